//! The events of a run, and everyone who hears of them: stdout (`--json`), the run directory, the person.
//!
//! One place makes the objects, so that `metrics.jsonl` and `--json` cannot differ.

use crate::checkpoints::Stall;
use crate::failure::Failure;
use crate::format::number;
use crate::rundir::RunDir;
use crate::screen::Screen;
use perilune_lua::{ParamValue, StepNumbers};
use perilune_plan::Readings;
use serde_json::{Map, Value, json};
use std::rc::Rc;
use std::time::Instant;

/// Version of the objects' shape; it changes when a field changes its meaning or goes away.
pub const SCHEMA: u32 = 1;

pub struct Events {
    pub screen: Rc<Screen>,
    pub dir: Option<RunDir>,
    /// The last value of every metric, for the last event.
    pub latest: Vec<(String, f64)>,
    /// Training began then, and had gone on for so many seconds before (in the processes that it resumes).
    begun: Instant,
    before: f64,
}

pub fn object(values: &[(String, f64)]) -> Value {
    Value::Object(values.iter().map(|(k, v)| (k.clone(), number(*v))).collect())
}

pub fn params(values: &[(String, ParamValue)]) -> Value {
    let one = |v: &ParamValue| match v {
        ParamValue::Int(i) => Value::from(*i),
        ParamValue::Float(f) => serde_json::Number::from_f64(*f).map_or(Value::Null, Value::Number),
        ParamValue::Bool(b) => Value::from(*b),
        ParamValue::Str(s) | ParamValue::Other(s) => Value::from(s.as_str()),
    };
    Value::Object(values.iter().map(|(k, v)| (k.clone(), one(v))).collect())
}

/// A warning that belongs to no step.
pub fn warn(screen: &Screen, message: &str) {
    tracing::warn!("{message}");
    screen.event(&json!({ "event": "warning", "message": message }));
    screen.warn(message);
}

impl Events {
    pub fn new(screen: Rc<Screen>) -> Events {
        Events { screen, dir: None, latest: Vec::new(), begun: Instant::now(), before: 0.0 }
    }

    /// Training begins now, after so many seconds of it in other processes.
    pub fn begin(&mut self, before: f64) {
        (self.begun, self.before) = (Instant::now(), before);
    }

    /// Of training so far, to the millisecond.
    fn seconds(&self) -> Value {
        let seconds = self.before + self.begun.elapsed().as_secs_f64();
        serde_json::Number::from_f64((seconds * 1e3).round() / 1e3).map_or(Value::Null, Value::Number)
    }

    fn remember(&mut self, values: &[(String, f64)]) {
        for (name, v) in values {
            match self.latest.iter_mut().find(|(n, _)| n == name) {
                Some(known) => known.1 = *v,
                None => self.latest.push((name.clone(), *v)),
            }
        }
    }

    pub fn start(&self, fields: &Map<String, Value>) {
        let mut event = Map::new();
        event.insert("event".into(), "start".into());
        event.extend(fields.clone());
        self.screen.event(&Value::Object(event));
    }

    pub fn step(&mut self, step: u64, n: &StepNumbers) -> Result<(), Failure> {
        let event = json!({ "event": "step", "step": step, "seconds": self.seconds(), "loss": number(n.loss), "metrics": object(&n.metrics) });
        let mut values = vec![("loss".to_string(), n.loss)];
        values.extend(n.metrics.iter().cloned());
        self.screen.event(&event);
        self.remember(&values);
        self.dir.as_mut().map_or(Ok(()), |d| d.log(&event, step, &values))
    }

    /// What the device's sensors say.
    pub fn system(&mut self, step: u64, readings: &Readings) -> Result<(), Failure> {
        let values = crate::monitor::metrics(readings);
        let event = json!({
            "event": "system", "step": step, "seconds": self.seconds(), "metrics": object(&values),
            "throttled": readings.throttled,
        });
        self.screen.event(&event);
        self.dir.as_mut().map_or(Ok(()), |d| d.log(&event, step, &values))
    }

