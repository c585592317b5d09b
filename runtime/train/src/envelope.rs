//! Measures how far the metrics of a run move by rounding alone, and decides whether another run stays within that.
//!
//! Two devices round differently, so a run that is repeated on another kind of device has other bits, and the difference grows with
//! the steps. How fast it grows is measured on the run itself: it is repeated three times with all trainable weights changed by
//! one ulp (`--perturb`), and the spread of the four runs is stored for each metric. The bound at step t is
//!
//! ```text
//! |new(t) - recorded(t)|  <=  8 * S(t) + F(t)
//! S(t)  the largest range of the four runs at any step up to t      (serialized on a grid of steps)
//! F(t)  2^-16 of the largest recorded magnitude up to t, in f32     (more where products are narrower), or a quantum of the metric
//! ```
//!
//! - S is a running maximum: perturbations grow, and that four runs meet at one step says nothing of a fifth.
//! - 8: for four independent normal values and a fifth, |x5 - x1| exceeds 8 times the range of the four with probability 0.0005 (0.002 for
//!   Student's t with 3 degrees of freedom, by simulation: `tests` below). ADR 218 has the derivation.
//! - F: in the first steps the four runs may have equal bits, while another device already adds in another order.
//! - A metric whose values are all multiples of a quantum, as an accuracy is, may differ by two of them.
//!
//! The envelope is a statement of its author, as the log is: [`Envelope::half_width`] says how much it allows.

use crate::error::{Error, Result};
use crate::metrics_log::MetricsLog;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Version of the JSON form.
const SCHEMA: u64 = 1;
/// Perturbed runs that are needed at least.
pub const PERTURBED_RUNS: usize = 3;
/// The factor of the spread.
const FACTOR: f64 = 8.0;
/// Consecutive steps of the grid differ by this factor, once they are further apart than 1.
const GRID: f64 = 1.04;

/// How far each metric of a run may move.
#[derive(Default, Clone, PartialEq, Debug)]
pub struct Envelope {
    /// The precision of the run's products, on which the bound of the first steps depends.
    pub precision: String,
    /// The number of runs that were measured, the original included.
    pub runs: usize,
    pub metrics: BTreeMap<String, Band>,
}

/// What the runs of an envelope had of one metric, on a grid of steps.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct Band {
    pub points: Vec<Point>,
    /// The number of which all values are multiples, if there is one.
    pub quantum: Option<f64>,
}

/// A step of the grid.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Point {
    pub step: u64,
    /// The lowest and the highest value of the runs; NaN if one of them has no number there.
    pub low: f64,
    pub high: f64,
    /// The largest range of the runs at any step up to this one; infinite once a run had no number where the original had one.
    pub spread: f64,
}

/// How two logs compare.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Every value is equal.
    SameBits,
    /// Values differ, and all are within the envelope.
    Within,
    /// A value is outside the envelope, or missing.
    Outside,
}

/// A value that differs from the record.
#[derive(Clone, PartialEq, Debug)]
pub struct Deviation {
    pub step: u64,
    pub metric: String,
    /// `None` where a log has no value, NaN where the value is no number.
    pub recorded: Option<f64>,
    pub found: Option<f64>,
    /// How far the value may be from the recorded one.
    pub allowed: f64,
}

/// The result of [`Envelope::compare`].
#[derive(Clone, PartialEq, Debug)]
pub struct Comparison {
    pub verdict: Verdict,
    /// The number of values that were compared.
    pub values: u64,
    /// The first value that differs at all, by step.
    pub first_difference: Option<Deviation>,
    /// The first value outside the envelope, by step.
    pub first_outside: Option<Deviation>,
}

