//! Decodes, crops and scales the images of a folder, as a [`Source`] of batches x (N, 3, P, P) u8, y (N) i64.

use super::crop::Crop;
use super::folder::Folder;
use super::read::{self, Scratch};
use super::resize::{self, Picture};
use crate::error::{Error, Result};
use crate::source::{Column, Sample, Source};
use perilune_core::{DType, Shape};
use std::cell::RefCell;
use std::sync::Arc;

/// A folder and the processing of each image.
pub struct Images {
    folder: Arc<Folder>,
    pixels: usize,
    crop: Crop,
    columns: [Column; 2],
}

impl Images {
    /// Images of `pixels` by `pixels`.
    pub fn new(folder: Arc<Folder>, pixels: usize, crop: Crop) -> Result<Images> {
        crop.check(pixels)?;
        let shape = Shape::new(&[3, pixels, pixels]).map_err(|e| Error::argument("pixels", e.message))?;
        let columns = [Column { dtype: DType::U8, shape }, Column { dtype: DType::I64, shape: Shape::SCALAR }];
        Ok(Images { folder, pixels, crop, columns })
    }
}

impl Source for Images {
    fn rows(&self) -> usize {
        self.folder.len()
    }

    fn columns(&self) -> &[Column] {
        &self.columns
    }

    fn write(&self, sample: Sample, columns: &mut [Vec<u8>]) -> Result<()> {
        thread_local!(static SCRATCH: RefCell<Scratch> = RefCell::default());
        let [x, y] = columns else { return Err(self.broke_down(sample)) };
        let (start, count) = (x.len(), 3 * self.pixels * self.pixels);
        x.resize(start + count, 0);
        // The scratch is cleared before each use, so a decoder that panics leaves nothing in it.
        SCRATCH.with_borrow_mut(|scratch| -> Result<()> {
            let (width, height) = read::read(self.folder.open_image(sample.row)?, scratch)?;
            let (across, down) = self.crop.sides(width, height, self.pixels, sample.index);
            let picture = Picture { width, height, rgb: &scratch.rgb };
            resize::resize(picture, &across, &down, &mut scratch.rows, &mut x[start..]);
            Ok(())
        })?;
        y.extend_from_slice(&i64::from(self.folder.class(sample.row)).to_le_bytes());
        Ok(())
    }

    fn too_large(&self, count: usize) -> Error {
        let p = self.pixels;
        Error::argument("a batch", format!("of {count} images of {p} x {p} does not fit into the host's memory"))
            .hint("a smaller batch, with `accumulate = n` for the same gradients, or fewer pixels")
    }

    fn broke_down(&self, sample: Sample) -> Error {
        Error::malformed(&self.folder.path(sample.row), "image", "the decoder broke down on it")
            .hint("copy or convert the file anew")
    }
}
