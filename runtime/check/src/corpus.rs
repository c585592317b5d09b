//! Checks corpora of token ids: ids beyond the vocabulary, stretches of one id, repeated stretches, evaluation windows that training has.
//!
//! Corpora are read by ranges in parallel blocks, so memory does not grow with them. The evaluation parts are read first; fingerprints of their
//! windows (`token_leaks`) are compared with the training part as it is read. `token_repeats` finds repetitions in training.

use crate::report::{Example, Finding, Report, Severity, SplitReport};
use crate::scan::Options;
use crate::token_leaks::{Leaks, Plan};
use crate::token_repeats::Repeats;
use crate::token_runs::run_length;
use crate::token_sweep::{Block, Buffers, Facts, Sweep, least_same, most_read};
use perilune_data::error::quote;
use perilune_data::text::Vocabulary;
use perilune_data::tokens::Tokens;
use perilune_data::{Error, Result};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Tokens of an excerpt: characters, or ids.
const CHARACTERS: u64 = 60;
const IDS: u64 = 12;
/// Examples of a finding.
const EXAMPLES: usize = 5;
/// The share of windows from which stretches of one id are a warning, and the length of one that is.
const FEW: f64 = 0.001;
const LONG: u64 = 4096;
/// The share of training tokens in repeated stretches from which they are a finding.
const REPEATED: f64 = 0.005;
/// The longest window that is compared at once; longer ones are compared by their beginnings.
const MOST_WINDOW: u64 = 1 << 18;

/// A part of a corpus whose windows a loader has.
#[derive(Clone)]
pub struct Corpus {
    pub name: String,
    /// Whether training must not see its windows.
    pub evaluation: bool,
    pub tokens: Arc<Tokens>,
    pub part: Range<u64>,
    /// The number in the recipe's text of the first of `tokens`, if these are a copy of a part.
    pub first: u64,
    /// Tokens of a window.
    pub context: u64,
    /// Ids are below it, where the recipe states it.
    pub vocabulary: Option<u64>,
    /// What decodes ids, if they are characters.
    pub characters: Option<Vocabulary>,
}

impl Corpus {
    fn len(&self) -> u64 {
        self.part.end - self.part.start
    }

    /// The file and the number of a token there.
    fn place(&self, token: u64) -> String {
        match self.tokens.place(token) {
            Some((path, token)) => format!("{}: token {token}", path.display()),
            None => format!("{}: token {}", self.name, self.first + token),
        }
    }

