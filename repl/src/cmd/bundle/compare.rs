//! Compares the results of a bundle's run with those that the bundle records.

use crate::console_out::say;
use crate::failure::Failure;
use crate::terminal::{json as json_text, one_line};
use perilune_bundle::Manifest;
use perilune_train::bundled::{ENVELOPE, RUN};
use perilune_train::envelope::Deviation;
use perilune_train::{Envelope, MetricsLog, Verdict, record_of};
use serde_json::Value;
use std::collections::HashSet;
use std::path::Path;

/// Bytes of an envelope, and of a log that is read whatever the run was.
const LONGEST: u64 = 64 << 20;

/// Compares the run in `dir`, which has ended, with the recorded one, in the folder to which the bundle was unpacked.
///
/// # Errors
/// The results differ by more than the envelope of the bundle allows, or differ and it has none.
pub fn results(manifest: &Manifest, folder: &Path, dir: &Path, json: bool) -> Result<(), Failure> {
    let Some(recorded) = &manifest.run else { return Ok(()) };
    let record = record_of(dir)?;
    let found = record.get("weights").and_then(Value::as_str).unwrap_or_default();
    let same_weights = recorded.weights == found;
    let envelope = envelope(folder)?;
    check_log(&folder.join(RUN), dir)?;
    let (mut log, again) = (MetricsLog::read(&folder.join(RUN))?, MetricsLog::read(dir)?);
    leave_out_stops(&mut log, &again, &folder.join(RUN))?;
    let compared = envelope.clone().unwrap_or_default().compare(&log, &again);
    if json {
        let mut event = compared.json();
        if let Some(fields) = event.as_object_mut() {
            fields.insert("event".into(), "compared".into());
            fields.insert("same_weights".into(), same_weights.into());
            fields.insert("has_envelope".into(), envelope.is_some().into());
        }
        say(&json_text(&format!("{event}\n")))?;
    }
    if same_weights && compared.verdict == Verdict::SameBits {
        if !json {
            say(&format!("the weights are those of the bundle: {}…\n", found.get(..12).unwrap_or(found)))?;
        }
        return Ok(());
    }
    let first = compared.first_difference.as_ref().map(|d| format!("the first step that differs: {}", shown(d)));
    let first = first.unwrap_or_else(|| "every metric of every step is equal, the weights differ".into());
    let device = if recorded.device_description.is_empty() {
        String::new()
    } else {
        format!(" (made on {})", recorded.device_description)
    };
    let here = record.get("device_description").and_then(Value::as_str).unwrap_or_default();
    let same_version = manifest.perilune == env!("CARGO_PKG_VERSION") && manifest.stdlib == perilune_lua::stdlib_hash();
    if same_version && kind(here) == kind(&recorded.device_description) {
        let rule = "this is the version and the kind of device that made it, which give the same bits";
        return Err(Failure::Refused(format!("the results are not those of the bundle: {first}\n  {rule}")));
    }
    match (&envelope, compared.verdict) {
        (Some(_), Verdict::SameBits | Verdict::Within) => {
            if !json {
                say(&format!("the results lie within the envelope of the bundle{device}; {first}\n"))?;
            }
            Ok(())
        }
        (Some(_), Verdict::Outside) => {
            let outside = compared.first_outside.map(|d| format!("\n  outside of it: {d}")).unwrap_or_default();
            Err(Failure::Refused(format!("the results are not those of the bundle{device}: {first}{outside}")))
        }
        (None, _) => {
            let rule = "it has no envelope, which tells how far results on other devices may differ";
            Err(Failure::Refused(format!("the results are not those of the bundle{device}: {first}\n  {rule}")))
        }
    }
}

/// Refuses a recorded log that is much longer than that of the run that repeated it: it would fill the memory of this process.
fn check_log(recorded: &Path, dir: &Path) -> Result<(), Failure> {
    let bytes = |dir: &Path| std::fs::metadata(dir.join("metrics.jsonl")).map_or(0, |m| m.len());
    let (theirs, ours) = (bytes(recorded), bytes(dir));
    if theirs > LONGEST.saturating_add(ours.saturating_mul(16)) {
        let rule = format!("the log of metrics has {theirs} bytes, and that of the run that repeated it {ours}");
        return Err(Failure::Refused(format!("the results are not those of the bundle: {rule}")));
    }
    Ok(())
}

/// Returns the part of a device's description on which bits depend: all but the number of threads.
fn kind(description: &str) -> String {
    let threads = |part: &&str| !part.trim().ends_with("thread") && !part.trim().ends_with("threads");
    let parts = description.split([',', '(']).filter(threads);
    parts.map(str::trim).collect::<Vec<_>>().join(",")
}

/// Removes the evaluations that the recorded run made because it stopped there, and was resumed: a run that does not stop makes
/// none.
fn leave_out_stops(log: &mut MetricsLog, again: &MetricsLog, run: &Path) -> Result<(), Failure> {
    let record = record_of(run)?;
    let resumed: HashSet<u64> =
        record.get("resumed").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_u64).collect();
    for (name, series) in log.by_name.iter_mut().filter(|(name, _)| name.contains('/')) {
        let made = again.by_name.get(name);
        series.retain(|step, _| !resumed.contains(step) || made.is_some_and(|made| made.contains_key(step)));
    }
    Ok(())
}

/// Formats a value that differs, as `step 12: loss is 0.5, recorded 0.25`.
fn shown(d: &Deviation) -> String {
    let show = |v: Option<f64>| v.map_or("missing".into(), |v| v.to_string());
    format!("step {}: {} is {}, recorded {}", d.step, one_line(&d.metric), show(d.found), show(d.recorded))
}

fn envelope(folder: &Path) -> Result<Option<Envelope>, Failure> {
    let path = folder.join(ENVELOPE);
    let Ok(about) = std::fs::metadata(&path) else { return Ok(None) };
    let wrong = |rule: String| Failure::Refused(format!("{ENVELOPE}: {rule}"));
    if about.len() > LONGEST {
        return Err(wrong(format!("has more than {LONGEST} bytes")));
    }
    let text = std::fs::read(&path).map_err(|e| wrong(e.to_string()))?;
    let value = serde_json::from_slice(&text).map_err(|e| wrong(e.to_string()))?;
    Ok(Some(Envelope::of_json(&value)?))
}
