//! Reads Arrow IPC files and streams as records.
//!
//! A record batch is the unit: the first record that is read of it reads the batch, and the asked columns of it stay in memory with
//! those of other batches up to a bound (`cache`).

use super::arrow_messages::{self, Block, Messages};
use super::cache::{Cache, Key, Weight};
use super::columnar::{self, by_unit, plain};
use super::numbered::{Numbered, One};
use super::text_files::Opening;
use super::{MAX_UNIT, arrow_value};
use crate::error::{Error, Result, quote};
use crate::expansion;
use crate::records::{Dataset, Fingerprint, Origin, Record, hash};
use arrow_array::{ArrayRef, RecordBatch};
use arrow_buffer::{Buffer, MutableBuffer};
use arrow_ipc::CompressionType;
use arrow_ipc::reader::{read_dictionary, read_record_batch};
use perilune_core::foreign_panic;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of record batches that a dataset keeps.
const CACHE: usize = 512 << 20;
/// Bytes of dictionaries that it keeps.
const DICTIONARIES: usize = 256 << 20;

/// The rows of Arrow files, with some of their columns.
#[derive(Clone)]
pub struct Arrow {
    inner: Arc<Inner>,
    /// The columns of a record, by their numbers in `Inner::names`.
    columns: Arc<[usize]>,
    /// The number of this list of columns among those that share the cache.
    view: usize,
}

struct Inner {
    files: Numbered<Index>,
    names: Vec<Arc<str>>,
    batches: Cache<Decoded>,
    dictionaries: Cache<Dictionaries>,
    views: Mutex<Vec<Arc<[usize]>>>,
}

struct Index {
    messages: Messages,
    roots: Vec<Option<usize>>,
}

/// The asked columns of a record batch.
struct Decoded {
    batch: RecordBatch,
    bytes: usize,
}

struct Dictionaries {
    by_id: HashMap<i64, ArrayRef>,
    bytes: usize,
}

impl Weight for Decoded {
    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Weight for Dictionaries {
    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Arrow {
    /// Opens files in this order. Records have these columns, in this order; by default all of the first
    /// file's.
    ///
    /// # Errors
    /// A file may not be read or is no Arrow file or stream, or lacks a column.
    pub fn open(paths: &[PathBuf], columns: Option<&[String]>, opening: Opening<'_>) -> Result<Arrow> {
        let mut names: Vec<Arc<str>> = Vec::new();
        let files = Numbered::new(paths, "arrow/1", opening, |open, number| {
            let path = open.path(number);
            let indexed = foreign_panic::catch(|| arrow_messages::index(open, number));
            let messages = indexed
                .ok_or_else(|| Error::malformed(path, "file", "cannot be decoded (it violates the format)"))
                .and_then(|messages| messages)?;
            let fields = messages.schema.fields().iter();
            let own: Vec<Arc<str>> = fields.map(|field| Arc::from(field.name().as_str())).collect();
            columnar::distinct(path, &own)?;
            if number == 0 {
                names = own.clone();
            }
            let rows = messages.starts.last().copied().unwrap_or(0);
            Ok((rows, Index { messages, roots: columnar::places(&names, &own) }))
        })?;
        let columns = columnar::choose(&files, &names, columns, |index: &Index| &index.roots)?;
        let (batches, dictionaries) = (Cache::new(CACHE), Cache::new(DICTIONARIES));
        let views = Mutex::new(vec![columns.clone()]);
        Ok(Arrow { inner: Arc::new(Inner { files, names, batches, dictionaries, views }), columns, view: 0 })
    }

    /// The names of the columns of its records.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.columns.iter().filter_map(|column| self.inner.names.get(*column)).map(|name| &**name)
    }

    /// The records of rows of one batch, in this order.
    fn rows(&self, file: usize, number: usize, rows: &[usize]) -> Result<Vec<Record>> {
        let one = &self.inner.files.files[file];
        let key = Key { file, unit: number, column: self.view };
        let decoded = self
            .inner
            .batches
            .get(key, || self.inner.guarded(one, number, || self.inner.batch(file, number, &self.columns)))?;
        let mut records = vec![Record { fields: Vec::with_capacity(self.columns.len()) }; rows.len()];
        for (place, column) in self.columns.iter().enumerate() {
            let name = &self.inner.names[*column];
            for (record, row) in records.iter_mut().zip(rows) {
                let value = arrow_value::value(decoded.batch.column(place), *row).map_err(|rule| {
                    let row = one.index.messages.starts[number] + *row as u64;
                    Error::malformed(
                        &one.path,
                        format!("record batch {number}, column {}, row {row}", quote(name)),
                        rule,
                    )
                })?;
                record.fields.push((name.clone(), value));
            }
        }
        Ok(records)
    }
}

impl Inner {
    /// Turns a panic of the decoder, on a file that violates the format in a way that it does not expect, into an error.
    fn guarded<T>(&self, one: &One<Index>, batch: usize, decode: impl FnOnce() -> Result<T>) -> Result<T> {
        foreign_panic::catch(decode).unwrap_or_else(|| {
            let place = format!("record batch {batch}");
            Err(Error::malformed(&one.path, place, "cannot be decoded (it violates the format)"))
        })
    }

