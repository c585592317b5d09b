//! Tests `perilune launch` and `submit`: output of several processes, exit status, signals, job files.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use support::{TINY, place};

#[test]
fn process_0_prints_as_it_is_and_the_others_with_their_rank() {
    let p = place();
    p.file("hi.lua", "print('hi')\nprint('there')");
    let r = p.run(&["launch", "-n", "3", "--", "run", "hi.lua"]);
    assert_eq!((r.status, r.out.as_str()), (Some(0), "hi\nthere\n"));
    // What several of the others print is shown once.
    let mut lines: Vec<_> = r.err.lines().map(|l| l.split_once("] ").unwrap().1).collect();
    lines.sort_unstable();
    assert_eq!(lines, ["hi", "there"], "{}", r.err);
}

#[test]
fn the_exit_status_is_that_of_the_processes() {
    let p = place();
    p.file("wrong.lua", "local x = nil\nprint(x.y)");
    let r = p.run(&["launch", "-n", "2", "--", "run", "wrong.lua"]);
    assert_eq!(r.status, Some(3));
    let last = r.err.split("error: rank ").last().unwrap();
    assert!(last.contains(" ended with exit status 3: wrong.lua:2: "), "{}", r.err);
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
        let args =
            ["launch", "-n", "2", "--max-restarts", "3", "--", "run", "tiny.lua", "--json", "--steps", "100000000"];
        let mut child = p.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let err = child.stderr.take().unwrap();
        // Both have started: the events of process 1 come by stderr.
        let (send, started) = std::sync::mpsc::channel();
        let other = std::thread::spawn(move || {
            for line in BufReader::new(err).lines().map_while(Result::ok) {
                if line.contains("\"step\":2,") {
                    let _ = send.send(());
                }
            }
        });
        let mut out = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        assert!(out.any(|line| line.contains("\"step\":2,")));
        // Lines that both print are shown once, so process 1's may be missing.
        let _ = started.recv_timeout(std::time::Duration::from_secs(5));
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
        let last: Value = serde_json::from_str(&out.last().unwrap()).unwrap();
        assert_eq!((last["event"].as_str(), last["status"].as_str()), (Some("done"), Some("interrupted")));
        assert_eq!(child.wait().unwrap().code(), Some(status), "{signal}");
        other.join().unwrap();
    }
}

#[cfg(target_os = "linux")]
#[test]
fn processes_end_with_their_launcher() {
    let p = place();
    p.file("tiny.lua", TINY);
    let args = ["launch", "-n", "2", "--", "run", "tiny.lua", "--json", "--steps", "100000000"];
    let mut child = p.command(&args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(out.any(|line| line.contains("\"step\":2,")));
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", child.id())).unwrap();
    let all: Vec<String> = children.split_whitespace().map(|pid| format!("/proc/{pid}")).collect();
    assert_eq!(all.len(), 2);
    child.kill().unwrap();
    child.wait().unwrap();
    let until = std::time::Instant::now() + std::time::Duration::from_secs(30);
    // A process that nobody has reaped yet has ended too.
    let runs = |process: &String| std::fs::read_to_string(format!("{process}/stat")).is_ok_and(|s| !s.contains(") Z "));
    while all.iter().any(runs) {
        assert!(std::time::Instant::now() < until, "a process goes on without its launcher");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
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
