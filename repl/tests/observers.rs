//! Tests the observers of a run (`on_step`, `on_eval`, `on_end`, `sinks`), `run:log`, and the runs of plain scripts (`pl.run`).
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use std::io::Read;
use support::{Place, Ran, Running, TINY, place};

/// The tiny recipe with these lines before its end.
fn with(lines: &str) -> Place {
    let p = place();
    p.file("tiny.lua", TINY.replace("return recipe", &format!("{lines}\nreturn recipe")));
    p
}

/// Observers that use all there is: they draw random numbers, evaluate tensors, and keep a State of their own.
const ALL: &str = r#"
local seen = pl.state(pl.zeros {})
function recipe.on_step(run, e)
  seen:assign(seen + 1)
  pl.eval(pl.rand { 8 } + run.model[1].weight:sum())
  run:log { noise = pl.rand {}, seen = seen, twice = 2 * e.loss, off = e.metrics.off, ["a/b"] = e.samples }
  if e.step % 3 == 0 then
    run:log { text = "step " .. e.step, w = pl.train.histogram(run.model[1].weight, { bins = 4 }), grid = pl.train.image(pl.rand { 3, 1, 2, 5 }) }
  end
end
function recipe.on_eval(run, e) run:log { ["gap " .. e.split] = e.loss - e.metrics.off } end
function recipe.on_end(run, status) run:log { status = status, dir = run.dir } end
"#;

fn ok(r: Ran) -> Ran {
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{}", r.out);
    r
}

fn events(p: &Place, dir: &str, kind: &str) -> Vec<Value> {
    let text = p.read(&format!("{dir}/metrics.jsonl"));
    let all = text.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
    all.filter(|e| e["event"] == kind).collect()
}

/// Everything that `run:log` was given under a kind: (step, name, value).
fn logged(p: &Place, dir: &str, kind: &str) -> Vec<(u64, String, Value)> {
    let of = |e: &Value| {
        let step = e["step"].as_u64().unwrap();
        let values = e[kind].as_object().cloned().unwrap_or_default();
        values.into_iter().map(move |(name, value)| (step, name, value)).collect::<Vec<_>>()
    };
    events(p, dir, "log").iter().flat_map(of).collect()
}

