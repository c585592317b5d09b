//! `perilune run`: trains a recipe, or runs a plain script or a bundle.

mod again;
mod session;

pub use again::Recorded;
pub use session::{Front, recompute};

use super::bundle::repeat::{self, BundleOptions};
use crate::confined::{self, Terms, UntrustedArgs};
use crate::console_out::Mode;
use crate::device::{DeviceArgs, key_value};
use crate::failure::Failure;
use crate::job::{Job, JobArgs};
use crate::policy_args::{PolicyArgs, start_directory};
use crate::retention::RetentionArgs;
use perilune_dist::launch::end_with_launcher;
use perilune_dist::rendezvous::process_env;
use perilune_policy::PolicyBuilder;
use perilune_train::history::Files;
use perilune_train::{Outcome, Replay, RunSpec, SavedRun, StartOptions, runs};
use std::path::{Path, PathBuf};

#[derive(clap::Args, Debug)]
pub struct RunArgs {
    /// The recipe or script, a .lua file; or a bundle, a .plb file or its address with a hash. With --resume RUN the recipe that the run
    /// stores, unless one is given
    #[arg(required_unless_present = "resume")]
    recipe: Option<PathBuf>,
    /// Set a param of the recipe; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    set: Vec<(String, String)>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Train this many steps instead of the recipe's
    #[arg(long, value_name = "N")]
    steps: Option<u32>,
    /// Stop after this step with an evaluation and a checkpoint, from which --resume continues; schedules are those of all steps
    #[arg(long, value_name = "STEP", value_parser = clap::value_parser!(u64).range(1..), conflicts_with = "watch")]
    until: Option<u64>,
    /// The seed of all random numbers
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(0..))]
    seed: Option<i64>,
    /// Change every initial weight by one ulp, up or down as SEED decides: runs that differ by rounding alone
    #[arg(long, value_name = "SEED")]
    perturb: Option<u64>,
    /// The directory of results [default: runs/NAME-DATE-TIME]
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Print events as JSON, one object per line
    #[arg(long)]
    json: bool,
    /// Print only results and the output of the recipe
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
    /// Write a checkpoint every N steps, at the end, and when a signal stops the run
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    checkpoint_every: Option<u64>,
    #[command(flatten)]
    files: PolicyArgs,
    #[command(flatten)]
    untrusted: UntrustedArgs,
    #[command(flatten)]
    job: JobArgs,
    #[command(flatten)]
    retention: RetentionArgs,
    /// Delete a run that is in --run-dir, and start anew there; other files in it stay
    #[arg(long, requires = "run_dir", conflicts_with = "resume")]
    overwrite: bool,
    /// Continue from the last checkpoint of RUN, or of the run in --run-dir, or of the recipe's newest run. A run without a
    /// checkpoint starts from its beginning, and so does one whose directory is not there yet
    #[arg(long, value_name = "RUN", num_args = 0..=1)]
    resume: Option<Option<PathBuf>>,
    /// With --resume: continue from the checkpoint of this step
    #[arg(long, value_name = "STEP", requires = "resume")]
    at: Option<u64>,
    /// With --resume: continue in a new run directory (--run-dir), and leave that of the run as it is
    #[arg(long, requires = "resume")]
    branch: bool,
    /// With --at: delete the later checkpoints and steps of the run, which continuing in its directory replaces
    #[arg(long, requires = "at", conflicts_with = "branch")]
    discard_later: bool,
    /// With --resume: apply edits made since the checkpoint as --watch would, with the new params and all States that fit
    #[arg(long, requires = "resume")]
    edited: bool,
    /// With --resume: continue although data files have changed since the run read them
    #[arg(long, requires = "resume")]
    changed_data: bool,
    /// With --resume: compare the whole content of data files with what the run read, also where size and time are equal
    #[arg(long, requires = "resume")]
    verify_data: bool,
    /// Refuse to train if the check of a sample of the data, before the first step, finds faults
    #[arg(long, conflicts_with = "no_data_check")]
    strict: bool,
    /// Skip that check
    #[arg(long)]
    no_data_check: bool,
    /// Apply edits of the recipe, and of files that it requires, during training
    #[arg(long)]
    watch: bool,
    /// If the loss or the gradient norm is NaN or infinite: stop, skip the update, or warn and continue
    #[arg(long, value_name = "stop|skip|warn", value_parser = ["stop", "skip", "warn"], hide_possible_values = true)]
    on_nan: Option<String>,
    /// If the loss is far above its recent values: warn, skip the update, stop, or do nothing (off)
    #[arg(long, value_name = "warn|skip|stop|off", value_parser = ["warn", "skip", "stop", "off"], hide_possible_values = true)]
    on_spike: Option<String>,
    /// Also write the run to the MLflow file store in DIR, such as mlruns; a resumed run continues there by itself
    #[arg(long, value_name = "DIR")]
    mlflow: Option<PathBuf>,
    #[command(flatten)]
    bundle: BundleOptions,
    /// With a bundle: remember for it what is granted now
    #[arg(long)]
    remember: bool,
    /// The arguments come from a record.
    #[arg(skip)]
    recorded: Option<Recorded>,
    /// The run that `perilune replay` repeats.
    #[arg(skip)]
    pub replay: Option<Replay>,
    /// The recipe comes from the directory of the run that is resumed.
    #[arg(skip)]
    stored: Option<Stored>,
}

