//! Decompresses text files that may be gzipped: detected by their first two bytes, bounded in size.
//!
//! Concatenated gzip members are one file, as for `zcat`. Other compressions are not supported.

use crate::error::{Error, Result};
use flate2::bufread::MultiGzDecoder;
use perilune_policy::Opened;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// The maximum expansion of a compressed file. Text and tables rarely exceed 20 times their packed size; a file made to exhaust the
/// memory reaches 1000 times.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expansion {
    /// Unpacked bytes per packed byte.
    pub ratio: u64,
    /// Unpacked bytes allowed for every file.
    pub free: u64,
}

pub(crate) const EXPANSION: Expansion = Expansion { ratio: 100, free: 32 << 20 };

impl Expansion {
    fn most(self, packed: u64) -> u64 {
        packed.saturating_mul(self.ratio).max(self.free)
    }
}

/// Returns a reader of the plain or unpacked bytes of a file, and its path. Reading fails beyond `limit` bytes, or beyond the
/// [`EXPANSION`] of a compressed file.
pub(crate) fn open(file: Opened, limit: u64) -> Result<(PathBuf, BufReader<Capped>)> {
    open_within(file, limit, EXPANSION)
}

fn open_within(file: Opened, limit: u64, expansion: Expansion) -> Result<(PathBuf, BufReader<Capped>)> {
    let (path, len) = (file.path().to_path_buf(), file.len());
    let mut file = BufReader::with_capacity(1 << 16, file);
    let head = file.fill_buf().map_err(|e| Error::io(&path, "read", e))?;
    let (source, most) = if head.starts_with(&[0x1f, 0x8b]) {
        (Source::Gzip(MultiGzDecoder::new(file)), expansion.most(len))
    } else if len > limit {
        return Err(too_long(&path, len, limit));
    } else {
        (Source::Plain(file), u64::MAX)
    };
    let past = if most < limit { io::ErrorKind::QuotaExceeded } else { io::ErrorKind::FileTooLarge };
    Ok((path, BufReader::with_capacity(1 << 16, Capped { source, left: limit.min(most), past })))
}

/// Converts a failed read of [`open`]'s reader to the crate's error.
pub(crate) fn read_error(path: &Path, limit: u64, e: io::Error) -> Error {
    match e.kind() {
        io::ErrorKind::FileTooLarge => too_long(path, limit.saturating_add(1), limit),
        io::ErrorKind::QuotaExceeded => {
            let Expansion { ratio, free } = EXPANSION;
            let rule = format!("unpacks to more than {ratio} times its size (and more than {} MiB)", free >> 20);
            Error::malformed(path, "gzip stream", rule)
                .hint("if the file is valid, decompress it first (gunzip) and read the result")
        }
        io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => {
            Error::malformed(path, "gzip stream", format!("is damaged ({e})")).hint("copy or download the file again")
        }
        _ => Error::io(path, "read", e),
    }
}

fn too_long(path: &Path, found: u64, limit: u64) -> Error {
    Error::too_large(path, "the text, unpacked, in bytes,", found, limit)
        .hint("keep large data as .npy or .safetensors, or raise max_bytes")
}

enum Source {
    Plain(BufReader<Opened>),
    Gzip(MultiGzDecoder<BufReader<Opened>>),
}

pub(crate) struct Capped {
    source: Source,
    left: u64,
    /// Makes the error for a file beyond the limits.
    past: io::ErrorKind,
}

impl Read for Capped {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = match &mut self.source {
            Source::Plain(r) => r.read(buf)?,
            Source::Gzip(r) => r.read(buf)?,
        };
        self.left = self.left.checked_sub(n as u64).ok_or(self.past)?;
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
        let (_, mut from) = open(named::open(&path).expect("opened"), u64::MAX).expect("read");
        let e = from.read_to_end(&mut text).expect_err("too much");
        assert!(text.len() as u64 <= EXPANSION.free);
        let e = read_error(&path, u64::MAX, e).to_string();
        assert!(
            e.contains("unpacks to more than 100 times its size (and more than 32 MiB)") && e.contains("gunzip"),
            "{e}"
        );
        let ample = Expansion { ratio: 2000, free: 0 };
        text.clear();
        let (_, mut from) = open_within(named::open(&path).expect("opened"), u64::MAX, ample).expect("read");
        from.read_to_end(&mut text).expect("read");
        assert_eq!(text.len(), 400 * line.len());
    }
}