    fn batch(&self, file: usize, number: usize, columns: &[usize]) -> Result<Decoded> {
        let one = &self.files.files[file];
        let Messages { schema, version, batches, starts, force, .. } = &one.index.messages;
        let dictionaries = self.dictionaries(file, force[number])?;
        let projection: Vec<usize> =
            columns.iter().filter_map(|column| one.index.roots.get(*column).copied().flatten()).collect();
        let block = batches[number];
        let place = || format!("record batch {number}");
        let wrong = |rule: String| Error::malformed(&one.path, place(), rule);
        let metadata = arrow_messages::metadata(&self.files.open, file, block)?;
        let message = arrow_ipc::root_as_message(&metadata).map_err(|e| wrong(plain(&e)))?;
        let header = message.header_as_record_batch().ok_or_else(|| wrong("is no record batch".into()))?;
        let body = self.body(file, block, &place)?;
        let bytes = self.checked(one, &header, &body, &place)?;
        let batch = read_record_batch(&body, header, schema.clone(), &dictionaries.by_id, Some(&projection), version)
            .map_err(|e| wrong(format!("cannot be decoded ({})", plain(&e))))?;
        if batch.num_rows() as u64 != starts[number + 1] - starts[number] || batch.num_columns() != columns.len() {
            return Err(wrong("has changed since it was opened".into()));
        }
        Ok(Decoded { batch, bytes })
    }

    /// Decodes the dictionaries that are in force at some batches.
    fn dictionaries(&self, file: usize, force: usize) -> Result<Arc<Dictionaries>> {
        let one = &self.files.files[file];
        let Messages { schema, version, dictionaries, in_force, .. } = &one.index.messages;
        self.dictionaries.get(Key { file, unit: force, column: 0 }, || {
            let mut out = Dictionaries { by_id: HashMap::new(), bytes: 0 };
            for number in &in_force[force] {
                let place = || format!("dictionary {number}");
                let wrong = |rule: String| Error::malformed(&one.path, place(), rule);
                let block = dictionaries[*number];
                let metadata = arrow_messages::metadata(&self.files.open, file, block)?;
                let message = arrow_ipc::root_as_message(&metadata).map_err(|e| wrong(plain(&e)))?;
                let header = message.header_as_dictionary_batch().ok_or_else(|| wrong("is no dictionary".into()))?;
                let body = self.body(file, block, &place)?;
                let data = header.data().ok_or_else(|| wrong("has no data".into()))?;
                out.bytes += self.checked(one, &data, &body, &place)?;
                if out.bytes as u64 > MAX_UNIT {
                    return Err(too_large(one, &place(), out.bytes as u64));
                }
                read_dictionary(&body, header, schema, &mut out.by_id, version)
                    .map_err(|e| wrong(format!("cannot be decoded ({})", plain(&e))))?;
            }
            Ok(out)
        })
    }

