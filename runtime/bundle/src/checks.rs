//! Detects damage in a file and names the first byte that differs, without the original.
//!
//! The checks follow the content as one skippable frame of Zstandard (RFC 8878, 3.1.2), which other programs ignore. They cut
//! the content into blocks of 4,096 bytes. The record of a block has the first 16 bytes of its BLAKE3 hash, S = Σ b(i) and
//! T = Σ (i+1)·b(i). If one byte of the block has changed, S changes by the difference d of its values and T by (i+1)·d, so the
//! quotient names the byte, and the hash of the block with that change undone confirms it. The records are content of the next
//! level, which has records of its own, until one record is left. That one stands in the footer, of which there are two copies.
//!
//! The checks prove nothing about the author: who changes a file can compute them again.

use crate::error::{Error, Result, io};
use std::fmt;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

/// Bytes of a block. S and T of a block fit 32 bits.
const BLOCK: usize = 4096;
/// Bytes of a record.
const RECORD: usize = 24;
/// Bytes of the hash in a record.
const HASH: usize = 16;
/// The magic number of a skippable frame, then the length of its content.
const FRAME: u32 = 0x184D_2A5B;
const FRAME_HEADER: usize = 8;
/// The first bytes of a footer.
const MARK: &[u8; 8] = b"PLBcheck";
/// Bytes of a footer: the mark, the length of the content, the record of the last level.
const FOOTER: usize = 16 + RECORD;
/// The largest content: the length of the frame has 32 bits.
pub(crate) const LARGEST: u64 = 512 << 30;

/// Where a file differs from what was written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Damage {
    /// One byte has another value.
    Byte { at: u64, found: u8, written: u8 },
    /// Several bytes of one range differ, `from` inclusive, `to` exclusive.
    Range { from: u64, to: u64 },
    /// The file has another length.
    Length { found: u64, written: u64 },
    /// The end of the file is not that of a bundle.
    NoChecks,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Damage::Byte { at, found, written } => {
                write!(f, "byte {at} is 0x{found:02x}, and was written as 0x{written:02x}")
            }
            Damage::Range { from, to } => write!(f, "the first byte that differs is one of bytes {from} to {}", to - 1),
            Damage::Length { found, written } if found < written => {
                write!(f, "it ends at byte {found}, and was written with {written} bytes")
            }
            Damage::Length { found, written } => {
                write!(f, "it has {found} bytes, and was written with {written}: what follows byte {written} was added")
            }
            Damage::NoChecks => write!(f, "its end is not that of a bundle: it is no bundle, or was cut off"),
        }
    }
}

/// The checks of one block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Record {
    hash: [u8; HASH],
    sum: u32,
    weighted: u32,
}

impl Record {
    fn of(block: &[u8]) -> Record {
        let mut hash = [0; HASH];
        hash.copy_from_slice(&blake3::hash(block).as_bytes()[..HASH]);
        let (mut sum, mut weighted) = (0u32, 0u32);
        for (i, byte) in block.iter().enumerate() {
            sum += u32::from(*byte);
            weighted += (i as u32 + 1) * u32::from(*byte);
        }
        Record { hash, sum, weighted }
    }

    fn bytes(&self) -> [u8; RECORD] {
        let mut out = [0; RECORD];
        out[..HASH].copy_from_slice(&self.hash);
        out[HASH..HASH + 4].copy_from_slice(&self.sum.to_le_bytes());
        out[HASH + 4..].copy_from_slice(&self.weighted.to_le_bytes());
        out
    }

    fn parse(bytes: &[u8]) -> Record {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let mut hash = [0; HASH];
        hash.copy_from_slice(&bytes[..HASH]);
        Record { hash, sum: word(HASH), weighted: word(HASH + 4) }
    }

    /// Finds what differs in a block that begins at `start` of the file.
    fn damage(&self, block: &[u8], start: u64) -> Option<Damage> {
        let found = Record::of(block);
        if found == *self {
            return None;
        }
        let d = i64::from(found.sum) - i64::from(self.sum);
        let t = i64::from(found.weighted) - i64::from(self.weighted);
        let place = (d != 0 && t % d == 0).then(|| t / d - 1).and_then(|i| usize::try_from(i).ok());
        if let Some(i) = place.filter(|i| *i < block.len())
            && let Ok(written) = u8::try_from(i64::from(block[i]) - d)
        {
            let mut mended = block.to_vec();
            mended[i] = written;
            if Record::of(&mended) == *self {
                return Some(Damage::Byte { at: start + i as u64, found: block[i], written });
            }
        }
        Some(Damage::Range { from: start, to: start + block.len() as u64 })
    }
}

