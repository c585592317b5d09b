//! Reads ranges of many files by position, with a bounded number of them open.
//!
//! The files are those of one reader, numbered in its order. Any thread may read. A file that changes, shrinks or vanishes
//! while it is in use is an error that names it: its size and time of modification are compared when it is opened again,
//! and once a second.

use crate::error::{Error, Result};
use perilune_policy::{Opened, Opener};
use std::collections::VecDeque;
use std::fs::{File, Metadata};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Files that one reader keeps open; a process may have 1,024 by default.
const MOST_OPEN: usize = 128;
/// The time after which an open file is compared with what it was at first.
const CHECK_EVERY: Duration = Duration::from_secs(1);

/// Files that are read by position.
#[derive(Debug)]
pub(crate) struct OpenFiles {
    opener: Arc<dyn Opener>,
    files: Vec<Identity>,
    /// The open ones, the last used behind.
    open: Mutex<VecDeque<Open>>,
}

/// What a file was when the reader first opened it.
#[derive(Debug)]
struct Identity {
    path: PathBuf,
    len: u64,
    modified: Option<SystemTime>,
}

/// What tells one state of a file from others, without its content: device, inode, size, and the seconds and nanoseconds of the last
/// change of the content and of the attributes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Stamp([i64; 7]);

impl Stamp {
    fn of(meta: &Metadata) -> Stamp {
        let [dev, ino, len] = [meta.dev(), meta.ino(), meta.size()].map(u64::cast_signed);
        Stamp([dev, ino, len, meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec()])
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.0.iter().flat_map(|n| n.to_le_bytes()).collect()
    }

    /// Whether the last change was that long ago, by the clock of this machine.
    pub(crate) fn is_older_than(&self, time: Duration) -> bool {
        let [.., modified, _, changed, _] = self.0;
        let seconds = u64::try_from(modified.max(changed)).unwrap_or(0);
        // Rounded up.
        let last = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds.saturating_add(1)));
        last.and_then(|last| last.elapsed().ok()).is_some_and(|age| age >= time)
    }
}

#[derive(Debug)]
struct Open {
    number: usize,
    file: Arc<File>,
    checked: Instant,
}

impl OpenFiles {
    pub(crate) fn new(opener: Arc<dyn Opener>) -> OpenFiles {
        OpenFiles { opener, files: Vec::new(), open: Mutex::default() }
    }

    /// Adds a file that is open and returns its number.
    pub(crate) fn add(&mut self, file: Opened) -> usize {
        let path = file.path().to_path_buf();
        self.add_as(file, path)
    }

    /// [`OpenFiles::add`] of a file that the opener knows by another path.
    pub(crate) fn add_as(&mut self, file: Opened, path: PathBuf) -> usize {
        let number = self.files.len();
        self.files.push(Identity { path, len: file.len(), modified: file.modified() });
        let open = Open { number, file: Arc::new(file.into_file()), checked: Instant::now() };
        keep(self.open.get_mut().unwrap_or_else(PoisonError::into_inner), open);
        number
    }

    pub(crate) fn path(&self, number: usize) -> &Path {
        &self.files[number].path
    }

    /// Bytes of a file when it was added.
    pub(crate) fn len(&self, number: usize) -> u64 {
        self.files[number].len
    }

    /// Fills `to` with the bytes of a file from `offset` on.
    ///
    /// # Errors
    /// The file has changed or vanished since it was added, or reading fails.
    pub(crate) fn read_at(&self, number: usize, offset: u64, to: &mut [u8]) -> Result<()> {
        let file = self.file(number)?;
        file.read_exact_at(to, offset).map_err(|e| Error::io(self.path(number), "read", e))
    }

    /// What a file is now.
    ///
    /// # Errors
    /// The file has changed or vanished since it was added.
    pub(crate) fn stamp(&self, number: usize) -> Result<Stamp> {
        let meta = self.file(number)?.metadata().map_err(|e| Error::io(self.path(number), "read", e))?;
        self.compare(number, meta.len(), meta.modified().ok())?;
        Ok(Stamp::of(&meta))
    }

