//! Opens and closes the step scope, and flushes recordings outside of one.

use crate::engine::{Engine, Fault};
use crate::recorder::Deferred;
use crate::state::StateId;
use perilune_core::env_flags::{self, Setting};
use perilune_core::error::{Error, Kind};
use perilune_core::graph::NodeId;
use perilune_plan::Request;

/// The switches, each also settable from Lua for a scope. The table in docs/guide/errors.md describes them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Switches {
    /// `PERILUNE_FUSION=0`: every primitive is a separate kernel.
    pub fusion: bool,
    /// `PERILUNE_PRINT_PLAN=1` (or `source`): show every plan when it is compiled.
    pub print_plan: PrintPlan,
    /// `PERILUNE_CHECK_NAN=1`: a NaN or infinity in a result or assignment of a step is an error.
    pub check_nan: bool,
    /// `PERILUNE_REPORT_MISSES=0`: do not report why a warmed-up loop needed a new plan.
    pub report_misses: bool,
}

/// The detail in which a compiled plan is printed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PrintPlan {
    Off,
    /// One line per kernel.
    Kernels,
    /// Also the recipe lines and the text of each kernel.
    Source,
}

impl Switches {
    pub fn from_env() -> Switches {
        Switches {
            fusion: env_flags::FUSION.is_on(true),
            print_plan: match env_flags::PRINT_PLAN.setting() {
                Some(Setting::Word(_)) => PrintPlan::Source,
                Some(Setting::On) => PrintPlan::Kernels,
                Some(Setting::Off) | None => PrintPlan::Off,
            },
            check_nan: env_flags::CHECK_NAN.is_on(false),
            report_misses: env_flags::REPORT_MISSES.is_on(true),
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Step {
    pub depth: u32,
    keep: Vec<NodeId>,
    finished: u64,
    /// The random counter at the start of the step.
    draws: u32,
}

/// The number of warm-up steps after which a new plan is reported.
const WARM: u64 = 8;

impl Step {
    pub fn warm(&self) -> bool {
        self.finished > WARM
    }
}

/// The number of nodes after which a recording outside any step is flushed.
const FLUSH_NODES: usize = 50_000;

/// Bytes of values after which those without handles are released, outside any step.
const CROWD_BYTES: usize = 256 << 20;

impl Engine {
    pub fn in_step(&self) -> bool {
        self.step.depth > 0
    }

    /// Returns whether something was recorded or assigned since the generation began.
    pub fn is_dirty(&self) -> bool {
        !self.recorder.graph.is_empty() || self.states.is_dirty()
    }

    /// Returns whether a recording outside a step is long enough to be flushed.
    pub fn wants_flush(&self) -> bool {
        self.step.depth == 0 && self.recorder.graph.len() > FLUSH_NODES
    }

    /// Evaluates all nodes with handles, writes all assignments and starts a new generation.
    ///
    /// The caller collects garbage first, so that only nodes that the script can reach have handles.
    pub fn flush(&mut self) -> Result<(), Fault> {
        // Weights of a layer that the recipe has replaced are not computed: before they are placed, each is whole on every device.
        self.states.drop_unborn();
        let roots = self.recorder.held();
        let wanted = self.wanted();
        self.recorder.drop_unreachable(&wanted, false);
        self.finish(roots, true).inspect_err(|fault| {
            // A new State that had no memory and that nothing reaches is not asked for again.
            if fault.error.kind == Kind::Memory {
                self.states.drop_unborn();
            }
        })
    }

    /// Returns the nodes of pending assignments and gradients.
    fn wanted(&mut self) -> Vec<NodeId> {
        let mut wanted: Vec<NodeId> = self.states.pending().iter().map(|c| c.1).collect();
        wanted.extend(self.states.grads_mut().filter_map(|held| match held {
            Deferred::Node(id) => Some(*id),
            Deferred::Value(_) => None,
        }));
        wanted
    }

    /// Returns whether enough was evaluated outside of a step to release values without handles.
    pub fn is_crowded(&self) -> bool {
        self.step.depth == 0 && self.recorder.made_bytes > CROWD_BYTES
    }

    /// Releases evaluated values without handles. The caller collects garbage first. Their readers compute them
    /// again if necessary.
    pub fn release_unreachable(&mut self) {
        let wanted = self.wanted();
        self.recorder.drop_unreachable(&wanted, true);
        self.recorder.made_bytes = 0;
    }

    /// Ends an implicit step of a plain loop: a flush that also advances the random counters.
    pub fn end_implicit_step(&mut self) -> Result<(), Fault> {
        self.flush()?;
        self.states.clear_grads();
        self.advance();
        Ok(())
    }

    /// Opens a step scope. The generation must be clean: flush first.
    pub fn begin_step(&mut self) -> Result<(), Fault> {
        if self.step.depth > 0 {
            return Err(Error::argument("step", "a step cannot be opened inside a step").into());
        }
        if self.is_dirty() {
            return Err(Error::system("step", "this is a bug: a step begins on an unflushed recording").into());
        }
        self.step.depth = 1;
        self.step.keep.clear();
        self.step.draws = self.recorder.graph.rng.occurrence;
        Ok(())
    }

    /// Marks a node of the open step that must survive it.
    pub fn keep(&mut self, id: NodeId) {
        self.step.keep.push(id);
    }

    /// Closes the step: evaluates `results` and kept nodes, writes assignments. On an error the States are as before.
    pub fn end_step(&mut self, results: &[NodeId]) -> Result<(), Fault> {
        let mut roots = std::mem::take(&mut self.step.keep);
        roots.extend_from_slice(results);
        self.step.depth = 0;
        if let Err(fault) = self.finish(roots, false) {
            self.recorder.graph.rng.occurrence = self.step.draws;
            return Err(fault);
        }
        self.advance();
        Ok(())
    }

    /// Closes a step that failed: its assignments are dropped.
    pub fn abort_step(&mut self) -> Result<(), Fault> {
        self.step.depth = 0;
        self.step.keep.clear();
        self.states.roll_back();
        // An interrupted step is undone as a whole.
        let undoing = self.interrupt.set_aside();
        // The next step draws what this one would have.
        self.recorder.graph.rng.occurrence = self.step.draws;
        let ended = self.finish(Vec::new(), false);
        drop(undoing);
        ended
    }

    fn advance(&mut self) {
        self.step.finished += 1;
        self.recorder.graph.rng.step = self.recorder.graph.rng.step.wrapping_add(1);
        self.recorder.graph.rng.occurrence = 0;
    }

    fn finish(&mut self, mut roots: Vec<NodeId>, keep_grads: bool) -> Result<(), Fault> {
        if keep_grads {
            for held in self.states.grads_mut() {
                if let Deferred::Node(id) = held {
                    roots.push(*id);
                }
            }
        }
        roots.sort_unstable();
        roots.dedup();
        let leaf = |e: &Engine, id: NodeId| e.recorder.graph.node(id).op == &perilune_core::ops::create::LEAF;
        roots.retain(|id| !leaf(self, *id) && !self.recorder.has_value(*id));
        let request = self.states.request(roots);
        if !(request.roots.is_empty() && request.state_writes.is_empty())
            && let Err(fault) = self.run_step(request).and_then(|request| self.check_finite(&request))
        {
            // The device checks indices before it writes; what was recorded cannot be run, so it is dropped.
            let undoing = self.interrupt.set_aside();
            self.states.roll_back();
            let initial = self.states.request(Vec::new());
            let stands = initial.state_writes.is_empty() || self.run_step(initial).is_ok();
            drop(undoing);
            if !stands {
                self.keep_initial();
                return Err(fault);
            }
            self.states.written(true);
            self.recorder.end_generation();
            return Err(fault);
        }
        if keep_grads {
            let mut kept = Vec::new();
            for held in self.states.grads_mut() {
                if let Deferred::Node(id) = held {
                    kept.push(*id);
                }
            }
            for id in kept {
                let value = self.value_of(id)?;
                for held in self.states.grads_mut() {
                    if matches!(held, Deferred::Node(n) if *n == id) {
                        *held = Deferred::Value(value.clone());
                    }
                }
            }
        }
        self.states.written(keep_grads);
        self.recorder.end_generation();
        Ok(())
    }

    /// Returns, with `check_nan`, an error with the recipe line of the first non-finite value.
    fn check_finite(&mut self, request: &Request) -> Result<(), Fault> {
        if !self.switches.check_nan {
            return Ok(());
        }
        let nodes = request.roots.iter().copied().chain(request.state_writes.iter().map(|c| c.1));
        for (k, id) in nodes.enumerate() {
            let node = self.recorder.graph.node(id);
            if !node.dtype.is_float() {
                continue;
            }
            let (name, shape, loc) = (node.op.name, node.shape, self.recorder.graph.loc_of(id));
            let value = match k.checked_sub(request.roots.len()) {
                None => self.read_node(id)?,
                Some(c) => self.read_written(StateId(request.state_writes[c].0))?,
            };
            if let Some(at) = (0..value.numel()).find(|&i| !value.get_f64(i).is_finite()) {
                let what = if k < request.roots.len() { "result" } else { "new value of a State" };
                let message = format!("the {what} ({name}, shape {shape}) has {} at element {at}", value.get_f64(at));
                let hint = "lower the learning rate, clip gradients, or check earlier operations for log, division and exp of large numbers";
                let error = Error::new(perilune_core::Kind::System, "check_nan", message).hint(hint);
                return Err(Fault { error, loc: Some(loc) });
            }
        }
        Ok(())
    }
}
