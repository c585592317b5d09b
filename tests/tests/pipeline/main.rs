//! Pipeline stages on virtual devices: a step in stages equals that of one device.
//!
//! `PERILUNE_DEVICE=cuda:0` takes virtual devices of a GPU, and `PERILUNE_MESH_GPUS=2` of two.
#![allow(clippy::unwrap_used)]

use perilune_core::ops::collective;
use perilune_cuda::OfflineTarget;
use perilune_dist::{MeshBackend, MeshOptions};
use perilune_lua::{DroppedStates, Run, Source, StrictShards, Taking};
use perilune_plan::Backend;
use perilune_plan::ir::{Kernel, Storage, ValueId};
use perilune_tests::harness::{in_soak, on_gpu, on_mesh};
use perilune_tests::outcome::Outcome;
use perilune_tests::recording::Recording;
use perilune_tests::scripts::{Script, script_on};
use std::path::Path;
use std::sync::Arc;

const MODEL: &str = "tests/pipeline/model.lua";
/// Steps of a run that is compared.
fn steps() -> usize {
    in_soak(20, 6)
}

fn open(mode: &str, params: &[(&str, &str)]) -> Script {
    let options = MeshOptions::parse(mode).unwrap_or_else(|e| panic!("{mode}: {e}"));
    let s = script_on(on_mesh(options.mesh, 1), params).unwrap();
    s.runtime.host().engine.borrow_mut().zero = options.zero;
    s
}

fn start(s: &Script, file: &str, precision: Option<&str>) -> Result<Run, String> {
    let recipe = s.recipe(Path::new(file)).map_err(|e| e.to_string())?;
    recipe.start(None, precision, None).map_err(|e| e.to_string())
}

fn outcome(s: &Script, file: &str, precision: Option<&str>, steps: usize) -> Outcome {
    let run = start(s, file, precision).unwrap_or_else(|e| panic!("{e}"));
    Outcome::of(&run, steps)
}

fn equals_one_device(net: &str, more: &[(&str, &str)], modes: &[&str]) {
    equals_one_device_after(steps(), net, more, modes);
}

fn equals_one_device_after(steps: usize, net: &str, more: &[(&str, &str)], modes: &[&str]) {
    let params: Vec<(&str, &str)> = [("net", net)].into_iter().chain(more.iter().copied()).collect();
    let one = outcome(&open("", &params), MODEL, None, steps);
    let finite = one.values.iter().filter(|v| v.1.is_finite()).count();
    assert!(finite * 4 > one.values.len() * 3 && one.states.len() > 10, "{finite} finite values");
    for mode in modes {
        let many = outcome(&open(mode, &params), MODEL, None, steps);
        let (off, what) = one.difference(&many);
        assert!(off <= 1e-10, "{net} {more:?} on {mode}: {off:e} in {what}");
    }
}

#[test]
fn mlp_in_stages_equals_one_device() {
    equals_one_device("mlp", &[], &["pp=2", "pp=4", "pp=2,dp=2", "pp=2,dp=2,zero=1", "pp=2,dp=2,zero=3"]);
}

#[test]
fn gpt_with_tied_embeddings_equals_one_device() {
    equals_one_device("gpt", &[], &["pp=2", "pp=4", "pp=2,dp=2,zero=1", "pp=2,tp=2", "pp=2,cp=2", "pp=2,cp=3"]);
}

#[test]
fn llama_with_tied_embeddings_equals_one_device() {
    equals_one_device("llama", &[], &["pp=2", "pp=4", "pp=2,dp=2,zero=1"]);
}

#[test]
fn every_schedule_gives_the_same_numbers() {
    let own = "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n1F0 1I0 1F1 1I1 1W0 1F2 1B2 1W1 1F3 1B3";
    for schedule in ["fill-drain", "1f1b", "zb-h1", own] {
        equals_one_device("gpt", &[("pipeline", schedule)], &["pp=2"]);
    }
    for schedule in ["fill-drain", "zb-h1"] {
        equals_one_device("mlp", &[("pipeline", schedule)], &["pp=4"]);
    }
}

