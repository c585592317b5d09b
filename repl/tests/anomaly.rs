//! Tests the policies for NaN and loss spikes: messages, skipped updates, stops.

#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use support::{Place, Ran, place};

/// A recipe with every kind of State: weights, moments, running statistics, an average of the weights. `BAD` replaces `ROW` of y.
const RECIPE: &str = r#"
local pl = require "perilune"
local nn = pl.nn
local recipe = pl.recipe { name = "watched", params = { lr = 0.01, steps = 60, seed = 3 }, ema = 0.9 }
function recipe.data(p)
  local x = pl.randn { 640, 4 }
  local y = pl.where(pl.arange(640):eq(ROW), BAD, x:sum(1) * 0.2)
  return { train = pl.data.tensors { x = x, y = y }:shuffle(p.seed):batch(8) }
end
function recipe.model(p) return nn.Sequential { nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1) } end
function recipe.optimizer(p, model) return pl.optim.AdamW(model, { lr = p.lr }) end
function recipe.loss(model, batch)
  local error = model(batch.x):squeeze(-1) - batch.y
  return (error * error):mean()
end
return recipe
"#;

fn recipe(row: usize, bad: &str) -> Place {
    let p = place();
    p.file("r.lua", RECIPE.replace("ROW", &row.to_string()).replace("BAD", bad));
    p
}

/// Without the check of data, which finds the NaN of a row before the first step.
fn run(p: &Place, dir: &str, more: &[&str]) -> Ran {
    let options = ["--no-data-check", "--checkpoint-every", "1", "--keep", "0"];
    p.run(&[&["run", "r.lua", "--json", "--run-dir", dir], &options[..], more].concat())
}

fn warnings(r: &Ran) -> Vec<Value> {
    r.events().into_iter().filter(|e| e["event"] == "warning").collect()
}

/// Returns whether the States of two steps have the same bytes.
fn same(p: &Place, dir: &str, a: u64, b: u64) -> bool {
    let read = |step: u64, file: &str| std::fs::read(p.path(&format!("{dir}/checkpoints/step-{step}/{file}"))).unwrap();
    ["model.safetensors", "optimizer.safetensors"].iter().all(|f| read(a, f) == read(b, f))
}

/// Returns the step, counted from 1, whose batch contains a row, as reported by the run.
fn the_step(p: &Place, row: i64) -> u64 {
    let r = run(p, "find", &["--on-nan", "warn", "--on-spike", "warn"]);
    let found = warnings(&r).into_iter().find(|w| w["samples"].as_array().is_some_and(|s| s.contains(&row.into())));
    found.unwrap_or_else(|| panic!("no warning names row {row}: {}{}", r.out, r.err))["step"].as_u64().unwrap()
}

#[test]
fn a_run_stops_at_nan_and_names_step_line_op_and_samples() {
    let p = recipe(17, "0/0");
    let r = run(&p, "a", &[]);
    assert_eq!(r.status, Some(3), "{}", r.err);
    let last = r.events().pop().unwrap();
    let message = last["message"].as_str().unwrap();
    assert!(message.starts_with("the loss is NaN at step "), "{message}");
    assert!(message.contains("the first NaN is in the data") && message.contains("; rows "), "{message}");
    // No file of it was kept.
    let step: u64 = message["the loss is NaN at step ".len()..].split(';').next().unwrap().parse().unwrap();
    assert!(!p.path(&format!("a/checkpoints/step-{step}")).exists());
}

#[test]
fn the_op_that_makes_the_first_nan_is_named_with_its_line() {
    let p = recipe(999, "0.0");
    let text = p.read("r.lua").replace(
        "  return (error * error):mean()",
        "  local far = (error - 1):exp()\n  local scaled = (far * 1e30) * 1e30 + far\n  return (scaled - scaled):mean()",
    );
    p.file("r.lua", text);
    let r = run(&p, "a", &[]);
    assert_eq!(r.status, Some(3), "{}", r.err);
    let last = r.events().pop().unwrap();
    let message = last["message"].as_str().unwrap();
    assert!(message.contains("the first infinity comes from mul, shape {8} (r.lua:15)"), "{message}");
    assert_eq!((&last["file"], &last["line"]), (&"r.lua".into(), &15.into()), "{last}");
}

