//! Checks that the counts of updates, which bias correction reads, follow the moments of each parameter through edits,
//! `recipe.migrate` and checkpoints, those of releases with one count included.
#![allow(clippy::unwrap_used)]

use perilune_core::HostTensor;
use perilune_lua::{DroppedStates, ParamValue, Run, Source, Taking};
use perilune_tests::scripts::{Script, script};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A linear model in `layers` layers of one weight each, whose loss has a gradient of constant sign: with AdamW every first update
/// of a weight has the size of the rate.
const RECIPE: &str = r#"
local pl = require "perilune"
local recipe = pl.recipe { name = "counts", params = { layers = 1, lr = 1e-3, steps = 100, seed = 1 }, precision = "PRECISION" }
function recipe.data() return { train = pl.data.tensors { x = pl.ones { 8, 1 } }:batch(8) } end
function recipe.model(p)
  local layers = {}
  for k = 1, p.layers do layers[k] = pl.nn.module { weight = pl.state(pl.ones { 1 }), forward = function(self, x) return x * self.weight end } end
  return pl.nn.Sequential(layers)
end
function recipe.optimizer(p, model) return pl.optim.AdamW(model, { lr = p.lr, weight_decay = 0 }) end
function recipe.loss(model, batch) return model(batch.x):mean() end
MIGRATE
return recipe
"#;

fn start(s: &Script, layers: usize, precision: &str, migrate: &str) -> Run {
    // Tests run side by side: each run has a file of its own.
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("counts-{}", NEXT.fetch_add(1, Ordering::Relaxed));
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("counts.lua");
    let text = RECIPE.replace("layers = 1", &format!("layers = {layers}"));
    std::fs::write(&file, text.replace("PRECISION", precision).replace("MIGRATE", migrate)).unwrap();
    s.recipe(&file).unwrap().start(None, None, None).unwrap()
}

fn run_of(layers: usize, precision: &str, migrate: &str) -> (Script, Run) {
    let s = script(2, &[]).unwrap();
    let run = start(&s, layers, precision, migrate);
    (s, run)
}

fn steps(run: &Run, n: usize) {
    for _ in 0..n {
        run.read(&run.step().unwrap()).unwrap();
    }
}

fn values(run: &Run) -> Vec<(String, HostTensor)> {
    let mut all = Vec::new();
    run.each_state(|path, t| all.push((path, t))).unwrap();
    all
}

fn weight(run: &Run, layer: usize) -> f64 {
    values(run).iter().find(|s| s.0 == format!("model.{layer}.weight")).unwrap().1.get_f64(0)
}

fn cursor(run: &Run, key: &str) -> Option<i64> {
    run.cursor().unwrap().into_iter().find(|c| c.0 == key).map(|c| match c.1 {
        ParamValue::Int(n) => n,
        other => panic!("{key}: {other:?}"),
    })
}

/// The change of a weight in one step.
fn change(run: &Run, layer: usize) -> f64 {
    let before = weight(run, layer);
    steps(run, 1);
    before - weight(run, layer)
}

#[test]
fn a_layer_added_by_an_edit_starts_with_steps_of_the_rate() {
    let (_a, old) = run_of(1, "f32", "");
    steps(&old, 20);
    let (_b, new) = run_of(2, "f32", "");
    // A checkpoint and a running version are moved alike.
    let (states, at) = (values(&old), old.cursor().unwrap());
    let parked = DroppedStates::default();
    let moved = new.take_over(Source::Values { states: &states, cursor: &at }, &parked, Taking::Fitting).unwrap();
    assert_eq!(moved.new, ["model.2.weight", "optim.adamw.m.2.weight", "optim.adamw.v.2.weight"]);
    assert_eq!((cursor(&new, "updates"), cursor(&new, "updates.2.weight")), (Some(20), Some(0)));
    assert!((change(&new, 2) - 1e-3).abs() < 1e-6, "{}", weight(&new, 2));
    assert_eq!((cursor(&new, "updates"), cursor(&new, "updates.2.weight")), (Some(21), Some(1)));
    assert_eq!(cursor(&new, "updates.1.weight"), None);
}

