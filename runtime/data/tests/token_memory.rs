//! Reads a corpus beyond any memory: a sparse file of 1 TB. In a process of its own, whose peak is that of this test alone.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

use perilune_data::tokens::Tokens;
use perilune_policy::Policy;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Tokens of two bytes.
const LEN: u64 = 500_000_000_000;

fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmHWM")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn a_terabyte_is_read_in_flat_memory() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sparse.bin");
    let file = File::create(&path).unwrap();
    if file.set_len(2 * LEN).is_err() {
        println!("skipped: a_terabyte_is_read_in_flat_memory: this file system has no file of 1 TB");
        return;
    }
    file.write_all_at(&[7, 0], 2 * LEN - 2).unwrap();
    let policy = Policy::builder().allow_read(dir.path()).unwrap().build();
    let tokens = Tokens::open(policy, &[path], &mut |_| ()).unwrap();
    let before = peak_kib();
    let mut bytes = Vec::new();
    for k in 0..20_000 {
        bytes.clear();
        let start = k * (LEN / 20_000);
        tokens.read(start..start + 1025, &mut bytes).unwrap();
        assert_eq!(bytes.len(), 4 * 1025);
    }
    bytes.clear();
    tokens.read(LEN - 2..LEN, &mut bytes).unwrap();
    assert_eq!(bytes, [0, 0, 0, 0, 7, 0, 0, 0]);
    // All of them are 2 TB as i32.
    let error = tokens.read(0..LEN, &mut bytes).unwrap_err().to_string();
    assert!(error.contains("tokens 0 to 500000000000: do not fit into the host's memory"), "{error}");
    assert!(peak_kib() - before < 4 << 10, "{} KiB more at the peak", peak_kib() - before);
}
