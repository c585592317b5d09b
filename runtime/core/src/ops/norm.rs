//! Defines softmax and the normalisations: fused nodes that compute in f32 or wider.
//!
//! Statistics and arithmetic are in f32 for 16-bit inputs (f64 for f64), variances are two-pass, and the result is
//! rounded once. Backward rules are separate fused nodes, in the form of one pass over a row with two sums. They start
//! from the input (for softmax, from the output) and recompute the statistics instead of keeping them.

use super::{Args, Class, Grad, Op, Out, bits, create, movement, one, out_of, real};
use crate::amp::Amp;
use crate::error::{Error, Result};
use crate::graph::{Graph, Infer, Meta, NodeId};
use crate::shape::Dims;
use crate::{DType, Shape};
use smallvec::{SmallVec, smallvec};

pub static OPS: &[&Op] = &[
    &SOFTMAX,
    &SOFTMAX_BACKWARD,
    &LOG_SOFTMAX,
    &LOG_SOFTMAX_BACKWARD,
    &LAYER_NORM,
    &LAYER_NORM_BACKWARD,
    &RMS_NORM,
    &RMS_NORM_BACKWARD,
    &GROUP_NORM,
    &BATCH_NORM,
    &BATCH_NORM_TRAIN,
    &BATCH_NORM_BACKWARD,
    &NORMALIZE,
];

type Axes = SmallVec<[usize; 8]>;

fn float_like(i: &Infer) -> Result<Meta> {
    i.float(0)?;
    create::same(i)
}

const FUSED: Op = Op { infer: float_like, grad: Grad::Expand, amp: Amp::Full, smooth: true, ..Op::BASE };

// ---- softmax -----------------------------------------------------------------------------------------------------

/// Returns x minus its maximum along `at`, and the exponential of that.
pub(super) fn shifted_exp(g: &mut Graph, x: NodeId, at: usize) -> Result<(NodeId, NodeId)> {
    let m = g.max(x, &[at], true)?;
    let m = movement::detach(g, m)?;
    let d = g.sub(x, m)?;
    Ok((d, g.exp(d)?))
}

/// Divides `x` by one number `s` per row, as a product with 1 / s: on a CPU, a division per element would cost more
/// than the rest of a softmax. Both roundings together stay below 1.5 units in the last place.
pub(super) fn divide_row(g: &mut Graph, x: NodeId, s: NodeId) -> Result<NodeId> {
    let inverse = g.recip(s)?;
    g.mul(x, inverse)
}

fn along(g: &mut Graph, a: &Args) -> Result<Out> {
    let x = g.to_float(a.tensor(0)?)?;
    let at = g.shape(x).axis(a.op.name, a.int(1)?)?;
    g.push(a.op, &[x], &[at as i64]).map(one)
}

const ROWS: &[&str] =
    &["f(2,3), -1", "f(2,3,4), 1", "f(5), 0", "f(3,0), 1", "f(0,3), 1", "f(4,70), -1", "f(70,4), 0", "f(4,1), -1"];

/// `attrs`: [axis].
pub static SOFTMAX: Op = Op {
    name: "softmax",
    sig: "x: tensor, dim: int = -1",
    doc: "x (..., C, ...) -> (..., C, ...): exp(x) / sum(exp(x)) along `dim`, without overflow. Integers are converted to\n\
          f32. A row of -inf gives NaN.",
    class: Class::Fused(|g, x, attrs| {
        g.island(x[0], |g, x| {
            let at = attrs[0] as usize;
            let (_, e) = shifted_exp(g, x, at)?;
            let s = g.sum(e, &[at], true)?;
            divide_row(g, e, s)
        })
        .map(one)
    }),
    call: Some(along),
    grad: Grad::Rule(|g, c| Ok(smallvec![Some(g.push(&SOFTMAX_BACKWARD, &[c.out, c.grad], c.attrs)?)])),
    samples: ROWS,
    ..FUSED
};

/// y = softmax(x), gradient g -> y (g - sum(g y)). `attrs`: [axis].
pub static SOFTMAX_BACKWARD: Op = Op {
    name: "softmax_backward",
    class: Class::Fused(|g, x, attrs| {
        let d = g.widen(x[1])?;
        g.island(x[0], |g, y| {
            let p = g.mul(d, y)?;
            let s = g.sum(p, &[attrs[0] as usize], true)?;
            let d = g.sub(d, s)?;
            g.mul(y, d)
        })
        .map(one)
    }),
    ..FUSED
};

