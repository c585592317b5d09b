//! Finds and reads checkpoints.

use crate::seal::{RECORD_SEAL, unseal};
use crate::write::OLD;
use crate::{Error, MODEL, OPTIMIZER, RECORD, Result, SCHEMA, Snapshot, io};
use perilune_core::HostTensor;
use perilune_data::{safetensors, shards};
use perilune_policy::{Directory, Opened};
use serde_json::{Map, Value};
use std::io::Read;
use std::path::{Path, PathBuf};

/// The maximum size of `run.json` in bytes; a larger file is refused.
const MAX_RECORD: u64 = 16 << 20;

/// A checkpoint found in a directory, not yet read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    pub step: u64,
    pub path: PathBuf,
}

/// Lists the checkpoints `step-N` in a directory, sorted by step, without reading them. A missing directory has none.
pub fn list(dir: &Path) -> Result<Vec<Found>> {
    match Directory::open(dir) {
        Ok(dir) => list_in(&dir),
        Err(e) if e.is_not_found() => Ok(Vec::new()),
        Err(perilune_policy::Error::Io { path, source, .. }) => Err(Error::Io { path, action: "list", source }),
        Err(e) => Err(e.into()),
    }
}

/// [`list`] of an open directory. A link is listed, so that a reader refuses it instead of taking an older checkpoint.
pub fn list_in(dir: &Directory) -> Result<Vec<Found>> {
    let (mut out, mut aside) = (Vec::new(), Vec::new());
    for (name, _) in dir.names()?.into_iter().filter(|n| n.1) {
        let path = dir.path().join(&name);
        if let Some(step) = step_of(&name) {
            out.push(Found { step, path });
        } else if let Some(step) = name.strip_prefix('.').and_then(|n| step_of(n.strip_suffix(OLD)?)) {
            aside.push(Found { step, path });
        }
    }
    // After a crash between the two renames that replace a checkpoint, it is complete under its hidden name.
    aside.retain(|f| !out.iter().any(|o| o.step == f.step));
    out.extend(aside);
    out.sort_by_key(|f| f.step);
    Ok(out)
}

/// Returns N for a directory `step-N`.
fn step_of(name: &str) -> Option<u64> {
    name.strip_prefix("step-")?.parse().ok()
}

/// Whether a directory of checkpoints has an entry of this name because one was written, replaced or removed.
pub fn is_checkpoint_name(name: &str) -> bool {
    let hidden = |name: &str| name.strip_prefix('.').and_then(|n| n.rsplit_once('.')).map(|n| n.0.to_string());
    step_of(name).is_some() || hidden(name).is_some_and(|n| step_of(&n).is_some())
}

fn broken(path: &Path, field: impl Into<String>, rule: impl Into<String>) -> Error {
    Error::Broken { path: path.to_path_buf(), field: field.into(), rule: rule.into() }
}

fn record(dir: &Directory) -> Result<(Map<String, Value>, String)> {
    let file = dir.open_unlinked(Path::new(RECORD))?;
    let (path, len) = (&file.path().to_path_buf(), file.len());
    if len > MAX_RECORD {
        return Err(broken(path, "size", format!("is {len} bytes; a record has at most {MAX_RECORD}")));
    }
    let mut text = String::new();
    file.take(MAX_RECORD).read_to_string(&mut text).map_err(io(path, "read"))?;
    match serde_json::from_str(&text) {
        Ok(Value::Object(map)) => Ok((map, text)),
        Ok(_) => Err(broken(path, "record", "is not a JSON object")),
        Err(e) => Err(broken(path, "record", format!("is not JSON: {e}"))),
    }
}

/// Bytes hashed at one time, few enough to be still in the processor's cache.
const CHUNK: usize = 1 << 20;

/// A reader that hashes the bytes it passes on.
struct Hashing {
    file: Opened,
    hasher: blake3::Hasher,
}

impl Read for Hashing {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        let most = to.len().min(CHUNK);
        let n = self.file.read(&mut to[..most])?;
        self.hasher.update(&to[..n]);
        Ok(n)
    }
}

