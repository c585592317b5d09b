//! Defines the values of a record: the data model of JSON, with integers, bytes and arrays of numbers.

use perilune_core::HostTensor;
use std::sync::Arc;

/// A value in a record. Cloning is cheap except for lists and maps.
#[derive(Clone, PartialEq, Debug)]
pub enum Value {
    /// `null` of JSON. In Lua a field that is absent, and `data.null` in a list.
    Null,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(Arc<str>),
    /// Bytes that are no UTF-8 text, such as an image file in a column of Parquet.
    Bytes(Arc<[u8]>),
    List(Vec<Value>),
    Map(Record),
    /// Numbers of one dtype, such as token ids. In Lua a list of numbers, nested for more than one dim.
    Array(Arc<HostTensor>),
}

/// Named values in the order of their source. Names are distinct.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct Record {
    pub fields: Vec<(Arc<str>, Value)>,
}

impl Record {
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.fields.iter().find(|(n, _)| &**n == name).map(|(_, value)| value)
    }

    /// Sets a field in place, or appends it.
    pub fn set(&mut self, name: &str, value: Value) {
        match self.fields.iter_mut().find(|(n, _)| &**n == name) {
            Some(field) => field.1 = value,
            None => self.fields.push((name.into(), value)),
        }
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.fields.iter().map(|(name, _)| &**name)
    }
}

impl Value {
    /// The name of its type, as messages state it.
    pub fn type_name(&self) -> &'static str {
        match self {
            Value::Null => "null",
            Value::Bool(_) => "a boolean",
            Value::Int(_) => "an integer",
            Value::Float(_) => "a number",
            Value::Text(_) => "a string",
            Value::Bytes(_) => "bytes",
            Value::List(_) => "a list",
            Value::Map(_) => "a map",
            Value::Array(_) => "an array of numbers",
        }
    }
}
