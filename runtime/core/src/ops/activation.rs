//! Defines activation functions: `relu` is a primitive, the others are fused nodes over it.
//!
//! A fused activation computes in f32 for 16-bit inputs and rounds once. Hand-written rules use only the input, so that
//! nothing else is kept for the backward pass. They stay finite where the decomposition's derivative would not (0 times
//! infinity behind a `where`). Integers are converted to f32.

use super::elementwise::{self, MapFn};
use super::{Args, Class, Grad, GradCtx, Grads, Op, Out, bits, movement, one, real};
use crate::error::{Error, Result};
use crate::graph::{Graph, Infer, Meta, NodeId};
use smallvec::smallvec;
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI, LOG2_E};

pub static OPS: &[&Op] = &[
    &RELU,
    &GELU,
    &GELU_BACKWARD,
    &SILU,
    &SOFTPLUS,
    &ELU,
    &SELU,
    &LEAKY_RELU,
    &MISH,
    &HARDSWISH,
    &HARDSIGMOID,
    &RELU6,
    &LOGSIGMOID,
    &SOFTSIGN,
];

const UNARY: &[&str] = &["f(2,3)", "f(0,3)", "f()", "f(2,1,4)"];
const WIDE: &[&str] = &["f(2,3)", "f(0,3)", "f()", "f(17;-6,6)"];

/// Shape rule: a float to a float of the same shape.
fn float_like(i: &Infer) -> Result<Meta> {
    i.float(0)?;
    Ok(i.inputs[0])
}

const FUSED: Op = Op { infer: float_like, grad: Grad::Expand, ..Op::BASE };

fn record(g: &mut Graph, a: &Args, attrs: &[i64]) -> Result<Out> {
    let x = g.to_float(a.tensor(0)?)?;
    g.push(a.op, &[x], attrs).map(one)
}

/// Builds a backward rule from the derivative as a function of x, in f32.
fn chain(g: &mut Graph, c: &GradCtx, slope: impl FnOnce(&mut Graph, NodeId) -> Result<NodeId>) -> Result<Grads> {
    let d = g.widen(c.grad)?;
    let dx = g.island(c.x(0), |g, x| {
        let s = slope(g, x)?;
        g.mul(d, s)
    })?;
    Ok(smallvec![Some(dx)])
}

pub static RELU: Op = Op {
    name: "relu",
    sig: "x: tensor",
    doc: "x (...) -> (...): max(x, 0); NaN stays NaN. The gradient at 0 is 0.",
    class: Class::Map(MapFn::Relu),
    infer: elementwise::infer,
    grad: Grad::Rule(|g, c| {
        let zero = g.constant_like(0.0, c.grad);
        let on = g.gt(c.out, zero)?;
        Ok(smallvec![Some(g.where_(on, c.grad, zero)?)])
    }),
    samples: UNARY,
    ..Op::BASE
};

/// 2 u = 2 sqrt(2/pi) (x + 0.044715 x^3). GELU's tanh form needs (1 + tanh(u)) / 2, which is the sigmoid of 2 u.
const TANH_SCALE: f64 = 2.0 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2;
const TANH_CUBIC: f64 = TANH_SCALE * 0.044715;

/// Returns 2 u log2(e), and x^2.
fn gelu_exponent(g: &mut Graph, x: NodeId) -> Result<(NodeId, NodeId)> {
    let square = g.square(x)?;
    let z = g.mul_c(square, LOG2_E * TANH_CUBIC)?;
    let z = g.add_c(z, LOG2_E * TANH_SCALE)?;
    Ok((g.mul(x, z)?, square))
}

/// The cumulative distribution function of the standard normal distribution at x.
fn normal_cdf(g: &mut Graph, x: NodeId) -> Result<NodeId> {
    let e = g.mul_c(x, FRAC_1_SQRT_2)?;
    let e = g.erf(e)?;
    let e = g.add_c(e, 1.0)?;
    g.mul_c(e, 0.5)
}

/// `attrs`: [1 for the tanh form, else 0].
pub static GELU: Op = Op {
    name: "gelu",
    sig: "x: tensor, *, approximate: 'none'|'tanh' = 'none'",
    doc: "x (...) -> (...): x times the normal distribution function at x; `approximate = \"tanh\"` is the form of GPT-2,\n\
          0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))). Hendrycks and Gimpel, arXiv:1606.08415.",
    class: Class::Fused(|g, x, attrs| {
        let tanh = attrs[0] != 0;
        g.island(x[0], |g, x| {
            let p = match tanh {
                true => {
                    let (z, _) = gelu_exponent(g, x)?;
                    g.sigmoid2(z)?
                }
                false => normal_cdf(g, x)?,
            };
            g.mul(x, p)
        })
        .map(one)
    }),
    call: Some(|g, a| record(g, a, &[i64::from(a.str(1) == "tanh")])),
    grad: Grad::Rule(|g, c| Ok(smallvec![Some(g.push(&GELU_BACKWARD, &[c.x(0), c.grad], c.attrs)?)])),
    samples: &["f(2,3)", "f(0,3)", "f()", "f(17;-6,6)", "f(2,3), approximate='tanh'", "f(17;-6,6), approximate='tanh'"],
    smooth: true,
    ..FUSED
};