/// Two and three stages a device, in turn and along a V, also with tied weights: the first and the last stage of a V are on one device.
#[test]
fn several_stages_on_a_device_equal_one_device() {
    for schedule in ["interleaved", "zbv", "dualpipev"] {
        equals_one_device("gpt", &[("pipeline", schedule)], &["pp=2", "pp=2,dp=2,zero=1"]);
        equals_one_device("mlp", &[("pipeline", schedule), ("accumulate", "6"), ("layers", "6")], &["pp=3"]);
    }
    equals_one_device("gpt", &[("pipeline", "interleaved,chunks=3"), ("layers", "6")], &["pp=2", "pp=2,tp=2"]);
    // Passes in pairs: of the schedule where they exchange tensors, of a recipe's own table anywhere.
    equals_one_device("gpt", &[("pipeline", "dualpipev")], &["pp=2,tp=2"]);
    let pairs = "0F0 0F1 0F2 (0F3;0B0) 0I1 0W1 0B2 0B3\n1F0 (1F1;1B0) 1F2 (1B1;1F3) 1B2 1B3";
    equals_one_device("gpt", &[("pipeline", pairs)], &["pp=2", "pp=2,tp=2", "pp=2,dp=2,zero=3"]);
    // Three stages, of which device 1 has the middle one.
    let own = "0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1\n1F0 1F1 1I0 1W0 1B1";
    equals_one_device("gpt", &[("pipeline", own), ("accumulate", "2")], &["pp=2"]);
    for schedule in ["interleaved", "zbv"] {
        equals_one_device(
            "mlp",
            &[("pipeline", schedule), ("bad", "77"), ("ema", "true")],
            &["pp=2", "pp=2,dp=2,zero=3"],
        );
    }
}

/// Shards are cut from each micro-batch, and every stage adds their terms in the tree of one device.
#[test]
fn strict_shards_give_the_bits_of_one_device() {
    let strict = |mode: &str, params: &[(&str, &str)]| {
        let s = open(mode, params);
        s.runtime.host().engine.borrow_mut().set_strict_shards(Some(4)).unwrap();
        s.runtime.host().strict_shards.set(StrictShards::CommandLine);
        outcome(&s, MODEL, None, steps())
    };
    let params = |net: &'static str, schedule: &'static str| {
        [("net", net), ("pipeline", schedule), ("dtype", "f32"), ("batch", "8"), ("dropout", "0.1"), ("layers", "4")]
    };
    for net in ["gpt", "mlp"] {
        let one = strict("", &params(net, "1f1b"));
        for (mode, schedule) in [
            ("pp=2", "1f1b"),
            ("pp=4", "zb-h1"),
            ("pp=2,dp=2", "zbv"),
            ("pp=2,dp=4,zero=1", "dualpipev"),
            ("pp=2,dp=2,zero=3", "interleaved"),
        ] {
            let many = strict(mode, &params(net, schedule));
            let (off, what) = one.difference(&many);
            assert!(off == 0.0, "{net} on {mode} with {schedule}: {off:e} in {what}");
        }
        // Without strict shards other devices round elsewhere: the comparison can fail.
        let plain = outcome(&open("pp=2,dp=2", &params(net, "1f1b")), MODEL, None, steps());
        assert!(one.difference(&plain).0 > 0.0, "{net}");
    }
}

/// The States of the stages of a device are on it, and no others.
#[test]
fn a_device_stores_the_states_of_its_stages() {
    let params = [("net", "mlp"), ("layers", "7"), ("pipeline", "zbv")];
    let s = open("pp=2", &params);
    let run = start(&s, MODEL, None).unwrap();
    run.step().and_then(|step| run.read(&step)).unwrap();
    let mut devices: Vec<(String, Option<usize>, Option<usize>)> = Vec::new();
    for (path, info) in run.state_infos().unwrap() {
        if path.ends_with("weight") {
            devices.push((path, info.placement.stage(), info.placement.stage_device()));
        }
    }
    let found: Vec<_> = devices.iter().filter(|d| d.0.starts_with("model.layers")).map(|d| (d.1, d.2)).collect();
    let want = [0, 0, 1, 1, 2, 2, 3].map(|stage| (Some(stage), Some([0, 1, 1, 0][stage])));
    assert_eq!(found, want, "{devices:?}");
    let weights: Vec<_> = devices.iter().filter(|d| d.0.starts_with("model.")).collect();
    for (path, stage, device) in &weights {
        let name = path.trim_start_matches("model.");
        let moments = devices.iter().filter(|d| d.0.starts_with("optim.") && d.0.ends_with(name));
        let moments: Vec<_> = moments.map(|d| (d.1, d.2)).collect();
        assert_eq!(moments, [(*stage, *device); 2], "{path}");
    }
}

