//! Indexes the lines of a text file on all cores, and hashes its content.
//!
//! Blocks are read, searched for newlines and hashed in pieces, and the pieces are joined in their order. So the index and the hash do not
//! depend on the number of threads. A block fits into the processor's last cache, since it is read and then passed over twice. Blank lines are no rows. Memory is 4.1 bytes a row.

use super::starts::{Starts, word};
use super::text_files::TextFiles;
use crate::error::{Error, Result};
use crate::source;
use perilune_core::Interrupt;
use rayon::prelude::*;
use std::path::Path;

/// Bytes that one task searches, below 2^31.
pub(super) const PIECE: usize = 1 << 20;
/// The most bytes of a line.
pub(super) const MAX_LINE: u64 = 256 << 20;
/// The bit of a newline whose line is blank, as far as it is in the piece.
const BLANK: u32 = 1 << 31;

/// The lines of a file.
#[derive(Default, PartialEq, Eq, Debug)]
pub(super) struct LineIndex {
    /// Where each row begins, and where the text ends.
    starts: Starts,
    blank: Blank,
    /// The BLAKE3 hash of the text.
    pub hash: [u8; 32],
}

/// Blank lines of a file: the rows before which there are some, and how many there are up to there.
#[derive(Default, PartialEq, Eq, Debug)]
struct Blank(Vec<(u64, u64)>);

impl Blank {
    fn push(&mut self, row: u64) {
        let all = self.0.last().map_or(0, |(_, count)| *count) + 1;
        match self.0.last_mut() {
            Some(last) if last.0 == row => last.1 = all,
            _ => self.0.push((row, all)),
        }
    }
}

impl LineIndex {
    /// Indexes the text of a file.
    ///
    /// # Errors
    /// Reading fails, a line has more than 256 MiB, the index needs more memory than there is, or an interrupt.
    pub fn build(text: &TextFiles, number: usize, interrupt: &Interrupt) -> Result<LineIndex> {
        match text.len(number) > PIECE as u64 {
            true => source::pool(None)?.install(|| index(text, number, interrupt)),
            false => index(text, number, interrupt),
        }
    }

    pub fn len(&self) -> u64 {
        self.starts.len().saturating_sub(1) as u64
    }

    /// Where the line of a row begins; of the number behind the last row, where the text ends.
    pub fn start(&self, row: u64) -> u64 {
        self.starts.get(row).unwrap_or(0)
    }

    /// The line of a row, from 1.
    pub fn line(&self, row: u64) -> u64 {
        let at = self.blank.0.partition_point(|(r, _)| *r <= row);
        row + 1 + at.checked_sub(1).and_then(|at| self.blank.0.get(at)).map_or(0, |(_, count)| *count)
    }

    /// Writes the index, as the cache keeps it.
    pub fn write(&self, to: &mut Vec<u8>) {
        to.extend_from_slice(&self.hash);
        self.starts.write(to);
        to.extend_from_slice(&(self.blank.0.len() as u64).to_le_bytes());
        to.extend(self.blank.0.iter().flat_map(|(row, count)| [row.to_le_bytes(), count.to_le_bytes()]).flatten());
    }

    /// Reads what [`LineIndex::write`] wrote of a text of `len` bytes. Returns nothing where it is something else.
    pub fn read(mut from: &[u8], len: u64) -> Option<LineIndex> {
        let (hash, rest) = from.split_first_chunk::<32>()?;
        from = rest;
        let starts = Starts::read(&mut from)?;
        let mut blank = Vec::new();
        for _ in 0..word(&mut from)? {
            blank.push((word(&mut from)?, word(&mut from)?));
        }
        let last = starts.len().checked_sub(1).and_then(|last| starts.get(last as u64));
        (from.is_empty() && last == Some(len)).then_some(LineIndex { starts, blank: Blank(blank), hash: *hash })
    }
}

/// Bytes that are in memory at a time: eight pieces for each thread, from 16 to 64 MiB.
pub(super) fn block_size() -> usize {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    (8 * PIECE).saturating_mul(threads).clamp(16 << 20, 64 << 20)
}

/// The newlines of a piece.
struct Piece {
    /// Where they are, with the bit [`BLANK`] if only space is between them and the one before.
    newlines: Vec<u32>,
    /// Whether only space follows the last one.
    blank_end: bool,
}

