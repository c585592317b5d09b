//! `perilune repl`: a prompt. On a terminal with a line editor; otherwise it runs the lines of stdin and prints their results, and
//! the exit status is 3 if one of them raised.

use crate::confined::{self, Terms, UntrustedArgs};
use crate::console_out;
use crate::device::{DeviceArgs, key_value};
use crate::diagnostics;
use crate::failure::Failure;
use crate::policy_args::{PolicyArgs, start_directory};
use crate::prompt::{self, Around, AtPrompt, Interrupts, Prompt, SharedEditor, Training, commands};
use perilune_lua::{Console, RuntimeOptions};
use perilune_train::{SavedRun, record_of, runs};
use std::cell::RefCell;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::rc::Rc;

#[derive(clap::Args, Debug)]
pub struct ReplArgs {
    /// A recipe; its run is the global `run`
    recipe: Option<PathBuf>,
    /// Open a run at its last checkpoint, with the recipe that it stores unless one is given. Nothing is written to its directory
    #[arg(long, value_name = "RUN", conflicts_with = "seed")]
    resume: Option<PathBuf>,
    /// With --resume: open the checkpoint of this step
    #[arg(long, value_name = "STEP", requires = "resume")]
    at: Option<u64>,
    /// Set a param of the recipe; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    set: Vec<(String, String)>,
    /// The seed of all random numbers
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(0..))]
    seed: Option<i64>,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    files: PolicyArgs,
    #[command(flatten)]
    untrusted: UntrustedArgs,
}

impl ReplArgs {
    /// What the prompt may touch when it is confined.
    fn terms(&self) -> Result<Terms, Failure> {
        let mut terms = Terms { recipe: self.recipe.clone(), ..Terms::default() };
        if let Some(run) = &self.resume {
            let run = runs::find(run)?;
            terms.start = start_directory(&record_of(&run)?);
            terms.opens.push(run);
        }
        self.files.add_grants(&mut terms);
        self.untrusted.add_to(&mut terms);
        Ok(terms)
    }
}

/// Runs the prompt until it is left.
pub fn repl(mut args: ReplArgs) -> Result<(), Failure> {
    if args.untrusted.supervises()? {
        return confined::supervise(std::env::args_os().collect(), &args.terms()?);
    }
    let terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let backend = args.device.open()?;
    let print = |text: &str| drop(console_out::say(text));
    let saved = args.resume.as_deref().map(|run| open(run, args.at, args.recipe.as_deref())).transpose()?;
    if let Some(saved) = &saved {
        args.device.place.sum_as(saved.record());
    }
    let policy = match (&args.recipe, &saved) {
        (Some(recipe), _) => args.files.recipe(recipe, &args.set)?,
        (None, Some(saved)) => {
            let start = start_directory(saved.record());
            args.files.recorded(&saved.source().path, start.as_deref(), &args.set)?
        }
        (None, None) => args.files.prompt(&args.set)?,
    };
    let policy = policy.build();
    let options =
        RuntimeOptions { backend: backend.clone(), params: args.set, policy, strict: true, print: Rc::new(print) };
    let runtime = args.device.runtime(options)?;
    diagnostics::gpu_source(&runtime);
    {
        let mut engine = runtime.host().engine.borrow_mut();
        // Every line needs a new plan, so misses are not worth a report.
        engine.switches.report_misses = false;
        if let Some(seed) = args.seed {
            engine.recorder.seed(seed as u64);
        }
    }
    runtime.offer_params(args.seed.map(|n| ("seed".to_string(), n.to_string())).into_iter().collect());
    let console = Console::new(&runtime, if terminal { "prompt" } else { "stdin" })?;
    let mut session = Prompt::bare(terminal && console_out::color(true));
    if let Some(saved) = saved {
        session.training = Some(RefCell::new(Training::saved(&runtime, saved, args.device)));
    } else if let Some(path) = args.recipe {
        session.training = Some(RefCell::new(Training::new(&runtime, path, args.seed, args.device)));
    }
    let interrupts = if terminal { Some(Rc::new(Interrupts::install()?)) } else { None };
    let around = Rc::new(AtPrompt(interrupts.clone()));
    let editor = SharedEditor::default();
    *runtime.host().pause.borrow_mut() = Some(prompt::pause(around.clone(), None, editor.clone()));
    if terminal {
        let banner = format!("perilune {} · Lua 5.4 · {} · ? for help", version(), backend.describe());
        session.say(&session.dim(&banner));
    }
    if let Some(training) = &session.training {
        let mut built = Ok(String::new());
        around.during(&runtime.host().interrupt, &mut || built = training.borrow_mut().build(&console));
        match built {
            Ok(said) if terminal => session.say(&session.dim(&said)),
            Ok(_) => {}
            // At a terminal the user can fix the recipe with :edit and :reload.
            Err(e @ Failure::Recipe(_)) if terminal => commands::complain(&e),
            Err(e) => return Err(e),
        }
    }
    let outcome =
        if terminal { prompt::typed(&session, &console, &*around, &editor) } else { prompt::piped(&session, &console) };
    *runtime.host().pause.borrow_mut() = None;
    outcome
}

/// Opens a checkpoint of a run, with its own recipe or an edited one.
fn open(run: &Path, at: Option<u64>, recipe: Option<&Path>) -> Result<SavedRun, Failure> {
    let saved = SavedRun::open(&runs::find(run)?, at)?;
    Ok(match recipe {
        Some(recipe) => saved.with_recipe(recipe)?,
        None => saved,
    })
}

/// Returns the version without a trailing zero: `0.1` for `0.1.0`.
fn version() -> &'static str {
    let all = env!("CARGO_PKG_VERSION");
    all.strip_suffix(".0").unwrap_or(all)
}
