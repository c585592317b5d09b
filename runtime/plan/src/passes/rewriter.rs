//! Copies a lowered step to a new graph node by node and renumbers its ids.

use crate::lowered::Lowered;
use perilune_core::graph::{Graph, Inputs, Node, NodeId};

/// The new step, and the new ids of the old nodes.
pub(crate) struct Rewriter {
    pub out: Lowered,
    /// For each old node visited so far: the new node that replaces it.
    pub map: Vec<NodeId>,
}

impl Rewriter {
    pub fn new(from: &Lowered) -> Rewriter {
        Rewriter::reusing(from, Graph::with_capacity(from.graph.len()))
    }

    /// Writes the new graph into the memory of another.
    pub fn reusing(from: &Lowered, spare: Graph) -> Rewriter {
        let mut out = Lowered::empty(from.states.clone(), spare.emptied());
        (out.starts, out.first_start) = (from.starts.clone(), from.first_start);
        out.placed_roots = from.placed_roots.clone();
        out.exchanges.clone_from(&from.exchanges);
        Rewriter { out, map: Vec::with_capacity(from.graph.len()) }
    }

    /// The inputs of an old node, by their new ids.
    pub fn inputs(&self, node: &Node) -> Inputs {
        let mut inputs = Inputs::from_slice(&node.inputs);
        inputs.iter_mut().for_each(|x| *x = self.map[x.index()]);
        inputs
    }

    /// Appends a copy of old node `id`.
    pub fn copy(&mut self, from: &Lowered, id: NodeId) -> NodeId {
        let inputs = self.inputs(from.graph.node(id));
        self.copy_over(from, id, inputs)
    }

    /// Appends a copy of old node `id` with other inputs.
    pub fn copy_over(&mut self, from: &Lowered, id: NodeId, inputs: Inputs) -> NodeId {
        let new = self.out.graph.add(from.graph.node(id).with_inputs(inputs));
        self.out.set_number(new, from.number(id));
        new
    }

    /// Returns the new step, once all old nodes have been visited.
    pub fn finish(mut self, from: &Lowered) -> Lowered {
        self.out.roots = from.roots.iter().map(|r| self.map[r.index()]).collect();
        self.out.state_writes = from.state_writes.iter().map(|c| self.map[c.index()]).collect();
        self.out.effects = from.effects.iter().map(|e| self.map[e.index()]).collect();
        self.out.ok = from.ok.map(|ok| self.map[ok.index()]);
        self.out
    }
}
