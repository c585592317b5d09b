//! Groups the records of a dataset by a key, and joins two datasets by the value of a field.

use super::scan::Scan;
use super::{first, located as at, place};
use crate::error::{Error, Result};
use crate::records::{Dataset, Fingerprint, Origin, Record, RecordFn, Value, hash};
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// The groups of a dataset: records { key, rows }, in the order of the first record of each.
struct Groups {
    inner: Arc<dyn Dataset>,
    groups: Vec<(Value, Vec<u64>)>,
    fingerprint: Fingerprint,
}

/// Collects the records with the same key. A group is a record of its `key` and its `rows`, a list of records.
///
/// # Errors
/// The function fails, or returns something else than a string, a number or a boolean.
pub fn group(inner: Arc<dyn Dataset>, f: &dyn RecordFn, scan: &Scan) -> Result<Arc<dyn Dataset>> {
    let keys = scan.results(&*inner, f, |value| match value {
        key @ (Value::Int(_) | Value::Float(_) | Value::Text(_) | Value::Bool(_)) => Ok(key),
        other => Err(super::function::wrong("group", f, &other, "return a string, a number or a boolean")),
    })?;
    let mut numbers: FxHashMap<Fingerprint, usize> = FxHashMap::default();
    let mut groups: Vec<(Value, Vec<u64>)> = Vec::new();
    for (row, key) in (0..).zip(keys) {
        let number = *numbers.entry(hash::value(&key)).or_insert(groups.len());
        if number == groups.len() {
            groups.push((key, Vec::new()));
        }
        groups[number].1.push(row);
    }
    let fingerprint = hash::stage("group/1", &[&f.fingerprint()], &[&*inner]);
    Ok(Arc::new(Groups { inner, groups, fingerprint }))
}

impl Groups {
    fn at(&self, index: u64) -> (&Value, Vec<u64>) {
        let (epoch, i) = place(index, self.len());
        let (key, rows) = &self.groups[i as usize];
        (key, rows.iter().map(|row| first(epoch, self.inner.len()) + row).collect())
    }
}

impl Dataset for Groups {
    fn len(&self) -> u64 {
        self.groups.len() as u64
    }

    fn get(&self, index: u64) -> Result<Record> {
        let (key, rows) = self.at(index);
        let rows = self.inner.get_many(&rows)?.into_iter().map(Value::Map).collect();
        Ok(Record { fields: vec![("key".into(), key.clone()), ("rows".into(), Value::List(rows))] })
    }

    fn origins(&self, index: u64) -> Result<Vec<Origin>> {
        let mut out = Vec::new();
        for row in self.at(index).1 {
            out.extend(self.inner.origins(row)?);
        }
        Ok(out)
    }

    fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }
}

/// A dataset whose records have the fields of another one's record too.
struct Join {
    inner: Arc<dyn Dataset>,
    other: Arc<dyn Dataset>,
    /// The row of each record, and that of the other.
    pairs: Vec<(u64, u64)>,
    field: String,
    fingerprint: Fingerprint,
}

/// Adds to each record the fields of the record of `other` that has the same value in `field`. A record without one is left out.
///
/// # Errors
/// A record lacks the field, two records of `other` have the same value, or both have another field of one name.
pub fn join(inner: Arc<dyn Dataset>, other: Arc<dyn Dataset>, field: &str, scan: &Scan) -> Result<Arc<dyn Dataset>> {
    let key = |_: u64, record: Record| match record.get(field) {
        Some(Value::Null) | None => {
            Err(Error::function(format!("the record has no field '{field}'")).hint("join needs it in all records"))
        }
        Some(value) => Ok(hash::value(value)),
    };
    let mut rows: FxHashMap<Fingerprint, u64> = FxHashMap::default();
    for (row, key) in (0..).zip(scan.each(&*other, key)?) {
        if rows.insert(key, row).is_some() {
            let rule = format!("another record has the same '{field}'");
            let error = Error::function(rule).hint("the values of the joined dataset must be distinct: see unique");
            return Err(at(&*other, row, error));
        }
    }
    let keys = scan.each(&*inner, key)?;
    let pairs = (0..).zip(keys).filter_map(|(row, key)| Some((row, *rows.get(&key)?))).collect();
    let fingerprint = hash::stage("join/1", &[field.as_bytes()], &[&*inner, &*other]);
    Ok(Arc::new(Join { inner, other, pairs, field: field.to_string(), fingerprint }))
}

impl Join {
    fn at(&self, index: u64) -> (u64, u64) {
        let (epoch, i) = place(index, self.len());
        let (row, other) = self.pairs[i as usize];
        (first(epoch, self.inner.len()) + row, other)
    }
}

impl Dataset for Join {
    fn len(&self) -> u64 {
        self.pairs.len() as u64
    }

    fn get(&self, index: u64) -> Result<Record> {
        let (row, other) = self.at(index);
        let mut record = self.inner.get(row)?;
        for (name, value) in self.other.get(other)?.fields {
            if *name == *self.field {
                continue;
            }
            if record.get(&name).is_some() {
                let error = Error::function(format!("both records have a field '{name}'"));
                let error = error.hint("rename it in one of the datasets: :rename { old = \"new\" }");
                return Err(at(&*self.inner, row, error));
            }
            record.fields.push((name, value));
        }
        Ok(record)
    }

    fn origins(&self, index: u64) -> Result<Vec<Origin>> {
        let (row, other) = self.at(index);
        let mut out = self.inner.origins(row)?;
        out.extend(self.other.origins(other)?);
        Ok(out)
    }

    fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }
}
