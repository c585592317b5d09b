//! Tests `perilune run`: events, the run directory, the output on a terminal.

#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use support::{TINY, place, tiny};

fn kinds(events: &[Value]) -> Vec<&str> {
    events.iter().map(|e| e["event"].as_str().unwrap()).collect()
}

#[test]
fn json_is_a_stream_of_events_and_nothing_else() {
    let p = place();
    p.file(
        "tiny.lua",
        TINY.replace("return recipe", "print('hello')\nfunction recipe.finish() print('bye') end\nreturn recipe"),
    );
    let r = p.run(&["run", "tiny.lua", "--json", "--set", "lr=0.05", "--threads", "1"]);
    assert_eq!(r.status, Some(0), "{}", r.err);
    assert_eq!(r.err, "hello\nbye\n");
    let events = r.events();
    assert_eq!(kinds(&events), ["start", "step", "step", "step", "step", "step", "step", "eval", "checkpoint", "done"]);
    let start = &events[0];
    assert_eq!(start["schema"], 1);
    assert_eq!(start["recipe"], "tiny");
    assert_eq!(start["device"], "cpu");
    assert_eq!(start["threads"], 1);
    assert_eq!(start["params"], json!({ "lr": 0.05, "seed": 3, "steps": 6, "width": 4 }));
    assert_eq!(start["samples"], json!({ "train": 48, "valid": 16 }));
    for (k, e) in events[1..7].iter().enumerate() {
        assert_eq!(e["step"], k as u64 + 1);
        assert!(e["loss"].is_f64() && e["metrics"]["off"].is_f64(), "{e}");
    }
    let eval = &events[7];
    assert_eq!(eval["step"], 6);
    assert!(eval["metrics"]["valid/loss"].is_f64() && eval["metrics"]["valid/off"].is_f64(), "{eval}");
    assert_eq!(events[8]["step"], 6);
    let done = &events[9];
    assert_eq!((&done["status"], &done["steps"]), (&json!("done"), &json!(6)));
    assert_eq!(done["metrics"]["valid/loss"], eval["metrics"]["valid/loss"]);
    assert_eq!(done["metrics"]["loss"], events[6]["loss"]);
    assert_eq!(done["weights"].as_str().unwrap().len(), 64);
    assert!(done["seconds"].as_f64().unwrap() > 0.0);
}

#[test]
fn the_same_seed_gives_the_same_weights_for_any_number_of_threads() {
    let p = tiny();
    let weights = |args: &[&str]| {
        let r = p.run(&[&["run", "tiny.lua", "--json"], args].concat());
        r.events().last().unwrap()["weights"].as_str().unwrap().to_string()
    };
    let one = weights(&["--threads", "1"]);
    assert_eq!(one, weights(&["--threads", "2"]));
    assert_eq!(one, weights(&["--set", "seed=3"]));
    assert_ne!(one, weights(&["--seed", "4"]));
    assert_ne!(one, weights(&["--steps", "5"]));
}

#[test]
fn a_run_directory_holds_what_is_needed_to_repeat_the_run() {
    let p = place();
    p.file("part.lua", "return { width = 4 }");
    p.file("tiny.lua", format!("local part = require 'part'\n{TINY}"));
    std::fs::create_dir_all(p.path(".git/refs/heads")).unwrap();
    p.file(".git/HEAD", "ref: refs/heads/main\n");
    p.file(".git/refs/heads/main", "0123456789abcdef0123456789abcdef01234567\n");
    let r = p.run(&["run", "tiny.lua", "--json"]);
    assert_eq!(r.status, Some(0), "{}", r.err);
    let runs = p.runs();
    assert_eq!(runs.len(), 1);
    assert!(runs[0].starts_with("tiny-20"), "{runs:?}");
    let dir = format!("runs/{}", runs[0]);
    assert_eq!(r.events()[0]["run_dir"], dir);
    let record = p.run_json(&dir);
    assert_eq!(record["schema"], 1);
    assert_eq!(record["recipe"], "tiny");
    assert_eq!(record["path"], "tiny.lua");
    assert_eq!(record["status"], "done");
    assert_eq!(record["seed"], 3);
    assert_eq!(record["precision"], "f32");
    assert_eq!(record["commit"], "0123456789abcdef0123456789abcdef01234567");
    assert_eq!(record["command"].as_array().unwrap()[1..], [json!("run"), json!("tiny.lua"), json!("--json")]);
    assert_eq!(record["weights"], r.events().last().unwrap()["weights"]);
    assert_eq!(record["files"][0]["path"], "tiny.lua");
    assert_eq!(record["files"][1]["path"], "part.lua");
    assert_eq!(p.read(&format!("{dir}/recipe/tiny.lua")), p.read("tiny.lua"));
    assert_eq!(p.read(&format!("{dir}/recipe/part.lua")), p.read("part.lua"));
    let logged: Vec<&str> = r.out.lines().filter(|l| l.contains("\"step\"") || l.contains("\"eval\"")).collect();
    let logged: Vec<&str> =
        logged.into_iter().filter(|l| !l.contains("\"start\"") && !l.contains("\"done\"")).collect();
    let metrics = p.read(&format!("{dir}/metrics.jsonl"));
    assert_eq!(metrics.lines().map(perilune_checkpoint::seal::unsealed).collect::<Vec<_>>(), logged);
    let tb = std::fs::read_dir(p.path(&dir).join("tb")).unwrap().next().unwrap().unwrap();
    assert!(tb.file_name().to_string_lossy().starts_with("events.out.tfevents."));
    assert!(tb.metadata().unwrap().len() > 7 * 40);
}