#[test]
fn observers_see_every_step_and_change_none() {
    let (plain, p) = (with("recipe.eval_every = 3"), with(&format!("recipe.eval_every = 3{ALL}")));
    for place in [&plain, &p] {
        ok(place.run(&["run", "tiny.lua", "--quiet", "--run-dir", "r"]));
    }
    assert_eq!(plain.run_json("r")["weights"], p.run_json("r")["weights"], "observers changed the run");

    let steps = events(&p, "r", "step");
    let figures = logged(&p, "r", "metrics");
    let of =
        |name: &str| figures.iter().filter(|f| f.1 == name).map(|f| (f.0, f.2.as_f64().unwrap())).collect::<Vec<_>>();
    let near = |a: f64, b: f64| (a - b).abs() <= 1e-6 * b.abs();
    assert_eq!(of("twice").len(), 6);
    for (e, (step, twice)) in steps.iter().zip(of("twice")) {
        assert!(e["step"] == step && near(twice, 2.0 * e["loss"].as_f64().unwrap()), "{e}");
    }
    assert_eq!(of("seen").iter().map(|s| s.1).collect::<Vec<_>>(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    assert_eq!(of("a/b"), (1..=6).map(|k| (k, 8.0)).collect::<Vec<_>>());
    let evaluations = events(&p, "r", "eval");
    let gaps = of("gap valid");
    assert_eq!(gaps.iter().map(|g| g.0).collect::<Vec<_>>(), [3, 6]);
    for (e, (_, gap)) in evaluations.iter().zip(gaps) {
        let metric = |name: &str| e["metrics"][name].as_f64().unwrap();
        assert!((gap - (metric("valid/loss") - metric("valid/off"))).abs() < 1e-6, "{e}");
    }
    let texts: Vec<(u64, String)> =
        logged(&p, "r", "texts").into_iter().map(|t| (t.0, format!("{}: {}", t.1, t.2.as_str().unwrap()))).collect();
    let text = |step, text: &str| (step, text.to_string());
    assert_eq!(texts, [text(3, "text: step 3"), text(6, "text: step 6"), text(6, "dir: r"), text(6, "status: done")]);
    for (_, _, h) in logged(&p, "r", "histograms") {
        let counts: Vec<u64> = h["counts"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect();
        assert_eq!((counts.iter().sum::<u64>(), h["edges"].as_array().unwrap().len()), (4, 5), "{h}");
    }
    for (step, _, image) in logged(&p, "r", "images") {
        // Three pictures of 2 by 5 in two columns.
        assert_eq!((&image["width"], &image["height"]), (&json!(10), &json!(4)));
        let file = image["file"].as_str().unwrap();
        assert_eq!(file, format!("media/grid-{step:07}.png"));
        let bytes = std::fs::read(p.path("r").join(file)).unwrap();
        assert_eq!(image["blake3"].as_str().unwrap(), blake3::hash(&bytes).to_hex().as_str());
    }
    assert_eq!(p.run_json("r")["metrics"]["a/b"], 8.0);
}

#[test]
fn a_resumed_run_logs_every_step_once() {
    let p = with(&format!("recipe.eval_every = 3{ALL}"));
    ok(p.run(&["run", "tiny.lua", "--quiet", "--run-dir", "whole", "--mlflow", "store"]));
    let args = ["run", "tiny.lua", "--quiet", "--checkpoint-every", "2", "--keep", "0"];
    ok(p.run(&[&args[..], &["--run-dir", "cut", "--mlflow", "store"]].concat()));
    // Go back to step 4; what was logged after it is logged again.
    ok(p.run(&[&args[..], &["--resume", "cut", "--at", "4", "--discard-later"]].concat()));
    let figures = |dir: &str| -> Vec<(u64, String, Value)> {
        // The observers' own counter and random numbers are not part of the run.
        logged(&p, dir, "metrics").into_iter().filter(|f| f.1 != "seen" && f.1 != "noise").collect()
    };
    assert_eq!(figures("cut"), figures("whole"));
    assert_eq!(logged(&p, "cut", "texts").len(), logged(&p, "whole", "texts").len());

    // The metric's file of the resumed MLflow run has each step once.
    let (record, id) = (p.run_json("cut"), |record: &Value| record["mlflow"]["run"].as_str().unwrap().to_string());
    assert_ne!(id(&record), id(&p.run_json("whole")));
    let file = format!("store/{}/{}/metrics/loss", record["mlflow"]["experiment"].as_str().unwrap(), id(&record));
    let text = p.read(&file);
    let steps: Vec<&str> = text.lines().map(|l| l.rsplit(' ').next().unwrap()).collect();
    assert_eq!(steps, ["1", "2", "3", "4", "5", "6"]);
}

#[test]
fn sinks_get_the_events_of_the_log() {
    let p = with(
        r#"
recipe.eval_every = 3
recipe.sinks = { function(e) print(e.event, e.step or e.steps, e.loss and "loss" or next(e.metrics or {})) end }
function recipe.on_eval(run, e) run:log { gap = 1 } end"#,
    );
    let r = ok(p.run(&["run", "tiny.lua", "--quiet", "--run-dir", "r", "--steps", "3"]));
    let lines: Vec<&str> = r.out.lines().filter(|l| l.contains('\t')).collect();
    let expected = [
        "start\t3\tnil",
        "step\t1\tloss",
        "step\t2\tloss",
        "step\t3\tloss",
        "eval\t3\tvalid/loss",
        "log\t3\tgap",
        "checkpoint\t3\tnil",
        "done\t3\t",
    ];
    assert_eq!(lines.len(), expected.len(), "{lines:#?}");
    for (line, expected) in lines.iter().zip(expected) {
        let sorted = |l: &str| l.replace("valid/off", "valid/loss");
        assert!(sorted(line).starts_with(expected), "{line} is not {expected}");
    }
}

#[test]
fn an_observer_that_changes_the_run_is_refused() {
    let cases = [
        ("function recipe.on_step(run) run.model[1].weight:assign(run.model[1].weight * 0) end", "recipe.on_step"),
        ("function recipe.on_eval(run) run:step() end", "recipe.on_eval"),
        ("function recipe.on_end(run) run.model[1].bias:assign(pl.zeros { 1 }) end", "recipe.on_end"),
        (
            "recipe.sinks = { function() recipe.w:assign(recipe.w * 0) end }\nlocal m = recipe.model\nfunction recipe.model(p) local n = m(p) recipe.w = n[1].weight return n end",
            "a sink of the recipe",
        ),
    ];
    for (lines, name) in cases {
        let p = with(lines);
        let r = p.run(&["run", "tiny.lua", "--quiet", "--run-dir", "r"]);
        assert_eq!(r.status, Some(3), "{lines}: {}", r.err);
        let place = r.err.starts_with("tiny.lua:");
        assert!(place && r.err.contains(&format!("is assigned in {name}, which only observes the run")), "{}", r.err);
        assert_eq!(p.run_json("r")["status"], "failed");
    }
}

#[test]
fn wrong_observers_are_refused_before_the_first_step() {
    let cases = [
        ("recipe.on_step = 3", "recipe.on_step is 3"),
        ("recipe.sinks = function() end", "recipe.sinks is a function"),
        ("recipe.sinks = { print, 4 }", "recipe.sinks[2] is 4"),
        ("recipe.on_stop = function() end", "unknown field 'on_stop'"),
    ];
    for (lines, rule) in cases {
        let p = with(lines);
        let r = p.run(&["run", "tiny.lua", "--quiet", "--run-dir", "r"]);
        assert!(r.status == Some(3) && r.err.contains(rule), "{lines}: {}", r.err);
        assert!(!p.path("r").exists(), "{lines}");
    }
}

#[test]
fn wrong_values_are_refused_with_their_names() {
    let cases = [
        ("run:log { [\"../x\"] = 1 }", "'../x'"),
        ("run:log { w = run.model[1].weight }", "'w' is a tensor of shape {1, 4}"),
        ("run:log { a = {} }", "'a' is a table"),
        ("run:log(3)", "its argument is 3"),
        ("run:log({ a = 1 }, -1)", "step"),
        ("run:log { a = pl.train.image(pl.rand { 5, 4, 4 }) }", "the image has shape {5, 4, 4}"),
        ("run:log { a = pl.train.histogram(pl.rand { 5 }, { bins = 0 }) }", "bins"),
        ("run:log { a = (\"x\"):rep(2 ^ 21) }", "more than 1 MiB"),
    ];
    for (line, rule) in cases {
        let p = with(&format!("function recipe.on_step(run)\n  {line}\nend"));
        let r = p.run(&["run", "tiny.lua", "--quiet", "--run-dir", "r"]);
        assert!(r.status == Some(3) && r.err.contains(rule) && r.err.starts_with("tiny.lua:1"), "{line}: {}", r.err);
    }
}

#[test]
fn names_that_a_store_cannot_have_are_a_warning() {
    let p = with("function recipe.on_step(run) run:log { [\"loss/x\"] = 1, other = 2 } end");
    let r = p.run(&["run", "tiny.lua", "--quiet", "--run-dir", "r", "--mlflow", "store"]);
    assert_eq!(r.status, Some(0), "{}", r.err);
    assert_eq!(r.err.matches("--mlflow leaves out the metric 'loss/x'").count(), 1, "{}", r.err);
    // It is in all other logs.
    assert_eq!(logged(&p, "r", "metrics").iter().filter(|f| f.1 == "loss/x").count(), 6);
    p.file("file", "");
    let r = p.run(&["run", "tiny.lua", "--run-dir", "s", "--mlflow", "file"]);
    assert!(r.status == Some(2) && r.err.contains("--mlflow file: it is a file; give a folder"), "{}", r.err);
    assert!(!p.path("s").exists());
}

const SCRIPT: &str = r#"
local pl = require "perilune"
local p = pl.params { n = 5, lr = 0.5 }
local run = pl.run { steps = p.n, params = p }
local w = pl.state(pl.ones { 3 })
for step in run:each() do
  local loss = pl.step(function() w:assign(w * (1 - p.lr)) return (w * w):sum() end)
  run:log { loss = loss, count = step }
  if step == 3 then run:log { note = "three", picture = pl.train.image(pl.zeros { 4, 4 }) } end
end
run:log { note = "after " .. run.count }
local out = run.dir .. "/out.txt"
pl.save(run.dir .. "/w.safetensors", { w = w })
print(run)
"#;

#[test]
fn a_script_gets_a_run() {
    let p = place();
    p.file("decay.lua", SCRIPT);
    let r = ok(p.run(&["run", "decay.lua", "--run-dir", "r"]));
    assert!(r.out.contains("run of decay · step 5 of 5") && r.out.contains("steps/s"), "{}", r.out);
    let steps: Vec<(u64, f64, f64)> = events(&p, "r", "step")
        .iter()
        .map(|e| (e["step"].as_u64().unwrap(), e["loss"].as_f64().unwrap(), e["metrics"]["count"].as_f64().unwrap()))
        .collect();
    assert_eq!(steps, (1..=5).map(|k| (k, 3.0 * 0.25f64.powi(k as i32), k as f64)).collect::<Vec<_>>());
    let texts: Vec<(u64, Value)> = logged(&p, "r", "texts").into_iter().map(|t| (t.0, t.2)).collect();
    assert_eq!(texts, [(3, json!("three")), (5, json!("after 5"))]);
    assert!(p.path("r/media/picture-0000003.png").exists() && p.path("r/w.safetensors").exists());
    let record = p.run_json("r");
    assert_eq!(
        (&record["status"], &record["steps_done"], &record["params"]),
        (&json!("done"), &json!(5), &json!({ "lr": 0.5, "n": 5 }))
    );
    let listed = ok(p.run(&["runs", "r"]));
    assert!(listed.out.contains("finished"), "{}", listed.out);
    let compared = ok(p.run(&["runs", "--compare", "r", "r"]));
    assert!(compared.out.contains("no difference"), "{}", compared.out);
    // It is not overwritten, and not resumed.
    let r = p.run(&["run", "decay.lua", "--run-dir", "r"]);
    assert!(r.status != Some(0) && r.err.contains("already contains a run"), "{}", r.err);
    ok(p.run(&["run", "decay.lua", "--run-dir", "r", "--overwrite", "--set", "n=2", "--quiet"]));
    assert_eq!(p.run_json("r")["steps_done"], 2);
}

#[test]
fn a_stop_request_ends_the_loop_of_a_script() {
    let p = place();
    p.file("decay.lua", SCRIPT);
    let mut run = Running::start(&p, &["run", "decay.lua", "--run-dir", "r", "--json", "--set", "n=1000000"]);
    run.next("start");
    run.until(60);
    run.signal("-INT");
    let warning = run.next("warning");
    assert!(warning["message"].as_str().unwrap().ends_with(" of 1000000"), "{warning}");
    let done = run.next("done");
    assert_eq!(done["status"], "interrupted");
    assert_eq!(run.child.wait().unwrap().code(), Some(130));
    let record = p.run_json("r");
    assert_eq!(record["status"], "interrupted");
    // What follows the loop has run.
    assert!(p.path("r/w.safetensors").exists());
    assert_eq!(logged(&p, "r", "texts").last().unwrap().2, json!(format!("after {}", record["steps_done"])));
}

#[test]
fn the_run_of_a_script_that_fails_is_recorded() {
    let p = place();
    p.file("fails.lua", "local pl = require 'perilune'\nlocal run = pl.run { name = 'x', steps = 3 }\nfor step in run:each() do run:log { a = step } end\nerror 'oops'");
    let r = p.run(&["run", "fails.lua", "--run-dir", "r"]);
    assert!(r.status == Some(3) && r.err.starts_with("fails.lua:4: oops"), "{}", r.err);
    let record = p.run_json("r");
    assert_eq!(
        (&record["status"], &record["recipe"], &record["metrics"]["a"]),
        (&json!("failed"), &json!("x"), &json!(3.0))
    );
    let cases = [
        ("pl.run { step = 3 }", "Did you mean 'steps'?"),
        ("pl.run { params = { a = {} } }", "params['a'] is a table"),
        ("pl.run {} pl.run {}", "the script has begun a run already"),
    ];
    for (k, (line, rule)) in cases.into_iter().enumerate() {
        p.file("wrong.lua", format!("local pl = require 'perilune'\n{line}"));
        let r = p.run(&["run", "wrong.lua", "--run-dir", &format!("wrong{k}")]);
        assert!(r.status == Some(3) && r.err.contains(rule), "{line}: {}", r.err);
    }
    p.file("both.lua", format!("require('perilune').run {{}}\n{TINY}"));
    let r = p.run(&["run", "both.lua", "--run-dir", "both"]);
    assert!(r.status == Some(2) && r.err.contains("pl.run is for a script without"), "{}", r.err);
}

#[test]
fn the_loop_of_any_recipe_is_set_from_the_command_line() {
    let p = with(
        "local old = recipe.optimizer\nfunction recipe.optimizer(p, model) print('steps', p.steps) return old(p, model) end",
    );
    // 48 training samples, 8 a batch.
    let r =
        ok(p.run(&["run", "tiny.lua", "--quiet", "--run-dir", "a", "--set", "epochs=2.5", "--set", "accumulate=3"]));
    assert!(r.out.contains("steps\t5"), "{}", r.out);
    assert_eq!(p.run_json("a")["steps_done"], 5);
    // By default an evaluation an epoch: 2 steps of 3 batches.
    let evaluated = |dir: &str| events(&p, dir, "eval").iter().map(|e| e["step"].as_u64().unwrap()).collect::<Vec<_>>();
    assert_eq!(evaluated("a"), [2, 4, 5]);
    ok(p.run(&["run", "tiny.lua", "--quiet", "--run-dir", "b", "--set", "eval_every=4"]));
    assert_eq!(evaluated("b"), [4, 6]);
    ok(p.run(&["run", "tiny.lua", "--quiet", "--run-dir", "c", "--set", "eval_every=0"]));
    assert_eq!(evaluated("c"), [6]);
    // A resumed run keeps them.
    let args = ["run", "tiny.lua", "--quiet", "--checkpoint-every", "2", "--keep", "0"];
    ok(p.run(&[&args[..], &["--run-dir", "d", "--set", "epochs=2.5", "--set", "accumulate=3"]].concat()));
    ok(p.run(&[&args[..], &["--resume", "d", "--at", "2", "--discard-later"]].concat()));
    assert_eq!(p.run_json("d")["weights"], p.run_json("a")["weights"]);
    for (args, rule) in [
        (&["--set", "epochs=0"][..], "epochs is 0"),
        (&["--set", "accumulate=0"], "accumulate"),
        (&["--set", "epochs=1", "--set", "steps=2"], "both set the length"),
        (&["--set", "epoch=1"], "unknown param 'epoch'"),
    ] {
        let r = p.run(&[&["run", "tiny.lua", "--run-dir", "z"], args].concat());
        assert!(r.status != Some(0) && r.err.contains(rule), "{args:?}: {}", r.err);
    }
}

/// Everything that a run prints on a terminal of so many columns, with its control sequences.
fn on_terminal(p: &Place, columns: u16, args: &[&str]) -> String {
    let (pty, pts) = pty_process::blocking::open().unwrap();
    pty.resize(pty_process::Size::new(40, columns)).unwrap();
    let command = pty_process::blocking::Command::new(env!("CARGO_BIN_EXE_perilune"));
    let mut child =
        command.args(args).current_dir(p.dir.path()).env_remove("NO_COLOR").env_remove("COLUMNS").spawn(pts).unwrap();
    let mut out = Vec::new();
    // On Linux the end of the output is an error.
    let _ = std::fs::File::from(std::os::fd::OwnedFd::from(pty)).read_to_end(&mut out);
    assert!(child.wait().unwrap().success(), "{}", String::from_utf8_lossy(&out));
    String::from_utf8_lossy(&out).into_owned()
}

/// Removes control sequences: from ESC [ to a letter.
fn plain(text: &str) -> String {
    let mut out = String::new();
    let mut parts = text.split("\x1b[");
    out += parts.next().unwrap_or_default();
    for part in parts {
        out += part.split_once(|c: char| c.is_ascii_alphabetic()).map_or("", |(_, rest)| rest);
    }
    out
}

#[test]
fn the_bar_fits_terminals_of_all_widths() {
    let p = with("recipe.eval_every = 500");
    for columns in [40, 60, 80, 120, 200] {
        let dir = format!("w{columns}");
        let out = on_terminal(&p, columns, &["run", "tiny.lua", "--steps", "1500", "--run-dir", &dir]);
        let shown = plain(&out);
        let bars: Vec<&str> = shown.split(['\r', '\n']).filter(|l| l.starts_with("step") && l.contains('█')).collect();
        assert!(!bars.is_empty(), "{columns}: {shown}");
        for bar in bars.iter().filter(|bar| !bar.contains("1500/1500")) {
            assert!(bar.trim_end().chars().count() <= usize::from(columns), "{columns}: {bar}");
        }
        let last = shown.lines().rfind(|l| l.contains("1500/1500")).unwrap();
        if columns >= 120 {
            assert!(last.contains(" · lr 0.100 · epoch ") && last.contains("off "), "{last}");
        }
        assert!(last.contains("loss") && out.contains("\x1b["), "{last}");
    }
}
