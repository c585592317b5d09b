//! The engine: handles, evaluation, reading back.

use crate::diagnostics::Diagnostics;
use crate::memory::Role;
use crate::profile::{Bound, HostStalls, Profile};
use crate::snapshot::SnapshotBytes;
use crate::state::{Deferred, StateId, States};
use crate::step::{PrintPlan, Step, Switches};
use perilune_core::error::{Error, Kind, Result};
use perilune_core::graph::{Graph, NodeId, RngState};
use perilune_core::ops::{self, Args, Class, Op, Value as Arg, create};
use perilune_core::source_loc::{SourceLoc, SourceMap};
use perilune_core::{DType, HostTensor, Shape};
use perilune_plan::ir::{Program, Root};
use perilune_plan::trace::Source;
use perilune_plan::{Backend, Buffer, Cache, Fingerprint, PlannedStep, Request, Tracer, show};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::thread::JoinHandle;

/// A node of some generation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Handle {
    pub generation: u32,
    pub id: NodeId,
}

impl Handle {
    /// What a freed tensor holds: generations count from 1.
    pub const FREED: Handle = Handle { generation: 0, id: NodeId(0) };
}

/// An error, and the recipe line of the kernel or node at fault where that is not the line being run.
#[derive(Clone, Debug)]
pub struct Fault {
    pub error: Error,
    pub loc: Option<SourceLoc>,
}

impl From<Error> for Fault {
    fn from(error: Error) -> Fault {
        Fault { error, loc: None }
    }
}

/// Values behind evaluated nodes: a buffer that nothing writes to any more.
#[derive(Debug)]
pub(crate) struct StoredValue {
    pub uid: u64,
    pub shape: Shape,
    pub dtype: DType,
    pub buffer: Buffer,
    pub role: Role,
    /// The recipe line that made it.
    pub loc: SourceLoc,
}

pub(crate) type Value = Rc<StoredValue>;

/// A handle that outlived its generation with a value.
struct Carried {
    value: Value,
    refs: u32,
    /// The leaf that stands for it in the current generation.
    leaf: Option<Handle>,
}

/// How many generations back a stale handle can still name its line.
const REMEMBERED: usize = 8;

/// What has happened, for people and tests.
#[derive(Clone, Copy, Default, Debug)]
pub struct Stats {
    pub generation: u32,
    pub nodes: usize,
    pub plans: usize,
    pub hits: u64,
    pub misses: u64,
    pub evictions: u64,
    pub runs: u64,
    /// Evaluations in the middle of a step scope.
    pub splits: u64,
    pub compile_ms: f64,
    /// Tracing and looking up plans that were there.
    pub lookup_ms: f64,
    pub run_ms: f64,
    /// Bytes of values and States held now.
    pub held_bytes: usize,
    /// Lua handles of tensors that are no States.
    pub handles: usize,
    pub arena_bytes: usize,
    pub live_bytes: usize,
    /// Of them, States.
    pub state_bytes: usize,
    /// Of the last run: kernels, and bytes of what it handed out.
    pub kernels: usize,
    pub output_bytes: usize,
}

/// The machine code of a step that has not been run.
#[derive(Debug, Default)]
pub enum Code {
    /// Nothing was asked about it.
    #[default]
    Unknown,
    /// Its plan is there, so the code is.
    Known,
    /// There is none that takes long to make.
    Ready,
    Making(JoinHandle<()>),
}

