//! Defines the events of a run and reports them: to the listener of the caller, and to the log in the run directory.
//!
//! [`Event::json`] is the one place that makes the JSON objects, so `metrics.jsonl` and `--json` cannot differ.

use crate::checkpoints::Stall;
use crate::error::{Error, Result};
use crate::history::{self, HistoryEntry};
use crate::media;
use crate::mlflow::Mlflow;
use crate::monitor;
use crate::numbers::{self, object};
use crate::rundir::RunDir;
use crate::tensorboard::Summary;
use perilune_lua::{Logged, LoggedValue, StepNumbers};
use perilune_plan::Readings;
use serde_json::{Map, Value, json};
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Instant;

/// Version of the JSON objects; it changes when a field changes its meaning or is removed.
pub const SCHEMA: u32 = 1;

/// Receives the events of a run, in order, on the thread that trains.
pub trait Listener {
    fn event(&self, event: &Event<'_>);
}

impl<F: Fn(&Event<'_>)> Listener for F {
    fn event(&self, event: &Event<'_>) {
        self(event);
    }
}

/// One event of a run. Steps count from 1; an event belongs to the step before it unless its doc states otherwise.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// The recipe has been built and will train: stop requests are honoured between steps from here on.
    Training,
    /// The run directory exists. `fields` describe the run, as in `run.json`.
    Start { fields: &'a Map<String, Value> },
    /// The sizes of the model and the data, for display: trained and frozen parameters, and the samples of each split.
    Recipe { name: &'a str, device: &'a str, parameters: u64, frozen: u64, samples: &'a [(String, u64)], seed: i64 },
    /// The run continues from a checkpoint; `changed` lists params and lines that differ from the version that wrote it.
    Resumed { step: u64, dir: &'a Path, changed: &'a [String], states: Option<&'a str> },
    /// The run continues in a new directory `dir`, as a branch of the run in `from` after `step`.
    Branched { step: u64, from: &'a Path, dir: &'a Path },
    /// A run that was to be resumed has no checkpoint and starts from its beginning, for this reason.
    Restarted { dir: &'a Path, reason: &'a str },
    /// Another version of the recipe, or the first one, takes the next step. `epoch`: the steps of an epoch, where the data has an end;
    /// `peak`: the device's limit in FLOP/s.
    Version { steps: u64, epoch: Option<f64>, tokens_per_sample: Option<u64>, peak: Option<f64> },
    /// A step has been issued: its seconds, those of them spent on batches, the FLOP of its matrix products, and from time to time the
    /// learning rate of the next one.
    Issued { step: u64, seconds: f64, data_seconds: f64, flops: f64, rate: Option<f64> },
    /// The numbers of a step have been read, one step after it was issued.
    Step { step: u64, seconds: f64, loss: f64, metrics: &'a [(String, f64)], samples: u64 },
    /// Sensors of the device.
    System { step: u64, seconds: f64, readings: &'a Readings },
    /// A split was evaluated; names carry the split, as in `valid/loss`.
    Evaluation { step: u64, seconds: f64, metrics: &'a [(String, f64)] },
    /// The evaluation that is due every so many steps, without the name of its split in front.
    PeriodicEvaluation { step: u64, split: &'a str, metrics: &'a [(String, f64)] },
    /// The recipe has logged values. `fields`: `metrics`, `texts`, `images` and `histograms` by name, where there are some.
    Logged { step: u64, seconds: f64, fields: &'a Map<String, Value> },
    /// A checkpoint is complete on the disk; `stalled` is how long the loop waited for it.
    Checkpoint { step: u64, path: &'a Path, stalled: f64, note: Option<&'a str> },
    /// A new version waits for machine code that is compiled in the background.
    ReloadWaits { step: u64 },
    /// A new version was applied after `step`, and has taken its first step.
    Applied { step: u64, changed: &'a [String], plans: u64, ms: f64, states: Option<&'a str> },
    /// A new version was refused at `step`. With `back_to` the steps after that one are void and will be repeated.
    Refused { step: u64, back_to: Option<u64>, error: &'a str },
    /// A warning; `details` are further fields of the JSON object.
    Warning { step: Option<u64>, message: &'a str, details: &'a Map<String, Value> },
    /// Early stopping ends the run after `step`; `reason` names the metric, its best value and the evaluations since.
    StoppedEarly { step: u64, reason: &'a str },
    /// The loop has ended, with or without an error; no step follows.
    LoopEnded,
    /// The recipe's last evaluations, by split.
    Finished { steps: u64, evaluations: &'a [(&'a str, Vec<(String, f64)>)], run_dir: &'a Path },
    /// The run stops at [`crate::RunSpec::until`], before its last step.
    Paused { step: u64, steps: u64, evaluations: &'a [(&'a str, Vec<(String, f64)>)], run_dir: &'a Path },
    /// A large data file, whose time has changed, is compared with that of the run.
    ComparesData { path: &'a str, bytes: u64 },
    /// The run has finished, and waits until its data files are hashed. A stop request ends the wait.
    HashesData,
    /// A stop request ended the run; the checkpoint is the one to continue from.
    Stopped { code: usize, step: u64, steps: u64, run_dir: &'a Path, checkpoint: Option<&'a Path> },
    /// The run failed; `run_dir` has its record, if it was created.
    Failed { error: &'a Error, run_dir: Option<&'a Path> },
    /// The last event of a run that has not failed.
    Done { status: &'a str, steps: u64, seconds: f64, metrics: &'a [(String, f64)], weights: Option<&'a str> },
    /// A replay reproduced the weights of the original run.
    Reproduced,
}

impl Event<'_> {
    /// Returns the JSON object of an event, or `None` for events that are only displayed.
    pub fn json(&self) -> Option<Value> {
        Some(match self {
            Event::Start { fields } => with(json!({ "event": "start" }), fields),
            Event::Branched { step, from, dir } => json!({
                "event": "branch", "step": step, "from": from.display().to_string(),
                "run_dir": dir.display().to_string(),
            }),
            Event::Restarted { dir, reason } => {
                json!({ "event": "restart", "run_dir": dir.display().to_string(), "reason": reason })
            }
            Event::Step { step, seconds, loss, metrics, .. } => json!({
                "event": "step", "step": step, "seconds": plain(*seconds), "loss": numbers::json(*loss),
                "metrics": object(metrics),
            }),
            Event::System { step, seconds, readings } => json!({
                "event": "system", "step": step, "seconds": plain(*seconds),
                "metrics": object(&monitor::metrics(readings)), "throttled": readings.throttled,
            }),
            Event::Evaluation { step, seconds, metrics } => {
                json!({ "event": "eval", "step": step, "seconds": plain(*seconds), "metrics": object(metrics) })
            }
            Event::Logged { step, seconds, fields } => {
                with(json!({ "event": "log", "step": step, "seconds": plain(*seconds) }), fields)
            }
            Event::Checkpoint { step, path, stalled, note } => {
                let ms = (stalled * 1e5).round() / 1e2;
                let mut event = json!({
                    "event": "checkpoint", "step": step, "path": path.display().to_string(), "stalled_ms": ms,
                });
                if let Some(note) = note {
                    event["note"] = (*note).into();
                }
                event
            }
            Event::Applied { step, changed, plans, ms, states } => json!({
                "event": "reload", "step": step, "ok": true, "changed": changed, "error": null,
                "plans": plans, "ms": numbers::json(*ms), "states": states,
            }),
            Event::Refused { step, back_to, error } => {
                let at = back_to.unwrap_or(*step);
                let mut event = json!({ "event": "reload", "step": at, "ok": false, "changed": [], "error": error });
                if let Some(n) = back_to {
                    (event["back_to"], event["repeated"]) = ((*n).into(), (step - n).into());
                }
                event
            }
            Event::Warning { step: Some(step), message, details } => {
                with(json!({ "event": "warning", "step": step, "message": message }), details)
            }
            Event::Warning { step: None, message, details } => {
                with(json!({ "event": "warning", "message": message }), details)
            }
            Event::StoppedEarly { step, reason } => json!({ "event": "early_stop", "step": step, "reason": reason }),
            Event::Failed { error: Error::Recipe(e), .. } => json!({
                "event": "error", "message": e.message, "file": e.file, "line": e.line, "hint": e.hint, "stack": e.stack,
            }),
            Event::Failed { error, .. } => {
                json!({ "event": "error", "message": error.to_string(), "file": null, "line": null })
            }
            Event::Done { status, steps, seconds, metrics, weights } => json!({
                "event": "done", "status": status, "steps": steps, "seconds": numbers::json(*seconds),
                "metrics": object(metrics), "weights": weights,
            }),
            _ => return None,
        })
    }
}

/// Returns a logged value as a curve has it, if it is a number.
fn figure(v: &Logged) -> Option<(String, f64)> {
    match v.value {
        LoggedValue::Figure(x) => Some((v.name.clone(), x)),
        _ => None,
    }
}

fn summary(value: &LoggedValue) -> Summary<'_> {
    match value {
        LoggedValue::Figure(v) => Summary::Scalar(*v),
        LoggedValue::Text(text) => Summary::Text(text),
        LoggedValue::Image(image) => Summary::Image(image),
        LoggedValue::Histogram(h) => Summary::Histogram(h),
    }
}

fn plain(v: f64) -> Value {
    serde_json::Number::from_f64(v).map_or(Value::Null, Value::Number)
}

fn with(mut event: Value, more: &Map<String, Value>) -> Value {
    if let Value::Object(event) = &mut event {
        event.extend(more.clone());
    }
    event
}

/// Makes the events of one run, and passes them on.
pub(crate) struct Reporter {
    listener: Rc<dyn Listener>,
    pub dir: Option<RunDir>,
    pub mlflow: Option<Mlflow>,
    /// The last checkpoint that was written.
    pub checkpointed: Option<PathBuf>,
    /// The last value of every metric, for the last event.
    pub latest: Vec<(String, f64)>,
    /// Events for the sinks of the recipe, with the steps that they belong to; `None` while it has no sinks.
    outbox: RefCell<Option<Vec<(u64, Value)>>>,
    /// The time at which training began in this process, and the seconds of training in earlier processes of the run.
    begun: Instant,
    before: f64,
}

impl Reporter {
    pub fn new(listener: Rc<dyn Listener>) -> Reporter {
        let (begun, before) = (Instant::now(), 0.0);
        let outbox = RefCell::default();
        Reporter { listener, dir: None, mlflow: None, checkpointed: None, latest: Vec::new(), outbox, begun, before }
    }

    /// Starts the clock of the events' `seconds` at the time that earlier processes of the run have taken.
    pub fn begin(&mut self, before: f64) {
        (self.begun, self.before) = (Instant::now(), before);
    }

    /// Seconds of training so far, to the millisecond.
    pub fn seconds(&self) -> f64 {
        ((self.before + self.begun.elapsed().as_secs_f64()) * 1e3).round() / 1e3
    }

    fn remember(&mut self, values: &[(String, f64)]) {
        for (name, v) in values {
            match self.latest.iter_mut().find(|(n, _)| n == name) {
                Some(known) => known.1 = *v,
                None => self.latest.push((name.clone(), *v)),
            }
        }
    }

    /// Passes an event to the listener and the sinks only.
    pub fn tell(&self, event: &Event<'_>) {
        self.listener.event(event);
        if let Some(outbox) = &mut *self.outbox.borrow_mut()
            && let Some(json) = event.json()
        {
            let step = json.get("step").or(json.get("steps")).and_then(Value::as_u64).unwrap_or(0);
            outbox.push((step, json));
        }
    }

    /// Returns the events since the last call, and whether sinks want those that follow.
    pub fn take_events(&self, wanted: bool) -> Vec<(u64, Value)> {
        std::mem::replace(&mut *self.outbox.borrow_mut(), wanted.then(Vec::new)).unwrap_or_default()
    }

    /// Passes an event to the listener and writes it to the log, with the values of the curves.
    fn log(&mut self, event: &Event<'_>, step: u64, values: &[(String, f64)]) -> Result<()> {
        self.tell(event);
        let (Some(dir), Some(json)) = (self.dir.as_mut(), event.json()) else { return Ok(()) };
        dir.log(&json, step, values)?;
        self.add_to_mlflow(step, values)
    }

    fn add_to_mlflow(&mut self, step: u64, values: &[(String, f64)]) -> Result<()> {
        let values = values.iter().map(|(name, v)| (name.as_str(), *v));
        let Some(mlflow) = self.mlflow.as_mut() else { return Ok(()) };
        for name in mlflow.metrics(step, values)? {
            self.warning(&format!(
                "--mlflow leaves out the metric '{name}': a store cannot have it beside one whose name continues it after '/', or that it \
                 continues\n  hint: give one of them another name"
            ));
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.mlflow.as_mut().map_or(Ok(()), Mlflow::flush)?;
        self.dir.as_mut().map_or(Ok(()), RunDir::flush)
    }

    /// Drops what was logged after a step that the run goes back to.
    pub fn rewind(&mut self, step: u64) -> Result<()> {
        self.mlflow.as_mut().map_or(Ok(()), |mlflow| mlflow.forget_after(step))?;
        self.dir.as_mut().map_or(Ok(()), |dir| dir.rewind(step))
    }

    /// Ends the record of the run in MLflow, if there is one.
    pub fn finish_mlflow(&mut self, status: &str) -> Result<()> {
        self.mlflow.as_mut().map_or(Ok(()), |mlflow| mlflow.finish(status))
    }

    pub fn step(&mut self, step: u64, n: &StepNumbers) -> Result<()> {
        let mut values = vec![("loss".to_string(), n.loss)];
        values.extend(n.metrics.iter().cloned());
        self.remember(&values);
        let seconds = self.seconds();
        let event = Event::Step { step, seconds, loss: n.loss, metrics: &n.metrics, samples: n.samples };
        self.log(&event, step, &values)
    }

    pub fn system(&mut self, step: u64, readings: &Readings) -> Result<()> {
        let event = Event::System { step, seconds: self.seconds(), readings };
        self.log(&event, step, &monitor::metrics(readings))
    }

    /// Reports metrics of a split, with the split's name as a prefix.
    pub fn evaluation(&mut self, step: u64, split: &str, metrics: &[(String, f64)]) -> Result<()> {
        tracing::info!(step, split, "evaluated");
        let values: Vec<(String, f64)> = metrics.iter().map(|(name, v)| (format!("{split}/{name}"), *v)).collect();
        self.remember(&values);
        self.log(&Event::Evaluation { step, seconds: self.seconds(), metrics: &values }, step, &values)?;
        self.flush()
    }

    /// Reports values that the recipe has logged.
    pub fn logged(&mut self, values: &[Logged]) -> Result<()> {
        for of_step in values.chunk_by(|a, b| a.step == b.step) {
            let step = of_step.first().map_or(0, |v| v.step);
            let fields = media::describe(self.dir.as_ref(), of_step)?;
            let event = Event::Logged { step, seconds: self.seconds(), fields: &fields };
            self.tell(&event);
            let figures: Vec<(String, f64)> = of_step.iter().filter_map(figure).collect();
            self.remember(&figures);
            if let (Some(dir), Some(json)) = (self.dir.as_mut(), event.json()) {
                let values = of_step.iter().map(|v| (v.name.as_str(), summary(&v.value)));
                dir.log_values(&json, step, values)?;
                self.add_to_mlflow(step, &figures)?;
            }
        }
        Ok(())
    }

    pub fn checkpoint(&mut self, step: u64, path: &Path, stall: &Stall) -> Result<()> {
        let ms = (stall.seconds * 1e5).round() / 1e2;
        tracing::info!(step, path = %path.display(), stalled_ms = ms, note = stall.note, "checkpoint");
        self.checkpointed = Some(path.to_path_buf());
        self.log(&Event::Checkpoint { step, path, stalled: stall.seconds, note: stall.note.as_deref() }, step, &[])
    }

    /// Reports a version that was applied or refused, under the step that it was applied after or the run goes back to.
    pub fn reload(&mut self, event: &Event<'_>) -> Result<()> {
        let step = match event {
            Event::Applied { step, changed, .. } => {
                tracing::info!(step, changed = ?changed, error = None::<&str>, "reload");
                *step
            }
            Event::Refused { step, back_to, error } => {
                let step = back_to.unwrap_or(*step);
                tracing::info!(step, changed = ?[""; 0], error, "reload");
                step
            }
            _ => return Ok(()),
        };
        self.log(event, step, &[])
    }

    /// Reports the end of a run by early stopping.
    pub fn stopped_early(&mut self, step: u64, reason: &str) -> Result<()> {
        tracing::info!(step, reason, "stopped early");
        let event = Event::StoppedEarly { step, reason };
        // A run that was killed after it had logged this logs it once.
        if self.dir.as_ref().is_some_and(|dir| dir.has_stopped_at(step)) {
            self.tell(&event);
            return Ok(());
        }
        self.log(&event, step, &[])
    }

    /// Appends a line to the history of versions in the run directory.
    pub fn history(&mut self, entry: &HistoryEntry<'_>) -> Result<()> {
        self.dir.as_mut().map_or(Ok(()), |dir| history::record(dir, entry))
    }

    /// Reports a warning that belongs to no step.
    pub fn warning(&self, message: &str) {
        tracing::warn!("{message}");
        self.tell(&Event::Warning { step: None, message, details: &Map::new() });
    }

    /// Reports a warning about a step, also to the log of the run.
    pub fn warning_at(&mut self, step: u64, message: &str, details: &Map<String, Value>) -> Result<()> {
        tracing::warn!(step, "{message}");
        self.log(&Event::Warning { step: Some(step), message, details }, step, &[])?;
        self.flush()
    }
}
