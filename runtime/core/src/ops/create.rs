//! Defines leaves and generators, and the functions that create tensors.
//!
//! No tensor memory is allocated here: `zeros` is a constant behind an expanding view, `arange` an index ramp. The
//! engine creates leaves for tensors from Lua tables (`pl.tensor`) and files.

use super::{Class, Generator, Grad, Op, Out, one};
use crate::error::{Error, Result};
use crate::graph::{Graph, Meta, Node, NodeId, Number};
use crate::mesh::{Along, Axis, Mesh, Placement, Start};
use crate::shape::{MAX_NUMEL, size};
use crate::{DType, Shape};
use smallvec::smallvec;

pub static OPS: &[&Op] = &[
    &LEAF,
    &STATE,
    &SCALAR,
    &CONSTANT,
    &IOTA,
    &TUPLE_GET,
    &CUSTOM,
    &OPTIMIZATION_BARRIER,
    &ZEROS,
    &ONES,
    &FULL,
    &ZEROS_LIKE,
    &ONES_LIKE,
    &FULL_LIKE,
    &ARANGE,
    &LINSPACE,
    &EYE,
    &SHARD,
];

/// An evaluated value held by the engine; `payload` is its identity.
pub static LEAF: Op = Op { name: "leaf", class: Class::Leaf, ..Op::BASE };
/// A State's value at the start of the step; `payload` is its identity.
pub static STATE: Op = Op { name: "state", class: Class::Leaf, ..Op::BASE };
/// A run-time number; `payload` holds its bits.
pub static SCALAR: Op = Op { name: "scalar", class: Class::Generator(Generator::Scalar), ..Op::BASE };
/// A constant of the program; `attrs[0]` holds its bits.
pub static CONSTANT: Op = Op { name: "constant", class: Class::Generator(Generator::Constant), ..Op::BASE };
/// `0 … attrs[0] - 1` as i64.
pub static IOTA: Op = Op { name: "iota", class: Class::Generator(Generator::Iota), ..Op::BASE };
/// The part of its input that one device of a mesh has: of an index ramp, of uniform numbers, or of a leaf that is whole on all
/// devices. `attrs`: [`Start::attrs`].
pub static SHARD: Op = Op { name: "part", class: Class::Generator(Generator::Shard), ..Op::BASE };
/// Output `attrs[0]` of the multi-output op that is its input.
pub static TUPLE_GET: Op = Op { name: "tuple_get", class: Class::TupleGet, ..Op::BASE };
/// The buffer that holds several outputs of its input; created by the planner, never recorded.
pub static JOINED: Op = Op { name: "joined", class: Class::TupleGet, ..Op::BASE };

/// Input 0, not to be read before input 1 has been computed. Recomputation starts from such barriers, so that it runs
/// late and its nodes differ from those of the first computation. Only the planner inserts it.
pub static OPTIMIZATION_BARRIER: Op =
    Op { name: "optimization_barrier", class: Class::View(|input, _, _| Some(*input)), ..Op::BASE };
/// The value of input 0; the host differentiates it with respect to the inputs after it. `payload` names the function.
pub static CUSTOM: Op = Op {
    name: "custom",
    class: Class::View(|l, _, _| Some(*l)),
    infer: |i| Ok(i.inputs[0]),
    grad: Grad::Host,
    ..Op::BASE
};

pub fn iota(g: &mut Graph, n: usize) -> Result<NodeId> {
    Ok(g.leaf(&IOTA, Shape::new(&[n])?, DType::I64, &[n as i64], 0))
}

