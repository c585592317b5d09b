//! Tests the supervisor of a confined process against a process that has broken out of the language: it floods the pipe of requests.
//! And the commands on saved runs: `eval` and `sample` with `--untrusted`.
//!
//! The test plays that process: it writes to the pipe through `/proc/PID/fd`.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use support::{Place, Ran, TINY, place};

const PATIENCE: Duration = Duration::from_secs(60);
/// `O_NONBLOCK` of Linux.
const NONBLOCK: i32 = 0o4000;
/// What the supervisor may have in memory: its program, its threads, and a few messages of 8 MiB.
const MAX_BYTES: u64 = 200 << 20;

/// A supervisor whose confined process computes forever, and the end of the pipe that this process writes to.
fn start(p: &Place) -> (Child, std::fs::File) {
    p.file("s.lua", "print('ready') while true do end\n");
    let mut command = p.command(&["run", "s.lua", "--untrusted", "--accept-missing-walls", "--time", "100s"]);
    let command = command.env("PERILUNE_CACHE", p.path("cache"));
    let mut supervisor = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(supervisor.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    let pid = supervisor.id();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    let child = children.split_whitespace().next().unwrap();
    let environment = std::fs::read_to_string(format!("/proc/{child}/environ")).unwrap();
    let pipes = environment.split('\0').find_map(|v| v.strip_prefix("PERILUNE_CONFINED=")).unwrap();
    let to = pipes.split_once(',').unwrap().1;
    let pipe = std::fs::File::options().write(true).custom_flags(NONBLOCK).open(format!("/proc/{child}/fd/{to}"));
    (supervisor, pipe.unwrap())
}

/// Writes until everything is written, the reader has gone, or a time has passed in which nothing was read.
fn flood(mut pipe: &std::fs::File, bytes: &[u8]) {
    let (mut left, mut last) = (bytes, Instant::now());
    while !left.is_empty() && last.elapsed() < Duration::from_secs(3) {
        match pipe.write(left) {
            Ok(n) => (left, last) = (&left[n..], Instant::now()),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => std::thread::sleep(Duration::from_millis(1)),
            Err(_) => return,
        }
    }
}

fn peak(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[test]
fn a_flood_of_requests_neither_stops_nor_fills_the_supervisor() {
    let walls = r#"{"Walls":{"found":[],"skipped":[["/etc/passwd","\u001b[2Jit is closed"]]}}"#;
    let floods: [(&str, Vec<u8>); 8] = [
        ("one long line", vec![b'x'; 64 << 20]),
        ("a long string", [&b"{\"Fetch\":\""[..], &vec![b'a'; 64 << 20]].concat()),
        ("a long address", format!("{{\"Fetch\":\"https://localhost/{}\"}}\n", "a".repeat(7 << 20)).into_bytes()),
        ("addresses", "{\"Fetch\":\"https://localhost/x\"}\n".repeat(200_000).into_bytes()),
        ("cancellations", "\"Cancel\"\n".repeat(500_000).into_bytes()),
        ("walls", format!("{walls}\n").repeat(20_000).into_bytes()),
        ("deep lists", "[".repeat(4 << 20).into_bytes()),
        ("no text", vec![0xff; 4 << 20]),
    ];
    for (name, bytes) in floods {
        let p = place();
        let (mut supervisor, pipe) = start(&p);
        flood(&pipe, &bytes);
        // The pipe ends with the process that has it.
        drop(pipe);
        let most = peak(supervisor.id());
        assert!(most < MAX_BYTES, "{name}: {} MiB", most >> 20);
        // It still takes a request to end, and ends its child.
        let begun = Instant::now();
        for _ in 0..2 {
            let pid = supervisor.id().to_string();
            assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
            std::thread::sleep(Duration::from_millis(1100));
        }
        let status = loop {
            match supervisor.try_wait().unwrap() {
                Some(status) => break status,
                None => assert!(begun.elapsed() < PATIENCE, "{name}: the supervisor does not end"),
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let mut err = String::new();
        supervisor.stderr.take().unwrap().read_to_string(&mut err).unwrap();
        println!("{name}: {} MiB, {status}, {:.1} s", most >> 20, begun.elapsed().as_secs_f64());
        assert!(begun.elapsed() < Duration::from_secs(10), "{name}: {:.1} s", begun.elapsed().as_secs_f64());
        assert!(matches!(status.code(), Some(1 | 130)), "{name}: {status} {err}");
        assert!(err.len() < 4096 && !err.contains('\u{1b}') && !err.contains("lacks walls"), "{name}: {err}");
        let left = std::fs::read_dir(p.path("cache/confined")).unwrap().count();
        assert_eq!(left, 0, "{name}");
    }
}

#[test]
fn saved_runs_of_others_are_confined() {
    let p = place();
    for dir in ["work", "other"] {
        std::fs::create_dir(p.path(dir)).unwrap();
    }
    p.file("other/secret.txt", "SECRET-4711\n");
    let sample = "function recipe.sample(run, prompt) return prompt .. ' ' .. tostring(pcall(pl.data.text, '../other/secret.txt')) end\nreturn recipe\n";
    let evaluate = "function recipe.evaluate(model, batch)\n  print(pcall(pl.save, '../other/x.npy', pl.ones { 1 }))\n  return { loss = (model(batch.x):squeeze(-1) - batch.y):abs():mean() }\nend\n";
    let (head, _) = TINY.trim_end().rsplit_once("return recipe").unwrap();
    p.file("work/tiny.lua", format!("{head}{evaluate}{sample}"));
    let run = |args: &[&str]| -> Ran {
        let mut command = p.command(args);
        command.current_dir(p.path("work")).env("PERILUNE_CACHE", p.path("cache")).output().unwrap().into()
    };
    let ran = run(&["run", "tiny.lua", "--run-dir", "one", "-q"]);
    assert_eq!(ran.status, Some(0), "{}{}", ran.out, ran.err);
    let before = support::snapshot_of(&p.path("work"));
    for args in [
        &["eval", "one", "--untrusted", "--accept-missing-walls"][..],
        &["sample", "one", "hello", "--untrusted", "--accept-missing-walls"],
    ] {
        let ran = run(args);
        assert_eq!(ran.status, Some(0), "{args:?}: {}{}", ran.out, ran.err);
        let both = format!("{}{}", ran.out, ran.err);
        assert!(both.contains("false") && !both.contains("true") && !both.contains("SECRET"), "{args:?}: {both}");
    }
    assert_eq!(support::snapshot_of(&p.path("work")), before, "they write nothing");
    assert!(!p.path("other/x.npy").exists());
    // The grants are those of the flags.
    let granted = run(&["sample", "one", "hello", "--untrusted", "--accept-missing-walls", "--allow-read=../other"]);
    assert!(granted.status == Some(0) && granted.out.contains("hello true"), "{}{}", granted.out, granted.err);
}
