//! Runs the training loop: issues steps, reads their numbers one step later, evaluates, and writes checkpoints.
//!
//! The numbers of step k are read after step k + 1 has been issued, so that reading never stalls the device. A non-finite
//! loss is therefore detected one step late, and reported with the step that it belongs to.

use crate::anomaly::{Detector, Finding, Limit, Policy};
use crate::audit::Audit;
use crate::cancel::Control;
use crate::checkpoints::Checkpoints;
use crate::data_record::{DATA, DataRecord};
use crate::digests::DigestLog;
use crate::error::Result;
use crate::events::{Event, Reporter};
use crate::hot_reload::{Candidate, Reloader, Trial};
use crate::job::{Decision, Job};
use crate::monitor::Monitor;
use crate::performance::Performance;
use perilune_lua::{Failed, ParamValue, Run, StepResult};
use serde_json::{Map, Value};
use std::cell::Cell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// The state of the loop.
pub(crate) struct TrainingLoop<'a> {
    pub run: Rc<Run>,
    pub params: Vec<(String, ParamValue)>,
    pub reporter: &'a mut Reporter,
    pub control: &'a Control,
    pub job: &'a Job,
    pub checkpoints: &'a mut Checkpoints,
    pub data: &'a mut DataRecord,
    /// Finds edits, and holds the version on trial.
    pub reloader: Option<Reloader<'a>>,
    pub trial: Option<Trial>,
    /// A step whose evaluation and checkpoint have not been handled yet.
    pub owed: Option<u64>,
    /// The random number state before the step or evaluation that runs.
    pub rng: (u64, u32),
    /// Whether the last loss that was read is finite.
    pub sound: bool,
    /// Whether the pending failure is a non-finite loss; States may be corrupt.
    pub corrupt: bool,
    /// The step at which the run ends, overriding the recipe.
    pub until: Option<u64>,
    /// The step after which the run stops to be continued later.
    pub pause: Option<u64>,
    /// Compares the run with a record.
    pub audit: Option<Audit>,
    /// Writes digests of its States and tensors.
    pub digests: Option<DigestLog>,
    pub(crate) pending: Option<Pending>,
    pub(crate) detector: Detector,
    /// Measures the run.
    pub performance: Performance,
    /// Whether the recipe's observers are called, and what it logs is kept.
    pub is_observed: bool,
    /// Samples the device's sensors, if it has any.
    pub monitor: Option<Monitor>,
    /// The anomaly policies of the caller, for non-finite values and for spikes, and those in force.
    pub(crate) policies: (Option<String>, Option<String>),
    pub(crate) on_nan: Policy,
    pub(crate) on_spike: Policy,
    /// The number of non-finite or skipped steps in a row, and whether the origin of one has been searched.
    pub(crate) bad: u32,
    pub(crate) traced: bool,
    pub(crate) last_loss: Option<f64>,
    /// Seconds spent on making batches, and how many of them have been reported.
    pub data_time: Rc<Cell<f64>>,
    pub data_seen: f64,
    /// When the learning rate was last read for display.
    rate_read: Option<Instant>,
    /// The durations of the last step and the last evaluation.
    last_step: Option<Duration>,
    last_evaluation: Option<Duration>,
    /// The last evaluation of each split: step and metrics.
    pub evaluated: HashMap<String, (u64, Vec<(String, f64)>)>,
}

/// A step whose numbers have not been read.
pub(crate) struct Pending {
    pub step: u64,
    result: StepResult,
    /// The random number state before it, and the limit of its loss.
    pub rng: (u64, u32),
    limit: Option<Limit>,
}

/// A step or an evaluation may be cancelled once it takes this many times as long as the last of its kind.
const LONG: u32 = 10;
/// The time between two readings of the learning rate.
const RATE_EVERY: Duration = Duration::from_millis(70);
/// The shortest duration that this is applied to, and the estimate for the first of its kind.
const LEAST: Duration = Duration::from_millis(500);
const FIRST: Duration = Duration::from_secs(6);

/// The reason why a run ended without an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    Finished,
    /// A stop request, with its code.
    Stopped {
        code: usize,
    },
    /// The run has reached [`crate::RunSpec::until`].
    Paused,
    /// The user left at a breakpoint.
    LeftBreakpoint,
}