pub struct Engine {
    pub graph: Graph,
    pub source_map: SourceMap,
    pub switches: Switches,
    pub(crate) backend: Rc<dyn Backend>,
    cache: Cache,
    tracer: Tracer,
    generation: u32,
    /// Values of the current generation's nodes, by node; shorter than the graph.
    evaluated: Vec<Option<Value>>,
    /// Live handles of the current generation's nodes, by node.
    refs: Vec<u32>,
    carried: FxHashMap<Handle, Carried>,
    /// Buffers that leaves of the current generation read, by uid.
    live: FxHashMap<u64, Value>,
    next_uid: u64,
    old_locs: VecDeque<(u32, Vec<SourceLoc>)>,
    pub(crate) states: States,
    /// Of the last snapshot.
    pub(crate) copies: Option<SnapshotBytes>,
    pub(crate) step: Step,
    pub(crate) stats: Stats,
    /// Bytes of values made since the caller last collected garbage: dropped ones come back only then.
    pub fresh_bytes: usize,
    /// Bytes of values made in this generation, or since what nobody holds of them was let go.
    pub(crate) made_bytes: usize,
    /// Misses to report: recipe line and what differs.
    pub notices: Diagnostics,
    /// Kernel times, while somebody asks for them.
    pub profile: Option<Profile>,
    /// What the host waits for, while somebody wants to know.
    pub host_stalls: Option<HostStalls>,
    /// The text of every plan compiled, if the switch asks for it.
    pub plans_shown: Diagnostics,
    /// A device that has kernels' texts, to show them where the one that computes has none.
    pub paper: Option<Rc<dyn Backend>>,
    /// FLOP of all products run so far.
    pub products: f64,
    /// What a step may take: more is recomputed, or an error.
    pub memory_budget: Option<usize>,
    /// The plan run with the largest arena.
    pub(crate) largest: Option<PlannedStep>,
    /// The plan that is to run or has failed to, or would take more than the budget.
    pub(crate) attempt: Option<PlannedStep>,
}

impl Engine {
    pub fn new(backend: Rc<dyn Backend>) -> Engine {
        Engine {
            graph: Graph::new(),
            source_map: SourceMap::default(),
            switches: Switches::from_env(),
            backend,
            cache: Cache::default(),
            tracer: Tracer::default(),
            generation: 1,
            evaluated: Vec::new(),
            refs: Vec::new(),
            carried: FxHashMap::default(),
            live: FxHashMap::default(),
            next_uid: 1,
            old_locs: VecDeque::new(),
            states: States::default(),
            copies: None,
            step: Step::default(),
            stats: Stats::default(),
            fresh_bytes: 0,
            made_bytes: 0,
            notices: Diagnostics::default(),
            profile: None,
            host_stalls: None,
            plans_shown: Diagnostics::default(),
            paper: None,
            products: 0.0,
            memory_budget: None,
            largest: None,
            attempt: None,
        }
    }

    pub fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    pub fn generation(&self) -> u32 {
        self.generation
    }

    pub fn stats(&self) -> Stats {
        let c = self.cache.counts;
        let values: usize = self.values().map(|v| v.buffer.nbytes()).sum();
        Stats {
            generation: self.generation,
            nodes: self.graph.len(),
            plans: self.cache.len(),
            hits: c.hits,
            misses: c.misses,
            evictions: c.evictions,
            compile_ms: c.compile_ms,
            held_bytes: values + self.states.nbytes(),
            handles: (self.refs.iter().sum::<u32>() + self.carried.values().map(|c| c.refs).sum::<u32>()) as usize,
            state_bytes: self.states.nbytes(),
            ..self.stats
        }
    }

    pub fn seed(&mut self, seed: u64) {
        self.graph.rng = RngState { seed, step: 0, occurrence: 0 };
    }

    // ---- handles -----------------------------------------------------------------------------------------------

    /// A counted handle of a node of the current generation.
    pub fn handle(&mut self, id: NodeId) -> Handle {
        if self.refs.len() <= id.index() {
            self.refs.resize(self.graph.len().max(id.index() + 1), 0);
        }
        self.refs[id.index()] += 1;
        Handle { generation: self.generation, id }
    }

    /// Counts a copy of a handle.
    pub fn retain(&mut self, h: Handle) {
        if h.generation == self.generation {
            self.refs[h.id.index()] += 1;
        } else if let Some(c) = self.carried.get_mut(&h) {
            c.refs += 1;
        }
    }

    /// A handle is gone.
    pub fn release(&mut self, h: Handle) {
        if h.generation == self.generation {
            if let Some(n) = self.refs.get_mut(h.id.index()) {
                *n = n.saturating_sub(1);
            }
        } else if let Some(c) = self.carried.get_mut(&h) {
            // Its leaf in this generation, if any, is counted for handles of its own.
            c.refs -= 1;
            if c.refs == 0
                && let Some(c) = self.carried.remove(&h)
            {
                // What was given back is no garbage to look for.
                self.fresh_bytes = self.fresh_bytes.saturating_sub(c.value.buffer.nbytes());
            }
        }
    }

