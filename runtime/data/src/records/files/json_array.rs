//! Reads JSON files that are one array of objects, or one object with such an array in a field.
//!
//! Opening reads the files once, by a scanner that follows strings and nesting, and stores where each element begins. The scanner checks
//! the syntax around the elements; that of an element is checked when it is read.

use super::json_scan;
use super::row_index::RowIndex;
use super::text_files::{Opening, TextFiles};
use crate::error::{Error, Result, quote};
use crate::records::{Dataset, Fingerprint, Origin, Record, hash, json};
use crate::source;
use perilune_core::Interrupt;
use rayon::prelude::*;
use std::path::PathBuf;
use std::sync::Arc;

/// Bytes before and behind the place of an error that messages show.
const EXCERPT: usize = 24;
/// Elements that a scan for malformed ones reads together.
const CHUNK: u64 = 256;

/// The elements of JSON files.
#[derive(Clone)]
pub struct JsonArray {
    inner: Arc<Inner>,
    /// The elements that are records; all without it.
    kept: Option<Arc<Vec<u32>>>,
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
        Ok(JsonArray { inner: Arc::new(Inner { text, files, fingerprint }), kept: None, fields: None })
    }

    /// Leaves out elements that are no objects, or malformed inside. Returns how many. The text around elements must be whole.
    ///
    /// # Errors
    /// Reading fails, an interrupt, or more than 2^32 elements.
    pub fn skip_malformed(&mut self, interrupt: &Interrupt) -> Result<u64> {
        let len = self.len();
        if u32::try_from(len).is_err() {
            let rule = format!("\"skip\" needs less than 2^32 records, and there are {len}");
            return Err(Error::argument("on_error", rule));
        }
        let good = |chunk: u64| -> Result<Vec<u32>> {
            if interrupt.is_requested() {
                return Err(Error::Interrupted);
            }
            let rows = chunk * CHUNK..len.min((chunk + 1) * CHUNK);
            rows.filter_map(|row| match self.get(row) {
                Ok(_) => Some(Ok(row as u32)),
                Err(Error::Line { .. }) => None,
                Err(e) => Some(Err(e)),
            })
            .collect()
        };
        let all = || (0..len.div_ceil(CHUNK)).into_par_iter().map(good).collect::<Result<Vec<_>>>();
        let kept: Vec<u32> = source::pool(None)?.install(all)?.into_iter().flatten().collect();
        let skipped = len - kept.len() as u64;
        self.kept = Some(Arc::new(kept));
        Ok(skipped)
    }

    /// The element of an index of the stream.
    fn row(&self, index: u64) -> u64 {
        let row = index % self.len();
        self.kept.as_ref().map_or(row, |kept| u64::from(kept[row as usize]))
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
        let all = || self.inner.files.last().map_or(0, |f| f.first + f.index.len());
        self.kept.as_ref().map_or_else(all, |kept| kept.len() as u64)
    }

    fn get(&self, index: u64) -> Result<Record> {
        let (file, number, row) = self.inner.at(self.row(index));
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
                        .hint("mend the record, or leave such records out: { on_error = \"skip\" }")
                }
                Err(e) => e,
            }
        })
    }

    fn origins(&self, index: u64) -> Result<Vec<Origin>> {
        let (file, number, row) = self.inner.at(self.row(index));
        let line = file.index.line(&self.inner.text, number, row)?;
        Ok(vec![Origin { file: file.path.clone(), row, line: Some(line), sub: 0, rewritten: false }])
    }

    fn fingerprint(&self) -> Fingerprint {
        let stage = if self.kept.is_some() { "json/1 skip" } else { "json/1" };
        hash::stage(stage, &[&self.inner.fingerprint], &[])
    }

    fn project(&self, fields: &[Arc<str>]) -> Option<Arc<dyn Dataset>> {
        Some(Arc::new(JsonArray { fields: Some(fields.into()), ..self.clone() }))
    }
}

#[cfg(test)]
#[path = "json_tests.rs"]
mod tests;
