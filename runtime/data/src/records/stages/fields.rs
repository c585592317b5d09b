//! Selects and renames the fields of records.

use super::{Mix, Pseudo, located};
use crate::error::{Error, Result};
use crate::records::{Dataset, Fingerprint, Origin, Record, hash};
use perilune_core::error::did_you_mean;
use std::sync::Arc;

/// The same records with some of their fields, or with other names for them.
pub struct Fields {
    inner: Arc<dyn Dataset>,
    /// The old and the new name of each.
    fields: Vec<(Arc<str>, Arc<str>)>,
    /// Whether the other fields stay.
    others: bool,
}

impl Fields {
    /// Keeps only these fields, in this order. A file reads no others where that saves work.
    pub fn select(inner: Arc<dyn Dataset>, names: &[String]) -> Fields {
        let names: Vec<Arc<str>> = names.iter().map(|n| n.as_str().into()).collect();
        let inner = inner.project(&names).unwrap_or(inner);
        Fields { inner, fields: names.iter().map(|n| (n.clone(), n.clone())).collect(), others: false }
    }

    /// Gives fields other names; the rest stays.
    pub fn rename(inner: Arc<dyn Dataset>, names: &[(String, String)]) -> Fields {
        let fields = names.iter().map(|(old, new)| (old.as_str().into(), new.as_str().into())).collect();
        Fields { inner, fields, others: true }
    }

    fn apply(&self, mut record: Record, index: u64) -> Result<Record> {
        for (old, _) in &self.fields {
            if record.get(old).is_none() {
                let near = did_you_mean(old, record.names());
                let hint = near.map_or_else(
                    || format!("the fields are {}", record.names().collect::<Vec<_>>().join(", ")),
                    |near| format!("did you mean '{near}'?"),
                );
                let error = Error::function(format!("the record has no field '{old}'")).hint(hint);
                return Err(located(&*self.inner, index, error));
            }
        }
        if !self.others {
            let fields = self.fields.iter().filter_map(|(old, new)| Some((new.clone(), record.get(old)?.clone())));
            return Ok(Record { fields: fields.collect() });
        }
        for (name, _) in &mut record.fields {
            if let Some((_, new)) = self.fields.iter().find(|(old, _)| old == name) {
                *name = new.clone();
            }
        }
        let twice = record.names().enumerate().find(|(k, name)| record.names().take(*k).any(|other| other == *name));
        if let Some((_, name)) = twice {
            let error = Error::function(format!("rename gives the record two fields '{name}'"));
            return Err(located(&*self.inner, index, error.hint("select the fields that you need first")));
        }
        Ok(record)
    }
}

impl Dataset for Fields {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn get(&self, index: u64) -> Result<Record> {
        self.apply(self.inner.get(index)?, index)
    }

    fn get_many(&self, indices: &[u64]) -> Result<Vec<Record>> {
        let records = self.inner.get_many(indices)?;
        records.into_iter().zip(indices).map(|(record, index)| self.apply(record, *index)).collect()
    }

    fn origins(&self, index: u64) -> Result<Vec<Origin>> {
        self.inner.origins(index)
    }

    fn fingerprint(&self) -> Fingerprint {
        let names: Vec<&[u8]> = self.fields.iter().flat_map(|(old, new)| [old.as_bytes(), new.as_bytes()]).collect();
        hash::stage(if self.others { "rename/1" } else { "select/1" }, &names, &[&*self.inner])
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
        Some((Arc::new(Fields { inner, fields: self.fields.clone(), others: self.others }), seed))
    }
}
