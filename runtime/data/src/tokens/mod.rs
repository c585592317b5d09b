//! Stores the token ids of a corpus, in files or in memory, and reads ranges of them.
//!
//! A corpus is a sequence of shards: `.bin` and `.npy` files of any size, those that a manifest lists, or one list of ids in memory. A file is read by
//! position and only where a range asks for it, so memory stays flat for a corpus of any size. Ids keep their width (u8 to
//! i64) in the shard and become i32 when they are read.
//!
//! Windows of a corpus are a [`crate::source::Source`]: [`TokenWindows`]. Not included: tokenizers, and writing (`perilune_tokenizer`).

mod layout;
pub mod manifest;
mod windows;

pub use windows::TokenWindows;

use crate::error::{Error, Result};
use crate::open_files::OpenFiles;
use layout::{Layout, Width};
use perilune_core::{DType, HostTensor, Shape, host_memory};
use perilune_policy::{Opened, Opener};
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes that are read from a file at a time.
const PIECE: u64 = 1 << 20;

/// A sequence of token ids, numbered from 0 across its shards.
#[derive(Debug)]
pub struct Tokens {
    shards: Vec<Shard>,
    files: Option<OpenFiles>,
}

#[derive(Debug)]
struct Shard {
    /// The numbers of its tokens in the corpus.
    range: Range<u64>,
    width: Width,
    /// Ids are below it, as a manifest states.
    vocabulary: Option<u64>,
    bytes: Bytes,
}

#[derive(Debug)]
enum Bytes {
    Memory(Vec<u8>),
    /// The number of the file, and where its ids start.
    File {
        number: usize,
        offset: u64,
    },
}

impl Tokens {
    /// Opens the files of a corpus, in this order, and passes each to `observe`. A `.json` file is a [`manifest`], which stands for
    /// its shards; their sizes are compared with it.
    ///
    /// # Errors
    /// There is no file, a file holds no token ids, or it may not be read.
    pub fn open(opener: Arc<dyn Opener>, paths: &[PathBuf], observe: &mut dyn FnMut(&Opened)) -> Result<Tokens> {
        let mut files = OpenFiles::new(opener.clone());
        let (mut shards, mut first) = (Vec::with_capacity(paths.len()), 0);
        for path in paths {
            let mut file = opener.open(path)?;
            observe(&file);
            let mut add = |file: Opened, Layout { width, offset, len }: Layout, vocabulary: Option<u64>| {
                let range = first..first + len;
                first = range.end;
                shards.push(Shard { range, width, vocabulary, bytes: Bytes::File { number: files.add(file), offset } });
            };
            if path.extension().is_none_or(|e| e != "json") {
                let layout = layout::read(&mut file)?;
                add(file, layout, None);
                continue;
            }
            let manifest = manifest::Manifest::read(file)?;
            let width = manifest.width(path)?;
            for shard in &manifest.shards {
                let file = opener.open(&manifest::beside(path, &shard.file))?;
                if Some(file.len()) != shard.tokens.checked_mul(width.bytes() as u64) {
                    let rule = format!(
                        "has {} bytes, and the manifest lists {} tokens of {} bytes",
                        file.len(),
                        shard.tokens,
                        width.bytes()
                    );
                    return Err(Error::malformed(file.path(), "file", rule).hint("encode or copy the files again"));
                }
                add(file, Layout { width, offset: 0, len: shard.tokens }, Some(manifest.vocabulary));
            }
        }
        if first == 0 {
            let (subject, rule) = match paths {
                [] => ("a corpus".to_string(), "has no files"),
                [path, ..] => (path.display().to_string(), "holds no tokens"),
            };
            return Err(Error::argument(subject, rule).hint("write token ids to .bin or .npy files"));
        }
        Ok(Tokens { shards, files: Some(files) })
    }

    /// Makes a corpus of ids in memory: u8, i32 or i64.
    pub fn in_memory(ids: HostTensor) -> Result<Tokens> {
        let width = match ids.dtype {
            DType::U8 => Width::U8,
            DType::I32 => Width::I32,
            DType::I64 => Width::I64,
            other => return Err(Error::argument("token ids", format!("are {}; they are integers", other.name()))),
        };
        let range = 0..ids.shape.numel() as u64;
        let shard = Shard { range, width, vocabulary: None, bytes: Bytes::Memory(ids.bytes) };
        Ok(Tokens { shards: vec![shard], files: None })
    }

