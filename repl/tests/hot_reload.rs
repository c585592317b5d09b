//! Tests failed edits of a watched run: the run continues as if they had not been made, whenever they fail.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use support::{Place, Running, place, save};

/// A recipe with averages, dropout and evaluations, whose state a failed evaluation could change. `LOSS`, `EVAL`, `LAYER` and
/// `STEPS` are replaced by edits.
const RECIPE: &str = r#"
local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local recipe = pl.recipe { name = "bad", params = { steps = STEPS, seed = 3, eval_every = 40 } }
recipe.ema = 0.9
function recipe.data(p)
  local x = pl.randn { 80, 4 }
  local set = pl.data.tensors { x = x, y = x:sum(1) }
  return { train = set:split("train", 0.75, p.seed):shuffle(p.seed):batch(8), valid = set:split("valid", 0.25, p.seed):batch(8) }
end
function recipe.model()
  return nn.Sequential { nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), LAYER nn.Linear(8, 1) }
end
function recipe.optimizer(_, model) return optim.SGD(model, { lr = 0.01, momentum = 0.5 }) end
local calls, evaluations = 0, 0
function recipe.loss(model, batch)
  calls = calls + 1
  local error = model(batch.x):squeeze(-1) - batch.y
  LOSS
  return (error * error):mean()
end
function recipe.evaluate(model, batch)
  evaluations = evaluations + 1
  local error = model(batch.x):squeeze(-1) - batch.y
  EVAL
  return { loss = (error * error):mean() }
end
return recipe
"#;

const ARGS: [&str; 8] = ["run", "bad.lua", "--json", "--watch", "--run-dir", "r", "--threads", "1"];

fn text(loss: &str, eval: &str, layer: &str, steps: u64) -> String {
    let text = RECIPE.replace("LOSS", loss).replace("EVAL", eval).replace("LAYER", layer);
    text.replace("STEPS", &steps.to_string())
}

const LONG: u64 = 10_000_000;

/// Saves a version that fails, and checks the events of its application (unless it never runs) and refusal.
fn fails(p: &Place, run: &mut Running, text: &str, applied: bool, says: &str) -> Value {
    save(p, "bad.lua", text);
    if applied {
        let event = run.next("reload");
        assert_eq!(event["ok"], true, "{event}");
    }
    let event = run.next("reload");
    assert!(event["error"].as_str().unwrap_or_default().contains(says), "{says}: {event}");
    run.next("step");
    event
}

/// Lets the run end after some more steps, and returns its weights.
fn finish(p: &Place, run: &mut Running, version: impl Fn(u64) -> String) -> (u64, Value) {
    let step = run.next("step")["step"].as_u64().unwrap();
    // Far enough ahead for a busy machine to detect the edit before.
    let steps = step + 3000;
    save(p, "bad.lua", &version(steps));
    assert_eq!(run.next("reload")["ok"], true);
    let done = run.next("done");
    assert!(run.child.wait().unwrap().success());
    assert_eq!(done["steps"], steps);
    (steps, done["weights"].clone())
}

#[test]
fn a_bad_edit_leaves_no_trace_in_the_weights() {
    let p = place();
    p.file("bad.lua", text("", "", "", LONG));
    let mut run = Running::start(&p, &ARGS);
    run.next("eval");

    // Recording its step raises, so it never runs.
    fails(&p, &mut run, &text("error = error + pl.zeros { 5 }", "", "", LONG), false, "{8}");
    fails(&p, &mut run, &text("", "error = error + pl.zeros { 5 }", "", LONG), false, "{8}");
    // A NaN loss is read a step late; the step of the edit is repeated.
    let nan = "error = error * (calls >= 3 and 0 / 0 or 1)";
    let event = fails(&p, &mut run, &text(nan, "", "", LONG), true, "the loss is NaN at step ");
    assert!(event["repeated"].as_u64().unwrap() >= 2, "{event}");
    // An evaluation that raises in its second batch, on averaged weights and in evaluation mode.
    fails(&p, &mut run, &text("", "if evaluations == 3 then error('no') end", "", LONG), true, "no");
    // A step that raises long after the trial.
    fails(&p, &mut run, &text("if calls == 60 then error('sixty') end", "", "", LONG), true, "sixty");

    let (steps, weights) = finish(&p, &mut run, |n| text("", "", "", n));
    p.file("bad.lua", text("", "", "", steps));
    let r = p.run(&["run", "bad.lua", "--quiet", "--run-dir", "straight", "--threads", "1"]);
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""));
    assert_eq!(p.run_json("straight")["weights"], weights);

    // The log has each step once, and records the repeated ones.
    let log = p.read("r/metrics.jsonl");
    let events: Vec<Value> = log.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let seen: Vec<u64> = events.iter().filter(|e| e["event"] == "step").map(|e| e["step"].as_u64().unwrap()).collect();
    assert_eq!(seen, (1..=steps).collect::<Vec<_>>());
    let ledger = p.read("r/ledger.jsonl");
    assert!(ledger.lines().any(|l| l.contains("the loss is NaN") && l.contains("\"back_to\":")), "{ledger}");
    assert!(ledger.contains("\"the version before\"") && ledger.contains("+  if calls == 60 then error('sixty') end"));

    let again = p.run(&["replay", "r", "--run-dir", "again"]);
    assert_eq!((again.status, again.complaints()), (Some(0), vec![]), "{}", again.out);
    assert_eq!(p.run_json("again")["weights"], weights);
}

