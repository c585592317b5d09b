//! Plans without a device and compiles with NVRTC, for the tests of generated kernels.

pub mod nvrtc;

use perilune_core::graph::{Graph, NodeId, Number};
use perilune_core::ops::{self, Args, Value, create};
use perilune_core::{DType, Shape, grad};
use perilune_cuda::emit;
use perilune_cuda::launch::{Function, Props, Work};
use perilune_plan::ir::{Kernel, Program};
use perilune_plan::{Backend, Null, Options, Request, Tracer};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A recording and its assignments.
#[derive(Default)]
pub struct Sketch {
    pub g: Graph,
    state_writes: Vec<(u64, NodeId)>,
    leaves: u64,
}

impl Sketch {
    pub fn leaf(&mut self, dtype: DType, dims: &[usize]) -> NodeId {
        self.leaves += 1;
        self.g.leaf(&create::LEAF, Shape::of(dims), dtype, &[], self.leaves)
    }

    /// A State with a unique payload.
    pub fn state(&mut self, dtype: DType, dims: &[usize]) -> (u64, NodeId) {
        self.leaves += 1;
        (self.leaves, self.g.leaf(&create::STATE, Shape::of(dims), dtype, &[], self.leaves))
    }

    pub fn assign(&mut self, state: u64, x: NodeId) {
        self.state_writes.push((state, x));
    }

    /// Calls an op as Lua does: positional arguments, then options; the others have their defaults.
    pub fn call_all(&mut self, name: &str, positional: &[Value], options: &[(&str, Value)]) -> Vec<NodeId> {
        let op = ops::by_name(name).unwrap_or_else(|| panic!("no op {name}"));
        let params = ops::parse_signature(op.sig).unwrap();
        let mut values: Vec<Value> = params.iter().map(|p| p.default.clone()).collect();
        values[..positional.len()].clone_from_slice(positional);
        for (option, v) in options {
            values[params.iter().position(|p| p.name == *option).unwrap()] = v.clone();
        }
        ops::call(&mut self.g, op, &Args::new(op, values)).unwrap_or_else(|e| panic!("{name}: {e}")).to_vec()
    }

    pub fn call(&mut self, name: &str, args: &[Value]) -> NodeId {
        self.call_all(name, args, &[])[0]
    }

    pub fn grads(&mut self, y: NodeId, wrt: &[NodeId]) -> Vec<NodeId> {
        let (shape, dtype) = (self.g.shape(y), self.g.dtype(y));
        let seed = self.g.filled(1.0, shape, dtype).unwrap();
        grad::grad(&mut self.g, y, seed, wrt, false).unwrap().into_iter().flatten().collect()
    }

    pub fn program(&self, roots: &[NodeId], fusion: bool) -> Program {
        plan(&self.g, self.request(roots), fusion)
    }

    pub fn request(&self, roots: &[NodeId]) -> Request {
        Request { roots: roots.to_vec(), state_writes: self.state_writes.clone(), ..Request::default() }
    }
}

pub fn plan(g: &Graph, request: Request, fusion: bool) -> Program {
    plan_on(g, request, fusion, &Null)
}

pub fn plan_on(g: &Graph, request: Request, fusion: bool, backend: &dyn Backend) -> Program {
    let mut tracer = Tracer::default();
    tracer.run(g, &request, |_| None);
    let p =
        perilune_plan::pipeline::plan(g, &tracer, &request, Options { fusion, ..Options::default() }, backend).unwrap();
    perilune_plan::check::check(&p).unwrap();
    p
}

pub fn t(x: NodeId) -> Value {
    Value::Tensor(x)
}

pub fn int(i: i64) -> Value {
    Value::Number(Number::Int(i))
}

pub fn float(f: f64) -> Value {
    Value::Number(Number::Float(f))
}

pub fn ints(v: &[i64]) -> Value {
    Value::Ints(v.into())
}

/// The launches of every region of a program.
pub fn works(p: &Program) -> Vec<Work> {
    works_on(p, &Props::H200)
}

/// As `works`, for another GPU.
pub fn works_on(p: &Program, props: &Props) -> Vec<Work> {
    let lists = p.kernels.iter().filter(|k| !matches!(k, Kernel::Library(_))).map(Kernel::regions);
    lists.map(|r| emit::regions(p, r, props).unwrap()).collect()
}

/// Distinct functions, each with the number of launches that use it.
#[derive(Default)]
pub struct Functions {
    pub by_text: BTreeMap<String, Function>,
    pub uses: HashMap<String, usize>,
}

impl Functions {
    pub fn add(&mut self, works: &[Work]) {
        for l in works.iter().flat_map(|w| &w.launches) {
            *self.uses.entry(l.function.text.clone()).or_default() += 1;
            self.by_text.entry(l.function.text.clone()).or_insert_with(|| (*l.function).clone());
        }
    }

    /// Compiles all functions in parallel and checks that no register spills; returns how many functions have a stack. Without NVRTC,
    /// prints that the test is skipped.
    pub fn compile(&self, arch: &str) -> usize {
        let Some(nvrtc) = nvrtc::Nvrtc::open() else {
            return 0;
        };
        let all: Vec<&Function> = self.by_text.values().collect();
        let chunks: Vec<&[&Function]> = all.chunks(24).collect();
        let stacks = AtomicUsize::new(0);
        nvrtc::each(&chunks, |chunk| {
            let found = nvrtc.functions(chunk, arch);
            assert_eq!(
                (found.functions, found.spilled),
                (chunk.len(), 0),
                "{arch}: PERILUNE_COMPILE=1 prints the report"
            );
            stacks.fetch_add(found.stack, Ordering::Relaxed);
        });
        stacks.into_inner()
    }
}
