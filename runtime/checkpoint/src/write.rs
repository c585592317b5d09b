//! Writes one checkpoint atomically, with the hashes of its files.

use crate::crash::point;
use crate::seal::seal;
use crate::{CHECKPOINTS, MODEL, OPTIMIZER, RECORD, Result, SCHEMA, Snapshot, io};
use perilune_data::shards;
use perilune_policy::Directory;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;

/// Suffixes of hidden directories: the checkpoint being written, the one it replaces, and one being removed.
const NEW: &str = ".new";
pub(crate) const OLD: &str = ".old";
const GONE: &str = ".gone";

/// The size and hash of each file, computed while it is written.
#[derive(Default)]
struct Digests(BTreeMap<String, (u64, blake3::Hasher)>);

impl Digests {
    fn add(&mut self, file: &str, bytes: &[u8]) {
        if !self.0.contains_key(file) {
            self.0.insert(file.to_string(), Default::default());
        }
        if let Some((n, hasher)) = self.0.get_mut(file) {
            *n += bytes.len() as u64;
            hasher.update(bytes);
        }
    }

    /// Returns the entry of a file in `run.json`.
    fn describe(&self, file: &str) -> Value {
        let found = self.0.get(file);
        json!({ "bytes": found.map(|f| f.0), "blake3": found.map(|f| f.1.finalize().to_hex().to_string()) })
    }
}

/// Writes `snapshot` as `step-N` in `dir` and returns its path. An existing checkpoint is replaced. Files larger than `limit`
/// bytes are split into shards. All files are created, renamed and removed beneath the handle of `dir`.
pub fn write(dir: &Directory, snapshot: &Snapshot, limit: u64) -> Result<PathBuf> {
    let name = format!("step-{}", snapshot.step);
    let (new, old) = (format!(".{name}{NEW}"), format!(".{name}{OLD}"));
    // Remove leftovers of a crash.
    dir.remove(&new)?;
    let inside = dir.create_directory(&new)?;
    point();
    let (mut files, mut digests) = (Map::new(), Digests::default());
    for (stem, tensors) in [(MODEL, &snapshot.model), (OPTIMIZER, &snapshot.optimizer)] {
        let format = BTreeMap::from([("format".to_string(), "pt".to_string())]);
        let mut observe = |file: &str, bytes: &[u8]| digests.add(file, bytes);
        let names = shards::save_with(&inside, stem, tensors, &format, limit, &mut observe)?; // flushed to the disk
        point();
        for name in names {
            let described = digests.describe(&name);
            files.insert(name, described);
        }
    }
    let mut record = Map::new();
    record.insert("schema".into(), SCHEMA.into());
    record.insert("step".into(), snapshot.step.into());
    record.extend(snapshot.record.clone());
    record.insert("files".into(), files.into());
    let mut file = inside.create(RECORD)?;
    file.write_all(seal(record).as_bytes()).map_err(io(&inside.path().join(RECORD), "write"))?;
    file.commit()?;
    point();
    inside.sync()?;
    if dir.has(&name)? {
        dir.remove(&old)?;
        dir.rename(&name, &old)?;
        point();
    }
    dir.rename(&new, &name)?;
    point();
    dir.sync()?;
    dir.remove(&old)?;
    point();
    Ok(dir.path().join(name))
}

/// Opens the directory of checkpoints of the run in `run`, and creates it before the first one. A link is refused.
pub(crate) fn checkpoints(run: &Directory) -> Result<Directory> {
    match run.create_directory(CHECKPOINTS) {
        Ok(made) => {
            // The entry of the directory itself must survive a power failure too.
            run.sync()?;
            Ok(made)
        }
        Err(e) if e.is_already_there() => Ok(run.subdirectory(CHECKPOINTS)?),
        Err(e) => Err(e.into()),
    }
}

/// Removes the checkpoint `name` of `dir` atomically: a rename hides it from readers before its files are deleted.
pub(crate) fn discard(dir: &Directory, name: &str) -> Result<()> {
    let gone = format!(".{name}{GONE}");
    // A hidden older version of it must not reappear.
    dir.remove(&format!(".{name}{OLD}"))?;
    dir.remove(&gone)?;
    match dir.rename(name, &gone) {
        Err(e) if e.is_not_found() => Ok(()),
        Err(e) => Err(e.into()),
        Ok(()) => {
            point();
            Ok(dir.remove(&gone)?)
        }
    }
}

/// Removes directories that a crash left partly written or partly removed. A replaced checkpoint is kept until its successor
/// exists.
pub(crate) fn tidy(dir: &Directory) -> Result<()> {
    for (name, _) in dir.names()? {
        if name.starts_with(".step-") && (name.ends_with(GONE) || name.ends_with(NEW)) {
            dir.remove(&name)?;
        }
    }
    Ok(())
}
