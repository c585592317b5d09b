//! Assembles the engine from its parts: recorder, States, executor and diagnostics.

use crate::diagnostics::Diagnostics;
use crate::evaluate::Executor;
use crate::recorder::Recorder;
use crate::snapshot::SnapshotBytes;
use crate::state::StateTable;
use crate::step::{Step, Switches};
use perilune_core::Interrupt;
use perilune_core::error::Error;
use perilune_core::source_loc::SourceLoc;
use perilune_plan::pipelining::StageCost;
use perilune_plan::{Backend, Schedule};
use std::sync::Arc;

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

/// Counters of the engine's work, for reports and tests.
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
    /// Tracing, and lookups of cached plans.
    pub lookup_ms: f64,
    pub run_ms: f64,
    /// Bytes of current values and States.
    pub held_bytes: usize,
    /// Lua handles of tensors that are not States.
    pub handles: usize,
    pub arena_bytes: usize,
    pub live_bytes: usize,
    /// Of these, States.
    pub state_bytes: usize,
    /// Of the last run: kernels, and bytes of its results.
    pub kernels: usize,
    pub output_bytes: usize,
}

/// One device, or the devices of a mesh, with one recording: see the crate's head.
pub struct Engine {
    pub recorder: Recorder,
    pub executor: Executor,
    pub diagnostics: Diagnostics,
    pub switches: Switches,
    /// The interrupt of this engine's work; other threads have clones.
    pub interrupt: Interrupt,
    pub(crate) states: StateTable,
    pub(crate) step: Step,
    pub(crate) stats: Stats,
    /// How far the States of a run are divided among devices with different samples; `None` for the default of the mesh
    /// ([`Engine::zero_stage`]).
    pub zero: Option<u8>,
    /// How pipeline stages take turns, if the mesh says so and not the recipe.
    pub mesh_schedule: Option<Schedule>,
    /// Logical shards of a batch, if bits must not depend on the number of devices: see [`Engine::set_strict_shards`].
    pub(crate) strict: Option<usize>,
    /// What each pipeline stage does in the forward pass of a micro-batch, once the model has been cut into stages.
    pub stage_costs: Vec<StageCost>,
    /// Micro-batches of a step that stages work on.
    pub micro_batches: usize,
    /// Samples of the batch that is being made: see [`Engine::set_batch`].
    pub(crate) batch: Option<usize>,
    /// Bytes of the last snapshot.
    pub(crate) snapshot: Option<SnapshotBytes>,
}

impl Engine {
    pub fn new(backend: Arc<dyn Backend>) -> Engine {
        let mut recorder = Recorder::default();
        recorder.graph.mesh = backend.mesh();
        Engine {
            recorder,
            executor: Executor::new(backend),
            diagnostics: Diagnostics::default(),
            switches: Switches::from_env(),
            interrupt: Interrupt::default(),
            states: StateTable::default(),
            step: Step::default(),
            stats: Stats::default(),
            zero: None,
            mesh_schedule: None,
            strict: None,
            stage_costs: Vec::new(),
            micro_batches: 1,
            batch: None,
            snapshot: None,
        }
    }

    pub fn backend(&self) -> &dyn Backend {
        &*self.executor.backend
    }

    pub fn stats(&self) -> Stats {
        let c = self.executor.cache.counts;
        let states = self.states.nbytes(&self.executor.backend.mesh());
        let values: usize = self.recorder.values().map(|v| v.device_bytes()).sum();
        Stats {
            generation: self.recorder.generation(),
            nodes: self.recorder.graph.len(),
            plans: self.executor.cache.len(),
            hits: c.hits,
            misses: c.misses,
            evictions: c.evictions,
            compile_ms: c.compile_ms,
            held_bytes: values + states,
            handles: self.recorder.handle_count(),
            state_bytes: states,
            ..self.stats
        }
    }
}
