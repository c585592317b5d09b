//! Feeds mutated files to every reader of bundles (`tests/fuzz_readers`): checks, archive, manifest, signature, keys.
#![allow(clippy::unwrap_used)]

#[path = "../../../../tests/fuzz_readers/mod.rs"]
mod engine;
#[path = "../support/forge.rs"]
mod forge;
mod formats;

#[test]
fn every_file_is_read_or_refused() {
    // Buffers and the window of Zstandard; a manifest takes some bytes for a byte of its text.
    engine::run(formats::all(), &engine::Bounds { files: 21_000, memory: (24 << 20, 64) });
}
