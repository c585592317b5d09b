//! Writes and reads the archive of a bundle: a tar file (POSIX ustar) in one frame of Zstandard.
//!
//! An entry has a name, a length and nothing else: it is a regular file of mode 0644 of user 0, from 1970. A reader accepts the
//! header that the writer makes for that name and length, bit for bit, and no other. So links, devices, permissions, extended
//! headers and sparse files are refused without a rule for each, and the same entries give the same bytes.

use crate::error::{Error, Result, refused};
use crate::name;
use std::io::{BufRead, BufReader, Read, Write};
use zstd::stream::{read::Decoder, write::Encoder};

/// Bytes of a tar block.
const BLOCK: usize = 512;
/// The level of compression. Its window has 2^22 bytes.
const LEVEL: i32 = 12;
/// The largest window of a reader, as a power of two.
const WINDOW: u32 = 23;

/// Returns the header of an entry.
pub(crate) fn header(entry: &str, len: u64) -> Result<tar::Header> {
    let mut header = tar::Header::new_ustar();
    header.set_path(entry).map_err(|e| Error::Usage(format!("the name {entry:?}: {e}")))?;
    header.set_entry_type(tar::EntryType::Regular);
    header.set_size(len);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_cksum();
    Ok(header)
}

fn padding(len: u64) -> usize {
    (BLOCK - (len % BLOCK as u64) as usize) % BLOCK
}

/// Writes an archive.
pub(crate) struct Writer<W: Write> {
    to: Encoder<'static, W>,
}

impl<W: Write> Writer<W> {
    pub fn new(to: W) -> Result<Writer<W>> {
        let to = Encoder::new(to, LEVEL).map_err(failed)?;
        Ok(Writer { to })
    }

    /// Appends an entry of `len` bytes.
    ///
    /// # Errors
    /// `from` has another length or cannot be read, or nothing can be written.
    pub fn append(&mut self, entry: &str, len: u64, from: &mut dyn Read) -> Result<()> {
        name::check(entry)?;
        self.to.write_all(header(entry, len)?.as_bytes()).map_err(failed)?;
        let n = std::io::copy(&mut from.take(len), &mut self.to).map_err(failed)?;
        let more = from.read(&mut [0]).map_err(failed)?;
        if n != len || more != 0 {
            return Err(Error::Usage(format!("{entry}: its length changed while it was packed")));
        }
        self.to.write_all(&[0; BLOCK][..padding(len)]).map_err(failed)
    }

    /// Ends the archive, and returns what was written to.
    pub fn finish(mut self) -> Result<W> {
        self.to.write_all(&[0; 2 * BLOCK]).map_err(failed)?;
        self.to.finish().map_err(failed)
    }
}

/// The path is added by the caller, which knows it.
fn failed(e: std::io::Error) -> Error {
    Error::Usage(format!("cannot write the bundle: {e}"))
}

/// Reads an archive, an entry after the other.
pub(crate) struct Reader<R: BufRead> {
    from: Decoder<'static, R>,
    /// Bytes that the archive may still have.
    left: u64,
}

impl<R: Read> Reader<BufReader<R>> {
    /// `most`: the bytes that the archive may have, unpacked.
    pub fn new(from: R, most: u64) -> Result<Reader<BufReader<R>>> {
        let mut from = Decoder::with_buffer(BufReader::new(from)).map_err(broken)?.single_frame();
        from.window_log_max(WINDOW).map_err(broken)?;
        Ok(Reader { from, left: most })
    }
}

impl<R: BufRead> Reader<R> {
    fn block(&mut self) -> Result<[u8; BLOCK]> {
        let mut block = [0; BLOCK];
        self.left = match self.left.checked_sub(BLOCK as u64) {
            Some(left) => left,
            None => return too_large(),
        };
        self.from.read_exact(&mut block).map_err(broken)?;
        Ok(block)
    }

    /// Returns the name and length of the next entry; `None` after the last, when the rest has been checked.
    pub fn next(&mut self) -> Result<Option<(String, u64)>> {
        let block = self.block()?;
        if block == [0; BLOCK] {
            if self.block()? != [0; BLOCK] {
                return refused("the archive: one empty block is not its end");
            }
            return match self.from.read(&mut [0]).map_err(broken)? {
                0 => Ok(None),
                _ => refused("the archive: something follows its end"),
            };
        }
        let found = tar::Header::from_byte_slice(&block);
        let entry = found.path_bytes();
        let entry =
            std::str::from_utf8(&entry).map_err(|_| Error::Refused("the name of an entry is no UTF-8".into()))?;
        name::check(entry)?;
        let len = found.entry_size().map_err(|e| Error::Refused(format!("{entry}: its length is unreadable: {e}")))?;
        let expected = header(entry, len).map_err(|e| Error::Refused(e.to_string()))?;
        if expected.as_bytes() != &block {
            return refused(format!("{entry}: its header is not that of a plain file of {len} bytes"));
        }
        self.left = match self.left.checked_sub(len) {
            Some(left) => left,
            None => return too_large(),
        };
        Ok(Some((entry.to_string(), len)))
    }

    /// Copies the content of the entry whose length [`Reader::next`] returned.
    pub fn content(&mut self, len: u64, mut to: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let mut left = len;
        let mut buffer = vec![0; 1 << 16];
        while left > 0 {
            let n = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
            let n = self.from.read(&mut buffer[..n]).map_err(broken)?;
            if n == 0 {
                return refused("the archive ends inside an entry");
            }
            to(&buffer[..n])?;
            left -= n as u64;
        }
        let padding = padding(len);
        let mut rest = [0; BLOCK];
        self.from.read_exact(&mut rest[..padding]).map_err(broken)?;
        if rest != [0; BLOCK] {
            return refused("the archive: an entry is padded with other bytes than zeros");
        }
        Ok(())
    }

    /// Checks that nothing follows the frame, after the last entry.
    pub fn finish(self) -> Result<()> {
        let mut rest = self.from.finish();
        match rest.fill_buf().map_err(broken)?.is_empty() {
            true => Ok(()),
            false => refused("something follows the archive"),
        }
    }
}

fn too_large<T>() -> Result<T> {
    refused("the archive unpacks to more than its size allows")
}

fn broken(e: std::io::Error) -> Error {
    Error::Refused(format!("the archive cannot be unpacked: {e}"))
}
