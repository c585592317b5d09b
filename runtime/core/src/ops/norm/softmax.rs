//! Defines softmax and log-softmax, along one axis.

use super::FUSED;
use crate::error::Result;
use crate::graph::{Graph, NodeId};
use crate::ops::{Args, Class, Grad, Op, Out, movement, one};
use smallvec::smallvec;
/// Returns x minus its maximum along `at`, and the exponential of that.
pub(in crate::ops) fn shifted_exp(g: &mut Graph, x: NodeId, at: usize) -> Result<(NodeId, NodeId)> {
    let m = g.max(x, &[at], true)?;
    let m = movement::detach(g, m)?;
    let d = g.sub(x, m)?;
    Ok((d, g.exp(d)?))
}

/// Divides `x` by one number `s` per row, as a product with 1 / s: on a CPU, a division per element would cost more
/// than the rest of a softmax. Both roundings together stay below 1.5 units in the last place.
pub(in crate::ops) fn divide_row(g: &mut Graph, x: NodeId, s: NodeId) -> Result<NodeId> {
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
