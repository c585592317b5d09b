//! Merges equal nodes (common subexpression elimination) and drops nodes without effect.
//!
//! A backward pass through a decomposition recomputes values of the forward pass; this pass merges the two nodes. Nodes
//! that no result depends on are dropped.

use crate::lowered::{Join, Lowered};
use crate::passes::rewriter::Rewriter;
use perilune_core::graph::{Node, NodeId};
use perilune_core::ops::elementwise::MapFn;
use perilune_core::ops::{Class, create, movement};
use rustc_hash::{FxBuildHasher, FxHashMap};
use std::hash::BuildHasher;

/// A node with its new inputs, and the number in which leaves and run-time numbers differ.
struct Candidate<'a> {
    node: &'a Node,
    inputs: &'a [NodeId],
    number: Option<u32>,
}

impl Candidate<'_> {
    fn hash(&self) -> u64 {
        let Candidate { node, inputs, number } = self;
        let key = (std::ptr::from_ref(node.op), inputs, &node.attrs, number, node.shape.dims(), node.dtype, node.tf32);
        FxBuildHasher.hash_one(key)
    }

    fn equals(&self, to: &Lowered, id: NodeId) -> bool {
        let (a, b) = (self.node, to.graph.node(id));
        std::ptr::eq(a.op, b.op)
            && self.inputs == &b.inputs[..]
            && a.attrs == b.attrs
            && self.number == to.number(id)
            && (a.shape, a.dtype, a.tf32) == (b.shape, b.dtype, b.tf32)
    }
}

/// Keeps the first of equal nodes and its storage layout.
pub fn apply(from: &Lowered) -> Lowered {
    let reached = from.reachable();
    let mut to = Rewriter::new(from);
    // By the hash of the old node; a node whose hash another has takes the next number that is free. The nodes themselves are
    // compared in the new graph, so that an entry is small.
    let mut seen: FxHashMap<u64, NodeId> = FxHashMap::default();
    seen.reserve(from.graph.len());
    for id in from.graph.ids() {
        if !reached[id.index()] {
            // Never looked up, so any id works.
            to.map.push(NodeId(0));
            continue;
        }
        to.out.graph.modes.loc = from.graph.loc_of(id);
        let node = from.graph.node(id);
        let inputs = to.inputs(node);
        if let Some(same) = trivial(&to.out, node, &inputs) {
            to.map.push(same);
            continue;
        }
        let number = from.number(id);
        let candidate = Candidate { node, inputs: &inputs, number };
        let mut hash = candidate.hash();
        let found = loop {
            match seen.get(&hash) {
                Some(other) if !candidate.equals(&to.out, *other) => hash = hash.wrapping_add(1),
                found => break found.copied(),
            }
        };
        if let Some(same) = found {
            to.map.push(same);
            continue;
        }
        let new = to.copy_over(from, id, inputs);
        seen.insert(hash, new);
        if let Some(layout) = from.stores.layouts.get(&id) {
            to.out.stores.layouts.insert(new, *layout);
        }
        if let Some(join) = from.stores.joins.get(&id) {
            let slices = join.slices.iter().map(|(x, layout)| (to.map[x.index()], *layout)).collect();
            to.out.stores.joins.insert(new, Join { op: to.map[join.op.index()], slices, ..join.clone() });
        }
        to.map.push(new);
    }
    to.finish(from)
}

/// Returns the input that a node equals, if the node has no effect.
fn trivial(out: &Lowered, node: &Node, inputs: &[NodeId]) -> Option<NodeId> {
    let same = |x: NodeId| out.graph.shape(x) == node.shape && out.graph.dtype(x) == node.dtype;
    match node.op.class {
        Class::View(_) if node.op == &movement::DETACH || node.op == &create::CUSTOM => Some(inputs[0]),
        // A reshape or an expansion to the same shape. A permutation or a flip may keep the shape and still reorder.
        Class::View(_) if inputs.len() == 1 && same(inputs[0]) && node.attrs.len() == node.shape.rank() => {
            (node.op == &movement::RESHAPE || node.op == &movement::EXPAND).then_some(inputs[0])
        }
        Class::Cast if same(inputs[0]) => Some(inputs[0]),
        Class::Map(MapFn::Mul) if node.dtype.is_float() => {
            let one = |x: NodeId| {
                let n = out.graph.node(x);
                n.op == &create::CONSTANT && n.attrs[0] as u64 == 1f64.to_bits()
            };
            match (one(inputs[0]), one(inputs[1])) {
                (_, true) if same(inputs[0]) => Some(inputs[0]),
                (true, _) if same(inputs[1]) => Some(inputs[1]),
                _ => None,
            }
        }
        _ => None,
    }
}
