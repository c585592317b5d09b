//! Locks a run directory for a single writer. Readers (`plot`, `ckpt`, `sample`) need no lock.
//!
//! The lock is an advisory lock (flock) on the file `.lock`. The kernel releases it when the process ends in any way, so a
//! killed run never blocks its directory. The text of the file names the owner of the lock, for messages.

use crate::error::{Error, Result, disk};
use crate::run_files::hostname;
use perilune_policy::Directory;
use std::fs::{File, TryLockError};
use std::io::{Read, Write};
use std::sync::Arc;

/// The file that is locked.
pub(crate) const LOCK: &str = ".lock";

/// The lock of a run directory, released when its last clone is dropped.
#[derive(Clone, Debug)]
pub(crate) struct RunLock {
    _file: Arc<File>,
}

impl RunLock {
    /// Locks the run in `dir`; fails if another process writes it.
    pub fn take(dir: &Directory) -> Result<RunLock> {
        let at = dir.path().join(LOCK);
        let mut file = dir.open_or_create(LOCK)?;
        match file.try_lock() {
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
        drop(lock);
        RunLock::take(&dir).expect("free again");
    }
}
