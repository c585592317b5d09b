//! Writes the checkpoints of a run in the background: decides when one is due, takes the snapshot, applies retention.
//! `resume.rs` restores a run from one.

use crate::error::Result;
use crate::events::Reporter;
use crate::numbers::object;
use crate::params;
use crate::retention::{Best, Retention};
use crate::run_log;
use crate::rundir::RECORD;
use crate::sample_file::SAMPLES;
use perilune_checkpoint::{Saver, Snapshot, Source};
use perilune_lua::{Copies, Run};
use perilune_policy::Directory;
use serde_json::{Map, Value, json};
use std::path::PathBuf;
use std::time::Instant;

const MODEL: &str = "model.";
const SCALER: &str = "scaler.";

/// Returns the name of a State in the files of a checkpoint; weights have a file of their own.
pub(crate) fn stored_name(path: &str) -> &str {
    path.strip_prefix(MODEL).unwrap_or(path)
}

/// How long the loop waited for a checkpoint: for its snapshot and for the end of the one before. The note explains why the
/// snapshot took longer than expected.
#[derive(Clone, Default)]
pub(crate) struct Stall {
    pub seconds: f64,
    pub note: Option<String>,
}

/// Schedules and writes the checkpoints of one run.
pub(crate) struct Checkpoints {
    /// None in a process of a job that writes no checkpoints: it sends what it has of the States to the one that does.
    saver: Option<Saver>,
    every: Option<u64>,
    retention: Retention,
    best: Option<Best>,
    /// Fields of every record besides the state of the run: recipe, params, versions.
    about: Map<String, Value>,
    last: Option<u64>,
    /// The stall of the checkpoint that is being written.
    stall: Stall,
}

impl Checkpoints {
    /// Creates the schedule. `record` is the `run.json` of a resumed run, which has the best checkpoint so far. Without a `run_dir`
    /// nothing is written.
    pub fn new(
        run_dir: Option<&Directory>,
        every: Option<u64>,
        retention: Retention,
        about: Map<String, Value>,
        run: &Run,
        record: Option<&Map<String, Value>>,
    ) -> Result<Checkpoints> {
        let (keep, best) = retention.choose(run)?;
        let mut saver = run_dir.map(|dir| Saver::new(dir.clone(), keep, retention.shard_size));
        let best = best.map(|b| b.recalled(record.and_then(|r| r.get("best")), run.count()));
        if let (Some(saver), Some(step)) = (&mut saver, best.as_ref().and_then(Best::step)) {
            saver.set_best(step);
        }
        Ok(Checkpoints { saver, every, retention, best, about, last: None, stall: Stall::default() })
    }

    /// Applies the retention policy of an edited recipe.
    pub fn rechoose(&mut self, run: &Run) -> Result<()> {
        let (keep, best) = self.retention.choose(run)?;
        if let Some(saver) = &mut self.saver {
            saver.keep = keep;
        }
        if best.as_ref().map(Best::name) != self.best.as_ref().map(Best::name) {
            self.best = best;
        }
        Ok(())
    }

    /// Updates the best checkpoint after an evaluation.
    pub fn evaluated(
        &mut self,
        step: u64,
        split: &str,
        values: &[(String, f64)],
        reporter: &mut Reporter,
    ) -> Result<()> {
        let Some(best) = &mut self.best else { return Ok(()) };
        if let Some(warning) = best.see(step, split, values) {
            reporter.warning(&warning);
        }
        if best.step() == Some(step) {
            if let Some(saver) = self.saver.as_mut().filter(|_| self.last == Some(step)) {
                saver.set_best(step);
            }
            let record = best.record();
            return reporter.dir.as_mut().map_or(Ok(()), |d| d.update_soon([("best", record)]));
        }
        Ok(())
    }

    /// Whether the evaluation at this step was the best so far.
    pub fn is_best(&self, step: u64) -> bool {
        self.best.as_ref().is_some_and(|b| b.step() == Some(step))
    }

    /// Lets the same step be saved again: its States have changed since the last checkpoint.
    pub fn invalidate(&mut self) {
        self.last = None;
    }

    /// Removes the checkpoints after a step that the run goes back to.
    pub fn forget_after(&mut self, step: u64, reporter: &mut Reporter) -> Result<()> {
        let written = self.saver.as_mut().map_or(Ok(None), |saver| saver.forget_after(step))?;
        if let Some(best) = &mut self.best {
            best.forget_after(step);
        }
        self.announce(written.filter(|w| w.0 <= step), reporter)
    }

    /// Sets the params of later checkpoints, after an edit.
    pub fn set_params(&mut self, params: Value) {
        self.about.insert("params".into(), params);
    }

