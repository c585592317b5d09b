//! Tests the record of the data that a run read: what `run.json` says of it, and what a resume and a replay compare.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use std::path::Path;
use std::time::{Duration, SystemTime};
use support::{Place, Ran, place, save};

/// Trains on a table, a folder of images and an array; what a test adds goes into BUILD and STEP.
const RECIPE: &str = r#"
local pl = require "perilune"
local recipe = pl.recipe { name = "table", params = { csv = "own.csv", lr = 0.1, steps = 4 } }
function recipe.data(p)
  local rows = pl.data.csv(p.csv)
  BUILD
  return { train = rows:tensors { x = { columns = { 0, 2 } }, y = { column = 2 } }:batch(2) }
end
function recipe.model() return pl.nn.Linear(2, 1) end
function recipe.optimizer(p, model) return pl.optim.SGD(model, { lr = p.lr }) end
local steps = 0
function recipe.loss(model, batch)
  steps = steps + 1
  STEP
  local error = model(batch.x):squeeze(-1) - batch.y
  return (error * error):mean()
end
return recipe
"#;

const ROWS: &str = "1,2,3\n4,5,6\n7,8,9\n0,1,2\n";
/// As many bytes.
const OTHER: &str = "1,2,3\n4,5,6\n7,8,8\n0,1,2\n";

fn with(build: &str, step: &str) -> Place {
    let p = place();
    p.file("r.lua", RECIPE.replace("BUILD", build).replace("STEP", step));
    p.file("own.csv", ROWS);
    p
}

fn trained(build: &str) -> Place {
    let p = with(build, "");
    ok(&p.run(&["run", "r.lua", "--run-dir", "a", "--checkpoint-every", "2"]));
    p
}

#[track_caller]
fn ok(r: &Ran) {
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{}", r.out);
}

fn resume(p: &Place, more: &[&str]) -> Ran {
    p.run(&[&["run", "r.lua", "--run-dir", "a", "--resume", "--steps", "6", "--json"], more].concat())
}

fn entry(p: &Place, dir: &str, path: &str) -> Value {
    let record = p.run_json(dir);
    let data = record["data"].as_array().unwrap();
    data.iter().find(|e| e["path"] == path).unwrap_or_else(|| panic!("{path}: {data:?}")).clone()
}

fn time_of(path: &Path) -> SystemTime {
    path.metadata().unwrap().modified().unwrap()
}

fn set_time(path: &Path, time: SystemTime) {
    std::fs::File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
}

/// Replaces a file and keeps its time of modification.
fn replace_unseen(p: &Place, name: &str, text: &str) {
    let time = time_of(&p.path(name));
    p.file(name, text);
    set_time(&p.path(name), time);
}

fn touch(p: &Place, name: &str) {
    set_time(&p.path(name), SystemTime::now() - Duration::from_secs(1000));
}

fn copy_images(p: &Place, to: &str) {
    let from = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/images/folder");
    assert!(std::process::Command::new("cp").arg("-r").arg(from).arg(p.path(to)).status().unwrap().success());
}

fn images(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut out = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        match entry.path() {
            path if path.is_dir() => out.extend(images(&path)),
            path => out.push(path),
        }
    }
    out.sort();
    out
}

