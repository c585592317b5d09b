//! Plans requests and runs them: the plan cache, the tracer and the device.

use crate::engine::{Engine, Fault};
use crate::memory::Role;
use crate::profile::Bound;
use crate::recorder::Handle;
use crate::shadow_weights::StepRequests;
use crate::step::PrintPlan;
use crate::stored_value::{Residence, Value};
use perilune_core::error::{Error, Result};
use perilune_core::graph::NodeId;
use perilune_core::ops::{self, Args, Class, Op, Value as Arg};
use perilune_core::source_loc::SourceLoc;
use perilune_core::{DType, HostTensor, Shape};
use perilune_plan::ir::{Program, Root};
use perilune_plan::{
    Backend, Buffer, BufferDesc, Cache, Fingerprint, Plan, PlannedStep, Request, RunContext, Tracer, show,
};
use std::rc::Rc;
use std::sync::Arc;
use std::thread::JoinHandle;

/// The state of the machine code of a step that has not run yet.
#[derive(Debug, Default)]
pub enum Code {
    /// Unknown.
    #[default]
    Unknown,
    /// The plan is cached, so the code exists.
    Known,
    /// No code that takes long to compile is missing.
    Ready,
    Making(JoinHandle<()>),
}

/// The device with its compiled plans.
pub struct Executor {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) cache: Cache,
    pub(crate) tracer: Tracer,
    /// FLOP of all products run so far.
    pub products: f64,
    /// The memory budget of a step in bytes: above it values are recomputed, or the step is an error.
    pub memory_budget: Option<usize>,
    /// The most bytes of a bucket of several gradients on a mesh.
    pub bucket: usize,
    /// The plan run with the largest arena.
    pub(crate) largest: Option<PlannedStep>,
    /// The plan that is about to run, failed to run, or would exceed the budget.
    pub(crate) attempt: Option<PlannedStep>,
    /// The plan that all processes have agreed on last.
    pub(crate) agreed: Option<Rc<Plan>>,
}

impl Executor {
    pub(crate) fn new(backend: Arc<dyn Backend>) -> Executor {
        Executor {
            backend,
            cache: Cache::default(),
            tracer: Tracer::default(),
            products: 0.0,
            memory_budget: None,
            bucket: perilune_plan::lanes::BUCKET_BYTES,
            largest: None,
            attempt: None,
            agreed: None,
        }
    }
}

impl Executor {
    /// Drops all plans: they are for a device that has been left.
    pub(crate) fn forget_plans(&mut self) {
        (self.cache, self.largest, self.attempt, self.agreed) = (Cache::default(), None, None, None);
    }

    /// Returns the recipe line of the last error, if a run before the failed call caused it.
    pub(crate) fn line_of_earlier_fault(&self) -> Option<SourceLoc> {
        let (program, origin) = self.backend.take_fault_origin()?;
        self.cache.line_of(&program, origin)
    }
}

impl Engine {
    /// Makes a tensor of host memory an input of the recording. The first run that reads it copies it to the device.
    pub fn from_host(&mut self, t: HostTensor) -> NodeId {
        let placement = self.input_placement(&t.shape);
        let value = self.recorder.new_input(t, placement);
        self.recorder.leaf(value)
    }

    /// Makes a tensor of host memory an input of the recording and copies it to the device now: a checkpoint need not be held twice.
    pub(crate) fn upload(&mut self, t: &HostTensor) -> Result<NodeId> {
        let buffer = self.executor.backend.upload(&BufferDesc::new(t.shape, t.dtype), &t.bytes).map_err(|e| {
            self.executor.attempt = None;
            self.explain(e.into()).error
        })?;
        let (at, loc) = (Residence::Device(buffer), self.recorder.graph.modes.loc);
        let value = self.recorder.new_value(t.shape, t.dtype, at, Role::Inputs, loc);
        Ok(self.recorder.leaf(value))
    }

