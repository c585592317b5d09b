//! Tests signals: the step is finished, the record is complete, and the exit status names the signal.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod support;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use support::{Place, TINY, place};

fn signal(child: &Child, name: &str) {
    assert!(Command::new("kill").args([name, &child.id().to_string()]).status().unwrap().success());
}

/// Starts an endless run and waits for its first steps.
fn endless(p: &Place) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut child = p
        .command(&["run", "tiny.lua", "--json", "--steps", "100000000", "--run-dir", "r"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("\"step\":2,") {
        line.clear();
        assert_ne!(out.read_line(&mut line).unwrap(), 0, "the run ended early");
    }
    (child, out)
}

fn wait(mut child: Child) -> (i32, Duration) {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return (status.code().unwrap_or(-1), start.elapsed());
        }
        assert!(start.elapsed() < Duration::from_secs(60), "it does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_signal_ends_the_run_after_the_step() {
    for (name, status) in [("-INT", 130), ("-TERM", 143)] {
        let p = place();
        p.file("tiny.lua", TINY);
        let (child, out) = endless(&p);
        signal(&child, name);
        let lines: Vec<String> = out.lines().map(Result::unwrap).collect();
        assert_eq!(wait(child).0, status);
        let last: serde_json::Value = serde_json::from_str(lines.last().unwrap()).unwrap();
        let warning: serde_json::Value = serde_json::from_str(&lines[lines.len() - 2]).unwrap();
        assert_eq!((last["event"].as_str(), last["status"].as_str()), (Some("done"), Some("interrupted")));
        assert_eq!(warning["event"], "warning");
        let record = p.run_json("r");
        assert_eq!(record["status"], "interrupted");
        assert_eq!(record["steps_done"], last["steps"]);
        assert_eq!(record["weights"], last["weights"]);
        let steps = p.read("r/metrics.jsonl").lines().filter(|l| l.contains("\"event\":\"step\"")).count() as u64;
        assert_eq!(last["steps"].as_u64(), Some(steps));
    }
}

#[test]
fn the_second_ctrl_c_ends_it_at_once() {
    let p = place();
    let slow = "print('in the step') local n = 0 for i = 1, 3e10 do n = n + i end\n  local error";
    p.file("tiny.lua", TINY.replace("local error", slow));
    let mut child = p
        .command(&["run", "tiny.lua", "--run-dir", "r"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while line != "in the step\n" {
        line.clear();
        assert_ne!(out.read_line(&mut line).unwrap(), 0, "the run ended early");
    }
    signal(&child, "-INT");
    // The message is printed at once, while the step continues.
    let mut err = BufReader::new(child.stderr.take().unwrap());
    line.clear();
    err.read_line(&mut line).unwrap();
    let said = "SIGINT: stopping after this step; a checkpoint will be written; Ctrl-C again stops at once\n";
    assert_eq!(line, said);
    assert!(child.try_wait().unwrap().is_none(), "the first one waits for the step");
    signal(&child, "-INT");
    let (status, time) = wait(child);
    assert_eq!(status, 130);
    assert!(time < Duration::from_secs(5));
}

/// The note is an event too, and the end names the checkpoint and a command that works as it stands.
#[test]
fn the_end_of_a_stopped_run_names_the_command_that_continues_it() {
    let p = place();
    // A step takes long enough to be stopped within.
    p.file("tiny.lua", TINY.replace("local error", "local n = 0 for i = 1, 1e7 do n = n + i end\n  local error"));
    for (name, dir) in [("-INT", None), ("-TERM", Some("my run"))] {
        let mut args = vec!["run", "tiny.lua", "--json", "--set", "lr=0.05", "--steps", "40"];
        args.extend(dir.iter().flat_map(|dir| ["--run-dir", dir]));
        let mut child = p.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("\"step\":2,") {
            line.clear();
            assert_ne!(out.read_line(&mut line).unwrap(), 0, "the run ended early");
        }
        signal(&child, name);
        let events: Vec<serde_json::Value> =
            out.lines().map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect();
        let all: support::Ran = child.wait_with_output().unwrap().into();
        let of =
            |kind: &str| events.iter().find(|e| e["event"] == kind).unwrap_or_else(|| panic!("{kind}: {events:?}"));
        let signal = format!("SIG{}", &name[1..]);
        assert_eq!(of("stopping")["signal"], signal.as_str());
        assert!(
            all.err.starts_with(&format!("{signal}: stopping after this step; a checkpoint will be")),
            "{}",
            all.err
        );
        let stopped = of("warning");
        let dir = dir.map_or_else(|| format!("runs/{}", p.runs()[0]), String::from);
        let checkpoint = format!("{dir}/checkpoints/step-{}", of("done")["steps"]);
        assert_eq!(stopped["checkpoint"], checkpoint.as_str());
        assert!(p.path(&checkpoint).exists());
        let command = stopped["continue"].as_str().unwrap();
        assert!(
            all.err.contains(&format!("its checkpoint is {checkpoint}\n  hint: to continue: {command}\n")),
            "{}",
            all.err
        );
        let r = Command::new("sh").args(["-c", command]).current_dir(p.dir.path()).output().unwrap();
        let r = support::Ran::from(r);
        assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{command}");
        let record = p.run_json(&dir);
        assert_eq!((&record["status"], &record["steps_done"]), (&"done".into(), &40.into()));
        assert_eq!(record["params"]["lr"], 0.05);
    }
}

/// Without `--watch` too.
#[test]
fn sighup_asks_for_a_look_at_the_recipe() {
    let p = place();
    p.file("tiny.lua", TINY);
    let (child, mut out) = endless(&p);
    p.file("tiny.lua", TINY.replace("lr = 0.1", "lr = 0.05"));
    signal(&child, "-HUP");
    let mut line = String::new();
    while !line.contains("\"event\":\"reload\"") {
        line.clear();
        assert_ne!(out.read_line(&mut line).unwrap(), 0, "the run ended early");
    }
    assert!(line.contains("\"ok\":true") && line.contains("lr 0.1 -> 0.05"), "{line}");
    signal(&child, "-INT");
    drop(out);
    assert_eq!(wait(child).0, 130);
}

/// Closing the terminal ends the run without losing a step.
#[test]
fn the_end_of_the_terminal_leaves_a_checkpoint() {
    let p = place();
    p.file("tiny.lua", TINY);
    // A child inherits an ignored SIGHUP (nohup); a signal that is caught here has its default action in the child.
    let caught = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGHUP, caught).unwrap();
    let (pty, pts) = pty_process::blocking::open().unwrap();
    let child = pty_process::blocking::Command::new(env!("CARGO_BIN_EXE_perilune"))
        .args(["run", "tiny.lua", "--quiet", "--steps", "100000000", "--run-dir", "r"])
        .current_dir(p.dir.path())
        .spawn(pts)
        .unwrap();
    let start = Instant::now();
    while !std::fs::read_to_string(p.path("r/metrics.jsonl")).is_ok_and(|log| log.contains("\"step\":2,")) {
        assert!(start.elapsed() < Duration::from_secs(60), "it does not begin");
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(pty);
    assert_eq!(wait(child).0, 129);
    let steps = p.run_json("r")["steps_done"].as_u64().unwrap();
    assert!(p.path(&format!("r/checkpoints/step-{steps}/run.json")).exists());
}

#[test]
fn a_plain_script_ends_at_the_first_signal() {
    let p = place();
    p.file("s.lua", "print('on')\nwhile true do end");
    let mut child = p.command(&["s.lua"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    signal(&child, "-INT");
    assert_eq!(wait(child).0, 130);
}