impl Envelope {
    /// Measures an envelope: `original` is the log of the recorded run, `perturbed` those of runs that began with weights changed by one
    /// ulp, and `precision` that of the run (`f32`, `tf32`, `bf16`, `fp16`, `fp8`).
    ///
    /// # Errors
    /// There are fewer than three perturbed runs, or the original has no metrics.
    pub fn measure(original: &MetricsLog, perturbed: &[MetricsLog], precision: &str) -> Result<Envelope> {
        if perturbed.len() < PERTURBED_RUNS {
            let n = perturbed.len();
            return Err(Error::Usage(format!(
                "an envelope needs {PERTURBED_RUNS} perturbed runs; {n} were given\n  hint: run the recipe with --perturb 1, 2 and 3"
            )));
        }
        if original.by_name.is_empty() {
            return Err(Error::Usage("an envelope needs the metrics of the original run; its log has none".into()));
        }
        let band = |(name, series): (&String, &BTreeMap<u64, f64>)| {
            let others: Vec<_> = perturbed.iter().map(|log| log.by_name.get(name)).collect();
            (name.clone(), Band::measure(series, &others))
        };
        let metrics = original.by_name.iter().map(band).collect();
        Ok(Envelope { precision: precision.into(), runs: perturbed.len() + 1, metrics })
    }

    /// Compares a log with the recorded one, step by step and metric by metric. To compare a part of a run, cut both logs with
    /// [`MetricsLog::until`].
    pub fn compare(&self, recorded: &MetricsLog, found: &MetricsLog) -> Comparison {
        let (mut values, mut first_difference, mut first_outside) = (0, None, None);
        let names: BTreeSet<&String> = recorded.by_name.keys().chain(found.by_name.keys()).collect();
        let none = BTreeMap::new();
        for name in names {
            let (a, b) = (recorded.by_name.get(name).unwrap_or(&none), found.by_name.get(name).unwrap_or(&none));
            let mut scale = 0.0;
            let steps: BTreeSet<&u64> = a.keys().chain(b.keys()).collect();
            for step in steps {
                values += 1;
                let (x, y) = (a.get(step).copied(), b.get(step).copied());
                scale = x.filter(|x| x.is_finite()).map_or(scale, |x| x.abs().max(scale));
                if same(x, y) {
                    continue;
                }
                let allowed = self.width(name, *step, scale);
                let within = x.zip(y).is_some_and(|(x, y)| allowed == f64::INFINITY || (x - y).abs() <= allowed);
                let deviation = Deviation { step: *step, metric: name.clone(), recorded: x, found: y, allowed };
                if !within {
                    keep_first(&mut first_outside, &deviation);
                }
                keep_first(&mut first_difference, &deviation);
            }
        }
        let verdict = match (&first_difference, &first_outside) {
            (None, _) => Verdict::SameBits,
            (Some(_), None) => Verdict::Within,
            (Some(_), Some(_)) => Verdict::Outside,
        };
        Comparison { verdict, values, first_difference, first_outside }
    }

    /// Returns how far a metric may be from its recorded value at a step.
    pub fn half_width(&self, recorded: &MetricsLog, metric: &str, step: u64) -> f64 {
        let series = recorded.by_name.get(metric).into_iter().flat_map(|s| s.range(..=step));
        let scale = series.map(|(_, v)| v.abs()).filter(|v| v.is_finite()).fold(0.0, f64::max);
        self.width(metric, step, scale)
    }

    /// `scale` is the largest recorded magnitude up to the step.
    fn width(&self, metric: &str, step: u64, scale: f64) -> f64 {
        let band = self.metrics.get(metric);
        let quantum = band.and_then(|b| b.quantum).map_or(0.0, |q| 2.0 * q * (1.0 + 1e-6));
        FACTOR * band.map_or(0.0, |b| b.spread(step)) + (rounding(&self.precision) * scale).max(quantum)
    }

    /// Returns the envelope as JSON. A band is four lists of equal length, with `null` for a value that is no number or has no bound.
    pub fn json(&self) -> Value {
        let list = |band: &Band, of: fn(&Point) -> f64| band.points.iter().map(|p| number(of(p))).collect::<Value>();
        let one = |band: &Band| {
            let steps: Value = band.points.iter().map(|p| Value::from(p.step)).collect();
            let mut out = json!({
                "steps": steps, "low": list(band, |p| p.low), "high": list(band, |p| p.high), "spread": list(band, |p| p.spread),
            });
            if let Some(quantum) = band.quantum {
                out["quantum"] = number(quantum);
            }
            out
        };
        let metrics: Map<String, Value> = self.metrics.iter().map(|(name, band)| (name.clone(), one(band))).collect();
        json!({ "schema": SCHEMA, "precision": self.precision, "runs": self.runs, "metrics": metrics })
    }

