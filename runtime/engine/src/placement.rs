//! Decides what each device of a mesh has of the inputs of a step: batches and States.
//!
//! A placement never changes a value, only what is sent and stored where. A batch is divided by its samples along the axes `dp`,
//! `shard` and `ep`, and by the positions of its sequences along `cp` ([`Engine::positions`]); other inputs are replicated. States are replicated unless [`Engine::place_state`] divides them.

use crate::engine::{Engine, Fault};
use crate::memory::Role;
use crate::recorder::Handle;
use crate::state::StateId;
use crate::stored_value::Residence;
use perilune_core::error::Result;
use perilune_core::graph::NodeId;
use perilune_core::mesh::{Along, Axis};
use perilune_core::source_loc::SourceLoc;
use perilune_core::{HostTensor, Mesh, Placement, Shape};
use perilune_plan::pipelining::cut::{Cut, cut};
use perilune_plan::predict::{Machine, Prediction, predict};
use perilune_plan::{Backend, InputBuffer, KeyExchange, Schedule, Transfer};
use std::sync::Arc;

/// The axes along which devices have different samples.
const SAMPLES: [Axis; 3] = [Axis::Dp, Axis::Shard, Axis::Ep];

/// The placement of a tensor of `samples` rows; replicated if some devices would have none. In `strict` shards it is replicated if
/// they differ in size, and divided even for one device, whose shards the planner finds by it.
fn by_samples(mesh: &Mesh, strict: Option<usize>, samples: usize) -> Placement {
    if let Some(shards) = strict {
        let inner = if mesh.size(Axis::Shard) > 1 { Along::Split(0) } else { Along::Replicated };
        let split = Placement::REPLICATED.with(Axis::Dp, Along::Split(0)).with(Axis::Shard, inner);
        return if samples > 0 && samples.is_multiple_of(shards) { split } else { Placement::REPLICATED };
    }
    if samples < SAMPLES.map(|axis| mesh.size(axis)).iter().product() {
        return Placement::REPLICATED;
    }
    let split = |p: Placement, axis: Axis| if mesh.size(axis) > 1 { p.with(axis, Along::Split(0)) } else { p };
    SAMPLES.into_iter().fold(Placement::REPLICATED, split)
}

impl Engine {
    /// Begins to make a batch of `samples`, or ends it: host tensors made in between whose dim 0 counts the samples are divided
    /// among devices. Returns the value of before.
    pub fn set_batch(&mut self, samples: Option<usize>) -> Option<usize> {
        std::mem::replace(&mut self.batch, samples)
    }

    /// Names how attention whose queries are split along `cp` gets the keys of other devices.
    pub fn set_key_exchange(&mut self, keys: KeyExchange) {
        self.executor.tracer.keys = keys;
    }

    /// How attention is to get keys along `cp`.
    pub fn key_exchange(&self) -> KeyExchange {
        self.executor.tracer.keys
    }

    /// Makes the numbers `0 ... length - 1`, of which each device along `cp` has a block. What is selected by them along the dim of a
    /// sequence is divided like them.
    pub fn positions(&mut self, length: usize) -> NodeId {
        let numbers: Vec<i64> = (0..length as i64).collect();
        let placement = Placement::REPLICATED.with(Axis::Cp, Along::Split(0));
        let value = self.recorder.new_input(HostTensor::from_i64(Shape::of(&[length]), &numbers), placement);
        self.recorder.leaf(value)
    }

    /// What each device gets of an input that is made now.
    pub(crate) fn input_placement(&self, shape: &Shape) -> Placement {
        match self.batch {
            Some(n) if shape.rank() > 0 && shape.dims()[0] == n => by_samples(&self.mesh(), self.strict, n),
            _ => Placement::REPLICATED,
        }
    }

    /// Cuts every batch into so many logical shards, whose terms are added in a fixed tree: the bits of a step do not depend on the
    /// number of devices. `None` ends it. An error if the mesh does not fit.
    pub fn set_strict_shards(&mut self, shards: Option<usize>) -> Result<()> {
        if let Some(shards) = shards {
            perilune_plan::check_strict_shards(&self.mesh(), shards)?;
        }
        self.strict = shards;
        Ok(())
    }

    /// The logical shards of a batch, if they are fixed.
    pub fn strict_shards(&self) -> Option<usize> {
        self.strict
    }

    /// The stage of ZeRO (Rajbhandari et al., arXiv:1910.02054): by default 3 with an axis `shard`, else 0.
    pub fn zero_stage(&self) -> u8 {
        self.zero.unwrap_or(if self.mesh().size(Axis::Shard) > 1 { 3 } else { 0 })
    }

