//! Creates, renames and deletes entries of a directory by its handle, for directories that the program owns (a run directory).
//!
//! No link is followed: one in place of a directory or file is an error, and one that is deleted is deleted itself. So a name
//! that is replaced by a link while the program works redirects nothing.

use crate::directory::{Directory, LISTED};
use crate::error::{Error, Result};
use crate::opened::{kind_of, name_of, regular};
use crate::resolve::NAME_ONLY;
use crate::staged::Staged;
use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path};
use std::sync::Arc;

const NEW_FILE: OFlags =
    OFlags::RDWR.union(OFlags::CREATE).union(OFlags::EXCL).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// Directories inside each other that [`Directory::remove`] enters, each of which holds a handle.
const MAX_DEPTH: usize = 64;

impl Directory {
    /// Opens the directory `name` of this one; a link is refused.
    pub fn subdirectory(&self, name: &str) -> Result<Directory> {
        let shown = self.path().join(name);
        plain(name, &shown)?;
        let flags = NAME_ONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match rustix::fs::openat(self.fd(), name, flags, Mode::empty()) {
            Ok(fd) => Ok(self.at(fd, &shown)),
            Err(e) => Err(match self.kind(name)? {
                Some(kind) if kind != FileType::Directory => Error::NotDirectory { path: shown, found: name_of(kind) },
                _ => Error::io(&shown, "open", e),
            }),
        }
    }

    /// Creates the directory `name`, which must not exist, and opens it.
    pub fn create_directory(&self, name: &str) -> Result<Directory> {
        let shown = self.path().join(name);
        plain(name, &shown)?;
        let made = rustix::fs::mkdirat(self.fd(), name, Mode::from_raw_mode(0o777));
        made.map_err(|e| Error::io(&shown, "create", e))?;
        self.subdirectory(name)
    }

    /// Opens the directory `name`, and creates it if there is nothing of that name.
    pub fn make_directory(&self, name: &str) -> Result<Directory> {
        match self.create_directory(name) {
            Err(e) if e.is_already_there() => self.subdirectory(name),
            made => made,
        }
    }

    /// Opens the directory `path` beneath this one, and creates what is missing of it.
    pub fn make_directories(&self, path: &Path) -> Result<Directory> {
        let mut at = self.clone();
        for part in path.components() {
            match part {
                Component::CurDir => {}
                Component::Normal(name) if name.to_str().is_some() => {
                    at = at.make_directory(name.to_str().unwrap_or(""))?
                }
                _ => {
                    let rule = "is not a path of plain names".to_string();
                    return Err(Error::Name { path: self.path().join(path), rule });
                }
            }
        }
        Ok(at)
    }

    /// Creates the file `name`, which must not exist, for reading and writing.
    pub fn create_new(&self, name: &str) -> Result<File> {
        let shown = self.path().join(name);
        plain(name, &shown)?;
        let fd = rustix::fs::openat(self.fd(), name, NEW_FILE, Mode::from_raw_mode(0o666));
        fd.map(File::from).map_err(|e| Error::io(&shown, "create", e))
    }

    /// Creates the file `name` in place of a file or link of that name, which is deleted.
    pub fn create_over(&self, name: &str) -> Result<File> {
        let shown = self.path().join(name);
        plain(name, &shown)?;
        match rustix::fs::unlinkat(self.fd(), name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => self.create_new(name),
            Err(e) => Err(Error::io(&shown, "replace", e)),
        }
    }

    /// Opens the file `name` for reading and writing, and creates it if it is not there.
    pub fn open_or_create(&self, name: &str) -> Result<File> {
        let shown = self.path().join(name);
        Staged::check(self.fd(), OsStr::new(name), &shown)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(self.fd(), name, flags, Mode::from_raw_mode(0o666));
        let fd = fd.map_err(|e| Error::io(&shown, "open", e))?;
        regular(&shown, &fd)?;
        Ok(File::from(fd))
    }

    /// Gives the entry `from` the name `to`; a file that has it is replaced.
    pub fn rename(&self, from: &str, to: &str) -> Result<()> {
        let shown = self.path().join(from);
        plain(from, &shown)?;
        plain(to, &self.path().join(to))?;
        rustix::fs::renameat(self.fd(), from, self.fd(), to).map_err(|e| Error::io(&shown, "rename", e))
    }

