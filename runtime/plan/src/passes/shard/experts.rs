//! Exchanges rows among devices that have blocks of the experts: each row goes to the device of its expert, and its result comes back.
//!
//! A device sorts the rows of its tokens by expert, and so by device, and fills for each device a block of slots with the rows for it.
//! Which slots are used is data, which stays on the device: a slot without a row names no expert, and the products skip it. After the
//! exchange every slot is a token with one expert, so the part of a device is the same node on other tokens. Further axes divide it
//! again. What the backward pass sends again of the forward pass is merged with it (`cse`).
//!
//! Blocks are as large as the most rows that can go to one device, so no row is dropped whatever the router does. The method is that of
//! Lepikhin et al., GShard (arXiv:2006.16668), without its capacity.

use super::candidates::Candidate;
use super::divider::Divider;
use super::part::Part;
use perilune_core::error::{Error, Result};
use perilune_core::graph::{Inputs, Node, NodeId};
use perilune_core::ops::experts::{self, EXPERT, EXPERT_MLP_BACKWARD, GRADIENT, SLOTS, UP};
use perilune_core::ops::{collective, elementwise, index, scan, sort};
use perilune_core::sharding::Meeting;
use perilune_core::{DType, Shape};
use smallvec::smallvec;

/// Where the rows of a device's tokens go.
struct Slots {
    /// The slots for one device.
    block: usize,
    /// For each slot, its row: (devices * block).
    rows: NodeId,
    /// For each slot, the token of its row.
    tokens: NodeId,
    /// For each slot that came, its expert on this device, or the number of these: (devices * block, 1).
    experts: NodeId,
    /// For each row, its slot: (R).
    of_row: NodeId,
    /// Whether a row has an expert: (R, 1).
    has_expert: NodeId,
}

