//! Reads token ids as llm.c and nanoGPT write them: `.bin` files of little-endian u16 or u32.
//!
//! llm.c's files start with 256 i32 words: a magic number, a version, the count of tokens. Magic 20240520 with version 1 is
//! GPT-2's, u16; 20240801 with version 7 is Llama 3's, u32. nanoGPT writes u16 ids without a header. Ids are returned as i32,
//! which every vocabulary fits.

use crate::error::{Error, Result};
use perilune_core::{DType, HostTensor, Shape};
use perilune_policy::Opened;
use std::io::Read;

/// Magic number, version and bytes of a token.
const KINDS: [(i32, i32, usize); 2] = [(20_240_520, 1, 2), (20_240_801, 7, 4)];
const HEADER: usize = 256 * 4;

/// Reads the ids in a `.bin` file: (N) i32.
pub fn read(mut file: Opened) -> Result<HostTensor> {
    let path = &file.path().to_path_buf();
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(|e| Error::io(path, "read", e))?;
    let word = |k: usize| bytes.get(4 * k..4 * k + 4).map_or(0, |b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let (mut body, mut size) = (&bytes[..], 2);
    let kind = KINDS.iter().find(|k| bytes.len() >= HEADER && k.0 == word(0));
    if let Some(&(_, version, width)) = kind {
        if word(1) != version {
            return Err(Error::malformed(path, "header", format!("version {} is not known; {version} is", word(1))));
        }
        (body, size) = (&bytes[HEADER..], width);
        if body.len() as u64 != u64::from(word(2) as u32) * size as u64 {
            let rule = format!(
                "the header declares {} tokens of {size} bytes, and {} bytes follow",
                word(2) as u32,
                body.len()
            );
            return Err(Error::malformed(path, "header", rule).hint("copy or download the file again"));
        }
    }
    if size == 4 {
        if let Some(k) = body.chunks_exact(4).position(|b| b[3] > 127) {
            return Err(Error::malformed(path, "file", format!("token {k} is above 2^31 - 1")));
        }
        return Ok(HostTensor { dtype: DType::I32, shape: Shape::of(&[body.len() / 4]), bytes: body.to_vec() });
    }
    if !body.len().is_multiple_of(2) {
        let rule = format!("{} bytes are not a whole number of u16 ids", body.len());
        return Err(
            Error::malformed(path, "file", rule).hint("token files hold u16 ids, as nanoGPT and llm.c write them")
        );
    }
    let out: Vec<u8> =
        body.chunks_exact(2).flat_map(|b| i32::from(u16::from_le_bytes([b[0], b[1]])).to_le_bytes()).collect();
    Ok(HostTensor { dtype: DType::I32, shape: Shape::of(&[body.len() / 2]), bytes: out })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(path: &std::path::Path) -> Result<HostTensor> {
        super::read(crate::file::named::open(path)?)
    }

    fn file(name: &str, bytes: &[u8]) -> std::path::PathBuf {
        let path = std::env::temp_dir().join(format!("perilune-{}-{name}.bin", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        path
    }

    #[test]
    fn plain_and_with_a_header() {
        let ids: Vec<u8> = [1u16, 50256, 65535].iter().flat_map(|i| i.to_le_bytes()).collect();
        let path = file("plain", &ids);
        let t = read(&path).unwrap();
        assert_eq!(t.shape, Shape::of(&[3]));
        let want: Vec<u8> = [1i32, 50256, 65535].iter().flat_map(|i| i.to_le_bytes()).collect();
        assert_eq!(t.bytes, want);
        let mut with = vec![0; HEADER];
        for (k, w) in [KINDS[0].0, 1, 3].iter().enumerate() {
            with[4 * k..4 * k + 4].copy_from_slice(&w.to_le_bytes());
        }
        with.extend(&ids);
        let path = file("header", &with);
        assert_eq!(read(&path).unwrap().bytes, want);
        let wide: Vec<u8> = [1i32, 50256, 65535].iter().flat_map(|i| i.to_le_bytes()).collect();
        let mut llama = vec![0; HEADER];
        for (k, w) in [KINDS[1].0, 7, 3].iter().enumerate() {
            llama[4 * k..4 * k + 4].copy_from_slice(&w.to_le_bytes());
        }
        llama.extend(&wide);
        assert_eq!(read(&file("llama", &llama)).unwrap().bytes, want);
        with.pop();
        let path = file("short", &with);
        assert!(read(&path).unwrap_err().to_string().contains("the header declares 3 tokens"));
        let path = file("odd", &ids[..5]);
        assert!(read(&path).unwrap_err().to_string().contains("not a whole number"));
    }
}
