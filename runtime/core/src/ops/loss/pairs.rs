//! Defines the losses that are functions of the difference of a value and its target.

use super::{FUSED, NONE, reduce, reduction, share};
use crate::error::{Error, Result};
use crate::graph::{Graph, Infer, Meta, NodeId};
use crate::ops::{Args, Class, GradCtx, Op, Out, bits, one, real};
use crate::{DType, Shape};

/// Shape rule of the losses over pairs: `attrs[0]` is the reduction.
pub(super) fn per_element(i: &Infer) -> Result<Meta> {
    i.float(0)?;
    Ok(Meta { shape: if i.attrs[0] == NONE { i.shape(0) } else { Shape::SCALAR }, dtype: i.dtype(0) })
}

pub(super) const PAIR: Op = Op { infer: per_element, ..FUSED };

/// Converts x and target to one float dtype and checks that their shapes are equal; a number or scalar target fits any
/// x.
pub(super) fn pair(g: &mut Graph, a: &Args) -> Result<(NodeId, NodeId)> {
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

pub(super) fn record_pair(g: &mut Graph, a: &Args, attrs: &[i64]) -> Result<Out> {
    let (x, t) = pair(g, a)?;
    g.push(a.op, &[x, t], attrs).map(one)
}

/// A loss that is a function of x - target.
pub(super) fn of_difference(
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
pub(super) fn element_gradient(g: &mut Graph, c: &GradCtx) -> Result<NodeId> {
    let d = g.widen(c.grad)?;
    let scale = share(c.attrs[0], g.shape(c.x(0)));
    if scale == 1.0 { Ok(d) } else { g.mul_c(d, scale) }
}

/// `slope` times the element's gradient, in the dtype and shape of input `i`.
pub(super) fn arrive(g: &mut Graph, c: &GradCtx, i: usize, slope: NodeId, d: NodeId) -> Result<Option<NodeId>> {
    let (shape, dtype) = (g.shape(c.x(i)), g.dtype(c.x(i)));
    let y = g.mul(slope, d)?;
    let y = g.expand(y, g.shape(c.x(0)))?;
    let y = g.sum_to(y, shape)?;
    Ok(Some(g.cast(y, dtype)?))
}
