use super::*;
use crate::minhash::mix;
use crate::token_sweep::least_same;
use perilune_core::{DType, HostTensor, Interrupt, Shape};
use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

/// Ids as words of a text have: few are frequent.
fn words(seed: u64, n: u64, vocabulary: u64) -> Vec<i64> {
    (0..n)
        .map(|k| {
            let unit = (mix(seed << 40 | k) >> 11) as f64 / (1u64 << 53) as f64;
            // Zipf's law: the rank r has a share of 1 / r.
            ((vocabulary as f64).powf(unit) - 1.0) as i64
        })
        .collect()
}

fn memory(ids: &[i64]) -> Arc<Tokens> {
    Arc::new(Tokens::in_memory(HostTensor::from_i64(Shape::of(&[ids.len()]), ids)).expect("ids"))
}

fn part(name: &str, tokens: &Arc<Tokens>, part: Range<u64>, context: u64) -> Corpus {
    let evaluation = name != "train";
    let tokens = tokens.clone();
    Corpus { name: name.into(), evaluation, tokens, part, first: 0, context, vocabulary: None, characters: None }
}

/// The first nine tenths for training, the rest for evaluation.
fn parts(ids: &[i64], context: u64) -> [Corpus; 2] {
    let (tokens, n) = (memory(ids), ids.len() as u64);
    [part("train", &tokens, 0..n / 10 * 9, context), part("valid", &tokens, n / 10 * 9..n, context)]
}

fn full() -> Options {
    Options::full(Interrupt::default())
}

fn report(corpora: &[Corpus]) -> Report {
    check(corpora, &full()).expect("a report")
}

fn rows(report: &Report, rule: &str, split: &str) -> BTreeSet<u64> {
    let found = report.findings.iter().filter(|f| f.rule == rule && f.split == split);
    found.flat_map(|f| f.rows.iter().copied()).collect()
}

/// Distinct multiples of `unit` below `n`.
fn draw(seed: u64, count: usize, n: u64, unit: u64) -> Vec<u64> {
    let mut out = BTreeSet::new();
    (0..)
        .map(|k| mix(seed << 40 | k) % (n / unit) * unit)
        .take_while(|at| {
            out.insert(*at);
            out.len() < count
        })
        .for_each(drop);
    out.into_iter().collect()
}

#[track_caller]
fn recalled(found: &BTreeSet<u64>, planted: &[u64]) {
    let hits = planted.iter().filter(|p| found.contains(p)).count();
    assert!(hits * 100 >= planted.len() * 99, "{hits} of {}", planted.len());
    assert!((found.len() - hits) * 100 <= planted.len(), "{} false alarms", found.len() - hits);
}

#[test]
fn clean_corpora_have_no_findings() {
    for (vocabulary, context) in [(50_000, 1024), (50_000, 64), (1_000, 256)] {
        let found = report(&parts(&words(1, 400_000, vocabulary), context));
        assert_eq!(found.findings, [], "{}", found.text());
        assert!(found.text().contains("train: 360000 tokens"), "{}", found.text());
    }
    assert_eq!(report(&[]).findings, []);
    assert_eq!(report(&parts(&[1, 2, 3], 2)).findings, []);
}

#[test]
fn a_book_has_no_findings() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/data/alice.txt");
    let text = std::fs::read_to_string(path).expect("the book of the recipes");
    let characters = Vocabulary::of(&text);
    let ids = characters.encode(&text, DType::I64).expect("ids").to_i64();
    for context in [32, 64, 128, 256] {
        let mut corpora = parts(&ids, context);
        corpora.iter_mut().for_each(|c| c.characters = Some(characters.clone()));
        let found = report(&corpora);
        assert_eq!(found.findings, [], "{context}: {}", found.text());
        // A window that is copied is found, and shown as text.
        let n = corpora[1].part.start;
        let unit = corpora[1].stretch(64);
        let mut bad = ids.clone();
        bad.copy_within((n + 3 * unit) as usize..(n + 4 * unit) as usize, 777);
        let mut corpora = parts(&bad, context);
        corpora.iter_mut().for_each(|c| c.characters = Some(characters.clone()));
        let found = report(&corpora);
        assert_eq!(rows(&found, "leakage", "valid"), BTreeSet::from([n + 3 * unit]), "{context}: {}", found.text());
        let shown = &found.findings[0].examples[0];
        let near = shown.other.as_deref().is_some_and(|other| other.starts_with("train: token 7"));
        assert!(near && shown.excerpt.contains(' '), "{shown:?}");
    }
}

