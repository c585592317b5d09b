//! Tests checkpoints and `--resume`: a run that was stopped, killed or moved has the bits of an uninterrupted run.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use support::{Place, Ran, place};

/// A recipe with everything that a run carries from step to step: moments, averages, batch statistics, dropout, shuffling,
/// accumulation, a schedule, evaluations, early stopping, a running metric, a State that follows from the sample log, and fp16's
/// scale by `--precision`.
const RECIPE: &str = r#"
local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local recipe = pl.recipe { name = "all", params = { lr = 0.05, steps = 12, seed = 3, width = 8, accumulate = 2, eval_every = 4 } }
recipe.early_stop = { metric = "valid/loss", patience = 50 }
recipe.ema = 0.9
local level = pl.state(pl.zeros {})
local scale = pl.state(pl.ones {})
recipe.states = { level = level, scale = scale }
recipe.sample_log = true
function recipe.after_step(run)
  if run.count % 3 == 0 then scale:assign(pl.tensor(1 + 1e-3 * run:worst(1, { by = "mean" })[1].mean)) end
end
function recipe.data(p)
  local x = pl.randn { 80, 4 }
  local set = pl.data.tensors { x = x, y = x:sum(1) }
  return { train = set:split("train", 0.75, p.seed):shuffle(p.seed):batch(8), valid = set:split("valid", 0.25, p.seed):batch(8) }
end
function recipe.model(p)
  return nn.Sequential { nn.Linear(4, p.width), nn.BatchNorm1d(p.width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(p.width, 1) }
end
function recipe.optimizer(p, model)
  return optim.AdamW(model, { lr = optim.cosine { peak = p.lr, warmup = 3, steps = p.steps }, clip_norm = 1 })
end
function recipe.loss(model, batch)
  local error = model(batch.x):squeeze(-1) - batch.y
  if model.training then level:assign(level * 0.9 + error:abs():mean():detach() * 0.1) end
  return (error * error):mean() * (1 + level:detach()) * scale:detach(), { level = level }, nil, error * error
end
return recipe
"#;

fn all() -> Place {
    let p = place();
    p.file("all.lua", RECIPE);
    p
}

fn run(p: &Place, dir: &str, more: &[&str]) -> Ran {
    let mut args = vec!["run", "all.lua", "--quiet", "--run-dir", dir];
    args.extend(more);
    p.run(&args)
}

fn weights(p: &Place, dir: &str) -> String {
    p.run_json(dir)["weights"].as_str().unwrap().to_string()
}

/// Returns the logged steps and evaluations, without the checkpoints between them.
fn logged(p: &Place, dir: &str) -> Vec<Value> {
    let lines = p.read(&format!("{dir}/metrics.jsonl"));
    let mut events: Vec<Value> = lines.lines().map(|l| serde_json::from_str::<Value>(l).unwrap()).collect();
    events.retain(|e| e["event"] != "checkpoint");
    // Times may differ, but must increase.
    let seconds: Vec<f64> = events.iter().filter_map(|e| e["seconds"].as_f64()).collect();
    assert!(seconds.is_sorted(), "{dir}: {seconds:?}");
    for e in &mut events {
        e.as_object_mut().unwrap().shift_remove("seconds");
        // The seal differs too, because it covers the seconds.
        e.as_object_mut().unwrap().shift_remove("seal");
    }
    events
}

fn same_log(p: &Place, a: &str, b: &str) {
    let (x, y) = (logged(p, a), logged(p, b));
    for (k, (x, y)) in x.iter().zip(&y).enumerate() {
        assert_eq!(x, y, "event {k} of {a} and {b}");
    }
    assert_eq!(x.len(), y.len(), "events of {a} and {b}: {:?} {:?}", x.get(y.len()), y.last());
}

fn checkpoints(p: &Place, dir: &str) -> Vec<String> {
    let mut out: Vec<String> = std::fs::read_dir(p.path(&format!("{dir}/checkpoints")))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    out.sort();
    out
}

/// Copies a run with only its checkpoints up to `step`.
fn copy_until(p: &Place, from: &str, to: &str, step: u64) {
    let status = Command::new("cp").args(["-r", from, to]).current_dir(p.dir.path()).status().unwrap();
    assert!(status.success());
    for name in checkpoints(p, to) {
        if name["step-".len()..].parse::<u64>().unwrap() > step {
            std::fs::remove_dir_all(p.path(&format!("{to}/checkpoints/{name}"))).unwrap();
        }
    }
}

#[test]
fn from_every_step_a_run_goes_on_to_the_same_bits() {
    for precision in ["f32", "bf16", "fp16", "fp8"] {
        let p = all();
        if precision == "fp8" {
            // fp8 needs layers whose sizes are multiples of 16.
            let wide = RECIPE.replace("width = 8", "width = 16");
            p.file("all.lua", wide.replace("nn.Linear(p.width, 1)", "nn.Linear(p.width, 16), nn.Linear(16, 1)"));
        }
        let r = run(&p, "straight", &["--precision", precision, "--checkpoint-every", "1", "--keep", "0"]);
        assert_eq!((r.status, r.err.as_str()), (Some(0), ""));
        for step in [1, 3, 4, 7, 11, 12] {
            let dir = format!("from-{step}");
            copy_until(&p, "straight", &dir, step);
            let r = run(&p, &dir, &["--resume"]);
            assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{precision} from {step}");
            assert_eq!(weights(&p, &dir), weights(&p, "straight"), "{precision} from {step}");
            same_log(&p, &dir, "straight");
            assert_eq!(p.run_json(&dir)["resumed"], serde_json::json!([step]));
        }
    }
}

/// Images are decoded and cropped ahead of their step. A resumed run must get the same ones, not those of two batches later.
#[test]
fn random_crops_go_on_to_the_same_bits() {
    let p = place();
    let pictures = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/images/folder");
    p.file(
        "all.lua",
        RECIPE.replace("data(p)", &format!("data(p)\n  local pictures = {pictures:?}")).replace(
            "local x = pl.randn { 80, 4 }\n  local set = pl.data.tensors { x = x, y = x:sum(1) }",
            r#"local set = pl.data.images(pictures, { pixels = 6, crop = "random" })
  set = set:map(function(b) return { x = b.x:to("f32"):mean({ 1, 2 }):narrow(1, 0, 4) / 255, y = b.y:to("f32") } end)"#,
        ),
    );
    let allow = format!("--allow-read={pictures}");
    let r = run(&p, "straight", &["--checkpoint-every", "1", "--keep", "0", &allow]);
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""));
    for step in [1, 2, 7] {
        let dir = format!("from-{step}");
        copy_until(&p, "straight", &dir, step);
        let r = run(&p, &dir, &["--resume", &allow]);
        assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "from {step}");
        assert_eq!(weights(&p, &dir), weights(&p, "straight"), "from {step}");
        same_log(&p, &dir, "straight");
    }
}