/// The part of `x`, an index ramp or uniform numbers, that each device of `mesh` makes: elements have the values that they have in
/// the whole tensor. The program is the same for all devices; where a part begins is a run-time number. On one device it is `x`.
/// In the last parts of an uneven dim, elements behind the tensor's end have other values of the same kind.
pub fn shard(g: &mut Graph, x: NodeId, mesh: &Mesh, placement: &Placement) -> Result<NodeId> {
    let (shape, dtype) = (g.shape(x), g.dtype(x));
    if !matches!(g.generator(x), Some(Generator::Iota | Generator::Uniform)) {
        let message = format!("{} is stored; only random numbers and index ramps are made in parts", g.node(x).op.name);
        return Err(Error::argument("shard", message));
    }
    if Axis::ALL.into_iter().any(|a| mesh.size(a) > 1 && matches!(placement.along(a), Along::Partial(_))) {
        return Err(Error::argument("shard", format!("{placement}: generated numbers are no partial results")));
    }
    let start = Start::new(mesh, placement, &shape)?;
    if start.is_empty() {
        return Ok(x);
    }
    let local = placement.local(mesh, &mesh.coordinates(0), &shape)?.shape;
    let (detached, attrs) = (g.modes.no_grad, start.attrs().collect());
    Ok(g.add(Node { op: &SHARD, dtype, detached, tf32: false, shape: local, inputs: smallvec![x], attrs, payload: 0 }))
}

/// Converts user-given dims to a shape.
pub fn shape_of(op: &str, dims: &[i64]) -> Result<Shape> {
    let mut out = Vec::with_capacity(dims.len());
    for &d in dims {
        out.push(usize::try_from(d).map_err(|_| Error::shape(op, format!("dim {d} is negative")))?);
    }
    Shape::new(&out)
}

fn filled(g: &mut Graph, value: f64, dims: &[i64], dtype: DType, op: &str) -> Result<Out> {
    let shape = shape_of(op, dims)?;
    g.filled(value, shape, dtype).map(one)
}

pub static ZEROS: Op = Op {
    name: "zeros",
    sig: "shape: ints, *, dtype: dtype = f32",
    doc: "zeros({d0, d1, ...}) -> (d0, d1, ...), all 0.",
    call: Some(|g, a| filled(g, 0.0, a.ints(0)?, a.dtype(1).unwrap_or(DType::F32), a.op.name)),
    samples: &["[2,3]", "[0,2]", "[], dtype='f64'", "[4], dtype='i64'", "[2,2], dtype='bool'"],
    ..Op::BASE
};

pub static ONES: Op = Op {
    name: "ones",
    sig: "shape: ints, *, dtype: dtype = f32",
    doc: "ones({d0, d1, ...}) -> (d0, d1, ...), all 1.",
    call: Some(|g, a| filled(g, 1.0, a.ints(0)?, a.dtype(1).unwrap_or(DType::F32), a.op.name)),
    samples: &["[2,3]", "[0,2]", "[], dtype='f64'", "[4], dtype='u8'", "[2,2], dtype='bool'"],
    ..Op::BASE
};

pub static FULL: Op = Op {
    name: "full",
    sig: "shape: ints, value: number, *, dtype: dtype?",
    doc: "full({d0, ...}, value) -> (d0, ...), all `value`.\n\
          dtype defaults to i64 for an integer value and f32 for a float. The value is a run-time number: changing it\n\
          recompiles nothing.",
    call: Some(|g, a| {
        let value = a.number(1)?;
        let dtype = a.dtype(2).unwrap_or(if matches!(value, Number::Int(_)) { DType::I64 } else { DType::F32 });
        let shape = shape_of(a.op.name, a.ints(0)?)?;
        let s = g.scalar(value, dtype);
        g.expand(s, shape).map(one)
    }),
    samples: &["[2,3], 1.5", "[2], 7", "[0], 2.0", "[], 3, dtype='f32'"],
    ..Op::BASE
};

fn like(g: &mut Graph, x: NodeId, value: f64, dtype: Option<DType>) -> Result<Out> {
    let (shape, dtype) = (g.shape(x), dtype.unwrap_or(g.dtype(x)));
    g.filled(value, shape, dtype).map(one)
}

