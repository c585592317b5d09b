//! `perilune data check`: checks the records of a recipe, files of records, or folders of images before training.

use crate::console_out::{ConsoleOut, Mode};
use crate::device::{DeviceArgs, key_value};
use crate::failure::{Failure, disk};
use crate::policy_args::PolicyArgs;
use perilune_check::{Options, Report, Split, check, images, open};
use perilune_core::Interrupt;
use perilune_data::images::ImageFiles;
use perilune_lua::{Loaded, RuntimeOptions};
use perilune_policy::{Directory, Entry, Opened, Opener, open_named};
use perilune_train::{MOST_IDS, Source, checked_data};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

#[derive(clap::Subcommand, Debug)]
pub enum DataArgs {
    /// Find faults in data: broken texts, duplicates, leakage between splits, labels, lengths, conversations. Exit status 1 if there are findings
    Check(Box<CheckArgs>),
}

#[derive(clap::Args, Debug)]
pub struct CheckArgs {
    /// A recipe (.lua), or files of training records (.jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow, .txt, also .gz and .zst), or a folder of images with a folder for each class
    #[arg(required = true)]
    inputs: Vec<PathBuf>,
    /// Files of records that training must not have; may be given several times. Of files that are not named so, those whose names have the
    /// word valid, val, dev, test or eval are such
    #[arg(long, value_name = "FILE")]
    eval: Vec<PathBuf>,
    /// A field with text that duplicates are looked for in; may be given several times [default: guessed]
    #[arg(long, value_name = "NAME")]
    text: Vec<String>,
    /// A field that is a label; may be given several times [default: guessed]
    #[arg(long, value_name = "NAME")]
    label: Vec<String>,
    /// Labels are integers from 0 to N - 1
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    classes: Option<u64>,
    /// The least similarity of near duplicates, of their sets of character 5-grams
    #[arg(long, value_name = "0..1", default_value = "0.8", value_parser = similarity)]
    similarity: f64,
    /// Decode all images of a folder instead of a sample
    #[arg(long)]
    all: bool,
    /// Write the report to FILE as one HTML page
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
    /// Set a param of the recipe; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    set: Vec<(String, String)>,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    files: PolicyArgs,
}

fn similarity(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if x > 0.0 && x <= 1.0 => Ok(x),
        _ => Err("it must be a number above 0 and at most 1, such as 0.8".into()),
    }
}

/// Opens the files that the command line names.
#[derive(Debug)]
struct Named;

impl Opener for Named {
    fn open(&self, path: &Path) -> perilune_policy::Result<Opened> {
        open_named(path)
    }

    fn list(&self, dir: &Path) -> perilune_policy::Result<Vec<Entry>> {
        Directory::open(dir)?.list(Path::new(""))
    }
}

/// Runs the command.
pub fn data(args: DataArgs) -> Result<(), Failure> {
    match args {
        DataArgs::Check(args) => run_check(*args),
    }
}

fn failed(e: perilune_data::Error) -> Failure {
    match e {
        perilune_data::Error::Interrupted => Failure::Signal(130),
        perilune_data::Error::Io { ref source, .. } if source.kind() != std::io::ErrorKind::NotFound => {
            Failure::System(e.to_string())
        }
        other => Failure::Usage(other.to_string()),
    }
}

fn run_check(args: CheckArgs) -> Result<(), Failure> {
    let console = ConsoleOut::new(if args.json { Mode::Json } else { Mode::Human });
    let is_recipe = |p: &PathBuf| p.extension().is_some_and(|e| e == "lua");
    let report = match args.inputs.as_slice() {
        [recipe] if is_recipe(recipe) => of_recipe(&args, recipe, &console)?,
        inputs if inputs.iter().any(is_recipe) => {
            return Err(Failure::Usage("give one recipe, or files of records, not both".into()));
        }
        [folder] if folder.is_dir() => of_folder(&args, folder)?,
        _ => of_files(&args)?,
    };
    if let Some(path) = &args.html {
        std::fs::write(path, report.html()).map_err(disk("write", path))?;
    }
    console.event(&report.json());
    console.result(&report.text());
    if report.faults().next().is_some() { Err(Failure::Said(1)) } else { Ok(()) }
}

fn options(args: &CheckArgs, interrupt: Interrupt) -> Options {
    Options {
        text: args.text.clone(),
        labels: args.label.clone(),
        classes: args.classes,
        similarity: args.similarity,
        ..Options::full(interrupt)
    }
}

