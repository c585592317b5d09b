//! Checks a sample of the data of a run, and whether packed documents are trained as if alone, before its first step.

use crate::error::{Error, Result};
use crate::events::{Event, Reporter};
use crate::job::Job;
use perilune_check::corpus::{self, Corpus};
use perilune_check::remote::{Holder, serve};
use perilune_check::{Finding, Options, Report, Split, check};
use perilune_core::{HostTensor, Interrupt, Shape};
use perilune_data::records::{Record, Value};
use perilune_lua::{Cause, Checked, CheckedRows, Failed, Run};
use serde_json::{Map, json};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time for reading data, unless findings decide whether the run starts.
const SECONDS: Duration = Duration::from_millis(800);
/// Bytes of rows that are copied from a device at once, and the rows of a copy.
const COPIED: u64 = 4 << 20;
const ROWS: u64 = 1024;
/// Token ids that are copied from a device: by a check of all data, and before a run.
pub const MOST_IDS: u64 = 1 << 28;
const QUICK_IDS: u64 = 1 << 24;

/// What the loaders of a run have that checks can read.
pub struct CheckedData {
    /// Records.
    pub splits: Vec<Split>,
    /// Parts of token corpora.
    pub corpora: Vec<Corpus>,
    /// Rows of tensors, by split.
    pub rows: Vec<(String, CheckedRows)>,
    /// The names of the other splits, with the reason for those that cannot be checked.
    pub others: Vec<(String, Option<String>)>,
}

/// Returns what the loaders of a run have. Token ids on a device are copied, at most `ids` of a split.
///
/// # Errors
/// The device fails, or an interrupt.
pub fn checked_data(run: &Run, ids: u64) -> std::result::Result<CheckedData, Failed> {
    let mut out = CheckedData { splits: Vec::new(), corpora: Vec::new(), rows: Vec::new(), others: Vec::new() };
    for name in run.splits() {
        if let Some(found) = run.records(&name) {
            let (encoded, vocabulary) = (found.encoded, found.vocabulary);
            out.splits.push(Split { encoded, vocabulary, ..Split::new(name, found.texts) });
            continue;
        }
        match run.corpus(&name, ids)? {
            Checked::Some(found) => {
                out.corpora.push(Corpus {
                    evaluation: name != "train",
                    name,
                    tokens: found.tokens,
                    part: found.part,
                    first: found.first,
                    context: found.context,
                    vocabulary: found.vocabulary,
                    characters: found.characters,
                });
                continue;
            }
            Checked::Not(reason) => {
                out.others.push((name, Some(reason)));
                continue;
            }
            Checked::None => {}
        }
        match run.rows(&name)? {
            Checked::Some(rows) => out.rows.push((name, rows)),
            Checked::Not(reason) => out.others.push((name, Some(reason))),
            Checked::None => out.others.push((name, None)),
        }
    }
    Ok(out)
}

impl CheckedData {
    pub fn is_empty(&self) -> bool {
        self.splits.is_empty() && self.corpora.is_empty() && self.rows.is_empty()
    }

    /// Checks records, corpora and rows, one after the other; a time limit is that of all together.
    ///
    /// # Errors
    /// Those of [`check`] and [`corpus::check`].
    pub fn check(&self, options: &Options) -> perilune_data::Result<Report> {
        let started = Instant::now();
        let left = || {
            let seconds = options.seconds.map(|all| all.saturating_sub(started.elapsed()));
            Options { seconds, ..options.clone() }
        };
        let mut report = if self.splits.is_empty() { Report::default() } else { check(&self.splits, &left())? };
        if !self.corpora.is_empty() {
            report.append(corpus::check(&self.corpora, &left())?);
        }
        if !self.rows.is_empty() {
            let sets: Vec<u64> = self.rows.iter().map(|r| r.1.len).collect();
            let limits = left();
            let of = |(name, rows): &(String, CheckedRows)| {
                let numbers = rows.index.clone().map(Arc::from);
                (name.clone(), numbers, rows_of_copy(rows))
            };
            let about: Vec<(String, Option<Arc<[u64]>>, u64)> = self.rows.iter().map(of).collect();
            report.append(serve(&Rows { sets: &self.rows, interrupt: &options.interrupt }, &sets, move |datasets| {
                let split = |((name, numbers, chunk), records)| Split {
                    unit: "rows",
                    numbers,
                    chunk,
                    ..Split::new(name, records)
                };
                let splits: Vec<Split> = about.into_iter().zip(datasets).map(split).collect();
                check(&splits, &limits)
            })?);
        }
        Ok(report)
    }
}

/// Reads rows of the tensors of a run as records.
struct Rows<'a> {
    sets: &'a [(String, CheckedRows)],
    interrupt: &'a Interrupt,
}