    /// Deletes the entry `name` with everything in it. Nothing of that name is no error.
    pub fn remove(&self, name: &str) -> Result<()> {
        let shown = self.path().join(name);
        plain(name, &shown)?;
        remove_tree(self.fd(), OsStr::new(name), 0).map_err(|e| Error::io(&shown, "remove", e))
    }

    /// Deletes the directory `name` if it is empty; returns whether it was. Anything else of that name is left alone.
    pub fn remove_empty(&self, name: &str) -> Result<bool> {
        let shown = self.path().join(name);
        plain(name, &shown)?;
        match rustix::fs::unlinkat(self.fd(), name, AtFlags::REMOVEDIR) {
            Ok(()) => Ok(true),
            Err(Errno::NOENT | Errno::NOTEMPTY | Errno::EXIST | Errno::NOTDIR) => Ok(false),
            Err(e) => Err(Error::io(&shown, "remove", e)),
        }
    }

    /// Whether there is an entry of this name, whatever it is.
    pub fn has(&self, name: &str) -> Result<bool> {
        Ok(self.kind(name)?.is_some())
    }

    /// The names in the directory, and whether each is a directory itself or a link, which is not looked at.
    pub fn names(&self) -> Result<Vec<(String, bool)>> {
        let entries = self.entries(Path::new(""), self.path())?.into_iter();
        let may_be_directory = |kind| matches!(kind, FileType::Directory | FileType::Symlink);
        Ok(entries.filter_map(|(name, kind)| Some((name.into_string().ok()?, may_be_directory(kind)))).collect())
    }

    /// Flushes the file `name` to the disk.
    pub fn sync_file(&self, name: &str) -> Result<()> {
        let file = self.open_unlinked(Path::new(name))?.into_file();
        file.sync_all().map_err(|e| Error::io(&self.path().join(name), "flush to the disk", e))
    }

    /// Whether `file` still has this name here, and this directory still has its path.
    ///
    /// A name that cannot be looked up for another reason than its absence (a network that is down) counts as in place.
    pub fn holds(&self, name: &str, file: &File) -> bool {
        let same = |found: rustix::io::Result<rustix::fs::Stat>, id: Option<(u64, u64)>| match (found, id) {
            (Ok(stat), Some(id)) => (stat.st_dev, stat.st_ino) == id,
            (Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP), _) => false,
            _ => true,
        };
        let own = rustix::fs::fstat(self.fd()).ok().map(|s| (s.st_dev, s.st_ino));
        let open = file.metadata().ok().map(|m| (m.dev(), m.ino()));
        same(rustix::fs::stat(self.path()), own)
            && same(rustix::fs::statat(self.fd(), name, AtFlags::SYMLINK_NOFOLLOW), open)
    }

    fn kind(&self, name: &str) -> Result<Option<FileType>> {
        match rustix::fs::statat(self.fd(), name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(kind_of(&stat))),
            Err(Errno::NOENT) => Ok(None),
            Err(e) => Err(Error::io(&self.path().join(name), "open", e)),
        }
    }

    fn at(&self, fd: OwnedFd, shown: &Path) -> Directory {
        self.with(Arc::new(fd), shown)
    }
}

/// One name: no path, no `..`.
fn plain(name: &str, shown: &Path) -> Result<()> {
    let mut parts = Path::new(name).components();
    match (parts.next(), parts.next()) {
        (Some(Component::Normal(part)), None) if part == name => Ok(()),
        _ => Err(Error::Name { path: shown.to_path_buf(), rule: "is not a plain name".into() }),
    }
}

fn remove_tree(dir: &OwnedFd, name: &OsStr, depth: usize) -> rustix::io::Result<()> {
    match rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        // A directory: Linux answers EISDIR, POSIX EPERM.
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(e) => return Err(e),
    }
    if depth == MAX_DEPTH {
        return Err(Errno::NAMETOOLONG);
    }
    let inside = rustix::fs::openat(dir, name, LISTED | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    // Listed before anything is deleted: a deletion may disturb the reading of a directory.
    let mut names: Vec<OsString> = Vec::new();
    for entry in rustix::fs::Dir::read_from(&inside)? {
        let entry = entry?;
        let name: &OsStr = std::os::unix::ffi::OsStrExt::from_bytes(entry.file_name().to_bytes());
        if name != "." && name != ".." {
            names.push(name.to_os_string());
        }
    }
    names.iter().try_for_each(|name| remove_tree(&inside, name, depth + 1))?;
    match rustix::fs::unlinkat(dir, name, AtFlags::REMOVEDIR) {
        Err(Errno::NOENT) => Ok(()),
        removed => removed,
    }
}
