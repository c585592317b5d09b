//! Decompresses text files that may be gzipped: detected by their first two bytes, bounded in size.
//!
//! Concatenated gzip members are one file, as for `zcat`. Other compressions are not supported.

use crate::error::{Error, Result};
use flate2::bufread::MultiGzDecoder;
use perilune_policy::Opened;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// The maximum expansion of a compressed file. A file made to exhaust the memory reaches 1000 times.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expansion {
    /// Unpacked bytes per packed byte.
    pub ratio: u64,
    /// Unpacked bytes allowed for every file.
    pub free: u64,
}

const FREE: u64 = 32 << 20;

/// Of tables: MNIST as CSV unpacks to 7 times its size, and its table in memory takes 17 times; tables of zeros and ones reach 40.
pub(crate) const TABLE: Expansion = Expansion { ratio: 100, free: FREE };
/// Of texts, whose characters become ids of 8 bytes: English unpacks to 3 times its size, source code to 5, logs to 20.
pub(crate) const PROSE: Expansion = Expansion { ratio: 25, free: FREE };

impl Expansion {
    pub fn most(self, packed: u64) -> u64 {
        packed.saturating_mul(self.ratio).max(self.free)
    }
}

/// The plain or unpacked bytes of a file.
pub(crate) struct Text {
    pub path: PathBuf,
    /// Whether the file is compressed.
    pub packed: bool,
    pub source: BufReader<Capped>,
}

/// Opens a file. Reading fails beyond `given` bytes; by default beyond `limit`, or beyond the expansion of a compressed file.
pub(crate) fn open(file: Opened, given: Option<u64>, limit: u64, expansion: Expansion) -> Result<Text> {
    let (path, len) = (file.path().to_path_buf(), file.len());
    let limit = given.unwrap_or(limit);
    let mut file = BufReader::with_capacity(1 << 16, file);
    let head = file.fill_buf().map_err(|e| Error::io(&path, "read", e))?;
    let packed = head.starts_with(&[0x1f, 0x8b]);
    if !packed && len > limit {
        return Err(past(&path, Limit::Bytes(limit)));
    }
    let by_ratio = expansion.most(len);
    let (most, rule) = match packed && given.is_none() && by_ratio < limit {
        true => (by_ratio, Limit::Expansion(expansion)),
        false => (limit, Limit::Bytes(limit)),
    };
    let source = if packed { Source::Gzip(MultiGzDecoder::new(file)) } else { Source::Plain(file) };
    Ok(Text { path, packed, source: BufReader::with_capacity(1 << 16, Capped { source, left: most, rule }) })
}

/// Converts a failed read of [`open`]'s reader to the crate's error.
pub(crate) fn read_error(path: &Path, e: io::Error) -> Error {
    if let Some(limit) = e.get_ref().and_then(|inner| inner.downcast_ref::<Limit>()) {
        return past(path, *limit);
    }
    match e.kind() {
        io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => {
            Error::malformed(path, "gzip stream", format!("is damaged ({e})")).hint("copy or download the file again")
        }
        _ => Error::io(path, "read", e),
    }
}

/// The limit that a file exceeds.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the text exceeds its limit")]
enum Limit {
    Bytes(u64),
    Expansion(Expansion),
}

fn past(path: &Path, limit: Limit) -> Error {
    match limit {
        Limit::Bytes(limit) => {
            let rule = format!("has more than {limit} bytes, the limit of its text");
            Error::malformed(path, "text", rule)
                .hint("raise the limit with the option max_bytes, or keep large data as .npy or .safetensors")
        }
        Limit::Expansion(Expansion { ratio, free }) => {
            let rule = format!("unpacks to more than {ratio} times its size (and more than {} MiB)", free >> 20);
            Error::malformed(path, "gzip stream", rule).hint(
                "if the file is valid, raise the limit with the option max_bytes, or decompress it first (gunzip)",
            )
        }
    }
}

enum Source {
    Plain(BufReader<Opened>),
    Gzip(MultiGzDecoder<BufReader<Opened>>),
}

pub(crate) struct Capped {
    source: Source,
    left: u64,
    rule: Limit,
}

impl Read for Capped {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = match &mut self.source {
            Source::Plain(r) => r.read(buf)?,
            Source::Gzip(r) => r.read(buf)?,
        };
        self.left = self.left.checked_sub(n as u64).ok_or_else(|| io::Error::other(self.rule))?;
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::named;
    use std::fs::File;
    use std::io::Write;

    #[test]
    fn a_bomb_is_refused_early() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("bomb.csv.gz");
        let mut packed = flate2::write::GzEncoder::new(File::create(&path).expect("made"), flate2::Compression::best());
        let line = "0,0,0,0\n".repeat(1 << 14);
        (0..400).for_each(|_| packed.write_all(line.as_bytes()).expect("written"));
        packed.finish().expect("finished");
        let mut text = Vec::new();
        let read = |given, expansion, text: &mut Vec<u8>| {
            text.clear();
            let mut from = open(named::open(&path).expect("opened"), given, u64::MAX, expansion).expect("read").source;
            from.read_to_end(text).map_err(|e| read_error(&path, e).to_string())
        };
        let e = read(None, TABLE, &mut text).expect_err("too much");
        assert!(text.len() as u64 <= FREE);
        assert!(
            e.contains("unpacks to more than 100 times its size (and more than 32 MiB)") && e.contains("gunzip"),
            "{e}"
        );
        assert!(e.contains("bomb.csv.gz") && e.contains("max_bytes"), "{e}");
        assert!(read(None, PROSE, &mut text).expect_err("too much").contains("25 times"));
        read(None, Expansion { ratio: 2000, free: 0 }, &mut text).expect("read");
        assert_eq!(text.len(), 400 * line.len());
        // A limit of the caller replaces that of the expansion.
        read(Some(text.len() as u64), TABLE, &mut text).expect("read");
        let e = read(Some(1 << 20), TABLE, &mut text).expect_err("too much");
        assert!(e.contains("more than 1048576 bytes") && e.contains("max_bytes"), "{e}");
    }
}
