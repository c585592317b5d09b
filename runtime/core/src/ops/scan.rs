//! Defines cumulative sums and products (scans).
//!
//! These are library routines: elements are added in order along the axis (16-bit floats accumulate in f32 and are
//! rounded at each store), so results do not depend on threads.

use super::{Class, Grad, Op, create, one};
use crate::DType;
use crate::amp::Amp;
use crate::error::Result;
use crate::graph::{Graph, NodeId};
use smallvec::smallvec;

pub static OPS: &[&Op] = &[&CUMSUM, &CUMPROD];

const SAMPLES: &[&str] = &["f(2,3), 1", "f(2,3,4), 1", "f(5), 0", "f(3,0), 1", "f(70,3), 0", "i(4;5), -1"];

fn record(g: &mut Graph, a: &super::Args) -> Result<super::Out> {
    let x = a.tensor(0)?;
    let at = g.shape(x).axis(a.op.name, a.int(1)?)?;
    let dtype = g.dtype(x).sum();
    let x = g.cast(x, dtype)?;
    g.push(a.op, &[x], &[at as i64]).map(one)
}

/// Running sum from the end of axis `at`.
fn from_the_end(g: &mut Graph, x: NodeId, at: usize) -> Result<NodeId> {
    let y = g.flip(x, at)?;
    let y = g.push(&CUMSUM, &[y], &[at as i64])?;
    g.flip(y, at)
}

/// `attrs`: [axis].
pub static CUMSUM: Op = Op {
    name: "cumsum",
    sig: "x: tensor, dim: int",
    doc: "x (..., N, ...) -> (..., N, ...): element i is the sum of elements 0 to i along `dim`. Integers and bools sum in\n\
          i64.",
    results: crate::ops::Results::One,
    shard: Some(crate::sharding::linear_along_other_dims),
    class: Class::Library,
    infer: create::same,
    call: Some(record),
    grad: Grad::Rule(|g, c| Ok(smallvec![Some(from_the_end(g, c.grad, c.attr(0))?)])),
    amp: Amp::Full,
    flops: None,
    samples: SAMPLES,
    smooth: true,
    ..Op::BASE
};

/// `attrs`: [axis].
pub static CUMPROD: Op = Op {
    name: "cumprod",
    sig: "x: tensor, dim: int",
    doc: "x (..., N, ...) -> (..., N, ...): element i is the product of elements 0 to i along `dim`. Integers and bools\n\
          multiply in i64. The second derivative is exact where no element is 0, the first everywhere.",
    results: crate::ops::Results::One,
    shard: Some(crate::sharding::along_other_dims),
    class: Class::Library,
    infer: create::same,
    call: Some(record),
    grad: Grad::Rule(|g, c| {
        // Products are zero from the first zero on. Up to it, one division suffices; at it, products without it are
        // needed.
        let (x, at) = (c.x(0), c.attrs);
        let (zero, one) = (g.constant_like(0.0, x), g.constant_like(1.0, x));
        let is_zero = g.eq(x, zero)?;
        let hits = g.cast(is_zero, DType::I64)?;
        let count = g.push(&CUMSUM, &[hits], at)?;
        let single = g.constant(1.0, DType::I64);
        let first = g.eq(count, single)?;
        let first = g.logical_and(is_zero, first)?;
        let without = g.where_(first, one, x)?;
        let without = g.push(&CUMPROD, &[without], at)?;
        let d = g.mul(c.grad, without)?;
        let of_first = from_the_end(g, d, c.attr(0))?;
        let d = g.mul(c.grad, c.out)?;
        let d = from_the_end(g, d, c.attr(0))?;
        let safe = g.where_(is_zero, one, x)?;
        let d = g.div(d, safe)?;
        Ok(smallvec![Some(g.where_(first, of_first, d)?)])
    }),
    amp: Amp::Full,
    flops: None,
    samples: &["p(2,3), 1", "p(2,3,4), 1", "p(5), 0", "p(3,0), 1", "i(4;5), -1"],
    smooth: true,
    ..Op::BASE
};