impl<'a> TrainingLoop<'a> {
    pub fn new(
        run: Rc<Run>,
        params: Vec<(String, ParamValue)>,
        reporter: &'a mut Reporter,
        (control, job): (&'a Control, &'a Job),
        (checkpoints, data): (&'a mut Checkpoints, &'a mut DataRecord),
        reloader: Option<Reloader<'a>>,
    ) -> Self {
        let rng = run.rng();
        TrainingLoop {
            run,
            params,
            reporter,
            control,
            job,
            checkpoints,
            data,
            reloader,
            trial: None,
            owed: None,
            rng,
            sound: true,
            corrupt: false,
            until: None,
            pause: None,
            audit: None,
            digests: None,
            pending: None,
            detector: Detector::new(),
            performance: Performance::new(None, 1),
            is_observed: false,
            monitor: None,
            policies: (None, None),
            on_nan: Policy::Stop,
            on_spike: Policy::Warn,
            bad: 0,
            traced: false,
            last_loss: None,
            data_time: Rc::default(),
            data_seen: 0.0,
            rate_read: None,
            last_step: None,
            last_evaluation: None,
            evaluated: HashMap::new(),
        }
    }

    /// Returns what the run has taken, for `run.json`.
    pub fn measured(&self) -> Value {
        let engine = self.run.host().engine.borrow();
        let backend = engine.backend();
        let peak = backend.peak_flops(&self.run.precision());
        self.performance.json(self.run.tokens_per_sample(), peak, backend.memory().peak)
    }

    /// Sets the anomaly policies; those of the caller override those of the recipe.
    pub fn set_policies(&mut self, policies: (Option<String>, Option<String>)) -> Result<()> {
        self.run.set_policies(policies.0.as_deref(), policies.1.as_deref())?;
        let (on_nan, on_spike) = self.run.policies();
        (self.on_nan, self.on_spike) = (Policy::of(&on_nan), Policy::of(&on_spike));
        self.policies = policies;
        Ok(())
    }

    /// Fills the window of losses from the log of a resumed run.
    pub fn remember(&mut self, history: &[Option<(u64, f64, Option<f64>)>]) {
        for entry in history {
            match entry {
                Some((step, loss, norm)) => {
                    let limit = self.detector.limit_for(*step);
                    self.detector.see(*step, *loss, *norm, limit);
                }
                None => self.detector.forget(),
            }
        }
    }

    /// Runs until the last step or a stop request.
    pub fn train(&mut self) -> Result<End> {
        let result = self.steps();
        self.reporter.tell(&Event::LoopEnded);
        result
    }

    fn steps(&mut self) -> Result<End> {
        loop {
            self.record_data()?;
            match self.turn() {
                Ok(Some(end)) => return Ok(end),
                Ok(None) => {}
                Err(failure) => self.recover(failure)?,
            }
        }
    }

    /// Adds data files that have been opened or hashed to the record of the run.
    fn record_data(&mut self) -> Result<()> {
        if !self.job.is_first() {
            return Ok(());
        }
        let step = self.run.count();
        let (warnings, update) = self.data.poll(step)?;
        for text in warnings {
            self.reporter.warning_at(step, &text, &Map::new())?;
        }
        match &mut self.reporter.dir {
            Some(dir) if update => dir.update_soon([(DATA, self.data.json())]),
            _ => Ok(()),
        }
    }

    /// Runs the evaluation and the checkpoint that are due after the last step, then issues the next step.
    fn turn(&mut self) -> Result<Option<End>> {
        self.rng = self.run.rng();
        if let Some(step) = self.owed {
            // In a replay: the version that the run returned to because of this step's evaluation.
            while self.reloader.as_ref().is_some_and(|r| r.owed(step)) && self.look()? {}
            self.after(step)?;
            self.owed = None;
            if let Some(audit) = &mut self.audit {
                audit.close_step(step, false);
            }
        }
        let stops = |audit: &Audit| self.digests.is_none() && audit.has_difference();
        if self.audit.as_ref().is_some_and(|audit| stops(audit) || audit.ends_before(self.run.count())) {
            self.settle()?;
            self.digest()?;
            return Ok(Some(End::Paused));
        }
        // A replay may apply several versions at one step, and one of them may have more steps.
        while self.reloader.as_ref().is_some_and(|r| r.replays()) && self.look()? {}
        self.digest()?;
        if self.run.finished()? || self.until.is_some_and(|n| self.run.count() >= n) {
            self.checkpoint()?;
            return Ok(Some(End::Finished));
        }
        if self.pause.is_some_and(|n| self.run.count() >= n) {
            self.checkpoint()?;
            return Ok(Some(End::Paused));
        }
        let candidate = self.candidate();
        let decision = self.job.decide(self.run.count(), self.control, candidate.is_some(), self.last_step)?;
        if let Decision { stop: Some(code), .. } = decision {
            self.checkpoint()?;
            return Ok(Some(End::Stopped { code }));
        }
        if decision.edit
            && let Some(candidate) = Candidate::shared(self.job, candidate)?
        {
            self.consider(candidate)?;
        }
        self.rng = self.run.rng();
        let limit = self.detector.limit_for(self.run.count() + 1);
        if self.on_spike == Policy::Skip {
            self.run.set_loss_limit(limit.map_or(f64::INFINITY, |l| l.at))?;
        }
        let start = Instant::now();
        let products = self.products();
        let result = {
            let _span = tracing::debug_span!("step", step = self.run.count() + 1).entered();
            self.cancellable(self.may_be_endless(), self.last_step, Run::step)
        };
        let result = result?;
        self.last_step = Some(start.elapsed());
        let step = self.run.count();
        self.owed = Some(step);
        self.record_applied(step)?;
        if let Some(before) = self.pending.replace(Pending { step, result, rng: self.rng, limit }) {
            self.report(before)?;
        }
        // Includes the wait for the previous step: the device computes while the host records.
        let (seconds, flops) = (start.elapsed().as_secs_f64(), self.products() - products);
        let data_seconds = self.data_time.get() - self.data_seen;
        self.data_seen += data_seconds;
        let rate = self.rate();
        self.performance.step(seconds, data_seconds, flops);
        self.reporter.tell(&Event::Issued { step, seconds, data_seconds, flops, rate });
        if let Some(readings) = self.monitor.as_ref().and_then(Monitor::take) {
            self.performance.readings(&readings);
            self.reporter.system(step, &readings)?;
        }
        Ok(None)
    }

