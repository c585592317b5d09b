//! Reads Parquet files as records.
//!
//! A row group is the unit: the first record that is read of it decodes the asked columns, which stay in memory with those of other
//! groups up to a bound (`cache`). Types are those of the Parquet schema; the Arrow schema that some writers embed is ignored.

use super::arrow_value;
use super::cache::{Cache, Key, Weight};
use super::columnar::{self, by_unit, plain};
use super::numbered::Numbered;
use super::text_files::Opening;
use super::{MAX_UNIT, footer, pages};
use crate::error::{Error, Result, quote};
use crate::open_files::OpenFiles;
use crate::records::{Dataset, Fingerprint, Origin, Record, hash};
use ::parquet::arrow::ProjectionMask;
use ::parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder};
use ::parquet::errors::ParquetError;
use ::parquet::file::metadata::{ParquetMetaDataReader, RowGroupMetaData};
use ::parquet::file::reader::{ChunkReader, Length};
use arrow_array::{Array, ArrayRef};
use bytes::Bytes;
use perilune_core::foreign_panic;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of decoded columns that a dataset keeps.
const CACHE: usize = 512 << 20;
/// Rows that are decoded at a time; the memory they take is compared with the limit after each.
const BATCH: usize = 4_096;
/// The most rows of a row group.
const MAX_ROWS: i64 = 1 << 31;

/// The rows of Parquet files, with some of their columns.
#[derive(Clone)]
pub struct Parquet {
    inner: Arc<Inner>,
    /// The columns of a record, by their numbers in `Inner::names`.
    columns: Arc<[usize]>,
}

struct Inner {
    files: Numbered<Index>,
    /// The top-level columns of the first file.
    names: Vec<Arc<str>>,
    cache: Cache<Column>,
}

/// Where the columns and rows of a file are.
struct Index {
    metadata: ArrowReaderMetadata,
    /// The first row of each row group, and the number of rows.
    starts: Vec<u64>,
    /// The place in the file's schema of each of the dataset's columns; `None` for one that it lacks.
    roots: Vec<Option<usize>>,
}

/// A decoded column of a row group, in pieces.
struct Column {
    pieces: Vec<ArrayRef>,
    /// The first row of each piece.
    starts: Vec<usize>,
    bytes: usize,
}

impl Weight for Column {
    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Parquet {
    /// Opens files in this order. Records have these columns, in this order; by default all of the first
    /// file's.
    ///
    /// # Errors
    /// A file may not be read or is no Parquet file, or lacks a column.
    pub fn open(paths: &[PathBuf], columns: Option<&[String]>, opening: Opening<'_>) -> Result<Parquet> {
        let mut names: Vec<Arc<str>> = Vec::new();
        let files = Numbered::new(paths, "parquet/1", opening, |open, number| {
            let metadata = metadata(open, number)?;
            let (path, own) = (open.path(number), roots(&metadata, open.path(number))?);
            if number == 0 {
                names = own.clone();
            }
            let starts = starts(path, metadata.metadata().row_groups())?;
            let roots = columnar::places(&names, &own);
            Ok((starts.last().copied().unwrap_or(0), Index { metadata, starts, roots }))
        })?;
        let columns = columnar::choose(&files, &names, columns, |index: &Index| &index.roots)?;
        Ok(Parquet { inner: Arc::new(Inner { files, names, cache: Cache::new(CACHE) }), columns })
    }

    /// The names of the columns of its records.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.columns.iter().filter_map(|column| self.inner.names.get(*column)).map(|name| &**name)
    }

    /// The records of rows of one group, in this order.
    fn rows(&self, file: usize, group: usize, rows: &[usize]) -> Result<Vec<Record>> {
        let mut records = vec![Record { fields: Vec::with_capacity(self.columns.len()) }; rows.len()];
        for column in &*self.columns {
            let decoded = self.inner.column(file, group, *column)?;
            for (record, row) in records.iter_mut().zip(rows) {
                let value = decoded.value(*row).map_err(|rule| {
                    let place = self.inner.place(group, *column);
                    let row = self.inner.files.files[file].index.starts[group] + *row as u64;
                    Error::malformed(&self.inner.files.files[file].path, format!("{place}, row {row}"), rule)
                })?;
                record.fields.push((self.inner.names[*column].clone(), value));
            }
        }
        Ok(records)
    }
}

impl Inner {
    fn place(&self, group: usize, column: usize) -> String {
        format!("row group {group}, column {}", quote(&self.names[column]))
    }