    /// The node a handle means in the current generation.
    pub fn node(&mut self, h: Handle) -> Result<NodeId> {
        if h.generation == self.generation {
            return Ok(h.id);
        }
        let generation = self.generation;
        let Some(c) = self.carried.get_mut(&h) else { return Err(self.stale(h)) };
        if let Some(leaf) = c.leaf.filter(|l| l.generation == generation) {
            return Ok(leaf.id);
        }
        let value = c.value.clone();
        let id = self.leaf(value);
        if let Some(c) = self.carried.get_mut(&h) {
            c.leaf = Some(Handle { generation, id });
        }
        Ok(id)
    }

    /// Shape and dtype without touching the graph.
    pub fn meta(&self, h: Handle) -> Result<(Shape, DType)> {
        if h.generation == self.generation {
            let n = self.graph.node(h.id);
            return Ok((n.shape, n.dtype));
        }
        self.carried.get(&h).map(|c| (c.value.shape, c.value.dtype)).ok_or_else(|| self.stale(h))
    }

    /// Whether the value is in memory already.
    pub fn is_evaluated(&self, h: Handle) -> bool {
        if h.generation != self.generation {
            return self.carried.contains_key(&h);
        }
        let node = self.graph.node(h.id);
        self.value(h.id).is_some() || matches!(node.op.class, Class::Leaf)
    }

    /// The line a handle was recorded at, if it is remembered.
    pub fn loc_of(&self, h: Handle) -> Option<SourceLoc> {
        if h.generation == self.generation {
            return Some(self.graph.loc_of(h.id));
        }
        let (_, source_map) = self.old_locs.iter().find(|(g, _)| *g == h.generation)?;
        source_map.get(h.id.index()).copied()
    }

    fn stale(&self, h: Handle) -> Error {
        if h == Handle::FREED {
            return Error::new(Kind::Stale, "", "this tensor was freed with x:free()");
        }
        let at = match self.loc_of(h).filter(|s| *s != SourceLoc::NONE) {
            Some(loc) => format!("recorded at {}", self.source_map.show(loc)),
            None => "recorded in an earlier step".to_string(),
        };
        Error::new(
            Kind::Stale,
            "",
            format!("this tensor was {at}, in a step that has ended, and was never evaluated: its value is gone"),
        )
        .hint("return it from the step, log it, or call pl.keep(x) inside the step")
    }

    // ---- leaves ------------------------------------------------------------------------------------------------

    fn value(&self, id: NodeId) -> Option<&Value> {
        self.evaluated.get(id.index()).and_then(Option::as_ref)
    }

    pub(crate) fn leaf(&mut self, value: Value) -> NodeId {
        let id = self.graph.leaf(&create::LEAF, value.shape, value.dtype, &[], value.uid);
        self.live.insert(value.uid, value);
        id
    }

    fn new_value(&mut self, shape: Shape, dtype: DType, buffer: Buffer, role: Role, loc: SourceLoc) -> Value {
        self.next_uid += 1;
        self.fresh_bytes += buffer.nbytes();
        self.made_bytes += buffer.nbytes();
        Rc::new(StoredValue { uid: self.next_uid, shape, dtype, buffer, role, loc })
    }

    /// The values that are held, each once.
    pub(crate) fn values(&self) -> impl Iterator<Item = &Value> {
        let carried = self.carried.values().map(|c| &c.value).filter(|v| !self.live.contains_key(&v.uid));
        let mut seen = FxHashSet::default();
        self.live.values().chain(carried).filter(move |v| seen.insert(v.uid))
    }

    /// A tensor from host memory.
    pub fn from_host(&mut self, t: &HostTensor) -> Result<NodeId> {
        let buffer = self.backend.upload(&t.bytes).map_err(|e| {
            self.attempt = None;
            self.explain(e.into()).error
        })?;
        let value = self.new_value(t.shape, t.dtype, buffer, Role::Inputs, self.graph.loc);
        Ok(self.leaf(value))
    }

    // ---- recording ---------------------------------------------------------------------------------------------

    /// Records a call of `op`; functions of the host evaluate their tensors first.
    pub fn call(&mut self, op: &'static Op, args: &Args) -> std::result::Result<SmallVec<[NodeId; 2]>, Fault> {
        let Class::Host(f) = op.class else {
            let before = self.graph.len();
            return ops::call(&mut self.graph, op, args).map_err(|e| {
                self.graph.truncate(before);
                e.into()
            });
        };
        let mut inputs = Vec::new();
        for v in &args.values {
            if let Arg::Tensor(id) = v {
                inputs.push(self.read_node(*id)?);
            }
        }
        let mut values = args.values.clone();
        for t in f(&inputs, args)? {
            values.push(Arg::Tensor(self.from_host(&t)?));
        }
        Ok(ops::call(&mut self.graph, op, &Args { op, values })?)
    }

