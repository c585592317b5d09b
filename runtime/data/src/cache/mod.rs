//! Stores what can be made again in a part of the program's cache folder: indexes of lines, texts of compressed files, tokenizers.
//!
//! A file has a checksum and is written under another name, flushed and renamed, so readers lock nothing; one that is cut or damaged is made
//! again. A lock keeps processes from the same work. Faults of the cache are no errors: without a folder, or without room in it, each
//! start does the work anew. `bound` removes what was used least recently.

mod bound;

pub use bound::{Entry, PARTS, Removed, VARIABLE, limit, list, shrink};

use crate::error::{Error, Result};
use perilune_core::Interrupt;
use perilune_policy::{Directory, Opener};
use std::fs::{File, TryLockError};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

const CHECKSUM: usize = 32;
/// The time between two attempts to take a lock.
const LOCK_EVERY: Duration = Duration::from_millis(50);

/// A part of the cache, such as `index`.
#[derive(Clone, Debug)]
pub struct CachePart {
    folder: Directory,
    cache: PathBuf,
}

impl CachePart {
    /// Opens a part of the cache, which it makes if needed; `None` without a cache folder or the right to write to it.
    pub fn open(cache: Option<&Path>, part: &str) -> Option<CachePart> {
        let dir = cache?.join(part);
        std::fs::create_dir_all(&dir).ok()?;
        Some(CachePart { folder: Directory::open(&dir).ok()?, cache: cache?.to_path_buf() })
    }

    pub fn folder(&self) -> &Directory {
        &self.folder
    }

    /// Reads a file that [`CachePart::store`] wrote with this magic text. `what` names it where memory is checked.
    pub fn load(&self, name: &str, magic: &[u8], what: &str) -> Option<Vec<u8>> {
        let mut file = self.folder.open(Path::new(name)).ok()?;
        let size = usize::try_from(file.len()).ok()?;
        perilune_core::host_memory::check(what, size).ok()?;
        let mut bytes = Vec::with_capacity(size);
        file.read_to_end(&mut bytes).ok()?;
        let (body, checksum) = bytes.split_last_chunk::<CHECKSUM>()?;
        (blake3::hash(body) == *checksum && body.starts_with(magic)).then_some(())?;
        self.mark_used(name);
        bytes.truncate(bytes.len() - CHECKSUM);
        bytes.drain(..magic.len());
        Some(bytes)
    }

    /// Writes a file.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn store(&self, name: &str, magic: &[u8], body: &[u8]) -> Result<()> {
        let mut hasher = blake3::Hasher::new();
        let checksum = hasher.update(magic).update(body).finalize();
        let mut staged = self.folder.create(name)?;
        let failed = |e| Error::io(&self.folder.path().join(name), "write", e);
        let parts = [magic, body, checksum.as_bytes()];
        parts.iter().try_for_each(|part| staged.write_all(part)).map_err(failed)?;
        staged.commit()?;
        self.bound();
        Ok(())
    }

    /// Records that a file is used now: the time of its lock. Another process may hold the file itself open and compare its times.
    pub fn mark_used(&self, name: &str) {
        // A cache that may not be written has no order of use.
        let _ = self.folder.append(&lock_name(name)).map(|file| file.set_modified(SystemTime::now()));
    }

    /// Keeps a file, which is read by position, from being removed while the lock lives. Files share sixteen locks, since a dataset may
    /// have more files than a process may open.
    pub fn hold(&self, name: &str) -> Option<File> {
        in_use(self, name).filter(|file| file.lock_shared().is_ok())
    }

    /// Keeps the whole cache within its bound, after a file was added.
    pub fn bound(&self) {
        bound::enforce(&self.cache);
    }

    /// Takes the lock of a name. A file system without locks lets two processes do the same work.
    ///
    /// # Errors
    /// An interrupt.
    pub fn lock(&self, name: &str, interrupt: &Interrupt) -> Result<Option<File>> {
        let Ok(file) = self.folder.append(&lock_name(name)) else { return Ok(None) };
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Some(file)),
                Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_EVERY),
                Err(TryLockError::Error(_)) => return Ok(None),
            }
            if interrupt.is_requested() {
                return Err(Error::Interrupted);
            }
        }
    }
}

fn lock_name(name: &str) -> String {
    format!("{name}.lock")
}

/// The lock of processes that read files whose names begin like this one.
fn in_use(part: &CachePart, name: &str) -> Option<File> {
    let first = name.chars().next().filter(char::is_ascii_alphanumeric)?;
    part.folder.append(&format!(".in-use-{first}")).ok()
}