/// `attrs`: [axis].
pub static LOG_SOFTMAX: Op = Op {
    name: "log_softmax",
    sig: "x: tensor, dim: int = -1",
    doc: "x (..., C, ...) -> (..., C, ...): x - log(sum(exp(x))) along `dim`, without overflow. Integers are converted to f32.",
    class: Class::Fused(|g, x, attrs| {
        g.island(x[0], |g, x| {
            let at = attrs[0] as usize;
            let (d, e) = shifted_exp(g, x, at)?;
            let s = g.sum(e, &[at], true)?;
            let l = g.log(s)?;
            g.sub(d, l)
        })
        .map(one)
    }),
    call: Some(along),
    grad: Grad::Rule(|g, c| Ok(smallvec![Some(g.push(&LOG_SOFTMAX_BACKWARD, &[c.out, c.grad], c.attrs)?)])),
    samples: ROWS,
    ..FUSED
};

/// y = log_softmax(x), gradient g -> g - exp(y) sum(g). `attrs`: [axis].
pub static LOG_SOFTMAX_BACKWARD: Op = Op {
    name: "log_softmax_backward",
    class: Class::Fused(|g, x, attrs| {
        let d = g.widen(x[1])?;
        g.island(x[0], |g, y| {
            let s = g.sum(d, &[attrs[0] as usize], true)?;
            let p = g.exp(y)?;
            let p = g.mul(p, s)?;
            g.sub(d, p)
        })
        .map(one)
    }),
    ..FUSED
};

// ---- layer norm and rms norm -------------------------------------------------------------------------------------

/// `attrs` of the norms over trailing dims: [number of trailing dims, 1 if a weight is given, eps bits, code of the
/// bias's dtype or -1].
struct Trailing {
    axes: Axes,
    lead: Axes,
    count: f64,
    weight: bool,
    eps: f64,
    bias: Option<DType>,
}

impl Trailing {
    fn of(shape: Shape, attrs: &[i64]) -> Trailing {
        let split = shape.rank() - attrs[0] as usize;
        Trailing {
            axes: (split..shape.rank()).collect(),
            lead: (0..split).collect(),
            count: shape.dims()[split..].iter().map(|&d| d as f64).product(),
            weight: attrs[1] != 0,
            eps: real(attrs[2]),
            bias: u8::try_from(attrs[3]).ok().and_then(DType::from_code),
        }
    }

    fn mean(&self, g: &mut Graph, x: NodeId) -> Result<NodeId> {
        let s = g.sum(x, &self.axes, true)?;
        g.mul_c(s, 1.0 / self.count)
    }

    /// 1 / sqrt(mean(d^2) + eps).
    fn inverse_root(&self, g: &mut Graph, d: NodeId) -> Result<NodeId> {
        let v = g.square(d)?;
        let v = self.mean(g, v)?;
        let v = g.add_c(v, self.eps)?;
        g.rsqrt(v)
    }

    /// Returns the row, centred (if `centre`) and scaled, and the scale.
    fn normal(&self, g: &mut Graph, x: NodeId, centre: bool) -> Result<(NodeId, NodeId)> {
        let mut d = x;
        if centre {
            let m = self.mean(g, x)?;
            d = g.sub(x, m)?;
        }
        let r = self.inverse_root(g, d)?;
        Ok((g.mul(d, r)?, r))
    }
}

fn check_weight(g: &Graph, op: &str, what: &str, w: Option<NodeId>, want: &[usize]) -> Result<()> {
    let Some(w) = w else { return Ok(()) };
    let (shape, dtype) = (g.shape(w), g.dtype(w));
    if shape.dims() != want {
        return Err(Error::shape(op, format!("{what} is {shape}, but x needs {}", Dims(want)))
            .hint("the weight's shape is that of the dims that are normalised: the last ones of x, or its channels"));
    }
    if !dtype.is_float() {
        return Err(Error::dtype(op, format!("{what} must be a float tensor, not {dtype}")));
    }
    Ok(())
}

