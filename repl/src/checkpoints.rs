//! Checkpoints of a training run: when one is due, what goes into it, and going on from one.

use crate::events::{self, Events};
use crate::failure::Failure;
use perilune_checkpoint::{Keep, Saver, Snapshot, list, read};
use perilune_lua::{ParamValue, Run};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

const MODEL: &str = "model.";

impl From<perilune_checkpoint::Error> for Failure {
    fn from(e: perilune_checkpoint::Error) -> Failure {
        use perilune_checkpoint::Error;
        match &e {
            Error::Broken { .. } => Failure::Refused(e.to_string()),
            Error::Data(perilune_data::Error::Io { .. }) | Error::Io { .. } | Error::Lost(_) => {
                Failure::System(e.to_string())
            }
            Error::Data(_) => Failure::Refused(e.to_string()),
        }
    }
}

/// The checkpoints of one run.
pub struct Checkpoints {
    saver: Saver,
    every: Option<u64>,
    /// What each of them says besides the run's own state: recipe, params, versions.
    about: Map<String, Value>,
    last: Option<u64>,
}

impl Checkpoints {
    pub fn new(run_dir: &Path, every: Option<u64>, keep: Keep, about: Map<String, Value>) -> Checkpoints {
        Checkpoints { saver: Saver::new(run_dir.join("checkpoints"), keep), every, about, last: None }
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
        // Going on from here must find the log up to here.
        if let Some(dir) = events.dir.as_mut() {
            dir.flush()?;
        }
        let written = self.saver.save(snapshot(run, &self.about, &events.latest)?)?;
        announce(written, events)
    }

    /// Says what has been written by now.
    pub fn poll(&mut self, events: &mut Events) -> Result<(), Failure> {
        let written = self.saver.poll()?;
        announce(written, events)
    }

    /// Waits until all is on the disk.
    pub fn finish(&mut self, events: &mut Events) -> Result<(), Failure> {
        let written = self.saver.wait()?;
        announce(written, events)
    }
}

fn announce(written: Option<(u64, PathBuf)>, events: &mut Events) -> Result<(), Failure> {
    if let Some((step, path)) = written {
        events.checkpoint(step, &path)?;
    }
    Ok(())
}

fn snapshot(run: &Run, about: &Map<String, Value>, latest: &[(String, f64)]) -> Result<Snapshot, Failure> {
    let (mut model, mut optimizer) = (Vec::new(), Vec::new());
    run.each_state(|path, t| match path.strip_prefix(MODEL) {
        Some(inside) => model.push((inside.to_string(), t)),
        None => optimizer.push((path, t)),
    })?;
    let (seed, step) = run.rng();
    let mut record = about.clone();
    record.insert("rng".into(), json!({ "seed": seed, "step": step }));
    record.insert("cursor".into(), events::params(&run.cursor()?));
    record.insert("metrics".into(), events::object(latest));
    Ok(Snapshot { step: run.count(), model, optimizer, record })
}

/// A run to go on with: its directory, what its `run.json` said, its last checkpoint.
pub struct Resume {
    pub dir: PathBuf,
    pub record: Map<String, Value>,
    snapshot: Snapshot,
    path: PathBuf,
}

pub fn record_of(dir: &Path) -> Result<Map<String, Value>, Failure> {
    let at = dir.join("run.json");
    let text = std::fs::read_to_string(&at).map_err(crate::failure::disk("read", &at))?;
    match serde_json::from_str(&text) {
        Ok(Value::Object(map)) => Ok(map),
        _ => Err(Failure::Refused(format!("{}: is not the record of a run", at.display()))),
    }
}

/// The run below `runs/` of this recipe file that was started last.
fn newest(recipe: &Path) -> Option<PathBuf> {
    let dirs = std::fs::read_dir("runs").into_iter().flatten().flatten().map(|e| e.path());
    let wanted = recipe.display().to_string();
    let runs = dirs.filter_map(|dir| {
        let record = record_of(&dir).ok()?;
        let ours = record.get("path").and_then(Value::as_str) == Some(&wanted);
        let started = record.get("started").and_then(Value::as_str).unwrap_or_default().to_string();
        ours.then_some((started, dir))
    });
    runs.max().map(|r| r.1)
}

