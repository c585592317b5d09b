//! `perilune replay`: repeats a recorded run with the edits it had, and compares the weights; or recomputes windows of it, and compares
//! every step.
//!
//! It parses the command line of `run.json` again and adds the versions of the recorded history. Relative paths start where the
//! run was started; only the arguments of the replay itself let the recipe read there.

use super::bundle::repeat::{self, Asked, BundleOptions};
use super::{command_of, run};
use crate::confined::{self, Terms, UntrustedArgs};
use crate::console_out::{ConsoleOut, Mode};
use crate::failure::{Failure, disk};
use crate::format::grouped;
use crate::policy_args::{PolicyArgs, start_directory};
use perilune_train::audit::windows::{self, Draw};
use perilune_train::bundled::RUN;
use perilune_train::digests::DigestOptions;
use perilune_train::{Audited, Recording, Replay, Window, record_of};
use serde_json::{Map, Value};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[derive(clap::Args, Debug)]
pub struct ReplayArgs {
    /// The directory of the run to repeat, or a bundle with it
    run: PathBuf,
    /// Recompute the steps A + 1 to B from the checkpoint at or before A, and compare each with the record; A.. and ..B are open
    #[arg(long, value_name = "A..B", conflicts_with_all = ["windows", "length", "seed"])]
    steps: Option<String>,
    /// Do that for K windows between checkpoints, drawn at random, and print the chance that they find a tampering of one step
    #[arg(long, value_name = "K")]
    windows: Option<usize>,
    /// With --windows: join neighbouring windows until each has at least this many steps
    #[arg(long, value_name = "STEPS", requires = "windows", value_parser = clap::value_parser!(u64).range(1..))]
    length: Option<u64>,
    /// With --windows: the seed of the draw [default: drawn at random]
    #[arg(long, value_name = "N", requires = "windows")]
    seed: Option<u64>,
    /// The directory of results [default: a new directory in runs/; none for --steps and --windows]
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Print events as JSON, one object per line
    #[arg(long)]
    json: bool,
    /// Print only results and the output of the recipe
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
    /// Compare the whole content of data files with what the run read, also where size and time are equal
    #[arg(long)]
    verify_data: bool,
    /// With --steps, in the process that `bundle diff --bisect` starts: write digests of the States before each step
    #[arg(long, requires = "steps", hide = true)]
    digests: bool,
    /// And of every tensor of this step
    #[arg(long, value_name = "STEP", requires = "digests", hide = true)]
    digest_tensors: Vec<u64>,
    #[command(flatten)]
    files: PolicyArgs,
    #[command(flatten)]
    untrusted: UntrustedArgs,
    #[command(flatten)]
    bundle: BundleOptions,
}

/// Repeats the run; fails if the weights, or a step of a window, differ.
pub fn replay(mut args: ReplayArgs) -> Result<(), Failure> {
    let audits = args.steps.is_some() || args.windows.is_some();
    let unpacked = args.bundle.unpacked()?.map(|folder| folder.join(RUN));
    // The confined process of a bundle has its walls already.
    let is_inside = unpacked.is_some();
    match unpacked {
        Some(run) => args.run = run,
        None if repeat::is_bundle(&args.run) => return args.of_bundle(audits),
        None => args.bundle.refuse_for(&args.run)?,
    }
    let record = record_of(&args.run)?;
    if !is_inside && args.untrusted.supervises()? {
        let again = args.again(&record, None, None)?;
        // The run directories of windows are temporary ones, and the confined process has a folder for such.
        let new = (!audits).then(|| run::new_directory(again.recipe()));
        let (run_dir, start) = (args.run_dir.clone().or(new), start_directory(&record));
        let mut terms = Terms { opens: vec![args.run.clone()], run_dir, start, ..Terms::default() };
        args.files.add_grants(&mut terms);
        args.untrusted.add_to(&mut terms);
        return confined::supervise(std::env::args_os().collect(), &terms);
    }
    if audits {
        return audit(&args);
    }
    let mut again = args.again(&record, start_directory(&record), args.run_dir.clone())?;
    again.replay = Some(Replay::read(&args.run, &record, again.recipe())?);
    run::run(again)
}

impl ReplayArgs {
    /// Repeats the run of a bundle, or windows of it, in a confined process.
    fn of_bundle(&self, audits: bool) -> Result<(), Failure> {
        let mut terms = Terms::default();
        self.files.add_grants(&mut terms);
        self.untrusted.add_to(&mut terms);
        let quiet = self.quiet || self.json;
        let asked = Asked { named: &self.run, options: &self.bundle, files: &self.files, remember: false, quiet };
        let mut prepared = repeat::prepare(&asked, terms)?;
        let manifest = prepared.bundle.manifest();
        if manifest.run.is_none() {
            let rule = "is the bundle of a recipe, which has no run to repeat";
            return Err(Failure::Usage(format!("{} {rule}\n  hint: perilune run trains it", self.run.display())));
        }
        let new = (!audits).then(|| run::new_directory(Path::new(&manifest.name)));
        prepared.terms.run_dir = self.run_dir.clone().or(new);
        prepared.supervise()
    }

