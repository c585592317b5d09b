//! Reads tables of text (`.csv`, plain or gzipped) into columns of numbers or categories.
//!
//! The whole table is kept as text and each column is parsed when it is requested, so one file serves columns of many
//! dtypes and every message can name line and column. Cells follow RFC 4180 (quotes may hold delimiters and line
//! ends); blank lines are skipped, unquoted cells are trimmed, and every row must have the number of cells of the first.
//! `csv_records` splits the text.
//!
//! Not supported: implicit dtypes, dates, decimal commas, tables larger than memory.

use crate::csv_lines::Lines;
use crate::csv_records::{self, Records};
use crate::error::{Error, Result, quote};
use crate::gzip_text::TABLE;
use perilune_core::error::did_you_mean;
use perilune_core::host_tensor::{push_f64, push_i64};
use perilune_core::{DType, HostTensor, Shape};
use perilune_policy::Opened;
use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

/// Whether the first row names the columns.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Header {
    /// Detected: the first row is a header if none of its cells is a number and a cell of the second row is.
    #[default]
    Auto,
    Yes,
    No,
}

#[derive(Clone, PartialEq, Debug)]
pub struct Options {
    pub header: Header,
    /// Detected if absent: the first of tab, `;` and `,` that splits the first rows into equal numbers of cells.
    pub delimiter: Option<char>,
    /// Lines that start with this are skipped.
    pub comment: Option<char>,
    /// The value of missing numbers. Missing cells are empty, `?`, `NA`, `N/A`, `NaN`, `null` or `none`, in any case.
    pub missing: Option<f64>,
    /// The limit of the unpacked text, and of the table in memory (its text and 4 bytes a cell), in bytes. By default 1 GiB of text and
    /// 4 GiB of table; of a compressed file 100 times its size, or 32 MiB if that is more.
    pub max_bytes: Option<u64>,
}

/// The default limits of the text and of the table.
const MAX_TEXT: u64 = 1 << 30;
const MAX_TABLE: u64 = 4 << 30;

impl Default for Options {
    fn default() -> Options {
        Options { header: Header::Auto, delimiter: None, comment: None, missing: None, max_bytes: None }
    }
}

/// A selection of columns: a single one gives a tensor of shape {rows}, the others one of shape {rows, columns}.
#[derive(Clone, PartialEq, Debug)]
pub enum Columns {
    Index(usize),
    Name(String),
    /// Half-open, counted from 0.
    Range(usize, usize),
    Indices(Vec<usize>),
    Names(Vec<String>),
}

/// A table as text.
#[derive(Clone, PartialEq, Debug)]
pub struct Rows {
    path: PathBuf,
    names: Option<Vec<String>>,
    num_columns: usize,
    /// The text of all cells, row by row; `ends[i]` is the end of cell `i`.
    text: String,
    ends: Vec<u32>,
    lines: Lines,
    missing: Option<f64>,
}

