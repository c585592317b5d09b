//! Splits a set into named parts (`train`, `valid`, …): disjoint, complete, and the same for the same seed.
//!
//! A part can be requested alone, without declaring the others: `("train", 0.8)` and `("valid", 0.2)`
//! must be disjoint although neither call refers to the other. So the positions of one permutation are assigned in a fixed
//! order, the other parts by name first and `train` last, and fractions are rounded to a billionth, so that 1 - 0.2 and
//! 0.8 are equal. Not supported: splits by group or by class.

use crate::error::{Error, Result, quote};
use crate::sample_order::{Permutation, Stream};

const WHOLE: u64 = 1_000_000_000;

/// A set divided into parts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Split {
    order: Permutation,
    /// The name, and the half-open range in `order`.
    parts: Vec<(String, u64, u64)>,
}

impl Split {
    /// Creates a split of all parts, whose fractions must sum to 1.
    pub fn new(n: usize, seed: u64, fractions: &[(&str, f64)]) -> Result<Split> {
        let mut sorted = fractions.to_vec();
        sorted.sort_by_key(|(name, _)| (*name == "train", *name));
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(Error::argument("split", format!("has the part {} twice", quote(pair[0].0))));
        }
        let mut billionths = Vec::with_capacity(sorted.len());
        for (name, f) in &sorted {
            if !(*f >= 0.0 && *f <= 1.0) {
                let rule = format!("the fraction of {} is {f}; it must be from 0 to 1", quote(name));
                return Err(Error::argument("split", rule));
            }
            billionths.push((f * WHOLE as f64).round() as u64);
        }
        let sum: u64 = billionths.iter().sum();
        // Fractions such as 1/3 leave a few billionths, which belong to the last part.
        if sum.abs_diff(WHOLE) > 1000 {
            let said = sorted.iter().map(|(name, f)| format!("{name} = {f}")).collect::<Vec<_>>().join(", ");
            let rule = format!("the fractions ({said}) sum to {}, not to 1", sum as f64 / WHOLE as f64);
            return Err(Error::argument("split", rule).hint("name the remaining part too, for instance unused = 0.1"));
        }
        let mut parts = Vec::with_capacity(sorted.len());
        let (mut upto, mut start) = (0u64, 0u64);
        for (i, ((name, _), share)) in sorted.iter().zip(billionths).enumerate() {
            upto = (upto + share).min(WHOLE);
            let end = match i + 1 == sorted.len() {
                true => n as u64,
                false => ((n as u128 * u128::from(upto) + u128::from(WHOLE) / 2) / u128::from(WHOLE)) as u64,
            };
            parts.push((name.to_string(), start, end));
            start = end;
        }
        Ok(Split { order: Permutation::new(n as u64, seed, 0, Stream::Split), parts })
    }

    /// Returns one part of two, by its name and fraction: `train`, or the part held out from it, `valid` or `test`.
    ///
    /// `valid` and `test` are the same samples, so a set split by single calls has one of them; for both, name all
    /// three parts in `new`.
    pub fn single(n: usize, seed: u64, name: &str, fraction: f64) -> Result<Split> {
        if !["train", "valid", "test"].contains(&name) {
            let rule = format!(
                "{} needs the fractions of the other parts; only train, valid and test work alone",
                quote(name)
            );
            let cure = "name every part with its fraction, for instance { train = 0.8, valid = 0.1, extra = 0.1 }";
            return Err(Error::argument("split", rule).hint(cure));
        }
        let other = if name == "train" { "valid" } else { "train" };
        Split::new(n, seed, &[(name, fraction), (other, 1.0 - fraction)])
    }

    /// Returns the names of the parts, in the order of assignment.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().map(|(name, ..)| name.as_str())
    }

    /// Returns the samples of a part in ascending order. An empty part is an error, since a recipe would train on nothing.
    pub fn part(&self, name: &str) -> Result<Vec<u64>> {
        let Some((_, start, end)) = self.parts.iter().find(|(n, ..)| n == name) else {
            let rule = format!("has no part {} (parts: {})", quote(name), self.names().collect::<Vec<_>>().join(", "));
            return Err(Error::argument("split", rule));
        };
        if start == end {
            let rule = format!("leaves {} none of the {} samples", quote(name), self.order.len());
            return Err(Error::argument("split", rule).hint("use a larger fraction"));
        }
        let mut samples: Vec<u64> = (*start..*end).map(|i| self.order.at(i)).collect();
        samples.sort_unstable();
        Ok(samples)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_calls_fit_together() -> Result<()> {
        for n in [2usize, 3, 5, 10, 15, 150, 1797] {
            for valid in [0.1, 0.2, 0.25, 0.3, 1.0 / 3.0, 0.5, 0.9] {
                let rounded = (valid * n as f64).round() as usize;
                if rounded == 0 || rounded == n {
                    continue;
                }
                let train = Split::single(n, 3, "train", 1.0 - valid)?.part("train")?;
                let held = Split::single(n, 3, "valid", valid)?.part("valid")?;
                assert_eq!(held, Split::single(n, 3, "test", valid)?.part("test")?);
                assert_eq!(held.len(), rounded, "n = {n}, valid = {valid}");
                let mut all = [train, held].concat();
                all.sort_unstable();
                assert_eq!(all, (0..n as u64).collect::<Vec<_>>(), "n = {n}, valid = {valid}");
            }
        }
        assert_eq!(Split::single(1797, 1, "train", 0.8)?.part("train")?.len(), 1438);
        Ok(())
    }

    #[test]
    fn named_parts_are_disjoint_and_whole_in_any_order() -> Result<()> {
        let a = Split::new(101, 1, &[("train", 0.7), ("valid", 0.1), ("test", 0.2)])?;
        let b = Split::new(101, 1, &[("test", 0.2), ("train", 0.7), ("valid", 0.1)])?;
        assert_eq!(a, b);
        let mut all = Vec::new();
        for (name, count) in [("test", 20), ("valid", 10), ("train", 71)] {
            let part = a.part(name)?;
            assert_eq!(part.len(), count, "{name}");
            assert!(part.windows(2).all(|w| w[0] < w[1]));
            all.extend(part);
        }
        all.sort_unstable();
        assert_eq!(all, (0..101).collect::<Vec<_>>());
        assert_ne!(a.part("test")?, Split::new(101, 2, &[("test", 0.2), ("train", 0.8)])?.part("test")?);
        let thirds = Split::new(9, 1, &[("a", 1.0 / 3.0), ("b", 1.0 / 3.0), ("c", 1.0 / 3.0)])?;
        assert!(thirds.names().all(|name| thirds.part(name).is_ok_and(|p| p.len() == 3)));
        assert_eq!(Split::new(7, 1, &[("train", 1.0)])?.part("train")?.len(), 7);
        Ok(())
    }

    #[test]
    fn bad_fractions_are_refused() {
        let message = |r: Result<Split>| r.map_err(|e| e.to_string()).expect_err("refused");
        assert!(message(Split::new(9, 1, &[("train", 0.8), ("valid", 0.1)])).contains("sum to 0.9"));
        assert!(message(Split::new(9, 1, &[("train", 1.5), ("valid", -0.5)])).contains("-0.5"));
        assert!(message(Split::new(9, 1, &[("train", f64::NAN)])).contains("NaN"));
        assert!(message(Split::new(9, 1, &[("a", 0.5), ("a", 0.5)])).contains("twice"));
        assert!(message(Split::new(9, 1, &[])).contains("sum to 0"));
        assert!(message(Split::single(9, 1, "extra", 0.5)).contains("every part"));
        let empty = Split::single(3, 1, "valid", 0.1).and_then(|s| s.part("valid")).map_err(|e| e.to_string());
        assert!(empty.is_err_and(|m| m.contains("none of the 3")));
        assert!(Split::single(3, 1, "valid", 0.4).and_then(|s| s.part("nope")).is_err());
    }
}