    /// Where a span of nodes that the backward pass is to compute again begins.
    pub fn open_span(&self) -> Handle {
        Handle { generation: self.generation, id: NodeId(self.graph.len() as u32) }
    }

    /// Ends a span. Of one that an evaluation of everything has cut, what came behind the cut counts.
    pub fn close_span(&mut self, from: Handle) {
        let start = if from.generation == self.generation { from.id } else { NodeId(0) };
        let end = NodeId(self.graph.len() as u32);
        if start < end {
            self.graph.remat.spans.push((start, end));
        }
    }

    // ---- evaluation --------------------------------------------------------------------------------------------

    /// Makes the values of `ids` and keeps them with their nodes. No State changes.
    pub fn evaluate(&mut self, ids: &[NodeId]) -> std::result::Result<(), Fault> {
        let roots: Vec<NodeId> =
            ids.iter().copied().filter(|id| self.value(*id).is_none()).filter(|id| !self.is_plain_leaf(*id)).collect();
        if roots.is_empty() {
            return Ok(());
        }
        if self.step.depth > 0 {
            self.stats.splits += 1;
        }
        self.run(&Request { roots, ..Request::default() })
    }

    pub(crate) fn trace(&mut self, request: &Request, known: impl Fn(NodeId) -> Option<u64>) {
        self.tracer.budgeted = false;
        self.tracer.run(&self.graph, request, known);
    }

    pub(crate) fn tracer(&self) -> &Tracer {
        &self.tracer
    }

    fn is_plain_leaf(&self, id: NodeId) -> bool {
        self.graph.node(id).op == &create::LEAF
    }

    /// Plans and runs a request; afterwards its roots have values. If memory runs out, nothing has changed.
    pub(crate) fn run(&mut self, request: &Request) -> std::result::Result<(), Fault> {
        self.attempt = None;
        let result = self.run_plan(request);
        let result = result.map_err(|fault| self.explain(fault));
        if let Some(ran) = self.attempt.take().filter(|_| result.is_ok())
            && self.largest.as_ref().is_none_or(|l| l.program.arena_bytes < ran.program.arena_bytes)
        {
            self.largest = Some(ran);
        }
        result
    }

    fn options(&self) -> perilune_plan::Options {
        perilune_plan::Options { fusion: self.switches.fusion, budget: self.memory_budget }
    }

