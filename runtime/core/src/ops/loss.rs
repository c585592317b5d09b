//! Defines the losses: fused nodes that compute in f32 or wider, all with a `reduction`.
//!
//! Classes are the *last* dim of logits, here as everywhere in Perilune (PyTorch has them second). No loss uses a
//! gather: the logit of the target is selected by comparing an index ramp with the class id, so that a loss and its
//! backward are each one pass over the rows of logits. Inputs must have equal shapes, because silently broadcasting (N)
//! against (N, 1) is a common mistake. Class ids pass through `class_ids`, which rejects ids outside the classes.

use super::{Args, Class, Grad, GradCtx, Grads, IndexFault, IndexKind, Op, Out, bits, create, index, norm, one, real};
use crate::amp::Amp;
use crate::error::{Error, Result};
use crate::graph::{Graph, Infer, Meta, NodeId};
use crate::{DType, Shape};
use smallvec::{SmallVec, smallvec};

pub static OPS: &[&Op] = &[
    &CLASS_IDS,
    &CROSS_ENTROPY,
    &CROSS_ENTROPY_BACKWARD,
    &NLL_LOSS,
    &MSE_LOSS,
    &L1_LOSS,
    &SMOOTH_L1_LOSS,
    &HUBER_LOSS,
    &BCE_WITH_LOGITS,
    &BCE_LOSS,
    &KL_DIV,
];

const FUSED: Op = Op { grad: Grad::Expand, amp: Amp::Full, smooth: true, ..Op::BASE };

// ---- reductions --------------------------------------------------------------------------------------------------

const NONE: i64 = 0;
const MEAN: i64 = 1;
const SUM: i64 = 2;
const BATCHMEAN: i64 = 3;

fn reduction(a: &Args, i: usize) -> i64 {
    match a.str(i) {
        "none" => NONE,
        "sum" => SUM,
        "batchmean" => BATCHMEAN,
        _ => MEAN,
    }
}

/// The factor of the sum of losses over a tensor of shape `shape`.
fn share(how: i64, shape: Shape) -> f64 {
    match how {
        MEAN => 1.0 / shape.numel() as f64,
        BATCHMEAN => 1.0 / shape.dims().first().map_or(1.0, |&n| n as f64),
        _ => 1.0,
    }
}

fn reduce(g: &mut Graph, x: NodeId, how: i64) -> Result<NodeId> {
    if how == NONE {
        return Ok(x);
    }
    let scale = share(how, g.shape(x));
    let s = g.sum_all(x)?;
    if how == SUM { Ok(s) } else { g.mul_c(s, scale) }
}

// ---- losses over classes -----------------------------------------------------------------------------------------

/// `attrs` of the losses over classes: [1 if targets are probabilities, reduction, ignored id, smoothing bits, index in
/// `OF_CLASSES`].
struct Classes {
    probabilities: bool,
    how: i64,
    ignore: i64,
    smoothing: f64,
    which: i64,
    /// The axis of the classes and their number.
    last: usize,
    n: usize,
}

impl Classes {
    fn of(logits: Shape, attrs: &[i64]) -> Classes {
        let last = logits.rank() - 1;
        Classes {
            probabilities: attrs[0] != 0,
            how: attrs[1],
            ignore: attrs[2],
            smoothing: real(attrs[3]),
            which: attrs[4],
            last,
            n: logits.dims()[last],
        }
    }

    /// Which targets are ignored. Only this small part of a loss reads the checked ids; the pass over the logits
    /// remains one kernel, which waits for it (`plan::fuse`).
    fn skipped(&self, g: &mut Graph, target: NodeId) -> Result<NodeId> {
        let target = g.push(&CLASS_IDS, &[target], &[self.n as i64, self.which, self.ignore])?;
        let ignore = g.int_constant(self.ignore);
        g.eq(target, ignore)
    }

    /// `row` if the target counts, else 0.
    fn guard(&self, g: &mut Graph, row: NodeId, target: NodeId) -> Result<NodeId> {
        let skip = self.skipped(g, target)?;
        let zero = g.constant_like(0.0, row);
        g.where_(skip, zero, row)
    }

    /// The divisor of "mean": the number of targets that count, or the sum of their classes' weights.
    fn total(&self, g: &mut Graph, target: NodeId, weight: Option<NodeId>, dtype: DType) -> Result<NodeId> {
        let each = match weight {
            Some(w) => {
                let picked = self.pick(g, w, target)?;
                self.guard(g, picked, target)?
            }
            None => {
                let skip = self.skipped(g, target)?;
                let counts = g.logical_not(skip)?;
                g.cast(counts, dtype)?
            }
        };
        g.sum_all(each)
    }

