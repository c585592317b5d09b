//! Reads JSON files that are one array of objects, or one object with such an array in a field.
//!
//! Opening reads the files once, by a scanner that follows strings and nesting, and stores where each element begins. The scanner checks
//! the syntax around the elements; that of an element is checked when it is read.

use super::json_scan;
use super::row_index::RowIndex;
use super::text_files::{Opening, TextFiles};
use crate::error::{Error, Result, quote};
use crate::records::{Dataset, Fingerprint, Origin, Record, hash, json};
use std::path::PathBuf;
use std::sync::Arc;

/// Bytes before and behind the place of an error that messages show.
const EXCERPT: usize = 24;

/// The elements of JSON files.
#[derive(Clone)]
pub struct JsonArray {
    inner: Arc<Inner>,
    /// The fields that are parsed; all without it.
    fields: Option<Arc<[Arc<str>]>>,
}

struct Inner {
    text: TextFiles,
    files: Vec<File>,
    fingerprint: Fingerprint,
}

struct File {
    path: Arc<PathBuf>,
    /// The number of its first element among those of all files.
    first: u64,
    index: RowIndex,
}

impl JsonArray {
    /// Indexes files in this order, compressed or not. The array is in `field` of an object, or is the whole file.
    ///
    /// # Errors
    /// A file may not be read, is damaged, or is no array of objects.
    pub fn open(paths: &[PathBuf], field: Option<&str>, mut opening: Opening<'_>) -> Result<JsonArray> {
        let text = TextFiles::new(paths, &mut opening)?;
        let (mut files, mut first, mut hasher) = (Vec::with_capacity(paths.len()), 0, blake3::Hasher::new());
        for number in 0..text.count() {
            let index = json_scan::index(&text, number, field, &mut hasher, opening.interrupt)?;
            hasher.update(&text.len(number).to_le_bytes());
            let count = index.len();
            files.push(File { path: Arc::new(text.path(number).to_path_buf()), first, index });
            first += count;
        }
        hasher.update(field.unwrap_or_default().as_bytes());
        let fingerprint = *hasher.finalize().as_bytes();
        Ok(JsonArray { inner: Arc::new(Inner { text, files, fingerprint }), fields: None })
    }
}

impl Inner {
    fn at(&self, row: u64) -> (&File, usize, u64) {
        let number = self.files.partition_point(|f| f.first <= row).saturating_sub(1);
        (&self.files[number], number, row - self.files[number].first)
    }
}

impl Dataset for JsonArray {
    fn len(&self) -> u64 {
        self.inner.files.last().map_or(0, |f| f.first + f.index.len())
    }

    fn get(&self, index: u64) -> Result<Record> {
        let (file, number, row) = self.inner.at(index % self.len());
        let (start, end) = file.index.range(row);
        let mut text = vec![0; (end - start) as usize];
        self.inner.text.read_at(number, start, &mut text)?;
        // The comma before the next element.
        let text = text.trim_ascii_end();
        let text = text.strip_suffix(b",").unwrap_or(text).trim_ascii_end();
        json::object(text, self.fields.as_deref()).map_err(|fault| {
            let begin = text
                .split_inclusive(|b| *b == b'\n')
                .take(fault.line.saturating_sub(1))
                .map(<[u8]>::len)
                .sum::<usize>();
            let at = (begin + fault.column).min(text.len());
            let around = &text[at.saturating_sub(EXCERPT)..text.len().min(at + EXCERPT)];
            let rule = format!("{}, near {}", fault.rule, quote(&String::from_utf8_lossy(around)));
            match file.index.line(&self.inner.text, number, row) {
                Ok(line) => {
                    let place = format!("record {row}, column {}: ", fault.column.max(1));
                    Error::line(&file.path, line + fault.line.saturating_sub(1) as u64, place, rule)
                }
                Err(e) => e,
            }
        })
    }

    fn origins(&self, index: u64) -> Result<Vec<Origin>> {
        let (file, number, row) = self.inner.at(index % self.len());
        let line = file.index.line(&self.inner.text, number, row)?;
        Ok(vec![Origin { file: file.path.clone(), row, line: Some(line), sub: 0 }])
    }

    fn fingerprint(&self) -> Fingerprint {
        hash::stage("json/1", &[&self.inner.fingerprint], &[])
    }

    fn project(&self, fields: &[Arc<str>]) -> Option<Arc<dyn Dataset>> {
        Some(Arc::new(JsonArray { fields: Some(fields.into()), ..self.clone() }))
    }
}

#[cfg(test)]
#[path = "json_tests.rs"]
mod tests;
