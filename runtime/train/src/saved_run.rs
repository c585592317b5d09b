//! Opens a run as one of its checkpoints has it, to evaluate it, to sample from it, or to go on with it at a prompt.
//!
//! The recipe is the text that the run directory stores, in the version that took the checkpoint's step, with the params of the
//! checkpoint; or an edited file. Nothing is written to the directory, which may be that of a running process.

use crate::data_record::{Compare, DataRecord, Entry};
use crate::error::{Error, Result};
use crate::history::{self, Files};
use crate::hot_reload::StartOptions;
use crate::resume::Resume;
use crate::source::Source;
use perilune_checkpoint::{CHECKPOINTS, RECORD};
use perilune_core::error::did_you_mean;
use perilune_lua::{Loaded, Recipe, Run, Runtime, StateMigration, StoredRun};
use perilune_policy::Directory;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// A run at one of its checkpoints.
pub struct SavedRun {
    resume: Resume,
    source: Source,
    /// The texts of the recipe and of the files that it requires; none for an edited recipe, whose files are on the disk.
    files: Files,
    edited: bool,
}

/// The States of optimizers and of the loss scaler, which an evaluation does not read.
const OF_TRAINING: [&str; 2] = ["optim.", "scaler."];

impl SavedRun {
    /// Reads the checkpoint of step `at` of the run in `dir`, or its last one.
    ///
    /// # Errors
    /// There is no such checkpoint, or a file of the run is damaged.
    pub fn open(dir: &Path, at: Option<u64>) -> Result<SavedRun> {
        SavedRun::within(&Directory::open(dir)?, at)
    }

    /// [`SavedRun::open`] of an open directory.
    fn within(handle: &Directory, at: Option<u64>) -> Result<SavedRun> {
        let dir = handle.path();
        let resume = Resume::within(handle.clone(), at, &dir.display().to_string())?.with_its_params();
        let path = recipe_path(&resume.record, dir)?;
        let home = path.parent().map(Path::to_path_buf).unwrap_or_default();
        let files = history::version_at(handle, &resume.record, &home, resume.step())?.files;
        let text = files.first().map(|f| f.1.clone());
        let text = text.ok_or_else(|| Error::Refused(format!("{}: run.json: files: is empty", dir.display())))?;
        Ok(SavedRun { resume, source: Source { path, text }, files, edited: false })
    }

    /// Takes the recipe from a file instead. Its model must fit the checkpoint, its optimizers need not.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn with_recipe(self, path: &Path) -> Result<SavedRun> {
        Ok(SavedRun { source: Source::read(path)?, files: Files::new(), edited: true, ..self })
    }

    /// Returns the run directory.
    pub fn dir(&self) -> &Path {
        &self.resume.dir
    }

    /// Returns the record of the run, `run.json`.
    pub fn record(&self) -> &Map<String, Value> {
        &self.resume.record
    }

    /// Returns the recipe: its path, as the run was given it, and the text that will run.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// Returns the texts of the recipe and of the files that it requires; none for a file on the disk.
    pub fn files(&self) -> &Files {
        &self.files
    }

    /// Returns the step of the checkpoint.
    pub fn step(&self) -> u64 {
        self.resume.step()
    }

    /// Loads the recipe in a runtime and builds the run with the States of the checkpoint. The params of the runtime, and `start`,
    /// override those of the checkpoint.
    ///
    /// # Errors
    /// The recipe fails, or the checkpoint does not fit it.
    pub fn build(&self, runtime: &Runtime, start: &StartOptions) -> Result<(Recipe, Run)> {
        let start = self.resume.start_options(start);
        runtime.set_texts(&self.files);
        runtime.keep_params(self.resume.params(), BTreeMap::new());
        if let Some(seed) = start.seed {
            runtime.host().engine.borrow_mut().recorder.seed(seed as u64);
        }
        let recipe = match self.source.load(runtime)? {
            Loaded::Recipe(recipe) => recipe,
            Loaded::Script => {
                let shown = self.source.path.display();
                return Err(Error::Usage(format!("{shown} is a plain script; the run was made by a recipe")));
            }
        };
        if let Some(steps) = start.steps
            && !runtime.params().names.iter().any(|n| n == "steps")
        {
            recipe.set_steps(i64::from(steps))?;
        }
        let run = recipe.start(start.seed, start.precision.as_deref(), start.memory_budget)?;
        runtime.host().fix_mesh();
        let handover = self.resume.load_into(&run, self.edited)?;
        self.check_fit(&handover, &recipe)?;
        Ok((recipe, run))
    }

    /// Refuses a recipe whose model has other States than the checkpoint.
    fn check_fit(&self, handover: &StateMigration, recipe: &Recipe) -> Result<()> {
        let mut h = handover.clone();
        let mut cure = "the run directory has the recipe that it was made with; --recipe FILE takes another one";
        if self.edited {
            let counts = |path: &String| !OF_TRAINING.iter().any(|prefix| path.starts_with(prefix));
            h.new.retain(counts);
            h.dropped.retain(counts);
            h.reshaped.retain(|(path, ..)| counts(path));
            h.kept.retain(|(path, _)| counts(path));
            if recipe.has("migrate") {
                (h.new, h.reshaped, h.dropped) = (Vec::new(), Vec::new(), Vec::new());
            }
            cure = "its model must have the States of the checkpoint, or recipe.migrate must fill them";
        }
        if h.exact() { Ok(()) } else { Err(self.resume.misfit(&h, cure)) }
    }

    /// Compares the data that the recipe has read as it was built with those of the run. Returns warnings about differences;
    /// `notice` is called with the path and size of a large file that has to be hashed.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn compare_data(&self, runtime: &Runtime, notice: &dyn Fn(&str, u64)) -> Result<Vec<String>> {
        let known = Entry::all(&self.resume.record);
        let mut data = DataRecord::new(runtime.policy().clone(), known, Compare::Accept, false);
        data.begin(self.step(), notice)
    }
}

