//! Compares pipelines with a naive implementation over lists, and checks the rules of single stages.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::records::{Field, Fingerprint, Length, List, Record, RecordFn, Value};
use crate::sample_order::{Permutation, Stream};
use perilune_core::Interrupt;
use perilune_core::philox::philox4x32;

struct Native<F>(&'static str, F);

impl<F: Fn(Record) -> Value + Send + Sync + 'static> RecordFn for Native<F> {
    fn call(&self, record: Record, _index: u64) -> Result<Value> {
        match (self.1)(record) {
            Value::Text(text) if &*text == "fail" => Err(Error::function("it failed")),
            value => Ok(value),
        }
    }

    fn place(&self) -> &str {
        self.0
    }

    fn fingerprint(&self) -> Fingerprint {
        crate::records::hash::stage(self.0, &[], &[])
    }
}

fn record(id: i64) -> Record {
    Record {
        fields: vec![("id".into(), Value::Int(id)), ("text".into(), Value::Text("x".repeat(id as usize % 5).into()))],
    }
}

fn list(n: i64) -> Arc<dyn Dataset> {
    Arc::new(List::new("list", (0..n).map(record).collect()))
}

fn id(record: &Record) -> i64 {
    match record.get("id") {
        Some(Value::Int(i)) => *i,
        _ => -1,
    }
}

fn scan(threads: usize) -> Scan {
    Scan::new(Some(threads), Interrupt::default()).unwrap()
}

fn ids(dataset: &dyn Dataset, epochs: u64) -> Vec<i64> {
    (0..dataset.len() * epochs).map(|i| id(&dataset.get(i).unwrap())).collect()
}

fn with_id(mut record: Record, to: i64) -> Record {
    record.set("id", Value::Int(to));
    record
}

/// A dataset and, for each of some epochs, its records by the definition of the stages.
struct Pair {
    real: Arc<dyn Dataset>,
    naive: Vec<Vec<Record>>,
}

const EPOCHS: u64 = 3;
/// Stages that `grow` chooses from.
const CHOICES: u32 = 11;

