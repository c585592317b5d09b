//! The loop of a training run: steps, numbers that lag one step, evaluations, the end.
//!
//! The numbers of step k are read when step k + 1 has been issued, so that reading never makes a device wait. Whether the
//! loss is still a number is therefore known one step late, and said with the step it belongs to.

use crate::checkpoints::Checkpoints;
use crate::events::Events;
use crate::failure::Failure;
use crate::format::metrics;
use crate::monitor::Monitor;
use crate::progress::Progress;
use crate::sentry::{Finding, Limit, Policy, Sentry};
use crate::signals::{Asked, Signals};
use crate::watch::{self, TRIAL, Trial, Watch};
use perilune_lua::{Failed, ParamValue, Run, StepResult};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Instant;

pub struct Trainer<'a> {
    pub run: Rc<Run>,
    pub params: Vec<(String, ParamValue)>,
    pub events: &'a mut Events,
    pub progress: &'a mut Progress,
    pub signals: &'a Signals,
    pub checkpoints: &'a mut Checkpoints,
    /// With `--watch`; and the version that has just been applied.
    pub watch: Option<Watch<'a>>,
    trial: Option<Trial>,
    /// Ends here, whatever the recipe says.
    pub until: Option<u64>,
    pending: Option<Pending>,
    sentry: Sentry,
    /// The device's sensors, where it has some.
    pub monitor: Option<Monitor>,
    /// What the command line says about NaN and leaps, and what holds.
    asked: (Option<String>, Option<String>),
    pub(crate) on_nan: Policy,
    pub(crate) on_spike: Policy,
    /// Steps in a row that were not finite, or skipped; whether the origin of one has been looked for.
    pub(crate) bad: u32,
    pub(crate) traced: bool,
    pub(crate) last_loss: Option<f64>,
    /// The step that the valid split was evaluated at last, and the result.
    pub evaluated: Option<(u64, Vec<(String, f64)>)>,
}

/// A step whose numbers have not been read.
pub(crate) struct Pending {
    pub step: u64,
    result: StepResult,
    /// The random numbers before it, and the limit of its loss.
    pub rng: (u64, u32),
    limit: Option<Limit>,
}

/// Why the loop ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    Finished,
    Asked(Asked),
}

impl<'a> Trainer<'a> {
    pub fn new(
        run: Rc<Run>,
        params: Vec<(String, ParamValue)>,
        events: &'a mut Events,
        progress: &'a mut Progress,
        signals: &'a Signals,
        checkpoints: &'a mut Checkpoints,
        watch: Option<Watch<'a>>,
    ) -> Self {
        Trainer {
            run,
            params,
            events,
            progress,
            signals,
            checkpoints,
            watch,
            trial: None,
            until: None,
            pending: None,
            sentry: Sentry::new(),
            monitor: None,
            asked: (None, None),
            on_nan: Policy::Stop,
            on_spike: Policy::Warn,
            bad: 0,
            traced: false,
            last_loss: None,
            evaluated: None,
        }
    }

    /// What to do about NaN and leaps: the command line before the recipe.
    pub fn set_policies(&mut self, asked: (Option<String>, Option<String>)) -> Result<(), Failure> {
        self.run.set_policies(asked.0.as_deref(), asked.1.as_deref())?;
        let (on_nan, on_spike) = self.run.policies();
        (self.on_nan, self.on_spike) = (Policy::of(&on_nan), Policy::of(&on_spike));
        self.asked = asked;
        Ok(())
    }

    /// What a run that goes on had seen.
    pub fn remember(&mut self, history: &[Option<(u64, f64, Option<f64>)>]) {
        for entry in history {
            match entry {
                Some((step, loss, norm)) => {
                    let limit = self.sentry.limit_for(*step);
                    self.sentry.see(*step, *loss, *norm, limit);
                }
                None => self.sentry.forget(),
            }
        }
    }

    /// Steps until the run is finished or a signal asks for the end.
    pub fn train(&mut self) -> Result<End, Failure> {
        let result = self.steps();
        self.progress.finish();
        result
    }

