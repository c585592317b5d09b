//! Finds the messages of an Arrow IPC file or stream, so that record batches are read by position.
//!
//! A file has a footer that lists its messages. A stream, which Hugging Face `datasets` writes, has none: its messages follow each
//! other, so the index reads the metadata of each and passes over its body.

use super::columnar::plain;
use crate::error::{Error, Result};
use crate::open_files::OpenFiles;
use arrow_ipc::{MessageHeader, MetadataVersion};
use arrow_schema::{Schema, SchemaRef};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The most bytes of a message's metadata, and of a footer.
const MAX_METADATA: u64 = 256 << 20;
/// The most rows of a record batch.
const MAX_ROWS: i64 = 1 << 31;
/// The most entries of the lists of dictionaries, over all batches.
const MAX_LISTED: usize = 1 << 24;
const CONTINUATION: [u8; 4] = [0xFF; 4];
const MAGIC: &[u8] = b"ARROW1";

/// Where a message is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    /// Where its metadata begins, behind the length.
    pub offset: u64,
    pub metadata: u64,
    /// Bytes of its body, which follows the metadata.
    pub body: u64,
}

/// The messages of a file or stream.
pub(crate) struct Messages {
    pub schema: SchemaRef,
    pub version: MetadataVersion,
    pub batches: Vec<Block>,
    /// The first row of each batch, and the number of rows.
    pub starts: Vec<u64>,
    pub dictionaries: Vec<Block>,
    /// The dictionary messages that are in force at some batches, in order.
    pub in_force: Vec<Vec<usize>>,
    /// For each batch its entry of `in_force`.
    pub force: Vec<usize>,
}

/// Collects messages in their order.
struct Collector<'a> {
    open: &'a OpenFiles,
    number: usize,
    found: Messages,
    /// The messages of each dictionary since it was last replaced.
    chains: BTreeMap<i64, Vec<usize>>,
    changed: bool,
    listed: usize,
}

/// Indexes a file or stream.
///
/// # Errors
/// It is neither, is damaged, or is too large for the limits.
pub(crate) fn index(open: &OpenFiles, number: usize) -> Result<Messages> {
    let len = open.len(number);
    let mut head = vec![0; len.min(8) as usize];
    open.read_at(number, 0, &mut head)?;
    match head.starts_with(MAGIC) {
        true => file(open, number),
        false => stream(open, number, &head),
    }
}

fn malformed(open: &OpenFiles, number: usize, at: u64, rule: impl Into<String>) -> Error {
    let error = Error::malformed(open.path(number), format!("byte {at}"), rule);
    error.hint("the file is damaged or incomplete: copy or write it again")
}

fn collector(open: &OpenFiles, number: usize, schema: Schema, version: MetadataVersion) -> Collector<'_> {
    let found = Messages {
        schema: Arc::new(schema),
        version,
        batches: Vec::new(),
        starts: vec![0],
        dictionaries: Vec::new(),
        in_force: vec![Vec::new()],
        force: Vec::new(),
    };
    Collector { open, number, found, chains: BTreeMap::new(), changed: false, listed: 0 }
}

fn schema_of(open: &OpenFiles, number: usize, at: u64, schema: arrow_ipc::Schema<'_>) -> Result<Schema> {
    if schema.endianness() != arrow_ipc::Endianness::Little {
        return Err(Error::unsupported(open.path(number), "schema", "has big-endian numbers"));
    }
    let made = arrow_ipc::convert::try_fb_to_schema(schema);
    made.map_err(|e| malformed(open, number, at, format!("the schema cannot be read ({})", plain(&e))))
}

