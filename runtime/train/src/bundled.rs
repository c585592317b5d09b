//! Collects what a bundle of a run or of a recipe has (`perilune_bundle`).
//!
//! The bundle of a run has its directory below `run/`, without TensorBoard's files and media: the record, the recipe in all its
//! versions, the logs with their seals, and the checkpoints that are asked for. The host, the process, the folder in which it was
//! started and the path of the program are left out of the record. The bundle of a recipe has its files below `recipe/`.
//!
//! Data are listed with the hash of their content. A run's data must still be those that it read.

use crate::data_record::Entry;
use crate::error::{Error, Result, disk};
use crate::history::{Files, dir_of};
use crate::mlflow::MLFLOW;
use crate::replay::Replay;
use crate::resume::record_of;
use crate::run_log::{self, LEDGER, METRICS};
use crate::rundir::{RECIPE, RECORD};
use crate::sample_file::SAMPLES;
use crate::source::mentions;
use perilune_bundle::manifest::{Asks, DataFile, RunFacts};
use perilune_bundle::{Content, Item};
use perilune_checkpoint::{CHECKPOINTS, seal};
use perilune_lua::{Recipe, Runtime};
use perilune_policy::{Directory, ReadKind, is_address};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The folder of a run in a bundle, and that of a recipe.
pub const RUN: &str = "run";
pub const FILES: &str = RECIPE;
/// The entry with the envelope of the results (`envelope.rs`).
pub const ENVELOPE: &str = "envelope.json";

/// Fields of `run.json` that name the machine, not the run.
const PRIVATE: [&str; 4] = ["host", "pid", "directory", MLFLOW];

/// Which checkpoints of a run are packed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Checkpoints {
    None,
    Last,
    All,
}

/// What a bundle has, except its README, its licence and the content of data.
#[derive(Debug)]
pub struct Contents {
    pub name: String,
    /// The entry of the recipe at the start.
    pub recipe: String,
    pub command: Vec<String>,
    pub params: Map<String, Value>,
    pub run: Option<RunFacts>,
    pub items: Vec<Item>,
    /// The files that the recipe reads, and where they are; of an address nowhere.
    pub data: Vec<(DataFile, PathBuf)>,
    /// Without hosts: the caller knows where addresses lead.
    pub asks: Asks,
}

/// Reads a run that has ended.
///
/// # Errors
/// The run has not ended, a file of it is damaged, or its data are not there any more or have changed.
pub fn of_run(dir: &Path, keep: Checkpoints) -> Result<Contents> {
    let record = record_of(dir)?;
    let text = |key: &str| record.get(key).and_then(Value::as_str).unwrap_or_default().to_string();
    let recipe = PathBuf::from(text("path"));
    let replay = Replay::read(dir, &record, &recipe)?;
    let open = Directory::open(dir)?;
    let metrics = run_log::text(&open, METRICS)?;
    run_log::verify(dir, METRICS, &metrics, &record, run_log::stood(&record, METRICS))?;
    let at = dir.display();
    let weights = replay.weights.clone().ok_or_else(|| {
        Error::Usage(format!("{at}: the run has no hash of its weights; it was stopped by a failure"))
    })?;
    let checkpoints = steps_of(dir, keep)?;
    let facts = RunFacts {
        steps: replay.steps,
        weights,
        metrics: record.get("metrics").and_then(Value::as_object).cloned().unwrap_or_default(),
        started: text("started"),
        seconds: record.get("seconds").and_then(Value::as_f64).unwrap_or_default(),
        device: text("device"),
        device_description: text("device_description"),
        mesh: record.get("mesh").and_then(Value::as_str).map(String::from),
        precision: text("precision"),
        edits: replay.versions.iter().filter(|v| !v.resumed).count() as u64,
        resumes: replay.versions.iter().filter(|v| v.resumed).count() as u64,
        checkpoints: checkpoints.iter().copied().collect(),
    };
    let home = dir_of(&recipe);
    let start = record.get("directory").and_then(Value::as_str).map(PathBuf::from).filter(|dir| dir.is_dir());
    let data = data_of(&replay.data, &home, start.as_deref())?;
    let mut command: Vec<String> = record
        .get("command")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(|w| Some(w.as_str()?.into()))
        .collect();
    if let Some(program) = command.first_mut() {
        *program = "perilune".into();
    }
    let kept = without_machine(record.clone(), &command);
    let mut items =
        vec![Item { name: format!("{RUN}/{RECORD}"), content: Content::Text(seal::seal(kept).into_bytes()) }];
    let versions = replay.versions.iter().map(|v| &v.files).chain([&replay.files]);
    let kernels = versions.clone().any(uses_kernels);
    for (name, is_folder) in open.names()? {
        let wanted = match is_folder {
            true => name == RECIPE || name.starts_with(&format!("{RECIPE}@")),
            false => [METRICS, LEDGER, SAMPLES].contains(&name.as_str()),
        };
        if wanted {
            add(&mut items, &dir.join(&name), &format!("{RUN}/{name}"))?;
        }
    }
    for step in &checkpoints {
        let inside = format!("{CHECKPOINTS}/step-{step}");
        add(&mut items, &dir.join(&inside), &format!("{RUN}/{inside}"))?;
    }
    let first = replay.files.first().map(|f| f.0.strip_prefix(&home).unwrap_or(&f.0).display().to_string());
    let first = first.ok_or_else(|| Error::Refused(format!("{at}: run.json: files: is empty")))?;
    let name = record.get("recipe").and_then(Value::as_str).unwrap_or("run").to_string();
    let params = record.get("params").and_then(Value::as_object).cloned().unwrap_or_default();
    let asks = Asks { kernels, ..Asks::default() };
    Ok(Contents {
        name,
        recipe: format!("{RUN}/{RECIPE}/{first}"),
        command,
        params,
        run: Some(facts),
        items,
        data,
        asks,
    })
}