    fn steps(&mut self) -> Result<End, Failure> {
        while !self.run.finished()? && self.until.is_none_or(|n| self.run.count() < n) {
            let every = self.run.eval_every().filter(|_| self.can_evaluate("valid"));
            self.look()?;
            if let Some(asked) = self.signals.asked() {
                self.checkpoint()?;
                return Ok(End::Asked(asked));
            }
            let (rng, limit) = (self.run.rng(), self.sentry.limit_for(self.run.count() + 1));
            if self.on_spike == Policy::Skip {
                self.run.set_loss_limit(limit.map_or(f64::INFINITY, |l| l.at))?;
            }
            let start = Instant::now();
            let products = self.products();
            let result = {
                let _span = tracing::debug_span!("step", step = self.run.count() + 1).entered();
                self.run.step()
            };
            self.notices();
            let result = match result {
                Ok(result) => result,
                Err(e) if self.trial.is_some() => {
                    self.take_back(e.into())?;
                    continue;
                }
                Err(e) => {
                    // The step before is complete; a loss that is no number may well be why this one failed.
                    self.settle()?;
                    return Err(e.into());
                }
            };
            let step = self.run.count();
            self.judge(step)?;
            if let Some(before) = self.pending.replace(Pending { step, result, rng, limit }) {
                self.report(before)?;
            }
            // With the wait for the step before: a device works while the host records.
            let work = self.products() - products;
            self.progress.took(start.elapsed().as_secs_f64(), work);
            if let Some(readings) = self.monitor.as_ref().and_then(Monitor::take) {
                self.events.system(step, &readings)?;
                self.progress.set_readings(&readings);
            }
            if every.is_some_and(|n| step.is_multiple_of(n)) {
                self.settle()?;
                let values = self.evaluate("valid")?;
                self.events.screen.line(&format!("step {step:>5} · valid {}", metrics(&values)));
            }
            if self.checkpoints.due(step) {
                self.checkpoint()?;
            } else {
                self.checkpoints.poll(self.events)?;
            }
        }
        self.checkpoint()?;
        Ok(End::Finished)
    }

    /// FLOP of all products so far.
    fn products(&self) -> f64 {
        self.run.host().engine.borrow().products
    }

    /// Applies a new version of the recipe, if there is one.
    fn look(&mut self) -> Result<(), Failure> {
        let at_once = self.signals.reload_asked();
        let Some(watch) = &mut self.watch else { return Ok(()) };
        let Some(files) = watch.changed(at_once, self.run.count()) else { return Ok(()) };
        // What is pending was recorded by the old version.
        if let Some(pending) = self.pending.take() {
            self.report(pending)?;
        }
        let step = self.run.count();
        let Some(watch) = &mut self.watch else { return Ok(()) };
        // A version on trial has done a step by now, and is the one to go back to from here on.
        if let Some(trial) = self.trial.take() {
            watch.accept(trial.files)?;
        }
        // What a version needs to be built, and its first step, are plans that are new by right.
        let host = self.run.host().clone();
        let report = |on: bool| std::mem::replace(&mut host.engine.borrow_mut().switches.report_misses, on);
        let reported = report(false);
        let loaded = watch.load(files.clone(), &self.run, &self.params);
        if loaded.is_err() {
            report(reported);
        }
        match loaded {
            Ok(next) => {
                // Plans of the step, not those that copied the State.
                let misses = self.run.host().engine.borrow().stats().misses;
                let (old, old_files) = (std::mem::replace(&mut self.run, Rc::new(next.run)), watch.running());
                let old_params = std::mem::replace(&mut self.params, next.params);
                let (files, changed, begun) = (next.files, next.changed, next.begun);
                let rng = self.run.rng();
                let trial =
                    Trial { rng, old, old_params, old_files, files, changed, since: step, begun, misses, reported };
                self.trial = Some(trial);
                self.evaluated = None;
                self.sentry.forget();
                self.set_policies(self.asked.clone())?;
                self.note_params()
            }
            Err(failure) => self.refused(step, &files, &failure),
        }
    }

    /// What goes on from here must find the params of now, not those of the start.
    fn note_params(&mut self) -> Result<(), Failure> {
        let params = crate::events::params(&self.params);
        self.progress.set_total(self.run.steps());
        self.checkpoints.set_params(params.clone());
        self.events.dir.as_mut().map_or(Ok(()), |d| d.update([("params", params), ("steps", self.run.steps().into())]))
    }

    fn refused(&mut self, step: u64, files: &[(PathBuf, String)], failure: &Failure) -> Result<(), Failure> {
        self.sentry.forget();
        self.events.reload(step, &[], Some(&failure.message()))?;
        self.events.screen.warn(&format!(
            "step {step} · {} · the version before goes on",
            failure.message().lines().next().unwrap_or_default()
        ));
        match &self.events.dir {
            Some(dir) => watch::record(&dir.path, step, &[], &files.to_vec(), Some(&failure.message())),
            None => Ok(()),
        }
    }