/// The recipe of a run, as its directory has it.
#[derive(Clone, Debug)]
struct Stored {
    /// Its text and those of the files that it requires.
    files: Files,
    /// The directory where the run was started, from which its relative paths start; none for the current one.
    start: Option<PathBuf>,
}
impl RunArgs {
    /// Returns the path of the recipe.
    pub fn recipe(&self) -> &Path {
        self.recipe.as_deref().unwrap_or(Path::new(""))
    }

    /// Returns the recipe, the params, and the options of files and of the device.
    pub fn parts(&self) -> (&Path, &[(String, String)], &PolicyArgs, &DeviceArgs) {
        (self.recipe(), &self.set, &self.files, &self.device)
    }

    /// Resolves `--resume RUN`: finds the run, and takes its recipe where none is given.
    fn completed(mut self) -> Result<RunArgs, Failure> {
        // The optional value of --resume takes the word after it, which may be the recipe.
        if self.recipe.is_none()
            && let Some(named) =
                self.resume.as_mut().and_then(|run| run.take_if(|p| p.extension().is_some_and(|e| e == "lua")))
        {
            self.recipe = Some(named);
        }
        let Some(run) = self.resume.as_mut().and_then(Option::as_mut) else {
            if self.recipe.is_none() {
                let cure = "name the run, or the recipe whose newest run continues: perilune run --resume RUN, perilune run RECIPE --resume";
                return Err(Failure::Usage(format!("--resume: there is neither a RUN nor a RECIPE\n  hint: {cure}")));
            }
            return Ok(self);
        };
        *run = runs::find(run)?;
        let run = run.clone();
        if let Some(dir) = self.run_dir.as_ref().filter(|dir| !self.branch && **dir != run) {
            let (run, dir) = (run.display(), dir.display());
            return Err(Failure::Usage(format!(
                "--resume {run} --run-dir {dir}: a run continues in its own directory\n  hint: --branch continues it in {dir}; leave out --run-dir otherwise"
            )));
        }
        if self.recipe.is_none() {
            if self.watch {
                let rule = "the recipe that the run stores is not edited; name the file to watch: perilune run RECIPE --resume";
                return Err(Failure::Usage(format!("--watch: {rule} {} --watch", run.display())));
            }
            let saved = SavedRun::open(&run, self.at)?;
            self.stored = Some(Stored { files: saved.files().clone(), start: start_directory(saved.record()) });
            self.recipe = Some(saved.source().path.clone());
        }
        Ok(self)
    }

    fn policy(&self) -> Result<PolicyBuilder, Failure> {
        match (&self.recorded, &self.stored) {
            (Some(recorded), _) => self.files.recorded(self.recipe(), recorded.start.as_deref(), &[]),
            (_, Some(stored)) => self.files.recorded(self.recipe(), stored.start.as_deref(), &self.set),
            _ => self.files.recipe(self.recipe(), &self.set),
        }
    }

    /// What the run may touch when it is confined.
    fn terms(&self) -> Result<Terms, Failure> {
        let place = self.job.place()?;
        let usage = |text: &str| Err(Failure::Usage(text.into()));
        if place.processes > 1 {
            return usage(
                "--untrusted: a confined recipe runs in one process
  hint: --mesh drives several GPUs of this machine from it",
            );
        }
        if self.watch {
            return usage(
                "--untrusted --watch: a recipe that is edited while it runs is one's own
  hint: leave out one of the two",
            );
        }
        let mut terms = Terms { run_dir: self.run_dir.clone(), ..Terms::default() };
        let named = self.resume.clone().flatten();
        match (&self.resume, &named) {
            (Some(None), _) if self.run_dir.is_none() => {
                return usage("--untrusted --resume: name the run that continues, as in --resume RUN");
            }
            // It continues in its own directory, or is the origin of a branch.
            (_, Some(run)) if self.branch => terms.opens.push(run.clone()),
            (_, Some(run)) => terms.run_dir = Some(run.clone()),
            _ => {}
        }
        match &self.stored {
            Some(stored) => terms.start = stored.start.clone(),
            None => terms.recipe = self.recipe.clone(),
        }
        if terms.run_dir.is_none() {
            terms.run_dir = Some(new_directory(self.recipe()));
        }
        if let Some(dir) = &self.mlflow {
            std::fs::create_dir_all(dir).map_err(crate::failure::disk("create", dir))?;
            terms.keeps.push(dir.clone());
        }
        self.files.add_grants(&mut terms);
        self.untrusted.add_to(&mut terms);
        Ok(terms)
    }

