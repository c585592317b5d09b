//! Defines the elementwise primitives: one table, with one line and one block per op.
//!
//! [`map_fns!`](crate::map_fns) lists every [`MapFn`] with its domain and its value as tokens over `x y z`. The CPU
//! backend instantiates vector loops from the same tokens, so the meaning of an op is defined once. Functions of more
//! than one arithmetic step are compositions in `activation.rs`.

use super::{Class, Grad, GradCtx, Grads, Op, Tolerance, one};
use crate::error::{Error, Result};
use crate::graph::{Graph, Infer, Meta, NodeId, Number};
use crate::ops::Value;
use crate::{DType, Shape};
use smallvec::smallvec;

/// The dtypes on which a function is defined, and the dtype of its result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Domain {
    /// Floats; integers are converted to f32 first.
    Float,
    /// All but bool; bools are converted to i64 first.
    Number,
    /// All dtypes, unchanged.
    Any,
    /// All dtypes to bool.
    Compare,
    /// Bools to bool; others are converted first.
    Logic,
    /// Floats to u8; integers are converted to f32 first.
    Code,
}

/// Calls the macro `$m` with the whole table: `Variant Domain arity |x, y, z| value;`.
///
/// `value` uses methods that each backend defines for its element types (the CPU: `perilune_cpu::math::{Number,
/// Float}`). A `Compare` yields a Rust bool; `Logic` operates on Rust bools.
#[macro_export]
macro_rules! map_fns {
    ($m:ident) => {
        $m! {
            Copy Any 1 |x| x;
            Neg Number 1 |x| x.neg();
            Abs Number 1 |x| x.abs();
            Sign Number 1 |x| x.sign();
            Exp Float 1 |x| x.exp();
            Log Float 1 |x| x.log();
            Log1p Float 1 |x| x.log1p();
            Expm1 Float 1 |x| x.expm1();
            Sqrt Float 1 |x| x.sqrt();
            Rsqrt Float 1 |x| x.rsqrt();
            Reciprocal Float 1 |x| x.recip();
            Sin Float 1 |x| x.sin();
            Cos Float 1 |x| x.cos();
            Tan Float 1 |x| x.tan();
            Tanh Float 1 |x| x.tanh();
            Sigmoid Float 1 |x| x.sigmoid();
            Sigmoid2 Float 1 |x| x.sigmoid2();
            Sigmoid2Rest Float 1 |x| x.neg().sigmoid2();
            Erf Float 1 |x| x.erf();
            Floor Float 1 |x| x.floor();
            Ceil Float 1 |x| x.ceil();
            Round Float 1 |x| x.round();
            Fp8E4m3 Code 1 |x| x.fp8_e4m3();
            Fp8E5m2 Code 1 |x| x.fp8_e5m2();
            Fp8E4m3Value Float 1 |x| x.fp8_e4m3_value();
            Fp8E5m2Value Float 1 |x| x.fp8_e5m2_value();
            Relu Number 1 |x| x.relu();
            Add Number 2 |x, y| x.add(y);
            Sub Number 2 |x, y| x.sub(y);
            Mul Number 2 |x, y| x.mul(y);
            Div Float 2 |x, y| x.div(y);
            FloorDiv Number 2 |x, y| x.div_floor(y);
            Remainder Number 2 |x, y| x.rem_floor(y);
            Pow Number 2 |x, y| x.pow(y);
            Maximum Number 2 |x, y| x.maximum(y);
            Minimum Number 2 |x, y| x.minimum(y);
            Eq Compare 2 |x, y| x == y;
            Ne Compare 2 |x, y| x != y;
            Lt Compare 2 |x, y| x < y;
            Le Compare 2 |x, y| x <= y;
            Gt Compare 2 |x, y| x > y;
            Ge Compare 2 |x, y| x >= y;
            IsNan Compare 1 |x| x.is_nan();
            IsInf Compare 1 |x| x.is_inf();
            LogicalAnd Logic 2 |x, y| x & y;
            LogicalOr Logic 2 |x, y| x | y;
            LogicalXor Logic 2 |x, y| x ^ y;
            LogicalNot Logic 1 |x| !x;
        }
    };
}

