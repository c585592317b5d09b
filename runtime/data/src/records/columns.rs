//! Fits columns of a table: mean and deviation of numbers, the values of categories.
//!
//! Sums are f64, in the order of the rows, in two passes. So a fit does not depend on the number of threads.

use super::stages::Scan;
use super::{Dataset, Record, Value};
use crate::error::{Error, Result};
use perilune_core::error::did_you_mean;
use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::sync::Arc;

/// The most values of a column of categories: beyond, it is a column of names or texts.
pub const MAX_CATEGORIES: usize = 1 << 20;

/// A column of numbers.
#[derive(Clone, PartialEq, Debug)]
pub struct Numbers {
    /// The rows that have a number.
    pub count: u64,
    pub mean: f64,
    /// The standard deviation, whose sum of squares is divided by `count`.
    pub deviation: f64,
}

/// The fit of a dataset.
#[derive(Clone, PartialEq, Debug)]
pub struct Columns {
    pub numbers: Vec<Numbers>,
    /// The values of each column of categories, sorted: booleans, integers, texts.
    pub categories: Vec<Vec<Value>>,
}

/// Fits columns on all records of an epoch. `null`, an absent field, NaN, and in categories the empty text are missing values.
///
/// # Errors
/// A record cannot be read or holds another kind of value, a column has no value at all or too many categories.
pub fn fit(dataset: &dyn Dataset, numbers: &[String], categories: &[String], scan: &Scan) -> Result<Columns> {
    let rows = scan.each(dataset, |_, record| {
        let numbers = numbers.iter().map(|name| number(&record, name)).collect::<Result<Vec<f64>>>()?;
        let categories = categories.iter().map(|name| category(&record, name)).collect::<Result<Vec<Value>>>()?;
        Ok((numbers, categories))
    })?;
    let nothing = |name: &String| -> Result<Error> {
        let names: BTreeSet<Arc<str>> =
            if dataset.is_empty() { BTreeSet::new() } else { dataset.get(0)?.names().map(Arc::from).collect() };
        let rule = format!("no record has a value in column '{name}'");
        let near = did_you_mean(name, names.iter().map(|n| &**n)).map(|near| format!("did you mean '{near}'?"));
        let all = || format!("the first record has {}", names.iter().map(|n| &**n).collect::<Vec<_>>().join(", "));
        Ok(Error::argument("data.fit_columns", rule).hint(near.unwrap_or_else(all)))
    };
    let mut out = Columns { numbers: Vec::new(), categories: Vec::new() };
    for (k, name) in numbers.iter().enumerate() {
        let values = || rows.iter().map(|(numbers, _)| numbers[k]).filter(|x| !x.is_nan());
        let count = values().count() as u64;
        if count == 0 {
            return Err(nothing(name)?);
        }
        let mean = values().sum::<f64>() / count as f64;
        let deviation = (values().map(|x| (x - mean) * (x - mean)).sum::<f64>() / count as f64).sqrt();
        if !deviation.is_finite() {
            let rule = format!("the numbers of column '{name}' are too large: their deviation is {deviation}");
            return Err(Error::argument("data.fit_columns", rule).hint("scale them in a :map before"));
        }
        out.numbers.push(Numbers { count, mean, deviation });
    }
    for (k, name) in categories.iter().enumerate() {
        let mut values: Vec<&Value> = rows.iter().map(|(_, categories)| &categories[k]).collect();
        values.sort_by(|a, b| compare(a, b));
        values.dedup();
        values.retain(|value| **value != Value::Null);
        if values.is_empty() {
            return Err(nothing(name)?);
        }
        if values.len() > MAX_CATEGORIES {
            let rule = format!("column '{name}' has {} categories; at most {MAX_CATEGORIES}", values.len());
            return Err(Error::argument("data.fit_columns", rule).hint("leave it out, or group its values in a :map"));
        }
        out.categories.push(values.into_iter().cloned().collect());
    }
    Ok(out)
}

/// The number of a column; NaN where it is missing.
fn number(record: &Record, name: &str) -> Result<f64> {
    match record.get(name) {
        None | Some(Value::Null) => Ok(f64::NAN),
        Some(Value::Int(i)) => Ok(*i as f64),
        Some(Value::Float(x)) if x.is_infinite() => {
            Err(Error::function(format!("column '{name}' is {x}")).hint("replace it in a :map before"))
        }
        Some(Value::Float(x)) => Ok(*x),
        Some(other) => Err(Error::function(format!("column '{name}' is {}, and not a number", other.type_name()))
            .hint("list it in `categories`, or make a number of it in a :map")),
    }
}

/// The category of a column; null where it is missing.
fn category(record: &Record, name: &str) -> Result<Value> {
    match record.get(name) {
        None | Some(Value::Null) => Ok(Value::Null),
        Some(Value::Text(text)) if text.is_empty() => Ok(Value::Null),
        Some(Value::Float(x)) if x.is_nan() => Ok(Value::Null),
        Some(Value::Float(x)) if x.fract() == 0.0 && x.abs() <= 9.0e15 => Ok(Value::Int(*x as i64)),
        Some(value @ (Value::Text(_) | Value::Int(_) | Value::Bool(_))) => Ok(value.clone()),
        Some(Value::Float(x)) => {
            Err(Error::function(format!("column '{name}' is {x}; categories are strings, integers and booleans"))
                .hint("list it in `numbers`, or group its values in a :map"))
        }
        Some(other) => Err(Error::function(format!(
            "column '{name}' is {}; categories are strings, integers and booleans",
            other.type_name()
        ))
        .hint("leave it out, or make a string of it in a :map")),
    }
}

/// Orders categories: null, booleans, integers, texts by their bytes.
fn compare(a: &Value, b: &Value) -> Ordering {
    let rank = |v: &Value| match v {
        Value::Null => 0,
        Value::Bool(_) => 1,
        Value::Int(_) => 2,
        _ => 3,
    };
    match (a, b) {
        (Value::Bool(a), Value::Bool(b)) => a.cmp(b),
        (Value::Int(a), Value::Int(b)) => a.cmp(b),
        (Value::Text(a), Value::Text(b)) => a.cmp(b),
        _ => rank(a).cmp(&rank(b)),
    }
}