#[test]
fn two_runs_in_one_second_do_not_share_a_directory() {
    let p = tiny();
    for _ in 0..3 {
        assert_eq!(p.run(&["run", "tiny.lua", "--steps", "1", "--quiet"]).status, Some(0));
    }
    assert_eq!(p.runs().len(), 3);
    assert_eq!(p.run(&["run", "tiny.lua", "--steps", "1", "--run-dir", "here"]).status, Some(0));
    let again = p.run(&["run", "tiny.lua", "--steps", "1", "--run-dir", "here"]);
    assert_eq!(again.status, Some(2));
    let hint = "  hint: --resume continues that run, --overwrite deletes it and starts anew\n";
    assert_eq!(
        again.err,
        format!("error: --run-dir here: it already contains a run; choose another directory\n{hint}")
    );
}

#[test]
fn a_person_sees_a_header_the_last_step_and_the_result() {
    let p = tiny();
    let r = p.run(&["run", "tiny.lua"]);
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""));
    let lines: Vec<&str> = r.out.lines().collect();
    assert_eq!(lines.len(), 3, "{}", r.out);
    assert!(
        lines[0].starts_with("tiny · cpu (") && lines[0].ends_with(" · 5 parameters · 48 train / 16 valid · seed 3"),
        "{}",
        lines[0]
    );
    assert!(lines[1].starts_with("step  6/6 · loss ") && lines[1].contains("samples/s · data "), "{}", lines[1]);
    assert!(
        lines[2].starts_with("valid loss ") && lines[2].contains(" · off ") && lines[2].contains("  runs/tiny-"),
        "{}",
        lines[2]
    );
    let quiet = p.run(&["run", "tiny.lua", "--quiet"]);
    assert_eq!(quiet.out.lines().count(), 1);
}

#[test]
fn colour_follows_the_environment() {
    let p = tiny();
    let colored = |vars: &[(&str, &str)]| {
        let mut c = p.command(&["run", "tiny.lua", "--steps", "1"]);
        c.envs(vars.iter().copied());
        String::from_utf8(c.output().unwrap().stdout).unwrap().contains('\x1b')
    };
    assert!(!colored(&[]));
    assert!(colored(&[("CLICOLOR_FORCE", "1")]));
    assert!(!colored(&[("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")]));
    assert!(!colored(&[("TERM", "dumb")]));
}

#[test]
fn evaluation_on_the_way_is_an_event_and_the_last_is_not_computed_twice() {
    let p = tiny();
    let text = p.read("tiny.lua").replace("seed = 3,", "seed = 3, eval_every = 2,");
    p.file(
        "tiny.lua",
        text.replace("valid = set:", "test = set:split('test', 0.1, p.seed):batch(8), valid = set:")
            .replace("0.25", "0.1"),
    );
    let r = p.run(&["run", "tiny.lua", "--json"]);
    let events = r.events();
    let evals: Vec<(u64, bool)> = events
        .iter()
        .filter(|e| e["event"] == "eval")
        .map(|e| (e["step"].as_u64().unwrap(), e["metrics"]["test/loss"].is_f64()))
        .collect();
    assert_eq!(evals, [(2, false), (4, false), (6, false), (6, true)]);
    assert_eq!(r.err, "");
}

