//! Finds the kernels that may report an index out of range.
//!
//! A device that reports bad indices late suppresses the State writes behind them. A State must therefore not be written in
//! place before the last kernel of its step that may report one. A kernel whose indices an earlier one has checked against
//! the same bound reports nothing new: the backward pass of a lookup reads the ids of the forward pass.

use crate::ir::{Kernel, Library, Operand};
use perilune_core::op::IndexKind;
use perilune_core::ops::index;

/// Returns the position of the last kernel that may report a bad index that none before it reports.
pub(crate) fn last(kernels: &[Kernel]) -> Option<usize> {
    let mut checked: Vec<(&Operand, usize)> = Vec::new();
    let mut last = None;
    for (at, kernel) in kernels.iter().enumerate() {
        let Kernel::Library(l) = kernel else { continue };
        let Some(fault) = l.op.index_fault else { continue };
        if l.op == &index::INDEX_SELECT && l.attrs.get(1) == Some(&index::OF_PLANNER) {
            continue;
        }
        let bound = match fault(&l.attrs).kind {
            IndexKind::Elements => bound(l),
            IndexKind::Classes(_) | IndexKind::Ends => None,
        };
        if let Some(check) = bound {
            if checked.contains(&check) {
                continue;
            }
            checked.push(check);
        }
        last = Some(at);
    }
    last
}

/// Returns the indices of a call and the number of elements that they count, for an op with `attrs` [axis, ...] and the
/// inputs tensor, indices, ...
fn bound(l: &Library) -> Option<(&Operand, usize)> {
    let axis = usize::try_from(*l.attrs.first()?).ok()?;
    let size = *l.inputs.first()?.shape().dims().get(axis)?;
    Some((l.inputs.get(1)?, size))
}
