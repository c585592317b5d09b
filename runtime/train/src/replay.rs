//! Reads what a replay needs: the versions of a recorded run, the steps they ran from, and the weights at its end.
//!
//! A replay of a whole run starts from the files of the run's first version and applies each later one after the step that it was
//! applied after; a stop and a resume count as a version. On the same device kind and release it reproduces the weights bit by bit.
//! A replay of a window ([`Replay::window`]) starts from a checkpoint and compares each step (`audit/`).

use crate::audit::{Recording, Window};
use crate::data_record::Entry;
use crate::digests::DigestOptions;
use crate::error::{Error, Result};
use crate::history::{self, Files, Version};
use crate::hot_reload::StartOptions;
use crate::params;
use crate::restart::{PERTURB, SET_PRECISION};
use crate::resume::Resume;
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// A recorded run, to be repeated.
#[derive(Clone, Debug)]
pub struct Replay {
    /// The files of the first version.
    pub files: Files,
    /// Later versions, in the order in which they ran.
    pub versions: Vec<Version>,
    /// The number of steps that the run took.
    pub steps: u64,
    /// The hash of its States at the end.
    pub weights: Option<String>,
    /// What it was given besides its command, and the precision: those of the run before, if it was started anew by a resume.
    pub(crate) given: Given,
    /// The data that it read.
    pub(crate) data: Vec<Entry>,
    /// The part that is repeated, unless it is the whole run.
    pub(crate) window: Option<Arc<Part>>,
    /// The digests that are written while it is repeated.
    pub(crate) digests: Option<DigestOptions>,
}

/// What a run was given, by its record.
#[derive(Clone, Default, Debug)]
pub(crate) struct Given {
    pub params: Vec<(String, String)>,
    precision: Option<String>,
    perturb: Option<u64>,
}

impl Given {
    /// Reads what a run was given. The record of one that was resumed has what the resume was given.
    fn of(record: &Map<String, Value>) -> Given {
        if record.contains_key("resumed") {
            return Given::default();
        }
        let params = record.get("set").and_then(Value::as_object).map(params::as_given).unwrap_or_default();
        let precision = record.get(SET_PRECISION).and_then(Value::as_str).map(String::from);
        Given { params, precision, perturb: record.get(PERTURB).and_then(Value::as_u64) }
    }

    /// Returns what overrides the recipe: the options of the command, or else what the run was given.
    pub fn start_options(&self, command: &StartOptions) -> StartOptions {
        let value = |name: &str| self.params.iter().find(|p| p.0 == name).map(|p| p.1.as_str());
        StartOptions {
            seed: command.seed.or_else(|| value("seed")?.parse().ok()),
            steps: command.steps.or_else(|| value("steps")?.parse().ok()),
            precision: command.precision.clone().or(self.precision.clone()),
            memory_budget: command.memory_budget,
            perturb: command.perturb.or(self.perturb),
        }
    }
}

/// A part of a recorded run that is recomputed and compared.
pub(crate) struct Part {
    pub recording: Arc<Recording>,
    /// The checkpoint to start from; none for the beginning of the run.
    pub start: Option<Resume>,
    /// The version that took its last step, if that is not the first one.
    pub version: Option<Version>,
    /// Whether the run has one version only.
    pub is_unedited: bool,
    pub from: u64,
    pub to: u64,
    /// Steps after which the run was resumed.
    pub resumed: BTreeSet<u64>,
}

impl Part {
    /// Returns the step of the checkpoint at the start; 0 for the beginning.
    pub fn start_step(&self) -> u64 {
        self.start.as_ref().map_or(0, Resume::step)
    }

    /// Returns what overrides the recipe at the start: the options of the run's command, or what a later version has recorded.
    pub fn start_options(&self, command: &StartOptions) -> StartOptions {
        let Some(version) = &self.version else { return command.clone() };
        StartOptions {
            seed: version.seed.or(command.seed),
            steps: version.steps.and_then(|n| u32::try_from(n).ok()).or(command.steps),
            precision: version.precision.clone().or(command.precision.clone()),
            memory_budget: command.memory_budget,
            perturb: None,
        }
    }