    fn excerpt(&self, token: u64) -> String {
        let most = if self.characters.is_some() { CHARACTERS } else { IDS };
        let mut bytes = Vec::new();
        if self.tokens.read(token..self.part.end.min(token + most), &mut bytes).is_err() {
            return String::new();
        }
        let ids: Vec<i64> =
            bytes.chunks_exact(4).map(|b| i64::from(i32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect();
        let shape = perilune_core::Shape::of(&[ids.len()]);
        let ids = perilune_core::HostTensor::from_i64(shape, &ids);
        match self.characters.as_ref().and_then(|c| c.decode(&ids).ok()) {
            Some(text) => quote(&text),
            None => ids.to_i64().iter().map(i64::to_string).collect::<Vec<_>>().join(" "),
        }
    }

    fn example(&self, token: u64, other: Option<String>) -> Example {
        Example { place: self.place(token), other, excerpt: self.excerpt(token) }
    }

    /// The tokens that are compared at once: a window, or as many as have two runs.
    fn stretch(&self, length: usize) -> u64 {
        let window = self.context.clamp(1, MOST_WINDOW);
        window * (2 * length as u64).div_ceil(window)
    }
}

/// Checks the parts of corpora.
///
/// # Errors
/// A disk fails, a part exceeds its corpus, threads cannot be started, or an interrupt. Ids that are none are a finding.
pub fn check(corpora: &[Corpus], options: &Options) -> Result<Report> {
    for corpus in corpora {
        if corpus.part.start > corpus.part.end || corpus.part.end > corpus.tokens.len() {
            let Range { start, end } = corpus.part;
            let rule = format!("tokens {start} to {end} are not in a corpus of {}", corpus.tokens.len());
            return Err(Error::argument(&corpus.name, rule));
        }
    }
    let pool = rayon::ThreadPoolBuilder::new().thread_name(|i| format!("check-{i}")).build();
    let pool = pool.map_err(|e| Error::argument("threads", format!("they cannot be started: {e}")))?;
    pool.install(|| all(corpora, options))
}

/// The number of ids: those that are known, or the largest of a sample.
fn ids(corpora: &[Corpus]) -> u64 {
    let known = corpora.iter().flat_map(|c| {
        c.tokens.vocabularies(c.part.clone()).filter_map(|v| v.1).chain(c.vocabulary).collect::<Vec<u64>>()
    });
    if let Some(known) = known.max() {
        return known;
    }
    let mut most = 0;
    for corpus in corpora {
        for k in 0..16u64 {
            let start = corpus.part.start + (u128::from(k) * u128::from(corpus.len()) / 16) as u64;
            let mut bytes = Vec::new();
            // A part that cannot be read is a finding when it is checked.
            if corpus.tokens.read(start..corpus.part.end.min(start + 4096), &mut bytes).is_ok() {
                let ids = bytes.chunks_exact(4).map(|b| u64::from(u32::from_le_bytes([b[0], b[1], b[2], b[3]])));
                most = ids.fold(most, u64::max);
            }
        }
    }
    most.saturating_add(1)
}

fn all(corpora: &[Corpus], options: &Options) -> Result<Report> {
    let started = Instant::now();
    let length = run_length(ids(corpora));
    let evaluations = || corpora.iter().enumerate().filter(|c| c.1.evaluation);
    let trains = || corpora.iter().enumerate().filter(|c| !c.1.evaluation);
    let tokens = evaluations().map(|c| most_read(c.1, options)).sum();
    let window = evaluations().map(|c| c.1.stretch(length)).min().unwrap_or(1);
    let (plan, mut leaks) = (Plan::new(length, tokens, window), Leaks::default());
    let mut facts: Vec<(usize, Facts)> = Vec::new();
    for (at, corpus) in evaluations() {
        let unit = corpus.stretch(length);
        let limit = options.seconds.map(|s| started + s / 2);
        let sweep = Sweep { corpus, options, limit, unit, margin: 0, buffers: Buffers::default() };
        let compare = trains().next().is_some();
        let each = |block: &Block| -> Vec<(u64, Vec<u64>)> {
            let mut out = Vec::new();
            let windows = block.ids.get(..block.own).unwrap_or_default().chunks(unit as usize);
            for (k, ids) in (0u64..).zip(windows).take(if compare { usize::MAX } else { 0 }) {
                let start = block.start + k * unit;
                if plan.has((start - corpus.part.start) / unit) && (ids.len() as u64 == unit || corpus.len() < unit) {
                    let mut hashes = Vec::new();
                    plan.runs.each(ids, |_, hash| hashes.push(hash));
                    out.push((start, hashes));
                }
            }
            out
        };
        let fold =
            |_, found: Vec<(u64, Vec<u64>)>| found.iter().for_each(|(start, hashes)| leaks.add(at, *start, hashes));
        facts.push((at, sweep.read(each, fold)?));
    }
    leaks.seal();
    let mut repeats: Vec<(usize, Repeats)> = Vec::new();
    for (at, corpus) in trains() {
        let mut own = Repeats::new(length, most_read(corpus, options));
        let (long, margin) = (own.runs, own.runs.length as u64 - 1);
        let limit = options.seconds.map(|s| started + s);
        let sweep = Sweep { corpus, options, limit, unit: 1, margin, buffers: Buffers::default() };
        let each = |block: &Block| {
            if !leaks.is_empty() {
                let ids = block.ids.get(..block.own + length - 1).unwrap_or(&block.ids);
                // The corpus of a training token is in the high bits.
                plan.runs.each(ids, |k, hash| leaks.look(hash, (at as u64) << 56 | (block.start + k as u64)));
            }
            let mut found = Vec::new();
            long.each(&block.ids, |k, hash| found.push((block.start + k as u64, hash)));
            (block.own as u64, found)
        };
        let fold = |start, (size, found): (u64, Vec<(u64, u64)>)| own.add(start, size, &found);
        facts.push((at, sweep.read(each, fold)?));
        repeats.push((at, own));
    }
    facts.sort_by_key(|f| (corpora.get(f.0).is_none_or(|c| c.evaluation), f.0));
    let mut report = Report::default();
    for (at, facts) in &facts {
        if let Some(corpus) = corpora.get(*at) {
            facts_of(corpus, facts, &mut report);
        }
    }
    for (at, repeats) in &repeats {
        let read = facts.iter().find(|f| f.0 == *at).map_or(0, |f| f.1.read);
        if let Some(corpus) = corpora.get(*at) {
            repeated(corpus, repeats, read, &mut report);
        }
    }
    for (at, corpus) in evaluations() {
        leaked(corpora, at, corpus, &leaks, &plan, &mut report);
    }
    report.findings.sort_by_key(|f| std::cmp::Reverse(f.severity));
    Ok(report)
}

/// Reports what the tokens of a part are, and findings of single tokens.
fn facts_of(corpus: &Corpus, facts: &Facts, report: &mut Report) {
    let vocabulary = corpus.tokens.vocabularies(corpus.part.clone()).filter_map(|v| v.1).chain(corpus.vocabulary).min();
    let ids = facts.ids.map_or_else(|| "none was read".to_string(), |(low, high)| format!("{low} to {high}"));
    let known = vocabulary.map_or_else(|| "of an unknown vocabulary".to_string(), |n| format!("of {n}"));
    let summary = format!("{ids} {known}; windows of {}", corpus.context);
    report.splits.push(SplitReport {
        name: corpus.name.clone(),
        unit: "tokens",
        records: corpus.len(),
        checked: facts.read,
        fields: vec![["ids".into(), "tokens".into(), summary]],
        plots: Vec::new(),
    });
    if facts.read < corpus.len() && facts.unreadable.count == 0 {
        report.remarks.push(format!("{}: {} of {} tokens were checked", corpus.name, facts.read, corpus.len()));
    }
    let mut add = |severity, rule, what: String, rows: &crate::field::Rows, of: u64, cure| {
        let examples = rows.rows.iter().take(EXAMPLES).map(|t| corpus.example(*t, None)).collect();
        let rows_of = rows.rows.iter().map(|t| corpus.first + t).collect();
        report.findings.push(finding(severity, rule, corpus, what, (rows.count, of), rows_of, examples, cure));
    };
    if facts.unreadable.count > 0 {
        let error = facts.error.as_deref().unwrap_or_default().lines().next().unwrap_or_default();
        let what = format!("cannot be read ({error}): {} blocks", facts.unreadable.count);
        let cure = "encode these files again";
        add(Severity::Error, "unreadable", what, &facts.unreadable, corpus.len(), cure);
    }
    if facts.outside.count > 0 {
        let (count, last) = (facts.outside.count, vocabulary.unwrap_or(1).saturating_sub(1));
        let what = format!("are ids outside of the vocabulary, 0 to {last}: {count} of {} tokens", facts.read);
        let cure = "encode with the tokenizer of the model";
        add(Severity::Error, "token-range", what, &facts.outside, facts.read, cure);
    }
    if facts.same.windows.count > 0 {
        let (least, count) = (least_same(corpus), facts.same.windows.count);
        let windows = (facts.read / least).max(count);
        let is_fault = count as f64 >= FEW * windows as f64 || facts.same.longest >= LONG;
        let severity = if is_fault { Severity::Warning } else { Severity::Note };
        let what = format!(
            "are one id repeated: {count} of {windows} windows of {least} tokens; the longest stretch has {}",
            facts.same.longest
        );
        let cure = "look at the file: a hole, or padding; encode or copy it again";
        add(severity, "constant-windows", what, &facts.same.windows, windows, cure);
    }
}

/// Reports the repeated stretches of training.
fn repeated(corpus: &Corpus, repeats: &Repeats, read: u64, report: &mut Report) {
    let tokens = repeats.tokens().min(read);
    if (tokens as f64) < REPEATED * read as f64 || tokens == 0 {
        return;
    }
    let example = |(at, earlier): &(u64, u64)| corpus.example(*at, Some(corpus.place(*earlier)));
    let what = format!(
        "repeat an earlier stretch of {} tokens or more: about {:.1} % of {read} tokens",
        repeats.runs.length,
        100.0 * tokens as f64 / read.max(1) as f64
    );
    let rows = repeats.stretches.rows.iter().map(|t| corpus.first + t).collect();
    let examples = repeats.named.iter().map(example).collect();
    let cure = "drop repeated documents before they are encoded: records:unique { ... }";
    let severity = Severity::Warning;
    report.findings.push(finding(severity, "exact-duplicates", corpus, what, (tokens, read), rows, examples, cure));
}

/// Reports the windows of an evaluation part that training has.
fn leaked(corpora: &[Corpus], at: usize, corpus: &Corpus, leaks: &Leaks, plan: &Plan, report: &mut Report) {
    let (compared, unit) = (leaks.windows(at), corpus.stretch(plan.runs.length));
    let windows = (corpus.len() / unit).max(1);
    if compared > 0 && compared < windows {
        report.remarks.push(format!("{}: {compared} of {windows} windows were compared with training", corpus.name));
    }
    let found: Vec<_> = leaks.leaked().into_iter().filter(|l| l.split == at).collect();
    if found.is_empty() {
        return;
    }
    let other = |at: u64| corpora.get((at >> 56) as usize).map(|train| train.place(at & ((1 << 56) - 1)));
    let examples = found.iter().take(EXAMPLES).map(|l| corpus.example(l.start, other(l.at))).collect();
    let what = format!(
        "stand in the training part: {} of {compared} windows of {unit} tokens have half of their runs of {} there",
        found.len(),
        plan.runs.length
    );
    let rows = found.iter().take(65_536).map(|l| corpus.first + l.start).collect();
    let cure = "remove them from training, or split by documents before they are encoded";
    let counts = (found.len() as u64, compared);
    report.findings.push(finding(Severity::Error, "leakage", corpus, what, counts, rows, examples, cure));
}

fn finding(
    severity: Severity,
    rule: &'static str,
    corpus: &Corpus,
    what: String,
    (count, of): (u64, u64),
    rows: Vec<u64>,
    examples: Vec<Example>,
    cure: &'static str,
) -> Finding {
    Finding { severity, rule, split: corpus.name.clone(), field: None, what, count, of, rows, examples, cure }
}

#[cfg(test)]
#[path = "corpus_tests.rs"]
mod tests;
