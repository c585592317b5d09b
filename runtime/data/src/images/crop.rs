//! Computes the crop of a sample: torchvision's RandomResizedCrop for training, its Resize and CenterCrop for
//! evaluation.
//!
//! A random crop is a function of (seed, number of the sample in the stream, size of the image): Philox gives each try four
//! words. So a checkpoint stores no state of it, and any thread may process any sample.

use super::resize::{Side, Span};
use crate::error::{Error, Result};
use crate::sample_order::Stream;
use perilune_core::philox::philox4x32;

/// The method by which an image becomes `pixels` by `pixels`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Crop {
    /// A random part with a `scale` of the area and a `ratio` of width to height from these ranges, scaled to fit.
    Random { seed: u64, scale: (f64, f64), ratio: (f64, f64) },
    /// The shorter side scaled to `resize`, then the center.
    Center { resize: usize },
}

/// The number of attempts at a random crop within the image, before the center is used.
const TRIES: u32 = 10;

impl Crop {
    /// Checks the options for images of `pixels` by `pixels`.
    pub fn check(&self, pixels: usize) -> Result<()> {
        if pixels == 0 || pixels > 1 << 14 {
            return Err(Error::argument("pixels", format!("are {pixels}; they must be from 1 to {}", 1 << 14)));
        }
        match *self {
            Crop::Random { scale: (low, high), .. } if !(low > 0.0 && low <= high && high <= 1.0) => {
                let rule = format!(
                    "is {{ {low}, {high} }}; fractions of the area must be above 0, at most 1, and in ascending order"
                );
                Err(Error::argument("scale", rule).hint("scale = { 0.08, 1 }"))
            }
            Crop::Random { ratio: (low, high), .. } if !(low > 0.0 && low <= high && high.is_finite()) => {
                let rule =
                    format!("is {{ {low}, {high} }}; ratios of width to height must be above 0 and in ascending order");
                Err(Error::argument("ratio", rule).hint("ratio = { 3 / 4, 4 / 3 }"))
            }
            Crop::Center { resize } if resize < pixels || resize > 1 << 15 => {
                let rule = format!("is {resize}; the shorter side must be from pixels = {pixels} to {}", 1 << 15);
                Err(Error::argument("resize", rule))
            }
            _ => Ok(()),
        }
    }

    /// Returns the scaling of both sides of an image, width first, for sample `sample` of the stream.
    pub fn sides(&self, width: usize, height: usize, pixels: usize, sample: u64) -> (Side, Side) {
        match *self {
            Crop::Random { seed, scale, ratio } => {
                let (across, down) = random(width, height, seed, sample, scale, ratio);
                let side = |source| Side { source, size: pixels, wanted: Span { start: 0, len: pixels } };
                (side(across), side(down))
            }
            Crop::Center { resize } => {
                let short = width.min(height);
                let side = |len: usize| {
                    let size = resize * len / short;
                    Side {
                        source: Span { start: 0, len },
                        size,
                        wanted: Span { start: middle(size, pixels), len: pixels },
                    }
                };
                (side(width), side(height))
            }
        }
    }
}

/// Returns the start of the middle `len` of `size`; halves round to even, as in Python.
fn middle(size: usize, len: usize) -> usize {
    let (half, odd) = ((size - len) / 2, (size - len) % 2);
    half + odd * (half % 2)
}

fn random(width: usize, height: usize, seed: u64, sample: u64, scale: (f64, f64), ratio: (f64, f64)) -> (Span, Span) {
    let (w, h) = (width as f64, height as f64);
    // From the libm crate, so that a crop does not depend on the C library.
    let (low, high) = (libm::log(ratio.0), libm::log(ratio.1));
    for attempt in 0..TRIES {
        let counter = [sample as u32, (sample >> 32) as u32, Stream::Crop as u32 | attempt << 8, 0];
        let words = philox4x32(counter, [seed as u32, (seed >> 32) as u32]);
        let between = |word: u32, low: f64, high: f64| low + (high - low) * (f64::from(word) / 4_294_967_296.0);
        let area = w * h * between(words[0], scale.0, scale.1);
        let aspect = libm::exp(between(words[1], low, high));
        let (cut_w, cut_h) = ((area * aspect).sqrt().round_ties_even(), (area / aspect).sqrt().round_ties_even());
        if cut_w >= 1.0 && cut_h >= 1.0 && cut_w <= w && cut_h <= h {
            let (cut_w, cut_h) = (cut_w as usize, cut_h as usize);
            let start = |word: u32, room: usize| ((u64::from(word) * (room as u64 + 1)) >> 32) as usize;
            let across = Span { start: start(words[3], width - cut_w), len: cut_w };
            return (across, Span { start: start(words[2], height - cut_h), len: cut_h });
        }
    }
    // The center, cropped to the nearest allowed ratio.
    let (mut cut_w, mut cut_h) = (width, height);
    if w / h < ratio.0 {
        cut_h = ((w / ratio.0).round_ties_even() as usize).clamp(1, height);
    } else if w / h > ratio.1 {
        cut_w = ((h * ratio.1).round_ties_even() as usize).clamp(1, width);
    }
    (Span { start: (width - cut_w) / 2, len: cut_w }, Span { start: (height - cut_h) / 2, len: cut_h })
}