macro_rules! define_map_fn {
    ($($v:ident $d:ident $n:literal |$($a:ident),*| $body:expr;)*) => {
        /// An elementwise function. `Where` (bool, T, T) is not in the table, because its inputs differ in dtype.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
        pub enum MapFn { $($v,)* Where }

        impl MapFn {
            pub const ALL: &[MapFn] = &[$(MapFn::$v,)* MapFn::Where];

            pub fn domain(self) -> Domain {
                match self { $(MapFn::$v => Domain::$d,)* MapFn::Where => Domain::Any }
            }

            pub fn arity(self) -> usize {
                match self { $(MapFn::$v => $n,)* MapFn::Where => 3 }
            }
        }
    };
}
map_fns!(define_map_fn);

impl MapFn {
    /// The number of the function in fingerprints. Functions that are appended to the table change none: `Where`, the last
    /// variant, keeps the number that it had among the first 48.
    pub fn code(self) -> usize {
        const WHERE: usize = 48;
        match self {
            MapFn::Where => WHERE,
            f => f as usize + usize::from(f as usize >= WHERE),
        }
    }

    /// Whether the function maps 16-bit floats to 16-bit floats exactly, so that its result needs no rounding.
    pub fn is_exact(self) -> bool {
        use MapFn::*;
        matches!(self, Copy | Neg | Abs | Sign | Relu | Maximum | Minimum | Where | Floor | Ceil | Round)
    }

    /// Approximate floating-point operations per element: the cost of recomputing a value instead of loading it.
    pub fn flops(self) -> usize {
        use MapFn::*;
        match self {
            Copy => 0,
            Exp | Expm1 | Reciprocal | Div | Sqrt | Rsqrt | FloorDiv | Remainder => 8,
            Sigmoid | Sigmoid2 | Sigmoid2Rest | Tanh | Log | Log1p | Erf | Sin | Cos | Tan => 16,
            Pow => 40,
            _ => 1,
        }
    }
}

pub static OPS: &[&Op] = &[
    &COPY,
    &NEG,
    &ABS,
    &SIGN,
    &EXP,
    &LOG,
    &LOG1P,
    &EXPM1,
    &SQRT,
    &RSQRT,
    &RECIPROCAL,
    &SIN,
    &COS,
    &TAN,
    &TANH,
    &SIGMOID,
    &SIGMOID2,
    &SIGMOID2_REST,
    &ERF,
    &FLOOR,
    &CEIL,
    &ROUND,
    &ADD,
    &SUB,
    &MUL,
    &DIV,
    &FLOOR_DIV,
    &REMAINDER,
    &POW,
    &MAXIMUM,
    &MINIMUM,
    &EQ,
    &NE,
    &LT,
    &LE,
    &GT,
    &GE,
    &ISNAN,
    &ISINF,
    &LOGICAL_AND,
    &LOGICAL_OR,
    &LOGICAL_XOR,
    &LOGICAL_NOT,
    &WHERE,
    &CLAMP,
    &ISFINITE,
];

/// Shape and dtype rule of every `Map`: inputs broadcast, and comparisons yield bool.
pub fn infer(i: &Infer) -> Result<Meta> {
    let mut shape = i.shape(0);
    for k in 1..i.inputs.len() {
        shape = Shape::broadcast(&shape, &i.shape(k)).ok_or_else(|| no_broadcast(i))?;
    }
    Ok(Meta { shape, dtype: i.inputs[i.inputs.len() - 1].dtype })
}

fn infer_bool(i: &Infer) -> Result<Meta> {
    Ok(Meta { shape: infer(i)?.shape, dtype: DType::Bool })
}

fn no_broadcast(i: &Infer) -> Error {
    let shapes: Vec<String> = i.inputs.iter().map(|m| m.shape.to_string()).collect();
    let clash = i.inputs.iter().enumerate().find_map(|(a, x)| {
        let rest = &i.inputs[a + 1..];
        rest.iter().find_map(|y| {
            let n = x.shape.rank().min(y.shape.rank());
            (1..=n).find_map(|k| {
                let (p, q) = (x.shape.dims()[x.shape.rank() - k], y.shape.dims()[y.shape.rank() - k]);
                (p != q && p != 1 && q != 1).then_some((k, p, q))
            })
        })
    });
    let rule = match clash {
        Some((k, p, q)) => format!(": dim -{k} is {p} and {q}; dims must be equal or 1"),
        None => String::new(),
    };
    Error::shape(i.op, format!("shapes {} do not broadcast{rule}", shapes.join(" and ")))
}

