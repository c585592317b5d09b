//! Feeds mutated files to every reader of data (`tests/fuzz_readers`).
#![allow(clippy::unwrap_used)]

#[path = "../../../../tests/fuzz_readers/mod.rs"]
mod engine;
mod formats;

#[test]
fn every_file_is_read_or_refused() {
    // Deflate expands 1,032 times, and an image takes 1,536 bytes for a byte of JPEG at most.
    engine::run(formats::all(), &engine::Bounds { files: 24_000, memory: (96 << 20, 1_600) });
}