    /// Metrics of a split, whose names it puts before theirs.
    pub fn eval(&mut self, step: u64, split: &str, metrics: &[(String, f64)]) -> Result<(), Failure> {
        tracing::info!(step, split, "evaluated");
        let values: Vec<(String, f64)> = metrics.iter().map(|(name, v)| (format!("{split}/{name}"), *v)).collect();
        let event = json!({ "event": "eval", "step": step, "seconds": self.seconds(), "metrics": object(&values) });
        self.screen.event(&event);
        self.remember(&values);
        self.dir.as_mut().map_or(Ok(()), |d| d.log(&event, step, &values).and_then(|()| d.flush()))
    }

    /// One is whole on the disk.
    pub fn checkpoint(&mut self, step: u64, path: &std::path::Path, stall: &Stall) -> Result<(), Failure> {
        let ms = (stall.seconds * 1e5).round() / 1e2;
        tracing::info!(step, path = %path.display(), stalled_ms = ms, note = stall.note, "checkpoint");
        let mut event =
            json!({ "event": "checkpoint", "step": step, "path": path.display().to_string(), "stalled_ms": ms });
        if let Some(note) = &stall.note {
            event["note"] = note.as_str().into();
        }
        self.screen.event(&event);
        self.dir.as_mut().map_or(Ok(()), |d| d.log(&event, step, &[]))
    }

    /// A new version of the recipe was applied after a step, or refused; `more` are fields besides.
    pub fn reload(&mut self, step: u64, changed: &[String], error: Option<&str>, more: Value) -> Result<(), Failure> {
        tracing::info!(step, changed = ?changed, error, "reload");
        let mut event =
            json!({ "event": "reload", "step": step, "ok": error.is_none(), "changed": changed, "error": error });
        if let (Some(event), Value::Object(more)) = (event.as_object_mut(), more) {
            event.extend(more);
        }
        self.screen.event(&event);
        self.dir.as_mut().map_or(Ok(()), |d| d.log(&event, step, &[]))
    }

    pub fn warning(&self, message: &str) {
        warn(&self.screen, message);
    }

    /// Something about a step, which the log of the run keeps too. `more` are fields of the event.
    pub fn warning_at(&mut self, step: u64, message: &str, more: Value) -> Result<(), Failure> {
        // A person reads the recipe's line first, unless the message says it.
        let place = more["file"].as_str().zip(more["line"].as_u64()).map(|(file, line)| format!("{file}:{line}"));
        let place = place.filter(|p| !message.contains(p.as_str())).map(|p| format!("{p}: ")).unwrap_or_default();
        tracing::warn!(step, "{message}");
        let mut event = json!({ "event": "warning", "step": step, "message": message });
        if let (Some(event), Value::Object(more)) = (event.as_object_mut(), more) {
            event.extend(more);
        }
        self.screen.event(&event);
        self.screen.warn(&format!("{place}{message}"));
        self.dir.as_mut().map_or(Ok(()), |d| d.log(&event, step, &[]).and_then(|()| d.flush()))
    }

    /// On stdout only; `main` says it to the person.
    pub fn error(&self, failure: &Failure) {
        let event = match failure {
            Failure::Recipe(e) => json!({
                "event": "error", "message": e.message, "file": e.file, "line": e.line, "hint": e.hint, "stack": e.stack,
            }),
            other => json!({ "event": "error", "message": other.message(), "file": null, "line": null }),
        };
        self.screen.event(&event);
    }

    pub fn done(&self, status: &str, steps: u64, seconds: f64, weights: Option<&str>) {
        self.screen.event(&json!({
            "event": "done", "status": status, "steps": steps, "seconds": number(seconds),
            "metrics": object(&self.latest), "weights": weights,
        }));
    }
}
