//! Tests the replay of windows: honest runs have the same bits in each window, and tampered ones, whose hashes and seals a forger has
//! computed again, differ in a window that holds the tampering.
//!
//! A tampering is of one of two kinds. The files of an honest run were edited (`EDITED`), or the run was computed in another way than
//! its directory states (`COMPUTED`).
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

#[path = "support/forge.rs"]
mod forge;
mod support;

use forge::Forger;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Mutex;
use support::{Place, Ran, Running, place, save};

/// Everything that a run carries from step to step: moments, averages, batch statistics, dropout, shuffling, accumulation, a schedule,
/// a running metric, evaluations, a sample log, a data file.
const RECIPE: &str = r#"
local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local recipe = pl.recipe { name = "audit", params = { lr = 0.02, steps = 12, seed = 3, width = 8, accumulate = 2, eval_every = 4, batch = 4 } }
recipe.ema = 0.9
recipe.sample_log = true
local level, count = pl.state(pl.zeros {}), 0
recipe.states = { level = level }
function recipe.data(p)
  local rows = pl.data.csv("points.csv"):tensors { x = { columns = { 0, 4 } }, y = { column = 4 } }
  return { train = rows:split("train", 0.75, p.seed):shuffle(p.seed):batch(p.batch), valid = rows:split("valid", 0.25, p.seed):batch(8) }
end
function recipe.model(p)
  return nn.Sequential { nn.Linear(4, p.width), nn.BatchNorm1d(p.width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(p.width, 1) }
end
function recipe.optimizer(p, model)
  local rate = optim.cosine { peak = p.lr, warmup = 3, steps = p.steps }
  return optim.AdamW(model, { lr = rate, clip_norm = 1, weight_decay = 0.01 })
end
function recipe.loss(model, batch)
  local x, y = batch.x, batch.y
  local error = model(x):squeeze(-1) - y
  if model.training then level:assign(level * 0.9 + error:abs():mean():detach() * 0.1) end
  return (error * error):mean(), { level = level }, nil, error * error
end
return recipe
"#;

/// Sixty-four rows of four numbers and their sum.
fn points() -> String {
    let row = |k: u64| {
        let x: Vec<f64> = (1..=4).map(|c| ((k * 7919 + c * 104_729) % 1000) as f64 / 500.0 - 1.0).collect();
        let y: f64 = x.iter().sum();
        format!("{},{y:.3}\n", x.iter().map(|v| format!("{v:.3}")).collect::<Vec<_>>().join(","))
    };
    (0..64).map(row).collect()
}

fn fresh(recipe: &str) -> Place {
    let p = place();
    p.file("audit.lua", recipe);
    p.file("points.csv", points());
    p
}

#[track_caller]
fn trained(p: &Place, dir: &str, more: &[&str]) {
    let args = [&["run", "audit.lua", "--quiet", "--run-dir", dir, "--checkpoint-every", "4", "--keep", "0"], more];
    let r = p.run(&args.concat());
    assert_eq!(r.status, Some(0), "{more:?}: {}", r.err);
}

fn replayed(p: &Place, dir: &str, window: &str) -> Ran {
    p.run(&["replay", dir, "--steps", window, "--json"])
}

/// Runs jobs on two threads, in the order of their numbers.
fn in_parallel(count: usize, job: impl Fn(usize) + Sync) {
    let next = Mutex::new(0..count);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let Some(k) = next.lock().unwrap().next() else { return };
                    job(k);
                }
            });
        }
    });
}

/// A tampered run: what was done to it, a window that holds that, and a part of the message.
struct Tampered {
    name: &'static str,
    window: &'static str,
    finds: &'static str,
}

#[track_caller]
fn is_found(p: &Place, dir: &str, t: &Tampered) {
    let r = replayed(p, dir, t.window);
    let name = t.name;
    assert_eq!(r.status, Some(4), "{name}: {}{}", r.out, r.err);
    assert!(r.err.contains("the record is not what the run computes: step "), "{name}: {}", r.err);
    assert!(r.err.contains(t.finds), "{name}: {}", r.err);
    // The forger's hashes and seals are intact.
    assert!(!r.err.contains("damaged"), "{name}: {}", r.err);
    let event = r.events().pop().unwrap();
    let (from, to) = t.window.split_once("..").unwrap();
    let bound = |text: &str, open: u64| if text.is_empty() { open } else { text.parse().unwrap() };
    let step = event["difference"]["step"].as_u64().unwrap();
    assert!((bound(from, 0)..=bound(to, 99)).contains(&step), "{name}: step {step} of {}", t.window);
}