#[test]
fn checkpointing_changes_no_bit() {
    let p = all();
    run(&p, "with", &["--checkpoint-every", "5"]);
    run(&p, "without", &[]);
    assert_eq!(weights(&p, "with"), weights(&p, "without"));
    assert_eq!(checkpoints(&p, "with"), ["step-10", "step-12", "step-5"]);
    assert_eq!(checkpoints(&p, "without"), ["step-12"]);
    run(&p, "one", &["--checkpoint-every", "1", "--keep", "1"]);
    assert_eq!(checkpoints(&p, "one"), ["step-12"]);
}

/// `run.json` records the position of a checkpoint: step, cursor, random numbers, schedule, scale, params, metrics, hashes.
#[test]
fn a_checkpoint_says_where_it_was_taken() {
    let p = all();
    run(&p, "r", &["--precision", "fp16", "--checkpoint-every", "5", "--keep", "0"]);
    let lr = |step: u64| -> f64 {
        let said = p.run_json(&format!("r/checkpoints/step-{step}"));
        for key in ["params", "versions", "rng", "metrics", "files"] {
            assert!(said[key].as_object().is_some_and(|o| !o.is_empty()), "{key}: {said}");
        }
        assert_eq!((&said["step"], &said["cursor"]["step"]), (&step.into(), &step.into()));
        // Evaluations draw separate random numbers.
        assert!(said["rng"]["step"].as_u64().unwrap() >= step && said["rng"]["seed"] == 3, "{said}");
        assert!(said["scaler"]["factor"].as_f64().unwrap() >= 1.0, "{said}");
        assert_eq!(said["schedule"]["updates"], step);
        said["schedule"]["lr"][0].as_f64().unwrap()
    };
    // A cosine that starts at 0.05.
    assert!(0.05 > lr(5) && lr(5) > lr(10) && lr(10) > 0.0, "{} {}", lr(5), lr(10));
}

/// A warning names each State that no checkpoint would contain, with the line that made it.
#[test]
fn a_state_that_is_not_saved_is_named() {
    let p = all();
    p.file("all.lua", RECIPE.replace("recipe.states = ", "local unused = "));
    for args in [&["run", "all.lua", "--run-dir", "r"][..], &["check", "all.lua"]] {
        let r = p.run(args);
        assert_eq!(r.status, Some(0));
        let said = "warning: all.lua:7: the step changes a State that checkpoints and edits do not carry over";
        assert_eq!(r.err.matches(said).count(), 1, "{args:?}: {}", r.err);
    }
    p.file("all.lua", RECIPE.replace("{ level = level, scale = scale }\n", "level\n"));
    let r = run(&p, "s", &[]);
    assert!(r.err.contains("recipe.states is ") && r.status == Some(3), "{}", r.err);
}

