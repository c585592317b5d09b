//! The loop of a training run: steps, numbers that lag one step, evaluations, the end.
//!
//! The numbers of step k are read when step k + 1 has been issued, so that reading never makes a device wait. Whether the
//! loss is still a number is therefore known one step late, and said with the step it belongs to.

use crate::checkpoints::Checkpoints;
use crate::edits::Trial;
use crate::events::Events;
use crate::failure::Failure;
use crate::format::metrics;
use crate::monitor::Monitor;
use crate::progress::Progress;
use crate::sentry::{Finding, Limit, Policy, Sentry};
use crate::signals::{Asked, Signals};
use crate::watch::Watch;
use perilune_lua::{Failed, ParamValue, Run, StepResult};
use std::rc::Rc;
use std::time::{Duration, Instant};

pub struct Trainer<'a> {
    pub run: Rc<Run>,
    pub params: Vec<(String, ParamValue)>,
    pub events: &'a mut Events,
    pub progress: &'a mut Progress,
    pub signals: &'a Signals,
    pub checkpoints: &'a mut Checkpoints,
    /// Edits to come, and the version that has just been applied.
    pub watch: Option<Watch<'a>>,
    pub trial: Option<Trial>,
    /// A step whose evaluation and checkpoint have not been looked at yet.
    pub owed: Option<u64>,
    /// The random numbers before what is being done.
    pub rng: (u64, u32),
    /// The last loss that was read is a number.
    pub sound: bool,
    /// The failure that is on its way is a loss that is none: the States are spoilt.
    pub spoilt: bool,
    /// Ends here, whatever the recipe says.
    pub until: Option<u64>,
    pub(crate) pending: Option<Pending>,
    pub(crate) sentry: Sentry,
    /// The device's sensors, where it has some.
    pub monitor: Option<Monitor>,
    /// What the command line says about NaN and leaps, and what holds.
    pub(crate) asked: (Option<String>, Option<String>),
    pub(crate) on_nan: Policy,
    pub(crate) on_spike: Policy,
    /// Steps in a row that were not finite, or skipped; whether the origin of one has been looked for.
    pub(crate) bad: u32,
    pub(crate) traced: bool,
    pub(crate) last_loss: Option<f64>,
    /// How long the last of each took.
    last_step: Option<Duration>,
    last_evaluation: Option<Duration>,
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