type Edit = fn(&Forger);

/// Adds one ulp to the first f32 of a tensor.
fn ulp(bytes: &mut [u8]) {
    let next = u32::from_le_bytes(bytes[..4].try_into().unwrap()) + 1;
    bytes[..4].copy_from_slice(&next.to_le_bytes());
}

fn next(v: &mut Value) {
    *v = json!(f64::from((v.as_f64().unwrap() as f32).next_up()));
}

/// Edits of an honest run of twelve steps with checkpoints at 4, 8 and 12.
#[rustfmt::skip]
const EDITED: &[(Tampered, Edit)] = &[
    (Tampered { name: "a loss", window: "4..8", finds: "step 6: loss: recorded 0.1," }, |f| f.event("step", 6, |e| e["loss"] = json!(0.1))),
    (Tampered { name: "a loss by one ulp", window: "4..8", finds: "step 6: loss: " }, |f| f.event("step", 6, |e| next(&mut e["loss"]))),
    (Tampered { name: "the last loss", window: "8..", finds: "step 12: loss: " }, |f| f.event("step", 12, |e| next(&mut e["loss"]))),
    (Tampered { name: "a gradient norm", window: "4..8", finds: "step 7: grad_norm: " }, |f| f.event("step", 7, |e| next(&mut e["metrics"]["grad_norm"]))),
    (Tampered { name: "a metric", window: "..4", finds: "step 2: level: " }, |f| f.event("step", 2, |e| next(&mut e["metrics"]["level"]))),
    (Tampered { name: "a metric that was removed", window: "..4", finds: "step 2: level: recorded none" }, |f| f.event("step", 2, |e| drop(e["metrics"].as_object_mut().unwrap().shift_remove("level")))),
    (Tampered { name: "a loss that is no number", window: "4..8", finds: "step 6: loss: recorded no number" }, |f| f.event("step", 6, |e| e["loss"] = Value::Null)),
    (Tampered { name: "an evaluation", window: "4..8", finds: "step 8: valid/loss: " }, |f| f.event("eval", 8, |e| next(&mut e["metrics"]["valid/loss"]))),
    (Tampered { name: "the last evaluation", window: "8..12", finds: "step 12: valid/loss: " }, |f| f.event("eval", 12, |e| e["metrics"]["valid/loss"] = json!(0.01))),
    (Tampered { name: "a removed evaluation", window: "4..8", finds: "step 8: evaluation of valid: recorded none" }, |f| f.log("metrics.jsonl", |l| l.retain(|e| !(e["event"] == "eval" && e["step"] == 8)))),
    (Tampered { name: "an added evaluation", window: "4..8", finds: "step 6: evaluation of valid: recorded one" }, |f| f.log("metrics.jsonl", |l| {
        let at = l.iter().position(|e| e["event"] == "step" && e["step"] == 7).unwrap();
        l.insert(at, json!({ "event": "eval", "step": 6, "seconds": 0.1, "metrics": { "valid/loss": 0.01 } }));
    })),
    (Tampered { name: "an evaluation of a split that is not there", window: "4..8", finds: "step 8: evaluation of best: recorded one" }, |f| f.log("metrics.jsonl", |l| {
        let at = l.iter().position(|e| e["event"] == "eval" && e["step"] == 8).unwrap();
        l.insert(at, json!({ "event": "eval", "step": 8, "seconds": 0.1, "metrics": { "best/loss": 0.01 } }));
    })),
    (Tampered { name: "a removed step", window: "4..8", finds: "step 6: step: recorded none" }, |f| f.log("metrics.jsonl", |l| l.retain(|e| !(e["event"] == "step" && e["step"] == 6)))),
    (Tampered { name: "two exchanged steps", window: "4..8", finds: "step 5: loss: " }, |f| f.log("metrics.jsonl", |l| {
        for e in l.iter_mut().filter(|e| e["event"] == "step") {
            e["step"] = match e["step"].as_u64().unwrap() { 5 => 6, 6 => 5, n => n }.into();
        }
    })),
    (Tampered { name: "a step fewer", window: "8..", finds: "step 11: " }, |f| {
        std::fs::remove_dir_all(f.dir.join("checkpoints/step-12")).unwrap();
        f.log("metrics.jsonl", |l| l.retain(|e| e["step"] != 12 || e["event"] == "eval"));
        f.log("metrics.jsonl", |l| l.iter_mut().filter(|e| e["step"] == 12).for_each(|e| e["step"] = 11.into()));
        f.samples(|all| all.retain(|e| e.step != 12));
        f.record(|r| { r.insert("steps_done".into(), 11.into()); r.shift_remove("weights"); });
    }),
    (Tampered { name: "a step more", window: "8..", finds: "step 12: length: " }, |f| {
        f.log("metrics.jsonl", |l| {
            let mut copy = l.iter().find(|e| e["event"] == "step" && e["step"] == 12).unwrap().clone();
            copy["step"] = 13.into();
            l.push(copy);
        });
        f.record(|r| { r.insert("steps_done".into(), 13.into()); r.shift_remove("weights"); });
    }),
    (Tampered { name: "a weight at the end of the window", window: "4..8", finds: "step 8: State model.1.weight: " }, |f| f.tensor(8, "model", "1.weight", ulp)),
    (Tampered { name: "a weight at the start of the window", window: "8..12", finds: "step 9: " }, |f| f.tensor(8, "model", "1.weight", |b| b[3] ^= 0x80)),
    (Tampered { name: "a moment", window: "4..8", finds: "step 8: State optim.adamw." }, |f| f.tensor(8, "optimizer", "optim.adamw.v.5.weight", ulp)),
    (Tampered { name: "an average of weights", window: "4..8", finds: "step 8: State ema." }, |f| f.tensor(8, "optimizer", "ema.5.weight", ulp)),
    (Tampered { name: "a running metric", window: "..4", finds: "step 4: State recipe.level: " }, |f| f.tensor(4, "optimizer", "recipe.level", ulp)),
    (Tampered { name: "a batch statistic", window: "..4", finds: "step 4: State model.2.running_mean: " }, |f| f.tensor(4, "model", "2.running_mean", ulp)),
    (Tampered { name: "the last weights", window: "8..12", finds: "step 12: State model.5.bias: " }, |f| { f.tensor(12, "model", "5.bias", ulp); f.rehash_weights(12); }),
    (Tampered { name: "the hash of the weights", window: "8..12", finds: "step 12: weights: " }, |f| f.record(|r| drop(r.insert("weights".into(), "0".repeat(64).into())))),
    (Tampered { name: "an older checkpoint", window: "4..8", finds: "step 8: State " }, |f| f.replace_checkpoint(8, 4)),
    (Tampered { name: "the random numbers of a checkpoint", window: "4..8", finds: "step 8: random numbers: step" }, |f| f.checkpoint_record(8, |r| r["rng"]["step"] = 77.into())),
    (Tampered { name: "the random numbers at the start", window: "8..12", finds: "step 9: " }, |f| f.checkpoint_record(8, |r| r["rng"]["step"] = 77.into())),
    (Tampered { name: "the learning rate of a checkpoint", window: "4..8", finds: "step 8: learning rate: " }, |f| f.checkpoint_record(8, |r| r["schedule"]["lr"] = json!([0.5]))),
    (Tampered { name: "the updates of a checkpoint", window: "4..8", finds: "step 8: " }, |f| f.checkpoint_record(8, |r| r["cursor"]["updates"] = 3.into())),
    (Tampered { name: "a param of a checkpoint", window: "4..8", finds: "step 4: param lr: recorded 0.5, recomputed 0.02" }, |f| f.checkpoint_record(4, |r| r["params"]["lr"] = json!(0.5))),
    (Tampered { name: "a param of the run", window: "..4", finds: "step 0: param lr: recorded 0.5, recomputed 0.02" }, |f| f.record(|r| r["params"]["lr"] = json!(0.5))),
    (Tampered { name: "the seed of the run", window: "..4", finds: "step 0: seed: recorded 4, recomputed 3" }, |f| f.record(|r| drop(r.insert("seed".into(), 4.into())))),
    (Tampered { name: "the precision of the run", window: "8..", finds: "step 8: precision: recorded bf16, recomputed f32" }, |f| f.record(|r| drop(r.insert("precision".into(), "bf16".into())))),
    (Tampered { name: "a default of the recipe", window: "4..8", finds: "step 4: param lr: recorded 0.02, recomputed 0.03" }, |f| {
        f.text("recipe", "audit.lua", &RECIPE.replace("lr = 0.02", "lr = 0.03"));
        f.record(|r| r["params"]["lr"] = json!(0.03));
    }),
    (Tampered { name: "an op of the recipe", window: "8..12", finds: "step 9: " }, |f| f.text("recipe", "audit.lua", &RECIPE.replace("nn.ReLU()", "nn.GELU()"))),
    (Tampered { name: "a logged sample", window: "4..8", finds: "step 6: samples: recorded rows row 63" }, |f| f.samples(|all| all.iter_mut().find(|e| e.step == 6).unwrap().id.row = 63)),
    (Tampered { name: "the loss of a logged sample", window: "4..8", finds: "step 7: samples: " }, |f| f.samples(|all| all.iter_mut().find(|e| e.step == 7).unwrap().loss += 1.0)),
    (Tampered { name: "removed samples", window: "4..8", finds: "step 8: samples: recorded none" }, |f| f.samples(|all| all.retain(|e| e.step != 8))),
];

