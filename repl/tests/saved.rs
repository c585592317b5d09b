//! Tests commands that open a run at one of its checkpoints: `eval`, `sample`, `repl --resume`, and `pl.load_run`.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use std::io::Write;
use std::process::Stdio;
use support::{Place, Ran, TINY, place, snapshot_of};

/// The recipe of the tests with dropout, averaged weights, a module of its own and a function that generates text.
fn recipe() -> String {
    TINY.replace("return pl.nn.Sequential { pl.nn.Linear(p.width, 1) }", "return require \"parts\" (p.width)").replace(
        "return recipe",
        "recipe.ema, recipe.eval_every = 0.5, 2\n\
         function recipe.sample(run, prompt)\n  \
           print(\"sampling\")\n  \
           local scale = run.model(pl.ones { 1, 4 }):sum():item()\n  \
           return (\"%s %.6f %.6f\"):format(prompt or \"nothing\", scale, pl.rand({}):item())\n\
         end\nreturn recipe",
    )
}

const PARTS: &str = "local nn = require(\"perilune\").nn\n\
                     return function(width) return nn.Sequential { nn.Dropout(0.25), nn.Linear(width, 1) } end";

/// A run of six steps with checkpoints at 2, 4 and 6. The files of the recipe are edited afterwards.
fn saved() -> Place {
    let p = place();
    p.file("tiny.lua", recipe());
    p.file("parts.lua", PARTS);
    let r =
        p.run(&["run", "tiny.lua", "--quiet", "--run-dir", "runs/a", "--checkpoint-every", "2", "--set", "lr=0.05"]);
    assert_eq!(r.status, Some(0), "{}", r.err);
    p.file("tiny.lua", recipe().replace("lr = 0.1", "lr = 9").replace("batch.y", "batch.y * 3"));
    p.file("parts.lua", "error 'not the module of the run'");
    p
}

/// The metrics of an evaluation as the log of the run has them.
fn logged(p: &Place, step: u64) -> Value {
    let text = p.read("runs/a/metrics.jsonl");
    let mut events = text.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
    events.rfind(|e| e["event"] == "eval" && e["step"] == step).unwrap()["metrics"].clone()
}

fn ok(r: Ran) -> Ran {
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{}", r.out);
    r
}

#[test]
fn an_evaluation_repeats_the_numbers_of_the_run() {
    let p = saved();
    let before = snapshot_of(&p.path("runs"));
    for (more, step) in [(&[][..], 6), (&["--at", "2"], 2), (&["--at", "4"], 4)] {
        let r = ok(p.run(&[&["eval", "a", "--json"][..], more].concat()));
        let events = r.events();
        assert_eq!((events.len(), &events[0]["event"], &events[0]["step"]), (1, &"eval".into(), &step.into()));
        assert_eq!(events[0]["metrics"], logged(&p, step), "bit by bit, at step {step}");
    }
    let r = ok(p.run(&["eval", "runs/a", "--split", "valid", "--split", "train"]));
    let lines: Vec<&str> = r.out.lines().collect();
    assert_eq!(lines[0], "runs/a · step 6");
    assert!(lines[1].starts_with("valid loss ") && lines[2].starts_with("train loss "), "{}", r.out);
    assert_eq!(snapshot_of(&p.path("runs")), before, "nothing was written");
}

#[test]
fn an_edited_recipe_evaluates_the_weights_of_a_run() {
    let p = saved();
    p.file("parts.lua", PARTS);
    let edit = recipe()
        .replace("{ off = error:abs():mean() }", "{ most = error:abs():max() }")
        .replace("optim.SGD", "optim.AdamW");
    p.file("edited.lua", edit);
    let r = ok(p.run(&["eval", "a", "--recipe", "edited.lua", "--json"]));
    let metrics = r.events()[0]["metrics"].clone();
    assert_eq!(metrics["valid/loss"], logged(&p, 6)["valid/loss"]);
    assert!(metrics["valid/most"].is_f64() && metrics["valid/off"].is_null(), "{metrics}");
    // Another model does not fit, and neither do params of another width.
    p.file("parts.lua", PARTS.replace("nn.Linear(width, 1)", "nn.Linear(width, 2)"));
    let r = p.run(&["eval", "a", "--recipe", "edited.lua"]);
    assert_eq!(r.status, Some(4), "{}", r.err);
    assert!(r.err.contains("does not fit the recipe: ") && r.err.contains("model.2.weight is f32 {1, 4}"), "{}", r.err);
    assert!(r.err.contains("hint: its model must have the States of the checkpoint"), "{}", r.err);
    let r = p.run(&["eval", "a", "--set", "width=5"]);
    assert_eq!(r.status, Some(4), "{}", r.err);
}

