//! `perilune find`: looks for a learning rate, or for the largest batch that fits, without training.
//!
//! Both build the recipe in this process and write nothing: there is no run directory, and what the recipe would save is not
//! written.

mod batch;
mod lr;

pub use batch::predicted_memory;

use crate::device::DeviceArgs;
use crate::failure::Failure;
use crate::policy_args::PolicyArgs;
use perilune_lua::{Cause, Loaded, Recipe, Runtime, RuntimeOptions};
use perilune_plan::Backend;
use perilune_train::{Error, Source};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

#[derive(clap::Subcommand, Debug)]
pub enum FindArgs {
    /// Find a learning rate: raise it from step to step until the loss diverges
    Lr(lr::LrArgs),
    /// Find the largest batch whose step fits in the memory of the device
    Batch(batch::BatchArgs),
}

pub fn find(args: FindArgs) -> Result<(), Failure> {
    match args {
        FindArgs::Lr(args) => lr::lr(&args),
        FindArgs::Batch(args) => batch::batch(&args),
    }
}

/// A recipe that has been loaded and not built.
pub struct Opened {
    pub runtime: Runtime,
    pub recipe: Recipe,
}

/// A backend for recipes that are loaded only.
pub fn silent_backend() -> Arc<dyn Backend> {
    Arc::new(perilune_cpu::Cpu::new(Some(1)))
}

/// Loads a recipe with params on a backend. Nothing that it saves is written, and what it prints is dropped.
///
/// # Errors
/// A param is wrong, the file raises an error, or it is a plain script.
pub fn load(
    path: &Path,
    set: &[(String, String)],
    device: &DeviceArgs,
    files: &PolicyArgs,
    backend: Arc<dyn Backend>,
) -> Result<Opened, Failure> {
    let source = Source::read(path)?;
    let policy = files.recipe(path, set)?.read_only(true).build();
    let options = RuntimeOptions { backend, params: set.to_vec(), policy, strict: true, print: Rc::new(|_: &str| ()) };
    let runtime = device.runtime(options)?;
    let plain = || Failure::Usage(format!("{} is a plain script; this takes a recipe", path.display()));
    match runtime.until_first_step(|| source.load(&runtime)) {
        Ok(Loaded::Recipe(recipe)) => Ok(Opened { runtime, recipe }),
        Ok(Loaded::Script) => Err(plain()),
        Err(Error::Recipe(e)) if e.cause == Cause::FirstStep => Err(plain()),
        Err(e) => Err(e.into()),
    }
}