    fn run_plan(&mut self, request: &Request) -> std::result::Result<(), Fault> {
        let begun = std::time::Instant::now();
        let evaluated = &self.evaluated;
        self.tracer.budgeted = self.memory_budget.is_some();
        self.tracer.run(&self.graph, request, |id| evaluated.get(id.index()).and_then(Option::as_ref).map(|v| v.uid));
        let options = self.options();
        let steady = self.step.warm() && !request.state_writes.is_empty();
        let difference = steady.then(|| self.cache.first_difference(&self.graph, &self.tracer)).flatten();
        let found = self.cache.get(&self.graph, &self.tracer, request, options, &*self.backend);
        let (plan, hit) = match found {
            Ok(found) => found,
            Err((error, sketch)) => {
                self.attempt = sketch;
                return Err(error.into());
            }
        };
        let PlannedStep { program, source_map, .. } = &plan.step;
        if !hit {
            let p = program;
            let (kernels, arena) = (p.kernels.len(), p.arena_bytes);
            let ms = begun.elapsed().as_secs_f64() * 1e3;
            tracing::debug!(kernels, nodes = self.tracer.trace.order.len(), arena, ms, "compiled a plan");
        }
        if hit {
            self.stats.lookup_ms += begun.elapsed().as_secs_f64() * 1e3;
        } else {
            if let Some((loc, what)) = difference.filter(|_| self.switches.report_misses) {
                self.notices.say(format!("new plan: first difference is {what} at {}", self.source_map.show(loc)));
            }
            match self.switches.print_plan {
                PrintPlan::Off => {}
                PrintPlan::Kernels => {
                    self.plans_shown.say(show::show(program, source_map, &self.source_map));
                }
                PrintPlan::Source => {
                    let text = self.sources(request, program, source_map)?;
                    self.plans_shown.say(text);
                }
            }
        }
        perilune_core::interrupt::check()?;
        self.attempt = Some(plan.step.clone());
        let mut inputs: Vec<Buffer> = Vec::with_capacity(self.tracer.trace.inputs.len());
        for source in &self.tracer.trace.inputs {
            inputs.push(match source {
                Source::State(k) => self.states.buffer(StateId(*k), &*self.backend)?,
                Source::Leaf(uid) => match self.live.get(uid) {
                    Some(v) => v.buffer.clone(),
                    None => return Err(Error::system("plan", "this is a bug: a leaf lost its buffer").into()),
                },
            });
        }
        let mut outputs: Vec<Buffer> = Vec::with_capacity(program.outputs.len());
        for nbytes in &program.outputs {
            outputs.push(self.backend.alloc(*nbytes)?);
        }
        let times = self.profile.as_mut().map(|p| p.entry(&plan));
        let start = std::time::Instant::now();
        let _span = tracing::trace_span!("run_plan", kernels = program.kernels.len(), hit).entered();
        if let Err(f) = plan.exec.run(&inputs, &self.tracer.trace.slots, &outputs, times) {
            // The line as it is now: a cached plan may have been made for another recipe line.
            let at = f.origin.position().and_then(|p| self.tracer.trace.order.get(p));
            return Err(Fault { error: f.error, loc: at.map(|id| self.graph.loc_of(*id)) });
        }
        self.stats.runs += 1;
        self.products += plan.products;
        self.stats.run_ms += start.elapsed().as_secs_f64() * 1e3;
        self.stats.arena_bytes = program.arena_bytes;
        self.stats.live_bytes = program.live_bytes;
        self.stats.kernels = program.kernels.len();
        self.stats.output_bytes = program.outputs.iter().sum();
        self.evaluated.resize(self.graph.len(), None);
        for (root, found) in request.roots.iter().zip(&program.results) {
            let buffer = match found {
                Root::Output(k) => outputs[*k as usize].clone(),
                Root::Input(k) => inputs[*k as usize].clone(),
            };
            let node = self.graph.node(*root);
            let (shape, dtype) = (node.shape, node.dtype);
            let value = self.new_value(shape, dtype, buffer, Role::Results, self.graph.loc_of(*root));
            self.live.insert(value.uid, value.clone());
            self.evaluated[root.index()] = Some(value);
        }
        Ok(())
    }

    /// The value of a node, evaluated if need be.
    pub(crate) fn value_of(&mut self, id: NodeId) -> std::result::Result<Value, Fault> {
        self.evaluate(&[id])?;
        if let Some(v) = self.value(id) {
            return Ok(v.clone());
        }
        let payload = self.graph.node(id).payload;
        match self.live.get(&payload) {
            Some(v) => Ok(v.clone()),
            None => Err(Error::system("eval", "this is a bug: an evaluated node has no value").into()),
        }
    }

    /// A node's value in host memory.
    pub fn read_node(&mut self, id: NodeId) -> std::result::Result<HostTensor, Fault> {
        let v = self.value_of(id)?;
        self.bring(&v.buffer, v.shape, v.dtype)
    }

    /// What a buffer holds, in host memory. The wait is noted if it is in the middle of a step.
    pub(crate) fn bring(
        &mut self,
        buffer: &Buffer,
        shape: Shape,
        dtype: DType,
    ) -> std::result::Result<HostTensor, Fault> {
        let start = std::time::Instant::now();
        let bytes = self.backend.download(buffer, shape.numel() * dtype.size())?;
        if let (Some(stalls), true) = (&mut self.host_stalls, self.step.depth > 0) {
            stalls.add(Bound::Sync, self.graph.loc, start.elapsed().as_secs_f64());
        }
        Ok(HostTensor::new(dtype, shape, bytes))
    }

    /// A handle's value in host memory.
    pub fn read(&mut self, h: Handle) -> std::result::Result<HostTensor, Fault> {
        if h.generation == self.generation {
            return self.read_node(h.id);
        }
        let Some(c) = self.carried.get(&h) else { return Err(self.stale(h).into()) };
        let v = c.value.clone();
        self.bring(&v.buffer, v.shape, v.dtype)
    }

