//! Edits of a run that goes on: which version of the recipe takes the next step.
//!
//! A new version is on trial until the numbers of its third step are known. Until then the run before it stays in memory,
//! untouched. What may go wrong, and what happens then:
//!
//! - it cannot be loaded, or its recorded step raises: it never ran;
//! - a step or an evaluation raises: the version before goes on from the States as they are (a step that raises has changed
//!   none), where they fit, and else from its own of then. One that does not end raises once a newer version is saved or the
//!   run is to stop: a step on trial, or with `--watch` any evaluation. Later steps are not listened to (`hurry.rs`);
//! - a loss on trial is no number: its States are spoilt, so the version before goes on from the step of the edit, and the
//!   steps since are repeated. Later than that a NaN is the recipe's, not the edit's.
//!
//! After the trial the version before is built again from its text. What any version raises that has none before it ends
//! the run, as it does without `--watch`.

use crate::failure::Failure;
use crate::hurry;
use crate::ledger::{self, Entry, Files, Kind};
use crate::train::Trainer;
use crate::watch::TRIAL;
use perilune_lua::{Memory, ParamValue, Run, Source, StateMigration, Taking};
use serde_json::json;
use std::rc::Rc;
use std::time::Instant;

/// A version on trial, and the one to go back to.
pub struct Trial {
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
    /// Whether new plans are reported, from its second step on.
    reported: bool,
    /// The random numbers at that step.
    rng: (u64, u32),
    /// The losses before it were numbers.
    pub sound: bool,
    /// A checkpoint has been taken since: what it dropped is gone.
    checkpointed: bool,
}

