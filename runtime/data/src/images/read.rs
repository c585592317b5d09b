//! Decodes one image file to 8-bit RGB: JPEG (baseline and progressive; grey, YCbCr, RGB, CMYK, YCCK), PNG of every kind, and WebP
//! (`webp`).
//!
//! The format is detected by the first bytes, not by the name: ImageNet has a PNG called .JPEG. Grey is repeated, an alpha
//! channel is dropped, 16 bits keep their high 8, CMYK is assumed to be inverted as Adobe writes it; PIL's `convert("RGB")`
//! does the same, except for 16-bit grey, which it clamps at 255. As in torchvision, EXIF orientation and colour profiles are
//! ignored. Files are untrusted: sizes are checked before pixels are allocated, and a truncated or undecodable file is an
//! error, never a part of an image.

use super::resize;
use super::webp;
use crate::error::{Error, Result};
use crate::image;
use perilune_policy::Opened;
use std::io::Read;
use std::path::Path;
use zune_core::bytestream::ZCursor;
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;

/// The maximum number of pixels of an image, about 11,585 by 11,585.
pub const MAX_PIXELS: u64 = 1 << 27;
/// The largest file read.
pub const MAX_FILE: u64 = 1 << 29;

/// The hint for a file that cannot be read.
pub(super) const CURE: &str = "copy or convert the file again, or move it out of the folder";

/// Buffers that a thread reuses.
#[derive(Default)]
pub struct Scratch {
    file: Vec<u8>,
    pub rgb: Vec<u8>,
    pub rows: resize::Rows,
}

/// Reads a file into `scratch.rgb` and returns width and height.
pub fn read(file: Opened, scratch: &mut Scratch) -> Result<(usize, usize)> {
    let (path, len) = (&file.path().to_path_buf(), file.len());
    if len > MAX_FILE {
        return Err(Error::too_large(path, "the file, in bytes,", len, MAX_FILE).hint(CURE));
    }
    scratch.file.clear();
    // One byte more than expected, so that a growing file is detected instead of read without end.
    let read = file.take(len + 1).read_to_end(&mut scratch.file).map_err(|e| Error::io(path, "read", e))?;
    if read as u64 != len {
        return Err(Error::malformed(path, "file", "the file changed while it was read")
            .hint("wait until the file is completely written"));
    }
    decode(path, &scratch.file, &mut scratch.rgb)
}

/// The same from the bytes of the file.
pub(super) fn decode(path: &Path, bytes: &[u8], rgb: &mut Vec<u8>) -> Result<(usize, usize)> {
    match bytes {
        [0xff, 0xd8, 0xff, ..] => jpeg(path, bytes, rgb),
        [0x89, b'P', b'N', b'G', ..] => png(path, bytes, rgb),
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => webp::decode(path, bytes, rgb),
        _ => Err(stranger(path, bytes)),
    }
}

/// Makes the error for a file of another format.
fn stranger(path: &Path, bytes: &[u8]) -> Error {
    let kind = match bytes {
        [] => "it is empty",
        [b'G', b'I', b'F', b'8', ..] => "it is a GIF",
        [b'B', b'M', ..] => "it is a BMP",
        [b'I', b'I', 42, 0, ..] | [b'M', b'M', 0, 42, ..] => "it is a TIFF",
        [_, _, _, _, b'f', b't', b'y', b'p', ..] => "it is a HEIC, AVIF or film",
        [b'<', ..] => "it is a web page or another text",
        _ => "it begins like none of them",
    };
    Error::malformed(path, "image", format!("{kind}; images are JPEG, PNG or WebP")).hint(CURE)
}

pub(super) fn check_size(path: &Path, width: u64, height: u64) -> Result<()> {
    match width * height {
        n if n > MAX_PIXELS => {
            let what = format!("the image's number of pixels ({width} x {height})");
            Err(Error::too_large(path, what, n, MAX_PIXELS).hint("scale the image down first"))
        }
        _ => Ok(()),
    }
}

