//! Indexes where the rows of a text file begin, by byte and by line.

use super::starts::Starts;
use super::text_files::TextFiles;
use crate::error::Result;
use std::path::Path;

/// Rows for each of which the line is stored; that of others is counted from there.
const EVERY: usize = 64;
/// Bytes that are read at a time to count lines.
const PIECE: u64 = 1 << 20;

/// The rows of a file.
#[derive(Default)]
pub(super) struct RowIndex {
    /// Where each row begins, and where the last one ends.
    starts: Starts,
    /// The line of every 64th row, from 1.
    lines: Vec<u64>,
    finished: bool,
}

impl RowIndex {
    pub fn push(&mut self, path: &Path, start: u64, line: u64) -> Result<()> {
        self.starts.reserve(path, 1)?;
        if self.starts.len().is_multiple_of(EVERY) {
            self.lines.push(line);
        }
        self.starts.push(start);
        Ok(())
    }

    /// Ends the last row.
    pub fn finish(&mut self, path: &Path, end: u64) -> Result<()> {
        self.starts.reserve(path, 1)?;
        self.starts.push(end);
        self.starts.shrink();
        self.finished = true;
        Ok(())
    }

    /// Whether the last row has ended.
    pub fn is_finished(&self) -> bool {
        self.finished
    }

    /// Rows, before the last one has ended.
    pub fn len_so_far(&self) -> u64 {
        self.starts.len() as u64
    }

    pub fn len(&self) -> u64 {
        self.starts.len().saturating_sub(1) as u64
    }

    /// Where a row begins and the next one does.
    pub fn range(&self, row: u64) -> (u64, u64) {
        let at = |k: u64| self.starts.get(k).unwrap_or(0);
        (at(row), at(row + 1))
    }

    /// The line of a row, counted in the file from the last one that is known.
    pub fn line(&self, text: &TextFiles, number: usize, row: u64) -> Result<u64> {
        let known = row as usize / EVERY;
        let (mut at, end) = (self.range((known * EVERY) as u64).0, self.range(row).0);
        let mut line = self.lines.get(known).copied().unwrap_or(1);
        let mut buffer = vec![0; PIECE.min(end.saturating_sub(at)) as usize];
        while at < end {
            let piece = &mut buffer[..PIECE.min(end - at) as usize];
            text.read_at(number, at, piece)?;
            line += memchr::memchr_iter(b'\n', piece).count() as u64;
            at += piece.len() as u64;
        }
        Ok(line)
    }
}