    /// Whether a checkpoint is due after this step.
    pub fn due(&self, step: u64) -> bool {
        self.every.is_some_and(|n| step.is_multiple_of(n))
    }

    /// Takes a snapshot and starts to write it in the background.
    pub fn save(&mut self, run: &Run, reporter: &mut Reporter) -> Result<()> {
        let step = run.count();
        if self.last == Some(step) {
            return Ok(());
        }
        self.last = Some(step);
        let Some(saver) = &mut self.saver else {
            return take(run, &self.about, &reporter.latest).map(drop);
        };
        let begun = Instant::now();
        // A resume from here needs the logs up to here.
        if let Some(dir) = reporter.dir.as_mut() {
            dir.flush()?;
            if let Some(log) = run.sample_log() {
                run.settle_sample_log()?;
                dir.write_samples(&mut log.borrow_mut(), true)?;
            }
        }
        if self.best.as_ref().is_some_and(|b| b.step() == Some(step)) {
            saver.set_best(step);
        }
        // Only one snapshot at a time, to limit host memory.
        let written = saver.wait()?;
        let mut taken = take(run, &self.about, &reporter.latest)?;
        if let Some(dir) = &reporter.dir {
            taken.record.insert(run_log::LOGS.into(), dir.heads());
            taken.dir = Some(dir.handle().clone());
        }
        let note = taken.copies.waited.clone();
        saver.save(step, taken)?;
        let seconds = begun.elapsed().as_secs_f64();
        self.announce(written, reporter)?;
        self.stall = Stall { seconds, note };
        Ok(())
    }

    /// Reports a checkpoint that has been completed since the last call.
    pub fn poll(&mut self, reporter: &mut Reporter) -> Result<()> {
        let written = self.saver.as_mut().map_or(Ok(None), Saver::poll)?;
        self.announce(written, reporter)
    }

    /// Waits until every checkpoint is on the disk.
    pub fn finish(&mut self, reporter: &mut Reporter) -> Result<()> {
        let written = self.saver.as_mut().map_or(Ok(None), Saver::wait)?;
        self.announce(written, reporter)
    }

    fn announce(&self, written: Option<(u64, PathBuf)>, reporter: &mut Reporter) -> Result<()> {
        written.map_or(Ok(()), |(step, path)| reporter.checkpoint(step, &path, &self.stall))
    }
}

/// A snapshot of a run after a step, whose copies of States may still be in flight.
struct PendingSnapshot {
    step: u64,
    /// The run directory, whose log and record must be synced before the checkpoint is.
    dir: Option<Directory>,
    paths: Vec<String>,
    copies: Copies,
    record: Map<String, Value>,
}

fn take(run: &Run, about: &Map<String, Value>, latest: &[(String, f64)]) -> Result<PendingSnapshot> {
    let (paths, copies) = run.snapshot()?;
    let (seed, step) = run.rng();
    let mut record = about.clone();
    record.insert("rng".into(), json!({ "seed": seed, "step": step }));
    let cursor = params::to_json(&run.cursor()?);
    if let Some(rates) = run.rates() {
        record.insert("schedule".into(), json!({ "updates": cursor["updates"], "lr": rates }));
    }
    record.insert("cursor".into(), cursor);
    record.insert("metrics".into(), object(latest));
    Ok(PendingSnapshot { step: run.count(), dir: None, paths, copies, record })
}

impl Source for PendingSnapshot {
    fn snapshot(&mut self) -> perilune_checkpoint::Result<Snapshot> {
        let step = self.step;
        if let Some(dir) = &self.dir {
            // A file system that cannot sync gives no guarantee after a power failure in any case.
            for name in [run_log::METRICS, run_log::LEDGER, SAMPLES, RECORD] {
                let _ = dir.sync_file(name);
            }
            let _ = dir.sync();
        }
        let values = self.copies.read().map_err(|source| perilune_checkpoint::Error::Device { step, source })?;
        let (mut model, mut optimizer) = (Vec::new(), Vec::new());
        // Informational; a resume reads the States.
        let scaler = self.paths.iter().zip(&values).filter_map(|(path, value)| {
            let name = path.strip_prefix(SCALER).filter(|_| value.numel() == 1)?;
            Some((name.to_string(), json!(value.get_f64(0))))
        });
        let scaler: Map<String, Value> = scaler.collect();
        if !scaler.is_empty() {
            self.record.insert("scaler".into(), scaler.into());
        }
        for (path, value) in std::mem::take(&mut self.paths).into_iter().zip(values) {
            match path.strip_prefix(MODEL) {
                Some(inside) => model.push((inside.to_string(), value)),
                None => optimizer.push((path, value)),
            }
        }
        Ok(Snapshot { step, model, optimizer, record: std::mem::take(&mut self.record) })
    }
}
