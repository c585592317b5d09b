//! Rewrites records in another way in each epoch.

use super::located;
use super::{Shuffle, first, place};
use crate::error::{Error, Result};
use crate::records::{Dataset, Fingerprint, Origin, Record, RecordFn, Value, hash};
use crate::sample_order::Stream;
use perilune_core::philox::philox4x32;
use std::sync::Arc;

/// Which records of an epoch are rewritten.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Rewrites {
    /// One record for each, which stays the original with this probability.
    Instead { keep: f64 },
    /// The original of each record, and so many rewrites of it behind it.
    Beside { copies: u64 },
}

/// Records, some of which a function has rewritten. What it draws is a function of the seed, the record and the epoch.
pub struct Augment {
    inner: Arc<dyn Dataset>,
    f: Arc<dyn RecordFn>,
    rewrites: Rewrites,
    seed: u64,
}

impl Augment {
    /// Rewrites records of `inner`, of a shuffle those beneath it, so that the place of a record does not count.
    ///
    /// # Errors
    /// The order of `inner` differs between epochs for another reason.
    pub fn of(
        inner: &Arc<dyn Dataset>,
        f: Arc<dyn RecordFn>,
        rewrites: Rewrites,
        seed: u64,
    ) -> Result<Arc<dyn Dataset>> {
        let augment = |inner: Arc<dyn Dataset>| Augment { inner, f, rewrites, seed };
        if !inner.varies() {
            return Ok(Arc::new(augment(inner.clone())));
        }
        match inner.unshuffled() {
            Some((beneath, order)) => Ok(Arc::new(Shuffle::new(Arc::new(augment(beneath)), order))),
            None => Err(Error::argument("augment", "needs the same records in every epoch, and here they differ")
                .hint("augment the datasets before they are mixed, and rewrite a record in one function")),
        }
    }

    /// Records that each record becomes.
    fn each(&self) -> u64 {
        match self.rewrites {
            Rewrites::Instead { .. } => 1,
            Rewrites::Beside { copies } => copies.saturating_add(1),
        }
    }

    /// The record of `inner`, and the number of the copy: 0 for the first.
    fn at(&self, index: u64) -> (u64, u64) {
        let (epoch, i) = place(index, self.len());
        (first(epoch, self.inner.len()) + i / self.each(), i % self.each())
    }

    fn is_rewritten(&self, index: u64) -> bool {
        match self.rewrites {
            Rewrites::Beside { .. } => self.at(index).1 > 0,
            Rewrites::Instead { keep } => {
                let key = [self.seed as u32, (self.seed >> 32) as u32];
                let words = philox4x32([index as u32, (index >> 32) as u32, Stream::Augment as u32, 0], key);
                f64::from(words[0]) / 4_294_967_296.0 >= keep
            }
        }
    }

    fn apply(&self, record: Record, index: u64) -> Result<Record> {
        if !self.is_rewritten(index) {
            return Ok(record);
        }
        let result = match self.f.call(record, index) {
            Ok(Value::Map(record)) => return Ok(record),
            Ok(other) => Err(super::function::wrong(
                "augment",
                &*self.f,
                &other,
                "return a table of named fields: { text = ... }",
            )),
            Err(e) => Err(e),
        };
        result.map_err(|e| located(self, index, e))
    }
}

impl Dataset for Augment {
    fn len(&self) -> u64 {
        self.inner.len().saturating_mul(self.each())
    }

    fn get(&self, index: u64) -> Result<Record> {
        self.apply(self.inner.get(self.at(index).0)?, index)
    }

    fn get_many(&self, indices: &[u64]) -> Result<Vec<Record>> {
        let mut rows: Vec<u64> = indices.iter().map(|index| self.at(*index).0).collect();
        rows.dedup();
        let read = self.inner.get_many(&rows)?;
        let (mut out, mut k) = (Vec::with_capacity(indices.len()), 0);
        for index in indices {
            let row = self.at(*index).0;
            k += usize::from(rows.get(k) != Some(&row));
            let Some(record) = read.get(k) else { return Err(Error::argument("augment", "this is a bug: no record")) };
            out.push(self.apply(record.clone(), *index)?);
        }
        Ok(out)
    }

    fn origins(&self, index: u64) -> Result<Vec<Origin>> {
        let (row, copy) = self.at(index);
        let (mut out, rewritten) = (self.inner.origins(row)?, self.is_rewritten(index));
        for origin in &mut out {
            origin.rewritten |= rewritten;
            if self.each() > 1 {
                origin.sub = copy as u32;
            }
        }
        Ok(out)
    }

    fn fingerprint(&self) -> Fingerprint {
        let (kind, amount) = match self.rewrites {
            Rewrites::Instead { keep } => (0, keep.to_bits()),
            Rewrites::Beside { copies } => (1, copies),
        };
        let arguments: [&[u8]; 4] = [&self.f.fingerprint(), &[kind], &amount.to_le_bytes(), &self.seed.to_le_bytes()];
        hash::stage("augment/1", &arguments, &[&*self.inner])
    }

    fn varies(&self) -> bool {
        true
    }
}
