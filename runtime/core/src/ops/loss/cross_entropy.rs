//! Defines cross-entropy and the negative log-likelihood of class ids.

use super::classes::{Classes, class_ids, class_weight, logits_of, per_row, widened};
use super::{FUSED, MEAN, NONE, SUM, reduction, share};
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::ops::{Class, Grad, GradCtx, Grads, Op, bits, create, index, norm, one};
use smallvec::{SmallVec, smallvec};

/// Inputs: logits, target, weight?; `attrs` as [`Classes`].
pub static CROSS_ENTROPY: Op = Op {
    name: "cross_entropy",
    sig: "logits: tensor, target: tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: 'mean'|'sum'|'none' = 'mean', weight: tensor?",
    doc: "logits (..., C), target (...) int or (..., C) float -> scalar, or (...) with reduction = \"none\".\n\
          The negative log-probability of the target under softmax(logits); the classes are the last dim. A target is a class\n\
          id, or a probability for each class. Ids equal to ignore_index are ignored, and \"mean\" divides by the number of\n\
          the other ids; any other id outside 0 to C - 1 is an error when the step runs. weight (C) multiplies the terms of\n\
          each class; for ids, \"mean\" then divides by the sum of the weights of those not ignored. label_smoothing mixes\n\
          the target with the uniform distribution (Szegedy et al., arXiv:1512.00567). Computed in f32 and rounded to the\n\
          dtype of logits.",
    class: Class::Fused(|g, x, attrs| {
        let c = Classes::of(g.shape(x[0]), attrs);
        g.island(x[0], |g, logits| {
            let (d, e) = norm::shifted_exp(g, logits, c.last)?;
            let s = g.sum(e, &[c.last], c.probabilities)?;
            let lse = g.log(s)?;
            let weight = widened(g, x.get(2))?;
            if c.probabilities {
                let mut t = c.wanted(g, x[1], logits)?;
                if let Some(w) = weight {
                    t = g.mul(t, w)?;
                }
                let l = g.sub(lse, d)?;
                let l = g.mul(t, l)?;
                let rows = g.sum(l, &[c.last], false)?;
                return c.reduce(g, rows, x[1], weight);
            }
            let hit = c.pick(g, d, x[1])?;
            let mut rows = g.sub(lse, hit)?;
            if let Some(w) = weight {
                let w = c.pick(g, w, x[1])?;
                rows = g.mul(rows, w)?;
            }
            if c.smoothing != 0.0 {
                let flat = match weight {
                    Some(w) => {
                        let lse = g.unsqueeze(lse, c.last)?;
                        let l = g.sub(lse, d)?;
                        let l = g.mul(l, w)?;
                        let l = g.sum(l, &[c.last], false)?;
                        g.mul_c(l, 1.0 / c.n as f64)?
                    }
                    None => {
                        let mean = g.sum(d, &[c.last], false)?;
                        let mean = g.mul_c(mean, 1.0 / c.n as f64)?;
                        g.sub(lse, mean)?
                    }
                };
                let flat = g.mul_c(flat, c.smoothing)?;
                rows = g.mul_c(rows, 1.0 - c.smoothing)?;
                rows = g.add_(rows, flat)?;
            }
            let rows = c.guard(g, rows, x[1])?;
            c.reduce(g, rows, x[1], weight)
        })
        .map(one)
    }),
    infer: per_row,
    call: Some(|g, a| {
        let (x, target) = (logits_of(g, a)?, a.tensor(1)?);
        let (ignore, smoothing) = (a.int(2)?, a.float(3)?);
        if !(0.0..=1.0).contains(&smoothing) {
            return Err(Error::argument(
                "cross_entropy",
                format!("label_smoothing is {smoothing}; it must be from 0 to 1"),
            ));
        }
        let probabilities = g.dtype(target).is_float() && g.shape(target) == g.shape(x);
        let target = if probabilities { target } else { class_ids(g, "cross_entropy", x, target)? };
        let mut inputs: SmallVec<[NodeId; 4]> = smallvec![x, target];
        inputs.extend(class_weight(g, a, 5, x)?);
        let attrs = [i64::from(probabilities), reduction(a, 4), ignore, bits(smoothing), 0];
        g.push(&CROSS_ENTROPY, &inputs, &attrs).map(one)
    }),
    grad: Grad::Rule(cross_entropy_grad),
    samples: &[
        "f(4,5), i(5;4)",
        "f(2,3,5), i(5;2,3), reduction='none'",
        "f(4,5), i(5;4), reduction='sum', label_smoothing=0.1",
        "f(4,5), i(5;4), ignore_index=2",
        "f(4,5), i(5;4), ignore_index=2, label_smoothing=0.2",
        "f(5), i(5;)",
        "f(4,5), p(4,5)",
        "f(4,5), p(4,5), label_smoothing=0.1, reduction='none'",
        "f(9,70), i(70;9)",
        "f(0,5), i(5;0), reduction='sum'",
        "f(4,5), i(5;4), weight=p(5)",
        "f(2,3,5), i(5;2,3), weight=p(5), reduction='none', ignore_index=1",
        "f(4,5), i(5;4), weight=p(5), ignore_index=2, label_smoothing=0.2",
        "f(4,5), i(5;4), weight=p(5), reduction='sum', label_smoothing=0.1",
        "f(4,5), p(4,5), weight=p(5), label_smoothing=0.1",
        "f(5), i(5;), weight=p(5)",
    ],
    ..FUSED
};

