//! Plants faults in 1 % of the records of synthetic and of real sets. Every rule finds 99 % of them, and nothing in the clean set.

#![allow(clippy::unwrap_used)]

use perilune_check::normal::{gram_set, jaccard, normal};
use perilune_check::{Options, Report, Severity, Split, check};
use perilune_core::Interrupt;
use perilune_data::records::{Dataset, List, Record, Value};
use std::collections::BTreeSet;
use std::sync::Arc;

/// A seeded generator (xorshift).
struct Draw(u64);

impl Draw {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n as u64) as usize
    }

    fn word(&mut self) -> String {
        let (length, mut word) = (2 + self.below(7), String::new());
        for _ in 0..length {
            word.push((b'a' + self.below(26) as u8) as char);
        }
        word
    }

    fn text(&mut self, words: usize) -> String {
        (0..words).map(|_| self.word()).collect::<Vec<_>>().join(" ")
    }
}

fn record(text: &str, label: i64, score: f64) -> Record {
    let mut out = Record::default();
    out.set("text", Value::Text(text.into()));
    out.set("label", Value::Int(label));
    out.set("score", Value::Float(score));
    out
}

fn clean(seed: u64, n: usize) -> Vec<Record> {
    let mut draw = Draw(seed);
    (0..n)
        .map(|_| {
            let words = 30 + draw.below(80);
            record(&draw.text(words), draw.below(10) as i64, draw.below(1000) as f64 / 7.0)
        })
        .collect()
}

fn split(name: &str, records: Vec<Record>) -> Split {
    let records: Arc<dyn Dataset> = Arc::new(List::new(name, records));
    Split::new(name, records)
}

fn run(train: Vec<Record>, valid: Vec<Record>) -> Report {
    check(&[split("train", train), split("valid", valid)], &Options::full(Interrupt::default())).unwrap()
}

fn rows(report: &Report, rule: &str, split: &str) -> BTreeSet<u64> {
    let found = report.findings.iter().filter(|f| f.rule == rule && f.split == split);
    found.flat_map(|f| f.rows.iter().copied()).collect()
}

fn text(r: &Record) -> String {
    match r.get("text") {
        Some(Value::Text(t)) => t.to_string(),
        _ => String::new(),
    }
}

/// Distinct places, so that each holds one fault.
fn places(draw: &mut Draw, n: usize, count: usize) -> Vec<usize> {
    let mut out = BTreeSet::new();
    while out.len() < count {
        out.insert(draw.below(n));
    }
    out.into_iter().collect()
}

/// Replaces characters until the similarity would fall below 0.8.
fn edited(draw: &mut Draw, text: &str) -> String {
    let (whole, mut out) = (gram_set(&normal(text)), text.to_string());
    loop {
        let mut chars: Vec<char> = out.chars().collect();
        let at = draw.below(chars.len());
        chars[at] = 'Q';
        let next: String = chars.into_iter().collect();
        if jaccard(&whole, &gram_set(&normal(&next))) < 0.82 {
            return out;
        }
        out = next;
    }
}

#[track_caller]
fn recalled(report: &Report, rule: &str, split: &str, planted: &[usize]) {
    let found = rows(report, rule, split);
    let hits = planted.iter().filter(|p| found.contains(&(**p as u64))).count();
    assert!(hits * 100 >= planted.len() * 99, "{rule}: {hits} of {}", planted.len());
    let more = found.len() - hits;
    assert!(more * 100 <= planted.len(), "{rule}: {more} false alarms");
    assert!(report.faults().any(|f| f.rule == rule), "{rule} is a note");
}

#[test]
fn a_clean_set_has_no_findings() {
    let report = run(clean(1, 4000), clean(2, 800));
    assert_eq!(report.findings, [], "{}", report.text());
    assert!(report.text().ends_with("no faults found"));
    assert!(report.html().contains("<svg"));
}

