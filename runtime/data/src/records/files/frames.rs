//! Writes and reads seekable zstd: frames of 2 MiB of text, with their table at the end, in the seekable format of the zstd project.
//!
//! Each frame has a checksum. `zstd -d` reads such files too.

use std::io::{self, Write};

/// Bytes of text in each frame but the last.
pub(super) const FRAME: usize = 2 << 20;
/// The level of compression: the fastest, since files are transcoded while a recipe waits.
const LEVEL: i32 = 1;
const SKIPPABLE: [u8; 4] = 0x184D_2A5Eu32.to_le_bytes();
const SEEKABLE: [u8; 4] = 0x8F92_EAB1u32.to_le_bytes();
/// The number of frames, a descriptor and the magic word.
const FOOTER: u64 = 9;
const HEADER: u64 = 8;

/// Where frames are.
#[derive(Debug, Default)]
pub(super) struct Table {
    /// Where each frame ends.
    pub ends: Vec<u64>,
    /// Bytes of text.
    pub len: u64,
}

impl Table {
    /// Where a frame begins, and its bytes.
    pub fn frame(&self, number: usize) -> Option<(u64, u64)> {
        let end = *self.ends.get(number)?;
        let start = if number == 0 { 0 } else { self.ends[number - 1] };
        Some((start, end - start))
    }

    /// Bytes of text in a frame.
    pub fn text(&self, number: usize) -> usize {
        (self.len.saturating_sub(number as u64 * FRAME as u64)).min(FRAME as u64) as usize
    }

    fn push(&mut self, packed: u64, text: u64) {
        self.ends.push(self.ends.last().copied().unwrap_or(0) + packed);
        self.len += text;
    }
}

/// Compresses text to frames.
pub(super) struct Writer<W> {
    to: W,
    text: Vec<u8>,
    packer: zstd::bulk::Compressor<'static>,
    pub table: Table,
}

impl<W: Write> Writer<W> {
    pub fn new(to: W) -> io::Result<Writer<W>> {
        let mut packer = zstd::bulk::Compressor::new(LEVEL)?;
        packer.include_checksum(true)?;
        Ok(Writer { to, text: Vec::with_capacity(FRAME), packer, table: Table::default() })
    }

    pub fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(FRAME - self.text.len()));
            self.text.extend_from_slice(now);
            bytes = later;
            if self.text.len() == FRAME {
                self.end_frame()?;
            }
        }
        Ok(())
    }

    fn end_frame(&mut self) -> io::Result<()> {
        let packed = self.packer.compress(&self.text)?;
        self.to.write_all(&packed)?;
        self.table.push(packed.len() as u64, self.text.len() as u64);
        self.text.clear();
        Ok(())
    }

    /// Writes the last frame and the table.
    pub fn finish(mut self) -> io::Result<(W, Table)> {
        if !self.text.is_empty() {
            self.end_frame()?;
        }
        let count = self.table.ends.len();
        let mut out = Vec::with_capacity(count * 8 + 17);
        out.extend_from_slice(&SKIPPABLE);
        let too_many = |_| io::Error::other("too many frames");
        out.extend_from_slice(&u32::try_from(count * 8 + FOOTER as usize).map_err(too_many)?.to_le_bytes());
        for number in 0..count {
            let (_, packed) = self.table.frame(number).unwrap_or_default();
            out.extend_from_slice(&u32::try_from(packed).map_err(too_many)?.to_le_bytes());
            out.extend_from_slice(&(self.table.text(number) as u32).to_le_bytes());
        }
        out.extend_from_slice(&(count as u32).to_le_bytes());
        out.push(0);
        out.extend_from_slice(&SEEKABLE);
        self.to.write_all(&out)?;
        Ok((self.to, self.table))
    }
}

