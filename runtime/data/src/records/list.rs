//! Holds records in memory.

use super::{Dataset, Fingerprint, Origin, Record, hash};
use crate::error::Result;
use std::path::PathBuf;
use std::sync::Arc;

/// Records in memory, such as those that a recipe lists.
pub struct List {
    /// What messages call it.
    name: Arc<PathBuf>,
    records: Vec<Record>,
    fingerprint: Fingerprint,
}

impl List {
    pub fn new(name: &str, records: Vec<Record>) -> List {
        let hashes: Vec<Fingerprint> = records.iter().map(hash::content).collect();
        let hashes: Vec<&[u8]> = hashes.iter().map(|h| h.as_slice()).collect();
        let fingerprint = hash::stage("list/1", &hashes, &[]);
        List { name: Arc::new(PathBuf::from(name)), records, fingerprint }
    }
}

impl Dataset for List {
    fn len(&self) -> u64 {
        self.records.len() as u64
    }

    fn get(&self, index: u64) -> Result<Record> {
        Ok(self.records[(index % self.len()) as usize].clone())
    }

    fn origins(&self, index: u64) -> Result<Vec<Origin>> {
        Ok(vec![Origin { file: self.name.clone(), row: index % self.len(), line: None, sub: 0, rewritten: false }])
    }

    fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }
}