/// Losses of a step with a bad sample are no numbers: no stage changes a State, as on one device.
#[test]
fn guard_moving_averages_and_dropout_span_all_stages() {
    // The batches of six steps are without the bad sample.
    let steps = 20;
    equals_one_device_after(steps, "mlp", &[("bad", "77"), ("ema", "true")], &["pp=2", "pp=2,dp=2,zero=1"]);
    equals_one_device("mlp", &[("dropout", "0.2")], &["pp=2", "pp=4"]);
    let params = [("net", "mlp"), ("bad", "77")];
    let one = outcome(&open("", &params), MODEL, None, steps);
    assert!(one.values.iter().any(|v| v.0 == "loss" && v.1.is_nan()), "no step has the bad sample");
}

#[test]
fn recomputed_activations_equal_stored_ones() {
    equals_one_device("gpt", &[("checkpoint", "true"), ("layers", "2")], &["pp=2"]);
}

/// Micro-batches that are no multiple of the stages, and more of them than a stage keeps.
#[test]
fn any_number_of_micro_batches() {
    for n in ["2", "3", "7"] {
        equals_one_device("mlp", &[("accumulate", n), ("steps", "40")], &["pp=2"]);
    }
}

#[test]
fn a_stage_needs_less_memory_than_the_whole() {
    let params = [("net", "gpt"), ("width", "64"), ("batch", "16"), ("layers", "8"), ("dtype", "f32")];
    let peak = |mode: &str, schedule: &str| {
        let params: Vec<(&str, &str)> = params.iter().copied().chain([("pipeline", schedule)]).collect();
        let s = open(mode, &params);
        let run = start(&s, MODEL, None).unwrap();
        run.step().and_then(|step| run.read(&step)).unwrap();
        let engine = s.runtime.host().engine.borrow();
        let stats = engine.stats();
        (stats.state_bytes, stats.arena_bytes, engine.backend().memory().peak)
    };
    let (one, two, four) = (peak("", "1f1b"), peak("pp=2", "1f1b"), peak("pp=4", "1f1b"));
    assert!(two.0 * 10 < one.0 * 7 && four.0 * 10 < one.0 * 4, "States: {one:?}, {two:?}, {four:?}");
    // On a GPU workspaces are larger than this model.
    let is_less = two.2 * 10 < one.2 * 9 && four.2 < two.2;
    assert!(is_less || on_gpu(), "peak: {one:?}, {two:?}, {four:?}");
    // Keeping the activations of all micro-batches takes more.
    let drained = peak("pp=4", "fill-drain");
    assert!(four.1 < drained.1, "intermediate values: {four:?} with 1f1b, {drained:?} with fill-drain");
}

/// Values that exceed a budget are recomputed by the stage that has them, and no number changes.
#[test]
fn a_memory_budget_is_kept_by_every_stage() {
    let params = [("net", "gpt"), ("width", "64"), ("batch", "16"), ("layers", "8"), ("pipeline", "fill-drain")];
    let train = |mode: &str, budget: Option<usize>| {
        let s = open(mode, &params);
        let recipe = s.recipe(Path::new(MODEL)).unwrap();
        let run = recipe.start(None, None, budget).unwrap();
        let outcome = Outcome::of(&run, 4);
        (outcome, s.runtime.host().engine.borrow().backend().memory().peak)
    };
    for mode in ["pp=2", "pp=2,dp=2"] {
        let (plain, most) = train(mode, None);
        let budget = most * 3 / 4;
        let (lean, less) = train(mode, Some(budget));
        // The batch and the numbers of a run are beside the step.
        // Workspaces of a GPU are more than these values.
        assert!(on_gpu() || less * 100 <= budget * 101, "{mode}: {less} of {budget}, {most} without");
        let (off, what) = plain.difference(&lean);
        assert!(off <= 1e-10, "{mode}: {off:e} in {what}");
    }
}

