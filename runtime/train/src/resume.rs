//! Restores a run from its last checkpoint, or from that of a step.

use crate::error::{Error, Result};
use crate::events::{Event, Reporter};
use crate::history::{self, Change, Files, HistoryEntry};
use crate::hot_reload::StartOptions;
use crate::params::{self, Params};
use crate::run_files::{MAX_RECORD, text_in};
use crate::run_lock::RunLock;
use crate::run_log;
use crate::rundir::{LogTail, RECORD, RunDir};
use perilune_checkpoint::seal::{self, RECORD_SEAL};
use perilune_checkpoint::{CHECKPOINTS, Found, Snapshot, list_in, read_in};
use perilune_core::HostTensor;
use perilune_lua::{DroppedStates, ParamValue, Params as LoadedParams, Run, Source, StateMigration, Taking};
use perilune_policy::Directory;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const MODEL: &str = "model.";

/// A run to continue: its directory, its `run.json`, one of its checkpoints.
pub struct Resume {
    pub dir: PathBuf,
    pub record: Map<String, Value>,
    pub(crate) snapshot: Snapshot,
    pub(crate) path: PathBuf,
    /// Whether the step was chosen, so that the params are those of the checkpoint: later ones may have been edited.
    chosen: bool,
    /// The directory that is locked, and written when the run goes on.
    handle: Option<Directory>,
    /// The lock of a run that will be written.
    _lock: Option<RunLock>,
}

/// Reads the `run.json` of a run, and checks its seal.
pub fn record_of(dir: &Path) -> Result<Map<String, Value>> {
    record_in(&Directory::open(dir)?)
}

/// [`record_of`] of an open directory.
pub(crate) fn record_in(dir: &Directory) -> Result<Map<String, Value>> {
    let at = dir.path().join(RECORD);
    let text = text_in(dir, Path::new(RECORD), MAX_RECORD)?;
    let Ok(Value::Object(mut record)) = serde_json::from_str(&text) else {
        return Err(Error::Refused(format!("{}: is not the record of a run", at.display())));
    };
    // A run without an id was written by a release without seals.
    if record.contains_key(RECORD_SEAL) || record.contains_key("id") {
        seal::unseal(&mut record, &text).map_err(|rule| {
            let hint = "restore the file; `--set` changes the params of a run that is resumed";
            Error::Refused(format!("{}: {RECORD_SEAL}: {rule}\n  hint: {hint}", at.display()))
        })?;
    }
    Ok(record)
}

/// Returns every State of a checkpoint by its path in a run.
pub(crate) fn states_of(snapshot: &Snapshot) -> Vec<(String, HostTensor)> {
    let model = snapshot.model.iter().map(|(path, t)| (format!("{MODEL}{path}"), t.clone()));
    model.chain(snapshot.optimizer.iter().cloned()).collect()
}

