//! Divides attention whose queries are split: brings the keys to the queries of each device.
//!
//! Three exchanges exist. Where the devices divide the key heads, an all-to-all turns a block of all positions with all heads into all
//! positions of a part of the heads, and attention runs as on one device, with its causal mask and its documents (Jacobs et al.,
//! DeepSpeed-Ulysses, arXiv:2309.14509). Else keys and values are gathered, and the positions of queries are shifted to those in the
//! whole sequence; with a mask of the call, a mask tells which keys a query of this device sees. If scores of all keys would be large,
//! blocks of keys are passed around instead (`ring.rs`; with a causal mask `zigzag.rs`). The backward pass gathers keys again, so that no
//! layer keeps those of all devices, and returns the gradient of each block of keys to the device that has it. The choice depends on
//! shapes alone.
//!
//! Padding of the last blocks is cut off keys and values. Padded queries compute rows that nothing reads; in the backward pass they
//! are zeros, because a gradient of keys sums over them.

use super::candidates::Candidate;
use super::divider::Divider;
use super::part::Part;
use super::visibility::{Hidden, Places};
use crate::ir::{AttentionExchange, Origin};
use crate::request::KeyExchange;
use perilune_core::error::{Error, Result};
use perilune_core::graph::{Attrs, Inputs, Node, NodeId};
use perilune_core::mesh::{Axis, Combine};
use perilune_core::ops::{Class, attention::ATTENTION_BACKWARD, collective, create, movement, slicing};
use perilune_core::sharding::Cut;
use perilune_core::{DType, Shape};
use smallvec::{SmallVec, smallvec};

/// Positions in `attrs` of attention and its backward op.
pub(super) const CAUSAL: usize = 0;
pub(super) const WINDOW: usize = 2;
pub(super) const DOCUMENTS: usize = 5;

/// Bytes of the scores of a device's queries and all keys above which keys are not gathered.
const MOST_SCORES: u128 = 256 << 20;

/// The old node with the operands that both exchanges name.
pub(super) struct Attention<'a> {
    pub id: NodeId,
    pub candidate: &'a Candidate,
    pub backward: bool,
    /// Block of the queries' positions, and of those of keys and values if they are split.
    pub queries: Cut,
    pub keys: Option<Cut>,
    /// Operand numbers.
    pub mask: Option<usize>,
    pub documents: Option<usize>,
}

