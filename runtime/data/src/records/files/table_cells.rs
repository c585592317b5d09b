//! Splits the text of tables into rows and cells, and finds the types of cells.

use super::table::ColumnType;
use super::text_files::TextFiles;
use crate::error::{Error, Result};
use csv_core::{ReadRecordResult, Reader, ReaderBuilder};
use perilune_core::Interrupt;
use std::cell::RefCell;

/// Bytes that are read at a time.
const PIECE: u64 = 4 << 20;
/// The most bytes of a row.
const MAX_ROW: usize = 256 << 20;
/// The most cells of a row.
const MAX_CELLS: usize = 1 << 20;

/// The most bytes of a parser that a thread keeps.
const MAX_KEPT: usize = 1 << 20;

/// Parses rows with a delimiter.
pub(super) struct Rows {
    delimiter: u8,
}

/// A row of a file.
pub(super) struct Record<'a> {
    /// Where it begins.
    pub start: u64,
    /// The line on which it begins, from 1.
    pub line: u64,
    text: &'a str,
    ends: &'a [usize],
}

impl Record<'_> {
    pub fn count(&self) -> usize {
        self.ends.len()
    }

    /// The text of a cell; "" beyond the last.
    pub fn cell(&self, number: usize) -> &str {
        self.get(number).unwrap_or_default()
    }

    pub fn get(&self, number: usize) -> Option<&str> {
        let end = *self.ends.get(number)?;
        let start = if number == 0 { 0 } else { *self.ends.get(number - 1)? };
        self.text.get(start..end)
    }

    pub fn cells(&self) -> impl Iterator<Item = &str> {
        (0..self.count()).map(|k| self.cell(k))
    }
}

/// The parser and what it has read of a row.
struct Partial {
    parser: Reader,
    text: Vec<u8>,
    ends: Vec<usize>,
    /// How much of `text` and of `ends` is filled.
    filled: usize,
    cells: usize,
}

impl Partial {
    /// Builds a parser each time: a clone of one lacks its classes of bytes (csv-core 0.1.13).
    fn new(delimiter: u8) -> Partial {
        let parser = ReaderBuilder::new().delimiter(delimiter).build();
        Partial { parser, text: vec![0; 4096], ends: vec![0; 64], filled: 0, cells: 0 }
    }

    /// Reads more of a row. Returns how many bytes it took, and whether the row is complete; `None` at the end of the file, which an empty
    /// input means. `Err` has a rule.
    fn feed(&mut self, input: &[u8]) -> std::result::Result<(usize, Option<bool>), String> {
        let mut taken = 0;
        loop {
            let (result, read, written, ended) =
                self.parser.read_record(&input[taken..], &mut self.text[self.filled..], &mut self.ends[self.cells..]);
            taken += read;
            self.filled += written;
            self.cells += ended;
            match result {
                ReadRecordResult::InputEmpty => return Ok((taken, Some(false))),
                ReadRecordResult::OutputFull if self.text.len() >= MAX_ROW => {
                    return Err(format!("the row has more than {MAX_ROW} bytes; is a quote never closed?"));
                }
                ReadRecordResult::OutputFull => self.text.resize(self.text.len() * 2, 0),
                ReadRecordResult::OutputEndsFull if self.ends.len() >= MAX_CELLS => {
                    return Err(format!("the row has more than {MAX_CELLS} cells"));
                }
                ReadRecordResult::OutputEndsFull => self.ends.resize(self.ends.len() * 2, 0),
                ReadRecordResult::Record => return Ok((taken, Some(true))),
                ReadRecordResult::End => return Ok((taken, None)),
            }
        }
    }

    /// The row as text; `Err` has the cell that is no UTF-8.
    fn row(&self, start: u64, line: u64) -> std::result::Result<Record<'_>, usize> {
        let (bytes, ends) = (&self.text[..self.filled], &self.ends[..self.cells]);
        let text = std::str::from_utf8(bytes).map_err(|e| ends.partition_point(|end| *end <= e.valid_up_to()))?;
        // A character may not continue in the next cell.
        match ends.iter().position(|end| !text.is_char_boundary(*end)) {
            Some(cell) => Err(cell),
            None => Ok(Record { start, line, text, ends }),
        }
    }

    fn clear(&mut self) {
        (self.filled, self.cells) = (0, 0);
    }
}

