//! Decides how a run with `resume` begins: at its last checkpoint, or anew where it has none.
//!
//! A restart script that always resumes never gets stuck: a directory that is not there, holds no run, or holds a run that
//! ended before its first checkpoint is one to start in. A run whose checkpoints are missing is not, since a start would delete
//! its log.

use crate::claim::{Claim, Contents, contents};
use crate::error::{Error, Result};
use crate::hot_reload::StartOptions;
use crate::params;
use crate::resume::{Resume, newest, record_of};
use crate::run_lock::RunLock;
use crate::run_log::{self, METRICS};
use crate::rundir::RECORD;
use crate::spec::RunSpec;
use perilune_checkpoint::{CHECKPOINTS, Found, list};
use perilune_policy::Directory;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// How a run with `resume` begins.
pub(crate) enum Beginning {
    Checkpoint(Box<Resume>),
    Anew(Restart),
}

/// A run that starts from its beginning.
pub(crate) struct Restart {
    pub dir: PathBuf,
    /// Why it has no checkpoint, as in `the run was killed before its first checkpoint`.
    pub reason: String,
    /// The handle and the lock of a directory that holds a run, and what its `run.json` says.
    held: Option<(Directory, RunLock, Contents)>,
}

impl Beginning {
    /// Finds the run that is resumed by this description: in its directory, or else the newest run of its recipe below `runs/`.
    pub fn find(spec: &RunSpec, recipe: &Path) -> Result<Beginning> {
        // The directory of a branch is that of the new run.
        let given = spec.resume_from.as_deref().or(spec.run_dir.as_deref().filter(|_| !spec.branch));
        let dir = match given {
            Some(dir) => dir.to_path_buf(),
            None => newest(recipe).ok_or_else(|| {
                let name = recipe.display();
                Error::Usage(format!(
                    "--resume: there is no run of {name} below runs/; name its directory with --run-dir"
                ))
            })?,
        };
        if spec.branch {
            // Nothing is written into the directory of a branch's origin, not even a lock.
            return Ok(Beginning::Checkpoint(Box::new(Resume::at(dir, spec.at, "--branch")?)));
        }
        let handle = match Directory::open(&dir) {
            Ok(handle) => handle,
            Err(e) if e.is_not_found() => return Ok(Beginning::Anew(Restart::nothing(dir))),
            Err(e) => return Err(e.into()),
        };
        let checkpoints = list(&dir.join(CHECKPOINTS))?;
        let found = contents(&handle)?;
        let unusable = || {
            let at = dir.join(RECORD);
            Err(Error::Refused(format!("{}: is not the record of a run", at.display())))
        };
        match found {
            Contents::Nothing if checkpoints.is_empty() => return Ok(Beginning::Anew(Restart::nothing(dir))),
            // Nothing is written into such a directory, not even a lock.
            Contents::Foreign if checkpoints.is_empty() => return unusable(),
            _ => {}
        }
        // Lock before the checkpoint is read, because another process may be replacing it.
        let lock = RunLock::take(&handle)?;
        // That process may have ended since.
        let (checkpoints, found) = (list(&dir.join(CHECKPOINTS))?, contents(&handle)?);
        if !checkpoints.is_empty() {
            if let Some(at) = spec.at.filter(|_| !spec.discard_later) {
                refuse_later(at, &checkpoints, &dir)?;
            }
            return Ok(Beginning::Checkpoint(Box::new(Resume::locked(handle, spec.at, lock)?)));
        }
        let reason = match &found {
            // Checks the seal: a record that was changed is refused.
            Contents::Run(_) => ended(&record_of(&dir)?, &handle)?,
            Contents::Incomplete => "the run was killed as it started: its run.json is incomplete".into(),
            Contents::Nothing | Contents::Foreign => return unusable(),
        };
        Ok(Beginning::Anew(Restart { dir, reason, held: Some((handle, lock, found)) }))
    }
}

