//! Streams the lines of `metrics.jsonl`, and limits what a log can make its readers hold in memory.

use crate::error::{Error, Result, disk};
use crate::run_log::METRICS;
use perilune_policy::Directory;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// The longest line that is read; a step with some thousand metrics has less.
const MAX_LINE: u64 = 16 << 20;
/// The most metrics of a log. A reader has a series or an extent for each.
const MAX_NAMES: usize = 10_000;

/// Calls `each` with the complete lines of the metrics log in `dir`, without their ends. A run without a log has no lines.
///
/// # Errors
/// The log cannot be read, a line has more than 16 MiB, or `each` fails.
pub(crate) fn for_each_line(dir: &Directory, mut each: impl FnMut(&mut Vec<u8>) -> Result<()>) -> Result<()> {
    if !dir.has(METRICS)? {
        return Ok(());
    }
    let path = dir.path().join(METRICS);
    let file = dir.open_unlinked(Path::new(METRICS))?.into_file();
    let (mut from, mut line) = (BufReader::with_capacity(1 << 20, file), Vec::new());
    loop {
        line.clear();
        let read = from.by_ref().take(MAX_LINE).read_until(b'\n', &mut line).map_err(disk("read", &path))?;
        if read as u64 == MAX_LINE {
            return Err(Error::Refused(format!("{}: a line has more than {MAX_LINE} bytes", path.display())));
        }
        // A line without an end is still being written.
        if line.pop() != Some(b'\n') {
            return Ok(());
        }
        each(&mut line)?;
    }
}

/// Returns the metrics of an event and its loss. NaN stands for null, which the log stores for NaN and infinities.
pub(crate) fn values(event: &Value) -> impl Iterator<Item = (&str, f64)> {
    let named = event["metrics"].as_object().into_iter().flatten().map(|(name, value)| (name.as_str(), value));
    let loss = event.get("loss").map(|value| ("loss", value));
    let number = |value: &Value| if value.is_null() { Some(f64::NAN) } else { value.as_f64() };
    named.chain(loss).filter_map(move |(name, value)| Some((name, number(value)?)))
}

/// Checks that a log may have a metric more.
///
/// # Errors
/// It has 10,000 already.
pub(crate) fn check_names(count: usize) -> Result<()> {
    if count < MAX_NAMES {
        return Ok(());
    }
    let rule = format!("{METRICS} has more than {MAX_NAMES} metrics");
    Err(Error::Refused(format!("{rule}\n  hint: log an array with run:log instead of a metric for each element")))
}
