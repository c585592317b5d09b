//! Defines the contract of an op: everything that the planner, the backends, autograd, the Lua bindings and the tests know
//! about it.
//!
//! Four kinds of op, by [`Class`]:
//! - primitives (`View`, `Map`, `Reduce`, `Library`, `Generator`, `Leaf`): nodes that the planner and backends know;
//! - `Fused`: one node that carries its own decomposition into primitives. The decomposition is the oracle, the fallback and
//!   the CPU path; a backend with a kernel of its own keeps the node whole;
//! - `Function`: a composition recorded as other ops on the spot, never a node;
//! - `Host`: the result's shape depends on data, so inputs are evaluated and the function runs on the host.
//!
//! Device code belongs to the backends: a map's CUDA function has the map's name (kernels/device/ops.cuh), and each backend
//! lists its library routines in one table, by op.

use crate::amp::Amp;
use crate::error::{Error, Result};
use crate::graph::{Graph, Infer, Meta, NodeId};
use crate::ops::elementwise::MapFn;
use crate::ops::{Args, Out};
use crate::{HostTensor, Layout, Shape};
use smallvec::SmallVec;
use std::fmt;

/// A registry entry. Statics of this type *are* the ops: identity is the address, `name` is unique.
pub struct Op {
    pub name: &'static str,
    /// The Lua face, parsed by [`crate::ops::parse_signature`]; empty for an op users never call by name.
    pub sig: &'static str,
    /// First line: the contract in shape letters. Then dtypes, edge cases, source of the method.
    pub doc: &'static str,
    /// How many tensors a call gives back.
    pub results: Results,
    pub class: Class,
    pub infer: fn(&Infer) -> Result<Meta>,
    /// Records a call. `None`: all arguments are operands of a `Map` (promoted and broadcast together).
    pub call: Option<fn(&mut Graph, &Args) -> Result<Out>>,
    pub grad: Grad,
    pub amp: Amp,
    /// Operations of its matrix products, a multiplication and an addition each counted; `None`: it makes none.
    pub flops: Option<fn(&Work) -> u64>,
    /// Whether a kernel of this op may apply a map to its result before it stores it (a GEMM epilogue).
    pub epilogue: bool,
    /// For an op that checks indices when it runs: what an index out of range is reported as, from the node's attributes.
    pub index_fault: Option<fn(&[i64]) -> IndexFault>,
    /// How far a result may be from its reference, where it differs from the default of the op's class.
    pub tolerance: Option<Tolerance>,
    /// Calls to test with, in the sampler's language (see `tests/src/sample.rs`): `"f(2,3), 1, keepdim=true"`.
    pub samples: &'static [&'static str],
    /// Whether the value is differentiable twice everywhere the samples look.
    pub smooth: bool,
}

impl Op {
    /// The defaults the op blocks start from.
    pub const BASE: Op = Op {
        name: "",
        sig: "",
        doc: "",
        results: Results::One,
        class: Class::Function,
        infer: |i| Err(Error::argument(i.op, "this is a bug: a function was recorded as a node")),
        call: None,
        grad: Grad::Zero,
        amp: Amp::Keep,
        flops: None,
        epilogue: false,
        index_fault: None,
        tolerance: None,
        samples: &[],
        smooth: false,
    };

    /// A stable number for plan keys and caches: FNV-1a of the name.
    pub fn code(&self) -> u32 {
        self.name.bytes().fold(0x811c_9dc5, |h, b| (h ^ b as u32).wrapping_mul(0x0100_0193))
    }
}

/// How a kernel that checks indices reports one out of range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IndexFault {
    /// The op that the recipe called; the node may be a part of its decomposition.
    pub op: &'static str,
    pub kind: IndexKind,
}

/// What an index counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IndexKind {
    /// Elements of a dim.
    Elements,
    /// Classes; the id in it is ignored.
    Classes(i64),
    /// Rows at which groups end.
    Ends,
}

impl IndexFault {
    /// The fault of an op whose indices count elements of a dim.
    pub const fn elements(op: &'static str) -> IndexFault {
        IndexFault { op, kind: IndexKind::Elements }
    }

    /// The error for `value`, which is out of range for `size`.
    pub fn error(self, value: i64, size: i64) -> Error {
        let (message, cure) = match self.kind {
            IndexKind::Ends => return crate::ops::grouped::bad_end(None, value, size),
            IndexKind::Classes(ignored) => (
                format!("a target is class {value}, but there are {size} classes"),
                crate::ops::loss::cure_of_class(size, ignored),
            ),
            IndexKind::Elements => (
                format!("index {value} is out of range for a dim of size {size}"),
                match size {
                    0 => "there is nothing to index".to_string(),
                    n => format!("indices count from 0: here 0 to {}", n - 1),
                },
            ),
        };
        Error::argument(self.op, message).hint(cure)
    }
}

/// The distance allowed between a result and its reference, in units in the last place (ulp) of the result's dtype.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Tolerance {
    /// Ulp of 16-bit floats, and of wider ones.
    pub half: f64,
    pub wide: f64,
    /// For 16-bit floats also this share of an ulp of the tensor's largest element: sums that cancel.
    pub half_scaled: f64,
}

