//! Defines random numbers: one generator node, and the distributions built on it.
//!
//! `uniform` yields 24 random bits per element as a pure function of (seed, step, index of the random op within the
//! step) and of the element's position in row-major order. Nothing is stored: backward passes, recomputation, other
//! devices and resumed runs generate the same numbers. Seed and counter are run-time numbers, so a new step compiles
//! nothing.

use super::{Class, Generator, Op, Out, create, one};
use crate::error::{Error, Result};
use crate::graph::{Graph, Meta, NodeId, Number};
use crate::{DType, Shape};
use smallvec::SmallVec;

pub static OPS: &[&Op] =
    &[&UNIFORM_BITS, &RAND, &UNIFORM, &RANDN, &RANDINT, &BERNOULLI, &RAND_LIKE, &RANDN_LIKE, &DROPOUT];

/// Uniform f32 in [0, 1). Inputs: seed and counter (step << 32 | occurrence), i64 scalars; `attrs`: the dims.
pub static UNIFORM_BITS: Op = Op {
    name: "uniform_bits",
    class: Class::Generator(Generator::Uniform),
    infer: |i| {
        let dims: SmallVec<[usize; 8]> = i.attrs.iter().map(|&d| d as usize).collect();
        Ok(Meta { shape: Shape::new(&dims)?, dtype: DType::F32 })
    },
    ..Op::BASE
};

/// Draws uniform f32 in [0, 1), multiples of 2^-24.
pub fn draw(g: &mut Graph, shape: Shape) -> Result<NodeId> {
    let counter = u64::from(g.rng.step) << 32 | u64::from(g.rng.occurrence);
    g.rng.occurrence = g.rng.occurrence.wrapping_add(1);
    let seed = g.scalar(Number::Int(g.rng.seed as i64), DType::I64);
    let counter = g.scalar(Number::Int(counter as i64), DType::I64);
    let dims: SmallVec<[i64; 8]> = shape.dims().iter().map(|&d| d as i64).collect();
    g.push(&UNIFORM_BITS, &[seed, counter], &dims)
}

/// Draws uniform f64 in [0, 1), multiples of 2^-48, from two draws.
fn draw_f64(g: &mut Graph, shape: Shape) -> Result<NodeId> {
    let (high, low) = (draw(g, shape)?, draw(g, shape)?);
    let (high, low) = (g.cast(high, DType::F64)?, g.cast(low, DType::F64)?);
    let low = g.mul_c(low, 1.0 / (1 << 24) as f64)?;
    g.add_(high, low)
}

/// Draws in the dtype in which numbers of `dtype` are computed.
fn draw_for(g: &mut Graph, shape: Shape, dtype: DType) -> Result<NodeId> {
    if dtype == DType::F64 { draw_f64(g, shape) } else { draw(g, shape) }
}

fn float_dtype(op: &str, dtype: Option<DType>) -> Result<DType> {
    let dtype = dtype.unwrap_or(DType::F32);
    if !dtype.is_float() {
        return Err(
            Error::dtype(op, format!("draws floats, not {dtype}")).hint("randint draws integers, bernoulli 0 and 1")
        );
    }
    Ok(dtype)
}

/// Uniform in [0, 1) of any float dtype; 16-bit floats drop low bits instead of rounding up to 1.
fn rand(g: &mut Graph, shape: Shape, dtype: DType) -> Result<NodeId> {
    let u = draw_for(g, shape, dtype)?;
    let steps = match dtype {
        DType::BF16 => 256.0,
        DType::F16 => 2048.0,
        _ => return Ok(u),
    };
    let u = g.mul_c(u, steps)?;
    let u = g.floor(u)?;
    let u = g.mul_c(u, 1.0 / steps)?;
    g.cast(u, dtype)
}