impl Divider<'_> {
    /// Appends the part of this device of an attention node, or of its backward node. Results other than the first are noted in
    /// `apart`.
    pub(super) fn attention(&mut self, id: NodeId, candidate: &Candidate) -> Result<NodeId> {
        let node = self.graph().node(id);
        let backward = node.op == &ATTENTION_BACKWARD;
        let required = if backward { 6 } else { 3 };
        let documents = (node.attrs[DOCUMENTS] != 0).then(|| node.inputs.len() - 1);
        let mask = (node.inputs.len() > required + usize::from(documents.is_some())).then_some(required);
        let Part::Block(queries) = candidate.operands[0] else {
            return Err(Error::system(node.op.name, "this is a bug: the queries are not split"));
        };
        let keys = candidate.operands[1].cut();
        let a = Attention { id, candidate, backward, queries, keys, mask, documents };
        let (exchange, is_zigzag) = (self.exchange(&a)?, self.is_zigzag(&a));
        let form = match exchange {
            KeyExchange::Ring if is_zigzag => "zig-zag ring",
            other => other.name(),
        };
        let origin = Origin(self.graph().loc_of(id).0);
        self.to.out.exchanges.push(AttentionExchange { axis: self.axis, form, origin });
        match exchange {
            KeyExchange::Heads => self.attention_by_heads(&a),
            KeyExchange::Ring if is_zigzag => self.attention_in_zigzag(&a),
            KeyExchange::Ring => self.attention_in_ring(&a),
            KeyExchange::Gather | KeyExchange::Auto => self.attention_with_all_keys(&a),
        }
    }

    /// Chooses how queries and keys meet, by shapes unless it is named.
    fn exchange(&self, a: &Attention) -> Result<KeyExchange> {
        let (heads, ring) = (self.divides_heads(a), a.keys.is_some() && a.mask.is_none());
        let refused = |name: &str, why: &str| {
            let axis = self.axis.name();
            let message = format!("keys={name} along {axis}={}: {why}", self.devices);
            Err(Error::argument(self.graph().node(a.id).op.name, message)
                .hint("leave `keys` out of the mesh, or write keys=gather, which always works"))
        };
        match self.division.keys {
            KeyExchange::Heads if !heads => {
                refused("heads", "the devices do not divide the key heads, or a mask is given")
            }
            KeyExchange::Ring if !ring => refused("ring", "a mask is given, or keys are not split as queries are"),
            KeyExchange::Auto if heads => Ok(KeyExchange::Heads),
            KeyExchange::Auto if ring && self.scores(a) > MOST_SCORES => Ok(KeyExchange::Ring),
            KeyExchange::Auto => Ok(KeyExchange::Gather),
            named => Ok(named),
        }
    }

    /// Bytes of the scores of a device's queries and all keys.
    fn scores(&self, a: &Attention) -> u128 {
        let node = self.graph().node(a.id);
        let (q, k) = (self.graph().shape(node.inputs[0]), self.graph().shape(node.inputs[1]));
        let n = q.rank();
        let rows = q.dims()[..n - 1].iter().map(|d| *d as u128).product::<u128>() / self.devices as u128;
        rows * k.dims()[n - 2] as u128 * self.graph().dtype(node.inputs[0]).compute().size() as u128
            / self.inner_devices() as u128
    }

    /// The devices along axes that are divided after this one.
    fn inner_devices(&self) -> usize {
        let mesh = &self.division.mesh;
        Axis::ALL.into_iter().filter(|axis| *axis > self.axis).map(|axis| mesh.size(axis)).product()
    }

    /// Whether every device gets whole key heads, also of each part that another axis makes of the heads.
    fn divides_heads(&self, a: &Attention) -> bool {
        let node = self.graph().node(a.id);
        let keys = self.graph().shape(node.inputs[1]);
        let heads = keys.rank().checked_sub(3).map_or(0, |at| keys.dims()[at]);
        let parts = self.devices * self.inner_devices();
        a.keys.is_some() && a.mask.is_none() && heads > 0 && heads.is_multiple_of(parts)
    }

    /// The block of operand `k`, with 0 for padding if a sum reads it.
    pub(super) fn block_of(&mut self, a: &Attention, k: usize) -> Result<NodeId> {
        let x = self.graph().node(a.id).inputs[k];
        let own = self.part(x, a.candidate.operands[k])?;
        let (whole, is_float) = (self.graph().shape(x), self.graph().dtype(x).is_float());
        match a.candidate.operands[k].cut() {
            Some(cut) if a.backward && is_float && cut.is_padded(&whole, self.devices) => {
                self.with_padding(own, cut, whole, 0.0)
            }
            _ => Ok(own),
        }
    }

    /// The results of an old node that are read, but for the first: number, shape and dtype.
    pub(super) fn further_results(&self, id: NodeId) -> Vec<(usize, Shape, DType)> {
        self.parts.get(&id).into_iter().flatten().copied().filter(|part| part.0 > 0).collect()
    }

    /// Result `k` of a new node.
    pub(super) fn result(&mut self, main: NodeId, k: usize, shape: Shape, dtype: DType) -> NodeId {
        let g = &mut self.to.out.graph;
        let (op, detached, inputs, attrs) =
            (&create::TUPLE_GET, g.node(main).detached, smallvec![main], smallvec![k as i64]);
        g.add(Node { op, dtype, detached, tf32: false, shape, inputs, attrs, payload: 0 })
    }

    // ---- keys and values are gathered ----------------------------------------------------------------------------

    fn attention_with_all_keys(&mut self, a: &Attention) -> Result<NodeId> {
        let node = self.graph().node(a.id);
        let masked = node.attrs[CAUSAL] != 0 || node.attrs[WINDOW] != 0;
        if (masked || a.documents.is_some()) && a.mask.is_none() {
            return self.attention_to_one_block(a, masked);
        }
        let mut inputs: Inputs = smallvec![self.block_of(a, 0)?];
        // In the backward pass, keys wait for the gradient of the result: they are not those of the forward pass.
        let gradient = if a.backward { Some(self.block_of(a, 3)?) } else { None };
        for k in [1, 2] {
            inputs.push(self.all_keys(a, k, gradient)?);
        }
        inputs.extend(gradient);
        if a.backward {
            inputs.push(self.block_of(a, 4)?);
            inputs.push(self.block_of(a, 5)?);
        }
        let seen = self.visible(a)?;
        let mask = a.mask.map(|k| self.block_of(a, k)).transpose()?;
        let combined = self.combined_mask(mask, seen)?;
        inputs.extend(combined);
        let mut attrs: Attrs = node.attrs.clone();
        (attrs[CAUSAL], attrs[WINDOW], attrs[DOCUMENTS]) = (0, 0, 0);
        let main = self.to.copy_over(self.from, a.id, inputs);
        self.to.out.graph.set_shape(main, a.candidate.results[0].local(&node.shape));
        self.to.out.graph.set_attrs(main, attrs);
        for (k, shape, dtype) in self.further_results(a.id) {
            let part = a.candidate.results[k];
            let new = match k {
                1 | 2 if a.backward => {
                    let term = self.result(main, k, shape, dtype);
                    match part {
                        Part::Block(cut) => self.reduce_scatter(term, cut, shape, Combine::Sum)?,
                        _ => term,
                    }
                }
                3 => self.gradient_of_mask(main, combined, part.local(&shape), dtype)?,
                _ => self.result(main, k, part.local(&shape), dtype),
            };
            self.apart.insert((a.id, k), new);
        }
        Ok(main)
    }

    /// Attends to all keys as one block, which kernels mask by documents, and if `masked` by the position of the first query.
    fn attention_to_one_block(&mut self, a: &Attention, masked: bool) -> Result<NodeId> {
        let (node, rule) = (self.graph().node(a.id), self.visibility(a)?);
        let gradient = if a.backward { Some(self.block_of(a, 3)?) } else { None };
        let kv = [self.all_keys(a, 1, gradient)?, self.all_keys(a, 2, gradient)?];
        let queries = self.block_of(a, 0)?;
        let own = self.own_places(a.queries.block)?;
        let size = self.graph_shape(kv[0]).dims()[a.queries.dim];
        let g = &mut self.to.out.graph;
        let at = [own, Places { first: g.int_constant(0), all: g.iota_along(size, 0, 1)? }];
        let hidden = Hidden { later: masked, padding: false };
        let Some(gradient) = gradient else {
            let out = self.attend(&rule, &[queries], kv, at, hidden)?;
            let shape = self.graph_shape(out);
            let lse = self.result(out, 1, shape.remove(shape.rank() - 1), self.to.out.graph.dtype(out));
            self.apart.insert((a.id, 1), lse);
            return self.to.out.graph.cast(out, node.dtype);
        };
        let (out, lse) = (self.block_of(a, 4)?, self.block_of(a, 5)?);
        let rows = self.row_products(gradient, out)?;
        let main = self.attend(&rule, &[queries, gradient, rows, lse], kv, at, hidden)?;
        let wide = self.to.out.graph.dtype(main);
        for (k, shape, dtype) in self.further_results(a.id) {
            let term = self.result(main, k, shape, wide);
            let term = self.to.out.graph.cast(term, dtype)?;
            let own = match a.candidate.results[k] {
                Part::Block(cut) => self.reduce_scatter(term, cut, shape, Combine::Sum)?,
                _ => term,
            };
            self.apart.insert((a.id, k), own);
        }
        self.to.out.graph.cast(main, node.dtype)
    }

    /// Keys or values of all positions. Those of the backward pass are gathered when the gradient of the result is known.
    fn all_keys(&mut self, a: &Attention, k: usize, gradient: Option<NodeId>) -> Result<NodeId> {
        let x = self.graph().node(a.id).inputs[k];
        let (Some(cut), Some(gradient)) = (a.keys, gradient) else { return self.part(x, Part::Whole) };
        let own = self.part(x, Part::Block(cut))?;
        let held = self.barrier(own, gradient);
        self.all_gather(held, cut, self.graph().shape(x))
    }

    /// Which keys the queries of this device see by position and document, beside a mask or documents: (.., T, S).
    fn visible(&mut self, a: &Attention) -> Result<Option<NodeId>> {
        let node = self.graph().node(a.id);
        let (window, s) = (node.attrs[WINDOW], self.graph().shape(node.inputs[1]));
        let s = s.dims()[s.rank() - 2];
        let mut seen = None;
        if node.attrs[CAUSAL] != 0 || window != 0 {
            let i = self.ramp(a.queries.block)?;
            let g = &mut self.to.out.graph;
            let i = g.unsqueeze(i, 1)?;
            let j = g.iota_along(s, 1, 2)?;
            let past = g.le(j, i)?;
            seen = Some(past);
            if window != 0 {
                let edge = g.add_c(i, -window as f64)?;
                let near = g.gt(j, edge)?;
                seen = Some(g.logical_and(past, near)?);
            }
        }
        let Some(k) = a.documents else { return Ok(seen) };
        let documents = node.inputs[k];
        let at = self.graph().shape(documents).rank() - 1;
        let all = self.part(documents, Part::Whole)?;
        let own = self.cut(all, Cut { dim: at, ..a.queries })?;
        let has_heads = self.graph().shape(node.inputs[0]).rank() > 2;
        let g = &mut self.to.out.graph;
        let (i, j) = (g.unsqueeze(own, at + 1)?, g.unsqueeze(all, at)?);
        let mut same = g.eq(i, j)?;
        if has_heads {
            same = g.unsqueeze(same, at)?;
        }
        match seen {
            Some(near) => g.logical_and(same, near).map(Some),
            None => Ok(Some(same)),
        }
    }

    /// The mask of the call on the keys that are seen.
    fn combined_mask(&mut self, mask: Option<NodeId>, seen: Option<NodeId>) -> Result<Option<NodeId>> {
        let (Some(mask), Some(seen)) = (mask, seen) else { return Ok(mask.or(seen)) };
        let g = &mut self.to.out.graph;
        if g.dtype(mask) == DType::Bool {
            return g.logical_and(mask, seen).map(Some);
        }
        let mask = g.widen(mask)?;
        let never = g.constant_like(f64::NEG_INFINITY, mask);
        g.where_(seen, mask, never).map(Some)
    }

    /// The gradient of the part of the mask that this device has, which was made wider by what is seen.
    fn gradient_of_mask(&mut self, main: NodeId, combined: Option<NodeId>, own: Shape, dtype: DType) -> Result<NodeId> {
        let g = &self.to.out.graph;
        let (shape, wide) = combined.map_or((own, dtype), |mask| (g.shape(mask), g.dtype(mask)));
        let all = self.result(main, 3, shape, wide);
        let g = &mut self.to.out.graph;
        let sum = g.sum_to(all, own)?;
        g.cast(sum, dtype)
    }

    // ---- heads are exchanged for positions ------------------------------------------------------------------------

    fn attention_by_heads(&mut self, a: &Attention) -> Result<NodeId> {
        let node = self.graph().node(a.id);
        let required = if a.backward { 6 } else { 3 };
        let mut inputs: Inputs = smallvec![];
        for k in 0..required {
            inputs.push(self.operand_by_heads(a, k)?);
        }
        if let Some(k) = a.documents {
            inputs.push(self.part(node.inputs[k], Part::Whole)?);
        }
        let heads = |shape: &Shape, parts: usize| {
            let at = node.shape.rank() - 3;
            shape.with(at, shape.dims()[at] / parts)
        };
        let main = self.to.copy_over(self.from, a.id, inputs);
        self.to.out.graph.set_shape(main, heads(&node.shape, self.devices));
        self.by_heads.insert((a.id, 0), main);
        for (k, shape, dtype) in self.further_results(a.id) {
            let own = self.result(main, k, heads(&shape, self.devices), dtype);
            self.by_heads.insert((a.id, k), own);
            let block = self.by_positions_of(own, &shape, a.queries)?;
            self.apart.insert((a.id, k), block);
        }
        self.by_positions_of(main, &node.shape, a.queries)
    }

    /// All positions of this device's heads of operand `k`.
    fn operand_by_heads(&mut self, a: &Attention, k: usize) -> Result<NodeId> {
        let x = self.graph().node(a.id).inputs[k];
        // The result of the forward node has this form already.
        let node = self.graph().node(x);
        let known = match node.op.class {
            Class::TupleGet => (node.inputs[0], node.attrs[0] as usize),
            _ => (x, 0),
        };
        if let Some(found) = self.by_heads.get(&known) {
            return Ok(*found);
        }
        let (own, shape) = (self.part(x, a.candidate.operands[k])?, self.graph().shape(x));
        self.by_heads_of(own, &shape, a.queries)
    }

    /// Sizes of (.., H, T, ..) seen as (outer, parts that other axes make of the heads, devices, heads, T, rest): all but the third and
    /// the fifth. Dim `at` is T.
    fn apart_by_heads(&self, whole: &Shape, at: usize) -> [usize; 4] {
        let dims = whole.dims();
        let product = |dims: &[usize]| dims.iter().product::<usize>();
        let inner = self.inner_devices();
        [product(&dims[..at - 1]), inner, dims[at - 1] / inner / self.devices, product(&dims[at + 1..])]
    }

    /// Turns a block of positions (dim `cut.dim`) with all heads, the dim before, into all positions of a part of the heads.
    fn by_heads_of(&mut self, x: NodeId, whole: &Shape, cut: Cut) -> Result<NodeId> {
        let (n, t) = (self.devices, cut.dim);
        let [outer, inner, heads, rest] = self.apart_by_heads(whole, t);
        let attrs = [self.axis as i64, 0, n as i64];
        let g = &mut self.to.out.graph;
        let x = g.reshape(x, &[outer, inner, n, heads, cut.block, rest])?;
        let x = g.permute(x, &[2, 0, 1, 3, 4, 5])?;
        let x = g.push(&collective::ALL_TO_ALL, &[x], &attrs)?;
        let x = g.permute(x, &[1, 2, 3, 0, 4, 5])?;
        let x = g.reshape(x, &[outer, inner, heads, n * cut.block, rest])?;
        let x = slicing::slice(g, x, 3, 0, whole.dims()[t], 1)?;
        movement::reshape(g, x, whole.with(t - 1, inner * heads))
    }

    /// The inverse of `by_heads_of`.
    fn by_positions_of(&mut self, x: NodeId, whole: &Shape, cut: Cut) -> Result<NodeId> {
        let (n, t) = (self.devices, cut.dim);
        let [outer, inner, heads, rest] = self.apart_by_heads(whole, t);
        let attrs = [self.axis as i64, 0, n as i64];
        let g = &mut self.to.out.graph;
        let x = g.reshape(x, &[outer, inner, heads, whole.dims()[t], rest])?;
        let x = slicing::strided_pad(g, x, 3, 0, 1, n * cut.block, 0.0)?;
        let x = g.reshape(x, &[outer, inner, heads, n, cut.block, rest])?;
        let x = g.permute(x, &[3, 0, 1, 2, 4, 5])?;
        let x = g.push(&collective::ALL_TO_ALL, &[x], &attrs)?;
        let x = g.permute(x, &[1, 2, 0, 3, 4, 5])?;
        let dims: SmallVec<[usize; 8]> = whole.with(t, cut.block).dims().into();
        g.reshape(x, &dims)
    }
}