/// x (...), gradient (...) -> gradient of x. `attrs` as `gelu`.
pub static GELU_BACKWARD: Op = Op {
    name: "gelu_backward",
    class: Class::Fused(|g, x, attrs| {
        let (d, tanh) = (g.widen(x[1])?, attrs[0] != 0);
        g.island(x[0], |g, x| {
            let s = match tanh {
                true => {
                    let (z, square) = gelu_exponent(g, x)?;
                    let left = g.sigmoid2(z)?;
                    // Not 1 - left: near 1 it has lost the digits that x times the slope of 2 u multiplies.
                    let rest = g.sigmoid2_rest(z)?;
                    let slope = g.mul_c(square, 3.0 * TANH_CUBIC)?;
                    let slope = g.add_c(slope, TANH_SCALE)?;
                    let right = g.mul(left, rest)?;
                    let right = g.mul(right, slope)?;
                    let right = g.mul(x, right)?;
                    g.add_(left, right)?
                }
                false => {
                    let cdf = normal_cdf(g, x)?;
                    let e = g.square(x)?;
                    let e = g.mul_c(e, -0.5)?;
                    let e = g.exp(e)?;
                    let pdf = g.mul_c(e, 0.5 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2)?;
                    let right = g.mul(x, pdf)?;
                    g.add_(cdf, right)?
                }
            };
            g.mul(d, s)
        })
        .map(one)
    }),
    smooth: true,
    ..FUSED
};

pub static SILU: Op = Op {
    name: "silu",
    sig: "x: tensor",
    doc: "x (...) -> (...): x * sigmoid(x), also called swish.",
    class: Class::Fused(|g, x, _| {
        g.island(x[0], |g, x| {
            let s = g.sigmoid(x)?;
            g.mul(x, s)
        })
        .map(one)
    }),
    call: Some(|g, a| record(g, a, &[])),
    grad: Grad::Rule(|g, c| {
        chain(g, c, |g, x| {
            let s = g.sigmoid(x)?;
            let r = g.rsub_c(1.0, s)?;
            let r = g.mul(x, r)?;
            let r = g.add_c(r, 1.0)?;
            g.mul(s, r)
        })
    }),
    samples: WIDE,
    smooth: true,
    ..FUSED
};

/// `attrs`: [beta bits, threshold bits].
pub static SOFTPLUS: Op = Op {
    name: "softplus",
    sig: "x: tensor, beta: float = 1.0, threshold: float = 20.0",
    doc: "x (...) -> (...): log(1 + exp(beta x)) / beta; x itself where beta x > threshold.",
    class: Class::Fused(|g, x, attrs| {
        let (beta, threshold) = (real(attrs[0]), real(attrs[1]));
        g.island(x[0], |g, x| {
            let z = g.mul_c(x, beta)?;
            let limit = g.constant_like(threshold, z);
            let linear = g.gt(z, limit)?;
            let y = g.exp(z)?;
            let y = g.log1p(y)?;
            let y = g.mul_c(y, 1.0 / beta)?;
            g.where_(linear, x, y)
        })
        .map(one)
    }),
    call: Some(|g, a| {
        let (beta, threshold) = (a.float(1)?, a.float(2)?);
        if beta.is_nan() || beta <= 0.0 {
            return Err(Error::argument("softplus", format!("beta is {beta}; it must be above 0")));
        }
        record(g, a, &[bits(beta), bits(threshold)])
    }),
    grad: Grad::Rule(|g, c| {
        let (beta, threshold) = (real(c.attrs[0]), real(c.attrs[1]));
        chain(g, c, |g, x| {
            let z = g.mul_c(x, beta)?;
            let limit = g.constant_like(threshold, z);
            let linear = g.gt(z, limit)?;
            let s = g.sigmoid(z)?;
            let one = g.constant_like(1.0, s);
            g.where_(linear, one, s)
        })
    }),
    samples: &["f(2,3)", "f(0,3)", "f()", "f(17;-6,6)", "f(5), 2.0", "f(9;-30,30), 1.0, 5.0"],
    smooth: true,
    ..FUSED
};