    /// Returns the open file of a number; opens it if needed.
    fn file(&self, number: usize) -> Result<Arc<File>> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let found = open.iter().rposition(|o| o.number == number).and_then(|at| open.remove(at));
        let found = match found {
            Some(known) if now.duration_since(known.checked) < CHECK_EVERY => known,
            Some(known) => {
                let meta = known.file.metadata().map_err(|e| Error::io(self.path(number), "read", e))?;
                self.compare(number, meta.len(), meta.modified().ok())?;
                Open { checked: now, ..known }
            }
            None => {
                let opened = self.opener.open(self.path(number))?;
                self.compare(number, opened.len(), opened.modified())?;
                Open { number, file: Arc::new(opened.into_file()), checked: now }
            }
        };
        let file = found.file.clone();
        keep(&mut open, found);
        Ok(file)
    }

    fn compare(&self, number: usize, len: u64, modified: Option<SystemTime>) -> Result<()> {
        let Identity { path, len: before, modified: then } = &self.files[number];
        if (len, modified) == (*before, *then) {
            return Ok(());
        }
        let rule = match len == *before {
            true => "was written to while it is in use".to_string(),
            false => format!("has {len} bytes, and had {before} when it was opened"),
        };
        let cure = "write a new file beside it, and start the run again with that";
        Err(Error::malformed(path, "file", rule).hint(cure))
    }
}

/// Adds an open file, and closes the one whose last use is longest ago beyond the limit.
fn keep(open: &mut VecDeque<Open>, one: Open) {
    open.push_back(one);
    if open.len() > MOST_OPEN {
        open.pop_front();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use perilune_policy::Policy;

    fn files(count: usize) -> (tempfile::TempDir, OpenFiles) {
        let dir = tempfile::tempdir().expect("a directory");
        let policy = Policy::builder().allow_read(dir.path()).expect("a root").build();
        let mut files = OpenFiles::new(policy.clone());
        for k in 0..count {
            let path = dir.path().join(format!("{k}.bin"));
            std::fs::write(&path, (k as u32).to_le_bytes()).expect("written");
            assert_eq!(files.add(policy.open(&path).expect("opened")), k);
        }
        (dir, files)
    }

    #[test]
    fn more_files_than_may_be_open_are_read() {
        let (_dir, files) = files(3 * MOST_OPEN);
        for k in (0..3 * MOST_OPEN).rev() {
            let mut word = [0; 4];
            files.read_at(k, 0, &mut word).expect("read");
            assert_eq!(u32::from_le_bytes(word), k as u32);
        }
        assert_eq!(files.open.lock().expect("a lock").len(), MOST_OPEN);
    }

    #[test]
    fn a_changed_file_is_named() {
        let (dir, files) = files(MOST_OPEN + 1);
        // Number 0 is closed: it is compared when it is opened again. The last one is open: it is compared later.
        std::fs::write(dir.path().join("0.bin"), [0; 9]).expect("written");
        let error = files.read_at(0, 0, &mut [0; 4]).expect_err("changed").to_string();
        assert!(error.contains("0.bin: file: has 9 bytes, and had 4 when it was opened"), "{error}");
        let last = dir.path().join(format!("{MOST_OPEN}.bin"));
        std::fs::write(&last, [1]).expect("written");
        let error = files.read_at(MOST_OPEN, 0, &mut [0; 4]).expect_err("too short").to_string();
        assert!(error.contains(".bin: cannot read") && error.contains("copy or download it again"), "{error}");
        for open in files.open.lock().expect("a lock").iter_mut() {
            open.checked = Instant::now().checked_sub(CHECK_EVERY).expect("a time");
        }
        let error = files.read_at(MOST_OPEN, 0, &mut [0]).expect_err("changed").to_string();
        assert!(error.contains("has 1 bytes, and had 4"), "{error}");
        std::fs::remove_file(dir.path().join("1.bin")).expect("removed");
        assert!(files.read_at(1, 0, &mut [0; 4]).is_ok(), "an open file may be removed");
    }
}
