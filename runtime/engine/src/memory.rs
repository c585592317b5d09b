//! Attributes device memory by role and recipe line, for `pl.memory()` and out-of-memory errors.
//!
//! States, data and results are tracked buffer by buffer. Intermediate values are taken from the plan: those of the largest
//! one that are live at the peak of its arena. Nothing is counted while steps run.

use crate::engine::{Engine, Fault};
use perilune_core::error::{Error, Kind};
use perilune_core::source_loc::SourceLoc;
use perilune_core::{DType, Shape, byte_size};
use perilune_plan::ir::Storage;
use perilune_plan::{BufferDesc, Memory, PlannedStep, memory, show};
use std::collections::HashMap;
use std::fmt::Write;

/// The use of a piece of memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Role {
    /// Trainable States.
    Weights,
    /// Other States: running statistics, averages, frozen weights.
    Buffers,
    /// 16-bit copies of States, for mixed precision.
    ShadowWeights,
    /// Moments and other optimizer slots.
    Optimizer,
    /// Intermediate values of a backward pass.
    Gradients,
    /// Other intermediate values of a step.
    Activations,
    /// Tensors made of host data: batches, data sets.
    Inputs,
    /// Results of steps and evaluations.
    Results,
    /// Copies of States for a checkpoint in progress.
    Checkpoint,
}

impl Role {
    pub const ALL: [Role; 9] = [
        Role::Weights,
        Role::Buffers,
        Role::ShadowWeights,
        Role::Optimizer,
        Role::Gradients,
        Role::Activations,
        Role::Inputs,
        Role::Results,
        Role::Checkpoint,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Role::Weights => "weights",
            Role::Buffers => "buffers",
            Role::ShadowWeights => "shadow_weights",
            Role::Optimizer => "optimizer",
            Role::Gradients => "gradients",
            Role::Activations => "activations",
            Role::Inputs => "inputs",
            Role::Results => "results",
            Role::Checkpoint => "checkpoint",
        }
    }
}

/// The roles of States.
const STATES: [Role; 4] = [Role::Weights, Role::Buffers, Role::ShadowWeights, Role::Optimizer];

/// The memory of one role that one recipe line made.
#[derive(Clone, Debug)]
pub struct Owner {
    pub role: Role,
    pub loc: SourceLoc,
    pub nbytes: usize,
    pub count: usize,
    /// The largest tensor among them.
    pub dtype: DType,
    pub shape: Shape,
}

/// The state of the memory.
#[derive(Clone, Debug, Default)]
pub struct Report {
    pub device: Memory,
    /// Largest first.
    pub owners: Vec<Owner>,
}

impl Report {
    /// Returns the bytes of a role.
    pub fn of(&self, role: Role) -> usize {
        self.owners.iter().filter(|o| o.role == role).map(|o| o.nbytes).sum()
    }
}

impl Report {
    /// Returns the names and bytes of the roles that there are.
    pub fn by_role(&self) -> Vec<(&'static str, usize)> {
        let all = Role::ALL.into_iter().map(|role| (role.name(), self.of(role)));
        all.filter(|(_, nbytes)| *nbytes > 0).collect()
    }
}

/// One tensor in memory.
pub(crate) type Entry = (Role, SourceLoc, DType, Shape, usize);

impl Engine {
    /// Lists the owners of memory, including the intermediate values of the largest plan so far.
    pub fn memory(&self) -> Report {
        self.report(self.executor.largest.as_ref(), false)
    }

    /// `planned`: the plan's outputs and new States are not allocated yet, and are included.
    fn report(&self, plan: Option<&PlannedStep>, planned: bool) -> Report {
        let mut entries: Vec<Entry> = self.states.entries(self.mesh()).collect();
        entries.extend(self.snapshot.iter().flat_map(|c| c.entries()));
        entries.extend(self.recorder.values().map(|v| (v.role, v.loc, v.dtype, v.shape, v.device_bytes())));
        if planned {
            entries.extend(self.states.unborn_entries(self.mesh()));
        }
        if let Some(plan) = plan {
            entries.extend(plan_entries(plan, planned));
        }
        let mut by_line: HashMap<(Role, SourceLoc), (Owner, usize)> = HashMap::new();
        for (role, loc, dtype, shape, nbytes) in entries {
            let new = || (Owner { role, loc, nbytes: 0, count: 0, dtype, shape }, 0);
            let (owner, most) = by_line.entry((role, loc)).or_insert_with(new);
            owner.nbytes += nbytes;
            owner.count += 1;
            // The order of a hash map must not decide between equal sizes.
            if (nbytes, shape.dims(), dtype as u32) > (*most, owner.shape.dims(), owner.dtype as u32) {
                (*most, owner.dtype, owner.shape) = (nbytes, dtype, shape);
            }
        }
        let mut owners: Vec<Owner> = by_line.into_values().map(|o| o.0).filter(|o| o.nbytes > 0).collect();
        owners.sort_by_key(|o| (std::cmp::Reverse(o.nbytes), o.role, o.loc));
        Report { device: self.executor.backend.memory(), owners }
    }