#[test]
fn a_record_names_the_data_with_their_hashes() {
    let p = with(
        r#"pl.data.images("pictures", { pixels = 8 })
           pl.data.images("pictures", { pixels = 4 })
           pl.load("sub/../one.npy")
           pl.save("made.npy", pl.ones { 2 })
           pl.load("made.npy")
           require "part""#,
        r#"if steps == 3 then pl.load("late.npy") end"#,
    );
    copy_images(&p, "pictures");
    std::fs::create_dir(p.path("sub")).unwrap();
    p.file("part.lua", "return 1");
    p.file(
        "make.lua",
        "local pl = require 'perilune' pl.save('one.npy', pl.ones { 3 }) pl.save('late.npy', pl.ones { 4 })",
    );
    ok(&p.run(&["run", "make.lua", "--allow-write=."]));
    ok(&p.run(&["run", "r.lua", "--run-dir", "a", "--allow-write=."]));
    let record = p.run_json("a");
    let paths: Vec<&str> = record["data"].as_array().unwrap().iter().map(|e| e["path"].as_str().unwrap()).collect();
    // Neither modules nor what the recipe has written.
    assert_eq!(paths, ["own.csv", "pictures", "sub/../one.npy", "late.npy"]);
    for (path, file, since) in
        [("own.csv", "own.csv", None), ("sub/../one.npy", "one.npy", None), ("late.npy", "late.npy", Some(3))]
    {
        let (entry, bytes) = (entry(&p, "a", path), std::fs::read(p.path(file)).unwrap());
        assert_eq!(entry["bytes"], bytes.len());
        assert_eq!(entry["blake3"], blake3::hash(&bytes).to_hex().as_str());
        let time = time_of(&p.path(file)).duration_since(SystemTime::UNIX_EPOCH).unwrap();
        assert_eq!(entry["mtime_ns"].as_u64(), u64::try_from(time.as_nanos()).ok());
        assert_eq!(entry["since"].as_u64(), since, "{path}");
    }
    let folder = entry(&p, "a", "pictures");
    let is_image = |path: &&std::path::PathBuf| {
        path.extension().is_some_and(|e| ["png", "jpg", "JPG", "jpeg"].iter().any(|known| e == *known))
    };
    let found = images(&p.path("pictures"));
    let bytes: u64 = found.iter().filter(is_image).map(|f| f.metadata().unwrap().len()).sum();
    assert_eq!((folder["files"].as_u64(), folder["bytes"].as_u64()), (Some(19), Some(bytes)));
    assert_eq!(folder["blake3"].as_str().map(str::len), Some(64));
    // The hash depends on the names and sizes alone.
    ok(&p.run(&["run", "r.lua", "--run-dir", "b", "--allow-write=."]));
    assert_eq!(entry(&p, "b", "pictures"), folder);
    // The same with a failure in the first step, which does not wait for hashes.
    p.file("r.lua", RECIPE.replace("BUILD", "").replace("STEP", "error('no')"));
    assert_eq!(p.run(&["run", "r.lua", "--run-dir", "c"]).status, Some(3));
    assert_eq!(entry(&p, "c", "own.csv")["bytes"], ROWS.len());
}

#[test]
fn a_resume_on_changed_data_is_refused_before_it_trains() {
    for (text, whole, rule) in [
        (format!("{ROWS}5,5,5\n"), &[][..], "it had 24 bytes, and has 30"),
        (OTHER.to_string(), &[], "its content differs"),
        (OTHER.to_string(), &["--verify-data"], "its content differs"),
    ] {
        let p = trained("");
        let (record, log) = (p.read("a/run.json"), p.read("a/metrics.jsonl"));
        match whole {
            [] => p.file("own.csv", &text),
            _ => replace_unseen(&p, "own.csv", &text),
        }
        let r = resume(&p, whole);
        assert_eq!(r.status, Some(4), "{}", r.out);
        let message = format!(
            "\"own.csv\" is not the data that the run read: {rule}\n  hint: restore it; --resume --changed-data"
        );
        assert!(r.err.contains(&message), "{message}: {}", r.err);
        assert!(!r.out.contains("\"event\":\"step\"") && !r.out.contains("\"event\":\"start\""), "{}", r.out);
        assert_eq!((p.read("a/run.json"), p.read("a/metrics.jsonl")), (record, log));
        // Equal size and time count as unchanged.
        if !whole.is_empty() {
            ok(&resume(&p, &[]));
        }
    }
    // A copy is the same data.
    let p = trained("");
    touch(&p, "own.csv");
    ok(&resume(&p, &[]));
    let time = time_of(&p.path("own.csv")).duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let now = entry(&p, "a", "own.csv");
    assert_eq!(now["mtime_ns"].as_u64(), u64::try_from(time.as_nanos()).ok());
    assert!(now["changed"].is_null() && now["blake3"].is_string(), "{now}");
    ok(&p.run(&["replay", "a", "--run-dir", "again", "--quiet"]));
    ok(&resume(&p, &["--verify-data"]));
    let r = p.run(&["run", "r.lua", "--verify-data"]);
    assert!(r.status == Some(2) && r.err.contains("--resume"), "{}", r.err);
}