/// Returns the records of the blocks of `bytes`.
fn records(bytes: &[u8]) -> Vec<u8> {
    bytes.chunks(BLOCK).flat_map(|block| Record::of(block).bytes()).collect()
}

/// Lengths of the levels of records of a content of `len` bytes, the first level first. The last one has one record.
fn levels(len: u64) -> Vec<u64> {
    let mut out = Vec::new();
    let mut len = len;
    loop {
        len = len.div_ceil(BLOCK as u64).max(1) * RECORD as u64;
        out.push(len);
        if len == RECORD as u64 {
            return out;
        }
    }
}

/// The record of the last level stands in the footer alone.
fn frame_length(len: u64) -> u64 {
    let levels = levels(len);
    levels.iter().sum::<u64>() - RECORD as u64 + 2 * FOOTER as u64
}

/// The bytes of a file with a content of `len` bytes.
fn file_length(len: u64) -> u64 {
    len + FRAME_HEADER as u64 + frame_length(len)
}

fn header(len: u64) -> Vec<u8> {
    // `LARGEST` bounds the length of the frame.
    let length = u32::try_from(frame_length(len)).unwrap_or(u32::MAX);
    [FRAME.to_le_bytes(), length.to_le_bytes()].concat()
}

fn footer(len: u64, top: &[u8]) -> Vec<u8> {
    [MARK.as_slice(), &len.to_le_bytes(), top].concat()
}

/// Passes content through, and appends its checks at the end.
pub(crate) struct Writer<W> {
    to: W,
    block: Vec<u8>,
    records: Vec<u8>,
    len: u64,
}

impl<W: Write> Writer<W> {
    pub fn new(to: W) -> Writer<W> {
        Writer { to, block: Vec::with_capacity(BLOCK), records: Vec::new(), len: 0 }
    }

    /// Writes the checks, and returns what was written to.
    pub fn finish(mut self) -> std::io::Result<W> {
        if self.len > LARGEST {
            let text = format!("a bundle has at most {} GiB", LARGEST >> 30);
            return Err(std::io::Error::new(std::io::ErrorKind::FileTooLarge, text));
        }
        if !self.block.is_empty() || self.len == 0 {
            self.records.extend(Record::of(&self.block).bytes());
        }
        self.to.write_all(&header(self.len))?;
        let mut level = std::mem::take(&mut self.records);
        while level.len() > RECORD {
            self.to.write_all(&level)?;
            level = records(&level);
        }
        let footer = footer(self.len, &level);
        self.to.write_all(&footer)?;
        self.to.write_all(&footer)?;
        Ok(self.to)
    }
}

impl<W: Write> Write for Writer<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let n = self.to.write(&bytes[..bytes.len().min(BLOCK - self.block.len())])?;
        self.block.extend(&bytes[..n]);
        self.len += n as u64;
        if self.block.len() == BLOCK {
            self.records.extend(Record::of(&self.block).bytes());
            self.block.clear();
        }
        Ok(n)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.to.flush()
    }
}