/// Standard normal numbers from two independent draws: Box and Muller, Ann. Math. Statist. 29 (1958).
fn randn(g: &mut Graph, shape: Shape, dtype: DType) -> Result<NodeId> {
    let (u, v) = (draw_for(g, shape, dtype)?, draw_for(g, shape, dtype)?);
    // 1 - u is in (0, 1], so its logarithm is finite.
    let r = g.rsub_c(1.0, u)?;
    let r = g.log(r)?;
    let r = g.mul_c(r, -2.0)?;
    let r = g.sqrt(r)?;
    let angle = g.mul_c(v, std::f64::consts::TAU)?;
    let c = g.cos(angle)?;
    let z = g.mul(r, c)?;
    g.cast(z, dtype)
}

pub static RAND: Op = Op {
    name: "rand",
    sig: "shape: ints, *, dtype: dtype = f32",
    doc: "rand({d0, ...}) -> (d0, ...): uniform in [0, 1).\n\
          f32 has 24 random bits, f64 48, f16 11, bf16 8. Philox 4x32-10 of (seed, step, call, element).",
    call: Some(|g, a| {
        let (shape, dtype) = (create::shape_of("rand", a.ints(0)?)?, float_dtype("rand", a.dtype(1))?);
        g.without_autocast(|g| rand(g, shape, dtype)).map(one)
    }),
    samples: &["[2,3]", "[0,3]", "[]", "[7], dtype='f64'", "[7], dtype='bf16'"],
    ..Op::BASE
};

pub static UNIFORM: Op = Op {
    name: "uniform",
    sig: "shape: ints, low: float = 0.0, high: float = 1.0, *, dtype: dtype = f32",
    doc: "uniform({d0, ...}, low, high) -> (d0, ...): uniform in [low, high); rounding may reach high.\n\
          low and high are run-time numbers.",
    call: Some(|g, a| {
        let (shape, dtype) = (create::shape_of("uniform", a.ints(0)?)?, float_dtype("uniform", a.dtype(3))?);
        let (low, high) = (a.float(1)?, a.float(2)?);
        if !(low <= high && (high - low).is_finite()) {
            return Err(Error::argument(
                "uniform",
                format!("low is {low} and high is {high}; low must not be above high"),
            ));
        }
        g.without_autocast(|g| {
            let u = draw_for(g, shape, dtype)?;
            let work = g.dtype(u);
            let (span, low) = (g.scalar(Number::Float(high - low), work), g.scalar(Number::Float(low), work));
            let y = g.mul(u, span)?;
            let y = g.add_(y, low)?;
            g.cast(y, dtype)
        })
        .map(one)
    }),
    samples: &["[2,3], -1, 1", "[0,3]", "[5], 2.0, 3.0, dtype='f64'"],
    ..Op::BASE
};

pub static RANDN: Op = Op {
    name: "randn",
    sig: "shape: ints, *, dtype: dtype = f32",
    doc: "randn({d0, ...}) -> (d0, ...): normal with mean 0 and variance 1, by Box and Muller's method from two uniform\n\
          draws. f32 reaches 5.77 standard deviations, f64 8.15. 16-bit floats are rounded from f32.",
    call: Some(|g, a| {
        let (shape, dtype) = (create::shape_of("randn", a.ints(0)?)?, float_dtype("randn", a.dtype(1))?);
        g.without_autocast(|g| randn(g, shape, dtype)).map(one)
    }),
    samples: &["[2,3]", "[0,3]", "[]", "[7], dtype='f64'", "[7], dtype='bf16'"],
    ..Op::BASE
};

/// Largest range for which one draw of 2^24 values is even enough (counts differ by less than 1 in 4096).
const NARROW: i64 = 4096;

