//! Finds the elements of an array in a JSON file, without parsing them.

use super::row_index::RowIndex;
use super::text_files::TextFiles;
use crate::error::{Error, Result, quote};
use perilune_core::Interrupt;
use perilune_core::error::did_you_mean;
use std::path::Path;

/// Bytes that are read at a time.
const PIECE: u64 = 4 << 20;
/// The most bytes of an element.
const MAX_ELEMENT: u64 = 256 << 20;
/// The most bytes of a name that is compared with the field, and the most fields that a message names.
const MAX_NAME: usize = 1 << 10;
const MAX_FIELDS: usize = 20;
/// The most levels, as of the parser.
const MAX_DEPTH: usize = 128;

/// What comes next at the level of the file, of its object, or of the array.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Expect {
    /// The value of the file.
    Root,
    /// A name of the object, or its end.
    Name,
    /// Only a name: behind a comma.
    NextName,
    Colon,
    /// The value of a field.
    Value,
    /// A comma, or the end of the object.
    Comma,
    /// An element of the array, or its end.
    Element,
    /// Only an element: behind a comma.
    NextElement,
    ElementComma,
    /// Nothing but space.
    End,
}

struct Scanner<'a> {
    path: &'a Path,
    field: Option<&'a str>,
    index: RowIndex,
    expect: Expect,
    /// The closing brackets that are due in a value which is passed over, and what comes behind it.
    open: Vec<u8>,
    after: Expect,
    /// A string is open; its next byte is escaped; it is a name.
    string: bool,
    escaped: bool,
    name: Option<Vec<u8>>,
    /// Whether the last name is that of the field.
    named: bool,
    found: bool,
    /// Names of fields that hold arrays.
    arrays: Vec<String>,
    last: String,
    /// A number or a word is being passed over.
    word: bool,
    /// Where the element begins.
    start: u64,
    line: u64,
}

/// Indexes the elements of a file's array.
pub(super) fn index(
    text: &TextFiles,
    number: usize,
    field: Option<&str>,
    hasher: &mut blake3::Hasher,
    interrupt: &Interrupt,
) -> Result<RowIndex> {
    let (path, len) = (text.path(number), text.len(number));
    let mut scan = Scanner {
        path,
        field,
        index: RowIndex::default(),
        expect: Expect::Root,
        open: Vec::new(),
        after: Expect::End,
        string: false,
        escaped: false,
        name: None,
        named: false,
        found: false,
        arrays: Vec::new(),
        last: String::new(),
        word: false,
        start: 0,
        line: 1,
    };
    let (mut buffer, mut at) = (vec![0; PIECE.min(len) as usize], 0);
    while at < len {
        if interrupt.is_requested() {
            return Err(Error::Interrupted);
        }
        let piece = &mut buffer[..PIECE.min(len - at) as usize];
        text.read_at(number, at, piece)?;
        hasher.update(piece);
        let from = if at == 0 && piece.starts_with(b"\xEF\xBB\xBF") { 3 } else { 0 };
        scan.piece(at, piece, from)?;
        at += piece.len() as u64;
    }
    scan.finish(len)
}

