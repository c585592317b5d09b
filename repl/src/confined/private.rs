//! Makes the folder of one confined process, in the user's cache: a cache of its own that ends with it, and the downloads that it was
//! given.
//!
//! ```text
//! confined/PID-N/cache     written by the child: kernels it compiled, files it unpacked
//! confined/PID-N/temp      TMPDIR of the child
//! confined/PID-N/data      read by the child: links to the downloads that it asked for
//! confined/PID-N/probe     closed to the child: what the probe of files attempts to open
//! confined/PID-N/lock      held by the supervisor; folders without a holder are removed
//! ```
//!
//! A kernel that a confined process compiled is never read by another process: it may have been planted.

use crate::failure::{Failure, disk};
use perilune_core::cache_folder::cache_folder;
use std::fs::File;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

const LOCK: &str = "lock";

/// The folder; it is removed when this is dropped.
#[derive(Debug)]
pub struct Private {
    path: PathBuf,
    _lock: File,
}

impl Private {
    /// Makes the folder, and removes those of processes that were killed.
    pub fn create() -> Result<Private, Failure> {
        let above = cache_folder().unwrap_or_else(|| std::env::temp_dir().join("perilune")).join("confined");
        let mut builder = std::fs::DirBuilder::new();
        builder.recursive(true).mode(0o700);
        builder.create(&above).map_err(disk("create", &above))?;
        sweep(&above);
        builder.recursive(false);
        for k in 0.. {
            let path = above.join(format!("{}-{k}", std::process::id()));
            match builder.create(&path) {
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists && k < 10_000 => continue,
                made => made.map_err(disk("create", &path))?,
            }
            let lock = path.join(LOCK);
            let lock = File::create(&lock).and_then(|file| file.lock().map(|()| file)).map_err(disk("lock", &lock))?;
            for name in ["cache", "temp", "data"] {
                builder.create(path.join(name)).map_err(disk("create", &path))?;
            }
            let probe = path.join("probe");
            std::fs::write(&probe, "closed\n").map_err(disk("write", &probe))?;
            let path = path.canonicalize().map_err(disk("find", &path))?;
            return Ok(Private { path, _lock: lock });
        }
        Err(Failure::System(format!("{}: no name is free", above.display())))
    }

    pub fn cache(&self) -> PathBuf {
        self.path.join("cache")
    }

    pub fn temp(&self) -> PathBuf {
        self.path.join("temp")
    }

    pub fn data(&self) -> PathBuf {
        self.path.join("data")
    }

    pub fn probe(&self) -> PathBuf {
        self.path.join("probe")
    }

    /// Puts a file of the download cache where the child may read it. The child cannot change it: it is a link in a folder that may only
    /// be read, or a copy where links between the folders are not possible.
    pub fn show(&self, file: &Path) -> std::io::Result<PathBuf> {
        let name = file.file_name().ok_or(std::io::ErrorKind::InvalidInput)?;
        let to = self.data().join(name);
        if !to.exists() && std::fs::hard_link(file, &to).is_err() {
            std::fs::copy(file, &to)?;
        }
        Ok(to)
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Removes the folders whose supervisors have ended.
fn sweep(above: &Path) {
    for entry in std::fs::read_dir(above).into_iter().flatten().flatten() {
        let lock = File::options().append(true).open(entry.path().join(LOCK));
        if lock.is_ok_and(|file| file.try_lock().is_ok()) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}
