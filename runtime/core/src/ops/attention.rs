//! Defines attention and rotary position embeddings.
//!
//! Letters: B batch, H query heads, G key heads (H = G r), T queries, S keys, D and E head sizes. The decomposition of
//! attention computes the T x S scores in f32; its backward recomputes them from q, k and v, so that nothing of that
//! size outlives the forward pass. A backend's flash-attention kernel never stores them and replaces both nodes. For
//! such a kernel the backward node also reads the result and the logarithms of the row sums, which the decomposition
//! does not use.

use super::{
    Args, Class, Count, Grad, Grads, Op, Out, Work, bits, create, elementwise, movement, norm, one, out_of, real,
};
use crate::amp::Amp;
use crate::error::{Error, Result};
use crate::graph::{Graph, Meta, NodeId};
use crate::op::times;
use crate::{DType, Shape};
use smallvec::{SmallVec, smallvec};

pub static OPS: &[&Op] = &[&ATTENTION, &ATTENTION_BACKWARD, &ROPE];

// ---- scaled dot product attention --------------------------------------------------------------------------------

/// `attrs` of attention: [1 if causal, scale bits, window or 0, D, E, 1 if the last input is `documents`]. The sizes
/// are for backends, which decide from the node alone whether they have a kernel for it.
pub(super) struct Scores {
    causal: bool,
    pub(super) scale: f64,
    window: i64,
    /// Of queries and of keys: (..., T) and (..., S) i64, with the leading dims of q up to the heads.
    documents: Option<[NodeId; 2]>,
    mask: Option<NodeId>,
    /// What is added to the positions of queries: an i64 scalar.
    shift: Option<NodeId>,
    /// Whether there is a dim of heads.
    heads: bool,
    /// Query heads per key head.
    r: usize,
}

/// Query heads per key head, if the tensors have heads (dim -3); `None` if they do not fit.
fn groups(q: Shape, k: Shape) -> Option<usize> {
    let (n, m) = (q.rank(), k.rank());
    if n != m || n < 3 {
        return (n == m).then_some(1);
    }
    let (h, g) = (q.dims()[n - 3], k.dims()[n - 3]);
    match (h, g) {
        _ if q.dims()[..n - 3] != k.dims()[..n - 3] => None,
        _ if h == g => Some(1),
        (_, 0) => None,
        _ => h.is_multiple_of(g).then_some(h / g),
    }
}

/// The optional inputs mask and documents, which follow the required ones.
fn optional(rest: &[NodeId], attrs: &[i64]) -> (Option<NodeId>, Option<NodeId>) {
    match rest.split_last() {
        Some((&documents, rest)) if attrs[5] != 0 => (rest.first().copied(), Some(documents)),
        _ => (rest.first().copied(), None),
    }
}

impl Scores {
    /// `rest`: the inputs after the required ones.
    pub(super) fn of(g: &Graph, q: NodeId, k: NodeId, rest: &[NodeId], attrs: &[i64]) -> Scores {
        let r = groups(g.shape(q), g.shape(k)).unwrap_or(1);
        let (mask, documents) = optional(rest, attrs);
        Scores {
            causal: attrs[0] != 0,
            scale: real(attrs[1]),
            window: attrs[2],
            documents: documents.map(|both| [both; 2]),
            mask,
            shift: None,
            heads: g.shape(q).rank() > 2,
            r,
        }
    }

    /// With positions of queries that are shifted against those of keys.
    pub(super) fn shifted(self, shift: NodeId) -> Scores {
        Scores { shift: Some(shift), ..self }
    }

    /// With documents of queries and of keys.
    pub(super) fn within(self, documents: [NodeId; 2]) -> Scores {
        Scores { documents: Some(documents), ..self }
    }

    /// (..., H, T, N) as (..., G, r, T, N).
    fn part(&self, g: &mut Graph, x: NodeId) -> Result<NodeId> {
        let shape = g.shape(x);
        if self.r == 1 {
            return Ok(x);
        }
        let at = shape.rank() - 3;
        let shape = shape.with(at, shape.dims()[at] / self.r).insert(at + 1, self.r)?;
        movement::reshape(g, x, shape)
    }

