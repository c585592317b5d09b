//! `perilune replay`: a run once more, with the edits it had, from its record and its ledger.
//!
//! The command of `run.json` is given again, with the recipe's files as they were and each later version applied after the
//! step it was applied after then; a stop and a resume is a version too. The same device kind and version give the same bits.

use crate::failure::Failure;
use crate::ledger::{self, Files, Version};
use crate::resume::record_of;
use crate::run::{self, RunArgs};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

#[derive(clap::Args, Debug)]
pub struct ReplayArgs {
    /// The directory of the run to repeat
    run: PathBuf,
    /// Where results go; a new directory below runs/ by default
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Print events as JSON, one object a line
    #[arg(long)]
    json: bool,
    /// Print only results and what the recipe prints
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
}

/// What a run is made to do again.
#[derive(Clone, Debug)]
pub struct Script {
    /// The recipe's files at the start.
    pub files: Files,
    /// Later versions, in the order in which they ran.
    pub versions: Vec<Version>,
    /// Where the run ended.
    pub steps: u64,
    /// The hash of its States there.
    pub weights: Option<String>,
}

impl Script {
    /// The recipe itself.
    pub fn text(&self) -> Result<&str, Failure> {
        let first = self.files.first().map(|f| f.1.as_str());
        first.ok_or_else(|| Failure::Refused("run.json: files: is empty".into()))
    }
}

fn script(dir: &Path, record: &Map<String, Value>, recipe: &Path) -> Result<Script, Failure> {
    let steps = record.get("steps_done").and_then(Value::as_u64);
    let steps = steps.ok_or_else(|| {
        Failure::Usage(format!("{}: the run has not ended; only what has can be repeated", dir.display()))
    })?;
    let (files, versions) = ledger::history(dir, record, recipe)?;
    // Before the ledger told of resumes, only `run.json` did.
    let resumed = record.get("resumed").and_then(Value::as_array).map_or(0, Vec::len);
    if resumed > 0 && !versions.iter().any(|v| v.resumed) {
        return Err(Failure::Usage(format!(
            "{}: the run was resumed by a version that did not say how; it cannot be repeated",
            dir.display()
        )));
    }
    let weights = record.get("weights").and_then(Value::as_str).map(String::from);
    Ok(Script { files, versions, steps, weights })
}

pub fn replay(args: ReplayArgs, parse: impl Fn(Vec<String>) -> Option<RunArgs>) -> Result<(), Failure> {
    let record = record_of(&args.run)?;
    let shown = args.run.display();
    let words = record.get("command").and_then(Value::as_array).into_iter().flatten();
    let command = words.filter_map(|w| w.as_str().map(String::from)).collect();
    let mut again = parse(command)
        .ok_or_else(|| Failure::Refused(format!("{shown}/run.json: command: is no `perilune run` of this version")))?;
    let here = std::env::current_dir().map(|d| d.display().to_string()).unwrap_or_default();
    if let Some(was) = record.get("directory").and_then(Value::as_str)
        && was != here
    {
        crate::screen::complain("warning", &format!("the run was started in {was}: paths are taken from {here} now"));
    }
    again.again(args.run_dir, args.json, args.quiet);
    again.script = Some(script(&args.run, &record, again.recipe())?);
    run::run(again)
}
