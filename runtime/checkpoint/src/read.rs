//! Finds and reads checkpoints.

use crate::seal::{RECORD_SEAL, unseal};
use crate::write::OLD;
use crate::{Error, MODEL, OPTIMIZER, RECORD, Result, SCHEMA, Snapshot, io};
use perilune_core::HostTensor;
use perilune_data::{safetensors, shards};
use serde_json::{Map, Value};
use std::fs::{self, File};
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
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(io(dir, "list")(e)),
    };
    let (mut out, mut aside) = (Vec::new(), Vec::new());
    for entry in entries {
        let entry = entry.map_err(io(dir, "list"))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = entry.path();
        if let Some(step) = step_of(&name).filter(|_| path.is_dir()) {
            out.push(Found { step, path });
        } else if let Some(step) = name.strip_prefix('.').and_then(|n| step_of(n.strip_suffix(OLD)?)) {
            aside.push(Found { step, path });
        }
    }
    // After a crash between the two renames that replace a checkpoint, it is complete under its hidden name.
    aside.retain(|f| f.path.is_dir() && !out.iter().any(|o| o.step == f.step));
    out.extend(aside);
    out.sort_by_key(|f| f.step);
    Ok(out)
}

/// Returns N for a directory `step-N`.
fn step_of(name: &str) -> Option<u64> {
    name.strip_prefix("step-")?.parse().ok()
}

fn broken(path: &Path, field: impl Into<String>, rule: impl Into<String>) -> Error {
    Error::Broken { path: path.to_path_buf(), field: field.into(), rule: rule.into() }
}

/// Opens a regular file. Links are refused, because they could point outside the checkpoint.
fn open(path: &Path) -> Result<(File, u64)> {
    let meta = fs::symlink_metadata(path).map_err(io(path, "open"))?;
    if !meta.is_file() {
        return Err(broken(path, "file", "is not a regular file"));
    }
    Ok((File::open(path).map_err(io(path, "open"))?, meta.len()))
}

fn record(path: &Path) -> Result<(Map<String, Value>, String)> {
    let (file, len) = open(path)?;
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
    file: File,
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
    dir: &Path,
    file: &str,
    files: &Value,
    parse: impl FnOnce(&Path, &mut dyn Read, u64) -> perilune_data::Result<T>,
) -> Result<T> {
    let path = dir.join(file);
    let said = &files[file];
    let (Some(bytes), Some(hash)) = (said["bytes"].as_u64(), said["blake3"].as_str()) else {
        return Err(broken(&dir.join(RECORD), format!("files.{file}"), "must have `bytes` and `blake3`"));
    };
    let (open, len) = open(&path)?;
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
fn tensors(dir: &Path, stem: &str, files: &Value) -> Result<Vec<(String, HostTensor)>> {
    let name = format!("{stem}{}", shards::INDEX);
    if files.get(&name).is_none() {
        return Ok(verified(dir, &format!("{stem}.safetensors"), files, safetensors::read)?.tensors);
    }
    let index = verified(dir, &name, files, |path, from, _| shards::read_index(path, from))?;
    let (path, mut out) = (dir.join(&name), Vec::new());
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
    Ok(record(&path.join(RECORD))?.0)
}

/// Reads and checks the checkpoint at `path`.
pub fn read(path: &Path) -> Result<Snapshot> {
    // A trailing slash would follow a link.
    let path: PathBuf = path.components().collect();
    let (path, at) = (path.as_path(), path.join(RECORD));
    if path.is_symlink() {
        return Err(broken(path, "directory", "is a link; a checkpoint must be a directory"));
    }
    let (mut record, text) = record(&at)?;
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
    let model = tensors(path, MODEL, &files)?;
    let optimizer = tensors(path, OPTIMIZER, &files)?;
    Ok(Snapshot { step, model, optimizer, record })
}