    /// Reduces the losses of the rows. They are few compared with the logits, and are added and divided in f64: in f32
    /// the rounding of the sum alone could cost the loss several units in its last place.
    fn reduce(&self, g: &mut Graph, rows: NodeId, target: NodeId, weight: Option<NodeId>) -> Result<NodeId> {
        if self.how == NONE {
            return Ok(rows);
        }
        let dtype = g.dtype(rows);
        let wide = g.cast(rows, DType::F64)?;
        let mean = if self.how != MEAN || self.probabilities {
            reduce(g, wide, self.how)?
        } else {
            let sum = g.sum_all(wide)?;
            let total = self.total(g, target, weight, dtype)?;
            let total = g.cast(total, DType::F64)?;
            g.div(sum, total)?
        };
        g.cast(mean, dtype)
    }

    /// The probabilities of the targets, after smoothing: (..., C).
    fn wanted(&self, g: &mut Graph, target: NodeId, like: NodeId) -> Result<NodeId> {
        if self.probabilities {
            let t = g.widen(target)?;
            return self.smooth(g, t);
        }
        let hit = index::one_hot(g, target, self.n)?;
        let off = self.smoothing / self.n as f64;
        let (on, off) = (g.constant_like(1.0 - self.smoothing + off, like), g.constant_like(off, like));
        g.where_(hit, on, off)
    }

    /// The element of each row of `x` at the target's class; a vector is used for all rows.
    fn pick(&self, g: &mut Graph, x: NodeId, target: NodeId) -> Result<NodeId> {
        let hit = index::one_hot(g, target, self.n)?;
        let zero = g.constant_like(0.0, x);
        let x = g.where_(hit, x, zero)?;
        g.sum(x, &[self.last], false)
    }

    /// Target probabilities after smoothing.
    fn smooth(&self, g: &mut Graph, target: NodeId) -> Result<NodeId> {
        if self.smoothing == 0.0 {
            return Ok(target);
        }
        let t = g.mul_c(target, 1.0 - self.smoothing)?;
        g.add_c(t, self.smoothing / self.n as f64)
    }
}

/// The mean of a loss over class ids as its sum and its divisor, for means over several batches: both add up, even if a
/// batch has no id that counts. `None` for any other node, and in 16 bits, which cannot hold a sum.
pub fn sum_and_total(g: &mut Graph, loss: NodeId) -> Result<Option<(NodeId, NodeId)>> {
    let node = g.node(loss).clone();
    let of_classes = node.op == &CROSS_ENTROPY || node.op == &NLL_LOSS;
    if !of_classes || node.dtype.is_half() || node.attrs[0] != 0 || node.attrs[1] != MEAN {
        return Ok(None);
    }
    let c = Classes::of(g.shape(node.inputs[0]), &node.attrs);
    let mut attrs = node.attrs.clone();
    attrs[1] = SUM;
    g.without_autocast(|g| {
        let sum = g.push(node.op, &node.inputs, &attrs)?;
        let total = g.with_no_grad(true, |g| {
            let weight = widened(g, node.inputs.get(2))?;
            c.total(g, node.inputs[1], weight, node.dtype)
        })?;
        Ok(Some((sum, total)))
    })
}

/// Shape rule of the losses over classes: a scalar, or one loss per row.
fn per_row(i: &Infer) -> Result<Meta> {
    i.float(0)?;
    let logits = i.shape(0);
    let shape = if i.attrs[1] == NONE { logits.remove(logits.rank() - 1) } else { Shape::SCALAR };
    Ok(Meta { shape, dtype: i.dtype(0) })
}

/// The ops whose ids are checked; the second attribute of `CLASS_IDS` is an index into this list.
pub const OF_CLASSES: [&str; 3] = ["cross_entropy", "nll_loss", "one_hot"];

/// The ignored id of an op that ignores none: one that is valid anyway.
pub const IGNORES_NONE: i64 = 0;

/// The hint for an id outside the classes.
pub fn cure_of_class(classes: i64, ignored: i64) -> String {
    match ignored {
        IGNORES_NONE => format!("classes count from 0: here 0 to {}", classes - 1),
        id => format!("classes count from 0: here 0 to {}, or {id} (ignore_index) to ignore one", classes - 1),
    }
}

