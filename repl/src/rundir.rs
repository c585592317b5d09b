//! The run directory: everything needed to repeat a run and to look at it.
//!
//!     run.json                 what ran, on what, how it ended
//!     recipe/                  the recipe and the files it required, as they were
//!     metrics.jsonl            the step and eval events
//!     tb/                      TensorBoard events (`tensorboard --logdir runs`)
//!     checkpoints/step-N/      see `perilune_checkpoint`
//!
//! It comes into being when training starts: its name is claimed by creating it, so two runs never share one. `run.json` is
//! replaced as a whole, so that a reader never meets half of it.

use crate::failure::{Failure, disk};
use crate::tensorboard::EventFile;
use serde_json::{Map, Value};
use std::fs::{self, File};
use std::io::{BufWriter, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Buffers are written at least this often, for those who watch.
const FLUSH: Duration = Duration::from_secs(1);

pub struct RunDir {
    pub path: PathBuf,
    record: Map<String, Value>,
    /// An update of `run.json` that is on its way.
    writing: Option<JoinHandle<Result<(), Failure>>>,
    metrics: BufWriter<File>,
    board: EventFile,
    flushed: Instant,
}

/// What the log of a run says about the step from which it goes on.
#[derive(Default)]
pub struct Kept {
    /// The metrics of the evaluation of `valid` at that step, if there was one.
    pub evaluated: Option<Vec<(String, f64)>>,
    /// How long the run had trained.
    pub seconds: f64,
    /// The steps, their loss and gradient norm; none where the recipe was loaded anew.
    pub history: Vec<Option<(u64, f64, Option<f64>)>>,
}

/// Seconds since 1970.
pub fn now() -> f64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

pub fn hostname() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").or_else(|_| fs::read_to_string("/etc/hostname"));
    let name = file_name(name.unwrap_or_default().trim());
    if name.is_empty() { "localhost".into() } else { name }
}

/// The text of a small file of a run that may be anybody's.
pub fn text_of(path: &Path) -> Result<String, Failure> {
    const MOST: u64 = 64 << 20;
    // Looked at before it is opened: a pipe would wait for a writer.
    let meta = fs::metadata(path).map_err(disk("read", path))?;
    let no = |rule: &str| Err(Failure::Refused(format!("{}: {rule}", path.display())));
    if !meta.is_file() {
        return no("file: is not a regular file");
    }
    if meta.len() > MOST {
        return no(&format!("size: is {} bytes; such a file has at most {MOST}", meta.len()));
    }
    let mut text = String::new();
    File::open(path).and_then(|f| f.take(MOST).read_to_string(&mut text)).map_err(disk("read", path))?;
    Ok(text)
}

/// Replaces `run.json` of the run at `path`. It is on the disk before it has the name: nothing goes on without it after a
/// power cut.
fn replace(path: &Path, text: &str) -> Result<(), Failure> {
    let (to, new) = (path.join("run.json"), path.join(".run.json.new"));
    let write = |mut f: File| f.write_all(text.as_bytes()).and_then(|()| f.sync_all());
    let written = File::create(&new).and_then(write).and_then(|()| fs::rename(&new, &to));
    written.map_err(disk("write", &to))
}

/// What may stand in a file name.
fn file_name(text: &str) -> String {
    text.chars().map(|c| if c.is_alphanumeric() || "-_.".contains(c) { c } else { '_' }).collect()
}

/// Makes the directory: `given`, which must not hold a run yet, or a new one below `runs/`.
fn claim(given: Option<&Path>, name: &str) -> Result<PathBuf, Failure> {
    if let Some(path) = given {
        fs::create_dir_all(path).map_err(disk("create the run directory", path))?;
        return match File::create_new(path.join("run.json")) {
            Ok(_) => Ok(path.to_path_buf()),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => Err(Failure::Usage(format!(
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
    Err(Failure::System("cannot find a free name for the run directory".into()))
}

/// Takes what was logged after a step out of `metrics.jsonl`, which it opens to go on, and finds the evaluation of `valid`
/// at that step.
fn cut(path: &Path, step: u64) -> Result<(BufWriter<File>, Kept), Failure> {
    let at = path.join("metrics.jsonl");
    let text = match fs::read_to_string(&at) {
        Ok(text) => text,
        Err(e) if e.kind() == ErrorKind::NotFound => String::new(),
        Err(e) => return Err(disk("read", &at)(e)),
    };
    let (mut lines, mut kept) = (String::new(), Kept::default());
    for line in text.lines() {
        // The last one may be cut short by the end of the process that wrote it.
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
    let new = path.join(".metrics.jsonl.new");
    fs::write(&new, lines).and_then(|()| fs::rename(&new, &at)).map_err(disk("write", &at))?;
    let metrics = fs::OpenOptions::new().append(true).open(&at).map_err(disk("write to", &at))?;
    Ok((BufWriter::new(metrics), kept))
}

impl RunDir {
    /// `files`: (path below `recipe/`, text).
    pub fn create(
        given: Option<&Path>,
        name: &str,
        record: Map<String, Value>,
        files: &[(PathBuf, String)],
    ) -> Result<RunDir, Failure> {
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

    /// Goes on in a directory whose last checkpoint is of `step`: what was logged after it will be logged again.
    pub fn resume(path: &Path, record: Map<String, Value>, step: u64) -> Result<(RunDir, Kept), Failure> {
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

    /// The run has gone back to a step: what was logged after it will be logged again.
    pub fn rewind(&mut self, step: u64) -> Result<(), Failure> {
        self.flush()?;
        self.metrics = cut(&self.path, step)?.0;
        Ok(())
    }

    /// Sets fields of `run.json`.
    pub fn update<'a>(&mut self, fields: impl IntoIterator<Item = (&'a str, Value)>) -> Result<(), Failure> {
        self.update_soon(fields)?;
        self.updated()
    }

    /// The same beside the training: a busy disk may take a second for it.
    pub fn update_soon<'a>(&mut self, fields: impl IntoIterator<Item = (&'a str, Value)>) -> Result<(), Failure> {
        for (key, value) in fields {
            self.record.insert(key.to_string(), value);
        }
        self.updated()?;
        let (path, text) = (self.path.clone(), format!("{:#}\n", Value::Object(self.record.clone())));
        self.writing = Some(std::thread::spawn(move || replace(&path, &text)));
        Ok(())
    }

    /// Waits until the last update is on the disk.
    fn updated(&mut self) -> Result<(), Failure> {
        let Some(writing) = self.writing.take() else { return Ok(()) };
        let lost =
            || Failure::System(format!("cannot write {}: its thread ended", self.path.join("run.json").display()));
        writing.join().unwrap_or_else(|_| Err(lost()))
    }

    /// A step or eval event, and its numbers for TensorBoard.
    pub fn log(&mut self, event: &Value, step: u64, values: &[(String, f64)]) -> Result<(), Failure> {
        let written = writeln!(self.metrics, "{event}")
            .and_then(|()| self.board.scalars(now(), step, values.iter().map(|(k, v)| (k.as_str(), *v))));
        written.map_err(disk("write to", &self.path))?;
        if self.flushed.elapsed() > FLUSH { self.flush() } else { Ok(()) }
    }

    pub fn flush(&mut self) -> Result<(), Failure> {
        self.flushed = Instant::now();
        self.metrics.flush().and_then(|()| self.board.flush()).map_err(disk("write to", &self.path))
    }
}
