//! From regions to CUDA text.

use crate::launch::{Props, Work};
use perilune_core::error::{Error, Result};
use perilune_plan::ir::{Program, Region};

/// The launches of regions with one body: one region, or the many of a `Kernel::Multi`.
pub fn regions(_: &Program, regions: &[Region], _: &Props) -> Result<Work> {
    Err(Error::system("cuda", format!("no code is generated yet for {} regions", regions.len())))
}