/// Reads the table at the end of a file of `len` bytes. `None` if it is no file of the [`Writer`].
pub(super) fn table(
    len: u64,
    read_at: &mut dyn FnMut(u64, &mut [u8]) -> crate::Result<()>,
) -> crate::Result<Option<Table>> {
    if len < FOOTER + HEADER {
        return Ok(None);
    }
    let mut footer = [0; FOOTER as usize];
    read_at(len - FOOTER, &mut footer)?;
    let [a, b, c, d, 0, magic @ ..] = footer else { return Ok(None) };
    let bytes = u64::from(u32::from_le_bytes([a, b, c, d])) * 8;
    if magic != SEEKABLE || bytes > len - FOOTER - HEADER {
        return Ok(None);
    }
    let mut entries = vec![0; bytes as usize];
    read_at(len - FOOTER - bytes, &mut entries)?;
    let mut out = Table::default();
    for entry in entries.chunks_exact(8) {
        let [a, b, c, d, text @ ..] = entry else { return Ok(None) };
        let (packed, text) =
            (u32::from_le_bytes([*a, *b, *c, *d]), text.first_chunk().map_or(0, |t| u32::from_le_bytes(*t)));
        // All frames but the last are whole.
        if text == 0 || text as usize > FRAME || out.len % FRAME as u64 != 0 {
            return Ok(None);
        }
        out.push(u64::from(packed), u64::from(text));
    }
    let packed = out.ends.last().copied().unwrap_or(0);
    Ok((packed + HEADER + bytes + FOOTER == len).then_some(out))
}

/// Decompresses a frame, which must have so many bytes of text.
pub(super) fn decompress(packed: &[u8], text: usize) -> io::Result<Vec<u8>> {
    let out = zstd::bulk::decompress(packed, text)?;
    match out.len() == text {
        true => Ok(out),
        false => Err(io::Error::other(format!("{} bytes, where the table says {text}", out.len()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use perilune_core::philox::philox4x32;

    #[test]
    fn frames_give_back_their_text() {
        for len in [0, 1, FRAME - 1, FRAME, FRAME + 1, 2 * FRAME + 77] {
            let text: Vec<u8> = (0..len).map(|k| philox4x32([k as u32 / 3, 0, 0, 0], [1, 0])[0] as u8 & 0x3F).collect();
            let mut writer = Writer::new(Vec::new()).expect("a writer");
            text.chunks(100_003).for_each(|part| writer.write(part).expect("written"));
            let (file, made) = writer.finish().expect("finished");
            let mut read = |at: u64, to: &mut [u8]| {
                to.copy_from_slice(&file[at as usize..at as usize + to.len()]);
                Ok(())
            };
            let found = table(file.len() as u64, &mut read).expect("read").expect("a table");
            assert_eq!((found.len, &found.ends), (len as u64, &made.ends));
            let mut back = Vec::new();
            for number in 0..found.ends.len() {
                let (at, packed) = found.frame(number).expect("a frame");
                back.extend(decompress(&file[at as usize..(at + packed) as usize], found.text(number)).expect("text"));
            }
            assert!(back == text, "{len}");
            assert!(zstd::stream::decode_all(&file[..]).expect("zstd -d reads it") == text);
            // A frame with a wrong byte is refused by its checksum or its structure.
            if len > 0 {
                let mut bad = file.clone();
                bad[20.min(found.ends[0] as usize - 1)] ^= 4;
                assert!(decompress(&bad[..found.ends[0] as usize], found.text(0)).is_err());
            }
        }
    }

    #[test]
    fn other_tables_are_not_taken() {
        let mut writer = Writer::new(Vec::new()).expect("a writer");
        writer.write(&[7; 5000]).expect("written");
        let (good, _) = writer.finish().expect("finished");
        for at in 0..good.len() {
            for byte in [0, 1, 0x7F, 0xFF] {
                let mut bad = good.clone();
                bad[at] = byte;
                let mut read = |at: u64, to: &mut [u8]| {
                    to.copy_from_slice(&bad[at as usize..at as usize + to.len()]);
                    Ok(())
                };
                let found = table(bad.len() as u64, &mut read).expect("read");
                assert!(found.is_none_or(|t| t.len <= FRAME as u64 && t.ends.len() <= 1));
            }
            let cut = &good[..at];
            let mut read = |at: u64, to: &mut [u8]| {
                to.copy_from_slice(&cut[at as usize..at as usize + to.len()]);
                Ok(())
            };
            assert!(table(at as u64, &mut read).expect("read").is_none());
        }
    }
}