/// Appends a random stage to both.
fn grow(p: Pair, choice: u32, number: u32, threads: usize) -> Pair {
    let Pair { real, naive } = p;
    let scan = scan(threads);
    let n = u64::from(number % 7);
    let each = |f: &dyn Fn(&Vec<Record>) -> Vec<Record>| naive.iter().map(f).collect::<Vec<_>>();
    match choice % CHOICES {
        0 => {
            let keep = move |r: &Record| !(id(r) as u64).is_multiple_of(n + 2);
            let f = Native("filter", move |r: Record| Value::Bool(keep(&r)));
            // Behind a shuffle, what is kept is shuffled, as if the filter came first.
            let naive = match real.unshuffled() {
                Some((inner, seed)) => {
                    let kept: Vec<Record> =
                        (0..inner.len()).map(|i| inner.get(i).unwrap()).filter(|r| keep(r)).collect();
                    shuffled(&vec![kept; EPOCHS as usize], seed)
                }
                None => each(&|e| e.iter().filter(|r| keep(r)).cloned().collect()),
            };
            Pair { real: commute("filter", &real, |inner| filter(inner, &f, &scan)).unwrap(), naive }
        }
        1 => {
            let many = move |r: &Record| {
                (0..id(r).rem_euclid(3)).map(|k| with_id(r.clone(), id(r) * 3 + k)).collect::<Vec<_>>()
            };
            let f = Native("flat_map", move |r: Record| Value::List(many(&r).into_iter().map(Value::Map).collect()));
            let made =
                commute("flat_map", &real, |inner| Ok(Arc::new(FlatMap::new(inner, Arc::new(f), &scan)?))).unwrap();
            // Behind a shuffle the results are shuffled one by one.
            let naive = match real.unshuffled() {
                Some((inner, seed)) => {
                    let flat: Vec<Record> = (0..inner.len()).flat_map(|i| many(&inner.get(i).unwrap())).collect();
                    shuffled(&vec![flat; EPOCHS as usize], seed)
                }
                None => each(&|e| e.iter().flat_map(many).collect()),
            };
            Pair { real: made, naive }
        }
        2 => Pair {
            naive: each(&|e| e.iter().take(n as usize + 3).cloned().collect()),
            real: Arc::new(Range::new(real, 0, n + 3)),
        },
        3 => Pair {
            naive: each(&|e| e.iter().skip(n as usize).cloned().collect()),
            real: Arc::new(Range::new(real, n, u64::MAX)),
        },
        4 => {
            let f = Native("map", move |r: Record| Value::Map(with_id(r.clone(), id(&r) + 1)));
            let naive = each(&|e| e.iter().map(|r| with_id(r.clone(), id(r) + 1)).collect());
            Pair { real: Arc::new(Map::new(real, Arc::new(f))), naive }
        }
        5 => {
            let other = list(n as i64 + 1);
            let naive = each(&|e| e.iter().cloned().chain((0..n as i64 + 1).map(record)).collect());
            Pair { real: Arc::new(Concat::new(vec![real, other])), naive }
        }
        6 => {
            let other = list(n as i64 + 1);
            let naive =
                each(&|e| e.iter().cloned().zip((0..n as i64 + 1).map(record)).flat_map(|(a, b)| [a, b]).collect());
            Pair { real: Arc::new(Interleave::new(vec![real, other])), naive }
        }
        7 if !real.varies() => {
            Pair { naive: shuffled(&naive, u64::from(number)), real: Arc::new(Shuffle::new(real, u64::from(number))) }
        }
        8 if !real.varies() => {
            let key = |r: &Record| id(r).rem_euclid(4);
            let f = Native("sort", move |r: Record| Value::Int(key(&r)));
            let descending = number.is_multiple_of(2);
            let naive = each(&|e| {
                let mut e = e.clone();
                e.sort_by_key(|r| if descending { -key(r) } else { key(r) });
                e
            });
            Pair { real: sort(real, &f, descending, &scan).unwrap(), naive }
        }
        9 if !real.varies() => {
            let naive = each(&|e| {
                let mut seen = std::collections::HashSet::new();
                e.iter().filter(|r| seen.insert(id(r))).cloned().collect()
            });
            Pair { real: unique(real, &["id".to_string()], &scan).unwrap(), naive }
        }
        10 if !real.varies() => {
            let rewrites =
                |r: &Record| (0..id(r).rem_euclid(3)).map(|k| with_id(r.clone(), id(r) * 5 + k)).collect::<Vec<_>>();
            let replace = number.is_multiple_of(2);
            let lists = naive[0].iter().map(rewrites).collect();
            let naive = each(&|e| {
                let original = |r: &Record| (!replace || rewrites(r).is_empty()).then(|| r.clone());
                e.iter().flat_map(|r| original(r).into_iter().chain(rewrites(r))).collect()
            });
            Pair { real: Rewritten::of(real, lists, replace).unwrap(), naive }
        }
        _ => Pair { real, naive },
    }
}

fn shuffled(epochs: &[Vec<Record>], seed: u64) -> Vec<Vec<Record>> {
    let order = |(e, records): (usize, &Vec<Record>)| {
        let order = Permutation::new(records.len() as u64, seed, e as u64, Stream::Shuffle);
        (0..records.len() as u64).map(|i| records[order.at(i) as usize].clone()).collect()
    };
    epochs.iter().enumerate().map(order).collect()
}