fn of_folder(args: &CheckArgs, folder: &Path) -> Result<Report, Failure> {
    let images = ImageFiles::of_folder(Arc::new(Named), folder, None).map_err(failed)?;
    images::check(&folder.display().to_string(), &images, args.all, &Interrupt::default()).map_err(failed)
}

/// Whether the name of a file says that it is for evaluation.
fn is_evaluation(path: &Path) -> bool {
    let stem = path.file_stem().map(|s| s.to_string_lossy().to_lowercase()).unwrap_or_default();
    let words = ["valid", "validation", "val", "dev", "test", "eval"];
    stem.split(|c: char| !c.is_ascii_alphabetic()).any(|word| words.contains(&word))
}

fn of_files(args: &CheckArgs) -> Result<Report, Failure> {
    let interrupt = Interrupt::default();
    let guess = args.eval.is_empty() && args.inputs.len() > 1;
    let (evaluation, train): (Vec<PathBuf>, Vec<PathBuf>) =
        args.inputs.iter().cloned().partition(|p| guess && is_evaluation(p));
    let mut splits = Vec::new();
    let mut add = |name: String, evaluation: bool, paths: &[PathBuf]| -> Result<(), Failure> {
        let records = open::files(Arc::new(Named), paths, &interrupt).map_err(failed)?;
        splits.push(Split { evaluation, ..Split::new(name, records) });
        Ok(())
    };
    if !train.is_empty() {
        add("train".into(), false, &train)?;
    }
    for path in evaluation.iter().chain(&args.eval) {
        add(
            path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default(),
            true,
            std::slice::from_ref(path),
        )?;
    }
    let mut report = check(&splits, &options(args, interrupt.clone())).map_err(failed)?;
    if !evaluation.is_empty() {
        let names: Vec<String> = evaluation.iter().map(|p| p.display().to_string()).collect();
        report
            .remarks
            .push(format!("taken as evaluation by their names: {} (--eval FILE says otherwise)", names.join(", ")));
    }
    Ok(report)
}

fn of_recipe(args: &CheckArgs, recipe: &Path, console: &ConsoleOut) -> Result<Report, Failure> {
    if !args.eval.is_empty() {
        return Err(Failure::Usage("--eval names files; a recipe's splits are those of recipe.data".into()));
    }
    let source = Source::read(recipe)?;
    let backend = args.device.open()?;
    let screen = Rc::new(ConsoleOut::new(Mode::Human));
    let print = move |text: &str| screen.note(text);
    let policy = args.files.recipe(recipe, &args.set)?.read_only(true).build();
    let params = args.set.clone();
    let runtime =
        args.device.runtime(RuntimeOptions { backend, params, policy, strict: true, print: Rc::new(print) })?;
    let Loaded::Recipe(loaded) = source.load(&runtime)? else {
        return Err(Failure::Usage(format!(
            "{}: a plain script has no data to check; give a recipe or files",
            recipe.display()
        )));
    };
    let run = loaded.start(None, args.device.precision.as_deref(), args.device.memory_budget)?;
    let data = checked_data(&run, MOST_IDS)?;
    let interrupt = &runtime.host().interrupt;
    let mut pictures = Vec::new();
    let mut others = Vec::new();
    for (name, reason) in &data.others {
        match run.images(name) {
            Some(folder) => pictures.push(images::check(name, &folder, args.all, interrupt).map_err(failed)?),
            None => others.push(match reason {
                Some(reason) => format!("{name} ({reason})"),
                None => format!("{name} (its loader has batches of its own)"),
            }),
        }
    }
    if data.is_empty() && pictures.is_empty() {
        let reasons = if others.is_empty() { String::new() } else { format!(": {}", others.join(", ")) };
        let message = format!(
            "no loader of this recipe has records, texts, tensors or images that can be checked: nothing was checked{reasons}"
        );
        console.event(&json!({ "event": "data_check", "splits": [], "findings": [], "remarks": [message] }));
        return Err(Failure::Usage(message));
    }
    let mut report = data.check(&options(args, interrupt.clone())).map_err(failed)?;
    pictures.into_iter().for_each(|found| report.append(found));
    if !others.is_empty() {
        report.remarks.push(format!("not checked: {}", others.join(", ")));
    }
    report.findings.sort_by_key(|f| std::cmp::Reverse(f.severity));
    Ok(report)
}
