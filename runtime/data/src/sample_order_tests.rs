//! Tests that orders are permutations, look random, and do not change between versions.

use super::*;
use std::collections::HashMap;

fn order(n: u64, seed: u64, epoch: u64) -> Vec<u64> {
    let p = Permutation::new(n, seed, epoch, Stream::Shuffle);
    (0..n).map(|i| p.at(i)).collect()
}

#[test]
fn every_order_is_a_permutation() {
    for n in (0..70).chain([255, 256, 257, 1000, 4095, 4096, 4097]) {
        let mut got = order(n, 7, 3);
        got.sort_unstable();
        assert_eq!(got, (0..n).collect::<Vec<_>>(), "n = {n}");
    }
    let big = Permutation::new(1 << 62, 1, 0, Stream::Shuffle);
    assert!(big.at((1 << 62) - 1) < 1 << 62);
    let big = Permutation::new((1 << 61) + 1, 1, 0, Stream::Shuffle);
    assert!((0..100).all(|i| big.at(i) < (1 << 61) + 1));
}

#[test]
fn sample_orders_match_pinned_values() {
    // Part of the contract: a checkpoint resumed by a later version must get the same samples. The numbers are those of
    // a second implementation, written in Python from the description of `Permutation` and `Windows`.
    assert_eq!(order(10, 1, 0), [6, 5, 2, 7, 4, 0, 3, 8, 9, 1]);
    assert_eq!(order(10, 1, 1), [5, 7, 8, 6, 2, 9, 4, 0, 1, 3]);
    assert_eq!(Permutation::new(1_000_000_007, u64::MAX, 1 << 40, Stream::Split).at(12_345), 669_749_290);
    let w = Windows::new(100_000, 65).expect("windows");
    assert_eq!((0..4).map(|i| w.random(1, i)).collect::<Vec<_>>(), [86_234, 72_644, 31_800, 44_611]);
}

/// Returns the number of standard deviations by which the chi-square of `counts` against equal shares exceeds its mean (by Wilson
/// and Hilferty's cube root, which is near normal even for few degrees of freedom).
fn deviations(counts: &[u64], degrees: f64) -> f64 {
    let expected = counts.iter().sum::<u64>() as f64 / counts.len() as f64;
    let chi_square: f64 = counts.iter().map(|&c| (c as f64 - expected).powi(2) / expected).sum();
    let spread = 2.0 / (9.0 * degrees);
    ((chi_square / degrees).cbrt() - (1.0 - spread)) / spread.sqrt()
}

#[test]
fn places_and_neighbours_are_uniform() {
    for n in [3u64, 5, 8, 16, 20, 33, 64, 65] {
        let trials = 10_000;
        let (mut place, mut step) = (vec![0u64; (n * n) as usize], vec![0u64; n as usize]);
        for epoch in 0..trials {
            let got = order(n, 42, epoch);
            for (i, &v) in got.iter().enumerate() {
                place[i * n as usize + v as usize] += 1;
            }
            step[((got[1] + n - got[0]) % n) as usize] += 1;
        }
        assert_eq!(step[0], 0);
        let (places, steps) = (deviations(&place, ((n - 1) * (n - 1)) as f64), deviations(&step[1..], (n - 2) as f64));
        assert!(places < 4.0 && steps < 4.0, "n = {n}: places {places}, steps {steps}");
    }
}

#[test]
fn all_orders_of_a_small_set_occur_equally() {
    let mut seen: HashMap<Vec<u64>, u64> = HashMap::new();
    for seed in 0..24_000 {
        *seen.entry(order(4, seed, 0)).or_default() += 1;
    }
    assert_eq!(seen.len(), 24);
    let x = deviations(&seen.values().copied().collect::<Vec<_>>(), 23.0);
    assert!(x < 4.0, "{x}");
}

#[test]
fn seed_epoch_and_stream_all_matter() {
    let base = order(1000, 1, 0);
    let same = |other: &[u64]| base.iter().zip(other).filter(|(a, b)| a == b).count();
    assert!(same(&order(1000, 2, 0)) < 10 && same(&order(1000, 1, 1)) < 10 && same(&order(1000, 1 << 32 | 1, 0)) < 10);
    let split = Permutation::new(1000, 1, 0, Stream::Split);
    assert!(same(&(0..1000).map(|i| split.at(i)).collect::<Vec<_>>()) < 10);
}

#[test]
fn batches_cover_each_epoch_once() -> Result<()> {
    for (n, batch, drop_last, count, last) in
        [(10, 3, false, 4, 1), (10, 3, true, 3, 3), (9, 3, true, 3, 3), (2, 5, false, 1, 2)]
    {
        let b = Batches::new(n, batch, drop_last, Some(5))?;
        assert_eq!((b.per_epoch(), b.size(count - 1)), (count, last));
        for epoch in 0..3 {
            let got: Vec<u64> = (0..count).flat_map(|i| b.indices(epoch, i)).collect();
            assert_eq!(got.len() as u64, b.samples_per_epoch());
            assert_eq!(got, order(n as u64, 5, epoch)[..got.len()]);
            for (i, &sample) in got.iter().enumerate() {
                assert_eq!(b.sample(epoch * b.samples_per_epoch() + i as u64), sample);
            }
        }
        assert_eq!(b.at_step(count + 1 % count), (1, b.indices(1, 1 % count)));
    }
    let plain = Batches::new(5, 2, false, None)?;
    assert_eq!(plain.at_step(5), (1, vec![4]));
    for (n, batch, drop_last) in [(0, 1, false), (1, 0, false), (3, 4, true)] {
        assert!(Batches::new(n, batch, drop_last, None).is_err());
    }
    Ok(())
}

#[test]
fn windows_fit_and_spread() -> Result<()> {
    let w = Windows::new(10, 4)?;
    let mut counts = [0u64; 7];
    for i in 0..70_000 {
        counts[w.random(9, i) as usize] += 1;
    }
    assert!(deviations(&counts, 6.0) < 4.0);
    assert_eq!(w.random_batch(9, 3, 4), (12..16).map(|i| w.random(9, i)).collect::<Vec<_>>());
    assert_eq!((w.sequential(3)?, w.sequential(4)?), (vec![0, 3, 6], vec![0, 4]));
    assert_eq!(Windows::new(4, 4)?.random(1, 1), 0);
    assert!(Windows::new(3, 4).is_err() && Windows::new(3, 0).is_err() && w.sequential(0).is_err());
    Ok(())
}
