//! Reads files with a record on each line: JSON objects (JSONL), or text.
//!
//! Opening reads the files once, for the offsets of their lines and their hash; records are read by position, so memory grows with the
//! number of lines, 8 bytes each, and not with the files. Blank lines are no records. Lines end with LF or CR LF; a byte-order mark is
//! skipped.

use super::reserve;
use super::text_files::{Opening, TextFiles};
use crate::error::{Error, Result, quote};
use crate::records::{Dataset, Fingerprint, Origin, Record, Value, hash, json};
use crate::source;
use perilune_core::Interrupt;
use rayon::prelude::*;
use std::path::PathBuf;
use std::sync::Arc;

/// Bytes that are indexed at a time.
const PIECE: u64 = 4 << 20;
/// The most bytes of a line.
const MAX_LINE: u64 = 256 << 20;
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
    /// Where each record's line begins, and where the file ends.
    starts: Vec<u64>,
    blank: Blank,
}

/// Blank lines of a file: the records before which there are some, and how many there are up to there.
#[derive(Default)]
struct Blank(Vec<(u64, u64)>);

impl Blank {
    fn push(&mut self, record: u64) {
        let all = self.0.last().map_or(0, |(_, count)| *count) + 1;
        match self.0.last_mut() {
            Some(last) if last.0 == record => last.1 = all,
            _ => self.0.push((record, all)),
        }
    }

    /// Those before a record.
    fn before(&self, record: u64) -> u64 {
        let at = self.0.partition_point(|(r, _)| *r <= record);
        at.checked_sub(1).and_then(|at| self.0.get(at)).map_or(0, |(_, count)| *count)
    }
}

impl Lines {
    /// Indexes files in this order, compressed or not.
    ///
    /// # Errors
    /// A file may not be read or is damaged, or has a line of more than 256 MiB.
    pub fn open(paths: &[PathBuf], format: LineFormat, mut opening: Opening<'_>) -> Result<Lines> {
        let text = TextFiles::new(paths, &mut opening)?;
        let (mut files, mut first, mut hasher) = (Vec::with_capacity(paths.len()), 0, blake3::Hasher::new());
        hasher.update(if format == LineFormat::Json { b"jsonl/1" } else { b"lines/1" });
        for number in 0..text.count() {
            let path = Arc::new(text.path(number).to_path_buf());
            let (starts, blank) = index(&text, number, &mut hasher, opening.interrupt)?;
            hasher.update(&text.len(number).to_le_bytes());
            let count = starts.len() as u64 - 1;
            files.push(File { path, first, starts, blank });
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
        let good = |row: u32| -> Result<Option<u32>> {
            if interrupt.is_requested() {
                return Err(Error::Interrupted);
            }
            match self.files.read(u64::from(row), None) {
                Ok(_) => Ok(Some(row)),
                Err(Error::Line { .. }) => Ok(None),
                Err(e) => Err(e),
            }
        };
        let all = || (0..len as u32).into_par_iter().map(good).collect::<Result<Vec<_>>>();
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

/// Finds the lines of a file. Returns where those that are not blank begin, with the end of the file behind, and the blank ones.
fn index(
    text: &TextFiles,
    number: usize,
    hasher: &mut blake3::Hasher,
    interrupt: &Interrupt,
) -> Result<(Vec<u64>, Blank)> {
    let (path, len) = (text.path(number).to_path_buf(), text.len(number));
    let (mut starts, mut blank, mut lines) = (Vec::<u64>::new(), Blank::default(), 0u64);
    let mut buffer = vec![0; PIECE.min(len) as usize];
    // Where the current line begins, and whether something but space has been seen in it.
    let (mut line, mut is_blank) = (0u64, true);
    let mut end_line = |starts: &mut Vec<u64>, line: u64, next: u64, is_blank: bool| -> Result<()> {
        match is_blank {
            true => blank.push(starts.len() as u64),
            false => starts.push(line),
        }
        lines += 1;
        if next - line > MAX_LINE {
            let rule = format!("has {} bytes; the limit is {MAX_LINE}", next - line);
            return Err(Error::line(&path, lines, "the line ", rule).hint("put each record on a line of its own"));
        }
        Ok(())
    };
    let mut at = 0;
    while at < len {
        if interrupt.is_requested() {
            return Err(Error::Interrupted);
        }
        let piece = &mut buffer[..PIECE.min(len - at) as usize];
        text.read_at(number, at, piece)?;
        hasher.update(piece);
        reserve(&path, &mut starts, memchr::memchr_iter(b'\n', piece).count())?;
        if at == 0 && piece.starts_with(b"\xEF\xBB\xBF") {
            line = 3;
        }
        let mut from = (line.max(at) - at) as usize;
        for newline in memchr::memchr_iter(b'\n', piece) {
            is_blank &= piece[from.min(newline)..newline].iter().all(u8::is_ascii_whitespace);
            let next = at + newline as u64 + 1;
            end_line(&mut starts, line, next, is_blank)?;
            (line, is_blank, from) = (next, true, newline + 1);
        }
        is_blank &= piece[from.min(piece.len())..].iter().all(u8::is_ascii_whitespace);
        at += piece.len() as u64;
    }
    if line < len && !is_blank {
        end_line(&mut starts, line, len, false)?;
    }
    starts.push(len);
    starts.shrink_to_fit();
    Ok((starts, blank))
}

impl Indexed {
    fn len(&self) -> u64 {
        self.files.last().map_or(0, |f| f.first + f.starts.len() as u64 - 1)
    }

    /// The file of a row, and its row there.
    fn at(&self, row: u64) -> (usize, u64) {
        let number = self.files.partition_point(|f| f.first <= row) - 1;
        // Files without records begin where the next one does.
        (number, row - self.files[number].first)
    }

    fn line(&self, number: usize, row: u64) -> u64 {
        row + 1 + self.files[number].blank.before(row)
    }

    fn read(&self, row: u64, fields: Option<&[Arc<str>]>) -> Result<Record> {
        let (number, row) = self.at(row);
        let file = &self.files[number];
        let (start, end) = (file.starts[row as usize], file.starts[row as usize + 1]);
        // Blank lines behind it belong to no record.
        let mut text = vec![0; (end - start).min(MAX_LINE) as usize];
        self.text.read_at(number, start, &mut text)?;
        let text = text.split(|b| *b == b'\n').next().unwrap_or_default();
        let text = text.strip_suffix(b"\r").unwrap_or(text);
        let fail = |column: usize, rule: String| {
            let around = &text[column.saturating_sub(EXCERPT).min(text.len())..text.len().min(column + EXCERPT)];
            let excerpt = quote(&String::from_utf8_lossy(around));
            let place = format!("column {}: ", column.max(1));
            Error::line(&file.path, self.line(number, row), place, format!("{rule}, near {excerpt}"))
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

    fn origins(&self, index: u64) -> Result<Vec<Origin>> {
        let (number, row) = self.files.at(self.row(index));
        let line = Some(self.files.line(number, row));
        Ok(vec![Origin { file: self.files.files[number].path.clone(), row, line, sub: 0 }])
    }

    fn fingerprint(&self) -> Fingerprint {
        let skips = [u8::from(self.kept.is_some())];
        hash::stage("lines/1", &[&self.files.fingerprint, &skips], &[])
    }

    fn project(&self, fields: &[Arc<str>]) -> Option<Arc<dyn Dataset>> {
        (self.files.format == LineFormat::Json)
            .then(|| Arc::new(Lines { fields: Some(fields.into()), ..self.clone() }) as Arc<dyn Dataset>)
    }
}

#[cfg(test)]
#[path = "lines_tests.rs"]
mod tests;
