//! Splits the lines of a text file into records and cells, each with the line on which it starts.
//!
//! The `csv` crate is not used: it reports a row after blank or comment lines by the first of those, cannot
//! locate the opening of an unclosed quote, and does not detect the delimiter.

use crate::error::{Error, Result};
use crate::gzip_text;
use perilune_policy::Opened;
use std::collections::VecDeque;
use std::io::BufRead;
use std::path::{Path, PathBuf};

pub(crate) const QUOTE_CURE: &str = "close every quote, and write a quote inside quotes twice";

/// Splits a record into cells: appends their text, and the end of each in `text`. A cell that starts with a quote ends
/// at the next single quote mark. `Err` has the position and the rule.
pub(crate) fn split(
    record: &str,
    delimiter: u8,
    text: &mut String,
    ends: &mut Vec<u32>,
) -> std::result::Result<(), (String, String)> {
    let delimiter = char::from(delimiter);
    let mut rest = record;
    for column in 0.. {
        let lead = if delimiter == ' ' { rest } else { rest.trim_start_matches(' ') };
        let more = match lead.strip_prefix('"') {
            Some(quoted) => {
                let place = || format!("column {column}: ");
                let Some(after) = unquote(quoted, text) else {
                    return Err((place(), "a quote is opened and never closed".into()));
                };
                let end = after.find(delimiter).unwrap_or(after.len());
                if !after[..end].trim().is_empty() {
                    return Err((
                        place(),
                        format!("{} follows a closing quote", crate::error::quote(after[..end].trim())),
                    ));
                }
                after[end..].strip_prefix(delimiter)
            }
            None => {
                let end = rest.find(delimiter).unwrap_or(rest.len());
                text.push_str(rest[..end].trim());
                rest[end..].strip_prefix(delimiter)
            }
        };
        ends.push(text.len() as u32);
        match more {
            Some(more) => rest = more,
            None => break,
        }
    }
    Ok(())
}

/// Appends the text before the closing quote and returns the text after it.
fn unquote<'a>(mut quoted: &'a str, text: &mut String) -> Option<&'a str> {
    loop {
        let end = quoted.find('"')?;
        text.push_str(&quoted[..end]);
        quoted = &quoted[end + 1..];
        match quoted.strip_prefix('"') {
            Some(next) => {
                text.push('"');
                quoted = next;
            }
            None => return Some(quoted),
        }
    }
}

/// Returns the first delimiter that splits all these records into the same number of cells, more than one.
pub(crate) fn detect(records: &VecDeque<(u64, String)>) -> u8 {
    let count = |record: &str, d: u8| {
        let mut inside = false;
        let cells = record.bytes().filter(|&b| {
            inside ^= b == b'"';
            b == d && !inside
        });
        cells.count()
    };
    let first = records.front().map_or("", |(_, r)| r.as_str());
    let alike = |d: u8| count(first, d) > 0 && records.iter().all(|(_, r)| count(r, d) == count(first, d));
    let candidates = [b'\t', b';', b','];
    candidates.into_iter().find(|&d| alike(d)).unwrap_or_else(|| {
        // If no delimiter splits all rows equally, they will be refused; the message should name the most likely one.
        candidates.into_iter().max_by_key(|&d| count(first, d)).unwrap_or(b',')
    })
}

/// Iterates over records with their first lines: one line each, or several if a quoted cell contains line ends.
pub(crate) struct Records {
    path: PathBuf,
    packed: bool,
    source: std::io::BufReader<gzip_text::Capped>,
    comment: Option<char>,
    delimiter: Option<u8>,
    line: u64,
    ahead: VecDeque<(u64, String)>,
}

impl Records {
    /// Opens a file of at most `max_bytes` of text, by default `limit` or the expansion of a compressed table. Offsets in the text
    /// are u32.
    pub fn open(
        file: Opened,
        max_bytes: Option<u64>,
        limit: u64,
        comment: Option<char>,
        delimiter: Option<u8>,
    ) -> Result<Records> {
        let given = max_bytes.map(|bytes| bytes.min(u64::from(u32::MAX)));
        let text = gzip_text::open(file, given, limit, gzip_text::TABLE)?;
        let gzip_text::Text { path, packed, source } = text;
        Ok(Records { path, packed, source, comment, delimiter, line: 0, ahead: VecDeque::new() })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the file is compressed.
    pub fn is_packed(&self) -> bool {
        self.packed
    }

    pub fn peek(&mut self, n: usize) -> Result<&VecDeque<(u64, String)>> {
        while self.ahead.len() < n {
            match self.fetch()? {
                Some(record) => self.ahead.push_back(record),
                None => break,
            }
        }
        Ok(&self.ahead)
    }

    pub fn next(&mut self) -> Result<Option<(u64, String)>> {
        match self.ahead.pop_front() {
            Some(record) => Ok(Some(record)),
            None => self.fetch(),
        }
    }

    fn fetch(&mut self) -> Result<Option<(u64, String)>> {
        let mut bytes = Vec::new();
        let mut quotes = Quotes::CellStart;
        let mut start = self.line + 1;
        loop {
            let from = bytes.len();
            let read = self.source.read_until(b'\n', &mut bytes);
            if read.map_err(|e| gzip_text::read_error(&self.path, e))? == 0 {
                break;
            }
            self.line += 1;
            if self.line == 1 && bytes.starts_with(b"\xef\xbb\xbf") {
                bytes.drain(..3);
            }
            if from == 0 {
                start = self.line;
                let comment = self.comment.is_some_and(|c| bytes.starts_with(c.to_string().as_bytes()));
                if comment || bytes.iter().all(u8::is_ascii_whitespace) {
                    bytes.clear();
                    continue;
                }
            }
            quotes = quotes.after(&bytes[from..], self.delimiter);
            if quotes != Quotes::Inside {
                break;
            }
        }
        if bytes.is_empty() {
            return Ok(None);
        }
        if quotes == Quotes::Inside {
            let error = Error::line(&self.path, start, "", "a quote is opened and never closed");
            return Err(error.hint(QUOTE_CURE));
        }
        while bytes.last().is_some_and(|b| matches!(b, b'\n' | b'\r')) {
            bytes.pop();
        }
        match String::from_utf8(bytes) {
            Ok(record) => Ok(Some((start, record))),
            Err(e) => {
                let at = e.utf8_error().valid_up_to();
                let rule = format!("byte {at} ({:#04x}) is not UTF-8", e.as_bytes()[at]);
                Err(Error::line(&self.path, start, "", rule).hint("save the file as UTF-8 (iconv -f latin1 -t utf-8)"))
            }
        }
    }
}

/// The state of a scan within a record, so that each byte is scanned once even if a cell spans many lines.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Quotes {
    CellStart,
    Plain,
    Inside,
    /// After a quote inside a quoted cell: its end, or the first quote of a pair.
    Closing,
}

impl Quotes {
    fn after(self, bytes: &[u8], delimiter: Option<u8>) -> Quotes {
        bytes.iter().fold(self, |state, &b| match (state, b) {
            (Quotes::Inside, b'"') => Quotes::Closing,
            (Quotes::Inside, _) => Quotes::Inside,
            (Quotes::CellStart | Quotes::Closing, b'"') => Quotes::Inside,
            _ if delimiter.map_or(b",;\t".contains(&b), |d| d == b) => Quotes::CellStart,
            (Quotes::CellStart, b' ') => Quotes::CellStart,
            _ => Quotes::Plain,
        })
    }
}
