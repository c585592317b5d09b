//! `perilune profile`: measures the time of a training step by recipe line and by kernel, and compares it with the roofline.
//!
//! A few steps warm up, so that compilation and autotuning are not counted; as many plain steps are measured, with the waits
//! of the host in them; then each kernel is timed alone (by events on a GPU), without the overlap of a plain run. All
//! figures are medians. The roofline is measured on a separate backend. Nothing is written except the timeline of `--trace`.

use crate::console_out::{ConsoleOut, Mode};
use crate::device::{DeviceArgs, key_value};
use crate::diagnostics;
use crate::failure::Failure;
use crate::policy_args::PolicyArgs;
use perilune_core::byte_size::show;
use perilune_lua::profile::{self, Bound, Ceiling};
use perilune_lua::step_parts::{Rounds, median};
use perilune_lua::{Cause, Loaded, Runtime, RuntimeOptions};
use perilune_policy::Policy;
use perilune_train::{Error, Source};
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
    /// Steps to measure, after as many steps of warm-up
    #[arg(long, value_name = "N", default_value_t = 5)]
    steps: u32,
    /// Also write a timeline for chrome://tracing or ui.perfetto.dev
    #[arg(long, value_name = "FILE.json")]
    trace: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    files: PolicyArgs,
}

/// Measures the roofline on a separate backend, so that the memory report has the recipe's buffers only.
fn ceiling(device: &DeviceArgs, precision: &str) -> Result<Ceiling, Failure> {
    let print = Rc::new(|_: &str| ());
    let options =
        RuntimeOptions { backend: device.open()?, params: Vec::new(), policy: Policy::closed(), strict: true, print };
    let runtime = Runtime::new(options)?;
    Ok(runtime.ceiling(precision)?)
}

/// Profiles a recipe and prints the tables.
pub fn profile(args: ProfileArgs) -> Result<(), Failure> {
    let source = Source::read(&args.recipe)?;
    let plain = || Failure::Usage(format!("{} is a plain script; profile takes a recipe", args.recipe.display()));
    let backend = args.device.open()?;
    let screen = Rc::new(ConsoleOut::new(Mode::Human));
    let print = {
        let screen = screen.clone();
        move |text: &str| screen.note(text)
    };
    let params = args.set.clone();
    let policy = args.files.recipe(&args.recipe, &params)?.build();
    let options = RuntimeOptions { backend: backend.clone(), params, policy, strict: true, print: Rc::new(print) };
    let runtime = args.device.runtime(options)?;
    diagnostics::plans(&runtime, &screen);
    let loaded = {
        // A plain script ends after its first step, and what it would save is not written.
        let _held = runtime.policy().hold_writes();
        runtime.until_first_step(|| source.load(&runtime))
    };
    let recipe = match loaded {
        Ok(Loaded::Recipe(recipe)) => recipe,
        Ok(Loaded::Script) => return Err(plain()),
        Err(Error::Recipe(e)) if e.cause == Cause::FirstStep => return Err(plain()),
        Err(e) => return Err(e.into()),
    };
    let run = recipe.start(None, args.device.precision.as_deref(), args.device.memory_budget)?;
    let ceiling = ceiling(&args.device, &run.precision())?;
    let steps = args.steps.max(1);
    let splits = |runtime: &Runtime| runtime.host().engine.borrow().stats().splits;
    let before = splits(&runtime);
    let mut rounds = Rounds::default();
    for k in 0..steps {
        let result = run.step()?;
        if k + 1 == steps {
            run.read(&result)?;
        }
    }
    // Time steps without events, as in a plain run, which reads the results of one step while the next is computed.
    let (mut last, mut owed) = (Instant::now(), None);
    for _ in 0..=steps {
        let begun = Instant::now();
        let result = run.step()?;
        let call = begun.elapsed().as_secs_f64();
        if let Some(result) = owed.replace(result) {
            run.read(&result)?;
        }
        let now = Instant::now();
        match &mut runtime.host().engine.borrow_mut().diagnostics.host_stalls {
            Some(stalls) => {
                stalls.end_step();
                rounds.steps.push((now - last).as_secs_f64());
                rounds.calls.push(call);
            }
            // The first step has no results before it to read.
            stalls => *stalls = Some(Default::default()),
        }
        last = now;
    }
    let waits = runtime.host().engine.borrow_mut().diagnostics.host_stalls.take().unwrap_or_default();
    if let Some(result) = owed {
        run.read(&result)?;
    }
    (rounds.data, rounds.sync) = (waits.by_step(Bound::Data), waits.by_step(Bound::Sync));
    let reads = (splits(&runtime) - before) as f64 / f64::from(2 * steps + 1);
    runtime.host().engine.borrow_mut().diagnostics.profile = Some(Default::default());
    for _ in 0..steps {
        run.step()?;
    }
    let engine = runtime.host().engine.borrow();
    let timings =
        engine.diagnostics.profile.as_ref().map(|p| p.timings(&engine.recorder.source_map)).unwrap_or_default();
    let waits = waits.list(&engine.recorder.source_map);
    rounds.kernels = timings.iter().map(|t| t.seconds * t.runs as f64).sum::<f64>() / f64::from(steps);
    let (seconds, kernels) = (median(&rounds.steps), rounds.kernels);
    screen.line(&format!("{} · {} · {:.3} ms a step", recipe.name(), backend.describe(), seconds * 1e3));
    screen.line(&format!(
        "ceiling, measured: {:.0} GB/s through memory, {:.0} GFLOP/s in {} products",
        ceiling.bytes / 1e9,
        ceiling.flops / 1e9,
        run.precision()
    ));
    let idle = (1.0 - kernels / seconds).max(0.0) * 100.0;
    screen.line(&format!(
        "kernels take {:.3} ms of a step; {idle:.0} % of it is outside of them (recording, data, launches, reads)",
        kernels * 1e3
    ));
    if reads > 0.0 {
        screen.line(&format!("{reads:.1} reads a step wait for the device while the step is recorded"));
    }
    screen.line("");
    // A CPU runs kernels within the call that queues them on a GPU.
    screen.line(&rounds.table(backend.name() == "cpu"));
    screen.line(&profile::by_line(&timings, &waits, &ceiling, steps));
    screen.line(&profile::by_kernel(&timings, &ceiling));
    if let Some(overlap) = profile::overlap(&timings, steps) {
        screen.line(&overlap);
    }
    if let Some(path) = &args.trace {
        let text = profile::trace(&timings, &waits, &ceiling);
        std::fs::write(path, text).map_err(|e| Failure::System(format!("--trace {}: {e}", path.display())))?;
        screen.note(&format!("timeline written to {}", path.display()));
    }
    let memory = engine.memory();
    let (now, most) = (show(memory.device.allocated), show(memory.device.peak));
    screen.line(&format!("memory: {now} allocated, {} reserved, {most} at most", show(memory.device.reserved)));
    for line in engine.show_owners(&memory, 12) {
        screen.line(&line);
    }
    Ok(())
}
