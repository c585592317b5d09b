//! Pipeline stages on virtual devices: a step in stages equals that of one device.
#![allow(clippy::unwrap_used)]

use perilune_core::HostTensor;
use perilune_dist::MeshOptions;
use perilune_lua::Run;
use perilune_tests::harness::on_mesh;
use perilune_tests::scripts::{Script, script_on};
use std::path::Path;

const MODEL: &str = "tests/pipeline/model.lua";
/// Steps of each run.
const STEPS: usize = 20;

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

struct Outcome {
    values: Vec<(String, f64)>,
    states: Vec<(String, HostTensor)>,
}

fn outcome(s: &Script, file: &str, precision: Option<&str>, steps: usize) -> Outcome {
    let run = start(s, file, precision).unwrap_or_else(|e| panic!("{e}"));
    let mut values = Vec::new();
    for _ in 0..steps {
        let numbers = run.step().and_then(|step| run.read(&step)).unwrap_or_else(|e| panic!("{e}"));
        values.push(("loss".into(), numbers.loss));
        values.extend(numbers.metrics);
    }
    for split in run.evaluated_splits() {
        values.extend(run.evaluate_batches(&split, Some(2)).unwrap_or_else(|e| panic!("{e}")));
    }
    let mut states = Vec::new();
    run.each_state(|path, t| states.push((path, t))).unwrap();
    Outcome { values, states }
}

/// The largest difference of a value or an element, relative to values above 1.
fn difference(a: &Outcome, b: &Outcome) -> (f64, String) {
    let mut worst = (0.0, String::new());
    let mut compare = |name: &str, a: f64, b: f64| {
        let off = (a - b).abs() / a.abs().max(1.0);
        if off > worst.0 || off.is_nan() && !(a.is_nan() && b.is_nan()) {
            worst = (if off.is_nan() { f64::INFINITY } else { off }, format!("{name}: {a} and {b}"));
        }
    };
    assert_eq!((a.values.len(), a.states.len()), (b.values.len(), b.states.len()));
    for ((name, a), (_, b)) in a.values.iter().zip(&b.values) {
        compare(name, *a, *b);
    }
    for ((path, a), (other, b)) in a.states.iter().zip(&b.states) {
        assert_eq!((path, a.shape, a.dtype), (other, b.shape, b.dtype));
        (0..a.numel()).for_each(|i| compare(path, a.get_f64(i), b.get_f64(i)));
    }
    worst
}

fn equals_one_device(net: &str, more: &[(&str, &str)], modes: &[&str]) {
    let params: Vec<(&str, &str)> = [("net", net)].into_iter().chain(more.iter().copied()).collect();
    let one = outcome(&open("", &params), MODEL, None, STEPS);
    assert!(one.values.iter().all(|v| v.1.is_finite()) && one.states.len() > 10);
    for mode in modes {
        let many = outcome(&open(mode, &params), MODEL, None, STEPS);
        let (off, what) = difference(&one, &many);
        assert!(off <= 1e-10, "{net} {more:?} on {mode}: {off:e} in {what}");
    }
}

#[test]
fn mlp_in_stages_equals_one_device() {
    equals_one_device("mlp", &[], &["pp=2", "pp=4", "pp=2,dp=2", "pp=2,dp=2,zero=1", "pp=2,dp=2,zero=3"]);
}

#[test]
fn gpt_with_tied_embeddings_equals_one_device() {
    equals_one_device("gpt", &[], &["pp=2", "pp=4", "pp=2,dp=2,zero=1", "pp=2,tp=2"]);
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
