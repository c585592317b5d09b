//! Computes the profile of records: fields, conversations, keys of duplicates.

use crate::chat::ChatFaults;
use crate::field::{FieldProfile, Rows};
use crate::minhash::{self, Bands, MINIMA};
use crate::normal;
use crate::roles::{Role, Roles};
use perilune_data::records::{Record, Value, hash};

/// Characters below which a text is too short for exact and for near duplicates: short answers repeat naturally.
const SHORT: usize = 16;
const SHORT_NEAR: usize = 40;
/// Numbers below which a record without text is too small for duplicates.
const FEW_NUMBERS: u64 = 8;
/// Fields that are profiled.
const FIELDS: usize = 256;

/// What is known of some records.
#[derive(Clone, Default, Debug)]
pub struct Profile {
    pub rows: u64,
    pub fields: Vec<FieldProfile>,
    pub chat: ChatFaults,
    pub unreadable: Rows,
    /// The first errors.
    pub errors: Vec<String>,
}

/// What duplicates are found by: 0 is no key.
#[derive(Clone, Copy, Debug)]
pub struct Keys {
    pub exact: u128,
    /// The hash of its labels, 0 without any.
    pub label: u64,
    /// `None` for texts that are too short.
    pub bands: Option<Bands>,
}

impl Keys {
    pub const NONE: Keys = Keys { exact: 0, label: 0, bands: None };
}

/// Buffers of a thread.
#[derive(Default)]
pub struct Scratch {
    pub text: String,
    grams: Vec<u32>,
}

/// Collects the normalized texts of a record.
pub fn texts(record: &Record, roles: &Roles, out: &mut String) {
    fn collect(value: &Value, out: &mut String) {
        match value {
            Value::Text(text) => {
                if !out.is_empty() {
                    out.push(normal::SEPARATOR);
                }
                normal::append(text, out);
            }
            Value::List(list) => list.iter().for_each(|v| collect(v, out)),
            Value::Map(map) => map.fields.iter().for_each(|(_, v)| collect(v, out)),
            _ => {}
        }
    }
    out.clear();
    for (name, value) in &record.fields {
        match roles.of(name) {
            Role::Text => collect(value, out),
            Role::Conversation => {
                if let Value::List(turns) = value {
                    turns.iter().filter_map(crate::chat::turn).for_each(|t| collect(t.1, out));
                }
            }
            _ => {}
        }
    }
}

fn numbers(value: &Value) -> u64 {
    match value {
        Value::Int(_) | Value::Float(_) => 1,
        Value::List(list) => list.iter().map(numbers).sum(),
        Value::Array(array) => array.numel() as u64,
        Value::Bytes(bytes) => bytes.len() as u64,
        _ => 0,
    }
}

fn word(hash: &[u8; 32]) -> u128 {
    hash.iter().take(16).fold(0, |word, byte| word << 8 | u128::from(*byte)).max(1)
}

/// Computes the keys of a record.
pub fn keys(record: &Record, roles: &Roles, near: bool, scratch: &mut Scratch) -> Keys {
    let mut out = Keys::NONE;
    let (labels, others): (Vec<_>, Vec<_>) = record.fields.iter().partition(|f| roles.of(&f.0) == Role::Label);
    if !labels.is_empty() {
        let labels = Record { fields: labels.into_iter().cloned().collect() };
        out.label = word(&hash::content(&labels)) as u64 | 1;
    }
    if !roles.has_text() {
        let fields: Vec<_> = others.into_iter().filter(|f| roles.of(&f.0) != Role::Identifier).cloned().collect();
        if fields.iter().map(|f| numbers(&f.1)).sum::<u64>() >= FEW_NUMBERS {
            out.exact = word(&hash::content(&Record { fields }));
        }
        return out;
    }
    texts(record, roles, &mut scratch.text);
    if scratch.text.len() >= SHORT {
        out.exact = word(blake3::hash(scratch.text.as_bytes()).as_bytes());
    }
    if near && scratch.text.len() >= SHORT_NEAR {
        normal::grams(&scratch.text, &mut scratch.grams);
        let mut minima = [0; MINIMA];
        minhash::minima(&scratch.grams, &mut minima);
        out.bands = Some(minhash::bands(&minima));
    }
    out
}

impl Profile {
    pub fn add(&mut self, record: &Record, roles: &Roles, row: u64) {
        self.rows += 1;
        for (k, (name, value)) in record.fields.iter().enumerate() {
            // Records mostly have the same fields in the same order.
            let at = match self.fields.get(k).is_some_and(|f| f.name == *name) {
                true => Some(k),
                false => self.fields.iter().position(|f| f.name == *name),
            };
            let at = match at {
                Some(at) => at,
                None if self.fields.len() < FIELDS => {
                    self.fields.push(FieldProfile::new(name.clone()));
                    self.fields.len() - 1
                }
                None => continue,
            };
            let role = roles.of(name);
            self.fields[at].add(value, role, row);
            if role == Role::Conversation {
                self.chat.add(value, row);
            }
        }
    }

    pub fn fail(&mut self, row: u64, message: String) {
        self.rows += 1;
        self.unreadable.add(row);
        if self.errors.len() < 3 {
            self.errors.push(message);
        }
    }

    pub fn merge(&mut self, other: Profile) {
        self.rows += other.rows;
        for field in other.fields {
            match self.fields.iter().position(|f| f.name == field.name) {
                Some(at) => self.fields[at].merge(field),
                None if self.fields.len() < FIELDS => self.fields.push(field),
                None => {}
            }
        }
        self.chat.merge(other.chat);
        self.unreadable.merge(other.unreadable);
        let room = 3 - self.errors.len().min(3);
        self.errors.extend(other.errors.into_iter().take(room));
    }
}

/// Quotes the first text of a record, or its first field.
pub fn first_text(record: &Record) -> String {
    let text = record
        .fields
        .iter()
        .find_map(|f| if let Value::Text(t) = &f.1 { Some(perilune_data::error::quote(t)) } else { None });
    text.unwrap_or_else(|| record.fields.first().map(|f| excerpt_of(&f.1)).unwrap_or_default())
}

/// Numbers of an array that an excerpt shows.
const SHOWN: usize = 8;

/// Shows the beginning of a value.
pub fn excerpt_of(value: &Value) -> String {
    match value {
        Value::Text(text) => perilune_data::error::quote(text),
        Value::Int(i) => i.to_string(),
        Value::Float(x) => x.to_string(),
        Value::Array(array) => {
            let shown: Vec<String> = (0..array.numel().min(SHOWN)).map(|i| array.get_f64(i).to_string()).collect();
            let more = if array.numel() > SHOWN { ", …" } else { "" };
            format!("{} {}: {}{more}", array.dtype, array.shape, shown.join(", "))
        }
        other => perilune_data::error::quote(&format!("{other:?}")),
    }
}