    /// Records a call of `op`; functions of the host evaluate their tensors first.
    pub fn call(&mut self, op: &'static Op, args: &Args) -> std::result::Result<ops::Out, Fault> {
        let Class::Host(f) = op.class else {
            let before = self.recorder.graph.len();
            return ops::call(&mut self.recorder.graph, op, args).map_err(|e| {
                self.recorder.graph.truncate(before);
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
            values.push(Arg::Tensor(self.from_host(t)));
        }
        Ok(ops::call(&mut self.recorder.graph, op, &Args { op, values })?)
    }

    /// Computes the values of `ids` and stores them with their nodes. No State changes.
    pub fn evaluate(&mut self, ids: &[NodeId]) -> std::result::Result<(), Fault> {
        let roots: Vec<NodeId> = ids
            .iter()
            .copied()
            .filter(|id| self.recorder.value(*id).is_none())
            .filter(|id| !self.recorder.is_plain_leaf(*id))
            .collect();
        if roots.is_empty() {
            return Ok(());
        }
        if self.step.depth > 0 {
            self.stats.splits += 1;
        }
        let StepRequests { own, .. } = self.step_requests(Request { roots, ..Request::default() })?;
        self.run(&own)
    }

    pub(crate) fn trace(&mut self, request: &Request, known: impl Fn(NodeId) -> Option<u64>) {
        self.executor.tracer.budgeted = false;
        self.executor.tracer.run(&self.recorder.graph, request, known);
        self.divide_trace();
    }

    pub(crate) fn tracer(&self) -> &Tracer {
        &self.executor.tracer
    }

    /// Plans and runs a request; afterwards its roots have values. If memory runs out, nothing has changed.
    pub(crate) fn run(&mut self, request: &Request) -> std::result::Result<(), Fault> {
        self.executor.attempt = None;
        let result = self.run_plan(request);
        let result = result.map_err(|fault| self.explain(fault));
        if let Some(ran) = self.executor.attempt.take().filter(|_| result.is_ok())
            && self.executor.largest.as_ref().is_none_or(|l| l.program.arena_bytes < ran.program.arena_bytes)
        {
            self.executor.largest = Some(ran);
        }
        result
    }

    pub(crate) fn options(&self) -> perilune_plan::Options {
        perilune_plan::Options {
            fusion: self.switches.fusion,
            budget: self.executor.memory_budget,
            bucket: self.executor.bucket,
        }
    }

    fn run_plan(&mut self, request: &Request) -> std::result::Result<(), Fault> {
        let begun = std::time::Instant::now();
        self.trace_run(request);
        let options = self.options();
        let steady = self.step.warm() && !request.state_writes.is_empty();
        let before = if steady { self.executor.cache.last() } else { None };
        let found = self.executor.cache.get(
            &self.recorder.graph,
            &self.executor.tracer,
            request,
            options,
            &*self.executor.backend,
        );
        let notices = self.executor.backend.take_notices();
        notices.into_iter().for_each(|text| self.diagnostics.notices.say(text));
        let (plan, hit) = match found {
            Ok(found) => found,
            Err(failed) => {
                self.executor.attempt = failed.step.map(|step| *step);
                return Err(Fault { error: failed.error, loc: failed.loc });
            }
        };
        let PlannedStep { program, source_map, .. } = &plan.step;
        if !hit {
            let p = program;
            let (kernels, arena) = (p.kernels.len(), p.arena_bytes);
            let ms = begun.elapsed().as_secs_f64() * 1e3;
            tracing::debug!(kernels, nodes = self.executor.tracer.trace.order.len(), arena, ms, "compiled a plan");
        }
        if hit {
            self.stats.lookup_ms += begun.elapsed().as_secs_f64() * 1e3;
        } else {
            let (graph, tracer) = (&self.recorder.graph, &self.executor.tracer);
            if let Some(before) = before.filter(|_| self.switches.report_misses)
                && let Some((loc, what)) = before.first_difference(graph, tracer)
            {
                self.diagnostics
                    .notices
                    .say(format!("new plan: first difference is {what} at {}", self.recorder.source_map.show(loc)));
            }
            match self.switches.print_plan {
                PrintPlan::Off => {}
                PrintPlan::Kernels => {
                    self.diagnostics.plans_shown.say(show::show(program, source_map, &self.recorder.source_map));
                }
                PrintPlan::Source => {
                    let text = self.sources(request, program, source_map)?;
                    self.diagnostics.plans_shown.say(text);
                }
            }
        }
        self.interrupt.check()?;
        self.agree_on(&plan)?;
        self.executor.attempt = Some(plan.step.clone());
        let (backend, recorder) = (&*self.executor.backend, &self.recorder);
        let leaf = |uid| match recorder.live(uid) {
            Some(v) => v.on_device(backend),
            None => Err(Error::system("plan", "this is a bug: a leaf lost its buffer")),
        };
        let inputs = self.states.bind(&self.executor.tracer.trace.inputs, backend, leaf)?;
        let mut outputs: Vec<Buffer> = Vec::with_capacity(program.outputs.len());
        for desc in &program.outputs {
            outputs.push(self.executor.backend.alloc(desc)?);
        }
        let (times, hidden) = match self.diagnostics.profile.as_mut().map(|p| p.entry(&plan)) {
            Some([times, hidden]) => (Some(times), Some(hidden)),
            None => (None, None),
        };
        let start = std::time::Instant::now();
        let _span = tracing::trace_span!("run_plan", kernels = program.kernels.len(), hit).entered();
        let context = RunContext { interrupt: &self.interrupt, times, hidden, peers: None };
        let first = self.executor.backend.mesh().coordinates(0);
        let numbers = program.numbers(&self.executor.tracer.trace.slots, &first);
        if let Err(f) = plan.exec.run(&inputs, &numbers, &outputs, context) {
            let earlier = self.executor.line_of_earlier_fault();
            // The line as it is now: a cached plan may have been made for another recipe line.
            let at = f.origin.position().and_then(|p| self.executor.tracer.trace.order.get(p));
            return Err(Fault { error: f.error, loc: earlier.or(at.map(|id| self.recorder.graph.loc_of(*id))) });
        }
        self.stats.runs += 1;
        self.executor.products += plan.products;
        self.stats.run_ms += start.elapsed().as_secs_f64() * 1e3;
        self.stats.arena_bytes = program.arena_bytes;
        self.stats.live_bytes = program.live_bytes;
        self.stats.kernels = program.kernels.len();
        self.stats.output_bytes = program.outputs.iter().map(BufferDesc::nbytes).sum();
        for (root, found) in request.roots.iter().zip(&program.results) {
            let buffer = match found {
                Root::Output(k) => outputs[*k as usize].clone(),
                Root::Input(k) => inputs[*k as usize].clone(),
            };
            let node = self.recorder.graph.node(*root);
            if !buffer.desc().holds(&node.shape, node.dtype) {
                let message = format!(
                    "this is a bug: {} {} is returned in a buffer of {:?}",
                    node.dtype,
                    node.shape,
                    buffer.desc()
                );
                return Err(Error::system("plan", message).into());
            }
            self.recorder.set_value(*root, buffer);
        }
        self.states.keep_bound(inputs);
        Ok(())
    }

    /// Returns the value of a node, evaluated if necessary.
    pub(crate) fn value_of(&mut self, id: NodeId) -> std::result::Result<Value, Fault> {
        self.evaluate(&[id])?;
        if let Some(v) = self.recorder.value(id) {
            return Ok(v.clone());
        }
        let payload = self.recorder.graph.node(id).payload;
        match self.recorder.live(payload) {
            Some(v) => Ok(v.clone()),
            None => Err(Error::system("eval", "this is a bug: an evaluated node has no value").into()),
        }
    }

    /// Returns a node's value in host memory.
    pub fn read_node(&mut self, id: NodeId) -> std::result::Result<HostTensor, Fault> {
        let v = self.value_of(id)?;
        self.read_value(&v)
    }

    fn read_value(&mut self, v: &Value) -> std::result::Result<HostTensor, Fault> {
        if let Some(t) = v.on_host() {
            return Ok(t.clone());
        }
        let buffer = v.on_device(&*self.executor.backend)?;
        self.bring(&buffer, v.shape, v.dtype)
    }

    /// Downloads a buffer. The wait is recorded if it is in the middle of a step.
    pub(crate) fn bring(
        &mut self,
        buffer: &Buffer,
        shape: Shape,
        dtype: DType,
    ) -> std::result::Result<HostTensor, Fault> {
        let start = std::time::Instant::now();
        let bytes = self
            .executor
            .backend
            .download(buffer)
            .map_err(|error| Fault { error, loc: self.executor.line_of_earlier_fault() })?;
        if let (Some(stalls), true) = (&mut self.diagnostics.host_stalls, self.step.depth > 0) {
            stalls.add(Bound::Sync, self.recorder.graph.modes.loc, start.elapsed().as_secs_f64());
        }
        Ok(HostTensor::new(dtype, shape, bytes))
    }

    /// Returns a handle's value in host memory.
    pub fn read(&mut self, h: Handle) -> std::result::Result<HostTensor, Fault> {
        if h.generation == self.recorder.generation() {
            return self.read_node(h.id);
        }
        let v = self.recorder.carried(h)?.clone();
        self.read_value(&v)
    }

    /// Returns the requests that evaluate `ids` and write the pending assignments.
    pub(crate) fn open_step(&mut self, ids: &[NodeId]) -> Result<StepRequests> {
        let request = self.states.request(ids.to_vec());
        self.step_requests(request)
    }

    /// Traces a request as a run of it would.
    pub(crate) fn trace_run(&mut self, request: &Request) {
        self.executor.tracer.budgeted = self.executor.memory_budget.is_some();
        self.executor.tracer.run(&self.recorder.graph, request, self.recorder.known());
        self.divide_trace();
    }

    /// Plans the last trace without compiling or running anything.
    pub(crate) fn plan_traced(&self, request: &Request) -> Result<Program> {
        perilune_plan::pipeline::plan(
            &self.recorder.graph,
            &self.executor.tracer,
            request,
            self.options(),
            &*self.executor.backend,
        )
    }

    /// Returns the kernels that would run if the open step ended with these results. Nothing runs.
    pub fn fingerprint(&mut self, ids: &[NodeId]) -> std::result::Result<Fingerprint, Fault> {
        let roots = self.recorder.roots(ids);
        let mut fingerprint = Fingerprint::default();
        for request in self.open_step(&roots)?.iter() {
            self.trace_run(request);
            fingerprint.kernels.extend(Fingerprint::of(&self.plan_traced(request)?).kernels);
        }
        Ok(fingerprint)
    }

    /// Starts to compile the machine code that is missing to end the open step with these results.
    pub fn prepare(&mut self, ids: &[NodeId]) -> std::result::Result<Code, Fault> {
        let roots = self.recorder.roots(ids);
        let mut missing = Vec::new();
        for request in self.open_step(&roots)?.iter() {
            self.trace_run(request);
            if !self.executor.cache.has(&self.executor.tracer, self.options()) {
                missing.push(self.plan_traced(request)?);
            }
        }
        if missing.is_empty() {
            return Ok(Code::Known);
        }
        let making = self.executor.backend.prepare(&missing)?;
        Ok(making.map_or(Code::Ready, Code::Making))
    }
}
