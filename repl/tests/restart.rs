//! Tests how a run begins in a directory that holds another one: `--overwrite`, and `--resume` where there is no checkpoint.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod support;

use std::process::Stdio;
use support::{Place, Ran, Running, TINY, place, tiny};

const RESUME: [&str; 5] = ["run", "tiny.lua", "--run-dir", "r", "--resume"];
const OVERWRITE: [&str; 5] = ["run", "tiny.lua", "--run-dir", "r", "--overwrite"];

fn weights(p: &Place, dir: &str) -> String {
    p.run_json(dir)["weights"].as_str().unwrap().to_string()
}

#[track_caller]
fn ok(r: &Ran) {
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{}", r.out);
}

/// The weights of a run that nothing has disturbed.
fn undisturbed(p: &Place) -> String {
    ok(&p.run(&["run", "tiny.lua", "--run-dir", "undisturbed", "--quiet"]));
    weights(p, "undisturbed")
}

/// Makes a run that fails in its third step, and repairs the recipe.
fn failed() -> Place {
    let p = tiny();
    let failing = "local steps = 0\nfunction recipe.loss(model, batch)\n  steps = steps + 1\n  if steps == 3 then error('no third step') end";
    p.file("tiny.lua", TINY.replace("function recipe.loss(model, batch)", failing));
    let r = p.run(&["run", "tiny.lua", "--run-dir", "r"]);
    assert_eq!((r.status, p.run_json("r")["status"].as_str()), (Some(3), Some("failed")), "{}", r.err);
    p.file("tiny.lua", TINY);
    p
}

#[test]
fn overwrite_starts_anew_and_keeps_foreign_files() {
    let p = failed();
    let expected = undisturbed(&p);
    // What a recipe or a person put into the directory of the run.
    for name in ["r/notes.txt", "r/tb/notes.txt", "r/recipe/notes.txt"] {
        p.file(name, "mine");
    }
    ok(&p.run(&OVERWRITE));
    assert_eq!(weights(&p, "r"), expected);
    // A run with checkpoints, an edit and a module.
    p.file("part.lua", "return 1");
    p.file("tiny.lua", format!("require 'part'\n{TINY}"));
    ok(&p.run(&[&OVERWRITE[..], &["--checkpoint-every", "1", "--keep", "0"]].concat()));
    ok(&p.run(&[&RESUME[..], &["--steps", "8", "--quiet"]].concat()));
    assert!(p.path("r/recipe/part.lua").exists() && p.path("r/checkpoints/step-8").exists());
    assert!(p.path("r/recipe@6").exists() && p.path("r/ledger.jsonl").exists());
    std::fs::create_dir(p.path("r/checkpoints/mine")).unwrap();
    p.file("tiny.lua", TINY);
    ok(&p.run(&OVERWRITE));
    assert_eq!(weights(&p, "r"), expected);
    assert!(!p.path("r/recipe/part.lua").exists() && !p.path("r/recipe@6").exists());
    assert!(!p.path("r/ledger.jsonl").exists() && !p.path("r/checkpoints/step-8").exists());
    assert_eq!(std::fs::read_dir(p.path("r/tb")).unwrap().count(), 2, "the file of this run and a foreign one");
    assert!(p.path("r/checkpoints/mine").exists());
    for name in ["r/notes.txt", "r/tb/notes.txt", "r/recipe/notes.txt"] {
        assert_eq!(p.read(name), "mine", "{name}");
    }
    ok(&p.run(&["replay", "r", "--quiet"]));
    // A directory that is not there, or is empty.
    std::fs::create_dir(p.path("empty")).unwrap();
    for dir in ["new", "empty"] {
        ok(&p.run(&["run", "tiny.lua", "--run-dir", dir, "--overwrite"]));
        assert_eq!(weights(&p, dir), expected);
    }
}