impl Scanner<'_> {
    fn fail(&self, rule: impl Into<String>) -> Error {
        Error::line(self.path, self.line, "", rule)
    }

    fn piece(&mut self, at: u64, piece: &[u8], mut from: usize) -> Result<()> {
        while from < piece.len() {
            if self.string {
                // Up to the next quote or backslash, unless the name is compared.
                let next = match self.escaped {
                    true => from,
                    false => memchr::memchr2(b'"', b'\\', &piece[from..]).map_or(piece.len(), |n| from + n),
                };
                self.line += memchr::memchr_iter(b'\n', &piece[from..next]).count() as u64;
                if let Some(name) = &mut self.name {
                    let room = MAX_NAME.saturating_sub(name.len());
                    let end = (next + 1).min(piece.len());
                    name.extend_from_slice(&piece[from..end][..(end - from).min(room)]);
                }
                if let Some(byte) = piece.get(next) {
                    match (self.escaped, byte) {
                        (true, _) => self.escaped = false,
                        (false, b'\\') => self.escaped = true,
                        (false, _) => self.end_string(),
                    }
                }
                from = next + 1;
                continue;
            }
            let byte = piece[from];
            if byte == b'\n' {
                self.line += 1;
            }
            self.byte(at + from as u64, byte)?;
            from += 1;
        }
        if self.expect == Expect::ElementComma
            && !self.open.is_empty()
            && at + piece.len() as u64 - self.start > MAX_ELEMENT
        {
            let rule = format!("record {} has more than {MAX_ELEMENT} bytes", self.index.len_so_far());
            return Err(self.fail(rule));
        }
        Ok(())
    }

    fn end_string(&mut self) {
        self.string = false;
        if let Some(name) = self.name.take() {
            // The closing quote is part of it, the opening one is not.
            let text = [b"\"", &name[..]].concat();
            self.last = serde_json::from_slice(&text).unwrap_or_default();
            self.named = self.field == Some(self.last.as_str());
            self.expect = Expect::Colon;
        }
    }

    /// Follows a byte outside strings.
    fn byte(&mut self, at: u64, byte: u8) -> Result<()> {
        if byte.is_ascii_whitespace() {
            self.word = false;
            return Ok(());
        }
        if !self.open.is_empty() {
            return self.inside(byte);
        }
        match (self.expect, byte) {
            (Expect::Root, b'[') if self.field.is_none() => self.expect = Expect::Element,
            (Expect::Root, b'{') => self.expect = Expect::Name,
            (Expect::Root, b'[') => {
                let field = self.field.unwrap_or_default();
                return Err(self
                    .fail(format!("the file is an array, without a field {}", quote(field)))
                    .hint("leave out field"));
            }
            (Expect::Root, _) => {
                let cure = "a file with an object on each line is read by data.jsonl, other text by data.lines";
                return Err(self.fail("the file is no array of objects").hint(cure));
            }
            (Expect::Name | Expect::NextName, b'"') => {
                self.string = true;
                self.name = Some(Vec::new());
            }
            (Expect::Name | Expect::Comma, b'}') => {
                self.word = false;
                self.expect = Expect::End;
            }
            (Expect::Colon, b':') => self.expect = Expect::Value,
            (Expect::Comma, b',') => {
                self.word = false;
                self.expect = Expect::NextName;
            }
            // A later field of the name counts, as in the parser; the first array is then not the one.
            (Expect::Value, b'[') if self.named && !self.found => {
                self.found = true;
                self.expect = Expect::Element;
            }
            (Expect::Value, _) if self.named => {
                let field = quote(self.field.unwrap_or_default());
                let rule = if self.found { "is in the file twice" } else { "is no array" };
                return Err(self.fail(format!("the field {field} {rule}")));
            }
            (Expect::Value, _) => self.pass_over(byte, Expect::Comma)?,
            // The rest of a number or a word.
            (Expect::Comma, _) if self.word => {}
            (Expect::Element | Expect::NextElement, b'{') => {
                self.start = at;
                self.index.push(self.path, at, self.line)?;
                self.pass_over(byte, Expect::ElementComma)?;
            }
            (Expect::Element | Expect::ElementComma, b']') => {
                self.index.finish(self.path, at)?;
                self.expect = if self.field.is_some() { Expect::Comma } else { Expect::End };
            }
            (Expect::ElementComma, b',') => self.expect = Expect::NextElement,
            (Expect::Element | Expect::NextElement, _) => {
                let rule = format!("element {} is no object: it begins with {}", self.index.len_so_far(), shown(byte));
                return Err(self
                    .fail(rule)
                    .hint("each element is a record: [{ \"text\": \"a\" }, { \"text\": \"b\" }]"));
            }
            (Expect::End, _) => {
                let rule = format!("{} follows the end of the value", shown(byte));
                return Err(self.fail(rule).hint("a file with an object on each line is read by data.jsonl"));
            }
            (expect, _) => {
                let wanted = match expect {
                    Expect::Colon => "a colon",
                    Expect::Comma => "a comma or the end of the object",
                    Expect::ElementComma => "a comma or the end of the array",
                    _ => "a name in quotes",
                };
                return Err(self.fail(format!("there is {} where {wanted} is expected", shown(byte))));
            }
        }
        Ok(())
    }

    /// Begins a value that is passed over.
    fn pass_over(&mut self, byte: u8, after: Expect) -> Result<()> {
        self.after = after;
        self.expect = after;
        match byte {
            b'{' => self.open.push(b'}'),
            b'[' => {
                if self.arrays.len() < MAX_FIELDS {
                    self.arrays.push(self.last.clone());
                }
                self.open.push(b']');
            }
            b'"' => self.string = true,
            b'-' | b'0'..=b'9' | b't' | b'f' | b'n' => self.word = true,
            other => return Err(self.fail(format!("there is {} where a value is expected", shown(other)))),
        }
        Ok(())
    }

    /// Follows a byte inside a value that is passed over.
    fn inside(&mut self, byte: u8) -> Result<()> {
        match byte {
            b'"' => self.string = true,
            b'{' | b'[' if self.open.len() >= MAX_DEPTH => {
                return Err(self.fail(format!("values are nested deeper than {MAX_DEPTH} levels")));
            }
            b'{' => self.open.push(b'}'),
            b'[' => self.open.push(b']'),
            b'}' | b']' => match self.open.pop() {
                Some(due) if due == byte => {}
                due => {
                    let due = shown(due.unwrap_or(b' '));
                    return Err(self.fail(format!("there is {} where {due} is expected", shown(byte))));
                }
            },
            _ => {}
        }
        Ok(())
    }

    fn finish(self, len: u64) -> Result<RowIndex> {
        if self.expect == Expect::Root {
            return Err(Error::malformed(self.path, "file", "is empty").hint("write [] for no records"));
        }
        if self.expect != Expect::End || self.string || !self.open.is_empty() {
            let rule = format!("ends in the middle of a value, after {len} bytes");
            return Err(
                Error::malformed(self.path, "file", rule).hint("the file is incomplete: copy or download it again")
            );
        }
        match self.field {
            None if self.index.is_finished() => Ok(self.index),
            Some(_) if self.found => Ok(self.index),
            field => {
                let arrays: Vec<String> = self.arrays.iter().map(|name| quote(name)).collect();
                let rule = match field {
                    None => "is an object, not an array".to_string(),
                    Some(field) => format!("has no field {}", quote(field)),
                };
                let near = field.and_then(|field| did_you_mean(field, self.arrays.iter().map(String::as_str)));
                let cure = match (near, self.arrays.first()) {
                    (Some(near), _) => format!("did you mean {}?", quote(near)),
                    (None, Some(first)) => {
                        format!(
                            "its arrays are {}; name one: {{ field = \"{}\" }}",
                            arrays.join(", "),
                            first.escape_debug()
                        )
                    }
                    (None, None) => "it has no field that is an array; data.jsonl reads an object on each line".into(),
                };
                Err(Error::malformed(self.path, "file", rule).hint(cure))
            }
        }
    }
}

fn shown(byte: u8) -> String {
    quote(&String::from_utf8_lossy(&[byte]))
}