pub static RANDINT: Op = Op {
    name: "randint",
    sig: "low: int, high: int, shape: ints, *, dtype: dtype = i64",
    doc: "randint(low, high, {d0, ...}) -> (d0, ...): integers, uniform in [low, high).\n\
          Ranges to 4096 use one draw of 24 bits, wider ones two (48 bits), so no value is favoured by more than 1 in\n\
          4096; high - low is at most 2^36. low and high are run-time numbers.",
    call: Some(|g, a| {
        let (low, high) = (a.int(0)?, a.int(1)?);
        let (shape, dtype) = (create::shape_of("randint", a.ints(2)?)?, a.dtype(3).unwrap_or(DType::I64));
        let span = match high.checked_sub(low) {
            Some(n) if (1..=1 << 36).contains(&n) => n,
            _ => {
                let message = format!("low is {low} and high is {high}; high must be above low, by at most 2^36");
                return Err(Error::argument("randint", message));
            }
        };
        let fits = match dtype {
            DType::U8 => low >= 0 && high <= 256,
            DType::I32 => low >= i64::from(i32::MIN) && high <= i64::from(i32::MAX) + 1,
            DType::Bool => low >= 0 && high <= 2,
            _ => true,
        };
        if !fits {
            return Err(Error::argument(
                "randint",
                format!("low is {low} and high is {high}; values to {} do not fit {dtype}", high - 1),
            ));
        }
        g.without_autocast(|g| {
            let u = if span <= NARROW { draw(g, shape)? } else { draw_f64(g, shape)? };
            let work = g.dtype(u);
            let (span, low) = (g.scalar(Number::Int(span), work), g.scalar(Number::Int(low), DType::I64));
            // u is far enough below 1 that the product rounds to less than span.
            let y = g.mul(u, span)?;
            let y = g.floor(y)?;
            let y = g.cast(y, DType::I64)?;
            let y = g.add_(y, low)?;
            g.cast(y, dtype)
        })
        .map(one)
    }),
    samples: &["0, 10, [2,3]", "-5, 5, [7]", "0, 100000, [4]", "0, 2, [0,3]", "0, 9, [3], dtype='i32'"],
    ..Op::BASE
};

pub static BERNOULLI: Op = Op {
    name: "bernoulli",
    sig: "p: operand, shape: ints?, *, dtype: dtype?",
    doc: "p (...) float -> (...) of p's dtype: 1 with probability p, else 0; or bernoulli(p, {d0, ...}) -> (d0, ...) f32\n\
          for a number p, which is a run-time number. Probabilities are accurate to 2^-24.",
    call: Some(|g, a| {
        let (shape, dtype) = match (a.opt_tensor(0), a.opt_float(0)) {
            (Some(p), _) => {
                let (shape, dtype) = (g.shape(p), g.dtype(p));
                if !dtype.is_float() {
                    return Err(Error::dtype(
                        "bernoulli",
                        format!("p must be a float tensor of probabilities, not {dtype}"),
                    ));
                }
                if !a.is_none(1) {
                    return Err(Error::argument(
                        "bernoulli",
                        format!("the result has the shape of p, {shape}; no other can be given"),
                    ));
                }
                (shape, dtype)
            }
            (_, Some(p)) => {
                if !(0.0..=1.0).contains(&p) {
                    return Err(Error::argument("bernoulli", format!("p is {p}; it must be from 0 to 1")));
                }
                let Some(dims) = a.opt_ints(1) else {
                    return Err(
                        Error::argument("bernoulli", "a number p needs a shape").hint("pl.bernoulli(0.5, {2, 3})")
                    );
                };
                (create::shape_of("bernoulli", dims)?, DType::F32)
            }
            _ => return Err(Error::argument("bernoulli", "p must be a tensor or a number")),
        };
        g.without_autocast(|g| {
            let u = draw(g, shape)?;
            let p = a.operand(g, 0, DType::F32)?;
            let p = g.widen(p)?;
            let hit = g.lt(u, p)?;
            g.cast(hit, a.dtype(2).unwrap_or(dtype))
        })
        .map(one)
    }),
    samples: &["0.3, [2,3]", "1.0, [4]", "p(2,3)", "0.5, [0]", "0.5, [3], dtype='bool'"],
    ..Op::BASE
};

pub static RAND_LIKE: Op = Op {
    name: "rand_like",
    sig: "x: tensor, *, dtype: dtype?",
    doc: "x (...) -> (...): uniform in [0, 1), of x's dtype unless one is given. See `rand`.",
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let (shape, dtype) = (g.shape(x), float_dtype("rand_like", a.dtype(1).or(Some(g.dtype(x))))?);
        g.without_autocast(|g| rand(g, shape, dtype)).map(one)
    }),
    samples: &["f(2,3)", "f(0,3)", "i(4;3), dtype='f32'"],
    ..Op::BASE
};