impl Trainer<'_> {
    /// Applies a new version of the recipe, if there is one; whether it did.
    pub fn look(&mut self) -> Result<bool, Failure> {
        let at_once = self.signals.reload_asked();
        let Some(watch) = &mut self.watch else { return Ok(false) };
        let Some(candidate) = watch.changed(at_once, self.run.count()) else { return Ok(false) };
        if candidate.is_from_trial() {
            self.accept(true)?;
        }
        // What is pending was recorded by the old version.
        if let Err(failure) = self.settle() {
            self.bad_edit(failure)?;
        }
        let step = self.run.count();
        // A version on trial has done a step by now, and is the one to go back to from here on.
        self.accept(false)?;
        // What a version needs to be built, and its first step, are plans that are new by right.
        let reported = self.report_misses(false);
        let Some(watch) = &mut self.watch else { return Ok(false) };
        let before = watch.running();
        let loaded = watch.load_in_run(&candidate, &self.run, &self.params);
        match loaded {
            Ok(None) => {
                self.report_misses(reported);
                let line = format!("step {step} · an edit waits for its kernels, which are being compiled");
                self.events.screen.line(&line);
                Ok(false)
            }
            Ok(Some(next)) => {
                // Plans of the step, not those that copied the State.
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
                self.evaluated = None;
                self.run.time_data(self.progress.data())?;
                self.new_pace();
                self.new_policies()?;
                self.note_params()?;
                Ok(true)
            }
            Err(failure) => {
                self.report_misses(reported);
                self.refused(step, None, &before, &candidate.files, &failure)?;
                Ok(false)
            }
        }
    }

    /// What goes on from here must find the params of now, not those of the start.
    pub fn note_params(&mut self) -> Result<(), Failure> {
        let params = crate::events::params(&self.params);
        self.progress.set_total(self.run.steps());
        if let Err(failure) = self.checkpoints.rechoose(&self.run) {
            self.events.warning(&failure.message());
        }
        self.checkpoints.set_params(params.clone());
        let defaults = self.watch.as_ref().map(|w| serde_json::json!(w.defaults()));
        let fields = [("params", params), ("steps", self.run.steps().into())];
        let fields = fields.into_iter().chain(defaults.map(|d| ("defaults", d)));
        self.events.dir.as_mut().map_or(Ok(()), |d| d.update_soon(fields))
    }

    fn refused(
        &mut self,
        step: u64,
        back_to: Option<u64>,
        before: &Files,
        files: &Files,
        failure: &Failure,
    ) -> Result<(), Failure> {
        self.sentry.forget();
        let text = failure.message();
        let repeated = step - back_to.unwrap_or(step);
        let more = back_to.map_or(serde_json::Value::Null, |n| json!({ "back_to": n, "repeated": repeated }));
        self.events.reload(back_to.unwrap_or(step), &[], Some(&text), more)?;
        let what = match repeated {
            0 => "the version before goes on".to_string(),
            1 => format!("the version before goes on from step {}: 1 step is repeated", step - 1),
            n => format!("the version before goes on from step {}: {n} steps are repeated", step - n),
        };
        self.events.screen.warn(&format!("step {step} · {} · {what}", text.lines().next().unwrap_or_default()));
        let kind = Kind::Refused { back_to };
        let entry = Entry { step, kind, before, files, ..Entry::new(files) };
        self.record(&Entry { error: Some(&text), ..entry })
    }

    fn record(&self, entry: &Entry<'_>) -> Result<(), Failure> {
        self.events.dir.as_ref().map_or(Ok(()), |dir| ledger::record(&dir.path, entry))
    }

    /// The version before an edit that failed goes on.
    fn record_way_back(
        &self,
        step: u64,
        from_trial: bool,
        before: &Files,
        files: &Files,
        states: Option<String>,
    ) -> Result<(), Failure> {
        let changed = ["the version before".to_string()];
        let run = Some((&*self.run, self.params.as_slice()));
        let entry = Entry { step, changed: &changed, before, states, run, ..Entry::new(files) };
        let owed = self.owed.is_some();
        self.record(&Entry { kind: Kind::Applied { from_trial, owed }, ..entry })
    }

    /// After the first step of a version on trial: it is applied.
    pub fn judge(&mut self, step: u64) -> Result<(), Failure> {
        let Some(trial) = &self.trial else { return Ok(()) };
        if step != trial.since + 1 {
            return Ok(());
        }
        self.run.host().engine.borrow_mut().switches.report_misses = trial.reported;
        let plans = self.run.host().engine.borrow().stats().misses - trial.misses;
        let ms = trial.begun.elapsed().as_secs_f64() * 1e3;
        let what = if trial.changed.is_empty() { "no change of the text".into() } else { trial.changed.join(", ") };
        let since = trial.since;
        self.events
            .screen
            .line(&format!("step {since} · {what} · applied at step {step} · {plans} plans compiled · {ms:.0} ms"));
        let states = trial.handover.show();
        if let Some(text) = &states {
            self.events.screen.line(&format!("step {since} · {text}"));
        }
        let more = json!({ "plans": plans, "ms": crate::format::number(ms), "states": states });
        self.events.reload(since, &trial.changed, None, more)?;
        let before = self.watch.as_ref().map(|w| w.running()).unwrap_or_default();
        let run = Some((&*self.run, self.params.as_slice()));
        let entry =
            Entry { step: since, changed: &trial.changed, before: &before, states, run, ..Entry::new(&trial.files) };
        self.record(&entry)
    }

    /// A step's numbers are known to be numbers: was it the last of a trial?
    pub fn passed(&mut self, step: u64) -> Result<(), Failure> {
        if self.trial.as_ref().is_some_and(|t| step >= t.since + TRIAL) { self.accept(false) } else { Ok(()) }
    }

    /// The trial is over: what the version before had and this one has not is parked, until the next checkpoint.
    fn accept(&mut self, parks: bool) -> Result<(), Failure> {
        let (Some(trial), Some(watch)) = (self.trial.take(), &mut self.watch) else { return Ok(()) };
        if parks || !trial.checkpointed {
            watch.parked.add(&trial.old, &trial.handover)?;
        }
        watch.accept(trial.files, &trial.old_params)
    }

    /// A checkpoint has been taken: what edits dropped is dropped for good.
    pub fn unpark(&mut self) {
        if let Some(watch) = &mut self.watch {
            watch.parked.clear();
        }
        if let Some(trial) = &mut self.trial {
            trial.checkpointed = true;
        }
    }

    /// Something of the running version went wrong. Goes on with the version before it, if there is one.
    pub fn bad_edit(&mut self, failure: Failure) -> Result<(), Failure> {
        let failure = if self.spoilt {
            // What was issued since is made of it.
            self.pending = None;
            failure
        } else {
            // The loss of the step before may well say why.
            self.settle().err().unwrap_or(failure)
        };
        let spoilt = std::mem::take(&mut self.spoilt);
        let Some(watch) = &mut self.watch else { return Err(failure) };
        let ended = hurry::ended(&failure);
        let failure = hurry::explain(failure, "in a step or an evaluation");
        if ended && self.trial.is_none() && !watch.can_step_back() {
            // There is a newer version to go on with, or the run is to stop, with a checkpoint.
            watch.look_at_once();
            self.owed = None;
            self.run.set_rng(self.rng);
            self.events.warning(&failure.message());
            return Ok(());
        }
        // In a replay the ways back are versions of the ledger.
        if watch.scripted() || !matches!(failure, Failure::Recipe(_)) {
            return Err(failure);
        }
        match self.trial.take() {
            Some(trial) if !spoilt || trial.sound => self.take_back(trial, spoilt, &failure),
            _ if spoilt => Err(failure),
            _ => self.go_back(failure),
        }
    }

    /// The version on trial has failed: the run before it goes on.
    fn take_back(&mut self, trial: Trial, spoilt: bool, failure: &Failure) -> Result<(), Failure> {
        self.run.host().engine.borrow_mut().switches.report_misses = trial.reported;
        let step = self.run.count();
        let new = std::mem::replace(&mut self.run, trial.old);
        self.params = trial.old_params;
        let mut before = Files::new();
        if let Some(watch) = &mut self.watch {
            before = watch.running();
            watch.recall(trial.memory)?;
        }
        let applied = step > trial.since && !spoilt;
        if applied {
            let parked = Default::default();
            self.run.take_over(Source::Run(&new), &parked, Taking::Back)?;
            self.run.set_rng(self.rng);
        } else {
            // Nothing was done, or nothing of it counts; the random numbers are drawn again.
            self.run.set_rng(trial.rng);
        }
        let back_to = (spoilt && step > trial.since).then_some(trial.since);
        if let Some(since) = back_to {
            self.rewind(since)?;
        }
        self.changed_back()?;
        self.refused(step, back_to, &before, &trial.files, failure)?;
        if applied { self.record_way_back(step, true, &trial.files, &before, None) } else { Ok(()) }
    }

    /// A version that had passed its trial has failed: the one before it is built again.
    fn go_back(&mut self, failure: Failure) -> Result<(), Failure> {
        let step = self.run.count();
        self.run.set_rng(self.rng);
        let Some(watch) = &mut self.watch else { return Err(failure) };
        let bad = watch.running();
        let Some(next) = watch.step_back(&self.run, &self.params) else { return Err(failure) };
        watch.parked.add(&self.run, &next.handover)?;
        (self.run, self.params) = (Rc::new(next.run), next.params);
        self.run.time_data(self.progress.data())?;
        self.changed_back()?;
        self.refused(step, None, &next.files, &bad, &failure)?;
        self.record_way_back(step, false, &bad, &next.files, next.handover.show())
    }

    /// Another version: what it says about NaN and leaps holds, and its losses are not compared with those before.
    fn new_policies(&mut self) -> Result<(), Failure> {
        self.sentry.forget();
        self.set_policies(self.asked.clone())
    }

    /// The progress line says how fast the running version is.
    pub fn new_pace(&mut self) {
        let peak = self.run.host().engine.borrow().backend().peak_flops(&self.run.precision());
        self.progress.begin(self.run.tokens_per_sample(), peak);
    }

    fn changed_back(&mut self) -> Result<(), Failure> {
        self.evaluated = None;
        self.new_pace();
        self.new_policies()?;
        self.checkpoints.again();
        self.note_params()
    }

    /// Steps after this one are void: their numbers and checkpoints go.
    fn rewind(&mut self, step: u64) -> Result<(), Failure> {
        self.owed = None;
        self.checkpoints.forget_after(step, self.events)?;
        self.events.dir.as_mut().map_or(Ok(()), |dir| dir.rewind(step))
    }
}
