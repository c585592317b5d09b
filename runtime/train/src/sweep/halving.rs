//! Computes the rungs of successive halving: how many points train for how many steps.
//!
//! All points train up to the first rung, the best 1/eta of them go on to the next one, which has eta times the steps, and the last rung
//! has all steps (Jamieson and Talwalkar 2016; the bracket of Hyperband with the most points, Li et al. 2018).

/// One rung.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rung {
    /// The number of points that train up to `until`.
    pub points: usize,
    /// The step at which they are compared.
    pub until: u64,
}

/// Returns the rungs of `points` points whose full length is `steps`; `eta` is at least 2. Rungs of the same step are one.
pub fn rungs(points: usize, eta: u32, steps: u64) -> Vec<Rung> {
    let mut divisors = vec![1u64];
    while let Some(next) = divisors.last().and_then(|d| d.checked_mul(u64::from(eta)))
        && next <= points as u64
        && next <= steps
    {
        divisors.push(next);
    }
    let top = divisors.len() - 1;
    let rung = |k: usize| Rung {
        points: (points as u64 / divisors[k]).max(1) as usize,
        until: steps.div_ceil(divisors[top - k]),
    };
    (0..=top).map(rung).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rung_has_a_third_of_the_points_and_thrice_the_steps() {
        let of = |points, eta, steps| rungs(points, eta, steps).iter().map(|r| (r.points, r.until)).collect::<Vec<_>>();
        assert_eq!(of(27, 3, 2700), [(27, 100), (9, 300), (3, 900), (1, 2700)]);
        assert_eq!(of(4, 2, 12), [(4, 3), (2, 6), (1, 12)]);
        assert_eq!(of(10, 3, 100), [(10, 12), (3, 34), (1, 100)]);
        assert_eq!(of(2, 3, 50), [(2, 50)]);
        assert_eq!(of(100, 3, 4), [(100, 2), (33, 4)]);
        assert_eq!(of(1, 2, 1), [(1, 1)]);
    }
}