#[test]
fn moments_that_migrate_fills_keep_the_count_of_the_optimizer() {
    let (_a, old) = run_of(1, "f32", "");
    steps(&old, 20);
    let fill = r#"function recipe.migrate(old, new)
      for _, slot in ipairs { "m", "v" } do
        new["optim.adamw." .. slot .. ".2.weight"]:assign(old["optim.adamw." .. slot .. ".1.weight"])
      end
    end"#;
    let (_b, new) = run_of(2, "f32", fill);
    let (states, at) = (values(&old), old.cursor().unwrap());
    new.take_over(Source::Values { states: &states, cursor: &at }, &DroppedStates::default(), Taking::Fitting).unwrap();
    assert_eq!((cursor(&new, "updates"), cursor(&new, "updates.2.weight")), (Some(20), None));
    assert!((change(&new, 2) - 1e-3).abs() < 1e-4);
}

#[test]
fn a_layer_that_an_edit_puts_back_has_its_own_count() {
    let s = script(2, &[]).unwrap();
    let first = start(&s, 2, "f32", "");
    steps(&first, 4);
    let mut dropped = DroppedStates::default();
    let second = start(&s, 1, "f32", "");
    let moved = second.take_over(Source::Run(&first), &dropped, Taking::Fitting).unwrap();
    dropped.add(&first, &moved).unwrap();
    steps(&second, 10);
    let third = start(&s, 2, "f32", "");
    let moved = third.take_over(Source::Run(&second), &dropped, Taking::Fitting).unwrap();
    assert_eq!(moved.parked.len(), 3, "{moved:?}");
    assert_eq!((cursor(&third, "updates"), cursor(&third, "updates.2.weight")), (Some(14), Some(4)));
    assert!((change(&third, 2) - 1e-3).abs() < 1e-4);
    // After a failed edit the version before it continues with its own counts.
    let kept = DroppedStates::default();
    first.take_over(Source::Run(&second), &kept, Taking::Back).unwrap();
    assert_eq!((cursor(&first, "updates"), cursor(&first, "updates.2.weight")), (Some(14), Some(4)));
}

#[test]
fn with_a_loss_scaler_the_counts_are_states() {
    let (_a, old) = run_of(1, "fp16", "");
    steps(&old, 5);
    let (_b, new) = run_of(2, "fp16", "");
    let (states, at) = (values(&old), old.cursor().unwrap());
    new.take_over(Source::Values { states: &states, cursor: &at }, &DroppedStates::default(), Taking::Fitting).unwrap();
    let count = |path: &str| values(&new).iter().find(|s| s.0 == path).unwrap().1.get_f64(0);
    assert_eq!((count("optim.adamw.step.1.weight"), count("optim.adamw.step.2.weight")), (5.0, 0.0));
    assert!((change(&new, 2) - 1e-3).abs() < 1e-6);
    assert_eq!((count("optim.adamw.step.1.weight"), count("optim.adamw.step.2.weight")), (6.0, 1.0));
}

#[test]
fn a_checkpoint_in_f32_gives_its_counts_to_a_run_in_fp16() {
    let (_a, old) = run_of(1, "f32", "");
    steps(&old, 7);
    let (_b, new) = run_of(2, "fp16", "");
    let (states, at) = (values(&old), old.cursor().unwrap());
    new.take_over(Source::Values { states: &states, cursor: &at }, &DroppedStates::default(), Taking::Fitting).unwrap();
    let count = |path: &str| values(&new).iter().find(|s| s.0 == path).unwrap().1.get_f64(0);
    assert_eq!((count("optim.adamw.step.1.weight"), count("optim.adamw.step.2.weight")), (7.0, 0.0));
}

/// Releases before counted the updates of all parameters together, in `scaler.updates`.
#[test]
fn an_older_checkpoint_in_fp16_loads_with_one_count_for_all() {
    let (_a, old) = run_of(2, "fp16", "");
    steps(&old, 5);
    let (mut states, at) = (values(&old), old.cursor().unwrap());
    states.retain(|s| !s.0.starts_with("optim.adamw.step."));
    let (_b, new) = run_of(2, "fp16", "");
    new.add_counts(&mut states).unwrap();
    let moved = new
        .take_over(Source::Values { states: &states, cursor: &at }, &DroppedStates::default(), Taking::Exact)
        .unwrap();
    assert!(moved.exact(), "{moved:?}");
    steps(&old, 3);
    steps(&new, 3);
    assert!(values(&old).iter().zip(&values(&new)).all(|(a, b)| a.0 == b.0 && a.1.bytes == b.1.bytes));
}
