//! Creates and updates the run directory, which has everything needed to repeat and inspect a run.
//!
//! ```text
//! run.json                 recipe, device, result; sealed
//! recipe/                  the recipe and the files it required, as they were
//! metrics.jsonl            the step and eval events; sealed line by line
//! samples.bin              the samples of every step, if the recipe has a sample log (`sample_file.rs`)
//! ledger.jsonl             edits and resumes, if there were any; sealed line by line
//! tb/                      TensorBoard events (`tensorboard --logdir runs`)
//! media/                   images that `run:log` was given (`media.rs`)
//! checkpoints/step-N/      see `perilune_checkpoint`
//! ```
//!
//! It is created when training starts (`claim.rs`), so two runs never share one. One process at a time writes it
//! (`run_lock.rs`). Every file is created, renamed and deleted by the handle of the directory, and no link in it is followed, so
//! one that takes a name while the run goes on redirects nothing. `run.json` is replaced by a rename, so a reader never sees a partial file. Seals reveal later changes
//! (`run_log.rs`); a resume and a replay check them.

use crate::claim::Claim;
use crate::error::{Error, Result, disk};
use crate::run_files::{hostname, now};
use crate::run_lock::RunLock;
use crate::run_log::{self, LEDGER, LOGS, METRICS, RunLog};
use crate::sample_file::{SAMPLES, SampleFile};
use crate::tensorboard::{EventFile, Summary};
use perilune_checkpoint::{CHECKPOINTS, seal};
use perilune_data::sample_log::SampleLog;
use perilune_policy::Directory;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The record of the run.
pub(crate) const RECORD: &str = "run.json";
/// The directories of the recipe's files and of TensorBoard's.
pub(crate) const RECIPE: &str = "recipe";
pub(crate) const BOARD: &str = "tb";

/// Buffers are flushed at least this often, for readers that follow the run.
const FLUSH: Duration = Duration::from_secs(1);

/// The open directory of one run.
pub struct RunDir {
    pub path: PathBuf,
    dir: Directory,
    record: Map<String, Value>,
    /// A write of `run.json` in the background.
    writing: Option<JoinHandle<Result<()>>>,
    metrics: RunLog,
    /// The history, opened when its first line is written.
    ledger: Option<RunLog>,
    samples: SampleFile,
    board: EventFile,
    flushed: Instant,
    /// The step at which the log says that the run ends early, in a run that was resumed there.
    stopped_at: Option<u64>,
    /// The lock of a new run; that of a resumed one belongs to [`crate::Resume`].
    _lock: Option<RunLock>,
}

/// The log of a resumed run up to the step of its checkpoint.
#[derive(Default)]
pub(crate) struct LogTail {
    /// The metrics of the evaluations at that step, by split.
    pub evaluated: HashMap<String, Vec<(String, f64)>>,
    /// Whether the run has logged that it ends there, before its last step.
    pub stopped: bool,
    /// Seconds of training.
    pub seconds: f64,
    /// Steps with their loss and gradient norm; `None` where another version of the recipe was applied.
    pub history: Vec<Option<(u64, f64, Option<f64>)>>,
}

/// Replaces `run.json`. The new file is synced before it gets the name: after a power failure either the old or the new one
/// exists.
fn replace(dir: &Directory, text: &str) -> Result<()> {
    Ok(dir.replace(RECORD, text.as_bytes())?)
}

/// Returns the lines of a metrics log up to a step, and what the rest of the run needs of them.
pub(crate) fn up_to(text: &str, step: u64) -> (Vec<&str>, LogTail) {
    let (mut lines, mut kept) = (Vec::new(), LogTail::default());
    for line in run_log::complete(text) {
        let event: Value = serde_json::from_str(line).unwrap_or_default();
        if event["step"].as_u64().is_some_and(|s| s <= step) {
            lines.push(line);
            kept.seconds = event["seconds"].as_f64().unwrap_or(kept.seconds);
            match event["event"].as_str() {
                Some("step") => {
                    // NaN and infinities are null there.
                    let number = |v: &Value| v.as_f64().unwrap_or(f64::NAN);
                    let norm = event["metrics"].get("grad_norm").map(number);
                    kept.history.push(Some((event["step"].as_u64().unwrap_or(0), number(&event["loss"]), norm)));
                }
                Some("reload") => kept.history.push(None),
                _ => {}
            }
        }
        kept.stopped |= event["event"] == "early_stop" && event["step"].as_u64() == Some(step);
        if event["event"] == "eval" && event["step"].as_u64() == Some(step) {
            let metrics = event["metrics"].as_object().into_iter().flatten();
            let mut splits: HashMap<String, Vec<(String, f64)>> = HashMap::new();
            for (name, value) in metrics {
                if let (Some((split, metric)), Some(value)) = (name.split_once('/'), value.as_f64()) {
                    splits.entry(split.to_string()).or_default().push((metric.to_string(), value));
                }
            }
            kept.evaluated.extend(splits);
        }
    }
    (lines, kept)
}

