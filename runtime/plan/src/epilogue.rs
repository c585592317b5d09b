//! Fuses maps into the products that they follow, as epilogues of library calls.
//!
//! This changes only the number of launches: every instruction rounds as before, so all bits are unchanged.

use crate::ir::*;
use crate::kernel_order::ControlDeps;
use crate::reading::{Reading, reading};
use perilune_core::id_map::IdMap;
use rustc_hash::FxHashSet;

/// Makes each pure map the epilogue of the product it reads, if nothing else reads that product and it is not a result
/// itself. Maps that update a State are left to horizontal fusion, which merges the optimizer updates of all
/// parameters. The fused kernel keeps the product's position in the order, so the product's inputs need not stay alive
/// until the map runs: a gradient that is added to that of an earlier micro-batch is added at once.
///
/// Contracting such an edge creates no cycle: only the map reads the product, so its other inputs do not depend on it.
pub fn fuse(
    kernels: &mut Vec<(u32, Kernel)>,
    values: &[Value],
    control_deps: &ControlDeps,
    roots: &FxHashSet<ValueId>,
    state_writes: &FxHashSet<ValueId>,
) {
    let mut readers: IdMap<ValueId, usize> = IdMap::default();
    let mut products: IdMap<ValueId, usize> = IdMap::default();
    for (k, (_, kernel)) in kernels.iter().enumerate() {
        let mut reads = kernel.reads();
        reads.sort_unstable();
        reads.dedup();
        for v in reads {
            *readers.entry(v).or_default() += 1;
        }
        if let Kernel::Library(l) = kernel
            && l.op.epilogue
            && !roots.contains(&l.outputs[0])
            && !state_writes.contains(&l.outputs[0])
        {
            products.insert(l.outputs[0], k);
        }
    }
    // A kernel with a control dependency on a product follows it just like a reader.
    for v in control_deps.values().flatten() {
        products.remove(v);
    }
    let mut gone = vec![false; kernels.len()];
    for k in 0..kernels.len() {
        let Kernel::Region(r) = &kernels[k].1 else { continue };
        if r.writes().any(|v| state_writes.contains(&v)) {
            continue;
        }
        let follows = r.reads().filter(|v| readers[v] == 1 && continues(r, *v, values));
        // Of several products, choose the one recorded last: the others are computed by then.
        let Some(v) = follows.filter(|v| products.contains_key(v)).max() else { continue };
        let Some(at) = products.remove(&v) else { continue };
        let (_, Kernel::Region(r)) = kernels[k].clone() else { continue };
        if let (_, Kernel::Library(l)) = &mut kernels[at] {
            l.epilogue = Some(r);
            gone[k] = true;
        }
    }
    let mut k = 0;
    kernels.retain(|_| {
        k += 1;
        !gone[k - 1]
    });
}

/// Whether `r` is a map over all of `v` that reads it once and in order.
fn continues(r: &Region, v: ValueId, values: &[Value]) -> bool {
    let n = values[v.0 as usize].shape.numel();
    let map = r.batch == 1 && r.rows == 1 && r.cols == n && r.body.iter().all(|i| i.level == Level::Full);
    let mut loads = r.body.iter().filter_map(|i| match &i.code {
        Code::Load { source: Source::Value(x), layout } if *x == v => Some(layout),
        _ => None,
    });
    map && loads.next().is_some_and(|l| reading(l, n, n) == Reading::Same) && loads.next().is_none()
}
