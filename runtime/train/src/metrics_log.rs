//! Reads `metrics.jsonl` as series: for each metric the value at every step that has one.
//!
//! Steps and evaluations are read; what a recipe logs itself (`run:log`) is not, since it may hold times. Of a step that was taken
//! again the last value counts. Seals are not checked here.

use crate::error::{Error, Result, disk};
use crate::run_log::METRICS;
use perilune_policy::Directory;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// The longest line that is read.
const MAX_LINE: u64 = 16 << 20;

/// The metrics of a run by name (`loss`, `grad_norm`, `valid/loss`), each by step. NaN stands for NaN and infinities.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct MetricsLog {
    pub by_name: BTreeMap<String, BTreeMap<u64, f64>>,
}

impl MetricsLog {
    /// Reads the log of the run in `dir`; a run without one has no metrics.
    ///
    /// # Errors
    /// The log cannot be read, or a line of it is longer than 16 MiB.
    pub fn read(dir: &Path) -> Result<MetricsLog> {
        let dir = Directory::open(dir)?;
        if !dir.has(METRICS)? {
            return Ok(MetricsLog::default());
        }
        let path = dir.path().join(METRICS);
        let file = dir.open_unlinked(Path::new(METRICS))?.into_file();
        MetricsLog::of(BufReader::with_capacity(1 << 20, file), &path)
    }

    /// Reads a log from any reader; errors name `path`.
    ///
    /// # Errors
    /// Those of [`MetricsLog::read`].
    pub fn of(mut from: impl BufRead, path: &Path) -> Result<MetricsLog> {
        let (mut out, mut line) = (MetricsLog::default(), Vec::new());
        loop {
            line.clear();
            let read = from.by_ref().take(MAX_LINE).read_until(b'\n', &mut line).map_err(disk("read", path))?;
            if read as u64 == MAX_LINE {
                return Err(Error::Refused(format!("{}: a line has more than {MAX_LINE} bytes", path.display())));
            }
            // A line without an end is still being written.
            if line.pop() != Some(b'\n') {
                return Ok(out);
            }
            out.add(&line);
        }
    }

    /// Parses the text of a log.
    pub fn parse(text: &str) -> MetricsLog {
        let mut out = MetricsLog::default();
        crate::run_log::complete(text).for_each(|line| out.add(line.as_bytes()));
        out
    }

    fn add(&mut self, line: &[u8]) {
        let Ok(event) = serde_json::from_slice::<Value>(line) else { return };
        let (Some(step), Some(kind)) = (event["step"].as_u64(), event["event"].as_str()) else { return };
        if !matches!(kind, "step" | "eval") {
            return;
        }
        let named = event["metrics"].as_object().into_iter().flatten().map(|(name, value)| (name.as_str(), value));
        let loss = event.get("loss").map(|value| ("loss", value));
        for (name, value) in named.chain(loss) {
            let Some(value) = (if value.is_null() { Some(f64::NAN) } else { value.as_f64() }) else { continue };
            match self.by_name.get_mut(name) {
                Some(series) => drop(series.insert(step, value)),
                None => drop(self.by_name.insert(name.into(), BTreeMap::from([(step, value)]))),
            }
        }
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
