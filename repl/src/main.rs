//! The `perilune` command: arguments in, exit status out. A file per command; what they do lies in the library crates.
//!
//! `perilune FILE.lua` is short for `perilune run FILE.lua`, so that a recipe can begin with `#!/usr/bin/env perilune`.

mod against;
mod alarm;
mod bench;
mod check;
mod checkpoints;
mod ckpt;
mod curves;
mod device;
mod doctor;
mod edits;
mod events;
mod failure;
mod format;
mod git;
mod hurry;
mod init;
mod keep;
mod ledger;
mod log;
mod monitor;
mod plot;
mod profile;
mod progress;
mod prompt;
mod replay;
mod resume;
mod run;
mod rundir;
mod screen;
mod sentry;
mod signals;
mod source;
mod tensorboard;
mod told;
mod train;
mod watch;

use clap::{CommandFactory, Parser, Subcommand};
use failure::Failure;
use std::ffi::OsString;
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "perilune", version, about = "A runtime for training recipes in Lua", arg_required_else_help = true)]
#[command(after_help = "`perilune FILE.lua` is short for `perilune run FILE.lua`.\n\
Exit status: 0 done, 1 failed (device, memory, disk), 2 wrong usage, 3 the recipe is wrong, 4 refused (a damaged checkpoint), 75 asks to be\nstarted again, 130 and 143 interrupted.")]
struct Cli {
    /// Write a log of what happens inside to FILE; PERILUNE_LOG says how much (debug, or perilune_engine=trace)
    #[arg(long, global = true, value_name = "FILE")]
    log: Option<std::path::PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a recipe, or run a plain script
    Run(Box<run::RunArgs>),
    /// Explore: a prompt with completion and help, with a recipe's run if one is named
    Repl(prompt::ReplArgs),
    /// Find mistakes in a recipe before they cost a run: one dry step, no training
    Check(check::CheckArgs),
    /// Say what the machine offers, what is missing and how to get it
    Doctor(doctor::DoctorArgs),
    /// Say where the time of a training step goes, kernel by kernel
    Profile(profile::ProfileArgs),
    /// List, inspect, compare, verify and export checkpoints
    #[command(subcommand)]
    Ckpt(ckpt::CkptArgs),
    /// Time ours and PyTorch's for the same work, on the same device
    Bench(bench::BenchArgs),
    /// Draw the curves of runs, in the terminal or as SVG or PNG
    Plot(curves::PlotArgs),
    /// Repeat a run with the edits that it had, and compare its weights
    Replay(replay::ReplayArgs),
    /// Begin a recipe in a new directory, with what an editor needs
    Init(init::InitArgs),
    /// Print the reference of all tensor operations (Markdown)
    Reference,
    /// Print type stubs for lua-language-server (LuaCATS)
    Stubs,
    /// Print a completion script
    Completions { shell: clap_complete::Shell },
}

/// Commands of the design that are not built yet.
const LATER: [&str; 1] = ["bundle"];

/// The recorded words of a run; those of `perilune FILE.lua` lack the command.
fn with_run(mut words: Vec<String>) -> Vec<String> {
    if words.get(1).is_some_and(|w| w != "run") {
        words.insert(1, "run".into());
    }
    words
}

/// `perilune FILE.lua …` becomes `perilune run FILE.lua …`.
fn arguments() -> Result<Vec<OsString>, Failure> {
    let mut args: Vec<OsString> = std::env::args_os().collect();
    let Some(first) = args.get(1).map(|a| a.to_string_lossy().into_owned()) else { return Ok(args) };
    if LATER.contains(&first.as_str()) {
        return Err(Failure::Usage(format!("`perilune {first}` is not in this version yet; it comes in a later one")));
    }
    let known = Cli::command().get_subcommands().any(|c| c.get_name() == first) || first == "help";
    let file = std::path::Path::new(&first);
    let is_script = file.extension().is_some_and(|e| e == "lua") || (first.contains('/') && file.is_file());
    if !known && !first.starts_with('-') && is_script {
        args.insert(1, "run".into());
    }
    Ok(args)
}

fn dispatch() -> Result<(), Failure> {
    let cli = Cli::parse_from(arguments()?);
    log::start(cli.log.as_deref())?;
    match cli.command {
        Command::Run(args) => run::run(*args),
        Command::Repl(args) => prompt::repl(args),
        Command::Check(args) => check::check(args),
        Command::Doctor(args) => doctor::doctor(&args),
        Command::Profile(args) => profile::profile(args),
        Command::Ckpt(args) => ckpt::ckpt(&args),
        Command::Bench(args) => bench::bench(args),
        Command::Plot(args) => curves::plot(&args),
        Command::Replay(args) => {
            replay::replay(args, |words| match Cli::try_parse_from(with_run(words)).ok()?.command {
                Command::Run(args) => Some(*args),
                _ => None,
            })
        }
        Command::Init(args) => init::init(&args),
        Command::Reference => screen::say(&perilune_lua::reference_markdown()),
        Command::Stubs => screen::say(&perilune_lua::stubs()),
        Command::Completions { shell } => {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "perilune", &mut text);
            screen::say(&String::from_utf8_lossy(&text))
        }
    }
}

/// A broken invariant is said in one line; the backtrace is for those who ask for it.
fn install_panic_hook() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let text = info.payload().downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| info.payload().downcast_ref::<&str>().copied()).unwrap_or("no message");
        let at = info.location().map(|l| format!(" ({}:{})", l.file(), l.line())).unwrap_or_default();
        screen::complain("error", &format!("this is a bug in perilune, please report it: {text}{at}"));
        if std::env::var_os("RUST_BACKTRACE").is_some() {
            default(info);
        }
    }));
}

fn main() -> ExitCode {
    install_panic_hook();
    let result = std::panic::catch_unwind(dispatch);
    match result {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(failure)) => {
            failure.show();
            ExitCode::from(failure.status())
        }
        Err(_) => ExitCode::FAILURE,
    }
}