    /// Says what each device has of the buffers that the last trace reads and writes.
    pub(crate) fn divide_trace(&mut self) {
        let mesh = self.executor.backend.mesh();
        if mesh.devices() == 1 && self.strict.is_none() {
            return;
        }
        self.executor.tracer.keeps_weights = matches!(self.zero_stage(), 1 | 2);
        let (states, recorder) = (&self.states, &self.recorder);
        self.executor.tracer.divide(&mesh, self.strict, |buffer| match buffer {
            InputBuffer::State(k) => states.get(StateId(k)).map_or(Placement::REPLICATED, |s| s.about.desc.placement),
            InputBuffer::Leaf(uid) => recorder.live(uid).map_or(Placement::REPLICATED, |v| v.placement_on(&mesh)),
        });
    }

    /// Sets the most bytes of gradients that one call combines; `None` for the default.
    pub fn set_bucket(&mut self, bytes: Option<usize>) {
        self.executor.bucket = bytes.unwrap_or(perilune_plan::lanes::BUCKET_BYTES);
    }

    /// Changes what each device has of a State. If it has a value already, the value moves at the end of the step, as by an
    /// assignment; then nothing may have been recorded since the last step ended.
    pub fn place_state(&mut self, id: StateId, placement: Placement) -> std::result::Result<(), Fault> {
        let mesh = self.mesh();
        let desc = self.states.get(id)?.about.desc;
        if desc.placement == placement {
            return Ok(());
        }
        // Checks that there are such dims.
        placement.local(&mesh, &mesh.coordinates(0), &desc.shape)?;
        let Some(old) = self.states.place(id, placement)? else { return Ok(()) };
        let loc = self.states.loc(id);
        let value = self.recorder.new_value(desc.shape, desc.dtype, Residence::Device(old), Role::Inputs, loc);
        let node = self.recorder.leaf(value);
        Ok(self.assign(id, node)?)
    }

    /// Sets how pipeline stages take turns, on so many micro-batches of a step.
    pub fn set_schedule(&mut self, schedule: Schedule, micro_batches: usize) {
        self.executor.tracer.schedule = schedule;
        self.micro_batches = micro_batches;
    }

    pub fn schedule(&self) -> &Schedule {
        &self.executor.tracer.schedule
    }

    /// Cuts the open step, which would end with these results, into pipeline stages. Nothing is placed.
    pub fn cut_stages(&mut self, ids: &[NodeId], stages: usize) -> std::result::Result<Cut, Fault> {
        let roots = self.recorder.roots(ids);
        let request = self.states.request(roots);
        self.trace_run(&request);
        let cut = cut(&self.recorder.graph, &self.executor.tracer.trace, stages)?;
        self.stage_costs = cut.costs.clone();
        Ok(cut)
    }

    /// Whether a State has a value in memory, so that placing it elsewhere moves it.
    pub fn has_memory(&self, id: StateId) -> bool {
        self.states.written_buffer(id).is_some()
    }

    /// The collectives of the plan that ran last.
    pub fn transfers(&self) -> Vec<Transfer> {
        self.executor.cache.last().map_or_else(Vec::new, |plan| perilune_plan::transfers(&plan.step))
    }

    /// How attention gets its keys in the plan that ran last: form, axis and recipe line of each node.
    pub fn exchanges(&self) -> Vec<(&'static str, Axis, SourceLoc)> {
        self.executor.cache.last().map_or_else(Vec::new, |plan| perilune_plan::exchanges(&plan.step))
    }

    /// Bytes of the slots of messages on each device along `pp`, of the largest plan so far; empty without pipeline stages.
    pub fn slot_bytes(&self) -> Vec<usize> {
        let slots = self.executor.backend.message_slots().zip(self.executor.largest.as_ref());
        slots.map_or_else(Vec::new, |(slots, plan)| slots.held(&plan.program))
    }

    /// Predicts the time of the plan that ran last on the devices of a machine.
    pub fn predict(&self, machine: &Machine) -> Option<Prediction> {
        self.executor.cache.last().map(|plan| predict(&plan.step, machine))
    }

    /// Moves everything to another device. Nothing may have been recorded since the last step ended.
    pub fn move_to(&mut self, backend: Arc<dyn Backend>) -> std::result::Result<(), Fault> {
        let old = std::mem::replace(&mut self.executor.backend, backend.clone());
        for value in self.recorder.all_values() {
            value.to_host(&*old)?;
        }
        self.states.move_to(&*old, &*backend)?;
        self.recorder.graph.mesh = backend.mesh();
        self.executor.forget_plans();
        Ok(())
    }

    /// What each device has of a node that has been evaluated; `None` if it has not.
    pub fn placement_of(&mut self, handle: Handle) -> Option<Placement> {
        let id = self.recorder.node(handle).ok()?;
        let leaf = self.recorder.graph.node(id).payload;
        let value =
            self.recorder.value(id).or_else(|| self.recorder.live(leaf).filter(|_| self.recorder.is_plain_leaf(id)));
        value.map(|v| v.placement)
    }

    /// The mesh of the engine's device.
    pub fn mesh(&self) -> Mesh {
        self.executor.backend.mesh()
    }
}
