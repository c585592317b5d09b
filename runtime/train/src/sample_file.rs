//! Writes the sample log of a run to `samples.bin` in the run directory, and reads it on a resume.
//!
//! Blocks are appended when they are full and before each checkpoint; a checkpoint records the hash of the last one. After
//! a step back the file is replaced. Its format is that of `perilune_data::sample_log`.

use crate::error::{Error, Result, disk};
use perilune_data::sample_log::{Hash, SampleLog, decode};
use perilune_policy::Directory;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

pub(crate) const SAMPLES: &str = "samples.bin";

/// The size limit of the file, some 300 million entries.
const MAX_BYTES: u64 = 4 << 30;

/// The file of a run that is being written.
#[derive(Default)]
pub(crate) struct SampleFile {
    file: Option<File>,
    /// The blocks in it, and the count of removals that they belong to.
    written: usize,
    rewinds: u64,
    head: Option<Hash>,
}

impl SampleFile {
    /// Appends the blocks of a log that are not in the file.
    pub fn write(&mut self, dir: &Directory, log: &SampleLog) -> Result<()> {
        let (blocks, rewinds) = log.blocks();
        let path = dir.path().join(SAMPLES);
        if rewinds != self.rewinds || self.file.is_none() {
            let new = format!(".{SAMPLES}.new");
            let mut file = dir.create_over(&new)?;
            blocks.iter().try_for_each(|b| file.write_all(&b.bytes)).map_err(disk("write", &path))?;
            dir.rename(&new, SAMPLES)?;
            self.file = Some(file);
        } else if let Some(file) = &mut self.file {
            let new = blocks.get(self.written..).unwrap_or_default();
            new.iter().try_for_each(|b| file.write_all(&b.bytes)).map_err(disk("write to", &path))?;
        }
        (self.written, self.rewinds, self.head) = (blocks.len(), rewinds, Some(log.head()));
        Ok(())
    }

    /// Returns the number of blocks written.
    pub fn written(&self) -> usize {
        self.written
    }

    /// Returns the hash of the last block, if there is a file.
    pub fn head(&self) -> Option<String> {
        self.head.map(|head| blake3::Hash::from_bytes(head).to_hex().to_string())
    }
}

/// Returns the name that the chain of a run's blocks begins with.
pub(crate) fn chain_name(id: &str) -> String {
    format!("{id} {SAMPLES}")
}

/// Returns the bytes of the file; none if there is no file.
pub(crate) fn bytes(dir: &Directory) -> Result<Vec<u8>> {
    if !dir.has(SAMPLES)? {
        return Ok(Vec::new());
    }
    let mut file = dir.open_unlinked(Path::new(SAMPLES))?;
    if file.len() > MAX_BYTES {
        let path = dir.path().join(SAMPLES);
        return Err(Error::Refused(format!("{}: has {} bytes; the limit is {MAX_BYTES}", path.display(), file.len())));
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(disk("read", &dir.path().join(SAMPLES)))?;
    Ok(bytes)
}

/// Returns the log of a run with this `id` up to a step. `head` is the hash that the checkpoint recorded.
pub(crate) fn read(bytes: &[u8], id: &str, step: u64, head: Option<&str>, path: &Path) -> Result<SampleLog> {
    let step = u32::try_from(step).unwrap_or(u32::MAX);
    // Before the rewind: blocks behind the checkpoint may have been replaced.
    let whole = decode(bytes, &chain_name(id), u32::MAX, path).map_err(|e| Error::Refused(e.to_string()))?;
    if let Some(head) = head
        && !blake3::Hash::from_hex(head).is_ok_and(|h| whole.passes(h.as_bytes()))
    {
        return Err(Error::Refused(format!(
            "{}: the checkpoint has a block with the hash {head}, but the file has none: blocks were removed\n  \
             hint: restore the file, or start a new run",
            path.display()
        )));
    }
    let mut log = whole;
    log.rewind(step).map_err(|e| Error::Refused(e.to_string()))?;
    Ok(log)
}

#[cfg(test)]
mod tests {
    use super::*;
    use perilune_data::sample_log::{Entry, SampleId};

    fn add(log: &mut SampleLog, steps: std::ops::RangeInclusive<u32>) {
        for step in steps {
            let id = SampleId { source: 0, row: u64::from(step), sub: 0 };
            log.add(step, [Entry { step, id, loss: 1.0, weight: 1.0, gradient: 1.0 }]).expect("added");
        }
        log.seal().expect("sealed");
    }

    #[test]
    fn a_file_grows_and_is_replaced_after_a_step_back() {
        let tmp = tempfile::tempdir().expect("a directory");
        let dir = Directory::open(tmp.path()).expect("opened");
        let (mut file, mut log) = (SampleFile::default(), SampleLog::new(&chain_name("id")));
        log.source("rows");
        let path = Path::new(SAMPLES);
        for (steps, back) in [(1..=3, None), (4..=9, None), (10..=12, Some(5)), (6..=7, None)] {
            add(&mut log, steps);
            if let Some(step) = back {
                log.rewind(step).and_then(|()| log.seal()).expect("rewound");
            }
            file.write(&dir, &log).expect("written");
            let read = read(&bytes(&dir).expect("bytes"), "id", 100, file.head().as_deref(), path).expect("read");
            assert_eq!((read.last_step(), read.len(), read.head()), (log.last_step(), log.len(), log.head()));
        }
        assert_eq!(log.last_step(), 7);
        let all = bytes(&dir).expect("bytes");
        let head = file.head();
        let error = read(&all[..all.len() / 2], "id", 100, head.as_deref(), path).expect_err("a block is missing");
        assert!(error.to_string().contains("blocks were removed"), "{error}");
        assert_eq!(read(&all, "id", 4, head.as_deref(), path).expect("read").last_step(), 4);
    }
}