#[test]
fn a_run_that_reads_other_data_now_is_reported() {
    let p = place();
    p.file("d.txt", "one");
    let text = TINY.replace(
        "local x = pl.randn { 64, 4 }",
        "local seen = pl.data.text(\"d.txt\")\n  local x = pl.randn { 64, 4 }",
    );
    p.file("tiny.lua", text);
    ok(p.run(&["run", "tiny.lua", "--quiet", "--run-dir", "runs/a"]));
    ok(p.run(&["eval", "a"]));
    p.file("d.txt", "two");
    let r = p.run(&["eval", "a", "--json"]);
    assert_eq!(r.status, Some(0));
    assert_eq!(r.err, "warning: \"d.txt\" is not the data that the run read: its content differs\n");
    // From elsewhere, relative paths start where the run was started, and the record grants no access.
    p.file("d.txt", "one");
    std::fs::create_dir(p.path("sub")).unwrap();
    let there = |args: &[&str]| -> Ran { p.command(args).current_dir(p.path("sub")).output().unwrap().into() };
    let denied = there(&["eval", "../runs/a"]);
    assert_eq!(denied.status, Some(3), "{}", denied.err);
    assert!(denied.err.contains("--allow-read"), "{}", denied.err);
    let r = there(&["eval", "../runs/a", "--json", "--allow-read", ".."]);
    assert_eq!((r.status, &r.events()[0]["metrics"]), (Some(0), &logged(&p, 6)), "{}", r.err);
}