/// Collects the files of a recipe that has been built in a runtime. `words`: those of the command after the recipe.
///
/// # Errors
/// A file of it, or of its data, cannot be read.
pub fn of_recipe(path: &Path, text: &str, runtime: &Runtime, recipe: &Recipe, words: &[String]) -> Result<Contents> {
    let home = dir_of(path);
    let mut files: Files = vec![(path.to_path_buf(), text.to_string())];
    files.extend(runtime.required());
    let inside = |path: &Path| path.strip_prefix(&home).unwrap_or(path).display().to_string();
    let items = files.iter().map(|(path, text)| Item {
        name: format!("{FILES}/{}", inside(path)),
        content: Content::Text(text.clone().into_bytes()),
    });
    let items: Vec<Item> = items.collect();
    let reads = runtime.policy().data_reads(&mut 0).unwrap_or_default();
    let mut data = Vec::new();
    for read in reads {
        match &read.kind {
            ReadKind::File { .. } if is_address(&read.name) => data.push((address(&read.name, None)?, PathBuf::new())),
            ReadKind::File { .. } => data.push(file(&read.name, &read.path, None)?),
            ReadKind::Folder(list) => {
                for k in 0..list.count() {
                    let (name, at) = list.file(k);
                    data.push(file(&format!("{}/{}", read.name, name.display()), &at, Some(&read.name))?);
                }
            }
        }
    }
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let command = ["perilune", "run", &name].map(String::from).into_iter().chain(words.iter().cloned()).collect();
    let params = match crate::params::to_json(&recipe.params()?) {
        Value::Object(params) => params,
        _ => Map::new(),
    };
    let asks = Asks { kernels: uses_kernels(&files), ..Asks::default() };
    Ok(Contents {
        name: recipe.name(),
        recipe: format!("{FILES}/{name}"),
        command,
        params,
        run: None,
        items,
        data,
        asks,
    })
}

/// Whether a text of the recipe mentions `pl.kernel`. What the run may do is decided by a grant, not by this.
fn uses_kernels(files: &Files) -> bool {
    files.iter().any(|(_, text)| mentions(text, "kernel"))
}

/// Returns the record without what names the machine.
fn without_machine(mut record: Map<String, Value>, command: &[String]) -> Map<String, Value> {
    for key in PRIVATE {
        record.shift_remove(key);
    }
    record.insert("command".into(), json!(command));
    record
}

/// Returns the steps of the checkpoints to be packed.
fn steps_of(dir: &Path, keep: Checkpoints) -> Result<BTreeSet<u64>> {
    if keep == Checkpoints::None {
        return Ok(BTreeSet::new());
    }
    let found = perilune_checkpoint::list(&dir.join(CHECKPOINTS))?;
    let steps: BTreeSet<u64> = found.iter().map(|f| f.step).collect();
    let last = steps.last().copied();
    let Some(last) = last else {
        let cure = "run it with --checkpoint-every N; its last step gets a checkpoint then";
        return Err(Error::Usage(format!("{}: the run has no checkpoints\n  hint: {cure}", dir.display())));
    };
    Ok(if keep == Checkpoints::Last { BTreeSet::from([last]) } else { steps })
}