    /// Returns the arguments of the recorded command, for a run in another directory.
    fn again(
        &self,
        record: &Map<String, Value>,
        start: Option<PathBuf>,
        run_dir: Option<PathBuf>,
    ) -> Result<run::RunArgs, Failure> {
        let mut again = command_of(record, &self.run)?;
        let recorded = run::Recorded { start, files: self.files.clone(), verify_data: self.verify_data };
        again.again(record, recorded, run_dir, self.json, self.quiet);
        Ok(again)
    }

    fn mode(&self) -> Mode {
        match (self.json, self.quiet) {
            (true, _) => Mode::Json,
            (_, true) => Mode::Quiet,
            _ => Mode::Human,
        }
    }
}

/// Recomputes windows of the run.
fn audit(args: &ReplayArgs) -> Result<(), Failure> {
    let chosen = args.steps.as_deref().map(str::parse::<Window>).transpose()?;
    let recording = Arc::new(Recording::read(&args.run)?);
    let draw = args.windows.map(|count| {
        let seed = args.seed.unwrap_or_else(|| RandomState::new().build_hasher().finish() >> 11);
        windows::draw(&recording.windows(args.length), count, seed)
    });
    let draw = draw.transpose()?;
    let drawn = draw.iter().flat_map(|draw| &draw.windows).map(|(from, to)| Window { from: *from, to: Some(*to) });
    let all: Vec<Window> = chosen.into_iter().chain(drawn).collect();
    let front = run::Front::open(args.mode())?;
    let start = start_directory(recording.record());
    let mut found = Vec::new();
    for window in all {
        let scratch = Scratch::new(args.run_dir.as_deref(), draw.as_ref().map(|_| window))?;
        let mut again = args.again(recording.record(), start.clone(), Some(scratch.dir.clone()))?;
        let mut replay = Replay::window(&recording, again.recipe(), window)?;
        if args.digests {
            replay = replay.with_digests(DigestOptions { tensors: args.digest_tensors.iter().copied().collect() });
        }
        again.replay = Some(replay);
        let outcome = run::recompute(&again, &front)?;
        // The caller compares digests, with another run.
        if let Some(audited) = outcome.audit.filter(|_| !args.digests) {
            print(&front.out, &audited);
            found.push(audited);
        }
    }
    let differ: Vec<&Audited> = found.iter().filter(|a| a.difference.is_some()).collect();
    if let Some(draw) = &draw {
        print_draw(&front.out, draw, differ.len());
    }
    match differ.first().and_then(|a| a.difference.as_ref()) {
        Some(first) => {
            Err(Failure::Refused(format!("{}: the record is not what the run computes: {first}", args.run.display())))
        }
        None => Ok(()),
    }
}

fn counted(n: u64, what: &str) -> String {
    format!("{} {what}{}", grouped(n), if n == 1 { "" } else { "s" })
}

/// Prints the result of a window.
fn print(out: &ConsoleOut, a: &Audited) {
    if out.mode == Mode::Json {
        return out.event(&a.json());
    }
    let from = match a.start {
        0 => "from the beginning".to_string(),
        step => format!("from the checkpoint of step {}, whose States are trusted", grouped(step)),
    };
    let mut parts = vec![counted(a.steps, "step")];
    let others = [(a.evaluations, "evaluation"), (a.checkpoints, "checkpoint"), (a.samples, "logged sample")];
    parts.extend(others.into_iter().filter(|o| o.0 > 0).map(|(n, what)| counted(n, what)));
    let result = match &a.difference {
        None => format!("same bits in {}", parts.join(", ")),
        Some(d) => d.to_string(),
    };
    out.result(&format!("steps {}..{} · {from} · {result}", a.from, a.to));
}

/// Prints what the windows covered.
fn print_draw(out: &ConsoleOut, draw: &Draw, differences: usize) {
    if out.mode == Mode::Json {
        return out.event(&draw.json(differences));
    }
    let percent = |share: f64| format!("{:.3} %", 100.0 * share);
    out.result(&format!(
        "{} of {} windows · {} of {} steps ({}) · a tampering of one step is found with a chance of {} · seed {}",
        draw.windows.len(),
        draw.of,
        grouped(draw.covered),
        grouped(draw.steps),
        percent(draw.share()),
        percent(draw.chance()),
        draw.seed,
    ));
}

/// The run directory of a window: below that of the command, or one that is removed afterwards. The recipe may write there.
struct Scratch {
    dir: PathBuf,
    /// The directory to remove.
    temporary: Option<PathBuf>,
}

impl Scratch {
    fn new(given: Option<&Path>, window: Option<Window>) -> Result<Scratch, Failure> {
        if let Some(dir) = given {
            let dir = window.map_or(dir.to_path_buf(), |w| dir.join(format!("steps-{w}")));
            return Ok(Scratch { dir, temporary: None });
        }
        let number = RandomState::new().build_hasher().finish();
        let dir = std::env::temp_dir().join(format!("perilune-replay-{}-{number:016x}", std::process::id()));
        std::fs::create_dir(&dir).map_err(disk("create", &dir))?;
        Ok(Scratch { dir: dir.clone(), temporary: Some(dir) })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Some(dir) = &self.temporary {
            let _ = std::fs::remove_dir_all(dir);
        }
    }
}