#[test]
fn a_resume_with_changed_data_records_them() {
    let p = trained("");
    p.file("own.csv", OTHER);
    let r = resume(&p, &["--changed-data"]);
    let warning = "warning: \"own.csv\" is not the data that the run read: its content differs\n";
    assert_eq!((r.status, r.err.as_str()), (Some(0), warning));
    assert!(r.events().iter().any(|e| e["event"] == "warning" && e["message"].as_str().unwrap().contains("own.csv")));
    let now = entry(&p, "a", "own.csv");
    assert_eq!(
        (&now["blake3"], &now["changed"]),
        (&blake3::hash(OTHER.as_bytes()).to_hex().as_str().into(), &true.into())
    );
    // From here on these are its data; but a replay would need both.
    let r = p.run(&["run", "r.lua", "--run-dir", "a", "--resume", "--steps", "8"]);
    ok(&r);
    let r = p.run(&["replay", "a", "--run-dir", "b"]);
    assert!(
        r.status == Some(4)
            && r.err.contains("\"own.csv\" is not the data that the run read: it was changed during the run"),
        "{}",
        r.err
    );
    assert!(!p.path("b").exists());
}

#[test]
fn a_replay_on_changed_data_is_refused_before_it_trains() {
    let p = trained("");
    p.file("own.csv", OTHER);
    let r = p.run(&["replay", "a", "--run-dir", "b"]);
    assert_eq!(r.status, Some(4), "{}", r.out);
    let message = "\"own.csv\" is not the data that the run read: its content differs\n  hint: restore it: a replay needs the data";
    assert!(r.err.contains(message), "{}", r.err);
    assert!(!p.path("b").exists());
    p.file("own.csv", ROWS);
    ok(&p.run(&["replay", "a", "--run-dir", "b"]));
    replace_unseen(&p, "own.csv", OTHER);
    let r = p.run(&["replay", "a", "--run-dir", "c", "--verify-data"]);
    assert!(r.status == Some(4) && r.err.contains(message), "{}", r.err);
    // Without a look at the content, the weights show it at the end.
    set_time(&p.path("own.csv"), {
        let recorded = entry(&p, "a", "own.csv")["mtime_ns"].as_u64().unwrap();
        SystemTime::UNIX_EPOCH + Duration::from_nanos(recorded)
    });
    let r = p.run(&["replay", "a", "--run-dir", "d"]);
    assert!(r.status == Some(4) && r.err.contains("the weights differ"), "{}", r.err);
}

#[test]
fn a_changed_folder_is_found_by_names_and_sizes() {
    let change: [(&str, fn(&Path)); 4] = [
        ("it had 19 files, and has 18", |image| std::fs::remove_file(image).unwrap()),
        ("the names or sizes of its files differ", |image| {
            std::fs::rename(image, image.with_file_name("zzz.png")).unwrap()
        }),
        ("the names or sizes of its files differ", |image| {
            let mut bytes = std::fs::read(image).unwrap();
            bytes.push(0);
            std::fs::write(image, bytes).unwrap();
        }),
        // Not in the names or sizes.
        ("", |image| set_time(image, SystemTime::now())),
    ];
    for (rule, change) in change {
        let p = with("pl.data.images('pictures', { pixels = 8 })", "");
        copy_images(&p, "pictures");
        ok(&p.run(&["run", "r.lua", "--run-dir", "a"]));
        let found = images(&p.path("pictures"));
        change(found.iter().find(|f| f.extension().is_some_and(|e| e == "png")).unwrap());
        let r = resume(&p, &[]);
        match rule {
            "" => ok(&r),
            rule => {
                let message = format!("\"pictures\" is not the data that the run read: {rule}");
                assert!(r.status == Some(4) && r.err.contains(&message), "{rule}: {}", r.err);
            }
        }
    }
}

