//! Decides how a fused region runs, before any text is emitted: pure functions of the plan and of a GPU's properties.
//!
//! - `region_analysis`: which instructions of a region depend on which reductions, and which stores alias its loads.
//! - `access`: how a layout is addressed: invariant, one element per row, aligned vectors or strided.
//! - `reduction_order`: how rows and columns are partitioned for reductions, which determines the order of additions.
//!
//! The choice of strategy, vector width, threads and shared memory is still made in `emit`, next to the text.

pub mod access;
pub mod reduction_order;
pub mod region_analysis;