    /// (..., G, r, T, N) as (..., H, T, N).
    fn join(&self, g: &mut Graph, x: NodeId) -> Result<NodeId> {
        let shape = g.shape(x);
        if self.r == 1 {
            return Ok(x);
        }
        let at = shape.rank() - 4;
        movement::reshape(g, x, shape.remove(at).with(at, shape.dims()[at] * self.r))
    }

    /// (..., H, T, N) as (..., G, r T, N): all queries of one key head.
    pub(super) fn merge(&self, g: &mut Graph, x: NodeId) -> Result<NodeId> {
        let shape = g.shape(x);
        if self.r == 1 {
            return Ok(x);
        }
        let at = shape.rank() - 3;
        let shape = shape.with(at, shape.dims()[at] / self.r).with(at + 1, shape.dims()[at + 1] * self.r);
        movement::reshape(g, x, shape)
    }

    /// (..., G, S, N) viewed as (..., G, r, S, N), each head r times.
    fn spread(&self, g: &mut Graph, x: NodeId) -> Result<NodeId> {
        if self.r == 1 {
            return Ok(x);
        }
        let at = g.shape(x).rank() - 2;
        let y = g.unsqueeze(x, at)?;
        let wide = g.shape(y).with(at, self.r);
        g.expand(y, wide)
    }

    /// x (..., H, T, N) times y (..., G, N, M) -> (..., H, T, M).
    pub(super) fn product(&self, g: &mut Graph, x: NodeId, y: NodeId) -> Result<NodeId> {
        let (x, y) = (self.part(g, x)?, self.spread(g, y)?);
        let z = g.matmul(x, y)?;
        self.join(g, z)
    }

    /// Which keys a query may attend to, apart from the mask: by its document and by its position.
    fn visible(&self, g: &mut Graph, t: usize, s: usize) -> Result<Option<NodeId>> {
        let near = self.near(g, t, s)?;
        let Some([own, theirs]) = self.documents else { return Ok(near) };
        let rank = g.shape(own).rank();
        let (i, j) = (g.unsqueeze(own, rank)?, g.unsqueeze(theirs, rank - 1)?);
        let mut same = g.eq(i, j)?;
        if self.heads {
            same = g.unsqueeze(same, rank - 1)?;
        }
        match near {
            Some(near) => g.logical_and(same, near).map(Some),
            None => Ok(Some(same)),
        }
    }

    /// Query i attends to key j if j <= i and j > i - window.
    fn near(&self, g: &mut Graph, t: usize, s: usize) -> Result<Option<NodeId>> {
        if !self.causal && self.window == 0 {
            return Ok(None);
        }
        let (mut i, j) = (g.iota_along(t, 0, 2)?, g.iota_along(s, 1, 2)?);
        if let Some(shift) = self.shift {
            i = g.add_(i, shift)?;
        }
        let past = g.le(j, i)?;
        if self.window == 0 {
            return Ok(Some(past));
        }
        let edge = g.add_c(i, -self.window as f64)?;
        let near = g.gt(j, edge)?;
        g.logical_and(past, near).map(Some)
    }

    /// scale q k^T + mask in f32: (..., H, T, S); negative infinity where a query sees no key.
    pub(super) fn scores(&self, g: &mut Graph, q: NodeId, k: NodeId) -> Result<NodeId> {
        let (q, k) = (g.widen(q)?, g.widen(k)?);
        let q = g.mul_c(q, self.scale)?;
        let k = g.t(k)?;
        let mut x = self.product(g, q, k)?;
        let shape = g.shape(x);
        let last = shape.rank() - 1;
        let never = g.constant_like(f64::NEG_INFINITY, x);
        if let Some(mask) = self.mask {
            x = if g.dtype(mask) == DType::Bool {
                g.where_(mask, x, never)?
            } else {
                let m = g.widen(mask)?;
                g.add_(x, m)?
            };
        }
        if let Some(seen) = self.visible(g, shape.dims()[last - 1], shape.dims()[last])? {
            x = g.where_(seen, x, never)?;
        }
        Ok(x)
    }

