//! Merges kernels into one launch: maps into the epilogue of the product they follow, and one body over many leaves.
//!
//! Both are choices about launches only. Every instruction rounds as before and reductions keep their order, so neither
//! changes a bit.

use crate::fuse::{Reading, reading};
use crate::ir::*;
use crate::program_builder::ControlDeps;
use perilune_core::Layout;
use std::collections::hash_map::DefaultHasher;
use std::collections::{HashMap, HashSet};
use std::hash::{Hash, Hasher};

/// A kernel that stores no more than this may run early: holding its results longer costs nothing to speak of.
const SMALL_BYTES: usize = 64 << 10;

/// Regions in one launch at most.
pub const MOST: usize = 1024;

/// Hangs each pure map on the product it reads, where nothing else reads that product and it is not wanted for itself.
/// Maps that update a State are left to run as one with their like: an optimizer's update of every parameter. The joint
/// kernel keeps the product's place in the order, so that what the product reads need not live until the map's: a
/// gradient that is added to that of an earlier micro-batch is added at once.
///
/// Contracting such an edge makes no circle: the map's other inputs do not depend on the product, since only the map
/// reads it.
pub fn epilogues(
    kernels: &mut Vec<(u32, Kernel)>,
    values: &[Value],
    control_deps: &ControlDeps,
    roots: &HashSet<ValueId>,
    state_writes: &HashSet<ValueId>,
) {
    let mut readers: HashMap<ValueId, usize> = HashMap::new();
    let mut products: HashMap<ValueId, usize> = HashMap::new();
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
    // Who waits for a product follows it as a reader does.
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
        // Of several, the one recorded last: the others are there by then.
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

/// Whether `r` is a map over all of `v`, read once and in order.
fn continues(r: &Region, v: ValueId, values: &[Value]) -> bool {
    let n = values[v.0 as usize].shape.numel();
    let map = r.batch == 1 && r.rows == 1 && r.cols == n && r.body.iter().all(|i| i.level == Level::Full);
    let mut loads = r.body.iter().filter_map(|i| match &i.code {
        Code::Load { source: Source::Value(x), layout } if *x == v => Some(layout),
        _ => None,
    });
    map && loads.next().is_some_and(|l| reading(l, n, n) == Reading::Same) && loads.next().is_none()
}

/// Whether two regions differ only in the values, slots and, if all they hold is one row that is read in order, in size.
pub fn same(a: &Region, b: &Region) -> bool {
    let one_row = a.batch * a.rows == 1 && b.batch * b.rows == 1;
    if (a.batch, a.rows, a.cols) != (b.batch, b.rows, b.cols) && !one_row {
        return false;
    }
    let stores = |r: &Region| r.stores.iter().map(|s| s.0).collect::<Vec<_>>();
    a.body.len() == b.body.len()
        && stores(a) == stores(b)
        && a.body.iter().zip(&b.body).all(|(x, y)| {
            x.dtype == y.dtype
                && x.level == y.level
                && match (&x.code, &y.code) {
                    (Code::Load { source: s, layout: l }, Code::Load { source: t, layout: m }) => {
                        let alike = match (s, t) {
                            (Source::Value(_), Source::Value(_)) | (Source::Slot(_), Source::Slot(_)) => true,
                            (Source::Uniform { .. }, Source::Uniform { .. }) => true,
                            _ => s == t,
                        };
                        alike && (l == m || (a.cols != b.cols && plain(l).is_some() && plain(l) == plain(m)))
                    }
                    (x, y) => x == y,
                }
        })
}

/// How a layout that needs no strides reads: all in order, or one element again and again.
fn plain(l: &Layout) -> Option<Reading> {
    let n = l.numel();
    if reading(l, n, n) == Reading::Same {
        return Some(Reading::Same);
    }
    (reading(l, n, 1) == Reading::Broadcast).then_some(Reading::Broadcast)
}

/// What regions that are [`same`] share.
pub fn signature(r: &Region) -> u64 {
    let mut h = DefaultHasher::new();
    (r.batch * r.rows == 1, r.body.len(), r.stores.len()).hash(&mut h);
    if r.batch * r.rows != 1 {
        (r.batch, r.rows, r.cols).hash(&mut h);
    }
    for i in &r.body {
        (i.dtype, i.level).hash(&mut h);
        match &i.code {
            Code::Load { source, .. } => std::mem::discriminant(source).hash(&mut h),
            Code::Map(f, args) => (f, args.as_slice()).hash(&mut h),
            Code::Cast(a) | Code::Broadcast(a) => (0u8, a).hash(&mut h),
            Code::ReduceRow(f, a) => (1u8, f, a).hash(&mut h),
            Code::ReduceCol(f, a) => (2u8, f, a).hash(&mut h),
        }
    }
    h.finish()
}

/// Which kernels may run before their turn, beside one like them: those whose results are small or wanted by no other
/// kernel, and those that read nothing but the program's inputs (casts of all weights). Two branches of a network that
/// happen to be alike stay apart: in step, they would hold the activations of both.
pub fn movable(kernels: &[(u32, Kernel)], values: &[Value]) -> Vec<bool> {
    let mut read: HashSet<ValueId> = HashSet::new();
    for (_, kernel) in kernels {
        read.extend(kernel.reads());
    }
    let given = |v: ValueId| matches!(values[v.0 as usize].storage, Storage::Input(_));
    kernels
        .iter()
        .map(|(_, kernel)| {
            let Kernel::Region(r) = kernel else { return false };
            let bytes: usize = r.writes().map(|v| values[v.0 as usize].nbytes()).sum();
            bytes <= SMALL_BYTES
                || r.writes().all(|v| !read.contains(&v))
                || (r.reads().all(given) && r.reads().count() > 0)
        })
        .collect()
}
