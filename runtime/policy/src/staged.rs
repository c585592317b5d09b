//! Writes a file beside its target and renames it at the end: whole or not at all.
//!
//! The temporary file is made through the handle of the directory, flushed to the disk, renamed over the target, and the
//! directory is flushed too: after a crash there is the old file or the new one. Dropped before [`Staged::commit`], it leaves
//! nothing. What is there and is no regular file (a link, FIFO, device, directory) is never replaced.

use crate::directory::sync;
use crate::error::{Error, Result};
use crate::opened::{kind_of, name_of};
use rustix::fd::OwnedFd;
use rustix::fs::{Access, AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A file being written.
#[derive(Debug)]
pub struct Staged {
    path: PathBuf,
    out: Out,
}

#[derive(Debug)]
enum Out {
    File(Box<Temporary>),
    /// Nothing may be written: bytes are counted and dropped.
    Nothing {
        at: u64,
        len: u64,
    },
}

#[derive(Debug)]
struct Temporary {
    dir: Arc<OwnedFd>,
    name: OsString,
    temp: OsString,
    file: File,
    renamed: bool,
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.renamed {
            let _ = rustix::fs::unlinkat(&self.dir, &self.temp, AtFlags::empty());
        }
    }
}

const NEW: OFlags =
    OFlags::WRONLY.union(OFlags::CREATE).union(OFlags::EXCL).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

impl Staged {
    /// Begins `name` in `dir`; `shown` is the path for messages.
    pub(crate) fn begin(dir: Arc<OwnedFd>, name: &OsStr, shown: &Path) -> Result<Staged> {
        Staged::check(&dir, name, shown)?;
        loop {
            let temp = OsString::from(format!(".perilune-{:016x}.tmp", RandomState::new().hash_one(name)));
            // As readable as any other file of its owner.
            match rustix::fs::openat(&dir, &temp, NEW, Mode::from_raw_mode(0o666)) {
                Err(Errno::EXIST) => {}
                Err(e) => return Err(Error::io(shown, "create a temporary file beside", e)),
                Ok(fd) => {
                    let (name, file) = (name.to_os_string(), File::from(fd));
                    let out = Out::File(Box::new(Temporary { dir, name, temp, file, renamed: false }));
                    return Ok(Staged { path: shown.to_path_buf(), out });
                }
            }
        }
    }

    /// [`Staged::begin`] whose temporary file is `.NAME.new`; one that a killed writer left is removed.
    pub(crate) fn begin_as(dir: Arc<OwnedFd>, name: &OsStr, shown: &Path) -> Result<Staged> {
        Staged::check(&dir, name, shown)?;
        let temp = OsString::from(format!(".{}.new", name.display()));
        let failed = |e| Error::io(shown, "write", e);
        match rustix::fs::unlinkat(&dir, &temp, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(e) => return Err(failed(e)),
        }
        let fd = rustix::fs::openat(&dir, &temp, NEW, Mode::from_raw_mode(0o666)).map_err(failed)?;
        let (name, file) = (name.to_os_string(), File::from(fd));
        let out = Out::File(Box::new(Temporary { dir, name, temp, file, renamed: false }));
        Ok(Staged { path: shown.to_path_buf(), out })
    }

    /// Checks all that [`Staged::begin`] does and writes nothing.
    pub(crate) fn nothing(dir: &OwnedFd, name: &OsStr, shown: &Path) -> Result<Staged> {
        Staged::check(dir, name, shown)?;
        rustix::fs::accessat(dir, ".", Access::WRITE_OK | Access::EXEC_OK, AtFlags::empty())
            .map_err(|e| Error::io(shown, "create a temporary file beside", e))?;
        Ok(Staged { path: shown.to_path_buf(), out: Out::Nothing { at: 0, len: 0 } })
    }

    pub(crate) fn check(dir: &OwnedFd, name: &OsStr, shown: &Path) -> Result<()> {
        let mut parts = Path::new(name).components();
        let plain = matches!(parts.next(), Some(std::path::Component::Normal(part)) if part == name);
        if !plain || parts.next().is_some() {
            return Err(Error::Name { path: shown.to_path_buf(), rule: "has no file name at its end".into() });
        }
        match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).map(|stat| kind_of(&stat)) {
            Ok(FileType::RegularFile) | Err(Errno::NOENT) => Ok(()),
            Ok(other) => Err(Error::NotRegular { path: shown.to_path_buf(), found: name_of(other) }),
            Err(e) => Err(Error::io(shown, "write", e)),
        }
    }

    /// The path of the target as it was asked for.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Puts the file in the place of its target. Without this nothing changes.
    ///
    /// # Errors
    /// The disk is full, or a link or special file has come to stand at the target meanwhile.
    pub fn commit(self) -> Result<()> {
        let Out::File(mut new) = self.out else { return Ok(()) };
        let path = self.path;
        new.file.sync_all().map_err(|e| Error::io(&path, "flush to the disk", e))?;
        Staged::check(&new.dir, &new.name, &path)?;
        rustix::fs::renameat(&new.dir, &new.temp, &new.dir, &new.name)
            .map_err(|e| Error::io(&path, "put in place", e))?;
        new.renamed = true;
        sync(&new.dir).map_err(|e| Error::io(&path, "flush the directory of", e))
    }
}

impl Write for Staged {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.out {
            Out::File(new) => new.file.write(bytes),
            Out::Nothing { at, len } => {
                *at += bytes.len() as u64;
                *len = (*len).max(*at);
                Ok(bytes.len())
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.out {
            Out::File(new) => new.file.flush(),
            Out::Nothing { .. } => Ok(()),
        }
    }
}

impl Seek for Staged {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        match &mut self.out {
            Out::File(new) => new.file.seek(to),
            Out::Nothing { at, len } => {
                let found = match to {
                    SeekFrom::Start(n) => Some(n),
                    SeekFrom::End(n) => len.checked_add_signed(n),
                    SeekFrom::Current(n) => at.checked_add_signed(n),
                };
                *at = found.ok_or(io::ErrorKind::InvalidInput)?;
                Ok(*at)
            }
        }
    }
}
