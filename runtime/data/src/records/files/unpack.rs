//! Decompresses gzip and zstd files once, to seekable frames in the program's cache folder.
//!
//! A file in the cache has the BLAKE3 hash of the compressed file as its name, and replaces nothing: it is written under another name,
//! flushed and renamed, while a lock keeps other processes from doing the same work. Where there is no folder or no room in it, the frames
//! stay in memory, up to a bound. A stream that is damaged, ends early or expands beyond its limit is an error.

use super::frames::{self, Table, Writer};
use crate::cache::CachePart;
use crate::error::{Error, Result};
use crate::gzip_text::Expansion;
use crate::open_files::OpenFiles;
use flate2::bufread::MultiGzDecoder;
use perilune_core::Interrupt;
use perilune_policy::{Directory, Opener};
use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Records expand to ten times their compressed size; logs of equal lines to more.
const RECORDS: Expansion = Expansion { ratio: 100, free: 64 << 20 };
/// The most bytes of frames that a dataset keeps in memory, where there is no cache folder.
const IN_MEMORY: u64 = 1 << 30;
/// The largest window of zstd: 128 MiB.
const WINDOW_LOG: u32 = 27;
const PIECE: usize = 1 << 20;

/// How a file is compressed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Packing {
    Gzip,
    Zstd,
}

impl Packing {
    /// Detects the compression by the first bytes of a file.
    pub fn of(path: &Path, head: &[u8]) -> Result<Option<Packing>> {
        let other = |what: &str, cure: &str| {
            let error = Error::unsupported(path, "file", format!("is compressed ({what}), which is not supported"));
            Err(error.hint(format!("decompress it ({cure}), or compress it with gzip or zstd")))
        };
        match head {
            [0x1F, 0x8B, ..] => Ok(Some(Packing::Gzip)),
            [0x28, 0xB5, 0x2F, 0xFD, ..] | [0x50..=0x5F, 0x2A, 0x4D, 0x18, ..] => Ok(Some(Packing::Zstd)),
            [0xFD, b'7', b'z', b'X', b'Z', ..] => other("xz", "unxz -k"),
            [b'B', b'Z', b'h', b'1'..=b'9', 0x31, 0x41, 0x59, 0x26, ..] => other("bzip2", "bunzip2 -k"),
            [0x04, 0x22, 0x4D, 0x18, ..] => other("lz4", "lz4 -d"),
            [b'P', b'K', 3, 4, ..] => other("zip", "unzip"),
            _ => Ok(None),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Packing::Gzip => "gzip",
            Packing::Zstd => "zstd",
        }
    }
}

/// The text of a compressed file as frames.
#[derive(Debug)]
pub(super) struct Frames {
    pub table: Table,
    pub place: Place,
}

/// Where frames are stored.
#[derive(Debug)]
pub(super) enum Place {
    Memory(Vec<u8>),
    /// The number of a file among those of the cache folder.
    Cache(usize),
}

/// The folder of decompressed files.
#[derive(Debug)]
pub(super) struct Store {
    part: Option<CachePart>,
    /// Locks that keep the files of the cache, by the first letter of their names.
    held: Vec<(Option<char>, File)>,
    pub open: OpenFiles,
    in_memory: u64,
}

impl Store {
    /// Uses `records` in the program's cache folder, which it makes if needed.
    pub fn new(cache: Option<&Path>) -> Store {
        let part = CachePart::open(cache, "records");
        let opener: Arc<dyn Opener> = match &part {
            Some(part) => Arc::new(part.folder().clone()),
            None => perilune_policy::Policy::closed(),
        };
        Store { part, held: Vec::new(), open: OpenFiles::new(opener), in_memory: 0 }
    }

