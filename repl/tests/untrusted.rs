//! Tests `--untrusted` through the commands: nothing is open without a flag, each flag opens its own act, limits end the process, the
//! supervisor passes on what belongs outside, and results have the bits of a run that is not confined.
//!
//! `PERILUNE_DEVICE=cuda` runs the recipes on a GPU.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

#[path = "../../runtime/fetch/tests/support/server.rs"]
mod server;
mod support;

use server::Server;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use support::{Place, Ran, TINY, place};

const SECRET: &str = "SECRET-4711";

/// Longer than any of these commands takes, so that a hang is a failure.
const PATIENCE: Duration = Duration::from_secs(120);

/// A folder `work` with recipes, from which commands start, beside others.
fn tree() -> Place {
    let p = place();
    for dir in ["work/parts", "work/sub", "data", "out", "other", "cache"] {
        std::fs::create_dir_all(p.path(dir)).unwrap();
    }
    p.file("work/tiny.lua", TINY);
    p.file("work/parts/width.lua", "return 4\n");
    p.file("work/own.csv", "1,2,3\n4,5,6\n");
    p.file("data/set.csv", "1,2,3\n4,5,6\n");
    p.file("data/beside.csv", "7,8,9\n");
    p.file("other/secret.csv", format!("{SECRET},1\n"));
    symlink(p.path("other/secret.csv"), p.path("data/link.csv")).unwrap();
    symlink(p.path("other"), p.path("data/way")).unwrap();
    p
}

fn command(p: &Place, args: &[&str]) -> Command {
    let mut c = p.command(args);
    c.current_dir(p.path("work")).env("PERILUNE_CACHE", p.path("cache"));
    if let Ok(device) = std::env::var("PERILUNE_DEVICE")
        && ["run", "check", "repl", "eval", "sample"].contains(&args[0])
    {
        c.args(["--device", &device]);
    }
    c
}

fn run(p: &Place, args: &[&str]) -> Ran {
    command(p, args).output().unwrap().into()
}

/// Runs a script confined.
fn script(p: &Place, text: &str, more: &[&str]) -> Ran {
    p.file("work/s.lua", format!("local pl = require \"perilune\"\n{text}\n"));
    run(p, &[&["run", "s.lua", "--untrusted"], more].concat())
}