impl Rows {
    pub fn new(delimiter: u8) -> Rows {
        Rows { delimiter }
    }

    pub fn delimiter(&self) -> u8 {
        self.delimiter
    }

    /// Passes all rows of a file to `each`, the header first, and hashes its text. A row that is no UTF-8 text is passed as its error. Returns
    /// where the last row ends.
    pub fn scan(
        &self,
        text: &TextFiles,
        number: usize,
        hasher: &mut blake3::Hasher,
        interrupt: &Interrupt,
        each: &mut dyn FnMut(Result<&Record<'_>>) -> Result<()>,
    ) -> Result<u64> {
        let (path, len) = (text.path(number), text.len(number));
        let mut row = Partial::new(self.delimiter);
        let mut buffer = vec![0; PIECE.min(len) as usize];
        // Where the row begins, its line, whether it has begun, and the line of what is read next.
        let (mut start, mut first, mut begun, mut line, mut at) = (0, 1u64, false, 1u64, 0u64);
        let fail = |line: u64, rule: String| Error::line(path, line, "", rule);
        let mut end_row = |row: &mut Partial, start: u64, line: u64| -> Result<()> {
            let read = row.row(start, line).map_err(|cell| {
                let error = Error::line(path, line, format!("cell {}: ", cell + 1), "is no UTF-8 text");
                error.hint("save the file as UTF-8 (iconv -f latin1 -t utf-8), or leave such rows out: { on_error = \"skip\" }")
            });
            match read {
                Ok(read) => each(Ok(&read))?,
                Err(e) => each(Err(e))?,
            }
            row.clear();
            Ok(())
        };
        while at < len {
            if interrupt.is_requested() {
                return Err(Error::Interrupted);
            }
            let piece = &mut buffer[..PIECE.min(len - at) as usize];
            text.read_at(number, at, piece)?;
            hasher.update(piece);
            let mut from = if at == 0 && piece.starts_with(b"\xEF\xBB\xBF") { 3 } else { 0 };
            while from < piece.len() {
                if !begun {
                    // Blank lines, and the LF behind a CR.
                    match piece[from] {
                        b'\n' => line += 1,
                        b'\r' => {}
                        _ => (begun, start, first) = (true, at + from as u64, line),
                    }
                    if !begun {
                        from += 1;
                        continue;
                    }
                }
                let (taken, complete) = row.feed(&piece[from..]).map_err(|rule| fail(first, rule))?;
                line += memchr::memchr_iter(b'\n', &piece[from..from + taken]).count() as u64;
                from += taken;
                if complete == Some(true) {
                    end_row(&mut row, start, first)?;
                    begun = false;
                } else if taken == 0 {
                    return Err(fail(first, "the row cannot be split".into()));
                }
            }
            at += piece.len() as u64;
        }
        // A newline ends a row without one, unless it is inside quotes.
        if begun {
            match row.feed(b"\n").map_err(|rule| fail(first, rule))? {
                (_, Some(true)) => end_row(&mut row, start, first)?,
                _ => {
                    let error = fail(first, "a quote is opened and never closed".into());
                    return Err(error.hint(crate::csv_records::QUOTE_CURE));
                }
            }
        }
        Ok(len)
    }

    /// Splits the text of one row.
    pub fn one<T>(&self, text: &[u8], then: impl FnOnce(&Record<'_>) -> Result<T>) -> Result<T> {
        let known = PARSER.take().filter(|(delimiter, _)| *delimiter == self.delimiter);
        let mut row = known.map_or_else(|| Partial::new(self.delimiter), |(_, row)| row);
        row.parser.reset();
        row.clear();
        let wrong = |rule: String| Error::argument("table", rule);
        let (_, complete) = row.feed(text).map_err(wrong)?;
        if complete == Some(false) {
            row.feed(b"").map_err(wrong)?;
        }
        let read = row.row(0, 0).map_err(|cell| wrong(format!("cell {cell} is no UTF-8 text")))?;
        let made = then(&read);
        if row.text.len() <= MAX_KEPT {
            PARSER.set(Some((self.delimiter, row)));
        }
        made
    }
}

thread_local! {
    /// The last parser of this thread and its delimiter: building its table of states takes longer than most rows.
    static PARSER: RefCell<Option<(u8, Partial)>> = const { RefCell::new(None) };
}

/// What the cells of a column have been so far.
#[derive(Clone, Default)]
pub(super) struct Kind {
    integers: bool,
    numbers: bool,
    text: bool,
}

impl Kind {
    pub fn see(&mut self, cell: &str) {
        if cell.is_empty() || self.text {
            return;
        }
        match number(cell) {
            Some(ColumnType::Integer) => self.integers = true,
            Some(_) => self.numbers = true,
            None => self.text = true,
        }
    }

    pub fn found(&self) -> ColumnType {
        match (self.text, self.numbers, self.integers) {
            (false, true, _) => ColumnType::Number,
            (false, false, true) => ColumnType::Integer,
            _ => ColumnType::Text,
        }
    }
}

/// The type of a number as JSON writes it; `None` for other text, and for integers beyond 64 bits, which a float would round.
fn number(cell: &str) -> Option<ColumnType> {
    let digits = |text: &str| text.bytes().take_while(u8::is_ascii_digit).count();
    let rest = cell.strip_prefix('-').unwrap_or(cell);
    let whole = digits(rest);
    if whole == 0 || (whole > 1 && rest.starts_with('0')) {
        return None;
    }
    let rest = &rest[whole..];
    if rest.is_empty() {
        return cell.parse::<i64>().ok().map(|_| ColumnType::Integer);
    }
    let rest = match rest.strip_prefix('.') {
        Some(fraction) if digits(fraction) > 0 => &fraction[digits(fraction)..],
        Some(_) => return None,
        None => rest,
    };
    let exponent = match rest.strip_prefix(['e', 'E']) {
        Some(exponent) => exponent.strip_prefix(['+', '-']).unwrap_or(exponent),
        None if rest.is_empty() => "0",
        None => return None,
    };
    let good = !exponent.is_empty() && digits(exponent) == exponent.len();
    (good && cell.parse::<f64>().is_ok_and(f64::is_finite)).then_some(ColumnType::Number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_json() {
        for cell in ["0", "-1", "9223372036854775807", "-9223372036854775808"] {
            assert_eq!(number(cell), Some(ColumnType::Integer), "{cell}");
        }
        for cell in ["0.5", "-1e3", "1E-7", "2.50", "1e+2", "-0.0"] {
            assert_eq!(number(cell), Some(ColumnType::Number), "{cell}");
        }
        for cell in [
            "",
            "-",
            "007",
            "+1",
            ".5",
            "1.",
            "1e",
            "1e+",
            "nan",
            "inf",
            "0x1",
            " 1",
            "1 ",
            "1,5",
            "1_0",
            "9223372036854775808",
            "1e999",
            "--1",
        ] {
            assert_eq!(number(cell), None, "{cell}");
            assert!(serde_json::from_str::<f64>(cell).is_err() || cell.contains(' ') || cell.len() == 19, "{cell}");
        }
    }

    #[test]
    fn a_column_has_the_type_of_all_its_cells() {
        let of = |cells: &[&str]| {
            let mut kind = Kind::default();
            cells.iter().for_each(|cell| kind.see(cell));
            kind.found()
        };
        assert_eq!(of(&["1", "", "-2"]), ColumnType::Integer);
        assert_eq!(of(&["1", "2.5"]), ColumnType::Number);
        assert_eq!(of(&["1", "2.5", "x"]), ColumnType::Text);
        assert_eq!(of(&["x", "1"]), ColumnType::Text);
        assert_eq!((of(&[]), of(&["", ""])), (ColumnType::Text, ColumnType::Text));
    }
}
