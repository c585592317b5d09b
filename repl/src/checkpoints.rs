//! Checkpoints of a training run: when one is due, what goes into it, which ones stay. `resume.rs` goes on from one.

use crate::events::{self, Events};
use crate::failure::Failure;
use crate::keep::{Best, KeepArgs};
use perilune_checkpoint::{Saver, Snapshot, Source};

use perilune_lua::{Copies, Run};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::time::Instant;

const MODEL: &str = "model.";
const SCALER: &str = "scaler.";

impl From<perilune_checkpoint::Error> for Failure {
    fn from(e: perilune_checkpoint::Error) -> Failure {
        use perilune_checkpoint::Error;
        match &e {
            Error::Broken { .. } => Failure::Refused(e.to_string()),
            Error::Data(perilune_data::Error::Io { .. }) | Error::Io { .. } | Error::Device { .. } | Error::Lost(_) => {
                Failure::System(e.to_string())
            }
            Error::Data(_) => Failure::Refused(e.to_string()),
        }
    }
}

/// How long the loop stood still for a checkpoint: for its snapshot, and for the end of the one before, and why the
/// snapshot took longer than it should.
#[derive(Clone, Default)]
pub struct Stall {
    pub seconds: f64,
    pub note: Option<String>,
}

/// The checkpoints of one run.
pub struct Checkpoints {
    saver: Saver,
    every: Option<u64>,
    args: KeepArgs,
    best: Option<Best>,
    /// What each of them says besides the run's own state: recipe, params, versions.
    about: Map<String, Value>,
    last: Option<u64>,
    /// Of the one that is being written.
    stall: Stall,
}

impl Checkpoints {
    /// `record` is that of the run, which says what was the best so far.
    pub fn new(
        run_dir: &Path,
        every: Option<u64>,
        args: KeepArgs,
        about: Map<String, Value>,
        run: &Run,
        record: Option<&Map<String, Value>>,
    ) -> Result<Checkpoints, Failure> {
        let dir = run_dir.join("checkpoints");
        let (keep, best) = args.choose(run)?;
        let mut saver = Saver::new(dir, keep, args.shard_size);
        let best = best.map(|b| b.recalled(record.and_then(|r| r.get("best")), run.count()));
        if let Some(step) = best.as_ref().and_then(Best::step) {
            saver.set_best(step);
        }
        Ok(Checkpoints { saver, every, args, best, about, last: None, stall: Stall::default() })
    }

    /// The recipe was edited: it may say something else about what stays.
    pub fn rechoose(&mut self, run: &Run) -> Result<(), Failure> {
        let (keep, best) = self.args.choose(run)?;
        self.saver.keep = keep;
        if best.as_ref().map(Best::name) != self.best.as_ref().map(Best::name) {
            self.best = best;
        }
        Ok(())
    }

    /// Metrics of an evaluation have arrived.
    pub fn evaluated(
        &mut self,
        step: u64,
        split: &str,
        values: &[(String, f64)],
        events: &mut Events,
    ) -> Result<(), Failure> {
        let Some(best) = &mut self.best else { return Ok(()) };
        if let Some(warning) = best.see(step, split, values) {
            events.warning(&warning);
        }
        if best.step() == Some(step) {
            if self.last == Some(step) {
                self.saver.set_best(step);
            }
            let said = best.record();
            return events.dir.as_mut().map_or(Ok(()), |d| d.update_soon([("best", said)]));
        }
        Ok(())
    }

    /// Whether the evaluation at this step was the best so far.
    pub fn is_best(&self, step: u64) -> bool {
        self.best.as_ref().is_some_and(|b| b.step() == Some(step))
    }

    /// The States are others than those of the last checkpoint, even at the same step.
    pub fn again(&mut self) {
        self.last = None;
    }

    /// The run has gone back: later checkpoints are none of it.
    pub fn forget_after(&mut self, step: u64, events: &mut Events) -> Result<(), Failure> {
        let written = self.saver.forget_after(step)?;
        if let Some(best) = &mut self.best {
            best.forget_after(step);
        }
        self.announce(written.filter(|w| w.0 <= step), events)
    }

    /// The params changed while the run went on.
    pub fn set_params(&mut self, params: Value) {
        self.about.insert("params".into(), params);
    }

    /// Whether one is due after this step.
    pub fn due(&self, step: u64) -> bool {
        self.every.is_some_and(|n| step.is_multiple_of(n))
    }

    /// Takes a snapshot and starts to write it; the loop goes on meanwhile.
    pub fn save(&mut self, run: &Run, events: &mut Events) -> Result<(), Failure> {
        let step = run.count();
        if self.last == Some(step) {
            return Ok(());
        }
        self.last = Some(step);
        let begun = Instant::now();
        // Going on from here must find the log up to here.
        if let Some(dir) = events.dir.as_mut() {
            dir.flush()?;
        }
        if self.is_best(step) {
            self.saver.set_best(step);
        }
        // Two snapshots would hold the memory twice.
        let written = self.saver.wait()?;
        let mut taken = take(run, &self.about, &events.latest)?;
        taken.dir = events.dir.as_ref().map(|d| d.path.clone());
        let note = taken.copies.waited.clone();
        self.saver.save(step, taken)?;
        let seconds = begun.elapsed().as_secs_f64();
        self.announce(written, events)?;
        self.stall = Stall { seconds, note };
        Ok(())
    }

    /// Says what has been written by now.
    pub fn poll(&mut self, events: &mut Events) -> Result<(), Failure> {
        let written = self.saver.poll()?;
        self.announce(written, events)
    }

    /// Waits until all is on the disk.
    pub fn finish(&mut self, events: &mut Events) -> Result<(), Failure> {
        let written = self.saver.wait()?;
        self.announce(written, events)
    }

    fn announce(&self, written: Option<(u64, PathBuf)>, events: &mut Events) -> Result<(), Failure> {
        written.map_or(Ok(()), |(step, path)| events.checkpoint(step, &path, &self.stall))
    }
}

/// A run after a step: what is known at once, and copies of its States that are still on their way.
struct Taken {
    step: u64,
    /// The run's directory, whose log and record must be on the disk before the checkpoint is.
    dir: Option<PathBuf>,
    paths: Vec<String>,
    copies: Copies,
    record: Map<String, Value>,
}

fn take(run: &Run, about: &Map<String, Value>, latest: &[(String, f64)]) -> Result<Taken, Failure> {
    let (paths, copies) = run.snapshot()?;
    let (seed, step) = run.rng();
    let mut record = about.clone();
    record.insert("rng".into(), json!({ "seed": seed, "step": step }));
    let cursor = events::params(&run.cursor()?);
    if let Some(rates) = run.rates() {
        record.insert("schedule".into(), json!({ "updates": cursor["updates"], "lr": rates }));
    }
    record.insert("cursor".into(), cursor);
    record.insert("metrics".into(), events::object(latest));
    Ok(Taken { step: run.count(), dir: None, paths, copies, record })
}

impl Source for Taken {
    fn snapshot(&mut self) -> perilune_checkpoint::Result<Snapshot> {
        let step = self.step;
        if let Some(dir) = &self.dir {
            // A file system that cannot is one on which a power cut loses what it likes.
            for name in ["metrics.jsonl", "ledger.jsonl", "run.json", ""] {
                let _ = std::fs::File::open(dir.join(name)).and_then(|f| f.sync_all());
            }
        }
        let values = self.copies.read().map_err(|source| perilune_checkpoint::Error::Device { step, source })?;
        let (mut model, mut optimizer) = (Vec::new(), Vec::new());
        // For people: what counts are the States.
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