    /// After a step of a version on trial: the first says that it is applied, the last that it stays.
    fn judge(&mut self, step: u64) -> Result<(), Failure> {
        let Some(trial) = &self.trial else { return Ok(()) };
        if step == trial.since + 1 {
            self.run.host().engine.borrow_mut().switches.report_misses = trial.reported;
            let plans = self.run.host().engine.borrow().stats().misses - trial.misses;
            let ms = trial.begun.elapsed().as_secs_f64() * 1e3;
            let what = if trial.changed.is_empty() { "no change of the text".into() } else { trial.changed.join(", ") };
            self.events.screen.line(&format!(
                "step {} · {what} · applied at step {step} · {plans} plans compiled · {ms:.0} ms",
                trial.since
            ));
            self.events.reload(trial.since, &trial.changed, None)?;
            if let Some(dir) = &self.events.dir {
                watch::record(&dir.path, trial.since, &trial.changed, &trial.files, None)?;
            }
        }
        if step >= trial.since + TRIAL
            && let Some(trial) = self.trial.take()
            && let Some(watch) = &mut self.watch
        {
            watch.accept(trial.files)?;
        }
        Ok(())
    }

    /// The version on trial threw: the one before goes on, from the State that the last good step left where it fits.
    fn take_back(&mut self, failure: Failure) -> Result<(), Failure> {
        let Some(trial) = self.trial.take() else { return Ok(()) };
        if let Some(pending) = self.pending.take() {
            self.report(pending)?;
        }
        self.run.host().engine.borrow_mut().switches.report_misses = trial.reported;
        let step = self.run.count();
        let applied = step > trial.since;
        let new = std::mem::replace(&mut self.run, trial.old);
        self.params = trial.old_params;
        if applied {
            let rng = new.rng();
            self.run.take_over(&new)?;
            self.run.set_rng(rng);
        } else {
            // Nothing was done; the random numbers of the step that failed are drawn again.
            self.run.set_rng(trial.rng);
        }
        self.set_policies(self.asked.clone())?;
        self.note_params()?;
        self.refused(step, &trial.files, &failure)?;
        if applied && let Some(dir) = &self.events.dir {
            watch::record(&dir.path, step, &["the version before".to_string()], &trial.old_files, None)?;
        }
        Ok(())
    }

    /// A checkpoint of the present step, once its loss has turned out to be a number.
    fn checkpoint(&mut self) -> Result<(), Failure> {
        self.settle()?;
        self.checkpoints.save(&self.run, self.events)
    }

    /// Reads what was still pending.
    fn settle(&mut self) -> Result<(), Failure> {
        self.pending.take().map_or(Ok(()), |p| self.report(p))
    }

    fn report(&mut self, pending: Pending) -> Result<(), Failure> {
        let step = pending.step;
        let numbers = self.run.read(&pending.result)?;
        self.events.step(step, &numbers)?;
        self.progress.update(step, numbers.loss, numbers.samples);
        let scaled = self.run.precision() == "fp16";
        let norm = numbers.metrics.iter().find(|m| m.0 == "grad_norm" && !scaled).map(|m| m.1);
        match self.sentry.see(step, numbers.loss, norm, pending.limit) {
            Some(Finding::NotFinite { metric, value }) => self.not_finite(&pending, metric, value)?,
            Some(Finding::Spike { median, limit, z }) if self.on_spike != Policy::Off => {
                self.leap(step, numbers.loss, median, limit, z)?;
            }
            _ => self.bad = 0,
        }
        if numbers.loss.is_finite() {
            self.last_loss = Some(numbers.loss);
        }
        Ok(())
    }

    pub fn can_evaluate(&self, split: &str) -> bool {
        self.run.has_split(split) && self.run.can_evaluate()
    }

    /// Metrics of a split at the current step; not computed twice.
    pub fn evaluate(&mut self, split: &str) -> Result<Vec<(String, f64)>, Failure> {
        let step = self.run.count();
        if let Some((at, values)) = &self.evaluated
            && split == "valid"
            && *at == step
        {
            return Ok(values.clone());
        }
        let values = self.aside(|run| run.evaluate(split))?;
        self.events.eval(step, split, &values)?;
        if split == "valid" {
            self.evaluated = Some((step, values.clone()));
        }
        Ok(values)
    }

    /// Runs what is no training step: its plans are new by right, and nobody needs to hear of it.
    pub fn aside<T>(&self, f: impl FnOnce(&Run) -> Result<T, Failed>) -> Result<T, Failure> {
        let switches =
            |on: bool| std::mem::replace(&mut self.run.host().engine.borrow_mut().switches.report_misses, on);
        let before = switches(false);
        let result = f(&self.run);
        switches(before);
        self.notices();
        Ok(result?)
    }

    /// What the engine has to say: plans that were asked for, and why a warmed-up loop needed a new one.
    pub fn notices(&self) {
        let (plans, notices) = {
            let mut engine = self.run.host().engine.borrow_mut();
            (std::mem::take(&mut engine.plans_shown), std::mem::take(&mut engine.notices))
        };
        for plan in plans {
            self.events.screen.note(plan.trim_end());
        }
        for notice in notices {
            self.events.warning(&notice);
        }
    }
}