/// A save that replaces the run's only checkpoint is killed at each crash point; a valid checkpoint always remains.
#[test]
fn the_only_checkpoint_survives_its_replacement() {
    let p = all();
    run(&p, "straight", &["--steps", "4"]);
    run(&p, "r", &["--steps", "3"]);
    let mut killed = 0;
    for point in 1..=9 {
        let args = ["run", "all.lua", "--quiet", "--run-dir", "r", "--resume", "--steps", "3"];
        let mut command = p.command(&args);
        let status = command.env("PERILUNE_TEST_CRASH", point.to_string()).stdout(Stdio::null()).status().unwrap();
        killed += u32::from(!status.success());
        let r = p.run(&["ckpt", "verify", "r"]);
        assert_eq!((r.status, r.out.lines().count()), (Some(0), 1), "point {point}: {}{}", r.out, r.err);
    }
    assert!(killed >= 6, "killed {killed} times");
    assert_eq!(run(&p, "r", &["--resume", "--steps", "4"]).status, Some(0));
    assert_eq!(weights(&p, "r"), weights(&p, "straight"));
}

/// A run that is killed repeatedly, during steps and saves, still finishes with the same weights.
#[test]
fn killed_runs_resume_to_the_same_bits() {
    let p = all();
    let more = ["--set", "steps=400"];
    run(&p, "straight", &more);
    let mut kills = 0u32;
    loop {
        let mut args = vec!["run", "all.lua", "--json", "--run-dir", "killed", "--checkpoint-every", "1"];
        args.extend(more);
        if checkpoints_begun(&p, "killed") {
            args.push("--resume");
        } else {
            let _ = std::fs::remove_dir_all(p.path("killed"));
        }
        let mut child = p.command(&args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        // Kill it after a varying number of lines, at an arbitrary point of its work.
        let mut left = 20 + 37 * kills % 61;
        while left > 0 && out.read_line(&mut line).unwrap() > 0 {
            line.clear();
            left -= 1;
        }
        if left > 0 {
            assert!(child.wait().unwrap().success());
            break;
        }
        child.kill().unwrap();
        child.wait().unwrap();
        kills += 1;
        assert!(kills < 200, "it does not get anywhere");
    }
    assert!(kills >= 5, "killed {kills} times only");
    assert_eq!(weights(&p, "killed"), weights(&p, "straight"));
    same_log(&p, "killed", "straight");
}

fn checkpoints_begun(p: &Place, dir: &str) -> bool {
    let entries = std::fs::read_dir(p.path(&format!("{dir}/checkpoints")));
    entries.is_ok_and(|e| e.flatten().any(|e| e.file_name().to_string_lossy().starts_with("step-")))
}

#[test]
fn signals_leave_a_checkpoint() {
    for (signal, status) in [("-USR1", 75), ("-INT", 130), ("-TERM", 143)] {
        let p = all();
        let mut child = p
            .command(&["run", "all.lua", "--json", "--steps", "300", "--run-dir", "r"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("\"step\":3,") {
            line.clear();
            assert_ne!(out.read_line(&mut line).unwrap(), 0, "the run ended early");
        }
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
        let rest: Vec<Value> = out.lines().map(|l| serde_json::from_str(&l.unwrap()).unwrap()).collect();
        let code = child.wait().unwrap().code();
        assert_eq!(code, Some(status));
        let said = rest.iter().find(|e| e["event"] == "checkpoint").unwrap();
        let done = rest.last().unwrap();
        assert_eq!(said["step"], done["steps"]);
        assert!(run(&p, "r", &["--resume"]).status == Some(0));
        run(&p, "straight", &["--steps", "300"]);
        assert_eq!(weights(&p, "r"), weights(&p, "straight"));
    }
}

#[test]
fn the_newest_run_is_found_and_may_go_further() {
    let p = all();
    for _ in 0..2 {
        assert_eq!(p.run(&["run", "all.lua", "--quiet", "--steps", "4"]).status, Some(0));
        std::thread::sleep(std::time::Duration::from_millis(1100)); // `started` counts seconds
    }
    let newest = p.runs().last().unwrap().clone();
    assert_eq!(p.run(&["run", "all.lua", "--quiet", "--resume", "--steps", "6"]).status, Some(0));
    assert_eq!(p.run_json(&format!("runs/{newest}"))["steps_done"], 6);
    assert_eq!(p.runs().len(), 2);
}

/// Retention keeps the last checkpoints, the best by a metric and every Nth; wrong metric names are reported.
#[test]
fn requested_checkpoints_are_retained() {
    let p = all();
    let kept = |dir: &str, more: &[&str]| {
        let r = run(&p, dir, &[&["--set", "eval_every=2", "--set", "lr=0.4"], more].concat());
        assert_eq!(r.status, Some(0), "{}", r.err);
        let mut out: Vec<u64> = checkpoints(&p, dir).iter().map(|c| c["step-".len()..].parse().unwrap()).collect();
        out.sort_unstable();
        (out, r.err)
    };
    assert_eq!(kept("a", &["--checkpoint-every", "1", "--keep", "1", "--keep-every", "5"]).0, [5, 10, 12]);
    // A checkpoint is written for the best evaluation, at any step.
    let (steps, said) = kept("b", &["--keep", "1", "--keep-best", "valid/loss"]);
    let values: Vec<(u64, f64)> = logged(&p, "b")
        .iter()
        .filter_map(|e| Some((e["step"].as_u64()?, e["metrics"]["valid/loss"].as_f64()?)))
        .collect();
    let best = values.iter().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap().0;
    let mut expected = vec![best, 12];
    expected.dedup();
    assert_eq!((steps, said.as_str()), (expected, ""));
    assert_eq!(p.run_json("b")["best"]["step"], best);
    let worst = values.iter().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap().0;
    let (steps, _) = kept("c", &["--keep", "1", "--keep-best", "valid/loss:max"]);
    assert!(steps.contains(&worst) && steps.len() <= 2, "{steps:?}, worst {worst}");
    // It is still the best after a resume.
    let (steps, _) = kept("c", &["--resume", "--keep", "1", "--keep-best", "valid/loss:max", "--steps", "14"]);
    assert!(steps.contains(&worst) || p.run_json("c")["best"]["step"] == 14, "{steps:?}");
    // The recipe may set the policy, and the command line overrides it.
    let said = "recipe.keep = { last = 2, every = 5, best = \"valid/loss\" }\nrecipe.ema = 0.9";
    p.file("all.lua", RECIPE.replace("recipe.ema = 0.9", said));
    let (steps, _) = kept("d", &["--checkpoint-every", "1"]);
    assert!([5, 10, 11, 12].iter().all(|n| steps.contains(n)) && steps.len() <= 5, "{steps:?}");
    let (steps, _) = kept("e", &["--checkpoint-every", "1", "--keep", "1", "--keep-best", "valid/los"]);
    assert_eq!(steps, [5, 10, 12]);
    let r = run(&p, "f", &["--keep-best", "valid/los"]);
    assert_eq!(r.status, Some(0));
    assert!(
        r.err.contains("the evaluation of valid has no 'los', but level, loss; did you mean valid/loss?"),
        "{}",
        r.err
    );
    assert_eq!(r.err.matches("has no 'los'").count(), 1);
    let r = run(&p, "g", &["--keep-best", "vali/loss"]);
    assert_eq!(r.status, Some(2));
    assert!(r.err.contains("no split 'vali', but train, valid; did you mean valid/loss?"), "{}", r.err);
    let r = run(&p, "g", &["--keep-best", "loss"]);
    assert!(r.status == Some(2) && r.err.contains("write SPLIT/METRIC"), "{}", r.err);
    assert!(!p.path("g").exists(), "nothing is made before the arguments are right");
}

/// Large files are split into shards, and every command reads them like single files.
#[test]
fn shards_are_read_wherever_files_are() {
    let p = all();
    let r = run(&p, "whole", &["--checkpoint-every", "6"]);
    assert_eq!(r.status, Some(0), "{}", r.err);
    let r = run(&p, "cut", &["--checkpoint-every", "6", "--shard-size", "100"]);
    assert_eq!(r.status, Some(0), "{}", r.err);
    let names: Vec<String> = std::fs::read_dir(p.path("cut/checkpoints/step-12"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    for name in ["model.safetensors.index.json", "optimizer.safetensors.index.json", "run.json"] {
        assert!(names.iter().any(|n| n == name), "{name}: {names:?}");
    }
    assert!(names.iter().any(|n| n.starts_with("model-00002-of-")) && !names.contains(&"model.safetensors".into()));
    let same = p.run(&["ckpt", "diff", "whole", "cut"]);
    assert!(same.out.lines().count() == 2 && same.out.ends_with(" tensors are equal\n"), "{}", same.out);
    assert_eq!(p.run(&["ckpt", "verify", "cut"]).status, Some(0));
    assert!(p.run(&["ckpt", "inspect", "cut"]).out.contains("optim.adamw.m.1.weight"));
    copy_until(&p, "cut", "again", 6);
    let r = run(&p, "again", &["--resume"]);
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""));
    assert_eq!(weights(&p, "again"), weights(&p, "whole"));
    // Exported for other programs, and read back by `pl.load`.
    let r = p.run(&["ckpt", "export", "whole", "w.safetensors", "--shard-size", "0.1KB"]);
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""));
    assert!(r.out.starts_with("w.safetensors.index.json: ") && r.out.contains(" files, "), "{}", r.out);
    let r = p.run(&["ckpt", "export", "cut", "one.safetensors"]);
    assert!(r.out.starts_with("one.safetensors: "), "{}", r.out);
    p.file(
        "see.lua",
        r#"local pl = require "perilune"
local cut, one, n = pl.load("w.safetensors.index.json"), pl.load("one.safetensors"), 0
for name, x in pairs(one) do
  assert(cut[name]:eq(x):all():item(), name)
  n = n + 1
end
local model = pl.nn.module { ["0"] = pl.state(pl.zeros { 1 }) }
print(n > 5, pcall(pl.nn.load_weights, model, "w.safetensors.index.json"))"#,
    );
    let r = p.run(&["run", "see.lua"]);
    assert!(
        r.out.starts_with("true\tfalse\t") && r.out.contains("w.safetensors.index.json has no '0'"),
        "{} {}",
        r.out,
        r.err
    );
    let shard = p.path("cut/checkpoints/step-12/model-00002-of-00005.safetensors");
    if let Ok(mut bytes) = std::fs::read(&shard) {
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&shard, bytes).unwrap();
        let r = p.run(&["ckpt", "verify", "cut"]);
        assert!(r.status == Some(4) && r.err.contains("model-00002-of-00005.safetensors: blake3: is "), "{}", r.err);
    }
}