const MAP: Op = Op { infer, ..Op::BASE };
const COMPARE: Op = Op { infer: infer_bool, ..Op::BASE };
const UNARY: &[&str] = &["f(2,3)", "f(0,3)", "f()", "f(2,1,4)"];
const POSITIVE: &[&str] = &["p(2,3)", "p(0,3)", "p()", "p(2,1,4)"];
const BINARY: &[&str] =
    &["f(2,3), f(2,3)", "f(2,3), f(3)", "f(2,1), f(1,3)", "f(), f(2)", "f(0,3), f(3)", "f(2,3), 1.5"];
const DIVISOR: &[&str] = &["f(2,3), p(2,3)", "f(2,3), p(3)", "f(2,1), p(1,3)", "f(0,3), p(3)", "f(2,3), 1.5"];
const BOOLS: &[&str] = &["b(2,3), b(2,3)", "b(2,3), b(3)", "b(0), b(0)"];

/// Backward rule of an elementwise op: each local gradient is summed down to its input's shape if that was broadcast.
fn local(g: &mut Graph, c: &GradCtx, grads: Grads) -> Result<Grads> {
    let mut out = Grads::new();
    for (i, d) in grads.into_iter().enumerate() {
        out.push(match d {
            Some(d) if c.needs[i] => {
                let shape = g.shape(c.x(i));
                Some(g.sum_to(d, shape)?)
            }
            _ => None,
        });
    }
    Ok(out)
}

macro_rules! rule {
    (|$g:ident, $c:ident| $($d:expr),+) => {
        Grad::Rule(|$g, $c| {
            let grads: Grads = smallvec![$(Some($d)),+];
            local($g, $c, grads)
        })
    };
}

pub static COPY: Op = Op {
    name: "contiguous",
    sig: "x: tensor",
    doc: "x (...) -> (...), the same values, contiguous in row-major order.",
    class: Class::Map(MapFn::Copy),
    grad: rule!(|g, c| c.grad),
    samples: UNARY,
    smooth: true,
    ..MAP
};

pub static NEG: Op = Op {
    name: "neg",
    sig: "x: tensor",
    doc: "x (...) -> (...): -x. Also the operator `-x`.",
    class: Class::Map(MapFn::Neg),
    grad: rule!(|g, c| g.neg(c.grad)?),
    samples: UNARY,
    smooth: true,
    ..MAP
};

pub static ABS: Op = Op {
    name: "abs",
    sig: "x: tensor",
    doc: "x (...) -> (...): |x|. The gradient at 0 is 0.",
    class: Class::Map(MapFn::Abs),
    grad: rule!(|g, c| {
        let s = g.sign(c.x(0))?;
        g.mul(c.grad, s)?
    }),
    samples: UNARY,
    ..MAP
};

pub static SIGN: Op = Op {
    name: "sign",
    sig: "x: tensor",
    doc: "x (...) -> (...): -1, 0 or 1; NaN stays NaN.",
    class: Class::Map(MapFn::Sign),
    samples: UNARY,
    ..MAP
};

pub static EXP: Op = Op {
    name: "exp",
    sig: "x: tensor",
    doc: "x (...) -> (...): e^x.",
    class: Class::Map(MapFn::Exp),
    grad: rule!(|g, c| g.mul(c.grad, c.out)?),
    amp: crate::amp::Amp::Full,
    samples: UNARY,
    smooth: true,
    ..MAP
};

pub static LOG: Op = Op {
    name: "log",
    sig: "x: tensor",
    doc: "x (...) -> (...): natural logarithm; -inf at 0, NaN below.",
    class: Class::Map(MapFn::Log),
    grad: rule!(|g, c| g.div(c.grad, c.x(0))?),
    amp: crate::amp::Amp::Full,
    samples: POSITIVE,
    smooth: true,
    ..MAP
};

pub static LOG1P: Op = Op {
    name: "log1p",
    sig: "x: tensor",
    doc: "x (...) -> (...): log(1 + x), accurate near 0.",
    class: Class::Map(MapFn::Log1p),
    grad: rule!(|g, c| {
        let d = g.add_c(c.x(0), 1.0)?;
        g.div(c.grad, d)?
    }),
    amp: crate::amp::Amp::Full,
    samples: POSITIVE,
    smooth: true,
    ..MAP
};

pub static EXPM1: Op = Op {
    name: "expm1",
    sig: "x: tensor",
    doc: "x (...) -> (...): e^x - 1, accurate near 0.",
    class: Class::Map(MapFn::Expm1),
    grad: rule!(|g, c| {
        let d = g.add_c(c.out, 1.0)?;
        g.mul(c.grad, d)?
    }),
    amp: crate::amp::Amp::Full,
    samples: UNARY,
    smooth: true,
    ..MAP
};