/// Records a norm over trailing dims: those of the weight, else of the bias, else the number in option `dims`.
fn call_trailing(g: &mut Graph, a: &Args, bias: Option<NodeId>, eps: f64, dims: Option<i64>) -> Result<Out> {
    let op = a.op.name;
    let x = g.to_float(a.tensor(0)?)?;
    let weight = a.opt_tensor(1);
    let shape = g.shape(x);
    let affine = weight.or(bias).map(|w| g.shape(w).rank());
    let n = affine.map_or(dims.unwrap_or(1), |n| n as i64);
    if dims.is_some_and(|d| d != n) {
        let message = format!("dims is {}, but the weight has {n} dims", dims.unwrap_or(1));
        return Err(Error::argument(op, message));
    }
    if n < 1 || n > shape.rank() as i64 {
        let message = format!("normalises the last {n} dims, but x is {shape}; there must be 1 to {}", shape.rank());
        return Err(Error::shape(op, message));
    }
    let want = &shape.dims()[shape.rank() - n as usize..];
    check_weight(g, op, "weight", weight, want)?;
    check_weight(g, op, "bias", bias, want)?;
    let mut inputs: SmallVec<[NodeId; 4]> = smallvec![x];
    inputs.extend(weight);
    inputs.extend(bias);
    let code = bias.map_or(-1, |b| g.dtype(b) as i64);
    g.push(a.op, &inputs, &[n, i64::from(weight.is_some()), bits(eps), code]).map(one)
}

fn trailing_forward(g: &mut Graph, x: &[NodeId], attrs: &[i64], centre: bool) -> Result<Out> {
    let t = Trailing::of(g.shape(x[0]), attrs);
    g.island(x[0], |g, w| {
        let (mut y, _) = t.normal(g, w, centre)?;
        if t.weight {
            let weight = g.widen(x[1])?;
            y = g.mul(y, weight)?;
        }
        if t.bias.is_some() {
            let bias = g.widen(x[1 + usize::from(t.weight)])?;
            y = g.add_(y, bias)?;
        }
        Ok(y)
    })
    .map(one)
}

/// dx = r (gw - mean(gw) - xhat mean(gw xhat)), gw = g weight; dweight = sum of g xhat; dbias = sum of g.
fn trailing_backward(g: &mut Graph, x: &[NodeId], attrs: &[i64], centre: bool) -> Result<Out> {
    let t = Trailing::of(g.shape(x[0]), attrs);
    let dtype = g.dtype(x[0]);
    let (w, d) = (g.widen(x[0])?, g.widen(x[1])?);
    let (xhat, r) = t.normal(g, w, centre)?;
    let mut dw = d;
    if t.weight {
        let weight = g.widen(x[2])?;
        dw = g.mul(d, weight)?;
    }
    let p = g.mul(dw, xhat)?;
    let p = t.mean(g, p)?;
    let p = g.mul(xhat, p)?;
    let mut dx = dw;
    if centre {
        let m = t.mean(g, dw)?;
        dx = g.sub(dx, m)?;
    }
    let dx = g.sub(dx, p)?;
    let dx = g.mul(dx, r)?;
    let mut out = one(g.cast(dx, dtype)?);
    if t.weight {
        let dtype = g.dtype(x[2]);
        let p = g.mul(d, xhat)?;
        let p = g.sum(p, &t.lead, false)?;
        out.push(g.cast(p, dtype)?);
    }
    if let Some(dtype) = t.bias {
        let p = g.sum(d, &t.lead, false)?;
        out.push(g.cast(p, dtype)?);
    }
    Ok(out)
}

/// The rule of both norms: the backward node reads x, gradient and weight, and its parts are the gradients.
fn trailing_rule(g: &mut Graph, c: &super::GradCtx, op: &'static Op) -> Result<super::Grads> {
    let shape = g.shape(c.x(0));
    let t = Trailing::of(shape, c.attrs);
    let small = Shape::of(&shape.dims()[t.lead.len()..]);
    let mut inputs: SmallVec<[NodeId; 4]> = smallvec![c.x(0), c.grad];
    let mut parts: SmallVec<[(Shape, DType); 2]> = SmallVec::new();
    if t.weight {
        inputs.push(c.x(1));
        parts.push((small, g.dtype(c.x(1))));
    }
    if let Some(dtype) = t.bias {
        parts.push((small, dtype));
    }
    let main = g.push(op, &inputs, c.attrs)?;
    Ok(out_of(g, main, &parts).into_iter().map(Some).collect())
}