    /// Reads the body of a message into aligned memory.
    fn body(&self, file: usize, block: Block, place: &dyn Fn() -> String) -> Result<Buffer> {
        let one = &self.files.files[file];
        if block.body > MAX_UNIT {
            return Err(too_large(one, &place(), block.body));
        }
        let mut body = MutableBuffer::from_len_zeroed(block.body as usize);
        self.files.open.read_at(file, block.offset + block.metadata, body.as_slice_mut())?;
        Ok(body.into())
    }

    /// Checks that the buffers of a batch are within its body, and the sizes that compressed ones say they have. Returns the bytes that the
    /// batch takes.
    fn checked(
        &self,
        one: &One<Index>,
        batch: &arrow_ipc::RecordBatch<'_>,
        body: &Buffer,
        place: &dyn Fn() -> String,
    ) -> Result<usize> {
        let codec = batch.compression().map(|compression| compression.codec());
        let mut bytes = body.len() as u64;
        for buffer in batch.buffers().iter().flat_map(|list| list.iter()) {
            let range = usize::try_from(buffer.offset()).ok().zip(usize::try_from(buffer.length()).ok());
            let range = range.and_then(|(from, length)| body.get(from..from.checked_add(length)?));
            let Some(range) = range else {
                let rule =
                    format!("has a buffer of {} bytes at {}, outside its data", buffer.length(), buffer.offset());
                return Err(Error::malformed(&one.path, place(), rule));
            };
            let Some((codec, (head, packed))) = codec.zip(range.split_first_chunk::<8>()) else { continue };
            // -1 says that the buffer is not compressed.
            let declared = u64::try_from(i64::from_le_bytes(*head)).unwrap_or(0);
            let most = match codec {
                CompressionType::ZSTD => expansion::zstd(packed),
                _ => expansion::lz4(packed.len() as u64),
            };
            if declared > most {
                let rule = format!(
                    "has a buffer that declares {declared} bytes; its {} bytes decompress to {most} at most",
                    packed.len()
                );
                return Err(Error::malformed(&one.path, place(), rule));
            }
            bytes = bytes.saturating_add(declared);
        }
        if bytes > MAX_UNIT {
            return Err(too_large(one, &place(), bytes));
        }
        Ok(bytes as usize)
    }
}

fn too_large(one: &One<Index>, place: &str, bytes: u64) -> Error {
    let error = Error::too_large(&one.path, format!("the size of {place} in bytes"), bytes, MAX_UNIT);
    error.hint("write smaller record batches: writer.write_table(table, max_chunksize=1000)")
}

impl Dataset for Arrow {
    fn len(&self) -> u64 {
        self.inner.files.len()
    }

    fn get(&self, index: u64) -> Result<Record> {
        let mut records = self.get_many(&[index])?;
        records.pop().ok_or_else(|| Error::argument("records", "there is no record"))
    }

    /// Reads the rows of a batch together.
    fn get_many(&self, indices: &[u64]) -> Result<Vec<Record>> {
        let places = indices.iter().map(|index| {
            let (file, row) = self.inner.files.at(index % self.len());
            let starts = &self.inner.files.files[file].index.messages.starts;
            let batch = starts.partition_point(|start| *start <= row) - 1;
            (file, batch, (row - starts[batch]) as usize)
        });
        by_unit(&places.collect::<Vec<_>>(), |file, batch, rows| self.rows(file, batch, rows))
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
        hash::stage("arrow/1", &[&[&self.inner.files.fingerprint[..]], &names[..]].concat(), &[])
    }

    fn project(&self, fields: &[Arc<str>]) -> Option<Arc<dyn Dataset>> {
        let has = |column: &&usize| self.inner.names.get(**column).is_some_and(|name| fields.contains(name));
        let columns: Arc<[usize]> = self.columns.iter().filter(has).copied().collect();
        let mut views = self.inner.views.lock().unwrap_or_else(PoisonError::into_inner);
        let view = views.iter().position(|known| *known == columns).unwrap_or_else(|| {
            views.push(columns.clone());
            views.len() - 1
        });
        drop(views);
        Some(Arc::new(Arrow { columns, view, ..self.clone() }))
    }
}
