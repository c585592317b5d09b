//! Tests which files the commands let a recipe open: the flags, `--set`, `check`, resume, replay and the prompt.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use std::os::unix::fs::symlink;
use std::process::Stdio;
use std::time::{Duration, Instant};
use support::{Place, place};

/// Trains on a table that a param names; what a hostile one adds goes into BUILD.
const TABLE: &str = r#"
local pl = require "perilune"
local recipe = pl.recipe { name = "table", params = { csv = "own.csv", out = "", lr = 0.1, steps = 4 } }
function recipe.data(p)
  local rows = pl.data.csv(p.csv)
  BUILD
  return { train = rows:tensors { x = { columns = { 0, 2 } }, y = { column = 2 } }:batch(2) }
end
function recipe.model() return pl.nn.Linear(2, 1) end
function recipe.optimizer(p, model) return pl.optim.SGD(model, { lr = p.lr }) end
function recipe.loss(model, batch)
  local error = model(batch.x):squeeze(-1) - batch.y
  return (error * error):mean()
end
return recipe
"#;

const ROWS: &str = "1,2,3\n4,5,6\n7,8,9\n0,1,2\n";

/// A place with a recipe in `work/`, from which commands start, and data in `big/`, which it may not read.
fn tree(build: &str) -> Place {
    let p = place();
    std::fs::create_dir_all(p.path("work")).unwrap();
    std::fs::create_dir_all(p.path("big")).unwrap();
    p.file("work/r.lua", TABLE.replace("BUILD", build));
    p.file("work/own.csv", ROWS);
    p.file("big/set.csv", ROWS);
    p
}

/// A record as releases before the seals wrote it, without a check of its text.
fn unsealed(mut record: Value) -> Value {
    let fields = record.as_object_mut().unwrap();
    fields.retain(|key, _| key != "blake3" && key != "id");
    record
}

fn run(p: &Place, args: &[&str]) -> support::Ran {
    p.command(args).current_dir(p.path("work")).output().unwrap().into()
}

#[test]
fn a_hostile_recipe_changes_nothing_in_check() {
    let p = tree(
        r#"local picture = pl.ones { 2, 2 }
        for _, path in ipairs { "../.profile", "../profile.png", ".profile", "link.png", "w.png", "../w.png" } do
          pcall(pl.data.save_png, path, picture)
          pcall(pl.save, path, picture)
        end
        pcall(pl.save, "w.npy", picture)"#,
    );
    for name in [".profile", "work/.profile", "profile.png"] {
        p.file(name, "echo start-up\n");
    }
    symlink("../.profile", p.path("work/link.png")).unwrap();
    let names = |dir: &str| {
        let mut out: Vec<_> = std::fs::read_dir(p.path(dir)).unwrap().flatten().map(|e| e.file_name()).collect();
        out.sort();
        out
    };
    let before = (names("."), names("work"));
    for flags in [&[][..], &["--allow-write=.."], &["--set", "out=w.png"]] {
        let r = run(&p, &[&["check", "r.lua"], flags].concat());
        assert_eq!(r.status, Some(0), "{}", r.err);
        assert_eq!((names("."), names("work")), before);
        for name in [".profile", "work/.profile", "profile.png"] {
            assert_eq!(p.read(name), "echo start-up\n");
        }
    }
}

