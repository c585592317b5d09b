//! Experts that move among devices between two steps, and their replicas: results equal those of one device where nothing moves.

use super::{MODEL, STEPS, open, start};
use perilune_core::HostTensor;
use perilune_lua::{DroppedStates, Run, Source, Taking};
use perilune_tests::outcome::Outcome;

/// Weights of experts, and what has their rows.
const OF_EXPERTS: [&str; 3] = ["mlp.up", "mlp.gate", "mlp.down"];
const LOAD: &str = "expert_load";

fn states_of(run: &Run) -> Vec<(String, HostTensor)> {
    let mut states = Vec::new();
    run.each_state(|path, t| states.push((path, t))).unwrap();
    states
}

/// Puts the rows of experts into the order of their numbers, and leaves out where they were.
fn by_expert(states: Vec<(String, HostTensor)>) -> Vec<(String, HostTensor)> {
    let rows = |path: &str| {
        let (_, from_block) = path.split_once("blocks.").unwrap();
        let block = from_block.split('.').next().unwrap();
        let name = format!("model.blocks.{block}.mlp.placement.rows");
        states.iter().find(|(path, _)| *path == name).map(|(_, t)| t.to_i64())
    };
    let sorted = |path: &str, t: &HostTensor| {
        let Some(rows) = rows(path) else { return t.clone() };
        let size = t.bytes.len() / rows.len();
        let bytes = rows.iter().flat_map(|row| &t.bytes[*row as usize * size..][..size]).copied().collect();
        HostTensor::new(t.dtype, t.shape, bytes)
    };
    let kept = states.iter().filter(|(path, _)| !path.contains(".placement."));
    let moved = |path: &str| OF_EXPERTS.iter().any(|name| path.ends_with(name));
    kept.map(|(path, t)| (path.clone(), if moved(path) { sorted(path, t) } else { t.clone() })).collect()
}

/// What a run comes to, without its placement and the loads of devices, and these loads.
fn trained(mode: &str, params: &[(&str, &str)], steps: usize) -> (Outcome, Vec<f64>, usize) {
    let run = start(&open(mode, params), MODEL).unwrap_or_else(|e| panic!("{mode} {params:?}: {e}"));
    let all = Outcome::of(&run, steps);
    let moved = moved_rows(&all.states);
    let (loads, values): (Vec<_>, Vec<_>) = all.values.into_iter().partition(|(name, _)| name == LOAD);
    (Outcome { values, states: by_expert(all.states) }, loads.into_iter().map(|(_, v)| v).collect(), moved)
}

/// The rows of a model that have other experts than at the start, and replicas of others.
fn moved_rows(states: &[(String, HostTensor)]) -> usize {
    let tables =
        |name: &'static str| states.iter().filter(move |(path, _)| path.starts_with("model.") && path.ends_with(name));
    let rows = tables("placement.rows").flat_map(|(_, t)| t.to_i64().into_iter().enumerate());
    let experts = tables("placement.rows").next().map_or(0, |(_, t)| t.numel() as i64);
    let sources = tables("placement.sources").flat_map(|(_, t)| t.to_i64().into_iter().enumerate());
    rows.filter(|(e, row)| *e as i64 != *row).count()
        + sources.filter(|(q, row)| experts - 1 - *q as i64 % experts != *row).count()
}

/// Compares runs whose experts move with one device, where none does.
fn equals_one_device(params: &[(&str, &str)], replicas: &str, modes: &[&str]) {
    let (one, _, _) = trained("", params, STEPS);
    assert!(one.is_finite());
    let rebalanced = [params, &[("rebalance", "3"), ("replicas", replicas)]].concat();
    for mode in [&[""], modes].concat() {
        let (own, _, moved) = trained(mode, &rebalanced, STEPS);
        let (off, what) = one.difference(&own);
        assert!(off <= 1e-10, "{params:?} on {mode}: {off:e} in {what}");
        assert!(mode.is_empty() || !mode.contains("ep=") || moved > 0, "{params:?} on {mode}: nothing has moved");
    }
}

#[test]
fn moved_experts_are_the_same_functions() {
    equals_one_device(&[], "0", &["ep=2", "ep=4"]);
    equals_one_device(&[("skewed", "true")], "0", &["ep=2", "dp=2", "dp=2,ep=2", "ep=2,tp=2"]);
    equals_one_device(&[("top", "1"), ("mlp", "gelu")], "0", &["ep=4", "cp=2,ep=2"]);
}

#[test]
fn replicas_are_the_same_functions() {
    equals_one_device(&[], "4", &["ep=2", "ep=4"]);
    equals_one_device(&[("skewed", "true")], "8", &["ep=8"]);
    equals_one_device(&[("skewed", "true")], "2", &["ep=2", "dp=2", "dp=2,ep=2", "ep=2,tp=2"]);
    equals_one_device(&[("batch", "5"), ("top", "3")], "2", &["ep=2", "cp=2,ep=2"]);
}

#[test]
fn moments_and_averages_move_too() {
    equals_one_device(&[("ema", "true")], "2", &["ep=2", "ep=2,zero=1"]);
    equals_one_device(&[("skewed", "true")], "0", &["ep=4,zero=3", "dp=2,ep=2,zero=3"]);
    equals_one_device(&[("optimizer", "adafactor"), ("skewed", "true")], "2", &["ep=2"]);
}

#[test]
fn recomputed_and_accumulated() {
    equals_one_device(&[("checkpoint", "true")], "2", &["ep=2"]);
    equals_one_device(&[("accumulate", "2")], "2", &["ep=2"]);
}

