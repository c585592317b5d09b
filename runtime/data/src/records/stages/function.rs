//! Defines stages that apply a function to each record.

use super::scan::Scan;
use super::{Mix, Pseudo, first, located as at, place};
use crate::error::{Error, Result};
use crate::records::{Dataset, Fingerprint, Origin, Record, RecordFn, Value, hash};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// The results of `flat_map` for that many records are kept, since neighbours come from one record.
const KEPT: usize = 64;

/// The error for a function that returns something else than its stage needs.
pub(super) fn wrong(stage: &str, f: &dyn RecordFn, found: &Value, needs: &str) -> Error {
    let found = found.type_name();
    Error::function(format!("the function of {stage} at {} returns {found}", f.place())).hint(needs)
}

/// One record for each record.
pub struct Map {
    inner: Arc<dyn Dataset>,
    f: Arc<dyn RecordFn>,
}

impl Map {
    pub fn new(inner: Arc<dyn Dataset>, f: Arc<dyn RecordFn>) -> Map {
        Map { inner, f }
    }

    fn record(&self, value: Value, index: u64) -> Result<Record> {
        match value {
            Value::Map(record) => Ok(record),
            other => {
                let e = wrong("map", &*self.f, &other, "return a table of named fields: { text = ... }");
                Err(at(&*self.inner, index, e))
            }
        }
    }
}

impl Dataset for Map {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn get(&self, index: u64) -> Result<Record> {
        let value = self.f.call(self.inner.get(index)?, index).map_err(|e| at(&*self.inner, index, e))?;
        self.record(value, index)
    }

    fn get_many(&self, indices: &[u64]) -> Result<Vec<Record>> {
        let (values, failed) = self.f.call_many(self.inner.get_many(indices)?, indices);
        let count = values.len();
        let records =
            values.into_iter().zip(indices).map(|(value, index)| self.record(value, *index)).collect::<Result<_>>()?;
        match failed {
            Some(e) => Err(at(&*self.inner, indices[count], e)),
            None => Ok(records),
        }
    }

    fn origins(&self, index: u64) -> Result<Vec<Origin>> {
        self.inner.origins(index)
    }

    fn fingerprint(&self) -> Fingerprint {
        hash::stage("map/1", &[&self.f.fingerprint()], &[&*self.inner])
    }

    fn varies(&self) -> bool {
        self.inner.varies()
    }

    fn mixture(&self) -> Option<&Mix> {
        self.inner.mixture()
    }

    fn pseudo(&self) -> Option<&Pseudo> {
        self.inner.pseudo()
    }

    fn unshuffled(&self) -> Option<(Arc<dyn Dataset>, u64)> {
        let (inner, seed) = self.inner.unshuffled()?;
        Some((Arc::new(Map { inner, f: self.f.clone() }), seed))
    }
}

/// Any number of records for each record.
pub struct FlatMap {
    inner: Arc<dyn Dataset>,
    f: Arc<dyn RecordFn>,
    /// How many results the records before each one have; one more than records.
    starts: Vec<u64>,
    kept: Mutex<VecDeque<(u64, Arc<Vec<Record>>)>>,
}

impl FlatMap {
    /// Counts the results of each record of `inner`, whose epochs must be equal.
    ///
    /// # Errors
    /// The function fails for a record.
    pub fn new(inner: Arc<dyn Dataset>, f: Arc<dyn RecordFn>, scan: &Scan) -> Result<FlatMap> {
        let counts = scan.each(&*inner, |i, record| Ok(results(&*f, record, i)?.len() as u64))?;
        let mut starts = Vec::with_capacity(counts.len() + 1);
        starts.push(0);
        starts.extend(counts.iter().scan(0, |sum, n| {
            *sum += n;
            Some(*sum)
        }));
        Ok(FlatMap { inner, f, starts, kept: Mutex::default() })
    }

    /// The record of `inner`, and the number among its results.
    fn at(&self, index: u64) -> (u64, usize) {
        let (epoch, i) = place(index, self.len());
        let row = self.starts.partition_point(|s| *s <= i) - 1;
        (first(epoch, self.inner.len()) + row as u64, (i - self.starts[row]) as usize)
    }
}

/// The results for a record.
fn results(f: &dyn RecordFn, record: Record, index: u64) -> Result<Vec<Record>> {
    let needs = "return a list of tables: { { text = ... }, { text = ... } }";
    let list = match f.call(record, index)? {
        Value::List(list) => list,
        // A table without fields is the empty list.
        Value::Map(record) if record.fields.is_empty() => Vec::new(),
        other => return Err(wrong("flat_map", f, &other, needs)),
    };
    let record = |value| match value {
        Value::Map(record) => Ok(record),
        other => Err(wrong("flat_map", f, &other, needs)),
    };
    list.into_iter().map(record).collect()
}

impl Dataset for FlatMap {
    fn len(&self) -> u64 {
        self.starts[self.starts.len() - 1]
    }

    fn get(&self, index: u64) -> Result<Record> {
        let (row, sub) = self.at(index);
        let lock = || self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let found = lock().iter().find(|(r, _)| *r == row).map(|(_, records)| records.clone());
        let records = match found {
            Some(records) => records,
            None => {
                let made = results(&*self.f, self.inner.get(row)?, row).map_err(|e| at(&*self.inner, row, e))?;
                let made = Arc::new(made);
                let mut kept = lock();
                kept.push_back((row, made.clone()));
                if kept.len() > KEPT {
                    kept.pop_front();
                }
                made
            }
        };
        records.get(sub).cloned().ok_or_else(|| {
            let rule = format!("the function of flat_map at {} returns fewer records than before", self.f.place());
            at(&*self.inner, row, Error::function(rule).hint("it must depend on the record alone"))
        })
    }

    fn origins(&self, index: u64) -> Result<Vec<Origin>> {
        let (row, sub) = self.at(index);
        let mut out = self.inner.origins(row)?;
        out.iter_mut().for_each(|o| o.sub = sub as u32);
        Ok(out)
    }

    fn fingerprint(&self) -> Fingerprint {
        hash::stage("flat_map/1", &[&self.f.fingerprint()], &[&*self.inner])
    }
}