#[test]
fn what_cannot_run_is_refused_with_the_rule_and_the_cure() {
    let refused = |mode: &str, params: &[(&str, &str)]| match start(&open(mode, params), MODEL, None) {
        Ok(_) => panic!("{mode} {params:?} runs"),
        Err(message) => message,
    };
    for (mode, params, parts) in [
        (
            "pp=4",
            &[("accumulate", "3")][..],
            &["pp=4: a step has 3 micro-batches, fewer than devices along pp", "--set accumulate=4"][..],
        ),
        ("pp=2", &[("accumulate", "1")], &["pp=2: a step has 1 micro-batch, fewer", "--set accumulate=2"]),
        ("pp=4", &[("layers", "2")], &["4 stages: the model has 3 of the 4 layers with weights", "use a smaller pp"]),
        ("pp=2", &[("pipeline", "1f1")], &["there is no schedule \"1f1\"", "did you mean 1f1b?"]),
        (
            "pp=2",
            &[("accumulate", "3"), ("pipeline", "interleaved")],
            &["interleaved: 3 micro-batches are no multiple of pp=2", "accumulate 4"],
        ),
        ("pp=2", &[("accumulate", "3"), ("pipeline", "dualpipev")], &["3 micro-batches are fewer than the 4 stages"]),
        (
            "pp=2",
            &[("pipeline", "interleaved,chunks=3")],
            &["6 stages: the model has 5 of the 6 layers", "fewer chunks"],
        ),
        ("pp=2", &[("pipeline", "zbv,chunks=3")], &["schedule zbv has a fixed number of stages a device"]),
        (
            "pp=2",
            &[("accumulate", "2"), ("pipeline", "0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")],
            &["deadlock: 0B0 waits for 1B0, which is behind 1F1; 1F1 waits for 0F1, which is behind 0B0"],
        ),
        ("pp=2", &[("pipeline", "0F0 0B0\n1F0 1B0")], &["0F1 is missing in the schedule"]),
    ] {
        let message = refused(mode, params);
        for part in parts {
            assert!(message.contains(part), "{mode} {params:?}: {message}");
        }
    }
}

/// A bad index on the first or the last stage, where tokens and classes are looked up, is an error, and no stage has written a State in the
/// step of it or behind.
#[test]
fn a_bad_index_in_one_stage_stops_all() {
    let ends = |mode: &str, bad_in: &str, schedule: &str| {
        let s = open(mode, &[("net", "gpt"), ("bad", "77"), ("bad_in", bad_in), ("pipeline", schedule)]);
        let run = start(&s, MODEL, None).unwrap();
        let step = || run.step().and_then(|step| run.read(&step));
        let failed = (0..20).find_map(|k| Some((k, step().err()?.to_string())));
        let mut states = Vec::new();
        run.each_state(|path, t| states.push((path, t))).unwrap();
        let (at, message) = failed.unwrap_or_else(|| panic!("{mode}: the bad sample in {bad_in} is no error"));
        // On a GPU any device may be the first to raise it.
        let is_named = message.contains("out of range") || message.contains("is class 27, but there are 24 classes");
        assert!(is_named, "{mode}: {message}");
        (at, Outcome { values: Vec::new(), states })
    };
    for bad_in in ["x", "y"] {
        let (at, one) = ends("", bad_in, "1f1b");
        assert!(at > 0, "the first step has the bad sample");
        for (mode, schedule) in [("pp=2", "1f1b"), ("pp=4", "zb-h1"), ("pp=2,dp=2", "zbv"), ("pp=2", "fill-drain")] {
            let (found, many) = ends(mode, bad_in, schedule);
            let (off, what) = one.difference(&many);
            assert!(
                (found == at || on_gpu()) && off <= 1e-10,
                "{bad_in} on {mode}: step {found} of {at}, {off:e} in {what}"
            );
        }
    }
}