pub static ZEROS_LIKE: Op = Op {
    name: "zeros_like",
    sig: "x: tensor, *, dtype: dtype?",
    doc: "x (...) -> (...), all 0, of x's dtype unless one is given.",
    call: Some(|g, a| like(g, a.tensor(0)?, 0.0, a.dtype(1))),
    samples: &["f(2,3)", "i(4;3)", "f(2), dtype='i64'"],
    ..Op::BASE
};

pub static ONES_LIKE: Op = Op {
    name: "ones_like",
    sig: "x: tensor, *, dtype: dtype?",
    doc: "x (...) -> (...), all 1, of x's dtype unless one is given.",
    call: Some(|g, a| like(g, a.tensor(0)?, 1.0, a.dtype(1))),
    samples: &["f(2,3)", "i(4;3)", "f(2), dtype='i64'"],
    ..Op::BASE
};

pub static FULL_LIKE: Op = Op {
    name: "full_like",
    sig: "x: tensor, value: number, *, dtype: dtype?",
    doc: "x (...) -> (...), all `value`, of x's dtype unless one is given.",
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let (shape, dtype) = (g.shape(x), a.dtype(2).unwrap_or(g.dtype(x)));
        let s = g.scalar(a.number(1)?, dtype);
        g.expand(s, shape).map(one)
    }),
    samples: &["f(2,3), 0.5", "i(4;3), 2"],
    ..Op::BASE
};

pub static ARANGE: Op = Op {
    name: "arange",
    sig: "start: number, stop: number?, step: number = 1, *, dtype: dtype?",
    doc: "arange(stop) or arange(start, stop, step) -> (n): start, start + step, ... below stop (above, if step < 0).\n\
          n = ceil((stop - start) / step), but at least 0. i64 if all are integers, else f32; floats are computed as\n\
          start + i * step in f64 and rounded once for f64, in f32 otherwise.",
    call: Some(|g, a| {
        let (start, stop) = match a.is_none(1) {
            true => (Number::Int(0), a.number(0)?),
            false => (a.number(0)?, a.number(1)?),
        };
        let step = a.number(2)?;
        let given = [start, stop, step].map(Number::as_f64);
        if given[2] == 0.0 || given.iter().any(|x| !x.is_finite()) {
            let [start, stop, step] = given;
            let message =
                format!("start is {start}, stop is {stop} and step is {step}; they must be finite, and step not 0");
            return Err(Error::argument("arange", message));
        }
        // Integers are counted exactly, since f64 cannot represent all of them.
        let whole = match (start, stop, step) {
            (Number::Int(a), Number::Int(b), Number::Int(step)) => {
                let (span, step) =
                    ((i128::from(b) - i128::from(a)) * i128::from(step.signum()), i128::from(step).abs());
                Some((span + step - 1).div_euclid(step).max(0) as f64)
            }
            _ => None,
        };
        let ints = whole.is_some();
        let n = whole.unwrap_or_else(|| ((stop.as_f64() - start.as_f64()) / step.as_f64()).ceil().max(0.0));
        if n > MAX_NUMEL as f64 {
            let of = |x: Number| match x {
                Number::Int(i) => i.to_string(),
                Number::Float(f) => f.to_string(),
            };
            let (start, stop, step) = (of(start), of(stop), of(step));
            let message =
                format!("{start} to {stop} in steps of {step} are {n:e} numbers; a tensor has at most 2^48 elements");
            return Err(Error::argument("arange", message));
        }
        let dtype = a.dtype(3).unwrap_or(if ints { DType::I64 } else { DType::F32 });
        finite_in("arange", dtype, &[("start", given[0]), ("step", given[2])])?;
        ramp(g, n as usize, start, step, dtype).map(one)
    }),
    samples: &["5", "2, 9, 3", "0, 1, 0.25", "5, 0, -2", "3, 3", "4, dtype='f32'"],
    ..Op::BASE
};