/// Indexes an IPC file by its footer.
fn file(open: &OpenFiles, number: usize) -> Result<Messages> {
    let len = open.len(number);
    let bad = |rule: &str| malformed(open, number, len, rule);
    if len < 18 {
        return Err(bad("the Arrow file ends before its footer"));
    }
    let mut tail = [0; 10];
    open.read_at(number, len - 10, &mut tail)?;
    let [a, b, c, d, magic @ ..] = tail;
    if magic != *MAGIC {
        return Err(bad("the Arrow file does not end with ARROW1"));
    }
    let size = u64::from(u32::from_le_bytes([a, b, c, d]));
    if size > (len - 18).min(MAX_METADATA) {
        return Err(bad(&format!("the Arrow file has a footer of {size} bytes, and {len} bytes in all")));
    }
    let at = len - 10 - size;
    let mut footer = vec![0; size as usize];
    open.read_at(number, at, &mut footer)?;
    let footer = arrow_ipc::root_as_footer(&footer)
        .map_err(|e| malformed(open, number, at, format!("the footer cannot be read ({})", plain(&e))))?;
    let schema = footer.schema().ok_or_else(|| malformed(open, number, at, "the footer has no schema"))?;
    let mut out = collector(open, number, schema_of(open, number, at, schema)?, footer.version());
    let lists = [footer.dictionaries(), footer.recordBatches()];
    for block in lists.iter().flatten().flat_map(|list| list.iter()) {
        let numbers =
            (u64::try_from(block.offset()), u64::try_from(block.metaDataLength()), u64::try_from(block.bodyLength()));
        let (Ok(offset), Ok(metadata), Ok(body)) = numbers else {
            return Err(malformed(open, number, at, "the footer has a negative offset or length"));
        };
        // The length before the metadata, which is longer since format 0.15, counts to it here.
        let mut head = [0; 4];
        if metadata < 8 || offset.checked_add(metadata).and_then(|n| n.checked_add(body)).is_none_or(|end| end > len) {
            return Err(malformed(open, number, at, format!("the footer names {metadata} bytes at {offset}")));
        }
        open.read_at(number, offset, &mut head)?;
        let prefix = if head == CONTINUATION { 8 } else { 4 };
        out.add(Block { offset: offset + prefix, metadata: metadata - prefix, body }, true)?;
    }
    Ok(out.found)
}

