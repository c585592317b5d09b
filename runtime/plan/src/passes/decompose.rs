//! Replaces fused ops that the backend has no kernel for by their decompositions.

use crate::backend::Backend;
use crate::lowered::Lowered;
use crate::passes::rewriter::Rewriter;
use perilune_core::error::Result;
use perilune_core::graph::{Graph, Node, NodeId};
use perilune_core::ops::{Class, Out};
use rustc_hash::FxHashMap;

/// Maximum nesting of decompositions, in case an op decomposes into itself.
const MAX_DEPTH: usize = 8;
/// Nodes that most decompositions have at most. Room for them takes addresses until they are there, and a graph that grows is copied.
const NODES: usize = 16;

/// Expands ops until only fused ops with a kernel are left.
pub fn apply(step: Lowered, backend: &dyn Backend) -> Result<Lowered> {
    all(step, &|n: &Node| matches!(n.op.class, Class::Fused(_)) && !backend.has_kernel(n))
}

/// Expands the fused ops that `decomposes` names until none is left.
pub(crate) fn all(mut step: Lowered, decomposes: &dyn Fn(&Node) -> bool) -> Result<Lowered> {
    for _ in 0..MAX_DEPTH {
        let count = step.graph.nodes().iter().filter(|node| decomposes(node)).count();
        if count == 0 {
            break;
        }
        step = expand(&step, count, decomposes)?;
    }
    Ok(step)
}

/// Replaces each such op, `count` in all, by its decomposition, one level deep.
fn expand(from: &Lowered, count: usize, decomposes: &dyn Fn(&Node) -> bool) -> Result<Lowered> {
    let mut to = Rewriter::reusing(from, Graph::with_capacity(from.graph.len() + NODES * count));
    let mut parts: FxHashMap<NodeId, Out> = FxHashMap::default();
    for id in from.graph.ids() {
        let node = from.graph.node(id);
        to.out.graph.modes.loc = from.graph.loc_of(id);
        let new = match node.op.class {
            Class::Fused(decompose) if decomposes(node) => {
                let inputs = to.inputs(node);
                to.out.graph.modes.tf32 = node.tf32;
                let outs = decompose(&mut to.out.graph, &inputs, &node.attrs)?;
                to.out.graph.modes.tf32 = false;
                let first = outs[0];
                parts.insert(id, outs);
                first
            }
            Class::TupleGet if parts.contains_key(&node.inputs[0]) => parts[&node.inputs[0]][node.attrs[0] as usize],
            _ => to.copy(from, id),
        };
        to.map.push(new);
    }
    Ok(to.finish(from))
}
