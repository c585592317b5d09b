//! Reads what a replay needs: the versions of a recorded run, the steps they ran from, and the weights at its end.
//!
//! A replay starts from the files of the run's first version and applies each later one after the step that it was applied
//! after; a stop and a resume count as a version. On the same device kind and release it reproduces the weights bit by bit.

use crate::data_record::Entry;
use crate::error::{Error, Result};
use crate::history::{self, Files, Version};
use serde_json::{Map, Value};
use std::path::Path;

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
    /// The data that it read.
    pub(crate) data: Vec<Entry>,
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

    /// Reads the run in `dir`, whose `run.json` is `record`. File names are relative to the directory of `recipe`.
    pub fn read(dir: &Path, record: &Map<String, Value>, recipe: &Path) -> Result<Replay> {
        let steps = record.get("steps_done").and_then(Value::as_u64);
        let steps = steps.ok_or_else(|| {
            Error::Usage(format!("{}: the run has not ended; only ended runs can be repeated", dir.display()))
        })?;
        let (files, versions) = history::read(dir, record, recipe)?;
        // Histories of older releases lack resumes; `run.json` counts them.
        let resumed = record.get("resumed").and_then(Value::as_array).map_or(0, Vec::len);
        if resumed > 0 && !versions.iter().any(|v| v.resumed) {
            return Err(Error::Usage(format!(
                "{}: the run was resumed by a version that did not record how; it cannot be repeated",
                dir.display()
            )));
        }
        let weights = record.get("weights").and_then(Value::as_str).map(String::from);
        Ok(Replay { files, versions, steps, weights, data: Entry::all(record) })
    }
}
