//! Divides a run into windows between its checkpoints, draws some of them, and computes the chance that they find a tampering.
//!
//! The windows are a partition of the steps: each begins and ends at a checkpoint of the record (or at the beginning and the end of the
//! run). One that is replayed compares every State at its end, so a tampering of any of its steps is found. Of m windows k different
//! ones are drawn, each set of k with the same probability. A tampering that lies in w windows is missed if all k are among the
//! other m - w:
//!
//! ```text
//! P(found) = 1 - C(m - w, k) / C(m, k)      for one step, w = 1:  k / m
//! ```
//!
//! This holds for every step, whichever the forger chose, if the seed of the draw was not known when the run was written.

use crate::error::{Error, Result};
use serde_json::{Value, json};

/// Windows that were drawn.
#[derive(Clone, PartialEq, Debug)]
pub struct Draw {
    /// In the order of the steps, as `(from, to)`.
    pub windows: Vec<(u64, u64)>,
    /// The number of windows of the run.
    pub of: usize,
    pub seed: u64,
    /// The steps of the windows, and of the run.
    pub covered: u64,
    pub steps: u64,
}

/// Divides the steps 1 to `end` at `checkpoints`, which are in order. With a length, neighbouring windows are joined until they have at
/// least as many steps; they are never cut, since a window ends where States can be compared.
pub fn partition(checkpoints: &[u64], end: u64, length: Option<u64>) -> Vec<(u64, u64)> {
    let (mut out, mut from) = (Vec::new(), 0);
    let inside = checkpoints.iter().copied().filter(|step| *step > 0 && *step < end);
    for to in inside.chain(Some(end)) {
        if to > from && (to == end || to - from >= length.unwrap_or(1)) {
            out.push((from, to));
            from = to;
        }
    }
    out
}

/// Draws `count` different windows of `all`.
///
/// # Errors
/// There are fewer, or none was asked for.
pub fn draw(all: &[(u64, u64)], count: usize, seed: u64) -> Result<Draw> {
    let (of, rule) = (all.len(), "the run has");
    if count == 0 || count > of {
        return Err(Error::Usage(format!(
            "--windows {count}: {rule} {of} window{} between its checkpoints\n  hint: --checkpoint-every and --keep 0 make more of them; --steps .. replays all",
            if of == 1 { "" } else { "s" }
        )));
    }
    let mut order: Vec<usize> = (0..of).collect();
    // The first `count` places of a Fisher–Yates shuffle.
    let mut stream = blake3::Hasher::new().update(b"windows").update(&seed.to_le_bytes()).finalize_xof();
    for k in 0..count {
        let at = k + below(&mut stream, (of - k) as u64) as usize;
        order.swap(k, at);
    }
    order.truncate(count);
    order.sort_unstable();
    let windows: Vec<(u64, u64)> = order.into_iter().filter_map(|k| all.get(k).copied()).collect();
    let covered = windows.iter().map(|(from, to)| to - from).sum();
    Ok(Draw { windows, of, seed, covered, steps: all.last().map_or(0, |w| w.1) })
}

/// Returns a uniform number below `n`: numbers of the last, incomplete range are drawn again.
fn below(stream: &mut blake3::OutputReader, n: u64) -> u64 {
    let limit = u64::MAX - u64::MAX % n;
    loop {
        let mut bytes = [0; 8];
        stream.fill(&mut bytes);
        let bits = u64::from_le_bytes(bytes);
        if bits < limit {
            return bits % n;
        }
    }
}

/// Returns the chance that `drawn` of `all` windows include one of the `tampered` ones.
pub fn chance(all: usize, drawn: usize, tampered: usize) -> f64 {
    if drawn + tampered > all {
        return 1.0;
    }
    // C(m - w, k) / C(m, k), factor by factor.
    let missed = (0..drawn).map(|k| (all - tampered - k) as f64 / (all - k) as f64);
    1.0 - missed.product::<f64>()
}

impl Draw {
    /// Returns the chance that these windows find a tampering of one step.
    pub fn chance(&self) -> f64 {
        self.windows.len() as f64 / self.of as f64
    }

    /// Returns the share of the run's steps that the windows cover.
    pub fn share(&self) -> f64 {
        self.covered as f64 / self.steps.max(1) as f64
    }

    /// Returns the event `audit` of `--json`. `differences` of the windows differ from the record.
    pub fn json(&self, differences: usize) -> Value {
        json!({
            "event": "audit", "windows": self.windows.len(), "of": self.of, "covered": self.covered, "steps": self.steps,
            "share": self.share(), "chance": self.chance(), "seed": self.seed, "differences": differences,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_divided_at_its_checkpoints() {
        let steps = [4, 8, 12, 13];
        assert_eq!(partition(&steps, 13, None), [(0, 4), (4, 8), (8, 12), (12, 13)]);
        assert_eq!(partition(&steps, 15, None), [(0, 4), (4, 8), (8, 12), (12, 13), (13, 15)]);
        assert_eq!(partition(&steps, 15, Some(5)), [(0, 8), (8, 13), (13, 15)]);
        assert_eq!(partition(&[], 7, Some(3)), [(0, 7)]);
        assert_eq!(partition(&[0, 9, 20], 9, None), [(0, 9)]);
        assert!(partition(&[], 0, None).is_empty());
    }

    #[test]
    fn a_draw_has_different_windows_and_can_be_repeated() {
        let all = partition(&(1..40).collect::<Vec<_>>(), 40, None);
        let (a, b) = (draw(&all, 12, 5).expect("drawn"), draw(&all, 12, 5).expect("drawn"));
        assert_eq!(a, b);
        assert!(a.windows.is_sorted_by(|x, y| x.0 < y.0) && a.windows.len() == 12 && a.covered == 12);
        assert_ne!(a.windows, draw(&all, 12, 6).expect("drawn").windows);
        assert_eq!((a.chance(), a.share()), (0.3, 0.3));
        for count in [0, 41] {
            let error = draw(&all, count, 5).expect_err("too many").to_string();
            assert!(error.contains("the run has 40 windows between its checkpoints\n  hint: "), "{error}");
        }
    }

    /// The formula against draws: windows of unequal lengths, a forger who chose any step, or several.
    #[test]
    fn the_chance_is_the_share_of_draws_that_find_a_tampering() {
        let all = partition(&[1, 2, 10, 11, 30, 31, 32, 60, 61], 100, None);
        let (m, k, draws) = (all.len(), 3, 20_000u64);
        for tampered in [vec![1], vec![70], vec![5, 6], vec![1, 70], vec![1, 5, 20, 70]] {
            let holds = |step: u64, windows: &[(u64, u64)]| windows.iter().any(|w| w.0 < step && step <= w.1);
            let windows_of = all.iter().filter(|w| tampered.iter().any(|step| holds(*step, &[**w]))).count();
            let found = (0..draws).filter(|seed| {
                let drawn = draw(&all, k, *seed).expect("drawn").windows;
                tampered.iter().any(|step| holds(*step, &drawn))
            });
            let (share, expected) = (found.count() as f64 / draws as f64, chance(m, k, windows_of));
            let deviation = (expected * (1.0 - expected) / draws as f64).sqrt();
            assert!((share - expected).abs() < 5.0 * deviation, "{tampered:?}: {share}, expected {expected}");
        }
        assert_eq!(chance(10, 3, 1), 1.0 - (9.0 / 10.0) * (8.0 / 9.0) * (7.0 / 8.0));
        assert_eq!((chance(10, 10, 1), chance(10, 3, 8), chance(10, 3, 0)), (1.0, 1.0, 0.0));
    }
}
