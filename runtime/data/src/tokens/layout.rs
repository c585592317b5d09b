//! Reads where the ids of a token file are and how wide they are: `.bin` as llm.c and nanoGPT write it, `.npy` of one dim.
//!
//! llm.c's files start with 256 i32 words: a magic number, a version, the count of tokens. Magic 20240520 with version 1 is
//! GPT-2's, u16; 20240801 with version 7 is Llama 3's, u32. nanoGPT writes u16 ids without a header.

use crate::error::{Error, Result};
use crate::npy;
use perilune_policy::Opened;
use std::io::{Read, Seek, SeekFrom};

/// Magic number, version and width of llm.c's headers.
const KINDS: [(i32, i32, Width); 2] = [(20_240_520, 1, Width::U16), (20_240_801, 7, Width::U32)];
const HEADER: u64 = 256 * 4;

/// The type of the ids in a file, little-endian.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Width {
    U8,
    U16,
    U32,
    I32,
    I64,
}

/// The ids of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Layout {
    pub width: Width,
    /// The position of the first id, in bytes.
    pub offset: u64,
    /// The number of ids.
    pub len: u64,
}

impl Width {
    pub(super) fn bytes(self) -> usize {
        match self {
            Width::U8 => 1,
            Width::U16 => 2,
            Width::U32 | Width::I32 => 4,
            Width::I64 => 8,
        }
    }

    /// Appends ids as little-endian i32; `Err` has the place of the first one that is negative or above 2^31 - 1.
    pub(super) fn widen(self, ids: &[u8], to: &mut Vec<u8>) -> std::result::Result<(), u64> {
        let outside = |fits: fn(&[u8]) -> bool| match ids.chunks_exact(self.bytes()).position(|id| !fits(id)) {
            Some(k) => Err(k as u64),
            None => Ok(()),
        };
        match self {
            Width::U8 => to.extend(ids.iter().flat_map(|b| [*b, 0, 0, 0])),
            Width::U16 => {
                to.reserve(2 * ids.len());
                ids.chunks_exact(2).for_each(|b| to.extend_from_slice(&[b[0], b[1], 0, 0]));
            }
            // The sign bit of an i32 is the bit that an u32 must not have.
            Width::U32 | Width::I32 => {
                outside(|id| id[3] < 128)?;
                to.extend_from_slice(ids);
            }
            Width::I64 => {
                outside(|id| id[3] < 128 && id[4..] == [0; 4])?;
                to.extend(ids.chunks_exact(8).flat_map(|b| [b[0], b[1], b[2], b[3]]));
            }
        }
        Ok(())
    }
}

/// Reads the layout of a file, by its header, and compares it with the size of the file.
pub(super) fn read(file: &mut Opened) -> Result<Layout> {
    let path = file.path().to_path_buf();
    let extension = path.extension().map(|e| e.to_string_lossy().to_ascii_lowercase());
    match extension.as_deref() {
        Some("npy") => return npy(file),
        Some("bin") => {}
        _ => {
            let error = Error::unsupported(&path, "name", "token files end in .bin or .npy, manifests in .json");
            return Err(error.hint("data.tokens reads ids of a .safetensors file, data.text the characters of a text"));
        }
    }
    let bytes = file.len();
    let mut head = Vec::new();
    let failed = |e| Error::io(&path, "read", e);
    file.seek(SeekFrom::Start(0)).map_err(failed)?;
    file.take(12).read_to_end(&mut head).map_err(failed)?;
    let word = |k: usize| head.get(4 * k..4 * k + 4).map_or(0, |b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let Some(&(_, version, width)) = KINDS.iter().find(|kind| bytes >= HEADER && kind.0 == word(0)) else {
        if !bytes.is_multiple_of(2) {
            let rule = format!("{bytes} bytes are not a whole number of u16 ids");
            let error = Error::malformed(&path, "file", rule);
            return Err(error.hint("token files hold u16 ids, as nanoGPT and llm.c write them"));
        }
        return Ok(Layout { width: Width::U16, offset: 0, len: bytes / 2 });
    };
    if word(1) != version {
        return Err(Error::malformed(&path, "header", format!("version {} is not known; {version} is", word(1))));
    }
    let (len, size, follow) = (u64::from(word(2) as u32), width.bytes() as u64, bytes - HEADER);
    if follow != len * size {
        let rule = format!("the header declares {len} tokens of {size} bytes, and {follow} bytes follow");
        return Err(Error::malformed(&path, "header", rule).hint("copy or download the file again"));
    }
    Ok(Layout { width, offset: HEADER, len })
}

fn npy(file: &mut Opened) -> Result<Layout> {
    let path = file.path().to_path_buf();
    let array = npy::describe(file)?;
    let width = match array.code.as_str() {
        "u1" => Width::U8,
        "u2" => Width::U16,
        "u4" => Width::U32,
        "i4" => Width::I32,
        "i8" => Width::I64,
        other => {
            let rule = format!("the ids are {other}; token files hold u1, u2, u4, i4 or i8");
            return Err(Error::unsupported(&path, "dtype", rule).hint("np.save(path, ids.astype('uint16'))"));
        }
    };
    if array.big_endian {
        let rule = "the ids are big-endian; token files are little-endian";
        return Err(Error::unsupported(&path, "dtype", rule).hint("np.save(path, ids.astype('<u2'))"));
    }
    if array.shape.rank() != 1 {
        let rule = format!("is {}; token ids have one dim", array.shape);
        return Err(Error::unsupported(&path, "shape", rule).hint("np.save(path, ids.reshape(-1))"));
    }
    Ok(Layout { width, offset: array.offset, len: array.shape.numel() as u64 })
}