    /// The exponentials of the scores beside the largest of each row, their sums (..., H, T, 1), 1 for a row without keys, the
    /// logarithms of these (..., H, T) beside 0, and which rows have no keys (..., H, T, 1).
    pub(super) fn exponentials(&self, g: &mut Graph, q: NodeId, k: NodeId) -> Result<(NodeId, NodeId, NodeId, NodeId)> {
        let x = self.scores(g, q, k)?;
        let shape = g.shape(x);
        let last = shape.rank() - 1;
        let never = g.constant_like(f64::NEG_INFINITY, x);
        let top = g.max(x, &[last], true)?;
        let top = movement::detach(g, top)?;
        let none = g.eq(top, never)?;
        let zero = g.constant_like(0.0, top);
        let top = g.where_(none, zero, top)?;
        let x = g.sub(x, top)?;
        let e = g.exp(x)?;
        let sum = g.sum(e, &[last], true)?;
        let one = g.constant_like(1.0, sum);
        let sum = g.where_(none, one, sum)?;
        let lse = g.log(sum)?;
        let lse = g.add_(lse, top)?;
        let lse = movement::reshape(g, lse, shape.remove(last))?;
        Ok((e, sum, lse, none))
    }

    /// softmax(scale q k^T + mask) in f32: (..., H, T, S), and the logarithm of the sum of each row's exponentials:
    /// (..., H, T). For a row without keys both are 0.
    fn weights(&self, g: &mut Graph, q: NodeId, k: NodeId) -> Result<(NodeId, NodeId)> {
        let (e, sum, lse, _) = self.exponentials(g, q, k)?;
        Ok((norm::divide_row(g, e, sum)?, lse))
    }
}

/// The share of `all` operations that is counted: under a causal mask a kernel computes half of the scores. (A window
/// or documents omit more; how much depends on the data.)
fn seen(w: &Work, all: u64) -> u64 {
    let half = w.count == Count::Executed && w.attrs.first() == Some(&1);
    if half { all / 2 } else { all }
}

