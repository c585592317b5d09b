//! Reads the fields of a JSON object without parsing those that are not named.
//!
//! A fast path of [`super::json`]: values that are passed over are checked by the grammar, and only named ones are converted. It reads
//! plain objects; for anything else (escapes in names, deep nesting, a fault) it returns nothing, and `serde_json` decides. What it accepts
//! must be accepted there with equal values, which `json_fields_tests.rs` checks on random and damaged objects.

use super::json;
use super::json_text::{MAX_DEPTH, Scan};
use super::value::{Record, Value};
use std::cell::RefCell;
use std::sync::Arc;

/// The most digits of an integer that fits into 64 bits whatever they are.
const SAFE_DIGITS: usize = 18;
/// The most fields of a record that is read here; a search by name is then faster than a hash.
const MAX_FIELDS: usize = 32;
/// Names of fields that a thread keeps, so that records share them.
const MAX_NAMES: usize = 64;

thread_local! {
    static NAMES: RefCell<Names> = const { RefCell::new(Names { list: Vec::new(), next: 0 }) };
}

struct Names {
    list: Vec<Arc<str>>,
    /// The one that is expected.
    next: usize,
}

/// Reads an object, with these fields only if they are given. Returns nothing where it is not plain.
pub(super) fn read(text: &[u8], fields: Option<&[Arc<str>]>) -> Option<Record> {
    let mut scan = Scan { text, at: 0 };
    scan.expect(b'{')?;
    let record = scan.object(fields, 1)?;
    scan.peek().is_none().then_some(record)
}

/// Returns the name as records of this thread share it.
fn shared(name: &str) -> Arc<str> {
    NAMES.with_borrow_mut(|names| {
        // Names come in the same order in each record.
        let next = names.list.get(names.next).filter(|n| &***n == name).map(|_| names.next);
        if let Some(at) = next.or_else(|| names.list.iter().position(|n| &**n == name)) {
            names.next = if at + 1 == names.list.len() { 0 } else { at + 1 };
            return names.list[at].clone();
        }
        if names.list.len() == MAX_NAMES {
            names.list.clear();
        }
        let made: Arc<str> = name.into();
        names.list.push(made.clone());
        names.next = 0;
        made
    })
}

impl Scan<'_> {
    /// Reads a string whose first quote is at `start`.
    fn string_value(&mut self, start: usize) -> Option<Value> {
        self.at = start + 1;
        let mut from = self.at;
        self.seek_special();
        let plain = self.text.get(from..self.at)?;
        if *self.text.get(self.at)? == b'"' {
            self.at += 1;
            return Some(Value::Text(std::str::from_utf8(plain).ok()?.into()));
        }
        let mut out = Vec::with_capacity(2 * plain.len() + 16);
        loop {
            out.extend_from_slice(self.text.get(from..self.at)?);
            let byte = *self.text.get(self.at)?;
            if byte == b'"' {
                self.at += 1;
                return Some(Value::Text(std::str::from_utf8(&out).ok()?.into()));
            }
            (byte == b'\\').then_some(())?;
            from = self.at + 2;
            match *self.text.get(self.at + 1)? {
                same @ (b'"' | b'\\' | b'/') => out.push(same),
                b'n' => out.push(b'\n'),
                b't' => out.push(b'\t'),
                b'r' => out.push(b'\r'),
                b'b' => out.push(8),
                b'f' => out.push(12),
                b'u' => {
                    let digits = self.text.get(from..from + 4)?;
                    let code = digits.iter().try_fold(0, |code, d| Some(code << 4 | char::from(*d).to_digit(16)?))?;
                    let Some(character) = char::from_u32(code) else {
                        // Half of a surrogate pair.
                        self.string()?;
                        return json::value(self.text.get(start..self.at)?);
                    };
                    out.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
                    from += 4;
                }
                _ => return None,
            }
            self.at = from;
            self.seek_special();
        }
    }

    /// Reads an object behind its bracket, with these fields only if they are given.
    fn object(&mut self, fields: Option<&[Arc<str>]>, depth: u32) -> Option<Record> {
        let mut record = Record::default();
        if self.peek()? == b'}' {
            self.at += 1;
            return Some(record);
        }
        loop {
            self.expect(b'"')?;
            let name = self.plain_string()?;
            self.expect(b':')?;
            let first = self.peek()?;
            let wanted = match fields {
                Some(fields) => fields.iter().find(|f| f.as_bytes() == name).cloned(),
                None => Some(shared(std::str::from_utf8(name).ok()?)),
            };
            match wanted {
                Some(name) => {
                    let value = self.value(first, depth)?;
                    let many = record.fields.len() == MAX_FIELDS;
                    match record.fields.iter_mut().find(|(n, _)| *n == name) {
                        // The last of two counts.
                        Some(field) => field.1 = value,
                        None if many => return None,
                        None => record.fields.push((name, value)),
                    }
                }
                None if name.is_ascii() || std::str::from_utf8(name).is_ok() => self.pass_over(first)?,
                None => return None,
            }
            match self.next()? {
                b',' => {}
                b'}' => return Some(record),
                _ => return None,
            }
        }
    }

    /// Reads an array behind its bracket.
    fn list(&mut self, depth: u32) -> Option<Vec<Value>> {
        let mut list = Vec::new();
        let mut first = self.peek()?;
        if first == b']' {
            self.at += 1;
            return Some(list);
        }
        loop {
            list.push(self.value(first, depth)?);
            match self.next()? {
                b',' => first = self.peek()?,
                b']' => return Some(list),
                _ => return None,
            }
        }
    }

    /// Reads a value that begins with `first`, the byte at the place.
    fn value(&mut self, first: u8, depth: u32) -> Option<Value> {
        let start = self.at;
        match first {
            b'"' => self.string_value(start),
            b'{' | b'[' if depth == MAX_DEPTH => None,
            b'{' => {
                self.at += 1;
                self.object(None, depth + 1).map(Value::Map)
            }
            b'[' => {
                self.at += 1;
                self.list(depth + 1).map(Value::List)
            }
            b't' => self.word(b"true").map(|()| Value::Bool(true)),
            b'f' => self.word(b"false").map(|()| Value::Bool(false)),
            b'n' => self.word(b"null").map(|()| Value::Null),
            _ => {
                let integer = self.number()?;
                let text = std::str::from_utf8(self.text.get(start..self.at)?).ok()?;
                // "-0" is a float in JSON's other parsers, which keeps the sign.
                match integer && text.len() <= SAFE_DIGITS && text != "-0" {
                    true => text.parse().ok().map(Value::Int),
                    false if integer => json::value(text.as_bytes()),
                    false => text.parse().ok().filter(|f: &f64| f.is_finite()).map(Value::Float),
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "json_fields_tests.rs"]
mod tests;