/// alpha (e^min(x, 0) - 1) below 0, otherwise x.
fn elu(g: &mut Graph, x: NodeId, alpha: f64) -> Result<NodeId> {
    let zero = g.constant_like(0.0, x);
    let up = g.gt(x, zero)?;
    let y = g.minimum(x, zero)?;
    let y = g.expm1(y)?;
    let y = g.mul_c(y, alpha)?;
    g.where_(up, x, y)
}

fn elu_slope(g: &mut Graph, x: NodeId, alpha: f64) -> Result<NodeId> {
    let zero = g.constant_like(0.0, x);
    let up = g.gt(x, zero)?;
    let s = g.minimum(x, zero)?;
    let s = g.exp(s)?;
    let s = g.mul_c(s, alpha)?;
    let one = g.constant_like(1.0, s);
    g.where_(up, one, s)
}

/// `attrs`: [alpha bits].
pub static ELU: Op = Op {
    name: "elu",
    sig: "x: tensor, alpha: float = 1.0",
    doc: "x (...) -> (...): x where x > 0, else alpha (exp(x) - 1). The gradient at 0 is alpha.",
    class: Class::Fused(|g, x, attrs| g.island(x[0], |g, x| elu(g, x, real(attrs[0]))).map(one)),
    call: Some(|g, a| {
        let alpha = a.float(1)?;
        record(g, a, &[bits(alpha)])
    }),
    grad: Grad::Rule(|g, c| chain(g, c, |g, x| elu_slope(g, x, real(c.attrs[0])))),
    samples: &["f(2,3)", "f(0,3)", "f()", "f(17;-6,6)", "f(5), 0.5"],
    ..FUSED
};

const SELU_ALPHA: f64 = 1.673_263_242_354_377_2;
const SELU_SCALE: f64 = 1.050_700_987_355_480_5;

pub static SELU: Op = Op {
    name: "selu",
    sig: "x: tensor",
    doc: "x (...) -> (...): 1.0507 * elu(x, 1.67326), the self-normalising unit of Klambauer et al., arXiv:1706.02515.",
    class: Class::Fused(|g, x, _| {
        g.island(x[0], |g, x| {
            let y = elu(g, x, SELU_ALPHA)?;
            g.mul_c(y, SELU_SCALE)
        })
        .map(one)
    }),
    call: Some(|g, a| record(g, a, &[])),
    grad: Grad::Rule(|g, c| {
        chain(g, c, |g, x| {
            let s = elu_slope(g, x, SELU_ALPHA)?;
            g.mul_c(s, SELU_SCALE)
        })
    }),
    samples: WIDE,
    ..FUSED
};

/// `attrs`: [slope bits].
pub static LEAKY_RELU: Op = Op {
    name: "leaky_relu",
    sig: "x: tensor, slope: float = 0.01",
    doc: "x (...) -> (...): x where x > 0, else slope x. The gradient at 0 is slope.",
    class: Class::Fused(|g, x, attrs| {
        g.island(x[0], |g, x| {
            let zero = g.constant_like(0.0, x);
            let up = g.gt(x, zero)?;
            let y = g.mul_c(x, real(attrs[0]))?;
            g.where_(up, x, y)
        })
        .map(one)
    }),
    call: Some(|g, a| {
        let slope = a.float(1)?;
        record(g, a, &[bits(slope)])
    }),
    samples: &["f(2,3)", "f(0,3)", "f()", "f(5), 0.2"],
    ..FUSED
};

/// e = exp(x), clamped where it no longer matters, and w = e (e + 2): tanh(log(1 + e)) = w / (w + 2).
fn mish_parts(g: &mut Graph, x: NodeId) -> Result<(NodeId, NodeId)> {
    let e = g.minimum_c(x, 20.0)?;
    let e = g.exp(e)?;
    let w = g.add_c(e, 2.0)?;
    Ok((e, g.mul(e, w)?))
}

pub static MISH: Op = Op {
    name: "mish",
    sig: "x: tensor",
    doc: "x (...) -> (...): x tanh(log(1 + exp(x))). Misra, arXiv:1908.08681. Computed with one exponential, as\n\
          x w / (w + 2) with w = e^x (e^x + 2).",
    class: Class::Fused(|g, x, _| {
        g.island(x[0], |g, x| {
            let (_, w) = mish_parts(g, x)?;
            let d = g.add_c(w, 2.0)?;
            let t = g.div(w, d)?;
            g.mul(x, t)
        })
        .map(one)
    }),
    call: Some(|g, a| record(g, a, &[])),
    grad: Grad::Rule(|g, c| {
        chain(g, c, |g, x| {
            // t + x t', t = w / (w + 2), t' = 4 e (e + 1) / (w + 2)^2
            let (e, w) = mish_parts(g, x)?;
            let d = g.add_c(w, 2.0)?;
            let t = g.div(w, d)?;
            let up = g.add_c(e, 1.0)?;
            let up = g.mul(e, up)?;
            let up = g.mul_c(up, 4.0)?;
            let up = g.div(up, d)?;
            let up = g.div(up, d)?;
            let up = g.mul(x, up)?;
            g.add_(t, up)
        })
    }),
    samples: WIDE,
    smooth: true,
    ..FUSED
};