/// Indexes a stream by the lengths of its messages.
fn stream(open: &OpenFiles, number: usize, head: &[u8]) -> Result<Messages> {
    let len = open.len(number);
    if len == 0 {
        return Err(malformed(open, number, 0, "the file is empty"));
    }
    let wrong = || {
        let error = Error::malformed(open.path(number), "file", "is no Arrow file or stream");
        let begins = crate::error::quote(&String::from_utf8_lossy(head));
        error.hint(format!("it begins with {begins}; data.records(path) reads a file by its extension"))
    };
    let (mut at, mut out) = (0, None::<Collector<'_>>);
    while at < len {
        // Other files seem to have a first message of absurd length.
        let block = next(open, number, at).map_err(|e| if at == 0 { wrong() } else { e })?;
        let Some(block) = block else { break };
        match &mut out {
            Some(out) => at = out.add(block, false)?,
            None => {
                let bytes = metadata(open, number, block).map_err(|_| wrong())?;
                let message = arrow_ipc::root_as_message(&bytes).map_err(|_| wrong())?;
                let schema = message.header_as_schema().ok_or_else(wrong)?;
                let schema = schema_of(open, number, at, schema)?;
                out = Some(collector(open, number, schema, message.version()));
                at = block.offset + block.metadata;
            }
        }
    }
    out.map(|out| out.found).ok_or_else(|| malformed(open, number, at, "the stream has no schema"))
}

/// The message at a position of a stream, whose body has no length yet; `None` at its end.
fn next(open: &OpenFiles, number: usize, at: u64) -> Result<Option<Block>> {
    let len = open.len(number);
    let word = |at: u64| -> Result<[u8; 4]> {
        let mut word = [0; 4];
        match at.checked_add(4).is_some_and(|end| end <= len) {
            true => open.read_at(number, at, &mut word).map(|()| word),
            false => Err(malformed(open, number, at, "the stream ends in the middle of a message")),
        }
    };
    let first = word(at)?;
    let (size, offset) = if first == CONTINUATION { (word(at + 4)?, at + 8) } else { (first, at + 4) };
    let metadata = u64::from(u32::from_le_bytes(size));
    if metadata == 0 {
        return Ok(None);
    }
    if metadata > MAX_METADATA || offset + metadata > len {
        let rule = format!("a message has {metadata} bytes of metadata, and the file {len} bytes in all");
        return Err(malformed(open, number, at, rule));
    }
    Ok(Some(Block { offset, metadata, body: 0 }))
}

/// Reads the metadata of a message.
pub(crate) fn metadata(open: &OpenFiles, number: usize, block: Block) -> Result<Vec<u8>> {
    if block.metadata > MAX_METADATA {
        return Err(malformed(open, number, block.offset, format!("a message has {} bytes", block.metadata)));
    }
    let mut bytes = vec![0; block.metadata as usize];
    open.read_at(number, block.offset, &mut bytes)?;
    Ok(bytes)
}

impl Collector<'_> {
    /// Adds a message, whose metadata names the length of its body unless the footer has. Returns where the next one begins.
    fn add(&mut self, mut block: Block, known: bool) -> Result<u64> {
        let (open, number, at) = (self.open, self.number, block.offset);
        let bytes = metadata(open, number, block)?;
        let message = arrow_ipc::root_as_message(&bytes)
            .map_err(|e| malformed(open, number, at, format!("a message cannot be read ({})", plain(&e))))?;
        if !known {
            let body = u64::try_from(message.bodyLength()).ok();
            let begin = block.offset + block.metadata;
            block.body =
                body.filter(|n| begin.checked_add(*n).is_some_and(|end| end <= open.len(number))).ok_or_else(|| {
                    let length = message.bodyLength();
                    malformed(
                        open,
                        number,
                        at,
                        format!("a message has {length} bytes of data behind it, and the file less"),
                    )
                })?;
        }
        match message.header_type() {
            MessageHeader::RecordBatch => {
                let rows = message.header_as_record_batch().map_or(-1, |batch| batch.length());
                if !(0..=MAX_ROWS).contains(&rows) {
                    let rule = format!("a record batch has {rows} rows; it has at most {MAX_ROWS}");
                    return Err(malformed(open, number, at, rule));
                }
                self.settle()?;
                let found = &mut self.found;
                found.batches.push(block);
                found.force.push(found.in_force.len() - 1);
                found.starts.push(found.starts.last().copied().unwrap_or(0) + rows as u64);
            }
            MessageHeader::DictionaryBatch => {
                let Some(batch) = message.header_as_dictionary_batch() else {
                    return Err(malformed(open, number, at, "a dictionary has no data"));
                };
                let place = self.found.dictionaries.len();
                self.found.dictionaries.push(block);
                let chain = self.chains.entry(batch.id()).or_default();
                if !batch.isDelta() {
                    chain.clear();
                }
                chain.push(place);
                self.changed = true;
            }
            MessageHeader::Schema => return Err(malformed(open, number, at, "the stream has a second schema")),
            other => {
                let kind = other.variant_name().unwrap_or("an unknown message");
                return Err(Error::unsupported(open.path(number), format!("byte {at}"), format!("has a {kind}")));
            }
        }
        Ok(block.offset + block.metadata + block.body)
    }

    /// Lists the dictionaries in force, if they have changed since the last batch.
    fn settle(&mut self) -> Result<()> {
        if !std::mem::take(&mut self.changed) {
            return Ok(());
        }
        let mut list: Vec<usize> = self.chains.values().flatten().copied().collect();
        list.sort_unstable();
        self.listed += list.len();
        if self.listed > MAX_LISTED {
            let rule = format!("has {} dictionaries between its batches, too many", self.found.dictionaries.len());
            return Err(Error::unsupported(self.open.path(self.number), "stream", rule));
        }
        self.found.in_force.push(list);
        Ok(())
    }
}
