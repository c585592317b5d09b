//! Keeps indexes of lines in the program's cache folder, so that a file is read once and not at each start.
//!
//! A file of the cache belongs to one state of a file of data: device, inode, size, and the times of the last change of content and of
//! attributes, which no program can set back. The format's version is part of its name.

use super::line_index::LineIndex;
use super::text_files::TextFiles;
use crate::cache::CachePart;
use crate::error::Result;
use crate::open_files::Stamp;
use perilune_core::Interrupt;
use std::path::Path;
use std::time::Duration;

/// The format of a file: another one has other names.
const MAGIC: &[u8] = b"perilune lines 1";
/// Texts below this size are indexed faster than a file is flushed.
const LEAST: u64 = 16 << 20;
/// A file may change twice within the resolution of its times: one that has changed within this time is not kept.
const SETTLED: Duration = Duration::from_secs(2);

/// The folder of indexes.
pub(super) struct IndexCache {
    part: Option<CachePart>,
    least: u64,
}

impl IndexCache {
    /// Uses `index` in the program's cache folder, which it makes if needed.
    pub fn new(cache: Option<&Path>) -> IndexCache {
        IndexCache::keeping(cache, LEAST)
    }

    fn keeping(cache: Option<&Path>, least: u64) -> IndexCache {
        IndexCache { part: CachePart::open(cache, "index"), least }
    }

    /// The index of a file's lines: that of the cache, or built now.
    ///
    /// # Errors
    /// Those of [`LineIndex::build`]; faults of the cache are none.
    pub fn lines(&self, text: &TextFiles, number: usize, interrupt: &Interrupt) -> Result<LineIndex> {
        let Some(part) = self.part.as_ref().filter(|_| text.len(number) >= self.least) else {
            return LineIndex::build(text, number, interrupt);
        };
        let (stamp, len) = (text.stamp(number)?, text.len(number));
        let name = name(&stamp, len);
        if let Some(found) = load(part, &name, len) {
            return Ok(found);
        }
        let _lock = part.lock(&name, interrupt)?;
        if let Some(found) = load(part, &name, len) {
            return Ok(found);
        }
        let made = LineIndex::build(text, number, interrupt)?;
        if stamp.is_older_than(SETTLED) && text.stamp(number)? == stamp {
            // The index is right without a copy of it.
            let _ = store(part, &name, &made);
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

fn load(part: &CachePart, name: &str, len: u64) -> Option<LineIndex> {
    LineIndex::read(&part.load(name, MAGIC, "an index of lines")?, len)
}

fn store(part: &CachePart, name: &str, index: &LineIndex) -> Result<()> {
    let mut body = Vec::new();
    index.write(&mut body);
    part.store(name, MAGIC, &body)
}

#[cfg(test)]
#[path = "index_cache_tests.rs"]
mod tests;
