//! Mixes datasets by weights, which may change as the stream is read.

use super::mix_schedule::{BLOCK, Schedule};
use crate::error::{Error, Result};
use crate::records::{Dataset, Fingerprint, Origin, Record, hash};
use std::sync::{Arc, PoisonError, RwLock};

/// Several datasets, each with its share of the stream. An epoch has as many records as they have together.
pub struct Mix {
    names: Vec<String>,
    all: Vec<Arc<dyn Dataset>>,
    /// The places of each in a block, by the weights that it was made with.
    counts: Vec<u64>,
    seed: u64,
    schedule: RwLock<Arc<Schedule>>,
}

impl Mix {
    /// Mixes datasets by weights. A `live` mixture may get other weights, and those of 0 later; one that is not live has none of 0.
    ///
    /// # Errors
    /// A weight is no number that [`shares`] takes, or belongs to an empty dataset.
    pub fn new(all: Vec<(String, Arc<dyn Dataset>, f64)>, seed: u64, live: bool) -> Result<Mix> {
        let weights: Vec<(String, f64)> = all.iter().map(|(name, _, weight)| (name.clone(), *weight)).collect();
        let counts = shares(&weights, live)?;
        if let Some((name, _, _)) = all.iter().find(|(_, dataset, _)| dataset.is_empty()) {
            return Err(
                Error::argument(format!("'{name}'"), "it has no records").hint("leave it out, or look at its filter")
            );
        }
        let schedule = Schedule::new(seed, 0, vec![0; all.len()], counts.clone());
        let names = all.iter().map(|(name, _, _)| name.clone()).collect();
        let all = all.into_iter().map(|(_, dataset, _)| dataset).collect();
        Ok(Mix { names, all, counts, seed, schedule: RwLock::new(Arc::new(schedule)) })
    }

    fn schedule(&self) -> Arc<Schedule> {
        self.schedule.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_schedule(&self, schedule: Schedule) {
        *self.schedule.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(schedule);
    }

    /// Gives the places from `first` on other weights. What was decided for them before is replaced.
    ///
    /// # Errors
    /// Those of [`shares`]; the weights have changed too often.
    pub fn decide(&self, first: u64, weights: &[f64]) -> Result<()> {
        let weights: Vec<(String, f64)> = self.names.iter().cloned().zip(weights.iter().copied()).collect();
        let counts = shares(&weights, true)?;
        let schedule = self.schedule();
        if schedule.counts() == counts {
            return Ok(());
        }
        let mut schedule = Schedule::clone(&schedule);
        schedule.append(first, counts)?;
        self.set_schedule(schedule);
        Ok(())
    }

    /// Returns the datasets' names and the schedule as text, which [`Mix::resume`] takes.
    pub fn state(&self) -> (&[String], String) {
        (&self.names, self.schedule().text())
    }

    /// Goes on from the state of a mixture of which the places before `sample` were taken. Datasets of the same name go on with
    /// their next record, others begin. If this is the same mixture, decided places stay; a mixture that is not live gives the
    /// rest its own weights.
    ///
    /// # Errors
    /// The text is no schedule of so many datasets.
    pub fn resume(&self, names: &[String], text: &str, sample: u64, live: bool) -> Result<()> {
        let stored = Schedule::parse(text, names.len()).ok_or_else(|| {
            Error::argument("data.mix", "the state of the mixture in the checkpoint cannot be read")
                .hint("use another checkpoint")
        })?;
        if names == self.names && stored.seed() == self.seed {
            let mut schedule = stored;
            if !live && schedule.counts() != self.counts {
                schedule.append(sample, self.counts.clone())?;
            }
            self.set_schedule(schedule);
            return Ok(());
        }
        let taken = stored.taken(sample);
        let before = self.names.iter().map(|name| names.iter().position(|n| n == name).map_or(0, |k| taken[k]));
        self.set_schedule(Schedule::new(self.seed, sample, before.collect(), self.counts.clone()));
        Ok(())
    }

    fn at(&self, index: u64) -> Result<(&dyn Dataset, u64)> {
        let (dataset, index) = self.schedule().at(index).ok_or_else(|| {
            Error::argument(
                "data.mix",
                format!("record {index} was taken before an edit changed the datasets of the mixture"),
            )
            .hint("read records that came later")
        })?;
        Ok((&*self.all[dataset], index))
    }
}

/// Divides a block by weights: whole numbers by largest remainders. A mixture that is not live gives each dataset at least one place.
///
/// # Errors
/// A weight is negative or not finite, all are 0, or one is less than 1/1024 of the sum and the mixture is not live.
fn shares(weights: &[(String, f64)], live: bool) -> Result<Vec<u64>> {
    let sum: f64 = weights.iter().map(|(_, w)| w).sum();
    for (name, weight) in weights {
        let fail = |rule: String, hint: &str| Err(Error::argument(format!("'{name}'"), rule).hint(hint));
        if !(weight.is_finite() && *weight >= 0.0 && (live || *weight > 0.0)) {
            let hint = if live {
                "weights are numbers from 0"
            } else {
                "weights are positive numbers; leave out what has none"
            };
            return fail(format!("the weight is {weight}"), hint);
        }
        if !live && weight / sum * (BLOCK as f64) < 1.0 {
            return fail(
                format!("the weight {weight} is less than 1/{BLOCK} of the sum {sum}"),
                "use a larger weight, or concat it with another dataset",
            );
        }
    }
    if !(sum.is_finite() && sum > 0.0) {
        return Err(Error::argument("data.mix", format!("the sum of the weights is {sum}"))
            .hint("give one dataset a positive weight"));
    }
    let exact: Vec<f64> = weights.iter().map(|(_, w)| w / sum * BLOCK as f64).collect();
    let mut counts: Vec<u64> = exact.iter().map(|x| x.floor() as u64).collect();
    let mut order: Vec<usize> = (0..weights.len()).filter(|k| exact[*k] > 0.0).collect();
    order.sort_by(|a, b| (exact[*b].fract()).total_cmp(&exact[*a].fract()).then(a.cmp(b)));
    let rest = BLOCK - counts.iter().sum::<u64>().min(BLOCK);
    order.into_iter().cycle().take(rest as usize).for_each(|k| counts[k] += 1);
    Ok(counts)
}

impl Dataset for Mix {
    fn len(&self) -> u64 {
        self.all.iter().map(|d| d.len()).sum()
    }