impl Holder for Rows<'_> {
    fn read(&self, set: usize, rows: &[u64]) -> perilune_data::Result<Vec<Record>> {
        use perilune_data::Error;
        if self.interrupt.is_requested() {
            return Err(Error::Interrupted);
        }
        let Some((split, set)) = self.sets.get(set) else { return Ok(Vec::new()) };
        let of_view =
            |row: &u64| set.index.as_ref().map_or(*row, |index| index.get(*row as usize).copied().unwrap_or(0));
        let mut list: Vec<u64> = rows.iter().map(of_view).collect();
        // Copies of one size have one plan.
        let size = rows_of_copy(set) as usize;
        let last = list.last().copied().unwrap_or(0);
        list.resize(list.len().max(size), last);
        let failed = |text: String| Error::io(Path::new(split), "read", std::io::Error::other(text));
        let tensors = set.read(&list).map_err(|e| match e {
            Failed::Recipe(e) if e.cause == Cause::Interrupted => Error::Interrupted,
            Failed::Recipe(e) => failed(e.to_string()),
            Failed::Usage(text) => failed(text),
        })?;
        let is_whole = |t: &HostTensor| t.shape.dims().first().is_some_and(|rows| *rows == list.len());
        if tensors.len() != set.names.len() || !tensors.iter().all(is_whole) {
            return Err(failed(format!("its loader gives other tensors than {} rows of each", list.len())));
        }
        let names: Vec<Arc<str>> = set.names.iter().map(|name| name.as_str().into()).collect();
        let record = |row: usize| {
            let fields = names.iter().cloned().zip(tensors.iter().map(|t| value(t, row)));
            Record { fields: fields.collect() }
        };
        Ok((0..rows.len()).map(record).collect())
    }
}

/// The rows that are copied at once.
fn rows_of_copy(set: &CheckedRows) -> u64 {
    (COPIED / set.numbers.saturating_mul(8).max(1)).clamp(1, ROWS)
}

/// Returns row `k` of a tensor: a number, or an array of its numbers.
fn value(tensor: &HostTensor, k: usize) -> Value {
    let count = tensor.shape.dims().first().copied().unwrap_or(1).max(1);
    let numbers = tensor.numel() / count;
    if numbers == 1 {
        return match tensor.dtype {
            perilune_core::DType::Bool => Value::Bool(tensor.get_i64(k) != 0),
            dtype if dtype.is_int() => Value::Int(tensor.get_i64(k)),
            _ => Value::Float(tensor.get_f64(k)),
        };
    }
    let size = numbers * tensor.dtype.size();
    let bytes = tensor.bytes.get(k * size..(k + 1) * size).unwrap_or_default().to_vec();
    let shape = Shape::of(tensor.shape.dims().get(1..).unwrap_or_default());
    Value::Array(Arc::new(HostTensor { dtype: tensor.dtype, shape, bytes }))
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
    let mut faults = faults_of_data(run, strict, interrupt)?;
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

/// Checks a sample of the data.
fn faults_of_data(run: &Run, strict: bool, interrupt: Interrupt) -> Result<Vec<Fault>> {
    let options = Options::quick(interrupt, (!strict).then_some(SECONDS));
    let found = match checked_data(run, QUICK_IDS) {
        Ok(data) if data.is_empty() => return Ok(Vec::new()),
        Ok(data) => data.check(&options).map_err(|e| (matches!(e, perilune_data::Error::Interrupted), e.to_string())),
        Err(Failed::Recipe(e)) if e.cause == Cause::Interrupted => return Err(Error::Recipe(e)),
        Err(e) => Err((false, Error::from(e).to_string())),
    };
    let report = match found {
        Ok(report) => report,
        // A check that was asked for must not be passed by failing.
        Err((false, text)) if strict => return Err(Error::System(format!("data check: {text}"))),
        // What the step reads it reports itself.
        Err((_, text)) => {
            tracing::debug!("data check: {text}");
            return Ok(Vec::new());
        }
    };
    let cure = "`perilune data check` on the recipe shows them";
    let fault =
        |f: &Finding| Fault { rule: f.rule, split: f.split.clone(), what: f.what.clone(), line: f.line(), cure };
    Ok(report.faults().map(fault).collect())
}

/// Tests whether packed documents are trained as if alone.
fn fault_of_packing(run: &Run) -> Result<Option<Fault>> {
    let found = match run.fault_of_packing() {
        Ok(found) => found,
        Err(Failed::Recipe(e)) if e.cause == Cause::Interrupted => return Err(Error::Recipe(e)),
        // What the step evaluates it reports itself.
        Err(e) => {
            tracing::debug!("data check: {}", Error::from(e));
            return Ok(None);
        }
    };
    let (what, cure) = match found.as_deref() {
        None => return Ok(None),
        Some("positions") => (
            "the loss of a packed document depends on where it lies in its sequence",
            "count positions from the start of each document: give the model `positions = batch.positions`",
        ),
        Some(_) => (
            "packed documents read each other: the losses of one change with the tokens of another",
            "give the attention `documents = batch.documents`, as nn.TransformerBlock passes it on",
        ),
    };
    let line = format!("train: {what}");
    Ok(Some(Fault { rule: "packing", split: "train".into(), what: what.into(), line, cure }))
}