/// The programs for GPUs, without one: in no stage is a transfer behind a State write, where all stages agree, and every kernel has a
/// source.
#[test]
fn programs_for_gpus_send_before_they_write_states() {
    let mut transfers = 0;
    for (mode, schedule) in [
        ("pp=2", "1f1b"),
        ("pp=2", "zb-h1"),
        ("pp=4", "fill-drain"),
        ("pp=2", "interleaved"),
        ("pp=2,dp=2,zero=1", "zbv"),
    ] {
        let options = MeshOptions::parse(mode).unwrap();
        let target = || -> Arc<dyn Backend> { Arc::new(OfflineTarget::default()) };
        let devices = (0..options.mesh.devices()).map(|_| target()).collect();
        let planner = MeshBackend::new(options.mesh, devices).unwrap();
        let recording = Recording::new(Box::new(planner));
        let params = [("net", "gpt"), ("pipeline", schedule), ("dtype", "f32"), ("layers", "4")];
        let s = script_on(recording.clone(), &params).unwrap();
        s.runtime.host().engine.borrow_mut().zero = options.zero;
        let run = start(&s, MODEL, Some("bf16")).unwrap();
        (0..2).for_each(|_| drop(run.step().unwrap()));
        for program in recording.take() {
            for (k, stage) in program.stages.iter().enumerate() {
                let p = &stage.program;
                let is_transfer = |k: &Kernel| matches!(k, Kernel::Library(l) if collective::is_transfer(l.op));
                let is_state = |v: &ValueId| matches!(p.values[v.0 as usize].storage, Storage::Input(_));
                let first = p.kernels.iter().position(|k| k.writes().iter().any(is_state)).unwrap_or(p.kernels.len());
                let last = p.kernels.iter().rposition(is_transfer);
                assert!(last.is_none_or(|last| last < first), "{mode} {schedule}, device {k}: {last:?} and {first}");
                transfers += p.kernels.iter().filter(|k| is_transfer(k)).count();
                for at in 0..p.kernels.len() {
                    target().source(p, at).unwrap().unwrap();
                }
            }
        }
    }
    assert!(transfers > 100, "{transfers} transfers");
}

/// The recipes as they are, with nothing but a mesh and micro-batches.
#[test]
fn recipes_run_in_stages() {
    let chargpt: &[(&str, &str)] =
        &[("layers", "2"), ("heads", "2"), ("width", "32"), ("context", "32"), ("batch", "8"), ("dropout", "0.1")];
    let tiny: &[(&str, &str)] =
        &[("size", "tiny"), ("vocab", "256"), ("context", "16"), ("batch", "8"), ("warmup", "2")];
    for (file, params, precisions) in [
        ("chargpt.lua", chargpt, &[None][..]),
        ("gpt2.lua", tiny, &[None, Some("bf16"), Some("fp16")]),
        ("llama.lua", tiny, &[None]),
    ] {
        let params: Vec<(&str, &str)> = params.iter().copied().chain([("accumulate", "4")]).collect();
        let file = format!("../recipes/{file}");
        for precision in precisions {
            let one = outcome(&open("", &params), &file, *precision, 4);
            for mode in ["pp=2", "pp=2,dp=2,zero=1"] {
                let many = outcome(&open(mode, &params), &file, *precision, 4);
                let limit = if precision.is_none() { 2e-3 } else { 5e-2 };
                for ((name, a), (_, b)) in one.values.iter().zip(&many.values) {
                    assert!(
                        (a - b).abs() <= limit * a.abs().max(1.0),
                        "{file} {precision:?} on {mode}: {name} {a} and {b}"
                    );
                }
            }
        }
    }
}

/// A run continues on another mesh, or with another schedule, from States that were trained in stages.
#[test]
fn states_move_between_meshes() {
    let params = |schedule: &'static str| [("net", "gpt"), ("pipeline", schedule)];
    let reference = outcome(&open("", &params("1f1b")), MODEL, None, 8);
    for ((from, first), (to, second)) in [
        (("pp=2", "1f1b"), ("pp=4", "1f1b")),
        (("pp=2", "zbv"), ("pp=2", "interleaved")),
        (("pp=2", "interleaved"), ("", "1f1b")),
        (("pp=4", "1f1b"), ("pp=2", "dualpipev")),
    ] {
        let first = open(from, &params(first));
        let run = start(&first, MODEL, None).unwrap();
        for _ in 0..5 {
            run.step().unwrap();
        }
        let mut states = Vec::new();
        run.each_state(|path, t| states.push((path, t))).unwrap();
        let cursor = run.cursor().unwrap();
        let second = open(to, &params(second));
        let run = start(&second, MODEL, None).unwrap();
        let source = Source::Values { states: &states, cursor: &cursor };
        run.take_over(source, &DroppedStates::default(), Taking::Exact).unwrap();
        for _ in 0..3 {
            run.step().unwrap();
        }
        let mut states = Vec::new();
        run.each_state(|path, t| states.push((path, t))).unwrap();
        let outcome = Outcome { values: reference.values.clone(), states };
        let (off, what) = reference.difference(&outcome);
        assert!(off <= 1e-10, "from {from} to {to}: {off:e} in {what}");
    }
}
