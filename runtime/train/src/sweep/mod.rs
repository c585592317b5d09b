//! Plans sweeps: runs of one recipe over values of its params, and what their results say.
//!
//! A sweep is a directory with `sweep.json`, which is written once, and one run directory for each trial. `axes.rs` parses values
//! and ranges, `plan.rs` makes the trials and stores them, `halving.rs` computes the rungs of successive halving, and
//! `stats.rs` the means with confidence intervals. What has been done is read from the run directories alone, so a sweep that
//! was killed goes on from what is on the disk. This module starts no process.

mod axes;
mod halving;
mod plan;
mod stats;

pub use axes::{Axis, Values};
pub use halving::{Rung, rungs};
pub use plan::{Draws, Plan, SWEEP, SweepDir, Trial};
pub use stats::{Estimate, t_quantile};

/// The param that distinguishes repetitions of one point: results are means over it.
pub const SEED: &str = "seed";
/// The most trials of a sweep. More are a mistake in a range.
pub const MOST_TRIALS: usize = 10_000;
