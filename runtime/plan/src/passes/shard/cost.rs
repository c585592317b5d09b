//! Counts the bytes that a way to divide a node sends.

use super::candidates::Candidate;
use super::convert::MAX_DERIVED;
use super::divider::Divider;
use super::part::Part;
use perilune_core::graph::{Node, NodeId};
use perilune_core::mesh::Axis;

/// What a byte counts of a weight that would be gathered, beside one of a sum that is completed: what the whole weight enters would
/// not be divided, or a device would not have room for it.
const WEIGHT: u128 = 1 << 20;
/// What a byte counts of another value whose blocks would be joined. Weights come to the batch, whatever they weigh: otherwise every
/// device computes all of it.
const MOVED: u128 = 1 << 40;

impl Divider<'_> {
    /// The bytes of a whole value.
    fn bytes(&self, id: NodeId) -> u128 {
        self.from.graph.shape(id).numel() as u128 * self.from.graph.dtype(id).size() as u128
    }

    /// Counts what a candidate sends, and what it would send later if its result is not what is needed.
    pub(super) fn total(&self, id: NodeId, node: &Node, c: &Candidate) -> u128 {
        let mut sum = self.of_operands(node, |k| c.operands[k]);
        let mut wanted = false;
        for (k, part) in c.results.iter().enumerate() {
            let Some(cut) = self.demand.of(id, k) else { continue };
            wanted |= *part == Part::Block(cut);
            sum += match part {
                Part::Block(own) if *own == cut => 0,
                Part::Block(_) => 2 * self.bytes(id),
                // A sum widens its terms, so they are sent in 16 bits.
                Part::Term(_) if self.widens(node) => self.bytes(node.inputs[0]),
                Part::Term(_) => self.bytes(id),
                Part::Whole | Part::Own => self.bytes(id) / 4,
            };
        }
        if !wanted {
            // What is computed from a block that was cut for it is likely to be gathered.
            sum += self.cut_for_it(node, c);
        }
        sum
    }

    /// Counts what computing the whole sends.
    pub(super) fn of_whole(&self, id: NodeId, node: &Node) -> u128 {
        let needed = if self.demand.of(id, 0).is_some() { self.bytes(id) / 4 } else { 0 };
        needed + self.of_operands(node, |_| Part::Whole)
    }

    fn of_operands(&self, node: &Node, part: impl Fn(usize) -> Part) -> u128 {
        self.distinct(node, &part).map(|k| self.cost(node.inputs[k], part(k))).sum()
    }

    /// The operands that are not the same part of the same value as one before.
    fn distinct<'a>(&'a self, node: &'a Node, part: &'a impl Fn(usize) -> Part) -> impl Iterator<Item = usize> + 'a {
        let x = &node.inputs;
        (0..x.len()).filter(move |k| (0..*k).all(|j| (x[j], part(j)) != (x[*k], part(*k))))
    }

    fn cut_for_it(&self, node: &Node, c: &Candidate) -> u128 {
        let part = |k: usize| c.operands[k];
        let cut = |k: &usize| {
            let (x, part) = (node.inputs[*k], c.operands[*k]);
            part.cut().is_some() && !self.exists(x, part) && !self.derivable(x, part, MAX_DERIVED)
        };
        let later = |k: usize| match self.first[node.inputs[k].index()] {
            Part::Whole => self.bytes(node.inputs[k]),
            Part::Term(_) => 2 * self.bytes(node.inputs[k]),
            Part::Block(_) | Part::Own => 0,
        };
        self.distinct(node, &part).filter(cut).map(later).sum()
    }

    /// Bytes that are sent to have a part of an old node; those of the whole tensor, not of a device.
    fn cost(&self, id: NodeId, part: Part) -> u128 {
        let (first, bytes) = (self.first[id.index()], self.bytes(id));
        // Along tp a weight stays where a rule has put it, and what it multiplies comes to it.
        let leaves = if self.is_weight[id.index()] == (self.axis == Axis::Tp) { MOVED } else { WEIGHT };
        match (first, part) {
            _ if first == part || self.exists(id, part) => 0,
            (_, Part::Block(_)) if self.derivable(id, part, MAX_DERIVED) => 0,
            (Part::Whole | Part::Own, _) | (_, Part::Own) => 0,
            (Part::Term(_), Part::Whole) => 2 * bytes,
            (Part::Term(_), Part::Block(_)) => bytes,
            (Part::Block(_), Part::Whole) => leaves * bytes,
            (Part::Block(_), Part::Block(_)) => 2 * leaves * bytes,
            (Part::Block(_), Part::Term(_)) => 3 * leaves * bytes,
            (Part::Term(_), Part::Term(_)) => 3 * bytes,
        }
    }
}