/// Whether lo < x < hi.
fn between(g: &mut Graph, x: NodeId, lo: f64, hi: f64) -> Result<NodeId> {
    let (lo, hi) = (g.constant_like(lo, x), g.constant_like(hi, x));
    let (a, b) = (g.gt(x, lo)?, g.lt(x, hi)?);
    g.logical_and(a, b)
}

/// x clamped to [0, 6]; the gradient is 0 at the ends and beyond.
fn relu6(g: &mut Graph, x: NodeId) -> Result<NodeId> {
    let inside = between(g, x, 0.0, 6.0)?;
    let cut = g.maximum_c(x, 0.0)?;
    let cut = g.minimum_c(cut, 6.0)?;
    let cut = movement::detach(g, cut)?;
    g.where_(inside, x, cut)
}

pub static RELU6: Op = Op {
    name: "relu6",
    sig: "x: tensor",
    doc: "x (...) -> (...): min(max(x, 0), 6). The gradient is 0 at 0 and 6 and beyond them.",
    class: Class::Fused(|g, x, _| g.island(x[0], relu6).map(one)),
    call: Some(|g, a| record(g, a, &[])),
    samples: &["f(2,3)", "f(0,3)", "f()", "f(17;-9,9)"],
    ..FUSED
};

pub static HARDSIGMOID: Op = Op {
    name: "hardsigmoid",
    sig: "x: tensor",
    doc: "x (...) -> (...): relu6(x + 3) / 6.",
    class: Class::Fused(|g, x, _| {
        g.island(x[0], |g, x| {
            let y = g.add_c(x, 3.0)?;
            let y = relu6(g, y)?;
            g.mul_c(y, 1.0 / 6.0)
        })
        .map(one)
    }),
    call: Some(|g, a| record(g, a, &[])),
    samples: WIDE,
    ..FUSED
};

pub static HARDSWISH: Op = Op {
    name: "hardswish",
    sig: "x: tensor",
    doc: "x (...) -> (...): x relu6(x + 3) / 6. Howard et al., arXiv:1905.02244.",
    class: Class::Fused(|g, x, _| {
        g.island(x[0], |g, x| {
            let inside = between(g, x, -3.0, 3.0)?;
            let y = g.add_c(x, 3.0)?;
            let y = g.mul(x, y)?;
            let y = g.mul_c(y, 1.0 / 6.0)?;
            let r = g.relu(x)?;
            g.where_(inside, y, r)
        })
        .map(one)
    }),
    call: Some(|g, a| record(g, a, &[])),
    samples: WIDE,
    ..FUSED
};

pub static LOGSIGMOID: Op = Op {
    name: "logsigmoid",
    sig: "x: tensor",
    doc: "x (...) -> (...): log(sigmoid(x)), without overflow: min(x, 0) - log(1 + exp(-|x|)).",
    class: Class::Fused(|g, x, _| {
        g.island(x[0], |g, x| {
            let e = g.abs(x)?;
            let e = g.neg(e)?;
            let e = g.exp(e)?;
            let l = g.log1p(e)?;
            let m = g.minimum_c(x, 0.0)?;
            g.sub(m, l)
        })
        .map(one)
    }),
    call: Some(|g, a| record(g, a, &[])),
    grad: Grad::Rule(|g, c| {
        chain(g, c, |g, x| {
            let n = g.neg(x)?;
            g.sigmoid(n)
        })
    }),
    samples: WIDE,
    smooth: true,
    ..FUSED
};

pub static SOFTSIGN: Op = Op {
    name: "softsign",
    sig: "x: tensor",
    doc: "x (...) -> (...): x / (1 + |x|).",
    class: Class::Fused(|g, x, _| {
        g.island(x[0], |g, x| {
            let d = g.abs(x)?;
            let d = g.add_c(d, 1.0)?;
            g.div(x, d)
        })
        .map(one)
    }),
    call: Some(|g, a| record(g, a, &[])),
    grad: Grad::Rule(|g, c| {
        chain(g, c, |g, x| {
            let d = g.abs(x)?;
            let d = g.add_c(d, 1.0)?;
            let d = g.square(d)?;
            g.recip(d)
        })
    }),
    samples: UNARY,
    ..FUSED
};
