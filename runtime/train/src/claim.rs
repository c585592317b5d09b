//! Claims the directory of a new run: locks it, refuses one that holds another run, and clears one that is overwritten.
//!
//! A directory holds a run if its `run.json` describes one, or is empty or cut off beside a lock file: a process that is
//! killed as it starts, or a power failure, leaves such a file. Clearing deletes what a run writes, by name, and nothing else;
//! files that the recipe or a person put beside it stay.

use crate::error::{Error, Result, disk};
use crate::media::{self, MEDIA};
use crate::run_files::{MAX_RECORD, file_name};
use crate::run_lock::{LOCK, RunLock};
use crate::run_log::{LEDGER, METRICS};
use crate::rundir::{BOARD, RECIPE, RECORD};
use crate::sample_file::SAMPLES;
use crate::tensorboard;
use perilune_checkpoint::{CHECKPOINTS, is_checkpoint_name};
use perilune_policy::Directory;
use serde_json::{Map, Value};
use std::io::Read;
use std::path::Path;

/// A directory that this process alone writes, with an empty `run.json`.
pub(crate) struct Claim {
    pub dir: Directory,
    pub lock: RunLock,
}

/// What `run.json` of a directory says.
#[derive(Debug)]
pub(crate) enum Contents {
    /// There is none.
    Nothing,
    /// It is empty or cut off.
    Incomplete,
    /// It describes a run; its seal has not been checked.
    Run(Map<String, Value>),
    /// It belongs to another program.
    Foreign,
}

/// Reads what a directory holds. A link, pipe or device in place of `run.json` is an error.
pub(crate) fn contents(dir: &Directory) -> Result<Contents> {
    if !dir.has(RECORD)? {
        return Ok(Contents::Nothing);
    }
    let file = dir.open_unlinked(Path::new(RECORD))?;
    if file.len() > MAX_RECORD {
        return Ok(Contents::Foreign);
    }
    let mut bytes = Vec::new();
    file.take(MAX_RECORD).read_to_end(&mut bytes).map_err(disk("read", &dir.path().join(RECORD)))?;
    // A file may be cut off within a character, and some file systems fill one with zeros after a power failure.
    let text = String::from_utf8_lossy(&bytes);
    Ok(match serde_json::from_str(text.trim_matches(['\0', ' ', '\n'])) {
        Ok(Value::Object(record)) if describes_run(&record) => Contents::Run(record),
        Err(e) if e.is_eof() && (dir.has(LOCK)? || foreign(dir)?.is_none()) => Contents::Incomplete,
        _ => Contents::Foreign,
    })
}

fn describes_run(record: &Map<String, Value>) -> bool {
    let text = |key: &str| record.get(key).is_some_and(Value::is_string);
    record.get("schema").is_some_and(Value::is_u64) && text("recipe") && text("path") && text("status")
}

/// Returns an entry of the directory that no run writes.
fn foreign(dir: &Directory) -> Result<Option<String>> {
    let known = [RECORD, LOCK, RECIPE, METRICS, LEDGER, SAMPLES, BOARD, MEDIA, CHECKPOINTS];
    let ours = |name: &str| known.contains(&name) || known.iter().any(|k| temporary(k) == name) || is_version(name);
    Ok(dir.names()?.into_iter().map(|n| n.0).find(|name| !ours(name)))
}

/// Returns the name under which a new version of a file is written.
fn temporary(name: &str) -> String {
    format!(".{name}.new")
}

/// Whether the name is that of a later version's files: `recipe@57`, `recipe@57-2`.
fn is_version(name: &str) -> bool {
    let numbers = name.strip_prefix(RECIPE).and_then(|rest| rest.strip_prefix('@'));
    numbers.is_some_and(|n| {
        n.starts_with(|c: char| c.is_ascii_digit()) && n.chars().all(|c| c.is_ascii_digit() || c == '-')
    })
}

impl Claim {
    /// Claims `given`, or a new directory below `runs/`. With `overwrite` a run in `given` is deleted.
    pub fn take(given: Option<&Path>, name: &str, overwrite: bool) -> Result<Claim> {
        let Some(path) = given else { return Claim::below_runs(name) };
        std::fs::create_dir_all(path).map_err(disk("create the run directory", path))?;
        let dir = Directory::open(path)?;
        let taken = || {
            Error::Usage(format!(
                "--run-dir {}: it already contains a run; choose another directory\n  \
                 hint: --resume continues that run, --overwrite deletes it and starts anew",
                path.display()
            ))
        };
        if !overwrite && dir.has(RECORD)? {
            return Err(taken());
        }
        let found = if overwrite { Claim::overwritten(&dir)? } else { Contents::Nothing };
        let lock = RunLock::take(&dir)?;
        if let Contents::Incomplete | Contents::Run(_) = found {
            return Claim { dir, lock }.cleared(&found);
        }
        match dir.create_new(RECORD) {
            Ok(_) => Ok(Claim { dir, lock }),
            Err(e) if e.is_already_there() => Err(taken()),
            Err(perilune_policy::Error::Io { source, .. }) => Err(disk("write to the run directory", path)(source)),
            Err(e) => Err(e.into()),
        }
    }