#[test]
fn steps_replace_epochs_too() {
    let p = tiny();
    p.file("tiny.lua", p.read("tiny.lua").replace("steps = 6", "epochs = 2"));
    let steps = |args: &[&str]| {
        p.run(&[&["run", "tiny.lua", "--json"], args].concat()).events().last().unwrap()["steps"].clone()
    };
    assert_eq!(steps(&[]), 12);
    assert_eq!(steps(&["--steps", "5"]), 5);
    assert_eq!(steps(&["--steps", "0"]), 0);
}

#[test]
fn a_loss_that_is_no_number_ends_the_run_with_the_step_and_a_cure() {
    let p = place();
    p.file("tiny.lua", TINY.replace("(error * error):mean()", "(error * error):mean() ^ 3"));
    let r = p.run(&["run", "tiny.lua", "--json", "--set", "lr=1e30"]);
    assert_eq!(r.status, Some(3));
    let events = r.events();
    let last = events.last().unwrap();
    assert_eq!(last["event"], "error");
    assert_eq!((&last["file"], &last["line"]), (&json!("tiny.lua"), &json!(13)));
    let message = last["message"].as_str().unwrap();
    assert!(message.contains(" at step 2; it was "), "{message}");
    assert!(last["hint"].as_str().unwrap().starts_with("try a lower learning rate (lr is 1"), "{last}");
    assert!(message.contains("; the first infinity comes from mul, shape {8} (tiny.lua:13); rows "), "{message}");
    assert!(r.err.starts_with("tiny.lua:13: the loss is "), "{}", r.err);
    let record = p.run_json(&format!("runs/{}", p.runs()[0]));
    assert_eq!(record["status"], "failed");
    assert!(record["error"].as_str().unwrap().contains("at step 2"));
}

#[test]
fn a_plain_script_runs_without_a_run_directory() {
    let p = place();
    p.file(
        "s.lua",
        "#!/usr/bin/env perilune\nlocal p = require('perilune').params { n = 2, seed = 0 }\nprint(p.n, p.seed)",
    );
    let r = p.run(&["s.lua", "--set", "n=5", "--seed", "7"]);
    assert_eq!((r.status, r.out.as_str(), r.err.as_str()), (Some(0), "5\t7\n", ""));
    assert!(p.runs().is_empty());
    let r = p.run(&["run", "s.lua", "--json", "--steps", "3"]);
    assert_eq!(r.status, Some(0));
    assert_eq!(kinds(&r.events()), ["warning", "start", "done"]);
    assert_eq!(r.err, "2\t0\nwarning: s.lua is a plain script: --steps had no effect\n");
    let r =
        p.run(&["run", "s.lua", "--precision", "bf16", "--memory-budget", "1GiB", "--on-nan", "skip", "--keep", "2"]);
    let idle = "--precision and --memory-budget and --on-nan and --keep had no effect";
    assert_eq!((r.status, r.out.as_str()), (Some(0), "2\t0\n"));
    assert_eq!(r.err, format!("warning: s.lua is a plain script: {idle}\n"));
}

#[test]
fn a_closed_output_pipe_neither_stops_the_run_nor_panics() {
    let p = tiny();
    let shell = |line: &str| {
        let line = line.replace("perilune", env!("CARGO_BIN_EXE_perilune"));
        let o = std::process::Command::new("sh").args(["-c", &line]).current_dir(p.dir.path()).output().unwrap();
        String::from_utf8(o.stderr).unwrap()
    };
    assert_eq!(shell("perilune reference | true"), "");
    assert_eq!(shell("perilune run tiny.lua --json --steps 3000 --run-dir r | head -n 1"), "");
    assert_eq!(p.run_json("r")["status"], "done");
}