/// Parses a file of the checkpoint, which is read once, and checks its size and hash against the record.
/// The error for a damaged file takes precedence over an error of `parse`.
fn verified<T>(
    dir: &Directory,
    file: &str,
    files: &Value,
    parse: impl FnOnce(&Path, &mut dyn Read, u64) -> perilune_data::Result<T>,
) -> Result<T> {
    let said = &files[file];
    let (Some(bytes), Some(hash)) = (said["bytes"].as_u64(), said["blake3"].as_str()) else {
        return Err(broken(&dir.path().join(RECORD), format!("files.{file}"), "must have `bytes` and `blake3`"));
    };
    let open = dir.open_unlinked(Path::new(file))?;
    let (path, len) = (open.path().to_path_buf(), open.len());
    if len != bytes {
        return Err(broken(&path, "size", format!("is {len} bytes, but run.json records {bytes}")));
    }
    let mut from = Hashing { file: open, hasher: blake3::Hasher::new() };
    let parsed = parse(&path, &mut from, len);
    // Hash the rest of the file if `parse` failed before its end.
    std::io::copy(&mut from, &mut std::io::sink()).map_err(io(&path, "read"))?;
    let found = from.hasher.finalize().to_hex();
    if found.as_str() != hash {
        return Err(broken(
            &path,
            "blake3",
            format!("is {found}, but run.json records {hash}: the file was changed or damaged"),
        ));
    }
    Ok(parsed?)
}

/// Reads the tensors of one file, or of its shards.
fn tensors(dir: &Directory, stem: &str, files: &Value) -> Result<Vec<(String, HostTensor)>> {
    let name = format!("{stem}{}", shards::INDEX);
    if files.get(&name).is_none() {
        return Ok(verified(dir, &format!("{stem}.safetensors"), files, safetensors::read)?.tensors);
    }
    let index = verified(dir, &name, files, |path, from, _| shards::read_index(path, from))?;
    let (path, mut out) = (dir.path().join(&name), Vec::new());
    for shard in &index.files {
        let inside = verified(dir, shard, files, safetensors::read)?.tensors;
        let names: Vec<&str> = inside.iter().map(|t| t.0.as_str()).collect();
        shards::check(&path, &index, shard, &names)?;
        out.extend(inside);
    }
    Ok(out)
}

/// Reads `run.json` of the checkpoint at `path`, and no other file.
pub fn about(path: &Path) -> Result<Map<String, Value>> {
    Ok(record(&Directory::open(path)?)?.0)
}

/// Reads and checks the checkpoint at `path`.
pub fn read(path: &Path) -> Result<Snapshot> {
    // A trailing slash would follow a link.
    let path: PathBuf = path.components().collect();
    let dir = Directory::open_itself(&path).map_err(|e| match e {
        perilune_policy::Error::NotRegular { .. } => {
            broken(&path, "directory", "is a link; a checkpoint must be a directory")
        }
        e => e.into(),
    })?;
    read_opened(&dir)
}

/// [`read`] of a checkpoint that [`list_in`] has found in an open directory.
pub fn read_in(dir: &Directory, found: &Found) -> Result<Snapshot> {
    let name = found.path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    let opened = dir.subdirectory(name).map_err(|e| match e {
        perilune_policy::Error::NotDirectory { path, found: "a link" } => {
            broken(&path, "directory", "is a link; a checkpoint must be a directory")
        }
        e => e.into(),
    });
    read_opened(&opened?)
}

fn read_opened(dir: &Directory) -> Result<Snapshot> {
    let (path, at) = (dir.path(), dir.path().join(RECORD));
    let (mut record, text) = record(dir)?;
    match record.remove("schema").as_ref().and_then(Value::as_u64) {
        // Records of schema 1 have no hash.
        Some(1) => {}
        Some(SCHEMA) => unseal(&mut record, &text).map_err(|rule| broken(&at, RECORD_SEAL, rule))?,
        Some(n) => return Err(broken(&at, "schema", format!("is {n}; this version reads 1 to {SCHEMA}"))),
        None => return Err(broken(&at, "schema", "is missing")),
    }
    let step = record.remove("step").as_ref().and_then(Value::as_u64);
    let step = step.ok_or_else(|| broken(&at, "step", "must be a whole number"))?;
    if let Some(named) = path.file_name().and_then(|n| step_of(n.to_str()?))
        && named != step
    {
        return Err(broken(&at, "step", format!("is {step}, but the directory is named for step {named}")));
    }
    let files = record.remove("files").ok_or_else(|| broken(&at, "files", "is missing"))?;
    let model = tensors(dir, MODEL, &files)?;
    let optimizer = tensors(dir, OPTIMIZER, &files)?;
    Ok(Snapshot { step, model, optimizer, record })
}
