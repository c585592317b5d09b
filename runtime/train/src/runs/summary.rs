//! Summarizes one run directory: what its record, its lock and its log say of the run.

use super::metrics::{Events, Extent, Goal, Metrics};
use super::varying;
use crate::claim::{Contents, contents};
use crate::error::Result;
use crate::numbers;
use crate::resume::record_of;
use crate::run_lock::RunLock;
use perilune_policy::Directory;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// The state of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Status {
    /// A process writes the directory now.
    Running,
    /// It took all its steps, or early stopping ended it.
    Finished,
    /// A signal, or the end of a breakpoint, ended it after a checkpoint; `--resume` continues it.
    Stopped,
    /// An error ended it.
    Failed,
    /// Its process was killed, or the machine failed.
    Interrupted,
    /// Its record cannot be read, or was changed.
    Damaged,
}

impl Status {
    pub const ALL: [Status; 6] =
        [Status::Running, Status::Finished, Status::Stopped, Status::Failed, Status::Interrupted, Status::Damaged];

    /// Returns the word for it.
    pub fn name(self) -> &'static str {
        match self {
            Status::Running => "running",
            Status::Finished => "finished",
            Status::Stopped => "stopped",
            Status::Failed => "failed",
            Status::Interrupted => "interrupted",
            Status::Damaged => "damaged",
        }
    }
}

/// A run directory as it is now.
#[derive(Clone, Debug)]
pub struct RunSummary {
    pub dir: PathBuf,
    /// `run.json`; empty where it cannot be read.
    pub record: Map<String, Value>,
    pub status: Status,
    /// The error of a failed run, or what is wrong with a damaged one.
    pub error: Option<String>,
    pub metrics: Metrics,
}

impl RunSummary {
    /// Reads the directory; `None` if it does not hold a run.
    ///
    /// # Errors
    /// The directory cannot be opened.
    pub fn read(dir: &Path) -> Result<Option<RunSummary>> {
        let handle = Directory::open(dir)?;
        let mut out = RunSummary {
            dir: dir.to_path_buf(),
            record: Map::new(),
            status: Status::Damaged,
            error: None,
            metrics: Metrics::default(),
        };
        match contents(&handle) {
            Ok(Contents::Nothing | Contents::Foreign) => return Ok(None),
            Ok(Contents::Incomplete) => {}
            Ok(Contents::Run(record)) => out.record = record,
            Err(e) => out.error = Some(e.to_string()),
        }
        if out.error.is_none() {
            // The lock first: a run that ends meanwhile is seen as running, never as killed.
            let held = RunLock::is_held(&handle);
            match (out.record.is_empty(), record_of(dir)) {
                (false, Err(e)) => out.error = Some(e.to_string()),
                (false, Ok(record)) => out.record = record,
                (true, _) => {}
            }
            out.status = match &out.error {
                Some(_) => Status::Damaged,
                // A process may have begun since.
                None => match status(&out.record, held) {
                    Status::Interrupted => status(&out.record, RunLock::is_held(&handle)),
                    status => status,
                },
            };
        }
        match Metrics::read(&handle, Events::Evaluations) {
            // A run without evaluations is judged by its steps.
            Ok(metrics) if metrics.by_name.is_empty() => {
                out.metrics = Metrics::read(&handle, Events::All).unwrap_or(metrics);
            }
            Ok(metrics) => out.metrics = metrics,
            Err(e) => (out.status, out.error) = (Status::Damaged, out.error.or_else(|| Some(e.to_string()))),
        }
        if out.status == Status::Failed {
            out.error = out.text("error").map(String::from);
        }
        Ok(Some(out))
    }

    /// Reads the metrics of steps too, besides those of evaluations.
    ///
    /// # Errors
    /// The log cannot be read.
    pub fn read_steps(&mut self) -> Result<()> {
        self.metrics = Metrics::read(&Directory::open(&self.dir)?, Events::All)?;
        Ok(())
    }

    fn text(&self, key: &str) -> Option<&str> {
        self.record.get(key).and_then(Value::as_str)
    }

    /// Returns the name of its directory.
    pub fn name(&self) -> String {
        let full =
            if self.dir.file_name().is_some() { self.dir.clone() } else { self.dir.canonicalize().unwrap_or_default() };
        full.file_name().map_or_else(|| self.dir.display().to_string(), |n| n.to_string_lossy().into_owned())
    }

