//! Bounds what the pages of a Parquet column decompress to, before the decoder takes memory for them.
//!
//! The decoder of the `parquet` crate takes the memory that a page's header declares and then decompresses the page. So a large page is
//! compared here with what its bytes can decompress to by the rules of its codec. A gzip page is read to its end, whatever its header
//! declares, so it is inflated once more without keeping the bytes.

use super::footer::Compact;
use crate::expansion;
use ::parquet::basic::Compression;
use ::parquet::errors::ParquetError;
use flate2::read::MultiGzDecoder;
use std::io::{self, Read};

/// Bytes that a page may declare without a comparison. Writers make pages of about 1 MiB.
const SMALL: u64 = 16 << 20;
/// Bytes that are first read of a page to parse its header, which is longer only if statistics are.
const HEADER: u64 = 256;

type Result<T> = std::result::Result<T, ParquetError>;

/// Reads bytes at a position of a column chunk.
type ReadAt<'a> = &'a dyn Fn(u64, u64) -> Result<Vec<u8>>;

/// What a page header says.
struct Page {
    inflated: u64,
    packed: u64,
    /// Bytes of levels, which are not compressed.
    levels: u64,
    compressed: bool,
}

/// Checks that no page of a column chunk of `length` bytes declares more than its bytes can decompress to, and that no gzip page inflates to
/// more than it declares.
pub(super) fn check(codec: Compression, length: u64, read: ReadAt<'_>) -> Result<()> {
    let (mut at, mut number) = (0, 0);
    while at < length {
        let (page, size) =
            header(at, length, read)?.ok_or_else(|| rule(format!("page {number} has no readable header")))?;
        at += size;
        if page.packed > length - at {
            return Err(rule(format!("page {number} ends behind its column")));
        }
        if page.compressed {
            let packed = page.packed.checked_sub(page.levels);
            let packed = packed.ok_or_else(|| rule(format!("page {number} has fewer bytes than its levels")))?;
            let room = page.inflated.saturating_sub(page.levels);
            let start = at + page.levels;
            let bytes = || read(start, packed);
            expands(codec, room, packed, &bytes).map_err(|e| match e {
                ParquetError::General(what) => rule(format!("page {number} {what}")),
                e => e,
            })?;
        }
        at += page.packed;
        number += 1;
    }
    Ok(())
}

fn rule(text: String) -> ParquetError {
    ParquetError::General(text)
}

/// Compares the `room` bytes that a page declares with what its `packed` bytes decompress to.
fn expands(codec: Compression, room: u64, packed: u64, bytes: &dyn Fn() -> Result<Vec<u8>>) -> Result<()> {
    if matches!(codec, Compression::GZIP(_)) {
        let bytes = bytes()?;
        let mut limited = MultiGzDecoder::new(&bytes[..]).take(room.saturating_add(1));
        // A damaged stream is an error of the decoder, which names it.
        if io::copy(&mut limited, &mut io::sink()).is_ok_and(|inflated| inflated > room) {
            return Err(rule(format!("inflates to more than the {room} bytes that it declares")));
        }
    }
    let most = match codec {
        _ if room <= SMALL => return Ok(()),
        Compression::GZIP(_) => expansion::deflate(packed),
        Compression::SNAPPY => expansion::snappy(packed),
        Compression::LZ4 | Compression::LZ4_RAW => expansion::lz4(packed),
        Compression::ZSTD(_) => expansion::zstd(&bytes()?),
        // Without compression no memory is taken, and other codecs have no decoder here.
        _ => return Ok(()),
    };
    match room > most {
        true => Err(rule(format!("declares {room} bytes; its {packed} bytes decompress to {most} at most"))),
        false => Ok(()),
    }
}

/// The header of the page at a position, and its bytes. `None` if it is damaged.
fn header(at: u64, length: u64, read: ReadAt<'_>) -> Result<Option<(Page, u64)>> {
    let mut size = HEADER;
    loop {
        let bytes = read(at, size.min(length - at))?;
        let mut from = Compact(&bytes);
        if let Some(page) = parse(&mut from) {
            return Ok(Some((page, (bytes.len() - from.0.len()) as u64)));
        }
        if size >= length - at {
            return Ok(None);
        }
        size *= 16;
    }
}