pub static SQRT: Op = Op {
    name: "sqrt",
    sig: "x: tensor",
    doc: "x (...) -> (...): square root; NaN below 0.",
    class: Class::Map(MapFn::Sqrt),
    grad: rule!(|g, c| {
        let d = g.add_(c.out, c.out)?;
        g.div(c.grad, d)?
    }),
    samples: POSITIVE,
    smooth: true,
    ..MAP
};

pub static RSQRT: Op = Op {
    name: "rsqrt",
    sig: "x: tensor",
    doc: "x (...) -> (...): 1 / sqrt(x).",
    class: Class::Map(MapFn::Rsqrt),
    grad: rule!(|g, c| {
        let d = g.div(c.out, c.x(0))?;
        let d = g.mul_c(d, -0.5)?;
        g.mul(c.grad, d)?
    }),
    amp: crate::amp::Amp::Full,
    samples: POSITIVE,
    smooth: true,
    ..MAP
};

pub static RECIPROCAL: Op = Op {
    name: "reciprocal",
    sig: "x: tensor",
    doc: "x (...) -> (...): 1 / x.",
    class: Class::Map(MapFn::Reciprocal),
    grad: rule!(|g, c| {
        let d = g.mul(c.out, c.out)?;
        let d = g.mul(c.grad, d)?;
        g.neg(d)?
    }),
    samples: POSITIVE,
    smooth: true,
    ..MAP
};

pub static SIN: Op = Op {
    name: "sin",
    sig: "x: tensor",
    doc: "x (...) -> (...): sine of x in radians.",
    class: Class::Map(MapFn::Sin),
    grad: rule!(|g, c| {
        let d = g.cos(c.x(0))?;
        g.mul(c.grad, d)?
    }),
    samples: UNARY,
    smooth: true,
    ..MAP
};

pub static COS: Op = Op {
    name: "cos",
    sig: "x: tensor",
    doc: "x (...) -> (...): cosine of x in radians.",
    class: Class::Map(MapFn::Cos),
    grad: rule!(|g, c| {
        let d = g.sin(c.x(0))?;
        let d = g.mul(c.grad, d)?;
        g.neg(d)?
    }),
    samples: UNARY,
    smooth: true,
    ..MAP
};

/// For functions that are steep or composed of several steps.
const STEEP: Option<Tolerance> = Some(Tolerance { half: 2.0, wide: 8.0, half_scaled: 0.0 });

pub static TAN: Op = Op {
    name: "tan",
    sig: "x: tensor",
    doc: "x (...) -> (...): tangent of x in radians.",
    class: Class::Map(MapFn::Tan),
    tolerance: STEEP,
    grad: rule!(|g, c| {
        let d = g.mul(c.out, c.out)?;
        let d = g.add_c(d, 1.0)?;
        g.mul(c.grad, d)?
    }),
    samples: &["u(2,3)", "u(0,3)", "u()", "u(2,1,4)"],
    smooth: true,
    ..MAP
};

pub static TANH: Op = Op {
    name: "tanh",
    sig: "x: tensor",
    doc: "x (...) -> (...): hyperbolic tangent.",
    class: Class::Map(MapFn::Tanh),
    grad: rule!(|g, c| {
        let d = g.mul(c.out, c.out)?;
        let one = g.constant_like(1.0, d);
        let d = g.sub(one, d)?;
        g.mul(c.grad, d)?
    }),
    samples: UNARY,
    smooth: true,
    ..MAP
};

pub static SIGMOID: Op = Op {
    name: "sigmoid",
    sig: "x: tensor",
    doc: "x (...) -> (...): 1 / (1 + e^-x).",
    class: Class::Map(MapFn::Sigmoid),
    grad: rule!(|g, c| {
        let one = g.constant_like(1.0, c.out);
        let d = g.sub(one, c.out)?;
        let d = g.mul(c.out, d)?;
        g.mul(c.grad, d)?
    }),
    samples: UNARY,
    smooth: true,
    ..MAP
};