#[test]
fn planted_faults_are_found() {
    const N: usize = 4000;
    let (mut train, valid) = (clean(1, N), clean(2, 1000));
    let mut draw = Draw(5);
    let all = places(&mut draw, N, 7 * N / 100);
    // Shuffled by their order modulo 7, so that no rule has neighbouring rows.
    let part = |k: usize| -> Vec<usize> { all.iter().copied().skip(k).step_by(7).collect() };
    let [corrupt, control, labels, nan, mojibake, doubled, near] = std::array::from_fn(part);
    let set = |r: &mut Record, t: String| r.set("text", Value::Text(t.into()));
    for p in &corrupt {
        let t = text(&train[*p]);
        set(&mut train[*p], t.replacen(' ', "\u{fffd}", 3));
    }
    for p in &control {
        let t = text(&train[*p]);
        set(&mut train[*p], t.replacen(' ', "\u{1b}[0m", 1));
    }
    for p in &mojibake {
        let t = text(&train[*p]);
        set(&mut train[*p], t.replacen(' ', " caf\u{c3}\u{a9} ", 1));
    }
    labels.iter().for_each(|p| train[*p].set("label", Value::Int(77)));
    nan.iter().for_each(|p| train[*p].set("score", Value::Float(f64::NAN)));
    // Copies go to the end, so that the planted row is the later one.
    let (mut copies, mut alike) = (Vec::new(), Vec::new());
    for p in &doubled {
        copies.push(train.len());
        let t = text(&train[*p]).to_uppercase().replace(' ', "  ");
        let mut copy = train[*p].clone();
        set(&mut copy, t);
        train.push(copy);
    }
    for p in &near {
        alike.push(train.len());
        let t = edited(&mut draw, &text(&train[*p]));
        let mut copy = train[*p].clone();
        set(&mut copy, t);
        train.push(copy);
    }
    let report = run(train, valid);
    recalled(&report, "encoding", "train", &corrupt);
    recalled(&report, "control-characters", "train", &control);
    recalled(&report, "mojibake", "train", &mojibake);
    recalled(&report, "label-range", "train", &labels);
    recalled(&report, "not-finite", "train", &nan);
    recalled(&report, "exact-duplicates", "train", &copies);
    recalled(&report, "near-duplicates", "train", &alike);
    let rules: BTreeSet<&str> = report.faults().map(|f| f.rule).collect();
    assert_eq!(rules.len(), 7, "{rules:?}");
}

#[test]
fn a_text_with_many_variants_is_one_cluster() {
    let (mut train, mut draw) = (clean(1, 500), Draw(6));
    let model = text(&train[0]);
    for _ in 0..300 {
        let variant = model.replacen(' ', &format!(" {} ", draw.word()), 1);
        train.push(record(&variant, 1, 1.0));
    }
    let report = run(train, Vec::new());
    let repeated = rows(&report, "near-duplicates", "train").len() + rows(&report, "exact-duplicates", "train").len();
    assert!(repeated >= 297, "{repeated} of 300");
}

#[test]
fn leaked_records_are_found() {
    const N: usize = 3000;
    let (mut train, valid) = (clean(1, N), clean(2, 2000));
    let mut draw = Draw(9);
    let all = places(&mut draw, valid.len(), 60);
    let part = |k: usize| -> Vec<usize> { all.iter().copied().skip(k).step_by(3).collect() };
    let [exact, near, inside] = std::array::from_fn(part);
    let at: Vec<usize> = places(&mut draw, N, 60);
    for (p, to) in exact.iter().zip(&at) {
        train[*to] = valid[*p].clone();
    }
    for (p, to) in near.iter().zip(&at[20..]) {
        train[*to].set("text", Value::Text(edited(&mut draw, &text(&valid[*p])).into()));
    }
    // In the middle of a longer text.
    for (p, to) in inside.iter().zip(&at[40..]) {
        let t = format!("{} {} {}", draw.text(150), text(&valid[*p]), draw.text(150));
        train[*to].set("text", Value::Text(t.into()));
    }
    let report = run(train, valid);
    recalled(&report, "leakage", "valid", &exact);
    recalled(&report, "near-leakage", "valid", &near);
    recalled(&report, "overlap", "valid", &inside);
    assert!(report.findings.iter().all(|f| f.rule != "leakage" || f.severity == Severity::Error));
}

