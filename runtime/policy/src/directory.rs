//! Holds a directory open and opens, lists and creates files beneath it.

use crate::error::{Error, Result};
use crate::opened::{Opened, kind_of};
use crate::opener::{Entry, Kind, Opener};
use crate::resolve::{Links, NAME_ONLY, Resolution, open_beneath};
use crate::staged::Staged;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use std::ffi::OsStr;
use std::fs::File;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A directory by its handle. It stays the same directory when it is renamed or another takes its name.
#[derive(Clone, Debug)]
pub struct Directory {
    fd: Arc<OwnedFd>,
    path: PathBuf,
    how: Resolution,
}

pub(crate) const LISTED: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NONBLOCK);

impl Directory {
    /// Opens a directory that the program or the command line names; links are followed.
    pub fn open(path: &Path) -> Result<Directory> {
        Directory::resolving(path, Resolution::Auto)
    }

    /// [`Directory::open`] whose paths are resolved in a given way.
    pub fn resolving(path: &Path, how: Resolution) -> Result<Directory> {
        let flags = NAME_ONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| Error::io(path, "open", e))?;
        Ok(Directory { fd: Arc::new(fd), path: path.to_path_buf(), how })
    }

    /// [`Directory::open`] that refuses a link as the last part of the path.
    pub fn open_itself(path: &Path) -> Result<Directory> {
        let flags = NAME_ONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        // A slash at the end would follow a link.
        let bare: PathBuf = path.components().collect();
        match rustix::fs::open(&bare, flags, Mode::empty()) {
            Ok(fd) => Ok(Directory { fd: Arc::new(fd), path: bare, how: Resolution::Auto }),
            Err(_) if bare.is_symlink() => Err(Error::NotRegular { path: bare, found: "a link" }),
            Err(e) => Err(Error::io(&bare, "open", e)),
        }
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn fd(&self) -> &Arc<OwnedFd> {
        &self.fd
    }

    /// Another directory whose paths are resolved like this one's.
    pub(crate) fn with(&self, fd: Arc<OwnedFd>, shown: &Path) -> Directory {
        Directory { fd, path: shown.to_path_buf(), how: self.how }
    }

    fn shown(&self, rest: &Path) -> PathBuf {
        if rest.as_os_str().is_empty() { self.path.clone() } else { self.path.join(rest) }
    }

    /// Opens the directory `rest` beneath this one.
    pub(crate) fn directory(&self, rest: &Path, shown: &Path) -> Result<Directory> {
        let flags = NAME_ONLY | OFlags::DIRECTORY;
        let fd = open_beneath(self.fd.as_fd(), rest, flags, Links::Follow, self.how);
        let fd = fd.map_err(|e| Error::io(shown, "open", e))?;
        Ok(Directory { fd: Arc::new(fd), path: shown.to_path_buf(), how: self.how })
    }

    pub(crate) fn file(&self, rest: &Path, shown: &Path) -> Result<Opened> {
        Opened::beneath(self.fd.as_fd(), rest, shown, Links::Follow, self.how)
    }

    /// Opens the file `rest` beneath this directory; a link anywhere in `rest` is refused.
    pub fn open_unlinked(&self, rest: &Path) -> Result<Opened> {
        Opened::beneath(self.fd.as_fd(), rest, &self.shown(rest), Links::Refuse, self.how)
    }

    /// Names and kinds of what `rest` holds, links as links.
    pub(crate) fn entries(&self, rest: &Path, shown: &Path) -> Result<Vec<(std::ffi::OsString, FileType)>> {
        let failed = |e| Error::io(shown, "list", e);
        let fd = open_beneath(self.fd.as_fd(), rest, LISTED, Links::Follow, self.how).map_err(failed)?;
        let mut out = Vec::new();
        for entry in rustix::fs::Dir::read_from(&fd).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes()).to_os_string();
            if name == "." || name == ".." {
                continue;
            }
            let kind = match entry.file_type() {
                FileType::Unknown => rustix::fs::statat(&fd, &name, AtFlags::SYMLINK_NOFOLLOW)
                    .map_or(FileType::Unknown, |stat| kind_of(&stat)),
                kind => kind,
            };
            out.push((name, kind));
        }
        Ok(out)
    }

    /// What a link beneath this directory leads to.
    pub(crate) fn target(&self, rest: &Path) -> Result<Kind> {
        let fd = open_beneath(self.fd.as_fd(), rest, NAME_ONLY, Links::Follow, self.how);
        let fd = fd.map_err(|e| Error::io(&self.shown(rest), "open", e))?;
        let stat = rustix::fs::fstat(&fd).map_err(|e| Error::io(&self.shown(rest), "open", e))?;
        Ok(plain_kind(kind_of(&stat)))
    }

    /// The size of the file `rest` beneath this directory, which is not opened.
    pub(crate) fn size(&self, rest: &Path) -> Result<u64> {
        let failed = |e| Error::io(&self.shown(rest), "open", e);
        let fd = open_beneath(self.fd.as_fd(), rest, NAME_ONLY, Links::Follow, self.how).map_err(failed)?;
        let stat = rustix::fs::fstat(&fd).map_err(failed)?;
        Ok(u64::try_from(stat.st_size).unwrap_or(0))
    }

    /// Begins a file `name` in this directory; see [`Staged`].
    ///
    /// # Errors
    /// `name` is not a plain file name, or what is there is not a regular file.
    pub fn create(&self, name: &str) -> Result<Staged> {
        self.create_as(OsStr::new(name), &self.shown(Path::new(name)))
    }

    pub(crate) fn create_as(&self, name: &OsStr, shown: &Path) -> Result<Staged> {
        Staged::begin(self.fd.clone(), name, shown)
    }

    /// Replaces the file `name` by these bytes, whole or not at all. One writer at a time: the new file's own name is fixed, so
    /// that nothing piles up where writers are killed.
    pub fn replace(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let mut file = Staged::begin_as(self.fd.clone(), OsStr::new(name), &self.shown(Path::new(name)))?;
        file.write_all(bytes).map_err(|e| Error::io(file.path(), "write", e))?;
        file.commit()
    }

    /// Opens the file `name` to append to it, and makes it if it is not there; a link is refused.
    pub fn append(&self, name: &str) -> Result<File> {
        let shown = self.shown(Path::new(name));
        Staged::check(&self.fd, OsStr::new(name), &shown)?;
        let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let fd = rustix::fs::openat(&self.fd, name, flags | OFlags::CLOEXEC, Mode::from_raw_mode(0o666));
        let fd = fd.map_err(|e| Error::io(&shown, "write to", e))?;
        crate::opened::regular(&shown, &fd)?;
        Ok(File::from(fd))
    }

    /// The bytes of the disk that has the directory, used or free.
    pub fn disk_size(&self) -> Option<u64> {
        let disk = rustix::fs::fstatvfs(&self.fd).ok()?;
        disk.f_blocks.checked_mul(disk.f_frsize)
    }

    /// Makes what the directory lists survive a power cut.
    pub fn sync(&self) -> Result<()> {
        sync(&self.fd).map_err(|e| Error::io(&self.path, "flush the directory", e))
    }
}

pub(crate) fn sync(dir: &OwnedFd) -> rustix::io::Result<()> {
    rustix::fs::fsync(rustix::fs::openat(dir, ".", LISTED | OFlags::CLOEXEC, Mode::empty())?)
}

pub(crate) fn plain_kind(kind: FileType) -> Kind {
    match kind {
        FileType::RegularFile => Kind::File,
        FileType::Directory => Kind::Directory,
        _ => Kind::Other,
    }
}

/// Paths are relative to the directory.
impl Opener for Directory {
    fn open(&self, path: &Path) -> Result<Opened> {
        self.file(path, &self.shown(path))
    }

    fn list(&self, dir: &Path) -> Result<Vec<Entry>> {
        let entries = self.entries(dir, &self.shown(dir))?.into_iter();
        let entry = |(name, kind): (std::ffi::OsString, FileType)| {
            let kind = match kind {
                FileType::Symlink => match self.target(&dir.join(&name)) {
                    Ok(kind) => kind,
                    Err(e) if e.leaves() => Kind::Outside,
                    Err(_) => Kind::Other,
                },
                kind => plain_kind(kind),
            };
            Entry { name, kind }
        };
        Ok(entries.map(entry).collect())
    }
}
