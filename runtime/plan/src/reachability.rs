//! Marks the nodes that a request needs: a reverse traversal from its roots that stops at values already available.

use crate::request::Request;
use perilune_core::graph::{Graph, NodeId};
use perilune_core::ops::Class;

/// Not needed.
pub const UNUSED: u32 = 0;
/// Needed; its value may come from a buffer.
pub const NEEDED: u32 = u32::MAX;
/// Needed, and computed even if its value is available, because another output of the same op is needed and was not
/// stored.
pub const RECOMPUTED: u32 = u32::MAX - 1;

/// Sets `marks` to [`NEEDED`], [`RECOMPUTED`] or [`UNUSED`] for each node of `g`. The traversal stops at nodes for
/// which `available` returns true. Returns one past the last marked node.
pub fn mark(g: &Graph, request: &Request, available: impl Fn(NodeId) -> bool, marks: &mut Vec<u32>) -> usize {
    marks.clear();
    marks.resize(g.len(), UNUSED);
    let mut top = 0;
    let ok = request.guard.as_ref().map(|guard| &guard.ok);
    for id in request.roots.iter().chain(request.state_writes.iter().map(|c| &c.1)).chain(ok) {
        marks[id.index()] = NEEDED;
        top = top.max(id.index() + 1);
    }
    for i in (0..top).rev() {
        let mark = marks[i];
        if mark == RECOMPUTED || (mark == NEEDED && !available(NodeId(i as u32))) {
            let node = &g.nodes()[i];
            for x in &node.inputs {
                let mark = &mut marks[x.index()];
                if matches!(node.op.class, Class::TupleGet) {
                    *mark = RECOMPUTED;
                } else if *mark != RECOMPUTED {
                    *mark = NEEDED;
                }
            }
        }
    }
    top
}