fn parse(from: &mut Compact<'_>) -> Option<Page> {
    let mut page = Page { inflated: 0, packed: 0, levels: 0, compressed: true };
    let mut id = 0;
    while let Some(kind) = from.field(&mut id)? {
        match (id, kind) {
            (2, 5) => page.inflated = u64::try_from(from.zigzag()?).ok()?,
            (3, 5) => page.packed = u64::try_from(from.zigzag()?).ok()?,
            // The header of a data page of version 2.
            (8, 12) => {
                let mut inner = 0;
                while let Some(kind) = from.field(&mut inner)? {
                    match (inner, kind) {
                        (5 | 6, 5) => page.levels = page.levels.checked_add(u64::try_from(from.zigzag()?).ok()?)?,
                        (7, kind) if kind <= 2 => page.compressed = kind == 1,
                        (_, kind) => from.skip(kind, 0)?,
                    }
                }
            }
            (_, kind) => from.skip(kind, 0)?,
        }
    }
    Some(page)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn checked(codec: Compression, chunk: &[u8]) -> std::result::Result<(), String> {
        let read = |at: u64, size: u64| Ok(chunk[at as usize..(at + size) as usize].to_vec());
        check(codec, chunk.len() as u64, &read).map_err(|e| match e {
            ParquetError::General(text) => text,
            e => e.to_string(),
        })
    }

    fn varint(mut n: u64, to: &mut Vec<u8>) {
        while n >= 0x80 {
            to.push(n as u8 | 0x80);
            n >>= 7;
        }
        to.push(n as u8);
    }

    /// A page of version 1 that declares a size.
    fn page(packed: &[u8], declared: u64) -> Vec<u8> {
        let mut out = vec![0x15, 0, 0x15];
        varint(declared * 2, &mut out);
        out.push(0x15);
        varint(packed.len() as u64 * 2, &mut out);
        out.push(0);
        out.extend_from_slice(packed);
        out
    }

    fn gzip_of(text: &[u8]) -> Vec<u8> {
        let mut to = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        to.write_all(text).expect("written");
        to.finish().expect("finished")
    }

    #[test]
    fn gzip_pages_inflate_to_what_they_declare() {
        let codec = Compression::GZIP(Default::default());
        let good = [page(&gzip_of(b"abcdef"), 6), page(&gzip_of(&[7; 60]), 60)].concat();
        assert_eq!(checked(codec, &good), Ok(()));
        let bomb = [page(&gzip_of(b"abcdef"), 6), page(&gzip_of(&[7; 10_000]), 60)].concat();
        assert_eq!(checked(codec, &bomb), Err("page 1 inflates to more than the 60 bytes that it declares".into()));
        for end in 1..good.len() {
            let whole = end == page(&gzip_of(b"abcdef"), 6).len();
            assert_eq!(checked(codec, &good[..end]).is_ok(), whole, "{end}");
        }
    }

    #[test]
    fn large_pages_declare_what_their_codec_allows() {
        let size = SMALL + 1;
        for (codec, ratio) in [(Compression::SNAPPY, 22), (Compression::LZ4, 255), (Compression::LZ4_RAW, 255)] {
            let enough = vec![0; size.div_ceil(ratio) as usize];
            assert_eq!(checked(codec, &page(&enough, size)), Ok(()), "{codec}");
            let few = &enough[1..];
            let most = few.len() as u64 * ratio;
            let says = format!("page 0 declares {size} bytes; its {} bytes decompress to {most} at most", few.len());
            assert_eq!(checked(codec, &page(few, size)), Err(says), "{codec}");
            assert_eq!(checked(codec, &page(&[0], SMALL)), Ok(()), "{codec}");
            assert!(checked(codec, &page(&[], size)).is_err(), "{codec}");
        }
        let gzip = Compression::GZIP(Default::default());
        assert!(checked(gzip, &page(&[], size)).is_err() && checked(gzip, &page(&gzip_of(b"a"), size)).is_err());
        assert_eq!(checked(Compression::UNCOMPRESSED, &page(&[0], size)), Ok(()));
    }

    #[test]
    fn large_zstd_pages_declare_what_their_blocks_hold() {
        let codec = Compression::ZSTD(Default::default());
        let size = SMALL + 1000;
        let frame = zstd::bulk::compress(&vec![0; size as usize], 1).expect("compressed");
        assert_eq!(checked(codec, &page(&frame, size)), Ok(()));
        let says = format!("page 0 declares {} bytes; its {} bytes decompress to", 1 << 30, frame.len());
        assert!(checked(codec, &page(&frame, 1 << 30)).expect_err("refused").starts_with(&says));
    }

    #[test]
    fn levels_are_within_their_page() {
        // A page of version 2 with levels of so many bytes, of 6.
        let page = |levels: u64| {
            let mut out = vec![0x15, 6, 0x15, 12, 0x15, 12, 0x5C, 0x55];
            varint(levels * 2, &mut out);
            out.extend_from_slice(&[0, 0]);
            out.extend_from_slice(b"abcdef");
            out
        };
        assert_eq!(checked(Compression::SNAPPY, &page(6)), Ok(()));
        for levels in [7, u64::from(u32::MAX), i64::MAX as u64] {
            let says = Err("page 0 has fewer bytes than its levels".to_string());
            assert_eq!(checked(Compression::SNAPPY, &page(levels)), says, "{levels}");
        }
    }

    #[test]
    fn headers_may_be_long() {
        // Field 5 is a struct with bytes in field 1, as statistics are.
        let long = |size: u64| {
            let mut out = vec![0x15, 0, 0x15, 12, 0x15, 12, 0x2C, 0x18];
            varint(size, &mut out);
            out.resize(out.len() + size as usize, 1);
            out.extend_from_slice(&[0, 0]);
            out.extend_from_slice(b"abcdef");
            out
        };
        for size in [0, 200, 300, 5000, 100_000] {
            assert_eq!(checked(Compression::SNAPPY, &[long(size), long(3)].concat()), Ok(()), "{size}");
        }
    }
}
