//! Passes blocks of keys from device to device, each of which attends to them with its queries (Liu et al., Ring Attention with
//! Blockwise Transformers, arXiv:2310.01889).
//!
//! Step s brings the keys of the device s places before this one. A device has those of one other device at a time, and scores of its
//! queries and one block. The results of the blocks are merged by the logarithms of their sums. In the backward pass the
//! gradients of a block of keys travel with it, in the dtype of the scores, and come home after the last step. All devices run one
//! program, so a block that a causal mask hides is a block of that program too, which a kernel skips at run time and a decomposition
//! computes; `zigzag.rs` makes the work even where blocks can be halved. Which keys are seen follows from positions in the whole
//! sequence (`visibility.rs`).

use super::attention::{Attention, CAUSAL, WINDOW};
use super::divider::Divider;
use super::visibility::{Hidden, Places};
use perilune_core::Shape;
use perilune_core::error::Result;
use perilune_core::graph::NodeId;
use perilune_core::ops::attention_block::merge;
use perilune_core::ops::{collective, elementwise};

impl Divider<'_> {
    pub(super) fn attention_in_ring(&mut self, a: &Attention) -> Result<NodeId> {
        let node = self.graph().node(a.id);
        let (rule, block) = (self.visibility(a)?, a.queries.block);
        let padding = a.queries.is_padded(&self.graph().shape(node.inputs[0]), self.devices);
        let hidden = Hidden { later: node.attrs[CAUSAL] != 0 || node.attrs[WINDOW] != 0, padding };
        let rows_at = self.own_places(block)?;
        let gradient = if a.backward { Some(self.block_of(a, 3)?) } else { None };
        let mut keys = [self.travelling(a, 1, gradient)?, self.travelling(a, 2, gradient)?];
        let queries = self.block_of(a, 0)?;
        let Some(gradient) = gradient else {
            let mut sum: Option<[NodeId; 2]> = None;
            for step in 0..self.devices {
                let keys_at = self.places_of_keys(rows_at, block, step)?;
                let out = self.attend(&rule, &[queries], keys, [rows_at, keys_at], hidden)?;
                let shape = self.graph_shape(out);
                let lse = self.result(out, 1, shape.remove(shape.rank() - 1), self.to.out.graph.dtype(out));
                let found = [out, lse];
                sum = Some(match sum {
                    Some(before) => {
                        let both = merge(&mut self.to.out.graph, before, found)?;
                        [both[0], both[1]]
                    }
                    None => found,
                });
                if step + 1 < self.devices {
                    keys = self.passed_on(keys)?;
                }
            }
            let [out, lse] = sum.unwrap_or([queries; 2]);
            self.apart.insert((a.id, 1), lse);
            return self.to.out.graph.cast(out, node.dtype);
        };
        let (out, lse) = (self.block_of(a, 4)?, self.block_of(a, 5)?);
        let rows = self.row_products(gradient, out)?;
        let wide = self.to.out.graph.dtype(rows);
        let (mut of_queries, mut of_keys): (Option<NodeId>, Option<[NodeId; 2]>) = (None, None);
        for step in 0..self.devices {
            let keys_at = self.places_of_keys(rows_at, block, step)?;
            let main = self.attend(&rule, &[queries, gradient, rows, lse], keys, [rows_at, keys_at], hidden)?;
            let new = [1, 2].map(|k| {
                let shape = self.graph_shape(keys[k - 1]);
                self.result(main, k, shape, wide)
            });
            let g = &mut self.to.out.graph;
            of_queries = Some(of_queries.map_or(Ok(main), |before| g.add_(before, main))?);
            let sums = match of_keys {
                Some([k, v]) => [g.add_(k, new[0])?, g.add_(v, new[1])?],
                None => new,
            };
            of_keys = Some(self.passed_on(sums)?);
            if step + 1 < self.devices {
                keys = self.passed_on(keys)?;
            }
        }
        for (k, own) in of_keys.into_iter().flatten().enumerate() {
            let dtype = self.graph().dtype(node.inputs[k + 1]);
            let own = self.to.out.graph.cast(own, dtype)?;
            self.apart.insert((a.id, k + 1), own);
        }
        self.to.out.graph.cast(of_queries.unwrap_or(queries), node.dtype)
    }

    pub(super) fn graph_shape(&self, new: NodeId) -> Shape {
        self.to.out.graph.shape(new)
    }

    /// The block of keys or values that this device passes on; its padding is 0. In the backward pass it is not what the forward pass
    /// has passed on, which would have to be kept.
    pub(super) fn travelling(&mut self, a: &Attention, k: usize, gradient: Option<NodeId>) -> Result<NodeId> {
        let x = self.graph().node(a.id).inputs[k];
        let own = self.part(x, a.candidate.operands[k])?;
        let whole = self.graph().shape(x);
        let own = match a.keys {
            Some(cut) if cut.is_padded(&whole, self.devices) => self.with_padding(own, cut, whole, 0.0)?,
            _ => own,
        };
        Ok(gradient.map_or(own, |gradient| self.barrier(own, gradient)))
    }

    /// Sends each tensor to the next device, and returns those of the device before.
    pub(super) fn passed_on<const N: usize>(&mut self, x: [NodeId; N]) -> Result<[NodeId; N]> {
        let n = self.devices;
        let mut out = x;
        for x in &mut out {
            *x = self.permuted(*x, &|to| (to + n - 1) % n)?;
        }
        Ok(out)
    }

    /// The piece of the device `sender(coordinate of this one)`; `x` itself if that is this one everywhere.
    pub(super) fn permuted(&mut self, x: NodeId, sender: &dyn Fn(usize) -> usize) -> Result<NodeId> {
        if (0..self.devices).all(|to| sender(to) == to) {
            return Ok(x);
        }
        let attrs = collective::permutation(self.axis, (0..self.devices).map(sender));
        self.to.out.graph.push(&collective::COLLECTIVE_PERMUTE, &[x], &attrs)
    }

    /// The sum of each row of products of the result and its gradient: (.., H, T).
    pub(super) fn row_products(&mut self, gradient: NodeId, out: NodeId) -> Result<NodeId> {
        let g = &mut self.to.out.graph;
        let (d, out) = (g.widen(gradient)?, g.widen(out)?);
        let products = g.mul(d, out)?;
        let last = g.shape(products).rank() - 1;
        g.sum(products, &[last], false)
    }

    /// The positions of the block of queries of this device.
    pub(super) fn own_places(&mut self, block: usize) -> Result<Places> {
        let coordinate = self.coordinate()?;
        self.places(coordinate, block)
    }

    /// The positions of the block of keys that this device has in a step: first its own, at the positions of its queries.
    fn places_of_keys(&mut self, own: Places, block: usize, step: usize) -> Result<Places> {
        if step == 0 {
            return Ok(own);
        }
        let from = self.sender_of_step(step)?;
        self.places(from, block)
    }

    /// The coordinate of the device whose keys this one has in a step: a scalar.
    pub(super) fn sender_of_step(&mut self, step: usize) -> Result<NodeId> {
        let n = self.devices;
        let coordinate = self.coordinate()?;
        let g = &mut self.to.out.graph;
        let (places, n) = (g.int_constant((n - step) as i64), g.int_constant(n as i64));
        let from = g.add_(coordinate, places)?;
        g.map(&elementwise::REMAINDER, &[from, n])
    }

    /// The coordinate of this device along the axis: a scalar.
    pub(super) fn coordinate(&mut self) -> Result<NodeId> {
        let coordinate = self.ramp(1)?;
        self.to.out.graph.reshape(coordinate, &[])
    }
}