#[test]
fn overwrite_refuses_what_is_not_a_run() {
    let p = tiny();
    let refused = |dir: &str, message: &str| {
        let r = p.run(&["run", "tiny.lua", "--run-dir", dir, "--overwrite"]);
        assert_eq!(r.status, Some(2), "{dir}: {}", r.err);
        assert!(r.err.contains(&format!("--overwrite: {dir} is not the directory of a run: {message}")), "{}", r.err);
    };
    for dir in ["photos", "config", "list", "cut"] {
        std::fs::create_dir(p.path(dir)).unwrap();
        p.file(&format!("{dir}/precious"), "mine");
    }
    p.file("config/run.json", r#"{ "schema": 1, "command": "serve" }"#);
    p.file("list/run.json", "[1, 2]");
    p.file("cut/run.json", r#"{ "command": "#);
    refused("photos", "it has no run.json, but precious");
    for dir in ["config", "list", "cut"] {
        refused(dir, "its run.json is not the record of a run");
        let r = p.run(&["run", "tiny.lua", "--run-dir", dir, "--resume"]);
        assert!(r.status == Some(4) && r.err.contains("is not the record of a run"), "{}", r.err);
    }
    for dir in ["photos", "config", "list", "cut"] {
        assert_eq!(p.read(&format!("{dir}/precious")), "mine");
    }
    let r = p.run(&["run", "tiny.lua", "--overwrite"]);
    assert!(r.status == Some(2) && r.err.contains("--run-dir"), "{}", r.err);
    let r = p.run(&[&OVERWRITE[..], &["--resume"]].concat());
    assert!(r.status == Some(2) && r.err.contains("cannot be used with"), "{}", r.err);
}

/// A wrong recipe or a wrong argument deletes nothing.
#[test]
fn overwrite_deletes_only_when_training_can_start() {
    let p = tiny();
    ok(&p.run(&["run", "tiny.lua", "--run-dir", "r"]));
    let before = p.read("r/run.json");
    p.file("tiny.lua", TINY.replace("pl.nn.Linear(p.width, 1)", "pl.nn.Linaer(p.width, 1)"));
    assert_eq!(p.run(&OVERWRITE).status, Some(3));
    p.file("tiny.lua", TINY);
    assert_eq!(p.run(&[&OVERWRITE[..], &["--set", "lrr=1"]].concat()).status, Some(2));
    assert_eq!(p.read("r/run.json"), before);
    assert!(p.path("r/checkpoints/step-6").exists());
}

#[test]
fn overwrite_refuses_a_run_that_is_written() {
    let p = tiny();
    let mut run = Running::start(&p, &["run", "tiny.lua", "--run-dir", "r", "--steps", "100000000", "--json"]);
    run.until(2);
    for args in [&OVERWRITE, &RESUME] {
        let r = p.run(args);
        let message = format!("r: process {} on ", run.child.id());
        assert!(r.status == Some(2) && r.err.contains(&message) && r.err.contains("is writing this run"), "{}", r.err);
    }
    run.signal("-INT");
    run.next("checkpoint");
    assert_eq!(run.child.wait().unwrap().code(), Some(130));
}

/// Links among the names that are deleted lead nowhere.
#[test]
fn overwrite_follows_no_link() {
    for (name, status) in
        [("r/run.json", 4), ("r/tb", 4), ("r/checkpoints", 4), ("r/recipe", 4), ("r/metrics.jsonl", 0)]
    {
        let p = tiny();
        ok(&p.run(&["run", "tiny.lua", "--run-dir", "r"]));
        std::fs::create_dir_all(p.path("victim/step-1")).unwrap();
        for file in ["victim/tiny.lua", "victim/events.out.tfevents.1", "victim/step-1/run.json"] {
            p.file(file, "mine");
        }
        let at = p.path(name);
        let _ = std::fs::remove_file(&at).or_else(|_| std::fs::remove_dir_all(&at));
        let target = if name.ends_with("json") || name.ends_with("jsonl") { "victim/tiny.lua" } else { "victim" };
        std::os::unix::fs::symlink(p.path(target), &at).unwrap();
        let r = p.run(&OVERWRITE);
        assert_eq!(r.status, Some(status), "{name}: {}{}", r.out, r.err);
        for file in ["victim/tiny.lua", "victim/events.out.tfevents.1", "victim/step-1/run.json"] {
            assert_eq!(p.read(file), "mine", "{name}: {file}");
        }
    }
}

/// A restart script's first start, and starts after every early end, need no other flags.
#[test]
fn resume_without_a_checkpoint_starts_from_the_beginning() {
    let p = tiny();
    let expected = undisturbed(&p);
    let starts = |p: &Place, reason: &str| {
        let copy = format!("{}-json", p.dir.path().join("r").display());
        let copied = p.path("r").exists().then(|| {
            let status = std::process::Command::new("cp").args(["-r", "r", &copy]).current_dir(p.dir.path()).status();
            assert!(status.unwrap().success());
        });
        let r = p.run(&RESUME);
        ok(&r);
        let line = format!("starting from the beginning in r: {reason}");
        assert!(r.out.lines().any(|l| l == line), "{line}: {}", r.out);
        assert_eq!(weights(p, "r"), expected);
        // The same as an event.
        let dir = if copied.is_some() { copy.as_str() } else { "other" };
        let r = p.run(&["run", "tiny.lua", "--run-dir", dir, "--resume", "--json"]);
        let events = r.events();
        let event = events.iter().find(|e| e["event"] == "restart").unwrap_or_else(|| panic!("{}", r.out));
        assert_eq!((event["run_dir"].as_str(), event["reason"].as_str()), (Some(dir), Some(reason)));
        std::fs::remove_dir_all(p.path(dir)).unwrap();
        // Then there is a checkpoint.
        let r = p.run(&RESUME);
        ok(&r);
        assert!(r.out.contains("continuing from step 6 of r"), "{}", r.out);
        std::fs::remove_dir_all(p.path("r")).unwrap();
    };
    starts(&p, "there is no run in it yet");
    std::fs::create_dir(p.path("r")).unwrap();
    p.file("r/log.txt", "of the script");
    starts(&p, "there is no run in it yet");
    // Killed between the creation of run.json and its first content, or cut off by a power failure.
    let incomplete = "the run was killed as it started: its run.json is incomplete";
    for text in ["", "{\"schema\": 1, \"recipe\": \"ti", "\0\0\0\0"] {
        std::fs::create_dir(p.path("r")).unwrap();
        for (name, text) in [("run.json", text), (".lock", ""), ("log.txt", "of the script")] {
            p.file(&format!("r/{name}"), text);
        }
        starts(&p, incomplete);
    }
    std::fs::create_dir(p.path("r")).unwrap();
    p.file("r/run.json", "");
    starts(&p, incomplete);
    let p = failed();
    undisturbed(&p);
    starts(&p, "the run failed before its first checkpoint (tiny.lua:14: no third step)");
    // Killed.
    let p = tiny();
    undisturbed(&p);
    let mut run = Running::start(&p, &["run", "tiny.lua", "--run-dir", "r", "--steps", "100000000", "--json"]);
    run.until(2);
    run.child.kill().unwrap();
    run.child.wait().unwrap();
    let r = p.run(&[&RESUME[..], &["--steps", "6"]].concat());
    ok(&r);
    let line = "starting from the beginning in r: the run was killed before its first checkpoint";
    assert!(r.out.lines().any(|l| l == line), "{}", r.out);
    assert_eq!(weights(&p, "r"), expected);
}

/// What the run was given stays; defaults are those of the repaired recipe.
#[test]
fn a_restarted_run_keeps_its_params() {
    let p = tiny();
    let failing = TINY.replace("local error = ", "  error('no', 0)\n  local error = ");
    p.file("tiny.lua", &failing);
    let given = ["--set", "lr=0.05", "--steps", "4", "--seed", "9", "--precision", "bf16"];
    assert_eq!(p.run(&[&["run", "tiny.lua", "--run-dir", "r"][..], &given].concat()).status, Some(3));
    p.file("tiny.lua", TINY.replace("width = 4", "width = 4, momentum = 0.5"));
    // It fails again on the way: what was given is not lost.
    p.file("tiny.lua", failing.replace("width = 4", "width = 4, momentum = 0.5"));
    assert_eq!(p.run(&RESUME).status, Some(3));
    p.file("tiny.lua", TINY.replace("width = 4", "width = 4, momentum = 0.5"));
    ok(&p.run(&RESUME));
    let record = p.run_json("r");
    let params = &record["params"];
    assert_eq!((&params["lr"], &params["steps"], &params["seed"]), (&0.05.into(), &4.into(), &9.into()));
    assert_eq!((&params["momentum"], &record["precision"]), (&0.5.into(), &"bf16".into()));
    // The command of the restart has none of that; a replay finds it in the record.
    ok(&p.run(&["replay", "r", "--quiet"]));
}

/// A start would delete the log of such a run.
#[test]
fn a_run_whose_checkpoints_were_removed_is_not_restarted() {
    let p = tiny();
    ok(&p.run(&["run", "tiny.lua", "--run-dir", "r"]));
    std::fs::remove_dir_all(p.path("r/checkpoints")).unwrap();
    let before = p.read("r/metrics.jsonl");
    let r = p.run(&RESUME);
    assert_eq!(r.status, Some(2), "{}", r.out);
    assert!(r.err.contains("there is no checkpoint in r/checkpoints, but the run has written some"), "{}", r.err);
    assert_eq!(p.read("r/metrics.jsonl"), before);
    // A run with checkpoints whose record is lost is not restarted either.
    ok(&p.run(&OVERWRITE));
    p.file("r/run.json", "");
    let r = p.run(&RESUME);
    assert!(r.status == Some(4) && r.err.contains("r/run.json: is not the record of a run"), "{}", r.err);
    assert!(p.path("r/checkpoints/step-6").exists());
}

/// A shell script that always passes the same arguments ends with the weights of an undisturbed run, wherever it is killed.
#[test]
fn a_restart_script_never_sticks() {
    let p = place();
    p.file("tiny.lua", TINY.replace("steps = 6", "steps = 300"));
    ok(&p.run(&["run", "tiny.lua", "--run-dir", "undisturbed", "--quiet"]));
    let args = [&RESUME[..], &["--checkpoint-every", "50", "--quiet"]].concat();
    let mut kills = 0;
    // From before the directory exists to the last steps.
    for delay in (0..60).map(|k| 5 + 5 * k) {
        let mut child = p.command(&args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(delay));
        child.kill().unwrap();
        let r: Ran = child.wait_with_output().unwrap().into();
        assert_eq!(r.err, "", "killed after {delay} ms");
        kills += u32::from(r.status.is_none());
    }
    assert!(kills >= 3, "killed {kills} times only");
    ok(&p.run(&args));
    assert_eq!(weights(&p, "r"), weights(&p, "undisturbed"));
}