#[test]
fn planted_faults_are_found() {
    for (vocabulary, context) in [(50_000u64, 256u64), (300, 512), (2_000, 128)] {
        let mut ids = words(5, 1_000_000, vocabulary);
        let high = 900_000;
        // One window in a hundred each; the training part is written in its halves, so that faults do not meet.
        let n = 450_000 / context * context;
        let unit = parts(&ids, context)[1].stretch(run_length(vocabulary));
        let count = (100_000 / unit / 100).max(3) as usize;
        let leaked: Vec<u64> = draw(1, count, 100_000 / unit * unit, unit).iter().map(|at| high + at).collect();
        let to = draw(2, count, n, unit.next_multiple_of(context));
        for (from, to) in leaked.iter().zip(&to) {
            ids.copy_within(*from as usize..(from + unit) as usize, *to as usize + 5);
        }
        let doubled = draw(3, (n / context / 50) as usize, n / 2 / (2 * context) * 2 * context, 2 * context);
        for at in &doubled {
            let from = (n + n / 4 + 2 * at / 3) as usize;
            ids.copy_within((n + at) as usize..(n + at + context) as usize, from.min(890_000));
        }
        let outside: Vec<u64> =
            draw(4, 100, high, 1).into_iter().filter(|at| !to.iter().any(|t| t.abs_diff(*at) < 2 * unit)).collect();
        let mut corpora = parts(&ids, context);
        let found = report(&corpora);
        recalled(&rows(&found, "leakage", "valid"), &leaked);
        assert!(found.faults().any(|f| f.rule == "exact-duplicates" && f.split == "train"), "{}", found.text());
        assert_eq!(rows(&found, "token-range", "train"), BTreeSet::new());
        outside.iter().for_each(|at| ids[*at as usize] = vocabulary as i64 + (at % 7) as i64);
        let constant = draw(6, (n / context / 100) as usize, n, context);
        for at in &constant {
            ids[*at as usize..(at + context) as usize].fill(7);
        }
        corpora = parts(&ids, context);
        corpora.iter_mut().for_each(|c| c.vocabulary = Some(vocabulary));
        let found = report(&corpora);
        let left: Vec<u64> = outside.into_iter().filter(|at| ids[*at as usize] >= vocabulary as i64).collect();
        assert_eq!(rows(&found, "token-range", "train"), left.iter().copied().collect());
        recalled(&rows(&found, "constant-windows", "train"), &constant);
        assert!(found.faults().any(|f| f.rule == "constant-windows"), "{}", found.text());
    }
}

#[test]
fn doubled_windows_are_counted_and_placed() {
    let context = 256;
    let mut ids = words(9, 500_000, 50_000);
    let at = draw(7, 20, 200_000, 2 * context);
    // 1 % of the training tokens, each a copy behind its original.
    for at in &at {
        ids.copy_within(*at as usize..(at + context) as usize, *at as usize + 200_000);
    }
    let found = report(&parts(&ids, context));
    let Some(finding) = found.findings.iter().find(|f| f.rule == "exact-duplicates") else {
        panic!("{}", found.text())
    };
    assert!(finding.count.abs_diff(20 * context) <= context, "{}", finding.what);
    recalled(&rows(&found, "exact-duplicates", "train"), &at.iter().map(|at| at + 200_000).collect::<Vec<_>>());
    assert!(finding.what.contains("about 1.1 % of 450000 tokens"), "{}", finding.what);
    assert_eq!(found.findings.len(), 1, "{}", found.text());
    let example = &finding.examples[0];
    assert_eq!(example.place, format!("train: token {}", at[0] + 200_000));
    assert_eq!(example.other, Some(format!("train: token {}", at[0])));
}

#[test]
fn rulers_are_no_fault_and_holes_are() {
    let mut ids = words(2, 300_000, 50_000);
    ids[1_000..1_063].fill(3);
    assert_eq!(report(&parts(&ids, 32)).findings, []);
    ids[1_000..1_064].fill(3);
    let found = report(&parts(&ids, 32));
    assert_eq!((found.findings.len(), found.faults().count()), (1, 0), "{}", found.text());
    // A hole across blocks.
    ids[250_000..270_000].fill(0);
    let found = report(&parts(&ids, 1024));
    let Some(hole) = found.faults().next() else { panic!("{}", found.text()) };
    assert!(hole.rule == "constant-windows" && hole.what.contains("the longest stretch has 20000"), "{}", hole.what);
    assert_eq!(least_same(&parts(&ids, 1024)[0]), 1024);
}

#[test]
fn a_sample_is_spread_and_bounded_and_a_request_ends_the_check() {
    let mut ids = words(3, 6_000_000, 50_000);
    let from = 5_400_000 + 1024 * 7;
    ids.copy_within(from..from + 1024 * 40, 1_000_000);
    let corpora = parts(&ids, 1024);
    let some = Options { tokens: 1 << 20, ..full() };
    let found = check(&corpora, &some).expect("a report");
    assert!(found.splits.iter().all(|s| s.checked <= 1 << 20), "{}", found.text());
    assert!(found.remarks.iter().any(|r| r.starts_with("train: 1048576 of 5400000")), "{:?}", found.remarks);
    let quick =
        check(&corpora, &Options::quick(Interrupt::default(), Some(Duration::from_secs(60)))).expect("a report");
    assert_eq!(quick.faults().filter(|f| f.rule == "leakage").map(|f| f.count).sum::<u64>(), 40, "{}", quick.text());
    let none = check(&corpora, &Options::quick(Interrupt::default(), Some(Duration::ZERO))).expect("a report");
    assert!(none.splits.iter().all(|s| s.checked == 0) && none.faults().count() == 0, "{}", none.text());
    let stopped = Interrupt::default();
    stopped.request();
    assert!(matches!(check(&corpora, &Options::full(stopped)), Err(Error::Interrupted)));
    let mut beyond = corpora[0].clone();
    beyond.part.end = 7_000_000;
    assert!(check(&[beyond], &full()).is_err_and(|e| e.to_string().contains("are not in a corpus of 6000000")));
}

#[test]
fn ids_that_are_none_are_a_finding() {
    let mut ids = words(4, 10_000, 1_000);
    ids[3] = -1;
    let found = report(&[part("train", &memory(&ids), 0..10_000, 128)]);
    let Some(fault) = found.faults().next() else { panic!("{}", found.text()) };
    assert!(fault.rule == "unreadable" && fault.what.contains("token 3 is negative"), "{}", fault.what);
}