    /// A plan of the request that was traced last, with the text of its kernels: as this device runs it, or, if it has no
    /// texts, as a GPU would.
    fn sources(
        &self,
        request: &Request,
        program: &Program,
        places: &[SourceLoc],
    ) -> std::result::Result<String, Fault> {
        let mut files: HashMap<String, Vec<String>> = HashMap::new();
        let written = |file: &str, line: u32| {
            let lines = files.entry(file.to_string()).or_insert_with(|| {
                std::fs::read_to_string(file).map(|t| t.lines().map(str::to_string).collect()).unwrap_or_default()
            });
            lines.get(line.checked_sub(1)? as usize).cloned()
        };
        let has_texts = (0..program.kernels.len()).any(|k| self.backend.source(program, k).is_some());
        let Some(paper) = self.paper.as_ref().filter(|_| !has_texts) else {
            let source = |k| self.backend.source(program, k);
            return Ok(show::show_sources(program, places, &self.source_map, written, source));
        };
        let shown = |graph: &Graph, tracer: &Tracer, places: &[SourceLoc]| -> Result<String> {
            let program = perilune_plan::cache::plan(graph, tracer, request, self.options(), &**paper)?;
            let text = show::show_sources(&program, places, &self.source_map, written, |k| paper.source(&program, k));
            Ok(format!("as {} would run it: {text}", paper.describe()))
        };
        let Some(graph) = self.graph.with_kernels() else { return Ok(shown(&self.graph, &self.tracer, places)?) };
        let mut tracer = Tracer::default();
        tracer.budgeted = self.tracer.budgeted;
        tracer.run(&graph, request, |id| self.value(id).map(|v| v.uid));
        let places: Vec<SourceLoc> = tracer.trace.order.iter().map(|id| graph.loc_of(*id)).collect();
        Ok(shown(&graph, &tracer, &places)?)
    }

    /// Traces what evaluating `ids` and writing the pending assignments takes.
    fn trace_step(&mut self, ids: &[NodeId]) -> Result<Request> {
        let mut request = self.states.request(ids.to_vec());
        self.add_copies(&mut request)?;
        let evaluated = &self.evaluated;
        self.tracer.budgeted = self.memory_budget.is_some();
        self.tracer.run(&self.graph, &request, |id| evaluated.get(id.index()).and_then(Option::as_ref).map(|v| v.uid));
        Ok(request)
    }

    /// Plans what was traced last; nothing is compiled or run.
    fn plan_traced(&self, request: &Request) -> Result<Program> {
        perilune_plan::cache::plan(&self.graph, &self.tracer, request, self.options(), &*self.backend)
    }

    /// The plan that evaluating `ids` would run, as text, with the text of its kernels if `source`; nothing runs.
    pub fn show_plan(&mut self, ids: &[NodeId], source: bool) -> std::result::Result<String, Fault> {
        let request = self.trace_step(ids)?;
        let program = self.plan_traced(&request)?;
        let places: Vec<SourceLoc> = self.tracer.trace.order.iter().map(|id| self.graph.loc_of(*id)).collect();
        if source {
            return self.sources(&request, &program, &places);
        }
        Ok(show::show(&program, &places, &self.source_map))
    }

    /// The kernels that ending the open step with these results would run; nothing runs.
    pub fn fingerprint(&mut self, ids: &[NodeId]) -> std::result::Result<Fingerprint, Fault> {
        let roots = self.roots(ids);
        let request = self.trace_step(&roots)?;
        Ok(Fingerprint::of(&self.plan_traced(&request)?))
    }

    /// Begins to make the machine code that ending the open step with these results would have to wait for.
    pub fn prepare(&mut self, ids: &[NodeId]) -> std::result::Result<Code, Fault> {
        let roots = self.roots(ids);
        let request = self.trace_step(&roots)?;
        if self.cache.has(&self.tracer, self.options()) {
            return Ok(Code::Known);
        }
        let making = self.backend.prepare(&self.plan_traced(&request)?)?;
        Ok(making.map_or(Code::Ready, Code::Making))
    }

    /// Those of `ids` that are yet to be computed, in order.
    fn roots(&self, ids: &[NodeId]) -> Vec<NodeId> {
        let open = |id: &NodeId| !self.is_plain_leaf(*id) && self.value(*id).is_none();
        let mut roots: Vec<NodeId> = ids.iter().copied().filter(open).collect();
        roots.sort_unstable();
        roots.dedup();
        roots
    }

    // ---- generations -------------------------------------------------------------------------------------------

    /// Nodes of the current generation that somebody holds a handle of.
    pub(crate) fn held(&self) -> Vec<NodeId> {
        (0..self.refs.len().min(self.graph.len()) as u32).map(NodeId).filter(|id| self.refs[id.index()] > 0).collect()
    }

