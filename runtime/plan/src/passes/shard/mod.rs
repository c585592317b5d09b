//! Divides a step among the devices of a mesh: decides what each device has of every value, and inserts collectives.
//!
//! The axes of the mesh are taken one after the other; each turns the step for one device into the step of every device along that
//! axis. The inputs say what a device has of them ([`Division`]). [`demand`] walks back from the State writes and notes which values
//! are needed in blocks. Then, in recording order, every node gets the cheapest of its [`candidates`], which are the factors of its
//! op (`core::sharding`) applied to the blocks that its operands have, counting the bytes that have to be sent ([`cost`]). A term of
//! a sum stays one through linear ops and is combined where a reader needs the whole or a block, once for all readers. [`convert`]
//! makes the piece that a reader needs, [`gather`] the whole of a State that is stored in blocks. Roots and the guard are whole;
//! State writes are what a device has of the State.
//!
//! The choice depends on the graph, the mesh and the inputs alone, so every process makes the same. All devices get one program:
//! where a device's part of generated numbers begins is a run-time number. The method is that of GSPMD (Xu et al.,
//! arXiv:2105.04663) with two sweeps: batch and States are known, and gradients follow the values they belong to.

mod attention;
mod candidates;
mod convert;
mod cost;
mod demand;
mod divider;
mod experts;
mod fold;
mod gather;
mod part;
mod recorded;
mod ring;
mod strict;
mod terms;
mod visibility;
mod zigzag;

pub use strict::{check as check_strict_shards, shard_devices};

use crate::key::Trace;
use crate::lowered::Lowered;
use crate::passes::{cse, decompose};
use crate::request::Division;
use crate::unplanned::Unplanned;
use divider::Divider;
use perilune_core::Graph;
use perilune_core::graph::{Node, NodeId};
use perilune_core::mesh::Axis;
use perilune_core::ops::{Class, movement};
use rustc_hash::FxHashMap;

/// Turns a step into that of each device of the mesh. `g` and `trace`: the recording that it comes from.
pub(crate) fn apply(step: Lowered, division: &Division, g: &Graph, trace: &Trace) -> Result<Lowered, Unplanned> {
    let mesh = &division.mesh;
    if mesh.devices() == 1 && division.strict.is_none() {
        return Ok(step);
    }
    // Stages of a pipeline are no parts of tensors: `pipelining` splits the step after this pass.
    let axes = || Axis::ALL.into_iter().filter(|axis| *axis != Axis::Pp && mesh.size(*axis) > 1);
    if axes().next().is_none() && division.strict.is_none() {
        return Ok(cse::apply(&step));
    }
    // Of a fused op without factors its parts are divided.
    let undivided = |n: &Node| matches!(n.op.class, Class::Fused(_)) && n.op.shard.is_none();
    let step = decompose::all(step, &undivided)?;
    // What both passes compute is combined once.
    let mut step = cse::apply(&step);
    as_stored(&mut step, division, &trace.state_write_inputs)?;
    if let Some(shards) = division.strict {
        return strict::apply(step, division, shards, g, trace);
    }
    for axis in axes() {
        let phases = gather::phases(&step, g, &trace.order);
        step = Divider::new(&step, division, &trace.state_write_inputs, phases, axis, None)?.run()?;
    }
    Ok(terms::apply(&step, mesh)?)
}

/// Gives a value that is written to a split State the dims of the State, which may have been recorded as another view of as many
/// elements.
fn as_stored(step: &mut Lowered, division: &Division, written: &[u32]) -> perilune_core::error::Result<()> {
    let mut leaves: FxHashMap<u32, NodeId> = FxHashMap::default();
    for (leaf, input) in &step.inputs {
        // Uses the first leaf of each input, so that the map's iteration order has no effect.
        leaves.entry(*input).and_modify(|first| *first = (*first).min(*leaf)).or_insert(*leaf);
    }
    for (i, input) in written.iter().enumerate() {
        let new = step.state_writes[i];
        let split = !division.inputs[*input as usize].is_replicated(&division.mesh);
        let shape = leaves.get(input).filter(|_| split).map(|leaf| step.graph.shape(*leaf));
        if let Some(shape) = shape.filter(|shape| *shape != step.graph.shape(new)) {
            step.graph.modes.loc = step.graph.loc_of(new);
            step.state_writes[i] = movement::reshape(&mut step.graph, new, shape)?;
        }
    }
    Ok(())
}