pub static LAYER_NORM: Op = Op {
    name: "layer_norm",
    sig: "x: tensor, weight: tensor?, bias: tensor?, *, eps: float = 1e-5, dims: int?",
    doc: "x (..., C), weight (C), bias (C) -> (..., C): (x - mean) / sqrt(var + eps) * weight + bias, with mean and biased\n\
          variance over the trailing dims of weight; without weight and bias, over the last `dims` dims (default 1).\n\
          Arithmetic is in f32 for 16-bit floats. Ba, Kiros and Hinton, arXiv:1607.06450.",
    class: Class::Fused(|g, x, attrs| trailing_forward(g, x, attrs, true)),
    call: Some(|g, a| call_trailing(g, a, a.opt_tensor(2), a.float(3)?, a.opt_int(4))),
    grad: Grad::Rule(|g, c| trailing_rule(g, c, &LAYER_NORM_BACKWARD)),
    samples: &[
        "f(2,5), f(5), f(5)",
        "f(2,3,4), f(3,4), f(3,4)",
        "f(2,3,4), f(4)",
        "f(2,5)",
        "f(2,3,4), nil, nil, dims=2",
        "f(2,3), nil, f(3)",
        "f(0,3), f(3), f(3)",
        "f(9,70), f(70), f(70), eps=0.1",
        "f(6), f(6), f(6)",
    ],
    ..FUSED
};

/// x, gradient, weight? -> dx, dweight?, dbias?. `attrs` as `layer_norm`.
pub static LAYER_NORM_BACKWARD: Op = Op {
    name: "layer_norm_backward",
    class: Class::Fused(|g, x, attrs| trailing_backward(g, x, attrs, true)),
    ..FUSED
};

pub static RMS_NORM: Op = Op {
    name: "rms_norm",
    sig: "x: tensor, weight: tensor?, *, eps: float = 1e-6, dims: int?",
    doc: "x (..., C), weight (C) -> (..., C): x / sqrt(mean(x^2) + eps) * weight over the trailing dims of weight; without\n\
          weight, over the last `dims` dims (default 1). Arithmetic is in f32 for 16-bit floats. Zhang and Sennrich,\n\
          arXiv:1910.07467.",
    class: Class::Fused(|g, x, attrs| trailing_forward(g, x, attrs, false)),
    call: Some(|g, a| call_trailing(g, a, None, a.float(2)?, a.opt_int(3))),
    grad: Grad::Rule(|g, c| trailing_rule(g, c, &RMS_NORM_BACKWARD)),
    samples: &[
        "f(2,5), f(5)",
        "f(2,3,4), f(3,4)",
        "f(2,5)",
        "f(2,3,4), nil, dims=2",
        "f(0,3), f(3)",
        "f(9,70), f(70), eps=0.1",
        "f(6), f(6)",
    ],
    ..FUSED
};

/// x, gradient, weight? -> dx, dweight?. `attrs` as `layer_norm`.
pub static RMS_NORM_BACKWARD: Op =
    Op { name: "rms_norm_backward", class: Class::Fused(|g, x, attrs| trailing_backward(g, x, attrs, false)), ..FUSED };

// ---- group norm and batch norm -----------------------------------------------------------------------------------

/// Views a tensor of shape (C) as (C, 1, ...) for (N, C, ...) of rank `rank`, in f32 for 16-bit floats.
fn per_channel(g: &mut Graph, w: NodeId, rank: usize) -> Result<NodeId> {
    let w = g.widen(w)?;
    let mut dims: Axes = smallvec![1; rank - 1];
    dims[0] = g.shape(w).numel();
    g.reshape(w, &dims)
}

/// All axes but 1.
fn all_but_channel(rank: usize) -> Axes {
    (0..rank).filter(|&a| a != 1).collect()
}

fn channels(g: &Graph, op: &str, x: NodeId) -> Result<usize> {
    let shape = g.shape(x);
    if shape.rank() < 2 {
        return Err(Error::shape(op, format!("needs x (N, C, ...), not shape {shape}")));
    }
    Ok(shape.dims()[1])
}

/// (N, C, ...) as (N, groups, rest).
fn grouped(g: &mut Graph, x: NodeId, groups: usize) -> Result<NodeId> {
    let shape = g.shape(x);
    let rest: usize = shape.dims()[1..].iter().product();
    g.reshape(x, &[shape.dims()[0], groups, rest / groups])
}

/// `layer_norm` attributes for rows without weight or bias.
fn plain(eps: i64) -> [i64; 4] {
    [1, 0, eps, -1]
}

