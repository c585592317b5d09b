//! Makes batches of records: a [`Source`] whose columns are the fields.
//!
//! The first record decides the columns: a number is a scalar, a list of numbers an array. Integers are i64, other numbers f32, booleans
//! bool; an array keeps its dtype. All records of a batch need the same shape, so lists of several lengths are padded to a given one.

use super::stages::Pseudo;
use super::{Dataset, Record, Value};
use crate::error::{Error, Result};
use crate::source::{Column, Sample, Source};
use perilune_core::{DType, HostTensor, Shape};
use std::sync::Arc;

/// How a field whose lists differ in length is padded.
#[derive(Clone, PartialEq, Debug)]
pub struct Pad {
    pub field: String,
    pub length: usize,
    pub value: f64,
}

/// Batches of a dataset. A row is an index of the stream.
pub struct RecordBatches {
    dataset: Arc<dyn Dataset>,
    names: Vec<Arc<str>>,
    columns: Vec<Column>,
    pads: Vec<Option<(usize, f64)>>,
}

/// Samples that a task makes: a function takes some microseconds.
const GRAIN: usize = 8;

impl RecordBatches {
    /// Reads the first record.
    ///
    /// # Errors
    /// There is none, it cannot be made, a field holds no numbers, or a field to be padded is not there.
    pub fn new(dataset: Arc<dyn Dataset>, pads: &[Pad]) -> Result<RecordBatches> {
        if dataset.is_empty() {
            return Err(Error::argument("batch", "there are no records").hint("look at the filters before it"));
        }
        let first = dataset.get(0)?;
        let names: Vec<Arc<str>> = first.fields.iter().map(|(name, _)| name.clone()).collect();
        if names.is_empty() {
            return Err(Error::argument("batch", "the records have no fields"));
        }
        let pad = |name: &str| pads.iter().find(|p| p.field == name).map(|p| (p.length, p.value));
        if let Some(lost) = pads.iter().find(|p| first.get(&p.field).is_none()) {
            let rule = format!("there is no field '{}' to pad", lost.field);
            return Err(Error::argument("batch", rule).hint(format!("the fields are {}", names.join(", "))));
        }
        let mut batches = RecordBatches { names, columns: Vec::new(), pads: Vec::new(), dataset };
        for (name, value) in &first.fields {
            let array = numbers(name, value).map_err(|e| batches.located(0, e))?;
            let mut shape = array.shape;
            let padded = pad(name);
            if let Some((length, _)) = padded {
                if shape.rank() != 1 {
                    let rule = format!("'{name}' has {} dims; only a list of numbers is padded", shape.rank());
                    return Err(batches.located(0, Error::function(rule)));
                }
                shape = Shape::of(&[length]);
            }
            batches.columns.push(Column { dtype: array.dtype, shape });
            batches.pads.push(padded);
        }
        Ok(batches)
    }

    /// The names of the columns.
    pub fn names(&self) -> &[Arc<str>] {
        &self.names
    }

    /// Names the record of an error.
    fn located(&self, index: u64, error: Error) -> Error {
        super::stages::located(&*self.dataset, index, error)
    }

    fn append(&self, record: &Record, k: usize, to: &mut Vec<u8>) -> Result<()> {
        let (name, column) = (&self.names[k], self.columns[k]);
        let Some(value) = record.get(name) else {
            let rule = format!("the record has no field '{name}', which the first one has");
            return Err(Error::function(rule).hint("set it in a map, or filter such records"));
        };
        let mut array = numbers(name, value)?;
        let fits = array.dtype == column.dtype || (array.dtype == DType::I64 && column.dtype == DType::F32);
        // An empty list says nothing of its elements.
        if !fits && array.numel() > 0 {
            let rule = format!("'{name}' is {}, and {} in the first record", array.dtype.name(), column.dtype.name());
            return Err(Error::function(rule).hint("make all alike in a map: x + 0.0 for numbers, x // 1 for integers"));
        }
        if array.dtype != column.dtype {
            array = array.cast(column.dtype);
        }
        if let Some((length, value)) = self.pads[k] {
            let found = array.numel();
            if array.shape.rank() != 1 || found > length {
                let rule = format!("'{name}' has {found} elements, and is padded to {length}");
                return Err(Error::function(rule).hint("pad to a larger length, or shorten the list in a map"));
            }
            let rest = HostTensor::from_f64(column.dtype, Shape::of(&[length - found]), &vec![value; length - found]);
            to.extend_from_slice(&array.bytes);
            to.extend_from_slice(&rest.bytes);
            return Ok(());
        }
        if array.shape != column.shape {
            let rule = format!("'{name}' has the shape {}, and {} in the first record", array.shape, column.shape);
            let hint =
                format!("pad it: :pad {{ {name} = {{ length = 128, value = 0 }} }}; or pack documents: :pack(1024)");
            return Err(Error::function(rule).hint(hint));
        }
        to.extend_from_slice(&array.bytes);
        Ok(())
    }
}