/// Refuses a resume in place that would replace later checkpoints: they may be the result of days.
fn refuse_later(at: u64, checkpoints: &[Found], dir: &Path) -> Result<()> {
    let is_there = checkpoints.iter().any(|f| f.step == at);
    let later: Vec<String> = checkpoints.iter().filter(|f| f.step > at).map(|f| f.step.to_string()).collect();
    if !is_there || later.is_empty() {
        return Ok(());
    }
    Err(Error::Usage(format!(
        "--at {at}: the run in {} has later checkpoints (of step {}), which continuing there would replace\n  \
         hint: --branch continues in a new directory and leaves this one as it is; --discard-later deletes them and the steps after {at}",
        dir.display(),
        later.join(", ")
    )))
}

impl Beginning {
    /// Returns what the run continues from, or what it starts anew after.
    pub fn parts(self) -> (Option<Resume>, Option<Restart>) {
        match self {
            Beginning::Checkpoint(resume) => (Some(*resume), None),
            Beginning::Anew(restart) => (None, Some(restart)),
        }
    }
}

/// Says how a run without a checkpoint ended. A run that has written one is refused.
fn ended(record: &Map<String, Value>, dir: &Directory) -> Result<String> {
    let log = run_log::text(dir, METRICS)?;
    if run_log::complete(&log).any(|line| line.contains("\"event\":\"checkpoint\"")) {
        let (at, log) = (dir.path().join(CHECKPOINTS), dir.path().join(METRICS));
        return Err(Error::Usage(format!(
            "--resume: there is no checkpoint in {}, but the run has written some ({}): they were removed\n  \
             hint: restore them, or start anew with --overwrite, which deletes the remaining files of the run",
            at.display(),
            log.display()
        )));
    }
    let text = |key: &str| record.get(key).and_then(Value::as_str).unwrap_or_default();
    Ok(match text("status") {
        "running" => "the run was killed before its first checkpoint".to_string(),
        "failed" => {
            let error = text("error").lines().next().unwrap_or_default();
            format!("the run failed before its first checkpoint ({error})")
        }
        status => format!("the run ended before its first checkpoint (status {status})"),
    })
}

impl Restart {
    fn nothing(dir: PathBuf) -> Restart {
        let reason = "there is no run in it yet".to_string();
        Restart { dir, reason, held: None }
    }

    /// Claims the directory for the new run and deletes the files of the previous one.
    pub fn claim(self) -> Result<Claim> {
        match self.held {
            Some((dir, lock, found)) => Claim { dir, lock }.cleared(&found),
            None => Claim::take(Some(&self.dir), "", false),
        }
    }

    fn recorded(&self, key: &str) -> Option<&Value> {
        match &self.held {
            Some((.., Contents::Run(record))) => record.get(key),
            _ => None,
        }
    }

    /// Returns the params that the run was given explicitly.
    pub fn given(&self) -> Vec<(String, String)> {
        self.recorded("set").and_then(Value::as_object).map(params::as_given).unwrap_or_default()
    }

    /// Returns what overrides the recipe: the options of this start, or else what the run was given. `offered` has the latter
    /// among the params.
    pub fn start_options(&self, now: &StartOptions, offered: &[(String, String)]) -> StartOptions {
        let number = |name: &str| {
            let value = offered.iter().find(|(key, _)| key == name).map(|(_, value)| value);
            value.and_then(|value| value.parse::<i64>().ok())
        };
        let precision = self.recorded(SET_PRECISION).and_then(Value::as_str).map(String::from);
        StartOptions {
            seed: now.seed.or(number("seed")),
            steps: now.steps.or(number("steps").and_then(|n| u32::try_from(n).ok())),
            precision: now.precision.clone().or(precision),
            memory_budget: now.memory_budget,
            perturb: now.perturb.or(self.recorded(PERTURB).and_then(Value::as_u64)),
        }
    }
}

/// The field of `run.json` with the precision that was given explicitly.
pub(crate) const SET_PRECISION: &str = "set_precision";
/// The field with the seed of a perturbation of the initial weights.
pub(crate) const PERTURB: &str = "perturb";