    /// Reads an envelope from its JSON form.
    ///
    /// # Errors
    /// It is not the envelope of a run; the error names the field and the rule.
    pub fn of_json(value: &Value) -> Result<Envelope> {
        let wrong = |field: &str, rule: &str| Error::Refused(format!("envelope: {field}: {rule}"));
        if value["schema"].as_u64() != Some(SCHEMA) {
            return Err(wrong("schema", &format!("is {}; this version reads {SCHEMA}", value["schema"])));
        }
        let precision = value["precision"].as_str().ok_or_else(|| wrong("precision", "must be a text"))?;
        let runs = value["runs"].as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| *n > PERTURBED_RUNS);
        let runs = runs.ok_or_else(|| wrong("runs", &format!("must be a number above {PERTURBED_RUNS}")))?;
        let metrics = value["metrics"].as_object().ok_or_else(|| wrong("metrics", "must be an object"))?;
        let metrics = metrics.iter().map(|(name, band)| {
            let band = Band::of_json(band).map_err(|rule| wrong(&format!("metrics.{name}"), &rule))?;
            Ok((name.clone(), band))
        });
        Ok(Envelope { precision: precision.into(), runs, metrics: metrics.collect::<Result<_>>()? })
    }
}

impl Band {
    fn measure(original: &BTreeMap<u64, f64>, others: &[Option<&BTreeMap<u64, f64>>]) -> Band {
        let (mut points, mut spread, mut next) = (Vec::new(), 0.0f64, 0);
        let last = original.keys().next_back().copied().unwrap_or(0);
        for (step, value) in original {
            let values = others.iter().map(|o| o.and_then(|o| o.get(step)).copied().unwrap_or(f64::NAN));
            let (mut low, mut high, mut absent) = (*value, *value, value.is_nan());
            for v in values {
                (low, high, absent) = (low.min(v), high.max(v), absent | v.is_nan());
            }
            if absent {
                (low, high) = (f64::NAN, f64::NAN);
            }
            spread = match absent {
                // All runs have no number here.
                true if value.is_nan()
                    && others.iter().all(|o| o.and_then(|o| o.get(step)).is_some_and(|v| v.is_nan())) =>
                {
                    spread
                }
                true => f64::INFINITY,
                false => spread.max(high - low),
            };
            if *step >= next || *step == last {
                points.push(Point { step: *step, low, high, spread });
                next = (step + 1).max((*step as f64 * GRID).ceil() as u64);
            }
        }
        let values = original.values().chain(others.iter().flatten().flat_map(|o| o.values()));
        Band { points, quantum: quantum(values.copied()) }
    }

    /// Returns the spread at a step: that of the next point of the grid, which includes all steps before it.
    fn spread(&self, step: u64) -> f64 {
        let at = self.points.partition_point(|p| p.step < step);
        self.points.get(at).or(self.points.last()).map_or(0.0, |p| p.spread)
    }

    fn of_json(value: &Value) -> std::result::Result<Band, String> {
        let list = |key: &str| value[key].as_array().ok_or_else(|| format!("{key}: must be a list"));
        let parse = |v: &Value, absent: f64| if v.is_null() { Some(absent) } else { v.as_f64() };
        let (steps, low, high, spread) = (list("steps")?, list("low")?, list("high")?, list("spread")?);
        if [low, high, spread].iter().any(|l| l.len() != steps.len()) {
            return Err("steps, low, high and spread: must have equal lengths".into());
        }
        let mut points: Vec<Point> = Vec::new();
        for (k, step) in steps.iter().enumerate() {
            let parts =
                (step.as_u64(), parse(&low[k], f64::NAN), parse(&high[k], f64::NAN), parse(&spread[k], f64::INFINITY));
            let (Some(step), Some(low), Some(high), Some(spread)) = parts else {
                return Err(format!("element {k}: must be a number"));
            };
            let before = points.last().map_or((0, 0.0), |p| (p.step + 1, p.spread));
            if step < before.0 || spread < before.1 || low > high {
                return Err(format!(
                    "element {k}: steps must increase, spreads must not decrease, and low be at most high"
                ));
            }
            points.push(Point { step, low, high, spread });
        }
        let quantum = value.get("quantum").map(|q| q.as_f64().filter(|q| *q > 0.0).ok_or("quantum: must be above 0"));
        Ok(Band { points, quantum: quantum.transpose()? })
    }
}