    fn column(&self, file: usize, group: usize, column: usize) -> Result<Arc<Column>> {
        self.cache.get(Key { file, unit: group, column }, || {
            let one = &self.files.files[file];
            let wrap = |rule: String| {
                let error = Error::malformed(&one.path, self.place(group, column), rule);
                error.hint("the file is damaged, or uses what this reader lacks; write it again with pyarrow")
            };
            let source = Source { open: self.files.open.clone(), number: file };
            // The decoder may panic on a file that violates the format in a way that it does not expect.
            match foreign_panic::catch(|| decode(source, one, group, column)) {
                Some(Ok(decoded)) => Ok(decoded),
                Some(Err(e)) => Err(own(e).unwrap_or_else(|e| wrap(format!("cannot be decoded ({})", plain(&e))))),
                None => Err(wrap("cannot be decoded (it violates the format)".into())),
            }
        })
    }
}

/// Decodes a column of a row group.
fn decode(
    source: Source,
    file: &super::numbered::One<Index>,
    group: usize,
    column: usize,
) -> std::result::Result<Column, ParquetError> {
    let Index { metadata, starts, roots } = &file.index;
    let root = roots.get(column).copied().flatten().ok_or_else(|| ParquetError::General("no such column".into()))?;
    let rows = (starts[group + 1] - starts[group]) as usize;
    let schema = metadata.parquet_schema();
    let too_large = |bytes: u64| {
        let error = Error::too_large(&file.path, format!("the size of row group {group} in bytes"), bytes, MAX_UNIT);
        external(error.hint("write smaller row groups: pyarrow.parquet.write_table(table, path, row_group_size=10000)"))
    };
    let chunks = metadata.metadata().row_group(group).columns().iter().enumerate();
    let own = chunks.filter(|(leaf, _)| schema.get_column_root_idx(*leaf) == root);
    let own: Vec<_> = own.map(|(_, chunk)| chunk).collect();
    let declared: i64 = own.iter().fold(0, |sum, chunk| sum.saturating_add(chunk.uncompressed_size().max(0)));
    if declared as u64 > MAX_UNIT {
        return Err(too_large(declared as u64));
    }
    for chunk in own {
        let (start, length) = chunk.byte_range();
        if length > MAX_UNIT {
            return Err(too_large(length));
        }
        pages::check(chunk.compression(), length, &|at, size| source.range(start.saturating_add(at), size as usize))?;
    }
    let reader = ParquetRecordBatchReaderBuilder::new_with_metadata(source, metadata.clone())
        .with_projection(ProjectionMask::roots(schema, [root]))
        .with_row_groups(vec![group])
        .with_batch_size(BATCH)
        .build()?;
    let mut out = Column { pieces: Vec::new(), starts: Vec::new(), bytes: 0 };
    let mut found = 0;
    for batch in reader {
        let batch = batch.map_err(|e| match e {
            arrow_schema::ArrowError::ExternalError(inner) => ParquetError::External(inner),
            e => ParquetError::ArrowError(e.to_string()),
        })?;
        let piece = batch.columns().first().ok_or_else(|| ParquetError::General("no column".into()))?;
        out.starts.push(found);
        found += piece.len();
        out.bytes += piece.get_array_memory_size();
        out.pieces.push(piece.clone());
        if out.bytes as u64 > MAX_UNIT {
            return Err(too_large(out.bytes as u64));
        }
    }
    if found != rows {
        return Err(ParquetError::General(format!("{found} rows, where the footer says {rows}")));
    }
    Ok(out)
}

impl Column {
    fn value(&self, row: usize) -> std::result::Result<crate::records::Value, String> {
        let piece = self.starts.partition_point(|start| *start <= row).saturating_sub(1);
        let (Some(array), Some(start)) = (self.pieces.get(piece), self.starts.get(piece)) else {
            return Err("has no rows".into());
        };
        arrow_value::value(array, row - start)
    }
}

/// Reads and checks the footer of a file.
fn metadata(open: &OpenFiles, number: usize) -> Result<ArrowReaderMetadata> {
    let footer = footer::read(open, number)?;
    let parsed = foreign_panic::catch(|| {
        let metadata = ParquetMetaDataReader::decode_metadata(&footer)?;
        let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
        ArrowReaderMetadata::try_new(Arc::new(metadata), options)
    });
    let wrap = |rule: String| {
        let error = Error::malformed(open.path(number), "footer", rule);
        error.hint("the file is damaged, or uses what this reader lacks; write it again with pyarrow")
    };
    match parsed {
        Some(Ok(metadata)) => Ok(metadata),
        Some(Err(e)) => Err(wrap(format!("cannot be decoded ({})", plain(&e)))),
        None => Err(wrap("cannot be decoded (it violates the format)".into())),
    }
}

/// The names of the top-level columns.
fn roots(metadata: &ArrowReaderMetadata, path: &Path) -> Result<Vec<Arc<str>>> {
    let names: Vec<Arc<str>> = metadata.schema().fields().iter().map(|f| Arc::from(f.name().as_str())).collect();
    columnar::distinct(path, &names)?;
    Ok(names)
}

