//! Defines the commands of `perilune`, one file each, and dispatches the command line to one of them.
//!
//! `perilune FILE.lua` is short for `perilune run FILE.lua`, so that a recipe can begin with `#!/usr/bin/env perilune`.

mod bench;
mod bundle;
mod cache;
mod check;
mod check_against;
mod check_mesh;
mod check_predict;
mod check_search;
mod ckpt;
mod completions;
mod data;
mod doctor;
mod eval;
mod fetch;
mod find;
mod init;
mod launch;
mod plot;
mod profile;
mod reference;
mod repl;
mod replay;
mod run;
mod runs;
mod runs_compare;
mod sample;
mod stubs;
mod submit;
mod sweep;
mod tokens;
mod usage;

use crate::failure::Failure;
use crate::log;
use clap::{CommandFactory, Parser, Subcommand};
use serde_json::{Map, Value};
use std::ffi::OsString;
use std::path::Path;

#[derive(Parser)]
#[command(name = "perilune", version, about = "A runtime for training recipes in Lua", arg_required_else_help = true)]
#[command(after_help = "`perilune FILE.lua` is short for `perilune run FILE.lua`.\n\
Exit status: 0 success, 1 failure (device, memory, disk), 2 wrong usage, 3 error in the recipe, 4 refused (a damaged checkpoint or\nbundle, a missing grant, a replay that differs), 75 restart requested, 124 at the limit of --time, 130 and 143 interrupted.")]
struct Cli {
    /// Write a log to FILE; PERILUNE_LOG sets the level (debug, or perilune_engine=trace)
    #[arg(long, global = true, value_name = "FILE")]
    log: Option<std::path::PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a recipe, or run a plain script
    Run(Box<run::RunArgs>),
    /// Open a prompt with completion and help, and with the run of a recipe if one is given
    Repl(repl::ReplArgs),
    /// Find mistakes in a recipe by a dry run of one step, without training
    Check(check::CheckArgs),
    /// Report devices and libraries, and how to install missing ones
    Doctor(doctor::DoctorArgs),
    /// Measure the time of a training step by kernel and by recipe line
    Profile(profile::ProfileArgs),
    /// List, inspect, compare, verify and export checkpoints
    #[command(subcommand)]
    Ckpt(ckpt::CkptArgs),
    /// Compare the speed of Perilune and PyTorch on the same device
    Bench(bench::BenchArgs),
    /// Train a recipe with many values of its params, and compare the results
    Sweep(Box<sweep::SweepArgs>),
    /// Find a learning rate, or the largest batch that fits
    #[command(subcommand)]
    Find(find::FindArgs),
    /// List runs with their status, best metric and params, or compare two
    Runs(runs::RunsArgs),
    /// Evaluate a checkpoint of a run on a split of its data
    Eval(eval::EvalArgs),
    /// Generate text from a checkpoint of a run, with the recipe's `sample`
    Sample(sample::SampleArgs),
    /// Plot the curves of runs in the terminal, or as SVG or PNG
    Plot(plot::PlotArgs),
    /// Repeat a run with its edits and compare the weights, or recompute windows of it and compare every step
    Replay(replay::ReplayArgs),
    /// Pack runs and recipes into bundles; sign, verify, list, compare and unpack them
    #[command(subcommand)]
    Bundle(bundle::BundleArgs),
    /// Run a command in several processes on this host
    Launch(launch::LaunchArgs),
    /// Write the file of a job for Slurm or Kubernetes
    Submit(submit::SubmitArgs),
    /// Check the data of a recipe, or files of records, before training
    #[command(subcommand)]
    Data(data::DataArgs),
    /// Train tokenizers, encode texts to token files, show the tokens of a text
    #[command(subcommand)]
    Tokens(tokens::TokensArgs),
    /// Download data into the cache and print its hash; list and remove what is there
    Fetch(fetch::FetchArgs),
    /// Show, bound and clear what the program keeps to be faster at the next start
    Cache(cache::CacheArgs),
    /// Download one file: the process that a command starts for it
    #[command(hide = true)]
    FetchProcess,
    /// Create a directory with a recipe and type stubs for an editor
    Init(init::InitArgs),
    /// Print the reference of operations and of the standard library (Markdown), or write it as pages
    Reference(reference::ReferenceArgs),
    /// Print type stubs for lua-language-server (LuaCATS)
    Stubs,
    /// Print a completion script
    Completions { shell: clap_complete::Shell },
}