/// Opens a new TensorBoard file in `tb/`.
fn board(dir: &Directory) -> Result<EventFile> {
    EventFile::create(&dir.make_directory(BOARD)?, now(), &hostname())
}

/// Writes the text files of a version beneath `dir`, in place of older ones.
pub(crate) fn write_version(dir: &Directory, folder: &str, files: &[(PathBuf, String)]) -> Result<()> {
    let top = dir.make_directory(folder)?;
    for (inside, text) in files {
        let above = top.make_directories(inside.parent().unwrap_or(Path::new("")))?;
        let name = inside.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let written = above.create_over(&name)?.write_all(text.as_bytes());
        written.map_err(disk("write", &above.path().join(&name)))?;
    }
    Ok(())
}

impl RunDir {
    /// Writes `run.json` and a copy of the recipe into a claimed directory. `files`: (path below `recipe/`, text).
    pub fn create(
        Claim { dir, lock }: Claim,
        mut record: Map<String, Value>,
        files: &[(PathBuf, String)],
    ) -> Result<RunDir> {
        write_version(&dir, RECIPE, files)?;
        record.insert("id".into(), id(&record).into());
        let metrics = RunLog::replace(&dir, METRICS, &record, std::iter::empty())?;
        let board = board(&dir)?;
        let (writing, ledger, flushed, path) = (None, None, Instant::now(), dir.path().to_path_buf());
        let samples = SampleFile::default();
        let mut dir = RunDir {
            path,
            dir,
            record,
            writing,
            metrics,
            ledger,
            samples,
            board,
            flushed,
            stopped_at: None,
            _lock: Some(lock),
        };
        dir.update([("status", Value::from("running"))])?;
        Ok(dir)
    }

    /// Opens the directory of a run that continues from its checkpoint of `step`; events after it are dropped. The logs must
    /// contain the heads of their chains recorded in `record`, which is `run.json`, and in the record of the checkpoint.
    pub(crate) fn resume(
        dir: &Directory,
        mut record: Map<String, Value>,
        checkpoint: &Map<String, Value>,
        step: u64,
    ) -> Result<(RunDir, LogTail)> {
        dir.make_directory(CHECKPOINTS)?;
        let (metrics, ledger) = (run_log::text(dir, METRICS)?, run_log::text(dir, LEDGER)?);
        for (log, text) in [(METRICS, &metrics), (LEDGER, &ledger)] {
            for from in [&record, checkpoint] {
                run_log::verify(dir.path(), log, text, &record, run_log::stood(from, log))?;
            }
        }
        if !record.contains_key("id") {
            record.insert("id".into(), id(&record).into());
        }
        // From here on the chains grow with the run.
        record.shift_remove(LOGS);
        let mut resumed = record.get("resumed").and_then(Value::as_array).cloned().unwrap_or_default();
        resumed.push(step.into());
        record.insert("status".into(), "running".into());
        record.insert("resumed".into(), resumed.into());
        replace(dir, &seal::seal(record.clone()))?;

        let (lines, tail) = up_to(&metrics, step);
        let metrics = RunLog::replace(dir, METRICS, &record, lines.into_iter())?;
        let ledger = match ledger.is_empty() {
            true => None,
            false => Some(RunLog::replace(dir, LEDGER, &record, run_log::complete(&ledger))?),
        };
        let (board, writing, flushed) = (board(dir)?, None, Instant::now());
        let path = dir.path().to_path_buf();
        let (dir, samples) = (dir.clone(), SampleFile::default());
        let stopped_at = tail.stopped.then_some(step);
        let dir =
            RunDir { path, dir, record, writing, metrics, ledger, samples, board, flushed, stopped_at, _lock: None };
        Ok((dir, tail))
    }

    /// Whether the log of a resumed run says already that it ends early, after this step.
    pub(crate) fn has_stopped_at(&self, step: u64) -> bool {
        self.stopped_at == Some(step)
    }

    /// Returns the fields of `run.json`.
    pub(crate) fn record(&self) -> &Map<String, Value> {
        &self.record
    }

    /// Returns the handle of the directory.
    pub(crate) fn handle(&self) -> &Directory {
        &self.dir
    }

    /// Writes the entries of the sample log that are not in its file: all of them with `seal`, else full blocks.
    pub fn write_samples(&mut self, log: &mut SampleLog, seal: bool) -> Result<()> {
        if seal {
            log.seal().map_err(|e| Error::System(e.to_string()))?;
        }
        if seal || log.blocks().0.len() > self.samples.written() {
            self.samples.write(&self.dir, log)?;
        }
        Ok(())
    }

    /// Returns the id of the run.
    pub fn id(&self) -> &str {
        self.record.get("id").and_then(Value::as_str).unwrap_or_default()
    }

