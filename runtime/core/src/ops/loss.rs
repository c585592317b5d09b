//! Losses: fused nodes, f32 islands, all with a `reduction`.
//!
//! Classes are the *last* dim of logits, here as everywhere else in Perilune (PyTorch has them second). Nothing gathers:
//! the logit of the target is picked by comparing an index ramp with the class id, so that a loss and its backward are
//! each one pass over the rows of logits. Inputs must have equal shapes: a silent broadcast of (N) against (N, 1) has
//! ruined many a regression.

use super::{Args, Class, Grad, GradCtx, Grads, Op, Out, bits, create, index, norm, one, real};
use crate::amp::Amp;
use crate::error::{Error, Result};
use crate::graph::{Graph, Infer, Meta, NodeId};
use crate::{DType, Shape};
use smallvec::{SmallVec, smallvec};

pub static OPS: &[&Op] = &[
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

/// What the sum of losses over a tensor of shape `shape` is multiplied by.
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

/// `attrs` of the losses over classes: [1 if targets are probabilities, reduction, ignored id, smoothing bits].
struct Classes {
    probabilities: bool,
    how: i64,
    ignore: i64,
    smoothing: f64,
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
            last,
            n: logits.dims()[last],
        }
    }

    /// Which targets do not count, and which name no class.
    fn masks(&self, g: &mut Graph, target: NodeId) -> Result<(NodeId, NodeId)> {
        let (ignore, zero, n) = (
            g.constant_like(self.ignore as f64, target),
            g.constant_like(0.0, target),
            g.constant_like(self.n as f64, target),
        );
        let skip = g.eq(target, ignore)?;
        let (below, above) = (g.lt(target, zero)?, g.ge(target, n)?);
        Ok((skip, g.logical_or(below, above)?))
    }

    /// `row` where the target counts, 0 where it does not, NaN where it names no class.
    fn guard(&self, g: &mut Graph, row: NodeId, target: NodeId) -> Result<NodeId> {
        let (skip, bad) = self.masks(g, target)?;
        let (nan, zero) = (g.constant_like(f64::NAN, row), g.constant_like(0.0, row));
        let row = g.where_(bad, nan, row)?;
        g.where_(skip, zero, row)
    }

    /// How many targets count.
    fn count(&self, g: &mut Graph, target: NodeId, dtype: DType) -> Result<NodeId> {
        let (skip, _) = self.masks(g, target)?;
        let valid = g.logical_not(skip)?;
        let valid = g.cast(valid, dtype)?;
        g.sum_all(valid)
    }

    /// The losses of the rows reduced.
    fn reduce(&self, g: &mut Graph, rows: NodeId, target: NodeId) -> Result<NodeId> {
        if self.how != MEAN || self.probabilities {
            return reduce(g, rows, self.how);
        }
        let (sum, dtype) = (g.sum_all(rows)?, g.dtype(rows));
        let count = self.count(g, target, dtype)?;
        g.div(sum, count)
    }

    /// The element of each row of `x` that the target names.
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

/// Shape rule of the losses over classes: a scalar, or a loss for each row.
fn per_row(i: &Infer) -> Result<Meta> {
    i.float(0)?;
    let logits = i.shape(0);
    let shape = if i.attrs[1] == NONE { logits.remove(logits.rank() - 1) } else { Shape::SCALAR };
    Ok(Meta { shape, dtype: i.dtype(0) })
}

/// Checks class ids against logits (N..., C): ids as i64.
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

fn logits_of(g: &mut Graph, a: &Args) -> Result<NodeId> {
    let x = a.tensor(0)?;
    let shape = g.shape(x);
    if shape.is_scalar() || shape.dims()[shape.rank() - 1] == 0 {
        return Err(Error::shape(a.op.name, format!("needs (..., classes), not shape {shape}")));
    }
    g.to_float(x)
}

