//! Divides the time of a training step into parts that sum to it.
//!
//! Steps are measured in rounds, and each part is the median over its rounds, so that a round disturbed by another process has
//! no effect. The parts are measured separately (kernels one by one, steps as they run) and may overlap, so that they
//! do not sum to the step: the last row is the difference, which is negative where they overlap.

use std::fmt::Write;

/// An outlier is farther from the median than so many median deviations, than this share of the median, and than so many
/// seconds.
const DEVIATIONS: f64 = 5.0;
const SHARE: f64 = 0.1;
const SECONDS: f64 = 5e-6;

/// The rule of [`outliers`], for tables.
pub const RULE: &str = "farther from the median than 5 median deviations, a tenth of it and 5 us";

/// Returns the median, or 0 without samples.
pub fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

/// Returns the indices of the samples that are far from the median.
pub fn outliers(samples: &[f64]) -> Vec<usize> {
    let middle = median(samples);
    let away: Vec<f64> = samples.iter().map(|s| (s - middle).abs()).collect();
    let most = (DEVIATIONS * median(&away)).max(SHARE * middle).max(SECONDS);
    (0..samples.len()).filter(|k| away[*k] > most).collect()
}

/// Seconds of each round.
#[derive(Clone, Default, Debug)]
pub struct Rounds {
    /// From the results of one step to those of the next.
    pub steps: Vec<f64>,
    /// Of this, the call that records a step and queues or runs its kernels.
    pub calls: Vec<f64>,
    /// Of the call, the waits of the host for a batch and for a value of the device.
    pub data: Vec<f64>,
    pub sync: Vec<f64>,
    /// The sum of the medians of a step's kernels, each timed alone.
    pub kernels: f64,
}

/// The parts of a step in tenths of a microsecond, rounded for display, so that the displayed numbers also sum.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Parts {
    pub step: i64,
    pub rows: Vec<(&'static str, i64)>,
}

impl Rounds {
    /// `inside`: whether kernels run within the call, as on a CPU, rather than after it.
    pub fn parts(&self, inside: bool) -> Parts {
        let tenths = |seconds: f64| (seconds * 1e7).round() as i64;
        let [step, call, data, sync] =
            [&self.steps, &self.calls, &self.data, &self.sync].map(|samples| tenths(median(samples)));
        let kernels = tenths(self.kernels);
        let host = (call - data - sync - if inside { kernels } else { 0 }).max(0);
        let rest = step - (kernels + host + data + sync);
        let last =
            if rest < 0 { "overlap: parts that ran beside each other" } else { "other: reads, waits for the device" };
        let rows = vec![
            ("kernels", kernels),
            ("host: recording, launches", host),
            ("data: the host makes batches", data),
            ("sync: the host waits for a value", sync),
            (last, rest),
        ];
        Parts { step, rows }
    }

    /// Formats a table of the parts and a list of outlier steps.
    pub fn table(&self, inside: bool) -> String {
        let parts = self.parts(inside);
        let micros = |x: i64| format!("{}{}.{}", if x < 0 { "-" } else { "" }, x.abs() / 10, x.abs() % 10);
        let share = |x: i64| x as f64 / parts.step.max(1) as f64 * 100.0;
        let ends = |pick: fn(f64, f64) -> f64| self.steps.iter().copied().reduce(pick).unwrap_or(0.0) * 1e6;
        let mut out = format!(
            "parts of a step, medians of {} steps ({:.1} to {:.1} us)\n  share   us a step  part\n",
            self.steps.len(),
            ends(f64::min),
            ends(f64::max)
        );
        for (name, part) in parts.rows.iter().chain([&("step", parts.step)]) {
            let _ = writeln!(out, "{:>5.1} % {:>11}  {name}", share(*part), micros(*part));
        }
        let far: Vec<String> =
            outliers(&self.steps).iter().map(|k| format!("step {} ({:.1} us)", k + 1, self.steps[*k] * 1e6)).collect();
        if !far.is_empty() {
            let _ = writeln!(out, "outliers, {RULE}: {}", far.join(", "));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_not_moved_by_one_round() {
        assert_eq!(
            [median(&[]), median(&[3.0]), median(&[1.0, 9.0, 2.0]), median(&[4.0, 1.0, 2.0, 9.0])],
            [0.0, 3.0, 2.0, 3.0]
        );
        assert_eq!(outliers(&[1e-3, 1.01e-3, 9e-3, 0.99e-3, 1e-3]), [2]);
        assert_eq!(outliers(&[1e-3, 1.05e-3, 0.95e-3]), [] as [usize; 0]);
        // Differences of microseconds are noise.
        assert_eq!(outliers(&[1e-6, 1e-6, 1e-6, 5e-6]), [] as [usize; 0]);
    }

    #[test]
    fn parts_sum_to_the_step_as_shown() {
        let rounds = Rounds {
            steps: vec![1.000_04e-3, 1.000_06e-3, 7e-3],
            calls: vec![0.9e-3; 3],
            data: vec![0.1e-3, 0.100_06e-3, 0.2e-3],
            sync: vec![0.05e-3; 3],
            kernels: 0.600_004e-3,
        };
        let on_cpu = rounds.parts(true);
        assert_eq!(on_cpu.step, 10_001);
        assert_eq!(on_cpu.rows.iter().map(|r| r.1).collect::<Vec<_>>(), [6_000, 1_499, 1_001, 500, 1_001]);
        let on_gpu = rounds.parts(false);
        assert_eq!(on_gpu.rows.iter().map(|r| r.1).collect::<Vec<_>>(), [6_000, 7_499, 1_001, 500, -4_999]);
        for parts in [&on_cpu, &on_gpu] {
            assert_eq!(parts.rows.iter().map(|r| r.1).sum::<i64>(), parts.step);
        }
        assert!(on_gpu.rows[4].0.starts_with("overlap") && on_cpu.rows[4].0.starts_with("other"));
        let text = rounds.table(false);
        assert!(text.contains("-50.0 %      -499.9  overlap"), "{text}");
        assert!(text.contains("100.0 %      1000.1  step\n"), "{text}");
        assert!(text.ends_with(": step 3 (7000.0 us)\n"), "{text}");
    }
}