/// Inputs: x, weight?, bias?; `attrs`: [groups, 1 if weight, 1 if bias, eps bits].
pub static GROUP_NORM: Op = Op {
    name: "group_norm",
    sig: "x: tensor, groups: int, weight: tensor?, bias: tensor?, *, eps: float = 1e-5",
    doc: "x (N, C, ...), weight (C), bias (C) -> (N, C, ...): each of `groups` groups of adjacent channels normalised to\n\
          mean 0 and variance 1 per sample, then scaled and shifted per channel. Arithmetic is in f32 for 16-bit floats.\n\
          Wu and He, arXiv:1803.08494.",
    class: Class::Fused(|g, x, attrs| {
        let shape = g.shape(x[0]);
        g.island(x[0], |g, w| {
            let rows = grouped(g, w, attrs[0] as usize)?;
            let y = g.push(&LAYER_NORM, &[rows], &plain(attrs[3]))?;
            let mut y = movement::reshape(g, y, shape)?;
            if attrs[1] != 0 {
                let weight = per_channel(g, x[1], shape.rank())?;
                y = g.mul(y, weight)?;
            }
            if attrs[2] != 0 {
                let bias = per_channel(g, x[1 + attrs[1] as usize], shape.rank())?;
                y = g.add_(y, bias)?;
            }
            Ok(y)
        })
        .map(one)
    }),
    call: Some(|g, a| {
        let x = g.to_float(a.tensor(0)?)?;
        let (c, groups) = (channels(g, "group_norm", x)?, a.int(1)?);
        if groups < 1 || !c.is_multiple_of(groups as usize) {
            return Err(Error::argument(
                "group_norm",
                format!("{c} channels cannot be split into {groups} equal groups"),
            ));
        }
        let (weight, bias) = (a.opt_tensor(2), a.opt_tensor(3));
        check_weight(g, "group_norm", "weight", weight, &[c])?;
        check_weight(g, "group_norm", "bias", bias, &[c])?;
        let inputs: SmallVec<[NodeId; 4]> = [Some(x), weight, bias].into_iter().flatten().collect();
        let given = |t: Option<NodeId>| i64::from(t.is_some());
        g.push(&GROUP_NORM, &inputs, &[groups, given(weight), given(bias), bits(a.float(4)?)]).map(one)
    }),
    grad: Grad::Rule(|g, c| {
        let (x, shape) = (c.x(0), g.shape(c.x(0)));
        let others = all_but_channel(shape.rank());
        let d = g.widen(c.grad)?;
        let rows = grouped(g, x, c.attr(0))?;
        let mut dy = d;
        if c.attrs[1] != 0 {
            let weight = per_channel(g, c.x(1), shape.rank())?;
            dy = g.mul(d, weight)?;
        }
        let dy = grouped(g, dy, c.attr(0))?;
        let dx = g.push(&LAYER_NORM_BACKWARD, &[rows, dy], &plain(c.attrs[3]))?;
        let mut out: super::Grads = smallvec![Some(movement::reshape(g, dx, shape)?)];
        if c.attrs[1] != 0 {
            let wide = g.widen(rows)?;
            let xhat = g.push(&LAYER_NORM, &[wide], &plain(c.attrs[3]))?;
            let xhat = movement::reshape(g, xhat, shape)?;
            let p = g.mul(d, xhat)?;
            let p = g.sum(p, &others, false)?;
            let dtype = g.dtype(c.x(1));
            out.push(Some(g.cast(p, dtype)?));
        }
        if c.attrs[2] != 0 {
            let p = g.sum(d, &others, false)?;
            let dtype = g.dtype(c.inputs[c.inputs.len() - 1]);
            out.push(Some(g.cast(p, dtype)?));
        }
        Ok(out)
    }),
    samples: &[
        "f(2,4,3), 2, f(4), f(4)",
        "f(2,4,3,2), 4, f(4), f(4)",
        "f(2,4,3), 1",
        "f(3,6), 3, f(6)",
        "f(2,4,3), 2, nil, f(4)",
        "f(0,4,3), 2, f(4), f(4)",
    ],
    ..FUSED
};

