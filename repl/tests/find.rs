//! Tests `perilune find`: learning rates of known problems, several optimizers and groups; the largest batch of a memory.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use support::{Place, TINY, place, tiny};

fn find(p: &Place, args: &[&str]) -> Vec<Value> {
    let r = p.run(&[&["find"][..], args, &["--json"]].concat());
    assert_eq!(r.status, Some(0), "{}", r.err);
    r.events()
}

/// A quadratic a/2 x² with gradient descent, which diverges above a rate of 2/a.
fn quadratic(optimizer: &str) -> Place {
    let p = place();
    p.file(
        "quadratic.lua",
        format!(
            r#"
local pl = require "perilune"
local recipe = pl.recipe {{ name = "quadratic", params = {{ lr = 0.01, steps = 100, seed = 1, batch = 2 }} }}
function recipe.data(p) return {{ train = pl.data.tensors {{ x = pl.ones {{ 8, 1 }} }}:batch(p.batch) }} end
function recipe.model(p)
  local m = {{ a = pl.state(pl.full({{ 4 }}, 3.0)), b = pl.state(pl.full({{ 4 }}, 3.0)) }}
  function m:forward(x) return (self.a * self.a):sum() * 2 + (self.b * self.b):sum() * 2 end
  return pl.nn.module(m)
end
function recipe.optimizer(p, model) return {optimizer} end
function recipe.loss(model, batch) return model(batch.x) end
return recipe
"#
        ),
    );
    p
}

#[test]
fn the_divergence_of_a_quadratic_is_found() {
    // a = 4, so gradient descent diverges above 0.5.
    let p = quadratic("pl.optim.SGD(model, { lr = p.lr })");
    let all = find(&p, &["lr", "quadratic.lua", "--from", "1e-4", "--to", "100"]);
    let last = all.last().unwrap();
    let diverged = last["diverged"].as_f64().unwrap();
    // The state has shrunk by then and has to grow again, and the smoothing is late.
    assert!((0.5..4.0).contains(&diverged), "{last}");
    assert!((last["tenth"].as_f64().unwrap() - diverged / 10.0).abs() < 1e-12);
    let steepest = last["steepest"].as_f64().unwrap();
    assert!((1e-3..0.5).contains(&steepest), "{last}");
    assert_eq!(last["recipe"], 0.01);
    let rates: Vec<f64> = all.iter().filter(|e| e["event"] == "rate").map(|e| e["rate"].as_f64().unwrap()).collect();
    assert!(
        (rates[0] - 1e-4).abs() < 1e-12 && rates.windows(2).all(|w| (w[1] / w[0] - rates[1] / rates[0]).abs() < 1e-9)
    );
    assert!(!p.path("runs").exists(), "it leaves no trace");
}

#[test]
fn a_schedule_and_other_optimizers_follow_the_ramp() {
    let schedule = "pl.optim.SGD(model, { lr = pl.optim.cosine { peak = p.lr, steps = p.steps, warmup = 10 } })";
    let plain = "pl.optim.SGD(model, { lr = p.lr })";
    let losses = |optimizer: &str| -> Vec<f64> {
        let all =
            find(&quadratic(optimizer), &["lr", "quadratic.lua", "--from", "1e-4", "--to", "0.1", "--steps", "40"]);
        all.iter().filter_map(|e| e["loss"].as_f64()).collect()
    };
    assert_eq!(losses(schedule), losses(plain), "the ramp replaces the schedule");
    assert_eq!(losses(plain).len(), 40);
    // The groups keep the ratio of their rates: the second one of 0 does not train.
    let groups = "pl.optim.SGD({ { params = { model.a }, lr = p.lr }, { params = { model.b }, lr = 0.0 } }, {})";
    let half = losses(groups);
    assert!(*half.last().unwrap() > 72.0 - 1e-3, "b stays at 3: 2 * 4 * 9 = 72, {half:?}");
    for optimizer in ["AdamW", "Muon", "Lion", "RMSprop"] {
        let text = format!("pl.optim.{optimizer}(model, {{ lr = p.lr }})");
        let all = losses(&text);
        assert!(all.last().unwrap() < &all[0], "{optimizer}: {all:?}");
    }
}

