#![allow(clippy::unwrap_used)]

use super::*;
use perilune_core::philox::philox4x32;

fn check(offsets: &[u64]) {
    let mut starts = Starts::default();
    starts.reserve(Path::new("a"), offsets.len()).unwrap();
    offsets.iter().for_each(|at| starts.push(*at));
    starts.shrink();
    let mut bytes = Vec::new();
    starts.write(&mut bytes);
    let mut rest = &[&bytes[..], b"more"].concat()[..];
    let again = Starts::read(&mut rest).unwrap();
    assert_eq!((rest, &again), (&b"more"[..], &starts));
    assert_eq!(starts.len(), offsets.len());
    for (k, at) in offsets.iter().enumerate() {
        assert_eq!(again.get(k as u64), Some(*at), "{k}");
    }
    assert_eq!((again.get(offsets.len() as u64), again.get(u64::MAX)), (None, None));
    for cut in [0, 1, 8, 16, bytes.len() / 2, bytes.len() - 1] {
        if cut < bytes.len() {
            assert_eq!(Starts::read(&mut &bytes[..cut]), None, "{cut} of {}", bytes.len());
        }
    }
}

#[test]
fn offsets_of_any_distance_are_kept() {
    check(&[]);
    check(&[7]);
    check(&[0, u64::from(u32::MAX) - 1, u64::from(u32::MAX), u64::from(u32::MAX) + 1, 1 << 62, u64::MAX]);
    for seed in 0..50 {
        let mut at = 0u64;
        let offsets: Vec<u64> = (0..seed * 7)
            .map(|k| {
                let [step, rare, ..] = philox4x32([seed, k, 0, 0], [1, 2]);
                at += u64::from(step % 5000) + u64::from(rare % 40 == 0) * (5 << 30);
                at
            })
            .collect();
        check(&offsets);
    }
}

#[test]
fn a_line_takes_little_more_than_four_bytes() {
    let mut starts = Starts::default();
    (0..64_000).for_each(|k| starts.push(k * 500));
    let mut bytes = Vec::new();
    starts.write(&mut bytes);
    assert_eq!(bytes.len(), 16 + 64_000 * 4 + 1000 * 8);
}

#[test]
fn counts_beyond_the_file_are_refused() {
    for counts in [[u64::MAX, 0], [0, u64::MAX], [1 << 61, 1 << 60], [1, 0], [0, 1]] {
        let bytes: Vec<u8> = counts.iter().flat_map(|n| n.to_le_bytes()).collect();
        assert_eq!(Starts::read(&mut &bytes[..]), None);
    }
}