/// Inputs: x, mean, var, weight?, bias?; `attrs`: [1 if weight, 1 if bias, eps bits].
pub static BATCH_NORM: Op = Op {
    name: "batch_norm",
    sig: "x: tensor, mean: tensor, var: tensor, weight: tensor?, bias: tensor?, *, eps: float = 1e-5",
    doc: "x (N, C, ...), mean (C), var (C), weight (C), bias (C) -> (N, C, ...): (x - mean) / sqrt(var + eps) * weight + bias\n\
          per channel, with the given statistics: running ones, or those of the batch, through which gradients flow.\n\
          Arithmetic is in f32 for 16-bit floats. Ioffe and Szegedy, arXiv:1502.03167.",
    class: Class::Fused(|g, x, attrs| {
        let rank = g.shape(x[0]).rank();
        g.island(x[0], |g, w| {
            let (mean, var) = (per_channel(g, x[1], rank)?, per_channel(g, x[2], rank)?);
            let r = g.add_c(var, real(attrs[2]))?;
            let r = g.rsqrt(r)?;
            let y = g.sub(w, mean)?;
            let mut y = g.mul(y, r)?;
            if attrs[0] != 0 {
                let weight = per_channel(g, x[3], rank)?;
                y = g.mul(y, weight)?;
            }
            if attrs[1] != 0 {
                let bias = per_channel(g, x[3 + attrs[0] as usize], rank)?;
                y = g.add_(y, bias)?;
            }
            Ok(y)
        })
        .map(one)
    }),
    call: Some(|g, a| {
        let x = g.to_float(a.tensor(0)?)?;
        let c = channels(g, "batch_norm", x)?;
        let mut inputs: SmallVec<[NodeId; 4]> = smallvec![x];
        for (i, what) in [(1, "mean"), (2, "var"), (3, "weight"), (4, "bias")] {
            check_weight(g, "batch_norm", what, a.opt_tensor(i), &[c])?;
            inputs.extend(if i < 3 { Some(a.tensor(i)?) } else { a.opt_tensor(i) });
        }
        let given = |i: usize| i64::from(!a.is_none(i));
        g.push(&BATCH_NORM, &inputs, &[given(3), given(4), bits(a.float(5)?)]).map(one)
    }),
    samples: &[
        "f(2,3,4), f(3), p(3), f(3), f(3)",
        "f(4,3), f(3), p(3)",
        "f(2,3,2,2), f(3), p(3), f(3)",
        "f(2,3,4), f(3), p(3), nil, f(3)",
        "f(0,3,4), f(3), p(3), f(3), f(3)",
    ],
    amp: Amp::Keep,
    ..FUSED
};

/// What `batch_norm_train` and its backward have in common.
struct Batch {
    weight: bool,
    bias: bool,
    eps: f64,
    rank: usize,
    /// Elements per channel.
    count: f64,
    others: Axes,
}

impl Batch {
    /// `attrs`: [1 if weight, 1 if bias, eps bits].
    fn of(x: Shape, attrs: &[i64]) -> Batch {
        let (rank, c) = (x.rank(), x.dims()[1]);
        let count = x.numel() as f64 / c.max(1) as f64;
        Batch {
            weight: attrs[0] != 0,
            bias: attrs[1] != 0,
            eps: real(attrs[2]),
            rank,
            count,
            others: all_but_channel(rank),
        }
    }

    fn sum(&self, g: &mut Graph, x: NodeId) -> Result<NodeId> {
        g.sum(x, &self.others, false)
    }

    fn mean(&self, g: &mut Graph, x: NodeId) -> Result<NodeId> {
        let s = self.sum(g, x)?;
        g.mul_c(s, 1.0 / self.count)
    }

    /// Broadcasts (C) against x.
    fn spread(&self, g: &mut Graph, w: NodeId) -> Result<NodeId> {
        per_channel(g, w, self.rank)
    }

    /// Computes the mean and biased variance of each channel of `x`, which is `w` in its compute type, in one pass:
    /// sums of the differences from one element of the channel and of their squares, which do not cancel unless that
    /// element is far from all others.
    fn statistics(&self, g: &mut Graph, x: NodeId, w: NodeId) -> Result<(NodeId, NodeId)> {
        let shape = g.shape(x);
        if shape.numel() == 0 {
            let mean = self.mean(g, w)?;
            return Ok((mean, mean));
        }
        // From the last axis to the samples: devices that have some of these send each other what is left, not all of x.
        let mut near = x;
        for &axis in self.others.iter().rev() {
            let middle = shape.dims()[axis] / 2;
            near = g.slice(near, axis, middle, middle + 1, 1)?;
        }
        // Expand before widening: both then fuse into the readers.
        let k = g.expand(near, shape)?;
        let k = g.widen(k)?;
        let d = g.sub(w, k)?;
        let square = g.square(d)?;
        let (d, square) = (self.mean(g, d)?, self.mean(g, square)?);
        let near = g.reshape(near, &shape.dims()[1..2])?;
        let near = g.widen(near)?;
        let mean = g.add_(near, d)?;
        let d = g.square(d)?;
        let var = g.sub(square, d)?;
        Ok((mean, g.maximum_c(var, 0.0)?))
    }

    fn inverse_root(&self, g: &mut Graph, var: NodeId) -> Result<NodeId> {
        let v = g.add_c(var, self.eps)?;
        g.rsqrt(v)
    }
}

