//! `perilune eval RUN`: evaluates a checkpoint of a run on a split of its data.

use crate::console_out::{ConsoleOut, Mode};
use crate::failure::Failure;
use crate::format::{grouped, metrics};
use crate::saved::SavedArgs;
use perilune_train::numbers::object;
use serde_json::json;
use std::rc::Rc;

#[derive(clap::Args, Debug)]
pub struct EvalArgs {
    #[command(flatten)]
    saved: SavedArgs,
    /// The split of the data; may be given several times
    #[arg(long, value_name = "NAME", default_value = "valid")]
    split: Vec<String>,
    /// Print one JSON object for each split
    #[arg(long)]
    json: bool,
}

/// Evaluates the splits and prints their metrics.
pub fn eval(args: &EvalArgs) -> Result<(), Failure> {
    if args.saved.supervised()? {
        return Ok(());
    }
    let out = Rc::new(ConsoleOut::new(if args.json { Mode::Json } else { Mode::Human }));
    let saved = args.saved.open()?;
    let (runtime, run) = args.saved.build(&saved, &out)?;
    let (dir, step) = (saved.dir().display().to_string(), saved.step());
    out.line(&out.dim(&format!("{dir} · step {}", grouped(step))));
    for split in &args.split {
        let values = perilune_train::evaluate(&run, split)?;
        out.result(&format!("{split} {}", metrics(&values)));
        let named: Vec<(String, f64)> = values.into_iter().map(|(name, v)| (format!("{split}/{name}"), v)).collect();
        out.event(&json!({ "event": "eval", "run_dir": dir, "step": step, "split": split, "metrics": object(&named) }));
    }
    runtime.host().take_notices().iter().for_each(|notice| out.warn(notice.trim_end()));
    Ok(())
}
