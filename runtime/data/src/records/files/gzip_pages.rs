//! Bounds what the gzip pages of a Parquet column inflate to, before the decoder inflates them.
//!
//! The decoder of the `parquet` crate reads a gzip page to its end, whatever size its header declares; other codecs stop at that size. So
//! the pages are inflated once more here, without keeping the bytes.

use super::footer::Compact;
use flate2::read::MultiGzDecoder;
use std::io::{self, Read};

/// What a page header says.
struct Page {
    inflated: u64,
    packed: u64,
    /// Bytes of levels, which are not compressed.
    levels: u64,
    compressed: bool,
}

/// Checks that no page of a column chunk inflates beyond the size that its header declares. `Err` has the rule.
pub(super) fn check(chunk: &[u8]) -> Result<(), String> {
    let (mut rest, mut number) = (chunk, 0);
    while !rest.is_empty() {
        let mut from = Compact(rest);
        let page = header(&mut from).ok_or_else(|| format!("page {number} has no readable header"))?;
        let size = usize::try_from(page.packed).ok();
        let data =
            size.and_then(|size| from.0.get(..size)).ok_or_else(|| format!("page {number} ends behind its column"))?;
        rest = &from.0[data.len()..];
        let room = page.inflated.saturating_sub(page.levels);
        let packed = usize::try_from(page.levels).ok().and_then(|levels| data.get(levels..)).unwrap_or_default();
        if page.compressed && !packed.is_empty() {
            let mut limited = MultiGzDecoder::new(packed).take(room + 1);
            // A damaged stream is an error of the decoder, which names it.
            if io::copy(&mut limited, &mut io::sink()).is_ok_and(|bytes| bytes > room) {
                return Err(format!("page {number} inflates to more than the {room} bytes that it declares"));
            }
        }
        number += 1;
    }
    Ok(())
}

fn header(from: &mut Compact<'_>) -> Option<Page> {
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

    /// A page of version 1 that declares a size.
    fn page(text: &[u8], declared: u8) -> Vec<u8> {
        let mut to = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        to.write_all(text).expect("written");
        let packed = to.finish().expect("finished");
        assert!(packed.len() < 64 && declared < 64);
        let mut out = vec![0x15, 0, 0x15, declared * 2, 0x15, packed.len() as u8 * 2, 0];
        out.extend_from_slice(&packed);
        out
    }

    #[test]
    fn pages_inflate_to_what_they_declare() {
        let good = [page(b"abcdef", 6), page(&[7; 60], 60)].concat();
        assert_eq!(check(&good), Ok(()));
        let bomb = [page(b"abcdef", 6), page(&[7; 10_000], 60)].concat();
        assert_eq!(check(&bomb), Err("page 1 inflates to more than the 60 bytes that it declares".into()));
        for end in 1..good.len() {
            let whole = end == page(b"abcdef", 6).len();
            assert_eq!(check(&good[..end]).is_ok(), whole, "{end}");
        }
    }
}