/// A layer that an edit removes and the next one restores has its old weights, unless a checkpoint was taken in between.
#[test]
fn dropped_states_are_parked_until_the_next_checkpoint() {
    let p = place();
    let layer = "nn.Linear(8, 8),";
    p.file("bad.lua", text("", "", layer, LONG));
    let mut run = Running::start(&p, &ARGS);
    run.next("step");
    let mut edit = |text: &str, says: &str| {
        save(&p, "bad.lua", text);
        let event = run.next("reload");
        assert!(event["states"].as_str().unwrap_or_default().contains(says), "{says}: {event}");
        for _ in 0..10 {
            run.next("step");
        }
    };
    edit(&text("", "", "", LONG), "dropped: ema.6.bias");
    edit(&text("", "", layer, LONG), "back again: ema.5.bias, ema.5.weight, ema.6.bias and");
    let (_, weights) = finish(&p, &mut run, |n| text("", "", layer, n));
    let again = p.run(&["replay", "r", "--run-dir", "again"]);
    assert_eq!((again.status, again.complaints()), (Some(0), vec![]), "{}", again.out);
    assert_eq!(p.run_json("again")["weights"], weights);

    let mut args = ARGS.to_vec();
    args[5] = "saved";
    args.extend(["--checkpoint-every", "5"]);
    p.file("bad.lua", text("", "", layer, LONG));
    let mut run = Running::start(&p, &args);
    run.next("step");
    for (version, says) in [(text("", "", "", LONG), "dropped: "), (text("", "", layer, LONG), "new: ema.6.bias")] {
        save(&p, "bad.lua", &version);
        let event = run.next("reload");
        assert!(event["states"].as_str().unwrap_or_default().contains(says), "{says}: {event}");
        run.next("checkpoint");
        run.next("checkpoint");
    }
    run.signal("-INT");
    assert_eq!(run.child.wait().unwrap().code(), Some(130));
}

/// An edit of the batch size or of `accumulate` goes on with the next sample, and its replay has the same bits.
#[test]
fn an_edit_of_the_batch_neither_repeats_nor_skips_a_sample() {
    let p = place();
    let version = |batch: u64, accumulate: u64, steps: u64| {
        format!(
            r#"
local pl = require "perilune"
local recipe = pl.recipe {{ name = "bad", params = {{ steps = {steps}, batch = {batch}, accumulate = {accumulate} }} }}
function recipe.data(p) return {{ train = pl.data.tensors({{ x = pl.arange(4000000):to("f32") }}):batch(p.batch) }} end
function recipe.model() return pl.nn.Linear(1, 1) end
function recipe.optimizer(_, model) return pl.optim.SGD(model, {{ lr = 1e-9 }}) end
function recipe.loss(model, batch)
  return (model(batch.x:unsqueeze(1) / 4e6) ^ 2):mean(), {{ middle = batch.x:mean() }}
end
return recipe
"#
        )
    };
    p.file("bad.lua", version(8, 1, LONG));
    let mut run = Running::start(&p, &ARGS);
    let sizes = [(8, 1), (12, 1), (5, 3), (4, 5), (8, 1)];
    for (batch, accumulate) in &sizes[1..] {
        for _ in 0..3 {
            run.next("step");
        }
        save(&p, "bad.lua", &version(*batch, *accumulate, LONG));
        assert_eq!(run.next("reload")["ok"], true);
    }
    let (steps, weights) = finish(&p, &mut run, |steps| version(8, 1, steps));

    let (mut next, mut at, mut edits) = (0.0, 0, 0);
    for line in p.read("r/metrics.jsonl").lines() {
        let event: Value = serde_json::from_str(line).unwrap();
        if event["event"] == "reload" {
            edits += 1;
        }
        if event["event"] != "step" {
            continue;
        }
        // The samples of a step follow each other, so their mean is that of the first and the last.
        let middle = event["metrics"]["middle"].as_f64().unwrap();
        let fits = |at: &usize| middle == next + ((sizes[*at].0 * sizes[*at].1) as f64 - 1.0) / 2.0;
        let found = (at..sizes.len()).find(fits);
        at = found.unwrap_or_else(|| panic!("step {}: the mean is {middle}, and sample {next} is next", event["step"]));
        next += (sizes[at].0 * sizes[at].1) as f64;
    }
    assert_eq!((at, edits), (sizes.len() - 1, sizes.len()));
    let again = p.run(&["replay", "r", "--run-dir", "again"]);
    assert_eq!((again.status, again.complaints()), (Some(0), vec![]), "{}", again.out);
    assert_eq!(p.run_json("again")["weights"], weights);
    assert_eq!(p.run_json("again")["steps"], steps);
}