/// `PERILUNE_FUZZ_COUNT` sets the number of pipelines.
#[test]
fn random_pipelines_equal_lists() {
    let count = std::env::var("PERILUNE_FUZZ_COUNT").ok().and_then(|n| n.parse().ok()).unwrap_or(400u32);
    let mut longest = 0;
    for seed in 0..count {
        let mut counter = 0;
        let mut draw = || {
            counter += 1;
            philox4x32([counter, 0, 0, 0], [seed, 7])[0]
        };
        let n = i64::from(draw() % 40) + 1;
        let mut pair = Pair { real: list(n), naive: vec![(0..n).map(record).collect(); EPOCHS as usize] };
        let threads = [1, 2, 7][draw() as usize % 3];
        for _ in 0..draw() % 6 {
            // A stage needs equal epochs unless it is behind a shuffle alone.
            let (choice, number) = (draw(), draw());
            if choice % CHOICES < 2 && pair.real.varies() && pair.real.unshuffled().is_none() {
                continue;
            }
            pair = grow(pair, choice, number, threads);
        }
        let len = pair.real.len();
        longest = longest.max(len);
        let naive: Vec<Record> = pair.naive.concat();
        assert_eq!(naive.len() as u64, len * EPOCHS, "pipeline {seed}");
        let mut indices: Vec<u64> = (0..len * EPOCHS).collect();
        // In another order, as workers ask.
        indices.sort_by_key(|i| philox4x32([*i as u32, 1, 0, 0], [seed, 9])[0]);
        for (i, r) in indices.iter().zip(pair.real.get_many(&indices).unwrap()) {
            assert_eq!(r, naive[*i as usize], "pipeline {seed}, record {i}");
            assert_eq!(r, pair.real.get(*i).unwrap(), "pipeline {seed}, record {i}");
        }
        // Each epoch has each record once, whatever the order.
        for epoch in 0..EPOCHS {
            let mut found: Vec<i64> =
                (epoch * len..(epoch + 1) * len).map(|i| id(&pair.real.get(i).unwrap())).collect();
            let mut want: Vec<i64> = pair.naive[epoch as usize].iter().map(id).collect();
            found.sort_unstable();
            want.sort_unstable();
            assert_eq!(found, want, "pipeline {seed}, epoch {epoch}");
        }
    }
    assert!(longest > 20, "all pipelines are short: {longest}");
}

#[test]
fn a_stage_behind_a_shuffle_applies_to_what_is_shuffled() {
    let even = Native("even", |r: Record| Value::Bool(id(&r) % 2 == 0));
    let first: Arc<dyn Dataset> = Arc::new(Shuffle::new(filter(list(20), &even, &scan(2)).unwrap(), 5));
    let behind: Arc<dyn Dataset> = Arc::new(Shuffle::new(list(20), 5));
    let behind = commute("filter", &behind, |inner| filter(inner, &even, &scan(2))).unwrap();
    assert_eq!(ids(&*first, 3), ids(&*behind, 3));
    assert_eq!(first.fingerprint(), behind.fingerprint());
    let taken: Arc<dyn Dataset> = Arc::new(Range::new(behind, 0, 5));
    let refused = commute("filter", &taken, |inner| filter(inner, &even, &scan(1))).err().unwrap().to_string();
    assert!(refused.contains("every epoch"), "{refused}");
}

#[test]
fn a_rewrite_names_the_record_that_it_is_made_of() {
    let text = |n: i64| vec![record(n + 100)];
    let of = |lists: Vec<Vec<Record>>, replace| Rewritten::of(list(3), lists, replace);
    let set = of(vec![text(0), vec![], [text(2), text(3)].concat()], false).unwrap();
    assert_eq!(ids(&*set, 2), [0, 100, 1, 2, 102, 103, 0, 100, 1, 2, 102, 103]);
    let origins: Vec<(u64, u32, bool)> = (6..12)
        .map(|i| {
            let origin = set.origins(i).unwrap().remove(0);
            (origin.row, origin.sub, origin.rewritten)
        })
        .collect();
    assert_eq!(origins, [(0, 0, false), (0, 1, true), (1, 0, false), (2, 0, false), (2, 1, true), (2, 2, true)]);
    let prints = [
        of(vec![text(0), vec![], vec![]], false),
        of(vec![text(1), vec![], vec![]], false),
        of(vec![vec![], text(0), vec![]], false),
        of(vec![text(0), vec![], vec![]], true),
    ]
    .map(|set| set.unwrap().fingerprint());
    assert!((0..4).all(|a| (0..a).all(|b| prints[a] != prints[b])), "{prints:?}");
    assert!(of(vec![text(0)], false).err().unwrap().to_string().contains("1 lists of rewrites were given for 3"));
    let shuffle: Arc<dyn Dataset> = Arc::new(Shuffle::new(list(3), 1));
    assert!(Rewritten::of(shuffle, vec![vec![]; 3], false).err().unwrap().to_string().contains("every epoch"));
}

