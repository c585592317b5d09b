//! Decides which version of an edited recipe takes the next step.
//!
//! A new version is on trial until the numbers of its third step have been read. Until then the run before it stays in
//! memory, unchanged. What can fail, and what happens then:
//!
//! - The version cannot be loaded, or recording a step of it raises: it never ran.
//! - A step or an evaluation raises: the version before continues from the States as they are (a step that raises has changed
//!   none) where they fit, and from its own earlier States otherwise. A step or an evaluation that does not end, on trial or
//!   with file watching at any time, is cancelled once a newer version is saved or a stop is requested (`cancel.rs`).
//! - A loss on trial is not finite: the States are corrupt, so the version before continues from the step of the edit, and
//!   the steps since are repeated. A non-finite loss after the trial is the recipe's, not the edit's.
//!
//! After the trial the version before has to be built again from its text. An error of a version that has none before it
//! ends the run, as it does without hot reload.

use super::{Candidate, NextVersion, Reloader, TRIAL};
use crate::cancel;
use crate::error::{Error, Result};
use crate::events::Event;
use crate::history::{Change, Files, HistoryEntry};
use crate::params;
use crate::training_loop::TrainingLoop;
use perilune_lua::{Memory, ParamValue, Run, Source, StateMigration, Taking};
use serde_json::json;
use std::rc::Rc;
use std::time::Instant;

/// A version on trial, and the one to return to.
pub(crate) struct Trial {
    old: Rc<Run>,
    old_params: Vec<(String, ParamValue)>,
    memory: Memory,
    files: Files,
    changed: Vec<String>,
    handover: StateMigration,
    /// The step it was applied after.
    pub since: u64,
    begun: Instant,
    misses: u64,
    /// Whether new plans are reported from its second step on.
    reported: bool,
    /// The random number state at that step.
    rng: (u64, u32),
    /// Whether the losses before it were finite.
    pub sound: bool,
    /// Whether a checkpoint has been taken since, which discards the States that it dropped.
    checkpointed: bool,
}

/// Brings the engines of all processes to the same state after they may have computed different things.
fn realign(run: &Run) -> Result<()> {
    let engine = &mut *run.host().engine.borrow_mut();
    engine.realign().map_err(|e| Error::System(e.to_string()))
}

