//! Selects content-defined fingerprints of a token sequence: hashes of its runs of N tokens, of which one in `rate` is kept.
//!
//! Whether a run is kept depends on its hash alone, so equal stretches of two corpora keep equal fingerprints, wherever they are. Periodic runs,
//! such as rulers and columns of zeros, are not kept: they say nothing of where a text is from.

use crate::minhash::mix;

/// The base of the rolling hash.
const BASE: u64 = 0x9E37_79B9_7F4A_7C15;
/// Runs that repeat with a period up to this are not kept.
const PERIODS: usize = 8;

/// Returns the tokens of a run: about 13 words of English by a vocabulary of so many ids.
pub fn run_length(ids: u64) -> usize {
    match ids {
        0..512 => 64,
        512..4096 => 32,
        _ => 16,
    }
}

/// Selects runs of one length.
#[derive(Clone, Copy, Debug)]
pub struct Runs {
    pub length: usize,
    /// One run in so many is kept.
    pub rate: u64,
    /// Hashes up to it are kept.
    limit: u64,
    /// The factor of the token that leaves a run.
    oldest: u64,
}

impl Runs {
    pub fn new(length: usize, rate: u64) -> Runs {
        let (length, rate) = (length.max(1), rate.max(1));
        let oldest = BASE.wrapping_pow(u32::try_from(length - 1).unwrap_or(u32::MAX));
        Runs { length, rate, limit: u64::MAX / rate, oldest }
    }

    /// Calls `f` with the place and the hash of each run that is kept, by rising places.
    #[inline]
    pub fn each(&self, ids: &[u32], mut f: impl FnMut(usize, u64)) {
        let code = |id: &u32| u64::from(*id) + 1;
        let before = ids.get(..self.length - 1).unwrap_or_default();
        let mut sum = before.iter().fold(0u64, |sum, id| sum.wrapping_mul(BASE).wrapping_add(code(id)));
        // Iterators over two slices are not inlined across codegen units.
        let mut at = 0;
        while let (Some(new), Some(old)) = (ids.get(at + self.length - 1), ids.get(at)) {
            sum = sum.wrapping_mul(BASE).wrapping_add(code(new));
            let hash = mix(sum);
            if hash <= self.limit && ids.get(at..at + self.length).is_some_and(|run| !is_periodic(run)) {
                f(at, hash);
            }
            sum = sum.wrapping_sub(code(old).wrapping_mul(self.oldest));
            at += 1;
        }
    }
}

fn is_periodic(run: &[u32]) -> bool {
    let repeats = |period: usize| run.get(period) == run.first() && run.get(period..) == run.get(..run.len() - period);
    (1..=PERIODS.min(run.len() / 2)).any(repeats)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn drawn(seed: u64, n: usize, ids: u64) -> Vec<u32> {
        (0..n as u64).map(|k| (mix(seed.wrapping_mul(1 << 32).wrapping_add(k)) % ids) as u32).collect()
    }

    fn runs(runs: Runs, ids: &[u32]) -> Vec<(usize, u64)> {
        let mut out = Vec::new();
        runs.each(ids, |at, hash| out.push((at, hash)));
        out
    }

    #[test]
    fn equal_runs_have_equal_hashes_and_others_differ() {
        let ids = drawn(3, 5000, 3);
        let mut by_run: HashMap<&[u32], u64> = HashMap::new();
        let found = runs(Runs::new(12, 1), &ids);
        for (at, hash) in &found {
            assert_eq!(*by_run.entry(&ids[*at..at + 12]).or_insert(*hash), *hash, "{at}");
        }
        let hashes: std::collections::HashSet<u64> = by_run.values().copied().collect();
        assert_eq!(hashes.len(), by_run.len());
        assert!(found.len() > 4900, "{}", found.len());
    }

    #[test]
    fn what_is_kept_depends_on_the_run_alone() {
        let (text, rate) = (drawn(1, 4000, 50_000), 16);
        let mut other = drawn(2, 777, 50_000);
        other.extend(&text);
        let (alone, inside) = (runs(Runs::new(16, rate), &text), runs(Runs::new(16, rate), &other));
        let own: Vec<_> = inside.iter().filter(|r| r.0 >= 777).map(|r| (r.0 - 777, r.1)).collect();
        assert_eq!(alone, own);
        assert!((150..350).contains(&alone.len()), "{}", alone.len());
    }

    #[test]
    fn periodic_and_short_sequences_keep_nothing() {
        let all = Runs::new(16, 1);
        for period in 1..=8u32 {
            let ids: Vec<u32> = (0..100).map(|k| k % period).collect();
            assert_eq!(runs(all, &ids), [], "{period}");
        }
        assert_eq!(runs(all, &(0..15).collect::<Vec<_>>()), []);
        assert_eq!(runs(all, &(0..16).collect::<Vec<_>>()).len(), 1);
        assert_eq!(runs(all, &[]), []);
    }
}
