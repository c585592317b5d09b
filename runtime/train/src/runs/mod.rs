//! Lists and compares run directories, also of runs that are being written: status, progress, metrics, params that differ.
//!
//! `summary.rs` reads one directory, `metrics.rs` its log, `varying.rs` finds the params in which runs differ,
//! `measured.rs` what they have taken, and `compare.rs` lists all differences of two. Nothing is written, and no lock is kept. A damaged directory is a run with the status
//! [`Status::Damaged`], so that one of them does not hide the others.

mod compare;
mod measured;
mod metrics;
mod summary;
mod varying;

pub use compare::{Comparison, Difference, FileDiff, MetricPair, compare, recipe_diff};
pub use measured::{Measurement, device_hours, watt_hours};
pub use metrics::{At, Extent, Goal, Metrics};
pub use summary::{RunSummary, Status};
pub use varying::{labels, value, varying};

use crate::error::{Error, Result, disk};
use perilune_core::error::did_you_mean;
use std::path::{Path, PathBuf};

/// The directory of runs below the current one.
pub const RUNS: &str = "runs";

/// Lists the runs in directories, each of which is a run or contains runs. The order is that of the directories, then by name.
///
/// # Errors
/// A directory does not exist or cannot be listed.
pub fn list(dirs: &[PathBuf]) -> Result<Vec<RunSummary>> {
    let mut out: Vec<RunSummary> = Vec::new();
    for dir in dirs {
        if let Some(run) = RunSummary::read(dir)? {
            out.push(run);
            continue;
        }
        let entries = std::fs::read_dir(dir).map_err(disk("list the directory", dir))?;
        let mut inside: Vec<PathBuf> = entries.flatten().map(|e| e.path()).filter(|p| p.is_dir()).collect();
        inside.sort();
        for path in inside {
            out.extend(RunSummary::read(&path)?);
        }
    }
    // `runs runs/a` names a run twice.
    let mut seen = std::collections::HashSet::new();
    out.retain(|run| seen.insert(run.dir.canonicalize().unwrap_or_else(|_| run.dir.clone())));
    Ok(out)
}

/// Finds the directory of a run that the command line names: a path, or the name of a directory below `runs/`.
///
/// # Errors
/// There is neither; the error suggests a run with a similar name.
pub fn find(named: &Path) -> Result<PathBuf> {
    if named.is_dir() {
        return Ok(named.to_path_buf());
    }
    let shown = named.display();
    if named.exists() {
        return Err(Error::Usage(format!("{shown} is a file; give the run directory (runs/NAME-DATE-TIME)")));
    }
    let is_name = named.components().count() == 1 && named.is_relative();
    let below = Path::new(RUNS).join(named);
    if is_name && below.is_dir() {
        return Ok(below);
    }
    let parent = if is_name { Path::new(RUNS) } else { named.parent().unwrap_or(Path::new(RUNS)) };
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten().filter(|e| e.path().is_dir());
    let names: Vec<String> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
    let wanted = named.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let near = did_you_mean(&wanted, names.iter().map(String::as_str));
    let near = near.map(|n| format!(". Did you mean {}?", parent.join(n).display())).unwrap_or_default();
    let places = if is_name {
        "neither in the current directory nor below runs/"
    } else {
        "`perilune runs` lists those below runs/"
    };
    Err(Error::Usage(format!("there is no run {shown}: {places}{near}")))
}
