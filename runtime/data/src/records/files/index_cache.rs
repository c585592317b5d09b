//! Keeps indexes of lines in the program's cache folder, so that a file is read once and not at each start.
//!
//! A file of the cache belongs to one state of a file of data: device, inode, size, and the times of the last change of content and of
//! attributes, which no program can set back. It has the format's version in its name and a checksum at its end; one that is cut or damaged
//! is made again. It is written under another name, flushed and renamed, so readers lock nothing. Without a folder, or without room in it,
//! each start builds the index.

use super::line_index::LineIndex;
use super::text_files::TextFiles;
use super::unpack::lock;
use crate::error::Result;
use crate::open_files::Stamp;
use perilune_core::Interrupt;
use perilune_policy::{Directory, Opener};
use std::io::{Read, Write};
use std::path::Path;
use std::time::Duration;

/// The format of a file: another one has other names.
const MAGIC: &[u8] = b"perilune lines 1";
/// Texts below this size are indexed faster than a file is flushed.
const LEAST: u64 = 16 << 20;
/// A file may change twice within the resolution of its times: one that has changed within this time is not kept.
const SETTLED: Duration = Duration::from_secs(2);
const CHECKSUM: usize = 32;

/// The folder of indexes.
pub(super) struct IndexCache {
    folder: Option<Directory>,
    least: u64,
}

impl IndexCache {
    /// Uses `index` in the program's cache folder, which it makes if needed.
    pub fn new(cache: Option<&Path>) -> IndexCache {
        IndexCache::keeping(cache, LEAST)
    }

    fn keeping(cache: Option<&Path>, least: u64) -> IndexCache {
        let folder = cache.map(|dir| dir.join("index")).and_then(|dir| {
            std::fs::create_dir_all(&dir).ok()?;
            Directory::open(&dir).ok()
        });
        IndexCache { folder, least }
    }

    /// The index of a file's lines: that of the cache, or built now.
    ///
    /// # Errors
    /// Those of [`LineIndex::build`]; faults of the cache are none.
    pub fn lines(&self, text: &TextFiles, number: usize, interrupt: &Interrupt) -> Result<LineIndex> {
        let Some(folder) = self.folder.as_ref().filter(|_| text.len(number) >= self.least) else {
            return LineIndex::build(text, number, interrupt);
        };
        let (stamp, len) = (text.stamp(number)?, text.len(number));
        let name = name(&stamp, len);
        if let Some(found) = load(folder, &name, len) {
            return Ok(found);
        }
        let _lock = lock(folder, &name, interrupt)?;
        if let Some(found) = load(folder, &name, len) {
            return Ok(found);
        }
        let made = LineIndex::build(text, number, interrupt)?;
        if stamp.is_older_than(SETTLED) && text.stamp(number)? == stamp {
            // The index is right without a copy of it.
            let _ = store(folder, &name, &made);
        }
        Ok(made)
    }
}

fn name(stamp: &Stamp, len: u64) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(MAGIC);
    hasher.update(&stamp.bytes());
    hasher.update(&len.to_le_bytes());
    format!("{}.lines", hasher.finalize().to_hex())
}

fn load(folder: &Directory, name: &str, len: u64) -> Option<LineIndex> {
    let mut file = folder.open(Path::new(name)).ok()?;
    let size = usize::try_from(file.len()).ok()?;
    perilune_core::host_memory::check("an index of lines", size).ok()?;
    let mut bytes = Vec::with_capacity(size);
    file.read_to_end(&mut bytes).ok()?;
    let (body, checksum) = bytes.split_last_chunk::<CHECKSUM>()?;
    (blake3::hash(body) == *checksum).then_some(())?;
    LineIndex::read(body.strip_prefix(MAGIC)?, len)
}

fn store(folder: &Directory, name: &str, index: &LineIndex) -> Result<()> {
    let mut bytes = MAGIC.to_vec();
    index.write(&mut bytes);
    let checksum = blake3::hash(&bytes);
    let mut staged = folder.create(name)?;
    let failed = |e| crate::Error::io(&folder.path().join(name), "write", e);
    staged.write_all(&bytes).and_then(|()| staged.write_all(checksum.as_bytes())).map_err(failed)?;
    Ok(staged.commit()?)
}

#[cfg(test)]
#[path = "index_cache_tests.rs"]
mod tests;
