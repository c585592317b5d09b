//! Defines the contract of an op: everything that the planner, the backends, autograd, the Lua bindings and the tests know
//! about it.
//!
//! Four kinds of op, by [`Class`]:
//! - primitives (`View`, `Map`, `Reduce`, `Library`, `Generator`, `Leaf`): nodes that the planner and backends know;
//! - `Fused`: one node that carries its own decomposition into primitives. The decomposition is the oracle, the
//!   fallback and the CPU path; a backend with a kernel for the op keeps the node whole;
//! - `Function`: a composition recorded as other ops at once, never a node;
//! - `Host`: the shape of the result depends on data, so inputs are evaluated and the function runs on the host.
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

/// A registry entry. Statics of this type *are* the ops: the address is the identity, and `name` is unique.
pub struct Op {
    pub name: &'static str,
    /// The Lua signature, parsed by [`crate::ops::parse_signature`]; empty for an op that users never call by name.
    pub sig: &'static str,
    /// First line: the contract in shape letters. Then dtypes, edge cases and the source of the method.
    pub doc: &'static str,
    /// Number of tensors that a call returns.
    pub results: Results,
    pub class: Class,
    pub infer: fn(&Infer) -> Result<Meta>,
    /// Records a call. `None`: all arguments are operands of a `Map` (promoted and broadcast together).
    pub call: Option<fn(&mut Graph, &Args) -> Result<Out>>,
    pub grad: Grad,
    pub amp: Amp,
    /// Operations of its matrix products, counting multiplications and additions separately; `None` if it has none.
    pub flops: Option<fn(&Work) -> u64>,
    /// Elements of input `k` that a call reads from memory; `None` if it reads each input once as a whole.
    pub reads: Option<fn(&Work, usize) -> u64>,
    /// How a node divides among devices; `None`: by the rule of its class (see [`crate::sharding`]).
    pub shard: Option<crate::sharding::Rule>,
    /// How a node divides whose operand 0 and result have different dims that go together.
    pub regroups: Option<&'static crate::sharding::Regrouping>,
    /// Whether a kernel of this op may apply a map to its result before it stores it (a GEMM epilogue).
    pub epilogue: bool,
    /// For an op that checks indices at run time: how an index out of range is reported, given the node's attributes.
    pub index_fault: Option<fn(&[i64]) -> IndexFault>,
    /// Allowed error of a result against its reference, if it differs from the default of the op's class.
    pub tolerance: Option<Tolerance>,
    /// Test calls in the sampler's language (see `tests/src/sample.rs`): `"f(2,3), 1, keepdim=true"`.
    pub samples: &'static [&'static str],
    /// Whether the value is twice differentiable at all points of the samples.
    pub smooth: bool,
}

impl Op {
    /// The defaults of op blocks.
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
        reads: None,
        shard: None,
        regroups: None,
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

/// How a kernel that checks indices reports one that is out of range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IndexFault {
    /// The op that the recipe called; the node may be part of its decomposition.
    pub op: &'static str,
    pub kind: IndexKind,
}

/// What an index refers to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IndexKind {
    /// Elements of a dim.
    Elements,
    /// Classes; the field is the ignored id.
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

/// The allowed difference between a result and its reference, in units in the last place (ulp) of the result's dtype.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Tolerance {
    /// Ulp of 16-bit floats, and of wider floats.
    pub half: f64,
    pub wide: f64,
    /// For 16-bit floats, also this fraction of an ulp of the tensor's largest element, for sums with cancellation.
    pub half_scaled: f64,
}

/// Which operations [`Op::flops`] counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Count {
    /// The nominal operations of the op. Recomputation to save memory does not count, and causal attention counts in
    /// full (Chowdhery et al., arXiv:2204.02311, appendix B).
    Meant,
    /// The operations that the op's own kernel executes.
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

    /// The size of a dim of input `k`, counted from the last.
    pub fn dim(&self, k: usize, from_last: usize) -> u64 {
        self.inputs.get(k).and_then(|s| s.dims().iter().rev().nth(from_last)).map_or(1, |d| *d as u64)
    }
}

