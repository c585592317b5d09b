//! Records which files the readers of data have opened, so that a run can store what it was trained on.

use crate::opened::Opened;
use std::collections::{HashMap, HashSet};
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// Files and folders that are recorded; more are counted.
const MOST: usize = 4096;

/// The files of a folder that a reader lists, in its order.
pub trait FileList: Debug + Send + Sync {
    fn count(&self) -> usize;

    /// The path of file `i` beneath the folder, and the path by which the reader opens it.
    fn file(&self, i: usize) -> (PathBuf, PathBuf);
}

/// What a reader of data opened.
#[derive(Clone, Debug)]
pub enum ReadKind {
    File { len: u64, modified: Option<SystemTime> },
    Folder(Arc<dyn FileList>),
}

/// A file or folder that a reader of data opened.
#[derive(Clone, Debug)]
pub struct DataRead {
    /// As the recipe wrote it.
    pub name: String,
    /// The path by which the policy opens it.
    pub path: PathBuf,
    pub kind: ReadKind,
}

/// The record of one policy.
#[derive(Debug, Default)]
pub(crate) struct Reads {
    list: Mutex<List>,
    /// The length of the list's log, for a caller that looks after every step.
    changes: AtomicU64,
}

#[derive(Debug, Default)]
struct List {
    reads: Vec<DataRead>,
    /// The place in `reads` by name.
    index: HashMap<String, usize>,
    /// The places that were added or replaced, in order.
    log: Vec<usize>,
    /// Files that the recipe has written, absolute: what it reads of them is no data of the run.
    written: HashSet<PathBuf>,
    omitted: u64,
}

impl Reads {
    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn file(&self, name: &str, file: &Opened, absolute: &Path) {
        if !self.lock().written.contains(absolute) {
            let kind = ReadKind::File { len: file.len(), modified: file.modified() };
            self.add(DataRead { name: name.to_string(), path: file.path().to_path_buf(), kind });
        }
    }

    pub fn add(&self, read: DataRead) {
        let mut list = self.lock();
        let known = list.index.get(&read.name).copied();
        let at = known.unwrap_or(list.reads.len());
        match known {
            Some(_) if list.reads[at].is_as(&read) => return,
            Some(_) => list.reads[at] = read,
            None if list.reads.len() == MOST => {
                list.omitted += 1;
                return;
            }
            None => {
                list.index.insert(read.name.clone(), at);
                list.reads.push(read);
            }
        }
        list.log.push(at);
        self.changes.store(list.log.len() as u64, Ordering::Release);
    }

    pub fn written(&self, absolute: PathBuf) {
        self.lock().written.insert(absolute);
    }

    pub fn since(&self, seen: &mut u64) -> Option<Vec<DataRead>> {
        if self.changes.load(Ordering::Acquire) == *seen {
            return None;
        }
        let list = self.lock();
        let from = usize::try_from(*seen).unwrap_or(0).min(list.log.len());
        *seen = list.log.len() as u64;
        Some(list.log[from..].iter().map(|at| list.reads[*at].clone()).collect())
    }

    pub fn omitted(&self) -> u64 {
        self.lock().omitted
    }
}

impl DataRead {
    /// Whether another read found the same file, as far as its size and time tell.
    fn is_as(&self, other: &DataRead) -> bool {
        match (&self.kind, &other.kind) {
            (ReadKind::File { len: a, modified: x }, ReadKind::File { len: b, modified: y }) => (a, x) == (b, y),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Opener, Policy};
    use std::io::Write;

    #[derive(Debug)]
    struct Many;

    impl FileList for Many {
        fn count(&self) -> usize {
            1_000_000
        }

        fn file(&self, i: usize) -> (PathBuf, PathBuf) {
            (format!("{i}.png").into(), format!("/images/{i}.png").into())
        }
    }

    #[test]
    fn reads_are_listed_once_until_they_change() {
        let dir = tempfile::tempdir().expect("a directory");
        let at = dir.path().join("a.csv");
        std::fs::write(&at, "1").expect("written");
        let policy = Policy::builder().allow_read(dir.path()).expect("a root").build();
        let mut seen = 0;
        let mut names =
            || -> Vec<String> { policy.data_reads(&mut seen).into_iter().flatten().map(|read| read.name).collect() };
        let open = || policy.open(&at).expect("opened");
        assert!(names().is_empty());
        policy.record_file("a.csv", &open());
        policy.record_file("a.csv", &open());
        policy.record_folder("images", Path::new("/images"), Arc::new(Many));
        assert_eq!(names(), ["a.csv", "images"]);
        assert!(names().is_empty());
        policy.record_file("a.csv", &open());
        assert!(names().is_empty());
        std::fs::write(&at, "12").expect("written");
        policy.record_file("a.csv", &open());
        assert_eq!(names(), ["a.csv"]);
        // Many single files do not fill the record.
        for i in 0..MOST {
            policy.record_file(&format!("{i}"), &open());
        }
        assert_eq!((names().len(), policy.unrecorded_reads()), (MOST - 2, 2));
    }

    #[test]
    fn what_was_written_is_no_data() {
        let dir = tempfile::tempdir().expect("a directory");
        let builder = Policy::builder().allow_read(dir.path()).and_then(|b| b.allow_write(dir.path()));
        let policy = builder.expect("roots").build();
        let at = dir.path().join("a.npy");
        let mut file = policy.create(&at, &["npy"]).expect("begun");
        file.write_all(b"1").expect("written");
        file.commit().expect("in place");
        policy.record_file("a.npy", &policy.open(&at).expect("opened"));
        assert!(policy.data_reads(&mut 0).is_none());
    }
}
