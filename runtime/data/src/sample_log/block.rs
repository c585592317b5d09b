//! Encodes blocks of a sample log: columns, compressed, with a hash that continues that of the block before.
//!
//! ```text
//! bytes   0..8    "PLSAMPL1"
//!         8..12   length of the compressed bytes, u32      12..16   length of the columns, u32
//!        16..20   first step                               20..24   last step
//!        24..56   BLAKE3 of (hash of the block before, bytes 8..24, compressed bytes)
//!        56..     zlib: u32 names, each (u32 length, UTF-8); u32 entries; columns of them, little-endian:
//!                 step u32, source u16, sub u32, row u64, loss f32, weight f32, gradient f32
//! ```

use super::{Entry, Hash, SampleId, SampleLog, see};
use crate::error::{Error, Result};
use flate2::Compression;
use flate2::read::ZlibDecoder;
use flate2::write::ZlibEncoder;
use std::io::{Read, Write};
use std::path::Path;

const MAGIC: &[u8; 8] = b"PLSAMPL1";
const HEAD: usize = 56;
/// Bytes of an entry in the columns.
const ENTRY: usize = 30;
/// The most bytes of the columns of a block: entries of one step are in one block, and a batch has at most some millions.
const MAX_RAW: usize = 1 << 30;

/// Entries of consecutive steps.
#[derive(Clone, PartialEq, Debug)]
pub struct Block {
    pub first_step: u32,
    pub last_step: u32,
    /// The hash of this block and those before.
    pub hash: Hash,
    /// How many sources are named in it.
    pub(super) names: usize,
    /// As in a file.
    pub bytes: Vec<u8>,
}

/// The error for bytes that are no block.
fn bad(rule: impl Into<String>) -> Error {
    Error::argument("the sample log", rule)
}

impl Block {
    pub(super) fn new(entries: &[Entry], names: &[String], before: Hash) -> Result<Block> {
        let mut raw = Vec::with_capacity(8 + entries.len() * ENTRY);
        raw.extend((names.len() as u32).to_le_bytes());
        for name in names {
            raw.extend((name.len() as u32).to_le_bytes());
            raw.extend(name.as_bytes());
        }
        raw.extend((entries.len() as u32).to_le_bytes());
        entries.iter().for_each(|e| raw.extend(e.step.to_le_bytes()));
        entries.iter().for_each(|e| raw.extend(e.id.source.to_le_bytes()));
        entries.iter().for_each(|e| raw.extend(e.id.sub.to_le_bytes()));
        entries.iter().for_each(|e| raw.extend(e.id.row.to_le_bytes()));
        entries.iter().for_each(|e| raw.extend(e.loss.to_le_bytes()));
        entries.iter().for_each(|e| raw.extend(e.weight.to_le_bytes()));
        entries.iter().for_each(|e| raw.extend(e.gradient.to_le_bytes()));
        if raw.len() > MAX_RAW {
            return Err(bad(format!("has {} entries in one block; {} fit", entries.len(), MAX_RAW / ENTRY)));
        }
        let mut encoder = ZlibEncoder::new(Vec::new(), Compression::fast());
        let packed = encoder.write_all(&raw).and_then(|()| encoder.finish());
        let packed = packed.map_err(|e| bad(format!("cannot be compressed: {e}")))?;
        let (first_step, last_step) = (entries.first().map_or(0, |e| e.step), entries.last().map_or(0, |e| e.step));
        let mut head = Vec::with_capacity(16);
        for n in [packed.len() as u32, raw.len() as u32, first_step, last_step] {
            head.extend(n.to_le_bytes());
        }
        let hash = chained(&before, &head, &packed);
        let bytes = [MAGIC, &*head, &hash, &packed].concat();
        Ok(Block { first_step, last_step, hash, names: names.len(), bytes })
    }

    /// Reads one block from the front of `bytes`. Returns `None` if they end before it does: its process was killed.
    fn parse(bytes: &[u8], before: &Hash) -> Result<Option<Block>> {
        let Some(head) = bytes.get(..HEAD) else { return Ok(None) };
        if &head[..8] != MAGIC {
            return Err(bad("has bytes that are no block"));
        }
        let number = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (packed, raw) = (number(8) as usize, number(12) as usize);
        if raw > MAX_RAW || packed > MAX_RAW {
            return Err(bad(format!("has a block of {raw} bytes; the limit is {MAX_RAW}")));
        }
        let Some(body) = bytes.get(HEAD..HEAD + packed) else { return Ok(None) };
        let hash = chained(before, &head[8..24], body);
        if hash[..] != head[24..56] {
            return Err(bad("has a block whose hash is another: it was changed or damaged"));
        }
        let mut block = Block {
            first_step: number(16),
            last_step: number(20),
            hash,
            names: 0,
            bytes: bytes[..HEAD + packed].to_vec(),
        };
        block.names = block.columns()?.0.len();
        Ok(Some(block))
    }

