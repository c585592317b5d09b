//! Tests the envelope of a run on real runs: another instruction set stays within it, another learning rate does not.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod support;

use perilune_train::{Envelope, MetricsLog, Verdict};
use support::{Place, place};

/// A network with normalization, whose deviations grow; an accuracy; 120 steps.
const RECIPE: &str = r#"
local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local recipe = pl.recipe { name = "grown", params = { lr = 0.02, steps = 120, seed = 3, eval_every = 20 } }
function recipe.data(p)
  local x = pl.randn { 256, 16 }
  local y = (x:sum(1):sin() + x[{ {}, 0 }] * x[{ {}, 1 }]):gt(0):to("i64")
  local set = pl.data.tensors { x = x, y = y }
  return { train = set:split("train", 0.75, p.seed):shuffle(p.seed):batch(16), valid = set:split("valid", 0.25, p.seed):batch(32) }
end
function recipe.model(p)
  return nn.Sequential { nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2) }
end
function recipe.optimizer(p, model) return optim.AdamW(model, { lr = p.lr, clip_norm = 1 }) end
function recipe.loss(model, batch)
  local logits = model(batch.x)
  return pl.cross_entropy(logits, batch.y), { accuracy = logits:argmax(-1):eq(batch.y):to("f32"):mean() }
end
return recipe
"#;

/// Whether the processor has both instruction sets that are compared.
fn has_avx2() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Trains with an instruction set, and returns the log.
fn trained(p: &Place, dir: &str, isa: &str, more: &[&str]) -> MetricsLog {
    let args = [&["run", "grown.lua", "--device", "cpu", "--quiet", "--run-dir", dir], more].concat();
    let out = p.command(&args).env("PERILUNE_CPU_ISA", isa).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    MetricsLog::read(&p.path(dir)).unwrap()
}

#[test]
fn another_instruction_set_is_within_and_another_rate_is_not() {
    if !has_avx2() {
        return;
    }
    let p = place();
    p.file("grown.lua", RECIPE);
    let original = trained(&p, "original", "avx2", &[]);
    let perturbed = ["1", "2", "3"].map(|seed| trained(&p, &format!("p{seed}"), "avx2", &["--perturb", seed]));
    assert!(perturbed.iter().all(|log| *log != original), "a perturbed run has other bits");
    assert_eq!(p.run_json("p2")["perturb"], 2);
    let envelope = Envelope::measure(&original, &perturbed, "f32").unwrap();
    let envelope = Envelope::of_json(&envelope.json()).unwrap();

    assert_eq!(envelope.compare(&original, &trained(&p, "again", "avx2", &[])).verdict, Verdict::SameBits);
    let other = envelope.compare(&original, &trained(&p, "other", "sse2", &[]));
    assert_eq!(other.verdict, Verdict::Within, "{:?}", other.first_outside);
    for (dir, rate) in [("faster", "lr=0.022"), ("slower", "lr=0.018")] {
        let found = envelope.compare(&original, &trained(&p, dir, "avx2", &["--set", rate]));
        let first = found.first_outside.unwrap_or_else(|| panic!("{rate} is within"));
        assert!(first.step <= 5, "{first}");
    }
    // A fourth perturbation is one of the same kind.
    let fourth = envelope.compare(&original, &trained(&p, "p4", "avx2", &["--perturb", "4"]));
    assert_eq!(fourth.verdict, Verdict::Within, "{:?}", fourth.first_outside);
}

/// A perturbation is applied once, at the beginning: a resume goes on from its checkpoint.
#[test]
fn a_perturbed_run_resumes_and_replays() {
    if !has_avx2() {
        return;
    }
    let p = place();
    p.file("grown.lua", RECIPE);
    let short = ["--steps", "8", "--checkpoint-every", "4", "--perturb", "5"];
    let whole = trained(&p, "whole", "avx2", &short);
    trained(&p, "half", "avx2", &[&short[..], &["--until", "4"]].concat());
    assert_eq!(trained(&p, "half", "avx2", &["--resume"]).by_name["loss"], whole.by_name["loss"]);
    let weights = |dir: &str| p.run_json(dir)["weights"].clone();
    assert_eq!(weights("half"), weights("whole"));
    let r = p.command(&["replay", "whole", "--quiet"]).env("PERILUNE_CPU_ISA", "avx2").output().unwrap();
    assert!(r.status.success(), "{}", String::from_utf8_lossy(&r.stderr));
}
