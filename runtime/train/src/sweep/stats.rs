//! Computes means over seeds with confidence intervals of 95 %.

/// Quantiles of Student's t at 0.975 for 1 to 30 degrees of freedom.
const T: [f64; 30] = [
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448,
    2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484,
    2.0452, 2.0423,
];

/// The quantile of the normal distribution at 0.975.
const Z: f64 = 1.959_963_985;

/// Returns the quantile at 0.975 of Student's t; beyond the table by the expansion in 1/n (Abramowitz and Stegun, 26.7.5).
/// Infinite for 0 degrees of freedom.
pub fn t_quantile(degrees: usize) -> f64 {
    match degrees {
        0 => f64::INFINITY,
        n if n <= T.len() => T[n - 1],
        n => {
            let n = n as f64;
            let first = (Z.powi(3) + Z) / 4.0;
            let second = (5.0 * Z.powi(5) + 16.0 * Z.powi(3) + 3.0 * Z) / 96.0;
            Z + first / n + second / (n * n)
        }
    }
}

/// The mean of some values, and how far the mean of the distribution may be from it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Estimate {
    pub mean: f64,
    /// Half the width of the confidence interval of 95 % by Student's t; none for a single value.
    pub half_width: Option<f64>,
    pub count: usize,
}

impl Estimate {
    /// Computes the estimate; `None` without values.
    pub fn of(values: &[f64]) -> Option<Estimate> {
        let count = values.len();
        if count == 0 {
            return None;
        }
        let mean = values.iter().sum::<f64>() / count as f64;
        let half_width = (count > 1).then(|| {
            let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (count - 1) as f64;
            t_quantile(count - 1) * (variance / count as f64).sqrt()
        });
        Some(Estimate { mean, half_width, count })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_those_of_students_t() {
        let e = Estimate::of(&[1.0, 2.0, 3.0, 4.0, 5.0]).expect("an estimate");
        // scipy.stats.t.interval(0.95, 4, 3, sqrt(2.5 / 5)): 3 -+ 1.96324.
        assert!((e.mean - 3.0).abs() < 1e-12 && (e.half_width.expect("a width") - 1.963_24).abs() < 1e-4, "{e:?}");
        assert_eq!(Estimate::of(&[7.0]), Some(Estimate { mean: 7.0, half_width: None, count: 1 }));
        assert_eq!(Estimate::of(&[]), None);
    }

    #[test]
    fn the_expansion_continues_the_table() {
        // Known values: 2.0395 for 31, 1.9840 for 100, 1.9623 for 1000.
        for (n, want) in [(31, 2.0395), (100, 1.9840), (1000, 1.9623)] {
            assert!((t_quantile(n) - want).abs() < 1e-4, "{n}: {}", t_quantile(n));
        }
        assert!((2..2000).all(|n| t_quantile(n) < t_quantile(n - 1)) && t_quantile(0).is_infinite());
    }
}
