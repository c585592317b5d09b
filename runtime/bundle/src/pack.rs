//! Writes a bundle: manifest, entries in the order of their names, checks. The same inputs give the same bytes.

use crate::archive;
use crate::checks;
use crate::error::{Error, Result, io};
use crate::manifest::{FileEntry, MANIFEST, Manifest};
use perilune_policy::Directory;
use std::fs::File;
use std::io::{BufWriter, Cursor, Read, Write};
use std::path::{Path, PathBuf};

/// The content of an entry.
#[derive(Clone, Debug)]
pub enum Content {
    Text(Vec<u8>),
    /// A file of the disk.
    File(PathBuf),
}

/// An entry to be packed.
#[derive(Clone, Debug)]
pub struct Item {
    /// The name in the bundle.
    pub name: String,
    pub content: Content,
}

/// What was written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Packed {
    /// BLAKE3 of the file: the identity of the bundle.
    pub hash: String,
    pub bytes: u64,
}

/// A bundle is not larger, unpacked, than this many times its size, or than [`SMALL`].
const RATIO: u64 = 1000;
const SMALL: u64 = 1 << 30;

/// Returns the bytes that a bundle of a size may have, unpacked.
pub(crate) fn most_unpacked(size: u64) -> u64 {
    size.saturating_mul(RATIO).max(SMALL)
}

/// Writes a bundle to `to`, whole or not at all. `manifest.files` is filled in from the items.
///
/// # Errors
/// An item has a forbidden name, cannot be read, or changes while it is packed; or the file cannot be written.
pub fn pack(to: &Path, manifest: &mut Manifest, items: &[Item]) -> Result<Packed> {
    let mut items: Vec<&Item> = items.iter().collect();
    items.sort_by(|a, b| a.name.cmp(&b.name));
    items.dedup_by(|a, b| a.name == b.name);
    manifest.files.clear();
    for item in &items {
        let (bytes, blake3) = hashed(item)?;
        manifest.files.push(FileEntry { path: item.name.clone(), bytes, blake3 });
    }
    let text = manifest.text();
    // What is written can be read: the same rules hold for both.
    Manifest::parse(text.as_bytes()).map_err(|e| Error::Usage(e.to_string()))?;
    let folder = to.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = to.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let staged = |e: perilune_policy::Error| Error::Usage(format!("cannot write {}: {}", to.display(), e.rule()));
    let file = Directory::open(folder).and_then(|dir| dir.create(&name)).map_err(staged)?;
    let counted = Hashing { to: BufWriter::new(file), hasher: blake3::Hasher::new() };
    let mut archive = archive::Writer::new(checks::Writer::new(counted))?;
    archive.append(MANIFEST, text.len() as u64, &mut Cursor::new(text.as_bytes()))?;
    for (item, entry) in items.iter().zip(&manifest.files) {
        let mut from = open(item)?;
        let mut again = blake3::Hasher::new();
        archive.append(&item.name, entry.bytes, &mut Tee { from: &mut from, hasher: &mut again })?;
        if again.finalize().to_hex().as_str() != entry.blake3 {
            return Err(Error::Usage(format!("{}: its content changed while it was packed", item.name)));
        }
    }
    let Hashing { to: file, hasher } = archive.finish()?.finish().map_err(io("write", to))?;
    let (hash, bytes) = (hasher.finalize().to_hex().to_string(), hasher.count());
    if manifest.unpacked() + text.len() as u64 > most_unpacked(bytes) {
        let rule =
            format!("its files have more than {RATIO} times the bytes of the bundle, which readers refuse as a bomb");
        return Err(Error::Usage(format!("{}: {rule}; leave out files that have one value throughout", to.display())));
    }
    let file = file.into_inner().map_err(|e| io("write", to)(e.into_error()))?;
    file.commit().map_err(staged)?;
    Ok(Packed { hash, bytes })
}

/// Opens the content of an item.
fn open(item: &Item) -> Result<Box<dyn Read + '_>> {
    Ok(match &item.content {
        Content::Text(text) => Box::new(Cursor::new(text)),
        Content::File(path) => Box::new(File::open(path).map_err(io("read", path))?),
    })
}

/// Returns the length and the hash of an item.
fn hashed(item: &Item) -> Result<(u64, String)> {
    let mut hasher = blake3::Hasher::new();
    match &item.content {
        Content::Text(text) => drop(hasher.update(text)),
        Content::File(path) => {
            let file = File::open(path).map_err(io("read", path))?;
            hasher.update_reader(file).map_err(io("read", path))?;
        }
    }
    Ok((hasher.count(), hasher.finalize().to_hex().to_string()))
}

struct Tee<'a> {
    from: &'a mut dyn Read,
    hasher: &'a mut blake3::Hasher,
}

impl Read for Tee<'_> {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        let n = self.from.read(to)?;
        self.hasher.update(&to[..n]);
        Ok(n)
    }
}

struct Hashing<W> {
    to: W,
    hasher: blake3::Hasher,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let n = self.to.write(bytes)?;
        self.hasher.update(&bytes[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.to.flush()
    }
}