    pub(crate) fn is_held(&self, id: NodeId) -> bool {
        self.refs.get(id.index()).is_some_and(|n| *n > 0)
    }

    /// Nodes that stand for handles of earlier generations.
    pub(crate) fn carried_leaves(&self) -> impl Iterator<Item = NodeId> {
        self.carried.values().filter_map(|c| c.leaf.filter(|l| l.generation == self.generation).map(|l| l.id))
    }

    /// Forgets a node's value; the node stays, and could be evaluated again.
    pub(crate) fn forget_value(&mut self, id: NodeId) {
        if let Some(v) = self.evaluated.get_mut(id.index()) {
            *v = None;
        }
    }

    /// The value behind a node or leaf.
    pub(crate) fn uid_of(&self, id: NodeId) -> Option<u64> {
        self.value(id).map(|v| v.uid).or_else(|| self.is_plain_leaf(id).then(|| self.graph.node(id).payload))
    }

    pub(crate) fn retain_live(&mut self, keep: impl Fn(u64) -> bool) {
        self.live.retain(|uid, _| keep(*uid));
    }

    /// Lets go of values that neither a handle nor a wanted node reads: the generation is about to end, or to be tried again
    /// after memory ran out.
    /// With `history` the leaves stay that anything held was made from: what is let go can be computed again, and gradients
    /// can be taken.
    pub(crate) fn drop_unreachable(&mut self, wanted: &[NodeId], history: bool) {
        let mut reached = vec![false; self.graph.len()];
        for id in self.held().iter().chain(wanted) {
            reached[id.index()] = true;
        }
        // Several leaves may stand for one value.
        let mut needed = FxHashSet::default();
        for i in (0..reached.len()).rev() {
            let id = NodeId(i as u32);
            if !reached[i] {
                continue;
            }
            match self.value(id) {
                Some(v) => {
                    needed.insert(v.uid);
                }
                None if self.is_plain_leaf(id) => {
                    needed.insert(self.graph.node(id).payload);
                }
                None => self.graph.node(id).inputs.iter().for_each(|x| reached[x.index()] = true),
            }
        }
        for (value, reached) in self.evaluated.iter_mut().zip(&reached) {
            if !reached {
                *value = None;
            }
        }
        if history {
            for id in self.carried_leaves().collect::<Vec<_>>() {
                reached[id.index()] = true;
            }
            for i in (0..reached.len()).rev() {
                let id = NodeId(i as u32);
                if reached[i] && self.is_plain_leaf(id) {
                    needed.insert(self.graph.node(id).payload);
                }
                if reached[i] {
                    self.graph.node(id).inputs.iter().for_each(|x| reached[x.index()] = true);
                }
            }
        }
        self.live.retain(|uid, _| needed.contains(uid));
    }

    /// Ends the generation: evaluated nodes with handles are carried over, all else is forgotten.
    pub(crate) fn end_generation(&mut self) {
        let generation = self.generation;
        for i in 0..self.refs.len().min(self.graph.len()) {
            if self.refs[i] == 0 {
                continue;
            }
            let id = NodeId(i as u32);
            let value = match self.value(id) {
                Some(v) => Some(v.clone()),
                None if self.is_plain_leaf(id) => self.live.get(&self.graph.node(id).payload).cloned(),
                None => None,
            };
            if let Some(value) = value {
                self.carried.insert(Handle { generation, id }, Carried { value, refs: self.refs[i], leaf: None });
            }
        }
        for c in self.carried.values_mut() {
            c.leaf = None;
        }
        let oldest = if self.old_locs.len() == REMEMBERED { self.old_locs.pop_front() } else { None };
        let (_, mut source_map) = oldest.unwrap_or_default();
        source_map.clear();
        source_map.extend(self.graph.ids().map(|id| self.graph.loc_of(id)));
        self.old_locs.push_back((generation, source_map));
        self.graph.clear();
        self.evaluated.clear();
        self.refs.clear();
        self.live.clear();
        self.made_bytes = 0;
        self.generation += 1;
    }

    pub(crate) fn held_grad(&mut self, held: &Deferred) -> NodeId {
        match held {
            Deferred::Node(id) => *id,
            Deferred::Value(v) => {
                let v = v.clone();
                self.leaf(v)
            }
        }
    }
}