/// Adds a file, or all files beneath a folder. Links and special files are refused, hidden ones are left out.
fn add(items: &mut Vec<Item>, path: &Path, name: &str) -> Result<()> {
    let kind = std::fs::symlink_metadata(path).map_err(disk("read", path))?.file_type();
    if kind.is_file() {
        items.push(Item { name: name.to_string(), content: Content::File(path.to_path_buf()) });
        return Ok(());
    }
    if !kind.is_dir() {
        return Err(Error::Refused(format!("{}: is neither a file nor a folder", path.display())));
    }
    for entry in std::fs::read_dir(path).map_err(disk("list", path))? {
        let entry = entry.map_err(disk("list", path))?;
        let inside = entry.file_name().to_string_lossy().into_owned();
        if !inside.starts_with('.') {
            add(items, &entry.path(), &format!("{name}/{inside}"))?;
        }
    }
    Ok(())
}

/// Finds the files of a run's data, and compares their content with what the run read.
fn data_of(entries: &[Entry], home: &Path, start: Option<&Path>) -> Result<Vec<(DataFile, PathBuf)>> {
    let mut out = Vec::new();
    for entry in entries {
        let name = entry.path();
        let wrong = |rule: &str| {
            Err(Error::Refused(format!(
                "{name}: {rule}\n  hint: restore it: the bundle repeats the run, with the data that it read"
            )))
        };
        if entry.has_changed() {
            return wrong("changed while the run read it, so the run cannot be repeated");
        }
        if is_address(name) {
            out.push((address(name, entry.content_hash())?, PathBuf::new()));
            continue;
        }
        // As recipes find it: beside the recipe, or where the run was started.
        let here = start.unwrap_or(Path::new(""));
        let places = [here.join(home).join(name), here.join(name)];
        let Some(at) = places.iter().find(|at| if entry.is_folder() { at.is_dir() } else { at.is_file() }) else {
            return wrong("is not there");
        };
        if entry.is_folder() {
            folder(&mut out, at, name, name)?;
            continue;
        }
        let (found, at) = file(name, at, None)?;
        if entry.content_hash().is_some_and(|hash| hash != found.blake3) {
            return wrong("is not what the run read: its content differs");
        }
        out.push((found, at));
    }
    Ok(out)
}

fn address(name: &str, hash: Option<&str>) -> Result<DataFile> {
    let wrong = || {
        Error::Usage(format!(
            "{name}: has no hash of its content, which a bundle needs\n  hint: ADDRESS#sha256:HEX or ADDRESS#blake3:HEX"
        ))
    };
    let (_, stated) = name.split_once('#').ok_or_else(wrong)?;
    let blake3 = stated.strip_prefix("blake3:").or(hash).unwrap_or_default().to_string();
    Ok(DataFile {
        path: name.to_string(),
        bytes: 0,
        blake3,
        address: Some(name.to_string()),
        inside: false,
        folder: None,
    })
}

fn file(name: &str, at: &Path, folder: Option<&str>) -> Result<(DataFile, PathBuf)> {
    let mut hasher = blake3::Hasher::new();
    std::fs::File::open(at).and_then(|f| hasher.update_reader(f).map(drop)).map_err(disk("read", at))?;
    let (bytes, blake3) = (hasher.count(), hasher.finalize().to_hex().to_string());
    let folder = folder.map(String::from);
    Ok((DataFile { path: name.to_string(), bytes, blake3, address: None, inside: false, folder }, at.to_path_buf()))
}

/// Lists the files beneath a folder in the order of their names; hidden ones are left out.
fn folder(out: &mut Vec<(DataFile, PathBuf)>, at: &Path, name: &str, top: &str) -> Result<()> {
    let entries = std::fs::read_dir(at).map_err(disk("list", at))?;
    let mut names: Vec<String> = entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    for inside in names.iter().filter(|n| !n.starts_with('.')) {
        let (path, shown) = (at.join(inside), format!("{name}/{inside}"));
        if path.is_dir() {
            folder(out, &path, &shown, top)?;
        } else if path.is_file() {
            out.push(file(&shown, &path, Some(top))?);
        }
    }
    Ok(())
}
