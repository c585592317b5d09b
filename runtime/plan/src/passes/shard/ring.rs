//! Passes blocks of keys from device to device, each of which attends to them with its queries (Liu et al., Ring Attention with
//! Blockwise Transformers, arXiv:2310.01889).
//!
//! Step s brings the keys of the device s places before this one. A device has those of one other device at a time, and scores of its
//! queries and one block. The results of the blocks are merged by the logarithms of their sums. In the backward pass the
//! gradients of a block of keys travel with it, in the dtype of the scores, and come home after the last step. All devices run one
//! program, so a block that a causal mask hides is computed too. Which keys are seen follows from positions in the whole sequence.

use super::attention::{Attention, CAUSAL, DOCUMENTS, WINDOW};
use super::divider::Divider;
use super::part::Part;
use perilune_core::error::Result;
use perilune_core::graph::{Attrs, Inputs, NodeId};
use perilune_core::ops::attention_block::{ATTENTION_BLOCK, ATTENTION_BLOCK_BACKWARD, merge};
use perilune_core::ops::{collective, elementwise, index};
use perilune_core::sharding::Cut;
use perilune_core::{DType, Shape};
use smallvec::smallvec;

/// What tells which keys of a block a query sees: the same in all steps.
struct Positions {
    causal: bool,
    window: i64,
    /// Positions of a block, and the queries' positions (T, 1).
    block: usize,
    size: usize,
    padded: bool,
    queries: NodeId,
    /// This device's coordinate: a scalar.
    coordinate: NodeId,
    /// The documents of all positions and of the queries, with their last dim; and whether there are heads.
    documents: Option<(NodeId, NodeId, usize)>,
    heads: bool,
}