#[test]
fn rates_of_digits_are_usable() {
    let p = place();
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/../recipes/digits.lua");
    let last = find(&p, &["lr", recipe, "--steps", "100"]).pop().unwrap();
    let steepest = last["steepest"].as_f64().unwrap();
    assert!((3e-4..5e-2).contains(&steepest), "{last}");
    assert!(
        (last["set_lr"].as_f64().unwrap() - steepest).abs() < 1e-12,
        "the largest rate of its schedule is lr: {last}"
    );
    let r = p.command(&["find", "lr", recipe, "--steps", "60"]).env("COLUMNS", "60").output().unwrap();
    let text = String::from_utf8_lossy(&r.stdout);
    assert!(text.contains("the loss falls fastest at") && text.contains("--set lr="), "{text}");
    assert!(text.lines().skip(1).filter(|l| l.contains('│')).all(|l| l.chars().count() <= 60), "{text}");
}

#[test]
fn recipes_without_a_rate_are_refused() {
    let p = tiny();
    p.file("sets.lua", TINY.replace("return recipe\n", "function recipe.step(run, batch)\n  local loss = recipe.loss(run.model, batch)\n  loss:backward()\n  run.opt.groups[1].options.lr = 0.1\n  run.opt:step()\n  return loss\nend\nreturn recipe\n"));
    p.file("zero.lua", TINY.replace("lr = p.lr", "lr = 0.0"));
    for (args, status, rule) in [
        (&["lr", "sets.lua", "--steps", "20"][..], 2, "sets the learning rate of the optimizer itself"),
        (&["lr", "zero.lua", "--steps", "20"], 3, "all learning rates are 0"),
        (&["lr", "tiny.lua", "--from", "1", "--to", "0.1"], 2, "above the first"),
        (&["lr", "tiny.lua", "--set", "lrr=1"], 2, "lr"),
        (&["batch", "tiny.lua"], 2, "no param 'batch'"),
        (&["batch", "tiny.lua", "--param", "widht"], 2, "Did you mean 'width'?"),
    ] {
        let r = p.run(&[&["find"][..], args].concat());
        assert_eq!(r.status, Some(status), "{args:?}: {}{}", r.out, r.err);
        assert!(r.err.contains(rule), "{args:?}: {}", r.err);
    }
}

#[test]
fn the_largest_batch_fits_and_the_next_one_does_not() {
    let p = place();
    let text = TINY
        .replace("width = 4 }", "width = 4, batch = 8 }")
        .replace(":shuffle(p.seed):batch(8)", ":shuffle(p.seed):batch(p.batch)");
    p.file("tiny.lua", text.replace("pl.randn { 64, 4 }", "pl.randn { 40000, 4 }"));
    let all = find(&p, &["batch", "tiny.lua", "--memory", "1MiB"]);
    let last = all.last().unwrap();
    let (batch, limit) = (last["batch"].as_u64().unwrap(), 1 << 20);
    let tries: Vec<(u64, u64, bool)> = all
        .iter()
        .filter(|e| e["event"] == "try")
        .map(|e| (e["batch"].as_u64().unwrap(), e["predicted"].as_u64().unwrap(), e["fits"] == true))
        .collect();
    assert!(tries.iter().all(|t| t.2 == (t.1 <= limit)), "{tries:?}");
    assert!(tries.iter().any(|t| t.0 == batch && t.2), "{last} {tries:?}");
    let above = tries.iter().filter(|t| !t.2).map(|t| t.0).min().unwrap();
    assert!(above > batch && above - batch <= (batch / 100).max(1), "{last} {tries:?}");
    // Memory that suffices for all samples.
    let most = find(&p, &["batch", "tiny.lua", "--memory", "1GiB"]).pop().unwrap();
    assert_eq!((most["batch"].as_u64(), most["power_of_two"].as_u64()), (Some(30000), Some(16384)));
    let r = p.run(&["find", "batch", "tiny.lua", "--memory", "10KiB"]);
    assert_eq!(r.status, Some(1), "{}", r.out);
    assert!(r.err.contains("a batch of 1 does not fit"), "{}", r.err);
}
