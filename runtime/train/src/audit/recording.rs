//! Reads what a run directory records of a run: the events of each step, the evaluations, the sample log, the checkpoints.

use super::windows;
use crate::error::{Error, Result};
use crate::resume::record_of;
use crate::run_log::{self, METRICS};
use crate::rundir::{LogTail, up_to};
use crate::sample_file::{self, SAMPLES};
use perilune_checkpoint::{CHECKPOINTS, Found, Snapshot, list_in, read_in};
use perilune_data::sample_log::SampleLog;
use perilune_policy::Directory;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

/// A recorded run, whose seals have been checked.
pub struct Recording {
    dir: Directory,
    record: Map<String, Value>,
    metrics: String,
    /// The lines of the steps, and those of the evaluations after a step.
    steps: BTreeMap<u64, Range<usize>>,
    evaluations: BTreeMap<u64, Vec<Range<usize>>>,
    /// The steps at which the run took a checkpoint; it may have been removed since.
    taken: BTreeSet<u64>,
    checkpoints: Vec<Found>,
    end: u64,
}

impl Recording {
    /// Reads the record of the run in `dir`.
    ///
    /// # Errors
    /// A file is missing, damaged, or its seals do not fit it.
    pub fn read(dir: &Path) -> Result<Recording> {
        let record = record_of(dir)?;
        let dir = Directory::open(dir)?;
        let metrics = run_log::text(&dir, METRICS)?;
        run_log::verify(dir.path(), METRICS, &metrics, &record, run_log::stood(&record, METRICS))?;
        let (mut steps, mut evaluations, mut taken) =
            (BTreeMap::new(), BTreeMap::<u64, Vec<_>>::new(), BTreeSet::new());
        let mut at = 0;
        for line in run_log::complete(&metrics) {
            let range = at..at + line.len();
            at = range.end + 1;
            let event: Value = serde_json::from_str(line).unwrap_or_default();
            let Some(step) = event["step"].as_u64() else { continue };
            match event["event"].as_str() {
                Some("step") => drop(steps.insert(step, range)),
                Some("eval") => evaluations.entry(step).or_default().push(range),
                Some("checkpoint") => drop(taken.insert(step)),
                _ => {}
            }
        }
        let mut checkpoints = match dir.subdirectory(CHECKPOINTS) {
            Ok(inside) => list_in(&inside)?,
            Err(e) if e.is_not_found() => Vec::new(),
            Err(e) => return Err(e.into()),
        };
        let last = steps.keys().next_back().copied().unwrap_or(0);
        let done = record.get("steps_done").and_then(Value::as_u64);
        // A run that was killed has no end; what it has logged can be compared.
        let end = done.unwrap_or_else(|| checkpoints.last().map_or(last, |f| f.step.max(last)));
        // A resume may have left later ones.
        checkpoints.retain(|f| f.step <= end);
        taken.extend(checkpoints.iter().map(|f| f.step));
        Ok(Recording { dir, record, metrics, steps, evaluations, taken, checkpoints, end })
    }

    /// Returns `run.json`.
    pub fn record(&self) -> &Map<String, Value> {
        &self.record
    }

    /// Returns the run directory.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn handle(&self) -> &Directory {
        &self.dir
    }

    /// Returns the last step of the record.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Returns the steps of the checkpoints that the directory has, in order.
    pub fn checkpoints(&self) -> Vec<u64> {
        self.checkpoints.iter().map(|f| f.step).collect()
    }

    /// Divides the run into windows between its checkpoints; see [`windows::partition`].
    pub fn windows(&self, length: Option<u64>) -> Vec<(u64, u64)> {
        windows::partition(&self.checkpoints(), self.end, length)
    }

    /// Whether the run took a checkpoint after this step, at which States that edits had dropped were freed.
    pub(crate) fn took_checkpoint(&self, step: u64) -> bool {
        self.taken.contains(&step)
    }

    pub(crate) fn has_checkpoint(&self, step: u64) -> bool {
        self.checkpoints.iter().any(|f| f.step == step)
    }

    /// Reads the checkpoint of a step, and checks its hashes and its place in the logs.
    pub(crate) fn checkpoint(&self, step: u64) -> Result<Snapshot> {
        let found = self.checkpoints.iter().find(|f| f.step == step);
        let found =
            found.ok_or_else(|| Error::System(format!("this is a bug: there is no checkpoint of step {step}")))?;
        let snapshot = read_in(&self.dir.subdirectory(CHECKPOINTS)?, found)?;
        let head = run_log::stood(&snapshot.record, METRICS);
        run_log::verify(self.path(), METRICS, &self.metrics, &self.record, head)?;
        Ok(snapshot)
    }

    fn event(&self, range: &Range<usize>) -> Value {
        self.metrics.get(range.clone()).and_then(|line| serde_json::from_str(line).ok()).unwrap_or_default()
    }

    /// Returns the event of a step, if it was logged.
    pub(crate) fn step(&self, step: u64) -> Option<Value> {
        self.steps.get(&step).map(|range| self.event(range))
    }

    /// Returns the metrics of the evaluations after a step, in their order.
    pub(crate) fn evaluations(&self, step: u64) -> Vec<Map<String, Value>> {
        let all = self.evaluations.get(&step).into_iter().flatten();
        all.filter_map(|range| self.event(range)["metrics"].as_object().cloned()).collect()
    }

    /// Returns what a run that continues after a step needs of the log.
    pub(crate) fn tail(&self, step: u64) -> LogTail {
        up_to(&self.metrics, step).1
    }

    /// Reads the sample log; none if the run has none.
    pub(crate) fn samples(&self) -> Result<Option<SampleLog>> {
        let bytes = sample_file::bytes(&self.dir)?;
        if bytes.is_empty() {
            return Ok(None);
        }
        let id = self.record.get("id").and_then(Value::as_str).unwrap_or_default();
        let head = run_log::stood(&self.record, SAMPLES);
        sample_file::read(&bytes, id, u64::MAX, head, &self.path().join(SAMPLES)).map(Some)
    }
}
