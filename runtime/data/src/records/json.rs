//! Parses JSON to the values of records.
//!
//! Objects keep the order of their fields; of a repeated name the last value counts, as in Python's `json`. Integers beyond 64 bits become
//! floats. `serde_json` limits nesting to 128 levels. Most objects are read by `json_fields`, with equal results.

use super::json_fields;
use super::value::{Record, Value};
use rustc_hash::FxHashMap;
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;
use std::sync::Arc;

/// Fields of an object beyond which names are looked up by hash.
const FEW: usize = 16;

/// What is wrong with a text, and where: its line and column, from 1, the latter in bytes.
#[derive(Debug)]
pub(crate) struct Fault {
    pub line: usize,
    pub column: usize,
    pub rule: String,
}

/// Parses one object, with these fields only if they are given.
pub(crate) fn object(text: &[u8], fields: Option<&[Arc<str>]>) -> std::result::Result<Record, Fault> {
    json_fields::read(text, fields).map_or_else(|| parse(text, fields), Ok)
}

/// Parses a value, if there is nothing else.
pub(super) fn value(text: &[u8]) -> Option<Value> {
    let mut parser = serde_json::Deserializer::from_slice(text);
    let value = Any.deserialize(&mut parser).ok()?;
    parser.end().ok().map(|()| value)
}

/// [`object`] by `serde_json` alone, which decides what is an object and what is wrong with others.
pub(super) fn parse(text: &[u8], fields: Option<&[Arc<str>]>) -> std::result::Result<Record, Fault> {
    let mut parser = serde_json::Deserializer::from_slice(text);
    let parsed = Object(fields).deserialize(&mut parser).and_then(|record| parser.end().map(|()| record));
    parsed.map_err(|e| {
        let message = e.to_string();
        let rule = message.rsplit_once(" at line ").map_or(message.as_str(), |(rule, _)| rule);
        Fault { line: e.line(), column: e.column(), rule: rule.to_string() }
    })
}

/// An object as a record, with some of its fields.
struct Object<'a>(Option<&'a [Arc<str>]>);

impl<'de> DeserializeSeed<'de> for Object<'_> {
    type Value = Record;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> std::result::Result<Record, D::Error> {
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Object<'_> {
    type Value = Record;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object such as {\"text\": \"…\"}")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Record, A::Error> {
        let mut record = Record::default();
        let mut places: FxHashMap<Arc<str>, usize> = FxHashMap::default();
        while let Some(name) = map.next_key::<std::borrow::Cow<'de, str>>()? {
            let name: Arc<str> = match self.0.map(|fields| fields.iter().find(|f| ***f == *name)) {
                None => Arc::from(&*name),
                Some(Some(field)) => field.clone(),
                Some(None) => {
                    map.next_value::<IgnoredAny>()?;
                    continue;
                }
            };
            let value = map.next_value_seed(Any)?;
            let known = match record.fields.len() < FEW {
                true => record.fields.iter().position(|(n, _)| *n == name),
                false => places.get(&name).copied(),
            };
            match known {
                Some(at) => record.fields[at].1 = value,
                None => record.fields.push((name.clone(), value)),
            }
            if record.fields.len() == FEW {
                places.extend(record.fields.iter().enumerate().map(|(k, (n, _))| (n.clone(), k)));
            } else if record.fields.len() > FEW && known.is_none() {
                places.insert(name, record.fields.len() - 1);
            }
        }
        Ok(record)
    }
}

/// Any value.
struct Any;

impl<'de> DeserializeSeed<'de> for Any {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> std::result::Result<Value, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Any {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> std::result::Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, v: bool) -> std::result::Result<Value, E> {
        Ok(Value::Bool(v))
    }

    fn visit_i64<E>(self, v: i64) -> std::result::Result<Value, E> {
        Ok(Value::Int(v))
    }

    fn visit_u64<E>(self, v: u64) -> std::result::Result<Value, E> {
        Ok(i64::try_from(v).map_or(Value::Float(v as f64), Value::Int))
    }

    fn visit_f64<E: serde::de::Error>(self, v: f64) -> std::result::Result<Value, E> {
        if v.is_finite() { Ok(Value::Float(v)) } else { Err(E::custom("a number beyond the range of 64-bit floats")) }
    }

    fn visit_str<E>(self, v: &str) -> std::result::Result<Value, E> {
        Ok(Value::Text(v.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = seq.next_element_seed(Any)? {
            list.push(item);
        }
        Ok(Value::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> std::result::Result<Value, A::Error> {
        Object(None).visit_map(map).map(Value::Map).map_err(A::Error::custom)
    }
}
