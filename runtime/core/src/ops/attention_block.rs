//! Defines attention to a block of the keys, whose results are merged with those of other blocks.
//!
//! A row of a block is normalized within it; the logarithm of its sum of exponentials says what it weighs beside other blocks. A row
//! without keys in a block has the logarithm of 0, negative infinity, and so weighs nothing. The backward op takes the logarithm
//! of the sum over all blocks: with it the weights of a block are those of the whole row. The planner inserts both ops where devices pass
//! keys on to each other (`plan/passes/shard/ring.rs`); a recipe records none. Dao et al., arXiv:2205.14135; Liu et al.,
//! arXiv:2310.01889.

use super::attention::Scores;
use super::{Class, Op, Out, norm};
use crate::amp::Amp;
use crate::error::Result;
use crate::graph::{Attrs, Graph, Meta, NodeId};
use crate::ops::movement;
use smallvec::smallvec;

/// The most positions of a sequence whose blocks have a shift: kernels add it to a position and a window in 32 bits.
pub const MOST_POSITIONS: usize = 1 << 29;

/// Positions in `attrs` that say whether there are documents, and a shift.
const DOCUMENTS: usize = 5;
const SHIFTED: usize = 6;

/// Whether the last input of a block with these attributes is `shift`.
pub fn is_shifted(attrs: &[i64]) -> bool {
    attrs.get(SHIFTED).is_some_and(|x| *x != 0)
}

/// The inputs of `count` that are the documents of queries and of keys, if there are documents.
pub fn documents(attrs: &[i64], count: usize) -> Option<[usize; 2]> {
    let last = count - 1 - usize::from(is_shifted(attrs));
    (attrs[DOCUMENTS] != 0).then(|| [last - 1, last])
}

/// `attrs` of a block, from those of attention: its keys are masked by position if `causal` or in a window.
pub fn block_attrs(attrs: &[i64], causal: bool, window: i64, shifted: bool) -> [i64; 7] {
    [i64::from(causal), attrs[1], window, attrs[3], attrs[4], attrs[DOCUMENTS], i64::from(shifted)]
}

/// The optional inputs, which follow the required ones.
fn scores(g: &Graph, x: &[NodeId], required: usize, attrs: &[i64]) -> Scores {
    let documents = documents(attrs, x.len());
    let shift = is_shifted(attrs).then(|| x[x.len() - 1]);
    let more = required + documents.map_or(0, |both| both.len()) + usize::from(shift.is_some());
    let seen = &x[required..][..x.len() - more];
    let mut own = Attrs::from_slice(attrs);
    own[DOCUMENTS] = 0;
    let mut scores = Scores::of(g, x[0], x[1], seen, &own);
    if let Some(both) = documents {
        scores = scores.within(both.map(|k| x[k]));
    }
    match shift {
        Some(shift) => scores.shifted(shift),
        None => scores,
    }
}

/// Inputs: q (.., H, T, D), k (.., G, S, D), v (.., G, S, E), seen? (bool, broadcast to (.., H, T, S)), documents of queries? (.., T) and
/// of keys? (.., S) (i64, without heads), shift? (i64 scalar) -> out (.., H, T, E), lse (.., H, T), both in the dtype of the scores.
/// `attrs` as attention, then 1 if the last input is `shift`. Causality and window count positions from the first key of the block;
/// query i is at i + shift, or i without one.
pub static ATTENTION_BLOCK: Op = Op {
    name: "attention_block",
    flops: super::attention::ATTENTION.flops,
    shard: Some(crate::sharding::attention_block),
    class: Class::Fused(|g, x, attrs| {
        let s = scores(g, x, 3, attrs);
        let (e, sum, lse, none) = s.exponentials(g, x[0], x[1])?;
        let shape = g.shape(lse);
        let none = movement::reshape(g, none, shape)?;
        let never = g.constant_like(f64::NEG_INFINITY, lse);
        let lse = g.where_(none, never, lse)?;
        let (p, v) = (norm::divide_row(g, e, sum)?, g.widen(x[2])?);
        Ok(smallvec![s.product(g, p, v)?, lse])
    }),
    infer: |i| {
        let (q, v) = (i.shape(0), i.shape(2));
        Ok(Meta { shape: q.with(q.rank() - 1, v.dims()[v.rank() - 1]), dtype: i.dtype(0).compute() })
    },
    amp: Amp::Low,
    ..Op::BASE
};