    fn get(&self, index: u64) -> Result<Record> {
        let (dataset, index) = self.at(index)?;
        dataset.get(index)
    }

    fn origins(&self, index: u64) -> Result<Vec<Origin>> {
        let (dataset, index) = self.at(index)?;
        dataset.origins(index)
    }

    /// That of the mixture as it was made.
    fn fingerprint(&self) -> Fingerprint {
        let counts: Vec<u8> = self.counts.iter().flat_map(|n| n.to_le_bytes()).collect();
        let parents: Vec<&dyn Dataset> = self.all.iter().map(|d| &**d).collect();
        hash::stage("mix/2", &[&self.seed.to_le_bytes(), &counts], &parents)
    }

    fn varies(&self) -> bool {
        true
    }

    fn mixture(&self) -> Option<&Mix> {
        Some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(weights: &[f64], live: bool) -> Result<Vec<u64>> {
        let named: Vec<(String, f64)> = weights.iter().enumerate().map(|(k, w)| (k.to_string(), *w)).collect();
        shares(&named, live)
    }

    #[test]
    fn a_block_is_divided_by_largest_remainders() {
        assert_eq!(counts(&[1.0, 1.0], false).unwrap(), [512, 512]);
        assert_eq!(counts(&[1.0; 3], false).unwrap(), [342, 341, 341]);
        assert_eq!(counts(&[0.999, 0.001], false).unwrap(), [1023, 1]);
        assert_eq!(counts(&[0.0, 3.0, 0.0], true).unwrap(), [0, 1024, 0]);
        assert_eq!(counts(&[1.0, 1e-9], true).unwrap(), [1024, 0]);
        for bad in [&[0.0, 1.0][..], &[1.0, 1e-9], &[f64::NAN], &[-1.0, 2.0], &[f64::INFINITY]] {
            assert!(counts(bad, false).is_err(), "{bad:?}");
        }
        for bad in [&[0.0, 0.0][..], &[f64::NAN], &[-1.0, 2.0], &[f64::MAX, f64::MAX]] {
            assert!(counts(bad, true).is_err(), "{bad:?}");
        }
    }
}
