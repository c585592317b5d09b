//! Creates and updates the run directory, which has everything needed to repeat a run and to look at it.
//!
//! ```text
//! run.json                 what ran, on what, how it ended
//! recipe/                  the recipe and the files it required, as they were
//! metrics.jsonl            the step and eval events
//! tb/                      TensorBoard events (`tensorboard --logdir runs`)
//! checkpoints/step-N/      see `perilune_checkpoint`
//! ```
//!
//! It is created when training starts; creating it claims its name, so two runs never share one. `run.json` is replaced by
//! a rename, so a reader never sees a partial file.

use crate::error::{Error, Result, disk};
use crate::tensorboard::EventFile;
use perilune_policy::{Directory, Opened};
use serde_json::{Map, Value};
use std::fs::{self, File};
use std::io::{BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Buffers are flushed at least this often, for readers that follow the run.
const FLUSH: Duration = Duration::from_secs(1);

/// The open directory of one run.
pub struct RunDir {
    pub path: PathBuf,
    record: Map<String, Value>,
    /// A write of `run.json` in the background.
    writing: Option<JoinHandle<Result<()>>>,
    metrics: BufWriter<File>,
    board: EventFile,
    flushed: Instant,
}

/// What the log of a resumed run has up to the step of its checkpoint.
#[derive(Default)]
pub(crate) struct LogTail {
    /// The metrics of the evaluation of `valid` at that step, if there was one.
    pub evaluated: Option<Vec<(String, f64)>>,
    /// Seconds of training.
    pub seconds: f64,
    /// Steps with their loss and gradient norm; `None` where another version of the recipe was applied.
    pub history: Vec<Option<(u64, f64, Option<f64>)>>,
}

/// Returns seconds since 1970.
pub fn now() -> f64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

/// Returns the host name, in characters that a file name may have.
pub fn hostname() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").or_else(|_| fs::read_to_string("/etc/hostname"));
    let name = file_name(name.unwrap_or_default().trim());
    if name.is_empty() { "localhost".into() } else { name }
}

/// The largest text file that is read, in bytes.
pub(crate) const MOST: u64 = 64 << 20;

/// Reads a small text file of a run directory, which may come from an untrusted source.
pub fn text_of(path: &Path) -> Result<String> {
    named_text(perilune_policy::open_named(path), path, MOST)
}

/// Reads a text file of the run directory `dir`; it has to be in the directory itself, and no part of its name a link.
pub fn text_in(dir: &Directory, name: &Path) -> Result<String> {
    named_text(dir.open_unlinked(name), &dir.path().join(name), MOST)
}

fn named_text(opened: perilune_policy::Result<Opened>, path: &Path, most: u64) -> Result<String> {
    let no = |rule: &str| Error::Refused(format!("{}: {rule}", path.display()));
    let file = opened.map_err(|e| match e {
        perilune_policy::Error::Io { source, .. } => disk("read", path)(source),
        _ => no("file: is not a regular file"),
    })?;
    if file.len() > most {
        return Err(no(&format!("size: is {} bytes; such a file has at most {most}", file.len())));
    }
    file.text(most).map_err(disk("read", path))
}

/// The directory of a run.
fn open(path: &Path) -> Result<Directory> {
    Directory::open(path).map_err(|e| Error::System(e.to_string()))
}

/// Replaces `run.json` of the run at `path`. The new file is synced before it gets the name: after a power failure either
/// the old or the new one is there.
fn replace(path: &Path, text: &str) -> Result<()> {
    open(path)?.replace("run.json", text.as_bytes()).map_err(|e| match e {
        perilune_policy::Error::Io { source, .. } => disk("write", &path.join("run.json"))(source),
        e => Error::Refused(e.to_string()),
    })
}

/// Replaces characters that a file name should not have.
fn file_name(text: &str) -> String {
    text.chars().map(|c| if c.is_alphanumeric() || "-_.".contains(c) { c } else { '_' }).collect()
}

/// Creates the directory: `given`, which must not have a run yet, or a new one below `runs/`.
fn claim(given: Option<&Path>, name: &str) -> Result<PathBuf> {
    if let Some(path) = given {
        fs::create_dir_all(path).map_err(disk("create the run directory", path))?;
        return match File::create_new(path.join("run.json")) {
            Ok(_) => Ok(path.to_path_buf()),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => Err(Error::Usage(format!(
                "--run-dir {}: it holds a run already; choose another directory",
                path.display()
            ))),
            Err(e) => Err(disk("write to the run directory", path)(e)),
        };
    }
    let runs = Path::new("runs");
    fs::create_dir_all(runs).map_err(disk("create the directory", runs))?;
    let stem = format!("{}-{}", file_name(name), jiff::Zoned::now().strftime("%Y%m%d-%H%M%S"));
    for k in 1.. {
        let path = runs.join(if k == 1 { stem.clone() } else { format!("{stem}-{k}") });
        match fs::create_dir(&path) {
            Ok(()) => return Ok(path),
            Err(e) if e.kind() == ErrorKind::AlreadyExists && k < 10_000 => {}
            Err(e) => return Err(disk("create the run directory", &path)(e)),
        }
    }
    Err(Error::System("cannot find a free name for the run directory".into()))
}