/// 1 / (1 + 2^-x), for GELU's tanh form: no precision is lost before the exponential, as it would be if a GPU computed
/// e^x through 2^y.
pub static SIGMOID2: Op = Op {
    name: "sigmoid2",
    class: Class::Map(MapFn::Sigmoid2),
    grad: rule!(|g, c| {
        let rest = g.sigmoid2_rest(c.x(0))?;
        let d = g.mul(c.out, rest)?;
        let d = g.mul_c(d, std::f64::consts::LN_2)?;
        g.mul(c.grad, d)?
    }),
    ..MAP
};

/// 1 - sigmoid2(x) to full precision, that is sigmoid2(-x); kernels that need both compute one exponential.
pub static SIGMOID2_REST: Op = Op {
    name: "sigmoid2_rest",
    class: Class::Map(MapFn::Sigmoid2Rest),
    grad: rule!(|g, c| {
        let s = g.sigmoid2(c.x(0))?;
        let d = g.mul(c.out, s)?;
        let d = g.mul_c(d, -std::f64::consts::LN_2)?;
        g.mul(c.grad, d)?
    }),
    ..MAP
};

pub static ERF: Op = Op {
    name: "erf",
    sig: "x: tensor",
    doc: "x (...) -> (...): the error function, 2/sqrt(pi) times the integral of e^-t^2 from 0 to x.",
    class: Class::Map(MapFn::Erf),
    grad: rule!(|g, c| {
        let d = g.square(c.x(0))?;
        let d = g.neg(d)?;
        let d = g.exp(d)?;
        let d = g.mul_c(d, std::f64::consts::FRAC_2_SQRT_PI)?;
        g.mul(c.grad, d)?
    }),
    samples: UNARY,
    smooth: true,
    ..MAP
};

/// Selects `op`, or `logical` if all operands are bools: sums and products of bools are bools, as in PyTorch.
fn or_logical(g: &mut Graph, a: &super::Args, op: &'static Op, logical: &'static Op) -> Result<super::Out> {
    let xs = a.operands(g)?;
    let bools = xs.iter().all(|&x| g.dtype(x) == DType::Bool);
    g.map(if bools { logical } else { op }, &xs).map(one)
}

/// Rounds; an integer tensor is returned unchanged.
fn rounded(g: &mut Graph, op: &'static Op, x: NodeId) -> Result<NodeId> {
    if g.dtype(x).is_float() { g.map(op, &[x]) } else { Ok(x) }
}

pub static FLOOR: Op = Op {
    name: "floor",
    sig: "x: tensor",
    doc: "x (...) -> (...): the largest integer not above x, as a float; integers are unchanged. The gradient is 0.",
    class: Class::Map(MapFn::Floor),
    call: Some(|g, a| rounded(g, &FLOOR, a.tensor(0)?).map(one)),
    samples: UNARY,
    ..MAP
};

pub static CEIL: Op = Op {
    name: "ceil",
    sig: "x: tensor",
    doc: "x (...) -> (...): the smallest integer not below x, as a float; integers are unchanged. The gradient is 0.",
    class: Class::Map(MapFn::Ceil),
    call: Some(|g, a| rounded(g, &CEIL, a.tensor(0)?).map(one)),
    samples: UNARY,
    ..MAP
};

pub static ROUND: Op = Op {
    name: "round",
    sig: "x: tensor",
    doc: "x (...) -> (...): the nearest integer, ties to even, as a float; integers are unchanged. The gradient is 0.",
    class: Class::Map(MapFn::Round),
    call: Some(|g, a| rounded(g, &ROUND, a.tensor(0)?).map(one)),
    samples: UNARY,
    ..MAP
};

pub static ADD: Op = Op {
    name: "add",
    sig: "x: operand, y: operand",
    doc: "x (...), y (...) -> broadcast: x + y. Also the operator `+`. Integers wrap around; for bools it is `or`.",
    class: Class::Map(MapFn::Add),
    call: Some(|g, a| or_logical(g, a, &ADD, &LOGICAL_OR)),
    grad: rule!(|g, c| c.grad, c.grad),
    samples: BINARY,
    smooth: true,
    ..MAP
};

pub static SUB: Op = Op {
    name: "sub",
    sig: "x: operand, y: operand",
    doc: "x (...), y (...) -> broadcast: x - y. Also the operator `-`. Integers wrap around, bools become i64.",
    class: Class::Map(MapFn::Sub),
    grad: rule!(|g, c| c.grad, g.neg(c.grad)?),
    samples: BINARY,
    smooth: true,
    ..MAP
};

