//! Reads CSV and TSV files with a header as records.
//!
//! Opening reads the files once: it finds where rows begin, by a parser that knows quotes, and the type of each column. A column has
//! integers if all its cells are, numbers if all are numbers, and strings otherwise; all rows of all files count, so the type does not
//! depend on which records are read. Numbers are written as in JSON: "007" and "+1" are strings. Empty cells are null among numbers, and
//! "" among strings.

use super::columnar;
use super::row_index::RowIndex;
use super::table_cells::{Kind, Record as Cells, Rows};
use super::text_files::{Opening, TextFiles};
use crate::error::{Error, Result, quote};
use crate::records::{Dataset, Fingerprint, Origin, Record, Value, hash};
use std::path::PathBuf;
use std::sync::Arc;

/// The most bytes of rows that are read together.
const TOGETHER: u64 = 1 << 20;

/// What a table is read as.
#[derive(Clone, Debug)]
pub struct TableFormat {
    /// The byte between cells.
    pub delimiter: u8,
    /// The columns of a record, in this order; all without it.
    pub columns: Option<Vec<String>>,
    /// The types of columns that are not found by their cells.
    pub types: Vec<(String, ColumnType)>,
    /// Whether rows that are malformed are left out: those with another number of cells than the header, no UTF-8 text, or a cell that is
    /// not of the type given for its column.
    pub skip_malformed: bool,
}

/// The type of a column.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ColumnType {
    Integer,
    Number,
    Text,
}

impl ColumnType {
    fn name(self) -> &'static str {
        match self {
            ColumnType::Integer => "integer",
            ColumnType::Number => "number",
            ColumnType::Text => "string",
        }
    }
}

/// The rows of tables, with some of their columns.
#[derive(Clone)]
pub struct Table {
    inner: Arc<Inner>,
    /// The columns of a record, by their numbers in the header of the first file.
    columns: Arc<[usize]>,
}

struct Inner {
    text: TextFiles,
    files: Vec<File>,
    names: Vec<Arc<str>>,
    types: Vec<ColumnType>,
    rows: Rows,
    /// Rows that were left out; `None` where none is.
    skipped: Option<u64>,
    fingerprint: Fingerprint,
}

struct File {
    path: Arc<PathBuf>,
    /// The number of its first row among those of all files.
    first: u64,
    index: RowIndex,
    /// The column of the file for each of the dataset's columns.
    places: Vec<usize>,
}

impl Table {
    /// Indexes files in this order, compressed or not. They have the columns of the first one, in any order.
    ///
    /// # Errors
    /// A file may not be read or is damaged; a row has more or fewer cells than the header; a cell is not of the type that is given.
    pub fn open(paths: &[PathBuf], format: TableFormat, mut opening: Opening<'_>) -> Result<Table> {
        let text = TextFiles::new(paths, &mut opening)?;
        let rows = Rows::new(format.delimiter);
        let mut hasher = blake3::Hasher::new();
        let (mut names, mut kinds, mut files): (Vec<Arc<str>>, Vec<Kind>, Vec<File>) = Default::default();
        let mut given: Vec<Option<ColumnType>> = Vec::new();
        let (mut first, mut skipped) = (0u64, 0u64);
        for number in 0..text.count() {
            let path = Arc::new(text.path(number).to_path_buf());
            let (mut index, mut places, mut own) = (RowIndex::default(), Vec::new(), Vec::new());
            let mut header = true;
            let end = rows.scan(&text, number, &mut hasher, opening.interrupt, &mut |row: Result<&Cells<'_>>| {
                if std::mem::take(&mut header) {
                    let row = row?;
                    own = row.cells().map(Arc::from).collect();
                    columnar::distinct(&path, &own)?;
                    if number == 0 {
                        names = own.clone();
                        kinds = vec![Kind::default(); names.len()];
                        given = types(&path, &names, &format.types)?;
                    }
                    places = same_columns(&path, &text, &names, &own)?;
                    return Ok(());
                }
                let row = match row.and_then(|row| checked(&path, row, &names, &places, &given)) {
                    Err(Error::Line { .. }) if format.skip_malformed => {
                        skipped += 1;
                        return Ok(());
                    }
                    row => row?,
                };
                for (column, place) in places.iter().enumerate() {
                    kinds[column].see(row.cell(*place));
                }
                index.push(&path, row.start, row.line)
            })?;
            if header {
                return Err(Error::malformed(&path, "file", "has no header").hint("the first row names the columns"));
            }
            index.finish(&path, end)?;
            hasher.update(&text.len(number).to_le_bytes());
            let count = index.len();
            files.push(File { path, first, index, places });
            first += count;
        }
        let types = kinds.iter().zip(&given).map(|(kind, given)| given.unwrap_or(kind.found())).collect();
        let columns = match (&format.columns, files.first()) {
            (Some(asked), Some(file)) => {
                let find = |name: &String| {
                    let found = names.iter().position(|n| **n == **name);
                    found.ok_or_else(|| columnar::unknown(&file.path, name, &names))
                };
                asked.iter().map(find).collect::<Result<Arc<[usize]>>>()?
            }
            _ => (0..names.len()).collect(),
        };
        let fingerprint = *hasher.finalize().as_bytes();
        let skipped = format.skip_malformed.then_some(skipped);
        Ok(Table { inner: Arc::new(Inner { text, files, names, types, rows, skipped, fingerprint }), columns })
    }

    /// How many rows were left out, where malformed ones are.
    pub fn skipped(&self) -> Option<u64> {
        self.inner.skipped
    }

    /// The names of the columns of its records.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.columns.iter().filter_map(|column| self.inner.names.get(*column)).map(|name| &**name)
    }
}

