//! Defines binary cross-entropy and the Kullback-Leibler divergence.

use super::pairs::{PAIR, arrive, element_gradient, pair, record_pair};
use super::{reduce, reduction};
use crate::Shape;
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::ops::{Class, Grad, Grads, Op, one};
use smallvec::{SmallVec, smallvec};

/// max(-x, 0) + log(1 + exp(-|x|)) = -log(sigmoid(x)).
fn minus_log_sigmoid(g: &mut Graph, x: NodeId) -> Result<NodeId> {
    let n = g.neg(x)?;
    let top = g.relu(n)?;
    let e = g.abs(x)?;
    let e = g.neg(e)?;
    let e = g.exp(e)?;
    let e = g.log1p(e)?;
    g.add_(top, e)
}

/// 1 + (pos_weight - 1) target.
fn positive_weight(g: &mut Graph, t: NodeId, weight: NodeId) -> Result<NodeId> {
    let w = g.widen(weight)?;
    let w = g.add_c(w, -1.0)?;
    let w = g.mul(w, t)?;
    g.add_c(w, 1.0)
}

/// Inputs: logits, target, pos_weight?; `attrs`: [reduction].
pub static BCE_WITH_LOGITS: Op = Op {
    name: "bce_with_logits",
    sig: "logits: tensor, target: operand, *, pos_weight: tensor?, reduction: 'mean'|'sum'|'none' = 'mean'",
    doc: "logits (...), target (...) in [0, 1] -> scalar, or (...) with reduction = \"none\": binary cross-entropy of\n\
          sigmoid(logits), without overflow. pos_weight, which broadcasts to logits, multiplies the loss of positives.",
    class: Class::Fused(|g, x, attrs| {
        let t = g.widen(x[1])?;
        g.island(x[0], |g, logits| {
            let mut l = minus_log_sigmoid(g, logits)?;
            if let Some(&weight) = x.get(2) {
                let w = positive_weight(g, t, weight)?;
                l = g.mul(l, w)?;
            }
            let rest = g.rsub_c(1.0, t)?;
            let rest = g.mul(rest, logits)?;
            let l = g.add_(l, rest)?;
            reduce(g, l, attrs[0])
        })
        .map(one)
    }),
    call: Some(|g, a| {
        let (x, t) = pair(g, a)?;
        let mut inputs: SmallVec<[NodeId; 4]> = smallvec![x, t];
        if let Some(w) = a.opt_tensor(2) {
            let (sx, sw, dtype) = (g.shape(x), g.shape(w), g.dtype(w));
            if Shape::broadcast(&sx, &sw) != Some(sx) || !dtype.is_float() {
                let message = format!("pos_weight is {dtype} {sw}; it must be a float tensor that broadcasts to {sx}");
                return Err(Error::shape("bce_with_logits", message));
            }
            inputs.push(w);
        }
        g.push(&BCE_WITH_LOGITS, &inputs, &[reduction(a, 3)]).map(one)
    }),
    grad: Grad::Rule(|g, c| {
        let d = element_gradient(g, c)?;
        let (x, t) = (g.widen(c.x(0))?, g.widen(c.x(1))?);
        let s = g.sigmoid(x)?;
        // dx: (1 - t) - w (1 - s), which is s - t without weights.
        let mut out: Grads = SmallVec::new();
        let weight = match c.inputs.get(2) {
            Some(&w) => Some(positive_weight(g, t, w)?),
            None => None,
        };
        let dx = match weight {
            Some(w) => {
                let miss = g.rsub_c(1.0, s)?;
                let miss = g.mul(w, miss)?;
                let rest = g.rsub_c(1.0, t)?;
                g.sub(rest, miss)?
            }
            None => g.sub(s, t)?,
        };
        out.push(arrive(g, c, 0, dx, d)?);
        if c.needs[1] || c.needs.get(2) == Some(&true) {
            let l = minus_log_sigmoid(g, x)?;
            // dt: (pos_weight - 1) l - x; dpos_weight: t l.
            let mut dt = g.neg(x)?;
            if let Some(&w) = c.inputs.get(2) {
                let w = g.widen(w)?;
                let w = g.add_c(w, -1.0)?;
                let w = g.mul(w, l)?;
                dt = g.add_(dt, w)?;
            }
            out.push(arrive(g, c, 1, dt, d)?);
            if c.inputs.len() > 2 {
                let dw = g.mul(t, l)?;
                out.push(arrive(g, c, 2, dw, d)?);
            }
        }
        Ok(out)
    }),
    samples: &[
        "f(2,3), p(2,3)",
        "f(2,3), p(2,3), reduction='sum'",
        "f(2,3), p(2,3), reduction='none'",
        "f(4), 1.0",
        "f(2,3), p(2,3), pos_weight=p(3)",
        "f(9;-30,30), p(9)",
    ],
    ..PAIR
};