/// The first row of each group, and the number of rows.
fn starts(path: &Path, groups: &[RowGroupMetaData]) -> Result<Vec<u64>> {
    let mut starts = vec![0u64];
    for (k, group) in groups.iter().enumerate() {
        let rows = group.num_rows();
        if !(0..=MAX_ROWS).contains(&rows) {
            let rule = format!("has {rows} rows; a row group has at most {MAX_ROWS}");
            return Err(Error::malformed(path, format!("row group {k}"), rule));
        }
        starts.push(starts[k] + rows as u64);
    }
    Ok(starts)
}

/// An error of this crate that the decoder carries; others are returned.
fn own(error: ParquetError) -> std::result::Result<Error, ParquetError> {
    match error {
        ParquetError::External(inner) => {
            inner.downcast::<Error>().map(|e| *e).or_else(|inner| match inner.downcast::<io::Error>() {
                Ok(e) => from_io(*e).map_err(|e| ParquetError::External(Box::new(e))),
                Err(inner) => Err(ParquetError::External(inner)),
            })
        }
        e => Err(e),
    }
}

fn from_io(error: io::Error) -> std::result::Result<Error, io::Error> {
    match error.get_ref().is_some_and(|inner| inner.is::<Error>()) {
        false => Err(error),
        true => match error.into_inner().map(|inner| inner.downcast::<Error>()) {
            Some(Ok(e)) => Ok(*e),
            _ => Err(io::Error::other("reading fails")),
        },
    }
}

fn external(error: Error) -> ParquetError {
    ParquetError::External(Box::new(error))
}

/// A file that the decoder reads by position.
#[derive(Clone)]
struct Source {
    open: Arc<OpenFiles>,
    number: usize,
}

impl Source {
    fn range(&self, start: u64, length: usize) -> std::result::Result<Vec<u8>, ParquetError> {
        let len = self.open.len(self.number);
        if start.checked_add(length as u64).is_none_or(|end| end > len) {
            return Err(ParquetError::EOF(format!("{length} bytes at {start} are read, and the file has {len}")));
        }
        let mut bytes = vec![0; length];
        self.open.read_at(self.number, start, &mut bytes).map_err(external)?;
        Ok(bytes)
    }
}

impl Length for Source {
    fn len(&self) -> u64 {
        self.open.len(self.number)
    }
}

impl ChunkReader for Source {
    type T = BufReader<From>;

    fn get_read(&self, start: u64) -> std::result::Result<Self::T, ParquetError> {
        Ok(BufReader::with_capacity(1 << 16, From { source: self.clone(), at: start }))
    }

    fn get_bytes(&self, start: u64, length: usize) -> std::result::Result<Bytes, ParquetError> {
        self.range(start, length).map(Bytes::from)
    }
}

/// A file from a position on.
struct From {
    source: Source,
    at: u64,
}

impl Read for From {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let left = Length::len(&self.source).saturating_sub(self.at);
        let count = left.min(to.len() as u64) as usize;
        let Source { open, number } = &self.source;
        open.read_at(*number, self.at, &mut to[..count]).map_err(io::Error::other)?;
        self.at += count as u64;
        Ok(count)
    }
}

impl Dataset for Parquet {
    fn len(&self) -> u64 {
        self.inner.files.len()
    }

    fn get(&self, index: u64) -> Result<Record> {
        let mut records = self.get_many(&[index])?;
        records.pop().ok_or_else(|| Error::argument("records", "there is no record"))
    }

    /// Reads the rows of a group together.
    fn get_many(&self, indices: &[u64]) -> Result<Vec<Record>> {
        let places = indices.iter().map(|index| {
            let (file, row) = self.inner.files.at(index % self.len());
            let starts = &self.inner.files.files[file].index.starts;
            let group = starts.partition_point(|start| *start <= row) - 1;
            (file, group, (row - starts[group]) as usize)
        });
        by_unit(&places.collect::<Vec<_>>(), |file, group, rows| self.rows(file, group, rows))
    }

    fn origins(&self, index: u64) -> Result<Vec<Origin>> {
        let (number, row) = self.inner.files.at(index % self.len());
        Ok(vec![Origin {
            file: self.inner.files.files[number].path.clone(),
            row,
            line: None,
            sub: 0,
            rewritten: false,
        }])
    }

    fn fingerprint(&self) -> Fingerprint {
        let names: Vec<&[u8]> = self.names().map(str::as_bytes).collect();
        hash::stage("parquet/1", &[&[&self.inner.files.fingerprint[..]], &names[..]].concat(), &[])
    }

    fn project(&self, fields: &[Arc<str>]) -> Option<Arc<dyn Dataset>> {
        let has = |column: &&usize| self.inner.names.get(**column).is_some_and(|name| fields.contains(name));
        let columns: Arc<[usize]> = self.columns.iter().filter(has).copied().collect();
        Some(Arc::new(Parquet { columns, ..self.clone() }))
    }
}