/// A replay repeats stops, edits and resumes, with other params, other States and a lost end.
#[test]
fn a_replay_goes_through_stops_and_resumes() {
    let p = all();
    let ok = |more: &[&str]| {
        let r = run(&p, "r", more);
        assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{more:?}");
    };
    ok(&["--steps", "4"]);
    ok(&["--resume", "--steps", "7", "--set", "lr=0.02"]);
    // Only --edited applies an edited param default of the recipe.
    p.file("all.lua", RECIPE.replace("accumulate = 2", "accumulate = 1"));
    let r = run(&p, "r", &["--resume", "--steps", "8"]);
    let stays = "warning: the run keeps its params: accumulate stays 2 (the edited default 1 is not applied)\n  \
                 hint: --resume --edited applies edited defaults, --set KEY=VALUE sets a param\n";
    assert_eq!((r.status, r.err.as_str()), (Some(0), stays));
    assert_eq!(p.run_json("r")["params"]["accumulate"], 2);
    ok(&["--resume", "--edited", "--steps", "10"]);
    assert_eq!((&p.run_json("r")["params"]["accumulate"], &p.run_json("r")["params"]["lr"]), (&1.into(), &0.02.into()));
    // Another layer.
    p.file(
        "all.lua",
        RECIPE.replace("accumulate = 2", "accumulate = 1").replace("nn.ReLU(),", "nn.ReLU(), nn.Linear(p.width, 8),"),
    );
    let r = run(&p, "r", &["--resume", "--steps", "12"]);
    assert_eq!(r.status, Some(4));
    assert!(r.err.contains("`--resume --edited` continues with the States that fit"), "{}", r.err);
    ok(&["--resume", "--edited", "--steps", "12"]);
    // The last part is lost and repeated.
    copy_until(&p, "r", "lost", 10);
    let r = run(&p, "lost", &["--resume", "--edited", "--steps", "13"]);
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""));
    for (dir, again) in [("r", "r2"), ("lost", "lost2")] {
        let r = p.run(&["replay", dir, "--run-dir", again]);
        assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{}", r.out);
        assert!(r.out.contains("the weights equal those of the run"), "{}", r.out);
        assert_eq!(weights(&p, again), weights(&p, dir));
    }
    let ledger = p.read("r/ledger.jsonl");
    assert_eq!(ledger.lines().filter(|l| l.contains("\"resumed\":true")).count(), 4, "{ledger}");
    assert!(p.run(&["run", "all.lua", "--edited"]).err.contains("--resume"));
}

