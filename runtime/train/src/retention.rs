//! Decides which checkpoints are kept: the last few, every so many steps, the best by a metric. Options of the caller
//! override those of `recipe.keep`.

use crate::error::{Error, Result};
use perilune_checkpoint::{Keep, SHARD_LIMIT};
use perilune_core::error::did_you_mean;
use perilune_lua::Run;
use serde_json::{Value, json};

/// The options of the caller; `None` leaves the choice to the recipe.
#[derive(Clone, Debug)]
pub struct Retention {
    /// Keep this many of the last checkpoints; 0 keeps all.
    pub last: Option<usize>,
    /// Keep every checkpoint whose step is a multiple of this.
    pub every: Option<u64>,
    /// Keep the best by a metric of an evaluation, as in `valid/loss` or `valid/accuracy:max`.
    pub best: Option<String>,
    /// Files larger than this are cut into shards.
    pub shard_size: u64,
}

impl Default for Retention {
    fn default() -> Retention {
        Retention { last: None, every: None, best: None, shard_size: SHARD_LIMIT }
    }
}

/// Tracks the best checkpoint by a metric.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Best {
    split: String,
    metric: String,
    max: bool,
    at: Option<(u64, f64)>,
    warned: bool,
}

impl Best {
    fn parse(text: &str, max: Option<bool>, from: &str) -> Result<Best> {
        let (name, mode) = match text.rsplit_once(':') {
            Some((name, "max")) => (name, Some(true)),
            Some((name, "min")) => (name, Some(false)),
            _ => (text, None),
        };
        let Some((split, metric)) = name.split_once('/').filter(|(s, m)| !s.is_empty() && !m.is_empty()) else {
            return Err(Error::Usage(format!(
                "{from}: '{text}' is not a metric of an evaluation; write SPLIT/METRIC, as in valid/loss or valid/accuracy:max"
            )));
        };
        let max = mode.or(max).unwrap_or(false);
        Ok(Best { split: split.into(), metric: metric.into(), max, at: None, warned: false })
    }

    pub fn name(&self) -> (&str, &str, bool) {
        (&self.split, &self.metric, self.max)
    }

    pub fn step(&self) -> Option<u64> {
        self.at.map(|a| a.0)
    }

    /// Returns the entry of `run.json`.
    pub fn record(&self) -> Value {
        let name = format!("{}/{}", self.split, self.metric);
        json!({ "metric": name, "max": self.max, "step": self.step(), "value": self.at.map(|a| a.1) })
    }

    /// Restores the best checkpoint up to `step` from the record of a resumed run, if it is by the same metric.
    pub fn recalled(mut self, recorded: Option<&Value>, step: u64) -> Best {
        let mine = self.record();
        if let Some(recorded) = recorded
            && recorded["metric"] == mine["metric"]
            && recorded["max"] == mine["max"]
            && let (Some(at), Some(value)) = (recorded["step"].as_u64(), recorded["value"].as_f64())
            && at <= step
        {
            self.at = Some((at, value));
        }
        self
    }

    pub fn forget_after(&mut self, step: u64) {
        self.at = self.at.filter(|a| a.0 <= step);
    }

    /// Compares the metrics of an evaluation with the best; returns a warning if they lack the chosen one.
    pub fn see(&mut self, step: u64, split: &str, values: &[(String, f64)]) -> Option<String> {
        if split != self.split {
            return None;
        }
        let Some((_, value)) = values.iter().find(|(name, _)| *name == self.metric) else {
            if std::mem::replace(&mut self.warned, true) {
                return None;
            }
            let names: Vec<&str> = values.iter().map(|v| v.0.as_str()).collect();
            let near = did_you_mean(&self.metric, names.iter().copied());
            let near = near.map(|n| format!("; did you mean {split}/{n}?")).unwrap_or_default();
            return Some(format!(
                "the best checkpoint is not kept: the evaluation of {split} has no '{}', but {}{near}",
                self.metric,
                names.join(", ")
            ));
        };
        let better = match self.at {
            None => !value.is_nan(),
            Some((_, best)) => {
                if self.max {
                    *value > best
                } else {
                    *value < best
                }
            }
        };
        if better {
            self.at = Some((step, *value));
        }
        None
    }
}

impl Retention {
    /// Lists the options by name, and whether each was given.
    pub(crate) fn given(&self) -> [(&'static str, bool); 4] {
        [
            ("--keep", self.last.is_some()),
            ("--keep-every", self.every.is_some()),
            ("--keep-best", self.best.is_some()),
            ("--shard-size", self.shard_size != SHARD_LIMIT),
        ]
    }

    /// Returns the policy: of the caller, else of the recipe, else the last three.
    pub(crate) fn choose(&self, run: &Run) -> Result<(Keep, Option<Best>)> {
        let recipe = run.keep();
        let keep =
            Keep { last: self.last.or(recipe.last).unwrap_or(3), every: self.every.or(recipe.every).unwrap_or(0) };
        let best = match (&self.best, &recipe.best) {
            (Some(text), _) => Some(Best::parse(text, None, "--keep-best")?),
            (None, Some(text)) => Some(Best::parse(text, recipe.max, "recipe.keep.best")?),
            _ => None,
        };
        if let Some(best) = &best
            && !run.has_split(&best.split)
        {
            let splits = run.splits();
            let near = did_you_mean(&best.split, splits.iter().map(String::as_str));
            let near = near.map(|n| format!("; did you mean {n}/{}?", best.metric)).unwrap_or_default();
            return Err(Error::Usage(format!(
                "keep the best by {}/{}: the data has no split '{}', but {}{near}",
                best.split,
                best.metric,
                best.split,
                splits.join(", ")
            )));
        }
        Ok((keep, best))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_is_the_smallest_or_the_largest() {
        let values = |x: f64| vec![("loss".to_string(), x), ("accuracy".to_string(), -x)];
        for (text, best) in [("valid/loss", 2), ("valid/accuracy:max", 2), ("valid/accuracy", 3), ("valid/loss:max", 3)]
        {
            let mut b = Best::parse(text, None, "--keep-best").expect("a metric");
            for (step, x) in [(1, 5.0), (2, 1.0), (3, 9.0), (4, f64::NAN), (5, 5.0)] {
                assert_eq!(b.see(step, "valid", &values(x)), None);
                assert_eq!(b.see(step, "test", &values(-99.0)), None);
            }
            assert_eq!(b.step(), Some(best), "{text}");
            let again = Best::parse(text, None, "--keep-best").expect("a metric").recalled(Some(&b.record()), 5);
            assert_eq!(again.at, b.at);
            assert_eq!(again.recalled(None, 5).at, b.at);
        }
        let mut b = Best::parse("valid/acuracy", None, "--keep-best").expect("a metric");
        let warning = b.see(1, "valid", &values(1.0)).expect("a warning");
        assert!(warning.contains("has no 'acuracy', but loss, accuracy; did you mean valid/accuracy?"), "{warning}");
        assert_eq!(b.see(2, "valid", &values(1.0)), None, "once");
        assert!(Best::parse("loss", None, "--keep-best").is_err());
    }
}