/// Which operations [`Op::flops`] counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Count {
    /// Those that the op means. What is computed a second time to save memory does not count, and attention counts whole, also
    /// where it is causal (Chowdhery et al., arXiv:2204.02311, appendix B).
    Meant,
    /// Those that a kernel of the op's own executes.
    Executed,
}

/// A node whose operations are counted.
#[derive(Clone, Copy, Debug)]
pub struct Work<'a> {
    pub inputs: &'a [Shape],
    pub out: Shape,
    pub attrs: &'a [i64],
    pub count: Count,
}

impl Work<'_> {
    /// Elements of input `k`.
    pub fn numel(&self, k: usize) -> u64 {
        self.inputs.get(k).map_or(0, |s| s.numel() as u64)
    }

    /// The size of input `k`'s dim, counted from the last.
    pub fn dim(&self, k: usize, from_last: usize) -> u64 {
        self.inputs.get(k).and_then(|s| s.dims().iter().rev().nth(from_last)).map_or(1, |d| *d as u64)
    }
}

/// Of a product (..., M, K) by (K, N), or by its transpose, to (..., M, N).
pub(crate) fn product_flops(w: &Work) -> u64 {
    2 * w.out.numel() as u64 * w.dim(0, 0)
}

impl PartialEq for Op {
    fn eq(&self, other: &Op) -> bool {
        std::ptr::eq(self, other)
    }
}

impl fmt::Debug for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// How many tensors a call of an op gives back: editors and the reference say it, a test compares it with the samples.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Results {
    One,
    /// One, and with some arguments a second.
    OneOrTwo,
    /// As many as there are names.
    Named(&'static [&'static str]),
    /// As many as the arguments say.
    Several,
}

/// What an op is to the planner.
#[derive(Clone, Copy)]
pub enum Class {
    /// A buffer the engine owns: an evaluated value or a State.
    Leaf,
    /// Values computed from an element's position alone; never stored unless a library op needs them in memory.
    Generator(Generator),
    /// Another reading of the input's elements. The function gives the layout of the result over the input's buffer,
    /// or `None` where strides cannot say it (a reshape of a transposed tensor) and a copy is needed first.
    View(fn(input: &Layout, attrs: &[i64], out: &crate::Shape) -> Option<Layout>),
    /// Elementwise over broadcast inputs of one dtype (`where`: a bool and two of one dtype).
    Map(MapFn),
    /// Elementwise change of dtype.
    Cast,
    /// Over the neighbouring dims `attrs[0]..attrs[1]`, which vanish.
    Reduce(ReduceFn),
    /// A routine each backend supplies under the op's name.
    Library,
    /// One node with its own decomposition: outputs as primitives.
    Fused(Expand),
    /// Output `attrs[0]` (from 1) of the many-valued op that is its input.
    TupleGet,
    Function,
    /// A function of the tensors' values, on the host. `call` then sees what it gave behind the arguments.
    Host(fn(&[HostTensor], &Args) -> Result<Vec<HostTensor>>),
}

pub type Expand = fn(&mut Graph, &[NodeId], &[i64]) -> Result<Out>;

/// What a generator yields at the element whose layout position is `p`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Generator {
    /// A run-time number: the node's payload.
    Scalar,
    /// The number in `attrs[0]` (f64 bits or i64).
    Constant,
    /// `p` itself.
    Iota,
    /// A uniform f32 in [0, 1) of 24 bits: Philox4x32-10 of (seed, counter, p); inputs are the two i64 scalars.
    Uniform,
    /// What its input, an index ramp or uniform numbers, yields at `p` plus a run-time number of the device.
    Shard,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum ReduceFn {
    Sum,
    Prod,
    Max,
    Min,
}

/// How gradients flow back through an op.
#[derive(Clone, Copy)]
pub enum Grad {
    /// The derivative is zero or meaningless (comparisons, indices, `detach`): nothing flows.
    Zero,
    /// The rule, as ordinary nodes.
    Rule(fn(&mut Graph, &GradCtx) -> Result<Grads>),
    /// Through the decomposition of a `Fused` op.
    Expand,
    /// Through a function of the host (Lua): the pass stops there (see [`crate::grad::Backward`]).
    Host,
    /// Not known; asking is an error that says so.
    Missing(&'static str),
}

/// Gradients for each input; `None` where nothing flows.
pub type Grads = SmallVec<[Option<NodeId>; 4]>;

/// What a backward rule sees.
#[derive(Debug)]
pub struct GradCtx<'a> {
    pub op: &'static Op,
    /// The node itself: its value may be used.
    pub out: NodeId,
    pub inputs: &'a [NodeId],
    pub attrs: &'a [i64],
    /// Gradient of output 0.
    pub grad: NodeId,
    /// Gradients of all outputs of a many-valued op (index 0 is `grad`); `None` where no gradient arrived.
    pub grads: &'a [Option<NodeId>],
    /// Which inputs want a gradient; the others may be given or left `None`.
    pub needs: &'a [bool],
}

impl GradCtx<'_> {
    pub fn x(&self, i: usize) -> NodeId {
        self.inputs[i]
    }

    pub fn attr(&self, i: usize) -> usize {
        self.attrs[i] as usize
    }
}
