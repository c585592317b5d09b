//! Finds evaluation windows that stand in the training part of a corpus, by fingerprints of token runs.
//!
//! A window is leaked if training has at least half of its fingerprints, and 4 at least. Runs that three evaluation windows have are boilerplate
//! and do not count.

use crate::token_runs::Runs;
use rustc_hash::FxHashMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Fingerprints that are held, of evaluation windows or of the training part: about 40 bytes each.
pub const MOST: u64 = 7 << 19;
/// Evaluation windows from which a run is boilerplate.
const BOILERPLATE: u8 = 3;
/// The least number of common fingerprints.
const LEAST: u32 = 4;
/// Fingerprints of a window: more need more time, and fewer than `FEW` miss leaks.
const ENOUGH: u64 = 64;
const FEW: u64 = 24;

/// What windows are compared by.
#[derive(Clone, Copy)]
pub struct Plan {
    pub runs: Runs,
    /// Of `of` windows so many are compared, spread evenly.
    pub wanted: u128,
    pub of: u128,
}

impl Plan {
    /// Chooses the rate by the tokens of all evaluation windows and the tokens of the shortest one.
    pub fn new(length: usize, tokens: u64, window: u64) -> Plan {
        let runs = (window + 1).saturating_sub(length as u64).max(1);
        let rate = (runs / ENOUGH).max(tokens.div_ceil(MOST)).min((runs / FEW).max(1)).max(1);
        let (wanted, of) = (u128::from(MOST) * u128::from(rate), u128::from(tokens.max(1)));
        Plan { runs: Runs::new(length, rate), wanted: wanted.min(of), of }
    }

    /// Whether window `k` of a split is compared.
    pub fn has(&self, k: u64) -> bool {
        let below = |k: u128| k * self.wanted / self.of;
        below(u128::from(k) + 1) > below(u128::from(k))
    }
}

/// Fingerprints of evaluation windows.
#[derive(Default)]
pub struct Leaks {
    /// The slot of each fingerprint.
    slots: FxHashMap<u64, u32>,
    /// In how many windows it is, and the last of them.
    records: Vec<(u8, u32)>,
    /// The first training token of a run that has it.
    seen: Vec<AtomicU64>,
    /// Window and slot, by rising windows.
    pairs: Vec<(u32, u32)>,
    /// The split and the first token of each window.
    windows: Vec<(usize, u64)>,
}

/// An evaluation window that stands in training.
pub struct Leak {
    pub split: usize,
    pub start: u64,
    /// The first training token of a common run.
    pub at: u64,
}

impl Leaks {
    /// Adds a window with its fingerprints.
    pub fn add(&mut self, split: usize, start: u64, hashes: &[u64]) {
        let window = self.windows.len() as u32;
        self.windows.push((split, start));
        for hash in hashes {
            let next = self.records.len();
            if next as u64 >= 2 * MOST {
                return;
            }
            let slot = *self.slots.entry(*hash).or_insert(next as u32);
            match self.records.get_mut(slot as usize) {
                None => self.records.push((1, window)),
                Some(known) if known.1 == window => continue,
                Some(known) => *known = (known.0.saturating_add(1), window),
            }
            self.pairs.push((window, slot));
        }
    }

    /// Ends the windows: training follows.
    pub fn seal(&mut self) {
        self.seen = self.records.iter().map(|_| AtomicU64::new(u64::MAX)).collect();
    }

    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// The number of windows of a split that are compared.
    pub fn windows(&self, split: usize) -> u64 {
        self.windows.iter().filter(|w| w.0 == split).count() as u64
    }

    /// Looks for a fingerprint of training.
    pub fn look(&self, hash: u64, at: u64) {
        if let Some(seen) = self.slots.get(&hash).and_then(|slot| self.seen.get(*slot as usize)) {
            seen.fetch_min(at, Ordering::Relaxed);
        }
    }

    /// Returns the windows that are leaked.
    pub fn leaked(&self) -> Vec<Leak> {
        let mut out = Vec::new();
        for pairs in self.pairs.chunk_by(|a, b| a.0 == b.0) {
            let (mut all, mut common, mut at) = (0u32, 0u32, u64::MAX);
            for slot in pairs.iter().map(|p| p.1 as usize) {
                if self.records.get(slot).is_some_and(|r| r.0 < BOILERPLATE) {
                    let seen = self.seen.get(slot).map_or(u64::MAX, |seen| seen.load(Ordering::Relaxed));
                    (all, common, at) = (all + 1, common + u32::from(seen != u64::MAX), at.min(seen));
                }
            }
            let window = pairs.first().and_then(|p| self.windows.get(p.0 as usize));
            if let Some((split, start)) = window.filter(|_| common >= LEAST && 2 * common >= all) {
                out.push(Leak { split: *split, start: *start, at });
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_bounds_what_is_held_and_keeps_enough_of_a_window() {
        for (length, tokens, window) in
            [(16, 100_000, 1024), (16, 1 << 40, 1024), (64, 5_000, 128), (16, 1 << 50, 64), (16, 1 << 27, 4096)]
        {
            let plan = Plan::new(length, tokens, window);
            let (runs, rate) = (window + 1 - length as u64, plan.runs.rate);
            assert!(rate == 1 || runs / rate >= FEW, "{length} {tokens} {window}: {rate}");
            let held = tokens as f64 / rate as f64 * plan.wanted as f64 / plan.of as f64;
            assert!(held <= MOST as f64 * 1.01, "{length} {tokens} {window}: {held}");
            let n = (tokens / window).min(100_000);
            let chosen = (0..n).filter(|k| plan.has(*k)).count() as f64;
            assert!((chosen - n as f64 * plan.wanted as f64 / plan.of as f64).abs() <= 1.0);
        }
    }

    #[test]
    fn half_of_the_fingerprints_and_four_are_a_leak() {
        let mut leaks = Leaks::default();
        leaks.add(0, 0, &[1, 2, 3, 4, 5, 6, 7, 8]);
        leaks.add(0, 10, &[11, 12, 13, 14, 15, 16, 17, 18, 19]);
        leaks.add(1, 20, &[21, 22, 23]);
        // Boilerplate of three windows.
        (3..6u64).for_each(|k| leaks.add(1, k * 10, &[100, 101, 102, 103, k]));
        leaks.seal();
        for hash in [1, 2, 3, 4, 11, 12, 13, 14, 21, 22, 23, 100, 101, 102, 103, 3] {
            leaks.look(hash, 1000 + hash);
        }
        let found: Vec<_> = leaks.leaked().iter().map(|l| (l.split, l.start, l.at)).collect();
        assert_eq!(found, [(0, 0, 1001)]);
        assert_eq!((leaks.windows(0), leaks.windows(1)), (2, 4));
    }
}