#[test]
fn edited_runs_are_found() {
    let p = fresh(RECIPE);
    trained(&p, "honest", &[]);
    in_parallel(EDITED.len(), |k| {
        let (tampered, edit) = &EDITED[k];
        let dir = format!("forged-{k}");
        edit(&Forger::copy(&p.path("honest"), &p.path(&dir)));
        is_found(&p, &dir, tampered);
    });
    // A forger who changes nothing writes the same seals.
    let f = Forger::copy(&p.path("honest"), &p.path("same"));
    f.log("metrics.jsonl", |_| ());
    f.samples(|_| ());
    f.checkpoint_record(8, |_| ());
    f.rehash_weights(12);
    f.rehash_data(p.dir.path());
    for file in ["run.json", "metrics.jsonl", "samples.bin", "checkpoints/step-8/run.json"] {
        assert_eq!(
            std::fs::read(p.path("same").join(file)).unwrap(),
            std::fs::read(p.path("honest").join(file)).unwrap(),
            "{file}"
        );
    }
}

/// In step 6, which the loss knows by the step before it.
const COUNTED: (&str, &str) =
    ("return recipe\n", "function recipe.after_step(run) count = run.count end\nreturn recipe\n");

type Claim = fn(&Forger);

/// Runs that were computed from another text, with other options or data: (text, its replacement), options, and what the forger does
/// besides storing the honest text.
#[rustfmt::skip]
const COMPUTED: &[(Tampered, &[(&str, &str)], &[&str], Claim)] = &[
    (Tampered { name: "the rate of one step", window: "4..8", finds: "" }, &[("lr = rate", "lr = function(t) return rate(t) * (t == 6 and 1.01 or 1) end")], &[], |_| ()),
    (Tampered { name: "the rate of the last step of a window", window: "4..8", finds: "step 8: " }, &[("lr = rate", "lr = function(t) return rate(t) * (t == 7 and 1.01 or 1) end")], &[], |_| ()),
    (Tampered { name: "the rate from a step on", window: "4..8", finds: "" }, &[("lr = rate", "lr = function(t) return rate(t) * (t >= 6 and 1.01 or 1) end")], &[], |_| ()),
    (Tampered { name: "the rate of the last step", window: "8..12", finds: "step 12: " }, &[("lr = rate", "lr = function(t) return rate(t) * (t == 11 and 1.001 or 1) end")], &[], |_| ()),
    (Tampered { name: "a step without an update", window: "4..8", finds: "" }, &[("lr = rate", "lr = function(t) return t == 6 and 0 or rate(t) end")], &[], |_| ()),
    (Tampered { name: "a swapped sample", window: "4..8", finds: "step 6: " }, &[("local error", "if count == 5 and model.training then x = pl.cat({ x[{ {0, 1} }], x[{ {0, 3} }] }, 0) end\n  local error"), COUNTED], &[], |_| ()),
    (Tampered { name: "swapped labels", window: "4..8", finds: "step 6: " }, &[("local error", "if count == 5 and model.training then y = pl.cat({ y[{ {1, 2} }], y[{ {0, 1} }], y[{ {2, 4} }] }, 0) end\n  local error"), COUNTED], &[], |_| ()),
    (Tampered { name: "weights that were edited during the run", window: "4..8", finds: "step " }, &[("return recipe\n", "function recipe.after_step(run) if run.count == 6 then local w = run.model[1].weight w:assign(w:detach() * 1.001) end end\nreturn recipe\n")], &[], |_| ()),
    (Tampered { name: "no clipping", window: "..4", finds: "" }, &[("clip_norm = 1, ", "")], &[], |_| ()),
    (Tampered { name: "another activation", window: "..4", finds: "step 1: " }, &[("nn.ReLU()", "nn.SiLU()")], &[], |_| ()),
    (Tampered { name: "another epsilon", window: "4..8", finds: "step 5: " }, &[("nn.BatchNorm1d(p.width)", "nn.BatchNorm1d(p.width, { eps = 2e-5 })")], &[], |_| ()),
    (Tampered { name: "no dropout", window: "8..", finds: "step 9: " }, &[("nn.Dropout(0.3)", "nn.Dropout(0)")], &[], |_| ()),
    (Tampered { name: "a scaled loss", window: "..4", finds: "step 1: loss: " }, &[("(error * error):mean(), {", "(error * error):mean() * 0.999, {")], &[], |_| ()),
    (Tampered { name: "another weight decay", window: "..4", finds: "" }, &[("weight_decay = 0.01", "weight_decay = 0.02")], &[], |_| ()),
    (Tampered { name: "other betas", window: "4..8", finds: "" }, &[("clip_norm = 1,", "clip_norm = 1, betas = { 0.9, 0.998 },")], &[], |_| ()),
    (Tampered { name: "another average", window: "..4", finds: "step 4: " }, &[("recipe.ema = 0.9", "recipe.ema = 0.91")], &[], |_| ()),
    (Tampered { name: "no shuffling", window: "..4", finds: "step 1: " }, &[(":shuffle(p.seed)", "")], &[], |_| ()),
    (Tampered { name: "training on the validation split", window: "4..8", finds: "" }, &[("\"train\", 0.75", "\"valid\", 0.25")], &[], |_| ()),
    (Tampered { name: "an easier evaluation", window: "4..8", finds: "step 8: valid/loss: " }, &[("  return (error", "  if not model.training then error = error * 0.5 end\n  return (error")], &[], |_| ()),
    (Tampered { name: "another batch size", window: "..4", finds: "" }, &[("batch(p.batch)", "batch(5)")], &[], |_| ()),
    (Tampered { name: "another number of steps in the schedule", window: "4..8", finds: "" }, &[("steps = p.steps }", "steps = 20 }")], &[], |_| ()),
    (Tampered { name: "another seed", window: "..4", finds: "step 1: " }, &[], &["--seed", "4"], |f| {
        f.command("4", "3");
        let claim = |r: &mut serde_json::Map<String, Value>| { r.insert("seed".into(), 3.into()); r["params"]["seed"] = 3.into(); };
        f.record(claim);
        for step in f.checkpoints() {
            f.checkpoint_record(step, |r| { claim(r); r["rng"]["seed"] = 3.into(); r["cursor"]["seed"] = 3.into(); });
        }
    }),
    (Tampered { name: "another param", window: "..4", finds: "" }, &[], &["--set", "lr=0.021"], |f| {
        f.command("lr=0.021", "lr=0.02");
        let claim = |r: &mut serde_json::Map<String, Value>| r["params"]["lr"] = json!(0.02);
        f.record(claim);
        f.checkpoints().into_iter().for_each(|step| f.checkpoint_record(step, claim));
    }),
    (Tampered { name: "another precision", window: "4..8", finds: "step 5: " }, &[], &["--precision", "bf16"], |f| {
        f.without(&["--precision", "bf16"]);
        let claim = |r: &mut serde_json::Map<String, Value>| drop(r.insert("precision".into(), "f32".into()));
        f.record(|r| { claim(r); r.shift_remove("set_precision"); });
        f.checkpoints().into_iter().for_each(|step| f.checkpoint_record(step, claim));
    }),
    (Tampered { name: "weights that began elsewhere", window: "..4", finds: "step 1: " }, &[], &["--perturb", "1"], |f| {
        f.without(&["--perturb", "1"]);
        f.record(|r| drop(r.shift_remove("perturb")));
    }),
    (Tampered { name: "data that were edited afterwards", window: "..4", finds: "" }, &[], &[], |f| {
        let place = f.dir.parent().unwrap();
        let text = std::fs::read_to_string(place.join("points.csv")).unwrap();
        std::fs::write(place.join("points.csv"), text.replace("-0.9", "-0.8")).unwrap();
        f.rehash_data(place);
    }),
];

