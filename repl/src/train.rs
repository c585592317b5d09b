//! The loop of a training run: steps, numbers that lag one step, evaluations, the end.
//!
//! The numbers of step k are read when step k + 1 has been issued, so that reading never makes a device wait. Whether the
//! loss is still a number is therefore known one step late, and said with the step it belongs to.

use crate::checkpoints::Checkpoints;
use crate::edits::Trial;
use crate::events::Events;
use crate::failure::Failure;
use crate::format::{metrics, short};
use crate::progress::Progress;
use crate::signals::{Asked, Signals};
use crate::watch::Watch;
use perilune_lua::{Failed, ParamValue, RecipeError, Run, StepResult};
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
    pub pending: Option<(u64, StepResult)>,
    last_loss: Option<f64>,
    /// The step that the valid split was evaluated at last, and the result.
    pub evaluated: Option<(u64, Vec<(String, f64)>)>,
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
            last_loss: None,
            evaluated: None,
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
        let start = Instant::now();
        let result = self.run.step();
        self.progress.took(start.elapsed().as_secs_f64());
        self.notices();
        let result = result?;
        let step = self.run.count();
        self.owed = Some(step);
        self.judge(step)?;
        if let Some(before) = self.pending.replace((step, result)) {
            self.report(before)?;
        }
        Ok(None)
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

    fn report(&mut self, (step, result): (u64, StepResult)) -> Result<(), Failure> {
        let numbers = self.run.read(&result)?;
        self.events.step(step, &numbers)?;
        self.progress.update(step, numbers.loss, numbers.samples);
        self.sound = numbers.loss.is_finite();
        if !self.sound {
            // Of a version on trial it is a bad edit, which `bad_edit` takes back.
            self.spoilt = true;
            return Err(self.not_finite(step, numbers.loss));
        }
        self.last_loss = Some(numbers.loss);
        self.passed(step)
    }

    fn not_finite(&self, step: u64, loss: f64) -> Failure {
        let what = if loss.is_nan() { "NaN" } else { "infinite" };
        let before = self.last_loss.map(|l| format!("; it was {} at step {}", short(l), step - 1)).unwrap_or_default();
        let lr = self.params.iter().find(|(name, _)| name == "lr").map(|(_, v)| match v {
            ParamValue::Int(i) => format!(" (lr is {i})"),
            ParamValue::Float(f) => format!(" (lr is {f})"),
            _ => String::new(),
        });
        let hint = format!(
            "try a lower learning rate{}, clip_norm = 1.0 in the optimizer, or look for log, sqrt and division at 0 in the loss and for NaN in the data",
            lr.unwrap_or_default()
        );
        let message = format!("the loss is {what} at step {step}{before}");
        let place = self.run.loss_place();
        let error = match &place {
            Some((file, line)) => RecipeError::at(file, Some(*line), message, Some(hint)),
            None => RecipeError::at("", None, message, Some(hint)),
        };
        Failure::Recipe(Box::new(RecipeError { file: place.map(|(file, _)| file), ..error }))
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
        let values = self.aside(|run| run.evaluate(split))?;
        self.events.eval(step, split, &values)?;
        self.checkpoints.evaluated(step, split, &values, self.events)?;
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