pub static MUL: Op = Op {
    name: "mul",
    sig: "x: operand, y: operand",
    doc: "x (...), y (...) -> broadcast: x * y. Also the operator `*`. Integers wrap around; for bools it is `and`.",
    class: Class::Map(MapFn::Mul),
    call: Some(|g, a| or_logical(g, a, &MUL, &LOGICAL_AND)),
    grad: Grad::Rule(|g, c| {
        let dx = if c.needs[0] { Some(g.mul(c.grad, c.x(1))?) } else { None };
        let dy = if c.needs[1] { Some(g.mul(c.grad, c.x(0))?) } else { None };
        local(g, c, smallvec![dx, dy])
    }),
    samples: BINARY,
    smooth: true,
    ..MAP
};

pub static DIV: Op = Op {
    name: "div",
    sig: "x: operand, y: operand",
    doc: "x (...), y (...) -> broadcast: x / y, always a float (integers are converted to f32). Also the operator `/`.",
    class: Class::Map(MapFn::Div),
    grad: Grad::Rule(|g, c| {
        let dx = g.div(c.grad, c.x(1))?;
        let dy = match c.needs[1] {
            true => {
                let d = g.mul(dx, c.out)?;
                Some(g.neg(d)?)
            }
            false => None,
        };
        local(g, c, smallvec![Some(dx), dy])
    }),
    samples: DIVISOR,
    smooth: true,
    ..MAP
};

pub static FLOOR_DIV: Op = Op {
    name: "floor_div",
    sig: "x: operand, y: operand",
    doc: "x (...), y (...) -> broadcast: floor(x / y), as in Lua and Python. Also the operator `//`.\n\
          An integer divided by 0 gives 0. The gradient is 0.",
    class: Class::Map(MapFn::FloorDiv),
    samples: DIVISOR,
    ..MAP
};

pub static REMAINDER: Op = Op {
    name: "remainder",
    sig: "x: operand, y: operand",
    doc: "x (...), y (...) -> broadcast: x - floor(x / y) * y, with the sign of y. Also the operator `%`.\n\
          An integer modulo 0 gives 0.",
    class: Class::Map(MapFn::Remainder),
    tolerance: STEEP,
    grad: Grad::Rule(|g, c| {
        let q = g.map(&FLOOR_DIV, &[c.x(0), c.x(1)])?;
        let d = g.mul(c.grad, q)?;
        let d = g.neg(d)?;
        local(g, c, smallvec![Some(c.grad), Some(d)])
    }),
    samples: DIVISOR,
    ..MAP
};

pub static POW: Op = Op {
    name: "pow",
    sig: "x: operand, y: operand",
    doc: "x (...), y (...) -> broadcast: x to the power y. Also the operator `^`.\n\
          The numbers 2, 3, 0.5, -0.5, 1 and -1 as exponents are part of the program and become products and roots; any\n\
          other number is a run-time slot. Integers wrap; an integer to a negative power is 0 unless x is 1 or -1.",
    class: Class::Map(MapFn::Pow),
    tolerance: STEEP,
    call: Some(|g, a| {
        if let (Some(Value::Tensor(x)), Some(Value::Number(n))) = (a.values.first(), a.values.get(1)) {
            let (x, exponent) = (*x, n.as_f64());
            let float = g.dtype(x).is_float();
            if exponent == 1.0 && (float || matches!(n, Number::Int(_))) {
                return Ok(one(x));
            }
            if exponent == 2.0 && g.dtype(x) != DType::Bool && (float || matches!(n, Number::Int(_))) {
                return g.square(x).map(one);
            }
            if float {
                match exponent {
                    3.0 => {
                        let s = g.square(x)?;
                        return g.mul(s, x).map(one);
                    }
                    0.5 => return g.sqrt(x).map(one),
                    -0.5 => return g.rsqrt(x).map(one),
                    -1.0 => return g.recip(x).map(one),
                    _ => {}
                }
            }
        }
        let xs = a.operands(g)?;
        g.map(&POW, &xs).map(one)
    }),
    grad: Grad::Rule(|g, c| {
        let (x, y) = (c.x(0), c.x(1));
        let less = g.add_c(y, -1.0)?;
        let d = g.map(&POW, &[x, less])?;
        let d = g.mul(y, d)?;
        // At y = 0 the derivative is 0 even if x^-1 is not finite.
        let zero = g.constant_like(0.0, x);
        let flat = g.eq(y, zero)?;
        let d = g.where_(flat, zero, d)?;
        let dx = g.mul(c.grad, d)?;
        let dy = match c.needs[1] {
            true => {
                let l = g.log(x)?;
                let d = g.mul(c.out, l)?;
                // 0^y does not depend on y for y >= 0.
                let base = g.eq(x, zero)?;
                let up = g.ge(y, zero)?;
                let still = g.logical_and(base, up)?;
                let d = g.where_(still, zero, d)?;
                Some(g.mul(c.grad, d)?)
            }
            false => None,
        };
        local(g, c, smallvec![Some(dx), dy])
    }),
    amp: crate::amp::Amp::Full,
    samples: &[
        "p(2,3), f(2,3)",
        "p(2,3), f(3)",
        "p(0,3), f(3)",
        "f(2,3), 2",
        "p(2,3), 0.5",
        "p(2,3), -1",
        "f(2,3), 3",
        "p(4), 1.7",
    ],
    smooth: true,
    ..MAP
};