#[test]
fn runs_that_were_computed_in_another_way_are_found() {
    in_parallel(COMPUTED.len(), |k| {
        let (tampered, replaced, options, claim) = &COMPUTED[k];
        let mut text = RECIPE.to_string();
        for (from, to) in *replaced {
            assert!(text.contains(from), "{}: {from}", tampered.name);
            text = text.replace(from, to);
        }
        let p = fresh(&text);
        trained(&p, "run", options);
        let f = Forger { dir: p.path("run") };
        f.text("recipe", "audit.lua", RECIPE);
        claim(&f);
        is_found(&p, "run", tampered);
    });
}

#[track_caller]
fn is_honest(p: &Place, dir: &str, window: &str, start: u64) -> Value {
    let r = replayed(p, dir, window);
    assert_eq!(r.status, Some(0), "{dir} {window}: {}{}", r.out, r.err);
    let event = r.events().pop().unwrap();
    assert_eq!((&event["same"], &event["start"]), (&true.into(), &start.into()), "{dir} {window}: {event}");
    event
}

/// Bounds, what is compared, and that nothing is left behind.
#[test]
fn a_window_is_the_steps_after_its_first_bound() {
    let p = fresh(RECIPE);
    trained(&p, "a", &[]);
    let counts = |e: &Value| ["steps", "evaluations", "checkpoints", "samples"].map(|key| e[key].as_u64().unwrap());
    assert_eq!(counts(&is_honest(&p, "a", "4..8", 4)), [4, 1, 1, 32]);
    assert_eq!(counts(&is_honest(&p, "a", "..", 0)), [12, 3, 3, 96]);
    // From the checkpoint before the first bound, to a step without one.
    assert_eq!(counts(&is_honest(&p, "a", "6..7", 4)), [3, 0, 0, 24]);
    assert_eq!(counts(&is_honest(&p, "a", "9..", 8)), [4, 1, 1, 32]);
    for (window, rule) in [
        ("8..13", "has the steps 1 to 12"),
        ("12..", "has the steps 1 to 12"),
        ("8..4", "has no steps"),
        ("8", "is not a window"),
    ] {
        let r = replayed(&p, "a", window);
        assert_eq!(r.status, Some(2), "{window}");
        assert!(r.err.contains(&format!("--steps {window}: ")) && r.err.contains(rule), "{}", r.err);
    }
    assert!(p.runs().is_empty());
    let r = p.run(&["replay", "a", "--steps", "4..8", "--run-dir", "kept"]);
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""));
    let line = "steps 4..8 · from the checkpoint of step 4, whose States are trusted · same bits in 4 steps, 1 evaluation, 1 checkpoint, 32 logged samples\n";
    assert_eq!(r.out, line);
    assert_eq!(p.read("kept/metrics.jsonl").lines().filter(|l| l.contains("\"event\":\"step\"")).count(), 4);
}