    /// Returns the learning rate of the next step for display, unless it was asked for a moment ago: a schedule may be a Lua function.
    fn rate(&mut self) -> Option<f64> {
        if self.rate_read.is_some_and(|at| at.elapsed() < RATE_EVERY) {
            return None;
        }
        self.rate_read = Some(Instant::now());
        self.run.rates()?.first().copied()
    }

    /// Returns the FLOP of all matrix products so far.
    fn products(&self) -> f64 {
        self.run.host().engine.borrow().executor.products
    }

    /// Runs the evaluation and the checkpoint that are due after a step.
    fn after(&mut self, step: u64) -> Result<()> {
        let mut best = false;
        if self.run.eval_every().is_some_and(|n| step.is_multiple_of(n)) {
            // The test split waits for the end.
            for split in self.run.evaluated_splits().iter().filter(|name| *name != "test") {
                self.settle()?;
                let values = self.evaluate(split)?;
                self.reporter.tell(&Event::PeriodicEvaluation { step, split, metrics: &values });
                best |= self.checkpoints.is_best(step);
            }
        }
        if let Some(audit) = &self.audit {
            return if audit.took_checkpoint(step) { self.compare_checkpoint(step) } else { Ok(()) };
        }
        if self.checkpoints.due(step) || best { self.checkpoint() } else { self.checkpoints.poll(self.reporter) }
    }

    /// Compares the States with the checkpoint that the recorded run took after this step.
    fn compare_checkpoint(&mut self, step: u64) -> Result<()> {
        self.settle()?;
        self.drop_parked();
        self.audit.as_mut().map_or(Ok(()), |audit| audit.checkpoint(step, &self.run))
    }

    /// Makes the evaluations that the record has after the last step of a window, compares the samples, and returns the comparison.
    pub fn finish_audit(&mut self) -> Result<Option<Audit>> {
        let step = self.run.count();
        let missing = match &self.audit {
            Some(audit) if !audit.has_difference() => audit.missing_evaluations(step),
            _ => Vec::new(),
        };
        let splits = self.run.splits();
        for split in missing.iter().filter(|split| splits.contains(split)) {
            self.evaluated.remove(split.as_str());
            self.evaluate(split)?;
        }
        let Some(mut audit) = self.audit.take() else { return Ok(None) };
        if audit.is_to_end() && !audit.has_difference() {
            audit.last_version(step, &self.run, &self.params);
        }
        audit.close_step(step, true);
        audit.samples(&self.run)?;
        Ok(Some(audit))
    }

    /// Writes the digests that are due before the next step.
    fn digest(&mut self) -> Result<()> {
        let Some(mut digests) = self.digests.take() else { return Ok(()) };
        let before = self.report_misses(false);
        let written = digests.before_step(&self.run);
        self.report_misses(before);
        self.digests = Some(digests);
        written
    }

    /// Writes a checkpoint of the present step, if its loss is finite.
    fn checkpoint(&mut self) -> Result<()> {
        self.settle()?;
        if self.audit.is_some() {
            return Ok(());
        }
        self.drop_parked();
        self.checkpoints.save(&self.run, self.reporter)
    }

