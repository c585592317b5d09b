//! Library ops other than float matrix products.

use crate::launch::{Props, Work};
use perilune_core::error::{Error, Result};
use perilune_plan::ir::{Library, Program};

/// The launches of a library call, without its epilogue.
pub fn routine(_: &Program, l: &Library, _: &Props) -> Result<Work> {
    Err(Error::system("cuda", format!("no kernel yet for {}", l.op.name)))
}
