//! Defines stages that combine several datasets without looking at their records.

use super::{first, place};
use crate::error::{Error, Result};
use crate::records::{Dataset, Fingerprint, Origin, Record, hash};
use std::sync::Arc;

fn parents(all: &[Arc<dyn Dataset>]) -> Vec<&dyn Dataset> {
    all.iter().map(|d| &**d).collect()
}

/// One dataset behind the other.
pub struct Concat {
    all: Vec<Arc<dyn Dataset>>,
    /// Where each begins in an epoch, and the length of the whole.
    starts: Vec<u64>,
}

impl Concat {
    pub fn new(all: Vec<Arc<dyn Dataset>>) -> Concat {
        let mut starts = vec![0];
        starts.extend(all.iter().scan(0, |sum, d| {
            *sum += d.len();
            Some(*sum)
        }));
        Concat { all, starts }
    }

    fn at(&self, index: u64) -> (&dyn Dataset, u64) {
        let (epoch, i) = place(index, self.len());
        let k = self.starts.partition_point(|s| *s <= i) - 1;
        (&*self.all[k], first(epoch, self.all[k].len()) + i - self.starts[k])
    }
}

impl Dataset for Concat {
    fn len(&self) -> u64 {
        self.starts[self.starts.len() - 1]
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
        hash::stage("concat/1", &[], &parents(&self.all))
    }

    fn varies(&self) -> bool {
        self.all.iter().any(|d| d.varies())
    }
}

/// A record of each in turn, until the shortest ends.
pub struct Interleave {
    all: Vec<Arc<dyn Dataset>>,
}

impl Interleave {
    pub fn new(all: Vec<Arc<dyn Dataset>>) -> Interleave {
        Interleave { all }
    }

    fn rounds(&self) -> u64 {
        self.all.iter().map(|d| d.len()).min().unwrap_or(0)
    }

    fn at(&self, index: u64) -> (&dyn Dataset, u64) {
        let (epoch, i) = place(index, self.len());
        let n = self.all.len() as u64;
        let dataset = &*self.all[(i % n) as usize];
        (dataset, first(epoch, dataset.len()) + i / n)
    }
}

impl Dataset for Interleave {
    fn len(&self) -> u64 {
        self.rounds() * self.all.len() as u64
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
        hash::stage("interleave/1", &[], &parents(&self.all))
    }

    fn varies(&self) -> bool {
        self.all.iter().any(|d| d.varies())
    }
}

/// The fields of the records of several datasets with the same number, in one record.
pub struct Zip {
    all: Vec<Arc<dyn Dataset>>,
}

impl Zip {
    /// # Errors
    /// The lengths differ.
    pub fn new(all: Vec<Arc<dyn Dataset>>) -> Result<Zip> {
        let lengths: Vec<String> = all.iter().map(|d| d.len().to_string()).collect();
        if all.windows(2).any(|pair| pair[0].len() != pair[1].len()) {
            let rule = format!("the datasets have {} records", lengths.join(" and "));
            return Err(Error::argument("zip", rule).hint("zip needs equal lengths: use take, or join by a field"));
        }
        Ok(Zip { all })
    }
}

impl Dataset for Zip {
    fn len(&self) -> u64 {
        self.all.first().map_or(0, |d| d.len())
    }

    fn get(&self, index: u64) -> Result<Record> {
        let mut out = Record::default();
        for dataset in &self.all {
            for (name, value) in dataset.get(index)?.fields {
                if out.get(&name).is_some() {
                    let rule = format!("two of the datasets have the field '{name}'");
                    return Err(
                        Error::argument("zip", rule).hint("rename it in one of them: :rename { old = \"new\" }")
                    );
                }
                out.fields.push((name, value));
            }
        }
        Ok(out)
    }

    fn origins(&self, index: u64) -> Result<Vec<Origin>> {
        let mut out = Vec::new();
        for dataset in &self.all {
            out.extend(dataset.origins(index)?);
        }
        Ok(out)
    }

    fn fingerprint(&self) -> Fingerprint {
        hash::stage("zip/1", &[], &parents(&self.all))
    }

    fn varies(&self) -> bool {
        self.all.iter().any(|d| d.varies())
    }
}