/// The numbers of a value as an array.
pub(crate) fn numbers(name: &str, value: &Value) -> Result<HostTensor> {
    let mut dims = Vec::new();
    let mut at = value;
    while let Value::List(list) = at {
        dims.push(list.len());
        match list.first() {
            Some(first) => at = first,
            None => break,
        }
    }
    let refuse = |found: &Value| {
        let rule = format!("'{name}' holds {}; a batch has numbers, booleans, and lists of them", found.type_name());
        Err(Error::function(rule).hint("leave it out: :select { ... }, or make numbers of it in a :map"))
    };
    match at {
        Value::Array(array) if dims.is_empty() => return Ok((**array).clone()),
        Value::Map(map) if map.fields.is_empty() && dims.is_empty() => dims.push(0),
        Value::List(_) | Value::Int(_) | Value::Float(_) | Value::Bool(_) => {}
        other => return refuse(other),
    }
    let Ok(shape) = Shape::new(&dims) else {
        return Err(Error::function(format!("'{name}' has {} dims", dims.len())).hint("use at most 8"));
    };
    let mut flat = Vec::with_capacity(shape.numel());
    if flatten(value, &dims, &mut flat).is_none() {
        let rule = format!("'{name}' is a list whose parts differ in length or hold other values than numbers");
        return Err(Error::function(rule).hint("use lists of equal length"));
    }
    let is = |f: fn(&Value) -> bool| flat.iter().all(|v| f(v));
    if is(|v| matches!(v, Value::Bool(_))) && !flat.is_empty() {
        let bytes = flat.iter().map(|v| u8::from(matches!(v, Value::Bool(true)))).collect();
        return Ok(HostTensor::new(DType::Bool, shape, bytes));
    }
    if is(|v| matches!(v, Value::Int(_))) {
        let ints: Vec<i64> = flat.iter().map(|v| if let Value::Int(i) = v { *i } else { 0 }).collect();
        return Ok(HostTensor::from_i64(shape, &ints));
    }
    let mut floats = Vec::with_capacity(flat.len());
    for v in flat {
        match v {
            Value::Int(i) => floats.push(*i as f64),
            Value::Float(x) => floats.push(*x),
            other => return refuse(other),
        }
    }
    Ok(HostTensor::from_f64(DType::F32, shape, &floats))
}

/// Collects the elements of nested lists with these dims. Returns `None` if they have others.
fn flatten<'a>(value: &'a Value, dims: &[usize], to: &mut Vec<&'a Value>) -> Option<()> {
    match (value, dims) {
        (Value::List(list), [n, rest @ ..]) if list.len() == *n => {
            list.iter().try_for_each(|item| flatten(item, rest, to))
        }
        // A table without fields is the empty list.
        (Value::Map(map), [0]) if map.fields.is_empty() => Some(()),
        (Value::Int(_) | Value::Float(_) | Value::Bool(_), []) => {
            to.push(value);
            Some(())
        }
        _ => None,
    }
}

impl Source for RecordBatches {
    /// Any index of the stream is a row.
    fn rows(&self) -> usize {
        usize::MAX
    }

    fn columns(&self) -> &[Column] {
        &self.columns
    }

    fn grain(&self) -> usize {
        GRAIN
    }

    fn version(&self) -> u64 {
        self.dataset.pseudo().map_or(0, Pseudo::version)
    }

    fn write(&self, sample: Sample, columns: &mut [Vec<u8>]) -> Result<()> {
        let index = sample.row as u64;
        let record = self.dataset.get(index)?;
        for (k, column) in columns.iter_mut().enumerate() {
            self.append(&record, k, column).map_err(|e| self.located(index, e))?;
        }
        if let Some(extra) = record.names().find(|name| !self.names.iter().any(|n| **n == **name)) {
            let rule = format!("the record has the field '{extra}', which the first one has not");
            let error = Error::function(rule).hint("use :select { ... } to name the fields of a batch");
            return Err(self.located(index, error));
        }
        Ok(())
    }
}