/// Gradient of `maximum` and `minimum`: it goes to the selected operand; if both are equal, each gets half, as in
/// PyTorch.
fn winner(g: &mut Graph, c: &GradCtx, first: NodeId) -> Result<Grads> {
    let tie = g.eq(c.x(0), c.x(1))?;
    let half = g.mul_c(c.grad, 0.5)?;
    let zero = g.constant_like(0.0, c.grad);
    let a = g.where_(first, c.grad, zero)?;
    let a = g.where_(tie, half, a)?;
    let b = g.where_(first, zero, c.grad)?;
    let b = g.where_(tie, half, b)?;
    local(g, c, smallvec![Some(a), Some(b)])
}

pub static MAXIMUM: Op = Op {
    name: "maximum",
    sig: "x: operand, y: operand",
    doc: "x (...), y (...) -> broadcast: the larger of the two; NaN if either is. Equal values share the gradient.",
    class: Class::Map(MapFn::Maximum),
    call: Some(|g, a| or_logical(g, a, &MAXIMUM, &LOGICAL_OR)),
    grad: Grad::Rule(|g, c| {
        let first = g.gt(c.x(0), c.x(1))?;
        winner(g, c, first)
    }),
    samples: BINARY,
    ..MAP
};

pub static MINIMUM: Op = Op {
    name: "minimum",
    sig: "x: operand, y: operand",
    doc: "x (...), y (...) -> broadcast: the smaller of the two; NaN if either is. Equal values share the gradient.",
    class: Class::Map(MapFn::Minimum),
    call: Some(|g, a| or_logical(g, a, &MINIMUM, &LOGICAL_AND)),
    grad: Grad::Rule(|g, c| {
        let first = g.lt(c.x(0), c.x(1))?;
        winner(g, c, first)
    }),
    samples: BINARY,
    ..MAP
};

macro_rules! comparisons {
    ($($id:ident $name:literal $f:ident $symbol:literal;)*) => { $(
        pub static $id: Op = Op {
            name: $name,
            sig: "x: operand, y: operand",
            doc: concat!("x (...), y (...) -> broadcast bool: x ", $symbol, " y. A method, since Lua's own comparisons return plain booleans."),
            class: Class::Map(MapFn::$f),
            samples: &["i(3;2,3), i(3;2,3)", "f(2,3), f(3)", "i(3;4), 1", "f(0,3), f(3)"],
            ..COMPARE
        };
    )* };
}

comparisons! {
    EQ "eq" Eq "==";
    NE "ne" Ne "!=";
    LT "lt" Lt "<";
    LE "le" Le "<=";
    GT "gt" Gt ">";
    GE "ge" Ge ">=";
}

pub static ISNAN: Op = Op {
    name: "isnan",
    sig: "x: tensor",
    doc: "x (...) -> bool (...): whether the element is NaN.",
    class: Class::Map(MapFn::IsNan),
    samples: &["f(2,3)", "f(0)", "i(3;2)"],
    ..COMPARE
};

pub static ISINF: Op = Op {
    name: "isinf",
    sig: "x: tensor",
    doc: "x (...) -> bool (...): whether the element is positive or negative infinity.",
    class: Class::Map(MapFn::IsInf),
    samples: &["f(2,3)", "f(0)", "i(3;2)"],
    ..COMPARE
};

pub static ISFINITE: Op = Op {
    name: "isfinite",
    sig: "x: tensor",
    doc: "x (...) -> bool (...): whether the element is neither infinite nor NaN.",
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let (n, i) = (g.isnan(x)?, g.isinf(x)?);
        let bad = g.logical_or(n, i)?;
        g.logical_not(bad).map(one)
    }),
    samples: &["f(2,3)", "f(0)", "i(3;2)"],
    ..Op::BASE
};