/// Inputs: q, k, v, mask?, documents? -> out, lse (..., H, T) in the dtype of the scores, which only the backward
/// reads; `attrs` as [`Scores`].
pub static ATTENTION: Op = Op {
    name: "scaled_dot_product_attention",
    sig: "q: tensor, k: tensor, v: tensor, *, mask: tensor?, is_causal: bool = false, scale: float?, window: int?, enable_gqa: bool = false, documents: tensor?",
    doc: "q (..., H, T, D), k (..., G, S, D), v (..., G, S, E) -> (..., H, T, E): softmax(scale q k^T) v.\n\
          scale is 1 / sqrt(D) unless given. mask broadcasts to (..., H, T, S): bool, true for the keys to attend to, or\n\
          float, added to the scores. With is_causal, query i attends to keys 0 to i; with window = w, only to the last w\n\
          of these. The result of a query without visible keys is 0. With enable_gqa, H may be a multiple of G: H / G\n\
          adjacent query heads share a key head.\n\
          documents (..., T) int, or a shape that broadcasts to q without heads and D, needs S = T: query i attends to key\n\
          j only if documents[i] == documents[j]. Ids may be any integers; runs of equal ids are fast.\n\
          Scores and softmax are in f32 for 16-bit floats; the weights are rounded to the dtype of q before multiplying v.\n\
          Vaswani et al., arXiv:1706.03762; Ainslie et al., arXiv:2305.13245.",
    // q k^T and p v.
    flops: Some(|w| seen(w, times([2, w.dim(1, 1), w.numel(0) + w.out.numel() as u64]))),
    results: crate::ops::Results::One,
    shard: Some(crate::sharding::attention),
    class: Class::Fused(|g, x, attrs| {
        let s = Scores::of(g, x[0], x[1], &x[3..], attrs);
        let (p, lse) = s.weights(g, x[0], x[1])?;
        let dtype = g.dtype(x[0]);
        let p = g.cast(p, dtype)?;
        Ok(smallvec![s.product(g, p, x[2])?, lse])
    }),
    infer: |i| {
        i.float(0)?;
        let (q, v) = (i.shape(0), i.shape(2));
        Ok(Meta { shape: q.with(q.rank() - 1, v.dims()[v.rank() - 1]), dtype: i.dtype(0) })
    },
    call: Some(call_attention),
    grad: Grad::Rule(|g, c| {
        // Records the node again. The planner merges the two, or recomputes it if the first has been evaluated and its
        // other output has been freed.
        let again = g.push(&ATTENTION, c.inputs, c.attrs)?;
        let q = g.shape(c.x(0));
        let lse = out_of(g, again, &[(q.remove(q.rank() - 1), g.dtype(c.x(0)).compute())])[1];
        let mut inputs: SmallVec<[NodeId; 8]> = smallvec![c.x(0), c.x(1), c.x(2), c.grad, again, lse];
        let mut parts: SmallVec<[(Shape, DType); 3]> = SmallVec::new();
        for &x in &c.inputs[1..3] {
            parts.push((g.shape(x), g.dtype(x)));
        }
        inputs.extend_from_slice(&c.inputs[3..]);
        if let Some(mask) = optional(&c.inputs[3..], c.attrs).0.filter(|&m| g.dtype(m).is_float()) {
            parts.push((g.shape(mask), g.dtype(mask)));
        }
        let main = g.push(&ATTENTION_BACKWARD, &inputs, c.attrs)?;
        Ok(out_of(g, main, &parts).into_iter().map(Some).collect())
    }),
    amp: Amp::Low,
    samples: &[
        "f(2,3,4,5), f(2,3,6,5), f(2,3,6,5)",
        "f(2,3,4,5), f(2,3,4,5), f(2,3,4,2), is_causal=true",
        "f(4,5), f(6,5), f(6,5)",
        "f(2,4,3,5), f(2,2,3,5), f(2,2,3,5), enable_gqa=true, is_causal=true",
        "f(2,4,5), f(2,6,5), f(2,6,5), mask=b(4,6)",
        "f(2,4,5), f(2,6,5), f(2,6,5), mask=f(2,1,6), scale=0.3",
        "f(2,7,4), f(2,7,4), f(2,7,4), window=3",
        "f(1,2,0,4), f(1,2,3,4), f(1,2,3,4)",
        "f(1,6,3,4), f(1,1,3,4), f(1,1,3,4), enable_gqa=true, mask=f(3,3)",
        "f(2,4,6,5), f(2,2,6,5), f(2,2,6,3), enable_gqa=true, is_causal=true, documents=i(3;2,6)",
        "f(2,2,6,4), f(2,2,6,4), f(2,2,6,4), documents=i(2;6), window=4",
        "f(5,4), f(5,4), f(5,4), documents=i(3;5), mask=f(5,5)",
        "f(2,3,5,4), f(2,3,5,4), f(2,3,5,4), documents=i(3;1,5), mask=b(5,5)",
    ],
    smooth: true,
    ..Op::BASE
};