/// The confined process of a supervisor.
fn child_of(supervisor: &Child) -> u32 {
    let begun = Instant::now();
    loop {
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let parent = status.lines().find_map(|l| l.strip_prefix("PPid:")?.trim().parse::<u32>().ok());
            if parent == Some(supervisor.id()) {
                return pid;
            }
        }
        assert!(begun.elapsed() < PATIENCE, "there is no confined process");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Waits for the end of a process; a hang fails the test.
fn wait(child: &mut Child) -> Option<i32> {
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.kill().unwrap();
    panic!("the command does not end");
}

fn lines_until(child: &mut Child, what: &str) -> BufReader<std::process::ChildStdout> {
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains(what) {
        line.clear();
        assert_ne!(out.read_line(&mut line).unwrap(), 0, "it ended early");
    }
    out
}

fn start(p: &Place, args: &[&str]) -> Child {
    command(p, args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Nothing of a command's supervisor is left.
fn is_clean(p: &Place) -> bool {
    std::fs::read_dir(p.path("cache/confined")).is_ok_and(|mut left| left.next().is_none())
}

#[test]
fn nothing_is_granted() {
    let p = tree();
    let other = p.path("other").display().to_string();
    for (line, flag) in [
        // The recipe's own folder and the current directory.
        ("pl.data.csv('own.csv')".to_string(), "--allow-read="),
        ("pl.data.text('own.csv')".into(), "--allow-read="),
        ("pl.data.images('sub', { pixels = 8 })".into(), "--allow-read="),
        (format!("pl.data.csv('{other}/secret.csv')"), "--allow-read="),
        ("pl.data.csv('../other/secret.csv')".into(), "--allow-read="),
        ("pl.data.csv('/etc/passwd')".into(), "--allow-read=/etc"),
        ("pl.save('w.npy', pl.ones { 2 })".into(), "--allow-write="),
        ("pl.save('../out/w.npy', pl.ones { 2 })".into(), "--allow-write=../out"),
        (
            "pl.kernel { name = 'k', inputs = 'x: f32', outputs = 'y', source = '__global__ void k(const float* x, float* y) {}', \
             grid = 1, block = 1, cpu = function(x) return x end }"
                .into(),
            "--allow-kernels",
        ),
    ] {
        let ran = script(&p, &line, &[]);
        let text = format!("{line}: {:?}\n{}{}", ran.status, ran.out, ran.err);
        assert!(ran.status == Some(4) && ran.err.contains(flag) && ran.err.starts_with("s.lua:2: "), "{text}");
        assert!(!text.contains("--set"), "{text}");
        assert!(!ran.out.contains(SECRET) && !ran.err.contains(SECRET), "{text}");
    }
    // A param that names a file opens nothing: flags alone do.
    p.file(
        "work/r.lua",
        TINY.replace("local x = ", "pl.data.csv(p.csv)\n  local x = ").replace("lr = 0.1", "lr = 0.1, csv = ''"),
    );
    for command in ["run", "check"] {
        let ran = run(&p, &[command, "r.lua", "--untrusted", "--set", "csv=../data/set.csv"]);
        assert!(ran.status == Some(4) && ran.err.contains("--allow-read=../data"), "{}{}", ran.out, ran.err);
        assert!(run(&p, &[command, "r.lua", "--set", "csv=../data/set.csv"]).status == Some(0));
    }
    assert!(p.read("work/own.csv").starts_with("1,2") && !p.path("work/w.npy").exists() && is_clean(&p));
    // The options go with --untrusted alone.
    for flag in ["--allow-kernels", "--time=1s", "--accept-missing-walls", "--process-memory=1GiB"] {
        let ran = run(&p, &["run", "tiny.lua", flag]);
        assert!(ran.status == Some(2) && ran.err.contains("goes with --untrusted"), "{}", ran.err);
    }
}

#[test]
fn each_grant_opens_its_own_act() {
    let p = tree();
    let ran = script(
        &p,
        "print((require('parts.width')), (pl.data.csv('../data/set.csv'):size()))",
        &["--allow-read=../data"],
    );
    assert_eq!((ran.status, ran.out.trim()), (Some(0), "4\t2"), "{}", ran.err);
    let ran = script(&p, "print((pl.data.csv('../data/set.csv'):size()))", &["--allow-read=../data/set.csv"]);
    assert_eq!((ran.status, ran.out.trim(), ran.err.as_str()), (Some(0), "2", ""));
    for (line, grant) in [
        ("pl.data.csv('../data/beside.csv')", "--allow-read=../data/set.csv"),
        ("pl.data.csv('../data/link.csv')", "--allow-read=../data"),
        ("pl.data.csv('../data/way/secret.csv')", "--allow-read=../data"),
        ("pl.data.csv('../data/../other/secret.csv')", "--allow-read=../data"),
        ("pl.save('../data/w.npy', pl.ones { 2 })", "--allow-read=../data"),
        ("pl.data.csv('../data/set.csv')", "--allow-write=../data"),
        ("pl.save('../other/w.npy', pl.ones { 2 })", "--allow-write=../out"),
    ] {
        let ran = script(&p, line, &[grant]);
        let text = format!("{line} with {grant}: {:?}\n{}{}", ran.status, ran.out, ran.err);
        assert!(ran.status == Some(4) && ran.err.contains("--allow-"), "{text}");
        assert!(!text.contains(SECRET), "{text}");
    }
    let ran = script(&p, "pl.save('../out/w.npy', pl.ones { 2 })", &["--allow-write=../out"]);
    assert!(ran.status == Some(0) && p.path("out/w.npy").is_file(), "{}", ran.err);
    let kernel = "local k = pl.kernel { name = 'k', inputs = 'x: f32', outputs = 'y', \
                  source = '__global__ void k(const float* x, float* y) { y[0] = x[0]; }', grid = 1, block = 1, \
                  cpu = function(x) return x end }\nprint(k(pl.ones { 1 }):item())";
    let ran = script(&p, kernel, &["--allow-kernels"]);
    assert!(ran.status == Some(0) && ran.out.trim().starts_with('1'), "{}{}", ran.out, ran.err);
    let ran = script(&p, "", &["--allow-read=../missing"]);
    assert!(ran.status == Some(2) && ran.err.contains("--allow-read: ../missing"), "{}", ran.err);
    assert!(is_clean(&p));
}

/// SHA-256 of the lines, computed with Python's hashlib.
const LINES: &[u8] = b"alpha\nbeta\ngamma\n";
const HASH: &str = "sha256:4fdbc441ea7b546100e086ac1e4fc5ae6749b7314311c99db05be450eca12996";

#[test]
fn the_supervisor_downloads() {
    let (p, server) = (tree(), Server::of(LINES));
    let call = format!("print(pl.data.lines('{}', {{ hash = '{HASH}' }}):get(0).text)", server.url("/lines.txt"));
    let ran = script(&p, &call, &[]);
    assert!(ran.status == Some(4) && ran.err.contains("--allow-net=127.0.0.1"), "{}{}", ran.out, ran.err);
    assert!(server.asked().is_empty());
    for _ in 0..2 {
        let ran = script(&p, &call, &["--allow-net=127.0.0.1"]);
        assert_eq!((ran.status, ran.out.trim()), (Some(0), "alpha"), "{}", ran.err);
    }
    assert_eq!(server.asked().len(), 1, "the second run finds it in the cache of the user");
    let cached = p.path("cache/data/sha256").join(HASH.trim_start_matches("sha256:"));
    assert_eq!(std::fs::read(cached).unwrap(), LINES);
    assert!(is_clean(&p));
}

#[test]
fn a_run_has_the_same_bits_and_continues() {
    let p = tree();
    let weights = |args: &[&str]| {
        let ran = run(&p, args);
        assert_eq!(ran.status, Some(0), "{args:?}: {}{}", ran.out, ran.err);
        ran.events().last().unwrap()["weights"].as_str().unwrap().to_string()
    };
    let free = weights(&["run", "tiny.lua", "--json", "--run-dir", "free"]);
    assert_eq!(weights(&["run", "tiny.lua", "--json", "--untrusted", "--run-dir", "held"]), free);
    assert_eq!(p.run_json("work/held")["status"], "done");
    // Without a name the run directory is below runs/.
    assert_eq!(weights(&["run", "tiny.lua", "--json", "--untrusted"]), free);
    assert_eq!(std::fs::read_dir(p.path("work/runs")).unwrap().count(), 1);
    // A part of it, then the rest.
    weights(&["run", "tiny.lua", "--json", "--untrusted", "--run-dir", "cut", "--until", "3"]);
    assert_eq!(weights(&["run", "--resume", "cut", "--json", "--untrusted"]), free);
    weights(&["run", "--resume", "cut", "--at", "3", "--branch", "--run-dir", "twig", "--json", "--untrusted"]);
    for args in [
        &["replay", "held", "--run-dir", "again", "--untrusted"][..],
        &["eval", "held", "--untrusted"],
        &["check", "tiny.lua", "--untrusted"],
    ] {
        let ran = run(&p, args);
        assert_eq!(ran.status, Some(0), "{args:?}: {}{}", ran.out, ran.err);
    }
    let before = support::snapshot_of(&p.path("work/held"));
    let mut prompt = command(&p, &["repl", "--resume", "held", "--untrusted"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    prompt.stdin.take().unwrap().write_all(b"print(run.model ~= nil, 6 * 7)\n").unwrap();
    let ran: Ran = prompt.wait_with_output().unwrap().into();
    assert!(ran.status == Some(0) && ran.out.contains("true\t42"), "{}{}", ran.out, ran.err);
    assert_eq!(support::snapshot_of(&p.path("work/held")), before, "a prompt writes nothing");
    for args in [&["run", "tiny.lua", "--untrusted", "--watch"][..], &["run", "tiny.lua", "--untrusted", "--resume"]] {
        assert_eq!(run(&p, args).status, Some(2), "{args:?}");
    }
    assert!(is_clean(&p));
}

/// A recipe of the repository, whose data need a grant.
#[test]
fn digits_has_the_same_bits() {
    let p = tree();
    let recipes = concat!(env!("CARGO_MANIFEST_DIR"), "/../recipes");
    let weights = |dir: &str, more: &[&str]| {
        let dir = p.path(dir).display().to_string();
        let args = ["run", "digits.lua", "--steps", "3", "--seed", "1", "--json", "--run-dir", &dir];
        let ran: Ran = command(&p, &[&args, more].concat()).current_dir(recipes).output().unwrap().into();
        assert_eq!(ran.status, Some(0), "{}{}", ran.out, ran.err);
        ran.events().last().unwrap()["weights"].as_str().unwrap().to_string()
    };
    assert_eq!(weights("held", &["--untrusted", "--allow-read=data"]), weights("free", &[]));
}

#[test]
fn limits_end_the_process() {
    let p = tree();
    let began = Instant::now();
    let ran = script(&p, "while true do end", &["--time", "1s"]);
    assert!(ran.status == Some(124) && ran.err.contains("--time 1s"), "{:?} {}", ran.status, ran.err);
    println!("--time 1s: {:.2} s", began.elapsed().as_secs_f64());
    // A run is asked to end first, and has a checkpoint then.
    let ran = run(
        &p,
        &["run", "tiny.lua", "--untrusted", "--time", "3s", "--steps", "100000000", "--run-dir", "t", "--quiet"],
    );
    assert_eq!(ran.status, Some(124), "{}", ran.err);
    assert_eq!(p.run_json("work/t")["status"], "interrupted");
    let hog = "local all = {}\nfor i = 1, 1e9 do all[i] = pl.ones { 1024, 1024 } pl.eval(all[i]) end";
    let ran = script(&p, hog, &["--process-memory", "700MiB"]);
    if std::env::var_os("PERILUNE_DEVICE").is_none() {
        assert!(ran.status == Some(1) && ran.err.contains("memory"), "{:?} {}", ran.status, ran.err);
    }
    // A flood of output waits for its reader, and ends with it.
    p.file("work/s.lua", "local pl = require \"perilune\"\nwhile true do print(('x'):rep(1000)) end\n");
    let mut flood = start(&p, &["run", "s.lua", "--untrusted", "--time", "20s"]);
    drop(lines_until(&mut flood, "xxx"));
    assert!(wait(&mut flood).is_some());
    assert!(is_clean(&p));
}

#[test]
fn the_process_stands_behind_all_walls_with_a_clean_environment() {
    let p = tree();
    p.file("work/s.lua", "local pl = require \"perilune\"\nprint('ready') while true do end\n");
    let mut supervisor = command(&p, &["run", "s.lua", "--untrusted"])
        .envs([
            ("HF_TOKEN", SECRET),
            ("AWS_SECRET_ACCESS_KEY", SECRET),
            ("MY_PASSWORD", SECRET),
            ("PERILUNE_TOKEN", SECRET),
        ])
        .envs([("LD_PRELOAD", ""), ("CUDA_CACHE_PATH", "/tmp"), ("LANG", "C.UTF-8")])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let _out = lines_until(&mut supervisor, "ready");
    let child = child_of(&supervisor);
    let environment = std::fs::read_to_string(format!("/proc/{child}/environ")).unwrap();
    let names: Vec<&str> = environment.split('\0').filter_map(|v| v.split_once('=')).map(|(name, _)| name).collect();
    assert!(names.contains(&"LANG") && names.contains(&"TMPDIR"), "{names:?}");
    for bad in
        ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD", "PERILUNE_TOKEN", "LD_PRELOAD", "HOME", "PATH", "USER"]
    {
        assert!(!names.contains(&bad), "{bad}: {names:?}");
    }
    assert!(!environment.contains(SECRET) && !environment.contains("CUDA_CACHE_PATH=/tmp\0"));
    let mut threads = 0;
    for task in std::fs::read_dir(format!("/proc/{child}/task")).unwrap().flatten() {
        let status = std::fs::read_to_string(task.path().join("status")).unwrap();
        let of = |name: &str| status.lines().find_map(|l| l.strip_prefix(name)).unwrap_or_default().trim().to_string();
        assert_eq!((of("NoNewPrivs:"), of("Seccomp:")), ("1".into(), "2".into()), "{status}");
        let powers =
            u64::from_str_radix(&of("CapEff:"), 16).unwrap() | u64::from_str_radix(&of("CapPrm:"), 16).unwrap();
        assert_eq!(powers & !0b110, 0, "{status}");
        threads += 1;
    }
    assert!(threads > 1);
    // Standard streams, the two pipes, and handles of granted folders: nothing else that the supervisor had open.
    let limit = std::fs::read_to_string(format!("/proc/{child}/limits")).unwrap();
    assert!(
        limit.lines().any(|l| l.starts_with("Max core file size") && l.split_whitespace().nth(4) == Some("0")),
        "{limit}"
    );
    // The end of the supervisor is that of the child.
    supervisor.kill().unwrap();
    supervisor.wait().unwrap();
    let begun = Instant::now();
    while std::fs::read_to_string(format!("/proc/{child}/status")).is_ok_and(|s| !s.contains("State:\tZ")) {
        assert!(begun.elapsed() < PATIENCE, "the confined process outlives its supervisor");
        std::thread::sleep(Duration::from_millis(10));
    }
    // What a killed supervisor has left is removed by the next one.
    assert!(!is_clean(&p));
    assert_eq!(script(&p, "print(1)", &[]).status, Some(0));
    assert!(is_clean(&p));
}

#[test]
fn signals_reach_the_run_once() {
    for (name, status, group) in [("-INT", 130, false), ("-TERM", 143, false), ("-INT", 130, true), ("-USR1", 75, true)]
    {
        let p = tree();
        let args = [
            "run",
            "tiny.lua",
            "--untrusted",
            "--json",
            "--steps",
            "100000000",
            "--run-dir",
            "r",
            "--checkpoint-every",
            "1000000",
        ];
        let mut supervisor =
            command(&p, &args).process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let out = lines_until(&mut supervisor, "\"step\":2,");
        let to = if group { format!("-{}", supervisor.id()) } else { supervisor.id().to_string() };
        assert!(Command::new("kill").args([name, "--", &to]).status().unwrap().success());
        // The run reads its pipe until the end.
        let last = out.lines().map_while(Result::ok).last().unwrap_or_default();
        assert_eq!(wait(&mut supervisor), Some(status), "{name} {group}: {last}");
        assert_eq!(p.run_json("work/r")["status"], "interrupted", "{name} {group}");
        assert!(last.contains("\"event\":\"done\""), "{name} {group}: {last}");
    }
    // A command without handlers ends at once.
    let p = tree();
    p.file("work/tiny.lua", TINY.replace("local error", "print('in the step') while true do end\n  local error"));
    let mut check = start(&p, &["check", "tiny.lua", "--untrusted"]);
    // A check prints what the recipe does on stderr.
    let mut err = BufReader::new(check.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("in the step") {
        line.clear();
        assert_ne!(err.read_line(&mut line).unwrap(), 0, "it ended early");
    }
    assert!(Command::new("kill").args(["-TERM", &check.id().to_string()]).status().unwrap().success());
    assert_eq!(wait(&mut check), Some(143));
}

#[test]
fn a_missing_wall_needs_leave() {
    let p = tree();
    p.file(
        "work/s.lua",
        "local pl = require \"perilune\"\nprint('it ran', pcall(pl.data.csv, '../other/secret.csv'))\n",
    );
    for wall in ["files", "calls"] {
        let run = |more: &[&str]| -> Ran {
            let mut c = command(&p, &[&["run", "s.lua", "--untrusted"], more].concat());
            c.env("PERILUNE_WITHOUT_WALLS", wall).output().unwrap().into()
        };
        let ran = run(&[]);
        assert!(ran.status == Some(4) && !ran.out.contains("it ran"), "{:?} {}", ran.status, ran.out);
        assert!(ran.err.contains("lacks walls") && ran.err.contains("--accept-missing-walls"), "{}", ran.err);
        // The language's boundary holds alone.
        let ran = run(&["--accept-missing-walls"]);
        assert!(ran.status == Some(0) && ran.out.contains("it ran\tfalse"), "{}{}", ran.out, ran.err);
        assert!(!ran.out.contains(SECRET), "{}", ran.out);
    }
    assert!(is_clean(&p));
}

#[test]
fn usage_is_said_once_and_status_passes_on() {
    let p = tree();
    for (args, status, text) in [
        (&["run", "tiny.lua", "--untrusted", "--set", "nothing=1"][..], 2, "nothing"),
        (&["run", "missing.lua", "--untrusted"], 2, "there is no file"),
        (&["run", "tiny.lua", "--untrusted", "--device", "tpu"], 2, "there is no such device"),
        (&["run", "tiny.lua", "--untrusted", "--time", "soon"], 2, "90s"),
        (&["eval", "no-run", "--untrusted"], 2, "no-run"),
    ] {
        let ran: Ran =
            p.command(args).current_dir(p.path("work")).env("PERILUNE_CACHE", p.path("cache")).output().unwrap().into();
        assert_eq!(ran.status, Some(status), "{args:?}: {}", ran.err);
        assert_eq!(ran.err.matches(text).count(), 1, "{args:?}: {}", ran.err);
    }
    let ran = script(&p, "error('mine')", &[]);
    assert!(ran.status == Some(3) && ran.err.starts_with("s.lua:2: "), "{}", ran.err);
    // An empty run directory is none.
    assert!(!p.path("work/runs").exists());
    let left: Vec<PathBuf> = std::fs::read_dir(p.path("cache/confined")).unwrap().flatten().map(|e| e.path()).collect();
    assert!(left.is_empty(), "{left:?}");
}