fn cross_entropy_grad(g: &mut Graph, c: &GradCtx) -> Result<Grads> {
    let (x, target) = (c.x(0), c.x(1));
    let mut inputs: SmallVec<[NodeId; 4]> = smallvec![x, target, c.grad];
    inputs.extend(c.inputs.get(2).copied());
    let mut out: Grads = smallvec![Some(g.push(&CROSS_ENTROPY_BACKWARD, &inputs, c.attrs)?), None];
    let k = Classes::of(g.shape(x), c.attrs);
    let of_target = c.needs[1] && k.probabilities;
    let of_weight = c.needs.get(2) == Some(&true);
    if !of_target && !of_weight {
        return Ok(out);
    }
    let wide = g.widen(x)?;
    let logp = g.push(&norm::LOG_SOFTMAX, &[wide], &[k.last as i64])?;
    let weight = widened(g, c.inputs.get(2))?;
    if of_target {
        let mut l = g.mul_c(logp, k.smoothing - 1.0)?;
        if let Some(w) = weight {
            l = g.mul(l, w)?;
        }
        let d = row_gradient(g, &k, x, c.grad)?;
        let d = g.mul(l, d)?;
        let dtype = g.dtype(target);
        out[1] = Some(g.cast(d, dtype)?);
    }
    if let (true, Some(w)) = (of_weight, weight) {
        let d = weight_gradient(g, &k, logp, target, w, c.grad)?;
        let dtype = g.dtype(c.x(2));
        out.push(Some(g.cast(d, dtype)?));
    }
    Ok(out)
}

/// With the target probabilities t and a row's share q of the loss, a = sum of -q t log p over the rows. If the loss is
/// divided by the sum of the weights, the share of each class in that sum times the loss is subtracted.
fn weight_gradient(
    g: &mut Graph,
    k: &Classes,
    logp: NodeId,
    target: NodeId,
    weight: NodeId,
    grad: NodeId,
) -> Result<NodeId> {
    let rows: SmallVec<[usize; 8]> = (0..k.last).collect();
    let over_rows = |g: &mut Graph, x: NodeId| if rows.is_empty() { Ok(x) } else { g.sum(x, &rows, false) };
    let divided = k.how == MEAN && !k.probabilities;
    let mut share = if k.probabilities { row_gradient(g, k, logp, grad)? } else { g.widen(grad)? };
    let dtype = g.dtype(share);
    let mut total = None;
    if divided {
        let sum = k.total(g, target, Some(weight), dtype)?;
        share = g.div(share, sum)?;
        total = Some(sum);
    }
    if !k.probabilities {
        share = k.guard(g, share, target)?;
        share = g.unsqueeze(share, k.last)?;
    }
    let t = k.wanted(g, target, logp)?;
    let l = g.neg(logp)?;
    let l = g.mul(t, l)?;
    let l = g.mul(l, share)?;
    let a = over_rows(g, l)?;
    let Some(total) = total else { return Ok(a) };
    let hit = index::one_hot(g, target, k.n)?;
    let hit = g.cast(hit, dtype)?;
    let skip = k.skipped(g, target)?;
    let skip = g.unsqueeze(skip, k.last)?;
    let zero = g.constant_like(0.0, hit);
    let hit = g.where_(skip, zero, hit)?;
    let hits = over_rows(g, hit)?;
    let loss = g.mul(a, weight)?;
    let loss = g.sum_all(loss)?;
    let loss = g.div(loss, total)?;
    let part = g.mul(hits, loss)?;
    g.sub(a, part)
}

