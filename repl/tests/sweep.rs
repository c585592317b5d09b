//! Tests `perilune sweep`: grids, draws, successive halving, kills, failures, errors, output.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use std::collections::BTreeMap;
use std::process::Stdio;
use std::time::{Duration, Instant};
use support::{Place, Ran, TINY, place, tiny};

fn sweep(p: &Place, more: &[&str]) -> Ran {
    p.run(&[&["sweep", "tiny.lua"][..], more].concat())
}

/// The events of a sweep that has succeeded.
fn events(p: &Place, more: &[&str]) -> Vec<Value> {
    let r = sweep(p, &[&["--json"][..], more].concat());
    assert_eq!(r.status, Some(0), "{}", r.err);
    r.events()
}

fn of<'a>(events: &'a [Value], kind: &str) -> Vec<&'a Value> {
    events.iter().filter(|e| e["event"] == kind).collect()
}

/// The run directories of a sweep, with what their records say.
fn records(p: &Place, dir: &str) -> BTreeMap<String, Value> {
    let entries = std::fs::read_dir(p.path(dir)).unwrap().flatten().filter(|e| e.path().join("run.json").exists());
    // A run that starts has an empty record.
    let record = |e: std::fs::DirEntry| {
        let text = std::fs::read_to_string(e.path().join("run.json")).ok()?;
        Some((e.file_name().to_string_lossy().into_owned(), serde_json::from_str(&text).ok()?))
    };
    entries.filter_map(record).collect()
}

/// The weights of an ordinary run.
fn weights(p: &Place, args: &[&str]) -> String {
    let r = p.run(&[&["run", "tiny.lua", "--json", "--overwrite", "--run-dir", "alone"][..], args].concat());
    assert_eq!(r.status, Some(0), "{}", r.err);
    r.events().last().unwrap()["weights"].as_str().unwrap().to_string()
}

/// Writes the recipe with a step of that many million rounds of a loop, so that a kill finds it at work.
fn slow(p: &Place, millions: u32) {
    let wait = format!("for _ = 1, {millions}000000 do end\n  local error = model(batch.x)");
    p.file("tiny.lua", TINY.replace("local error = model(batch.x)", &wait));
}

#[test]
fn a_grid_trains_all_combinations_as_ordinary_runs() {
    let p = tiny();
    let all = events(&p, &["--set", "lr=0.1,0.01", "--set", "seed=1..3", "--run-dir", "s", "--jobs", "2"]);
    assert_eq!((of(&all, "sweep")[0]["trials"].as_u64(), of(&all, "trial").len()), (Some(6), 6));
    let summary = all.last().unwrap();
    assert_eq!(
        (&summary["event"], &summary["metric"], &summary["failed"]),
        (&"summary".into(), &"valid/loss".into(), &0.into())
    );
    let records = records(&p, "s");
    assert_eq!(records.len(), 6);
    for (k, group) in summary["groups"].as_array().unwrap().iter().enumerate() {
        let own = records
            .values()
            .filter(|r| r["params"]["lr"].as_f64().unwrap().to_string() == group["params"]["lr"].as_str().unwrap());
        let values: Vec<f64> = own.map(|r| r["metrics"]["valid/loss"].as_f64().unwrap()).collect();
        let mean = values.iter().sum::<f64>() / 3.0;
        let deviation = (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / 2.0).sqrt();
        // 4.3027: the quantile of Student's t for two degrees of freedom.
        let half = 4.3027 * deviation / 3f64.sqrt();
        assert_eq!(values.len(), 3);
        assert!((group["mean"].as_f64().unwrap() - mean).abs() < 1e-9 * mean.abs(), "{group}");
        assert!((group["half_width"].as_f64().unwrap() - half).abs() < 1e-4 * half, "{group} {half}");
        assert_eq!(group["best"], Value::Bool(k == 0), "a rate of 0.1 learns faster in 6 steps");
    }
    let alone = weights(&p, &["--set", "lr=0.01", "--set", "seed=2"]);
    assert_eq!(records["5-lr=0.01-seed=2"]["weights"], alone.as_str(), "{:?}", records.keys());
    // `perilune runs` lists them, and the same command finds nothing to do.
    assert_eq!(p.run(&["runs", "s", "--json"]).events().len(), 6);
    let again = events(&p, &["--set", "lr=0.1,0.01", "--set", "seed=1..3", "--run-dir", "s"]);
    assert_eq!((of(&again, "trial").len(), again.last().unwrap()), (0, summary));
    let other = sweep(&p, &["--set", "lr=0.1,0.02", "--run-dir", "s"]);
    assert_eq!(other.status, Some(2));
    assert!(other.err.contains("another sweep, --set differs") && other.err.contains("--resume s"), "{}", other.err);
}