/// Parses the recorded command line of a run; `None` if it is not one of this release.
fn recorded_run(mut words: Vec<String>) -> Option<run::RunArgs> {
    // `perilune FILE.lua` was recorded without the command.
    if words.get(1).is_some_and(|w| w != "run") {
        words.insert(1, "run".into());
    }
    match Cli::try_parse_from(words).ok()?.command {
        Command::Run(args) => Some(*args),
        _ => None,
    }
}

/// Parses the command in the record of the run in `dir`.
fn command_of(record: &Map<String, Value>, dir: &Path) -> Result<run::RunArgs, Failure> {
    let words = record.get("command").and_then(Value::as_array).into_iter().flatten();
    recorded_run(words.filter_map(|w| w.as_str().map(String::from)).collect()).ok_or_else(|| {
        let rule = "command: is not a `perilune run` command of this version";
        Failure::Refused(format!("{}/run.json: {rule}", dir.display()))
    })
}

/// Parses the words of a `perilune run`; the error is what clap says of them.
fn parse_run(words: Vec<String>) -> Result<run::RunArgs, String> {
    match Cli::try_parse_from(words).map(|cli| cli.command) {
        Ok(Command::Run(args)) => Ok(*args),
        Ok(_) => Err("they are not those of perilune run".into()),
        Err(e) => {
            let text = e.to_string();
            Err(text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_string())
        }
    }
}

/// Returns the arguments, with `run` put before a file name.
fn arguments() -> Vec<OsString> {
    let mut args: Vec<OsString> = std::env::args_os().collect();
    let Some(first) = args.get(1).map(|a| a.to_string_lossy().into_owned()) else { return args };
    let known = Cli::command().get_subcommands().any(|c| c.get_name() == first) || first == "help";
    let file = std::path::Path::new(&first);
    let is_script =
        file.extension().is_some_and(|e| e == "lua" || e == "plb") || (first.contains('/') && file.is_file());
    if !known && !first.starts_with('-') && is_script {
        args.insert(1, "run".into());
    }
    args
}

/// Parses the arguments of the process and runs the command.
pub fn dispatch() -> Result<(), Failure> {
    let cli = usage::parse(arguments());
    log::start(cli.log.as_deref())?;
    match cli.command {
        Command::Run(args) => run::run(*args),
        Command::Repl(args) => repl::repl(args),
        Command::Check(args) => check::check(args),
        Command::Doctor(args) => doctor::doctor(&args),
        Command::Profile(args) => profile::profile(args),
        Command::Ckpt(args) => ckpt::ckpt(&args),
        Command::Bench(args) => bench::bench(args),
        Command::Runs(args) => runs::runs(&args),
        Command::Eval(args) => eval::eval(&args),
        Command::Sample(args) => sample::sample(&args),
        Command::Plot(args) => plot::plot(&args),
        Command::Sweep(args) => sweep::sweep(*args),
        Command::Find(args) => find::find(args),
        Command::Replay(args) => replay::replay(args),
        Command::Bundle(args) => bundle::bundle(args),
        Command::Launch(args) => launch::launch(args),
        Command::Submit(args) => submit::submit(args),
        Command::Data(args) => data::data(args),
        Command::Tokens(args) => tokens::tokens(args),
        Command::Cache(args) => cache::cache(&args),
        Command::Fetch(args) => fetch::fetch(&args),
        Command::FetchProcess => fetch::serve(),
        Command::Init(args) => init::init(&args),
        Command::Reference(args) => reference::reference(&args),
        Command::Stubs => stubs::stubs(),
        Command::Completions { shell } => completions::completions(shell, &mut Cli::command()),
    }
}
