//! Builds a policy: collects its root directories from the flags and paths of a command line.

use crate::directory::Directory;
use crate::error::Result;
use crate::fetched::{Downloads, Fetcher, Granted};
use crate::policy::{Policy, Root, Roots, Which};
use crate::reads::Reads;
use crate::resolve::Resolution;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, RwLock};

/// The file name suffix of an index of sharded tensors; the shards are in the same directory.
const INDEX: &str = ".safetensors.index.json";

/// Builds a [`Policy`]. Without calls it grants no access.
#[derive(Debug)]
pub struct PolicyBuilder {
    /// The current directory, from which arguments start.
    here: PathBuf,
    /// The directory from which relative paths of the recipe start.
    base: PathBuf,
    /// The folder of the recipe; relative paths of params are resolved against it too.
    folder: Option<PathBuf>,
    roots: Roots,
    absent: Vec<PathBuf>,
    read_only: bool,
    granted_only: bool,
    kernels: bool,
    how: Resolution,
    fetcher: Option<Arc<dyn Fetcher>>,
    placed: Vec<(PathBuf, Granted)>,
}

impl Default for PolicyBuilder {
    fn default() -> PolicyBuilder {
        // Without a current directory, relative paths are resolved against the root directory.
        let here = std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/"));
        PolicyBuilder {
            base: here.clone(),
            here,
            folder: None,
            roots: Roots::default(),
            absent: Vec::new(),
            read_only: false,
            granted_only: false,
            kernels: true,
            how: Resolution::Auto,
            fetcher: None,
            placed: Vec::new(),
        }
    }
}

impl PolicyBuilder {
    /// Makes relative paths of the recipe start from `dir`, where a recorded run was started. It opens nothing: arguments still
    /// start from the current directory.
    #[must_use]
    pub fn relative_to(mut self, dir: &Path) -> PolicyBuilder {
        self.base = self.here.join(dir).components().collect();
        self
    }

    /// Reads: the folder of a recipe that the command names, and the current directory if the recipe is beneath it.
    #[must_use]
    pub fn recipe(mut self, recipe: &Path) -> PolicyBuilder {
        let folder = folder_of(recipe);
        self.read_if_there(&folder);
        self.folder = Some(folder);
        self.recorded_recipe(recipe)
    }

    /// Reads: the current directory if a recipe that a record names is beneath it. The record itself opens nothing.
    #[must_use]
    pub fn recorded_recipe(mut self, recipe: &Path) -> PolicyBuilder {
        let folder = self.base.join(folder_of(recipe)).canonicalize();
        if let (Ok(folder), Ok(here)) = (folder, self.here.canonicalize())
            && folder.starts_with(here)
        {
            self.read_if_there(Path::new("."));
        }
        self
    }

    /// Reads and writes: the current directory, for a prompt without a recipe.
    #[must_use]
    pub fn current_directory(mut self) -> PolicyBuilder {
        if let Ok(root) = root(&self.here, Path::new("."), Which::All, self.how) {
            self.roots.reads.push(root.clone());
            self.roots.writes.push(root);
        }
        self
    }

    /// Reads and writes the file, and reads the directory, that the value of a param names; a value that names nothing, and a
    /// bare `/` or `..`, grants nothing. A relative value starts from the current directory; what is to be read, from the
    /// folder of the recipe too.
    #[must_use]
    pub fn argument(mut self, value: &str) -> PolicyBuilder {
        let path = Path::new(value);
        let names = path.components().any(|part| matches!(part, Component::Normal(_)));
        if !names || value.contains('\0') {
            return self;
        }
        let beside = self.folder.clone().filter(|_| path.is_relative()).map(|folder| folder.join(path));
        for path in [Some(path.to_path_buf()), beside].into_iter().flatten() {
            self.read_file_or_directory(&path);
        }
        let targets = self.file_roots(path);
        if targets.is_empty() {
            self.absent.push(self.here.join(path).components().collect());
        }
        self.roots.writes.extend(targets);
        self
    }

    /// Reads: everything in a directory, or one file.
    ///
    /// # Errors
    /// There is nothing of that name.
    pub fn allow_read(mut self, path: &Path) -> Result<PolicyBuilder> {
        if self.here.join(path).is_file() {
            self.read_file_or_directory(path);
        } else {
            self.roots.reads.push(root(&self.here, path, Which::All, self.how)?);
        }
        Ok(self)
    }

    /// Writes: everything in a directory.
    ///
    /// # Errors
    /// There is no directory of that name.
    pub fn allow_write(mut self, path: &Path) -> Result<PolicyBuilder> {
        self.roots.writes.push(root(&self.here, path, Which::All, self.how)?);
        Ok(self)
    }

    /// Every write is checked and then goes nowhere.
    #[must_use]
    pub fn read_only(mut self, on: bool) -> PolicyBuilder {
        self.read_only = on;
        self
    }