/// The product of counts, or the largest number where it has no room: sizes of several tensors meet in it.
pub(crate) fn times<const N: usize>(counts: [u64; N]) -> u64 {
    counts.into_iter().fold(1, u64::saturating_mul)
}

/// The elements that a lookup reads of each input: of the first as many as it returns, at most all.
pub(crate) fn lookup_reads(w: &Work, k: usize) -> u64 {
    if k == 0 { w.numel(0).min(w.out.numel() as u64) } else { w.numel(k) }
}

/// The operations of a product (..., M, K) by (K, N), or by its transpose, to (..., M, N).
pub(crate) fn product_flops(w: &Work) -> u64 {
    times([2, w.out.numel() as u64, w.dim(0, 0)])
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

/// Number of tensors that a call of an op returns, for editors and the reference; a test compares it with the samples.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Results {
    One,
    /// One, and a second one with some arguments.
    OneOrTwo,
    /// One for each name.
    Named(&'static [&'static str]),
    /// Depends on the arguments.
    Several,
}

/// How the planner treats an op.
#[derive(Clone, Copy)]
pub enum Class {
    /// A buffer that the engine owns: an evaluated value or a State.
    Leaf,
    /// Values computed only from an element's position; stored only if a library op needs them in memory.
    Generator(Generator),
    /// A view of the input's elements. The function returns the layout of the result over the input's buffer, or `None`
    /// if strides cannot express it (a reshape of a transposed tensor) and a copy is needed first.
    View(fn(input: &Layout, attrs: &[i64], out: &crate::Shape) -> Option<Layout>),
    /// Elementwise over broadcast inputs of one dtype (`where`: a bool and two of one dtype).
    Map(MapFn),
    /// Elementwise change of dtype.
    Cast,
    /// A reduction over the adjacent dims `attrs[0]..attrs[1]`, which are removed.
    Reduce(ReduceFn),
    /// A routine that each backend registers under the op's name.
    Library,
    /// One node with a decomposition: its outputs as primitives.
    Fused(Expand),
    /// Output `attrs[0]` (from 1) of the multi-output op that is its input.
    TupleGet,
    Function,
    /// A function of the tensors' values on the host. `call` receives its results after the arguments.
    Host(fn(&[HostTensor], &Args) -> Result<Vec<HostTensor>>),
}

pub type Expand = fn(&mut Graph, &[NodeId], &[i64]) -> Result<Out>;

/// The value of a generator at the element whose layout position is `p`.
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

impl ReduceFn {
    pub const ALL: &[ReduceFn] = &[ReduceFn::Sum, ReduceFn::Prod, ReduceFn::Max, ReduceFn::Min];

    /// The function that combines two elements.
    pub fn combine(self) -> MapFn {
        match self {
            ReduceFn::Sum => MapFn::Add,
            ReduceFn::Prod => MapFn::Mul,
            ReduceFn::Max => MapFn::Maximum,
            ReduceFn::Min => MapFn::Minimum,
        }
    }
}

/// How gradients propagate through an op.
#[derive(Clone, Copy)]
pub enum Grad {
    /// The derivative is zero or meaningless (comparisons, indices, `detach`): nothing flows.
    Zero,
    /// The rule, as ordinary nodes.
    Rule(fn(&mut Graph, &GradCtx) -> Result<Grads>),
    /// Through the decomposition of a `Fused` op.
    Expand,
    /// Through a host (Lua) function: the pass pauses there (see [`crate::grad::Backward`]).
    Host,
    /// Unknown; requesting it is an error with this message.
    Missing(&'static str),
}

/// Gradients for each input; `None` where nothing flows.
pub type Grads = SmallVec<[Option<NodeId>; 4]>;

/// The arguments of a backward rule.
#[derive(Debug)]
pub struct GradCtx<'a> {
    pub op: &'static Op,
    /// The node itself: its value may be used.
    pub out: NodeId,
    pub inputs: &'a [NodeId],
    pub attrs: &'a [i64],
    /// Gradient of output 0.
    pub grad: NodeId,
    /// Gradients of all outputs of a multi-output op (index 0 is `grad`); `None` where no gradient arrived.
    pub grads: &'a [Option<NodeId>],
    /// Which inputs need a gradient; the others may be computed or left `None`.
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
