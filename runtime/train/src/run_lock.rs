//! Locks a run directory for a single writer. Readers (`plot`, `ckpt`, `runs`) need no lock.
//!
//! The lock is an advisory lock (flock) on the file `.lock`. The kernel releases it when the process ends in any way, so a
//! killed run never blocks its directory. The text of the file names the owner of the lock, for messages.

use crate::error::{Error, Result, disk};
use crate::run_files::hostname;
use perilune_policy::Directory;
use std::fs::{File, TryLockError};
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The file that is locked.
pub(crate) const LOCK: &str = ".lock";

/// The lock of a run directory, released when its last clone is dropped.
#[derive(Clone, Debug)]
pub(crate) struct RunLock {
    _file: Arc<File>,
}

/// How often, and after what time, a lock that is held is tried again: a reader that asks for it ([`RunLock::is_held`]) holds it for
/// an instant.
const TRIES: usize = 5;
const PAUSE: Duration = Duration::from_millis(10);

impl RunLock {
    /// Returns whether a process writes the run in `dir`; `None` where the file system has no locks.
    pub fn is_held(dir: &Directory) -> Option<bool> {
        let file = match dir.open_unlinked(Path::new(LOCK)) {
            Ok(file) => file.into_file(),
            Err(e) if e.is_not_found() => return Some(false),
            Err(_) => return None,
        };
        // Shared, so that readers do not see each other.
        match file.try_lock_shared() {
            Ok(()) => Some(false),
            Err(TryLockError::WouldBlock) => Some(true),
            Err(TryLockError::Error(_)) => None,
        }
    }

    /// Locks the run in `dir`; fails if another process writes it.
    pub fn take(dir: &Directory) -> Result<RunLock> {
        let at = dir.path().join(LOCK);
        let mut file = dir.open_or_create(LOCK)?;
        let mut locked = file.try_lock();
        for _ in 0..TRIES {
            if !matches!(locked, Err(TryLockError::WouldBlock)) {
                break;
            }
            std::thread::sleep(PAUSE);
            locked = file.try_lock();
        }
        match locked {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                // For the message only.
                let _ = (&mut file).take(200).read_to_string(&mut holder);
                let holder: String = holder.chars().filter(|c| !c.is_control()).collect();
                let holder = if holder.is_empty() { "another process".to_string() } else { holder };
                return Err(Error::Usage(format!(
                    "{}: {holder} is writing this run; wait until it ends, or stop it",
                    dir.path().display()
                )));
            }
            // On a file system without locks the run continues unprotected.
            Err(TryLockError::Error(e)) => tracing::warn!("cannot lock {}: {e}", at.display()),
        }
        let holder = format!("process {} on {}\n", std::process::id(), hostname());
        file.set_len(0).and_then(|()| file.write_all(holder.as_bytes())).map_err(disk("write", &at))?;
        Ok(RunLock { _file: Arc::new(file) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_has_one_writer() {
        let dir = tempfile::tempdir().expect("a directory");
        let dir = Directory::open(dir.path()).expect("opened");
        let lock = RunLock::take(&dir).expect("free");
        let error = RunLock::take(&dir).expect_err("taken").to_string();
        assert!(error.contains(&format!("process {} on ", std::process::id())), "{error}");
        assert_eq!(RunLock::is_held(&dir), Some(true));
        drop(lock);
        assert_eq!(RunLock::is_held(&dir), Some(false));
        RunLock::take(&dir).expect("free again");
    }

    /// A reader that looks at the lock disturbs no writer.
    #[test]
    fn a_reader_does_not_take_the_lock() {
        let dir = tempfile::tempdir().expect("a directory");
        let dir = Directory::open(dir.path()).expect("opened");
        assert_eq!(RunLock::is_held(&dir), Some(false), "no file was made");
        assert!(!dir.has(LOCK).expect("looked"));
        drop(RunLock::take(&dir).expect("free"));
        std::thread::scope(|scope| {
            let looks = scope.spawn(|| (0..2000).all(|_| RunLock::is_held(&dir).is_some()));
            for _ in 0..200 {
                drop(RunLock::take(&dir).expect("taken beside a reader"));
            }
            assert!(looks.join().expect("joined"));
        });
    }
}