/// `pl.load` finds a saved file under the same relative path, even if the script's folder has a file of that name.
#[test]
fn load_finds_what_save_wrote() {
    let p = place();
    std::fs::create_dir(p.path("sub")).unwrap();
    let text = |value: i64| {
        format!(
            "local pl = require 'perilune'\nlocal before = pl.load('w.npy'):item()\n\
             pl.save('w.npy', pl.tensor({value}))\nprint(before, pl.load('w.npy'):item())\n"
        )
    };
    p.file("make.lua", "local pl = require 'perilune'\npl.save('sub/w.npy', pl.tensor(1))\n");
    assert_eq!(p.run(&["run", "make.lua", "--allow-write=."]).status, Some(0));
    p.file("sub/script.lua", text(2));
    let r = p.run(&["run", "sub/script.lua", "--allow-write", "."]);
    assert_eq!((r.out.as_str(), r.err.as_str()), ("1\t2\n", ""), "beside the recipe at first, then where it was saved");
    assert_eq!(p.run(&["run", "sub/script.lua", "--allow-write", "."]).out, "2\t2\n");
    assert!(p.path("w.npy").exists());
}

#[test]
fn out_of_memory_is_a_failure_that_names_the_owners_and_what_would_help() {
    let p = tiny();
    p.file(
        "wide.lua",
        TINY.replace("pl.nn.Linear(p.width, 1)", "pl.nn.Linear(4, 40000), pl.nn.Tanh(), pl.nn.Linear(40000, 1)"),
    );
    let r: support::Ran =
        p.command(&["run", "wide.lua", "--json"]).env("PERILUNE_MEMORY_LIMIT", "3MiB").output().unwrap().into();
    assert_eq!(r.status, Some(1), "{}", r.err);
    let last = r.events().pop().unwrap();
    assert_eq!(last["event"], "error");
    let text = format!("{last}");
    for part in ["out of memory", "of 3.0 MiB are in use", "largest owners", "weights", "wide.lua:", "what would help"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    let same = ["3M", "3MiB", "3145728"].map(|size| {
        let r: support::Ran =
            p.command(&["run", "wide.lua"]).env("PERILUNE_MEMORY_LIMIT", size).output().unwrap().into();
        assert!(r.status == Some(1) && r.err.contains("of 3.0 MiB are in use"), "{size}: {}", r.err);
        let r = p.run(&["ckpt", "export", "none", "w.safetensors", "--shard-size", size]);
        assert!(!r.err.contains("--shard-size"), "{size}: {}", r.err);
        r.status
    });
    assert_eq!(same, [same[0]; 3]);
    let r: support::Ran = p.command(&["run", "tiny.lua"]).env("PERILUNE_MEMORY_LIMIT", "lots").output().unwrap().into();
    assert_eq!(r.status, Some(2), "{}", r.err);
    assert!(r.err.contains("PERILUNE_MEMORY_LIMIT: \"lots\" is not an amount of memory"), "{}", r.err);
}

#[test]
fn a_memory_budget_is_kept_or_refused() {
    let p = tiny();
    let r = p.run(&["run", "tiny.lua", "--memory-budget", "1KiB"]);
    assert_eq!(r.status, Some(1), "{}", r.err);
    assert!(r.err.contains("memory_budget: the step needs ") && r.err.contains("the budget is 1.0 KiB"), "{}", r.err);
    // The error is at the line with the largest use.
    assert!(r.err.contains("tiny.lua:5:") && r.err.contains("f32 {64, 4}"), "{}", r.err);
    let r = p.run(&["run", "tiny.lua", "--memory-budget", "much"]);
    assert_eq!(r.status, Some(2), "{}", r.err);
    let weights = |args: &[&str]| p.run(args).events().last().unwrap()["weights"].to_string();
    let plain = weights(&["run", "tiny.lua", "--json"]);
    for size in ["1GiB", "512M", "512MiB", "1.5 GB", "1000000000"] {
        assert_eq!(weights(&["run", "tiny.lua", "--json", "--memory-budget", size]), plain, "{size}");
    }
    // A budget may be a param, with a number or a string as its default.
    for default in ["1 << 30", "2e9", "\"1GiB\""] {
        p.file("param.lua", TINY.replace("width = 4 }", &format!("width = 4, memory_budget = {default} }}")));
        for size in ["512M", "512MiB", "536870912"] {
            let set = format!("memory_budget={size}");
            assert_eq!(weights(&["run", "param.lua", "--json", "--set", &set]), plain, "{default}, {size}");
        }
        let r = p.run(&["run", "param.lua", "--set", "memory_budget=1K"]);
        assert!(r.err.contains("the budget is 1.0 KiB"), "{default}: {}", r.err);
    }
}