impl Divider<'_> {
    pub(super) fn attention_in_ring(&mut self, a: &Attention) -> Result<NodeId> {
        let node = self.graph().node(a.id);
        let at = self.positions_of(a)?;
        let gradient = if a.backward { Some(self.block_of(a, 3)?) } else { None };
        let mut keys = [self.travelling(a, 1, gradient)?, self.travelling(a, 2, gradient)?];
        let mut attrs: Attrs = node.attrs.clone();
        (attrs[CAUSAL], attrs[WINDOW], attrs[DOCUMENTS]) = (0, 0, 0);
        let queries = self.block_of(a, 0)?;
        let Some(gradient) = gradient else {
            let mut sum: Option<[NodeId; 2]> = None;
            for step in 0..self.devices {
                let mut inputs: Inputs = smallvec![queries, keys[0], keys[1]];
                inputs.extend(self.seen_of(&at, step)?);
                let out = self.to.out.graph.push(&ATTENTION_BLOCK, &inputs, &attrs)?;
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
            let mut inputs: Inputs = smallvec![queries, keys[0], keys[1], gradient, rows, lse];
            inputs.extend(self.seen_of(&at, step)?);
            let main = self.to.out.graph.push(&ATTENTION_BLOCK_BACKWARD, &inputs, &attrs)?;
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

    fn graph_shape(&self, new: NodeId) -> Shape {
        self.to.out.graph.shape(new)
    }

    /// The block of keys or values that this device passes on; its padding is 0. In the backward pass it is not what the forward pass
    /// has passed on, which would have to be kept.
    fn travelling(&mut self, a: &Attention, k: usize, gradient: Option<NodeId>) -> Result<NodeId> {
        let x = self.graph().node(a.id).inputs[k];
        let own = self.part(x, a.candidate.operands[k])?;
        let whole = self.graph().shape(x);
        let own = match a.keys {
            Some(cut) if cut.is_padded(&whole, self.devices) => self.with_padding(own, cut, whole, 0.0)?,
            _ => own,
        };
        Ok(gradient.map_or(own, |gradient| self.barrier(own, gradient)))
    }

    fn passed_on(&mut self, x: [NodeId; 2]) -> Result<[NodeId; 2]> {
        let axis = [self.axis as i64];
        let g = &mut self.to.out.graph;
        Ok([g.push(&collective::SHIFT, &[x[0]], &axis)?, g.push(&collective::SHIFT, &[x[1]], &axis)?])
    }

    /// The sum of each row of products of the result and its gradient: (.., H, T).
    fn row_products(&mut self, gradient: NodeId, out: NodeId) -> Result<NodeId> {
        let g = &mut self.to.out.graph;
        let (d, out) = (g.widen(gradient)?, g.widen(out)?);
        let products = g.mul(d, out)?;
        let last = g.shape(products).rank() - 1;
        g.sum(products, &[last], false)
    }

    fn positions_of(&mut self, a: &Attention) -> Result<Positions> {
        let node = self.graph().node(a.id);
        let (block, shape) = (a.queries.block, self.graph().shape(node.inputs[0]));
        let queries = self.ramp(block)?;
        let queries = self.to.out.graph.unsqueeze(queries, 1)?;
        let coordinate = self.ramp(1)?;
        let coordinate = self.to.out.graph.reshape(coordinate, &[])?;
        let documents = match a.documents {
            Some(k) => {
                let at = self.graph().shape(node.inputs[k]).rank() - 1;
                let all = self.part(node.inputs[k], Part::Whole)?;
                Some((all, self.cut(all, Cut { dim: at, ..a.queries })?, at))
            }
            None => None,
        };
        Ok(Positions {
            causal: node.attrs[CAUSAL] != 0 || node.attrs[WINDOW] != 0,
            window: node.attrs[WINDOW],
            block,
            size: shape.dims()[a.queries.dim],
            padded: a.queries.is_padded(&shape, self.devices),
            queries,
            coordinate,
            documents,
            heads: shape.rank() > 2,
        })
    }

    /// Which keys the queries see in a step; all of them if `None`.
    fn seen_of(&mut self, at: &Positions, step: usize) -> Result<Option<NodeId>> {
        if !at.causal && !at.padded && at.documents.is_none() {
            return Ok(None);
        }
        let n = self.devices as i64;
        let g = &mut self.to.out.graph;
        // The device from which the keys come.
        let (places, n) = (g.int_constant(n - step as i64), g.int_constant(n));
        let from = g.add_(at.coordinate, places)?;
        let from = g.map(&elementwise::REMAINDER, &[from, n])?;
        let block = g.int_constant(at.block as i64);
        let first = g.mul(from, block)?;
        let ramp = g.iota_along(at.block, 0, 1)?;
        let ids = g.add_(ramp, first)?;
        let j = g.unsqueeze(ids, 0)?;
        let mut all = Vec::new();
        if at.causal {
            all.push(g.le(j, at.queries)?);
        }
        if at.window != 0 {
            let edge = g.add_c(at.queries, -at.window as f64)?;
            all.push(g.gt(j, edge)?);
        }
        if at.padded {
            let size = g.int_constant(at.size as i64);
            all.push(g.lt(j, size)?);
        }
        if let Some((documents, own, dim)) = at.documents {
            let last = g.int_constant(at.size as i64 - 1);
            let ids = g.map(&elementwise::MINIMUM, &[ids, last])?;
            let theirs = g.push(&index::INDEX_SELECT, &[documents, ids], &[dim as i64, index::OF_PLANNER])?;
            let (i, j) = (g.unsqueeze(own, dim + 1)?, g.unsqueeze(theirs, dim)?);
            let mut same = g.eq(i, j)?;
            if at.heads {
                same = g.unsqueeze(same, dim)?;
            }
            all.push(same);
        }
        let mut seen = None;
        for one in all {
            seen = Some(match seen {
                Some(before) => g.logical_and(before, one)?,
                None => one,
            });
        }
        debug_assert!(seen.is_none_or(|x| g.dtype(x) == DType::Bool));
        Ok(seen)
    }
}