/// Checks a row against the header and the types that are given.
fn checked<'a, 'b>(
    path: &std::path::Path,
    row: &'a Cells<'b>,
    names: &[Arc<str>],
    places: &[usize],
    given: &[Option<ColumnType>],
) -> Result<&'a Cells<'b>> {
    if row.count() != names.len() {
        let rule = format!("the row has {} cells, and the header {}", row.count(), names.len());
        let cure = "put cells with delimiters or newlines in quotes, name the delimiter, { delimiter = \";\" }, or leave such rows \
                    out: { on_error = \"skip\" }";
        return Err(Error::line(path, row.line, "", rule).hint(cure));
    }
    for ((place, kind), name) in places.iter().zip(given).zip(names) {
        let cell = row.cell(*place);
        if let Some(kind) = kind
            && value(*kind, cell).is_none()
        {
            let rule = format!("{} is no {}, which types names", quote(cell), kind.name());
            return Err(Error::line(path, row.line, format!("column {}: ", quote(name)), rule));
        }
    }
    Ok(row)
}

/// The types that are given for columns.
fn types(
    path: &std::path::Path,
    names: &[Arc<str>],
    given: &[(String, ColumnType)],
) -> Result<Vec<Option<ColumnType>>> {
    let mut out = vec![None; names.len()];
    for (name, kind) in given {
        let at = names.iter().position(|n| **n == **name).ok_or_else(|| columnar::unknown(path, name, names))?;
        out[at] = Some(*kind);
    }
    Ok(out)
}

/// The place in a file's header of each column of the first file, which has the same ones.
fn same_columns(path: &std::path::Path, text: &TextFiles, names: &[Arc<str>], own: &[Arc<str>]) -> Result<Vec<usize>> {
    let first = text.path(0).display();
    let differs = |rule: String| Err(Error::line(path, 1, "the header ", rule));
    if let Some(other) = own.iter().find(|name| !names.contains(name)) {
        return differs(format!("has the column {}, and that of {first} has not", quote(other)));
    }
    let mut places = Vec::with_capacity(names.len());
    for name in names {
        match own.iter().position(|n| n == name) {
            Some(place) => places.push(place),
            None => return differs(format!("lacks the column {} of {first}", quote(name))),
        }
    }
    Ok(places)
}

/// The value of a cell; `None` if it is not of this type.
fn value(kind: ColumnType, cell: &str) -> Option<Value> {
    Some(match kind {
        ColumnType::Text => Value::Text(cell.into()),
        _ if cell.is_empty() => Value::Null,
        ColumnType::Integer => Value::Int(cell.parse().ok()?),
        ColumnType::Number => Value::Float(cell.parse::<f64>().ok().filter(|x| x.is_finite())?),
    })
}

