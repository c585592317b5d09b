//! The op registry: one op, one block.
//!
//! An [`Op`] says everything about an op in one place: its Lua signature, doc, shape and dtype rule, class, backward,
//! and sample inputs (a map's CUDA function has its name: kernels/device/ops.cuh). The Lua bindings, `help`, the editor stubs, the reference page, the op tests, the
//! gradient tests and the fuzzers all loop over [`all`]. A plain new op touches one file of this folder.
//!
//! Four kinds of entry, by [`Class`]:
//! - primitives (`View`, `Map`, `Reduce`, `Library`, `Generator`, `Leaf`): nodes that the planner and backends know;
//! - `Fused`: one node that carries its own decomposition into primitives. The decomposition is the oracle, the
//!   fallback and the CPU path; a backend with a kernel of its own keeps the node whole;
//! - `Function`: a composition recorded as other ops on the spot, never a node;
//! - `Host`: the result's shape depends on data, so inputs are evaluated and the function runs on the host.

mod args;
mod build;

pub mod activation;
pub mod attention;
pub mod cast;
pub mod conv;
pub mod create;
pub mod einsum;
pub mod elementwise;
pub mod fp8;
pub mod grouped;
pub mod index;
pub mod loss;
pub mod matmul;
pub mod movement;
pub mod norm;
pub mod optim;
pub mod random;
pub mod reduce;
pub mod scan;
pub mod sort;
pub mod source;

pub use args::{Args, Param, Ty, Value, parse_signature};
pub use build::{Out, bits, one, out_of, real};
pub use cast::cast;

use crate::amp::Amp;
use crate::error::{Error, Result};
use crate::graph::{Graph, Infer, Meta, NodeId};
use crate::{HostTensor, Layout, Shape};
use elementwise::MapFn;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::fmt;
use std::sync::OnceLock;

/// A registry entry. Statics of this type *are* the ops: identity is the address, `name` is unique.
pub struct Op {
    pub name: &'static str,
    /// The Lua face, parsed by [`parse_signature`]; empty for an op users never call by name.
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
        samples: &[],
        smooth: false,
    };

    /// A stable number for plan keys and caches: FNV-1a of the name.
    pub fn code(&self) -> u32 {
        self.name.bytes().fold(0x811c_9dc5, |h, b| (h ^ b as u32).wrapping_mul(0x0100_0193))
    }
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

/// All ops with their place in the Lua face, in documentation order.
pub fn all() -> &'static [&'static Op] {
    static ALL: OnceLock<Vec<&'static Op>> = OnceLock::new();
    ALL.get_or_init(|| {
        [
            create::OPS,
            random::OPS,
            cast::OPS,
            elementwise::OPS,
            activation::OPS,
            reduce::OPS,
            scan::OPS,
            movement::OPS,
            index::OPS,
            sort::OPS,
            matmul::OPS,
            grouped::OPS,
            fp8::OPS,
            conv::OPS,
            norm::OPS,
            attention::OPS,
            loss::OPS,
            optim::OPS,
            source::OPS,
        ]
        .concat()
    })
}

/// The op of that name.
pub fn by_name(name: &str) -> Option<&'static Op> {
    static NAMES: OnceLock<HashMap<&'static str, &'static Op>> = OnceLock::new();
    NAMES.get_or_init(|| all().iter().map(|op| (op.name, *op)).collect()).get(name).copied()
}

/// Records a call of `op` as the Lua face does: through its `call`, or as a `Map` of all operands.
pub fn call(g: &mut Graph, op: &'static Op, args: &Args) -> Result<Out> {
    match op.call {
        Some(f) => f(g, args),
        None => args.operands(g).and_then(|xs| g.map(op, &xs)).map(one),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_codes_and_signatures_are_sound() {
        let mut codes = HashMap::new();
        for op in all() {
            assert!(codes.insert(op.code(), op.name).is_none(), "{} is twice in the registry or collides", op.name);
            if !op.sig.is_empty() {
                let params = parse_signature(op.sig).unwrap_or_else(|e| panic!("{}: {e}", op.name));
                assert!(!params.is_empty() || op.sig == "-", "{}: empty signature", op.name);
                assert!(!op.doc.is_empty(), "{} has no doc", op.name);
                assert!(!op.samples.is_empty(), "{} has no samples", op.name);
                assert!(op.call.is_some() || matches!(op.class, Class::Map(_)), "{} cannot be called", op.name);
            }
        }
    }
}
