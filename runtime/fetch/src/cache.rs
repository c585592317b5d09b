//! Stores downloaded content by hash, in a folder that all processes of a user share.
//!
//!   data/sha256/HEX          the content, read-only, hashed before it got this name
//!   data/sha256/HEX.from     the address that it came from
//!   data/sha256/HEX.part     a download that has not ended, with its validator in HEX.etag
//!   data/sha256/HEX.lock     held by the process that downloads it

use crate::error::{Error, Result};
use crate::hash::{Algorithm, ContentHash};
use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The folder of downloaded content.
#[derive(Clone, Debug)]
pub struct Cache(PathBuf);

/// Content of the cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cached {
    pub path: PathBuf,
    pub hash: ContentHash,
    pub bytes: u64,
}

/// The files of one download.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    pub part: PathBuf,
    pub etag: PathBuf,
    lock: PathBuf,
}

impl Cache {
    /// A cache in the folder `data` of `root`.
    pub fn at(root: &Path) -> Cache {
        Cache(root.join("data"))
    }

    /// The cache of the user: in `$PERILUNE_CACHE`, or `perilune` in the user's cache folder.
    ///
    /// # Errors
    /// The environment names no folder.
    pub fn of_user() -> Result<Cache> {
        let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let home = || set("HOME").map(|home| home.join(".cache"));
        let root = set("PERILUNE_CACHE").or_else(|| Some(set("XDG_CACHE_HOME").or_else(home)?.join("perilune")));
        let none = || Error::new("there is no cache folder for downloads").hint("set PERILUNE_CACHE to a folder");
        Ok(Cache::at(&root.ok_or_else(none)?))
    }

    /// The folder that `at` was given.
    pub fn root(&self) -> &Path {
        self.0.parent().unwrap_or(&self.0)
    }

    fn folder(&self, algorithm: Algorithm) -> PathBuf {
        self.0.join(algorithm.name())
    }

    /// Finds content.
    pub fn find(&self, hash: &ContentHash) -> Option<Cached> {
        let path = self.folder(hash.algorithm()).join(hash.hex());
        let meta = path.symlink_metadata().ok().filter(|meta| meta.is_file())?;
        Some(Cached { path, hash: hash.clone(), bytes: meta.len() })
    }

    /// All content, sorted by hash, with the address it came from.
    ///
    /// # Errors
    /// The folder cannot be listed.
    pub fn list(&self) -> Result<Vec<(Cached, Option<String>)>> {
        let mut found = Vec::new();
        for algorithm in Algorithm::ALL {
            let folder = self.folder(algorithm);
            let entries = match folder.read_dir() {
                Ok(entries) => entries,
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
                Err(e) => return Err(Error::disk("list", &folder, &e)),
            };
            for entry in entries.flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                let Ok(hash) = ContentHash::parse(&format!("{}:{name}", algorithm.name())) else { continue };
                if let Some(cached) = self.find(&hash) {
                    found.push((cached, std::fs::read_to_string(folder.join(format!("{name}.from"))).ok()));
                }
            }
        }
        found.sort_by_key(|(cached, _)| cached.hash.to_string());
        Ok(found)
    }

    /// Removes content and what is left of its download. Processes that have it open keep it.
    ///
    /// # Errors
    /// There is nothing of this hash, or it cannot be removed.
    pub fn remove(&self, hash: &ContentHash) -> Result<()> {
        let slot = self.slot(hash.algorithm(), hash.hex());
        let path = self.folder(hash.algorithm()).join(hash.hex());
        let mut any = false;
        for path in [path.clone(), path.with_extension("from"), slot.part, slot.etag] {
            match std::fs::remove_file(&path) {
                Ok(()) => any = true,
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                Err(e) => return Err(Error::disk("remove", &path, &e)),
            }
        }
        let none = || {
            Error::new(format!("the cache has nothing of {hash}")).hint("`perilune fetch --list` prints what it has")
        };
        any.then_some(()).ok_or_else(none)
    }

    /// The files of the download of `key`, a hash or the name of an address.
    pub(crate) fn slot(&self, algorithm: Algorithm, key: &str) -> Slot {
        let file = |ending: &str| self.folder(algorithm).join(format!("{key}.{ending}"));
        Slot { part: file("part"), etag: file("etag"), lock: file("lock") }
    }

    /// Locks a download against other processes. `waits` is called if another has it.
    pub(crate) fn lock(&self, slot: &Slot, waits: &mut dyn FnMut() -> Result<()>) -> Result<File> {
        let folder = slot.lock.parent().unwrap_or(&self.0);
        std::fs::create_dir_all(folder).map_err(|e| Error::disk("create", folder, &e))?;
        let file = File::options().create(true).append(true).open(&slot.lock);
        let file = file.map_err(|e| Error::disk("open", &slot.lock, &e))?;
        if file.try_lock().is_err() {
            waits()?;
            file.lock().map_err(|e| Error::disk("lock", &slot.lock, &e))?;
        }
        Ok(file)
    }

    /// Gives a complete and hashed part its name. It is on the disk before it has the name.
    pub(crate) fn publish(&self, slot: &Slot, part: &File, hash: &ContentHash, address: &str) -> Result<Cached> {
        let folder = self.folder(hash.algorithm());
        let path = folder.join(hash.hex());
        part.set_permissions(Permissions::from_mode(0o444)).map_err(|e| Error::disk("protect", &slot.part, &e))?;
        part.sync_all().map_err(|e| Error::disk("write", &slot.part, &e))?;
        std::fs::rename(&slot.part, &path).map_err(|e| Error::disk("rename", &slot.part, &e))?;
        File::open(&folder).and_then(|dir| dir.sync_all()).map_err(|e| Error::disk("write", &folder, &e))?;
        // For `--list` only.
        let _ = std::fs::write(path.with_extension("from"), address);
        let _ = std::fs::remove_file(&slot.etag);
        self.find(hash).ok_or_else(|| Error::new(format!("{} has disappeared", path.display())))
    }

    /// Bytes of the disk that are free for this user; none if the system does not say.
    pub(crate) fn free(&self) -> Option<u64> {
        let disk = rustix::fs::statvfs(&self.0).ok()?;
        disk.f_bavail.checked_mul(disk.f_frsize)
    }
}
