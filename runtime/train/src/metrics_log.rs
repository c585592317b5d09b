//! Reads `metrics.jsonl` as series: for each metric the value at every step that has one.
//!
//! Steps and evaluations are read; what a recipe logs itself (`run:log`) is not, since it may hold times. Of a step that was taken
//! again the last value counts. Seals are not checked here.

use crate::error::{Error, Result};
use crate::log_lines::{check_names, for_each_line, values};
use perilune_policy::Directory;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// The most values of a log. A map filled in order of its keys takes about 33 bytes for each.
const MAX_VALUES: usize = 32 << 20;

/// The metrics of a run by name (`loss`, `grad_norm`, `valid/loss`), each by step. NaN stands for NaN and infinities.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct MetricsLog {
    pub by_name: BTreeMap<String, BTreeMap<u64, f64>>,
}

impl MetricsLog {
    /// Reads the log of the run in `dir`; a run without one has no metrics.
    ///
    /// # Errors
    /// The log cannot be read, a line of it is longer than 16 MiB, or it has more than 10,000 metrics or 2^25 values.
    pub fn read(dir: &Path) -> Result<MetricsLog> {
        let (mut out, mut count) = (MetricsLog::default(), 0);
        for_each_line(&Directory::open(dir)?, |line| out.add(line, &mut count))?;
        Ok(out)
    }

    /// Adds a line to a log that has had `count` values so far, those of steps that were taken again included.
    fn add(&mut self, line: &[u8], count: &mut usize) -> Result<()> {
        let Ok(event) = serde_json::from_slice::<Value>(line) else { return Ok(()) };
        let (Some(step), Some(kind)) = (event["step"].as_u64(), event["event"].as_str()) else { return Ok(()) };
        if !matches!(kind, "step" | "eval") {
            return Ok(());
        }
        for (name, value) in values(&event) {
            *count += 1;
            if *count > MAX_VALUES {
                return Err(Error::Refused(format!("metrics.jsonl has more than {MAX_VALUES} values of steps")));
            }
            match self.by_name.get_mut(name) {
                Some(series) => drop(series.insert(step, value)),
                None => {
                    check_names(self.by_name.len())?;
                    self.by_name.insert(name.into(), BTreeMap::from([(step, value)]));
                }
            }
        }
        Ok(())
    }

    /// Returns the log up to a step.
    #[must_use]
    pub fn until(&self, step: u64) -> MetricsLog {
        let cut = |series: &BTreeMap<u64, f64>| series.range(..=step).map(|(at, v)| (*at, *v)).collect();
        let by_name = self.by_name.iter().map(|(name, series)| (name.clone(), cut(series)));
        MetricsLog { by_name: by_name.filter(|(_, series): &(_, BTreeMap<_, _>)| !series.is_empty()).collect() }
    }

    /// Returns the last step that has a value; 0 if none has.
    pub fn last_step(&self) -> u64 {
        self.by_name.values().filter_map(|series| series.keys().next_back()).copied().max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run_log::METRICS;

    #[test]
    fn a_log_with_too_many_metrics_is_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let write = |from: usize, to: usize| {
            let names: Vec<String> = (from..to).map(|k| format!("\"m{k}\":1")).collect();
            format!("{{\"event\":\"eval\",\"step\":1,\"metrics\":{{{}}}}}\n", names.join(","))
        };
        std::fs::write(dir.path().join(METRICS), write(0, 6000) + &write(4000, 10_000)).expect("written");
        assert_eq!(MetricsLog::read(dir.path()).expect("read").by_name.len(), 10_000);
        std::fs::write(dir.path().join(METRICS), write(0, 6000) + &write(4000, 10_001)).expect("written");
        let rule = MetricsLog::read(dir.path()).expect_err("refused").to_string();
        assert!(rule.contains("more than 10000 metrics") && rule.contains("hint: "), "{rule}");
    }
}