#[test]
fn labels_of_other_distributions_and_conflicts() {
    let (mut train, mut valid) = (clean(1, 2000), clean(2, 2000));
    valid.iter_mut().step_by(2).for_each(|r| r.set("label", Value::Int(3)));
    valid[7].set("label", Value::Int(10));
    let mut twice = train[5].clone();
    let Some(Value::Int(label)) = twice.get("label").cloned() else { panic!() };
    twice.set("label", Value::Int((label + 1) % 10));
    train.push(twice);
    let report = run(train, valid);
    let rules: BTreeSet<&str> = report.faults().map(|f| f.rule).collect();
    assert_eq!(rules, BTreeSet::from(["label-conflicts", "label-distribution", "unseen-label"]), "{}", report.text());
    assert_eq!(rows(&report, "label-conflicts", "train"), BTreeSet::from([2000]));
    assert_eq!(rows(&report, "unseen-label", "valid"), BTreeSet::from([7]));
    let options = Options { classes: Some(10), ..Options::full(Interrupt::default()) };
    let report = check(&[split("train", vec![record("a text of some length", 10, 1.0); 40])], &options).unwrap();
    assert!(rows(&report, "label-range", "train").len() <= 40);
}

fn turns(roles: &[(&str, &str)]) -> Record {
    let turn = |(role, content): &(&str, &str)| {
        let mut out = Record::default();
        out.set("role", Value::Text((*role).into()));
        out.set("content", Value::Text((*content).into()));
        Value::Map(out)
    };
    let mut out = Record::default();
    out.set("messages", Value::List(roles.iter().map(turn).collect()));
    out
}

#[test]
fn conversations_are_checked() {
    let mut draw = Draw(4);
    let mut all: Vec<Record> = (0..300)
        .map(|_| turns(&[("system", "be kind"), ("user", &draw.text(20)), ("assistant", &draw.text(30))]))
        .collect();
    assert_eq!(run(all.clone(), Vec::new()).faults().count(), 0);
    all[3] = turns(&[("user", "how are you?"), ("user", "well?"), ("assistant", "fine, thanks")]);
    all[5] = turns(&[("user", "how are you today?"), ("assistant", " ")]);
    all[8] = turns(&[("user", "is there an answer to this?")]);
    let report = run(all, Vec::new());
    assert_eq!(rows(&report, "roles", "train"), BTreeSet::from([3]));
    assert_eq!(rows(&report, "empty-turns", "train"), BTreeSet::from([5]));
    assert_eq!(rows(&report, "no-answer", "train"), BTreeSet::from([5, 8]));
}

#[test]
fn token_ids_and_masks_are_checked() {
    let ids = |list: &[i64], mask: &[i64]| {
        let ints = |l: &[i64]| Value::List(l.iter().map(|i| Value::Int(*i)).collect());
        let mut out = Record::default();
        out.set("ids", ints(list));
        out.set("mask", ints(mask));
        out
    };
    let encoded = vec![ids(&[1, 2], &[0, 1]), ids(&[1, 9], &[0, 1]), ids(&[1, 2], &[0, 0]), ids(&[-1], &[1])];
    let mut train = split("train", clean(1, 4));
    train.encoded = Some(Arc::new(List::new("encoded", encoded)));
    train.vocabulary = Some(9);
    let report = check(&[train], &Options::full(Interrupt::default())).unwrap();
    assert_eq!(rows(&report, "token-range", "train"), BTreeSet::from([1, 3]));
    assert_eq!(rows(&report, "mask", "train"), BTreeSet::from([2]));
}

#[test]
fn types_missing_fields_and_edges() {
    let mut all = clean(1, 100);
    all[10].set("score", Value::Text("high".into()));
    all[20].fields.pop();
    let report = run(all, Vec::new());
    assert_eq!(rows(&report, "mixed-types", "train"), BTreeSet::from([10]));
    assert!(report.findings.iter().any(|f| f.rule == "missing" && f.count == 1));
    assert_eq!(run(Vec::new(), Vec::new()).findings, []);
    assert_eq!(run(clean(1, 1), clean(2, 1)).faults().count(), 0);
    let stopped = Interrupt::default();
    stopped.request();
    assert!(check(&[split("train", clean(1, 10))], &Options::full(stopped)).is_err());
}