fn call_attention(g: &mut Graph, a: &Args) -> Result<Out> {
    let op = "scaled_dot_product_attention";
    let given = [a.tensor(0)?, a.tensor(1)?, a.tensor(2)?];
    let dtype = given.iter().fold(g.dtype(given[0]), |d, &x| DType::promote(d, g.dtype(x))).to_float();
    let [q, k, v] = given.map(|x| g.shape(x));
    let n = q.rank();
    let wrong = |why: &str| Err(Error::shape(op, format!("q {q}, k {k}, v {v}: {why}")));
    if n < 2 || k.rank() != n || v.rank() != n {
        return wrong("must be (..., T, D), (..., S, D) and (..., S, E), with the same number of dims");
    }
    if q.dims()[n - 1] != k.dims()[n - 1] {
        return wrong("the last dims of q and k must be equal");
    }
    if k.dims()[..n - 1] != v.dims()[..n - 1] {
        return wrong("all dims of k and v but the last must be equal");
    }
    let Some(r) = groups(q, k) else {
        return wrong("the leading dims of q and k must be equal; heads (dim -3) of q may be a multiple of those of k");
    };
    if r != 1 && !a.bool(7) {
        let e = Error::shape(op, format!("q has {} heads (dim -3) and k has {}", q.dims()[n - 3], k.dims()[n - 3]));
        return Err(e.hint("enable_gqa = true lets query heads share key heads"));
    }
    let window = match a.opt_int(6) {
        Some(w) if w < 1 => return Err(Error::argument(op, format!("window is {w}; it must be 1 or more"))),
        // A window of all queries sees as much as any larger one.
        w => w.map_or(0, |w| w.min((q.dims()[n - 2] as i64).max(1))),
    };
    let mut inputs: SmallVec<[NodeId; 5]> = SmallVec::new();
    for x in given {
        inputs.push(g.cast(x, dtype)?);
    }
    if let Some(mask) = a.opt_tensor(3) {
        let (m, dtype) = (g.shape(mask), g.dtype(mask));
        let scores = q.with(n - 1, k.dims()[n - 2]);
        if Shape::broadcast(&scores, &m) != Some(scores) {
            return Err(Error::shape(op, format!("mask {m} does not broadcast to the scores {scores}")));
        }
        if dtype != DType::Bool && !dtype.is_float() {
            let e = Error::dtype(op, format!("mask must be bool (true: attend) or float (added), not {dtype}"));
            return Err(e.hint("mask:to(\"bool\") selects keys"));
        }
        inputs.push(mask);
    }
    let documents = a.opt_tensor(8);
    if let Some(documents) = documents {
        inputs.push(documents_of(g, documents, q, k)?);
    }
    let scale = a.opt_float(5).unwrap_or(1.0 / (q.dims()[n - 1] as f64).sqrt());
    let sizes = [q.dims()[n - 1] as i64, v.dims()[n - 1] as i64];
    let (causal, documents) = (i64::from(a.bool(4)), i64::from(documents.is_some()));
    g.push(&ATTENTION, &inputs, &[causal, bits(scale), window, sizes[0], sizes[1], documents]).map(one)
}

/// The document ids in i64, one for each position of q without its heads.
fn documents_of(g: &mut Graph, documents: NodeId, q: Shape, k: Shape) -> Result<NodeId> {
    let op = "scaled_dot_product_attention";
    let (shape, dtype) = (g.shape(documents), g.dtype(documents));
    let n = q.rank();
    let (t, s) = (q.dims()[n - 2], k.dims()[n - 2]);
    if !dtype.is_int() {
        let e = Error::dtype(op, format!("documents must be integers, not {dtype}"));
        return Err(e.hint("documents:to(\"i64\"), or `mask` to select keys"));
    }
    if t != s {
        let e =
            Error::shape(op, format!("documents needs as many keys as queries, but q has {t} positions and k has {s}"));
        return Err(e.hint("a mask (..., T, S) selects the keys of each query"));
    }
    let mut dims: SmallVec<[usize; 8]> = SmallVec::from_slice(&q.dims()[..n.saturating_sub(3)]);
    dims.push(t);
    let wanted = Shape::of(&dims);
    if Shape::broadcast(&wanted, &shape) != Some(wanted) {
        let e = Error::shape(
            op,
            format!("documents {shape} does not broadcast to {wanted}, the dims of q {q} without heads and D"),
        );
        return Err(e.hint("dim -3 of q is its heads, if it has 3 dims or more"));
    }
    let documents = g.cast(documents, DType::I64)?;
    g.expand(documents, wanted)
}

