//! Reads the fields of a JSON object without parsing those that are not named.
//!
//! A fast path of [`super::json`]: values that are passed over are checked by the grammar, and only named ones are converted. It reads
//! plain objects; for anything else (escapes in names, deep nesting, a fault) it returns nothing, and `serde_json` decides. What it accepts
//! must be accepted there with equal values, which `json_fields_tests.rs` checks on random and damaged objects.

use super::json;
use super::value::{Record, Value};
use std::cell::RefCell;
use std::sync::Arc;

/// The most levels within the object, below the limit of `serde_json`: one bit of a word each.
const MAX_DEPTH: u32 = 64;
/// Bytes of a string that are compared together.
const LANES: usize = 32;
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

/// Whether a byte ends the plain part of a string.
fn is_special(byte: u8) -> bool {
    (byte == b'"') | (byte == b'\\') | (byte < 0x20)
}

/// Marks the high bit of bytes that [`is_special`], in the order of memory. Bits above the first one may be wrong.
fn special(word: u64) -> u64 {
    const ONES: u64 = u64::from_ne_bytes([1; 8]);
    let below = |word: u64, bound: u64| word.wrapping_sub(ONES * bound) & !word;
    (below(word ^ (ONES * 0x22), 1) | below(word ^ (ONES * 0x5C), 1) | below(word, 0x20)) & (ONES << 7)
}

struct Scan<'a> {
    text: &'a [u8],
    at: usize,
}

impl<'a> Scan<'a> {
    /// The next byte that is no space.
    #[inline]
    fn peek(&mut self) -> Option<u8> {
        loop {
            let byte = *self.text.get(self.at)?;
            if !matches!(byte, b' ' | b'\n' | b'\t' | b'\r') {
                return Some(byte);
            }
            self.at += 1;
        }
    }

    #[inline]
    fn next(&mut self) -> Option<u8> {
        let byte = self.peek()?;
        self.at += 1;
        Some(byte)
    }

    #[inline]
    fn expect(&mut self, byte: u8) -> Option<()> {
        (self.next()? == byte).then_some(())
    }

    fn rest(&self) -> &'a [u8] {
        self.text.get(self.at..).unwrap_or_default()
    }

    /// Moves to the next quote, backslash or control character.
    #[inline]
    fn to_special(&mut self) {
        let rest = self.rest();
        let (mut from, mut words) = (0, 0);
        while let Some(word) = rest.get(from..).and_then(<[u8]>::first_chunk::<8>) {
            let found = special(u64::from_le_bytes(*word));
            if found != 0 {
                self.at += from + found.trailing_zeros() as usize / 8;
                return;
            }
            (from, words) = (from + 8, words + 8);
            if words == LANES {
                words = 0;
                // A comparison of all lanes has no branches, so the compiler makes vectors of it.
                while let Some(lanes) = rest.get(from..from + LANES)
                    && !lanes.iter().fold(false, |any, b| any | is_special(*b))
                {
                    from += LANES;
                }
            }
        }
        let tail = rest.get(from..).unwrap_or_default();
        self.at += from + tail.iter().position(|b| is_special(*b)).unwrap_or(tail.len());
    }

    /// Reads a string without escapes, behind its first quote.
    #[inline]
    fn plain_string(&mut self) -> Option<&'a [u8]> {
        let start = self.at;
        self.to_special();
        let text = self.text.get(start..self.at)?;
        (*self.text.get(self.at)? == b'"').then_some(())?;
        self.at += 1;
        Some(text)
    }

    /// Reads a string whose first quote is at `start`.
    fn string_value(&mut self, start: usize) -> Option<Value> {
        self.at = start + 1;
        let mut from = self.at;
        self.to_special();
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
            self.to_special();
        }
    }

    /// Passes over a string, behind its first quote.
    fn string(&mut self) -> Option<()> {
        loop {
            self.to_special();
            match *self.text.get(self.at)? {
                b'"' => {
                    self.at += 1;
                    return Some(());
                }
                b'\\' => match *self.text.get(self.at + 1)? {
                    b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => self.at += 2,
                    b'u' => {
                        let digits = self.text.get(self.at + 2..self.at + 6)?;
                        digits.iter().all(u8::is_ascii_hexdigit).then_some(())?;
                        self.at += 6;
                    }
                    _ => return None,
                },
                _ => return None,
            }
        }
    }

    /// Passes over the digits, of which there is one at least.
    fn digits(&mut self) -> Option<()> {
        let count = self.rest().iter().take_while(|b| b.is_ascii_digit()).count();
        self.at += count;
        (count > 0).then_some(())
    }

    /// Passes over a number. Returns whether it is an integer.
    fn number(&mut self) -> Option<bool> {
        let next = |scan: &Self| scan.text.get(scan.at).copied();
        if next(self) == Some(b'-') {
            self.at += 1;
        }
        match next(self)? {
            b'0' => self.at += 1,
            _ => self.digits()?,
        }
        // Digits behind a zero.
        if next(self).is_some_and(|b| b.is_ascii_digit()) {
            return None;
        }
        let mut integer = true;
        if next(self) == Some(b'.') {
            self.at += 1;
            self.digits()?;
            integer = false;
        }
        if matches!(next(self), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(next(self), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.digits()?;
            integer = false;
        }
        Some(integer)
    }

    /// Passes over a value that begins with `first`, the byte at the place.
    fn pass_over(&mut self, first: u8) -> Option<()> {
        // The open brackets: a bit each, set for an object.
        let (mut open, mut depth, mut first) = (0u64, 0u32, first);
        loop {
            match first {
                b'"' => {
                    self.at += 1;
                    self.string()?;
                }
                b'{' | b'[' => {
                    self.at += 1;
                    let object = first == b'{';
                    let next = self.peek()?;
                    if next == if object { b'}' } else { b']' } {
                        self.at += 1;
                    } else {
                        if depth == MAX_DEPTH {
                            return None;
                        }
                        open = open << 1 | u64::from(object);
                        depth += 1;
                        first = if object { self.name()? } else { next };
                        continue;
                    }
                }
                b't' => self.word(b"true")?,
                b'f' => self.word(b"false")?,
                b'n' => self.word(b"null")?,
                _ => {
                    self.number()?;
                }
            }
            // Ends of values.
            loop {
                if depth == 0 {
                    return Some(());
                }
                let object = open & 1 == 1;
                match self.next()? {
                    b',' => {
                        first = if object { self.name()? } else { self.peek()? };
                        break;
                    }
                    b'}' if object => {}
                    b']' if !object => {}
                    _ => return None,
                }
                open >>= 1;
                depth -= 1;
            }
        }
    }

    /// Passes over a name and its colon. Returns the first byte of the value.
    fn name(&mut self) -> Option<u8> {
        self.expect(b'"')?;
        self.string()?;
        self.expect(b':')?;
        self.peek()
    }

    fn word(&mut self, word: &[u8]) -> Option<()> {
        self.rest().starts_with(word).then_some(())?;
        self.at += word.len();
        Some(())
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