/// The real set, if it is there: it is no part of the project.
#[test]
fn questions_of_gsm8k() {
    let Ok(dir) = std::env::var("PERILUNE_TEST_DATA") else {
        println!("skipped: PERILUNE_TEST_DATA names no folder with gsm8k-train.jsonl and gsm8k-test.jsonl");
        return;
    };
    let read = |name: &str| -> Vec<Record> {
        let text = std::fs::read_to_string(std::path::Path::new(&dir).join(name)).unwrap();
        let line = |line: &str| {
            let json: serde_json::Value = serde_json::from_str(line).unwrap();
            let mut out = Record::default();
            for name in ["question", "answer"] {
                out.set(name, Value::Text(json[name].as_str().unwrap().into()));
            }
            out
        };
        text.lines().map(line).collect()
    };
    let (train, test) = (read("gsm8k-train.jsonl"), read("gsm8k-test.jsonl"));
    let report = run(train.clone(), test.clone());
    // Question 603 of the test set has the text of question 1,315 of the training set with other numbers.
    assert!(report.faults().all(|f| f.rule == "overlap" && f.rows == [602]), "{}", report.text());
    let (mut bad, mut draw, n) = (train.clone(), Draw(11), train.len());
    let all = places(&mut draw, test.len(), 26);
    let at = places(&mut draw, n, 26);
    let (exact, near) = all.split_at(13);
    let question =
        |r: &Record, f: &str| if let Some(Value::Text(t)) = r.get(f) { t.to_string() } else { String::new() };
    exact.iter().zip(&at).for_each(|(p, to)| bad[*to] = test[*p].clone());
    for (p, to) in near.iter().zip(&at[13..]) {
        for f in ["question", "answer"] {
            bad[*to].set(f, Value::Text(edited(&mut draw, &question(&test[*p], f)).into()));
        }
    }
    let copies: Vec<usize> = (bad.len()..bad.len() + 75).collect();
    places(&mut draw, n, 75).into_iter().for_each(|p| bad.push(train[p].clone()));
    let report = run(bad, test);
    let found = rows(&report, "leakage", "valid");
    assert!(exact.iter().all(|p| found.contains(&(*p as u64))));
    let found = rows(&report, "near-leakage", "valid");
    assert!(near.iter().all(|p| found.contains(&(*p as u64))));
    let found = rows(&report, "exact-duplicates", "train");
    assert!(copies.iter().filter(|p| found.contains(&(**p as u64))).count() >= 74);
}

/// Rows as tensors have them: an array, a label and a number of the row.
fn arrays(seed: u64, n: usize) -> Vec<Record> {
    let mut draw = Draw(seed);
    (0..n)
        .map(|row| {
            let values: Vec<f32> = (0..16).map(|_| draw.below(1 << 20) as f32 / 1024.0).collect();
            let mut out = Record::default();
            let shape = perilune_core::Shape::of(&[4, 4]);
            out.set("x", Value::Array(Arc::new(perilune_core::HostTensor::from_f32(shape, &values))));
            out.set("y", Value::Int(draw.below(10) as i64));
            out.set("row", Value::Int(row as i64));
            out
        })
        .collect()
}

fn rows_of(name: &str, records: Vec<Record>) -> Split {
    Split { unit: "rows", chunk: 256, ..split(name, records) }
}