#[test]
fn a_mixture_has_its_shares_and_each_record_once_an_epoch() {
    let parts = |weights: [f64; 2]| {
        vec![
            ("a".to_string(), list(300), weights[0]),
            (
                "b".to_string(),
                Arc::new(Map::new(
                    list(50),
                    Arc::new(Native("far", |r: Record| Value::Map(with_id(r.clone(), id(&r) + 1000)))),
                )) as Arc<dyn Dataset>,
                weights[1],
            ),
        ]
    };
    let mix = Mix::new(parts([3.0, 1.0]), 1, false).unwrap();
    for block in 0..3 {
        let far = (block * 1024..(block + 1) * 1024).filter(|i| id(&mix.get(*i).unwrap()) >= 1000).count();
        assert_eq!(far, 256, "block {block}");
    }
    let first: Vec<i64> = (0..1024).map(|i| id(&mix.get(i).unwrap())).filter(|i| *i < 1000).collect();
    let times = |want: i64| first.iter().filter(|i| **i == want).count();
    assert!((0..300).all(|i| (2..=3).contains(&times(i))), "768 places are 2.56 epochs of 300");
    let error = Mix::new(parts([1.0, 1e-6]), 1, false).err().unwrap().to_string();
    assert!(error.contains("'b'") && error.contains("1/1024"), "{error}");
}

#[test]
fn equal_records_stay_in_one_part_and_new_ones_move_none() {
    let part_of = |n: i64, low, high| ids(&*part(list(n), 3, low, high, &scan(2)).unwrap(), 1);
    let (train, valid) = (part_of(1000, 0.0, 0.8), part_of(1000, 0.8, 1.0));
    assert_eq!(train.len() + valid.len(), 1000);
    assert!((750..850).contains(&train.len()), "{}", train.len());
    assert!(train.iter().all(|i| part_of(2000, 0.0, 0.8).contains(i)));
}

#[test]
fn packed_documents_are_whole_and_masked() {
    let documents: Vec<Vec<i64>> = (0..40).map(|k| (0..k % 7 + 1).map(|t| 100 * k + t).collect()).collect();
    let ints = |ids: &[i64]| Value::List(ids.iter().map(|i| Value::Int(*i)).collect());
    let records = documents
        .iter()
        .map(|d| Record { fields: vec![("ids".into(), ints(d)), ("mask".into(), ints(&vec![1; d.len()]))] });
    let inner: Arc<dyn Dataset> = Arc::new(List::new("docs", records.collect()));
    let options =
        PackOptions { length: 9, ids: "ids".into(), mask: Some("mask".into()), padding: 7, too_long: TooLong::Error };
    let packed = pack(inner.clone(), options.clone(), &scan(2)).unwrap();
    let mut found: Vec<Vec<i64>> = Vec::new();
    for i in 0..packed.len() {
        let r = packed.get(i).unwrap();
        let field = |name: &str| match r.get(name) {
            Some(Value::Array(a)) => a.to_i64(),
            other => panic!("{name} is {other:?}"),
        };
        let (x, y, docs, positions) = (field("x"), field("y"), field("documents"), field("positions"));
        assert!([x.len(), y.len(), docs.len(), positions.len()] == [9; 4]);
        for t in 0..9 {
            if positions[t] == 0 && x[t] != 7 {
                found.push(vec![x[t]]);
            } else if x[t] != 7 {
                found.last_mut().unwrap().push(x[t]);
            }
            // A target is the next token of the same document.
            assert!(y[t] == IGNORED || y[t] == x[t] + 1, "{x:?} {y:?}");
            let inside = t + 1 < 9 && docs[t + 1] == docs[t] && x[t + 1] != 7;
            assert!(!inside || y[t] == x[t + 1], "{x:?} {y:?}");
        }
    }
    // A document of one token trains nothing: at the end of a window it is left out.
    let mut want: Vec<i64> = documents.iter().filter(|d| d.len() > 1).map(|d| d[0]).collect();
    let mut starts: Vec<i64> = found.iter().map(|d| d[0]).filter(|first| first % 700 != 0).collect();
    starts.sort_unstable();
    want.sort_unstable();
    assert_eq!(starts, want);
    let none = Record { fields: vec![("ids".into(), ints(&[1, 2, 3])), ("mask".into(), ints(&[1, 0, 1]))] };
    let masked: Arc<dyn Dataset> = Arc::new(List::new("docs", vec![none]));
    let by_default = pack(masked, PackOptions { mask: None, length: 3, ..options.clone() }, &scan(1)).unwrap();
    let Some(Value::Array(y)) = by_default.get(0).unwrap().get("y").cloned() else { panic!("y is no array") };
    assert_eq!(y.to_i64(), [IGNORED, 3, IGNORED]);
    let error = pack(inner, PackOptions { length: 4, ..options }, &scan(1)).err().unwrap().to_string();
    assert!(error.contains("docs: record 5") && error.contains("6 tokens"), "{error}");
}