#[test]
fn windows_are_drawn_and_counted() {
    let p = fresh(RECIPE);
    trained(&p, "a", &[]);
    let r = p.run(&["replay", "a", "--windows", "2", "--seed", "5", "--json"]);
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""));
    let events = r.events();
    assert_eq!(events.iter().map(|e| e["event"].as_str().unwrap()).collect::<Vec<_>>(), ["window", "window", "audit"]);
    assert_eq!(
        events[2],
        json!({ "event": "audit", "windows": 2, "of": 3, "covered": 8, "steps": 12, "share": 8.0 / 12.0, "chance": 2.0 / 3.0, "seed": 5, "differences": 0 })
    );
    let again = p.run(&["replay", "a", "--windows", "2", "--seed", "5", "--json"]);
    assert_eq!(again.out, r.out);
    let r = p.run(&["replay", "a", "--windows", "1", "--length", "5"]);
    let joined = |n: &str, steps: &str, share: &str| {
        format!(
            "1 of 2 windows · {n} of 12 steps ({steps} %) · a tampering of one step is found with a chance of {share} % · seed "
        )
    };
    assert!(
        r.out.contains(&joined("8", "66.667", "50.000")) || r.out.contains(&joined("4", "33.333", "50.000")),
        "{}",
        r.out
    );
    let r = p.run(&["replay", "a", "--windows", "4"]);
    assert_eq!(r.status, Some(2));
    assert!(r.err.contains("--windows 4: the run has 3 windows between its checkpoints\n  hint: "), "{}", r.err);
    // Of a tampered run one window differs, and the others are replayed too.
    let f = Forger::copy(&p.path("a"), &p.path("b"));
    f.event("step", 6, |e| e["loss"] = json!(0.5));
    let r = p.run(&["replay", "b", "--windows", "3", "--json"]);
    assert_eq!(r.status, Some(4));
    let same: Vec<Value> = r.events().iter().map(|e| e["same"].clone()).collect();
    assert_eq!(same, [true.into(), false.into(), true.into(), Value::Null]);
    assert_eq!(r.events()[3]["differences"], 1);
    assert!(
        r.err.contains("b: the record is not what the run computes: step 6: loss: recorded 0.5, recomputed ")
            && r.err.contains("(audit.lua:"),
        "{}",
        r.err
    );
}