/// A save that a run may make passes `check`; one that it may not is found there.
#[test]
fn check_finds_a_save_that_the_run_may_not_make() {
    let p = tree(r#"if p.out ~= "" then pl.save(p.out, pl.ones { 2 }) else pl.save("w.npy", pl.ones { 2 }) end"#);
    let r = run(&p, &["check", "r.lua"]);
    assert_eq!(r.status, Some(3));
    for part in
        ["r.lua:6: save: \"w.npy\" is not in a directory that may be written", "--allow-write=.", "--set out=FILE"]
    {
        assert!(r.err.contains(part), "{}", r.err);
    }
    assert_eq!(run(&p, &["run", "r.lua"]).status, Some(3));
    assert_eq!(run(&p, &["check", "r.lua", "--allow-write=."]).status, Some(0));
    assert_eq!(run(&p, &["check", "r.lua", "--set", "out=x.npy"]).status, Some(0));
    assert!(!p.path("work/w.npy").exists() && !p.path("work/x.npy").exists());
    let r = run(&p, &["run", "r.lua", "--set", "out=x.npy"]);
    assert_eq!(r.status, Some(0), "{}", r.err);
    assert!(p.path("work/x.npy").exists());
    assert_eq!(run(&p, &["run", "r.lua", "--allow-write", ".", "--run-dir", "runs/b"]).status, Some(0));
    assert!(p.path("work/w.npy").exists());
    let r = run(&p, &["run", "r.lua", "--allow-write=none"]);
    assert_eq!((r.status, r.err.contains("--allow-write: none: cannot open")), (Some(2), true), "{}", r.err);
}

#[test]
fn the_run_directory_may_be_written_once_it_is_there() {
    let p = tree("");
    let text = p.read("work/r.lua").replace("  local error", "  pl.save('kept/state.npy', pl.ones { 2 }) local error");
    p.file("work/r.lua", text);
    let r = run(&p, &["run", "r.lua", "--run-dir", "kept"]);
    assert_eq!(r.status, Some(0), "{}", r.err);
    assert!(p.path("work/kept/state.npy").exists());
    assert_eq!(run(&p, &["run", "r.lua", "--run-dir", "other"]).status, Some(3));
}

#[test]
fn data_elsewhere_are_read_when_an_argument_names_them() {
    let p = tree("");
    let big = p.path("big/set.csv").display().to_string();
    let set = format!("csv={big}");
    assert_eq!(run(&p, &["check", "r.lua", "--set", &set]).status, Some(0));
    assert_eq!(run(&p, &["check", "r.lua", "--set", "csv=../big/set.csv"]).status, Some(0));
    p.file("work/r.lua", p.read("work/r.lua").replace("own.csv", "../big/set.csv"));
    let r = run(&p, &["run", "r.lua"]);
    assert!(
        r.status == Some(3) && r.err.contains("hint: allow it on the command line: --allow-read=../big"),
        "{}",
        r.err
    );
    for flag in ["--allow-read=../big", "--allow-read=../big/set.csv"] {
        assert_eq!(run(&p, &["check", "r.lua", flag]).status, Some(0));
    }
    let r = run(&p, &["run", "r.lua", "--allow-read=../none"]);
    assert_eq!((r.status, r.err.contains("--allow-read: ../none: cannot open")), (Some(2), true), "{}", r.err);
}

/// A record says what was read; it opens nothing.
#[test]
fn a_resume_and_a_replay_read_nothing_for_their_record() {
    let p = tree("");
    let set = format!("csv={}", p.path("big/set.csv").display());
    let r = run(&p, &["run", "r.lua", "--set", &set, "--run-dir", "a", "--checkpoint-every=2"]);
    assert_eq!(r.status, Some(0), "{}", r.err);
    for args in
        [&["run", "r.lua", "--resume", "--run-dir", "a", "--steps", "6"][..], &["replay", "a", "--run-dir", "b"]]
    {
        let r = run(&p, args);
        assert_eq!(r.status, Some(3), "{args:?}: {}", r.err);
        assert!(r.err.contains("set.csv\" is not in a directory that may be read"), "{}", r.err);
    }
    let r = run(&p, &["replay", "a", "--run-dir", "c", "--allow-read=../big"]);
    assert_eq!(r.status, Some(0), "{}", r.err);
    let r = run(&p, &["run", "r.lua", "--resume", "--run-dir", "a", "--steps", "6", "--allow-read=../big"]);
    assert_eq!(r.status, Some(0), "{}", r.err);

    // Neither does a recorded flag, nor the folder of a recorded recipe.
    let mut record = unsealed(p.run_json("work/c"));
    let words = ["perilune", "run", "../big/r.lua", "--set", &set, "--allow-read=/"].map(Value::from);
    record["command"] = json!(words);
    p.file("work/c/run.json", record.to_string());
    let r = run(&p, &["replay", "c", "--run-dir", "d"]);
    assert!(r.status == Some(3) && r.err.contains("is not in a directory that may be read"), "{}", r.err);
}

#[test]
fn a_replay_reads_the_files_of_its_run_directory_only() {
    let p = tree("");
    assert_eq!(run(&p, &["run", "r.lua", "--run-dir", "a"]).status, Some(0));
    let whole = unsealed(p.run_json("work/a"));
    let hash = |text: &str| blake3::hash(text.as_bytes()).to_hex().to_string();
    p.file("big/evil.lua", "return 1");
    for name in ["../../../big/evil.lua", "linked.lua", "folder/evil.lua"] {
        let mut record = whole.clone();
        record["files"].as_array_mut().unwrap().push(json!({ "path": name, "blake3": hash("return 1") }));
        p.file("work/a/run.json", record.to_string());
        let _ = symlink("../../../big/evil.lua", p.path("work/a/recipe/linked.lua"));
        let _ = symlink("../../../big", p.path("work/a/recipe/folder"));
        let r = run(&p, &["replay", "a", "--run-dir", "b"]);
        assert!(
            matches!(r.status, Some(1 | 4)) && r.err.contains("evil.lua") | r.err.contains("linked.lua"),
            "{name}: {}",
            r.err
        );
        assert!(!p.path("work/b").exists());
    }
}

/// A run directory from elsewhere may hold links under the names that a resume writes.
#[test]
fn a_resume_writes_through_no_link() {
    let p = tree("");
    assert_eq!(run(&p, &["run", "r.lua", "--run-dir", "a", "--checkpoint-every=2"]).status, Some(0));
    p.file("victim", "mine");
    for name in [".run.json.new", ".metrics.jsonl.new"] {
        symlink("../../victim", p.path("work/a").join(name)).unwrap();
    }
    let r = run(&p, &["run", "r.lua", "--resume", "--run-dir", "a", "--steps", "6"]);
    assert_eq!(r.status, Some(0), "{}", r.err);
    assert_eq!(p.read("victim"), "mine");
    let _ = std::fs::remove_file(p.path("work/a/ledger.jsonl"));
    symlink("../../victim", p.path("work/a/ledger.jsonl")).unwrap();
    let r = run(&p, &["run", "r.lua", "--resume", "--run-dir", "a", "--steps", "8"]);
    assert!(r.status != Some(0), "{}", r.err);
    assert_eq!(p.read("victim"), "mine");
}

#[test]
fn a_fifo_in_place_of_a_recipe_is_refused_at_once() {
    let p = tree("");
    for name in ["work/pipe.lua", "work/pipe.csv"] {
        assert!(std::process::Command::new("mkfifo").arg(p.path(name)).status().unwrap().success());
    }
    let begun = Instant::now();
    for args in [
        &["run", "pipe.lua"][..],
        &["check", "pipe.lua"],
        &["profile", "pipe.lua"],
        &["run", "r.lua", "--set", "csv=pipe.csv"],
        &["check", "r.lua", "--set", "csv=pipe.csv"],
    ] {
        let r = run(&p, args);
        assert!(
            matches!(r.status, Some(2 | 3)) && r.err.contains("is a FIFO; a regular file is needed"),
            "{args:?}: {}",
            r.err
        );
    }
    assert!(begun.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_prompt_without_a_recipe_has_the_current_directory() {
    let p = tree("");
    let say = |lines: &str, args: &[&str]| {
        use std::io::Write;
        let mut c = p.command(&[&["repl"], args].concat());
        let c = c.current_dir(p.path("work")).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = c.spawn().unwrap();
        child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
        support::Ran::from(child.wait_with_output().unwrap())
    };
    let r = say("pl.save('w.npy', pl.ones({3}))\npl.load('w.npy'):size(0)\n", &[]);
    assert!(r.status == Some(0) && r.out.ends_with("3\n"), "{} {}", r.out, r.err);
    let r = say("pl.data.csv('../big/set.csv')\n", &[]);
    assert!(r.status == Some(3) && r.err.contains("--allow-read=../big"), "{} {}", r.out, r.err);
    assert_eq!(say("pl.data.csv('../big/set.csv')\n", &["--allow-read=../big"]).status, Some(0));
}
