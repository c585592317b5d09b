//! Checks a sample of the records of a run before its first step.

use crate::error::{Error, Result};
use crate::events::{Event, Reporter};
use perilune_check::{Finding, Options, Split, check};
use perilune_core::Interrupt;
use perilune_lua::Run;
use serde_json::{Map, json};
use std::time::Duration;

/// Time for reading records, unless findings decide whether the run starts.
const SECONDS: Duration = Duration::from_millis(800);

/// Returns the splits of a run whose loaders have records, and the names of the others.
pub fn data_splits(run: &Run) -> (Vec<Split>, Vec<String>) {
    let (mut splits, mut others) = (Vec::new(), Vec::new());
    for name in run.splits() {
        match run.records(&name) {
            Some(found) => splits.push(Split {
                evaluation: name != "train",
                name,
                records: found.texts,
                encoded: found.encoded,
                vocabulary: found.vocabulary,
            }),
            None => others.push(name),
        }
    }
    (splits, others)
}

/// Reports findings as warnings in the log and one line; with `strict` they are an error. Silent when nothing is found.
pub(crate) fn before_first_step(run: &Run, strict: bool, interrupt: Interrupt, reporter: &Reporter) -> Result<()> {
    let (splits, _) = data_splits(run);
    if splits.is_empty() {
        return Ok(());
    }
    let options = Options::quick(interrupt, (!strict).then_some(SECONDS));
    let report = match check(&splits, &options) {
        Ok(report) => report,
        // A check that was asked for must not be passed by failing.
        Err(e) if strict && !matches!(e, perilune_data::Error::Interrupted) => {
            return Err(Error::System(format!("data check: {e}")));
        }
        // What the step reads it reports itself.
        Err(e) => {
            tracing::debug!("data check: {e}");
            return Ok(());
        }
    };
    let faults: Vec<&Finding> = report.faults().collect();
    let Some(first) = faults.first() else { return Ok(()) };
    faults.iter().for_each(|f| tracing::warn!(rule = f.rule, "data check: {}", f.line()));
    let more = match faults.len() - 1 {
        0 => String::new(),
        1 => ", and 1 other finding".into(),
        n => format!(", and {n} other findings"),
    };
    let text = format!("data check: {}{more}", first.line());
    if strict {
        let hint = "`perilune data check` on the recipe shows the records; without --strict findings are warnings";
        return Err(Error::Refused(format!("{text}\n  hint: {hint}")));
    }
    let list: Vec<_> = faults.iter().map(|f| json!({ "rule": f.rule, "split": f.split, "what": f.what })).collect();
    let details = Map::from_iter([("findings".to_string(), list.into())]);
    let message = format!("{text}; `perilune data check` on the recipe shows the records");
    reporter.tell(&Event::Warning { step: None, message: &message, details: &details });
    Ok(())
}
