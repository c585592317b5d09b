//! Parses the options of commands that open a run at one of its checkpoints, and creates the runtime for them.

use crate::confined::{self, Terms, UntrustedArgs};
use crate::console_out::ConsoleOut;
use crate::device::{DeviceArgs, key_value};
use crate::failure::Failure;
use crate::format;
use crate::policy_args::{PolicyArgs, start_directory};
use perilune_lua::{Run, Runtime, RuntimeOptions};
use perilune_train::{SavedRun, StartOptions, record_of, runs};
use std::path::PathBuf;
use std::rc::Rc;

/// A run, its checkpoint, and what overrides them.
#[derive(clap::Args, Clone, Debug)]
pub struct SavedArgs {
    /// A run directory, or the name of one below runs/
    run: PathBuf,
    /// Take the checkpoint of this step [default: the last one]
    #[arg(long, value_name = "STEP")]
    at: Option<u64>,
    /// Take the recipe from FILE instead of the run directory; its model must fit the checkpoint
    #[arg(long, value_name = "FILE")]
    recipe: Option<PathBuf>,
    /// Set a param of the recipe, instead of that of the run; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    set: Vec<(String, String)>,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    files: PolicyArgs,
    #[command(flatten)]
    untrusted: UntrustedArgs,
}

impl SavedArgs {
    /// Runs the command confined if `--untrusted` asks for it; whether it has run.
    pub fn supervised(&self) -> Result<bool, Failure> {
        if !self.untrusted.supervises()? {
            return Ok(false);
        }
        let run = runs::find(&self.run)?;
        let mut terms = Terms { recipe: self.recipe.clone(), ..Terms::default() };
        if self.recipe.is_none() {
            terms.start = start_directory(&record_of(&run)?);
        }
        terms.opens.push(run);
        self.files.add_grants(&mut terms);
        self.untrusted.add_to(&mut terms);
        confined::supervise(std::env::args_os().collect(), &terms).map(|()| true)
    }

    /// Opens the checkpoint.
    pub fn open(&self) -> Result<SavedRun, Failure> {
        let saved = SavedRun::open(&runs::find(&self.run)?, self.at)?;
        Ok(match &self.recipe {
            Some(recipe) => saved.with_recipe(recipe)?,
            None => saved,
        })
    }

    /// Opens a runtime and builds the run in it. The recipe prints to `out`, which also shows warnings about its data.
    pub fn build(&self, saved: &SavedRun, out: &Rc<ConsoleOut>) -> Result<(Runtime, Run), Failure> {
        let mut device = self.device.clone();
        device.place.sum_as(saved.record());
        let policy = match &self.recipe {
            Some(recipe) => self.files.recipe(recipe, &self.set)?,
            None => {
                let start = start_directory(saved.record());
                self.files.recorded(&saved.source().path, start.as_deref(), &self.set)?
            }
        };
        let print = {
            let out = out.clone();
            move |text: &str| out.print(text)
        };
        let backend = device.open()?;
        let (params, policy, print) = (self.set.clone(), policy.build(), Rc::new(print));
        let runtime = device.runtime(RuntimeOptions { backend, params, policy, strict: true, print })?;
        runtime.host().engine.borrow_mut().switches.report_misses = false;
        let start = StartOptions {
            precision: device.precision.clone(),
            memory_budget: device.memory_budget,
            ..StartOptions::default()
        };
        let (_, run) = saved.build(&runtime, &start)?;
        let notice = |path: &str, bytes: u64| {
            out.line(&format!("comparing {path:?} with the data of the run ({})", format::bytes(bytes as usize)));
        };
        for text in saved.compare_data(&runtime, &notice)? {
            out.warn(&text);
        }
        Ok((runtime, run))
    }
}
