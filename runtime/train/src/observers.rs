//! Calls the recipe's observers from the training loop: `on_step`, `on_eval`, `on_end`, and its sinks; writes what they log.
//!
//! Observers are called between two steps, once the numbers that they are about have been written to the log. A replay calls none:
//! it has no run directory, and they cannot change its result.

use crate::error::Result;
use crate::training_loop::TrainingLoop;
use perilune_lua::{Failed, Run, StepNumbers};

impl TrainingLoop<'_> {
    /// Calls `recipe.on_step`.
    pub(crate) fn observe_step(&mut self, step: u64, numbers: &StepNumbers) -> Result<()> {
        let seconds = self.reporter.seconds();
        self.observe("on_step", |run| run.on_step(step, seconds, numbers))
    }

    /// Calls `recipe.on_eval`.
    pub(crate) fn observe_evaluation(&mut self, step: u64, split: &str, values: &[(String, f64)]) -> Result<()> {
        self.observe("on_eval", |run| run.on_eval(step, split, values))
    }

    /// Calls `recipe.on_end` with the status of the run.
    pub(crate) fn observe_end(&mut self, status: &str) -> Result<()> {
        self.observe("on_end", |run| run.on_end(status))
    }

    fn observe(&mut self, name: &str, call: impl FnOnce(&Run) -> std::result::Result<(), Failed>) -> Result<()> {
        if self.is_observed && self.run.has_observer(name) {
            self.aside(call)?;
        }
        self.pass_on()
    }

    /// Writes what the recipe has logged, and passes the new events to its sinks. What a sink logs is written too.
    pub(crate) fn pass_on(&mut self) -> Result<()> {
        if !self.is_observed {
            return Ok(());
        }
        let logged = self.run.host().observed.take();
        self.reporter.logged(&logged)?;
        // A new version of the recipe may have other sinks.
        let wanted = self.run.has_observer("sinks");
        let events = self.reporter.take_events(wanted);
        if events.is_empty() || !wanted {
            return Ok(());
        }
        for (step, event) in &events {
            self.aside(|run| run.sink(*step, event))?;
        }
        let logged = self.run.host().observed.take();
        self.reporter.logged(&logged)
    }
}
