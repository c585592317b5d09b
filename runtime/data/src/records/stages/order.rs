//! Defines stages that map an index of the stream to another index: nothing is read or stored for them.

use super::{first, place};
use crate::error::Result;
use crate::records::{Dataset, Fingerprint, Origin, Record, Value, hash};
use crate::sample_order::{Permutation, Stream};
use std::sync::Arc;

/// Another order in each epoch: a permutation by (seed, epoch).
pub struct Shuffle {
    inner: Arc<dyn Dataset>,
    seed: u64,
}

impl Shuffle {
    pub fn new(inner: Arc<dyn Dataset>, seed: u64) -> Shuffle {
        Shuffle { inner, seed }
    }

    fn at(&self, index: u64) -> u64 {
        let (epoch, i) = place(index, self.len());
        first(epoch, self.len()) + Permutation::new(self.len(), self.seed, epoch, Stream::Shuffle).at(i)
    }
}

impl Dataset for Shuffle {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn get(&self, index: u64) -> Result<Record> {
        self.inner.get(self.at(index))
    }

    fn get_many(&self, indices: &[u64]) -> Result<Vec<Record>> {
        self.inner.get_many(&indices.iter().map(|i| self.at(*i)).collect::<Vec<_>>())
    }

    fn origins(&self, index: u64) -> Result<Vec<Origin>> {
        self.inner.origins(self.at(index))
    }

    fn fingerprint(&self) -> Fingerprint {
        hash::stage("shuffle/1", &[&self.seed.to_le_bytes()], &[&*self.inner])
    }

    fn varies(&self) -> bool {
        true
    }

    fn unshuffled(&self) -> Option<(Arc<dyn Dataset>, u64)> {
        (!self.inner.varies()).then(|| (self.inner.clone(), self.seed))
    }
}

/// A range of each epoch: `take` and `skip`.
pub struct Range {
    inner: Arc<dyn Dataset>,
    first: u64,
    count: u64,
}

impl Range {
    /// The records `first` to `first + count` of each epoch, as far as they exist.
    pub fn new(inner: Arc<dyn Dataset>, first: u64, count: u64) -> Range {
        let first = first.min(inner.len());
        let count = count.min(inner.len() - first);
        Range { inner, first, count }
    }

    fn at(&self, index: u64) -> u64 {
        let (epoch, i) = place(index, self.count);
        first(epoch, self.inner.len()) + self.first + i
    }
}

impl Dataset for Range {
    fn len(&self) -> u64 {
        self.count
    }

    fn get(&self, index: u64) -> Result<Record> {
        self.inner.get(self.at(index))
    }

    fn get_many(&self, indices: &[u64]) -> Result<Vec<Record>> {
        self.inner.get_many(&indices.iter().map(|i| self.at(*i)).collect::<Vec<_>>())
    }

    fn origins(&self, index: u64) -> Result<Vec<Origin>> {
        self.inner.origins(self.at(index))
    }

    fn fingerprint(&self) -> Fingerprint {
        hash::stage("range/1", &[&self.first.to_le_bytes(), &self.count.to_le_bytes()], &[&*self.inner])
    }

    fn varies(&self) -> bool {
        self.inner.varies()
    }
}

/// Several epochs as one. The stream stays; only where an epoch ends changes.
pub struct Repeat {
    inner: Arc<dyn Dataset>,
    times: u64,
}

impl Repeat {
    pub fn new(inner: Arc<dyn Dataset>, times: u64) -> Repeat {
        Repeat { inner, times }
    }
}

impl Dataset for Repeat {
    fn len(&self) -> u64 {
        self.inner.len().saturating_mul(self.times)
    }

    fn get(&self, index: u64) -> Result<Record> {
        self.inner.get(index)
    }

    fn get_many(&self, indices: &[u64]) -> Result<Vec<Record>> {
        self.inner.get_many(indices)
    }

    fn origins(&self, index: u64) -> Result<Vec<Origin>> {
        self.inner.origins(index)
    }

    fn fingerprint(&self) -> Fingerprint {
        hash::stage("repeat/1", &[&self.times.to_le_bytes()], &[&*self.inner])
    }

