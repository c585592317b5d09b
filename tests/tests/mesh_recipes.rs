//! Runs the recipes on virtual devices, in every mode, against one device.
//!
//! A mode changes the order of sums only, so losses, metrics and States are equal to rounding. `PERILUNE_MESH=dp=2` runs any other
//! test of this crate on a mesh.
#![allow(clippy::unwrap_used)]

use perilune_core::HostTensor;
use perilune_dist::MeshOptions;
use perilune_lua::Run;
use perilune_tests::harness::on_mesh;
use perilune_tests::scripts::{Script, script_on};
use std::path::{Path, PathBuf};

/// Steps of each run.
const STEPS: usize = 4;

/// Modes on 2, 4 and 8 devices.
const MODES: [&str; 6] = ["dp=2", "dp=4,zero=1", "dp=2,zero=2", "dp=4,zero=3", "dp=2,shard=2", "dp=2,shard=4,zero=1"];

/// Modes of models of sequences, with layers that divide along tp.
const TENSOR_MODES: [&str; 7] =
    ["tp=2", "dp=2,tp=2", "dp=2,tp=2,zero=3", "cp=2", "cp=4", "dp=2,cp=2,zero=3", "cp=2,tp=2"];

struct Outcome {
    /// Loss and metrics of each step, then of the evaluation.
    values: Vec<(String, f64)>,
    states: Vec<(String, HostTensor)>,
}

fn recipe_of(file: &str) -> PathBuf {
    Path::new("../recipes").join(file)
}

fn open(mode: &str, params: &[(&str, &str)]) -> Script {
    let options = MeshOptions::parse(mode).unwrap_or_else(|e| panic!("{mode}: {e}"));
    let s = script_on(on_mesh(options.mesh, 1), params).unwrap();
    s.runtime.host().engine.borrow_mut().zero = options.zero;
    s.runtime.host().engine.borrow_mut().set_key_exchange(options.keys);
    s
}

fn start(s: &Script, file: &Path, precision: Option<&str>) -> Run {
    let recipe = s.recipe(file).unwrap_or_else(|e| panic!("{e}"));
    recipe.start(None, precision, None).unwrap_or_else(|e| panic!("{e}"))
}

fn steps(run: &Run, n: usize, values: &mut Vec<(String, f64)>) {
    for _ in 0..n {
        let numbers = run.step().and_then(|step| run.read(&step)).unwrap_or_else(|e| panic!("{e}"));
        values.push(("loss".into(), numbers.loss));
        values.extend(numbers.metrics);
    }
}

fn states(run: &Run) -> Vec<(String, HostTensor)> {
    let mut all = Vec::new();
    run.each_state(|path, t| all.push((path, t))).unwrap();
    all
}

fn train(mode: &str, file: &str, params: &[(&str, &str)], precision: Option<&str>) -> Outcome {
    let s = open(mode, params);
    let run = start(&s, &recipe_of(file), precision);
    let mut values = Vec::new();
    steps(&run, STEPS, &mut values);
    for split in run.evaluated_splits() {
        values.extend(run.evaluate_batches(&split, Some(2)).unwrap_or_else(|e| panic!("{e}")));
    }
    Outcome { values, states: states(&run) }
}

/// Differences that rounding explains: relative to a value, and to the largest element of a State. AdamW turns a gradient that is
/// zero but for rounding (that of the bias of keys) into a whole update, so a hundredth of all elements may differ by more.
struct Tolerance {
    value: f64,
    state: f64,
}

const F32: Tolerance = Tolerance { value: 2e-4, state: 2e-3 };

fn compare(name: &str, one: &Outcome, mesh: &Outcome, tolerance: &Tolerance) {
    assert_eq!(one.values.len(), mesh.values.len(), "{name}");
    for (k, ((metric, a), (_, b))) in one.values.iter().zip(&mesh.values).enumerate() {
        let close = (a - b).abs() <= tolerance.value * a.abs().max(1.0) || a.is_nan() && b.is_nan();
        assert!(close, "{name}: value {k}, {metric}: {a} on one device, {b} on the mesh");
    }
    assert_eq!(one.states.len(), mesh.states.len(), "{name}");
    let (mut far, mut all, mut worst) = (0, 0, (0.0, ""));
    for ((path, a), (other, b)) in one.states.iter().zip(&mesh.states) {
        assert_eq!((path, a.shape, a.dtype), (other, b.shape, b.dtype), "{name}");
        let values = |t: &HostTensor| (0..t.numel()).map(|i| t.get_f64(i)).collect::<Vec<_>>();
        let (a, b) = (values(a), values(b));
        let scale = a.iter().fold(1e-6f64, |m, v| m.max(v.abs()));
        for share in a.iter().zip(&b).map(|(a, b)| (a - b).abs() / scale) {
            far += usize::from(share > tolerance.state || share.is_nan());
            worst = if share > worst.0 { (share, path.as_str()) } else { worst };
        }
        all += a.len();
    }
    assert!(far * 100 <= all, "{name}: {far} of {all} elements of States differ, most in {worst:?}");
}

