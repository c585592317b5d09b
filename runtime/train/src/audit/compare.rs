//! Compares a run with a recording while the run recomputes it.

use super::{Audited, Difference, Recording, states};
use crate::error::{Error, Result};
use crate::numbers;
use crate::params::{self, Params};
use perilune_data::sample_log::{Entry, SampleLog};
use perilune_lua::{ParamValue, Run, StepNumbers};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The comparison of one window.
pub(crate) struct Audit {
    recording: Arc<Recording>,
    pub result: Audited,
    /// Evaluations after the present step that were recorded and have been found.
    found: (u64, BTreeSet<usize>),
    /// Steps after which the run was resumed: what was evaluated as it stopped is not evaluated when it goes on.
    resumed: BTreeSet<u64>,
}

/// Bits of a number; null stands for what is none.
fn bits(v: &Value) -> Option<u64> {
    v.as_f64().map(f64::to_bits)
}

fn same(a: &Value, b: &Value) -> bool {
    match (bits(a), bits(b)) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}

fn show(v: Option<&Value>) -> String {
    match v {
        None => "none".into(),
        Some(Value::Null) => "no number".into(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

/// Returns the first value by name that differs between two objects: the name, and both values.
fn differing<'a>(a: &'a Map<String, Value>, b: &'a Map<String, Value>) -> Option<(&'a str, String, String)> {
    let names: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    let differs = |name: &&String| match (a.get(*name), b.get(*name)) {
        (Some(x), Some(y)) => !same(x, y),
        _ => true,
    };
    let name = names.into_iter().find(differs)?;
    Some((name, show(a.get(name)), show(b.get(name))))
}

fn map(values: &[(String, f64)]) -> Map<String, Value> {
    values.iter().map(|(name, v)| (name.clone(), parsed(*v))).collect()
}

/// Returns a number as it is read back from the log.
fn parsed(v: f64) -> Value {
    numbers::json(v)
}

impl Audit {
    pub fn new(recording: Arc<Recording>, (start, from, to): (u64, u64, u64), resumed: BTreeSet<u64>) -> Audit {
        let result =
            Audited { start, from, to, steps: 0, evaluations: 0, checkpoints: 0, samples: 0, difference: None };
        Audit { recording, result, found: (start, BTreeSet::new()), resumed }
    }

    /// Whether the run has taken the last step of the window, and nothing of the record follows but what this step requires: neither
    /// later versions nor the evaluations of a run that is done.
    pub fn ends_before(&self, count: u64) -> bool {
        count >= self.result.to && !(self.is_to_end() && self.is_done())
    }

    /// Whether the window reaches the end of the run.
    pub fn is_to_end(&self) -> bool {
        self.result.to >= self.recording.end()
    }

    /// Whether the run has taken all its steps.
    fn is_done(&self) -> bool {
        self.record("status").and_then(Value::as_str) == Some("done")
    }

    pub fn has_difference(&self) -> bool {
        self.result.difference.is_some()
    }

    /// Keeps the difference of the lowest step.
    fn differs(&mut self, new: Difference) {
        if self.result.difference.as_ref().is_none_or(|d| new.step < d.step) {
            self.result.difference = Some(new);
        }
    }

    fn record(&self, key: &str) -> Option<&Value> {
        self.recording.record().get(key)
    }

    /// Compares params, as recorded at a step, with those of the run.
    pub fn params(&mut self, step: u64, recorded: &Map<String, Value>, now: &Params) {
        // The text of a table or a function is no value.
        let is_value = |name: &str| !now.iter().any(|(n, v)| n == name && matches!(v, ParamValue::Other(_)));
        let keep = |object: &Map<String, Value>| -> Map<String, Value> {
            object.iter().filter(|(name, _)| is_value(name)).map(|(name, v)| (name.clone(), v.clone())).collect()
        };
        let (recorded, now) = (keep(recorded), params::to_json(now).as_object().map(keep).unwrap_or_default());
        if let Some((name, was, is)) = differing(&recorded, &now) {
            self.differs(Difference { step, what: format!("param {name}"), recorded: was, found: is, place: None });
        }
    }

    /// Compares seed, precision and params with `run.json`, which has those of the last version.
    pub fn last_version(&mut self, step: u64, run: &Run, now: &Params) {
        if let Some(recorded) = self.record("params").and_then(Value::as_object).cloned() {
            self.params(step, &recorded, now);
        }
        let values = [("seed", json!(run.seed())), ("precision", json!(run.precision()))];
        for (key, now) in values {
            if let Some(was) = self.record(key).filter(|was| **was != now) {
                let (recorded, found) = (show(Some(was)), show(Some(&now)));
                self.differs(Difference { step, what: key.into(), recorded, found, place: None });
            }
        }
    }

    /// Compares the numbers of a step.
    pub fn step(&mut self, step: u64, n: &StepNumbers, place: Option<(String, u32)>) {
        if step > self.result.to {
            return;
        }
        self.result.steps += 1;
        let now = json!({ "loss": parsed(n.loss), "metrics": map(&n.metrics) });
        let Some(was) = self.recording.step(step) else {
            let found = format!("loss {}", show(now.get("loss")));
            return self.differs(Difference { step, what: "step".into(), recorded: "none".into(), found, place });
        };
        if !same(&was["loss"], &now["loss"]) {
            let (recorded, found) = (show(was.get("loss")), show(now.get("loss")));
            return self.differs(Difference { step, what: "loss".into(), recorded, found, place });
        }
        let none = Map::new();
        let object = |v: &'_ Value| v["metrics"].as_object().cloned().unwrap_or(none.clone());
        if let Some((name, recorded, found)) = differing(&object(&was), &object(&now)) {
            self.differs(Difference { step, what: name.into(), recorded, found, place });
        }
    }

    /// Compares an evaluation with those that were recorded after the step.
    pub fn evaluation(&mut self, step: u64, split: &str, values: &[(String, f64)], place: Option<(String, u32)>) {
        if step > self.result.to || step <= self.result.start {
            return;
        }
        if self.found.0 != step {
            self.found = (step, BTreeSet::new());
        }
        self.result.evaluations += 1;
        let now: Map<String, Value> = values.iter().map(|(name, v)| (format!("{split}/{name}"), parsed(*v))).collect();
        let recorded = self.recording.evaluations(step);
        let of_split = |e: &Map<String, Value>| e.keys().any(|name| name.split_once('/').is_some_and(|n| n.0 == split));
        let (mut nearest, mut any) = (None, false);
        for (k, was) in recorded.iter().enumerate().filter(|(_, e)| of_split(e)) {
            match differing(was, &now) {
                None => {
                    any = true;
                    self.found.1.insert(k);
                }
                Some((name, was, is)) => nearest = Some((name.to_string(), was, is)),
            }
        }
        if any {
            return;
        }
        let (what, recorded, found) = nearest.unwrap_or_else(|| {
            let found = now.iter().next().map_or("metrics".into(), |(name, v)| format!("{name} {v}"));
            (format!("evaluation of {split}"), "none".into(), found)
        });
        self.differs(Difference { step, what, recorded, found, place });
    }

    /// Lists the splits that were evaluated after a step according to the record, and have not been found.
    pub fn missing_evaluations(&self, step: u64) -> Vec<String> {
        let found = |k: &usize| self.found.0 == step && self.found.1.contains(k);
        let recorded = self.recording.evaluations(step).into_iter().enumerate().filter(|(k, _)| !found(k));
        let split = |(_, e): (usize, Map<String, Value>)| Some(e.keys().next()?.split_once('/')?.0.to_string());
        recorded.filter_map(split).collect()
    }

    /// Reports evaluations that were recorded after a step and that the run has not made. `last`: the window is complete; until
    /// then its last step may be evaluated once more.
    pub fn close_step(&mut self, step: u64, last: bool) {
        let Audited { start, to, .. } = self.result;
        if step <= start || step > to || (!last && (step == to || self.resumed.contains(&step))) {
            return;
        }
        if let Some(split) = self.missing_evaluations(step).into_iter().next() {
            let what = format!("evaluation of {split}");
            self.differs(Difference { step, what, recorded: "one".into(), found: "none".into(), place: None });
        }
    }

    /// Whether the run took a checkpoint after this step of the window.
    pub fn took_checkpoint(&self, step: u64) -> bool {
        step <= self.result.to && self.recording.took_checkpoint(step)
    }

    /// Compares the checkpoint of a step, if the record has it: States, position in the data, random numbers, learning rates.
    pub fn checkpoint(&mut self, step: u64, run: &Run) -> Result<()> {
        if step <= self.result.start || step > self.result.to || !self.recording.has_checkpoint(step) {
            return Ok(());
        }
        let recorded = self.recording.checkpoint(step)?;
        self.result.checkpoints += 1;
        if let Some(found) = states::difference(run, &recorded)? {
            self.differs(found);
        }
        let (seed, drawn) = run.rng();
        let cursor = params::to_json(&run.cursor()?);
        let mut now = vec![("rng", json!({ "seed": seed, "step": drawn })), ("seed", run.seed().into())];
        if let Some(rates) = run.rates() {
            now.push(("schedule", json!({ "updates": cursor["updates"], "lr": rates })));
        }
        now.push(("cursor", cursor));
        now.push(("precision", run.precision().into()));
        for (key, now) in now {
            let was = recorded.record.get(key);
            if was.is_some_and(|was| same_text(was, &now)) {
                continue;
            }
            let (what, recorded, found) = match (was.and_then(Value::as_object), now.as_object()) {
                (Some(was), Some(now)) => match differing(was, now) {
                    Some((name, recorded, found)) => (named(key, name), recorded, found),
                    None => continue,
                },
                _ => (key.into(), show(was), show(Some(&now))),
            };
            self.differs(Difference { step, what, recorded, found, place: None });
            return Ok(());
        }
        Ok(())
    }

    /// Compares the logged samples of the window's steps.
    pub fn samples(&mut self, run: &Run) -> Result<()> {
        let recorded = self.recording.samples()?;
        let Some(log) = run.sample_log() else {
            if recorded.is_some() {
                let (recorded, found) = ("a sample log".into(), "none".into());
                self.differs(Difference {
                    step: self.result.from,
                    what: "samples".into(),
                    recorded,
                    found,
                    place: None,
                });
            }
            return Ok(());
        };
        run.settle_sample_log()?;
        let log = log.borrow();
        // Every checkpoint has the samples before it; those of a killed run may end there.
        let sealed = self.recording.checkpoints().last().copied().unwrap_or(0);
        let last = recorded.as_ref().map_or(0, |log| u64::from(log.last_step())).max(sealed);
        let end = self.result.difference.as_ref().map_or(self.result.to, |d| d.step).min(run.count()).min(last);
        let (first, end) = (as_step(self.result.start + 1), as_step(end));
        if first > end {
            return Ok(());
        }
        let wrong = |e: perilune_data::Error| Error::Refused(e.to_string());
        let none = SampleLog::default();
        let recorded = recorded.as_ref().unwrap_or(&none);
        let (was, now) = (recorded.range(first, end).map_err(wrong)?, log.range(first, end).map_err(wrong)?);
        self.result.samples += now.len() as u64;
        let shown = |log: &SampleLog, e: Option<&Entry>| e.map_or("none".to_string(), |e| entry(log, e));
        for k in 0..was.len().max(now.len()) {
            let (a, b) = (was.get(k), now.get(k));
            let (x, y) = (shown(recorded, a), shown(&log, b));
            if x != y {
                let step = [a, b].into_iter().flatten().map(|e| u64::from(e.step)).min().unwrap_or_default();
                // Another sample is the cause of a loss that differs at the same step.
                let is_other = a.zip(b).is_none_or(|(a, b)| (a.step, a.id) != (b.step, b.id));
                if self.result.difference.as_ref().is_none_or(|d| step < d.step || (is_other && step == d.step)) {
                    let what = "samples".to_string();
                    self.result.difference = Some(Difference { step, what, recorded: x, found: y, place: None });
                }
                break;
            }
        }
        Ok(())
    }

    /// Compares the end of the run: the hash of all States, and whether the recipe ends there.
    pub fn end(&mut self, run: &Run, weights: &str) -> Result<()> {
        let step = run.count();
        if !self.is_to_end() || self.has_difference() {
            return Ok(());
        }
        if step < self.result.to || (self.is_done() && !run.finished()?) {
            let (recorded, found) = (format!("the run ends after step {}", self.result.to), self.length(run, step));
            self.differs(Difference { step, what: "length".into(), recorded, found, place: None });
        }
        let was = self.record("weights").and_then(Value::as_str).filter(|was| *was != weights).map(String::from);
        if let Some(recorded) = was {
            let (what, found) = ("weights".into(), weights.into());
            self.differs(Difference { step, what, recorded, found, place: None });
        }
        Ok(())
    }

    fn length(&self, run: &Run, step: u64) -> String {
        match step < self.result.to {
            true => format!("it ends after step {step}"),
            false => format!("it has {} steps", run.steps()),
        }
    }
}

/// Returns the name of a value of a checkpoint's record.
fn named(key: &str, name: &str) -> String {
    match (key, name) {
        ("schedule", "lr") => "learning rate".into(),
        ("rng", name) => format!("random numbers: {name}"),
        ("cursor", name) => format!("position: {name}"),
        (key, name) => format!("{key}.{name}"),
    }
}

/// Whether two values are the same text.
fn same_text(a: &Value, b: &Value) -> bool {
    let text = |v: &Value| v.to_string();
    text(a) == text(b)
}

fn as_step(step: u64) -> u32 {
    u32::try_from(step).unwrap_or(u32::MAX)
}

/// Describes an entry of the sample log with all its bits.
fn entry(log: &SampleLog, e: &Entry) -> String {
    let source = log.sources().get(usize::from(e.id.source)).map_or("", String::as_str);
    let sub = if e.id.sub == 0 { String::new() } else { format!(".{}", e.id.sub) };
    let number = |v: f32| if v.is_nan() { "none".to_string() } else { format!("{v:?}") };
    format!(
        "{source} row {}{sub} at step {}, loss {}, weight {}, gradient {}",
        e.id.row,
        e.step,
        number(e.loss),
        number(e.weight),
        number(e.gradient)
    )
}