    fn varies(&self) -> bool {
        self.inner.varies()
    }
}

/// Windows of consecutive records: each field becomes the list of its values. What does not fill the last window is left out.
pub struct Windows {
    inner: Arc<dyn Dataset>,
    size: u64,
    stride: u64,
}

impl Windows {
    /// `size` and `stride` are at least 1.
    pub fn new(inner: Arc<dyn Dataset>, size: u64, stride: u64) -> Windows {
        Windows { inner, size: size.max(1), stride: stride.max(1) }
    }

    fn places(&self, index: u64) -> Vec<u64> {
        let (epoch, window) = place(index, self.len());
        let first = first(epoch, self.inner.len()) + window * self.stride;
        (first..first + self.size).collect()
    }
}

impl Dataset for Windows {
    fn len(&self) -> u64 {
        self.inner.len().checked_sub(self.size).map_or(0, |rest| rest / self.stride + 1)
    }

    fn get(&self, index: u64) -> Result<Record> {
        Ok(transpose(self.inner.get_many(&self.places(index))?))
    }

    fn origins(&self, index: u64) -> Result<Vec<Origin>> {
        let mut out = Vec::new();
        for place in self.places(index) {
            out.extend(self.inner.origins(place)?);
        }
        Ok(out)
    }

    fn fingerprint(&self) -> Fingerprint {
        hash::stage("windows/1", &[&self.size.to_le_bytes(), &self.stride.to_le_bytes()], &[&*self.inner])
    }

    fn varies(&self) -> bool {
        self.inner.varies()
    }
}

/// One record whose fields are the lists of those of several records. A field that one of them lacks is null there.
pub(super) fn transpose(records: Vec<Record>) -> Record {
    let mut out = Record::default();
    for (k, record) in records.into_iter().enumerate() {
        for (name, value) in record.fields {
            let at = match out.fields.iter().position(|(n, _)| *n == name) {
                Some(at) => at,
                None => {
                    out.fields.push((name, Value::List(Vec::new())));
                    out.fields.len() - 1
                }
            };
            if let Value::List(list) = &mut out.fields[at].1 {
                list.resize(k, Value::Null);
                list.push(value);
            }
        }
    }
    let longest = out.fields.iter().map(|(_, v)| if let Value::List(l) = v { l.len() } else { 0 }).max().unwrap_or(0);
    for (_, value) in &mut out.fields {
        if let Value::List(list) = value {
            list.resize(longest, Value::Null);
        }
    }
    out
}

/// Records in order of length, in blocks of a batch each, which are shuffled: so the samples of a batch are of about one length.
pub struct Bucket {
    /// In order of length.
    sorted: Arc<dyn Dataset>,
    batch: u64,
    seed: u64,
}

impl Bucket {
    pub fn new(sorted: Arc<dyn Dataset>, batch: u64, seed: u64) -> Bucket {
        Bucket { sorted, batch: batch.max(1), seed }
    }

    /// The last block, which may be smaller, stays last.
    fn at(&self, index: u64) -> u64 {
        let (epoch, i) = place(index, self.len());
        let blocks = self.len() / self.batch;
        let (block, within) = (i / self.batch, i % self.batch);
        let block = match block < blocks {
            true => Permutation::new(blocks, self.seed, epoch, Stream::Shuffle).at(block),
            false => block,
        };
        first(epoch, self.len()) + block * self.batch + within
    }
}

impl Dataset for Bucket {
    fn len(&self) -> u64 {
        self.sorted.len()
    }

    fn get(&self, index: u64) -> Result<Record> {
        self.sorted.get(self.at(index))
    }

    fn origins(&self, index: u64) -> Result<Vec<Origin>> {
        self.sorted.origins(self.at(index))
    }

    fn fingerprint(&self) -> Fingerprint {
        hash::stage("bucket/1", &[&self.batch.to_le_bytes(), &self.seed.to_le_bytes()], &[&*self.sorted])
    }

    fn varies(&self) -> bool {
        true
    }
}
