//! Hashes records by content and stages by what they are made of.

use super::value::{Record, Value};
use super::{Dataset, Fingerprint};
use blake3::Hasher;

/// The BLAKE3 hash of a record's values. The order of its fields does not count.
pub fn content(record: &Record) -> Fingerprint {
    let mut hasher = Hasher::new();
    write_record(&mut hasher, record);
    *hasher.finalize().as_bytes()
}

/// The hash of a record's content as a person compares it: numbers by their value, whatever their type, and `null` as a field that is absent.
pub fn by_value(record: &Record) -> Fingerprint {
    content(&plain_record(record))
}

fn plain_record(record: &Record) -> Record {
    let fields = record.fields.iter().filter(|(_, value)| *value != Value::Null);
    Record { fields: fields.map(|(name, value)| (name.clone(), plain(value))).collect() }
}

/// Replaces integers by the number that equals them, where there is one.
fn plain(value: &Value) -> Value {
    match value {
        Value::Int(i) if (*i as f64) as i64 == *i && i.unsigned_abs() <= 1 << 53 => Value::Float(*i as f64),
        // -0 is 0.
        Value::Float(x) => Value::Float(x + 0.0),
        Value::List(list) => Value::List(list.iter().map(plain).collect()),
        Value::Map(record) => Value::Map(plain_record(record)),
        other => other.clone(),
    }
}

/// Hashes one value.
pub fn value(value: &Value) -> Fingerprint {
    let mut hasher = Hasher::new();
    write(&mut hasher, value);
    *hasher.finalize().as_bytes()
}

/// The fingerprint of a stage: its name and version, its arguments, and the datasets that it reads.
pub fn stage(name: &str, arguments: &[&[u8]], parents: &[&dyn Dataset]) -> Fingerprint {
    let mut hasher = Hasher::new();
    text(&mut hasher, name.as_bytes());
    arguments.iter().for_each(|argument| text(&mut hasher, argument));
    parents.iter().for_each(|parent| text(&mut hasher, &parent.fingerprint()));
    *hasher.finalize().as_bytes()
}

/// A length before the bytes, so that neighbours cannot be exchanged for others.
fn text(hasher: &mut Hasher, bytes: &[u8]) {
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}

fn write_record(hasher: &mut Hasher, record: &Record) {
    let mut fields: Vec<_> = record.fields.iter().collect();
    fields.sort_by(|a, b| a.0.cmp(&b.0));
    hasher.update(&(fields.len() as u64).to_le_bytes());
    for (name, value) in fields {
        text(hasher, name.as_bytes());
        write(hasher, value);
    }
}

fn write(hasher: &mut Hasher, value: &Value) {
    match value {
        Value::Null => hasher.update(b"n"),
        Value::Bool(b) => hasher.update(&[b'b', u8::from(*b)]),
        Value::Int(i) => hasher.update(b"i").update(&i.to_le_bytes()),
        Value::Float(x) => hasher.update(b"f").update(&x.to_bits().to_le_bytes()),
        Value::Text(s) => {
            hasher.update(b"t");
            text(hasher, s.as_bytes());
            hasher
        }
        Value::Bytes(b) => {
            hasher.update(b"y");
            text(hasher, b);
            hasher
        }
        Value::List(list) => {
            hasher.update(b"l").update(&(list.len() as u64).to_le_bytes());
            list.iter().for_each(|item| write(hasher, item));
            hasher
        }
        Value::Map(record) => {
            hasher.update(b"m");
            write_record(hasher, record);
            hasher
        }
        Value::Array(array) => {
            hasher.update(b"a");
            text(hasher, array.dtype.name().as_bytes());
            array.shape.dims().iter().for_each(|d| {
                hasher.update(&(*d as u64).to_le_bytes());
            });
            text(hasher, &array.bytes);
            hasher
        }
    };
}

/// A number in [0, 1) that depends on a seed and a record's content.
pub(crate) fn seeded(seed: u64, record: &Record) -> f64 {
    let mut hasher = Hasher::new();
    hasher.update(&seed.to_le_bytes());
    write_record(&mut hasher, record);
    let bytes = hasher.finalize();
    let word = bytes.as_bytes()[..8].iter().rev().fold(0u64, |word, byte| word << 8 | u64::from(*byte));
    (word >> 11) as f64 / (1u64 << 53) as f64
}
