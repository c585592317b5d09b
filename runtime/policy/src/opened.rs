//! Opens one regular file and keeps its path for messages.

use crate::error::{Error, Result};
use crate::resolve::{Links, NAME_ONLY, Resolution, open_beneath};
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::fs::{FileType, Mode, OFlags, Stat};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// An open regular file: its path as it was asked for, its length in bytes and its time of modification.
#[derive(Debug)]
pub struct Opened {
    file: File,
    path: PathBuf,
    len: u64,
    modified: Option<SystemTime>,
}

/// Never waits: not for the writer of a FIFO, not for a terminal.
const READ: OFlags = OFlags::RDONLY.union(OFlags::NONBLOCK).union(OFlags::NOCTTY);

impl Opened {
    /// Opens `rest` beneath `root`; `shown` is the path for messages.
    pub(crate) fn beneath(
        root: BorrowedFd<'_>,
        rest: &Path,
        shown: &Path,
        links: Links,
        how: Resolution,
    ) -> Result<Opened> {
        let failed = |e: rustix::io::Errno| match e {
            rustix::io::Errno::LOOP if links == Links::Refuse => {
                Error::NotRegular { path: shown.to_path_buf(), found: "a link" }
            }
            // A record of a directory names files of that directory.
            rustix::io::Errno::XDEV if links == Links::Refuse => {
                Error::Name { path: shown.to_path_buf(), rule: "leads out of its directory".into() }
            }
            e => Error::io(shown, "open", e),
        };
        // Its kind first, by a handle that opens nothing: an open alone has effects on devices and FIFOs.
        if cfg!(target_os = "linux") {
            let name = open_beneath(root, rest, NAME_ONLY, links, how).map_err(failed)?;
            regular(shown, &name)?;
            own_file_system(shown, &name)?;
        }
        Opened::new(open_beneath(root, rest, READ, links, how).map_err(failed)?, shown)
    }

    fn new(fd: OwnedFd, shown: &Path) -> Result<Opened> {
        let stat = regular(shown, &fd)?;
        let file = File::from(fd);
        let modified = file.metadata().and_then(|m| m.modified()).ok();
        Ok(Opened { file, path: shown.to_path_buf(), len: u64::try_from(stat.st_size).unwrap_or(0), modified })
    }

    /// The path as it was asked for.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes when it was opened.
    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn modified(&self) -> Option<SystemTime> {
        self.modified
    }

    /// The file alone.
    pub fn into_file(self) -> File {
        self.file
    }

    /// Reads the whole file as UTF-8 text of at most `most` bytes.
    pub fn text(mut self, most: u64) -> io::Result<String> {
        let mut text = String::new();
        let limit = self.by_ref().take(most.saturating_add(1)).read_to_string(&mut text)?;
        if limit as u64 > most {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("more than {most} bytes")));
        }
        Ok(text)
    }
}

impl Read for Opened {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.file.read(to)
    }
}

impl Seek for Opened {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}

/// Opens a file that the command line or the prompt names, under no policy: links are followed wherever
/// they lead. Like every open here it refuses what is not a regular file and never waits.
pub fn open_named(path: &Path) -> Result<Opened> {
    let failed = |e| Error::io(path, "open", e);
    let stat = rustix::fs::stat(path).map_err(failed)?;
    check(path, &stat)?;
    Opened::new(rustix::fs::open(path, READ | OFlags::CLOEXEC, Mode::empty()).map_err(failed)?, path)
}

/// The status of an open file; refuses one that is not regular.
pub(crate) fn regular(shown: &Path, fd: &OwnedFd) -> Result<Stat> {
    let stat = rustix::fs::fstat(fd).map_err(|e| Error::io(shown, "open", e))?;
    check(shown, &stat)?;
    Ok(stat)
}

fn check(shown: &Path, stat: &Stat) -> Result<()> {
    match kind_of(stat) {
        FileType::RegularFile => Ok(()),
        other => Err(Error::NotRegular { path: shown.to_path_buf(), found: name_of(other) }),
    }
}

pub(crate) fn kind_of(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

pub(crate) fn name_of(kind: FileType) -> &'static str {
    match kind {
        FileType::Directory => "a directory",
        FileType::Symlink => "a link",
        FileType::Fifo => "a FIFO",
        FileType::Socket => "a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        _ => "not a regular file",
    }
}

/// Refuses the views of the kernel, whose files tell of other processes: a root above them may be `/`.
#[cfg(target_os = "linux")]
fn own_file_system(shown: &Path, fd: &OwnedFd) -> Result<()> {
    const PROC: u32 = 0x9fa0;
    const SYS: u32 = 0x6265_6572;
    match rustix::fs::fstatfs(fd).map(|s| s.f_type as u32) {
        Ok(PROC | SYS) => {
            Err(Error::NotRegular { path: shown.to_path_buf(), found: "a view of the kernel (/proc, /sys)" })
        }
        _ => Ok(()),
    }
}

#[cfg(not(target_os = "linux"))]
fn own_file_system(_: &Path, _: &OwnedFd) -> Result<()> {
    Ok(())
}
