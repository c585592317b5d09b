//! Decodes WebP images, lossy and lossless, to 8-bit RGB.
//!
//! The container is checked before the decoder runs: all chunks are in the file, there is one image and no animation, and its sides are
//! those of the canvas. So nothing is allocated for sides that were not compared with the limit, and a truncated file is an error.

use super::read::{CURE, check_size};
use crate::error::{Error, Result};
use crate::expansion;
use image_webp::WebPDecoder;
use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// Bytes before the first chunk: "RIFF", the size of the rest, "WEBP".
const HEAD: usize = 12;

/// Pixels that a lossless image may have however few its bytes are.
const FREE_PIXELS: u64 = 1 << 23;

/// What the chunks of a file say.
#[derive(Default)]
struct Found {
    canvas: Option<(u64, u64)>,
    /// Sides of the image, and the bytes of its data.
    image: Option<(u64, u64, usize)>,
    lossy: bool,
}

/// Decodes the bytes of a file to `rgb` and returns width and height.
pub(super) fn decode(path: &Path, bytes: &[u8], rgb: &mut Vec<u8>) -> Result<(usize, usize)> {
    let malformed = |rule: String| Error::malformed(path, "WebP", rule).hint(CURE);
    let found = chunks(path, bytes)?;
    let Some((width, height, size)) = found.image else {
        return Err(malformed("it has no image".into()));
    };
    check_size(path, width, height)?;
    if let Some((w, h)) = found.canvas.filter(|canvas| *canvas != (width, height)) {
        return Err(malformed(format!("its canvas is {w} x {h}, and its image {width} x {height}")));
    }
    // Each macroblock of 16 by 16 pixels has a prediction mode, which takes more than a bit.
    let least = width.div_ceil(16) * height.div_ceil(16) / 8;
    if found.lossy && (size as u64) < least {
        return Err(malformed(format!(
            "{width} x {height} pixels take {least} bytes or more, and the image has {size}"
        )));
    }
    // Lossless images of one colour take a few bytes at any size. PNG files, which are compressed by deflate, never expand as much.
    let most = expansion::deflate(size as u64);
    if !found.lossy && width * height > FREE_PIXELS && 4 * width * height > most {
        return Err(malformed(format!(
            "{width} x {height} pixels in {size} bytes, which may hold {} at most",
            FREE_PIXELS.max(most / 4)
        )));
    }
    // The decoder is caught where it breaks down, since files are untrusted.
    let made = catch_unwind(AssertUnwindSafe(|| pixels(bytes, width, height, rgb)));
    match made {
        Ok(Ok(())) => Ok((width as usize, height as usize)),
        Ok(Err(rule)) => Err(malformed(rule)),
        Err(_) => Err(malformed("the decoder broke down on it".into())),
    }
}

fn pixels(bytes: &[u8], width: u64, height: u64, rgb: &mut Vec<u8>) -> std::result::Result<(), String> {
    let mut decoder = WebPDecoder::new(Cursor::new(bytes)).map_err(|e| e.to_string())?;
    let channels = if decoder.has_alpha() { 4 } else { 3 };
    let count = width as usize * height as usize;
    if decoder.output_buffer_size() != Some(channels * count) {
        return Err("its size differs from that of its canvas".into());
    }
    rgb.clear();
    rgb.resize(channels * count, 0);
    decoder.read_image(rgb).map_err(|e| e.to_string())?;
    if channels == 4 {
        // An alpha channel is dropped, as of a PNG.
        for pixel in 0..count {
            rgb.copy_within(4 * pixel..4 * pixel + 3, 3 * pixel);
        }
        rgb.truncate(3 * count);
    }
    Ok(())
}

/// Reads the headers of all chunks.
fn chunks(path: &Path, bytes: &[u8]) -> Result<Found> {
    let malformed = |rule: &str| Error::malformed(path, "WebP", rule).hint(CURE);
    let truncated = || malformed("the file is truncated");
    let size = u32_at(bytes, 4).ok_or_else(truncated)? as usize;
    let end = size.checked_add(8).filter(|end| *end <= bytes.len() && *end >= HEAD).ok_or_else(truncated)?;
    let (mut found, mut at) = (Found::default(), HEAD);
    while at < end {
        let header = bytes.get(at..end).and_then(|rest| rest.first_chunk::<8>()).ok_or_else(truncated)?;
        let len = u32::from_le_bytes([header[4], header[5], header[6], header[7]]) as usize;
        let data = bytes.get(at + 8..end).and_then(|rest| rest.get(..len)).ok_or_else(truncated)?;
        let image = match &header[..4] {
            b"ANIM" | b"ANMF" => {
                let error = Error::unsupported(path, "WebP", "it is an animation, and images are single pictures");
                return Err(
                    error.hint("extract a frame (libwebp: webpmux -get frame 1 FILE -o OUT), or leave the file out")
                );
            }
            b"VP8X" => {
                let side = |at: usize| Some(u64::from(u32_at(data, at)? & 0xff_ffff) + 1);
                // The height ends with the chunk, so it is read from a byte before.
                let height = u32_at(data, 6).map(|word| u64::from(word >> 8) + 1);
                found.canvas = Some((side(4).ok_or_else(truncated)?, height.ok_or_else(truncated)?));
                None
            }
            b"VP8 " => {
                let word = u32_at(data, 6).ok_or_else(truncated)?;
                found.lossy = true;
                Some((u64::from(word & 0x3fff), u64::from(word >> 16 & 0x3fff)))
            }
            b"VP8L" => {
                let word = u32_at(data, 1).ok_or_else(truncated)?;
                Some((u64::from(word & 0x3fff) + 1, u64::from(word >> 14 & 0x3fff) + 1))
            }
            _ => None,
        };
        if let Some((width, height)) = image {
            if found.image.is_some() {
                return Err(malformed("it has more than one image"));
            }
            if width == 0 || height == 0 {
                return Err(malformed("a side of its image is 0"));
            }
            found.image = Some((width, height, len));
        }
        at = at.saturating_add(8 + len + len % 2);
    }
    Ok(found)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk::<4>().map(|b| u32::from_le_bytes(*b))
}

#[cfg(test)]
#[path = "webp_tests.rs"]
mod tests;