/// The gradient that reaches each row of probabilities: (..., 1), or one scalar for all.
fn row_gradient(g: &mut Graph, k: &Classes, logits: NodeId, grad: NodeId) -> Result<NodeId> {
    let d = g.widen(grad)?;
    if k.how == NONE {
        return g.unsqueeze(d, k.last);
    }
    let rows = g.shape(logits).remove(k.last);
    if k.how == SUM { Ok(d) } else { g.mul_c(d, share(k.how, rows)) }
}

/// Inputs: logits, target, gradient of the loss, weight?; `attrs` as `cross_entropy`. (softmax - target) times the
/// row's gradient; with weights, the target is multiplied by them and softmax by the sum of that target.
pub static CROSS_ENTROPY_BACKWARD: Op = Op {
    name: "cross_entropy_backward",
    class: Class::Fused(|g, x, attrs| {
        let c = Classes::of(g.shape(x[0]), attrs);
        g.island(x[0], |g, logits| {
            let (_, e) = norm::shifted_exp(g, logits, c.last)?;
            let s = g.sum(e, &[c.last], true)?;
            let mut p = norm::divide_row(g, e, s)?;
            let mut t = c.wanted(g, x[1], p)?;
            let weight = widened(g, x.get(3))?;
            if let Some(w) = weight {
                t = g.mul(t, w)?;
            }
            if c.probabilities || weight.is_some() {
                let mass = g.sum(t, &[c.last], true)?;
                p = g.mul(p, mass)?;
            }
            let d = g.sub(p, t)?;
            if c.probabilities {
                let coef = row_gradient(g, &c, logits, x[2])?;
                return g.mul(d, coef);
            }
            let mut coef = g.widen(x[2])?;
            if c.how == MEAN {
                let dtype = g.dtype(coef);
                let total = c.total(g, x[1], weight, dtype)?;
                coef = g.div(coef, total)?;
            }
            let coef = c.guard(g, coef, x[1])?;
            let coef = g.unsqueeze(coef, c.last)?;
            g.mul(d, coef)
        })
        .map(one)
    }),
    infer: |i| {
        i.float(0)?;
        create::same(i)
    },
    ..FUSED
};

/// Inputs: log-probabilities, target, weight?; `attrs` as [`Classes`].
pub static NLL_LOSS: Op = Op {
    name: "nll_loss",
    sig: "logp: tensor, target: tensor, *, ignore_index: int = -100, reduction: 'mean'|'sum'|'none' = 'mean', weight: tensor?",
    doc: "logp (..., C), target (...) int -> scalar, or (...) with reduction = \"none\": minus the log-probability of the\n\
          target, for logp from log_softmax; the classes are the last dim. Ids equal to ignore_index are ignored, and\n\
          \"mean\" divides by the number of the other ids; any other id outside 0 to C - 1 is an error when the step runs.\n\
          weight (C) multiplies the losses of each class, and \"mean\" divides by the sum of the weights of the ids not\n\
          ignored.",
    class: Class::Fused(|g, x, attrs| {
        let c = Classes::of(g.shape(x[0]), attrs);
        g.island(x[0], |g, logp| {
            let rows = c.pick(g, logp, x[1])?;
            let mut rows = g.neg(rows)?;
            let weight = widened(g, x.get(2))?;
            if let Some(w) = weight {
                let w = c.pick(g, w, x[1])?;
                rows = g.mul(rows, w)?;
            }
            let rows = c.guard(g, rows, x[1])?;
            c.reduce(g, rows, x[1], weight)
        })
        .map(one)
    }),
    infer: per_row,
    call: Some(|g, a| {
        let x = logits_of(g, a)?;
        let target = class_ids(g, "nll_loss", x, a.tensor(1)?)?;
        let mut inputs: SmallVec<[NodeId; 4]> = smallvec![x, target];
        inputs.extend(class_weight(g, a, 4, x)?);
        g.push(&NLL_LOSS, &inputs, &[0, reduction(a, 3), a.int(2)?, bits(0.0), 1]).map(one)
    }),
    samples: &[
        "f(4,5), i(5;4)",
        "f(2,3,5), i(5;2,3), reduction='none'",
        "f(4,5), i(5;4), reduction='sum'",
        "f(4,5), i(5;4), ignore_index=2",
        "f(4,5), i(5;4), ignore_index=2, weight=p(5)",
        "f(2,3,5), i(5;2,3), reduction='none', weight=p(5)",
    ],
    ..FUSED
};
