//! Finds stretches of the training part of a corpus that repeat an earlier one, by fingerprints of long token runs.

use crate::field::Rows;
use crate::token_leaks::MOST;
use crate::token_runs::Runs;
use rustc_hash::FxHashMap;
use std::collections::hash_map::Entry;

/// Repetitions that are named, with the stretch that they repeat.
const NAMED: usize = 5;

/// Stretches that repeat an earlier one.
pub struct Repeats {
    pub runs: Runs,
    /// The first token of each fingerprint.
    first: FxHashMap<u64, u64>,
    /// Fingerprints that occurred before.
    repeated: u64,
    /// The first tokens of repeated stretches.
    pub stretches: Rows,
    /// Of the first stretches: their first token, and that of the earlier one.
    pub named: Vec<(u64, u64)>,
    /// The place from which fingerprints follow without a gap, and whether the last one was repeated.
    end: u64,
    open: bool,
}

impl Repeats {
    /// Chooses the rate by the tokens that are read. Runs are four times as long as those of leaks: sentences recur in any corpus.
    pub fn new(length: usize, tokens: u64) -> Repeats {
        let runs = Runs::new(4 * length, tokens.div_ceil(MOST));
        let (first, stretches) = (FxHashMap::default(), Rows::default());
        Repeats { runs, first, repeated: 0, stretches, named: Vec::new(), end: 0, open: false }
    }

    /// Adds the fingerprints of a block.
    pub fn add(&mut self, start: u64, size: u64, found: &[(u64, u64)]) {
        self.open &= self.end == start;
        self.end = start + size;
        for (at, hash) in found {
            let full = self.first.len() as u64 >= 2 * MOST;
            match self.first.entry(*hash) {
                Entry::Occupied(earlier) => {
                    self.repeated += 1;
                    if !self.open {
                        self.stretches.add(*at);
                        if self.named.len() < NAMED {
                            self.named.push((*at, *earlier.get()));
                        }
                    }
                    self.open = true;
                }
                Entry::Vacant(place) => {
                    self.open = false;
                    if !full {
                        place.insert(*at);
                    }
                }
            }
        }
    }

    /// The tokens of repeated stretches: a fingerprint stands for `rate` of their runs, and a stretch ends with its last run.
    pub fn tokens(&self) -> u64 {
        self.repeated * self.runs.rate + self.stretches.count * (self.runs.length as u64 - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::minhash::mix;

    #[test]
    fn the_tokens_of_repeated_stretches_are_counted() {
        let mut ids: Vec<u32> = (0..20_000u64).map(|k| (mix(k) % 50_000) as u32).collect();
        ids.copy_within(100..600, 5_000);
        ids.copy_within(1_000..2_000, 12_000);
        for (rate, off) in [(1, 0), (7, 150)] {
            let mut repeats = Repeats::new(16, rate * MOST);
            assert_eq!(repeats.runs.rate, rate);
            for start in (0..20_000).step_by(2_500) {
                let mut found = Vec::new();
                let end = (start + 2_500 + 63).min(ids.len());
                repeats.runs.each(&ids[start..end], |at, hash| found.push(((start + at) as u64, hash)));
                repeats.add(start as u64, 2_500, &found);
            }
            assert!(repeats.tokens().abs_diff(1_500) <= off, "{rate}: {}", repeats.tokens());
            assert_eq!(repeats.stretches.count, 2, "{rate}");
            if rate == 1 {
                assert_eq!(
                    (repeats.stretches.rows, repeats.named),
                    (vec![5_000, 12_000], vec![(5_000, 100), (12_000, 1_000)])
                );
            }
        }
    }
}
