//! Reads ranges of the text of many files by position, whether they are compressed or not.

use super::cache::{Cache, Key, Weight};
use super::frames::{self, FRAME};
use super::unpack::{Frames, Packing, Place, Store};
use crate::error::{Error, Result};
use crate::open_files::{OpenFiles, Stamp};
use perilune_core::Interrupt;
use perilune_policy::{Opened, Opener};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of decompressed frames that a dataset keeps.
const CACHE: usize = 64 << 20;

/// What opening a dataset of files needs.
pub struct Opening<'a> {
    pub opener: Arc<dyn Opener>,
    /// The program's cache folder, for the text of compressed files.
    pub cache: Option<PathBuf>,
    pub interrupt: &'a Interrupt,
    /// Sees every file that is opened.
    pub observe: &'a mut dyn FnMut(&Opened),
}

/// Files whose text is read by position.
pub(super) struct TextFiles {
    open: OpenFiles,
    store: Store,
    /// The frames of a compressed file, by its number.
    frames: Vec<Option<Frames>>,
    cache: Cache<Frame>,
}

struct Frame(Vec<u8>);

impl Weight for Frame {
    fn bytes(&self) -> usize {
        self.0.len()
    }
}

impl TextFiles {
    /// Opens files in this order; decompresses those that are compressed.
    ///
    /// # Errors
    /// A file may not be read or is damaged.
    pub fn new(paths: &[PathBuf], opening: &mut Opening<'_>) -> Result<TextFiles> {
        let mut open = OpenFiles::new(opening.opener.clone());
        let (mut store, mut frames) = (None, Vec::with_capacity(paths.len()));
        for path in paths {
            let file = opening.opener.open(path)?;
            (opening.observe)(&file);
            let number = open.add(file);
            let mut head = vec![0; open.len(number).min(8) as usize];
            open.read_at(number, 0, &mut head)?;
            frames.push(match Packing::of(path, &head)? {
                None => None,
                Some(packing) => {
                    let store = store.get_or_insert_with(|| Store::new(opening.cache.as_deref()));
                    Some(store.frames(&open, number, packing, opening.interrupt)?)
                }
            });
        }
        let store = store.unwrap_or_else(|| Store::new(None));
        Ok(TextFiles { open, store, frames, cache: Cache::new(CACHE) })
    }

    pub fn count(&self) -> usize {
        self.frames.len()
    }

    pub fn path(&self, number: usize) -> &Path {
        self.open.path(number)
    }

    /// Bytes of a file's text.
    pub fn len(&self, number: usize) -> u64 {
        self.frames[number].as_ref().map_or_else(|| self.open.len(number), |frames| frames.table.len)
    }

    /// What a file is now, compressed or not.
    ///
    /// # Errors
    /// The file has changed or vanished since it was opened.
    pub fn stamp(&self, number: usize) -> Result<Stamp> {
        self.open.stamp(number)
    }

    /// Fills `to` with the text of a file from `offset` on.
    ///
    /// # Errors
    /// The file has changed or vanished since it was opened, the text ends before, or reading fails.
    pub fn read_at(&self, number: usize, offset: u64, to: &mut [u8]) -> Result<()> {
        let Some(frames) = &self.frames[number] else { return self.open.read_at(number, offset, to) };
        let (mut at, mut rest) = (offset, to);
        while !rest.is_empty() {
            let unit = (at / FRAME as u64) as usize;
            let frame = self.cache.get(Key { file: number, unit, column: 0 }, || self.frame(number, frames, unit))?;
            let from = frame.0.get((at % FRAME as u64) as usize..).unwrap_or_default();
            let count = from.len().min(rest.len());
            if count == 0 {
                let source = std::io::ErrorKind::UnexpectedEof.into();
                return Err(Error::io(self.path(number), "read", source));
            }
            let (now, later) = rest.split_at_mut(count);
            now.copy_from_slice(&from[..count]);
            (at, rest) = (at + count as u64, later);
        }
        Ok(())
    }

    fn frame(&self, number: usize, frames: &Frames, unit: usize) -> Result<Frame> {
        let path = self.path(number);
        let Some((start, packed)) = frames.table.frame(unit) else {
            return Err(Error::io(path, "read", std::io::ErrorKind::UnexpectedEof.into()));
        };
        let text = frames.table.text(unit);
        let made = match &frames.place {
            Place::Memory(bytes) => {
                frames::decompress(bytes.get(start as usize..(start + packed) as usize).unwrap_or_default(), text)
            }
            Place::Cache(file) => {
                let mut bytes = vec![0; packed as usize];
                self.store.open.read_at(*file, start, &mut bytes)?;
                frames::decompress(&bytes, text)
            }
        };
        made.map(Frame).map_err(|e| {
            let rule = format!("its text in the cache folder is damaged ({})", super::columnar::plain(&e));
            let cached = match &frames.place {
                Place::Cache(file) => format!("records/{} in the cache folder", self.store.open.path(*file).display()),
                Place::Memory(_) => "the run, and start it again".into(),
            };
            Error::malformed(path, format!("frame {unit}"), rule).hint(format!("delete {cached}; it is made again"))
        })
    }
}
