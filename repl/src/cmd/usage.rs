//! Parses the command line, and adds to clap's errors what it cannot know: params of recipes, files, and numbers below zero.

use crate::cmd::Cli;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser};
use perilune_core::error::did_you_mean;
use std::ffi::OsString;
use std::path::Path;

/// Commands that take a recipe and its params.
const OF_RECIPES: [&str; 6] = ["run", "check", "repl", "profile", "eval", "sweep"];

/// Parses the arguments of the process; ends it with clap's message and tips if they are wrong.
pub(super) fn parse(args: Vec<OsString>) -> Cli {
    let words: Vec<String> = args.iter().map(|a| a.to_string_lossy().into_owned()).collect();
    match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(mut error) => {
            if let Some(tips) = tips(&error, &words) {
                error.remove(ContextKind::SuggestedArg);
                error.remove(ContextKind::SuggestedSubcommand);
                // It is that of the option that clap would have suggested.
                error.remove(ContextKind::Usage);
                error.insert(
                    ContextKind::Suggested,
                    ContextValue::StyledStrs(tips.into_iter().map(Into::into).collect()),
                );
            }
            error.exit()
        }
    }
}

fn text(error: &clap::Error, kind: ContextKind) -> Option<&str> {
    match error.get(kind)? {
        ContextValue::String(text) => Some(text),
        _ => None,
    }
}

/// Returns tips that replace those of clap, if there are better ones.
fn tips(error: &clap::Error, words: &[String]) -> Option<Vec<String>> {
    match error.kind() {
        ErrorKind::UnknownArgument => unknown_option(text(error, ContextKind::InvalidArg)?, words),
        ErrorKind::InvalidSubcommand => unknown_command(text(error, ContextKind::InvalidSubcommand)?),
        _ => None,
    }
}

/// An option that is no option may be a param of the recipe.
fn unknown_option(given: &str, words: &[String]) -> Option<Vec<String>> {
    let command = words.get(1)?;
    if given.starts_with('-') && given.trim_start_matches('-').parse::<f64>().is_ok() {
        let before = words.iter().position(|w| w == given).and_then(|at| words.get(at.checked_sub(1)?));
        let option = before.filter(|w| w.starts_with("--")).map_or("an option", String::as_str);
        return Some(vec![format!("{given} is below 0; {option} takes numbers from 0")]);
    }
    let name = given.strip_prefix("--")?.split('=').next()?;
    if !OF_RECIPES.contains(&command.as_str()) || !name.starts_with(|c: char| c.is_ascii_alphabetic()) {
        return None;
    }
    let param = name.replace('-', "_");
    let mut tips = vec![format!("params of a recipe are set by --set: --set {param}=VALUE")];
    let cli = Cli::command();
    let options: Vec<String> = cli
        .find_subcommand(command)
        .into_iter()
        .flat_map(clap::Command::get_arguments)
        .filter_map(|a| a.get_long().map(str::to_string))
        .collect();
    // `epochs` is no misspelling of `steps`.
    let near =
        did_you_mean(name, options.iter().map(String::as_str)).filter(|near| near.len().abs_diff(name.len()) <= 2);
    if let Some(near) = near {
        tips.insert(0, format!("there is an option --{near}"));
    }
    Some(tips)
}

/// A command that is no command may be a recipe.
fn unknown_command(given: &str) -> Option<Vec<String>> {
    let stem = given.strip_suffix(".lua").unwrap_or(given);
    let file = |dir: &str| Path::new(dir).join(format!("{stem}.lua"));
    let found = ["", "recipes"].iter().map(|dir| file(dir)).find(|path| path.is_file());
    if let Some(path) = found {
        return Some(vec![format!("to train the recipe: perilune run {}", path.display())]);
    }
    let names: Vec<String> = Cli::command().get_subcommands().map(|c| c.get_name().to_string()).collect();
    let near = did_you_mean(given, names.iter().map(String::as_str));
    let tip =
        near.map_or_else(|| "`perilune --help` lists the commands".into(), |near| format!("did you mean {near}?"));
    Some(vec![tip])
}
