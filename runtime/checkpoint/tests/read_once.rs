//! Counts the bytes that saving and loading a checkpoint read: none on save, each once on load.
#![cfg(target_os = "linux")]
#![allow(clippy::expect_used, clippy::unwrap_used)]

#[path = "../../../tests/src/skip.rs"]
mod skip;

use perilune_checkpoint::{SHARD_LIMIT, Snapshot, read, write};
use perilune_core::{DType, HostTensor, Shape};
use perilune_policy::Directory;
use serde_json::Map;

/// Returns the bytes that this thread has read, or `None` if the kernel does not count them.
fn bytes_read() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/thread-self/io").ok()?;
    text.lines().find_map(|l| l.strip_prefix("rchar: ")).and_then(|n| n.trim().parse().ok())
}

#[test]
fn a_save_reads_nothing_back_and_a_load_reads_each_byte_once() {
    if bytes_read().is_none() {
        return skip::skipped("/proc/thread-self/io is missing, so bytes read are not counted");
    }
    let tensor = |name: &str, n: usize| {
        (name.to_string(), HostTensor::new(DType::F32, Shape::of(&[n]), (0..4 * n).map(|i| (i % 251) as u8).collect()))
    };
    let snapshot = Snapshot {
        step: 1,
        model: vec![tensor("a", 300_000), tensor("b", 700_000)],
        optimizer: vec![tensor("optim.a", 500_000)],
        record: Map::new(),
    };
    let total = 6_000_000;
    // The record, the headers and the counter's own file are small compared to the tensors.
    let small = 100_000;
    for limit in [SHARD_LIMIT, 1_500_000] {
        let dir = tempfile::tempdir().expect("a directory");
        let before = bytes_read().expect("counted");
        let path = write(&Directory::open(dir.path()).expect("opened"), &snapshot, limit).expect("written");
        let saved = bytes_read().expect("counted") - before;
        assert!(saved < small, "a save read {saved} bytes");
        let before = bytes_read().expect("counted");
        let back = read(&path).expect("read");
        let loaded = bytes_read().expect("counted") - before;
        assert!((total..total + small).contains(&loaded), "a load of {total} bytes read {loaded}");
        assert_eq!(back, snapshot);
    }
}
