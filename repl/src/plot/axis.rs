//! Scales axes: maps numbers to positions, and chooses round numbers for ticks.

/// Larger numbers count as infinite: a difference of two of them may overflow.
const HUGE: f64 = 1e300;

/// Whether a number can be placed on an axis.
pub fn drawable(v: f64, log: bool) -> bool {
    v.abs() <= HUGE && (!log || v > 1.0 / HUGE)
}

/// Returns the least and the greatest number, widened when they are equal.
pub fn range(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    let (lo, hi) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(lo, hi), v| (lo.min(v), hi.max(v)));
    if lo > hi {
        return None;
    }
    let size = lo.abs().max(hi.abs());
    if hi - lo > size * 1e-12 && hi - lo > 1.0 / HUGE {
        return Some((lo, hi));
    }
    let apart = if size > 1e-290 { size * 0.1 } else { 1.0 };
    Some((lo - apart, hi + apart))
}

#[derive(Clone, Debug)]
pub struct Axis {
    lo: f64,
    hi: f64,
    log: bool,
    /// Values with their labels.
    pub ticks: Vec<(f64, String)>,
}

impl Axis {
    /// Creates an axis from `lo` to `hi` with about `wanted` ticks; both ends are extended by the share `pad` of the length.
    pub fn new((lo, hi): (f64, f64), log: bool, pad: f64, wanted: usize) -> Axis {
        let (a, b) = if log { (lo.log10(), hi.log10()) } else { (lo, hi) };
        let extra = (b - a) * pad;
        let (a, b) = (a - extra, b + extra);
        let ticks = if log { log_ticks(a, b, wanted) } else { ticks(a, b, wanted) };
        Axis { lo: a, hi: b, log, ticks }
    }

    /// Maps a number to its position: 0 at the lower end, 1 at the upper.
    pub fn at(&self, v: f64) -> f64 {
        let v = if self.log { v.log10() } else { v };
        (v - self.lo) / (self.hi - self.lo)
    }
}

/// Returns the step of 1, 2 or 5 times a power of ten that gives at most about `wanted` ticks.
fn nice_step(span: f64, wanted: usize) -> f64 {
    let raw = span / wanted.max(1) as f64;
    let power = 10f64.powf(raw.log10().floor());
    let times = raw / power;
    power
        * if times <= 1.0 {
            1.0
        } else if times <= 2.0 {
            2.0
        } else if times <= 5.0 {
            5.0
        } else {
            10.0
        }
}

fn ticks(lo: f64, hi: f64, wanted: usize) -> Vec<(f64, String)> {
    let step = nice_step(hi - lo, wanted);
    let first = (lo / step - 1e-9).ceil();
    let values = (0..100).map(|i| (first + f64::from(i)) * step).take_while(|v| *v <= hi + step * 1e-9);
    let values: Vec<f64> = values.map(|v| if v == 0.0 { 0.0 } else { v }).collect();
    let most = values.iter().fold(0f64, |m, v| m.max(v.abs()));
    values.iter().map(|v| (*v, label(*v, step, most))).collect()
}

/// Returns powers of ten as ticks; if they are few, also their multiples by 2 and 5.
fn log_ticks(lo: f64, hi: f64, wanted: usize) -> Vec<(f64, String)> {
    let (first, last) = ((lo - 1e-9).ceil() as i32, (hi + 1e-9).floor() as i32);
    let decades = (last - first + 1).max(0) as usize;
    let inside = |v: f64| (lo - 1e-9..=hi + 1e-9).contains(&v.log10());
    let mut values: Vec<f64> = if decades >= 3 {
        let least = decades.div_ceil(wanted.max(2)) as i32;
        let every = [1, 2, 3, 5, 10, 20, 50, 100].into_iter().find(|n| *n >= least).unwrap_or(least);
        (first..=last).filter(|e| e % every == 0).map(|e| 10f64.powi(e)).collect()
    } else {
        let company = (first - 1..=last).flat_map(|e| [1.0, 2.0, 5.0].map(|m| m * 10f64.powi(e)));
        company.filter(|v| inside(*v)).collect()
    };
    if values.len() < 2 {
        values =
            ticks(10f64.powf(lo), 10f64.powf(hi), wanted).into_iter().map(|(v, _)| v).filter(|v| *v > 0.0).collect();
        let (step, most) = (nice_step(10f64.powf(hi) - 10f64.powf(lo), wanted), 10f64.powf(hi));
        return values.iter().map(|v| (*v, label(*v, step, most))).collect();
    }
    values.iter().map(|v| (*v, label(*v, 10f64.powf((v.log10() + 1e-9).floor()), *v))).collect()
}

