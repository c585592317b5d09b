//! `perilune replay`: repeats a recorded run with the edits it had, and compares the weights.
//!
//! It parses the command line of `run.json` again and adds the versions of the recorded history. Relative paths start where the
//! run was started; only the arguments of the replay itself let the recipe read there.

use super::{recorded_run, run};
use crate::confined::{self, Terms, UntrustedArgs};
use crate::failure::Failure;
use crate::policy_args::{PolicyArgs, start_directory};
use perilune_train::{Replay, record_of};
use serde_json::Value;
use std::path::PathBuf;

#[derive(clap::Args, Debug)]
pub struct ReplayArgs {
    /// The directory of the run to repeat
    run: PathBuf,
    /// The directory of results [default: a new directory in runs/]
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
    #[command(flatten)]
    files: PolicyArgs,
    #[command(flatten)]
    untrusted: UntrustedArgs,
}

/// Repeats the run; fails if the weights differ.
pub fn replay(args: ReplayArgs) -> Result<(), Failure> {
    let record = record_of(&args.run)?;
    let shown = args.run.display();
    let words = record.get("command").and_then(Value::as_array).into_iter().flatten();
    let command = words.filter_map(|w| w.as_str().map(String::from)).collect();
    let mut again = recorded_run(command).ok_or_else(|| {
        Failure::Refused(format!("{shown}/run.json: command: is not a `perilune run` command of this version"))
    })?;
    let start = start_directory(&record);
    if args.untrusted.supervises()? {
        let run_dir = match &args.run_dir {
            Some(dir) => dir.clone(),
            None => run::new_directory(again.recipe()),
        };
        let mut terms = Terms { opens: vec![args.run.clone()], run_dir: Some(run_dir), start, ..Terms::default() };
        args.files.add_grants(&mut terms);
        args.untrusted.add_to(&mut terms);
        return confined::supervise(std::env::args_os().collect(), &terms);
    }
    let recorded = run::Recorded { start, files: args.files, verify_data: args.verify_data };
    again.again(&record, recorded, args.run_dir, args.json, args.quiet);
    again.replay = Some(Replay::read(&args.run, &record, again.recipe())?);
    run::run(again)
}
