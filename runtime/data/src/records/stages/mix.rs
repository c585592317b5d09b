//! Mixes datasets with fixed weights.
//!
//! The stream is cut into blocks of 1,024 places. Each block has the same number of places for a dataset, its weight rounded by largest
//! remainders, in an order that is a permutation by (seed, block). So the dataset of any place, and the number of the record in
//! it, are computed without those before.

use crate::error::{Error, Result};
use crate::records::{Dataset, Fingerprint, Origin, Record, hash};
use crate::sample_order::{Permutation, Stream};
use std::sync::Arc;

/// The places of a block.
pub const BLOCK: u64 = 1024;

/// Several datasets, each with its share of the stream. An epoch has as many records as they have together.
pub struct Mix {
    all: Vec<Arc<dyn Dataset>>,
    /// The first place of each dataset in a block before the permutation, and the end of the last.
    starts: Vec<u64>,
    seed: u64,
}

impl Mix {
    /// # Errors
    /// A weight is no positive number, is below 1/1024 of the sum, or belongs to an empty dataset.
    pub fn new(all: Vec<(String, Arc<dyn Dataset>, f64)>, seed: u64) -> Result<Mix> {
        let sum: f64 = all.iter().map(|(_, _, w)| w).sum();
        for (name, dataset, weight) in &all {
            let fail = |rule: String, hint: &str| Err(Error::argument(format!("'{name}'"), rule).hint(hint));
            if !(weight.is_finite() && *weight > 0.0) {
                return fail(
                    format!("the weight is {weight}"),
                    "weights are positive numbers; leave out what has none",
                );
            }
            if weight / sum * (BLOCK as f64) < 1.0 {
                return fail(
                    format!("the weight {weight} is less than 1/{BLOCK} of the sum {sum}"),
                    "use a larger weight, or concat it with another dataset",
                );
            }
            if dataset.is_empty() {
                return fail("it has no records".into(), "leave it out, or look at its filter");
            }
        }
        let counts = apportion(&all.iter().map(|(_, _, w)| w / sum).collect::<Vec<_>>());
        let mut starts = vec![0];
        starts.extend(counts.iter().scan(0, |at, n| {
            *at += n;
            Some(*at)
        }));
        Ok(Mix { all: all.into_iter().map(|(_, dataset, _)| dataset).collect(), starts, seed })
    }

    fn at(&self, index: u64) -> (&dyn Dataset, u64) {
        let (block, slot) = (index / BLOCK, index % BLOCK);
        let slot = Permutation::new(BLOCK, self.seed, block, Stream::Mix).at(slot);
        let k = self.starts.partition_point(|s| *s <= slot) - 1;
        let count = self.starts[k + 1] - self.starts[k];
        (&*self.all[k], block * count + slot - self.starts[k])
    }
}

/// Divides a block by shares that sum to 1: whole numbers, at least 1 each, by largest remainders.
fn apportion(shares: &[f64]) -> Vec<u64> {
    let exact: Vec<f64> = shares.iter().map(|s| s * BLOCK as f64).collect();
    let mut counts: Vec<u64> = exact.iter().map(|x| x.floor() as u64).collect();
    let mut order: Vec<usize> = (0..shares.len()).collect();
    order.sort_by(|a, b| (exact[*b].fract()).total_cmp(&exact[*a].fract()).then(a.cmp(b)));
    let rest = BLOCK - counts.iter().sum::<u64>().min(BLOCK);
    order.into_iter().cycle().take(rest as usize).for_each(|k| counts[k] += 1);
    counts
}

impl Dataset for Mix {
    fn len(&self) -> u64 {
        self.all.iter().map(|d| d.len()).sum()
    }

    fn get(&self, index: u64) -> Result<Record> {
        let (dataset, index) = self.at(index);
        dataset.get(index)
    }

    fn origins(&self, index: u64) -> Result<Vec<Origin>> {
        let (dataset, index) = self.at(index);
        dataset.origins(index)
    }

    fn fingerprint(&self) -> Fingerprint {
        let starts: Vec<u8> = self.starts.iter().flat_map(|s| s.to_le_bytes()).collect();
        let parents: Vec<&dyn Dataset> = self.all.iter().map(|d| &**d).collect();
        hash::stage("mix/1", &[&self.seed.to_le_bytes(), &starts], &parents)
    }

    fn varies(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_divided_by_largest_remainders() {
        assert_eq!(apportion(&[0.5, 0.5]), [512, 512]);
        assert_eq!(apportion(&[1.0 / 3.0; 3]), [342, 341, 341]);
        assert_eq!(apportion(&[0.999, 0.001]), [1023, 1]);
    }
}
