//! Defines the trait that readers of several files open them by.

use crate::error::Result;
use crate::opened::Opened;
use perilune_core::error::did_you_mean;
use std::ffi::OsString;
use std::fmt::Debug;
use std::path::Path;

/// What an entry of a directory is, links followed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    File,
    Directory,
    /// A FIFO, device or socket, or a link that leads nowhere.
    Other,
    /// A link that leads to what may not be read.
    Outside,
}

/// An entry of a directory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    pub name: OsString,
    pub kind: Kind,
}

/// Opens files by path. Readers hold one instead of touching the file system, on threads of their own too.
pub trait Opener: Debug + Send + Sync {
    /// Opens a regular file.
    ///
    /// # Errors
    /// The path is denied, names nothing, or is not a regular file.
    fn open(&self, path: &Path) -> Result<Opened>;

    /// Lists a directory, in no order.
    ///
    /// # Errors
    /// The path is denied or is no directory.
    fn list(&self, dir: &Path) -> Result<Vec<Entry>>;
}

/// Names that are compared for a suggestion; more would take noticeable time.
const COMPARED: usize = 1000;

/// Suggests a file of the same directory whose name is nearly that of `path`; none where the directory may not be listed.
pub fn near(opener: &dyn Opener, path: &Path) -> Option<String> {
    let wanted = path.file_name()?.to_str()?;
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let entries = opener.list(folder).ok()?.into_iter().take(COMPARED);
    let mut names: Vec<String> = entries.filter_map(|e| e.name.into_string().ok()).collect();
    names.sort();
    did_you_mean(wanted, names.iter().map(String::as_str)).map(String::from)
}
