//! Hashes the States of a run, so that two runs can be compared bit by bit.

use crate::error::Result;
use perilune_lua::Run;

/// Returns BLAKE3 over every State in path order: path, dtype, shape, bytes; texts and lists follow their lengths. States
/// are fetched one by one, so a large model needs the host memory of its largest State only.
pub fn weights_hash(run: &Run) -> Result<String> {
    let mut hash = blake3::Hasher::new();
    let text = |hash: &mut blake3::Hasher, t: &[u8]| {
        hash.update(&(t.len() as u64).to_le_bytes());
        hash.update(t);
    };
    run.each_state(|path, t| {
        text(&mut hash, path.as_bytes());
        text(&mut hash, t.dtype.name().as_bytes());
        hash.update(&(t.shape.rank() as u64).to_le_bytes());
        for d in t.shape.dims() {
            hash.update(&(*d as u64).to_le_bytes());
        }
        text(&mut hash, &t.bytes);
    })?;
    Ok(hash.finalize().to_hex().to_string())
}
