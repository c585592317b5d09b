//! Decodes, crops and scales images, as a [`Source`] of batches x (N, 3, P, P) u8 and a column for each kind of labels.

use super::crop::Crop;
use super::files::ImageFiles;
use super::read::{self, Scratch};
use super::resize::{self, Picture};
use crate::error::{Error, Result};
use crate::source::{Column, Sample, Source};
use perilune_core::{DType, Shape};
use std::cell::RefCell;
use std::sync::Arc;

/// Images and the processing of each.
pub struct Images {
    files: Arc<ImageFiles>,
    pixels: usize,
    crop: Crop,
    columns: Vec<Column>,
}

impl Images {
    /// Images of `pixels` by `pixels`.
    pub fn new(files: Arc<ImageFiles>, pixels: usize, crop: Crop) -> Result<Images> {
        crop.check(pixels)?;
        let shape = Shape::new(&[3, pixels, pixels]).map_err(|e| Error::argument("pixels", e.message))?;
        let mut columns = vec![Column { dtype: DType::U8, shape }];
        columns.extend(files.labels().iter().map(|labels| labels.column()));
        Ok(Images { files, pixels, crop, columns })
    }
}

impl Source for Images {
    fn rows(&self) -> usize {
        self.files.len()
    }

    fn columns(&self) -> &[Column] {
        &self.columns
    }

    fn write(&self, sample: Sample, columns: &mut [Vec<u8>]) -> Result<()> {
        thread_local!(static SCRATCH: RefCell<Scratch> = RefCell::default());
        let [x, labels @ ..] = columns else { return Err(self.broke_down(sample)) };
        let (start, count) = (x.len(), 3 * self.pixels * self.pixels);
        x.resize(start + count, 0);
        // The scratch is cleared before each use, so a decoder that panics leaves nothing in it.
        SCRATCH.with_borrow_mut(|scratch| -> Result<()> {
            let (width, height) = read::read(self.files.open_image(sample.row)?, scratch)?;
            let (across, down) = self.crop.sides(width, height, self.pixels, sample.index);
            let picture = Picture { width, height, rgb: &scratch.rgb };
            resize::resize(picture, &across, &down, &mut scratch.rows, &mut x[start..]);
            Ok(())
        })?;
        for (column, labels) in labels.iter_mut().zip(self.files.labels()) {
            labels.write(sample.row, column);
        }
        Ok(())
    }

    fn too_large(&self, count: usize) -> Error {
        let p = self.pixels;
        Error::argument("a batch", format!("of {count} images of {p} x {p} does not fit into the host's memory"))
            .hint("a smaller batch, with `accumulate = n` for the same gradients, or fewer pixels")
    }

    fn broke_down(&self, sample: Sample) -> Error {
        Error::malformed(&self.files.path(sample.row), "image", "the decoder broke down on it")
            .hint("copy or convert the file anew")
    }
}
