//! Bounds what compressed bytes decompress to, by the rules of their codecs. Decoders take the memory that a file declares before they
//! decompress.

/// The most bytes of a zstd block (RFC 8878, 3.1.1.2.4).
const ZSTD_BLOCK: u64 = 128 << 10;

/// Bytes that so many of deflate decompress to at most, with room for the framing: 1032 for one.
pub(crate) fn deflate(packed: u64) -> u64 {
    packed.saturating_mul(1032).saturating_add(1024)
}

/// Bytes that so many of Snappy decompress to at most: a copy of 64 bytes takes 3 (format_description.txt of Snappy, 2.2).
pub(crate) fn snappy(packed: u64) -> u64 {
    packed.saturating_mul(22)
}

/// Bytes that so many of LZ4 decompress to at most: a byte adds 255 to the length of a match (lz4_Block_format.md).
pub(crate) fn lz4(packed: u64) -> u64 {
    packed.saturating_mul(255)
}

/// Bytes that zstd frames decompress to at most (RFC 8878, 3.1.1), up to where they are damaged.
pub(crate) fn zstd(bytes: &[u8]) -> u64 {
    let mut most = 0;
    // The decoder names the damage.
    let _: Option<()> = blocks(bytes, &mut most);
    most
}

/// Adds what each block holds; `None` for a damaged frame.
fn blocks(mut bytes: &[u8], most: &mut u64) -> Option<()> {
    while !bytes.is_empty() {
        let magic = u32::from_le_bytes(*take(&mut bytes, 4)?.first_chunk()?);
        if magic & !0xF == 0x184D_2A50 {
            let size = u32::from_le_bytes(*take(&mut bytes, 4)?.first_chunk()?);
            take(&mut bytes, size as usize)?;
            continue;
        }
        let [head] = *take(&mut bytes, 1)?.first_chunk()?;
        let single = head & 0x20 != 0;
        let window = usize::from(!single);
        let dictionary = [0, 1, 2, 4][usize::from(head & 3)];
        let content = [usize::from(single), 2, 4, 8][usize::from(head >> 6)];
        take(&mut bytes, window + dictionary + content)?;
        loop {
            let [a, b, c] = *take(&mut bytes, 3)?.first_chunk()?;
            let block = u32::from_le_bytes([a, b, c, 0]);
            let (size, kind) = ((block >> 3) as usize, (block >> 1) & 3);
            // Raw bytes, one byte that is repeated, or a compressed block.
            *most += if kind < 2 { ZSTD_BLOCK.min(size as u64) } else { ZSTD_BLOCK };
            take(&mut bytes, if kind == 1 { 1 } else { size })?;
            if block & 1 == 1 {
                break;
            }
        }
        take(&mut bytes, if head & 4 != 0 { 4 } else { 0 })?;
    }
    Some(())
}

fn take<'a>(from: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let (first, rest) = from.split_at_checked(count)?;
    *from = rest;
    Some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zstd_frames_hold_what_their_blocks_do() {
        let text = vec![0; (5 << 20) + 1000];
        let noise: Vec<u8> =
            (0..300_000u32).map(|k| perilune_core::philox::philox4x32([k, 0, 0, 0], [1, 0])[0] as u8).collect();
        for (text, level) in [(&text, -5), (&text, 1), (&text, 19), (&noise, 1), (&noise, 9)] {
            // By itself, and as a frame of a stream, behind one that is skipped.
            let bulk = ::zstd::bulk::compress(text, level).expect("compressed");
            let stream = ::zstd::stream::encode_all(&text[..], level).expect("compressed");
            for frame in [bulk, [&[0x5A, 0x2A, 0x4D, 0x18, 2, 0, 0, 0, 9, 9][..], &stream].concat()] {
                let most = zstd(&frame);
                assert!(most >= text.len() as u64 && most < text.len() as u64 + 2 * ZSTD_BLOCK, "{level}: {most}");
                assert_eq!(zstd(&[&frame[..], &frame].concat()), 2 * most);
                assert!((0..frame.len()).step_by(7).all(|end| zstd(&frame[..end]) <= most));
            }
        }
    }
}
