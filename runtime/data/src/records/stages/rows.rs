//! Selects rows of a dataset: filters, sorts, splits by hash, samples, drops duplicates.

use super::function::wrong;
use super::scan::Scan;
use super::{first, place};
use crate::error::{Error, Result};
use crate::records::{Dataset, Fingerprint, Origin, Record, RecordFn, Value, hash};
use crate::sample_order::{Permutation, Stream};
use perilune_core::error::did_you_mean;
use rustc_hash::FxHashSet;
use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError, RwLock};

/// Some rows of each epoch of a dataset, in any order.
pub struct Rows {
    inner: Arc<dyn Dataset>,
    rows: List,
    fingerprint: Fingerprint,
}

/// Row numbers, in 4 bytes each where they fit.
enum List {
    Short(Vec<u32>),
    Long(Vec<u64>),
}

impl Rows {
    /// `stage` and `arguments` are what the rows follow from. The epochs of `inner` must be equal.
    fn of(inner: Arc<dyn Dataset>, rows: Vec<u64>, stage: &str, arguments: &[&[u8]]) -> Arc<dyn Dataset> {
        let fingerprint = hash::stage(stage, arguments, &[&*inner]);
        let rows = match u32::try_from(inner.len()) {
            Ok(_) => List::Short(rows.into_iter().map(|r| r as u32).collect()),
            Err(_) => List::Long(rows),
        };
        Arc::new(Rows { inner, rows, fingerprint })
    }

    fn at(&self, index: u64) -> u64 {
        let (epoch, i) = place(index, self.len());
        let row = match &self.rows {
            List::Short(rows) => u64::from(rows[i as usize]),
            List::Long(rows) => rows[i as usize],
        };
        first(epoch, self.inner.len()) + row
    }
}

impl Dataset for Rows {
    fn len(&self) -> u64 {
        match &self.rows {
            List::Short(rows) => rows.len() as u64,
            List::Long(rows) => rows.len() as u64,
        }
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
        self.fingerprint
    }
}

/// The rows for which `keep` is true.
fn kept(keep: Vec<bool>) -> Vec<u64> {
    (0..).zip(keep).filter(|(_, keep)| *keep).map(|(row, _)| row).collect()
}

/// The records for which a function returns true.
///
/// # Errors
/// The function fails or returns no boolean.
pub fn filter(inner: Arc<dyn Dataset>, f: &dyn RecordFn, scan: &Scan) -> Result<Arc<dyn Dataset>> {
    let keep = scan.results(&*inner, f, |value| match value {
        Value::Bool(keep) => Ok(keep),
        other => Err(wrong("filter", f, &other, "return true or false: r.text ~= nil, not r.text")),
    })?;
    Ok(Rows::of(inner, kept(keep), "filter/1", &[&f.fingerprint()]))
}

/// The records whose content has a keyed hash in the range `low .. high` of 0 to 1. Equal records are in the same part, and new records
/// move none.
///
/// # Errors
/// A record cannot be read.
pub fn part(inner: Arc<dyn Dataset>, seed: u64, low: f64, high: f64, scan: &Scan) -> Result<Arc<dyn Dataset>> {
    let keep = scan.each(&*inner, |_, record| {
        let hash = hash::seeded(seed, &record);
        Ok((low..high).contains(&hash))
    })?;
    let arguments: [&[u8]; 3] = [&seed.to_le_bytes(), &low.to_le_bytes(), &high.to_le_bytes()];
    Ok(Rows::of(inner, kept(keep), "part/1", &arguments))
}

/// `count` rows drawn without replacement, in their order; all if there are fewer.
pub fn sample(inner: Arc<dyn Dataset>, count: u64, seed: u64) -> Arc<dyn Dataset> {
    let order = Permutation::new(inner.len(), seed, 0, Stream::Sample);
    let mut rows: Vec<u64> = (0..count.min(inner.len())).map(|i| order.at(i)).collect();
    rows.sort_unstable();
    Rows::of(inner, rows, "sample/1", &[&count.to_le_bytes(), &seed.to_le_bytes()])
}

/// The first of the records that are equal in these fields; of all fields if the list is empty.
///
/// # Errors
/// A record cannot be read.
pub fn unique(inner: Arc<dyn Dataset>, fields: &[String], scan: &Scan) -> Result<Arc<dyn Dataset>> {
    let hashes = scan.each(&*inner, |_, mut record| {
        if !fields.is_empty() {
            record.fields.retain(|(name, _)| fields.iter().any(|f| **f == **name));
        }
        Ok(hash::content(&record))
    })?;
    let mut seen = FxHashSet::default();
    let keep = hashes.into_iter().map(|h| seen.insert(h)).collect();
    let arguments: Vec<&[u8]> = fields.iter().map(|f| f.as_bytes()).collect();
    Ok(Rows::of(inner, kept(keep), "unique/1", &arguments))
}