/// Every window of runs with other precisions, meshes, stops, resumes and edits.
#[test]
fn honest_windows_have_the_same_bits() {
    let p = fresh(RECIPE);
    let kinds: [(&str, &[&str]); 4] = [
        ("fp16", &["--precision", "fp16"]),
        ("mesh", &["--mesh", "dp=2", "--device", "cpu"]),
        ("skip", &["--on-spike", "skip", "--set", "accumulate=1"]),
        ("perturbed", &["--perturb", "7"]),
    ];
    in_parallel(kinds.len(), |k| {
        let (dir, more) = kinds[k];
        trained(&p, dir, more);
        all_windows(&p, dir, &["0..4", "4..8", "8..12"]);
    });
    // Stopped at 6, resumed with another rate, stopped at 9 where no checkpoint is due, resumed with another text.
    trained(&p, "stops", &["--until", "6"]);
    trained_on(&p, "stops", &["--set", "lr=0.05", "--until", "9"]);
    p.file("audit.lua", RECIPE.replace("nn.ReLU()", "nn.Tanh()").replace("weight_decay = 0.01", "weight_decay = 0.1"));
    trained_on(&p, "stops", &["--edited", "--steps", "14"]);
    all_windows(&p, "stops", &["0..4", "4..6", "6..8", "8..9", "9..12", "12..14"]);
    // Windows over several versions.
    is_honest(&p, "stops", "5..13", 4);
    is_honest(&p, "stops", "..", 0);
    edits_of_the_history(&p);
}

