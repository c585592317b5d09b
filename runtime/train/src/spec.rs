//! Describes a run: the plain data that a [`crate::Trainer`] is made of.

use crate::error::{Error, Result};
use crate::history::Files;
use crate::hot_reload::StartOptions;
use crate::replay::Replay;
use crate::retention::Retention;
use std::path::PathBuf;

/// A description of a run. All fields except the recipe have defaults.
#[derive(Clone, Debug, Default)]
pub struct RunSpec {
    /// The recipe or script, a `.lua` file.
    pub recipe: PathBuf,
    /// Params set explicitly, as `--set` gives them; the runtime has to be opened with the same ones.
    pub params: Vec<(String, String)>,
    pub start: StartOptions,
    /// Texts to run instead of the files on the disk, the recipe first: those of a run that is resumed as it was.
    pub files: Option<Files>,
    /// The directory of results; `runs/NAME-DATE-TIME` by default. A resume reads the run here, unless `resume_from` names it.
    pub run_dir: Option<PathBuf>,
    /// The program has chosen `run_dir`, so a script that makes no use of it ignores nothing.
    pub run_dir_is_default: bool,
    /// Write a checkpoint whenever the step is a multiple of this, besides the one at the end.
    pub checkpoint_every: Option<u64>,
    pub retention: Retention,
    /// Delete a run that is in `run_dir`, and start anew there.
    pub overwrite: bool,
    /// Continue from the last checkpoint of the run in `run_dir`, or of the recipe's newest run; start from the beginning where
    /// it has none.
    pub resume: bool,
    /// Stop after this step with a checkpoint and an evaluation, although the run has more steps; a resume continues it.
    pub until: Option<u64>,
    /// With `resume`: the directory of the run.
    pub resume_from: Option<PathBuf>,
    /// With `resume`: the step of the checkpoint to continue from, instead of the last one.
    pub at: Option<u64>,
    /// With `resume`: continue in a new directory (`run_dir`), which begins as a copy of the run up to the checkpoint.
    pub branch: bool,
    /// With `at`, unless it is a branch: delete the checkpoints after that step, which continuing replaces.
    pub discard_later: bool,
    /// With `resume`: apply an edited recipe as a hot reload would.
    pub edited: bool,
    /// With `resume`: continue although data files have changed since the run read them.
    pub changed_data: bool,
    /// With `resume` or `replay`: hash the data files that are compared, also where size and time are equal.
    pub verify_data: bool,
    /// Apply edits of the recipe, and of the files it requires, when they are saved.
    pub watch: bool,
    /// Also write the run to the MLflow file store in this folder. A resumed run continues in the one that it began with.
    pub mlflow: Option<PathBuf>,
    /// Findings of the data check are an error instead of warnings.
    pub strict: bool,
    /// Take no sample of the data before the first step.
    pub no_data_check: bool,
    /// The policy for a non-finite loss or gradient norm: `stop`, `skip` or `warn`.
    pub on_nan: Option<String>,
    /// The policy for a spike of the loss: `warn`, `skip`, `stop` or `off`.
    pub on_spike: Option<String>,
    /// Repeat this run instead of loading the recipe from the disk.
    pub replay: Option<Replay>,
    /// The command line and the number of CPU threads, for `run.json` only.
    pub command: Vec<String>,
    pub threads: usize,
}

impl RunSpec {
    /// Returns values that a recipe may have params for: `steps` and `seed`, then what a resumed run was `given`. Unlike
    /// `params`, a value for which there is no param is not an error.
    pub(crate) fn offered(&self, given: Vec<(String, String)>) -> Result<Vec<(String, String)>> {
        let mut out = Vec::new();
        for (name, value) in [("steps", self.start.steps.map(i64::from)), ("seed", self.start.seed)] {
            let Some(value) = value else { continue };
            if self.params.iter().any(|(key, _)| key == name) {
                return Err(Error::Usage(format!("--{name} and --set {name}=… set the same param; give one of them")));
            }
            out.push((name.to_string(), value.to_string()));
        }
        for (name, value) in given {
            if !out.iter().chain(&self.params).any(|(key, _)| *key == name) {
                out.push((name, value));
            }
        }
        Ok(out)
    }

    /// Lists the options given that a plain script does not read; `params` are the names of those that it reads. `has_run`: it calls `pl.run`.
    pub(crate) fn ignored_by_script(&self, params: &[String], has_run: bool) -> Vec<&'static str> {
        let given = [
            ("--steps", self.start.steps.is_some() && !params.iter().any(|n| n == "steps")),
            ("--run-dir", self.run_dir.is_some() && !self.run_dir_is_default && !has_run),
            ("--overwrite", self.overwrite && !has_run),
            ("--until", self.until.is_some()),
            ("--precision", self.start.precision.is_some()),
            ("--memory-budget", self.start.memory_budget.is_some()),
            ("--perturb", self.start.perturb.is_some()),
            ("--checkpoint-every", self.checkpoint_every.is_some()),
            ("--watch", self.watch),
            ("--strict", self.strict),
            ("--no-data-check", self.no_data_check),
            ("--mlflow", self.mlflow.is_some()),
            ("--on-nan", self.on_nan.is_some()),
            ("--on-spike", self.on_spike.is_some()),
        ];
        given.into_iter().chain(self.retention.given()).filter(|o| o.1).map(|o| o.0).collect()
    }
}
