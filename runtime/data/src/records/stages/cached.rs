//! Keeps the records of one epoch in memory.

use super::scan::Scan;
use crate::error::Result;
use crate::records::{Dataset, Fingerprint, Origin, Record};
use std::sync::Arc;

/// A dataset whose records have been made once.
pub struct Cached {
    inner: Arc<dyn Dataset>,
    records: Vec<Record>,
}

impl Cached {
    /// Reads all records of `inner`, whose epochs must be equal.
    ///
    /// # Errors
    /// A record cannot be made.
    pub fn new(inner: Arc<dyn Dataset>, scan: &Scan) -> Result<Cached> {
        let records = scan.each(&*inner, |_, record| Ok(record))?;
        Ok(Cached { inner, records })
    }
}

impl Dataset for Cached {
    fn len(&self) -> u64 {
        self.records.len() as u64
    }

    fn get(&self, index: u64) -> Result<Record> {
        Ok(self.records[(index % self.len()) as usize].clone())
    }

    fn origins(&self, index: u64) -> Result<Vec<Origin>> {
        self.inner.origins(index)
    }

    /// The records are those of the dataset that was read.
    fn fingerprint(&self) -> Fingerprint {
        self.inner.fingerprint()
    }
}
