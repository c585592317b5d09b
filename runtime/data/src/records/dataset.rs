//! Defines `Dataset`, the trait of files of records and of every stage of a pipeline.

use super::stages::{Mix, Pseudo};
use super::value::Record;
use crate::error::Result;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// The BLAKE3 hash of what a dataset is made of: contents of files, stages with their arguments, text of functions. Two datasets of
/// one fingerprint have the same records in the same order; caches use it as their key.
pub type Fingerprint = [u8; 32];

/// Where a record is from, for messages, the ledger of samples and the exclusion of held-out rows.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Origin {
    pub file: Arc<PathBuf>,
    /// The row of that file, from 0: a record of JSONL, a row of a table, a document.
    pub row: u64,
    /// The line of a text file at which the row begins, from 1.
    pub line: Option<u64>,
    /// The number of the sample among those that a stage made of the row (`flat_map`, windows).
    pub sub: u32,
    /// Whether a stage has rewritten the record (`augment`): its text is not that of the file.
    pub rewritten: bool,
}

/// What stands for the file of records that a recipe lists.
pub const MEMORY: &str = "list";

impl Origin {
    /// Whether the record is one of a list in memory, which has no file.
    pub fn is_in_memory(&self) -> bool {
        self.line.is_none() && self.file.as_os_str() == MEMORY
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.file.display())?;
        match self.line {
            Some(line) => write!(f, "{line}")?,
            None => write!(f, " record {}", self.row)?,
        }
        f.write_str(if self.rewritten { " (rewritten)" } else { "" })
    }
}

/// A sequence of records, numbered in one stream: those of epoch `e` have the indices `e * len()` to `(e + 1) * len()`.
pub trait Dataset: Send + Sync + 'static {
    /// The number of records in an epoch.
    fn len(&self) -> u64;

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads the record at an index of the stream, as a pure function of it. A file repeats in every epoch; a shuffle has another
    /// order in each, and a stage with random choices draws them by `index`.
    ///
    /// # Errors
    /// The record cannot be read or made; the error names its origin.
    fn get(&self, index: u64) -> Result<Record>;

    /// Reads several records, in this order. A file that decodes many rows together overrides it.
    ///
    /// # Errors
    /// That of the first record that fails.
    fn get_many(&self, indices: &[u64]) -> Result<Vec<Record>> {
        indices.iter().map(|index| self.get(*index)).collect()
    }

    /// The rows of files that a record is made of: one, or several for a pack or a zip.
    ///
    /// # Errors
    /// A file that must be read for it cannot be read.
    fn origins(&self, index: u64) -> Result<Vec<Origin>>;

    fn fingerprint(&self) -> Fingerprint;

    /// Whether the records of an epoch, or their order, differ from those of another epoch.
    fn varies(&self) -> bool {
        false
    }

    /// The dataset beneath a shuffle, and its seed, where this is one, or maps the records of one.
    fn unshuffled(&self) -> Option<(Arc<dyn Dataset>, u64)> {
        None
    }

    /// Returns the mixture that the records are those of, one for one, if they are.
    fn mixture(&self) -> Option<&Mix> {
        None
    }

    /// Returns the stream of pseudo-labels that the records are those of, one for one, if they are.
    fn pseudo(&self) -> Option<&Pseudo> {
        None
    }

    /// Returns the same records with these fields only, where leaving out the others saves work; `None` where it saves none.
    fn project(&self, _fields: &[Arc<str>]) -> Option<Arc<dyn Dataset>> {
        None
    }
}