    /// Formats the owners as lines of a table.
    pub fn show_owners(&self, report: &Report, most: usize) -> Vec<String> {
        let line = |o: &Owner| {
            let many = if o.count > 1 { format!("{} tensors, such as ", o.count) } else { String::new() };
            let what = format!("{many}{} {}", o.dtype, o.shape);
            format!(
                "{:>9}  {:<11}  {:<40}  {}",
                byte_size::show(o.nbytes),
                o.role.name(),
                what,
                self.recorder.source_map.show(o.loc)
            )
        };
        let mut out: Vec<String> = report.owners.iter().take(most).map(|o| line(o).trim_end().to_string()).collect();
        let rest: usize = report.owners.iter().skip(most).map(|o| o.nbytes).sum();
        if rest > 0 {
            out.push(format!("{:>9}  in {} smaller ones", byte_size::show(rest), report.owners.len() - most));
        }
        out
    }

    /// Adds the owners of memory, including the plan that did not fit, and possible remedies to an out-of-memory error.
    pub(crate) fn explain(&self, mut fault: Fault) -> Fault {
        if fault.error.kind != Kind::Memory {
            return fault;
        }
        let plan = self.executor.attempt.as_ref();
        let report = self.report(plan, true);
        let budget = fault.error.op == "memory_budget";
        let states = self.states.nbytes(&self.mesh());
        let beyond = self.executor.memory_budget.filter(|most| budget && states > *most);
        if budget && fault.loc.is_none() {
            // A recipe's step has no current line: use the line of the largest owner, of States where they alone are too large.
            let planned = [Role::Activations, Role::Gradients, Role::Results];
            let roles: &[Role] = if beyond.is_some() { &STATES } else { &planned };
            let owner = report.owners.iter().find(|o| roles.contains(&o.role));
            fault.loc = owner.map(|o| o.loc).filter(|s| *s != SourceLoc::NONE);
        }
        let mut text = std::mem::take(&mut fault.error.message);
        if let Some(most) = beyond {
            let (states, most) = (byte_size::show(states), byte_size::show(most));
            text = format!("the States alone take {states}, and the budget is {most}: recomputation saves none of it");
        }
        if let Some(plan) = plan {
            let p = &plan.program;
            let _ = write!(
                text,
                "\n  what was to run keeps {} in between and hands out {}",
                byte_size::show(p.arena_bytes),
                byte_size::show(p.outputs.iter().map(BufferDesc::nbytes).sum())
            );
        }
        text.push_str("\n  the largest owners:");
        for line in self.show_owners(&report, 6) {
            let _ = write!(text, "\n  {line}");
        }
        fault.error.message = text;
        fault.error.hint = Some(cures(&report, budget, beyond.is_some()));
        fault
    }
}

/// Lists the values that are live at the peak of a plan's arena and, if requested, its outputs.
fn plan_entries(plan: &PlannedStep, outputs: bool) -> Vec<Entry> {
    let p = &plan.program;
    let entry = |v: &perilune_plan::ir::Value| {
        let backward = v.origin.position().and_then(|at| plan.backward.get(at)).is_some_and(|b| *b);
        let role = if backward { Role::Gradients } else { Role::Activations };
        (role, show::place(v.origin, &plan.source_map), v.dtype, v.shape, v.nbytes())
    };
    let mut out: Vec<Entry> = memory::fullest(p).iter().map(|v| entry(&p.values[v.0 as usize])).collect();
    if outputs {
        let handed = p.values.iter().filter(|v| matches!(v.storage, Storage::Output(_)));
        out.extend(
            handed.map(|v| (Role::Results, show::place(v.origin, &plan.source_map), v.dtype, v.shape, v.nbytes())),
        );
    }
    out
}

/// Suggests remedies, most effective first. Under a budget everything that can be recomputed already is.
fn cures(report: &Report, budget: bool, by_states: bool) -> String {
    let total: usize = report.owners.iter().map(|o| o.nbytes).sum();
    let large = |role: Role, share: f64| report.of(role) as f64 > share * total as f64;
    let half = report.owners.iter().any(|o| o.role == Role::Activations && o.dtype.is_half());
    let mut out = match by_states {
        true => vec!["a smaller model"],
        false => vec!["a smaller batch, with `accumulate = n` for the same gradients from n smaller ones"],
    };
    if budget {
        out.push("a larger memory_budget");
    } else if large(Role::Activations, 0.2) || large(Role::Gradients, 0.3) {
        out.push("pl.checkpoint(fn, x), `checkpoint = true` of blocks, or recipe.memory_budget");
    }
    if !half && !by_states {
        out.push("--precision bf16");
    }
    if large(Role::Optimizer, 0.3) {
        out.push("an optimizer that keeps less (Adafactor, Lion, SGD)");
    }
    if large(Role::Inputs, 0.3) {
        out.push("smaller data, or data in a narrower dtype");
    }
    if !budget && large(Role::Results, 0.3) {
        out.push("x:free() or a narrower scope for tensors that are held and not needed");
    }
    format!("what would help: {}", out.join("; "))
}

/// Makes the error for an exceeded budget, before anything ran.
pub fn parse_budget(text: &str) -> perilune_core::Result<usize> {
    byte_size::amount(text).map_err(|e| Error::argument("memory_budget", e))
}