    fn below_runs(name: &str) -> Result<Claim> {
        let runs = Path::new("runs");
        std::fs::create_dir_all(runs).map_err(disk("create the directory", runs))?;
        let runs = Directory::open(runs)?;
        let stem = format!("{}-{}", file_name(name), jiff::Zoned::now().strftime("%Y%m%d-%H%M%S"));
        for k in 1.. {
            match runs.create_directory(&if k == 1 { stem.clone() } else { format!("{stem}-{k}") }) {
                Err(e) if e.is_already_there() && k < 10_000 => {}
                made => {
                    let dir = made?;
                    return Ok(Claim { lock: RunLock::take(&dir)?, dir });
                }
            }
        }
        Err(Error::System("cannot find a free name for the run directory".into()))
    }

    /// Returns what a directory holds that may be overwritten: a run, or nothing.
    fn overwritten(dir: &Directory) -> Result<Contents> {
        let shown = dir.path().display();
        let found = contents(dir)?;
        let rule = match &found {
            Contents::Incomplete | Contents::Run(_) => return Ok(found),
            Contents::Foreign => format!("its {RECORD} is not the record of a run"),
            Contents::Nothing => match foreign(dir)? {
                None => return Ok(found),
                Some(name) => format!("it has no {RECORD}, but {name}"),
            },
        };
        let cure = "choose another directory, or leave out --overwrite to start a run beside these files";
        Err(Error::Usage(format!("--overwrite: {shown} is not the directory of a run: {rule}\n  hint: {cure}")))
    }

    /// Deletes the run in the directory, and leaves an empty `run.json`.
    pub fn cleared(self, found: &Contents) -> Result<Claim> {
        let dir = &self.dir;
        // A process that is killed meanwhile leaves a directory that is still recognized.
        dir.replace(RECORD, b"")?;
        for name in [METRICS, LEDGER, SAMPLES] {
            dir.remove(name)?;
        }
        for name in [RECORD, METRICS, LEDGER, SAMPLES].map(temporary) {
            dir.remove(&name)?;
        }
        if let Contents::Run(record) = found {
            let files = record.get("files").and_then(Value::as_array).into_iter().flatten();
            for path in files.filter_map(|f| f["path"].as_str()) {
                let path = Path::new(RECIPE).join(path);
                let names = path.components().map(|part| part.as_os_str().to_str().unwrap_or_default());
                remove_file(dir, &names.collect::<Vec<_>>())?;
            }
        }
        for (name, _) in dir.names()?.iter().filter(|n| is_version(&n.0)) {
            dir.remove(name)?;
        }
        remove_from(dir, BOARD, tensorboard::is_file_name)?;
        remove_from(dir, MEDIA, media::is_file_name)?;
        remove_from(dir, CHECKPOINTS, is_checkpoint_name)?;
        Ok(self)
    }
}

/// Deletes the entries of a subdirectory that the program has written, then the subdirectory if it is empty.
fn remove_from(dir: &Directory, name: &str, ours: impl Fn(&str) -> bool) -> Result<()> {
    if !dir.has(name)? {
        return Ok(());
    }
    let inside = dir.subdirectory(name)?;
    for (entry, _) in inside.names()?.iter().filter(|n| ours(&n.0)) {
        inside.remove(entry)?;
    }
    dir.remove_empty(name)?;
    Ok(())
}

/// Deletes a file by the names of its path, and the directories above it that are empty then. The path comes from a record: what
/// is not there, or is not a path of plain names, is left alone.
fn remove_file(dir: &Directory, names: &[&str]) -> Result<()> {
    match names {
        [] => {}
        [name] => {
            let is_file = dir.names()?.iter().any(|(known, may_be_directory)| known == name && !may_be_directory);
            if is_file {
                dir.remove(name)?;
            }
        }
        [folder, rest @ ..] => {
            let Ok(inside) = dir.subdirectory(folder) else { return Ok(()) };
            remove_file(&inside, rest)?;
            dir.remove_empty(folder)?;
        }
    }
    Ok(())
}