impl TrainingLoop<'_> {
    /// Returns a new version of the recipe, if there is one. In a job process 0 looks for it, when all vote.
    pub fn candidate(&mut self) -> Option<Candidate> {
        let step = self.run.count();
        if !self.job.is_first() || !self.job.votes_before(step) {
            return None;
        }
        let at_once = self.control.take_reload();
        self.reloader.as_mut()?.changed(at_once, step)
    }

    /// Applies a new version of the recipe, if there is one; returns whether it did.
    pub fn look(&mut self) -> Result<bool> {
        self.candidate().map_or(Ok(false), |candidate| self.consider(candidate))
    }

    /// Applies a version of the recipe; returns whether it did. In a job it is applied in all processes or in none.
    pub fn consider(&mut self, candidate: Candidate) -> Result<bool> {
        if candidate.is_from_trial() {
            self.accept(true)?;
        }
        // The pending step was recorded by the old version.
        if let Err(failure) = self.settle() {
            self.recover(failure)?;
        }
        let step = self.run.count();
        // A resumed run has read the losses before it from its log.
        let resumed = candidate.is_resumed();
        // A version on trial has taken a step by now, and becomes the one to return to.
        self.accept(false)?;
        // Building a version, and its first step, need new plans in any case.
        let reported = self.report_misses(false);
        let Some(reloader) = &mut self.reloader else { return Ok(false) };
        let before = reloader.running();
        let loaded = match self.job.has_several() {
            true => self.load_together(&candidate)?,
            false => reloader.load_in_run(&candidate, &self.run, &self.params),
        };
        match loaded {
            Ok(None) => {
                self.report_misses(reported);
                self.reporter.tell(&Event::ReloadWaits { step });
                Ok(false)
            }
            Ok(Some(next)) => {
                // Count the plans of the step, not those that copied States.
                let misses = self.run.host().engine.borrow().stats().misses;
                self.trial = Some(Trial {
                    old: std::mem::replace(&mut self.run, Rc::new(next.run)),
                    old_params: std::mem::replace(&mut self.params, next.params),
                    memory: next.memory,
                    files: next.files,
                    changed: next.changed,
                    handover: next.handover,
                    since: step,
                    begun: next.begun,
                    misses,
                    reported,
                    rng: self.run.rng(),
                    sound: self.sound,
                    checkpointed: false,
                });
                self.evaluated.clear();
                self.run.time_data(self.data_time.clone())?;
                self.announce_version();
                if !resumed {
                    self.detector.forget();
                }
                self.set_policies(self.policies.clone())?;
                self.store_params()?;
                Ok(true)
            }
            Err(failure) => {
                self.report_misses(reported);
                self.refused(step, None, &before, &candidate.files, &failure)?;
                Ok(false)
            }
        }
    }

    /// Builds a version in all processes. If one of them cannot, none has it; the error is the first one's.
    fn load_together(&mut self, candidate: &Candidate) -> Result<Result<Option<NextVersion>>> {
        let Some(reloader) = &mut self.reloader else { return Ok(Ok(None)) };
        let built = reloader.load(candidate, &self.run, &self.params);
        if self.job.has_failed() {
            return built.map(Some).map(Ok);
        }
        let own = built.as_ref().err().map(|e| e.to_string());
        let error = self.job.first_error(own.as_deref())?;
        realign(&self.run)?;
        Ok(match (built, error) {
            (Ok(next), None) => Ok(Some(next)),
            (Ok(next), Some(text)) => {
                reloader.recall(next.memory)?;
                Err(Error::System(text))
            }
            // The error has the recipe's line here, and the same text elsewhere.
            (Err(error), Some(text)) if error.to_string() == text => Err(error),
            (Err(error), text) => Err(text.map_or(error, Error::System)),
        })
    }

    /// Writes the present params and sizes to the records that a resume reads.
    pub fn store_params(&mut self) -> Result<()> {
        let params = params::to_json(&self.params);
        if let Err(error) = self.checkpoints.rechoose(&self.run) {
            self.reporter.warning(&error.to_string());
        }
        self.checkpoints.set_params(params.clone());
        let defaults = self.reloader.as_ref().map(|r| json!(r.defaults()));
        let fields = [
            ("params", params),
            ("steps", self.run.steps().into()),
            ("parameters", self.run.num_parameters().into()),
            ("frozen_parameters", self.run.num_frozen().into()),
        ];
        let fields = fields.into_iter().chain(defaults.map(|d| ("defaults", d)));
        self.reporter.dir.as_mut().map_or(Ok(()), |d| d.update_soon(fields))
    }

    /// Reports and records a version that was refused.
    fn refused(
        &mut self,
        step: u64,
        back_to: Option<u64>,
        before: &Files,
        files: &Files,
        failure: &Error,
    ) -> Result<()> {
        self.detector.forget();
        let text = failure.to_string();
        self.reporter.reload(&Event::Refused { step, back_to, error: &text })?;
        let kind = Change::Refused { back_to };
        let entry = HistoryEntry { step, kind, before, files, ..HistoryEntry::new(files) };
        self.reporter.history(&HistoryEntry { error: Some(&text), ..entry })
    }

    /// Records that the version before a failed edit continues.
    fn record_return(
        &mut self,
        step: u64,
        from_trial: bool,
        before: &Files,
        files: &Files,
        states: Option<String>,
    ) -> Result<()> {
        let changed = ["the version before".to_string()];
        let run = Some((&*self.run, self.params.as_slice()));
        let entry = HistoryEntry { step, changed: &changed, before, states, run, ..HistoryEntry::new(files) };
        let owed = self.owed.is_some();
        self.reporter.history(&HistoryEntry { kind: Change::Applied { from_trial, owed }, ..entry })
    }

    /// Reports and records a version on trial after its first step.
    pub fn record_applied(&mut self, step: u64) -> Result<()> {
        let Some(trial) = &self.trial else { return Ok(()) };
        if step != trial.since + 1 {
            return Ok(());
        }
        self.run.host().engine.borrow_mut().switches.report_misses = trial.reported;
        let plans = self.run.host().engine.borrow().stats().misses - trial.misses;
        let ms = trial.begun.elapsed().as_secs_f64() * 1e3;
        let (since, changed, states) = (trial.since, &trial.changed, trial.handover.show());
        self.reporter.reload(&Event::Applied { step: since, changed, plans, ms, states: states.as_deref() })?;
        let before = self.reloader.as_ref().map(|r| r.running()).unwrap_or_default();
        let run = Some((&*self.run, self.params.as_slice()));
        let entry =
            HistoryEntry { step: since, changed, before: &before, states, run, ..HistoryEntry::new(&trial.files) };
        self.reporter.history(&entry)
    }

    /// Ends the trial if this was its last step; the numbers of the step have been read.
    pub fn passed(&mut self, step: u64) -> Result<()> {
        if self.trial.as_ref().is_some_and(|t| step >= t.since + TRIAL) { self.accept(false) } else { Ok(()) }
    }

    /// Ends the trial: States that the version before had and this one lacks are parked until the next checkpoint.
    fn accept(&mut self, parks: bool) -> Result<()> {
        let (Some(trial), Some(reloader)) = (self.trial.take(), &mut self.reloader) else { return Ok(()) };
        if parks || !trial.checkpointed {
            reloader.parked.add(&trial.old, &trial.handover)?;
        }
        reloader.accept(trial.files, &trial.old_params)
    }

    /// Frees the States that edits dropped, at a checkpoint: it does not have them.
    pub fn drop_parked(&mut self) {
        if let Some(reloader) = &mut self.reloader {
            reloader.parked.clear();
        }
        if let Some(trial) = &mut self.trial {
            trial.checkpointed = true;
        }
    }

    /// Continues with the version before the running one, which has failed; returns the error if there is none.
    pub fn recover(&mut self, failure: Error) -> Result<()> {
        if self.job.has_several() {
            // Without a version to return to, the others have to learn of the error before this process computes anything that they
            // do not. With one, all return if all have failed alike.
            let returns = self.trial.is_some() || self.reloader.as_ref().is_some_and(Reloader::can_step_back);
            let text = failure.to_string();
            let what = format!("what follows the error {}", text.lines().next().unwrap_or_default());
            if self.job.has_failed() || !returns || self.job.agree(&what, || text).is_err() {
                return Err(failure);
            }
            realign(&self.run)?;
        }
        let failure = if self.corrupt {
            // Steps issued since were computed from the corrupt States.
            self.pending = None;
            failure
        } else {
            // The loss of the step before may give the reason.
            self.settle().err().unwrap_or(failure)
        };
        let corrupt = std::mem::take(&mut self.corrupt);
        let Some(reloader) = &mut self.reloader else { return Err(failure) };
        let cancelled = cancel::cancelled(&failure);
        let failure = cancel::explain(failure, "in a step or an evaluation");
        if cancelled && self.trial.is_none() && !reloader.can_step_back() {
            // A newer version continues, or the run stops, with a checkpoint.
            reloader.skip_wait();
            self.owed = None;
            self.run.set_rng(self.rng);
            self.reporter.warning(&failure.to_string());
            return Ok(());
        }
        // In a replay the returns are versions of the history.
        if reloader.replays() || !matches!(failure, Error::Recipe(_)) {
            return Err(failure);
        }
        match self.trial.take() {
            Some(trial) if !corrupt || trial.sound => self.revert(trial, corrupt, &failure),
            _ if corrupt => Err(failure),
            _ => self.rebuild_previous(failure),
        }
    }

    /// Continues with the run before a failed version on trial.
    fn revert(&mut self, trial: Trial, corrupt: bool, failure: &Error) -> Result<()> {
        self.run.host().engine.borrow_mut().switches.report_misses = trial.reported;
        let step = self.run.count();
        let new = std::mem::replace(&mut self.run, trial.old);
        self.params = trial.old_params;
        let mut before = Files::new();
        if let Some(reloader) = &mut self.reloader {
            before = reloader.running();
            reloader.recall(trial.memory)?;
        }
        let applied = step > trial.since && !corrupt;
        if applied {
            let parked = Default::default();
            self.run.take_over(Source::Run(&new), &parked, Taking::Back)?;
            self.run.set_rng(self.rng);
        } else {
            // No step was taken, or those taken are void: their random numbers are drawn again.
            self.run.set_rng(trial.rng);
        }
        let back_to = (corrupt && step > trial.since).then_some(trial.since);
        if let Some(since) = back_to {
            self.rewind(since)?;
        }
        self.version_changed()?;
        self.refused(step, back_to, &before, &trial.files, failure)?;
        if applied { self.record_return(step, true, &trial.files, &before, None) } else { Ok(()) }
    }

    /// Builds the version before a failed one again: the failed one had passed its trial.
    fn rebuild_previous(&mut self, failure: Error) -> Result<()> {
        let step = self.run.count();
        self.run.set_rng(self.rng);
        let Some(reloader) = &mut self.reloader else { return Err(failure) };
        let bad = reloader.running();
        let Some(next) = reloader.step_back(&self.run, &self.params) else { return Err(failure) };
        reloader.parked.add(&self.run, &next.handover)?;
        (self.run, self.params) = (Rc::new(next.run), next.params);
        self.run.time_data(self.data_time.clone())?;
        self.version_changed()?;
        self.refused(step, None, &next.files, &bad, &failure)?;
        self.record_return(step, false, &bad, &next.files, next.handover.show())
    }

    /// Applies the anomaly policies of another version, and clears the window of its losses.
    fn new_policies(&mut self) -> Result<()> {
        self.detector.forget();
        self.set_policies(self.policies.clone())
    }

    /// Reports the version that takes the next step; the time of its data is measured from here on.
    pub fn announce_version(&mut self) {
        let peak = self.run.host().engine.borrow().backend().peak_flops(&self.run.precision());
        self.data_seen = self.data_time.get();
        let (steps, tokens_per_sample) = (self.run.steps(), self.run.tokens_per_sample());
        let epoch = self.run.steps_per_epoch();
        self.reporter.tell(&Event::Version { steps, epoch, tokens_per_sample, peak });
    }

    /// Updates everything that depends on the version, after a return to another one.
    fn version_changed(&mut self) -> Result<()> {
        self.evaluated.clear();
        self.announce_version();
        self.new_policies()?;
        self.checkpoints.invalidate();
        self.store_params()
    }

    /// Removes the events and checkpoints of the steps after this one, which are void.
    fn rewind(&mut self, step: u64) -> Result<()> {
        self.owed = None;
        self.checkpoints.forget_after(step, self.reporter)?;
        // What void steps have logged is void.
        self.run.host().observed.take();
        self.reporter.rewind(step)
    }
}