/// Inputs: q, k, v, gradient, out, lse, mask?, documents? -> dq, dk, dv, dmask? (if the mask is a float). `attrs` as attention.
///
/// It is a function of q, k, v, the gradient and the mask: out and lse follow from these, so they receive no gradient.
pub static ATTENTION_BACKWARD: Op = Op {
    name: "scaled_dot_product_attention_backward",
    // p^T d and d v^T; ds k and ds^T q. A kernel also recomputes the scores q k^T.
    flops: Some(|w| {
        let again = if w.count == Count::Executed { w.numel(0) } else { 0 };
        seen(w, times([2, w.dim(1, 1), 2 * w.numel(3) + 2 * w.numel(0) + again]))
    }),
    shard: Some(crate::sharding::attention_backward),
    class: Class::Fused(|g, x, attrs| {
        let [q, k, v, d] = [x[0], x[1], x[2], x[3]];
        let s = Scores::of(g, q, k, &x[6..], attrs);
        let dtype = g.dtype(q);
        let (p, _) = s.weights(g, q, k)?;
        let last = g.shape(p).rank() - 1;
        // dv = p^T d; the product itself sums over the query heads that share a key head.
        let low = g.cast(p, dtype)?;
        let (pm, dm) = (s.merge(g, low)?, s.merge(g, d)?);
        let pt = g.t(pm)?;
        let dv = g.matmul(pt, dm)?;
        // ds = p (dp - sum(p dp)), dp = d v^T
        let (dw, vw) = (g.widen(d)?, g.widen(v)?);
        let vt = g.t(vw)?;
        let dp = s.product(g, dw, vt)?;
        let row = g.mul(p, dp)?;
        let row = g.sum(row, &[last], true)?;
        let ds = g.sub(dp, row)?;
        let ds = g.mul(p, ds)?;
        let low = g.mul_c(ds, s.scale)?;
        let low = g.cast(low, dtype)?;
        let dq = s.product(g, low, k)?;
        let (sm, qm) = (s.merge(g, low)?, s.merge(g, q)?);
        let st = g.t(sm)?;
        let dk = g.matmul(st, qm)?;
        let mut out: Out = smallvec![dq, dk, dv];
        if let Some(mask) = s.mask.filter(|&m| g.dtype(m).is_float()) {
            let (shape, dtype) = (g.shape(mask), g.dtype(mask));
            let dmask = g.sum_to(ds, shape)?;
            out.push(g.cast(dmask, dtype)?);
        }
        Ok(out)
    }),
    infer: create::same,
    grad: Grad::Expand,
    smooth: true,
    ..Op::BASE
};

// ---- rotary positions --------------------------------------------------------------------------------------------