impl Divider<'_> {
    /// Whether every device has as many experts, if tokens go to them.
    pub(super) fn has_whole_experts(&self, node: &Node, c: &Candidate) -> bool {
        let padded =
            |part: Part| part.cut().is_none_or(|cut| cut.is_padded(&self.graph().shape(node.inputs[UP]), self.devices));
        c.meets != Some(Meeting::Experts) || !padded(c.operands[UP])
    }

    /// Appends the part of this device of a node of experts. Results other than the first are noted in `apart`.
    pub(super) fn experts(&mut self, id: NodeId, c: &Candidate) -> Result<NodeId> {
        let node = self.graph().node(id);
        let backward = node.op == &EXPERT_MLP_BACKWARD;
        let own = self.experts_of_tokens(node, c)?;
        let shape = self.to.out.graph.shape(own);
        let slots = self.slots(node, c, own)?;
        let mut inputs: Inputs = smallvec![];
        for (k, (x, part)) in node.inputs.iter().zip(&c.operands).enumerate() {
            let own = if k == EXPERT { slots.experts } else { self.part(*x, *part)? };
            inputs.push(match k {
                0 => self.send(own, slots.tokens, slots.block)?,
                GRADIENT if backward => self.send_gradient(own, &slots)?,
                _ => own,
            });
        }
        let main = self.to.copy_over(self.from, id, inputs);
        let count = self.devices * slots.block;
        // On average as many rows come as leave.
        let rows = self.to.out.graph.shape(own).numel().max(1);
        let mut attrs = node.attrs.clone();
        let before = attrs.get(SLOTS).copied().unwrap_or(1);
        attrs.truncate(SLOTS);
        attrs.push(before * (count / rows).max(1) as i64);
        self.to.out.graph.set_attrs(main, attrs);
        let width = node.shape.dims()[node.shape.rank() - 1];
        let local = if backward { Shape::of(&[count, width]) } else { Shape::of(&[count, 1, width]) };
        self.to.out.graph.set_shape(main, local);
        for (k, shape, dtype) in self.further_results(id) {
            let new = self.result(main, k, c.results[k].local(&shape), dtype);
            self.apart.insert((id, k), new);
        }
        let g = &mut self.to.out.graph;
        let by_slot = g.reshape(main, &[count, width])?;
        let back = self.all_slots(by_slot, slots.block)?;
        let g = &mut self.to.out.graph;
        let by_row = take(g, back, slots.of_row)?;
        let by_row = self.or_zero(slots.has_expert, by_row)?;
        let g = &mut self.to.out.graph;
        let by_row = g.reshape(by_row, &[shape.dims()[0], shape.dims()[1], width])?;
        if backward { experts::sum_of_token(g, by_row) } else { Ok(by_row) }
    }

    /// The experts of this device's tokens. Padding has none.
    fn experts_of_tokens(&mut self, node: &Node, c: &Candidate) -> Result<NodeId> {
        let x = node.inputs[EXPERT];
        let own = self.part(x, c.operands[EXPERT])?;
        let whole = self.graph().shape(x);
        match c.operands[EXPERT].cut() {
            Some(cut) if cut.is_padded(&whole, self.devices) => {
                let experts = self.graph().shape(node.inputs[UP]).dims()[0];
                self.with_padding(own, cut, whole, experts as f64)
            }
            _ => Ok(own),
        }
    }

    /// Finds the slots of rows with these experts (N, K), and exchanges which experts they are for.
    fn slots(&mut self, node: &Node, c: &Candidate, expert: NodeId) -> Result<Slots> {
        let Part::Block(cut) = c.operands[UP] else {
            return Err(Error::system(node.op.name, "this is a bug: the experts are not split"));
        };
        let (n, each) = (self.devices, cut.block);
        let g = &mut self.to.out.graph;
        let shape = g.shape(expert);
        let (tokens, k) = (shape.dims()[0], shape.dims()[1]);
        // The experts of a token differ.
        let block = (tokens * k.min(each)).max(1);
        let flat = g.reshape(expert, &[tokens * k])?;
        let order = g.push(&sort::ARGSORT, &[flat], &[0, 0])?;
        let places = g.push(&sort::ARGSORT, &[order], &[0, 0])?;
        let own = g.int_constant(each as i64);
        let device = g.map(&elementwise::FLOOR_DIV, &[flat, own])?;
        let hits = index::one_hot(g, device, n)?;
        let hits = g.cast(hits, DType::I64)?;
        let counts = g.sum(hits, &[0], false)?;
        let ends = g.push(&scan::CUMSUM, &[counts], &[0])?;
        let starts = g.sub(ends, counts)?;
        // The rows of a device are adjacent in the order of experts.
        let (column, counts) = (g.unsqueeze(starts, 1)?, g.unsqueeze(counts, 1)?);
        let j = g.iota_along(block, 1, 2)?;
        let used = g.lt(j, counts)?;
        let at = g.add_(column, j)?;
        let first = g.int_constant(0);
        let at = g.where_(used, at, first)?;
        let at = g.reshape(at, &[n * block])?;
        let rows = take(g, order, at)?;
        let of_each = g.int_constant(k as i64);
        let tokens = g.map(&elementwise::FLOOR_DIV, &[rows, of_each])?;
        // Experts are counted from the first of their device.
        let ids = take(g, flat, rows)?;
        let ids = g.reshape(ids, &[n, block])?;
        let r = g.iota_along(n, 0, 2)?;
        let lowest = g.mul(r, own)?;
        let ids = g.sub(ids, lowest)?;
        let ids = g.where_(used, ids, own)?;
        let ids = g.push(&collective::ALL_TO_ALL, &[ids], &[self.axis as i64, 0, n as i64])?;
        let experts = g.reshape(ids, &[n * block, 1])?;
        // A row without an expert comes after all others: it has no device.
        let count = g.int_constant(n as i64);
        let has_expert = g.lt(device, count)?;
        let device = g.where_(has_expert, device, first)?;
        let start = take(g, starts, device)?;
        let within = g.sub(places, start)?;
        let size = g.int_constant(block as i64);
        let slot = g.mul(device, size)?;
        let slot = g.add_(slot, within)?;
        let of_row = g.where_(has_expert, slot, first)?;
        let has_expert = g.unsqueeze(has_expert, 1)?;
        Ok(Slots { block, rows, tokens, experts, of_row, has_expert })
    }

    /// Fills all slots with elements of `x` (M, D), and exchanges them: (devices * block, D).
    fn send(&mut self, x: NodeId, at: NodeId, block: usize) -> Result<NodeId> {
        let filled = take(&mut self.to.out.graph, x, at)?;
        self.all_slots(filled, block)
    }

    /// The gradients of the results of all slots that came: (devices * block, 1, D).
    fn send_gradient(&mut self, d: NodeId, slots: &Slots) -> Result<NodeId> {
        let g = &mut self.to.out.graph;
        let shape = g.shape(d);
        let (rows, width) = (shape.dims()[0] * shape.dims()[1], shape.dims()[2]);
        let d = g.reshape(d, &[rows, width])?;
        let d = self.send(d, slots.rows, slots.block)?;
        self.to.out.graph.unsqueeze(d, 1)
    }

    /// Every device sends each other one the slots for it.
    fn all_slots(&mut self, x: NodeId, block: usize) -> Result<NodeId> {
        let (axis, n) = (self.axis as i64, self.devices);
        let g = &mut self.to.out.graph;
        let width = g.shape(x).dims()[1];
        let x = g.reshape(x, &[n, block, width])?;
        let x = g.push(&collective::ALL_TO_ALL, &[x], &[axis, 0, n as i64])?;
        g.reshape(x, &[n * block, width])
    }
}

/// The elements of dim 0 at positions that are in range.
fn take(g: &mut perilune_core::Graph, x: NodeId, at: NodeId) -> Result<NodeId> {
    g.push(&index::INDEX_SELECT, &[x, at], &[0, index::OF_PLANNER])
}