/// Adds the gradient of the batch statistics, which are outputs too: mean and variance.
fn through_statistics(
    g: &mut Graph,
    c: &super::GradCtx,
    b: &Batch,
    mean: NodeId,
    dmean: Option<NodeId>,
    dvar: Option<NodeId>,
) -> Result<Option<NodeId>> {
    let mut out = None;
    if let Some(d) = dmean {
        let d = g.mul_c(d, 1.0 / b.count)?;
        let d = b.spread(g, d)?;
        out = Some(g.expand(d, g.shape(c.x(0)))?);
    }
    if let Some(d) = dvar {
        let d = g.mul_c(d, 2.0 / b.count)?;
        let (d, m) = (b.spread(g, d)?, b.spread(g, mean)?);
        let x = g.widen(c.x(0))?;
        let x = g.sub(x, m)?;
        let d = g.mul(x, d)?;
        out = Some(match out {
            Some(other) => g.add_(other, d)?,
            None => d,
        });
    }
    Ok(out)
}

/// Inputs: x, weight?, bias? -> y, mean, var; `attrs` as [`Batch`] and the dtype of the bias.
pub static BATCH_NORM_TRAIN: Op = Op {
    name: "batch_norm_train",
    sig: "x: tensor, weight: tensor?, bias: tensor?, *, eps: float = 1e-5",
    doc: "x (N, C, ...), weight (C), bias (C) -> y (N, C, ...), mean (C), var (C): batch_norm with the mean and the biased variance\n\
          of the batch itself, which are also returned, in f32 for 16-bit floats. Gradients flow through all three.\n\
          Arithmetic is in f32 for 16-bit floats. Ioffe and Szegedy, arXiv:1502.03167.",
    results: crate::ops::Results::Named(&["y", "mean", "var"]),
    class: Class::Fused(|g, x, attrs| {
        let b = Batch::of(g.shape(x[0]), attrs);
        let dtype = g.dtype(x[0]);
        let w = g.widen(x[0])?;
        let (mean, var) = b.statistics(g, x[0], w)?;
        let r = b.inverse_root(g, var)?;
        let (m, r) = (b.spread(g, mean)?, b.spread(g, r)?);
        let y = g.sub(w, m)?;
        let mut y = g.mul(y, r)?;
        if b.weight {
            let weight = b.spread(g, x[1])?;
            y = g.mul(y, weight)?;
        }
        if b.bias {
            let bias = b.spread(g, x[1 + usize::from(b.weight)])?;
            y = g.add_(y, bias)?;
        }
        Ok(smallvec![g.cast(y, dtype)?, mean, var])
    }),
    call: Some(|g, a| {
        let x = g.to_float(a.tensor(0)?)?;
        let c = channels(g, "batch_norm_train", x)?;
        let mut inputs: SmallVec<[NodeId; 4]> = smallvec![x];
        for (i, what) in [(1, "weight"), (2, "bias")] {
            check_weight(g, "batch_norm_train", what, a.opt_tensor(i), &[c])?;
            inputs.extend(a.opt_tensor(i));
        }
        let given = |i: usize| i64::from(!a.is_none(i));
        let y = g.push(&BATCH_NORM_TRAIN, &inputs, &[given(1), given(2), bits(a.float(3)?)])?;
        let wide = g.dtype(x).compute();
        Ok(out_of(g, y, &[(Shape::of(&[c]), wide), (Shape::of(&[c]), wide)]))
    }),
    grad: Grad::Rule(|g, c| {
        let shape = g.shape(c.x(0));
        let b = Batch::of(shape, c.attrs);
        let channel = Shape::of(&shape.dims()[1..2]);
        let wide = g.dtype(c.x(0)).compute();
        // Records the node again: the planner merges the two, or recomputes it if the first has been freed.
        let again = g.push(&BATCH_NORM_TRAIN, c.inputs, c.attrs)?;
        let parts = out_of(g, again, &[(channel, wide), (channel, wide)]);
        let mut inputs: SmallVec<[NodeId; 5]> = smallvec![c.x(0), c.grad, parts[1], parts[2]];
        let mut small: SmallVec<[(Shape, DType); 2]> = SmallVec::new();
        if b.weight {
            inputs.push(c.x(1));
            small.push((channel, g.dtype(c.x(1))));
        }
        let mut attrs: SmallVec<[i64; 4]> = c.attrs.into();
        if b.bias {
            let dtype = g.dtype(c.x(1 + usize::from(b.weight)));
            small.push((channel, dtype));
            attrs.push(dtype as i64);
        }
        let main = g.push(&BATCH_NORM_BACKWARD, &inputs, &attrs)?;
        let mut out: super::Grads = out_of(g, main, &small).into_iter().map(Some).collect();
        let of = |k: usize| c.grads.get(k).copied().flatten();
        if let Some(more) = through_statistics(g, c, &b, parts[1], of(1), of(2))? {
            let dtype = g.dtype(c.x(0));
            let more = g.cast(more, dtype)?;
            out[0] = Some(g.add_(main, more)?);
        }
        Ok(out)
    }),
    samples: &[
        "f(2,3,4), f(3), f(3)",
        "f(4,3)",
        "f(2,3,2,2), f(3)",
        "f(3,2,4,5), f(2), f(2), eps=0.1",
        "f(2,3,4), nil, f(3)",
        "f(1,3,5), f(3), f(3)",
    ],
    amp: Amp::Keep,
    ..FUSED
};