#[test]
fn a_skipped_step_changes_no_state() {
    let p = recipe(17, "0/0");
    let step = the_step(&p, 17);
    let r = run(&p, "a", &["--on-nan", "skip"]);
    assert_eq!(r.status, Some(0), "{}", r.err);
    let said = warnings(&r);
    assert_eq!(said.len(), 1, "{said:?}");
    let message = said[0]["message"].as_str().unwrap();
    assert!(message.ends_with("its update was skipped") && message.contains("; rows "), "{message}");
    assert_eq!(said[0]["step"], step);
    assert!(same(&p, "a", step - 1, step), "step {step} changed a State");
    assert!(!same(&p, "a", step, step + 1));
    let log = p.read("a/metrics.jsonl");
    assert!(log.contains("\"event\":\"warning\""), "{log}");
    // The plain output names the line of the recipe too.
    let r = p.run(&["run", "r.lua", "--run-dir", "b", "--on-nan", "warn", "--steps", &(step + 2).to_string()]);
    let said = format!("warning: r.lua:12: the loss is NaN at step {step}");
    assert!(r.err.contains(&said) && r.err.contains("; rows "), "{said}: {}", r.err);
}

/// The loss is finite, but its gradient is NaN.
#[test]
fn gradients_are_watched_too() {
    let p = recipe(999, "0.0");
    let loss = "  return (error * error):mean() + (error * 0):abs():sqrt():sum()";
    p.file("r.lua", p.read("r.lua").replace("  return (error * error):mean()", loss));
    let r = run(&p, "a", &[]);
    let message = r.events().pop().unwrap()["message"].as_str().unwrap().to_string();
    assert!(message.starts_with("the loss is NaN at step 2"), "{message}");
    assert!(message.contains("model.") && message.contains("held the first NaN before the step"), "{message}");
    let r = run(&p, "b", &["--on-nan", "skip"]);
    assert_eq!(r.status, Some(3), "{}", r.err);
    let said = warnings(&r);
    assert!(said[0]["message"].as_str().unwrap().starts_with("the norm of the gradients is NaN at step 1"), "{said:?}");
    let message = r.events().pop().unwrap()["message"].as_str().unwrap().to_string();
    assert!(message.contains("the updates of 20 steps in a row were skipped"), "{message}");
    assert!(same(&p, "b", 1, 5));
}

#[test]
fn a_loss_spike_is_reported_and_may_be_skipped() {
    let p = recipe(17, "1000.0");
    let step = the_step(&p, 17);
    assert!(step > 25, "the row comes too early for a spike: step {step}");
    let r = run(&p, "a", &["--on-spike", "skip"]);
    assert_eq!(r.status, Some(0), "{}", r.err);
    let said = warnings(&r);
    assert_eq!((said.len(), &said[0]["step"]), (1, &step.into()), "{said:?}");
    let message = said[0]["message"].as_str().unwrap();
    assert!(message.starts_with("the loss rises to 1") && message.ends_with("its update was skipped"), "{message}");
    assert!(same(&p, "a", step - 1, step) && !same(&p, "a", step, step + 1));
    let stopped = run(&p, "b", &["--on-spike", "stop"]);
    assert_eq!(stopped.status, Some(3));
    assert!(warnings(&run(&p, "c", &["--on-spike", "off"])).is_empty());
    // A run resumed from a checkpoint before the spike skips it too.
    let copy = |to: &str| std::process::Command::new("cp").args(["-r", "a", to]).current_dir(p.dir.path()).status();
    assert!(copy("d").unwrap().success());
    for k in step - 3..=60 {
        std::fs::remove_dir_all(p.path(&format!("d/checkpoints/step-{k}"))).unwrap();
    }
    let again = run(&p, "d", &["--on-spike", "skip", "--resume"]);
    assert_eq!(again.status, Some(0), "{}", again.err);
    assert_eq!(p.run_json("d")["weights"], p.run_json("a")["weights"]);
}

#[test]
fn the_recipe_sets_anomaly_policies_and_unknown_words_are_errors() {
    let p = recipe(17, "0/0");
    p.file("r.lua", p.read("r.lua").replace("ema = 0.9", "ema = 0.9, on_nan = \"skip\""));
    assert_eq!(run(&p, "a", &[]).status, Some(0));
    assert_eq!(run(&p, "b", &["--on-nan", "stop"]).status, Some(3));
    p.file("r.lua", p.read("r.lua").replace("\"skip\"", "\"skpi\""));
    let r = run(&p, "c", &[]);
    assert!(r.err.contains("on_nan") && r.err.contains("skip"), "{}", r.err);
}
