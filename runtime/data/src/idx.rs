//! Reads IDX files, the arrays of MNIST and its successors, plain or gzip.
//!
//! A file is two zero bytes, a type code, the number of dims, each dim as a big-endian u32, and the elements in row-major order,
//! big-endian (http://yann.lecun.com/exdb/mnist). i8 and i16 widen to i32. The header's claim is compared with the size of a plain
//! file before elements are read; memory for a compressed one grows with the bytes that arrive, up to a limit.

use crate::error::{Error, Result};
use crate::gzip_text::{self, TABLE, Text};
use perilune_core::{DType, HostTensor, MAX_RANK, Shape};
use perilune_policy::Opened;
use std::io::{ErrorKind, Read};
use std::path::Path;

/// The limit of a file's plain bytes, unless the caller gives one.
pub const MAX_BYTES: u64 = 4 << 30;

const CURE: &str = "copy or download the file again";

/// The element types: code, bytes in the file, dtype.
const TYPES: [(u8, usize, DType); 6] = [
    (0x08, 1, DType::U8),
    (0x09, 1, DType::I32),
    (0x0b, 2, DType::I32),
    (0x0c, 4, DType::I32),
    (0x0d, 4, DType::F32),
    (0x0e, 8, DType::F64),
];

/// Reads the array of a file; `max_bytes` replaces the limits of its plain bytes.
pub fn load(file: Opened, max_bytes: Option<u64>) -> Result<HostTensor> {
    let len = file.len();
    let Text { path, packed, mut source } = gzip_text::open(file, max_bytes, MAX_BYTES, TABLE)?;
    read(&path, &mut source, (!packed).then_some(len))
}

/// Fills `buf`; the header of the file ends before that otherwise.
fn fill(path: &Path, from: &mut impl Read, buf: &mut [u8]) -> Result<()> {
    from.read_exact(buf).map_err(|e| match e.kind() {
        ErrorKind::UnexpectedEof => Error::malformed(path, "header", "is cut off").hint("is it an IDX file?"),
        _ => gzip_text::read_error(path, e),
    })
}

/// Reads an array from plain bytes, of which there are `len` if that is known.
fn read(path: &Path, from: &mut impl Read, len: Option<u64>) -> Result<HostTensor> {
    let bad = |place: &str, rule: String| Error::malformed(path, place, rule);
    let mut magic = [0; 4];
    fill(path, from, &mut magic)?;
    let [zero, also_zero, code, rank] = magic;
    if zero != 0 || also_zero != 0 {
        let rule = format!("starts with {zero:#04x} {also_zero:#04x}, not with two zero bytes");
        return Err(bad("header", rule).hint("is it an IDX file? MNIST's are named like train-images-idx3-ubyte.gz"));
    }
    let Some(&(_, size, dtype)) = TYPES.iter().find(|t| t.0 == code) else {
        let known = TYPES.map(|t| format!("{:#04x}", t.0)).join(", ");
        return Err(bad("header", format!("has the type code {code:#04x}, which is none of {known}")));
    };
    let rank = usize::from(rank);
    if rank > MAX_RANK {
        return Err(Error::too_large(path, "the number of dims", rank as u64, MAX_RANK as u64));
    }
    let mut dims = Vec::with_capacity(rank);
    for _ in 0..rank {
        let mut word = [0; 4];
        fill(path, from, &mut word)?;
        dims.push(u32::from_be_bytes(word) as usize);
    }
    let shape = Shape::new(&dims).map_err(|e| bad("header", e.message))?;
    let (header, needed) = (4 + 4 * rank as u64, (shape.numel() as u64).saturating_mul(size as u64));
    if let Some(len) = len
        && len != header + needed
    {
        let rule = format!("shape {shape} takes {needed} bytes, but {} follow the header", len.saturating_sub(header));
        return Err(bad("data", rule).hint(CURE));
    }
    let mut bytes = Vec::with_capacity(needed.min(1 << 20) as usize);
    from.take(needed).read_to_end(&mut bytes).map_err(|e| gzip_text::read_error(path, e))?;
    if bytes.len() as u64 != needed {
        let rule = format!("ends after {} of the {needed} bytes of shape {shape}", bytes.len());
        return Err(bad("data", rule).hint(CURE));
    }
    // Reading to the end also compares the checksum of a compressed file.
    if from.read(&mut [0]).map_err(|e| gzip_text::read_error(path, e))? != 0 {
        return Err(bad("data", format!("goes on after the {needed} bytes of shape {shape}")).hint(CURE));
    }
    Ok(HostTensor::new(dtype, shape, native(code, bytes)))
}

/// The bytes of elements in the byte order of the machine, i8 and i16 as i32.
fn native(code: u8, bytes: Vec<u8>) -> Vec<u8> {
    fn each<const N: usize, const M: usize>(bytes: &[u8], f: impl Fn([u8; N]) -> [u8; M]) -> Vec<u8> {
        bytes.as_chunks::<N>().0.iter().flat_map(|chunk| f(*chunk)).collect()
    }
    match code {
        0x09 => each(&bytes, |[b]: [u8; 1]| i32::from(b as i8).to_ne_bytes()),
        0x0b => each(&bytes, |b: [u8; 2]| i32::from(i16::from_be_bytes(b)).to_ne_bytes()),
        0x0c | 0x0d => each(&bytes, |b: [u8; 4]| u32::from_be_bytes(b).to_ne_bytes()),
        0x0e => each(&bytes, |b: [u8; 8]| u64::from_be_bytes(b).to_ne_bytes()),
        _ => bytes,
    }
}

#[cfg(test)]
#[path = "idx_tests.rs"]
mod tests;