    /// Drops the events after a step that the run goes back to.
    pub fn rewind(&mut self, step: u64) -> Result<()> {
        self.flush()?;
        let text = run_log::text(&self.dir, METRICS)?;
        self.metrics = RunLog::replace(&self.dir, METRICS, &self.record, up_to(&text, step).0.into_iter())?;
        Ok(())
    }

    /// Sets fields of `run.json` and waits until it is on the disk.
    pub fn update<'a>(&mut self, fields: impl IntoIterator<Item = (&'a str, Value)>) -> Result<()> {
        self.update_soon(fields)?;
        self.updated()
    }

    /// Sets fields of `run.json` in the background: a busy disk may take a second.
    pub fn update_soon<'a>(&mut self, fields: impl IntoIterator<Item = (&'a str, Value)>) -> Result<()> {
        for (key, value) in fields {
            self.record.insert(key.to_string(), value);
        }
        self.updated()?;
        self.check_in_place()?;
        let (dir, text) = (self.dir.clone(), Arc::new(seal::seal(self.record.clone())));
        let work = {
            let (dir, text) = (dir.clone(), text.clone());
            move || replace(&dir, &text)
        };
        match std::thread::Builder::new().name("run.json".into()).spawn(work) {
            Ok(writing) => self.writing = Some(writing),
            // If no thread can be created, write here.
            Err(_) => replace(&dir, &text)?,
        }
        Ok(())
    }

    /// Ends the run: syncs both logs, and writes the last fields of `run.json` with the final heads of the logs' chains.
    pub fn finish<'a>(&mut self, fields: impl IntoIterator<Item = (&'a str, Value)>) -> Result<()> {
        self.flush()?;
        self.metrics.sync()?;
        self.ledger.as_mut().map_or(Ok(()), RunLog::sync)?;
        let heads = self.heads();
        self.update(fields.into_iter().chain([(LOGS, heads)]))
    }

    /// Waits for the write in the background.
    fn updated(&mut self) -> Result<()> {
        let Some(writing) = self.writing.take() else { return Ok(()) };
        let lost = || Error::System(format!("cannot write {}: its thread ended", self.path.join(RECORD).display()));
        writing.join().unwrap_or_else(|_| Err(lost()))
    }

    /// Appends an event to `metrics.jsonl`, and its numbers to the TensorBoard file.
    pub fn log(&mut self, event: &Value, step: u64, values: &[(String, f64)]) -> Result<()> {
        let values = values.iter().map(|(k, v)| (k.as_str(), Summary::Scalar(*v)));
        self.log_values(event, step, values)
    }

    /// Appends an event to `metrics.jsonl`, and values of any kind to the TensorBoard file.
    pub fn log_values<'a>(
        &mut self,
        event: &Value,
        step: u64,
        values: impl Iterator<Item = (&'a str, Summary<'a>)>,
    ) -> Result<()> {
        self.metrics.append(event)?;
        self.board.values(now(), step, values).map_err(disk("write to", &self.path))?;
        if self.flushed.elapsed() > FLUSH { self.flush() } else { Ok(()) }
    }

    /// Appends a line to the history of versions, `ledger.jsonl`.
    pub(crate) fn append_history(&mut self, line: &Value) -> Result<()> {
        self.check_in_place()?;
        let ledger = match &mut self.ledger {
            Some(ledger) => ledger,
            none => none.insert(RunLog::replace(&self.dir, LEDGER, &self.record, std::iter::empty())?),
        };
        ledger.append(line).and_then(|()| ledger.flush())
    }

    /// Returns the field `logs` of a record: the heads of the logs' chains.
    pub(crate) fn heads(&self) -> Value {
        let ledger = self.ledger.as_ref().map(|l| l.head().to_string());
        let ledger = ledger.unwrap_or_else(|| run_log::chain(&self.record, LEDGER).head().to_string());
        let mut heads = json!({ METRICS: self.metrics.head(), LEDGER: ledger });
        if let Some(head) = self.samples.head() {
            heads[SAMPLES] = head.into();
        }
        heads
    }

    /// Flushes both logs. A directory that was removed or renamed in the meantime is an error.
    pub fn flush(&mut self) -> Result<()> {
        self.flushed = Instant::now();
        self.metrics.flush()?;
        self.board.flush().map_err(disk("write to", &self.path))?;
        self.check_in_place()
    }

    fn check_in_place(&self) -> Result<()> {
        if self.metrics.is_in_place() {
            return Ok(());
        }
        Err(Error::System(format!(
            "the run directory {} is gone: it was removed, renamed or replaced while the run was writing to it\n  \
             hint: what was not in a checkpoint elsewhere is lost; start the run again",
            self.path.display()
        )))
    }
}

/// Returns the id of a run: a hash of its fields at the start, including the time, the process and the recipe.
fn id(record: &Map<String, Value>) -> String {
    let text = Value::Object(record.clone()).to_string();
    blake3::hash(text.as_bytes()).to_hex()[..32].to_string()
}
