//! Reads files with a record on each line: JSON objects (JSONL), or text.
//!
//! Opening reads the files once, for the offsets of their lines and their hash, which the cache folder keeps (`index_cache`). Records are
//! read by position, so memory grows with the number of lines, 4.1 bytes each, and not with the files; records that follow one another are
//! read together. Blank lines are no records. Lines end with LF or CR LF; a byte-order mark is skipped.

use super::index_cache::IndexCache;
use super::line_index::{LineIndex, MAX_LINE};
use super::text_files::{Opening, TextFiles};
use crate::error::{Error, Result, quote};
use crate::records::{Dataset, Fingerprint, Origin, Record, Value, hash, json};
use crate::source;
use perilune_core::Interrupt;
use rayon::prelude::*;
use std::path::PathBuf;
use std::sync::Arc;

/// The most bytes of records that are read together.
const TOGETHER: u64 = 1 << 20;
/// Records that a scan of malformed ones reads together.
const CHUNK: u64 = 256;
/// Bytes before and behind the place of an error that messages show.
const EXCERPT: usize = 24;

/// What a line holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LineFormat {
    /// A JSON object, whose fields are those of the record.
    Json,
    /// UTF-8 text: the field `text`.
    Text,
}

/// The records of files with one on each line.
#[derive(Clone)]
pub struct Lines {
    files: Arc<Indexed>,
    /// The rows that are records; all without it.
    kept: Option<Arc<Vec<u32>>>,
    /// The fields that are parsed; all without it.
    fields: Option<Arc<[Arc<str>]>>,
}

struct Indexed {
    format: LineFormat,
    text: TextFiles,
    files: Vec<File>,
    fingerprint: Fingerprint,
}

struct File {
    path: Arc<PathBuf>,
    /// The number of its first record among those of all files.
    first: u64,
    index: LineIndex,
}

impl Lines {
    /// Indexes files in this order, compressed or not.
    ///
    /// # Errors
    /// A file may not be read or is damaged, or has a line of more than 256 MiB.
    pub fn open(paths: &[PathBuf], format: LineFormat, mut opening: Opening<'_>) -> Result<Lines> {
        let text = TextFiles::new(paths, &mut opening)?;
        let cache = IndexCache::new(opening.cache.as_deref());
        let (mut files, mut first, mut hasher) = (Vec::with_capacity(paths.len()), 0, blake3::Hasher::new());
        hasher.update(if format == LineFormat::Json { b"jsonl/2" } else { b"lines/2" });
        for number in 0..text.count() {
            let path = Arc::new(text.path(number).to_path_buf());
            let index = cache.lines(&text, number, opening.interrupt)?;
            hasher.update(&index.hash);
            hasher.update(&text.len(number).to_le_bytes());
            let count = index.len();
            files.push(File { path, first, index });
            first += count;
        }
        let fingerprint = *hasher.finalize().as_bytes();
        Ok(Lines { files: Arc::new(Indexed { format, text, files, fingerprint }), kept: None, fields: None })
    }

    /// Leaves out lines that are no records. Returns how many.
    ///
    /// # Errors
    /// Reading fails, an interrupt, or more than 2^32 lines.
    pub fn skip_malformed(&mut self, interrupt: &Interrupt) -> Result<u64> {
        let len = self.files.len();
        if u32::try_from(len).is_err() {
            return Err(Error::argument(
                "on_error",
                format!("\"skip\" needs less than 2^32 lines, and there are {len}"),
            ));
        }
        let good = |chunk: u64| -> Result<Vec<u32>> {
            if interrupt.is_requested() {
                return Err(Error::Interrupted);
            }
            let rows = chunk * CHUNK..len.min((chunk + 1) * CHUNK);
            let mut kept = Vec::with_capacity(CHUNK as usize);
            self.files.read_each(&rows.collect::<Vec<_>>(), None, &mut |row, record| match record {
                Ok(_) => {
                    kept.push(row as u32);
                    Ok(())
                }
                Err(Error::Line { .. }) => Ok(()),
                Err(e) => Err(e),
            })?;
            Ok(kept)
        };
        let all = || (0..len.div_ceil(CHUNK)).into_par_iter().map(good).collect::<Result<Vec<_>>>();
        let kept: Vec<u32> = source::pool(None)?.install(all)?.into_iter().flatten().collect();
        let skipped = len - kept.len() as u64;
        self.kept = Some(Arc::new(kept));
        Ok(skipped)
    }

    fn row(&self, index: u64) -> u64 {
        let row = index % self.len();
        self.kept.as_ref().map_or(row, |kept| u64::from(kept[row as usize]))
    }
}

impl Indexed {
    fn len(&self) -> u64 {
        self.files.last().map_or(0, |f| f.first + f.index.len())
    }

    /// The file of a row, and its row there.
    fn at(&self, row: u64) -> (usize, u64) {
        let number = self.files.partition_point(|f| f.first <= row) - 1;
        // Files without records begin where the next one does.
        (number, row - self.files[number].first)
    }

