//! Opens, verifies and unpacks a bundle.
//!
//! [`Bundle::open`] reads the whole file once and believes nothing of it before: the checks, then the archive, whose entries must
//! be the manifest and the files that it lists, in their order, with their lengths and hashes.

use crate::archive;
use crate::checks::{self, damaged};
use crate::error::{Error, Result, io, refused};
use crate::manifest::{self, MANIFEST, Manifest};
use crate::pack::most_unpacked;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// A verified bundle.
#[derive(Debug)]
pub struct Bundle {
    path: PathBuf,
    file: File,
    /// Bytes of the archive, and of the file.
    archive: u64,
    bytes: u64,
    hash: String,
    manifest: Manifest,
}

impl Bundle {
    /// Opens a bundle and verifies all of it.
    ///
    /// # Errors
    /// It cannot be read, is damaged (the error names the first byte that differs), or breaks a rule of the format.
    pub fn open(path: &Path) -> Result<Bundle> {
        let shown = path.display();
        let mut file = perilune_policy::open_named(path)
            .map_err(|e| Error::Usage(format!("cannot open {shown}: {}", e.rule())))?
            .into_file();
        let archive = checks::verify(&mut file, path)?.map_err(|damage| damaged(path, &damage))?;
        let mut hasher = blake3::Hasher::new();
        file.seek(SeekFrom::Start(0)).map_err(io("read", path))?;
        hasher.update_reader(&file).map_err(io("read", path))?;
        let (hash, bytes) = (hasher.finalize().to_hex().to_string(), hasher.count());
        let mut bundle = Bundle { path: path.to_path_buf(), file, archive, bytes, hash, manifest: empty() };
        bundle.manifest = bundle.walk(None, |_, _| Ok(()))?;
        Ok(bundle)
    }

    /// Returns the path by which it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns BLAKE3 of the file, the identity of the bundle.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// Returns the length of the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns the content of one entry of at most `most` bytes.
    ///
    /// # Errors
    /// There is no such entry, it is larger, or the file was changed.
    pub fn read(&self, entry: &str, most: u64) -> Result<Vec<u8>> {
        let known = self.manifest.files.iter().find(|file| file.path == entry);
        let Some(known) = known else { return refused(format!("{}: there is no {entry}", self.path.display())) };
        if known.bytes > most {
            return refused(format!("{}: {entry} has more than {most} bytes", self.path.display()));
        }
        let mut out = Vec::new();
        self.walk(Some(&self.manifest), |name, bytes| {
            if name == entry {
                out.extend_from_slice(bytes);
            }
            Ok(())
        })?;
        Ok(out)
    }

    /// Writes the files whose names `wanted` chooses beneath `dir`, which must be new and nobody else's.
    ///
    /// # Errors
    /// A file cannot be written, or is there already; or the bundle was changed since it was opened.
    pub fn extract(&self, dir: &Path, wanted: &dyn Fn(&str) -> bool) -> Result<()> {
        let mut now: Option<(String, File)> = None;
        // Files without bytes are made here: the walk shows content only.
        for entry in self.manifest.files.iter().filter(|f| wanted(&f.path)) {
            let path = dir.join(&entry.path);
            if let Some(above) = path.parent() {
                std::fs::create_dir_all(above).map_err(io("create", above))?;
            }
            OpenOptions::new().write(true).create_new(true).open(&path).map_err(io("create", &path))?;
        }
        self.walk(Some(&self.manifest), |name, bytes| {
            if !wanted(name) {
                return Ok(());
            }
            let path = dir.join(name);
            if now.as_ref().is_none_or(|(open, _)| open != name) {
                let file = OpenOptions::new().append(true).open(&path).map_err(io("write", &path))?;
                now = Some((name.to_string(), file));
            }
            match &mut now {
                Some((_, file)) => file.write_all(bytes).map_err(io("write", &path)),
                None => Ok(()),
            }
        })?;
        Ok(())
    }

    /// Reads the archive and hands the content of the files out, in parts. Returns the manifest, which must be `known` if it is given.
    fn walk(&self, known: Option<&Manifest>, mut each: impl FnMut(&str, &[u8]) -> Result<()>) -> Result<Manifest> {
        let named = |e: Error| match e {
            Error::Refused(rule) => Error::Refused(format!("{}: {rule}", self.path.display())),
            e => e,
        };
        let mut file = &self.file;
        file.seek(SeekFrom::Start(0)).map_err(io("read", &self.path))?;
        let mut reader = archive::Reader::new(file.take(self.archive), most_unpacked(self.bytes)).map_err(named)?;
        let mut walk = || -> Result<Manifest> {
            let Some((first, len)) = reader.next()? else { return refused("the archive is empty") };
            if first != MANIFEST || len > manifest::LONGEST {
                return refused(format!("its first entry must be {MANIFEST}, of at most {} bytes", manifest::LONGEST));
            }
            let mut text = Vec::new();
            reader.content(len, |bytes| {
                text.extend_from_slice(bytes);
                Ok(())
            })?;
            let manifest = Manifest::parse(&text)?;
            if known.is_some_and(|known| *known != manifest) {
                return refused("it was changed while it was read");
            }
            for expected in &manifest.files {
                let Some((name, len)) = reader.next()? else { return refused(format!("{} is missing", expected.path)) };
                if (&name, len) != (&expected.path, expected.bytes) {
                    let (path, bytes) = (&expected.path, expected.bytes);
                    return refused(format!(
                        "the entry {name} of {len} bytes is where {MANIFEST} lists {path} of {bytes}"
                    ));
                }
                let mut hasher = blake3::Hasher::new();
                reader.content(len, |bytes| {
                    hasher.update(bytes);
                    each(&name, bytes)
                })?;
                let found = hasher.finalize().to_hex();
                if found.as_str() != expected.blake3 {
                    return refused(format!("{name}: its hash is {found}, and {MANIFEST} lists {}", expected.blake3));
                }
            }
            match reader.next()? {
                None => Ok(manifest),
                Some((name, _)) => refused(format!("{name} is not listed in {MANIFEST}")),
            }
        };
        let manifest = walk().map_err(named)?;
        reader.finish().map_err(named)?;
        Ok(manifest)
    }
}

/// A manifest before it is read.
fn empty() -> Manifest {
    Manifest {
        format: manifest::FORMAT,
        perilune: String::new(),
        stdlib: String::new(),
        name: String::new(),
        license: None,
        recipe: String::new(),
        command: Vec::new(),
        params: Default::default(),
        run: None,
        data: Vec::new(),
        asks: Default::default(),
        files: Vec::new(),
    }
}