/// A param that was given, or whose value is that of the edited default, is not mentioned; the warning is an event too.
#[test]
fn a_resume_names_the_edited_defaults_that_are_not_applied() {
    let p = all();
    assert_eq!(run(&p, "r", &["--steps", "4", "--set", "width=4"]).status, Some(0));
    let edited = RECIPE.replace("lr = 0.05", "lr = 0.02").replace("width = 8", "width = 16");
    p.file("all.lua", edited.replace("recipe.early_stop", "recipe.name = \"all\"\nrecipe.early_stop"));
    let warnings = |more: &[&str]| -> Vec<String> {
        let args = [&["run", "all.lua", "--json", "--run-dir", "r", "--resume"], more].concat();
        let r = p.run(&args);
        assert_eq!(r.status, Some(0), "{}", r.err);
        let warned = |e: &Value| e["event"] == "warning";
        r.events().into_iter().filter(warned).map(|e| e["message"].as_str().unwrap().to_string()).collect()
    };
    let hint = "\n  hint: --resume --edited applies edited defaults, --set KEY=VALUE sets a param";
    let stays = format!("the run keeps its params: lr stays 0.05 (the edited default 0.02 is not applied){hint}");
    // As long as it is not applied.
    assert_eq!(warnings(&["--steps", "5"]), [stays.as_str()]);
    assert_eq!(warnings(&["--steps", "6"]), [stays.as_str()]);
    assert!(warnings(&["--steps", "7", "--edited"]).is_empty());
    assert_eq!((&p.run_json("r")["params"]["lr"], &p.run_json("r")["params"]["width"]), (&0.02.into(), &4.into()));
    assert!(warnings(&["--steps", "8"]).is_empty());
}

