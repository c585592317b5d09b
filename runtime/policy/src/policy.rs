//! Opens files beneath the root directories of a policy and denies all others.
//!
//! A path is tried beneath every root whose name it begins with. If a link leads out of that root, or the path has another
//! name for the same place, its real path is looked up and tried beneath the roots again. The lookup only chooses a handle:
//! whatever it says, the open is beneath that handle.

use crate::builder::PolicyBuilder;
use crate::directory::{Directory, plain_kind};
use crate::error::{Access, Error, Result};
use crate::fetched::Downloads;
use crate::opened::Opened;
use crate::opener::{Entry, Kind, Opener};
use crate::reads::{DataRead, FileList, ReadKind, Reads};
use crate::staged::Staged;
use rustix::fs::FileType;
use std::ffi::{OsStr, OsString};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// Which files of a root are granted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Which {
    All,
    /// The file of this name directly in it.
    Only(OsString),
    /// The files directly in it whose names end so.
    Ending(&'static str),
    /// The files beneath it, at any depth, whose names end so.
    Beneath(&'static str),
}

/// An open directory, its absolute names, and what of it is granted.
#[derive(Clone, Debug)]
pub(crate) struct Root {
    pub dir: Directory,
    /// As it was named, and without links.
    pub names: Vec<PathBuf>,
    pub which: Which,
}

impl Root {
    /// The rest of an absolute path beneath this root, if the root's names are its beginning and the grant holds it.
    fn rest<'a>(&self, path: &'a Path) -> Option<&'a Path> {
        let rest = self.names.iter().find_map(|name| path.strip_prefix(name).ok())?;
        let granted = match &self.which {
            Which::All => true,
            Which::Only(name) => rest.as_os_str() == name,
            Which::Ending(end) => {
                let mut parts = rest.components();
                let plain = matches!(parts.next(), Some(Component::Normal(_))) && parts.next().is_none();
                plain && rest.as_os_str().as_encoded_bytes().ends_with(end.as_bytes())
            }
            Which::Beneath(end) => rest.as_os_str().as_encoded_bytes().ends_with(end.as_bytes()),
        };
        granted.then_some(rest)
    }
}

#[derive(Clone, Default, Debug)]
pub(crate) struct Roots {
    pub reads: Vec<Root>,
    pub writes: Vec<Root>,
}

/// What a command may open. Shared by `Arc`; every method takes `&self`.
#[derive(Debug)]
pub struct Policy {
    /// The directory that relative paths start from, absolute.
    pub(crate) here: PathBuf,
    /// The current directory, from which the relative paths of [`Policy::grant_directory`] start.
    pub(crate) current: PathBuf,
    pub(crate) roots: RwLock<Arc<Roots>>,
    /// Files that were named to be written, in directories that do not exist: absolute.
    pub(crate) absent: Vec<PathBuf>,
    pub(crate) read_only: bool,
    /// Params open nothing, so a cure names flags alone.
    pub(crate) granted_only: bool,
    pub(crate) kernels: bool,
    pub(crate) holds: AtomicUsize,
    pub(crate) reads: Reads,
    pub(crate) downloads: Downloads,
}

/// While it lives, nothing is written; see [`Policy::hold_writes`].
#[derive(Debug)]
pub struct WriteHold(Arc<Policy>);