    /// States that flags alone grant: the caller adds neither the recipe's folder nor params, errors name no other cure, and kernels need
    /// [`PolicyBuilder::allow_kernels`].
    #[must_use]
    pub fn granted_only(mut self) -> PolicyBuilder {
        (self.granted_only, self.kernels) = (true, false);
        self
    }

    /// Whether the recipe may launch kernels of its own source.
    #[must_use]
    pub fn allow_kernels(mut self, on: bool) -> PolicyBuilder {
        self.kernels = on;
        self
    }

    /// Reads: the `.lua` files beneath the folder of a recipe, so that it can require them.
    #[must_use]
    pub fn modules(mut self, recipe: &Path) -> PolicyBuilder {
        self.roots.reads.extend(root(&self.here, &folder_of(recipe), Which::Beneath(".lua"), self.how));
        self
    }

    /// Resolves addresses; without one they are errors.
    #[must_use]
    pub fn fetcher(mut self, fetcher: Arc<dyn Fetcher>) -> PolicyBuilder {
        self.fetcher = Some(fetcher);
        self
    }

    /// Reads: `actual`, a file or a directory with everything in it, where the recipe names `named`: data of a bundle, wherever they
    /// are on this machine. A relative `named` starts where the relative paths of the recipe do, so [`PolicyBuilder::relative_to`]
    /// comes first. Neither `actual` under its own name nor what else has the name is granted.
    ///
    /// # Errors
    /// `actual` is not there.
    pub fn place(mut self, named: &Path, actual: &Path) -> Result<PolicyBuilder> {
        let named: PathBuf = self.base.join(named).components().collect();
        if self.here.join(actual).is_dir() {
            let root = root(&self.here, actual, Which::All, self.how)?;
            self.roots.reads.push(Root { names: vec![named], ..root });
            return Ok(self);
        }
        let (folder, name) = (folder_of(actual), actual.file_name().unwrap_or_default());
        let root = root(&self.here, &folder, Which::Only(name.to_os_string()), self.how)?;
        root.dir.size(Path::new(name))?;
        self.placed.push((named, Granted { root, rest: PathBuf::from(name), content: String::new() }));
        Ok(self)
    }

    /// How roots that are added from now on resolve paths.
    #[must_use]
    pub fn resolution(mut self, how: Resolution) -> PolicyBuilder {
        self.how = how;
        self
    }

    pub fn build(self) -> Arc<Policy> {
        Arc::new(Policy {
            here: self.base,
            current: self.here,
            roots: RwLock::new(Arc::new(self.roots)),
            absent: self.absent,
            read_only: self.read_only,
            granted_only: self.granted_only,
            kernels: self.kernels,
            holds: AtomicUsize::new(0),
            reads: Reads::default(),
            downloads: Downloads::new(self.fetcher, self.placed),
        })
    }

    fn read_if_there(&mut self, dir: &Path) {
        self.roots.reads.extend(root(&self.here, dir, Which::All, self.how));
    }

    fn read_file_or_directory(&mut self, path: &Path) {
        if self.here.join(path).is_dir() {
            self.read_if_there(path);
            return;
        }
        let found = self.file_roots(path);
        if path.as_os_str().as_encoded_bytes().ends_with(INDEX.as_bytes()) {
            let shards = found.iter().map(|root| Root { which: Which::Ending(".safetensors"), ..root.clone() });
            self.roots.reads.extend(shards);
        }
        self.roots.reads.extend(found);
    }

    /// The directory of one file, for that file alone; if the name is a link, where it leads too.
    fn file_roots(&self, path: &Path) -> Vec<Root> {
        let absolute = self.here.join(path);
        let real = absolute.canonicalize().ok().filter(|real| *real != absolute && real.is_file());
        let of = |file: &Path| {
            let (dir, name) = (file.parent()?, file.file_name()?);
            root(&self.here, dir, Which::Only(name.to_os_string()), self.how).ok()
        };
        [Some(absolute), real].into_iter().flatten().filter_map(|file| of(&file)).collect()
    }
}

/// Opens a directory as a root; a relative path starts from `here`.
pub(crate) fn root(here: &Path, dir: &Path, which: Which, how: Resolution) -> Result<Root> {
    let named: PathBuf = here.join(dir).components().collect();
    // The error names the path as it was given.
    let shown = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    let dir = Directory::resolving(&named, how).map_err(|e| match e {
        crate::Error::Io { action, source, .. } => crate::Error::Io { path: shown.to_path_buf(), action, source },
        e => e,
    })?;
    let real = named.canonicalize().ok().filter(|real| *real != named);
    Ok(Root { dir, names: std::iter::once(named).chain(real).collect(), which })
}

fn folder_of(recipe: &Path) -> PathBuf {
    match recipe.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir.to_path_buf(),
        _ => PathBuf::from("."),
    }
}
