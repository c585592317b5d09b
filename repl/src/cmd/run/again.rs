//! Runs the arguments of a record again: for a replay, a bundle, or the measure of an envelope.

use super::{RunArgs, Stored};
use crate::cmd::bundle::repeat::BundleOptions;
use crate::confined::{Terms, UntrustedArgs};
use crate::failure::Failure;
use crate::policy_args::PolicyArgs;
use perilune_train::history::Files;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// How a replay runs the arguments of a record.
#[derive(Clone, Debug, Default)]
pub struct Recorded {
    /// The directory where the run was started, from which its relative paths start; none for the current one.
    pub start: Option<PathBuf>,
    /// The options of the replay itself.
    pub files: PolicyArgs,
    pub verify_data: bool,
}

impl RunArgs {
    /// Changes the arguments to those of the same run from its start, in another directory. What they say of files is replaced:
    /// they come from a record, which must not open any.
    pub fn again(
        &mut self,
        record: &Map<String, Value>,
        recorded: Recorded,
        run_dir: Option<PathBuf>,
        json: bool,
        quiet: bool,
    ) {
        (self.files, self.verify_data) = (recorded.files.clone(), recorded.verify_data);
        self.device.place.sum_as(record);
        self.recorded = Some(recorded);
        (self.run_dir, self.json, self.quiet) = (run_dir, json, quiet);
        (self.overwrite, self.resume, self.edited, self.watch) = (false, None, false, false);
        (self.changed_data, self.at, self.branch, self.discard_later) = (false, None, false, false);
        // A record names no place to write to.
        (self.until, self.mlflow) = (None, None);
        self.untrusted = UntrustedArgs::default();
    }

    /// Whether only results and the output of the recipe are printed.
    pub fn is_quiet(&self) -> bool {
        self.quiet || self.json
    }

    /// Whether events are printed as JSON.
    pub fn is_json(&self) -> bool {
        self.json
    }

    /// The options of bundles.
    pub fn bundle(&self) -> &BundleOptions {
        &self.bundle
    }

    /// What the options grant to the recipe of a bundle, and whether that is remembered.
    pub fn grants(&self) -> (Terms, bool) {
        let mut terms = Terms::default();
        self.files.add_grants(&mut terms);
        self.untrusted.add_to(&mut terms);
        (terms, self.remember)
    }

    /// The options of files, for a bundle that is repeated.
    pub fn recorded(&self, start: &Path) -> Recorded {
        Recorded { start: Some(start.to_path_buf()), files: self.files.clone(), verify_data: false }
    }

    /// The run directory that the command line names.
    pub fn run_dir(&self) -> Option<&Path> {
        self.run_dir.as_deref()
    }

    /// Whether the options make another run than the one that a bundle records.
    pub fn changes_run(&self) -> bool {
        let device = &self.device;
        !self.set.is_empty()
            || self.steps.is_some()
            || self.seed.is_some()
            || device.precision.is_some()
            || device.place.has_mesh()
            || device.place.strict_shards.is_some()
    }

    /// Refuses options that a bundle cannot have.
    pub fn check_for_bundle(&self) -> Result<(), Failure> {
        let given = [
            ("--resume", self.resume.is_some()),
            ("--until", self.until.is_some()),
            ("--watch", self.watch),
            ("--strict", self.strict),
            ("--on-nan", self.on_nan.is_some()),
            ("--on-spike", self.on_spike.is_some()),
        ];
        let Some((flag, _)) = given.into_iter().find(|option| option.1) else { return Ok(()) };
        let cure = "perilune bundle extract unpacks it; what it has is run and edited like your own files then";
        Err(Failure::Usage(format!("{flag}: a bundle is repeated as it is\n  hint: {cure}")))
    }

    /// Refuses options of bundles for a recipe.
    pub(super) fn refuse_options_of_bundles(&self) -> Result<(), Failure> {
        if self.remember {
            return Err(Failure::Usage("--remember: is an option of bundles: a grant is kept for their hash".into()));
        }
        self.bundle.refuse_for(self.recipe())
    }

    /// Changes the recorded arguments of a bundle to those of a run of it here: device, folders, output and changed params are those
    /// that were `given`. `device`: the kind of device that the recorded run had.
    pub fn again_as(&mut self, record: &Map<String, Value>, recorded: Recorded, given: RunArgs, device: Option<&str>) {
        self.again(record, recorded, given.run_dir, given.json, given.quiet);
        self.device.place.instead_of(&given.device.place, device);
        self.set.retain(|(name, _)| !given.set.iter().any(|(set, _)| set == name));
        self.set.extend(given.set);
        (self.steps, self.seed) = (given.steps.or(self.steps), given.seed.or(self.seed));
        self.device.precision = given.device.precision.or(self.device.precision.take());
        self.device.memory_budget = given.device.memory_budget.or(self.device.memory_budget);
        self.checkpoint_every = given.checkpoint_every.or(self.checkpoint_every);
        self.overwrite = given.overwrite;
        self.mlflow = given.mlflow;
        self.bundle = BundleOptions::default();
    }

    /// Changes the initial weights by one ulp each, in directions drawn from a seed.
    pub fn perturb_by(&mut self, seed: u64) {
        self.perturb = Some(seed);
    }

    /// Runs these texts instead of a file of the disk.
    pub fn store(&mut self, files: Files) {
        self.stored = Some(Stored { files, start: None });
    }
}