/// Returns the part of a metric's magnitude that another order of sums may change. Sums in f32 have many terms; products in a narrower
/// format are added in f32 and averaged over samples, so that few roundings of that format remain.
fn rounding(precision: &str) -> f64 {
    match precision {
        "fp8" => 2f64.powi(-4),
        "bf16" => 2f64.powi(-7),
        "fp16" | "tf32" => 2f64.powi(-9),
        _ => 2f64.powi(-16),
    }
}

/// The number of different values from which a quantum is inferred, and the largest multiple of it.
const FEWEST: usize = 3;
const LARGEST: f64 = 1e6;

/// Returns the smallest distance of two values, if all values are multiples of it.
fn quantum(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut all: Vec<f64> = values.filter(|v| v.is_finite()).collect();
    all.sort_by(f64::total_cmp);
    // Values of f32 whose text was rounded differ in their last digits.
    let near = |a: f64, b: f64| (a - b).abs() <= 2f64.powi(-22) * a.abs().max(b.abs());
    all.dedup_by(|a, b| near(*a, *b));
    let gap = all.windows(2).map(|w| w[1] - w[0]).fold(f64::INFINITY, f64::min);
    let fits = |v: &f64| (v / gap).abs() <= LARGEST && (v / gap - (v / gap).round()).abs() < 1e-3;
    (all.len() >= FEWEST && gap.is_finite() && all.iter().all(fits)).then_some(gap)
}

/// Returns a number with all its digits; null for NaN and infinities.
fn number(v: f64) -> Value {
    serde_json::Number::from_f64(v).map_or(Value::Null, Value::Number)
}

/// Whether two values have the same bits; NaN equals NaN.
fn same(a: Option<f64>, b: Option<f64>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()),
        (a, b) => a.is_none() && b.is_none(),
    }
}

/// Keeps the deviation of the lower step; of equal steps the one that came first.
fn keep_first(first: &mut Option<Deviation>, found: &Deviation) {
    if first.as_ref().is_none_or(|f| found.step < f.step) {
        *first = Some(found.clone());
    }
}

impl Deviation {
    /// Returns the deviation as JSON; `allowed` is null where there is no bound.
    pub fn json(&self) -> Value {
        let value = |v: Option<f64>| v.map_or(Value::Null, number);
        json!({
            "step": self.step, "metric": self.metric, "recorded": value(self.recorded), "found": value(self.found),
            "allowed": number(self.allowed),
        })
    }
}

/// Formats `step 12: loss is 0.5, recorded 0.25, at most 0.01 apart`.
impl fmt::Display for Deviation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let show = |v: Option<f64>| v.map_or("missing".into(), |v| v.to_string());
        let (found, recorded) = (show(self.found), show(self.recorded));
        write!(f, "step {}: {} is {found}, recorded {recorded}", self.step, self.metric)?;
        if self.found.is_some() && self.recorded.is_some() {
            write!(f, ", at most {:.3e} apart", self.allowed)?;
        }
        Ok(())
    }
}

impl Verdict {
    /// Returns the name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::SameBits => "same bits",
            Verdict::Within => "within the envelope",
            Verdict::Outside => "outside the envelope",
        }
    }
}

impl Comparison {
    /// Returns the comparison as JSON.
    pub fn json(&self) -> Value {
        let one = |d: &Option<Deviation>| d.as_ref().map_or(Value::Null, Deviation::json);
        json!({
            "verdict": self.verdict.name(), "values": self.values, "first_difference": one(&self.first_difference),
            "first_outside": one(&self.first_outside),
        })
    }
}

#[cfg(test)]
mod tests;