impl Drop for WriteHold {
    fn drop(&mut self) {
        self.0.holds.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Policy {
    /// A policy to add roots to.
    pub fn builder() -> PolicyBuilder {
        PolicyBuilder::default()
    }

    /// A policy that opens nothing.
    pub fn closed() -> Arc<Policy> {
        Policy::builder().build()
    }

    /// Lets the directory `dir` be written, and read, from now on: a run directory that has just been made.
    pub fn grant_directory(&self, dir: &Path) -> Result<()> {
        let root = crate::builder::root(&self.current, dir, Which::All, Default::default())?;
        let mut roots = self.roots.write().unwrap_or_else(PoisonError::into_inner);
        let mut now = Roots::clone(&roots);
        now.reads.push(root.clone());
        now.writes.push(root);
        *roots = Arc::new(now);
        Ok(())
    }

    /// From now until the guard is dropped, [`Policy::create`] checks everything and writes nothing. Holds may nest.
    #[must_use]
    pub fn hold_writes(self: &Arc<Policy>) -> WriteHold {
        self.holds.fetch_add(1, Ordering::AcqRel);
        WriteHold(self.clone())
    }

    /// Whether the recipe is open to flags alone: neither its folder nor the current directory is read.
    pub fn is_granted_only(&self) -> bool {
        self.granted_only
    }

    /// Whether the recipe may launch kernels of its own source.
    pub fn allows_kernels(&self) -> bool {
        self.kernels
    }

    /// The directory that relative paths start from, if it is not the current one.
    pub fn elsewhere(&self) -> Option<&Path> {
        Some(self.here.as_path()).filter(|here| *here != self.current)
    }

    /// Records that a reader of data opened a file under the name that the recipe wrote. A file that the recipe itself has
    /// written is left out.
    pub fn record_file(&self, name: &str, file: &Opened) {
        self.reads.file(name, file, &self.absolute(file.path()));
    }

    /// Records that a reader of data listed a folder.
    pub fn record_folder(&self, name: &str, path: &Path, files: Arc<dyn FileList>) {
        self.reads.add(DataRead { name: name.to_string(), path: path.to_path_buf(), kind: ReadKind::Folder(files) });
    }

    /// The files and folders that readers of data have opened since the last call with the same counter, if there are any.
    pub fn data_reads(&self, seen: &mut u64) -> Option<Vec<DataRead>> {
        self.reads.since(seen)
    }

    /// How many opened files are not in the record, which holds 4,096.
    pub fn unrecorded_reads(&self) -> u64 {
        self.reads.omitted()
    }

    /// The size of a file in bytes. It is not opened.
    ///
    /// # Errors
    /// The path is denied or names nothing.
    pub fn size(&self, path: &Path) -> Result<u64> {
        self.beneath(Access::Read, path, |dir, rest| dir.size(rest))
    }

    pub(crate) fn absolute(&self, path: &Path) -> PathBuf {
        self.here.join(path).components().collect()
    }

    /// Begins a file at `path`, whose name must end in one of `endings` (as in `"png"`). Where writes are held (`check`, a
    /// rehearsal) all checks are made, and what is written goes nowhere.
    ///
    /// # Errors
    /// The path is denied, has another ending, names something that is not a regular file, or its directory does not exist.
    pub fn create(&self, path: &Path, endings: &[&str]) -> Result<Staged> {
        let shown = || path.to_path_buf();
        let Some(name) = path.file_name().filter(|_| !path.as_os_str().as_encoded_bytes().ends_with(b"/")) else {
            return Err(Error::Name { path: shown(), rule: "has no file name at its end".into() });
        };
        if !path.extension().is_some_and(|e| endings.iter().any(|known| e == OsStr::new(known))) {
            let endings: Vec<String> = endings.iter().map(|e| format!(".{e}")).collect();
            return Err(Error::Name { path: shown(), rule: format!("is none of {}", endings.join(", ")) });
        }
        let parent = path.parent().unwrap_or(Path::new(""));
        let nothing = self.read_only || self.holds.load(Ordering::Acquire) > 0;
        self.beneath(Access::Write, path, |dir, rest| {
            let above = rest.parent().unwrap_or(Path::new(""));
            let dir = dir.directory(above, parent).map_err(|e| absent(e, path, parent))?;
            match nothing {
                true => Staged::nothing(dir.fd(), name, path),
                false => {
                    let file = dir.create_as(name, path)?;
                    self.reads.written(self.absolute(path));
                    Ok(file)
                }
            }
        })
    }

    /// What `open` makes of the first root that holds `path`.
    fn beneath<T>(&self, access: Access, path: &Path, open: impl Fn(&Directory, &Path) -> Result<T>) -> Result<T> {
        let roots = self.roots.read().unwrap_or_else(PoisonError::into_inner).clone();
        let roots = match access {
            Access::Read => &roots.reads,
            Access::Write => &roots.writes,
        };
        let absolute = self.absolute(path);
        if let (Access::Read, Some(file)) = (access, self.downloads.find(&absolute)) {
            return open(&file.root.dir, &file.rest);
        }
        let attempt = |path: &Path| {
            let mut found = Attempt::Nowhere;
            for (root, rest) in roots.iter().filter_map(|root| Some((root, root.rest(path)?))) {
                match open(&root.dir, rest) {
                    Ok(out) => return Attempt::Done(out),
                    Err(e) if e.leaves() => found = if let Attempt::Nowhere = found { Attempt::Left } else { found },
                    Err(e) if !matches!(found, Attempt::Failed(_)) => found = Attempt::Failed(e),
                    Err(_) => {}
                }
            }
            found
        };
        let left = match attempt(&absolute) {
            Attempt::Done(out) => return Ok(out),
            Attempt::Failed(e) => return Err(e),
            Attempt::Left => true,
            Attempt::Nowhere => false,
        };
        let real = match access {
            Access::Read => absolute.canonicalize().ok(),
            // The target of a write need not be there.
            Access::Write => absolute.parent().zip(absolute.file_name()).and_then(|(dir, name)| {
                let dir = dir.canonicalize().ok()?;
                Some(dir.join(name))
            }),
        };
        match real.as_deref().map(attempt) {
            Some(Attempt::Done(out)) => return Ok(out),
            Some(Attempt::Failed(e)) => return Err(e),
            _ => {}
        }
        if access == Access::Write && self.absent.contains(&absolute) {
            return Err(no_folder(path, path.parent().unwrap_or(Path::new(""))));
        }
        // By `..` alone a path leaves a root by its own words.
        let left = left && roots.iter().any(|root| root.rest(&without_parents(&absolute)).is_some());
        // The cure names the place that a link of a root leads to. Of other paths it repeats what was asked.
        let place = Some(&absolute).filter(|_| left).and_then(|path| place_of(path));
        // A flag is read in the current directory.
        let asked = || if self.elsewhere().is_some() { absolute.clone() } else { path.to_path_buf() };
        let place = place.unwrap_or_else(asked);
        let directory = match place.parent() {
            Some(p) if p.as_os_str().is_empty() => PathBuf::from("."),
            Some(p) => p.to_path_buf(),
            None => place,
        };
        let params = !self.granted_only;
        Err(Error::Denied { path: path.to_path_buf(), access, left, directory, params })
    }

    /// Opens a directory that may be read, with everything in it; a link beneath the root of a grant is followed, one out of it is denied.
    ///
    /// # Errors
    /// The path is denied, or names no directory.
    pub fn directory(&self, path: &Path) -> Result<Directory> {
        self.beneath(Access::Read, path, |dir, rest| dir.directory(rest, path)).map_err(|e| self.itself(e, path))
    }

    /// What `path` names, links followed.
    ///
    /// # Errors
    /// The path is denied or names nothing.
    pub fn kind(&self, path: &Path) -> Result<Kind> {
        self.beneath(Access::Read, path, |dir, rest| dir.target(rest)).map_err(|e| self.itself(e, path))
    }

    /// The cure for a directory names the directory.
    fn itself(&self, error: Error, dir: &Path) -> Error {
        match error {
            Error::Denied { path, access, left: false, params, .. } => {
                let directory = if self.elsewhere().is_some() { self.absolute(dir) } else { dir.to_path_buf() };
                Error::Denied { path, access, left: false, directory, params }
            }
            e => e,
        }
    }

    fn kind_of_link(&self, path: &Path) -> Kind {
        match self.kind(path) {
            Ok(kind) => kind,
            Err(Error::Denied { .. }) => Kind::Outside,
            Err(_) => Kind::Other,
        }
    }
}

enum Attempt<T> {
    Done(T),
    Failed(Error),
    Left,
    Nowhere,
}

/// Where a path leads, without a look at whether it is there: its last links read, the directory above without links.
fn place_of(path: &Path) -> Option<PathBuf> {
    const MOST: usize = 8;
    let mut path = path.to_path_buf();
    for _ in 0..MOST {
        let (dir, name) = (path.parent()?.canonicalize().ok()?, path.file_name()?);
        let full = dir.join(name);
        match full.read_link() {
            Ok(target) => path = dir.join(target),
            Err(_) => return Some(full),
        }
    }
    None
}

/// The path with every `..` taken as the opposite of the name before it, for messages only: links are not looked at.
fn without_parents(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(out.pop()),
            part => out.push(part),
        }
    }
    out
}

/// That the directory of a target does not exist is an error of the target.
fn absent(error: Error, path: &Path, parent: &Path) -> Error {
    if error.is_not_found() { no_folder(path, parent) } else { error }
}

fn no_folder(path: &Path, parent: &Path) -> Error {
    let rule = format!("cannot be written: there is no folder {}; create it first", parent.display());
    Error::Name { path: path.to_path_buf(), rule }
}

/// Relative paths start from the directory that was current when the policy was made.
impl Opener for Policy {
    fn open(&self, path: &Path) -> Result<Opened> {
        self.beneath(Access::Read, path, |dir, rest| dir.file(rest, path))
    }

    fn list(&self, dir: &Path) -> Result<Vec<Entry>> {
        let entries = self.beneath(Access::Read, dir, |root, rest| root.entries(rest, dir));
        let entries = entries.map_err(|e| self.itself(e, dir))?;
        let entry = |(name, kind)| {
            let kind = match kind {
                FileType::Symlink => self.kind_of_link(&dir.join(&name)),
                kind => plain_kind(kind),
            };
            Entry { name, kind }
        };
        Ok(entries.into_iter().map(entry).collect())
    }
}