    /// The frames of a compressed file: those of the cache, or made now.
    ///
    /// # Errors
    /// The file is damaged, expands beyond its limit or changes while it is read; or there is no place for its text.
    pub fn frames(
        &mut self,
        from: &OpenFiles,
        number: usize,
        packing: Packing,
        interrupt: &Interrupt,
    ) -> Result<Frames> {
        let hash = hash(from, number, interrupt)?;
        let name = format!("{}.zst", blake3::Hash::from_bytes(hash).to_hex());
        let Some(part) = self.part.clone() else {
            return self.keep_in_memory(from, number, packing, hash, interrupt);
        };
        self.hold(&part, &name);
        let folder = part.folder();
        if let Some(found) = self.cached(folder, &name)? {
            return Ok(found);
        }
        let _lock = part.lock(&name, interrupt)?;
        if let Some(found) = self.cached(folder, &name)? {
            return Ok(found);
        }
        let Ok(staged) = folder.create(&name) else {
            return self.keep_in_memory(from, number, packing, hash, interrupt);
        };
        let made = transcode(from, number, packing, staged, u64::MAX, hash, interrupt);
        match made.and_then(|(staged, _)| staged.commit().map_err(Error::from)) {
            Ok(()) => {
                part.bound();
                let made = self.cached(folder, &name)?;
                let path = || folder.path().join(&name);
                made.ok_or_else(|| Error::malformed(&path(), "table", "differs from what was written"))
            }
            // No room in the cache folder, or none to write it.
            Err(Error::Io { action: "write" | "flush to the disk" | "put in place", .. }) => {
                self.keep_in_memory(from, number, packing, hash, interrupt)
            }
            Err(e) => Err(e),
        }
    }

    /// Keeps a file of the cache while this store lives.
    fn hold(&mut self, part: &CachePart, name: &str) {
        let first = name.chars().next();
        if self.held.iter().all(|(known, _)| *known != first) {
            self.held.extend(part.hold(name).map(|lock| (first, lock)));
        }
        part.mark_used(name);
    }

    /// Opens a file of the cache; one that is no longer whole is made again.
    fn cached(&mut self, folder: &Directory, name: &str) -> Result<Option<Frames>> {
        let Ok(file) = folder.open(Path::new(name)) else { return Ok(None) };
        let len = file.len();
        // Paths of the files are relative to the folder.
        let number = self.open.add_as(file, PathBuf::from(name));
        let table = frames::table(len, &mut |at, to| self.open.read_at(number, at, to))?;
        Ok(table.map(|table| Frames { table, place: Place::Cache(number) }))
    }

    fn keep_in_memory(
        &mut self,
        from: &OpenFiles,
        number: usize,
        packing: Packing,
        hash: [u8; 32],
        interrupt: &Interrupt,
    ) -> Result<Frames> {
        let left = IN_MEMORY.saturating_sub(self.in_memory);
        let (bytes, table) = transcode(from, number, packing, Vec::new(), left, hash, interrupt)?;
        self.in_memory += bytes.len() as u64;
        Ok(Frames { table, place: Place::Memory(bytes) })
    }
}

fn hash(from: &OpenFiles, number: usize, interrupt: &Interrupt) -> Result<[u8; 32]> {
    let mut source = Source { from, number, at: 0, hasher: blake3::Hasher::new() };
    drain(&mut source, interrupt)?;
    Ok(*source.hasher.finalize().as_bytes())
}

fn drain(source: &mut Source<'_>, interrupt: &Interrupt) -> Result<()> {
    let mut buffer = vec![0; PIECE];
    loop {
        if interrupt.is_requested() {
            return Err(Error::Interrupted);
        }
        match source.read(&mut buffer).map_err(|e| reading(source.from.path(source.number), e))? {
            0 => return Ok(()),
            _ => continue,
        }
    }
}