#[test]
fn the_recipe_generates_samples_from_a_checkpoint() {
    let p = saved();
    let before = snapshot_of(&p.path("runs"));
    let text = |args: &[&str]| ok(p.run(&[&["sample"][..], args].concat())).out;
    let plain = text(&["a"]);
    assert!(plain.starts_with("sampling\nnothing ") && plain.lines().count() == 2, "{plain}");
    assert_eq!(text(&["a"]), plain, "the same each time");
    assert_ne!(text(&["a", "--seed", "7"]), plain);
    assert_eq!(text(&["a", "--seed", "7"]), text(&["a", "--seed", "7"]));
    let words = text(&["a", "two", "words"]);
    assert_eq!(words, plain.replace("nothing", "two words"));
    assert_ne!(text(&["a", "--at", "2"]), plain, "other weights");
    let r = ok(p.run(&["sample", "a", "hm", "-n", "2"]));
    assert_eq!(r.out.matches("--- sample ").count(), 2, "{}", r.out);
    let r = p.run(&["sample", "a", "hm", "-n", "2", "--json"]);
    let events = r.events();
    assert_eq!((events.len(), r.err.as_str()), (2, "sampling\nsampling\n"), "what the recipe prints is no event");
    assert_eq!((&events[0]["event"], &events[0]["prompt"]), (&"sample".into(), &"hm".into()));
    assert_ne!(events[0]["text"], events[1]["text"]);
    // A prompt with lines of its own comes from stdin.
    let mut child = p
        .command(&["sample", "a", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"one\ntwo\n").unwrap();
    let r: Ran = child.wait_with_output().unwrap().into();
    assert_eq!(ok(r).out, plain.replace("nothing", "one\ntwo"));
    assert_eq!(snapshot_of(&p.path("runs")), before, "nothing was written");
}

#[test]
fn a_recipe_without_a_sample_function_is_named_with_its_line() {
    let p = place();
    p.file("tiny.lua", TINY);
    ok(p.run(&["run", "tiny.lua", "--quiet", "--run-dir", "runs/a"]));
    let r = p.run(&["sample", "a"]);
    assert_eq!(r.status, Some(3), "{}", r.err);
    assert!(r.err.starts_with("tiny.lua:11: run:generate: the recipe 'tiny' has no function `sample`"), "{}", r.err);
    assert!(r.err.contains("hint: write `function recipe.sample(run, prompt) ... end`"), "{}", r.err);
    p.file("near.lua", TINY.replace("return recipe", "recipe.sampel = function() end\nreturn recipe"));
    let r = p.run(&["sample", "a", "--recipe", "near.lua"]);
    assert!(r.err.contains("unknown field 'sampel'") && r.err.contains("did you mean recipe.sample?"), "{}", r.err);
}

#[test]
fn wrong_usage_of_saved_runs_names_the_cure() {
    let p = saved();
    std::fs::create_dir_all(p.path("runs/empty")).unwrap();
    let cases: [(&[&str], i32, &str); 6] = [
        (&["eval", "b"], 2, "there is no run b: neither in the current directory nor below runs/"),
        (&["eval", "runs/aa"], 2, "Did you mean runs/a?"),
        (
            &["eval", "a", "--at", "5"],
            2,
            "--at 5: the run in runs/a has no checkpoint of step 5 (it has 2, 4, 6)\n  hint: step 4 is the nearest",
        ),
        (
            &["eval", "a", "--split", "vaild"],
            2,
            "has no split of that name (it has train, valid). Did you mean 'valid'?",
        ),
        (&["eval", "empty"], 2, "runs/empty: there is no checkpoint in runs/empty/checkpoints"),
        (&["sample", "a", "--set", "lrr=1"], 2, "unknown param 'lrr' for recipe tiny"),
    ];
    for (args, status, message) in cases {
        let r = p.run(args);
        assert_eq!(r.status, Some(status), "{args:?}: {}", r.err);
        assert!(r.err.contains(message), "{args:?}: {}", r.err);
    }
    let file = p.path("runs/a/checkpoints/step-6/model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let r = p.run(&["eval", "a"]);
    assert_eq!(r.status, Some(4), "{}", r.err);
    assert!(r.err.contains("model.safetensors: blake3: is "), "{}", r.err);
    ok(p.run(&["eval", "a", "--at", "4"]));
}

fn at_prompt(p: &Place, args: &[&str], lines: &str) -> Ran {
    let mut child =
        p.command(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    child.wait_with_output().unwrap().into()
}

#[test]
fn a_prompt_goes_on_from_a_checkpoint() {
    let p = saved();
    let before = snapshot_of(&p.path("runs"));
    let r = ok(at_prompt(
        &p,
        &["repl", "--resume", "a", "--at", "4"],
        "run.count, run.params.lr\nrun:step(2)\nrun:evaluate().loss\n",
    ));
    let lines: Vec<&str> = r.out.lines().collect();
    assert_eq!(lines[..2], ["4", "0.05"], "{}", r.out);
    let loss = logged(&p, 6)["valid/loss"].as_f64().unwrap();
    let shown: f64 = lines.last().unwrap().parse().unwrap();
    assert_eq!(shown as f32, loss as f32, "the steps are those of the run");
    assert_eq!(snapshot_of(&p.path("runs")), before, "nothing was written");
    let r = p.run(&["repl", "--resume", "b"]);
    assert_eq!(r.status, Some(2), "{}", r.err);
    let r = p.run(&["repl", "--at", "4"]);
    assert!(r.err.contains("--resume <RUN>"), "{}", r.err);
}

#[test]
fn a_script_loads_a_run() {
    let p = saved();
    let before = snapshot_of(&p.path("runs"));
    p.file("parts.lua", "return { mine = true }");
    p.file(
        "use.lua",
        r#"
local pl = require "perilune"
pl.seed(5)
local x, parts = pl.rand({}):item(), require "parts"
local run = pl.load_run("runs/a")
assert(parts.mine and require "parts" == parts, "the modules of the script stay")
assert(run.count == 6 and run.params.lr == 0.05 and run.recipe.name == "tiny")
print(("%.9g"):format(run:evaluate().loss))
print(run:generate("hello"):match "^hello " ~= nil)
local early = pl.load_run("runs/a", { at = 2 })
print(("%.9g"):format(early:evaluate().loss))
print(early.model(pl.ones { 1, 4 }):sum():item() ~= run.model(pl.ones { 1, 4 }):sum():item())
pl.seed(5)
local again = pl.load_run("runs/a", { at = 4 })
print(pl.rand({}):item() == x)
run:step(2)
print(run.count, again.count)
"#,
    );
    let r = p.run(&["run", "use.lua"]);
    // A script that evaluates several models needs several plans.
    assert!(r.status == Some(0) && r.err.lines().all(|l| l.starts_with("warning: new plan: ")), "{}", r.err);
    let of = |step| format!("{:.9}", logged(&p, step)["valid/loss"].as_f64().unwrap());
    let lines: Vec<&str> = r.out.lines().collect();
    let near = |line: &str, step| line[..8] == of(step)[..8];
    assert!(near(lines[0], 6) && near(lines[3], 2), "{} {} {}", r.out, of(6), of(2));
    let rest: Vec<&str> = lines.iter().copied().enumerate().filter(|(k, _)| ![0, 3].contains(k)).map(|l| l.1).collect();
    assert_eq!(rest, ["sampling", "true", "true", "true", "8\t4"], "{}", r.out);
    assert_eq!(snapshot_of(&p.path("runs")), before, "nothing was written");
}

/// A run is a teacher in the recipe of another one, whose record names the checkpoint among its data.
#[test]
fn a_recipe_learns_from_a_loaded_run() {
    let p = saved();
    let student = TINY
        .replace("name = \"tiny\"", "name = \"student\"")
        .replace(
            "function recipe.model(p) return",
            "local teacher\nfunction recipe.model(p)\n  teacher = pl.load_run(\"runs/a\", { at = 4 }).model\n  teacher:eval()\n  return",
        )
        .replace("- batch.y", "- pl.no_grad(function() return teacher(batch.x) end):squeeze(-1)");
    p.file("student.lua", student);
    ok(p.run(&["run", "student.lua", "--quiet", "--run-dir", "runs/s", "--steps", "3"]));
    let data = p.run_json("runs/s")["data"].clone();
    assert_eq!(data[0]["path"], "runs/a/checkpoints/step-4/run.json", "{data}");
    ok(p.run(&["run", "student.lua", "--quiet", "--run-dir", "runs/s", "--resume", "--steps", "6"]));
    ok(p.run(&["run", "student.lua", "--quiet", "--run-dir", "runs/whole"]));
    assert_eq!(p.run_json("runs/s")["weights"], p.run_json("runs/whole")["weights"], "resumed as uninterrupted");
    ok(p.run(&["check", "student.lua"]));
}

#[test]
fn wrong_calls_of_load_run_name_the_cure() {
    let p = saved();
    std::fs::create_dir(p.path("sub")).unwrap();
    std::os::unix::fs::symlink(p.path("runs/a"), p.path("sub/link")).unwrap();
    let error = |line: &str, message: &str| {
        p.file("sub/use.lua", format!("local pl = require \"perilune\"\n{line}\n"));
        let r = p.run(&["run", "sub/use.lua"]);
        assert_eq!(r.status, Some(3), "{line}: {}", r.err);
        assert!(r.err.starts_with("sub/use.lua:2: load_run: ") && r.err.contains(message), "{line}: {}", r.err);
    };
    error("pl.load_run(\"runs/a\", { at = 3 })", "the run in runs/a has no checkpoint of step 3 (it has 2, 4, 6)");
    error("pl.load_run(\"runs/a\", { At = 2 })", "unknown option 'At' (options: at). Did you mean 'at'?");
    error("pl.load_run(\"runs/a\", { at = -2 })", "at is -2; it must be the step of a checkpoint");
    error("pl.load_run(\"runs/b\")", "there is no run directory \"runs/b\"");
    error("pl.load_run(7)", "the run directory is 7; it must be a string");
    error("pl.step(function() pl.load_run(\"runs/a\") end)", "a step is open");
    error("pl.load_run(\"runs/a/run.json\")", "run.json");

    // The policy decides what may be read: from below, the directory of the runs is not.
    p.file(
        "sub/use.lua",
        "local pl = require \"perilune\"\nprint(pl.load_run(arg_dir or \"../runs/a\").count)\n"
            .replace("arg_dir or ", ""),
    );
    let below = |args: &[&str]| -> Ran { p.command(args).current_dir(p.path("sub")).output().unwrap().into() };
    let r = below(&["run", "use.lua"]);
    assert_eq!(r.status, Some(3), "{}", r.err);
    assert!(r.err.contains("--allow-read"), "{}", r.err);
    assert_eq!(ok(below(&["run", "use.lua", "--allow-read", ".."])).out, "6\n");
    p.file("sub/use.lua", "local pl = require \"perilune\"\nprint(pl.load_run(\"link\").count)\n");
    let r = below(&["run", "use.lua"]);
    assert_eq!(r.status, Some(3), "a link leads out: {}", r.err);
}

/// A run whose recipe loads itself ends in an error, not in a crash.
#[test]
fn a_run_that_loads_itself_is_refused() {
    let p = place();
    p.file("d.txt", "once");
    let text = TINY.replace(
        "return pl.nn.Sequential",
        "if pl.data.text(\"d.txt\"):size() > 4 then pl.load_run(\"runs/a\") end\n  return pl.nn.Sequential",
    );
    p.file("tiny.lua", text);
    ok(p.run(&["run", "tiny.lua", "--quiet", "--run-dir", "runs/a"]));
    p.file("d.txt", "for ever");
    let r = p.run(&["eval", "a"]);
    assert_eq!(r.status, Some(3), "{}", r.err);
    assert!(r.err.contains("loaded by a run that is loaded by another one, 8 deep"), "{}", r.err);
}
