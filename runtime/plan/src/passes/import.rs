//! Copies the traced nodes into a new graph. Leaves and run-time scalars keep the numbers that they have in the trace.

use crate::key::Tracer;
use crate::lowered::Lowered;
use crate::request::{InputBuffer, Request};
use perilune_core::graph::{Graph, Inputs, NodeId};
use perilune_core::ops::{Generator, create};
use perilune_core::source_loc::SourceLoc;

/// Creates the first form of the step, in which node k is node k of the trace.
pub fn apply(g: &Graph, tracer: &Tracer, request: &Request) -> Lowered {
    let trace = &tracer.trace;
    let position = |id: NodeId| NodeId(tracer.position(id) as u32);
    let states = trace.inputs.iter().map(|b| matches!(b, InputBuffer::State(_))).collect();
    let mut out = Lowered::empty(states, Graph::with_capacity(trace.order.len()));
    (out.starts, out.first_start) = (trace.starts.clone(), trace.slots.len() as u32);
    // The slots for start offsets of parts follow those of the recorded scalars.
    let (mut slot, mut start) = (0, trace.slots.len() as u32);
    for (k, &id) in trace.order.iter().enumerate() {
        let node = g.node(id);
        // Source locations of the lowered graph are positions in the trace: see `ir::Origin`.
        out.graph.modes.loc = SourceLoc(k as u32 + 1);
        if let Some(input) = trace.leaves[k] {
            let new = out.graph.leaf(&create::LEAF, node.shape, node.dtype, &[], u64::from(input));
            out.inputs.insert(new, input);
            continue;
        }
        let mut inputs = Inputs::from_slice(&node.inputs);
        inputs.iter_mut().for_each(|x| *x = position(*x));
        let new = out.graph.add(node.with_inputs(inputs));
        let next = match out.graph.generator(new) {
            Some(Generator::Scalar) => &mut slot,
            Some(Generator::Shard) => &mut start,
            _ => continue,
        };
        out.slots.insert(new, *next);
        *next += 1;
    }
    out.roots = request.roots.iter().map(|r| position(*r)).collect();
    out.state_writes = request.state_writes.iter().map(|c| position(c.1)).collect();
    out.ok = request.guard.as_ref().map(|guard| position(guard.ok));
    out
}