pub static RANDN_LIKE: Op = Op {
    name: "randn_like",
    sig: "x: tensor, *, dtype: dtype?",
    doc: "x (...) -> (...): normal with mean 0 and variance 1, of x's dtype unless one is given. See `randn`.",
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let (shape, dtype) = (g.shape(x), float_dtype("randn_like", a.dtype(1).or(Some(g.dtype(x))))?);
        g.without_autocast(|g| randn(g, shape, dtype)).map(one)
    }),
    samples: &["f(2,3)", "f(0,3)", "i(4;3), dtype='f32'"],
    ..Op::BASE
};

pub static DROPOUT: Op = Op {
    name: "dropout",
    sig: "x: tensor, p: float = 0.5",
    doc: "x (...) -> (...): each element 0 with probability p, else x / (1 - p). p is a run-time number in [0, 1]; at 0 the\n\
          result is x itself. The mask is generated again in the backward pass, not stored. Srivastava et al., JMLR 15\n\
          (2014).",
    call: Some(|g, a| {
        let p = a.float(1)?;
        if !(0.0..=1.0).contains(&p) {
            return Err(Error::argument("dropout", format!("p is {p}; it must be from 0 to 1")));
        }
        let x = g.to_float(a.tensor(0)?)?;
        if p == 0.0 {
            // The counter advances even so, so that later draws of the step do not depend on p.
            g.rng.occurrence = g.rng.occurrence.wrapping_add(1);
            return Ok(one(x));
        }
        dropout(g, x, p)
    }),
    samples: &["f(2,3), 0.3", "f(0,3), 0.5", "f(4), 0.0"],
    smooth: true,
    ..Op::BASE
};

fn dropout(g: &mut Graph, x: NodeId, p: f64) -> Result<Out> {
    let shape = g.shape(x);
    let u = draw(g, shape)?;
    let limit = g.scalar(Number::Float(p), DType::F32);
    let keep = g.ge(u, limit)?;
    g.island(x, |g, x| {
        let work = g.dtype(x);
        // At p = 1 all elements are 0, and the scale must not be infinite.
        let scale = g.scalar(Number::Float(if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 }), work);
        let y = g.mul(x, scale)?;
        let zero = g.constant_like(0.0, y);
        g.where_(keep, y, zero)
    })
    .map(one)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{Args, Value};

    fn numbers(g: &Graph) -> Vec<u64> {
        g.nodes().iter().filter(|n| n.op == &create::SCALAR).map(|n| n.payload).collect()
    }

    #[test]
    fn every_call_draws_from_a_counter_of_its_own() {
        let mut g = Graph::new();
        g.rng.seed = 7;
        g.rng.step = 3;
        let shape = Shape::of(&[2]);
        draw(&mut g, shape).unwrap();
        draw(&mut g, shape).unwrap();
        assert_eq!(numbers(&g), [7, 3 << 32, 7, 3 << 32 | 1]);
        randn(&mut g, shape, DType::F32).unwrap();
        assert_eq!(g.rng.occurrence, 4);
    }

    #[test]
    fn dropout_at_zero_is_the_identity_and_advances_the_counter() {
        let mut g = Graph::new();
        let x = g.leaf(&create::LEAF, Shape::of(&[2]), DType::F32, &[], 0);
        let args = Args::new(&DROPOUT, [Value::Tensor(x), Value::Number(Number::Float(0.0))]);
        assert_eq!(super::super::call(&mut g, &DROPOUT, &args).unwrap()[0], x);
        assert_eq!(g.rng.occurrence, 1);
        let args = Args::new(&DROPOUT, [Value::Tensor(x), Value::Number(Number::Float(1.5))]);
        let e = super::super::call(&mut g, &DROPOUT, &args).unwrap_err();
        assert_eq!(e.to_string(), "dropout: p is 1.5; it must be from 0 to 1");
    }
}