#[test]
fn incompatible_checkpoints_are_rejected() {
    let p = all();
    run(&p, "r", &["--checkpoint-every", "6"]);
    let refused = |text: &str| {
        let r = run(&p, "r", &["--resume"]);
        assert_eq!(r.status, Some(4), "{}", r.err);
        assert!(r.err.contains(text), "{text}: {}", r.err);
    };
    p.file("all.lua", RECIPE.replace("nn.Linear(4, p.width)", "nn.Linear(4, p.width, { bias = false })"));
    refused("step-12: does not fit the recipe: the recipe has no State ");
    p.file("all.lua", RECIPE);
    let r = run(&p, "r", &["--resume", "--set", "width=9"]);
    assert_eq!(r.status, Some(4));
    assert!(r.err.contains("is f32 {8, 4}, and the recipe's is f32 {9, 4}"), "{}", r.err);
    let at = p.path("r/checkpoints/step-12/model.safetensors");
    let mut bytes = std::fs::read(&at).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&at, bytes).unwrap();
    refused("model.safetensors: blake3: is ");
    refused("hint: remove r/checkpoints/step-12 to continue from step 6");
}

/// Invalid files are refused before they are read into memory, and `list` reports them.
#[test]
fn foreign_files_in_a_run_are_rejected() {
    let p = all();
    run(&p, "r", &["--checkpoint-every", "6"]);
    let endless = |name: &str| {
        std::fs::remove_file(p.path(name)).unwrap();
        std::os::unix::fs::symlink("/dev/zero", p.path(name)).unwrap();
    };
    endless("r/checkpoints/step-12/run.json");
    let r = p.run(&["ckpt", "list", "r"]);
    let broken = r.out.lines().last().unwrap();
    assert!(
        broken.contains("run.json: file: is a link; a regular file is needed") && r.out.lines().count() == 2,
        "{}",
        r.out
    );
    endless("r/run.json");
    std::fs::remove_dir_all(p.path("r/checkpoints/step-12")).unwrap();
    for args in [&["run", "all.lua", "--run-dir", "r", "--resume"][..], &["replay", "r"]] {
        let r = p.run(args);
        assert_eq!(r.status, Some(4), "{}", r.err);
        assert!(r.err.contains("r/run.json: file: is a link; a regular file is needed"), "{}", r.err);
    }
}

