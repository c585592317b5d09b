//! Applies the policies for anomalies: warns, counts skipped updates, or fails with the cause and a cure.

use super::{MAX_SKIPPED, Policy};
use crate::error::{Error, Result};
use crate::numbers::{self, short};
use crate::training_loop::{Pending, TrainingLoop};
use perilune_lua::{NotFinite, ParamValue, RecipeError};
use serde_json::{Map, Value, json};

/// Sample numbers that a message lists; the event has all.
const NAMED: usize = 8;

/// A message about a step, with the place of its cause in the recipe.
struct Report {
    message: String,
    hint: Option<String>,
    place: Option<(String, u32)>,
    fields: Map<String, Value>,
}

impl TrainingLoop<'_> {
    /// Handles a loss or gradient norm that is not finite.
    pub(crate) fn not_finite(&mut self, pending: &Pending, metric: &str, value: f64) -> Result<()> {
        self.bad += 1;
        // The search is slow: run it once per series of bad steps, and never for a custom step that continues.
        let search = match self.on_nan {
            Policy::Stop => true,
            Policy::Skip => !self.traced && !self.run.own_step(),
            _ => false,
        };
        if self.on_nan == Policy::Warn && self.bad > 1 {
            return Ok(());
        }
        self.traced |= search;
        let found = if search { self.search(pending) } else { None };
        let mut report = self.describe(pending.step, metric, value, found);
        match self.on_nan {
            Policy::Skip if self.bad < MAX_SKIPPED => {
                report.message.push_str("; its update was skipped");
                self.warn(pending.step, report)
            }
            Policy::Skip => {
                report.message.push_str(&format!(
                    "; the updates of {MAX_SKIPPED} steps in a row were skipped, so the weights no longer change"
                ));
                Err(report.into_error())
            }
            Policy::Warn => {
                report.message.push_str("; the run continues");
                self.warn(pending.step, report)
            }
            _ => Err(report.into_error()),
        }
    }

    /// Handles a spike of the loss.
    pub(crate) fn spike(&mut self, step: u64, loss: f64, median: f64, limit: f64, z: f64) -> Result<()> {
        let (samples, mut fields) = self.samples(step);
        fields.insert("metric".into(), "loss".into());
        fields.insert("value".into(), numbers::json(loss));
        fields.insert("limit".into(), numbers::json(limit));
        let many = if z.is_finite() { format!(", {z:.0} standard deviations above it") } else { String::new() };
        let mut message = format!(
            "the loss rises to {} at step {step}: the median of the last steps is {}{many}{samples}",
            short(loss),
            short(median)
        );
        let hint = "look at these samples, lower the learning rate, or set clip_norm = 1.0 in the optimizer; --on-spike selects the policy for spikes";
        let place = self.run.loss_place();
        match self.on_spike {
            Policy::Skip => {
                self.bad += 1;
                message.push_str("; its update was skipped");
                if self.bad >= MAX_SKIPPED {
                    message.push_str(&format!(", as were those of the {} steps before", MAX_SKIPPED - 1));
                    return Err(Report { message, hint: Some(hint.into()), place, fields }.into_error());
                }
                self.warn(step, Report { message, hint: None, place, fields })
            }
            Policy::Stop => Err(Report { message, hint: Some(hint.into()), place, fields }.into_error()),
            _ => self.warn(step, Report { message, hint: None, place, fields }),
        }
    }

    fn warn(&mut self, step: u64, report: Report) -> Result<()> {
        let mut fields = report.fields;
        if let Some((file, line)) = report.place {
            fields.insert("file".into(), file.into());
            fields.insert("line".into(), line.into());
        }
        self.reporter.warning_at(step, &report.message, &fields)
    }

    /// Records the step again on its unchanged States to find the op that caused the value. Failing to find it is
    /// not an error.
    fn search(&self, pending: &Pending) -> Option<NotFinite> {
        self.aside(|run| run.diagnose(pending.step, pending.rng)).ok().flatten()
    }

    /// Lists the samples of a step: `; rows 4, 17, 203, …`, and the same for the event.
    fn samples(&self, step: u64) -> (String, Map<String, Value>) {
        let mut fields = Map::new();
        let Ok(Some((what, ids))) = self.run.samples_of(step) else { return (String::new(), fields) };
        let named: Vec<String> = ids.iter().take(NAMED).map(i64::to_string).collect();
        let more = if ids.len() > NAMED { format!(", … ({} in all)", ids.len()) } else { String::new() };
        fields.insert("samples".into(), json!(ids));
        (format!("; {what} {}{more}", named.join(", ")), fields)
    }

    fn describe(&self, step: u64, metric: &str, value: f64, found: Option<NotFinite>) -> Report {
        let what = if value.is_nan() { "NaN" } else { "infinite" };
        let subject = if metric == "loss" { "the loss" } else { "the norm of the gradients" };
        let before = self.last_loss.filter(|_| metric == "loss");
        let before = before.map(|l| format!("; it was {} at step {}", short(l), step - 1)).unwrap_or_default();
        let (samples, mut fields) = self.samples(step);
        fields.insert("metric".into(), metric.into());
        let origin = found.as_ref().map(|f| format!("; {}", origin(f))).unwrap_or_default();
        if let Some(f) = &found {
            fields.insert("op".into(), f.op.as_str().into());
        }
        let lr = self.params.iter().find(|(name, _)| name == "lr").map(|(_, v)| match v {
            ParamValue::Int(i) => format!(" (lr is {i})"),
            ParamValue::Float(f) => format!(" (lr is {f})"),
            _ => String::new(),
        });
        let hint = format!(
            "try a lower learning rate{}, clip_norm = 1.0 in the optimizer, or look for log, sqrt and division at 0 in the loss and for NaN in the data; --on-nan skip omits such steps",
            lr.unwrap_or_default()
        );
        let place = found.and_then(|f| f.place).or_else(|| self.run.loss_place());
        let message = format!("{subject} is {what} at step {step}{before}{origin}{samples}");
        Report { message, hint: Some(hint), place, fields }
    }
}

/// Names the first non-finite value: `the first NaN comes from log, shape {64, 10} (digits.lua:33)`.
fn origin(f: &NotFinite) -> String {
    let what = if f.nan { "NaN" } else { "infinity" };
    let at = f.place.as_ref().map(|(file, line)| format!(" ({file}:{line})")).unwrap_or_default();
    match &f.state {
        Some(path) => {
            format!("{path} held the first {what} before the step, so the gradients of an earlier one were not finite")
        }
        None if f.input => format!("the first {what} is in the data or in a number of the recipe{at}"),
        None => format!("the first {what} comes from {}, shape {}{at}", f.op, f.shape),
    }
}

impl Report {
    fn into_error(self) -> Error {
        let error = match &self.place {
            Some((file, line)) => RecipeError::at(file, Some(*line), self.message, self.hint),
            None => RecipeError::at("", None, self.message, self.hint),
        };
        Error::Recipe(Box::new(RecipeError { file: self.place.map(|(file, _)| file), ..error }))
    }
}
