//! Defines softmax and the normalisations: fused nodes that compute in f32 or wider.
//!
//! Statistics and arithmetic are in f32 for 16-bit inputs (f64 for f64), variances are two-pass, and the result is
//! rounded once. Backward rules are separate fused nodes, in the form of one pass over a row with two sums. They start
//! from the input (for softmax, from the output) and recompute the statistics instead of keeping them.

mod batch;
mod group;
mod softmax;
mod trailing;

pub use batch::{BATCH_NORM, BATCH_NORM_BACKWARD, BATCH_NORM_TRAIN};
pub use group::GROUP_NORM;
pub use softmax::{LOG_SOFTMAX, LOG_SOFTMAX_BACKWARD, SOFTMAX, SOFTMAX_BACKWARD};
pub(super) use softmax::{divide_row, shifted_exp};
pub use trailing::{LAYER_NORM, LAYER_NORM_BACKWARD, RMS_NORM, RMS_NORM_BACKWARD};

use super::{Class, Grad, Op, bits, create, one, real};
use crate::amp::Amp;
use crate::error::{Error, Result};
use crate::graph::{Infer, Meta};
use smallvec::SmallVec;
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
