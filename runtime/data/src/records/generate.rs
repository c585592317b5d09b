//! Makes records by a function of their number.

use super::value::{Record, Value};
use super::{Dataset, Fingerprint, Origin, RecordFn, hash};
use crate::error::{Error, Result};
use std::path::PathBuf;
use std::sync::Arc;

/// A source of `count` records that a function makes, the same in each epoch. Nothing is stored.
pub struct Generate {
    count: u64,
    f: Arc<dyn RecordFn>,
    /// What messages and origins call it: "data.generate at sft.lua:31".
    name: Arc<PathBuf>,
}

impl Generate {
    /// `f` gets an empty record and the number of the record to make.
    pub fn new(count: u64, f: Arc<dyn RecordFn>) -> Generate {
        let name = Arc::new(PathBuf::from(format!("data.generate at {}", f.place())));
        Generate { count, f, name }
    }

    fn origin(&self, row: u64) -> Origin {
        Origin { file: self.name.clone(), row, line: None, sub: 0, rewritten: false }
    }
}

impl Dataset for Generate {
    fn len(&self) -> u64 {
        self.count
    }

    fn get(&self, index: u64) -> Result<Record> {
        let row = index % self.count.max(1);
        match self.f.call(Record::default(), row)? {
            Value::Map(record) => Ok(record),
            other => Err(Error::function(format!("the function returns {}", other.type_name()))
                .hint("return a table of named fields: { x = ... }")
                .of_record(&self.origin(row).to_string())),
        }
    }

    fn origins(&self, index: u64) -> Result<Vec<Origin>> {
        Ok(vec![self.origin(index % self.count.max(1))])
    }

    fn fingerprint(&self) -> Fingerprint {
        hash::stage("generate/1", &[&self.count.to_le_bytes(), &self.f.fingerprint()], &[])
    }
}
