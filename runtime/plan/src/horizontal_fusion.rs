//! Finds independent kernels that can run as one launch (horizontal fusion), such as an optimizer's update of every
//! parameter.
//!
//! This changes only the number of launches: every instruction rounds as before and reductions keep their order, so all
//! bits are unchanged.

use crate::ir::*;
use crate::reading::{Reading, reading};
use perilune_core::Layout;
use perilune_core::id_map::IdSet;
use rustc_hash::FxHasher;
use std::hash::{Hash, Hasher};

/// Maximum bytes that a kernel may store and still run early: keeping small results alive longer is nearly free.
const SMALL_BYTES: usize = 64 << 10;

/// Maximum regions in one launch.
pub const MOST: usize = 1024;

/// Whether two regions differ only in their values, their slots and, if each covers a single row read in order, their
/// size.
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
                            (Source::Value(_), Source::Value(_))
                            | (Source::Block { .. }, Source::Block { .. })
                            | (Source::Slot(_), Source::Slot(_)) => true,
                            (Source::Uniform { start: a, .. }, Source::Uniform { start: b, .. })
                            | (Source::Iota { start: a }, Source::Iota { start: b }) => a.is_some() == b.is_some(),
                            _ => s == t,
                        };
                        alike && (l == m || (a.cols != b.cols && plain(l).is_some() && plain(l) == plain(m)))
                    }
                    (x, y) => x == y,
                }
        })
}

/// How a layout that needs no strides is read: all elements in order, or one element repeated.
fn plain(l: &Layout) -> Option<Reading> {
    let n = l.numel();
    if reading(l, n, n) == Reading::Same {
        return Some(Reading::Same);
    }
    (reading(l, n, 1) == Reading::Broadcast).then_some(Reading::Broadcast)
}

/// A hash that is equal for regions that are [`same`].
pub fn signature(r: &Region) -> u64 {
    let mut h = FxHasher::default();
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

/// Groups independent regions into kernels of similar ones, in the order of the first of each group.
pub fn grouped(regions: Vec<Region>) -> Vec<Kernel> {
    let mut groups: Vec<Vec<Region>> = Vec::new();
    for r in regions {
        match groups.iter_mut().find(|g| g.len() < MOST && same(&g[0], &r)) {
            Some(group) => group.push(r),
            None => groups.push(vec![r]),
        }
    }
    let kernel = |mut group: Vec<Region>| match group.pop() {
        Some(only) if group.is_empty() => Some(Kernel::Region(only)),
        last => {
            group.extend(last);
            (!group.is_empty()).then_some(Kernel::Multi(group))
        }
    };
    groups.into_iter().filter_map(kernel).collect()
}

/// Which kernels may run early, in one launch with a similar one: those whose results are small or read by no other
/// kernel, and those that read only the program's inputs (casts of all weights). Similar branches of a network stay
/// separate: in one launch, the activations of both would be alive at once.
pub fn movable(kernels: &[(u32, Kernel)], values: &[Value]) -> Vec<bool> {
    let mut read: IdSet<ValueId> = IdSet::default();
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
