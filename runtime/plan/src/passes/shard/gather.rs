//! Gathers weights that are stored in blocks: when, and how often.
//!
//! A whole weight lives for a few layers only. It is gathered again for the backward pass, and for a use that comes much later, unless
//! the step keeps whole weights to its end ([`Division::keeps_weights`](crate::request::Division::keeps_weights)).
//! Each gathering waits, through an optimization barrier, for the input of the layer before its own: so it may begin one layer
//! ahead and no earlier, and `cse` does not merge it with the one of the forward pass.

use super::divider::Divider;
use super::part::Part;
use crate::lowered::Lowered;
use perilune_core::error::Result;
use perilune_core::graph::{Graph, Node, NodeId};
use perilune_core::ops::elementwise::MapFn;
use perilune_core::ops::{Class, create};
use smallvec::{SmallVec, smallvec};

/// A whole weight is used again if at most so many layers have begun since.
const REUSED: usize = 2;

/// A whole weight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gathered {
    node: NodeId,
    phase: u32,
    /// The number of layers that had begun when it was last used.
    layers: usize,
}

/// For each node, a number that increases with each backward pass that begins and each that ends.
pub(super) fn phases(step: &Lowered, g: &Graph, order: &[NodeId]) -> Vec<u32> {
    let mut last = 0;
    let phase = |id| {
        if let Some(recorded) = (step.graph.loc_of(id).0 as usize).checked_sub(1).and_then(|at| order.get(at)) {
            last = 2 * g.remat.pass_of(*recorded) + u32::from(g.remat.back_of(*recorded).is_none());
        }
        last
    };
    step.graph.ids().map(phase).collect()
}

impl Divider<'_> {
    /// Whether a node is a State, or a view, a cast or another function of nothing but States and constants.
    pub(super) fn follows_from_states(&self, id: NodeId) -> bool {
        let (from, node) = (self.from, self.from.graph.node(id));
        let weight = |x: &NodeId| self.is_weight[x.index()];
        match node.op.class {
            _ if from.inputs.get(&id).is_some_and(|k| from.states[*k as usize]) => true,
            Class::View(_) | Class::Library => {
                node.inputs.first().is_some_and(weight) && {
                    matches!(node.op.class, Class::View(_))
                        || node.op.regroups.is_some() && node.inputs.iter().all(weight)
                }
            }
            Class::Map(_) | Class::Cast => {
                let generated = |x: &NodeId| from.graph.generator(*x).is_some();
                node.inputs.iter().any(weight) && node.inputs.iter().all(|x| weight(x) || generated(x))
            }
            _ => false,
        }
    }

    /// Whether the whole of a weight that is stored in blocks can be used again.
    pub(super) fn gathered(&self, id: NodeId) -> Option<NodeId> {
        let known = self.whole_weights.get(&self.demand.value(id))?;
        // The logical shards of a device begin each layer one after the other.
        let reused = REUSED * self.strict.as_ref().map_or(1, |s| s.copies);
        let again = known.phase == self.phase && self.layers.len() - known.layers <= reused;
        (again || self.division.keeps_weights).then_some(known.node)
    }

    /// Returns the whole of a weight that a device has in blocks.
    pub(super) fn whole_weight(&mut self, id: NodeId) -> Result<NodeId> {
        let found = match self.gathered(id) {
            Some(node) => node,
            None => self.gather_weight(id)?,
        };
        let entry = Gathered { node: found, phase: self.phase, layers: self.layers.len() };
        self.whole_weights.insert(self.demand.value(id), entry);
        Ok(found)
    }

    /// Returns the whole of a value that is written to a State. Where a device has a block of it that follows, element by element, from
    /// another value whose whole is there, it is computed from that: a new weight and its 16-bit copy are gathered once.
    pub(super) fn written_whole(&mut self, id: NodeId) -> Result<NodeId> {
        let node = self.from.graph.node(id);
        let elementwise = matches!(node.op.class, Class::Map(_) | Class::Cast);
        if !elementwise || self.first[id.index()].cut().is_none() || self.exists(id, Part::Whole) {
            return self.part(id, Part::Whole);
        }
        let missing = |x: &&NodeId| !self.exists(**x, Part::Whole);
        let apart: SmallVec<[NodeId; 4]> = node.inputs.iter().filter(missing).copied().collect();
        // A select of a block is one of the whole block, and leaves it for the copy.
        let follows = match apart[..] {
            [] => true,
            [x] => matches!(node.op.class, Class::Map(MapFn::Where)) && self.first[x.index()].cut().is_some(),
            _ => false,
        };
        if !follows {
            return self.part(id, Part::Whole);
        }
        let inputs = node.inputs.iter().map(|x| self.written_whole(*x)).collect::<Result<_>>()?;
        self.to.out.graph.modes.loc = self.from.graph.loc_of(id);
        let new = self.to.copy_over(self.from, id, inputs);
        self.made.insert((id, Part::Whole), new);
        Ok(new)
    }

    fn gather_weight(&mut self, id: NodeId) -> Result<NodeId> {
        let node = self.from.graph.node(id);
        // A view is one of the whole.
        if let (Class::View(_), [x]) = (node.op.class, &node.inputs[..])
            && self.from.graph.shape(*x).numel() == node.shape.numel()
            && self.first[x.index()].cut().is_some()
        {
            let whole = self.whole_weight(*x)?;
            return Ok(self.to.copy_over(self.from, id, smallvec![whole]));
        }
        let Part::Block(cut) = self.first[id.index()] else { return Ok(self.to.map[id.index()]) };
        let own = self.to.map[id.index()];
        let held = match self.layer_before() {
            Some(start) => self.barrier(own, start),
            None => own,
        };
        self.all_gather(held, cut, self.from.graph.shape(id))
    }

    /// Notes that a layer begins if the node being visited reads other values than the last one that had weights gathered. Returns
    /// the input of the layer before.
    fn layer_before(&mut self) -> Option<NodeId> {
        let inputs = &self.from.graph.node(self.visited).inputs;
        let starts = inputs.iter().filter(|x| !self.is_weight[x.index()] && **x < self.visited);
        let start = starts.max().copied();
        if let Some(start) = start.filter(|x| self.layers.last() != Some(x)) {
            self.layers.push(start);
        }
        let computed = |x: &&NodeId| self.from.graph.generator(**x).is_none() && !self.from.inputs.contains_key(x);
        let (_, before) = self.layers.split_last()?;
        before.iter().rev().find(computed).map(|x| self.to.map[x.index()])
    }

    /// `x`, not to be read before `start` has been computed.
    pub(super) fn barrier(&mut self, x: NodeId, start: NodeId) -> NodeId {
        let g = &mut self.to.out.graph;
        let (dtype, shape, inputs) = (g.dtype(x), g.shape(x), smallvec![x, start]);
        let (op, attrs) = (&create::OPTIMIZATION_BARRIER, smallvec![]);
        g.add(Node { op, dtype, detached: true, tf32: false, shape, inputs, attrs, payload: 0 })
    }
}
