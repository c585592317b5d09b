//! Reads documents of text files and JSONL files, one after the other.
//!
//! A text file is one document. A line of a JSONL file is an object whose field has a text or the messages of a conversation.

use perilune_data::error::quote;
use perilune_data::{Error, Result};
use perilune_policy::Opened;
use serde_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Larger text files are refused, because a document is encoded whole.
const MAX_TEXT: u64 = 1 << 30;
/// Longer lines are refused.
const MAX_LINE: u64 = 64 << 20;

/// A document and where it is.
#[derive(Clone, PartialEq, Debug)]
pub struct Document {
    pub content: Content,
    pub path: Arc<Path>,
    /// The line, from 1, of a JSONL file.
    pub line: Option<u64>,
}

#[derive(Clone, PartialEq, Debug)]
pub enum Content {
    Text(String),
    /// The messages of a conversation.
    Messages(Vec<Value>),
}

impl Document {
    /// Bytes of its text, about.
    pub fn weight(&self) -> usize {
        match &self.content {
            Content::Text(text) => text.len(),
            Content::Messages(list) => list.iter().map(|m| 64 + m["content"].as_str().map_or(0, str::len)).sum(),
        }
    }

    /// An error at this document.
    pub fn error(&self, e: &Error) -> Error {
        let text = e.to_string();
        let (rule, hint) =
            text.split_once("\n  hint: ").map_or((text.as_str(), None), |(rule, hint)| (rule, Some(hint)));
        let error = match self.line {
            Some(line) => Error::line(&self.path, line, "", rule),
            None => Error::malformed(&self.path, "text", rule),
        };
        match hint {
            Some(hint) => error.hint(hint),
            None => error,
        }
    }
}

/// The documents of files, in their order.
#[derive(Debug)]
pub struct Inputs {
    files: std::vec::IntoIter<Opened>,
    field: Option<String>,
    lines: Option<Lines>,
    read: Arc<AtomicU64>,
}

#[derive(Debug)]
struct Lines {
    path: Arc<Path>,
    source: BufReader<File>,
    line: u64,
}

/// Whether a file has a record a line, by its name.
pub fn is_jsonl(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "jsonl" || e == "ndjson")
}

impl Inputs {
    /// # Errors
    /// A JSONL file is given without a field.
    pub fn new(files: Vec<Opened>, field: Option<String>) -> Result<Inputs> {
        if let (None, Some(file)) = (&field, files.iter().find(|f| is_jsonl(f.path()))) {
            let error = Error::argument(file.path().display().to_string(), "has records, and no field is named");
            return Err(error.hint("--field text names the field that has the text"));
        }
        Ok(Inputs { files: files.into_iter(), field, lines: None, read: Arc::default() })
    }

    /// The number of bytes read so far, for a bar.
    pub fn read(&self) -> Arc<AtomicU64> {
        self.read.clone()
    }

    fn step(&mut self) -> Result<Option<Document>> {
        loop {
            if let Some(lines) = &mut self.lines {
                if let Some(found) = lines.next(self.field.as_deref().unwrap_or_default(), &self.read)? {
                    return Ok(Some(found));
                }
                self.lines = None;
            }
            let Some(file) = self.files.next() else { return Ok(None) };
            let path: PathBuf = file.path().to_path_buf();
            if is_jsonl(&path) {
                let source = BufReader::with_capacity(1 << 18, file.into_file());
                self.lines = Some(Lines { path: path.into(), source, line: 0 });
                continue;
            }
            let len = file.len();
            let text = perilune_data::text::read(file, Some(MAX_TEXT))?;
            self.read.fetch_add(len, Ordering::Relaxed);
            return Ok(Some(Document { content: Content::Text(text), path: path.into(), line: None }));
        }
    }
}

impl Iterator for Inputs {
    type Item = Result<Document>;

    fn next(&mut self) -> Option<Result<Document>> {
        let found = self.step().transpose();
        if matches!(found, Some(Err(_))) {
            (self.files, self.lines) = (Vec::new().into_iter(), None);
        }
        found
    }
}

impl Lines {
    fn next(&mut self, field: &str, read: &AtomicU64) -> Result<Option<Document>> {
        loop {
            let mut line = Vec::new();
            let failed = |e| Error::io(&self.path, "read", e);
            let count = self.source.by_ref().take(MAX_LINE + 1).read_until(b'\n', &mut line).map_err(failed)?;
            read.fetch_add(count as u64, Ordering::Relaxed);
            self.line += 1;
            if count == 0 {
                return Ok(None);
            }
            let bad = |rule: String| Error::line(&self.path, self.line, "", rule);
            if count as u64 > MAX_LINE {
                return Err(bad(format!("is longer than {MAX_LINE} bytes")));
            }
            if line.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let record: Value = serde_json::from_slice(&line).map_err(|e| bad(format!("is not JSON: {e}")))?;
            let Value::Object(mut record) = record else { return Err(bad("is not an object".into())) };
            let content = match record.remove(field) {
                Some(Value::String(text)) => Content::Text(text),
                Some(Value::Array(list)) if list.iter().all(Value::is_object) => Content::Messages(list),
                Some(_) => return Err(bad(format!("field {} is neither a text nor a list of messages", quote(field)))),
                None => {
                    let known: Vec<&str> = record.keys().map(String::as_str).take(20).collect();
                    let rule = format!(
                        "has no field {} (fields: {})",
                        quote(field),
                        quote(&known.join(", ")).trim_matches('\'')
                    );
                    return Err(bad(rule));
                }
            };
            return Ok(Some(Document { content, path: self.path.clone(), line: Some(self.line) }));
        }
    }
}

/// Cuts a long text into parts that end at a line break, so that threads share the work of training.
pub fn parts(text: String) -> Vec<String> {
    const PART: usize = 1 << 16;
    if text.len() <= PART {
        return vec![text];
    }
    let (mut parts, mut part) = (Vec::new(), String::new());
    for line in text.split_inclusive('\n') {
        part.push_str(line);
        if part.len() >= PART {
            parts.push(std::mem::take(&mut part));
        }
    }
    parts.push(part);
    parts
}

/// The texts of documents for training, long ones in [`parts`].
///
/// # Errors
/// An item is the error of a document that cannot be read.
pub fn training_texts(inputs: Inputs) -> impl Iterator<Item = Result<String>> + Send {
    inputs.flat_map(|document| {
        let parts: Vec<Result<String>> = match document {
            Err(e) => vec![Err(e)],
            Ok(Document { content: Content::Text(text), .. }) => parts(text).into_iter().map(Ok).collect(),
            // The vocabulary comes from what the turns say.
            Ok(Document { content: Content::Messages(list), .. }) => {
                list.iter().filter_map(|m| m["content"].as_str()).map(|text| Ok(text.to_string())).collect()
            }
        };
        parts
    })
}