/// Inputs: x, positions?, rates?; `attrs`: [1 if interleaved, 1 or -1 (the direction of rotation), base bits, 1 if there are
/// rates].
pub static ROPE: Op = Op {
    name: "rope",
    sig: "x: tensor, positions: tensor?, *, base: float = 10000.0, interleaved: bool = false, rates: tensor?",
    doc: "x (..., T, D), positions (T) or any shape that broadcasts to (..., T) -> (..., T, D): pairs of elements rotated by\n\
          position * base^(-2i / D), i from 0 to D/2 - 1, or by position * rates[i]: rates (D/2), for models that scale\n\
          them (nn.rope_rates). Positions are 0 to T - 1 unless given. A pair is elements i and i + D/2 (Llama, NeoX), or\n\
          2i and 2i + 1 if `interleaved` (GPT-J). Angles are computed in f64 and reduced to half a turn; sines, cosines and\n\
          the rotation are in f32 (f64 for f64). The error of a pair is at most 5e-7 of its length before it is rounded to\n\
          x's dtype, at every position up to 2^24. Su et al., arXiv:2104.09864.",
    class: Class::Fused(|g, x, attrs| {
        let shape = g.shape(x[0]);
        let rank = shape.rank();
        let (t, half) = (shape.dims()[rank - 2], shape.dims()[rank - 1] / 2);
        let (interleaved, sign, base) = (attrs[0] != 0, attrs[1] as f64, real(attrs[2]));
        // The pair is a separate dim: before the D/2 dim, or after it.
        let (pair, index) = if interleaved { (rank, rank - 1) } else { (rank - 1, rank) };
        g.island(x[0], |g, w| {
            let dtype = g.dtype(w);
            // A table of (T, D/2) angles in f64, a turn at most: position * rate has no error that matters before the whole
            // turns are dropped.
            let given = attrs[3] != 0;
            let rate = if given {
                let rate = g.cast(x[x.len() - 1], DType::F64)?;
                if interleaved { g.unsqueeze(rate, 1)? } else { rate }
            } else {
                let i = g.iota_along(half, index, rank + 1)?;
                let i = g.cast(i, DType::F64)?;
                let rate = g.mul_c(i, -base.ln() / half.max(1) as f64)?;
                g.exp(rate)?
            };
            let at = match x.get(1) {
                Some(&p) if x.len() - usize::from(given) > 1 => {
                    let p = g.cast(p, DType::F64)?;
                    let r = g.shape(p).rank();
                    let p = g.unsqueeze(p, r)?;
                    g.unsqueeze(p, r)?
                }
                _ => {
                    let p = g.iota_along(t, 0, 3)?;
                    g.cast(p, DType::F64)?
                }
            };
            let turns_per_position = g.mul_c(rate, std::f64::consts::TAU.recip())?;
            let turns = g.mul(at, turns_per_position)?;
            let whole = g.map(&elementwise::ROUND, &[turns])?;
            let turns = g.sub(turns, whole)?;
            let angle = g.mul_c(turns, std::f64::consts::TAU)?;
            let angle = g.cast(angle, dtype)?;
            let (cos, sin) = (g.cos(angle)?, g.sin(angle)?);
            // The first of a pair subtracts the second, and the second adds the first.
            let side = g.iota_along(2, pair, rank + 1)?;
            let side = g.cast(side, dtype)?;
            let side = g.mul_c(side, 2.0 * sign)?;
            let side = g.add_c(side, -sign)?;
            let sin = g.mul(sin, side)?;
            let split = shape.with(rank - 1, half).insert(pair, 2)?;
            let w = movement::reshape(g, w, split)?;
            let other = g.flip(w, pair)?;
            let (a, b) = (g.mul(w, cos)?, g.mul(other, sin)?);
            let y = g.add_(a, b)?;
            movement::reshape(g, y, shape)
        })
        .map(one)
    }),
    infer: |i| {
        i.float(0)?;
        create::same(i)
    },
    call: Some(|g, a| {
        let x = g.to_float(a.tensor(0)?)?;
        let shape = g.shape(x);
        let rank = shape.rank();
        if rank < 2 || !shape.dims()[rank - 1].is_multiple_of(2) {
            return Err(Error::shape("rope", format!("needs x (..., T, D) with D even, not shape {shape}")));
        }
        let base = a.float(2)?;
        if base.is_nan() || base <= 0.0 || base.is_infinite() {
            return Err(Error::argument("rope", format!("base is {base}; it must be above 0")));
        }
        let mut inputs: SmallVec<[NodeId; 2]> = smallvec![x];
        if let Some(p) = a.opt_tensor(1) {
            let (at, want) = (g.shape(p), shape.remove(rank - 1));
            if at.is_scalar() || Shape::broadcast(&want, &at) != Some(want) {
                let message =
                    format!("positions {at} do not broadcast to {want}, the shape of x {shape} without its last dim");
                return Err(Error::shape("rope", message));
            }
            inputs.push(p);
        }
        let rates = a.opt_tensor(4);
        if let Some(rates) = rates {
            let (got, half) = (g.shape(rates), shape.dims()[rank - 1] / 2);
            if got.dims() != [half] {
                let message =
                    format!("rates have shape {got}; they must be {{{half}}}, one for each pair of x {shape}");
                return Err(Error::shape("rope", message));
            }
            inputs.push(g.to_float(rates)?);
        }
        g.push(&ROPE, &inputs, &[i64::from(a.bool(3)), 1, bits(base), i64::from(rates.is_some())]).map(one)
    }),
    grad: Grad::Rule(|g, c| {
        let mut inputs: SmallVec<[NodeId; 2]> = c.inputs.into();
        inputs[0] = c.grad;
        let back = g.push(&ROPE, &inputs, &[c.attrs[0], -c.attrs[1], c.attrs[2], c.attrs[3]])?;
        let mut out: Grads = smallvec![Some(back)];
        if c.needs.iter().skip(1).any(|n| *n) {
            return Err(Error::gradient("rope", "positions and rates have no gradient")
                .hint("detach them, as in positions:detach()"));
        }
        out.resize(c.inputs.len(), None);
        Ok(out)
    }),
    samples: &[
        "f(2,3,4,6)",
        "f(5,4)",
        "f(2,5,4), i(9;5)",
        "f(2,5,4), i(9;2,5), base=500",
        "f(2,5,4), interleaved=true",
        "f(2,5,3,4), i(9;5,1), interleaved=true",
        "f(2,5,4), rates=i(3;2)",
        "f(2,5,4), i(9;5), rates=i(3;2), interleaved=true",
        "f(0,4)",
        "f(3,0,4)",
    ],
    smooth: true,
    ..Op::BASE
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Number;
    use crate::ops::{Value, call};

    fn leaf(g: &mut Graph, dims: &[usize]) -> Value {
        Value::Tensor(g.leaf(&create::LEAF, Shape::of(dims), DType::F32, &[], 0))
    }

    fn attend(q: &[usize], k: &[usize], v: &[usize], mask: &[usize], gqa: bool) -> Result<Shape> {
        let g = &mut Graph::new();
        let (q, k, v) = (leaf(g, q), leaf(g, k), leaf(g, v));
        let mask = if mask.is_empty() { Value::None } else { leaf(g, mask) };
        let rest = [Value::Bool(false), Value::None, Value::None, Value::Bool(gqa)];
        let args = Args::new(&ATTENTION, [q, k, v, mask].into_iter().chain(rest));
        call(g, &ATTENTION, &args).map(|out| g.shape(out[0]))
    }

    #[test]
    fn attention_checks_what_must_fit() {
        let shape = attend(&[2, 4, 3, 8], &[2, 2, 5, 8], &[2, 2, 5, 6], &[3, 5], true).unwrap();
        assert_eq!(shape.dims(), [2, 4, 3, 6]);
        let e = attend(&[2, 4, 3, 8], &[2, 2, 5, 8], &[2, 2, 5, 6], &[], false).unwrap_err();
        assert_eq!(e.hint.as_deref(), Some("enable_gqa = true lets query heads share key heads"));
        let e = attend(&[2, 3, 8], &[2, 5, 7], &[2, 5, 7], &[], false).unwrap_err();
        assert!(e.message.ends_with("the last dims of q and k must be equal"), "{e}");
        let e = attend(&[2, 3, 8], &[2, 5, 8], &[2, 5, 8], &[4, 5], false).unwrap_err();
        assert_eq!(e.message, "mask {4, 5} does not broadcast to the scores {2, 3, 5}");
    }

    #[test]
    fn the_backward_node_reads_what_the_forward_saved() {
        let g = &mut Graph::new();
        let [q, k] = [[2, 4, 3, 8], [2, 2, 5, 8]].map(|d| leaf(g, &d));
        let rest = [Value::None, Value::Bool(true), Value::None, Value::None, Value::Bool(true)];
        let args = Args::new(&ATTENTION, [q.clone(), k.clone(), k].into_iter().chain(rest));
        let y = call(g, &ATTENTION, &args).unwrap()[0];
        let Value::Tensor(q) = q else { panic!() };
        let d = crate::grad::grad(g, y, y, &[q], false).unwrap()[0].unwrap();
        let back = g.node(d).clone();
        assert_eq!((back.op, back.attrs[3..].to_vec()), (&ATTENTION_BACKWARD, vec![8, 8, 0]));
        let (out, lse) = (g.node(back.inputs[4]), g.node(back.inputs[5]));
        assert_eq!((out.op, &out.inputs, &out.attrs), (&ATTENTION, &g.node(y).inputs, &g.node(y).attrs));
        assert_eq!((lse.op, lse.inputs[0], lse.shape.dims()), (&create::TUPLE_GET, back.inputs[4], &[2, 4, 3][..]));
    }

    #[test]
    fn the_gradient_of_rope_is_the_inverse_rotation() {
        let g = &mut Graph::new();
        let x = leaf(g, &[2, 3, 4]);
        let base = Value::Number(Number::Float(1e4));
        let y = call(g, &ROPE, &Args::new(&ROPE, [x.clone(), Value::None, base, Value::Bool(false), Value::None]))
            .unwrap()[0];
        let Value::Tensor(x) = x else { panic!() };
        let d = crate::grad::grad(g, y, y, &[x], false).unwrap()[0].unwrap();
        assert_eq!((g.node(d).op, g.node(d).attrs[1]), (&ROPE, -1));
    }
}