/// An error unless numbers are finite in the dtype in which floats of `dtype` are computed: 0 times infinity is NaN.
fn finite_in(op: &str, dtype: DType, numbers: &[(&str, f64)]) -> Result<()> {
    let narrow = dtype.is_float() && dtype.compute() == DType::F32;
    for (name, x) in numbers {
        if !x.is_finite() || narrow && !(*x as f32).is_finite() {
            let within = if narrow { DType::F32 } else { DType::F64 };
            return Err(Error::argument(op, format!("{name} is {x:e}; it must be finite in {within}")));
        }
    }
    Ok(())
}

/// `start + i * step` for `i` below `n`.
fn ramp(g: &mut Graph, n: usize, start: Number, step: Number, dtype: DType) -> Result<NodeId> {
    let i = iota(g, n)?;
    let work = if dtype.is_float() { dtype.compute() } else { DType::I64 };
    let i = g.cast(i, work)?;
    let (start, step) = (g.scalar(start, work), g.scalar(step, work));
    let y = g.mul(i, step)?;
    let y = g.add_(y, start)?;
    g.cast(y, dtype)
}

pub static LINSPACE: Op = Op {
    name: "linspace",
    sig: "start: number, stop: number, steps: int, *, dtype: dtype = f32",
    doc: "linspace(start, stop, n) -> (n): n evenly spaced numbers from start to stop, both included.\n\
          If n = 1, the number is start. Computed from both ends, so that the last is exactly stop.",
    call: Some(|g, a| {
        let (start, stop, n) = (a.float(0)?, a.float(1)?, a.int(2)?);
        if n < 0 {
            return Err(Error::argument("linspace", format!("steps is {n}; it must be 0 or more")));
        }
        let n = size("linspace", "the result", i128::from(n))?;
        let dtype = a.dtype(3).unwrap_or(DType::F32);
        let work = if dtype.is_float() { dtype.compute() } else { DType::F64 };
        let step = if n > 1 { (stop - start) / (n - 1) as f64 } else { 0.0 };
        finite_in("linspace", dtype, &[("start", start), ("stop", stop), ("the step between them", step)])?;
        let step = g.scalar(Number::Float(step), work);
        let (start, stop) = (g.scalar(Number::Float(start), work), g.scalar(Number::Float(stop), work));
        let i = iota(g, n)?;
        let i = g.cast(i, work)?;
        let up = g.mul(i, step)?;
        let up = g.add_(start, up)?;
        let last = g.constant(n.max(1) as f64 - 1.0, work);
        let down = g.sub(last, i)?;
        let down = g.mul(down, step)?;
        let down = g.sub(stop, down)?;
        let half = g.constant(n.div_ceil(2) as f64, work);
        let first = g.lt(i, half)?;
        let y = g.where_(first, up, down)?;
        g.cast(y, dtype).map(one)
    }),
    samples: &["0, 1, 5", "-2, 3, 7", "1, 1, 1", "0, 1, 0", "0, 1, 4, dtype='f64'"],
    ..Op::BASE
};

pub static EYE: Op = Op {
    name: "eye",
    sig: "n: int, m: int?, *, dtype: dtype = f32",
    doc: "eye(n[, m]) -> (n, m): 1 where row equals column, else 0.",
    call: Some(|g, a| {
        let n = a.int(0)?;
        let shape = shape_of("eye", &[n, a.opt_int(1).unwrap_or(n)])?;
        let (r, c) = (g.iota_along(shape.dims()[0], 0, 2)?, g.iota_along(shape.dims()[1], 1, 2)?);
        let same = g.eq(r, c)?;
        g.cast(same, a.dtype(2).unwrap_or(DType::F32)).map(one)
    }),
    samples: &["3", "2, 4", "0", "3, dtype='i64'"],
    ..Op::BASE
};

/// Shape rule of ops that keep the shape and dtype of their first input.
pub fn same(i: &crate::graph::Infer) -> Result<Meta> {
    Ok(i.inputs[0])
}
