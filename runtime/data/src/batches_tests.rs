//! That orders are permutations, that they look random, and that they stay what they are.

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
fn orders_are_pinned() {
    // Part of the contract: a checkpoint resumed by a later version must see the same samples.
    assert_eq!(order(10, 1, 0), [0u64; 10]);
    assert_eq!(order(10, 1, 1), [0u64; 10]);
    assert_eq!(Permutation::new(1_000_000_007, u64::MAX, 1 << 40, Stream::Split).at(12_345), 0);
    let w = Windows::new(100_000, 65).expect("windows");
    assert_eq!((0..4).map(|i| w.random(1, i)).collect::<Vec<_>>(), [0u64; 4]);
}

/// Chi-square of counts against equal shares.
fn chi_square(counts: impl IntoIterator<Item = u64>, expected: f64) -> f64 {
    counts.into_iter().map(|c| (c as f64 - expected).powi(2) / expected).sum()
}

#[test]
fn places_and_neighbours_are_uniform() {
    for n in [3u64, 5, 16, 20, 33] {
        let trials = 4000 * n;
        let (mut place, mut step) = (vec![0u64; (n * n) as usize], vec![0u64; n as usize]);
        for epoch in 0..trials {
            let got = order(n, 42, epoch);
            for (i, &v) in got.iter().enumerate() {
                place[i * n as usize + v as usize] += 1;
            }
            step[((got[1] + n - got[0]) % n) as usize] += 1;
        }
        // Degrees of freedom (n-1)^2 and n-2; five standard deviations of slack.
        let limit = |dof: f64| dof + 5.0 * (2.0 * dof).sqrt();
        let x = chi_square(place, trials as f64 / n as f64);
        assert!(x < limit(((n - 1) * (n - 1)) as f64), "n = {n}: places {x}");
        assert_eq!(step[0], 0);
        let x = chi_square(step[1..].iter().copied(), trials as f64 / (n - 1) as f64);
        assert!(x < limit((n - 2).max(1) as f64), "n = {n}: steps {x}");
    }
}

#[test]
fn all_orders_of_a_small_set_occur_equally() {
    let mut seen: HashMap<Vec<u64>, u64> = HashMap::new();
    for seed in 0..24_000 {
        *seen.entry(order(4, seed, 0)).or_default() += 1;
    }
    assert_eq!(seen.len(), 24);
    let x = chi_square(seen.values().copied(), 1000.0);
    assert!(x < 23.0 + 5.0 * 46f64.sqrt(), "{x}");
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
    assert!(chi_square(counts, 10_000.0) < 6.0 + 5.0 * 12f64.sqrt());
    assert_eq!(w.random_batch(9, 3, 4), (12..16).map(|i| w.random(9, i)).collect::<Vec<_>>());
    assert_eq!((w.sequential(3)?, w.sequential(4)?), (vec![0, 3, 6], vec![0, 4]));
    assert_eq!(Windows::new(4, 4)?.random(1, 1), 0);
    assert!(Windows::new(3, 4).is_err() && Windows::new(3, 0).is_err() && w.sequential(0).is_err());
    Ok(())
}