/// Finds the run below `runs/` of this recipe file that was started last.
pub(crate) fn newest(recipe: &Path) -> Option<PathBuf> {
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

/// The number of steps that an error lists.
const LISTED: usize = 12;

fn no_such_step(step: u64, found: &[Found], dir: &Path) -> Error {
    let steps: Vec<String> = found.iter().rev().take(LISTED).rev().map(|f| f.step.to_string()).collect();
    let earlier = if found.len() > LISTED { "…, " } else { "" };
    let list = format!("{earlier}{}", steps.join(", "));
    let nearest = found.iter().min_by_key(|f| f.step.abs_diff(step)).map_or(0, |f| f.step);
    Error::Usage(format!(
        "--at {step}: the run in {} has no checkpoint of step {step} (it has {list})\n  hint: step {nearest} is the nearest; --checkpoint-every and --keep decide which there are",
        dir.display()
    ))
}

impl Resume {
    /// Reads a checkpoint of a run that this process has locked: that of step `at`, or the last one.
    pub(crate) fn locked(handle: Directory, at: Option<u64>, lock: RunLock) -> Result<Resume> {
        Ok(Resume { _lock: Some(lock), ..Resume::within(handle, at, "--resume")? })
    }

    /// Reads the last checkpoint of the run in `dir`; messages begin with `op`.
    pub fn of(dir: PathBuf, op: &str) -> Result<Resume> {
        Resume::at(dir, None, op)
    }

    /// Reads the checkpoint of step `at` of the run in `dir`, or the last one. Messages about missing checkpoints begin with `op`.
    ///
    /// # Errors
    /// There is no such checkpoint, or a file of it or `run.json` is damaged.
    pub fn at(dir: PathBuf, at: Option<u64>, op: &str) -> Result<Resume> {
        Resume::within(Directory::open(&dir)?, at, op)
    }

    /// [`Resume::at`] of an open directory.
    pub(crate) fn within(handle: Directory, at: Option<u64>, op: &str) -> Result<Resume> {
        let dir = handle.path().to_path_buf();
        let none = || {
            let at = dir.join(CHECKPOINTS);
            Error::Usage(format!(
                "{op}: there is no checkpoint in {}; a run writes them with --checkpoint-every N, and one when it ends or is stopped",
                at.display()
            ))
        };
        let checkpoints = match handle.subdirectory(CHECKPOINTS) {
            Err(e) if e.is_not_found() => return Err(none()),
            opened => opened?,
        };
        let found = list_in(&checkpoints)?;
        if found.is_empty() {
            return Err(none());
        }
        let k = match at {
            None => found.len() - 1,
            Some(step) => found.iter().position(|f| f.step == step).ok_or_else(|| no_such_step(step, &found, &dir))?,
        };
        let snapshot = read_in(&checkpoints, &found[k]).map_err(|e| match (Error::from(e), at) {
            (Error::Refused(text), None) if k > 0 => Error::Refused(format!(
                "{text}\n  hint: remove {} to continue from step {}",
                found[k].path.display(),
                found[k - 1].step
            )),
            (other, _) => other,
        })?;
        let record = record_in(&handle)?;
        if snapshot.record.contains_key(run_log::LOGS) && !record.contains_key("id") {
            let at = dir.join("run.json");
            return Err(Error::Refused(format!("{}: id: is missing: the file was changed or damaged", at.display())));
        }
        let path = found[k].path.clone();
        Ok(Resume { dir, record, path, snapshot, chosen: at.is_some(), handle: Some(handle), _lock: None })
    }

    /// A run of which another process has the directory.
    pub(crate) fn elsewhere(dir: PathBuf, path: PathBuf, record: Map<String, Value>, snapshot: Snapshot) -> Resume {
        Resume { dir, record, snapshot, path, chosen: false, handle: None, _lock: None }
    }

    /// The same checkpoint in another directory, which this process has locked.
    pub(crate) fn moved(self, record: Map<String, Value>, path: PathBuf, handle: Directory, lock: RunLock) -> Resume {
        let dir = handle.path().to_path_buf();
        Resume { dir, record, path, handle: Some(handle), _lock: Some(lock), ..self }
    }

    /// Makes the params those of the checkpoint, whichever step was asked for.
    pub(crate) fn with_its_params(self) -> Resume {
        Resume { chosen: true, ..self }
    }

    /// Returns the handle of the run directory.
    pub(crate) fn open(&self) -> Result<Directory> {
        match &self.handle {
            Some(handle) => Ok(handle.clone()),
            None => Ok(Directory::open(&self.dir)?),
        }
    }

    /// Opens the run directory to continue in it.
    pub(crate) fn open_dir(&self) -> Result<(RunDir, LogTail)> {
        RunDir::resume(&self.open()?, self.record.clone(), &self.snapshot.record, self.step())
    }

    /// Returns the step of the checkpoint.
    pub fn step(&self) -> u64 {
        self.snapshot.step
    }

    fn object(&self, key: &str) -> Map<String, Value> {
        self.record.get(key).and_then(Value::as_object).cloned().unwrap_or_default()
    }

    /// Returns the params of the run as `--set` would give them.
    pub fn params(&self) -> Vec<(String, String)> {
        let of_checkpoint = self.snapshot.record.get("params").and_then(Value::as_object).filter(|_| self.chosen);
        of_checkpoint.map_or_else(|| params::as_given(&self.object("params")), params::as_given)
    }

    /// Returns the params that were given explicitly.
    pub fn given(&self) -> Vec<(String, String)> {
        params::as_given(&self.object("set"))
    }

    /// Returns the defaults that the params of its recipe had, as text.
    pub fn defaults(&self) -> BTreeMap<String, String> {
        params::as_given(&self.object("defaults")).into_iter().collect()
    }

    /// Returns what overrides the recipe: the options of this start, or else what the run has.
    pub(crate) fn start_options(&self, now: &StartOptions) -> StartOptions {
        let steps = self.record.get("steps").and_then(Value::as_u64).and_then(|n| u32::try_from(n).ok());
        let precision = self.record.get("precision").and_then(Value::as_str).map(String::from);
        StartOptions {
            seed: now.seed.or_else(|| self.record.get("seed").and_then(Value::as_i64)),
            steps: now.steps.or(steps),
            precision: now.precision.clone().or(precision),
            memory_budget: now.memory_budget,
            // The States of a checkpoint are not initial ones.
            perturb: None,
        }
    }

    /// Loads the checkpoint into a freshly built run. Its States must match those of the checkpoint; with `edited` the ones
    /// that fit are taken, as in a reload.
    pub fn restore(&self, run: &Run, edited: bool) -> Result<StateMigration> {
        let handover = self.load_into(run, edited)?;
        if !edited && !handover.exact() {
            return Err(self.misfit(
                &handover,
                &format!(
                    "`--resume --edited` continues with the States that fit; `perilune check RECIPE --against {}` lists them",
                    self.dir.display()
                ),
            ));
        }
        Ok(handover)
    }

    /// Returns the error of a recipe that the checkpoint does not fit.
    pub(crate) fn misfit(&self, handover: &StateMigration, cure: &str) -> Error {
        let path = self.path.display();
        Error::Refused(format!("{path}: does not fit the recipe: {}\n  hint: {cure}", handover.misfit()))
    }

    /// Loads the checkpoint into a freshly built run, if it fits; with `fitting`, the States that do.
    pub(crate) fn load_into(&self, run: &Run, fitting: bool) -> Result<StateMigration> {
        let (cursor, rng) = self.position()?;
        let mut states = self.states();
        run.add_counts(&mut states)?;
        let how = if fitting { Taking::Fitting } else { Taking::Exact };
        let source = Source::Values { states: &states, cursor: &cursor };
        let handover = run.take_over(source, &DroppedStates::default(), how)?;
        if fitting || handover.exact() {
            run.set_rng(rng);
        }
        Ok(handover)
    }

    /// Returns every State of the checkpoint by its path in a run.
    pub(crate) fn states(&self) -> Vec<(String, HostTensor)> {
        states_of(&self.snapshot)
    }

    /// Returns the cursor of the checkpoint, and the seed and step of its random numbers.
    pub(crate) fn position(&self) -> Result<(Vec<(String, ParamValue)>, (u64, u32))> {
        let refuse = |what: String| Error::Refused(format!("{}: {what}", self.path.display()));
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
        let number = |v: &Value| match v {
            Value::Bool(b) => Some(ParamValue::Bool(*b)),
            Value::Number(n) => {
                Some(n.as_i64().map_or_else(|| ParamValue::Float(n.as_f64().unwrap_or(f64::NAN)), ParamValue::Int))
            }
            Value::String(s) => Some(ParamValue::Str(s.clone())),
            _ => None,
        };
        let cursor: Vec<_> = cursor.iter().filter_map(|(k, v)| Some((k.clone(), number(v)?))).collect();
        Ok((cursor, (seed, step)))
    }

    /// Names the params that stay as recorded although the recipe's defaults were edited.
    fn unapplied(&self, loaded: &LoadedParams) -> Option<String> {
        let recorded = self.defaults();
        let edited = loaded.kept.iter().filter_map(|(key, value)| {
            let (was, now) = (recorded.get(key)?, loaded.defaults.get(key)?);
            let differs = was != now && now.trim_matches('"') != value;
            differs.then(|| format!("{key} stays {value} (the edited default {now} is not applied)"))
        });
        let edited: Vec<String> = edited.collect();
        let hint = "--resume --edited applies edited defaults, --set KEY=VALUE sets a param";
        (!edited.is_empty()).then(|| format!("the run keeps its params: {}\n  hint: {hint}", edited.join(", ")))
    }

    /// Reports the resume and records it in the history, which a replay follows.
    pub(crate) fn enter(
        &self,
        files: &Files,
        (run, values): (&Run, &Params),
        handover: &StateMigration,
        about: &Map<String, Value>,
        (edited, loaded): (bool, &LoadedParams),
        reporter: &mut Reporter,
    ) -> Result<()> {
        let name = files.first().map(|f| f.0.clone()).unwrap_or_default();
        // The version that ran until then; the history of an older release may lack it.
        let (first, versions) = history::read(&self.dir, &self.record, &name).unwrap_or_default();
        let before = versions.into_iter().rfind(|v| v.since <= self.step()).map_or(first, |v| v.files);
        let mut changed: Vec<String> = Vec::new();
        let was = self.params();
        for (key, value) in params::as_given(params::to_json(values).as_object().unwrap_or(&Map::new())) {
            match was.iter().find(|p| p.0 == key) {
                Some((_, old)) if *old == value => {}
                Some((_, old)) => changed.push(format!("{key} {old} -> {value}")),
                None => changed.push(format!("{key} {value}")),
            }
        }
        changed.extend(history::places(&before, files));
        let step = self.step();
        let states = handover.show();
        reporter.tell(&Event::Resumed { step, dir: &self.dir, changed: &changed, states: states.as_deref() });
        if let Some(text) = self.unapplied(loaded) {
            reporter.warning(&text);
        }
        let entry = HistoryEntry {
            step,
            kind: Change::Resumed,
            changed: &changed,
            before: &before,
            states,
            run: Some((run, values)),
            device: about["device"].as_str(),
            ..HistoryEntry::new(files)
        };
        reporter.history(&entry)?;
        let fields = ["params", "defaults", "set", "steps", "precision", "parameters", "frozen_parameters"];
        let fields = fields.map(|key| (key, about[key].clone()));
        // An edited default that was not applied is applied by a later resume with `edited`.
        let waits = !edited && self.record.contains_key("defaults");
        let fields = fields.into_iter().filter(|f| f.0 != "defaults" || !waits);
        reporter.dir.as_mut().map_or(Ok(()), |dir| dir.update(fields))
    }
}