#[test]
fn joins_groups_windows_and_buckets() {
    let far = Native("far", |r: Record| {
        Value::Map(Record { fields: vec![("id".into(), Value::Int(id(&r) * 2)), ("y".into(), Value::Int(id(&r)))] })
    });
    let other: Arc<dyn Dataset> = Arc::new(Map::new(list(10), Arc::new(far)));
    let joined = join(list(8), other.clone(), "id", &scan(2)).unwrap();
    assert_eq!(ids(&*joined, 1), [0, 2, 4, 6]);
    assert_eq!(joined.get(3).unwrap().get("y"), Some(&Value::Int(3)));
    let twice: Arc<dyn Dataset> = Arc::new(Concat::new(vec![other.clone(), other]));
    assert!(join(list(8), twice, "id", &scan(2)).err().unwrap().to_string().contains("distinct"));
    let groups = group(list(10), &Length("text".into()), &scan(2)).unwrap();
    assert_eq!(groups.len(), 5);
    assert_eq!(groups.get(1).unwrap().get("key"), Some(&Value::Int(1)));
    assert_eq!(groups.origins(1).unwrap().len(), 2);
    let windows = Windows::new(list(10), 4, 3);
    assert_eq!(windows.len(), 3);
    let last = windows.get(2).unwrap();
    assert_eq!(last.get("id"), Some(&Value::List((6..10).map(Value::Int).collect())));
    let sorted = sort(list(20), &Length("text".into()), false, &scan(2)).unwrap();
    let bucket = Bucket::new(sorted, 4, 3);
    for e in 0..2 {
        for batch in 0..5 {
            let lengths: Vec<i64> = (0..4).map(|k| id(&bucket.get(e * 20 + batch * 4 + k).unwrap()) % 5).collect();
            assert!(lengths.iter().all(|l| *l == lengths[0]), "{lengths:?}");
        }
    }
    assert_ne!(ids(&bucket, 1), ids(&bucket, 2)[20..]);
}

#[test]
fn an_error_names_the_first_record_in_order() {
    let f = Native("keep", |r: Record| if id(&r) >= 700 { Value::Text("fail".into()) } else { Value::Bool(true) });
    for threads in [1, 2, 7] {
        let error = filter(list(2000), &f, &scan(threads)).err().unwrap().to_string();
        assert_eq!(error, "list: record 700: it failed");
    }
    let wrong = filter(list(5), &Field("text".into()), &scan(1)).err().unwrap().to_string();
    assert!(wrong.contains("returns a string") && wrong.contains("true or false"), "{wrong}");
}

/// A recipe may ask for any record; a range of a large dataset multiplies its index.
#[test]
fn no_index_overflows() {
    let one: Arc<dyn Dataset> = Arc::new(Range::new(list(1000), 3, 1));
    let twice: Arc<dyn Dataset> = Arc::new(Concat::new(vec![one.clone(), Arc::new(Shuffle::new(one, 1))]));
    for index in [i64::MAX as u64, 1 << 62, 1 << 53] {
        assert_eq!(id(&twice.get(index).unwrap()), 3, "{index}");
    }
}