/// Shards of an index are data too.
#[test]
fn shards_are_compared() {
    let p = with("pl.load('w.safetensors.index.json')", "");
    for (name, value) in [("m-1", 1), ("m-2", 2)] {
        p.file(
            "make.lua",
            format!(
                "local pl = require 'perilune' pl.save('{name}.safetensors', {{ ['{name}'] = pl.tensor({value}.0) }})"
            ),
        );
        ok(&p.run(&["run", "make.lua", "--allow-write=."]));
    }
    p.file("w.safetensors.index.json", r#"{"weight_map": {"m-1": "m-1.safetensors", "m-2": "m-2.safetensors"}}"#);
    ok(&p.run(&["run", "r.lua", "--run-dir", "a"]));
    p.file("make.lua", "local pl = require 'perilune' pl.save('m-2.safetensors', { ['m-2'] = pl.tensor(3.0) })");
    ok(&p.run(&["run", "make.lua", "--allow-write=."]));
    let r = resume(&p, &[]);
    let message = "\"m-2.safetensors\" is not the data that the run read: its content differs";
    assert!(r.status == Some(4) && r.err.contains(message), "{}", r.err);
}

/// A file in place of another is named; a record of an older release has nothing to compare.
#[test]
fn other_files_are_named() {
    let p = trained("");
    p.file("other.csv", OTHER);
    let r = resume(&p, &["--set", "csv=other.csv"]);
    let warning = "warning: the run read \"own.csv\", and the recipe does not now; it reads \"other.csv\" instead\n";
    assert_eq!((r.status, r.err.as_str()), (Some(0), warning));
    assert_eq!(entry(&p, "a", "other.csv")["since"], 4, "the step of the checkpoint");
    ok(&p.run(&["replay", "a", "--run-dir", "b", "--quiet"]));

    let p = trained("");
    let mut record = p.run_json("a").as_object().unwrap().clone();
    record.shift_remove("data");
    record.shift_remove("blake3");
    p.file("a/run.json", perilune_checkpoint::seal::seal(record));
    p.file("own.csv", OTHER);
    ok(&resume(&p, &[]));
    assert_eq!(entry(&p, "a", "own.csv")["blake3"], blake3::hash(OTHER.as_bytes()).to_hex().as_str());
}

/// An edit that reads a file again, which has another content by now, says so. A new time alone is no change.
#[test]
fn an_edit_that_reads_changed_data_says_so() {
    let p = with("", "");
    let endless = ["--set", "steps=100000000", "--set", "lr=0.0001"];
    let args = [&["run", "r.lua", "--run-dir", "a", "--json", "--watch"], &endless[..]].concat();
    let mut run = support::Running::start(&p, &args);
    run.until(2);
    let hashed = || entry(&p, "a", "own.csv")["blake3"].is_string();
    while !hashed() {
        run.next("step");
    }
    touch(&p, "own.csv");
    save(&p, "r.lua", &RECIPE.replace("BUILD", "-- one").replace("STEP", ""));
    let applied = run.next("reload");
    assert_eq!(applied["ok"], true, "{applied}");
    run.until(applied["step"].as_u64().unwrap() + 200);
    assert!(entry(&p, "a", "own.csv")["changed"].is_null());
    p.file("own.csv", OTHER);
    save(&p, "r.lua", &RECIPE.replace("BUILD", "-- two").replace("STEP", ""));
    let warning = run.next("warning");
    assert!(
        warning["message"].as_str().unwrap().starts_with("\"own.csv\" has changed since the run read it"),
        "{warning}"
    );
    run.signal("-INT");
    run.next("checkpoint");
    run.child.wait().unwrap();
    assert_eq!(entry(&p, "a", "own.csv")["changed"], true);
    let r = p.run(&["replay", "a", "--run-dir", "b"]);
    assert!(r.status == Some(4) && r.err.contains("it was changed during the run"), "{}", r.err);
}

/// Data that an edit reads are compared when a replay applies it.
#[test]
fn a_replay_compares_the_data_of_an_edit() {
    let p = with("", "");
    p.file("more.csv", ROWS);
    let endless = ["--set", "steps=100000000", "--set", "lr=0.0001"];
    let args = [&["run", "r.lua", "--run-dir", "a", "--json", "--watch"], &endless[..]].concat();
    let mut run = support::Running::start(&p, &args);
    run.until(2);
    save(&p, "r.lua", &RECIPE.replace("BUILD", "pl.data.csv('more.csv')").replace("STEP", ""));
    let applied = run.next("reload");
    assert_eq!(applied["ok"], true, "{applied}");
    let after = applied["step"].as_u64().unwrap() + 2;
    run.until(after);
    run.signal("-INT");
    run.next("checkpoint");
    assert_eq!(run.child.wait().unwrap().code(), Some(130));
    let more = entry(&p, "a", "more.csv");
    assert!(more["since"].as_u64() >= applied["step"].as_u64(), "{more}");
    ok(&p.run(&["replay", "a", "--run-dir", "b", "--quiet"]));
    p.file("more.csv", OTHER);
    let r = p.run(&["replay", "a", "--run-dir", "c", "--quiet"]);
    assert!(r.status == Some(4) && r.err.contains("\"more.csv\" is not the data that the run read: "), "{}", r.err);
}

/// A tree with a recipe in a folder, data beside it and in the directory where the run is started.
fn tree() -> Place {
    let p = place();
    for folder in ["work/recipes", "elsewhere/below", "outside"] {
        std::fs::create_dir_all(p.path(folder)).unwrap();
    }
    let build = "pl.data.csv('beside.csv') pl.data.csv('data.csv')";
    p.file("work/recipes/r.lua", RECIPE.replace("BUILD", build).replace("STEP", ""));
    p.file("work/own.csv", ROWS);
    p.file("work/data.csv", ROWS);
    p.file("work/recipes/beside.csv", ROWS);
    let r: Ran =
        p.command(&["run", "recipes/r.lua", "--run-dir", "a"]).current_dir(p.path("work")).output().unwrap().into();
    ok(&r);
    p
}

#[test]
fn a_replay_works_from_any_directory() {
    let p = tree();
    let work = p.path("work").canonicalize().unwrap().display().to_string();
    let run = p.path("work/a").display().to_string();
    let replay = |from: &str, more: &[&str]| -> Ran {
        let out = p.path("out").display().to_string();
        let args = [&["replay", &run, "--run-dir", &out], more].concat();
        let r = p.command(&args).current_dir(p.path(from)).output().unwrap().into();
        let _ = std::fs::remove_dir_all(&out);
        r
    };
    // The directory of the start, and one above it, contain the recipe.
    ok(&replay("work", &[]));
    ok(&replay(".", &[]));
    // From elsewhere the record grants nothing; the error names the flag, which is enough.
    for from in ["elsewhere", "elsewhere/below", "work/recipes", "outside"] {
        let r = replay(from, &[]);
        let flag = format!("--allow-read={work}");
        match from {
            // It contains the recipe, but not the data beside the run's start.
            "work/recipes" => assert!(r.status == Some(3) && r.err.contains(&flag), "{from}: {}", r.err),
            _ => {
                assert_eq!(r.status, Some(3), "{from}: {}", r.err);
                assert!(r.err.contains("\"own.csv\" is not in a directory that may be read"), "{from}: {}", r.err);
                assert!(r.err.contains(&flag), "{from}: {}", r.err);
            }
        }
        let r = replay(from, &[&flag]);
        ok(&r);
        assert!(r.out.contains("the weights equal those of the run"), "{}", r.out);
    }
    // A relative flag starts from the current directory, and so does the directory of results.
    ok(&replay("elsewhere/below", &["--allow-read=../../work"]));
    let r: Ran = p
        .command(&["replay", "../work/a", "--allow-read=../work"])
        .current_dir(p.path("outside"))
        .output()
        .unwrap()
        .into();
    ok(&r);
    assert_eq!(std::fs::read_dir(p.path("outside/runs")).unwrap().count(), 1);
    assert!(!p.path("work/runs").exists());
    // Files of the same names in the current directory are not taken for those of the run.
    for file in ["own.csv", "data.csv", "beside.csv"] {
        p.file(&format!("elsewhere/{file}"), OTHER);
    }
    ok(&replay("elsewhere", &[&format!("--allow-read={work}")]));
    assert_eq!(replay("elsewhere", &[]).status, Some(3));
    // A tree that has been moved.
    std::fs::rename(p.path("work"), p.path("moved")).unwrap();
    let r: Ran = p.command(&["replay", "a", "--run-dir", "b"]).current_dir(p.path("moved")).output().unwrap().into();
    assert_eq!(r.status, Some(0), "{}", r.err);
    assert!(r.err.contains("which is not there; relative paths now start at "), "{}", r.err);
}

/// A record that names another directory opens nothing there.
#[test]
fn a_recorded_directory_grants_nothing() {
    let p = tree();
    p.file("outside/own.csv", OTHER);
    let mut record = p.run_json("work/a").as_object().unwrap().clone();
    for (directory, from) in [("outside", "work"), ("outside", "elsewhere"), ("work", "outside")] {
        record.insert("directory".into(), p.path(directory).canonicalize().unwrap().display().to_string().into());
        record.shift_remove("blake3");
        p.file("work/a/run.json", perilune_checkpoint::seal::seal(record.clone()));
        let run = p.path("work/a").display().to_string();
        let r: Ran = p.command(&["replay", &run, "--run-dir", "b"]).current_dir(p.path(from)).output().unwrap().into();
        assert_eq!(r.status, Some(3), "{directory} from {from}: {}{}", r.out, r.err);
        assert!(r.err.contains("is not in a directory that may be read"), "{}", r.err);
        assert!(!p.path(from).join("b").exists());
    }
}
