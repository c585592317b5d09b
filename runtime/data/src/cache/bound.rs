//! Bounds the size of the program's cache: removes what was used least recently.
//!
//! The last use of a file is the time of its lock, or its own. A file that a process makes, or reads by position, is locked and stays. So
//! a removal beside running processes costs them nothing but work that they do again at their next start.

use super::{CachePart, in_use};
use crate::error::{Error, Result};
use perilune_core::byte_size;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// The parts that are bounded: all that the program can make again without a network.
pub const PARTS: [&str; 4] = ["index", "kernels", "records", "tokenizers"];
/// The part whose files stay open, or are opened again, while a dataset lives.
const READ_BY_POSITION: &str = "records";
/// The environment variable of the bound.
pub const VARIABLE: &str = "PERILUNE_CACHE_LIMIT";
/// The bound without the variable: this share of the disk, and not less than the minimum.
const SHARE: u64 = 10;
const MIN_LIMIT: u64 = 10 << 30;
/// Temporary files and locks without a file that are older are what killed processes left.
const STALE: Duration = Duration::from_secs(24 * 3600);

/// A file of the cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    pub part: &'static str,
    pub name: String,
    pub path: PathBuf,
    pub bytes: u64,
    pub used: SystemTime,
}

/// What a removal did.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Removed {
    pub files: u64,
    pub bytes: u64,
    /// Bytes that are left, and those of them that would have been removed but for a process that uses them.
    pub left: u64,
    pub in_use: u64,
}

/// The bound of the cache in bytes: that of `PERILUNE_CACHE_LIMIT` ("50GiB", or "none"), or a tenth of the disk and at least 10 GiB.
///
/// # Errors
/// The variable is no size.
pub fn limit(cache: &Path) -> Result<u64> {
    match std::env::var(VARIABLE).ok().filter(|text| !text.is_empty()) {
        Some(text) if text == "none" => Ok(u64::MAX),
        Some(text) => byte_size::amount(&text)
            .map(|n| n as u64)
            .map_err(|e| Error::argument(VARIABLE, e).hint("or \"none\" for no bound")),
        None => {
            let disk = perilune_policy::Directory::open(cache).ok().and_then(|dir| dir.disk_size());
            Ok(disk.map_or(MIN_LIMIT, |bytes| (bytes / SHARE).max(MIN_LIMIT)))
        }
    }
}

/// Lists the files of the bounded parts, those used least recently first.
///
/// # Errors
/// A folder cannot be listed.
pub fn list(cache: &Path) -> Result<Vec<Entry>> {
    let mut out = Vec::new();
    for part in PARTS {
        for (name, path, bytes, modified) in files(&cache.join(part))? {
            if name.starts_with('.') || name.ends_with(LOCK) {
                continue;
            }
            let locked = std::fs::symlink_metadata(lock_of(&path)).and_then(|meta| meta.modified());
            let used = locked.map_or(modified, |time| time.max(modified));
            out.push(Entry { part, name, path, bytes, used });
        }
    }
    out.sort_by(|a, b| (a.used, &a.path).cmp(&(b.used, &b.path)));
    Ok(out)
}

const LOCK: &str = ".lock";

fn lock_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_os_string();
    name.push(LOCK);
    name.into()
}

/// The regular files of a folder: name, path, bytes and the time of the last change; none where there is no folder.
fn files(folder: &Path) -> Result<Vec<(String, PathBuf, u64, SystemTime)>> {
    let entries = match folder.read_dir() {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(Error::io(folder, "list", e)),
    };
    let mut out = Vec::new();
    for entry in entries.flatten() {
        // A file may vanish meanwhile.
        let Ok(meta) = entry.path().symlink_metadata() else { continue };
        if let (true, Ok(modified), Ok(name)) = (meta.is_file(), meta.modified(), entry.file_name().into_string()) {
            out.push((name, entry.path(), meta.len(), modified));
        }
    }
    Ok(out)
}

/// Removes files, those used least recently first, until `limit` bytes are left; only those of `part`, if one is named. Also removes what
/// killed processes left.
///
/// # Errors
/// A folder cannot be listed.
pub fn shrink(cache: &Path, limit: u64, part: Option<&str>) -> Result<Removed> {
    let entries: Vec<Entry> =
        list(cache)?.into_iter().filter(|entry| part.is_none_or(|part| part == entry.part)).collect();
    let mut removed = Removed { left: entries.iter().map(|entry| entry.bytes).sum(), ..Removed::default() };
    for entry in entries {
        if removed.left <= limit {
            break;
        }
        if remove(cache, &entry) {
            removed.files += 1;
            removed.bytes += entry.bytes;
            removed.left -= entry.bytes;
        } else {
            removed.in_use += entry.bytes;
        }
    }
    for part in PARTS.into_iter().filter(|known| part.is_none_or(|part| part == *known)) {
        sweep(&cache.join(part))?;
    }
    Ok(removed)
}

/// Removes a file unless a process makes or reads it.
fn remove(cache: &Path, entry: &Entry) -> bool {
    // Both locks are held until the file is gone. Files of the other parts are read whole.
    let part = CachePart::open(Some(cache), entry.part).filter(|_| entry.part == READ_BY_POSITION);
    let _reading = match part.and_then(|part| in_use(&part, &entry.name)) {
        Some(lock) if lock.try_lock().is_err() => return false,
        found => found,
    };
    let lock = lock_of(&entry.path);
    let _making = match File::options().append(true).open(&lock) {
        Ok(file) if file.try_lock().is_err() => return false,
        found => found.ok(),
    };
    let gone = std::fs::remove_file(&entry.path).is_ok();
    if gone {
        let _ = std::fs::remove_file(&lock);
    }
    gone
}

/// Removes temporary files, and locks of files that are not there, of which no process has been heard for a day.
fn sweep(folder: &Path) -> Result<()> {
    for (name, path, _, modified) in files(folder)? {
        let temporary = name.starts_with(".perilune-") && name.ends_with(".tmp");
        let orphan = name.strip_suffix(LOCK).is_some_and(|of| !folder.join(of).exists());
        let old = SystemTime::now().duration_since(modified).is_ok_and(|age| age > STALE);
        let free = || File::options().append(true).open(&path).is_ok_and(|file| file.try_lock().is_ok());
        if old && (temporary || orphan && free()) {
            let _ = std::fs::remove_file(&path);
        }
    }
    Ok(())
}

/// Keeps the cache within its bound after a file was added to it. Faults of the cache are no errors.
pub(super) fn enforce(cache: &Path) {
    if let Ok(limit) = limit(cache) {
        let _ = shrink(cache, limit, None);
    }
}

#[cfg(test)]
#[path = "bound_tests.rs"]
mod tests;