pub static BCE_LOSS: Op = Op {
    name: "bce_loss",
    sig: "x: tensor, target: operand, *, reduction: 'mean'|'sum'|'none' = 'mean'",
    doc: "x (...) in [0, 1], target (...) in [0, 1] -> scalar, or (...) with reduction = \"none\": binary cross-entropy of\n\
          probabilities. Logarithms are clamped at -100, as in PyTorch. bce_with_logits is more accurate.",
    class: Class::Fused(|g, x, attrs| {
        let t = g.widen(x[1])?;
        g.island(x[0], |g, x| {
            let a = g.log(x)?;
            let a = g.maximum_c(a, -100.0)?;
            let a = g.mul(t, a)?;
            let b = g.neg(x)?;
            let b = g.log1p(b)?;
            let b = g.maximum_c(b, -100.0)?;
            let rest = g.rsub_c(1.0, t)?;
            let b = g.mul(rest, b)?;
            let l = g.add_(a, b)?;
            let l = g.neg(l)?;
            reduce(g, l, attrs[0])
        })
        .map(one)
    }),
    call: Some(|g, a| record_pair(g, a, &[reduction(a, 2)])),
    grad: Grad::Rule(|g, c| {
        let d = element_gradient(g, c)?;
        let (x, t) = (g.widen(c.x(0))?, g.widen(c.x(1))?);
        let miss = g.rsub_c(1.0, x)?;
        let both = g.mul(x, miss)?;
        let both = g.maximum_c(both, 1e-12)?;
        let off = g.sub(x, t)?;
        let dx = g.div(off, both)?;
        let mut out: Grads = smallvec![arrive(g, c, 0, dx, d)?];
        if c.needs[1] {
            let (a, b) = (g.log(x)?, g.log(miss)?);
            let (a, b) = (g.maximum_c(a, -100.0)?, g.maximum_c(b, -100.0)?);
            let dt = g.sub(b, a)?;
            out.push(arrive(g, c, 1, dt, d)?);
        }
        Ok(out)
    }),
    samples: &[
        "f(2,3;0.1,0.9), f(2,3;0.1,0.9)",
        "f(2,3;0.1,0.9), f(2,3;0.1,0.9), reduction='sum'",
        "f(4;0.1,0.9), 1.0, reduction='none'",
    ],
    ..PAIR
};

/// Inputs: log-probabilities, target; `attrs`: [reduction, 1 if the target is in logarithms too].
pub static KL_DIV: Op = Op {
    name: "kl_div",
    sig: "x: tensor, target: operand, *, log_target: bool = false, reduction: 'mean'|'sum'|'batchmean'|'none' = 'mean'",
    doc: "x (...) log-probabilities, target (...) probabilities -> scalar, or (...) with reduction = \"none\":\n\
          target (log(target) - x), 0 where target is 0; with log_target, exp(target) (target - x). \"batchmean\" divides the\n\
          sum by the size of dim 0, which gives the KL divergence; \"mean\" by the number of elements, as in PyTorch.",
    class: Class::Fused(|g, x, attrs| {
        let t = g.widen(x[1])?;
        g.island(x[0], |g, logp| {
            let l = if attrs[1] != 0 {
                let p = g.exp(t)?;
                let d = g.sub(t, logp)?;
                g.mul(p, d)?
            } else {
                let (zero, one) = (g.constant_like(0.0, t), g.constant_like(1.0, t));
                let empty = g.eq(t, zero)?;
                // Replaces 0 by 1, whose logarithm is finite: neither the value nor the gradient contains log(0).
                let safe = g.where_(empty, one, t)?;
                let l = g.log(safe)?;
                let a = g.mul(t, l)?;
                let b = g.mul(t, logp)?;
                g.sub(a, b)?
            };
            reduce(g, l, attrs[0])
        })
        .map(one)
    }),
    call: Some(|g, a| record_pair(g, a, &[reduction(a, 3), i64::from(a.bool(2))])),
    samples: &[
        "f(2,3), p(2,3)",
        "f(2,3), p(2,3), reduction='batchmean'",
        "f(2,3), f(2,3), log_target=true, reduction='sum'",
        "f(2,3), p(2,3), reduction='none'",
    ],
    ..PAIR
};