fn jpeg(path: &Path, bytes: &[u8], rgb: &mut Vec<u8>) -> Result<(usize, usize)> {
    let failed = |e: zune_jpeg::errors::DecodeErrors| {
        let text = e.to_string();
        Error::malformed(path, "JPEG", text.trim_end_matches('.').trim()).hint(CURE)
    };
    if !is_whole(bytes) {
        return Err(Error::malformed(path, "JPEG", "the file is truncated").hint(CURE));
    }
    let side = image::MAX_SIDE as usize;
    let limits = DecoderOptions::default().set_strict_mode(false).set_max_width(side).set_max_height(side);
    let mut decoder =
        JpegDecoder::new_with_options(ZCursor::new(bytes), limits.jpeg_set_out_colorspace(ColorSpace::RGB));
    decoder.decode_headers().map_err(failed)?;
    let (width, height) = decoder.dimensions().unwrap_or_default();
    check_size(path, width as u64, height as u64)?;
    // A block of 8 by 8 pixels takes at least one bit.
    let least = width.div_ceil(8) * height.div_ceil(8) / 8;
    if bytes.len() < least {
        let rule = format!("{width} x {height} pixels take {least} bytes or more, and the file has {}", bytes.len());
        return Err(Error::malformed(path, "JPEG", rule).hint(CURE));
    }
    use ColorSpace::{CMYK, Luma, RGB, YCCK, YCbCr};
    let known = decoder.input_colorspace().filter(|c| matches!(c, Luma | RGB | YCbCr | CMYK | YCCK));
    if known.is_none() || decoder.output_buffer_size() != Some(3 * width * height) {
        let rule = "its channels are neither grey, RGB, YCbCr nor CMYK";
        return Err(Error::unsupported(path, "JPEG", rule).hint(CURE));
    }
    // Unusual headers are tolerated, as in libjpeg; an error in the pixels is an error, not a grey patch.
    decoder.set_options(decoder.options().set_strict_mode(true));
    rgb.clear();
    rgb.resize(3 * width * height, 0);
    decoder.decode_into(rgb).map_err(failed)?;
    Ok((width, height))
}

/// Returns whether the end of the image is present. Decoders would fill missing rows with grey.
fn is_whole(bytes: &[u8]) -> bool {
    let mut at = 2;
    loop {
        // Skip to the next marker: 0xff and a byte that is neither stuffing (0), fill (0xff) nor a restart (0xd0 to 0xd7). Between
        // segments this skips stray bytes, after SOS it skips the scan.
        while let Some(found) = bytes.get(at..).and_then(|rest| rest.iter().position(|b| *b == 0xff)) {
            at += found;
            if !matches!(bytes.get(at + 1), Some(0 | 1 | 0xff | 0xd0..=0xd8)) {
                break;
            }
            at += 1;
        }
        match bytes.get(at..at + 4) {
            Some([0xff, marker, high, low]) if *marker != 0xd9 => {
                at += 2 + (usize::from(*high) << 8 | usize::from(*low))
            }
            _ => return bytes.get(at..at + 2) == Some(&[0xff, 0xd9]),
        }
    }
}

fn png(path: &Path, bytes: &[u8], rgb: &mut Vec<u8>) -> Result<(usize, usize)> {
    let limit = |width: u32, height: u32| check_size(path, u64::from(width), u64::from(height));
    let image = image::decode(path, std::io::Cursor::new(bytes), bytes.len() as u64, limit)?;
    let [height, width, channels] = *image.shape.dims() else {
        return Err(Error::malformed(path, "PNG", format!("has shape {}", image.shape)));
    };
    rgb.clear();
    rgb.reserve(3 * width * height);
    match channels {
        3 => rgb.extend_from_slice(&image.bytes),
        4 => rgb.extend(image.bytes.chunks_exact(4).flat_map(|p| [p[0], p[1], p[2]])),
        n => rgb.extend(image.bytes.chunks_exact(n).flat_map(|p| [p[0]; 3])),
    }
    Ok((width, height))
}