#[track_caller]
fn trained_on(p: &Place, dir: &str, more: &[&str]) {
    trained(p, dir, &[&["--resume"], more].concat());
}

#[track_caller]
fn all_windows(p: &Place, dir: &str, windows: &[&str]) {
    let r = p.run(&["replay", dir, "--windows", &windows.len().to_string(), "--json"]);
    assert_eq!(r.status, Some(0), "{dir}: {}{}", r.out, r.err);
    let events = r.events();
    let of: Vec<String> =
        events.iter().filter(|e| e["event"] == "window").map(|e| format!("{}..{}", e["from"], e["to"])).collect();
    assert_eq!(of, windows, "{dir}");
    assert!(
        events.iter().filter(|e| e["event"] == "window").all(|e| e["same"] == true && e["checkpoints"] == 1),
        "{dir}: {events:?}"
    );
}

/// Tamperings of the history of the run "stops".
fn edits_of_the_history(p: &Place) {
    let ledger = "ledger.jsonl";
    #[rustfmt::skip]
    let edits: [(Tampered, Edit); 4] = [
        (Tampered { name: "a removed resume", window: "6..8", finds: "" }, |f| f.log("ledger.jsonl", |l| drop(l.remove(0)))),
        (Tampered { name: "a removed edit", window: "9..12", finds: "step 10: " }, |f| f.log("ledger.jsonl", |l| drop(l.pop()))),
        (Tampered { name: "a param of the history", window: "6..8", finds: "" }, |f| f.log("ledger.jsonl", |l| l[0]["params"]["lr"] = json!(0.06))),
        (Tampered { name: "the text of an edit", window: "9..12", finds: "step 10: " }, |f| f.text("recipe@9", "audit.lua", RECIPE)),
    ];
    assert_eq!(p.read(&format!("stops/{ledger}")).lines().count(), 2);
    in_parallel(edits.len(), |k| {
        let dir = format!("history-{k}");
        edits[k].1(&Forger::copy(&p.path("stops"), &p.path(&dir)));
        is_found(p, &dir, &edits[k].0);
    });
}