#[test]
fn planted_faults_of_arrays_are_found() {
    const N: usize = 5000;
    let check = |train: Vec<Record>, valid: Vec<Record>| {
        check(&[rows_of("train", train), rows_of("valid", valid)], &Options::full(Interrupt::default())).unwrap()
    };
    let (mut train, valid) = (arrays(1, N), arrays(2, 2000));
    let report = check(train.clone(), valid.clone());
    assert_eq!(report.findings, [], "{}", report.text());
    let mut draw = Draw(3);
    let all = places(&mut draw, N, 5 * N / 100);
    let part = |k: usize| -> Vec<usize> { all.iter().copied().skip(k).step_by(5).collect() };
    let [nan, labels, conflicts, doubled, to] = std::array::from_fn(part);
    for p in &nan {
        let Some(Value::Array(x)) = train[*p].get("x").cloned() else { panic!() };
        let mut x = perilune_core::HostTensor::clone(&x);
        x.bytes[20..24].copy_from_slice(&f32::NAN.to_le_bytes());
        train[*p].set("x", Value::Array(Arc::new(x)));
    }
    labels.iter().for_each(|p| train[*p].set("y", Value::Int(77)));
    let leaked = places(&mut draw, valid.len(), 20);
    for (from, to) in leaked.iter().zip(&to) {
        train[*to].set("x", valid[*from].get("x").cloned().unwrap());
    }
    let (mut copies, mut others) = (Vec::new(), Vec::new());
    for (rows, list, label) in [(&doubled, &mut copies, 0), (&conflicts, &mut others, 1)] {
        for p in rows {
            let mut copy = train[*p].clone();
            let Some(Value::Int(y)) = copy.get("y").cloned() else { panic!() };
            copy.set("y", Value::Int((y + label) % 10));
            copy.set("row", Value::Int(train.len() as i64));
            list.push(train.len());
            train.push(copy);
        }
    }
    let report = check(train, valid);
    recalled(&report, "not-finite", "train", &nan);
    recalled(&report, "label-range", "train", &labels);
    recalled(&report, "leakage", "valid", &leaked);
    recalled(&report, "label-conflicts", "train", &others);
    recalled(&report, "exact-duplicates", "train", &[copies, others].concat());
    let rules: BTreeSet<&str> = report.faults().map(|f| f.rule).collect();
    assert_eq!(rules.len(), 5, "{}", report.text());
    assert!(report.text().contains("f32 {4, 4}:") || report.text().contains("f32 (4, 4):"), "{}", report.text());
}

#[test]
fn a_sample_does_not_miss_labels_that_training_has() {
    let mut draw = Draw(8);
    let labelled = |n: usize, draw: &mut Draw| -> Vec<Record> {
        (0..n).map(|_| record(&draw.text(20), draw.below(400) as i64, 1.0)).collect()
    };
    let (train, valid) = (labelled(40_000, &mut draw), labelled(4_000, &mut draw));
    let quick = Options { rows: 1000, ..Options::full(Interrupt::default()) };
    let report = check(&[split("train", train), split("valid", valid)], &quick).unwrap();
    assert!(report.findings.iter().all(|f| f.rule != "unseen-label"), "{}", report.text());
}

#[test]
fn labels_that_training_lacks_by_chance_are_no_finding() {
    let mut draw = Draw(9);
    let mut labelled =
        |labels: &[i64]| -> Vec<Record> { labels.iter().map(|label| record(&draw.text(20), *label, 1.0)).collect() };
    let common: Vec<i64> = (0..1000).map(|k| k % 10).collect();
    let unseen = |train: Vec<Record>, valid: Vec<Record>| {
        let options = Options { labels: vec!["label".into()], ..Options::full(Interrupt::default()) };
        let report = check(&[split("train", train), split("valid", valid)], &options).unwrap();
        report.findings.iter().find(|f| f.rule == "unseen-label").map(|f| f.count)
    };
    let with = |more: std::ops::Range<i64>| common.iter().copied().chain(more).collect::<Vec<i64>>();
    assert_eq!(unseen(labelled(&common), labelled(&with(200..205))), Some(5));
    // Twenty labels occur once in training too.
    assert_eq!(unseen(labelled(&with(100..120)), labelled(&with(200..205))), None);
    assert_eq!(unseen(labelled(&with(100..120)), labelled(&with(200..260))), Some(60));
    // A few records of each label.
    assert_eq!(unseen(labelled(&common[..40]), labelled(&[0, 1, 2, 11])), None);
}