impl Resume {
    /// The last checkpoint of the run in `given`, or else of the newest run of this recipe below `runs/`.
    pub fn find(given: Option<&Path>, recipe: &Path) -> Result<Resume, Failure> {
        let dir = match given {
            Some(dir) => dir.to_path_buf(),
            None => newest(recipe).ok_or_else(|| {
                let name = recipe.display();
                Failure::Usage(format!(
                    "--resume: there is no run of {name} below runs/; name its directory with --run-dir"
                ))
            })?,
        };
        let checkpoints = dir.join("checkpoints");
        let found = list(&checkpoints)?;
        let Some(newest) = found.last() else {
            return Err(Failure::Usage(format!(
                "--resume: there is no checkpoint in {}; a run writes some with --checkpoint-every N, and one when it ends or is stopped",
                checkpoints.display()
            )));
        };
        let snapshot = read(&newest.path).map_err(|e| match Failure::from(e) {
            Failure::Refused(text) if found.len() > 1 => Failure::Refused(format!(
                "{text}\n  hint: remove {} to go on from step {}",
                newest.path.display(),
                found[found.len() - 2].step
            )),
            other => other,
        })?;
        let record = record_of(&dir)?;
        Ok(Resume { dir, record, path: newest.path.clone(), snapshot })
    }

    pub fn step(&self) -> u64 {
        self.snapshot.step
    }

    /// The params of the run as `--set` would give them.
    pub fn params(&self) -> Vec<(String, String)> {
        let list = self.record.get("params").and_then(Value::as_object);
        let text = |v: &Value| v.as_str().map_or_else(|| v.to_string(), String::from);
        list.into_iter().flatten().filter(|(_, v)| !v.is_null()).map(|(k, v)| (k.clone(), text(v))).collect()
    }

    pub fn steps(&self) -> Option<u32> {
        self.record.get("steps").and_then(Value::as_u64).and_then(|n| u32::try_from(n).ok())
    }

    pub fn seed(&self) -> Option<i64> {
        self.record.get("seed").and_then(Value::as_i64)
    }

    pub fn precision(&self) -> Option<String> {
        self.record.get("precision").and_then(Value::as_str).map(String::from)
    }

    /// Puts a freshly built run where the checkpoint was taken.
    pub fn restore(&self, run: &Run) -> Result<(), Failure> {
        let refuse = |what: String| Failure::Refused(format!("{}: {what}", self.path.display()));
        let s = &self.snapshot;
        let cursor = s
            .record
            .get("cursor")
            .and_then(Value::as_object)
            .ok_or_else(|| refuse("run.json: cursor: is missing".into()))?;
        let rng = s.record.get("rng").unwrap_or(&Value::Null);
        let (Some(seed), Some(step)) = (rng["seed"].as_u64(), rng["step"].as_u64().and_then(|n| u32::try_from(n).ok()))
        else {
            return Err(refuse("run.json: rng: needs `seed` and `step`".into()));
        };
        let mut values: Vec<_> = s.model.iter().map(|(path, t)| (format!("{MODEL}{path}"), t.clone())).collect();
        values.extend(s.optimizer.iter().cloned());
        run.load_states(&values).map_err(|what| {
            refuse(format!("does not fit the recipe: {what}\n  hint: a changed model starts a run of its own"))
        })?;
        let number = |v: &Value| match v {
            Value::Bool(b) => Some(ParamValue::Bool(*b)),
            Value::Number(n) => {
                Some(n.as_i64().map_or_else(|| ParamValue::Float(n.as_f64().unwrap_or(f64::NAN)), ParamValue::Int))
            }
            Value::String(s) => Some(ParamValue::Str(s.clone())),
            _ => None,
        };
        let cursor: Vec<_> = cursor.iter().filter_map(|(k, v)| Some((k.clone(), number(v)?))).collect();
        run.seek(&cursor)?;
        run.set_rng((seed, step));
        Ok(())
    }
}