    /// The names of sources and the entries.
    fn columns(&self) -> Result<(Vec<String>, Vec<Entry>)> {
        let length = u32::from_le_bytes([self.bytes[12], self.bytes[13], self.bytes[14], self.bytes[15]]);
        let mut raw = Vec::new();
        let read = ZlibDecoder::new(&self.bytes[HEAD..]).take(u64::from(length) + 1).read_to_end(&mut raw);
        read.map_err(|e| bad(format!("has a block that cannot be decompressed: {e}")))?;
        if raw.len() != length as usize {
            return Err(bad(format!("has a block of another length than the {length} bytes that it states")));
        }
        let mut from = Columns(&raw);
        let names = (0..from.u32()?).map(|_| from.text()).collect::<Result<Vec<_>>>()?;
        let n = from.u32()? as usize;
        if from.0.len() != n.saturating_mul(ENTRY) {
            return Err(bad(format!("has a block of {n} entries in {} bytes", from.0.len())));
        }
        let (step, source, sub) = (from.column::<4>(n)?, from.column::<2>(n)?, from.column::<4>(n)?);
        let (row, loss) = (from.column::<8>(n)?, from.column::<4>(n)?);
        let (weight, gradient) = (from.column::<4>(n)?, from.column::<4>(n)?);
        let entry = |k: usize| Entry {
            step: u32::from_le_bytes(step[k]),
            id: SampleId {
                source: u16::from_le_bytes(source[k]),
                row: u64::from_le_bytes(row[k]),
                sub: u32::from_le_bytes(sub[k]),
            },
            loss: f32::from_le_bytes(loss[k]),
            weight: f32::from_le_bytes(weight[k]),
            gradient: f32::from_le_bytes(gradient[k]),
        };
        Ok((names, (0..n).map(entry).collect()))
    }

    pub(super) fn entries(&self) -> Result<Vec<Entry>> {
        Ok(self.columns()?.1)
    }
}

fn chained(before: &Hash, head: &[u8], packed: &[u8]) -> Hash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(before).update(head).update(packed);
    *hasher.finalize().as_bytes()
}

/// What is left of the columns of a block.
struct Columns<'a>(&'a [u8]);

impl<'a> Columns<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(n).ok_or_else(|| bad("has a block that ends too early"))?;
        self.0 = rest;
        Ok(front)
    }

    fn u32(&mut self) -> Result<u32> {
        let b = self.take(4)?;
        Ok(u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
    }

    fn text(&mut self) -> Result<String> {
        let n = self.u32()? as usize;
        String::from_utf8(self.take(n)?.to_vec()).map_err(|_| bad("names a source by bytes that are no UTF-8"))
    }

    fn column<const N: usize>(&mut self, n: usize) -> Result<&'a [[u8; N]]> {
        let bytes = self.take(n.saturating_mul(N))?;
        Ok(bytes.as_chunks::<N>().0)
    }
}

/// Reads the file of a log up to a step. An incomplete block at its end is left out. `name` is that of [`SampleLog::new`], and `path` is
/// for messages.
///
/// # Errors
/// A complete block is damaged.
pub fn decode(bytes: &[u8], name: &str, step: u32, path: &Path) -> Result<SampleLog> {
    let mut log = SampleLog::new(name);
    let mut rest = bytes;
    let at = |number: usize| {
        move |e: Error| match e {
            Error::Argument { rule, .. } => Error::malformed(path, format!("block {number}"), rule),
            other => other,
        }
    };
    while !rest.is_empty() {
        let number = log.blocks.len();
        let Some(block) = Block::parse(rest, &log.head()).map_err(at(number))? else { break };
        let (names, entries) = block.columns().map_err(at(number))?;
        for name in &names {
            log.source(name);
        }
        entries.iter().for_each(|e| see(&mut log.table, e));
        rest = &rest[block.bytes.len()..];
        log.named = log.sources.len();
        log.blocks.push(block);
    }
    log.rewind(step)?;
    Ok(log)
}