/// An edit that is applied while the run goes on, and one that fails and is reverted.
#[test]
fn windows_follow_the_edits_of_a_watched_run() {
    let long = RECIPE.replace("steps = 12", "steps = 4000");
    let p = fresh(&long);
    let args = ["run", "audit.lua", "--json", "--run-dir", "w", "--checkpoint-every", "20", "--keep", "0", "--watch"];
    let mut run = Running::start(&p, &args);
    run.until(10);
    save(&p, "audit.lua", &long.replace("weight_decay = 0.01", "weight_decay = 0.1"));
    run.next("reload");
    save(&p, "audit.lua", &long.replace("error:abs()", "error:nothing()"));
    run.next("reload");
    save(&p, "audit.lua", &long.replace("lr = 0.02", "lr = 0.03").replace("ReLU", "Tanh"));
    let at = run.next("reload")["step"].as_u64().unwrap();
    run.until(at + 45);
    run.signal("-INT");
    assert_eq!(run.child.wait().unwrap().code(), Some(130));
    let applied = p.read("w/ledger.jsonl").lines().filter(|l| l.contains("\"ok\":true")).count();
    assert_eq!(applied, 2);
    let edited = at / 20 * 20;
    is_honest(&p, "w", &format!("{edited}..{}", edited + 20), edited);
    is_honest(&p, "w", &format!("{}..", edited + 20), edited + 20);
    is_honest(&p, "w", &format!("..{}", at + 1), 0);
}

/// A run that was killed has no end; what it has logged is compared.
#[test]
fn a_killed_run_is_compared_as_far_as_its_log_goes() {
    let p = fresh(RECIPE);
    trained(&p, "a", &[]);
    let f = Forger::copy(&p.path("a"), &p.path("b"));
    std::fs::remove_dir_all(p.path("b/checkpoints/step-12")).unwrap();
    f.record(|r| {
        for key in ["steps_done", "weights", "logs", "metrics", "seconds"] {
            r.shift_remove(key);
        }
        r.insert("status".into(), "running".into());
    });
    f.log("metrics.jsonl", |l| l.retain(|e| e["step"].as_u64().is_some_and(|s| s <= 10)));
    assert_eq!(is_honest(&p, "b", "..", 0)["to"], 10);
    is_honest(&p, "b", "8..", 8);
    let r = p.run(&["replay", "b"]);
    assert_eq!(r.status, Some(2));
    assert!(r.err.contains("the run has not ended") && r.err.contains("hint: --steps .."), "{}", r.err);
}

/// Damage is refused with the file, before anything runs.
#[test]
fn a_window_of_a_damaged_run_is_refused() {
    let p = fresh(RECIPE);
    trained(&p, "a", &[]);
    let text = p.read("a/metrics.jsonl");
    p.file("a/metrics.jsonl", text.replacen("\"step\":6,", "\"step\":7,", 1));
    let r = replayed(&p, "a", "8..12");
    assert_eq!(r.status, Some(4));
    assert!(r.err.contains("a/metrics.jsonl:") && r.err.contains("the log was changed or damaged"), "{}", r.err);
    assert!(Path::new(&p.path("a")).is_dir());
}