#[test]
fn with_pipeline_stages() {
    let params = [("accumulate", "2"), ("skewed", "true")];
    equals_one_device(&params, "0", &["pp=2,ep=2", "pp=2"]);
    equals_one_device(&params, "2", &["pp=2,ep=2", "pp=2,dp=2"]);
    equals_one_device(&[("accumulate", "2"), ("ema", "true")], "2", &["pp=2,ep=2,zero=1"]);
}

/// Without clipping, whose norm adds in the order of rows, moves change no bit.
#[test]
fn moves_change_no_bit() {
    let params = [("skewed", "true"), ("clip", "0"), ("dtype", "f32")];
    let (stay, _, _) = trained("ep=4", &params, STEPS);
    let (moved, _, rows) = trained("ep=4", &[&params[..], &[("rebalance", "2")]].concat(), STEPS);
    assert!(rows > 0);
    for ((path, a), (_, b)) in stay.states.iter().zip(&moved.states) {
        assert!(a == b, "{path}");
    }
}

/// All tokens go to two experts of one device, always. They get devices of their own; with replicas, two devices have two of their six copies.
#[test]
fn the_load_of_devices_evens_out() {
    let params = [("skewed", "true"), ("frozen_router", "true"), ("rebalance", "4")];
    for (replicas, after) in [("0", 2.0), ("4", 4.0 / 3.0)] {
        let (_, loads, _) = trained("ep=4", &[&params[..], &[("replicas", replicas)]].concat(), 6);
        assert_eq!(loads.len(), 6);
        for (step, load) in loads.iter().enumerate() {
            let expected = if step < 4 { 4.0 } else { after };
            assert!((load - expected).abs() < 1e-9, "{replicas} replicas: {loads:?}");
        }
    }
}

/// A checkpoint right before a rebalancing, or after one, continues on any mesh.
#[test]
fn checkpoints_continue_on_other_meshes() {
    let params = [("rebalance", "3"), ("replicas", "4"), ("skewed", "true")];
    let (reference, _, _) = trained("", &params, 10);
    for (from, to, at) in
        [("ep=4", "ep=2", 6), ("ep=2", "", 7), ("ep=4", "ep=4", 3), ("", "ep=4", 6), ("dp=2,ep=2", "ep=4", 5)]
    {
        let first = open(from, &params);
        let run = start(&first, MODEL).unwrap();
        for _ in 0..at {
            run.step().unwrap();
        }
        let (states, cursor) = (states_of(&run), run.cursor().unwrap());
        let second = open(to, &params);
        let run = start(&second, MODEL).unwrap();
        let source = Source::Values { states: &states, cursor: &cursor };
        run.take_over(source, &DroppedStates::default(), Taking::Exact).unwrap();
        for _ in at..10 {
            run.step().unwrap();
        }
        let own = Outcome { values: reference.values.clone(), states: by_expert(states_of(&run)) };
        let (off, what) = reference.difference(&own);
        assert!(off <= 1e-10, "from {from} to {to} after {at} steps: {off:e} in {what}");
    }
}

/// Weights whose rows have moved are not those of a layer that does not know it.
#[test]
fn an_edit_may_not_drop_the_order_of_rows() {
    let first = open("ep=4", &[("rebalance", "3"), ("skewed", "true")]);
    let run = start(&first, MODEL).unwrap();
    for _ in 0..4 {
        run.step().unwrap();
    }
    let (states, cursor) = (states_of(&run), run.cursor().unwrap());
    let second = open("", &[("skewed", "true")]);
    let run = start(&second, MODEL).unwrap();
    let take = |how| {
        let source = Source::Values { states: &states, cursor: &cursor };
        run.take_over(source, &DroppedStates::default(), how)
    };
    let exact = take(Taking::Exact).unwrap();
    assert!(exact.misfit().contains("the recipe has no State") && exact.misfit().contains("placement"), "{exact:?}");
    let Err(error) = take(Taking::Fitting) else { panic!("it is taken") };
    for part in ["model.blocks.1.mlp has no `rebalance` any more", "keep it, with every = 0"] {
        assert!(error.to_string().contains(part), "{error}");
    }
}

/// A step copies the rows of replicas, forward and backward, and no others.
#[test]
fn only_replicas_are_copied() {
    let s = open("ep=4", &[("layers", "1"), ("rebalance", "100"), ("replicas", "4")]);
    let run = start(&s, MODEL).unwrap();
    run.step().unwrap();
    let transfers = s.runtime.host().engine.borrow().transfers();
    let largest = |op: &str| transfers.iter().filter(|t| t.op == op).map(|t| t.bytes).max().unwrap_or(0);
    // 4 of 8 matrices of 16 x 24 numbers.
    let replicas = 4 * 16 * 24 * 8;
    for op in ["all_gather", "all_reduce", "reduce_scatter"] {
        assert!(largest(op) <= replicas, "{op}: {} > {replicas}", largest(op));
    }
}

#[test]
fn what_cannot_move_is_refused_with_the_rule_and_the_cure() {
    for (mode, params, parts) in [
        (
            "ep=4",
            &[("rebalance", "3"), ("replicas", "3")][..],
            &["ep=4 does not divide the 3 replicas of experts of blocks.1.mlp", "choose an ep"][..],
        ),
        ("", &[("rebalance", "3"), ("replicas", "-1")], &["rebalance.replicas is -1, but must be a whole number"]),
    ] {
        let Err(message) = start(&open(mode, params), MODEL) else { panic!("{mode} {params:?} runs") };
        for part in parts {
            assert!(message.contains(part), "{mode} {params:?}: {message}");
        }
    }
}