/// Checks a file, and returns the length of its content, or the damage.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn verify(file: &mut File, path: &Path) -> Result<std::result::Result<u64, Damage>> {
    let fail = io("read", path);
    let found = file.metadata().map_err(&fail)?.len();
    let mut read = |at: u64, n: usize| -> Result<Vec<u8>> {
        let mut out = vec![0; n];
        file.seek(SeekFrom::Start(at)).and_then(|_| file.read_exact(&mut out)).map_err(&fail)?;
        Ok(out)
    };
    if found < (FRAME_HEADER + 2 * FOOTER) as u64 {
        return Ok(Err(Damage::NoChecks));
    }
    let ends = found - 2 * FOOTER as u64;
    let both = read(ends, 2 * FOOTER)?;
    let (first, second) = both.split_at(FOOTER);
    let stated = |footer: &[u8]| {
        let len = u64::from_le_bytes(footer[8..16].try_into().ok()?);
        (&footer[..8] == MARK && len <= LARGEST).then_some(len)
    };
    // The copy that fits the length of the file and the level above is the right one.
    let fits = |footer: &[u8]| stated(footer).is_some_and(|len| file_length(len) == found);
    let right = match (fits(first), fits(second)) {
        (true, true) if first == second => first,
        (true, true) => {
            let len = stated(first).unwrap_or_default();
            let levels = levels(len);
            // The level whose record stands in the footer; of a content of one block, the content itself.
            let (at, n) = match levels.len() {
                1 => (0, len),
                n => (ends - levels[n - 2], levels[n - 2]),
            };
            let below = read(at, usize::try_from(n).unwrap_or(usize::MAX))?;
            if Record::of(&below).bytes() == first[16..] { first } else { second }
        }
        (true, false) => first,
        (false, true) => second,
        (false, false) => {
            // A file with another length still says how long it was, unless its end is missing.
            let known = stated(first).or_else(|| stated(second)).map(file_length);
            return Ok(Err(match known {
                Some(written) if written != found => Damage::Length { found, written },
                _ => trailing(file, found, path)?,
            }));
        }
    };
    let len = stated(right).unwrap_or_default();
    if let Some(i) = (0..FOOTER).find(|i| first[*i] != second[*i]) {
        let (wrong, start) = if right == first { (second, ends + FOOTER as u64) } else { (first, ends) };
        return Ok(Err(Damage::Byte { at: start + i as u64, found: wrong[i], written: right[i] }));
    }
    let written = header(len);
    let header = read(len, FRAME_HEADER)?;
    if let Some(i) = (0..FRAME_HEADER).find(|i| header[*i] != written[*i]) {
        return Ok(Err(Damage::Byte { at: len + i as u64, found: header[i], written: written[i] }));
    }
    // From the last level down: each is checked by one that has been checked. The content is level 0.
    let mut above = right[16..].to_vec();
    let sizes: Vec<u64> = std::iter::once(len).chain(levels(len)).collect();
    let mut end = ends;
    for level in (0..sizes.len() - 1).rev() {
        let start = if level == 0 { 0 } else { end - sizes[level] };
        let mut kept = Vec::new();
        for (k, record) in above.chunks(RECORD).enumerate() {
            let at = (k * BLOCK) as u64;
            let n = usize::try_from((sizes[level] - at).min(BLOCK as u64)).unwrap_or(BLOCK);
            let block = read(start + at, n)?;
            if let Some(damage) = Record::parse(record).damage(&block, start + at) {
                return Ok(Err(damage));
            }
            if level > 0 {
                kept.extend(block);
            }
        }
        (above, end) = (kept, start);
    }
    Ok(Ok(len))
}

/// Looks for a footer before the end of a file to which bytes were added.
fn trailing(file: &mut File, found: u64, path: &Path) -> Result<Damage> {
    const LOOK: u64 = 1 << 20;
    let from = found.saturating_sub(LOOK);
    let mut tail = Vec::new();
    let read = file.seek(SeekFrom::Start(from)).and_then(|_| file.take(LOOK).read_to_end(&mut tail));
    read.map_err(io("read", path))?;
    for at in (0..tail.len().saturating_sub(2 * FOOTER - 1)).rev() {
        let (first, rest) = tail[at..].split_at(FOOTER);
        if &first[..8] == MARK && first == &rest[..FOOTER] {
            let written = from + (at + 2 * FOOTER) as u64;
            let len = u64::from_le_bytes(first[8..16].try_into().unwrap_or_default());
            if len <= LARGEST && file_length(len) == written {
                return Ok(Damage::Length { found, written });
            }
        }
    }
    Ok(Damage::NoChecks)
}

/// Returns the error of a damaged bundle.
pub(crate) fn damaged(path: &Path, damage: &Damage) -> Error {
    let cure = "hint: copy or download it again, and compare its hash with the one that its author states";
    Error::Refused(format!("{}: the bundle is damaged: {damage}\n  {cure}", path.display()))
}