    fn line(&self, number: usize, row: u64) -> u64 {
        self.files[number].index.line(row)
    }

    /// Reads rows in this order and passes each to `f`. Those that follow one another in a file are read together.
    fn read_each(
        &self,
        rows: &[u64],
        fields: Option<&[Arc<str>]>,
        f: &mut dyn FnMut(u64, Result<Record>) -> Result<()>,
    ) -> Result<()> {
        let (mut rest, mut buffer) = (rows, Vec::new());
        while let Some(row) = rest.first().copied() {
            let (number, own) = self.at(row);
            let index = &self.files[number].index;
            let start = index.start(own);
            let mut ends = vec![self.end(number, own)];
            for (next, k) in rest.iter().skip(1).zip(1..) {
                if *next != row + k || own + k >= index.len() || self.end(number, own + k) - start > TOGETHER {
                    break;
                }
                ends.push(self.end(number, own + k));
            }
            let last = ends.last().copied().unwrap_or(start);
            buffer.resize(last.saturating_sub(start) as usize, 0);
            self.text.read_at(number, start, &mut buffer)?;
            for (end, k) in ends.iter().zip(0..) {
                let (from, to) = (index.start(own + k) - start, end - start);
                let text = buffer.get(from as usize..to as usize).unwrap_or_default();
                f(row + k, self.parse(number, own + k, text, fields))?;
            }
            rest = rest.get(ends.len()..).unwrap_or_default();
        }
        Ok(())
    }

    /// Where the text of a row ends, of which the first line counts. Blank lines behind it belong to no record.
    fn end(&self, number: usize, row: u64) -> u64 {
        let index = &self.files[number].index;
        index.start(row + 1).min(index.start(row).saturating_add(MAX_LINE))
    }

    fn read_many(&self, rows: &[u64], fields: Option<&[Arc<str>]>) -> Result<Vec<Record>> {
        let mut records = Vec::with_capacity(rows.len());
        self.read_each(rows, fields, &mut |_, record| {
            records.push(record?);
            Ok(())
        })?;
        Ok(records)
    }

    fn read(&self, row: u64, fields: Option<&[Arc<str>]>) -> Result<Record> {
        let (number, own) = self.at(row);
        let start = self.files[number].index.start(own);
        let mut text = vec![0; self.end(number, own).saturating_sub(start) as usize];
        self.text.read_at(number, start, &mut text)?;
        self.parse(number, own, &text, fields)
    }

    /// Parses a row of a file, at the beginning of `text`.
    fn parse(&self, number: usize, row: u64, text: &[u8], fields: Option<&[Arc<str>]>) -> Result<Record> {
        let line = memchr::memchr(b'\n', text).and_then(|end| text.get(..end)).unwrap_or(text);
        let text = line.strip_suffix(b"\r").unwrap_or(line);
        let fail = |column: usize, rule: String| {
            let around = &text[column.saturating_sub(EXCERPT).min(text.len())..text.len().min(column + EXCERPT)];
            let excerpt = quote(&String::from_utf8_lossy(around));
            let place = format!("column {}: ", column.max(1));
            Error::line(&self.files[number].path, self.line(number, row), place, format!("{rule}, near {excerpt}"))
        };
        match self.format {
            LineFormat::Json => json::object(text, fields).map_err(|fault| {
                fail(fault.column, fault.rule).hint("mend the line, or leave such lines out: { on_error = \"skip\" }")
            }),
            LineFormat::Text => {
                let text = std::str::from_utf8(text).map_err(|e| fail(e.valid_up_to() + 1, "no UTF-8 text".into()))?;
                Ok(Record { fields: vec![("text".into(), Value::Text(text.into()))] })
            }
        }
    }
}

impl Dataset for Lines {
    fn len(&self) -> u64 {
        self.kept.as_ref().map_or(self.files.len(), |kept| kept.len() as u64)
    }

    fn get(&self, index: u64) -> Result<Record> {
        self.files.read(self.row(index), self.fields.as_deref())
    }

    fn get_many(&self, indices: &[u64]) -> Result<Vec<Record>> {
        let rows: Vec<u64> = indices.iter().map(|index| self.row(*index)).collect();
        self.files.read_many(&rows, self.fields.as_deref())
    }

    fn origins(&self, index: u64) -> Result<Vec<Origin>> {
        let (number, row) = self.files.at(self.row(index));
        let line = Some(self.files.line(number, row));
        Ok(vec![Origin { file: self.files.files[number].path.clone(), row, line, sub: 0, rewritten: false }])
    }

    fn fingerprint(&self) -> Fingerprint {
        let skips = [u8::from(self.kept.is_some())];
        hash::stage("lines/2", &[&self.files.fingerprint, &skips], &[])
    }

    fn project(&self, fields: &[Arc<str>]) -> Option<Arc<dyn Dataset>> {
        (self.files.format == LineFormat::Json)
            .then(|| Arc::new(Lines { fields: Some(fields.into()), ..self.clone() }) as Arc<dyn Dataset>)
    }
}

#[cfg(test)]
#[path = "lines_tests.rs"]
mod tests;