pub static LOGICAL_AND: Op = Op {
    name: "logical_and",
    sig: "x: operand, y: operand",
    doc: "x (...), y (...) -> broadcast bool: whether both are not zero.",
    class: Class::Map(MapFn::LogicalAnd),
    samples: BOOLS,
    ..COMPARE
};

pub static LOGICAL_OR: Op = Op {
    name: "logical_or",
    sig: "x: operand, y: operand",
    doc: "x (...), y (...) -> broadcast bool: whether at least one is not zero.",
    class: Class::Map(MapFn::LogicalOr),
    samples: BOOLS,
    ..COMPARE
};

pub static LOGICAL_XOR: Op = Op {
    name: "logical_xor",
    sig: "x: operand, y: operand",
    doc: "x (...), y (...) -> broadcast bool: whether exactly one is not zero.",
    class: Class::Map(MapFn::LogicalXor),
    samples: BOOLS,
    ..COMPARE
};

pub static LOGICAL_NOT: Op = Op {
    name: "logical_not",
    sig: "x: tensor",
    doc: "x (...) -> bool (...): whether the element is zero.",
    class: Class::Map(MapFn::LogicalNot),
    samples: &["b(2,3)", "b(0)", "i(2;3)"],
    ..COMPARE
};

pub static WHERE: Op = Op {
    name: "where",
    sig: "cond: tensor, x: operand, y: operand",
    doc: "cond (...) bool, x (...), y (...) -> broadcast: x where cond is true, else y. `cond:where(x, y)` works too.",
    class: Class::Map(MapFn::Where),
    call: Some(|g, a| {
        let cond = a.tensor(0)?;
        let like = match (a.opt_tensor(1), a.opt_tensor(2)) {
            (Some(x), Some(y)) => g.common(&[x, y]),
            (Some(x), None) | (None, Some(x)) => g.dtype(x),
            (None, None) => DType::Bool,
        };
        let (x, y) = (a.operand(g, 1, like)?, a.operand(g, 2, like)?);
        g.map(&WHERE, &[cond, x, y]).map(one)
    }),
    grad: Grad::Rule(|g, c| {
        let zero = g.constant_like(0.0, c.grad);
        let a = g.where_(c.x(0), c.grad, zero)?;
        let b = g.where_(c.x(0), zero, c.grad)?;
        local(g, c, smallvec![None, Some(a), Some(b)])
    }),
    samples: &[
        "b(2,3), f(2,3), f(2,3)",
        "b(2,1), f(3), f(2,3)",
        "b(2,3), f(2,3), 0.0",
        "b(3), 1, 2",
        "b(0), f(0), f(0)",
    ],
    smooth: true,
    ..MAP
};

pub static CLAMP: Op = Op {
    name: "clamp",
    sig: "x: tensor, min: operand?, max: operand?",
    doc: "x (...) -> (...): x limited to [min, max]; either bound may be nil. NaN stays NaN. No gradient flows where x is\n\
          outside the bounds.",
    call: Some(|g, a| {
        let mut x = a.tensor(0)?;
        if a.is_none(1) && a.is_none(2) {
            return Err(Error::argument("clamp", "needs min, max or both"));
        }
        let (input, dtype) = (x, g.dtype(x));
        let mut inside = None;
        for (i, op, keep) in [(1, &MAXIMUM, &GE), (2, &MINIMUM, &LE)] {
            if !a.is_none(i) {
                let bound = a.operand(g, i, dtype)?;
                let ok = g.map(keep, &[input, bound])?;
                inside = Some(match inside {
                    Some(other) => g.logical_and(other, ok)?,
                    None => ok,
                });
                x = g.map(op, &[x, bound])?;
            }
        }
        // The value is the clamped one; where x is inside the bounds it is x itself, so the gradient is that of
        // `where`.
        match inside {
            Some(ok) if g.dtype(x) == dtype => g.where_(ok, input, x).map(one),
            _ => Ok(one(x)),
        }
    }),
    samples: &[
        "f(2,3), -0.5, 0.5",
        "f(2,3), 0.1",
        "f(3), nil, 0.2",
        "i(9;5), 2, 5",
        "f(2,3), f(3), 1.0",
        "f(0), 0.0, 1.0",
    ],
    ..Op::BASE
};