/// A newer save or a signal may end a step or an evaluation that takes so many times as long as the last of its kind.
const LONG: u32 = 10;
/// That long it may take at least; and what the first one of all is thought to take.
const LEAST: Duration = Duration::from_millis(500);
const FIRST: Duration = Duration::from_secs(6);

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
        let rng = run.rng();
        Trainer {
            run,
            params,
            events,
            progress,
            signals,
            checkpoints,
            watch,
            trial: None,
            owed: None,
            rng,
            sound: true,
            spoilt: false,
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
            last_step: None,
            last_evaluation: None,
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
        loop {
            match self.turn() {
                Ok(Some(end)) => return Ok(end),
                Ok(None) => {}
                Err(failure) => self.bad_edit(failure)?,
            }
        }
    }

    /// What is due after the last step, then the next one.
    fn turn(&mut self) -> Result<Option<End>, Failure> {
        self.rng = self.run.rng();
        if let Some(step) = self.owed {
            // In a replay: the version that this step's evaluation sent the run back to.
            while self.watch.as_ref().is_some_and(|w| w.owed(step)) && self.look()? {}
            self.after(step)?;
            self.owed = None;
        }
        // A replay may have several versions to go through at one step, one with more steps among them.
        while self.watch.as_ref().is_some_and(|w| w.scripted()) && self.look()? {}
        if self.run.finished()? || self.until.is_some_and(|n| self.run.count() >= n) {
            self.checkpoint()?;
            return Ok(Some(End::Finished));
        }
        if let Some(asked) = self.signals.asked() {
            self.checkpoint()?;
            return Ok(Some(End::Asked(asked)));
        }
        self.look()?;
        self.rng = self.run.rng();
        let limit = self.sentry.limit_for(self.run.count() + 1);
        if self.on_spike == Policy::Skip {
            self.run.set_loss_limit(limit.map_or(f64::INFINITY, |l| l.at))?;
        }
        let start = Instant::now();
        let products = self.products();
        let result = {
            let _span = tracing::debug_span!("step", step = self.run.count() + 1).entered();
            // Lua code that can be ended is slower: only the first steps of an edit are.
            self.patiently(self.trial.is_some(), self.last_step, Run::step)
        };
        let result = result?;
        self.last_step = Some(start.elapsed());
        let step = self.run.count();
        self.owed = Some(step);
        self.judge(step)?;
        if let Some(before) = self.pending.replace(Pending { step, result, rng: self.rng, limit }) {
            self.report(before)?;
        }
        // With the wait for the step before: a device works while the host records.
        let work = self.products() - products;
        self.progress.took(start.elapsed().as_secs_f64(), work);
        if let Some(readings) = self.monitor.as_ref().and_then(Monitor::take) {
            self.events.system(step, &readings)?;
            self.progress.set_readings(&readings);
        }
        Ok(None)
    }

    /// FLOP of all products so far.
    fn products(&self) -> f64 {
        self.run.host().engine.borrow().executor.products
    }

    /// The evaluation and the checkpoint that are due after a step.
    fn after(&mut self, step: u64) -> Result<(), Failure> {
        let every = self.run.eval_every().filter(|_| self.can_evaluate("valid"));
        let mut best = false;
        if every.is_some_and(|n| step.is_multiple_of(n)) {
            self.settle()?;
            let values = self.evaluate("valid")?;
            self.events.screen.line(&format!("step {step:>5} · valid {}", metrics(&values)));
            best = self.checkpoints.is_best(step);
        }
        if self.checkpoints.due(step) || best { self.checkpoint() } else { self.checkpoints.poll(self.events) }
    }

    /// A checkpoint of the present step, once its loss has turned out to be a number.
    fn checkpoint(&mut self) -> Result<(), Failure> {
        self.settle()?;
        self.unpark();
        self.checkpoints.save(&self.run, self.events)
    }

    /// Reads what was still pending.
    pub fn settle(&mut self) -> Result<(), Failure> {
        self.pending.take().map_or(Ok(()), |p| self.report(p))
    }

    fn report(&mut self, pending: Pending) -> Result<(), Failure> {
        let step = pending.step;
        let numbers = self.run.read(&pending.result)?;
        self.events.step(step, &numbers)?;
        self.progress.update(step, numbers.loss, numbers.samples);
        let scaled = self.run.precision() == "fp16";
        let norm = numbers.metrics.iter().find(|m| m.0 == "grad_norm" && !scaled).map(|m| m.1);
        self.sound = numbers.loss.is_finite();
        match self.sentry.see(step, numbers.loss, norm, pending.limit) {
            Some(Finding::NotFinite { metric, value }) => {
                // Of a version on trial it is a bad edit, which `bad_edit` takes back.
                self.spoilt = true;
                self.not_finite(&pending, metric, value)?;
                self.spoilt = false;
            }
            Some(Finding::Spike { median, limit, z }) if self.on_spike != Policy::Off => {
                self.leap(step, numbers.loss, median, limit, z)?;
            }
            _ => self.bad = 0,
        }
        if numbers.loss.is_finite() {
            self.last_loss = Some(numbers.loss);
        }
        self.passed(step)
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
        self.rng = self.run.rng();
        let begun = Instant::now();
        let listens = self.trial.is_some() || self.watch.as_ref().is_some_and(Watch::listens);
        let before = self.report_misses(false);
        let values = self.patiently(listens, self.last_evaluation, |run| run.evaluate(split));
        self.report_misses(before);
        let values = values?;
        self.last_evaluation = Some(begun.elapsed());
        self.events.eval(step, split, &values)?;
        self.checkpoints.evaluated(step, split, &values, self.events)?;
        if split == "valid" {
            self.evaluated = Some((step, values.clone()));
        }
        Ok(values)
    }

    /// Runs what is no training step.
    pub fn aside<T>(&self, f: impl FnOnce(&Run) -> Result<T, Failed>) -> Result<T, Failure> {
        let before = self.report_misses(false);
        let result = f(&self.run);
        self.report_misses(before);
        Ok(result?)
    }

    /// Whether new plans are worth a word: those of what is no training step are new by right. Returns what held before.
    pub fn report_misses(&self, on: bool) -> bool {
        std::mem::replace(&mut self.run.host().engine.borrow_mut().switches.report_misses, on)
    }

    /// Does something that a newer save or a signal may end, if `listens`, once it takes much longer than the `last` time.
    fn patiently<T>(
        &mut self,
        listens: bool,
        last: Option<Duration>,
        f: impl FnOnce(&Run) -> Result<T, Failed>,
    ) -> Result<T, Failure> {
        let stop = self.signals.asked().is_some();
        let time = last.map_or(FIRST, |t| t.max(LEAST)) * LONG;
        Ok(match &mut self.watch {
            Some(watch) if listens && !watch.scripted() => watch.patiently(time, stop, || f(&self.run))?,
            _ => f(&self.run)?,
        })
    }
}