impl Inner {
    /// The file of a row, and its row there.
    fn at(&self, row: u64) -> (&File, usize, u64) {
        let number = self.files.partition_point(|f| f.first <= row).saturating_sub(1);
        (&self.files[number], number, row - self.files[number].first)
    }

    fn len(&self) -> u64 {
        self.files.last().map_or(0, |f| f.first + f.index.len())
    }
}

impl Table {
    /// The record of a file's row.
    fn record(&self, file: &File, row: u64, text: &[u8]) -> Result<Record> {
        let changed = || {
            let error =
                Error::malformed(&file.path, format!("row {row}"), "differs from what it was when it was opened");
            error.hint("write a new file beside it, and start the run again with that")
        };
        self.inner.rows.one(text, |cells| {
            let mut record = Record { fields: Vec::with_capacity(self.columns.len()) };
            for column in &*self.columns {
                let cell = cells.get(file.places[*column]).ok_or_else(changed)?;
                let value = value(self.inner.types[*column], cell).ok_or_else(changed)?;
                record.fields.push((self.inner.names[*column].clone(), value));
            }
            Ok(record)
        })
    }
}

impl Dataset for Table {
    fn len(&self) -> u64 {
        self.inner.len()
    }

    fn get(&self, index: u64) -> Result<Record> {
        let (file, number, row) = self.inner.at(index % self.len());
        let (start, end) = file.index.range(row);
        let mut bytes = vec![0; end.saturating_sub(start) as usize];
        self.inner.text.read_at(number, start, &mut bytes)?;
        self.record(file, row, &bytes)
    }

    fn get_many(&self, indices: &[u64]) -> Result<Vec<Record>> {
        let (mut records, mut bytes, mut rest) = (Vec::with_capacity(indices.len()), Vec::new(), indices);
        while let Some(index) = rest.first() {
            // Rows that follow one another in a file are read together.
            let (file, number, row) = self.inner.at(index % self.len());
            let (start, end) = file.index.range(row);
            let mut ends = vec![end];
            for (next, k) in rest.iter().skip(1).zip(1..) {
                let (_, end) = file.index.range(row + k);
                if *next != index + k || row + k >= file.index.len() || end - start > TOGETHER {
                    break;
                }
                ends.push(end);
            }
            bytes.resize(ends.last().map_or(0, |end| end.saturating_sub(start)) as usize, 0);
            self.inner.text.read_at(number, start, &mut bytes)?;
            let mut from = start;
            for (end, k) in ends.iter().zip(0..) {
                let text = bytes.get((from - start) as usize..(end - start) as usize).unwrap_or_default();
                records.push(self.record(file, row + k, text)?);
                from = *end;
            }
            rest = rest.get(ends.len()..).unwrap_or_default();
        }
        Ok(records)
    }

    fn origins(&self, index: u64) -> Result<Vec<Origin>> {
        let (file, number, row) = self.inner.at(index % self.len());
        let line = file.index.line(&self.inner.text, number, row)?;
        Ok(vec![Origin { file: file.path.clone(), row, line: Some(line), sub: 0, rewritten: false }])
    }

    fn fingerprint(&self) -> Fingerprint {
        let types: Vec<u8> = self.inner.types.iter().map(|t| *t as u8).collect();
        let names: Vec<&[u8]> = self.names().map(str::as_bytes).collect();
        let own: [&[u8]; 3] = [&self.inner.fingerprint, &[self.inner.rows.delimiter()], &types];
        let stage = if self.inner.skipped.is_some() { "table/1 skip" } else { "table/1" };
        hash::stage(stage, &[&own[..], &names[..]].concat(), &[])
    }

    fn project(&self, fields: &[Arc<str>]) -> Option<Arc<dyn Dataset>> {
        let has = |column: &&usize| self.inner.names.get(**column).is_some_and(|name| fields.contains(name));
        let columns: Arc<[usize]> = self.columns.iter().filter(has).copied().collect();
        Some(Arc::new(Table { columns, ..self.clone() }))
    }
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