/// Inputs: ids i64; `attrs`: [number of classes, index in `OF_CLASSES`, ignored id]. Returns the ids. Each must be from
/// 0 to the number of classes - 1 or the ignored one; any other is an error in the name of the op.
pub static CLASS_IDS: Op = Op {
    name: "class_ids",
    shard: Some(crate::sharding::elementwise),
    class: Class::Library,
    infer: create::same,
    amp: Amp::Keep,
    index_fault: Some(|attrs| IndexFault { op: OF_CLASSES[attrs[1] as usize], kind: IndexKind::Classes(attrs[2]) }),
    ..Op::BASE
};

/// Checks class ids against logits (N..., C) and converts them to i64. Their values are checked when the step runs.
fn class_ids(g: &mut Graph, op: &str, logits: NodeId, target: NodeId) -> Result<NodeId> {
    let (x, t, dtype) = (g.shape(logits), g.shape(target), g.dtype(target));
    let want = x.remove(x.rank() - 1);
    if !dtype.is_int() {
        return Err(Error::dtype(op, format!("class ids must be integers, not {dtype}"))
            .hint("convert them with y:to(\"i64\")"));
    }
    if t != want {
        let e = Error::shape(
            op,
            format!("target {t} does not fit logits {x}: it must be {want}, one class id for each row of logits"),
        );
        let column = t.rank() == want.rank() + 1 && t.dims()[t.rank() - 1] == 1;
        let second = x.rank() > 2 && t == x.remove(1);
        return Err(match (column, second) {
            (true, _) => e.hint("drop the last dim of the target with y:squeeze(-1)"),
            (_, true) => e.hint("classes are the last dim here: move them with logits:permute"),
            _ => e,
        });
    }
    g.cast(target, DType::I64)
}

/// Option `i`, one weight for each class.
fn class_weight(g: &mut Graph, a: &Args, i: usize, logits: NodeId) -> Result<Option<NodeId>> {
    let Some(w) = a.opt_tensor(i) else { return Ok(None) };
    let (s, x, dtype) = (g.shape(w), g.shape(logits), g.dtype(w));
    let n = x.dims()[x.rank() - 1];
    if s.dims() != [n] || !dtype.is_float() {
        let message = format!("weight is {dtype} {s}; it must be a float tensor {{{n}}}, one number for each class");
        return Err(Error::shape(a.op.name, message));
    }
    let wide = if g.dtype(logits) == DType::F64 { DType::F64 } else { DType::F32 };
    g.cast(w, wide).map(Some)
}

/// Converts a weight among the inputs to at least f32.
fn widened(g: &mut Graph, weight: Option<&NodeId>) -> Result<Option<NodeId>> {
    weight.map(|&w| g.widen(w)).transpose()
}

fn logits_of(g: &mut Graph, a: &Args) -> Result<NodeId> {
    let x = a.tensor(0)?;
    let shape = g.shape(x);
    if shape.is_scalar() || shape.dims()[shape.rank() - 1] == 0 {
        return Err(Error::shape(a.op.name, format!("needs (..., classes), not shape {shape}")));
    }
    g.to_float(x)
}

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

// ---- losses over pairs -------------------------------------------------------------------------------------------

/// Shape rule of the losses over pairs: `attrs[0]` is the reduction.
fn per_element(i: &Infer) -> Result<Meta> {
    i.float(0)?;
    Ok(Meta { shape: if i.attrs[0] == NONE { i.shape(0) } else { Shape::SCALAR }, dtype: i.dtype(0) })
}

const PAIR: Op = Op { infer: per_element, ..FUSED };

/// Converts x and target to one float dtype and checks that their shapes are equal; a number or scalar target fits any
/// x.
fn pair(g: &mut Graph, a: &Args) -> Result<(NodeId, NodeId)> {
    let x = g.to_float(a.tensor(0)?)?;
    let dtype = g.dtype(x);
    let t = a.operand(g, 1, dtype)?;
    let (sx, st) = (g.shape(x), g.shape(t));
    if sx != st && !st.is_scalar() {
        let e =
            Error::shape(a.op.name, format!("x {sx} and target {st} must have the same shape; they are not broadcast"));
        return Err(if sx.numel() == st.numel() { e.hint("give the target the shape of x with y:reshape") } else { e });
    }
    let dtype = DType::promote(dtype, g.dtype(t));
    Ok((g.cast(x, dtype)?, g.cast(t, dtype)?))
}