/// Truncates `metrics.jsonl` to the events up to a step, opens it for appending, and returns what the rest of the run needs.
fn cut(path: &Path, step: u64) -> Result<(BufWriter<File>, LogTail)> {
    let at = path.join("metrics.jsonl");
    let text = match open(path)?.open_unlinked(Path::new("metrics.jsonl")) {
        Err(e) if e.is_not_found() => String::new(),
        // However long the run was.
        opened => named_text(opened, &at, u64::MAX)?,
    };
    let (mut lines, mut kept) = (String::new(), LogTail::default());
    for line in text.lines() {
        // The last line may be incomplete: its process may have been killed.
        let event: Value = serde_json::from_str(line).unwrap_or_default();
        if event["step"].as_u64().is_some_and(|s| s <= step) {
            lines.extend([line, "\n"]);
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
        if event["event"] == "eval" && event["step"].as_u64() == Some(step) {
            let metrics = event["metrics"].as_object().into_iter().flatten();
            let valid = metrics.filter_map(|(k, v)| Some((k.strip_prefix("valid/")?.to_string(), v.as_f64()?)));
            kept.evaluated = Some(valid.collect::<Vec<_>>()).filter(|v| !v.is_empty()).or(kept.evaluated);
        }
    }
    let refused = |e: perilune_policy::Error| Error::System(e.to_string());
    let dir = open(path)?;
    dir.replace("metrics.jsonl", lines.as_bytes()).map_err(refused)?;
    let metrics = dir.append("metrics.jsonl").map_err(refused)?;
    Ok((BufWriter::new(metrics), kept))
}

impl RunDir {
    /// Creates the directory with `run.json` and a copy of the recipe. `files`: (path below `recipe/`, text).
    pub fn create(
        given: Option<&Path>,
        name: &str,
        record: Map<String, Value>,
        files: &[(PathBuf, String)],
    ) -> Result<RunDir> {
        let path = claim(given, name)?;
        for (inside, text) in files {
            let to = path.join("recipe").join(inside);
            let dir = to.parent().unwrap_or(&path);
            fs::create_dir_all(dir).map_err(disk("create", dir))?;
            fs::write(&to, text).map_err(disk("write", &to))?;
        }
        let metrics = path.join("metrics.jsonl");
        let metrics = BufWriter::new(File::create(&metrics).map_err(disk("create", &metrics))?);
        let tb = path.join("tb");
        fs::create_dir_all(&tb).map_err(disk("create", &tb))?;
        let board = EventFile::create(&tb, now(), &hostname()).map_err(disk("write to", &tb))?;
        let mut dir = RunDir { path, record, writing: None, metrics, board, flushed: Instant::now() };
        dir.update([("status", Value::from("running"))])?;
        Ok(dir)
    }

    /// Opens the directory of a run that continues from its checkpoint of `step`; events after it are dropped.
    pub(crate) fn resume(path: &Path, record: Map<String, Value>, step: u64) -> Result<(RunDir, LogTail)> {
        let (metrics, kept) = cut(path, step)?;
        let tb = path.join("tb");
        fs::create_dir_all(&tb).map_err(disk("create", &tb))?;
        let board = EventFile::create(&tb, now(), &hostname()).map_err(disk("write to", &tb))?;
        let mut dir =
            RunDir { path: path.to_path_buf(), record, writing: None, metrics, board, flushed: Instant::now() };
        let mut resumed = dir.record.get("resumed").and_then(Value::as_array).cloned().unwrap_or_default();
        resumed.push(step.into());
        dir.update([("status", Value::from("running")), ("resumed", resumed.into())])?;
        Ok((dir, kept))
    }

    /// Drops the events after a step that the run goes back to.
    pub fn rewind(&mut self, step: u64) -> Result<()> {
        self.flush()?;
        self.metrics = cut(&self.path, step)?.0;
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
        let (path, text) = (self.path.clone(), format!("{:#}\n", Value::Object(self.record.clone())));
        self.writing = Some(std::thread::spawn(move || replace(&path, &text)));
        Ok(())
    }

    /// Waits for the write in the background.
    fn updated(&mut self) -> Result<()> {
        let Some(writing) = self.writing.take() else { return Ok(()) };
        let lost = || Error::System(format!("cannot write {}: its thread ended", self.path.join("run.json").display()));
        writing.join().unwrap_or_else(|_| Err(lost()))
    }

    /// Appends an event to `metrics.jsonl`, and its numbers to the TensorBoard file.
    pub fn log(&mut self, event: &Value, step: u64, values: &[(String, f64)]) -> Result<()> {
        let written = writeln!(self.metrics, "{event}")
            .and_then(|()| self.board.scalars(now(), step, values.iter().map(|(k, v)| (k.as_str(), *v))));
        written.map_err(disk("write to", &self.path))?;
        if self.flushed.elapsed() > FLUSH { self.flush() } else { Ok(()) }
    }

    /// Flushes both logs.
    pub fn flush(&mut self) -> Result<()> {
        self.flushed = Instant::now();
        self.metrics.flush().and_then(|()| self.board.flush()).map_err(disk("write to", &self.path))
    }
}
