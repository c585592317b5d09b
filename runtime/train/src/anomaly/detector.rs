//! Detects anomalies in a run's loss and gradient norm: values that are not finite, and spikes.
//!
//! The host reads these values in any case, one step late, so detection costs the device nothing. A spike is a loss far
//! above the recent ones: by ten standard deviations (estimated by the median and the median absolute deviation, which
//! outliers do not move) and by four times the distance of the largest of them from the median, so that a loss with a long tail
//! raises no alarm. With `skip` the device compares the loss with a limit computed from the losses up to two steps before;
//! a resumed run therefore skips the same steps as an uninterrupted one.

use std::collections::VecDeque;

/// The number of losses from which a limit is computed, and the minimum number.
const WINDOW: usize = 100;
const ENOUGH: usize = 20;
/// This many spikes in a row are a new level of the loss.
const LEVEL: u32 = 5;
/// A run ends after this many steps in a row without an update: the weights no longer change.
pub const MAX_SKIPPED: u32 = 20;

/// The policy for an anomaly.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Policy {
    Off,
    Warn,
    Skip,
    Stop,
}

impl Policy {
    /// Parses a policy; the recipe layer has checked the word.
    pub fn of(word: &str) -> Policy {
        match word {
            "off" => Policy::Off,
            "warn" => Policy::Warn,
            "skip" => Policy::Skip,
            _ => Policy::Stop,
        }
    }
}

/// An anomaly in the numbers of a step.
#[derive(Clone, PartialEq, Debug)]
pub enum Finding {
    NotFinite {
        metric: &'static str,
        value: f64,
    },
    /// `z` counts standard deviations above the median.
    Spike {
        median: f64,
        limit: f64,
        z: f64,
    },
}

/// The threshold that a step's loss is compared with.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Limit {
    median: f64,
    sigma: f64,
    /// A loss above this is a spike.
    pub at: f64,
}

/// Keeps a window of recent losses and computes the limit of the next one.
pub struct Detector {
    /// The window, in order of time and sorted.
    recent: VecDeque<f64>,
    sorted: Vec<f64>,
    /// Losses that are too new for the window; `None` clears it.
    new: VecDeque<(u64, Option<f64>)>,
    spikes: u32,
}

impl Detector {
    pub fn new() -> Detector {
        Detector { recent: VecDeque::new(), sorted: Vec::new(), new: VecDeque::new(), spikes: 0 }
    }

    /// Clears the window: the losses of another version of the recipe are not comparable.
    pub fn forget(&mut self) {
        *self = Detector::new();
    }

    fn median(&self) -> f64 {
        let n = self.sorted.len();
        (self.sorted[(n - 1) / 2] + self.sorted[n / 2]) / 2.0
    }

    /// Returns the median absolute deviation, by discarding the farther end of the sorted window until half is left.
    fn spread(&self, median: f64) -> f64 {
        let (mut lo, mut hi) = (0, self.sorted.len() - 1);
        for _ in 0..self.sorted.len() / 2 {
            if median - self.sorted[lo] > self.sorted[hi] - median { lo += 1 } else { hi -= 1 }
        }
        (median - self.sorted[lo]).max(self.sorted[hi] - median)
    }

    /// Returns the limit of a step about to be recorded; `None` while the window is too small. A loss enters the window two
    /// steps later, when it has been read in any case: an evaluation that reads it earlier changes no limit.
    pub fn limit_for(&mut self, step: u64) -> Option<Limit> {
        while let Some((seen, loss)) = self.new.front().copied()
            && seen + 2 <= step
        {
            self.new.pop_front();
            match loss {
                Some(loss) => self.remember(loss),
                None => (self.recent, self.sorted) = Default::default(),
            }
        }
        if self.sorted.len() < ENOUGH {
            return None;
        }
        let median = self.median();
        let sigma = 1.4826 * self.spread(median);
        let worst = self.sorted[self.sorted.len() - 1] - median;
        // Compare in f32, as the device does.
        Some(Limit { median, sigma, at: f64::from((median + (10.0 * sigma).max(4.0 * worst)) as f32) })
    }

    /// Compares the loss and norm of a step with the limit of that step; steps are passed in order. `norm` is the gradient norm,
    /// if it is known and no loss scaler handles it.
    pub fn see(&mut self, step: u64, loss: f64, norm: Option<f64>, limit: Option<Limit>) -> Option<Finding> {
        if !loss.is_finite() {
            return Some(Finding::NotFinite { metric: "loss", value: loss });
        }
        if let Some(value) = norm.filter(|n| !n.is_finite()) {
            return Some(Finding::NotFinite { metric: "grad_norm", value });
        }
        // The log stores the loss with the precision of f32.
        let loss = f64::from(loss as f32);
        let Some(Limit { median, sigma, at }) = limit.filter(|l| loss > l.at) else {
            self.spikes = 0;
            self.new.push_back((step, Some(loss)));
            return None;
        };
        self.spikes += 1;
        if self.spikes >= LEVEL {
            self.spikes = 0;
            self.new.extend([(step, None), (step, Some(loss))]);
        }
        Some(Finding::Spike { median, limit: at, z: (loss - median) / sigma })
    }

