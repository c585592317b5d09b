//! Reads and writes PNG images as tensors of shape {H, W, C}.
//!
//! Reading always returns u8: palettes become colours, 1 to 4 bits are scaled to 8, 16 bits keep their
//! high 8, and a transparent colour becomes an alpha channel. The size is checked against a limit and against
//! the maximum expansion of the file's bytes before a pixel is allocated. Not supported: other formats, resizing, colour
//! management, and frames of an animation after the first.

use crate::error::{Error, Result};
use crate::expansion;
use crate::file;
use perilune_core::{DType, HostTensor, Shape};
use perilune_policy::{Opened, Staged};
use std::io::{BufRead, BufReader, Seek, Write};
use std::path::Path;

/// The longest side read or written.
pub const MAX_SIDE: u64 = 32_768;
/// The limit of pixel bytes read.
pub const MAX_BYTES: u64 = 1 << 30;

/// Reads a PNG as u8 {H, W, C}, C being 1 (grey), 2 (grey, alpha), 3 (RGB) or 4 (RGBA).
pub fn load(file: Opened) -> Result<HostTensor> {
    let (path, len) = (file.path().to_path_buf(), file.len());
    decode(&path, BufReader::new(file), len, |_, _| Ok(()))
}

/// The same from the `len` bytes of `source`; `path` is for errors. `limit` may also refuse a width and height.
pub(crate) fn decode(
    path: &Path,
    source: impl BufRead + Seek,
    len: u64,
    limit: impl FnOnce(u32, u32) -> Result<()>,
) -> Result<HostTensor> {
    let failed = |e: png::DecodingError| match e {
        png::DecodingError::IoError(e) => Error::io(path, "read", e),
        e => Error::malformed(path, "image", e.to_string()).hint("check that this is a complete PNG file"),
    };
    let limits = png::Limits { bytes: 64 << 20 };
    let mut decoder = png::Decoder::new_with_limits(source, limits);
    decoder.set_transformations(png::Transformations::normalize_to_color8());
    decoder.set_ignore_text_chunk(true);
    decoder.set_ignore_iccp_chunk(true);
    let info = decoder.read_header_info().map_err(failed)?;
    for (what, side) in [("the image's width", info.width), ("the image's height", info.height)] {
        if u64::from(side) > MAX_SIDE {
            return Err(Error::too_large(path, what, u64::from(side), MAX_SIDE).hint("scale the image down first"));
        }
    }
    limit(info.width, info.height)?;
    let (raw, most) = (info.raw_bytes() as u64, expansion::deflate(len));
    if raw > most {
        let rule =
            format!("{}x{} pixels take {raw} bytes, but the file's {len} hold at most {most}", info.width, info.height);
        return Err(Error::malformed(path, "image", rule));
    }
    let mut reader = decoder.read_info().map_err(failed)?;
    let nbytes = reader.output_buffer_size().map_or(u64::MAX, |n| n as u64);
    if nbytes > MAX_BYTES {
        return Err(
            Error::too_large(path, "the image, in bytes,", nbytes, MAX_BYTES).hint("scale the image down first")
        );
    }
    let mut pixels = vec![0; nbytes as usize];
    let frame = reader.next_frame(&mut pixels).map_err(failed)?;
    reader.finish().map_err(failed)?;
    let dims = [frame.height as usize, frame.width as usize, frame.color_type.samples()];
    let shape = Shape::new(&dims).map_err(|e| Error::malformed(path, "image", e.message))?;
    if frame.bit_depth != png::BitDepth::Eight || pixels.len() != shape.numel() {
        return Err(Error::malformed(path, "image", format!("{} bytes do not fill {shape}", pixels.len())));
    }
    Ok(HostTensor::new(DType::U8, shape, pixels))
}

/// Writes {H, W} or {H, W, C} as a PNG of 8 bits. u8 is written unchanged; floats are clamped to 0..1
/// and rounded to 0..255; bools are black and white.
pub fn save(file: Staged, image: &HostTensor) -> Result<()> {
    let path = &file.path().to_path_buf();
    let bytes = encode(image, &format!("image for {}", path.display()))?;
    file::write_whole(file, |out| {
        out.write_all(&bytes).and_then(|()| out.flush()).map_err(|e| Error::io(path, "write", e))
    })
}

/// Returns the bytes of the PNG that `save` writes; `subject` names the image in errors.
pub fn encode(image: &HostTensor, subject: &str) -> Result<Vec<u8>> {
    let (h, w, c) = match *image.shape.dims() {
        [h, w] => (h, w, 1),
        [h, w, c @ 1..=4] => (h, w, c),
        _ => {
            let rule = format!("has shape {}; it must be {{H, W}} or {{H, W, C}} with C from 1 to 4", image.shape);
            return Err(Error::argument(subject, rule).hint("{C, H, W} becomes {H, W, C} by x:permute(1, 2, 0)"));
        }
    };
    for side in [h, w] {
        if side == 0 || side as u64 > MAX_SIDE {
            let rule = format!("has shape {}; its sides must be from 1 to {MAX_SIDE}", image.shape);
            return Err(Error::argument(subject, rule));
        }
    }
    let pixels = match image.dtype {
        DType::U8 => image.bytes.clone(),
        DType::Bool => image.bytes.iter().map(|&b| if b == 0 { 0 } else { 255 }).collect(),
        d if d.is_float() => {
            let mut pixels = Vec::with_capacity(image.numel());
            for i in 0..image.numel() {
                let v = image.get_f64(i);
                if v.is_nan() {
                    let rule = format!("is NaN at row {}, column {}", i / (w * c), i / c % w);
                    return Err(Error::argument(subject, rule));
                }
                pixels.push((v.clamp(0.0, 1.0) * 255.0).round() as u8);
            }
            pixels
        }
        d => {
            let rule = format!("has dtype {d}; images are written from u8 (0 to 255), floats (0 to 1) or bool");
            return Err(Error::argument(subject, rule).hint("cast to u8 first"));
        }
    };
    let mut out = Vec::new();
    let failed = |e: png::EncodingError| Error::argument(subject, format!("cannot become a PNG: {e}"));
    let mut encoder = png::Encoder::new(&mut out, w as u32, h as u32);
    encoder.set_color(match c {
        1 => png::ColorType::Grayscale,
        2 => png::ColorType::GrayscaleAlpha,
        3 => png::ColorType::Rgb,
        _ => png::ColorType::Rgba,
    });
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header().map_err(failed)?;
    writer.write_image_data(&pixels).map_err(failed)?;
    writer.finish().map_err(failed)?;
    Ok(out)
}

#[cfg(test)]
#[path = "image_tests.rs"]
mod tests;