#[test]
fn ckpt_lists_inspects_compares_verifies_and_exports() {
    let p = all();
    run(&p, "r", &["--checkpoint-every", "6"]);
    let ok = |args: &[&str]| {
        let r = p.run(args);
        assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{args:?}");
        r.out
    };
    let listed = ok(&["ckpt", "list", "r"]);
    assert!(
        listed.contains("step        6")
            && listed.contains("r/checkpoints/step-12  ")
            && listed.contains("valid/loss "),
        "{listed}"
    );
    let seen = ok(&["ckpt", "inspect", "r"]);
    for part in ["step-12: step 12", "weights: ", " f32   {8, 4} ", "optim.adamw.m.1.weight", "rng {\"seed\":3"] {
        assert!(seen.contains(part), "{part}: {seen}");
    }
    let (a, b) = ("r/checkpoints/step-6", "r/checkpoints/step-12");
    let changed = ok(&["ckpt", "diff", a, b]);
    assert!(changed.starts_with("step 6 and step 12\n") && changed.contains("changed by "), "{changed}");
    let same = ok(&["ckpt", "diff", b, "r"]);
    assert!(same.lines().count() == 2 && same.ends_with(" tensors are equal\n"), "{same}");
    assert_eq!(ok(&["ckpt", "verify", a, b]).lines().count(), 2);
    assert_eq!(ok(&["ckpt", "verify", "r"]), ok(&["ckpt", "verify", a, b]));
    ok(&["ckpt", "export", "r", "w.safetensors", "--dtype", "bf16"]);
    p.file("see.lua", "print(require(\"perilune\").load(\"w.safetensors\")[\"1.weight\"].dtype)");
    assert_eq!(ok(&["run", "see.lua"]), "bf16\n");
    let r = p.run(&["ckpt", "export", "r", "w.safetensors", "--dtype", "i64"]);
    assert_eq!((r.status, r.err.as_str()), (Some(2), "error: --dtype i64: it must be one of f32, bf16, f16, f64\n"));
    let r = p.run(&["ckpt", "inspect", "all.lua"]);
    assert_eq!(r.status, Some(2));
    let at = p.path("r/checkpoints/step-6/optimizer.safetensors");
    std::fs::write(&at, &std::fs::read(&at).unwrap()[..100]).unwrap();
    let r = p.run(&["ckpt", "verify", b, a]);
    assert_eq!(r.status, Some(4));
    assert!(r.err.contains("optimizer.safetensors: size: is 100 bytes"), "{}", r.err);
    // A broken checkpoint does not hide the others.
    let r = p.run(&["ckpt", "verify", "r"]);
    assert_eq!((r.status, r.out.lines().count()), (Some(4), 1), "{}{}", r.out, r.err);
    let logged = std::fs::read_to_string(p.path("r/metrics.jsonl")).unwrap();
    assert!(logged.lines().any(|l| l.contains("\"checkpoint\"") && l.contains("\"stalled_ms\":")), "{logged}");
}

const MIXTURE: &str = r#"
local pl = require "perilune"
local recipe = pl.recipe { name = "mixture", params = { steps = 40, seed = 1, eval_every = 3, far = 2 } }
local function list(n, from)
  local out = {}
  for i = 1, n do out[i] = { x = { i / n, from }, y = from * i / n } end
  return pl.data.list(out)
end
function recipe.data(p)
  local function weights(step, metrics)
    return { near = 1, far = step < 20 and 0 or p.far * (metrics.loss + metrics["valid/loss"]) }
  end
  return { train = pl.data.mix({ near = list(50, 0.5), far = list(30, 2) }, weights, { every = 4 }):batch(8), valid = list(10, 1):batch(5) }
end
function recipe.model() return pl.nn.Linear(2, 1) end
function recipe.optimizer(_, model) return pl.optim.SGD(model, { lr = 0.1 }) end
function recipe.loss(model, batch) return pl.mse_loss(model(batch.x):squeeze(-1), batch.y) end
return recipe
"#;

/// The weights of a mixture are decided from metrics; a resume has the same samples, and a replay of an edited run too.
#[test]
fn live_mixtures_resume_and_replay() {
    let p = place();
    p.file("mix.lua", MIXTURE);
    let ok = |args: &[&str]| {
        let r = p.run(args);
        assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{args:?}");
    };
    let schedule = |dir: &str| {
        let saved = p.read(&format!("{dir}/checkpoints/step-40/run.json"));
        serde_json::from_str::<Value>(&saved).unwrap()["cursor"]["mixture"].as_str().unwrap().to_string()
    };
    ok(&["run", "mix.lua", "--quiet", "--run-dir", "whole"]);
    for step in ["1", "19", "20", "28"] {
        ok(&["run", "mix.lua", "--quiet", "--run-dir", step, "--steps", step]);
        ok(&["run", "mix.lua", "--quiet", "--run-dir", step, "--resume", "--steps", "40"]);
        assert_eq!(weights(&p, step), weights(&p, "whole"), "{step}");
        assert_eq!(schedule(step), schedule("whole"));
    }
    assert!(schedule("whole").matches(';').count() > 4, "{}", schedule("whole"));
    ok(&["run", "mix.lua", "--quiet", "--run-dir", "edited", "--steps", "20"]);
    p.file("mix.lua", MIXTURE.replace("near = 1,", "near = 3,"));
    ok(&["run", "mix.lua", "--quiet", "--run-dir", "edited", "--resume", "--edited", "--steps", "50"]);
    for dir in ["whole", "19", "edited"] {
        let again = format!("{dir}-again");
        ok(&["replay", dir, "--run-dir", &again]);
        assert_eq!(weights(&p, dir), weights(&p, &again));
    }
}