/// Formats a tick among others that are `step` apart and at most `most` in size, with as few digits as distinguish them.
fn label(v: f64, step: f64, most: f64) -> String {
    if !(1e-4..1e15).contains(&most) {
        if v == 0.0 {
            return "0".into();
        }
        let digits = (most.log10().floor() - (step * 1.000001).log10().floor()).clamp(0.0, 15.0) as usize;
        let text = format!("{v:.digits$e}");
        return match text.split_once('e') {
            Some((m, e)) if m.contains('.') => format!("{}e{e}", m.trim_end_matches('0').trim_end_matches('.')),
            _ => text,
        };
    }
    let (unit, suffix) = match most {
        m if m >= 1e12 => (1e12, "T"),
        m if m >= 1e9 => (1e9, "G"),
        m if m >= 1e6 => (1e6, "M"),
        m if m >= 1e4 => (1e3, "k"),
        _ => (1.0, ""),
    };
    let decimals = (-(step / unit * 1.000001).log10().floor()).clamp(0.0, 15.0) as usize;
    let text = format!("{:.decimals$}", v / unit);
    if v == 0.0 { "0".into() } else { format!("{text}{suffix}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(lo: f64, hi: f64, log: bool) -> Vec<String> {
        Axis::new((lo, hi), log, 0.0, 5).ticks.into_iter().map(|t| t.1).collect()
    }

    #[test]
    fn ticks_are_round_and_tell_each_other_apart() {
        assert_eq!(shown(0.0, 1.0, false), ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]);
        assert_eq!(shown(-3.0, 7.0, false), ["-2", "0", "2", "4", "6"]);
        assert_eq!(shown(0.0, 50_000.0, false), ["0", "10k", "20k", "30k", "40k", "50k"]);
        assert_eq!(shown(1e6, 1.002e6, false), ["1.0000M", "1.0005M", "1.0010M", "1.0015M", "1.0020M"]);
        assert_eq!(shown(0.0, 3e-7, false), ["0", "1e-7", "2e-7", "3e-7"]);
        assert_eq!(shown(0.001, 100.0, true), ["0.01", "1", "100"]);
        assert_eq!(shown(0.01, 100.0, true), ["0.01", "0.1", "1", "10", "100"]);
        assert_eq!(shown(0.5, 3.0, true), ["0.5", "1", "2"]);
        assert_eq!(shown(2.1, 2.9, true), ["2.2", "2.4", "2.6", "2.8"]);
        assert_eq!(shown(1e-20, 1e20, true), ["1e-20", "1e-10", "1", "10G", "1e20"]);
    }

    #[test]
    fn a_range_is_never_empty() {
        assert_eq!(range([2.0, 2.0].into_iter()), Some((1.8, 2.2)));
        assert_eq!(range([0.0].into_iter()), Some((-1.0, 1.0)));
        assert_eq!(range(std::iter::empty()), None);
        for v in [1e-310, 5e-324, 1e300, -1e300] {
            let (lo, hi) = range([v].into_iter()).expect("there is one number");
            let axis = Axis::new((lo, hi), false, 0.05, 5);
            assert!((0.0..=1.0).contains(&axis.at(v)), "{v}: {axis:?}");
            assert!(axis.ticks.len() < 20, "{axis:?}");
        }
    }
}
