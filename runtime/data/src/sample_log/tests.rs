use super::*;
use std::path::Path;

fn entry(row: u64, loss: f32) -> Entry {
    Entry { step: 0, id: SampleId { source: 0, row, sub: 0 }, loss, weight: 1.0, gradient: loss / 2.0 }
}

/// Steps of four samples each: sample `row` has the loss `row / step`.
fn filled(steps: u32) -> SampleLog {
    let mut log = SampleLog::new("run");
    assert_eq!(log.source("a.jsonl"), 0);
    for step in 1..=steps {
        let rows = (0..4).map(|k| (u64::from(step) * 4 + k) % 10);
        log.add(step, rows.map(|row| entry(row, row as f32 / step as f32))).expect("added");
    }
    log
}

fn file(log: &SampleLog) -> Vec<u8> {
    log.blocks().0.iter().flat_map(|b| b.bytes.clone()).collect()
}

/// What both logs answer.
fn same(a: &SampleLog, b: &SampleLog, steps: u32) {
    for step in 0..=steps + 1 {
        assert_eq!(a.samples(step).expect("read"), b.samples(step).expect("read"), "step {step}");
    }
    assert_eq!(a.worst(100, Order::Mean), b.worst(100, Order::Mean));
    assert_eq!((a.len(), a.last_step(), a.sources()), (b.len(), b.last_step(), b.sources()));
}

#[test]
fn statistics_equal_those_of_the_list() {
    let log = filled(25);
    let mut losses: Vec<Vec<f64>> = vec![Vec::new(); 10];
    for step in 1..=25 {
        let entries = log.samples(step).expect("read");
        assert_eq!(entries.len(), 4);
        entries.iter().for_each(|e| losses[e.id.row as usize].push(f64::from(e.loss)));
    }
    for (row, all) in losses.iter().enumerate() {
        let s = log.of(SampleId { source: 0, row: row as u64, sub: 0 }).expect("seen");
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        let variance = all.iter().map(|l| (l - mean).powi(2)).sum::<f64>() / (all.len() - 1) as f64;
        assert_eq!(s.count as usize, all.len());
        assert!((s.mean - mean).abs() < 1e-12 && (s.deviation() - variance.sqrt()).abs() < 1e-9, "{s:?}");
    }
    let rows: Vec<u64> = log.worst(3, Order::Mean).iter().map(|(id, _)| id.row).collect();
    let mut order: Vec<usize> = (0..10).collect();
    let mean = |k: usize| losses[k].iter().sum::<f64>() / losses[k].len() as f64;
    order.sort_by(|a, b| mean(*b).total_cmp(&mean(*a)));
    assert_eq!(rows, order[..3].iter().map(|k| *k as u64).collect::<Vec<_>>());
}

#[test]
fn a_sample_without_a_loss_has_no_place_among_the_worst() {
    let mut log = SampleLog::new("run");
    log.add(1, [entry(0, f32::NAN), entry(1, 0.5)]).expect("added");
    assert_eq!(log.worst(9, Order::Last).len(), 1);
    assert_eq!(log.of(SampleId { source: 0, row: 0, sub: 0 }).expect("seen").count, 0);
    assert!(log.worst(0, Order::Last).is_empty());
}

#[test]
fn a_step_that_is_taken_again_replaces_the_later_ones() {
    let mut log = filled(20);
    log.seal().expect("sealed");
    for step in 21..=30 {
        log.add(step, [entry(3, 1.0)]).expect("added");
    }
    let before = log.blocks().1;
    log.add(21, [entry(5, 2.0)]).expect("added");
    assert_eq!((log.last_step(), log.blocks().1), (21, before), "no block went");
    log.rewind(12).expect("rewound");
    same(&log, &filled(12), 20);
    assert_eq!(log.blocks().1, before + 1);
}

#[test]
fn a_file_is_read_up_to_a_step() {
    let mut log = filled(9);
    log.seal().expect("sealed");
    log.source("b.jsonl");
    for step in 10..=15 {
        let id = SampleId { source: 1, row: u64::from(step), sub: 2 };
        log.add(step, [Entry { id, ..entry(0, 1.0) }]).expect("added");
    }
    let head = log.head();
    log.seal().expect("sealed");
    let bytes = file(&log);
    let read = |bytes: &[u8], step| decode(bytes, "run", step, Path::new("samples.bin"));
    same(&read(&bytes, 100).expect("whole"), &log, 20);
    let mut cut = read(&bytes, 7).expect("cut");
    assert_eq!(cut.sources(), ["a.jsonl", "b.jsonl"]);
    cut.source("c.jsonl");
    cut.add(8, [entry(1, 3.0)]).expect("added");
    cut.seal().expect("sealed");
    let again = read(&file(&cut), 100).expect("whole");
    same(&again, &cut, 20);
    assert!(read(&bytes, 100).expect("whole").passes(&head));
    // A torn end is left out; the first block is whole.
    let torn = read(&bytes[..bytes.len() - 1], 100).expect("torn");
    assert_eq!((torn.last_step(), torn.head()), (9, head));
}

#[test]
fn damage_is_an_error() {
    let mut log = filled(30);
    log.seal().expect("sealed");
    let bytes = file(&log);
    for at in 0..bytes.len() {
        let mut broken = bytes.clone();
        broken[at] ^= 0x40;
        match decode(&broken, "run", 100, Path::new("samples.bin")) {
            // A length that is too large reads as a torn end.
            Ok(read) => assert!(read.is_empty(), "byte {at}"),
            Err(error) => assert!(error.to_string().contains("samples.bin"), "{error}"),
        }
    }
    assert!(decode(&bytes, "another run", 100, Path::new("samples.bin")).is_err());
}
