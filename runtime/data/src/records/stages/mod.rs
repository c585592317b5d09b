//! Implements the stages of a pipeline: datasets over datasets.
//!
//! A stage that looks at the records (a filter, a sort) reads those of one epoch once, in parallel, when it is made ([`scan`]), and keeps
//! the rows that it found. So it needs the same rows in every epoch. Behind a shuffle it is applied to what is shuffled, and the
//! result is shuffled: [`commute`].

mod augment;
mod bins;
mod cached;
mod combine;
mod fields;
mod function;
mod group;
mod mix;
mod mix_schedule;
mod order;
mod pack;
mod pseudo;
mod rewrite;
mod rows;
mod scan;

pub use augment::{Augment, Rewrites};
pub use bins::TooLong;
pub use cached::Cached;
pub use combine::{Concat, Interleave, Zip};
pub use fields::Fields;
pub use function::{FlatMap, Map};
pub use group::{group, join};
pub use mix::Mix;
pub use order::{Bucket, Range, Repeat, Shuffle, Windows};
pub use pack::{IGNORED, PackOptions, pack};
pub use pseudo::{Pseudo, PseudoLabel};
pub use rewrite::Rewritten;
pub use rows::{Rows, digest, filter, part, sample, sort, unique, without};
pub use scan::Scan;

use super::{Dataset, Origin};
use crate::error::{Error, Result};
use std::sync::Arc;

/// Applies a stage that needs the same rows in every epoch. Of a shuffle it is applied to the dataset beneath.
///
/// # Errors
/// The order differs between epochs for another reason.
pub fn commute(
    what: &str,
    upstream: &Arc<dyn Dataset>,
    stage: impl FnOnce(Arc<dyn Dataset>) -> Result<Arc<dyn Dataset>>,
) -> Result<Arc<dyn Dataset>> {
    if !upstream.varies() {
        return stage(upstream.clone());
    }
    match upstream.unshuffled() {
        Some((inner, seed)) => Ok(Arc::new(Shuffle::new(stage(inner)?, seed))),
        None => Err(Error::argument(what, "needs the same records in every epoch, and here they differ")
            .hint(format!("call {what} before the stages that mix, augment, or take from a shuffle"))),
    }
}

/// The epoch of an index of the stream, and the place in it.
fn place(index: u64, len: u64) -> (u64, u64) {
    (index / len.max(1), index % len.max(1))
}

/// The index of the first record of an epoch. Epochs that no run reaches repeat earlier ones.
fn first(epoch: u64, len: u64) -> u64 {
    const MOST: u64 = 1 << 62;
    epoch % (MOST / len.max(1)).max(1) * len
}

/// Adds where a record is from to the error of a function.
pub fn located(dataset: &dyn Dataset, index: u64, error: Error) -> Error {
    if !matches!(error, Error::Function { .. }) {
        return error;
    }
    let origin = dataset.origins(index).ok().and_then(|o| o.into_iter().next());
    error.of_record(&origin.map_or_else(|| format!("record {index}"), |o: Origin| o.to_string()))
}

#[cfg(test)]
mod tests;