/// Inputs: q, k, v, gradient of the result, its products with the result summed by row (.., H, T), lse of the whole row (.., H, T), seen?,
/// documents of queries and of keys?, shift? -> dq, dk, dv of this block, in the dtype of the scores.
pub static ATTENTION_BLOCK_BACKWARD: Op = Op {
    name: "attention_block_backward",
    flops: super::attention::ATTENTION_BACKWARD.flops,
    shard: Some(crate::sharding::attention_block_backward),
    class: Class::Fused(|g, x, attrs| {
        let s = scores(g, x, 6, attrs);
        let scores = s.scores(g, x[0], x[1])?;
        let p = row_weights(g, scores, x[5])?;
        let [q, k, v, d] = [x[0], x[1], x[2], x[3]].map(|x| g.widen(x));
        let (q, k, v, d) = (q?, k?, v?, d?);
        let (pm, dm) = (s.merge(g, p)?, s.merge(g, d)?);
        let pt = g.t(pm)?;
        let dv = g.matmul(pt, dm)?;
        // ds = p (dp - sum of the row), dp = d v^T
        let vt = g.t(v)?;
        let dp = s.product(g, d, vt)?;
        let rank = g.shape(x[4]).rank();
        let row = g.unsqueeze(x[4], rank)?;
        let ds = g.sub(dp, row)?;
        let ds = g.mul(p, ds)?;
        let ds = g.mul_c(ds, s.scale)?;
        let dq = s.product(g, ds, k)?;
        let (sm, qm) = (s.merge(g, ds)?, s.merge(g, q)?);
        let st = g.t(sm)?;
        let dk = g.matmul(st, qm)?;
        Ok(smallvec![dq, dk, dv])
    }),
    infer: |i| Ok(Meta { shape: i.shape(0), dtype: i.dtype(0).compute() }),
    amp: Amp::Low,
    ..Op::BASE
};

/// exp(scores - lse): the softmax of whole rows; 0 in a row without keys.
fn row_weights(g: &mut Graph, scores: NodeId, lse: NodeId) -> Result<NodeId> {
    let never = g.constant_like(f64::NEG_INFINITY, lse);
    let none = g.eq(lse, never)?;
    let zero = g.constant_like(0.0, lse);
    let lse = g.where_(none, zero, lse)?;
    let rank = g.shape(lse).rank();
    let lse = g.unsqueeze(lse, rank)?;
    let x = g.sub(scores, lse)?;
    g.exp(x)
}

/// Merges the results of two blocks: out and lse of each.
pub fn merge(g: &mut Graph, a: [NodeId; 2], b: [NodeId; 2]) -> Result<Out> {
    let top = g.maximum(a[1], b[1])?;
    let never = g.constant_like(f64::NEG_INFINITY, top);
    let none = g.eq(top, never)?;
    let zero = g.constant_like(0.0, top);
    // A row without keys in either block has no largest score.
    let top = g.where_(none, zero, top)?;
    let mut shares = [a, b];
    for share in &mut shares {
        let x = g.sub(share[1], top)?;
        share[1] = g.exp(x)?;
    }
    let sum = g.add_(shares[0][1], shares[1][1])?;
    let log = g.log(sum)?;
    let lse = g.add_(log, top)?;
    let one = g.constant_like(1.0, sum);
    let sum = g.where_(none, one, sum)?;
    let mut parts = [shares[0][0]; 2];
    for (part, [out, weight]) in parts.iter_mut().zip(shares) {
        let weight = g.div(weight, sum)?;
        let rank = g.shape(weight).rank();
        let weight = g.unsqueeze(weight, rank)?;
        *part = g.mul(out, weight)?;
    }
    Ok(smallvec![g.add_(parts[0], parts[1])?, lse])
}
