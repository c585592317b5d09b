//! Tests whether two samples of categories have one distribution (Pearson's chi-square).

/// The result of a test.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ChiSquare {
    pub statistic: f64,
    pub freedom: u32,
    /// The probability of a statistic at least as large under one distribution.
    pub p: f64,
    /// Cramér's V: the size of the difference, from 0 to 1.
    pub effect: f64,
}

/// Compares counts of the same categories. Categories whose expected count is below 5 are merged. `None` if fewer than two remain.
pub fn compare(pairs: &[(u64, u64)]) -> Option<ChiSquare> {
    let sum = |f: fn(&(u64, u64)) -> u64| pairs.iter().map(|p| f(p) as f64).sum::<f64>();
    let (a, b) = (sum(|p| p.0), sum(|p| p.1));
    let all = a + b;
    if a == 0.0 || b == 0.0 {
        return None;
    }
    let (mut cells, mut rest) = (Vec::new(), (0.0, 0.0));
    for (x, y) in pairs.iter().map(|(x, y)| (*x as f64, *y as f64)) {
        match (x + y) * a.min(b) / all >= 5.0 {
            true => cells.push((x, y)),
            false => rest = (rest.0 + x, rest.1 + y),
        }
    }
    if rest.0 + rest.1 > 0.0 {
        cells.push(rest);
    }
    if cells.len() < 2 {
        return None;
    }
    let term = |seen: f64, expected: f64| (seen - expected).powi(2) / expected;
    let statistic: f64 = cells.iter().map(|(x, y)| term(*x, (x + y) * a / all) + term(*y, (x + y) * b / all)).sum();
    let freedom = u32::try_from(cells.len() - 1).unwrap_or(u32::MAX);
    let p = upper_gamma(f64::from(freedom) / 2.0, statistic / 2.0);
    Some(ChiSquare { statistic, freedom, p, effect: (statistic / all).sqrt() })
}

/// The regularized upper incomplete gamma function Q(a, x), by its series or its continued fraction.
fn upper_gamma(a: f64, x: f64) -> f64 {
    if x <= 0.0 {
        return 1.0;
    }
    let front = (a * x.ln() - x - libm::lgamma(a)).exp();
    if x < a + 1.0 {
        let (mut term, mut sum, mut n) = (1.0 / a, 1.0 / a, a);
        for _ in 0..10_000 {
            n += 1.0;
            term *= x / n;
            sum += term;
            if term < sum * 1e-16 {
                break;
            }
        }
        return (1.0 - front * sum).clamp(0.0, 1.0);
    }
    // Lentz's algorithm.
    let (mut b, mut c) = (x + 1.0 - a, 1e300);
    let mut d = 1.0 / b;
    let mut h = d;
    for i in 1..10_000 {
        let an = -f64::from(i) * (f64::from(i) - a);
        b += 2.0;
        d = 1.0 / (an * d + b);
        c = b + an / c;
        let step = d * c;
        h *= step;
        if (step - 1.0).abs() < 1e-15 {
            break;
        }
    }
    (front * h).clamp(0.0, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of scipy.stats.chi2.sf.
    #[test]
    fn tails_are_those_of_scipy() {
        for (freedom, x, expected) in [
            (1.0, 3.841_458_820_694_124, 0.05),
            (10.0, 18.307_038_053_275_146, 0.05),
            (2.0, 9.210_340_371_976_18, 0.01),
            (9.0, 9.0, 0.437_274_188_913_1),
        ] {
            let got = upper_gamma(freedom / 2.0, x / 2.0);
            assert!((got - expected).abs() < 1e-9, "{freedom} {x}: {got}");
        }
    }

    #[test]
    fn equal_and_different_distributions() {
        assert_eq!(compare(&[(100, 10)]), None);
        assert_eq!(compare(&[(100, 0), (10, 0)]), None);
        let same = compare(&[(500, 50), (300, 30)]).unwrap();
        assert_eq!((same.p, same.freedom), (1.0, 1));
        // By hand: [[10, 20], [20, 10]] has the statistic 20 / 3.
        let other = compare(&[(10, 20), (20, 10)]).unwrap();
        assert!((other.statistic - 20.0 / 3.0).abs() < 1e-12 && (other.p - 0.009_823_274_507_519_25).abs() < 1e-9);
    }
}