fn record_pair(g: &mut Graph, a: &Args, attrs: &[i64]) -> Result<Out> {
    let (x, t) = pair(g, a)?;
    g.push(a.op, &[x, t], attrs).map(one)
}

/// A loss that is a function of x - target.
fn of_difference(
    g: &mut Graph,
    x: &[NodeId],
    how: i64,
    f: impl FnOnce(&mut Graph, NodeId) -> Result<NodeId>,
) -> Result<Out> {
    let t = g.widen(x[1])?;
    g.island(x[0], |g, x| {
        let d = g.sub(x, t)?;
        let l = f(g, d)?;
        reduce(g, l, how)
    })
    .map(one)
}

/// d^2 / 2 times `inner` where |d| is below `edge`; beyond it, (|d| - edge / 2) times `outer`.
fn rounded(g: &mut Graph, d: NodeId, edge: f64, inner: f64, outer: f64, inclusive: bool) -> Result<NodeId> {
    let size = g.abs(d)?;
    let limit = g.constant_like(edge, size);
    let near = if inclusive { g.le(size, limit)? } else { g.lt(size, limit)? };
    let square = g.square(d)?;
    let square = g.mul_c(square, 0.5 * inner)?;
    let line = g.add_c(size, -0.5 * edge)?;
    let line = g.mul_c(line, outer)?;
    g.where_(near, square, line)
}

/// Inputs of all losses over pairs: x, target; `attrs`: [reduction, extra...].
pub static MSE_LOSS: Op = Op {
    name: "mse_loss",
    sig: "x: tensor, target: operand, *, reduction: 'mean'|'sum'|'none' = 'mean'",
    doc: "x (...), target (...) or a number -> scalar, or (...) with reduction = \"none\": (x - target)^2.\n\
          Shapes must be equal; they are not broadcast. Computed in f32 for 16-bit floats.",
    class: Class::Fused(|g, x, attrs| of_difference(g, x, attrs[0], |g, d| g.square(d))),
    call: Some(|g, a| record_pair(g, a, &[reduction(a, 2)])),
    samples: &[
        "f(2,3), f(2,3)",
        "f(2,3), f(2,3), reduction='sum'",
        "f(2,3), f(2,3), reduction='none'",
        "f(4), 1.0",
        "f(0), f(0), reduction='sum'",
    ],
    ..PAIR
};

pub static L1_LOSS: Op = Op {
    name: "l1_loss",
    sig: "x: tensor, target: operand, *, reduction: 'mean'|'sum'|'none' = 'mean'",
    doc: "x (...), target (...) or a number -> scalar, or (...) with reduction = \"none\": |x - target|. The gradient at 0 is 0.",
    class: Class::Fused(|g, x, attrs| of_difference(g, x, attrs[0], |g, d| g.abs(d))),
    call: Some(|g, a| record_pair(g, a, &[reduction(a, 2)])),
    samples: &["f(2,3), f(2,3)", "f(2,3), f(2,3), reduction='sum'", "f(2,3), f(2,3), reduction='none'", "f(4), 1.0"],
    smooth: false,
    ..PAIR
};

pub static SMOOTH_L1_LOSS: Op = Op {
    name: "smooth_l1_loss",
    sig: "x: tensor, target: operand, *, beta: float = 1.0, reduction: 'mean'|'sum'|'none' = 'mean'",
    doc: "x (...), target (...) or a number -> scalar, or (...) with reduction = \"none\": with d = x - target, d^2 / (2 beta)\n\
          where |d| < beta, else |d| - beta / 2. Girshick, arXiv:1504.08083.",
    class: Class::Fused(|g, x, attrs| {
        let beta = real(attrs[1]);
        of_difference(
            g,
            x,
            attrs[0],
            |g, d| if beta == 0.0 { g.abs(d) } else { rounded(g, d, beta, 1.0 / beta, 1.0, false) },
        )
    }),
    call: Some(|g, a| {
        let beta = a.float(2)?;
        if beta.is_nan() || beta < 0.0 {
            return Err(Error::argument("smooth_l1_loss", format!("beta is {beta}; it must be 0 or more")));
        }
        record_pair(g, a, &[reduction(a, 3), bits(beta)])
    }),
    samples: &[
        "f(2,3), f(2,3)",
        "f(2,3), f(2,3), beta=0.5, reduction='sum'",
        "f(2,3), f(2,3), reduction='none'",
        "f(4), f(4), beta=0.0",
    ],
    smooth: false,
    ..PAIR
};

