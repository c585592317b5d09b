//! Defines the norms over trailing dims: layer norm (Ba et al., 2016, arXiv:1607.06450) and RMS norm (Zhang and Sennrich, 2019,
//! arXiv:1910.07467).

use super::{Axes, FUSED};
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::ops::{self, Args, Class, Grad, Op, Out, bits, one, out_of, real};
use crate::shape::Dims;
use crate::{DType, Shape};
use smallvec::{SmallVec, smallvec};
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

pub(super) fn check_weight(g: &Graph, op: &str, what: &str, w: Option<NodeId>, want: &[usize]) -> Result<()> {
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
fn trailing_rule(g: &mut Graph, c: &ops::GradCtx, op: &'static Op) -> Result<ops::Grads> {
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
