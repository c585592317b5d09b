//! Writes one checkpoint.

use crate::crash::point;
use crate::{Error, MODEL, OPTIMIZER, RECORD, Result, SCHEMA, Snapshot, io};
use perilune_data::shards;
use perilune_policy::Directory;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Ends of the hidden names of what is being written, what it replaces, and what is being removed.
const NEW: &str = ".new";
pub(crate) const OLD: &str = ".old";
const GONE: &str = ".gone";

/// Makes what a directory lists survive a power cut.
fn sync_dir(dir: &Path) -> Result<()> {
    #[cfg(unix)]
    File::open(dir).and_then(|d| d.sync_all()).map_err(io(dir, "flush the directory"))?;
    #[cfg(not(unix))]
    let _ = dir;
    Ok(())
}

/// Size and hash of each file, counted while it is written.
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

    /// What `run.json` says of a file.
    fn describe(&self, file: &str) -> Value {
        let found = self.0.get(file);
        json!({ "bytes": found.map(|f| f.0), "blake3": found.map(|f| f.1.finalize().to_hex().to_string()) })
    }
}

/// The key of a record's own hash, its last one.
pub(crate) const SEAL: &str = "blake3";

/// The text of a record with its own hash in it: BLAKE3 of the text with nothing in the hash's place.
fn sealed(mut record: Map<String, Value>) -> String {
    record.shift_remove(SEAL);
    record.insert(SEAL.into(), "".into());
    let mut text = format!("{:#}\n", Value::Object(record));
    let hash = blake3::hash(text.as_bytes()).to_hex();
    if let Some(at) = text.rfind("\"\"") {
        text.insert_str(at + 1, &hash);
    }
    text
}

fn remove(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(io(dir, "remove")(e)),
        _ => Ok(()),
    }
}

/// Writes `snapshot` as `dir/step-N` and returns that path. One that is there already is replaced. Files larger than `limit`
/// bytes are cut into shards.
pub fn write(dir: &Path, snapshot: &Snapshot, limit: u64) -> Result<PathBuf> {
    let name = format!("step-{}", snapshot.step);
    let (to, new, old) = (dir.join(&name), dir.join(format!(".{name}{NEW}")), dir.join(format!(".{name}{OLD}")));
    if !dir.exists() {
        fs::create_dir_all(dir).map_err(io(dir, "create"))?;
        // Its name must survive, too.
        let above = dir.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        sync_dir(above)?;
    }
    // Left by a crash, if there.
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
    file.write_all(sealed(record).as_bytes()).map_err(io(&new.join(RECORD), "write"))?;
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

/// Takes a checkpoint away, in one instant as far as readers can see.
pub(crate) fn discard(path: &Path) -> Result<()> {
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let gone = path.with_file_name(format!(".{name}{GONE}"));
    // What it replaced, or a crash left, must not come back in its place.
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

/// Removes what crashes have left half written or half removed. One that was put aside counts until its place is taken.
pub(crate) fn tidy(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with(".step-") && (name.ends_with(GONE) || name.ends_with(NEW)) {
            remove(&entry.path())?;
        }
    }
    Ok(())
}