#[test]
fn the_table_fits_its_terminal() {
    let p = tiny();
    let args = ["--set", "lr=0.1,0.01", "--set", "width=4", "--set", "seed=1,2", "--run-dir", "s", "--steps", "2"];
    let first = sweep(&p, &args);
    assert_eq!(first.status, Some(0), "{}", first.err);
    assert!(first.out.lines().next().unwrap().starts_with("4 runs of tiny.lua in s"), "{}", first.out);
    assert!(
        first.out.contains("(2 seeds)  ← best") && first.out.contains(" ± ") && !first.out.contains('\x1b'),
        "{}",
        first.out
    );
    for columns in [40, 80, 200] {
        let r: Ran = p
            .command(&[&["sweep", "tiny.lua"][..], &args].concat())
            .env("COLUMNS", columns.to_string())
            .env("CLICOLOR_FORCE", "1")
            .output()
            .unwrap()
            .into();
        let table: Vec<&str> = r.out.lines().filter(|l| l.contains("seeds") || l.contains("best")).collect();
        assert!(table.len() >= 2 && r.out.contains("\x1b[32m← best"), "{columns}: {}", r.out);
        assert!(table.iter().all(|l| console_width(l) <= columns), "{columns}: {}", r.out);
    }
}

/// The columns of a line without its styles.
fn console_width(line: &str) -> usize {
    let mut parts = line.split('\x1b');
    let first = parts.next().unwrap_or_default().chars().count();
    first + parts.map(|part| part.split_once('m').map_or(0, |(_, rest)| rest.chars().count())).sum::<usize>()
}

#[test]
fn a_terminal_shows_a_live_line_and_the_table() {
    use std::io::Read;
    let p = tiny();
    let (mut pty, pts) = pty_process::blocking::open().unwrap();
    pty.resize(pty_process::Size::new(30, 60)).unwrap();
    slow(&p, 6);
    let command = pty_process::blocking::Command::new(env!("CARGO_BIN_EXE_perilune"))
        .args(["sweep", "tiny.lua", "--set", "lr=0.1,0.01", "--run-dir", "s", "--jobs", "1"])
        .current_dir(p.dir.path())
        .env("TERM", "xterm")
        .env_remove("NO_COLOR");
    let mut child = command.spawn(pts).unwrap();
    let (mut text, mut buffer) = (Vec::new(), [0; 4096]);
    // Reading fails once the other end is closed.
    while let Ok(n @ 1..) = pty.read(&mut buffer) {
        text.extend_from_slice(&buffer[..n]);
    }
    assert!(child.wait().unwrap().success());
    let text = String::from_utf8_lossy(&text);
    assert!(text.contains("0/2 · lr=0.1 ") && text.contains("/6 loss "), "{text}");
    assert!(text.contains("(1 run)") && text.contains("← best"), "{text}");
}

#[test]
fn draws_are_those_of_their_seed() {
    let p = tiny();
    let args = ["--set", "lr=log:1e-3..1e-1", "--set", "seed=1,2", "--random", "3", "--steps", "2"];
    let points = |dir: &str, seed: &str| {
        let all = events(&p, &[&args[..], &["--seed", seed, "--run-dir", dir]].concat());
        let groups = all.last().unwrap()["groups"].as_array().unwrap().clone();
        assert!(groups.iter().all(|g| g["runs"] == 2), "every point has both seeds: {groups:?}");
        groups.iter().map(|g| g["params"]["lr"].as_str().unwrap().to_string()).collect::<Vec<_>>()
    };
    let first = points("a", "7");
    assert!(first.iter().all(|lr| (1e-3..=1e-1).contains(&lr.parse::<f64>().unwrap())), "{first:?}");
    assert_eq!(first, points("b", "7"));
    assert_ne!(first, points("c", "8"));
}

#[test]
fn halving_resumes_the_best_and_has_the_bits_of_whole_runs() {
    let p = tiny();
    p.file("tiny.lua", TINY.replace("{ lr = p.lr }", "{ lr = pl.optim.cosine { peak = p.lr, steps = p.steps } }"));
    let args = ["--set", "lr=0.1,0.05,0.001,0.0001", "--halving", "--eta", "2", "--steps", "12", "--run-dir", "s"];
    let all = events(&p, &args);
    let rungs: Vec<(u64, usize)> = of(&all, "rung")
        .iter()
        .map(|r| (r["until"].as_u64().unwrap(), r["points"].as_array().unwrap().len()))
        .collect();
    assert_eq!(rungs, [(3, 4), (6, 2), (12, 1)]);
    let records = records(&p, "s");
    let steps = |r: &Value| r["steps_done"].as_u64().unwrap();
    // 4 runs of 3 steps, 2 of 3 more, 1 of 6 more.
    assert_eq!(records.values().map(steps).sum::<u64>(), 12 + 6 + 6);
    let best = records.iter().find(|(_, r)| steps(r) == 12).unwrap();
    assert_eq!((best.1["resumed"].to_string(), &best.1["status"]), ("[3,6]".into(), &"done".into()));
    let lr = best.1["params"]["lr"].to_string();
    assert_eq!(best.1["weights"], weights(&p, &["--steps", "12", "--set", &format!("lr={lr}")]).as_str());
    let last = all.last().unwrap();
    let chosen = last["groups"].as_array().unwrap().iter().find(|g| g["best"] == true).unwrap().clone();
    assert_eq!(chosen["step"], 12, "{last}");
    // The same command decides as before, from what is on the disk.
    let again = events(&p, &args);
    assert_eq!((of(&again, "trial").len(), again.last().unwrap()), (0, last));
}

