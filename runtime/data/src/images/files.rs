//! Stores the files of a set of images with their labels: those of a folder of classes or of a list.

use super::labels::Labels;
use crate::error::Result;
use perilune_policy::{FileList, Opened, Opener};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The images of a folder or a list at the time it was opened. Only paths and labels are in memory.
#[derive(Debug)]
pub struct ImageFiles {
    /// By which the images are opened when they are needed, on any thread.
    pub(super) opener: Arc<dyn Opener>,
    /// The folder from which the names of the files are counted in the record of a run.
    pub(super) root: PathBuf,
    pub(super) folders: Vec<PathBuf>,
    /// The number of the folder, and the path within it.
    pub(super) files: Vec<(u32, Box<Path>)>,
    pub(super) labels: Vec<Labels>,
}

impl ImageFiles {
    /// Returns the number of images.
    pub fn len(&self) -> usize {
        self.files.len()
    }

    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// The folder of all images, as far as they have one.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The columns of labels: `y` of a folder, those that the recipe names of a list.
    pub fn labels(&self) -> &[Labels] {
        &self.labels
    }

    /// Returns the file of image `i`.
    pub fn path(&self, i: usize) -> PathBuf {
        let (folder, path) = &self.files[i];
        self.folders[*folder as usize].join(path)
    }

    /// Opens the file of image `i`.
    pub fn open_image(&self, i: usize) -> Result<Opened> {
        Ok(self.opener.open(&self.path(i))?)
    }
}

impl FileList for ImageFiles {
    fn count(&self) -> usize {
        self.len()
    }

    fn file(&self, i: usize) -> (PathBuf, PathBuf) {
        let at = self.path(i);
        (at.strip_prefix(&self.root).unwrap_or(&at).to_path_buf(), at)
    }
}