/// The records whose content, in these fields, no record of `other` has; in all fields if the list is empty. Numbers are compared by value.
///
/// # Errors
/// A record cannot be read, no record of a dataset has one of the fields, or without a list the two have other fields.
pub fn without(
    inner: Arc<dyn Dataset>,
    other: &dyn Dataset,
    fields: &[String],
    scan: &Scan,
) -> Result<Arc<dyn Dataset>> {
    let (own_hashes, own_names) = contents(&*inner, fields, scan)?;
    let (hashes, names) = contents(other, fields, scan)?;
    if fields.is_empty() && own_names != names && !(own_names.is_empty() || names.is_empty()) {
        let list = |names: &BTreeSet<Arc<str>>| names.iter().map(|n| &**n).collect::<Vec<_>>().join(", ");
        let rule = format!("the records have the fields {}, and the others {}", list(&own_names), list(&names));
        return Err(Error::argument("without", rule).hint("name the fields to compare: :without(other, { \"x\" })"));
    }
    let held: FxHashSet<Fingerprint> = hashes.into_iter().collect();
    let keep = own_hashes.into_iter().map(|h| !held.contains(&h)).collect();
    let other = other.fingerprint();
    let arguments: Vec<&[u8]> = std::iter::once(&other[..]).chain(fields.iter().map(|f| f.as_bytes())).collect();
    Ok(Rows::of(inner, kept(keep), "without/1", &arguments))
}

/// A hash of the content of all records in these fields, in their order: it stays when the code that makes them changes and they do not.
///
/// # Errors
/// Those of [`without`].
pub fn digest(dataset: &dyn Dataset, fields: &[String], scan: &Scan) -> Result<Fingerprint> {
    let (hashes, _) = contents(dataset, fields, scan)?;
    let hashes: Vec<&[u8]> = hashes.iter().map(|h| h.as_slice()).collect();
    Ok(hash::stage("digest/1", &hashes, &[]))
}

/// The hashes of all records in these fields, and the names of fields that occur.
fn contents(dataset: &dyn Dataset, fields: &[String], scan: &Scan) -> Result<(Vec<Fingerprint>, BTreeSet<Arc<str>>)> {
    let names = RwLock::new(BTreeSet::<Arc<str>>::new());
    let hashes = scan.each(dataset, |_, mut record| {
        record.fields.retain(|(_, value)| *value != Value::Null);
        for (name, _) in &record.fields {
            if !names.read().unwrap_or_else(PoisonError::into_inner).contains(name) {
                names.write().unwrap_or_else(PoisonError::into_inner).insert(name.clone());
            }
        }
        if !fields.is_empty() {
            record.fields.retain(|(name, _)| fields.iter().any(|f| **f == **name));
        }
        Ok(hash::by_value(&record))
    })?;
    let names = names.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(lost) = fields.iter().find(|f| !hashes.is_empty() && !names.contains(f.as_str())) {
        let near = did_you_mean(lost, names.iter().map(|n| &**n));
        let hint = near.map_or_else(
            || format!("the fields are {}", names.iter().map(|n| &**n).collect::<Vec<_>>().join(", ")),
            |near| format!("did you mean '{near}'?"),
        );
        return Err(Error::argument("without", format!("no record has a field '{lost}'")).hint(hint));
    }
    Ok((hashes, names))
}

/// The records in the order of a function's results: numbers or strings. Equal ones keep their order.
///
/// # Errors
/// The function fails, or returns something else, or numbers for some and strings for others.
pub fn sort(inner: Arc<dyn Dataset>, f: &dyn RecordFn, descending: bool, scan: &Scan) -> Result<Arc<dyn Dataset>> {
    let keys = scan.results(&*inner, f, |value| match value {
        Value::Float(x) if x.is_nan() => {
            Err(Error::function(format!("the function of sort at {} returns NaN", f.place())))
        }
        key @ (Value::Int(_) | Value::Float(_) | Value::Text(_)) => Ok(key),
        other => Err(wrong("sort", f, &other, "return a number or a string")),
    })?;
    let is_text = |key: &Value| matches!(key, Value::Text(_));
    if let Some(other) = keys.iter().position(|key| is_text(key) != is_text(&keys[0])) {
        let rule = format!("the function of sort at {} returns strings for some records", f.place());
        let error = Error::function(rule).hint("return numbers for all, or strings for all");
        return Err(super::located(&*inner, other as u64, error));
    }
    let mut rows: Vec<u64> = (0..keys.len() as u64).collect();
    rows.sort_by(|a, b| {
        let order = compare(&keys[*a as usize], &keys[*b as usize]);
        if descending { order.reverse() } else { order }
    });
    Ok(Rows::of(inner, rows, "sort/1", &[&f.fingerprint(), &[u8::from(descending)]]))
}

fn compare(a: &Value, b: &Value) -> Ordering {
    let number = |v: &Value| match v {
        Value::Int(i) => *i as f64,
        Value::Float(x) => *x,
        _ => 0.0,
    };
    match (a, b) {
        (Value::Int(a), Value::Int(b)) => a.cmp(b),
        (Value::Text(a), Value::Text(b)) => a.cmp(b),
        _ => number(a).total_cmp(&number(b)),
    }
}