/// Inputs: logits, target; `attrs` as [`Classes`].
pub static CROSS_ENTROPY: Op = Op {
    name: "cross_entropy",
    sig: "logits: tensor, target: tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: 'mean'|'sum'|'none' = 'mean'",
    doc: "logits (..., C), target (...) int or (..., C) float -> scalar, or (...) with reduction = \"none\".\n\
          The negative log-probability of the target under softmax(logits); the classes are the last dim. A target is a class\n\
          id, or a probability for each class. Ids equal to ignore_index count for nothing, and \"mean\" divides by the number\n\
          of ids that count; any other id outside 0 to C - 1 makes its loss NaN. label_smoothing mixes the target with the\n\
          uniform distribution (Szegedy et al., arXiv:1512.00567). f32 inside, rounded to the dtype of logits.",
    class: Class::Fused(|g, x, attrs| {
        let c = Classes::of(g.shape(x[0]), attrs);
        g.island(x[0], |g, logits| {
            let (d, e) = norm::shifted_exp(g, logits, c.last)?;
            let s = g.sum(e, &[c.last], c.probabilities)?;
            let lse = g.log(s)?;
            if c.probabilities {
                let t = g.widen(x[1])?;
                let t = c.smooth(g, t)?;
                let l = g.sub(lse, d)?;
                let l = g.mul(t, l)?;
                let rows = g.sum(l, &[c.last], false)?;
                return c.reduce(g, rows, x[1]);
            }
            let hit = c.pick(g, d, x[1])?;
            let mut rows = g.sub(lse, hit)?;
            if c.smoothing != 0.0 {
                let mean = g.sum(d, &[c.last], false)?;
                let mean = g.mul_c(mean, 1.0 / c.n as f64)?;
                let flat = g.sub(lse, mean)?;
                let flat = g.mul_c(flat, c.smoothing)?;
                rows = g.mul_c(rows, 1.0 - c.smoothing)?;
                rows = g.add_(rows, flat)?;
            }
            let rows = c.guard(g, rows, x[1])?;
            c.reduce(g, rows, x[1])
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
        let attrs = [i64::from(probabilities), reduction(a, 4), ignore, bits(smoothing)];
        g.push(&CROSS_ENTROPY, &[x, target], &attrs).map(one)
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
    ],
    ..FUSED
};

fn cross_entropy_grad(g: &mut Graph, c: &GradCtx) -> Result<Grads> {
    let (x, target) = (c.x(0), c.x(1));
    let mut out: Grads = smallvec![Some(g.push(&CROSS_ENTROPY_BACKWARD, &[x, target, c.grad], c.attrs)?)];
    let k = Classes::of(g.shape(x), c.attrs);
    if c.needs[1] && k.probabilities {
        let wide = g.widen(x)?;
        let l = g.push(&norm::LOG_SOFTMAX, &[wide], &[k.last as i64])?;
        let l = g.mul_c(l, k.smoothing - 1.0)?;
        let d = row_gradient(g, &k, x, c.grad)?;
        let d = g.mul(l, d)?;
        let dtype = g.dtype(target);
        out.push(Some(g.cast(d, dtype)?));
    }
    Ok(out)
}

/// The gradient that reaches each row of probabilities: (..., 1), or a scalar for all.
fn row_gradient(g: &mut Graph, k: &Classes, logits: NodeId, grad: NodeId) -> Result<NodeId> {
    let d = g.widen(grad)?;
    if k.how == NONE {
        return g.unsqueeze(d, k.last);
    }
    let rows = g.shape(logits).remove(k.last);
    if k.how == SUM { Ok(d) } else { g.mul_c(d, share(k.how, rows)) }
}

/// Inputs: logits, target, gradient of the loss; `attrs` as `cross_entropy`. (softmax - target) times the row's gradient.
pub static CROSS_ENTROPY_BACKWARD: Op = Op {
    name: "cross_entropy_backward",
    class: Class::Fused(|g, x, attrs| {
        let c = Classes::of(g.shape(x[0]), attrs);
        g.island(x[0], |g, logits| {
            let (_, e) = norm::shifted_exp(g, logits, c.last)?;
            let s = g.sum(e, &[c.last], true)?;
            let p = norm::divide_row(g, e, s)?;
            if c.probabilities {
                let t = g.widen(x[1])?;
                let t = c.smooth(g, t)?;
                let mass = g.sum(t, &[c.last], true)?;
                let p = g.mul(p, mass)?;
                let d = g.sub(p, t)?;
                let coef = row_gradient(g, &c, logits, x[2])?;
                return g.mul(d, coef);
            }
            let hit = index::one_hot(g, x[1], c.n)?;
            let off = c.smoothing / c.n as f64;
            let (on, off) = (g.constant_like(1.0 - c.smoothing + off, p), g.constant_like(off, p));
            let t = g.where_(hit, on, off)?;
            let d = g.sub(p, t)?;
            let mut coef = g.widen(x[2])?;
            if c.how == MEAN {
                let dtype = g.dtype(coef);
                let count = c.count(g, x[1], dtype)?;
                coef = g.div(coef, count)?;
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

/// Inputs: log-probabilities, target; `attrs` as [`Classes`].
pub static NLL_LOSS: Op = Op {
    name: "nll_loss",
    sig: "logp: tensor, target: tensor, *, ignore_index: int = -100, reduction: 'mean'|'sum'|'none' = 'mean'",
    doc: "logp (..., C), target (...) int -> scalar, or (...) with reduction = \"none\": minus the log-probability of the\n\
          target, for logp from log_softmax; the classes are the last dim. Ids equal to ignore_index count for nothing, and\n\
          \"mean\" divides by the number of ids that count; any other id outside 0 to C - 1 makes its loss NaN.",
    class: Class::Fused(|g, x, attrs| {
        let c = Classes::of(g.shape(x[0]), attrs);
        g.island(x[0], |g, logp| {
            let rows = c.pick(g, logp, x[1])?;
            let rows = g.neg(rows)?;
            let rows = c.guard(g, rows, x[1])?;
            c.reduce(g, rows, x[1])
        })
        .map(one)
    }),
    infer: per_row,
    call: Some(|g, a| {
        let x = logits_of(g, a)?;
        let target = class_ids(g, "nll_loss", x, a.tensor(1)?)?;
        g.push(&NLL_LOSS, &[x, target], &[0, reduction(a, 3), a.int(2)?, bits(0.0)]).map(one)
    }),
    samples: &[
        "f(4,5), i(5;4)",
        "f(2,3,5), i(5;2,3), reduction='none'",
        "f(4,5), i(5;4), reduction='sum'",
        "f(4,5), i(5;4), ignore_index=2",
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

/// x and target of one float dtype and shape; a number or scalar target fits any x.
fn pair(g: &mut Graph, a: &Args) -> Result<(NodeId, NodeId)> {
    let x = g.to_float(a.tensor(0)?)?;
    let dtype = g.dtype(x);
    let t = a.operand(g, 1, dtype)?;
    let (sx, st) = (g.shape(x), g.shape(t));
    if sx != st && !st.is_scalar() {
        let e =
            Error::shape(a.op.name, format!("x {sx} and target {st} must have the same shape; they are not broadcast"));
        return Err(if sx.numel() == st.numel() { e.hint("bring the target to it with y:reshape") } else { e });
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

/// d^2 / 2 times `inner` where |d| is below `edge`, |d| times `outer` less half the edge beyond.
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
          Shapes must be equal: nothing is broadcast. f32 inside for 16-bit floats.",
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

/// The gradient that reaches each element of a loss over pairs: of x's shape, or a scalar for all.
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
          probabilities. Logarithms are cut at -100, as in PyTorch. bce_with_logits is the accurate form.",
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
          sum by the size of dim 0, which is the divergence proper; \"mean\" by the number of elements, as in PyTorch.",
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
                // log(1) in its place: neither the value nor the gradient sees log(0).
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
             hint: bring the target to it with y:reshape"
        );
    }
}
