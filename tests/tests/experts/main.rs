//! Experts over devices: training on an axis `ep`, alone and with other axes, equals that of one device.
#![allow(clippy::unwrap_used)]

mod rebalance;

use perilune_core::mesh::Axis;
use perilune_dist::MeshOptions;
use perilune_lua::Run;
use perilune_tests::harness::on_mesh;
use perilune_tests::outcome::Outcome;
use perilune_tests::scripts::{Script, script_on};
use std::path::Path;

const MODEL: &str = "tests/experts/model.lua";
/// Steps of each run.
const STEPS: usize = 20;

fn open(mode: &str, params: &[(&str, &str)]) -> Script {
    let options = MeshOptions::parse(mode).unwrap_or_else(|e| panic!("{mode}: {e}"));
    let s = script_on(on_mesh(options.mesh, 1), params).unwrap();
    s.runtime.host().engine.borrow_mut().zero = options.zero;
    s
}

fn start(s: &Script, file: &str) -> Result<Run, String> {
    let recipe = s.recipe(Path::new(file)).map_err(|e| e.to_string())?;
    recipe.start(None, None, None).map_err(|e| e.to_string())
}

fn outcome(s: &Script, file: &str, steps: usize) -> Outcome {
    let run = start(s, file).unwrap_or_else(|e| panic!("{e}"));
    Outcome::of(&run, steps)
}

fn equals_one_device(params: &[(&str, &str)], modes: &[&str]) {
    let one = outcome(&open("", params), MODEL, STEPS);
    assert!(one.values.len() > 3 * STEPS && one.states.len() > 30, "{} States", one.states.len());
    assert!(one.is_finite(), "{params:?} on one device");
    for mode in modes {
        let (off, what) = one.difference(&outcome(&open(mode, params), MODEL, STEPS));
        assert!(off <= 1e-10, "{params:?} on {mode}: {off:e} in {what}");
    }
}

#[test]
fn experts_over_devices_equal_one_device() {
    equals_one_device(&[], &["ep=2", "ep=4", "ep=8"]);
}

#[test]
fn with_other_axes() {
    equals_one_device(&[], &["dp=2", "tp=2", "dp=2,ep=2", "ep=2,tp=2", "cp=2,ep=2", "shard=2,ep=2", "dp=2,ep=2,tp=2"]);
}

#[test]
fn with_divided_states() {
    equals_one_device(
        &[],
        &["dp=2,zero=3", "ep=2,zero=1", "ep=2,zero=3", "ep=4,zero=3", "dp=2,ep=2,zero=2", "dp=2,ep=2,zero=3"],
    );
    equals_one_device(&[("ema", "true")], &["ep=2", "ep=2,zero=1"]);
}

/// The batch divides among the devices unevenly, and one of 4 has no sample.
#[test]
fn batches_of_any_size() {
    equals_one_device(&[("batch", "5")], &["ep=2", "ep=4", "dp=2,ep=2", "ep=2,tp=2", "ep=4,zero=3"]);
    equals_one_device(&[("batch", "7")], &["dp=3,ep=2"]);
}

/// Padding of other axes, which lies among the tokens of a device, goes to no expert and takes no slot.
#[test]
fn padding_takes_no_slots() {
    let params = [("experts", "2"), ("context", "5"), ("batch", "7")];
    equals_one_device(&params, &["cp=2,ep=2", "dp=2,ep=2", "cp=3,ep=2", "dp=2,cp=2,ep=2"]);
}

#[test]
fn one_expert_a_token_without_a_gate() {
    equals_one_device(&[("top", "1"), ("mlp", "gelu")], &["ep=2", "ep=4", "dp=2,ep=2", "ep=2,tp=2"]);
}

/// More experts a token than a device has.
#[test]
fn most_experts_a_token() {
    equals_one_device(&[("top", "5"), ("experts", "6")], &["ep=2", "ep=3", "ep=6"]);
}

/// All rows go to one device. None is dropped.
#[test]
fn all_tokens_to_the_first_experts() {
    equals_one_device(&[("skewed", "true")], &["ep=2", "ep=4", "dp=2,ep=2"]);
}

#[test]
fn recomputed_and_accumulated() {
    equals_one_device(&[("checkpoint", "true")], &["ep=2", "dp=2,ep=2"]);
    equals_one_device(&[("accumulate", "2")], &["ep=2"]);
}

#[test]
fn with_pipeline_stages() {
    equals_one_device(&[("accumulate", "2")], &["pp=2", "pp=2,ep=2"]);
}

/// The collectives along ep of a step, by op.
fn along_ep(s: &Script, op: &str) -> Vec<usize> {
    let transfers = s.runtime.host().engine.borrow().transfers();
    transfers.iter().filter(|t| t.axis == Axis::Ep && t.op == op).map(|t| t.bytes).collect()
}

/// A block sends rows, the numbers of their experts and results forward; gradients of both backward. Rows are sent once.
#[test]
fn rows_are_exchanged_and_experts_stay() {
    let s = open("ep=4", &[("layers", "1")]);
    let run = start(&s, MODEL).unwrap();
    run.step().unwrap();
    let sent = along_ep(&s, "all_to_all");
    // 12 tokens of a device with 2 experts each have 24 rows of 16 numbers, as many for each of 4 devices.
    let rows = 4 * 24 * 16 * 8;
    assert_eq!(sent.iter().filter(|bytes| **bytes == rows).count(), 4, "{sent:?}");
    assert_eq!(sent.iter().filter(|bytes| **bytes == 4 * 24 * 8).count(), 1, "{sent:?}");
    assert_eq!((sent.len(), along_ep(&s, "all_gather")), (5, vec![]));
    // The experts and their moments are a quarter of those of one device.
    let placed = run.state_infos().unwrap();
    let of_experts: Vec<_> = placed.iter().filter(|(path, _)| path.ends_with("mlp.up")).collect();
    assert!(of_experts.len() >= 3, "{}", of_experts.len());
    for (path, info) in of_experts {
        assert_eq!(info.placement.along(Axis::Ep), perilune_core::mesh::Along::Split(0), "{path}");
    }
}

#[test]
fn what_cannot_run_is_refused_with_the_rule_and_the_cure() {
    for (mode, params, parts) in [
        (
            "ep=4",
            &[("experts", "6")][..],
            &["ep=4 does not divide the 6 experts of model.blocks.1.mlp", "choose an ep"][..],
        ),
        ("ep=2", &[("experts", "0")], &["ep=2 divides no layer of the model: it has no experts", "use nn.MoE"]),
        (
            "dp=2,ep=2",
            &[("batch", "3")],
            &["a batch of 3 samples leaves some of the 4 devices along dp, shard and ep without one"],
        ),
    ] {
        let Err(message) = start(&open(mode, params), MODEL) else { panic!("{mode} {params:?} runs") };
        for part in parts {
            assert!(message.contains(part), "{mode} {params:?}: {message}");
        }
    }
}
