//! Adds rewrites of records, which were made beforehand, to the records that they were made of.

use super::{first, place};
use crate::error::{Error, Result};
use crate::records::{Dataset, Fingerprint, Origin, Record, hash};
use std::sync::Arc;

/// A record of the stage: row `row` of an epoch beneath, or a rewrite of it, which has a number from 1 on.
struct Entry {
    row: u64,
    number: u32,
    rewrite: Option<Record>,
}

/// Records and their rewrites, the same in every epoch.
pub struct Rewritten {
    inner: Arc<dyn Dataset>,
    entries: Vec<Entry>,
    fingerprint: Fingerprint,
}

impl Rewritten {
    /// Puts the rewrites of each record behind it, or with `replace` in its place. A record without any stays. `rewrites` has a list
    /// for each record of `inner`, in order.
    ///
    /// # Errors
    /// The records of `inner` differ between epochs, or `rewrites` has another number of lists.
    pub fn of(inner: Arc<dyn Dataset>, rewrites: Vec<Vec<Record>>, replace: bool) -> Result<Arc<dyn Dataset>> {
        if inner.varies() {
            return Err(Error::argument("rewrite", "needs the same records in every epoch, and here they differ")
                .hint("rewrite the datasets before they are shuffled, mixed or augmented"));
        }
        if rewrites.len() as u64 != inner.len() {
            let message = format!("{} lists of rewrites were given for {} records", rewrites.len(), inner.len());
            return Err(Error::argument("rewrite", message).hint("give a list for each record, an empty one for none"));
        }
        let mut hashes: Vec<Fingerprint> = Vec::new();
        let mut entries = Vec::new();
        for (row, list) in (0..).zip(rewrites) {
            if list.is_empty() || !replace {
                entries.push(Entry { row, number: 0, rewrite: None });
            }
            for (number, record) in (1..).zip(list) {
                hashes.push(hash::stage("row/1", &[&row.to_le_bytes(), &hash::content(&record)], &[]));
                entries.push(Entry { row, number, rewrite: Some(record) });
            }
        }
        let mut arguments: Vec<&[u8]> = hashes.iter().map(|h| h.as_slice()).collect();
        arguments.push(if replace { b"replace" } else { b"keep" });
        let fingerprint = hash::stage("rewrite/1", &arguments, &[&*inner]);
        Ok(Arc::new(Rewritten { inner, entries, fingerprint }))
    }

    /// The entry at an index of the stream, and the index of its record in the stream beneath.
    fn at(&self, index: u64) -> (&Entry, u64) {
        let (epoch, i) = place(index, self.len());
        let entry = &self.entries[i as usize];
        (entry, first(epoch, self.inner.len()) + entry.row)
    }
}

impl Dataset for Rewritten {
    fn len(&self) -> u64 {
        self.entries.len() as u64
    }

    fn get(&self, index: u64) -> Result<Record> {
        let (entry, beneath) = self.at(index);
        entry.rewrite.clone().map_or_else(|| self.inner.get(beneath), Ok)
    }

    fn origins(&self, index: u64) -> Result<Vec<Origin>> {
        let (entry, beneath) = self.at(index);
        let mut out = self.inner.origins(beneath)?;
        for origin in &mut out {
            origin.rewritten |= entry.rewrite.is_some();
            origin.sub = origin.sub.max(entry.number);
        }
        Ok(out)
    }

    fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }
}
