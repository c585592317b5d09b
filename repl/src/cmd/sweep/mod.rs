//! `perilune sweep`: trains a recipe with many values of its params, and compares the results.
//!
//! Each trial is a process `perilune run` of its own, so it has the bits of an ordinary run, and its failure ends no other one. The
//! plan is stored before the first trial starts; what has been done is read from the run directories, so the same command, or
//! `--resume DIR`, goes on after any end. `plan.rs` checks the arguments, `trials.rs` runs processes, `report.rs` prints.

mod plan;
mod report;
mod trials;

use crate::console_out::{ConsoleOut, Mode};
use crate::device::key_value;
use crate::failure::Failure;
use crate::job::JobArgs;
use perilune_lua::Failed;
use perilune_train::runs::Status;
use perilune_train::sweep::{Plan, Rung, SweepDir, rungs};
use serde_json::json;
use std::path::PathBuf;
use trials::{Pool, Task};

#[derive(clap::Args, Debug)]
pub struct SweepArgs {
    /// The recipe, a .lua file
    #[arg(required_unless_present = "resume", conflicts_with = "resume")]
    recipe: Option<PathBuf>,
    /// The values of a param, or of seed or steps: a list 1e-3,3e-3 (a comma within a value is \,) or a range 1..5 with both ends. With --random also ranges
    /// 0.1..0.5 and log:1e-4..1e-2. A list for a param `ablate` gets the recipe's default as the baseline, first
    #[arg(long, value_name = "KEY=VALUES", value_parser = key_value)]
    set: Vec<(String, String)>,
    /// Draw N points of the values instead of running all combinations; each with every value of seed
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    random: Option<u32>,
    /// With --random: the seed of the draws [default: 1]
    #[arg(long, value_name = "S", requires = "random")]
    seed: Option<u64>,
    /// Successive halving: train all points for a part of the steps, the best of them for longer, and the last for all steps
    #[arg(long)]
    halving: bool,
    /// With --halving: 1/ETA of the points go on, with ETA times the steps [default: 3]
    #[arg(long, value_name = "ETA", requires = "halving", value_parser = clap::value_parser!(u32).range(2..=100))]
    eta: Option<u32>,
    /// The metric to compare, after the last step, such as valid/accuracy:max [default: that of `perilune runs`]
    #[arg(long, value_name = "METRIC")]
    metric: Option<String>,
    /// Train each run for this many steps instead of the recipe's
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    steps: Option<u32>,
    /// Runs side by side [default: 1 on a GPU; on a CPU as many as have a core and, by prediction, the memory]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    jobs: Option<u32>,
    /// The directory of the sweep; one that has the same sweep goes on [default: runs/NAME-sweep-DATE-TIME]
    #[arg(long, value_name = "DIR", conflicts_with = "resume")]
    run_dir: Option<PathBuf>,
    /// Go on with the sweep in DIR: finished runs stay, interrupted ones are resumed
    #[arg(long, value_name = "DIR",
          conflicts_with_all = ["set", "random", "seed", "halving", "eta", "metric", "steps", "arguments"])]
    resume: Option<PathBuf>,
    /// Print one JSON object for each run, and a last one with the table
    #[arg(long)]
    json: bool,
    /// Further options of `perilune run` for every run, after --, such as -- --device cpu --checkpoint-every 500
    #[arg(last = true, value_name = "OPTIONS")]
    arguments: Vec<String>,
}

/// Runs or continues a sweep.
pub fn sweep(args: SweepArgs) -> Result<(), Failure> {
    if JobArgs::default().place()?.processes > 1 {
        return Err(Failure::Usage("perilune sweep runs in one process: call it without a launcher".into()));
    }
    let dir = match &args.resume {
        Some(path) => plan::reopen(path)?,
        None => {
            let (name, made) = plan::make(&args)?;
            SweepDir::create(args.run_dir.as_deref(), &name, made)?
        }
    };
    let out = ConsoleOut::new(if args.json { Mode::Json } else { Mode::Human });
    let jobs = jobs(&args, &dir.plan, &out)?;
    let points = dir.plan.points();
    let place = dir.path.display();
    let verb = if dir.resumed { "continuing in" } else { "in" };
    out.line(&format!(
        "{} runs of {} {verb} {place}, {jobs} at a time",
        dir.plan.trials.len(),
        crate::terminal::one_line(&dir.plan.recipe.display().to_string())
    ));
    out.event(&json!({
        "event": "sweep", "run_dir": dir.path.display().to_string(), "recipe": dir.plan.recipe.display().to_string(),
        "trials": dir.plan.trials.len(), "points": points, "jobs": jobs, "resumed": dir.resumed,
    }));
    let rungs = match dir.plan.halving {
        Some((eta, steps)) => rungs(points, eta, steps).into_iter().map(Some).collect(),
        None => vec![None],
    };
    let mut pool = Pool::new(&dir, &out, jobs)?;
    let mut chosen: Vec<usize> = (0..points).collect();
    for (k, rung) in rungs.iter().enumerate() {
        let is_last = k + 1 == rungs.len();
        if let Some(Rung { points, until }) = rung {
            chosen = report::best(&dir, &chosen, *points, (k > 0).then(|| rungs[k - 1]).flatten())?;
            out.line(&format!("rung {} of {}: {} points to step {until}", k + 1, rungs.len(), chosen.len()));
            out.event(
                &json!({ "event": "rung", "rung": k + 1, "rungs": rungs.len(), "points": chosen, "until": until }),
            );
        }
        // The last rung trains to the end of the run, with its last evaluations.
        let until = rung.map(|r| r.until).filter(|_| !is_last);
        let of_rung = dir.plan.trials.iter().filter(|t| chosen.contains(&t.point));
        pool.run(of_rung.map(|trial| Task { trial, until }).collect())?;
    }
    let failed = report::print(&dir, &chosen, rungs.last().copied().flatten(), &out)?;
    if failed == 0 { Ok(()) } else { Err(Failure::Said(1)) }
}

/// Decides how many runs go side by side.
fn jobs(args: &SweepArgs, plan: &Plan, out: &ConsoleOut) -> Result<usize, Failure> {
    let most = plan.trials.len().max(1);
    if let Some(jobs) = args.jobs {
        return Ok((jobs as usize).min(most));
    }
    let run = plan::run_args(plan, plan.trials.first())?;
    let (path, set, files, device) = run.parts();
    if !device.place.is_cpu() {
        out.note("one run at a time on a GPU; --jobs N runs N side by side, which share its memory");
        return Ok(1);
    }
    let cores = device.threads().min(most);
    if cores < 2 {
        return Ok(1);
    }
    let predicted = super::find::predicted_memory(path, set, device, files);
    let (Ok(bytes), Some(free)) = (&predicted, perilune_core::host_memory::available()) else { return Ok(1) };
    // What a process takes besides tensors.
    const OWN: usize = 256 << 20;
    Ok(cores.min((free / 100 * perilune_core::host_memory::SHARE / (bytes + OWN)).max(1)))
}

/// Whether a run needs no further steps.
fn is_over(status: Status) -> bool {
    matches!(status, Status::Finished | Status::Failed)
}

fn usage(e: Failed) -> Failure {
    e.into()
}
