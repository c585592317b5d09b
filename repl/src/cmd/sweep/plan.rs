//! Makes the plan of a sweep from the command line, and checks every value before anything runs.

use super::{SweepArgs, usage};
use crate::cmd::find;
use crate::cmd::run::RunArgs;
use crate::failure::Failure;
use perilune_core::error::did_you_mean;
use perilune_lua::ParamValue;
use perilune_train::sweep::{Axis, Draws, Plan, SEED, SweepDir, Trial, Values};
use perilune_train::{Source, params};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The param of ablations, whose default is the baseline.
const ABLATE: &str = "ablate";
/// Options that the sweep gives to its runs itself.
const OWN: [&str; 17] = [
    "--run-dir",
    "--resume",
    "--json",
    "--quiet",
    "-q",
    "--set",
    "--seed",
    "--steps",
    "--until",
    "--overwrite",
    "--branch",
    "--watch",
    "--at",
    "--edited",
    "--threads",
    "--rank",
    "--log",
];

/// Params of a recipe with their values.
type Known = BTreeMap<String, ParamValue>;

/// Makes the plan. Returns the name of the recipe with it.
pub fn make(args: &SweepArgs) -> Result<(String, Plan), Failure> {
    let Some(path) = args.recipe.clone() else { return Err(Failure::Usage("sweep: there is no RECIPE".into())) };
    let source = Source::read(&path)?;
    for argument in &args.arguments {
        let option = argument.split('=').next().unwrap_or_default();
        if OWN.contains(&option) {
            let cure = match option {
                "--set" | "--seed" => "give it before --, as in --set seed=1..5",
                "--threads" => "--jobs N divides the cores among the runs",
                _ => "the sweep sets it for its runs",
            };
            return Err(Failure::Usage(format!("-- {option}: {cure}")));
        }
    }
    let bare = run_args_of(&path, &[], &args.arguments)?;
    let (_, _, files, device) = bare.parts();
    let loaded = find::load(&path, &[], device, files, find::silent_backend())?;
    let known: Known = loaded.recipe.params().map_err(usage)?.into_iter().collect();
    let name = loaded.recipe.name();
    drop(loaded);

    let (axes, fixed) = axes(args, &known)?;
    if axes.is_empty() {
        let cure = "give an axis two values, as in --set lr=1e-3,3e-3 or --set seed=1..5; perilune run trains once";
        return Err(Failure::Usage(format!("sweep: nothing varies\n  hint: {cure}")));
    }
    let draws = args.random.map(|count| Draws { count, seed: args.seed.unwrap_or(1) });
    let halving = match args.halving {
        true => Some((args.eta.unwrap_or(3), full_steps(args, &axes, &fixed, &known)?)),
        false => None,
    };
    let trials = Plan::trials(&axes, draws)?;
    let mut arguments = args.arguments.clone();
    arguments.extend(args.steps.map(|n| ["--steps".into(), n.to_string()]).into_iter().flatten());
    let directory =
        std::env::current_dir().map_err(|e| Failure::System(format!("there is no current directory: {e}")))?;
    let hash = blake3::hash(source.text.as_bytes()).to_hex().to_string();
    let plan =
        Plan { recipe: path, hash, directory, fixed, draws, halving, metric: args.metric.clone(), arguments, trials };
    check(&plan, &known)?;
    Ok((name, plan))
}

/// Opens the sweep in a directory, and checks that its recipe and place are those of its start.
pub fn reopen(path: &Path) -> Result<SweepDir, Failure> {
    let dir = SweepDir::open(path)?;
    let here = std::env::current_dir().unwrap_or_default();
    if here.canonicalize().ok() != dir.plan.directory.canonicalize().ok() {
        let rule = "relative paths start there; call it from that directory";
        let from = dir.plan.directory.display();
        return Err(Failure::Usage(format!("--resume {}: the sweep was started in {from}: {rule}", path.display())));
    }
    let source = Source::read(&dir.plan.recipe)?;
    if blake3::hash(source.text.as_bytes()).to_hex().as_str() != dir.plan.hash {
        let rule = "has changed since the sweep began, so its runs would not be comparable";
        let cure = "restore the file, or start a new sweep";
        return Err(Failure::Usage(format!("{} {rule}\n  hint: {cure}", dir.plan.recipe.display())));
    }
    Ok(dir)
}

