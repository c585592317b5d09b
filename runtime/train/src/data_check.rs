//! Checks a sample of the records of a run, and whether packed documents are separate, before its first step.

use crate::error::{Error, Result};
use crate::events::{Event, Reporter};
use crate::job::Job;
use perilune_check::{Finding, Options, Split, check};
use perilune_core::Interrupt;
use perilune_lua::{Cause, Failed, Run};
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

/// What a check has found, in one line, and how its cause is found.
struct Fault {
    rule: &'static str,
    split: String,
    what: String,
    line: String,
    cure: &'static str,
}

/// Reports findings as warnings in the log and one line; with `strict` they are an error. Silent when nothing is found.
/// A run of several processes does not evaluate its model for a check.
pub(crate) fn before_first_step(
    run: &Run,
    strict: bool,
    job: &Job,
    interrupt: Interrupt,
    reporter: &Reporter,
) -> Result<()> {
    let mut faults = faults_of_records(run, strict, interrupt)?;
    if !job.has_several() {
        faults.extend(fault_of_packing(run)?);
    }
    let Some(first) = faults.first() else { return Ok(()) };
    faults.iter().for_each(|f| tracing::warn!(rule = f.rule, "data check: {}", f.line));
    let more = match faults.len() - 1 {
        0 => String::new(),
        1 => ", and 1 other finding".into(),
        n => format!(", and {n} other findings"),
    };
    let text = format!("data check: {}{more}", first.line);
    if strict {
        return Err(Error::Refused(format!("{text}\n  hint: {}; without --strict findings are warnings", first.cure)));
    }
    let list: Vec<_> = faults.iter().map(|f| json!({ "rule": f.rule, "split": f.split, "what": f.what })).collect();
    let details = Map::from_iter([("findings".to_string(), list.into())]);
    reporter.tell(&Event::Warning { step: None, message: &format!("{text}; {}", first.cure), details: &details });
    Ok(())
}

/// Checks a sample of the records.
fn faults_of_records(run: &Run, strict: bool, interrupt: Interrupt) -> Result<Vec<Fault>> {
    let (splits, _) = data_splits(run);
    if splits.is_empty() {
        return Ok(Vec::new());
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
            return Ok(Vec::new());
        }
    };
    let cure = "`perilune data check` on the recipe shows the records";
    let fault =
        |f: &Finding| Fault { rule: f.rule, split: f.split.clone(), what: f.what.clone(), line: f.line(), cure };
    Ok(report.faults().map(fault).collect())
}

/// Tests whether packed documents read each other.
fn fault_of_packing(run: &Run) -> Result<Option<Fault>> {
    match run.documents_are_separate() {
        Ok(Some(false)) => {}
        Ok(_) => return Ok(None),
        Err(Failed::Recipe(e)) if e.cause == Cause::Interrupted => return Err(Error::Recipe(e)),
        // What the step evaluates it reports itself.
        Err(e) => {
            tracing::debug!("data check: {}", Error::from(e));
            return Ok(None);
        }
    }
    let what = "packed documents read each other: the losses of one change with the tokens of another";
    let line = format!("train: {what}");
    let cure = "give the attention `documents = batch.documents`, as nn.TransformerBlock passes it on";
    Ok(Some(Fault { rule: "packing", split: "train".into(), what: what.into(), line, cure }))
}