    /// Joins the processes of the job, or none.
    fn join(&self) -> Result<Job, Failure> {
        if self.recorded.is_some() {
            return Job::alone();
        }
        let place = self.job.place()?;
        if place.processes == 1 {
            // A sweep starts its runs as its children.
            if !end_with_launcher(&process_env) {
                return Err(Failure::System("the process that started this run has ended".into()));
            }
            return Job::alone();
        }
        // What all processes have to be given alike; process 0 gives them the rest.
        let terms = [
            ("recipe", self.recipe().file_name().unwrap_or_default().to_string_lossy().into_owned()),
            ("mesh", self.device.place.mesh_text()),
            ("kind of device", self.device.place.kind_in_job(&place)?),
        ];
        Job::join(place, &terms)
    }

    fn mode(&self) -> Mode {
        match (self.json, self.quiet) {
            (true, _) => Mode::Json,
            (_, true) => Mode::Quiet,
            _ => Mode::Human,
        }
    }

    fn spec(&self) -> RunSpec {
        RunSpec {
            recipe: self.recipe().to_path_buf(),
            files: self.stored.as_ref().map(|stored| stored.files.clone()),
            params: self.set.clone(),
            start: StartOptions {
                seed: self.seed,
                precision: self.device.precision.clone(),
                steps: self.steps,
                memory_budget: self.device.memory_budget,
                perturb: self.perturb,
            },
            run_dir: match confined::grants() {
                Some(grants) if self.resume.is_none() || self.branch => self.run_dir.clone().or(grants.run_dir.clone()),
                _ => self.run_dir.clone(),
            },
            run_dir_is_default: self.run_dir.is_none(),
            checkpoint_every: self.checkpoint_every,
            retention: self.retention.policy(),
            overwrite: self.overwrite,
            until: self.until,
            resume: self.resume.is_some(),
            resume_from: self.resume.clone().flatten(),
            at: self.at,
            branch: self.branch,
            discard_later: self.discard_later,
            edited: self.edited,
            changed_data: self.changed_data,
            verify_data: self.verify_data,
            watch: self.watch,
            mlflow: self.mlflow.clone(),
            strict: self.strict,
            no_data_check: self.no_data_check,
            on_nan: self.on_nan.clone(),
            on_spike: self.on_spike.clone(),
            replay: self.replay.clone(),
            command: command_line(),
            threads: self.device.threads(),
        }
    }
}

/// A new directory below `runs/` for a confined run: it is named before the recipe says its name.
pub fn new_directory(recipe: &Path) -> PathBuf {
    // `..` has no stem.
    let name = recipe.file_stem().map_or_else(|| "run".into(), |stem| stem.to_string_lossy().into_owned());
    let stem = format!("{name}-{}", jiff::Zoned::now().strftime("%Y%m%d-%H%M%S"));
    let named = (1..).map(|k| Path::new("runs").join(if k == 1 { stem.clone() } else { format!("{stem}-{k}") }));
    named.into_iter().find(|path| !path.exists()).unwrap_or_else(|| Path::new("runs").join(&stem))
}

/// Returns the words of the command line.
fn command_line() -> Vec<String> {
    std::env::args_os().map(|a| a.to_string_lossy().into_owned()).collect()
}

/// Runs a recipe or script, alone or with the other processes of its job. If a signal stopped the run, the exit status is that of the
/// signal.
pub fn run(args: RunArgs) -> Result<(), Failure> {
    if repeat::is_bundle(args.recipe()) {
        return repeat::repeat(args);
    }
    args.refuse_options_of_bundles()?;
    let args = args.completed()?;
    if args.untrusted.supervises()? {
        // What is no recipe is said by the process that the person started.
        if args.stored.is_none() {
            perilune_train::Source::read(args.recipe())?;
        }
        return confined::supervise(std::env::args_os().collect(), &args.terms()?);
    }
    run_to_end(args).map(drop)
}

/// Runs a recipe or script whose arguments are complete, in this process.
pub fn run_to_end(args: RunArgs) -> Result<Outcome, Failure> {
    let job = args.join()?;
    let result = session::train(args, &job);
    let (outcome, result) = match result {
        Ok(outcome) => (Some(outcome), Ok(())),
        Err(e) => (None, Err(e)),
    };
    job.end(result)?;
    outcome.ok_or_else(|| Failure::System("the run has no outcome".into()))
}