    /// The number of tokens.
    pub fn len(&self) -> u64 {
        self.shards.last().map_or(0, |s| s.range.end)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Divides a range by the files that hold it: the part of each, and the number of ids of its vocabulary, if a manifest states that.
    pub fn vocabularies(&self, range: Range<u64>) -> impl Iterator<Item = (Range<u64>, Option<u64>)> {
        let first = self.shards.partition_point(|s| s.range.end <= range.start);
        let shards = self.shards.iter().skip(first).take_while(move |s| s.range.start < range.end);
        shards.map(move |s| (s.range.start.max(range.start)..s.range.end.min(range.end), s.vocabulary))
    }

    /// Returns the file of a token and the number of the token in it; none in memory.
    pub fn place(&self, token: u64) -> Option<(&Path, u64)> {
        let shard = self.shards.get(self.shards.partition_point(|s| s.range.end <= token))?;
        match (&shard.bytes, &self.files) {
            (Bytes::File { number, .. }, Some(files)) => Some((files.path(*number), token - shard.range.start)),
            _ => None,
        }
    }

    /// Appends the ids of a range to `to`, as little-endian i32.
    ///
    /// # Errors
    /// The range exceeds the corpus or the host's memory, an id is negative or above 2^31 - 1, or a file cannot be read.
    pub fn read(&self, range: Range<u64>, to: &mut Vec<u8>) -> Result<()> {
        if range.end > self.len() || range.start > range.end {
            let rule = format!("are not in a corpus of {}", self.len());
            return Err(Error::argument(format!("tokens {} to {}", range.start, range.end), rule));
        }
        let bytes = usize::try_from(range.end - range.start).unwrap_or(usize::MAX).saturating_mul(4);
        if host_memory::check("token ids", bytes).is_err() || to.try_reserve(bytes).is_err() {
            let rule = format!("do not fit into the host's memory: they take {bytes} bytes");
            let subject = format!("tokens {} to {}", range.start, range.end);
            return Err(Error::argument(subject, rule).hint("read fewer at a time, as windows do"));
        }
        let mut at = range.start;
        let mut k = self.shards.partition_point(|s| s.range.end <= at);
        let mut buffer = Vec::new();
        while at < range.end {
            let shard = &self.shards[k];
            let end = range.end.min(shard.range.end).min(at + PIECE / shard.width.bytes() as u64);
            self.read_shard(shard, at - shard.range.start..end - shard.range.start, &mut buffer, to)?;
            at = end;
            if at == shard.range.end {
                k = self.shards.partition_point(|s| s.range.end <= at);
            }
        }
        Ok(())
    }

    fn read_shard(&self, shard: &Shard, part: Range<u64>, buffer: &mut Vec<u8>, to: &mut Vec<u8>) -> Result<()> {
        let size = shard.width.bytes() as u64;
        let span = part.start * size..part.end * size;
        let negative = |path: &Path, k: u64| {
            let rule = format!("token {} is negative or above 2^31 - 1", part.start + k);
            Error::malformed(path, "file", rule).hint("token files hold ids of a vocabulary")
        };
        match (&shard.bytes, &self.files) {
            (Bytes::File { number, offset }, Some(files)) => {
                buffer.clear();
                buffer.resize((span.end - span.start) as usize, 0);
                files.read_at(*number, offset + span.start, buffer)?;
                shard.width.widen(buffer, to).map_err(|k| negative(files.path(*number), k))
            }
            (Bytes::Memory(bytes), _) => shard
                .width
                .widen(&bytes[span.start as usize..span.end as usize], to)
                .map_err(|k| negative(Path::new("memory"), k)),
            (Bytes::File { .. }, None) => Err(Error::argument("a corpus", "this is a bug: its files are not open")),
        }
    }
}

/// Reads a whole file: (N) i32.
pub fn read_file(mut file: Opened) -> Result<HostTensor> {
    let path = file.path().to_path_buf();
    let Layout { width, offset, len } = layout::read(&mut file)?;
    let failed = |e| Error::io(&path, "read", e);
    file.seek(SeekFrom::Start(offset)).map_err(failed)?;
    let (mut bytes, mut ids) = (Vec::new(), Vec::new());
    file.read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 != len * width.bytes() as u64 {
        return Err(Error::malformed(&path, "file", "changed while it was read"));
    }
    width
        .widen(&bytes, &mut ids)
        .map_err(|k| Error::malformed(&path, "file", format!("token {k} is negative or above 2^31 - 1")))?;
    Ok(HostTensor { dtype: DType::I32, shape: Shape::of(&[ids.len() / 4]), bytes: ids })
}

#[cfg(test)]
#[path = "../tokens_tests.rs"]
mod tests;
