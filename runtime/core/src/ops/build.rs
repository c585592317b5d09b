//! Provides short builder functions for recording, which op blocks and backward rules use.

use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId, Number};
use crate::ops::elementwise::{self as e, Domain};
use crate::ops::{Class, Op, activation, cast, create, matmul, movement, reduce, slicing};
use crate::{DType, Shape};
use smallvec::{SmallVec, smallvec};

/// What a call returns: nearly always one tensor.
pub type Out = SmallVec<[NodeId; 4]>;

pub fn one(id: NodeId) -> Out {
    smallvec![id]
}

/// The outputs of a multi-output node that was just recorded: the node and its parts.
pub fn out_of(g: &mut Graph, main: NodeId, parts: &[(Shape, DType)]) -> Out {
    let mut out = one(main);
    for (k, &(shape, dtype)) in parts.iter().enumerate() {
        let detached = g.node(main).detached;
        out.push(g.add(crate::graph::Node {
            op: &create::TUPLE_GET,
            dtype,
            detached,
            tf32: false,
            shape,
            inputs: smallvec![main],
            attrs: smallvec![k as i64 + 1],
            payload: 0,
        }));
    }
    out
}

/// Encodes a float as an attribute.
pub fn bits(value: f64) -> i64 {
    value.to_bits() as i64
}

/// Decodes the float that [`bits`] encoded as an attribute.
pub fn real(attr: i64) -> f64 {
    f64::from_bits(attr as u64)
}

macro_rules! unary {
    ($($name:ident = $op:expr),* $(,)?) => { $(
        pub fn $name(&mut self, x: NodeId) -> Result<NodeId> { self.map(&$op, &[x]) }
    )* };
}

macro_rules! binary {
    ($($name:ident = $op:expr),* $(,)?) => { $(
        pub fn $name(&mut self, x: NodeId, y: NodeId) -> Result<NodeId> { self.map(&$op, &[x, y]) }
    )* };
}

impl Graph {
    unary! {
        neg = e::NEG, exp = e::EXP, log = e::LOG, sqrt = e::SQRT, rsqrt = e::RSQRT, tanh = e::TANH, abs = e::ABS,
        sigmoid = e::SIGMOID, sigmoid2 = e::SIGMOID2, sigmoid2_rest = e::SIGMOID2_REST,
        recip = e::RECIPROCAL, logical_not = e::LOGICAL_NOT, sign = e::SIGN, sin = e::SIN,
        cos = e::COS, erf = e::ERF, copy = e::COPY, isnan = e::ISNAN, isinf = e::ISINF, log1p = e::LOG1P,
        expm1 = e::EXPM1, floor = e::FLOOR,
    }
    binary! {
        sub = e::SUB, mul = e::MUL, div = e::DIV, maximum = e::MAXIMUM, minimum = e::MINIMUM,
        eq = e::EQ, ne = e::NE, lt = e::LT, le = e::LE, gt = e::GT, ge = e::GE, pow = e::POW,
        logical_and = e::LOGICAL_AND, logical_or = e::LOGICAL_OR,
    }

    /// The common dtype of tensors.
    pub fn common(&self, xs: &[NodeId]) -> DType {
        let (mut wide, mut scalar) = (None, None);
        for &x in xs {
            let meet = if self.shape(x).is_scalar() { &mut scalar } else { &mut wide };
            *meet = Some(meet.map_or(self.dtype(x), |d| DType::promote(d, self.dtype(x))));
        }
        match (wide, scalar) {
            (Some(wide), Some(scalar)) => wide.promote_scalar(scalar),
            (one, other) => one.or(other).unwrap_or(DType::F32),
        }
    }

    /// Records a `Map` op: promotes the operands to one dtype and checks that they broadcast.
    pub fn map(&mut self, op: &'static Op, xs: &[NodeId]) -> Result<NodeId> {
        let Class::Map(f) = op.class else {
            return Err(Error::argument(op.name, "this is a bug: not an elementwise op"));
        };
        let skip = usize::from(f == e::MapFn::Where);
        let mut dtype = self.common(&xs[skip..]);
        match f.domain() {
            Domain::Float | Domain::Code => dtype = dtype.to_float(),
            Domain::Number if dtype == DType::Bool => dtype = DType::I64,
            Domain::Logic => dtype = DType::Bool,
            _ => {}
        }
        let mut inputs: SmallVec<[NodeId; 4]> = SmallVec::new();
        for (i, &x) in xs.iter().enumerate() {
            let want = if i < skip { DType::Bool } else { dtype };
            inputs.push(if self.dtype(x) == want { x } else { cast(self, x, want)? });
        }
        self.push(op, &inputs, &[])
    }

    pub fn where_(&mut self, cond: NodeId, a: NodeId, b: NodeId) -> Result<NodeId> {
        self.map(&e::WHERE, &[cond, a, b])
    }

    /// Combines `x` with a constant of the program (not a slot) as right operand.
    pub fn mul_c(&mut self, x: NodeId, c: f64) -> Result<NodeId> {
        let c = self.constant_like(c, x);
        self.mul(x, c)
    }

    pub fn add_c(&mut self, x: NodeId, c: f64) -> Result<NodeId> {
        let c = self.constant_like(c, x);
        self.add_(x, c)
    }

    /// `c - x`.
    pub fn rsub_c(&mut self, c: f64, x: NodeId) -> Result<NodeId> {
        let c = self.constant_like(c, x);
        self.sub(c, x)
    }

    pub fn maximum_c(&mut self, x: NodeId, c: f64) -> Result<NodeId> {
        let c = self.constant_like(c, x);
        self.maximum(x, c)
    }