const PSEUDO: &str = r#"
local pl = require "perilune"
local data, nn, optim = pl.data, pl.nn, pl.optim
local recipe = pl.recipe { name = "labels", params = { steps = 48, seed = 1, confidence = 0.7, share = 0.5 } }
recipe.sample_log = true
local function point(i) return { x = { math.random() * 2 - 1, math.random() * 2 - 1 }, number = i } end
function recipe.data(p)
  local all = data.generate(300, point, { seed = p.seed })
  local labelled = all:map(function(r) return { x = r.x, y = r.x[1] + r.x[2] > 0 and 1 or 0 } end)
  local valid, rest = labelled:holdout(0.2)
  local stream = data.pseudo(rest:sample(12, 1):shuffle(1), rest:select("x"), {
    held = valid, confidence = p.confidence, share = p.share, start = 6, every = 5, seed = 2,
    predict = function(model, batch) return model(batch.x) end,
  })
  return { train = stream:batch(8), valid = valid:batch(30) }
end
function recipe.model() return nn.Sequential { nn.Linear(2, 8), nn.GELU(), nn.Linear(8, 2) } end
function recipe.optimizer(_, model) return optim.AdamW(model, { lr = 3e-2 }) end
function recipe.loss(model, batch) return pl.cross_entropy(model(batch.x), batch.y) end
function recipe.finish(run)
  local labels = run:pseudo_labels()
  if #labels == 0 then return end
  print(#labels, labels[1].file:match "data.generate at labels.lua:%d+", labels[1].round <= labels[#labels].round + 9)
end
return recipe
"#;

/// The labels are States: a resume has the same ones and the same samples, a replay of an edited run too, and an edit of the filter keeps
/// them bit for bit until the next round.
#[test]
fn pseudo_labels_resume_replay_and_reload() {
    let p = place();
    p.file("labels.lua", PSEUDO);
    let ok = |args: &[&str]| {
        let r = p.run(args);
        assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{args:?}");
        r.out
    };
    let state = |dir: &str, step: u32| {
        let path = p.path(&format!("{dir}/checkpoints/step-{step}/optimizer.safetensors"));
        let bytes = std::fs::read(path).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        ["label", "confidence", "round", "place"].map(|name| {
            let at = &header[format!("data.pseudo.{name}")]["data_offsets"];
            let at = [0, 1].map(|k| 8 + length + at[k].as_u64().unwrap() as usize);
            bytes[at[0]..at[1]].to_vec()
        })
    };
    let out = ok(&["run", "labels.lua", "--run-dir", "whole", "--checkpoint-every", "1", "--keep", "0"]);
    assert!(out.contains("data.generate at labels.lua:6\ttrue"), "{out}");
    for step in ["1", "5", "6", "7", "13", "26"] {
        ok(&["run", "labels.lua", "--quiet", "--run-dir", step, "--steps", step]);
        ok(&["run", "labels.lua", "--quiet", "--run-dir", step, "--resume", "--steps", "48"]);
        assert_eq!(weights(&p, step), weights(&p, "whole"), "{step}");
        let samples = |dir: &str| std::fs::read(p.path(&format!("{dir}/samples.bin"))).unwrap().len();
        assert!(samples(step) > 0 && samples("whole") > 0);
        assert_eq!(state(step, 48), state("whole", 48), "{step}");
    }
    assert_ne!(state("whole", 6), state("whole", 5));
    assert_eq!(state("whole", 10), state("whole", 6));
    assert_ne!(state("whole", 11), state("whole", 10));
    // An edit after step 20 holds from the round of step 21 on.
    ok(&["run", "labels.lua", "--quiet", "--run-dir", "edited", "--steps", "20"]);
    p.file("labels.lua", PSEUDO.replace("confidence = p.confidence", "confidence = p.confidence + 0.2"));
    let args = ["run", "labels.lua", "--quiet", "--run-dir", "edited", "--resume", "--edited", "--steps", "48"];
    ok(&[&args[..], &["--checkpoint-every", "1", "--keep", "0"]].concat());
    let kept = state("edited", 20);
    assert_eq!(kept, state("whole", 20));
    assert_ne!(state("edited", 21), state("whole", 21));
    for dir in ["whole", "13", "edited"] {
        let again = format!("{dir}-again");
        ok(&["replay", dir, "--run-dir", &again]);
        assert_eq!(weights(&p, dir), weights(&p, &again));
        assert_eq!(state(dir, 48), state(&again, 48));
    }
}