impl Rows {
    /// Reads a table. Its path stays for messages.
    pub fn read(file: Opened, options: &Options) -> Result<Rows> {
        let given = match options.delimiter {
            Some(c) if !c.is_ascii() || "\"\r\n".contains(c) => {
                let rule = format!("{} must be one ASCII character, not a quote or a line end", quote(&c.to_string()));
                return Err(Error::argument("csv option delimiter", rule));
            }
            d => d.map(|c| c as u8),
        };
        let packed = file.len();
        let mut records = Records::open(file, options.max_bytes, MAX_TEXT, options.comment, given)?;
        let most = match options.max_bytes {
            Some(bytes) => bytes,
            None if records.is_packed() => TABLE.most(packed),
            None => MAX_TABLE,
        };
        let delimiter = match given {
            Some(d) => d,
            None => csv_records::detect(records.peek(16)?),
        };
        let mut rows = Rows {
            path: records.path().to_path_buf(),
            names: None,
            num_columns: 0,
            text: String::new(),
            ends: Vec::new(),
            lines: Lines::default(),
            missing: options.missing,
        };
        while let Some((line, record)) = records.next()? {
            rows.push(line, &record, delimiter)?;
            if rows.nbytes() > most {
                return Err(rows.too_large(most, records.is_packed() && options.max_bytes.is_none()));
            }
        }
        rows.text.shrink_to_fit();
        rows.ends.shrink_to_fit();
        let header = match options.header {
            Header::Yes => true,
            Header::No => false,
            Header::Auto => rows.looks_headed(),
        };
        if header && !rows.is_empty() {
            rows.take_header();
        }
        if rows.is_empty() {
            let rule = if header { "has a header and no rows" } else { "has no rows" };
            return Err(Error::malformed(&rows.path, "table", rule));
        }
        Ok(rows)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the number of rows, without the header.
    pub fn len(&self) -> usize {
        self.lines.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes that the table takes in memory.
    fn nbytes(&self) -> u64 {
        (self.text.len() + self.ends.len() * size_of::<u32>() + self.lines.nbytes()) as u64
    }

    /// The error for a table above its limit. Cells of few characters take more memory than text.
    fn too_large(&self, most: u64, packed: bool) -> Error {
        let what = match packed {
            true => format!(
                "the table, in bytes (its text and 4 bytes a cell; limited to {} times the packed file),",
                TABLE.ratio
            ),
            false => "the table, in bytes (its text and 4 bytes a cell),".to_string(),
        };
        Error::too_large(&self.path, what, self.nbytes(), most)
            .hint("if the file is valid, raise the limit with the option max_bytes, or keep large data as .npy or .safetensors")
    }

    pub fn num_columns(&self) -> usize {
        self.num_columns
    }

    /// Returns the header, if there is one.
    pub fn names(&self) -> Option<&[String]> {
        self.names.as_deref()
    }

    /// Returns the text of a cell. Panics out of range.
    pub fn cell(&self, row: usize, column: usize) -> &str {
        let i = row * self.num_columns + column;
        let start = if i == 0 { 0 } else { self.ends[i - 1] as usize };
        &self.text[start..self.ends[i] as usize]
    }

    /// Returns the line of the file on which a row starts, from 1.
    pub fn line(&self, row: usize) -> u64 {
        self.lines.get(row)
    }

    /// Returns whether every cell of the column is a number or missing, and at least one is a number.
    pub fn is_numeric(&self, column: usize) -> bool {
        let mut any = false;
        (0..self.len()).all(|r| {
            let cell = self.cell(r, column);
            let number = cell.parse::<f64>().is_ok() && !is_missing(cell);
            any |= number;
            number || is_missing(cell)
        }) && any
    }

    /// Resolves a selection to valid column indices.
    pub fn resolve(&self, columns: &Columns) -> Result<Vec<usize>> {
        let n = self.num_columns;
        let at = |i: usize| match i < n {
            true => Ok(i),
            false => Err(self.wrong(format!("has no column {i}: its {n} columns are 0 to {}", n - 1))),
        };
        match columns {
            Columns::Index(i) => Ok(vec![at(*i)?]),
            Columns::Indices(list) => list.iter().map(|&i| at(i)).collect(),
            Columns::Name(name) => Ok(vec![self.find(name)?]),
            Columns::Names(list) => list.iter().map(|name| self.find(name)).collect(),
            Columns::Range(lo, hi) if lo < hi && *hi <= n => Ok((*lo..*hi).collect()),
            Columns::Range(lo, hi) => {
                let rule = format!("has {n} columns; the range {{{lo}, {hi}}} must ascend and end at {n} or before");
                Err(self.wrong(rule).hint("ranges are half-open and count from 0: {0, 64} takes columns 0 to 63"))
            }
        }
    }

    /// Returns columns of numbers, each multiplied by `scale` in f64 and rounded once. Integers must be whole and in
    /// range. A missing cell becomes `missing` (before scaling) if that or the option of the same name is given.
    pub fn numbers(&self, columns: &Columns, dtype: DType, scale: f64, missing: Option<f64>) -> Result<HostTensor> {
        let picked = self.resolve(columns)?;
        let missing = missing.or(self.missing);
        let mut bytes = Vec::with_capacity(self.len() * picked.len() * dtype.size());
        for row in 0..self.len() {
            for &column in &picked {
                let cell = self.cell(row, column);
                let pushed = match missing {
                    Some(fill) if is_missing(cell) => push_float(fill * scale, dtype, &mut bytes),
                    _ => push_cell(cell, dtype, scale, &mut bytes),
                };
                pushed.map_err(|(rule, cure)| self.wrong_cell(row, column, rule, cure))?;
            }
        }
        let shape = match columns {
            Columns::Index(_) | Columns::Name(_) => Shape::new(&[self.len()]),
            _ => Shape::new(&[self.len(), picked.len()]),
        };
        Ok(HostTensor::new(dtype, shape.map_err(|e| self.wrong(e.message))?, bytes))
    }

    /// Encodes a column of words by a vocabulary: the column's own words, sorted, or a given list in its order (that of
    /// the training set, say). `dtype` is i64, i32 or u8.
    pub fn codes(&self, column: &Columns, dtype: DType, given: Option<&[String]>) -> Result<(HostTensor, Vec<String>)> {
        let picked = self.resolve(column)?;
        let [column] = picked[..] else {
            return Err(self.wrong(format!("codes are made from one column, not {}", picked.len())));
        };
        if let Some(row) = (0..self.len()).find(|&r| self.cell(r, column).is_empty()) {
            let cure = Some("fill the cell, for instance with the word 'none'".to_string());
            return Err(self.wrong_cell(row, column, "the cell is empty; a category needs a word".into(), cure));
        }
        let own = || (0..self.len()).map(|r| self.cell(r, column)).collect::<BTreeSet<_>>();
        let vocabulary = given.map_or_else(|| own().into_iter().map(String::from).collect(), <[String]>::to_vec);
        let mut codes: HashMap<&str, i64> = HashMap::new();
        for (code, word) in vocabulary.iter().enumerate() {
            if codes.insert(word, code as i64).is_some() {
                return Err(self.wrong(format!("the category {} is given twice", quote(word))));
            }
        }
        check_code_dtype(dtype, vocabulary.len()).map_err(|rule| self.wrong(rule))?;
        let mut bytes = Vec::with_capacity(self.len() * dtype.size());
        for row in 0..self.len() {
            let cell = self.cell(row, column);
            match codes.get(cell) {
                Some(&code) => push_i64(dtype, code, &mut bytes),
                None => {
                    let rule = format!("{} is not among the {} categories given", quote(cell), vocabulary.len());
                    let near = did_you_mean(cell, vocabulary.iter().map(String::as_str));
                    let cure = near.map(|word| format!("did you mean {}?", quote(word)));
                    return Err(self.wrong_cell(row, column, rule, cure));
                }
            }
        }
        let shape = Shape::new(&[self.len()]).map_err(|e| self.wrong(e.message))?;
        Ok((HostTensor::new(dtype, shape, bytes), vocabulary))
    }

    fn push(&mut self, line: u64, record: &str, delimiter: u8) -> Result<()> {
        let before = self.ends.len();
        csv_records::split(record, delimiter, &mut self.text, &mut self.ends)
            .map_err(|(place, rule)| Error::line(&self.path, line, place, rule).hint(csv_records::QUOTE_CURE))?;
        let cells = self.ends.len() - before;
        if self.is_empty() {
            self.num_columns = cells;
        } else if cells != self.num_columns {
            let first = self.line(0);
            let rule = format!("this row has {cells} cells, and the one on line {first} has {}", self.num_columns);
            let cure =
                format!("cells were split at {}; see the option delimiter", quote(&char::from(delimiter).to_string()));
            return Err(Error::line(&self.path, line, "", rule).hint(cure));
        }
        self.lines.push(line as u32);
        Ok(())
    }

    fn looks_headed(&self) -> bool {
        let number = |row: usize, c: usize| self.cell(row, c).parse::<f64>().is_ok();
        self.len() > 1 && !(0..self.num_columns).any(|c| number(0, c)) && (0..self.num_columns).any(|c| number(1, c))
    }

    fn take_header(&mut self) {
        self.names = Some((0..self.num_columns).map(|c| self.cell(0, c).to_string()).collect());
        let cut = self.ends[self.num_columns - 1];
        self.text.drain(..cut as usize);
        self.ends.drain(..self.num_columns);
        self.ends.iter_mut().for_each(|end| *end -= cut);
        self.lines.skip_header();
    }

    fn find(&self, name: &str) -> Result<usize> {
        let Some(names) = &self.names else {
            let error = self.wrong(format!("has no header, so no column is called {}", quote(name)));
            return Err(error.hint("set header = true if the first row is one, or pick columns by index"));
        };
        let mut hits = names.iter().enumerate().filter(|(_, n)| n.as_str() == name).map(|(i, _)| i);
        match (hits.next(), hits.next()) {
            (Some(i), None) => Ok(i),
            (Some(i), Some(j)) => {
                let rule = format!("calls both column {i} and column {j} {}", quote(name));
                Err(self.wrong(rule).hint("pick one by index"))
            }
            _ => {
                let shown = names.iter().take(20).map(|n| quote(n)).collect::<Vec<_>>().join(", ");
                let more = if names.len() > 20 { ", …" } else { "" };
                let error = self.wrong(format!("has no column {} (columns: {shown}{more})", quote(name)));
                Err(match did_you_mean(name, names.iter().map(String::as_str)) {
                    Some(near) => error.hint(format!("did you mean {}?", quote(near))),
                    None => error,
                })
            }
        }
    }

    fn wrong(&self, rule: impl Into<String>) -> Error {
        Error::argument(self.path.display().to_string(), rule)
    }

    fn wrong_cell(&self, row: usize, column: usize, rule: String, cure: Option<String>) -> Error {
        let name = self.names.as_ref().map_or(String::new(), |names| format!(" ({})", quote(&names[column])));
        let error = Error::line(&self.path, self.line(row), format!("column {column}{name}: "), rule);
        match cure {
            Some(cure) => error.hint(cure),
            // The first row of data may be a header that contains a number.
            None if row == 0 && self.names.is_none() && !self.cell(row, column).is_empty() => {
                error.hint("if this line is a header, set header = true")
            }
            None => error,
        }
    }
}

/// Checks that codes below `len` fit `dtype`; `Err` has the rule.
pub(crate) fn check_code_dtype(dtype: DType, len: usize) -> std::result::Result<(), String> {
    let most = match dtype {
        DType::U8 => 256,
        DType::I32 => i32::MAX as usize,
        DType::I64 => usize::MAX,
        _ => return Err(format!("codes are i64, i32 or u8, not {dtype}")),
    };
    if len > most {
        return Err(format!("{len} categories do not fit {dtype}, which holds {most}; use i32 or i64"));
    }
    Ok(())
}

fn is_missing(cell: &str) -> bool {
    cell.is_empty() || ["?", "na", "n/a", "nan", "null", "none"].iter().any(|m| cell.eq_ignore_ascii_case(m))
}

type Wrong = (String, Option<String>);

fn push_cell(cell: &str, dtype: DType, scale: f64, out: &mut Vec<u8>) -> std::result::Result<(), Wrong> {
    if is_missing(cell) {
        let what =
            if cell.is_empty() { "the cell is empty".to_string() } else { format!("{} means missing", quote(cell)) };
        return Err((what, Some("say missing = 0, or whatever should stand there, to fill such cells".into())));
    }
    if dtype == DType::I64 && scale == 1.0 {
        // Exact beyond 2^53.
        if let Ok(v) = cell.parse::<i64>() {
            push_i64(dtype, v, out);
            return Ok(());
        }
    }
    if dtype == DType::Bool && scale == 1.0 && (cell.eq_ignore_ascii_case("true") || cell.eq_ignore_ascii_case("false"))
    {
        out.push(u8::from(cell.len() == 4));
        return Ok(());
    }
    let Ok(v) = cell.parse::<f64>() else {
        let cure = if cell.replacen(',', ".", 1).parse::<f64>().is_ok() {
            "numbers take a decimal point, not a comma"
        } else {
            "a column of words becomes ids with `labels = true`; empty cells take the option `missing`"
        };
        return Err((format!("{} is not a number", quote(cell)), Some(cure.to_string())));
    };
    push_float(v * scale, dtype, out)
}

/// Appends `v` if `dtype` can represent it: floats may round but not overflow, integers must be whole.
fn push_float(v: f64, dtype: DType, out: &mut Vec<u8>) -> std::result::Result<(), Wrong> {
    let (low, high) = match dtype {
        DType::Bool => (0.0, 1.0),
        DType::U8 => (0.0, 255.0),
        DType::I32 => (f64::from(i32::MIN), f64::from(i32::MAX)),
        // Both bounds are exact floats; the upper one is the largest below 2^63.
        DType::I64 => (-9_223_372_036_854_775_808.0, 9_223_372_036_854_774_784.0),
        DType::F16 => (-65_504.0, 65_504.0),
        DType::BF16 => (-f64::from(half::bf16::MAX), f64::from(half::bf16::MAX)),
        DType::F32 => (f64::from(f32::MIN), f64::from(f32::MAX)),
        DType::F64 => (f64::NEG_INFINITY, f64::INFINITY),
    };
    if !dtype.is_float() && v.fract() != 0.0 {
        // An infinite or NaN `v` has a NaN fraction and is rejected here too.
        return Err((format!("{v} is not a whole number, which {dtype} needs"), Some("read it as f32".into())));
    }
    if v.is_finite() && (v < low || v > high) {
        return Err((
            format!("{v} is outside the range of {dtype}, {low} to {high}"),
            Some("use a wider dtype".into()),
        ));
    }
    push_f64(dtype, v, out);
    Ok(())
}

#[cfg(test)]
#[path = "csv_tests.rs"]
mod tests;