/// Evaluates a split of a run.
///
/// # Errors
/// There is no such split, or the recipe has neither `loss` nor `evaluate`, or one of them fails.
pub fn evaluate(run: &Run, split: &str) -> Result<Vec<(String, f64)>> {
    let splits = run.splits();
    if !splits.iter().any(|known| known == split) {
        let near = did_you_mean(split, splits.iter().map(String::as_str)).map(|n| format!(". Did you mean '{n}'?"));
        return Err(Error::Usage(format!(
            "--split {split}: the data of the recipe has no split of that name (it has {}){}",
            splits.join(", "),
            near.unwrap_or_default()
        )));
    }
    Ok(run.evaluate(split)?)
}

/// Returns the path of the recipe as the run was given it.
pub(crate) fn recipe_path(record: &Map<String, Value>, dir: &Path) -> Result<PathBuf> {
    let path = record.get("path").and_then(Value::as_str).map(PathBuf::from);
    path.ok_or_else(|| Error::Refused(format!("{}: run.json: path: is missing", dir.display())))
}

/// Lets recipes, scripts and the prompt of a runtime open runs by `pl.load_run`.
pub fn enable_load_run(runtime: &Runtime) {
    let read = |dir: &Directory, at: Option<u64>| {
        let stored = SavedRun::within(dir, at).and_then(SavedRun::stored);
        stored.map_err(|e| {
            let text = e.to_string();
            // The option of a command line is none of a function.
            let option = format!("--at {}: ", at.unwrap_or_default());
            text.strip_prefix(&option).map(String::from).unwrap_or(text)
        })
    };
    *runtime.host().read_run.borrow_mut() = Some(Rc::new(read));
}

impl SavedRun {
    /// Returns the run as plain data.
    fn stored(self) -> Result<StoredRun> {
        let start = self.resume.start_options(&StartOptions::default());
        let (cursor, rng) = self.resume.position()?;
        let step = self.step();
        let inside = self.resume.path.file_name().unwrap_or_default();
        Ok(StoredRun {
            step,
            rng,
            cursor,
            states: self.resume.states(),
            params: self.resume.params(),
            seed: start.seed,
            precision: start.precision,
            steps: start.steps.map(i64::from),
            path: self.source.path,
            files: self.files,
            record: Path::new(CHECKPOINTS).join(inside).join(RECORD),
        })
    }
}
