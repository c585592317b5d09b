//! Plans a traced request by running the compiler passes in order, from the recording to a program.

use crate::backend::Backend;
use crate::fuse;
use crate::ir::Program;
use crate::key::{Trace, Tracer};
use crate::lanes::BUCKET_BYTES;
use crate::lowered::Lowered;
use crate::passes::budget;
use crate::passes::remat::Spans;
use crate::passes::{control_deps, cse, decompose, guard, import, nhwc, output_layout, pad_gemm, remat, shard, views};
use crate::pipelining::{join, split};
use crate::program_builder;
use crate::request::Request;
use crate::unplanned::Unplanned;
use perilune_core::error::{Error, Result};
use perilune_core::graph::{Graph, NodeId};
use perilune_core::mesh::Axis;

/// The most bytes that all values of a step may have together. What follows sums sizes in 64 bits.
const MAX_BYTES: u128 = 1 << 60;

/// Planner options; part of the key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// If false, every primitive is a separate kernel. The numbers stay the same.
    pub fusion: bool,
    /// Bytes that a step may take, including all that it reads, returns and keeps in between.
    pub budget: Option<usize>,
    /// The most bytes of a bucket of several gradients (see [`crate::lanes`]).
    pub bucket: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options { fusion: true, budget: None, bucket: BUCKET_BYTES }
    }
}

/// Plans a traced request without compiling it.
pub fn plan(g: &Graph, tracer: &Tracer, request: &Request, options: Options, backend: &dyn Backend) -> Result<Program> {
    try_plan(g, tracer, request, options, backend).map_err(|failed| failed.error)
}

/// As `plan`. If the step exceeds the budget, the error includes the plan that needs the least memory.
pub(crate) fn try_plan(
    g: &Graph,
    tracer: &Tracer,
    request: &Request,
    options: Options,
    backend: &dyn Backend,
) -> std::result::Result<Program, Unplanned> {
    let with = |more: &[(NodeId, NodeId)]| -> std::result::Result<Program, Unplanned> {
        let spans = if more.is_empty() { &tracer.trace.spans } else { &Spans::new(g, more) };
        let low = divide(g, tracer, request, spans)?;
        let build = |low: Lowered, trace: &Trace| -> Result<Program> {
            let low = lower(low, backend)?;
            let clusters = fuse::fuse(&low, options.fusion);
            Ok(program_builder::build(&low, &clusters, g, trace, options))
        };
        let trace = &tracer.trace;
        let Some(division) = trace.division.as_ref().filter(|d| d.mesh.size(Axis::Pp) > 1) else {
            return Ok(build(low, trace)?);
        };
        let mut steps = split::apply(&low, division, g, trace)?;
        let mut programs = Vec::with_capacity(steps.len());
        for step in &mut steps {
            let empty = Lowered::empty(Vec::new(), Graph::new());
            let own = Trace { state_write_inputs: std::mem::take(&mut step.state_write_inputs), ..trace.clone() };
            programs.push(build(std::mem::replace(&mut step.step, empty), &own)?);
        }
        Ok(join::join(programs, &steps, request.roots.len()))
    };
    let program = with(&[])?;
    match options.budget {
        Some(limit) if budget::needs(&program) > limit => budget::fit(g, &tracer.trace.order, program, limit, with),
        _ => Ok(program),
    }
}

/// Runs the passes that need the recording, the last of which divides the step among devices. `spans`: what the backward pass
/// recomputes, as recorded or as `budget` chose.
///
/// Shadow weights have no pass here: the engine chooses them, and tracing reads each as a leaf (`Request::copies`).
fn divide(g: &Graph, tracer: &Tracer, request: &Request, spans: &Spans) -> std::result::Result<Lowered, Unplanned> {
    let trace = &tracer.trace;
    let mut step = import::apply(g, tracer, request);
    step = remat::apply(step, g, &trace.order, spans);
    if let Some(guard) = &request.guard {
        step = guard::apply(step, &guard.state_writes, &trace.state_write_inputs)?;
    }
    if let Some(division) = &trace.division {
        step = shard::apply(step, division, g, trace)?;
    }
    Ok(step)
}

/// Runs the other graph passes in order.
fn lower(mut step: Lowered, backend: &dyn Backend) -> Result<Lowered> {
    step = decompose::apply(step, backend)?;
    step = pad_gemm::apply(step, backend)?;
    step = nhwc::apply(step, backend)?;
    step = output_layout::apply(step, backend);
    let merged = cse::apply(&step);
    step = views::apply(&merged, step.graph);
    step = control_deps::apply(step);
    check_bytes(&step.graph)?;
    step.defers_index_faults = backend.defers_index_faults();
    step.has_host_memory_route = backend.has_host_memory_route();
    step.fills = backend.row_bytes().filter(|_| backend.fills_rows());
    Ok(step)
}

/// Refuses a step whose values are so large that sums of their sizes might overflow.
fn check_bytes(g: &Graph) -> Result<()> {
    let bytes = |id| g.shape(id).numel() as u128 * g.dtype(id).size() as u128;
    let total: u128 = g.ids().map(bytes).sum();
    if total <= MAX_BYTES {
        return Ok(());
    }
    let message = format!("the values of this step have {total} bytes in all; at most 2^60 can be planned");
    Err(Error::memory("", message).hint("read a value or end the step earlier, and check the sizes of its tensors"))
}