    /// Reads the numbers of the pending step.
    pub fn settle(&mut self) -> Result<()> {
        self.pending.take().map_or(Ok(()), |p| self.report(p))
    }

    /// Reads and reports the numbers of a step, and handles anomalies.
    fn report(&mut self, pending: Pending) -> Result<()> {
        let step = pending.step;
        if let (Some(dir), Some(log), None) = (&mut self.reporter.dir, self.run.sample_log(), &self.audit) {
            dir.write_samples(&mut log.borrow_mut(), false)?;
        }
        let numbers = self.run.read(&pending.result)?;
        self.performance.samples(numbers.samples);
        self.reporter.step(step, &numbers)?;
        if let Some(audit) = &mut self.audit {
            audit.step(step, &numbers, self.run.loss_place());
        }
        if let Some(digests) = &mut self.digests {
            digests.numbers(step, &numbers)?;
        }
        self.observe_step(step, &numbers)?;
        let scaled = self.run.precision() == "fp16";
        let norm = numbers.metrics.iter().find(|m| m.0 == "grad_norm" && !scaled).map(|m| m.1);
        self.sound = numbers.loss.is_finite();
        match self.detector.see(step, numbers.loss, norm, pending.limit) {
            Some(Finding::NotFinite { metric, value }) => {
                // In a version on trial the edit is at fault, and `recover` reverts it.
                self.corrupt = true;
                self.not_finite(&pending, metric, value)?;
                self.corrupt = false;
            }
            Some(Finding::Spike { median, limit, z }) if self.on_spike != Policy::Off => {
                self.spike(step, numbers.loss, median, limit, z)?;
            }
            _ => self.bad = 0,
        }
        if numbers.loss.is_finite() {
            self.last_loss = Some(numbers.loss);
        }
        self.passed(step)
    }

    /// Evaluates a split at the current step; the last result for each is cached.
    pub fn evaluate(&mut self, split: &str) -> Result<Vec<(String, f64)>> {
        let step = self.run.count();
        if let Some((_, values)) = self.evaluated.get(split).filter(|(at, _)| *at == step) {
            return Ok(values.clone());
        }
        self.rng = self.run.rng();
        let begun = Instant::now();
        let cancellable = self.may_be_endless();
        let before = self.report_misses(false);
        let values = self.cancellable(cancellable, self.last_evaluation, |run| run.evaluate(split));
        self.report_misses(before);
        let values = values?;
        self.last_evaluation = Some(begun.elapsed());
        self.reporter.evaluation(step, split, &values)?;
        if let Some(audit) = &mut self.audit {
            audit.evaluation(step, split, &values, self.run.loss_place());
        }
        self.checkpoints.evaluated(step, split, &values, self.reporter)?;
        self.evaluated.insert(split.to_string(), (step, values.clone()));
        self.observe_evaluation(step, split, &values)?;
        Ok(values)
    }

    /// Runs something other than a training step: its plans are not reported as misses.
    pub fn aside<T>(&self, f: impl FnOnce(&Run) -> std::result::Result<T, Failed>) -> Result<T> {
        let before = self.report_misses(false);
        let result = f(&self.run);
        self.report_misses(before);
        Ok(result?)
    }

    /// Sets whether new plans are reported as cache misses, and returns the setting before.
    pub fn report_misses(&self, on: bool) -> bool {
        std::mem::replace(&mut self.run.host().engine.borrow_mut().switches.report_misses, on)
    }

    /// Whether a step or an evaluation is to be cancellable: on trial, and wherever saved files are watched. Lua code that
    /// is not cancellable is faster.
    fn may_be_endless(&self) -> bool {
        // A process that cancelled its step alone would leave the others.
        !self.job.has_several() && (self.trial.is_some() || self.reloader.as_ref().is_some_and(Reloader::watches_files))
    }

    /// Runs a step or an evaluation; with `cancellable`, a newer save or a stop request ends it once it takes much longer
    /// than `last`.
    fn cancellable<T>(
        &mut self,
        cancellable: bool,
        last: Option<Duration>,
        f: impl FnOnce(&Run) -> std::result::Result<T, Failed>,
    ) -> Result<T> {
        let stop = self.control.stop_requested().is_some();
        let time = last.map_or(FIRST, |t| t.max(LEAST)) * LONG;
        Ok(match &mut self.reloader {
            Some(r) if cancellable && !r.replays() => r.cancellable(time, stop, || f(&self.run))?,
            _ => f(&self.run)?,
        })
    }
}