/// Parses the values of `--set`: axes, and values that all runs have.
fn axes(args: &SweepArgs, known: &Known) -> Result<(Vec<Axis>, Vec<(String, String)>), Failure> {
    let (mut axes, mut fixed, mut seen) = (Vec::new(), Vec::new(), BTreeSet::new());
    for (name, text) in &args.set {
        if !seen.insert(name) {
            return Err(Failure::Usage(format!("--set {name}: it is given twice; list its values: --set {name}=A,B")));
        }
        let is_option = matches!(name.as_str(), SEED | "steps");
        if name == "steps" && args.steps.is_some() {
            return Err(Failure::Usage("--steps and --set steps=… set the same; give one of them".into()));
        }
        let Some(default) = known.get(name) else {
            if is_option {
                push(Axis::parse(name, text)?, &mut axes, &mut fixed)?;
                continue;
            }
            let near = did_you_mean(name, known.keys().map(String::as_str)).map(|n| format!(". Did you mean '{n}'?"));
            let list = known.keys().cloned().collect::<Vec<_>>().join(", ");
            return Err(Failure::Usage(format!(
                "--set {name}: the recipe has no param '{name}' (there are {list}){}",
                near.unwrap_or_default()
            )));
        };
        if let ParamValue::Str(value) = default
            && value.contains(',')
            && Axis::has_plain_comma(text)
        {
            let cure = r"write \, for a comma of a value; a comma alone separates values";
            return Err(Failure::Usage(format!(
                "--set {name}={text}: the default '{value}' has a comma, so it is not clear whether this is one value\n  hint: {cure}"
            )));
        }
        let mut axis = Axis::parse(name, text)?;
        if name == ABLATE
            && let Values::List(list) = &mut axis.values
        {
            let baseline = match params::as_given(&[(name.clone(), json_of(default))].into_iter().collect()).pop() {
                Some((_, text)) => text,
                None => String::new(),
            };
            if !list.contains(&baseline) {
                list.insert(0, baseline);
            }
        }
        push(axis, &mut axes, &mut fixed)?;
    }
    Ok((axes, fixed))
}

fn json_of(value: &ParamValue) -> serde_json::Value {
    params::to_json(&[("v".into(), value.clone())])["v"].clone()
}

/// Adds an axis, or a value that all runs have if it is the only one.
fn push(axis: Axis, axes: &mut Vec<Axis>, fixed: &mut Vec<(String, String)>) -> Result<(), Failure> {
    match axis.len() {
        Some(1) => fixed.extend(axis.list()?.into_iter().map(|value| (axis.name.clone(), value))),
        _ => axes.push(axis),
    }
    Ok(())
}

/// Returns the number of steps of a whole run, of which the rungs are fractions.
fn full_steps(args: &SweepArgs, axes: &[Axis], fixed: &[(String, String)], known: &Known) -> Result<u64, Failure> {
    let cure = "give --steps N";
    if axes.iter().any(|axis| axis.name == "steps") {
        let rule = "the rungs are parts of one number of steps, so steps cannot vary";
        return Err(Failure::Usage(format!("--halving: {rule}\n  hint: {cure}")));
    }
    if let Some(steps) = args.steps {
        return Ok(u64::from(steps));
    }
    let given = fixed.iter().find(|(name, _)| name == "steps").and_then(|(_, text)| text.parse().ok());
    let default =
        known.get("steps").and_then(|v| if let ParamValue::Int(n) = v { u64::try_from(*n).ok() } else { None });
    let rule = || {
        Failure::Usage(format!(
            "--halving: the recipe has no param 'steps' that says how long a run is\n  hint: {cure}"
        ))
    };
    given.or(default).filter(|n| *n > 0).ok_or_else(rule)
}

/// Loads the recipe with every value once, so that a wrong one ends the sweep before its first run.
fn check(plan: &Plan, known: &Known) -> Result<(), Failure> {
    let mut tried = BTreeSet::new();
    for trial in &plan.trials {
        if trial.values.iter().all(|value| tried.contains(value)) && !tried.is_empty() {
            continue;
        }
        tried.extend(trial.values.iter().cloned());
        let run = run_args(plan, Some(trial))?;
        let (path, set, files, device) = run.parts();
        device.check_precision()?;
        // `seed` and `steps` are options where the recipe has no such param.
        let set: Vec<_> = set.iter().filter(|(name, _)| known.contains_key(name)).cloned().collect();
        find::load(path, &set, device, files, find::silent_backend())?.recipe.params().map_err(usage)?;
    }
    Ok(())
}

/// Returns the words after `perilune` that run a trial, without those that say where and how far.
pub fn words(plan: &Plan, trial: Option<&Trial>) -> Vec<String> {
    let values = plan.fixed.iter().chain(trial.into_iter().flat_map(|t| &t.values)).cloned().collect::<Vec<_>>();
    run_words(&plan.recipe, &values, &plan.arguments)
}

fn run_words(recipe: &Path, values: &[(String, String)], arguments: &[String]) -> Vec<String> {
    let mut out = vec!["run".to_string(), recipe.display().to_string()];
    for (name, value) in values {
        // Both set a param of that name if there is one.
        match name.as_str() {
            SEED | "steps" => out.push(format!("--{name}={value}")),
            _ => out.extend(["--set".into(), format!("{name}={value}")]),
        }
    }
    out.extend(arguments.iter().cloned());
    out
}

/// Parses the command of a trial.
pub fn run_args(plan: &Plan, trial: Option<&Trial>) -> Result<RunArgs, Failure> {
    parse(words(plan, trial))
}

fn run_args_of(recipe: &Path, values: &[(String, String)], arguments: &[String]) -> Result<RunArgs, Failure> {
    parse(run_words(recipe, values, arguments))
}

fn parse(words: Vec<String>) -> Result<RunArgs, Failure> {
    let words = std::iter::once("perilune".to_string()).chain(words).collect();
    crate::cmd::parse_run(words).map_err(|text| Failure::Usage(format!("the options of the runs: {text}")))
}
