//! Watches the files of a recipe for changes. It watches their directories, because editors save by renaming, and a watch on a file
//! ends with a rename.

use crate::cancel::Control;
use crate::error::{Error, Result};
use crate::history::dir_of;
use notify::{RecommendedWatcher, RecursiveMode, Watcher as _};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Saves this close together count once.
const SETTLE: Duration = Duration::from_millis(200);

/// A watch on the files of the recipe.
pub(super) struct FileWatch {
    watcher: RecommendedWatcher,
    /// The files that count, as events name them: others in the same directory may be written at every step.
    names: Arc<Mutex<BTreeSet<PathBuf>>>,
    events: Receiver<()>,
    touched: Option<Instant>,
}

/// Returns the nearest existing directory of a path, with links resolved, and the path as events of a watch on it name it.
fn watched_name(path: &Path) -> Option<(PathBuf, PathBuf)> {
    let (mut dir, mut rest) = (dir_of(path), PathBuf::from(path.file_name()?));
    loop {
        if let Ok(real) = dir.canonicalize() {
            return Some((real.clone(), real.join(rest)));
        }
        rest = Path::new(dir.file_name()?).join(rest);
        dir = dir_of(&dir);
    }
}

impl FileWatch {
    /// Starts a watch on no files. Every save cancels what `control` is building, if that is older.
    pub fn new(control: Control) -> Result<FileWatch> {
        let (send, events) = channel();
        let names: Arc<Mutex<BTreeSet<PathBuf>>> = Arc::default();
        let ours = names.clone();
        let counts = move |path: &PathBuf| {
            let names = ours.lock().unwrap_or_else(PoisonError::into_inner);
            // A directory that contains such a file is watched too.
            names.iter().any(|name| name.starts_with(path))
        };
        let heard = move |event: notify::Result<notify::Event>| {
            // All events except reads count, including lost events.
            let passed = |e: &notify::Event| e.kind.is_access() || !(e.paths.is_empty() || e.paths.iter().any(&counts));
            if !event.as_ref().is_ok_and(passed) {
                let _ = send.send(());
                control.file_saved();
            }
        };
        let watcher = notify::recommended_watcher(heard)
            .map_err(|e| Error::System(format!("--watch: cannot listen for changed files: {e}")))?;
        // Files may have been saved since they were loaded.
        Ok(FileWatch { watcher, names, events, touched: Some(Instant::now()) })
    }

    /// Watches these files instead of those before. Repeating it renews the watch on a directory that was removed and made
    /// again.
    pub fn watch<'f>(&mut self, files: impl Iterator<Item = &'f PathBuf>) -> Result<()> {
        let (mut dirs, mut names) = (BTreeSet::new(), BTreeSet::new());
        for path in files {
            // A write through a link changes its target.
            let target = path.canonicalize().ok();
            for (dir, name) in [Some(path), target.as_ref()].into_iter().flatten().filter_map(|p| watched_name(p)) {
                dirs.insert(dir);
                names.insert(name);
            }
        }
        *self.names.lock().unwrap_or_else(PoisonError::into_inner) = names;
        for dir in dirs {
            let watched = self.watcher.watch(&dir, RecursiveMode::NonRecursive);
            watched.map_err(|e| Error::System(format!("--watch: cannot watch {}: {e}", dir.display())))?;
        }
        Ok(())
    }

    /// Whether a file was touched since the last call of `settled` that returned true.
    pub fn touched(&mut self) -> bool {
        while self.events.try_recv().is_ok() {
            self.touched = Some(Instant::now());
        }
        self.touched.is_some()
    }

    /// Whether a file was touched and no save followed for a moment; `at_once` does not wait.
    pub fn settled(&mut self, at_once: bool) -> bool {
        self.touched();
        let settled = at_once || self.touched.is_some_and(|t| t.elapsed() >= SETTLE);
        if settled {
            self.touched = None;
        }
        settled
    }

    /// Lets the next call of `settled` return true for a touched file.
    pub fn skip_wait(&mut self) {
        if self.touched() {
            self.touched = Instant::now().checked_sub(SETTLE).or(self.touched);
        }
    }
}