fn is_blank(text: &[u8]) -> bool {
    text.iter().all(u8::is_ascii_whitespace)
}

fn newlines(piece: &[u8], first: usize) -> Piece {
    let (mut from, mut newlines) = (first, Vec::new());
    for newline in memchr::memchr_iter(b'\n', piece) {
        let blank = is_blank(piece.get(from..newline).unwrap_or_default());
        newlines.push(newline as u32 | if blank { BLANK } else { 0 });
        from = newline + 1;
    }
    Piece { newlines, blank_end: is_blank(piece.get(from..).unwrap_or_default()) }
}

fn index(text: &TextFiles, number: usize, interrupt: &Interrupt) -> Result<LineIndex> {
    let (path, len) = (text.path(number).to_path_buf(), text.len(number));
    let mut buffer = vec![0; len.min(block_size() as u64) as usize];
    let (mut hasher, mut joined) = (blake3::Hasher::new(), Joined::new(&path));
    let mut at = 0;
    while at < len {
        let room = buffer.len() as u64;
        let block = &mut buffer[..(len - at).min(room) as usize];
        let read = |(k, piece): (usize, &mut [u8])| -> Result<Piece> {
            if interrupt.is_requested() {
                return Err(Error::Interrupted);
            }
            let at = at + (k * PIECE) as u64;
            text.read_at(number, at, piece)?;
            let mark = at == 0 && piece.starts_with(b"\xEF\xBB\xBF");
            Ok(newlines(piece, if mark { 3 } else { 0 }))
        };
        let pieces = match block.len() > PIECE {
            true => block.par_chunks_mut(PIECE).enumerate().map(read).collect::<Result<Vec<_>>>()?,
            false => block.chunks_mut(PIECE).enumerate().map(read).collect::<Result<Vec<_>>>()?,
        };
        match block.len() > PIECE {
            true => hasher.update_rayon(block),
            false => hasher.update(block),
        };
        if at == 0 && block.starts_with(b"\xEF\xBB\xBF") {
            joined.line = 3;
        }
        for (k, piece) in pieces.iter().enumerate() {
            joined.piece(at + (k * PIECE) as u64, piece)?;
        }
        at += block.len() as u64;
    }
    let (mut starts, blank) = joined.finish(len)?;
    starts.push(len);
    starts.shrink();
    Ok(LineIndex { starts, blank, hash: *hasher.finalize().as_bytes() })
}

/// The lines of the pieces so far.
struct Joined<'a> {
    path: &'a Path,
    starts: Starts,
    blank: Blank,
    /// The lines that have ended.
    lines: u64,
    /// Where the current line begins, and whether it is blank so far.
    line: u64,
    is_blank: bool,
}

impl Joined<'_> {
    fn new(path: &Path) -> Joined<'_> {
        Joined { path, starts: Starts::default(), blank: Blank::default(), lines: 0, line: 0, is_blank: true }
    }

    fn piece(&mut self, at: u64, piece: &Piece) -> Result<()> {
        // One more for a last line without a newline, one for the end of the text.
        self.starts.reserve(self.path, piece.newlines.len() + 2)?;
        for newline in &piece.newlines {
            self.is_blank &= newline & BLANK != 0;
            self.end_line(at + u64::from(newline & !BLANK) + 1)?;
        }
        self.is_blank &= piece.blank_end;
        Ok(())
    }

    fn end_line(&mut self, next: u64) -> Result<()> {
        match self.is_blank {
            true => self.blank.push(self.starts.len() as u64),
            false => self.starts.push(self.line),
        }
        self.lines += 1;
        let bytes = next - self.line;
        if bytes > MAX_LINE {
            let rule = format!("has {bytes} bytes; the limit is {MAX_LINE}");
            return Err(
                Error::line(self.path, self.lines, "the line ", rule).hint("put each record on a line of its own")
            );
        }
        (self.line, self.is_blank) = (next, true);
        Ok(())
    }

    fn finish(mut self, len: u64) -> Result<(Starts, Blank)> {
        if self.line < len && !self.is_blank {
            self.end_line(len)?;
        }
        Ok((self.starts, self.blank))
    }
}
