//! Writes one checkpoint atomically, with the hashes of its files.

use crate::crash::point;
use crate::seal::seal;
use crate::{Error, MODEL, OPTIMIZER, RECORD, Result, SCHEMA, Snapshot, io};
use perilune_data::shards;
use perilune_policy::Directory;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Suffixes of hidden directories: the checkpoint being written, the one it replaces, and one being removed.
const NEW: &str = ".new";
pub(crate) const OLD: &str = ".old";
const GONE: &str = ".gone";

/// Flushes the entries of a directory, so that they survive a power failure.
fn sync_dir(dir: &Path) -> Result<()> {
    #[cfg(unix)]
    File::open(dir).and_then(|d| d.sync_all()).map_err(io(dir, "flush the directory"))?;
    #[cfg(not(unix))]
    let _ = dir;
    Ok(())
}

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

fn remove(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(io(dir, "remove")(e)),
        _ => Ok(()),
    }
}

/// Writes `snapshot` as `dir/step-N` and returns that path. An existing checkpoint is replaced. Files larger than `limit`
/// bytes are split into shards.
pub fn write(dir: &Path, snapshot: &Snapshot, limit: u64) -> Result<PathBuf> {
    let name = format!("step-{}", snapshot.step);
    let (to, new, old) = (dir.join(&name), dir.join(format!(".{name}{NEW}")), dir.join(format!(".{name}{OLD}")));
    if !dir.exists() {
        // Do not create parent directories: a run directory that was removed in the meantime is an error.
        fs::create_dir(dir).map_err(io(dir, "create"))?;
        // The entry of the directory itself must survive too.
        let above = dir.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        sync_dir(above)?;
    }
    // Remove leftovers of a crash.
    remove(&new)?;
    fs::create_dir(&new).map_err(io(&new, "create"))?;
    let inside = Directory::open_itself(&new)?;
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
    file.write_all(seal(record).as_bytes()).map_err(io(&new.join(RECORD), "write"))?;
    file.commit()?;
    point();
    inside.sync()?;
    if to.exists() {
        remove(&old)?;
        fs::rename(&to, &old).map_err(io(&to, "put aside"))?;
        point();
    }
    fs::rename(&new, &to).map_err(io(&to, "put in place"))?;
    point();
    sync_dir(dir)?;
    remove(&old)?;
    point();
    Ok(to)
}

/// Removes a checkpoint atomically: a rename hides it from readers before its files are deleted.
pub(crate) fn discard(path: &Path) -> Result<()> {
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let gone = path.with_file_name(format!(".{name}{GONE}"));
    // A hidden older version of it must not reappear.
    remove(&path.with_file_name(format!(".{name}{OLD}")))?;
    remove(&gone)?;
    match fs::rename(path, &gone) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err::<(), Error>(io(path, "remove")(e)),
        Ok(()) => {
            point();
            remove(&gone)
        }
    }
}

/// Removes directories that a crash left partly written or partly removed. A replaced checkpoint is kept until its successor
/// exists.
pub(crate) fn tidy(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with(".step-") && (name.ends_with(GONE) || name.ends_with(NEW)) {
            remove(&entry.path())?;
        }
    }
    Ok(())
}
