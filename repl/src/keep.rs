//! Which checkpoints stay: the last few, every so many steps, the best by a metric. `recipe.keep` says it too; the command
//! line goes before.

use crate::failure::Failure;
use perilune_checkpoint::{Keep, SHARD_LIMIT};
use perilune_core::error::did_you_mean;
use perilune_lua::Run;
use serde_json::{Value, json};

#[derive(clap::Args, Clone, Debug)]
pub struct KeepArgs {
    /// Keep the last N checkpoints, 3 by default; 0 keeps all
    #[arg(long, value_name = "N")]
    keep: Option<usize>,
    /// Keep every checkpoint whose step is a multiple of N, too
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    keep_every: Option<u64>,
    /// Keep the best by a metric of an evaluation, too, and write one when it gets better: valid/loss, valid/accuracy:max
    #[arg(long, value_name = "METRIC[:max]")]
    keep_best: Option<String>,
    /// Cut files of checkpoints that would be larger into shards with an index (5GB, 512M, …)
    #[arg(long, value_name = "SIZE", value_parser = size, default_value_t = SHARD_LIMIT, hide_default_value = true)]
    pub shard_size: u64,
}

/// Bytes, in the grammar of every other amount of memory.
pub fn size(text: &str) -> Result<u64, String> {
    perilune_core::byte_size::amount(text).map(|n| n as u64)
}

/// The best checkpoint by a metric.
#[derive(Clone, PartialEq, Debug)]
pub struct Best {
    split: String,
    metric: String,
    max: bool,
    at: Option<(u64, f64)>,
    warned: bool,
}

impl Best {
    fn parse(text: &str, max: Option<bool>, from: &str) -> Result<Best, Failure> {
        let (name, mode) = match text.rsplit_once(':') {
            Some((name, "max")) => (name, Some(true)),
            Some((name, "min")) => (name, Some(false)),
            _ => (text, None),
        };
        let Some((split, metric)) = name.split_once('/').filter(|(s, m)| !s.is_empty() && !m.is_empty()) else {
            return Err(Failure::Usage(format!(
                "{from}: '{text}' names no metric of an evaluation; write SPLIT/METRIC, as in valid/loss or valid/accuracy:max"
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

    /// What `run.json` says.
    pub fn record(&self) -> Value {
        let name = format!("{}/{}", self.split, self.metric);
        json!({ "metric": name, "max": self.max, "step": self.step(), "value": self.at.map(|a| a.1) })
    }

    /// With what a run that goes on has had, up to that step.
    pub fn recalled(mut self, said: Option<&Value>, step: u64) -> Best {
        let mine = self.record();
        if let Some(said) = said
            && said["metric"] == mine["metric"]
            && said["max"] == mine["max"]
            && let (Some(at), Some(value)) = (said["step"].as_u64(), said["value"].as_f64())
            && at <= step
        {
            self.at = Some((at, value));
        }
        self
    }

    pub fn forget_after(&mut self, step: u64) {
        self.at = self.at.filter(|a| a.0 <= step);
    }

    /// Looks at the metrics of an evaluation; a warning if they lack the one that is asked for.
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

impl KeepArgs {
    /// The options, and whether each was given.
    pub fn given(&self) -> [(&'static str, bool); 4] {
        [
            ("--keep", self.keep.is_some()),
            ("--keep-every", self.keep_every.is_some()),
            ("--keep-best", self.keep_best.is_some()),
            ("--shard-size", self.shard_size != SHARD_LIMIT),
        ]
    }

    /// What stays, by the command line, else by the recipe, else the last three.
    pub fn choose(&self, run: &Run) -> Result<(Keep, Option<Best>), Failure> {
        let said = run.keep();
        let keep =
            Keep { last: self.keep.or(said.last).unwrap_or(3), every: self.keep_every.or(said.every).unwrap_or(0) };
        let best = match (&self.keep_best, &said.best) {
            (Some(text), _) => Some(Best::parse(text, None, "--keep-best")?),
            (None, Some(text)) => Some(Best::parse(text, said.max, "recipe.keep.best")?),
            _ => None,
        };
        if let Some(best) = &best
            && !run.has_split(&best.split)
        {
            let splits = run.splits();
            let near = did_you_mean(&best.split, splits.iter().map(String::as_str));
            let near = near.map(|n| format!("; did you mean {n}/{}?", best.metric)).unwrap_or_default();
            return Err(Failure::Usage(format!(
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
    fn sizes() {
        let of = |text| size(text).ok();
        assert_eq!((of("5GB"), of("1GiB"), of("12")), (Some(5_000_000_000), Some(1 << 30), Some(12)));
        assert_eq!((of("0.5KB"), of("0"), of("x"), of("-1MB")), (Some(500), None, None, None));
        assert_eq!((of("512M"), of("512MiB"), of("2gib")), (Some(512 << 20), Some(512 << 20), Some(2 << 30)));
    }

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
        let said = b.see(1, "valid", &values(1.0)).expect("a warning");
        assert!(said.contains("has no 'acuracy', but loss, accuracy; did you mean valid/accuracy?"), "{said}");
        assert_eq!(b.see(2, "valid", &values(1.0)), None, "once");
        assert!(Best::parse("loss", None, "--keep-best").is_err());
    }
}