/// x, gradient, mean, var, weight? -> dx, dweight?, dbias?; `attrs` as `batch_norm_train`, with the dtype of the bias.
///
/// dx = weight r (g - mean(g) - xhat mean(g xhat)), xhat = (x - mean) r; dweight = sum of g xhat; dbias = sum of g.
pub static BATCH_NORM_BACKWARD: Op = Op {
    name: "batch_norm_backward",
    class: Class::Fused(|g, x, attrs| {
        let b = Batch::of(g.shape(x[0]), attrs);
        let dtype = g.dtype(x[0]);
        let (w, d) = (g.widen(x[0])?, g.widen(x[1])?);
        let r = b.inverse_root(g, x[3])?;
        let m = b.spread(g, x[2])?;
        let centred = g.sub(w, m)?;
        let p = g.mul(d, centred)?;
        let (sum, product) = (b.sum(g, d)?, b.sum(g, p)?);
        // The gradient of the weight has one factor of r, from xhat.
        let dweight = g.mul(product, r)?;
        let mean = g.mul_c(sum, 1.0 / b.count)?;
        let slope = g.mul(dweight, r)?;
        let slope = g.mul_c(slope, 1.0 / b.count)?;
        let scale = match b.weight {
            true => {
                let weight = g.widen(x[4])?;
                g.mul(weight, r)?
            }
            false => r,
        };
        let (mean, slope, scale) = (b.spread(g, mean)?, b.spread(g, slope)?, b.spread(g, scale)?);
        let dx = g.sub(d, mean)?;
        let p = g.mul(centred, slope)?;
        let dx = g.sub(dx, p)?;
        let dx = g.mul(dx, scale)?;
        let mut out = one(g.cast(dx, dtype)?);
        if b.weight {
            let dtype = g.dtype(x[4]);
            out.push(g.cast(dweight, dtype)?);
        }
        if b.bias {
            let Some(dtype) = DType::from_code(attrs[3] as u8) else {
                return Err(Error::dtype("batch_norm_backward", "this is a bug: an unknown dtype"));
            };
            out.push(g.cast(sum, dtype)?);
        }
        Ok(out)
    }),
    ..FUSED
};

/// `attrs`: [axis, eps bits].
pub static NORMALIZE: Op = Op {
    name: "normalize",
    sig: "x: tensor, dim: int = -1, *, eps: float = 1e-12",
    doc: "x (..., C, ...) -> (..., C, ...): x / max(|x|, eps), with |x| the Euclidean norm along `dim`. A row of zeros stays 0.",
    class: Class::Fused(|g, x, attrs| {
        g.island(x[0], |g, x| {
            let s = g.square(x)?;
            let s = g.sum(s, &[attrs[0] as usize], true)?;
            // Squared on both sides, because the square root has no gradient at 0.
            let s = g.maximum_c(s, real(attrs[1]).powi(2))?;
            let r = g.rsqrt(s)?;
            g.mul(x, r)
        })
        .map(one)
    }),
    call: Some(|g, a| {
        let x = g.to_float(a.tensor(0)?)?;
        let at = g.shape(x).axis("normalize", a.int(1)?)?;
        let eps = a.float(2)?;
        if !(1e-18..1e18).contains(&eps) {
            return Err(Error::argument("normalize", format!("eps is {eps}; it must be from 1e-18 to 1e18")));
        }
        g.push(&NORMALIZE, &[x], &[at as i64, bits(eps)]).map(one)
    }),
    samples: &["f(2,3)", "f(2,3,4), 1", "f(5), 0", "f(0,3)", "f(4,70), eps=10"],
    ..FUSED
};
