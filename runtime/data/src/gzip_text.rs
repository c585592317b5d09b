//! Decompresses text files that may be gzipped: detected by their first two bytes, bounded in size.
//!
//! Several gzip members one after the other are one file, as for `zcat`. Other compressions are not read.

use crate::error::{Error, Result};
use flate2::bufread::MultiGzDecoder;
use perilune_policy::Opened;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// A reader of the plain or unpacked bytes of a file, and its path. Reading fails with FileTooLarge beyond `limit` bytes.
pub(crate) fn open(file: Opened, limit: u64) -> Result<(PathBuf, BufReader<Capped>)> {
    let (path, len) = (file.path().to_path_buf(), file.len());
    let mut file = BufReader::with_capacity(1 << 16, file);
    let head = file.fill_buf().map_err(|e| Error::io(&path, "read", e))?;
    let source = if head.starts_with(&[0x1f, 0x8b]) {
        Source::Gzip(MultiGzDecoder::new(file))
    } else if len > limit {
        return Err(too_long(&path, len, limit));
    } else {
        Source::Plain(file)
    };
    Ok((path, BufReader::with_capacity(1 << 16, Capped { source, left: limit })))
}

/// Turns a failed read of [`open`]'s reader into the crate's error.
pub(crate) fn read_error(path: &Path, limit: u64, e: io::Error) -> Error {
    match e.kind() {
        io::ErrorKind::FileTooLarge => too_long(path, limit.saturating_add(1), limit),
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
}

impl Read for Capped {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = match &mut self.source {
            Source::Plain(r) => r.read(buf)?,
            Source::Gzip(r) => r.read(buf)?,
        };
        self.left = self.left.checked_sub(n as u64).ok_or(io::ErrorKind::FileTooLarge)?;
        Ok(n)
    }
}