pub static HUBER_LOSS: Op = Op {
    name: "huber_loss",
    sig: "x: tensor, target: operand, *, delta: float = 1.0, reduction: 'mean'|'sum'|'none' = 'mean'",
    doc: "x (...), target (...) or a number -> scalar, or (...) with reduction = \"none\": with d = x - target, d^2 / 2 where\n\
          |d| <= delta, else delta (|d| - delta / 2). Huber, Ann. Math. Statist. 35 (1964).",
    class: Class::Fused(|g, x, attrs| {
        let delta = real(attrs[1]);
        of_difference(g, x, attrs[0], |g, d| rounded(g, d, delta, 1.0, delta, true))
    }),
    call: Some(|g, a| {
        let delta = a.float(2)?;
        if delta.is_nan() || delta <= 0.0 {
            return Err(Error::argument("huber_loss", format!("delta is {delta}; it must be above 0")));
        }
        record_pair(g, a, &[reduction(a, 3), bits(delta)])
    }),
    samples: &["f(2,3), f(2,3)", "f(2,3), f(2,3), delta=0.5, reduction='sum'", "f(2,3), f(2,3), reduction='none'"],
    smooth: false,
    ..PAIR
};

/// The gradient that reaches each element of a loss over pairs: of x's shape, or one scalar for all.
fn element_gradient(g: &mut Graph, c: &GradCtx) -> Result<NodeId> {
    let d = g.widen(c.grad)?;
    let scale = share(c.attrs[0], g.shape(c.x(0)));
    if scale == 1.0 { Ok(d) } else { g.mul_c(d, scale) }
}

/// `slope` times the element's gradient, in the dtype and shape of input `i`.
fn arrive(g: &mut Graph, c: &GradCtx, i: usize, slope: NodeId, d: NodeId) -> Result<Option<NodeId>> {
    let (shape, dtype) = (g.shape(c.x(i)), g.dtype(c.x(i)));
    let y = g.mul(slope, d)?;
    let y = g.expand(y, g.shape(c.x(0)))?;
    let y = g.sum_to(y, shape)?;
    Ok(Some(g.cast(y, dtype)?))
}

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{Value, call, create};

    fn leaf(g: &mut Graph, dims: &[usize], dtype: DType) -> Value {
        Value::Tensor(g.leaf(&create::LEAF, Shape::of(dims), dtype, &[], 0))
    }

    fn cross_entropy(x: &[usize], t: &[usize], dtype: DType) -> Error {
        let g = &mut Graph::new();
        let (x, t) = (leaf(g, x, DType::F32), leaf(g, t, dtype));
        let int = |n| Value::Number(crate::Number::Int(n));
        let args = Args::new(&CROSS_ENTROPY, [x, t, int(-100), int(0), Value::Str("mean".into())]);
        call(g, &CROSS_ENTROPY, &args).unwrap_err()
    }

    #[test]
    fn wrong_targets_say_what_would_be_right() {
        let e = cross_entropy(&[4, 5], &[4, 1], DType::I64);
        assert_eq!(
            e.to_string(),
            "cross_entropy: target {4, 1} does not fit logits {4, 5}: it must be {4}, one class id for each row of logits\n  \
             hint: drop the last dim of the target with y:squeeze(-1)"
        );
        let e = cross_entropy(&[2, 5, 7], &[2, 7], DType::I64);
        assert_eq!(e.hint.as_deref(), Some("classes are the last dim here: move them with logits:permute"));
        let e = cross_entropy(&[4, 5], &[4], DType::F32);
        assert_eq!(e.message, "class ids must be integers, not f32");
        let e = cross_entropy(&[], &[], DType::I64);
        assert_eq!(e.message, "needs (..., classes), not shape {}");
    }

    #[test]
    fn pairs_are_not_broadcast() {
        let g = &mut Graph::new();
        let (x, t) = (leaf(g, &[3], DType::F32), leaf(g, &[3, 1], DType::F32));
        let e = call(g, &MSE_LOSS, &Args::new(&MSE_LOSS, [x, t, Value::Str("mean".into())])).unwrap_err();
        assert_eq!(
            e.to_string(),
            "mse_loss: x {3} and target {3, 1} must have the same shape; they are not broadcast\n  \
             hint: give the target the shape of x with y:reshape"
        );
    }
}