    /// Returns the params that a later version has recorded.
    pub fn params(&self) -> Option<Vec<(String, String)>> {
        self.version.as_ref()?.params.as_ref().map(params::as_given)
    }
}

impl fmt::Debug for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "steps {}..{} from the checkpoint of step {}", self.from, self.to, self.start_step())
    }
}

impl Replay {
    /// Returns the text of the recipe at the start.
    pub(crate) fn text(&self) -> Result<&str> {
        let first = self.files.first().map(|f| f.1.as_str());
        first.ok_or_else(|| Error::Refused("run.json: files: is empty".into()))
    }

    /// Returns the replay without the weights at its end, whose difference would be an error: the caller compares them.
    #[must_use]
    pub fn compared_by_caller(self) -> Replay {
        Replay { weights: None, ..self }
    }

    /// Returns the replay of a window that also writes digests of the run, and goes on where the record differs.
    #[must_use]
    pub fn with_digests(self, options: DigestOptions) -> Replay {
        Replay { digests: Some(options), ..self }
    }

    /// Reads the run in `dir`, whose `run.json` is `record`. File names are relative to the directory of `recipe`.
    pub fn read(dir: &Path, record: &Map<String, Value>, recipe: &Path) -> Result<Replay> {
        let steps = record.get("steps_done").and_then(Value::as_u64);
        let steps = steps.ok_or_else(|| {
            Error::Usage(format!(
                "{}: the run has not ended; only ended runs can be repeated as a whole\n  hint: --steps .. repeats what it has logged",
                dir.display()
            ))
        })?;
        let (files, versions) = versions(dir, record, recipe)?;
        let weights = record.get("weights").and_then(Value::as_str).map(String::from);
        let (given, data) = (Given::of(record), Entry::all(record));
        Ok(Replay { files, versions, steps, weights, given, data, window: None, digests: None })
    }

    /// Reads a window of a recording, from the last checkpoint at or before its first step.
    ///
    /// # Errors
    /// The window is not in the run, or a file of the run is damaged.
    pub fn window(recording: &Arc<Recording>, recipe: &Path, window: Window) -> Result<Replay> {
        let (dir, record, end) = (recording.path(), recording.record(), recording.end());
        let to = window.to.unwrap_or(end);
        if to > end || window.from >= to {
            return Err(Error::Usage(format!(
                "--steps {window}: {} has the steps 1 to {end}\n  hint: A..B is the steps A + 1 to B, with B at most {end}",
                dir.display()
            )));
        }
        let (first, mut later) = versions(dir, record, recipe)?;
        let is_unedited = later.is_empty();
        let at = recording.checkpoints().into_iter().rfind(|step| *step <= window.from && *step > 0);
        let start = at.map(|step| Resume::within(recording.handle().clone(), Some(step), "--steps")).transpose()?;
        let resumed = later.iter().filter(|v| v.resumed).map(|v| v.since).collect();
        let (mut files, mut version) = (first, None);
        if let Some(step) = at {
            let ran = later.iter().take_while(|v| history::is_of_step(v.since, v.owed, step)).count();
            version = later.drain(..ran).next_back();
            files = version.as_ref().map_or(files, |v| v.files.clone());
        }
        let (recording, from) = (recording.clone(), window.from);
        let part = Part { recording, start, version, is_unedited, from, to, resumed };
        let (given, data) = (Given::of(part.recording.record()), Entry::all(part.recording.record()));
        let window = Some(Arc::new(part));
        Ok(Replay { files, versions: later, steps: to, weights: None, given, data, window, digests: None })
    }
}

/// Reads the versions of a run, unless an older release has resumed it without recording how.
fn versions(dir: &Path, record: &Map<String, Value>, recipe: &Path) -> Result<(Files, Vec<Version>)> {
    let (files, versions) = history::read(dir, record, recipe)?;
    // Histories of older releases lack resumes; `run.json` counts them.
    let resumed = record.get("resumed").and_then(Value::as_array).map_or(0, Vec::len);
    if resumed > 0 && !versions.iter().any(|v| v.resumed) {
        return Err(Error::Usage(format!(
            "{}: the run was resumed by a version that did not record how; it cannot be repeated",
            dir.display()
        )));
    }
    Ok((files, versions))
}
