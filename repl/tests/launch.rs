//! Tests `perilune launch` and `submit`: output of several processes, exit status, signals, job files.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use support::{TINY, place};

#[test]
fn process_0_prints_what_a_script_prints() {
    let p = place();
    p.file("hi.lua", "print('hi')\nprint('there')");
    let r = p.run(&["launch", "-n", "3", "--", "run", "hi.lua", "--device", "cpu", "--mesh", "dp=3"]);
    assert_eq!((r.status, r.out.as_str(), r.err.as_str()), (Some(0), "hi\nthere\n", ""));
}

#[test]
fn the_exit_status_is_that_of_the_processes() {
    let p = place();
    p.file("wrong.lua", "local x = nil\nprint(x.y)");
    let r = p.run(&["launch", "-n", "2", "--", "run", "wrong.lua"]);
    assert_eq!(r.status, Some(3));
    assert!(r.err.contains("wrong.lua:2:") && r.err.contains("ended with exit status 3"), "{}", r.err);
    for (args, message) in [
        (
            vec!["launch", "--", "run", "r.lua"],
            "error: launch needs the number of processes: perilune launch -n 2 -- run recipe.lua",
        ),
        (
            vec!["launch", "-n", "0", "--", "run", "r.lua"],
            "error: -n 0: the number of processes on a host is from 1 to 1024",
        ),
        (
            vec!["launch", "-n", "1", "--master", "x", "--", "run"],
            "error: --master x: write it as HOST:PORT, such as node1:29500",
        ),
    ] {
        let r = p.run(&args);
        assert_eq!((r.status, r.err.trim_end()), (Some(2), message));
    }
    let r: support::Ran = p
        .command(&["launch", "-n", "2", "--", "run", "r.lua"])
        .envs([("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")])
        .output()
        .unwrap()
        .into();
    assert_eq!(r.status, Some(2));
    assert!(r.err.contains("this process has been started by a launcher itself, as rank 0 of 2"), "{}", r.err);
}

#[test]
fn signals_reach_the_processes() {
    for (signal, status) in [("-INT", 130), ("-TERM", 143), ("-USR1", 75)] {
        let p = place();
        p.file("tiny.lua", TINY);
        let args = ["launch", "-n", "2", "--max-restarts", "3", "run", "tiny.lua", "--json", "--steps", "100000000"];
        let args = [&args[..], &["--device", "cpu", "--mesh", "dp=2"]].concat();
        let mut child = p.command(&args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        assert!(out.any(|line| line.contains("\"step\":2,")));
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
        let last: Value = serde_json::from_str(&out.last().unwrap()).unwrap();
        assert_eq!((last["event"].as_str(), last["status"].as_str()), (Some("done"), Some("interrupted")));
        assert_eq!(child.wait().unwrap().code(), Some(status), "{signal}");
    }
}

/// The first attempt is killed; the launcher starts all processes again, and the run continues from its checkpoint.
#[test]
fn a_killed_process_is_started_again() {
    let p = place();
    p.file("tiny.lua", TINY);
    let args =
        ["launch", "-n", "2", "--max-restarts", "1", "run", "tiny.lua", "--json", "--steps", "3000", "--device", "cpu"];
    let args = [&args[..], &["--mesh", "dp=2", "--run-dir", "r", "--checkpoint-every", "5"]].concat();
    let mut child = p.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(out.any(|line| line.contains("\"event\":\"checkpoint\"")));
    // Process 1 is a child of the launcher whose RANK is 1.
    let children = format!("/proc/{0}/task/{0}/children", child.id());
    let pids = std::fs::read_to_string(children).unwrap();
    let second = pids.split_whitespace().find(|pid| {
        let env = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        env.split(|b| *b == 0).any(|v| v == b"RANK=1")
    });
    assert!(Command::new("kill").args(["-KILL", second.unwrap()]).status().unwrap().success());
    let last: Value = serde_json::from_str(&out.last().unwrap()).unwrap();
    assert_eq!((last["event"].as_str(), last["steps"].as_u64()), (Some("done"), Some(3000)));
    let output = child.wait_with_output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{err}");
    assert!(err.contains("warning: restart 1 of at most 1: rank 1 was killed by SIGKILL"), "{err}");
    assert!(p.run_json("r")["resumed"].as_array().is_some_and(|steps| steps.len() == 1));
}

#[test]
fn job_files_are_printed_or_written_once() {
    let p = place();
    let args = ["submit", "--engine", "slurm", "--nodes", "2", "--gpus-per-node", "8"];
    let command = ["--", "run", "My_Recipe.lua", "--mesh", "dp=16"];
    let r = p.run(&[&args[..], &command].concat());
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""));
    assert!(r.out.starts_with("#!/bin/bash\n#SBATCH --job-name=my-recipe\n#SBATCH --nodes=2\n"), "{}", r.out);
    assert!(
        r.out.contains("perilune run My_Recipe.lua --mesh dp=16 --run-dir \"runs/my-recipe-$SLURM_JOB_ID\" --resume\n")
    );
    let written = p.run(&[&args[..], &["-o", "job.sh"], &command].concat());
    assert_eq!(written.out, "job.sh is ready. Next: sbatch job.sh\n");
    assert_eq!(p.read("job.sh"), r.out);
    let again = p.run(&[&args[..], &["-o", "job.sh"], &command].concat());
    assert_eq!((again.status, again.err.as_str()), (Some(1), "error: cannot write job.sh: file exists\n"));
    let r = p.run(&["submit", "--engine", "k8s", "--", "run", "r.lua"]);
    assert_eq!(r.status, Some(2));
    assert!(r.err.starts_with("error: an image is missing"), "{}", r.err);
    assert!(p.runs().is_empty());
}
