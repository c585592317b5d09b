//! Defines the trait of functions of a record, such as those that a recipe writes in Lua.

use super::Fingerprint;
use super::value::{Record, Value};
use crate::error::{Error, Result};

/// A pure function of a record and of its index in the stream. Stages call it on any thread, in any order, and more than once.
pub trait RecordFn: Send + Sync + 'static {
    /// Computes the result: a map for `map`, a boolean for `filter`, a list of maps for `flat_map`, a key for `sort` and `group`.
    ///
    /// # Errors
    /// The function fails, or returns what is no value of a record. The stage adds the origin of the record.
    fn call(&self, record: Record, index: u64) -> Result<Value>;

    /// Computes the results for several records, those before the first that fails, with its error. What a call costs beside the
    /// function itself is shared among them.
    fn call_many(&self, records: Vec<Record>, indices: &[u64]) -> (Vec<Value>, Option<Error>) {
        let mut out = Vec::with_capacity(records.len());
        for (record, index) in records.into_iter().zip(indices) {
            match self.call(record, *index) {
                Ok(value) => out.push(value),
                Err(e) => return (out, Some(e)),
            }
        }
        (out, None)
    }

    /// Where it is defined, for messages: "sft.lua:31".
    fn place(&self) -> &str;

    /// The hash of all that its result depends on besides the record: its code, its captured values, the modules that it loads.
    fn fingerprint(&self) -> Fingerprint;
}

/// The value of a field.
pub struct Field(pub String);

impl RecordFn for Field {
    fn call(&self, record: Record, _index: u64) -> Result<Value> {
        let found = record.fields.iter().position(|(name, _)| **name == *self.0);
        let mut fields = record.fields;
        match found {
            Some(at) => Ok(fields.swap_remove(at).1),
            None => Err(missing(&self.0)),
        }
    }

    fn place(&self) -> &str {
        "a field"
    }

    fn fingerprint(&self) -> Fingerprint {
        super::hash::stage("field/1", &[self.0.as_bytes()], &[])
    }
}

/// The number of elements of a field, of a text its characters.
pub struct Length(pub String);

impl RecordFn for Length {
    fn call(&self, record: Record, _index: u64) -> Result<Value> {
        let length = match record.get(&self.0) {
            Some(Value::List(list)) => list.len(),
            Some(Value::Array(array)) => array.shape.dims().first().copied().unwrap_or(0),
            Some(Value::Text(text)) => text.chars().count(),
            // A table without fields is the empty list.
            Some(Value::Map(map)) if map.fields.is_empty() => 0,
            Some(other) => {
                let rule = format!("'{}' is {}, which has no length", self.0, other.type_name());
                return Err(Error::function(rule).hint("name a list or a text"));
            }
            None => return Err(missing(&self.0)),
        };
        Ok(Value::Int(length as i64))
    }

    fn place(&self) -> &str {
        "a field"
    }

    fn fingerprint(&self) -> Fingerprint {
        super::hash::stage("length/1", &[self.0.as_bytes()], &[])
    }
}

fn missing(name: &str) -> Error {
    Error::function(format!("the record has no field '{name}'")).hint("name a field that all records have")
}