    pub fn minimum_c(&mut self, x: NodeId, c: f64) -> Result<NodeId> {
        let c = self.constant_like(c, x);
        self.minimum(x, c)
    }

    /// `add` under a name that does not shadow the arena's `add`.
    pub fn add_(&mut self, x: NodeId, y: NodeId) -> Result<NodeId> {
        self.map(&e::ADD, &[x, y])
    }

    pub fn square(&mut self, x: NodeId) -> Result<NodeId> {
        self.mul(x, x)
    }

    pub fn cast(&mut self, x: NodeId, dtype: DType) -> Result<NodeId> {
        cast(self, x, dtype)
    }

    /// Casts `x` to the dtype in which composites compute: f32 for 16-bit floats and integers.
    pub fn widen(&mut self, x: NodeId) -> Result<NodeId> {
        let dtype = self.dtype(x).to_float().compute();
        cast(self, x, dtype)
    }

    /// `x` as a float: itself, or f32 for integers.
    pub fn to_float(&mut self, x: NodeId) -> Result<NodeId> {
        let dtype = self.dtype(x).to_float();
        cast(self, x, dtype)
    }

    /// Applies `f` to `x` in the dtype in which composites compute (see `widen`), and rounds its result once to the
    /// dtype of `x`.
    pub fn island(&mut self, x: NodeId, f: impl FnOnce(&mut Graph, NodeId) -> Result<NodeId>) -> Result<NodeId> {
        let dtype = self.dtype(x).to_float();
        let w = self.widen(x)?;
        let y = f(self, w)?;
        cast(self, y, dtype)
    }

    pub fn reshape(&mut self, x: NodeId, dims: &[usize]) -> Result<NodeId> {
        movement::reshape(self, x, Shape::new(dims)?)
    }

    pub fn expand(&mut self, x: NodeId, shape: Shape) -> Result<NodeId> {
        movement::expand(self, x, shape)
    }

    pub fn permute(&mut self, x: NodeId, axes: &[usize]) -> Result<NodeId> {
        movement::permute(self, x, axes)
    }

    /// Swaps the last two dims.
    pub fn t(&mut self, x: NodeId) -> Result<NodeId> {
        let r = self.shape(x).rank();
        let mut axes: SmallVec<[usize; 8]> = (0..r).collect();
        axes.swap(r - 1, r - 2);
        movement::permute(self, x, &axes)
    }

    pub fn unsqueeze(&mut self, x: NodeId, at: usize) -> Result<NodeId> {
        let shape = self.shape(x).insert(at, 1)?;
        movement::reshape(self, x, shape)
    }

    /// Elements `lo, lo + step, …` below `hi` of axis `at`.
    pub fn slice(&mut self, x: NodeId, at: usize, lo: usize, hi: usize, step: usize) -> Result<NodeId> {
        slicing::slice(self, x, at, lo, hi, step)
    }

    /// Sum over the axes of `dims` (any set); with `keepdim` the axes are kept with size 1.
    pub fn sum(&mut self, x: NodeId, dims: &[usize], keepdim: bool) -> Result<NodeId> {
        reduce::over(self, &reduce::SUM, x, dims, keepdim)
    }

    /// Sum of all elements, a scalar.
    pub fn sum_all(&mut self, x: NodeId) -> Result<NodeId> {
        let dims: SmallVec<[usize; 8]> = (0..self.shape(x).rank()).collect();
        self.sum(x, &dims, false)
    }

    pub fn max(&mut self, x: NodeId, dims: &[usize], keepdim: bool) -> Result<NodeId> {
        reduce::over(self, &reduce::AMAX, x, dims, keepdim)
    }

    pub fn mean(&mut self, x: NodeId, dims: &[usize], keepdim: bool) -> Result<NodeId> {
        reduce::mean(self, x, dims, keepdim)
    }

    /// Reverses a broadcast: sums `x` down to `shape`, which broadcasts to the shape of `x`.
    pub fn sum_to(&mut self, x: NodeId, shape: Shape) -> Result<NodeId> {
        let from = self.shape(x);
        if from == shape {
            return Ok(x);
        }
        let lead = from.rank() - shape.rank();
        let wide = |i: usize| i < lead || (shape.dims()[i - lead] == 1 && from.dims()[i] != 1);
        let dims: SmallVec<[usize; 8]> = (0..from.rank()).filter(|&i| wide(i)).collect();
        let y = self.sum(x, &dims, false)?;
        movement::reshape(self, y, shape)
    }

    /// The elements of axis `at` in reverse order.
    pub fn flip(&mut self, x: NodeId, at: usize) -> Result<NodeId> {
        self.push(&movement::FLIP, &[x], &[at as i64])
    }

    pub fn matmul(&mut self, a: NodeId, b: NodeId) -> Result<NodeId> {
        matmul::matmul(self, a, b)
    }

    pub fn relu(&mut self, x: NodeId) -> Result<NodeId> {
        self.map(&activation::RELU, &[x])
    }

    /// `0, 1, …, n - 1` as i64 along axis `at` of a tensor that broadcasts to rank `rank`.
    pub fn iota_along(&mut self, n: usize, at: usize, rank: usize) -> Result<NodeId> {
        let i = create::iota(self, n)?;
        let mut dims: SmallVec<[usize; 8]> = smallvec![1; rank];
        dims[at] = n;
        self.reshape(i, &dims)
    }

    /// A tensor of `shape` filled with one constant of the program.
    pub fn filled(&mut self, value: f64, shape: Shape, dtype: DType) -> Result<NodeId> {
        let c = self.constant(value, dtype);
        self.expand(c, shape)
    }

    pub fn slot(&mut self, n: Number, dtype: DType) -> NodeId {
        self.scalar(n, dtype)
    }
}
