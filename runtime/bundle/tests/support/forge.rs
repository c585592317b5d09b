//! Writes bundles that no packer writes: any tar header, any block of Zstandard, and checks that are right.
//!
//! It shares no code with the crate, so it tests the documented format as well.
#![allow(dead_code)] // each test binary uses a part of it

/// Bytes of a tar block.
const BLOCK: usize = 512;
/// The end of a tar file.
pub const END: [u8; 2 * BLOCK] = [0; 2 * BLOCK];
/// Bytes of a block of Zstandard.
const ZSTD_BLOCK: usize = 128 << 10;

/// A header of tar, to be changed and then passed to [`entry`].
pub type Header = [u8; BLOCK];

/// Fields of a header: first byte and length.
pub const MODE: (usize, usize) = (100, 8);
pub const UID: (usize, usize) = (108, 8);
pub const SIZE: (usize, usize) = (124, 12);
pub const MTIME: (usize, usize) = (136, 12);
pub const KIND: usize = 156;
pub const LINK: usize = 157;

/// Writes a number in octal digits and a zero byte.
pub fn octal(header: &mut Header, (at, len): (usize, usize), value: u64) {
    let digits = format!("{value:0width$o}", width = len - 1);
    header[at..at + len - 1].copy_from_slice(&digits.as_bytes()[digits.len() + 1 - len..]);
    header[at + len - 1] = 0;
}

/// Returns the header of a plain file, as the packer writes it.
pub fn header(name: &[u8], len: u64) -> Header {
    let mut out = [0; BLOCK];
    out[..name.len()].copy_from_slice(name);
    octal(&mut out, MODE, 0o644);
    octal(&mut out, UID, 0);
    octal(&mut out, (116, 8), 0);
    if len < 1 << 33 {
        octal(&mut out, SIZE, len);
    } else {
        // Base 256 of GNU tar.
        out[SIZE.0] = 0x80;
        out[SIZE.0 + 4..SIZE.0 + 12].copy_from_slice(&len.to_be_bytes());
    }
    octal(&mut out, MTIME, 0);
    out[KIND] = b'0';
    out[257..265].copy_from_slice(b"ustar\x0000");
    summed(out)
}

/// Returns the header with its checksum.
pub fn summed(mut header: Header) -> Header {
    header[148..156].fill(b' ');
    let sum = header.iter().map(|b| u64::from(*b)).sum();
    octal(&mut header, (148, 8), sum);
    header
}

/// Returns an entry with its padding.
pub fn entry(header: Header, content: &[u8]) -> Vec<u8> {
    let mut out = summed(header).to_vec();
    out.extend(content);
    out.resize(out.len().next_multiple_of(BLOCK), 0);
    out
}

/// Returns the entry of a plain file.
pub fn plain(name: &str, content: &[u8]) -> Vec<u8> {
    entry(header(name.as_bytes(), content.len() as u64), content)
}

/// A frame of Zstandard whose blocks are stored or are one repeated byte (RFC 8878, 3.1.1).
pub struct Frame(Vec<u8>);

impl Frame {
    /// Begins a frame with a window of 2^`window` bytes.
    pub fn new(window: u8) -> Frame {
        Frame([&0xFD2F_B528u32.to_le_bytes()[..], &[0, (window - 10) << 3]].concat())
    }

    fn block(&mut self, kind: u32, len: usize, content: &[u8]) {
        self.0.extend(&(kind << 1 | (len as u32) << 3).to_le_bytes()[..3]);
        self.0.extend(content);
    }

    pub fn stored(mut self, bytes: &[u8]) -> Frame {
        for part in bytes.chunks(ZSTD_BLOCK) {
            self.block(0, part.len(), part);
        }
        self
    }

    /// Adds zeros, 4 bytes of the frame for 128 KiB.
    pub fn zeros(mut self, len: u64) -> Frame {
        let mut left = len;
        while left > 0 {
            let n = left.min(ZSTD_BLOCK as u64);
            self.block(1, n as usize, &[0]);
            left -= n;
        }
        self
    }

    pub fn finish(mut self) -> Vec<u8> {
        // An empty last block.
        self.0.extend([1, 0, 0]);
        self.0
    }
}

/// Returns the record of a block of the checks: 16 bytes of its hash, the sum of its bytes, and the sum weighted by their places.
fn record(block: &[u8]) -> Vec<u8> {
    let (mut sum, mut weighted) = (0u32, 0u32);
    for (k, byte) in (1u32..).zip(block) {
        sum += u32::from(*byte);
        weighted += k * u32::from(*byte);
    }
    [&blake3::hash(block).as_bytes()[..16], &sum.to_le_bytes(), &weighted.to_le_bytes()].concat()
}

/// Returns a content with the checks that follow it.
pub fn with_checks(content: &[u8]) -> Vec<u8> {
    let records = |bytes: &[u8]| bytes.chunks(4096).flat_map(record).collect::<Vec<u8>>();
    let mut level = if content.is_empty() { record(b"") } else { records(content) };
    let mut checks = Vec::new();
    while level.len() > 24 {
        checks.extend(&level);
        level = records(&level);
    }
    let footer = [b"PLBcheck", &(content.len() as u64).to_le_bytes()[..], &level].concat();
    checks.extend([&footer[..], &footer].concat());
    let mut out = content.to_vec();
    out.extend(0x184D_2A5Bu32.to_le_bytes());
    out.extend((checks.len() as u32).to_le_bytes());
    out.extend(checks);
    out
}

/// Returns the bundle of these bytes of tar.
pub fn packed(tar: &[u8]) -> Vec<u8> {
    with_checks(&Frame::new(17).stored(tar).finish())
}

/// Returns the bundle of these entries.
pub fn archive(parts: &[&[u8]]) -> Vec<u8> {
    packed(&[parts.concat(), END.to_vec()].concat())
}
