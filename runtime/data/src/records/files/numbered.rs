//! Opens the files of one dataset, hashes their contents, and numbers their rows in one sequence.

use super::text_files::Opening;
use crate::error::{Error, Result};
use crate::open_files::OpenFiles;
use crate::records::Fingerprint;
use perilune_core::Interrupt;
use std::path::PathBuf;
use std::sync::Arc;

/// Bytes that are hashed at a time.
const PIECE: u64 = 4 << 20;
/// Files above this size are hashed by their size, their end and samples, as the record of a run does.
const WHOLE: u64 = 16 << 30;
const SAMPLES: u64 = 64;
const SAMPLE: u64 = 1 << 20;

/// Files with rows, each with an index of its own.
pub(crate) struct Numbered<T> {
    pub open: Arc<OpenFiles>,
    pub files: Vec<One<T>>,
    pub fingerprint: Fingerprint,
}

pub(crate) struct One<T> {
    pub path: Arc<PathBuf>,
    /// The number of its first row among those of all files.
    pub first: u64,
    pub rows: u64,
    pub index: T,
}

impl<T> Numbered<T> {
    /// Opens files in this order and indexes each by `index`, which returns its rows too.
    ///
    /// # Errors
    /// A file may not be read or indexed, or there are more than 2^63 rows.
    pub fn new(
        paths: &[PathBuf],
        version: &str,
        opening: Opening<'_>,
        mut index: impl FnMut(&Arc<OpenFiles>, usize) -> Result<(u64, T)>,
    ) -> Result<Numbered<T>> {
        let mut open = OpenFiles::new(opening.opener.clone());
        for path in paths {
            let file = opening.opener.open(path)?;
            (opening.observe)(&file);
            open.add(file);
        }
        let (open, mut files, mut first) = (Arc::new(open), Vec::with_capacity(paths.len()), 0u64);
        let mut hasher = blake3::Hasher::new();
        hasher.update(version.as_bytes());
        for number in 0..paths.len() {
            hash(&open, number, &mut hasher, opening.interrupt)?;
            let path = Arc::new(open.path(number).to_path_buf());
            let (rows, index) = index(&open, number)?;
            files.push(One { path: path.clone(), first, rows, index });
            first = first.checked_add(rows).filter(|all| *all < 1 << 63).ok_or_else(|| {
                Error::malformed(&path, "file", format!("has {rows} rows, and there are {first} before it"))
            })?;
        }
        Ok(Numbered { open, files, fingerprint: *hasher.finalize().as_bytes() })
    }

    /// Rows of all files.
    pub fn len(&self) -> u64 {
        self.files.last().map_or(0, |f| f.first + f.rows)
    }

    /// The number of the file that has a row, and the row's number there.
    pub fn at(&self, row: u64) -> (usize, u64) {
        // Files without rows begin where the next one does.
        let number = self.files.partition_point(|f| f.first <= row).saturating_sub(1);
        (number, row - self.files.get(number).map_or(0, |f| f.first))
    }
}

/// Adds the contents of a file to a hash.
fn hash(open: &OpenFiles, number: usize, hasher: &mut blake3::Hasher, interrupt: &Interrupt) -> Result<()> {
    let len = open.len(number);
    hasher.update(&len.to_le_bytes());
    let mut buffer = vec![0; PIECE.min(len) as usize];
    let mut add = |at: u64, bytes: u64| -> Result<()> {
        if interrupt.is_requested() {
            return Err(Error::Interrupted);
        }
        let piece = &mut buffer[..bytes as usize];
        open.read_at(number, at, piece)?;
        hasher.update(piece);
        Ok(())
    };
    if len > WHOLE {
        (0..SAMPLES).try_for_each(|k| add((len - SAMPLE) / (SAMPLES - 1) * k, SAMPLE))?;
        return add(len - PIECE, PIECE);
    }
    (0..len.div_ceil(PIECE)).try_for_each(|k| add(k * PIECE, PIECE.min(len - k * PIECE)))
}