#[test]
fn until_stops_a_run_that_a_resume_continues_exactly() {
    let p = tiny();
    let whole = weights(&p, &["--steps", "9"]);
    let r = p.run(&["run", "tiny.lua", "--run-dir", "r", "--steps", "9", "--until", "4"]);
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""));
    assert!(r.out.contains("stopped at step 4 of 9 (--until)"), "{}", r.out);
    let record = p.run_json("r");
    assert_eq!((&record["status"], &record["steps_done"]), (&"interrupted".into(), &4.into()));
    assert!(record["metrics"]["valid/loss"].is_f64(), "it is evaluated there");
    assert_eq!(p.run(&["run", "tiny.lua", "--run-dir", "r", "--resume", "--until", "4", "--quiet"]).status, Some(0));
    assert_eq!(p.run(&["run", "tiny.lua", "--run-dir", "r", "--resume", "--until", "7", "--quiet"]).status, Some(0));
    assert_eq!(p.run(&["run", "tiny.lua", "--run-dir", "r", "--resume", "--quiet"]).status, Some(0));
    let record = p.run_json("r");
    assert_eq!((&record["status"], record["weights"].as_str()), (&"done".into(), Some(whole.as_str())));
}

#[test]
fn a_sweep_of_twenty_runs_is_killed_and_goes_on() {
    let p = place();
    slow(&p, 1);
    let args =
        ["sweep", "tiny.lua", "--set", "lr=0.1,0.01", "--set", "seed=1..10", "--run-dir", "s", "--jobs", "2", "--json"];
    let start = || {
        let more = ["--", "--checkpoint-every", "2"];
        p.command(&[&args[..], &more].concat()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    let wait_for = |n: usize| {
        let begun = Instant::now();
        while !p.path("s").is_dir() || records(&p, "s").values().filter(|r| r["status"] == "done").count() < n {
            assert!(begun.elapsed() < Duration::from_secs(60), "the sweep makes no progress");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    for done in [4, 9] {
        let mut child = start();
        wait_for(done);
        child.kill().unwrap();
        child.wait().unwrap();
    }
    // A stop by a signal leaves checkpoints, and says how to go on.
    let mut child = start();
    wait_for(13);
    assert!(std::process::Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(143));
    let before = records(&p, "s");
    let done: Vec<&String> = before.iter().filter(|(_, r)| r["status"] == "done").map(|(name, _)| name).collect();
    assert!(done.len() < 20, "the kills came too late to test anything");
    let r = p.run(&["sweep", "--resume", "s", "--jobs", "2", "--json"]);
    assert_eq!(r.status, Some(0), "{}", r.err);
    let after = records(&p, "s");
    assert_eq!((after.len(), r.events().last().unwrap()["failed"].as_u64()), (20, Some(0)));
    assert!(done.iter().all(|name| after[*name] == before[*name]), "finished runs stay as they are");
    for (lr, seed, name) in
        [("0.1", "1", "01-lr=0.1-seed=1"), ("0.1", "10", "10-lr=0.1-seed=10"), ("0.01", "4", "14-lr=0.01-seed=4")]
    {
        let alone = weights(&p, &["--set", &format!("lr={lr}"), "--set", &format!("seed={seed}")]);
        assert_eq!(after[name]["weights"], alone.as_str(), "{name}");
    }
    // Those that the signal stopped went on from their checkpoints.
    for (name, record) in before.iter().filter(|(_, r)| r["steps_done"].as_u64().is_some_and(|n| n > 0 && n < 6)) {
        let params = &record["params"];
        let set = [format!("lr={}", params["lr"]), format!("seed={}", params["seed"])];
        let alone = weights(&p, &["--set", &set[0], "--set", &set[1]]);
        assert_eq!(after[name]["weights"], alone.as_str(), "{name}");
        assert!(after[name]["resumed"].as_array().is_some_and(|r| !r.is_empty()), "{name}");
    }
    let hashes: std::collections::BTreeSet<&str> = after.values().map(|r| r["weights"].as_str().unwrap()).collect();
    assert_eq!(hashes.len(), 20);
}

#[test]
fn a_failed_run_ends_no_other_and_is_named() {
    let p = tiny();
    let r = sweep(&p, &["--set", "lr=0.1,1e30", "--set", "seed=1,2", "--run-dir", "s"]);
    assert_eq!(r.status, Some(1), "{}", r.err);
    assert!(r.out.contains("(2 seeds)") && r.out.contains("← best"), "{}", r.out);
    assert!(r.out.contains("(0 seeds, 2 failed)"), "{}", r.out);
    assert!(r.err.contains("3-lr=1e30-seed=1: ") && r.err.contains("4-lr=1e30-seed=2: "), "{}", r.err);
    let json = sweep(&p, &["--set", "lr=0.1,1e30", "--set", "seed=1,2", "--run-dir", "s", "--json"]);
    let last = json.events().pop().unwrap();
    assert_eq!((json.status, &last["failed"], &last["groups"][1]["mean"]), (Some(1), &2.into(), &Value::Null));
}

#[test]
fn wrong_arguments_are_refused_before_anything_runs() {
    let p = tiny();
    p.file("words.lua", TINY.replace("width = 4", "width = 4, names = 'a,b'"));
    for (args, rule) in [
        (&["tiny.lua", "--set", "lrr=1,2"][..], "Did you mean 'lr'?"),
        (&["tiny.lua", "--set", "lr=0.1"], "nothing varies"),
        (&["tiny.lua"], "nothing varies"),
        (&["tiny.lua", "--set", "seed=5..1"], "is empty"),
        (&["tiny.lua", "--set", "seed=1..1000000000"], "1000000000 combinations"),
        (&["tiny.lua", "--set", "lr=0.1..0.5"], "--random"),
        (&["tiny.lua", "--set", "lr=0.1,high"], "lr"),
        (&["tiny.lua", "--set", "lr=0.1,,0.2"], r"\,"),
        (&["tiny.lua", "--set", "lr=1,2", "--set", "lr=3"], "given twice"),
        (&["words.lua", "--set", "names=a,b"], r"write \,"),
        (&["tiny.lua", "--set", "lr=1,2", "--", "--run-dir", "x"], "the sweep sets it"),
        (&["tiny.lua", "--set", "lr=1,2", "--", "--devise", "cpu"], "--devise"),
        (&["tiny.lua", "--set", "steps=4,8", "--halving"], "steps cannot vary"),
        (&["none.lua", "--set", "lr=1,2"], "there is no file"),
        (&["--resume", "nowhere"], "there is no sweep"),
    ] {
        let r = p.run(&[&["sweep"][..], args].concat());
        assert_eq!(r.status, Some(2), "{args:?}: {}{}", r.out, r.err);
        assert!(r.err.contains(rule), "{args:?}: {}", r.err);
    }
    assert!(!p.path("runs").exists(), "nothing was written");
    let metric = sweep(&p, &["--set", "lr=0.1,0.2", "--metric", "valid/of", "--steps", "1"]);
    assert_eq!(metric.status, Some(2));
    assert!(metric.err.contains("Did you mean 'valid/off'?"), "{}", metric.err);
    // A sweep whose recipe was edited since would compare different recipes.
    assert_eq!(sweep(&p, &["--set", "lr=0.1,0.2", "--steps", "1", "--run-dir", "s"]).status, Some(0));
    p.file("tiny.lua", TINY.replace("batch(8)", "batch(4)"));
    let edited = p.run(&["sweep", "--resume", "s"]);
    assert!(edited.status == Some(2) && edited.err.contains("has changed since the sweep began"), "{}", edited.err);
}

#[test]
fn an_ablation_begins_with_its_baseline() {
    let p = place();
    let off = "lr = p.ablate == 'rate' and 0.0 or p.lr";
    p.file("tiny.lua", TINY.replace("width = 4", "width = 4, ablate = ''").replace("lr = p.lr", off));
    let all = events(&p, &["--set", "ablate=rate,other", "--run-dir", "s", "--metric", "valid/off:min"]);
    let groups = all.last().unwrap()["groups"].as_array().unwrap();
    let names: Vec<&str> = groups.iter().map(|g| g["params"]["ablate"].as_str().unwrap()).collect();
    assert_eq!(names, ["", "rate", "other"]);
    assert_eq!(all.last().unwrap()["metric"], "valid/off");
    assert!(groups[1]["mean"].as_f64() > groups[0]["mean"].as_f64(), "without a rate nothing is learnt");
    assert_eq!(groups[0]["mean"], groups[2]["mean"]);
}