    fn remember(&mut self, loss: f64) {
        if self.recent.len() == WINDOW
            && let Some(old) = self.recent.pop_front()
        {
            let at = self.sorted.partition_point(|v| *v < old);
            self.sorted.remove(at);
        }
        self.recent.push_back(loss);
        let at = self.sorted.partition_point(|v| *v < loss);
        self.sorted.insert(at, loss);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers in 0..1 without a pattern.
    fn noise(i: u64) -> f64 {
        let x = (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40) as f64 / (1u64 << 24) as f64
    }

    #[test]
    fn the_spread_is_the_median_distance() {
        let mut s = Detector::new();
        for n in [1usize, 2, 3, 8, 33] {
            s.sorted = (0..n).map(|i| noise(i as u64 + 7)).collect();
            s.sorted.sort_by(f64::total_cmp);
            let median = s.median();
            let mut distances: Vec<f64> = s.sorted.iter().map(|v| (v - median).abs()).collect();
            distances.sort_by(f64::total_cmp);
            assert_eq!(s.spread(median), distances[(n - 1) / 2], "{n}");
        }
    }

    /// Passes losses as a run does, from step 1 on; returns the steps with a finding.
    fn watch(s: &mut Detector, losses: impl Iterator<Item = f64>) -> Vec<u64> {
        let one = |(k, loss)| {
            let step = k as u64 + 1;
            let limit = s.limit_for(step);
            s.see(step, loss, None, limit).map(|_| step)
        };
        losses.enumerate().filter_map(one).collect()
    }

    #[test]
    fn a_spike_is_found_and_a_long_tail_is_not() {
        // A falling loss with 5 % noise, like that of a language model.
        let falls = |i: u64| 6.0 * (-(i as f64) / 100.0).exp() + 2.5 + 0.1 * noise(i);
        assert_eq!(watch(&mut Detector::new(), (0..300).map(falls)), [0u64; 0]);
        let spike = |i: u64| if i == 250 { 7.0 } else { falls(i) };
        assert_eq!(watch(&mut Detector::new(), (0..300).map(spike)), [251]);
        // An exponential distribution, like a classifier's loss near its end.
        let tail = |i: u64| -0.01 * (1.0 - noise(i)).ln();
        assert_eq!(watch(&mut Detector::new(), (0..20_000).map(tail)), [0u64; 0]);
        assert_eq!(watch(&mut Detector::new(), (0..100).map(|_| 1.0)), [0u64; 0]);
    }

    #[test]
    fn a_new_level_is_accepted() {
        let level = |i: u64| if i < 50 { 1.0 } else { 9.0 } + 0.1 * noise(i);
        let found = watch(&mut Detector::new(), (0..100).map(level));
        // The fifth loss is read after the sixth step has been recorded.
        assert_eq!(found, [51, 52, 53, 54, 55, 56]);
    }

    #[test]
    fn non_finite_values_are_reported_and_do_not_enter_the_window() {
        let mut s = Detector::new();
        watch(&mut s, (0..50).map(|i| 1.0 + 0.1 * noise(i)));
        let before = s.limit_for(60);
        assert!(matches!(s.see(51, f64::NAN, None, before), Some(Finding::NotFinite { metric: "loss", .. })));
        let norm = s.see(52, 1.0, Some(f64::INFINITY), before);
        assert!(matches!(norm, Some(Finding::NotFinite { metric: "grad_norm", .. })));
        assert_eq!(s.limit_for(60), before);
        assert_eq!(s.see(53, 1.0, Some(3.0), before), None);
    }

    /// Losses are read earlier before an evaluation; the limits must be the same.
    #[test]
    fn a_limit_does_not_depend_on_when_losses_were_read() {
        let losses: Vec<f64> = (0..200).map(|i| if (120..130).contains(&i) { 9.0 } else { noise(i) }).collect();
        let limits = |early: &dyn Fn(u64) -> bool| {
            let (mut s, mut out, mut pending) = (Detector::new(), Vec::new(), None);
            for (k, loss) in losses.iter().enumerate() {
                let step = k as u64 + 1;
                let limit = s.limit_for(step);
                out.push(limit);
                if let Some((step, loss, limit)) = pending.replace((step, *loss, limit)) {
                    s.see(step, loss, None, limit);
                }
                if early(step)
                    && let Some((step, loss, limit)) = pending.take()
                {
                    s.see(step, loss, None, limit);
                }
            }
            out
        };
        let never = limits(&|_| false);
        assert_eq!(never, limits(&|_| true));
        assert_eq!(never, limits(&|step| step % 7 == 0));
        assert!(never.iter().flatten().count() > 150);
    }
}