fn every_mode(file: &str, params: &[(&str, &str)], precision: Option<&str>, tolerance: &Tolerance) {
    let one = train("", file, params, precision);
    let transformer = ["chargpt.lua", "gpt2.lua", "llama.lua"].contains(&file);
    for mode in MODES.iter().chain(TENSOR_MODES.iter().filter(|_| transformer)) {
        compare(&format!("{file} on {mode}"), &one, &train(mode, file, params, precision), tolerance);
    }
}

/// Batches are augmented: the draws of a sample do not depend on the device that has it.
#[test]
fn fashion() {
    every_mode("fashion.lua", &[("width", "4"), ("batch", "16"), ("dropout", "0")], None, &F32);
}

#[test]
fn digits() {
    every_mode("digits.lua", &[], None, &F32);
    every_mode("digits.lua", &[("net", "cnn"), ("batch", "32")], None, &F32);
}

/// Dropout: the masks do not depend on the mesh.
#[test]
fn chargpt() {
    let small =
        [("layers", "2"), ("heads", "2"), ("width", "32"), ("context", "32"), ("batch", "8"), ("dropout", "0.1")];
    every_mode("chargpt.lua", &small, None, &F32);
}

/// Mixed precision: weights have 16-bit copies, which are placed like them.
#[test]
fn gpt2() {
    let small = [("size", "tiny"), ("vocab", "256"), ("context", "16"), ("batch", "8"), ("warmup", "2")];
    every_mode("gpt2.lua", &small, None, &F32);
    every_mode("gpt2.lua", &small, Some("bf16"), &Tolerance { value: 2e-2, state: 5e-2 });
    every_mode("gpt2.lua", &small, Some("fp16"), &Tolerance { value: 2e-2, state: 5e-2 });
}

/// Accumulation of two micro-batches, grouped-query attention.
#[test]
fn llama() {
    let small =
        [("size", "tiny"), ("vocab", "256"), ("context", "16"), ("batch", "8"), ("accumulate", "2"), ("warmup", "2")];
    every_mode("llama.lua", &small, None, &F32);
}

/// Keys come to queries in a ring, in zig-zag order and with blocks that cannot be halved, or are gathered.
#[test]
fn keys_of_other_devices() {
    let small = [("size", "tiny"), ("vocab", "256"), ("context", "60"), ("batch", "4"), ("warmup", "2")];
    for (precision, tolerance) in [(None, &F32), (Some("bf16"), &Tolerance { value: 2e-2, state: 5e-2 })] {
        let one = train("", "llama.lua", &small, precision);
        for mode in ["cp=2,keys=ring", "cp=4,keys=ring", "cp=3,keys=ring", "dp=2,cp=2,keys=ring", "cp=4,keys=gather"] {
            compare(&format!("llama.lua on {mode}"), &one, &train(mode, "llama.lua", &small, precision), tolerance);
        }
    }
}

/// Experts over devices, alone and with all other axes.
#[test]
fn llama_of_experts() {
    let small =
        [("size", "tiny"), ("vocab", "256"), ("context", "16"), ("batch", "8"), ("warmup", "2"), ("experts", "4")];
    let one = train("", "llama.lua", &small, None);
    for mode in ["ep=2", "ep=4", "dp=2,ep=2", "ep=2,zero=3", "ep=2,tp=2", "dp=2,ep=2,tp=2,zero=1", "cp=2,ep=2"] {
        compare(&format!("llama.lua on {mode}"), &one, &train(mode, "llama.lua", &small, None), &F32);
    }
}

/// Batch norm: the statistics are those of the whole batch.
#[test]
fn resnet50() {
    let small =
        [("size", "tiny"), ("classes", "10"), ("pixels", "32"), ("batch", "8"), ("warmup", "2"), ("lr", "0.001")];
    every_mode("resnet50.lua", &small, None, &Tolerance { value: 2e-3, state: 2e-2 });
}

#[test]
fn small_recipes() {
    every_mode("regression.lua", &[], None, &F32);
    every_mode("autoencoder.lua", &[], None, &F32);
    every_mode("gru.lua", &[("batch", "8")], None, &F32);
}

/// Metrics over all samples of an evaluation; labels of the model after steps 1 and 3; a reference that the run computes after step 2.
#[test]
fn data_strategies() {
    every_mode("tabular.lua", &[("rows", "600"), ("hidden", "16")], None, &F32);
    let rounds = [("channels", "4"), ("start", "1"), ("every", "2"), ("confidence", "0"), ("batch", "32")];
    every_mode("pseudo.lua", &rounds, None, &F32);
    let small =
        [("layers", "1"), ("heads", "2"), ("width", "32"), ("count", "40"), ("batch", "8"), ("supervised", "2")];
    // Right after the reference is computed all margins are zero but for rounding, which decides about their signs.
    let without_signs = |mode| {
        let mut outcome = train(mode, "dpo.lua", &small, None);
        outcome.values.retain(|(metric, _)| metric != "preferred");
        outcome
    };
    let one = without_signs("");
    for mode in MODES {
        compare(&format!("dpo.lua on {mode}"), &one, &without_signs(mode), &F32);
    }
}

/// Two optimizers, gradients of gradients; latent noise.
#[test]
fn gan_and_vae() {
    every_mode("gan.lua", &[("hidden", "32")], None, &Tolerance { value: 2e-3, state: 1e-2 });
    every_mode("vae.lua", &[("hidden", "32")], None, &F32);
}