/// Decompresses a file into frames of at most `most` bytes in all.
fn transcode<W: Write>(
    from: &OpenFiles,
    number: usize,
    packing: Packing,
    to: W,
    most: u64,
    hash: [u8; 32],
    interrupt: &Interrupt,
) -> Result<(W, Table)> {
    let (path, packed) = (from.path(number), from.len(number));
    let writing = |e: io::Error| Error::io(path, "write", e);
    let mut writer = Writer::new(to).map_err(writing)?;
    let source = BufReader::with_capacity(1 << 16, Source { from, number, at: 0, hasher: blake3::Hasher::new() });
    let mut decoder = Decoder::new(packing, source).map_err(|e| reading(path, e))?;
    let (mut buffer, mut len, limit) = (vec![0; PIECE], 0u64, RECORDS.most(packed));
    loop {
        if interrupt.is_requested() {
            return Err(Error::Interrupted);
        }
        let count = match decoder.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(e) if is_own(&e) => return Err(reading(path, e)),
            Err(e) => {
                let what = match e.kind() {
                    io::ErrorKind::UnexpectedEof => "ends early".to_string(),
                    _ => format!("is damaged ({})", super::columnar::plain(&e)),
                };
                let place = format!("{} stream, before byte {} of {packed}", packing.name(), decoder.source().at);
                let error = Error::malformed(path, place, format!("{what}, after {len} bytes of text"));
                return Err(error.hint("copy or download the file again"));
            }
        };
        len += count as u64;
        if len > limit {
            let Expansion { ratio, free } = RECORDS;
            let rule = format!("unpacks to more than {ratio} times its size (and more than {} MiB)", free >> 20);
            let error = Error::malformed(path, format!("{} stream", packing.name()), rule);
            return Err(error.hint("if the file is valid, decompress it first"));
        }
        writer.write(&buffer[..count]).map_err(writing)?;
        if writer.table.ends.last().is_some_and(|bytes| *bytes > most) {
            let rule =
                format!("needs more than {most} bytes of memory, as there is no cache folder with room for its text");
            let error = Error::unsupported(path, format!("{} stream", packing.name()), rule);
            return Err(error.hint("set PERILUNE_CACHE to a folder with room, or decompress the file first"));
        }
    }
    // What follows the stream counts to the hash too.
    let mut source = decoder.into_source();
    drain(&mut source, interrupt)?;
    if *source.hasher.finalize().as_bytes() != hash {
        let error = Error::malformed(path, "file", "was written to while it was read");
        return Err(error.hint("write a new file beside it, and start the run again with that"));
    }
    writer.finish().map_err(writing)
}

/// Decompresses a file.
enum Decoder<'a> {
    Gzip(Box<MultiGzDecoder<BufReader<Source<'a>>>>),
    Zstd(Box<zstd::stream::read::Decoder<'static, BufReader<Source<'a>>>>),
}

impl<'a> Decoder<'a> {
    fn new(packing: Packing, source: BufReader<Source<'a>>) -> io::Result<Decoder<'a>> {
        Ok(match packing {
            Packing::Gzip => Decoder::Gzip(Box::new(MultiGzDecoder::new(source))),
            Packing::Zstd => {
                let mut decoder = zstd::stream::read::Decoder::with_buffer(source)?;
                decoder.window_log_max(WINDOW_LOG)?;
                Decoder::Zstd(Box::new(decoder))
            }
        })
    }

    fn source(&self) -> &Source<'a> {
        match self {
            Decoder::Gzip(d) => d.get_ref().get_ref(),
            Decoder::Zstd(d) => d.get_ref().get_ref(),
        }
    }

    fn into_source(self) -> Source<'a> {
        match self {
            Decoder::Gzip(d) => d.into_inner().into_inner(),
            Decoder::Zstd(d) => d.finish().into_inner(),
        }
    }
}

impl Read for Decoder<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        match self {
            Decoder::Gzip(d) => d.read(to),
            Decoder::Zstd(d) => d.read(to),
        }
    }
}

/// Reads a file from its beginning and hashes what it reads.
struct Source<'a> {
    from: &'a OpenFiles,
    number: usize,
    at: u64,
    hasher: blake3::Hasher,
}

impl Read for Source<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let count = (self.from.len(self.number) - self.at).min(to.len() as u64) as usize;
        self.from.read_at(self.number, self.at, &mut to[..count]).map_err(io::Error::other)?;
        self.hasher.update(&to[..count]);
        self.at += count as u64;
        Ok(count)
    }
}

/// Whether an error of reading is one of this crate, that of a file that changes or vanishes.
fn is_own(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<Error>())
}

fn reading(path: &Path, error: io::Error) -> Error {
    match is_own(&error) {
        false => Error::io(path, "read", error),
        true => match error.into_inner().map(|inner| inner.downcast::<Error>()) {
            Some(Ok(e)) => *e,
            _ => Error::io(path, "read", io::Error::other("it fails")),
        },
    }
}