    /// Returns the name of its recipe.
    pub fn recipe(&self) -> Option<&str> {
        self.text("recipe")
    }

    /// Returns when it was started.
    pub fn started(&self) -> Option<jiff::Timestamp> {
        self.text("started")?.parse().ok()
    }

    /// Returns when it was started, in the time of that machine, as in `2026-11-27 09:15`.
    pub fn started_text(&self) -> Option<String> {
        Some(self.text("started")?.get(..16)?.replace('T', " "))
    }

    /// Returns the last step that is known of.
    pub fn step(&self) -> u64 {
        match self.metrics.step {
            0 => self.record.get("steps_done").and_then(Value::as_u64).unwrap_or(0),
            step => step,
        }
    }

    /// Returns the number of steps that it has been asked for.
    pub fn steps(&self) -> Option<u64> {
        self.record.get("steps").and_then(Value::as_u64)
    }

    /// Returns the metric by which it is judged: that of its best checkpoint, else the loss of an evaluation, any metric of one,
    /// or the loss of its steps.
    pub fn goal(&self) -> Option<Goal> {
        let known = &self.metrics.by_name;
        if let Some(goal) = Goal::of_record(&self.record).filter(|goal| known.contains_key(&goal.metric)) {
            return Some(goal);
        }
        let evaluated = || known.keys().filter(|name| name.contains('/'));
        let first = known.get_key_value("valid/loss").map(|(name, _)| name);
        let first = first.or_else(|| evaluated().find(|name| name.ends_with("/loss"))).or_else(|| evaluated().next());
        let first = first.or_else(|| known.get_key_value("loss").map(|(name, _)| name));
        first.map(|name| Goal::parse(name))
    }

    /// Returns a metric.
    pub fn metric(&self, name: &str) -> Option<Extent> {
        self.metrics.by_name.get(name).copied()
    }

    /// Returns the event `run` of `--json`. `goal` is the metric of the field `best`, `varying` are the params that differ.
    pub fn json(&self, goal: Option<&Goal>, varying: &[String]) -> Value {
        let field = |key: &str| self.record.get(key).cloned().unwrap_or(Value::Null);
        let best = goal.and_then(|goal| {
            let at = self.metric(&goal.metric)?.best(goal)?;
            Some(json!({ "metric": goal.metric, "max": goal.max, "step": at.step, "value": numbers::json(at.value) }))
        });
        let last: Map<String, Value> =
            self.metrics.by_name.iter().map(|(name, e)| (name.clone(), numbers::json(e.last.value))).collect();
        let differs: Map<String, Value> = varying
            .iter()
            .filter_map(|name| Some((name.clone(), varying::field(&self.record, name)?.clone())))
            .collect();
        json!({
            "event": "run", "name": self.name(), "run_dir": self.dir.display().to_string(), "recipe": field("recipe"),
            "started": field("started"), "status": self.status.name(), "error": self.error, "step": self.step(),
            "steps": field("steps"), "seconds": self.metrics.seconds, "best": best, "metrics": last,
            "params": field("params"), "differs": differs, "seed": field("seed"), "device": field("device"),
            "precision": field("precision"), "branch": field("branch"), "performance": field("performance"),
        })
    }
}

/// Derives the status. `held` says whether a process has the lock; `None` where the file system has no locks.
fn status(record: &Map<String, Value>, held: Option<bool>) -> Status {
    match (held, record.get("status").and_then(Value::as_str)) {
        (Some(true), _) | (None, Some("running")) => Status::Running,
        (_, Some("done")) => Status::Finished,
        (_, Some("failed")) => Status::Failed,
        (_, Some("interrupted")) => Status::Stopped,
        // Its process ended without a last word.
        _ => Status::Interrupted,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lock_tells_a_killed_run_from_a_running_one() {
        let of = |text: &str, held| status(&Map::from_iter([("status".to_string(), text.into())]), held);
        assert_eq!(of("running", Some(true)), Status::Running);
        assert_eq!(of("running", Some(false)), Status::Interrupted);
        assert_eq!(of("running", None), Status::Running);
        // Resumed: the record is written after the lock was taken.
        assert_eq!(of("done", Some(true)), Status::Running);
        assert_eq!(of("done", Some(false)), Status::Finished);
        assert_eq!(of("interrupted", Some(false)), Status::Stopped);
        assert_eq!(of("failed", None), Status::Failed);
        assert_eq!(status(&Map::new(), Some(false)), Status::Interrupted);
    }
}
