//! Orders the updates of States whose new values are gathered, as with `zero` 1 and 2, so that most are gathered while others are computed.
//!
//! The links take longer than the updates. So the largest comes first, and the others in launches of about a bucket each, whose
//! gatherings become one call ([`crate::lanes::merge`]).

use crate::ir::{Kernel, Value, ValueId};
use crate::lanes::collective;
use perilune_core::ops::collective::ALL_GATHER;

/// Moves the anchors of the updates and their gatherings. Returns, for each kernel, the bytes that are gathered of its results if it is
/// such an update: only gatherings read it, and only kernels that nothing follows read those.
pub(crate) fn order(
    kernels: &mut [(u32, Kernel)],
    values: &[Value],
    users: &[impl AsRef<[usize]>],
) -> Vec<Option<usize>> {
    let followers = |k: usize| users[k].as_ref();
    let gathered = |k: usize| {
        let l = collective(&kernels[k].1).filter(|l| l.op == &ALL_GATHER)?;
        let bytes = |v: &ValueId| values[v.0 as usize].nbytes();
        followers(k).iter().all(|u| followers(*u).is_empty()).then(|| l.outputs.iter().map(bytes).sum::<usize>())
    };
    let update = |k: usize| -> Option<usize> {
        let is_region = matches!(kernels[k].1, Kernel::Region(_)) && !followers(k).is_empty();
        if is_region { followers(k).iter().map(|u| gathered(*u)).sum() } else { None }
    };
    let bytes: Vec<Option<usize>> = (0..kernels.len()).map(update).collect();
    let mut updates: Vec<usize> = (0..kernels.len()).filter(|k| bytes[*k].is_some()).collect();
    let Some(first) = updates.iter().map(|k| kernels[*k].0).min() else { return bytes };
    updates.sort_by_key(|k| (std::cmp::Reverse(bytes[*k]), *k));
    for (at, k) in updates.into_iter().enumerate() {
        let anchor = first + at as u32;
        kernels[k].0 = anchor;
        for u in users[k].as_ref() {
            kernels[*u].0 = anchor;
        }
    }
    bytes
}
