//! `perilune profile`: where the time of a training step goes, kernel by kernel, with recipe lines.
//!
//! A few steps warm up, so that compiling and choosing algorithms stay out of the table; then each kernel is timed by
//! itself (by events on a GPU), which costs the overlap that a plain run has. Nothing is written.

use crate::device::{DeviceArgs, key_value};
use crate::failure::Failure;
use crate::screen::{Mode, Screen};
use crate::source::Source;
use perilune_core::bytes::show;
use perilune_lua::{Loaded, Runtime, RuntimeOptions};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Instant;

#[derive(clap::Args, Debug)]
pub struct ProfileArgs {
    /// The recipe, a .lua file
    recipe: PathBuf,
    /// Set a param of the recipe; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    set: Vec<(String, String)>,
    /// Steps to measure, after as many to warm up
    #[arg(long, value_name = "N", default_value_t = 5)]
    steps: u32,
    #[command(flatten)]
    device: DeviceArgs,
}

pub fn profile(args: ProfileArgs) -> Result<(), Failure> {
    let source = Source::read(&args.recipe)?;
    let backend = args.device.open()?;
    let screen = Rc::new(Screen::new(Mode::Human));
    let print = {
        let screen = screen.clone();
        move |text: &str| screen.note(text)
    };
    let options = RuntimeOptions { backend: backend.clone(), params: args.set, strict: true, print: Rc::new(print) };
    let runtime = Runtime::new(options)?;
    let Loaded::Recipe(recipe) = source.load(&runtime)? else {
        return Err(Failure::Usage(format!("{} is a plain script; profile takes a recipe", args.recipe.display())));
    };
    let run = recipe.start(None, args.device.precision.as_deref(), args.device.memory_budget)?;
    let steps = args.steps.max(1);
    let mut seconds = 0.0;
    for pass in 0..2 {
        let start = Instant::now();
        for k in 0..steps {
            let result = run.step()?;
            if k + 1 == steps {
                run.read(&result)?;
            }
        }
        // The second pass without events: what a step takes in a plain run.
        if pass == 1 {
            seconds = start.elapsed().as_secs_f64() / f64::from(steps);
        }
    }
    runtime.host().engine.borrow_mut().profile = Some(Default::default());
    for _ in 0..steps {
        run.step()?;
    }
    let engine = runtime.host().engine.borrow();
    screen.line(&format!("{} · {} · {:.3} ms a step", recipe.name(), backend.describe(), seconds * 1e3));
    if let Some(p) = &engine.profile {
        screen.line(&p.report(&engine.sites));
    }
    let memory = engine.memory();
    let (now, most) = (show(memory.device.allocated), show(memory.device.peak));
    screen.line(&format!("memory: {now} allocated, {} reserved, {most} at most", show(memory.device.reserved)));
    for line in engine.show_owners(&memory, 12) {
        screen.line(&line);
    }
    Ok(())
}
