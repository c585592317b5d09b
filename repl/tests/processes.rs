//! Trains one run in several processes: results against one process, text of process 0, signals, edits, failures, restarts.
//!
//! `PERILUNE_TRIALS=200` makes so many seeded trials of failures; by default there is one of each kind. `PERILUNE_DEVICE=cuda` with
//! `PERILUNE_MESH_GPUS=2` trains on two GPUs, which exchange messages of NCCL; meshes of more devices are left out.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};
use support::{Place, Ran, SEQUENCES, place, save};

/// A recipe with what a run carries from step to step, a module of its own, and a file of its process: at the step that it names
/// the process raises.
const RECIPE: &str = r#"
local pl = require "perilune"
local nn, optim, parts = pl.nn, pl.optim, require "parts"
local recipe = pl.recipe { name = "all", params = { lr = 0.05, steps = 12, seed = 3, width = 8, eval_every = 4 } }
recipe.ema, recipe.accumulate = 0.9, 2
local boom, step = pl.load("flag.safetensors").v:item(), 0
function recipe.data(p)
  local x = pl.randn { 80, 4 }
  local set = pl.data.tensors { x = x, y = x:sum(1) }
  return { train = set:split("train", 0.75, p.seed):shuffle(p.seed):batch(8), valid = set:split("valid", 0.25, p.seed):batch(8) }
end
function recipe.model(p)
  return nn.Sequential { nn.Linear(4, p.width, { bias = false }), nn.BatchNorm1d(p.width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(p.width, 1) }
end
function recipe.optimizer(p, model)
  return optim.AdamW(model, { lr = optim.cosine { peak = p.lr, warmup = 3, steps = 12 }, clip_norm = 1 })
end
function recipe.loss(model, batch)
  step = step + 1
  if step == boom then error("as planned") end
  return parts.squared(model(batch.x):squeeze(-1) - batch.y):mean()
end
recipe.sharding = { ['1'] = 'column', ['2'] = 'column', ['5'] = 'row' }
-- more
return recipe
"#;

const PARTS: &str = "return { squared = function(x) return x * x end }\n";

/// A directory with the flag of a process: the step at which it raises, or 0.
fn flag(p: &Place, boom: u32) {
    p.file(
        "flag.lua",
        format!("local pl = require 'perilune'\npl.save('flag.safetensors', {{ v = pl.tensor({{{boom}}}) }})"),
    );
    assert_eq!(p.run(&["run", "flag.lua", "--device", "cpu", "--allow-write=."]).status, Some(0));
}

fn all(more: &str) -> Place {
    let p = place();
    p.file("all.lua", RECIPE.replace("-- more", more));
    p.file("parts.lua", PARTS);
    flag(&p, 0);
    p
}

fn weights(p: &Place, dir: &str) -> String {
    p.run_json(dir)["weights"].as_str().unwrap().to_string()
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// One process of a job.
struct Process {
    child: Child,
    lines: Receiver<String>,
    errors: std::thread::JoinHandle<String>,
}

impl Process {
    /// Starts process `rank` of a job in a directory.
    fn start(p: &Place, rank: usize, processes: usize, port: u16, args: &[&str]) -> Process {
        let mut command = p.command(args);
        for (name, value) in [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", processes)] {
            command.env(name, value.to_string());
        }
        command.env("LOCAL_WORLD_SIZE", processes.to_string()).env("MASTER_ADDR", "127.0.0.1");
        command.env("MASTER_PORT", port.to_string()).env("PERILUNE_SILENCE", "4");
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let (send, lines) = channel();
        std::thread::spawn(move || out.lines().map_while(Result::ok).all(|line| send.send(line).is_ok()));
        let mut err = child.stderr.take().unwrap();
        let errors = std::thread::spawn(move || {
            let mut text = String::new();
            let _ = err.read_to_string(&mut text);
            text
        });
        Process { child, lines, errors }
    }

    /// Waits for an event of process 0 that contains these texts.
    fn wait_for(&self, texts: &[&str]) -> String {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let line = self.lines.recv_timeout(until.saturating_duration_since(Instant::now()));
            let line = line.unwrap_or_else(|e| panic!("there is no event with {texts:?}: {e}"));
            if texts.iter().all(|text| line.contains(text)) {
                return line;
            }
        }
    }

    fn signal(&self, name: &str) {
        assert!(Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap().success());
    }

    /// Waits for the end. Returns exit status, the rest of stdout, and stderr.
    fn end(mut self) -> Ran {
        let until = Instant::now() + Duration::from_secs(60);
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if Instant::now() > until {
                let _ = self.child.kill();
                let _ = self.child.wait();
                panic!("a process does not end: {}", self.errors.join().unwrap());
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        let out = self.lines.iter().map(|line| line + "\n").collect();
        Ran { status: status.code(), out, err: anonymous(&self.errors.join().unwrap()) }
    }
}

/// Without the host's name, which differs among machines.
fn anonymous(text: &str) -> String {
    let mut out = text.to_string();
    while let Some(at) = out.find(" (host ") {
        let end = at + out[at..].find(')').unwrap() + 1;
        out.replace_range(at..end, "");
    }
    out
}

/// Starts a job: a process in each of these directories.
fn start(dirs: &[&Place], args: &[&str]) -> Vec<Process> {
    let port = free_port();
    dirs.iter().enumerate().map(|(rank, p)| Process::start(p, rank, dirs.len(), port, args)).collect()
}

fn ended(all: Vec<Process>) -> Vec<Ran> {
    all.into_iter().map(Process::end).collect()
}

/// The device that processes train on.
fn device() -> &'static str {
    static DEVICE: LazyLock<String> = LazyLock::new(|| std::env::var("PERILUNE_DEVICE").unwrap_or("cpu".into()));
    &DEVICE
}

/// Whether a mesh of so many devices can be tested.
fn has_room(devices: usize) -> bool {
    device() == "cpu" || std::env::var("PERILUNE_MESH_GPUS").is_ok_and(|gpus| devices <= gpus.parse().unwrap())
}

fn args<'a>(dir: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["run", "all.lua", "--device", device(), "--json", "--run-dir", dir, "--threads", "1"], more].concat()
}

#[test]
fn several_processes_train_to_the_bits_of_one() {
    let p = all("");
    for (mesh, processes, devices) in [
        ("dp=2", 2, 2),
        ("dp=2,zero=1", 2, 2),
        ("dp=2,zero=3", 2, 2),
        ("dp=4,zero=3", 2, 4),
        ("dp=2,tp=2,zero=1", 4, 4),
        ("tp=2", 2, 2),
        ("dp=2,shard=2", 2, 4),
        ("pp=2", 2, 2),
        ("pp=2,dp=2,zero=1", 2, 4),
        ("pp=2,dp=2", 4, 4),
    ] {
        if !has_room(devices) {
            continue;
        }
        let (one, many) = (format!("one-{mesh}"), format!("many-{mesh}"));
        let ran = p.run(&args(&one, &["--mesh", mesh]));
        assert_eq!(ran.status, Some(0), "{mesh}: {}", ran.err);
        let results = ended(start(&vec![&p; processes], &args(&many, &["--mesh", mesh, "--checkpoint-every", "5"])));
        for (rank, r) in results.iter().enumerate() {
            assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{mesh}, rank {rank}");
            assert_eq!(r.out.is_empty(), rank > 0, "{mesh}: process 0 alone prints: {}", r.out);
        }
        assert_eq!(weights(&p, &one), weights(&p, &many), "{mesh} in {processes} processes");
        let log = |dir: &str| {
            let lines = p.read(&format!("{dir}/metrics.jsonl"));
            let events = lines.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
            let kept = events.filter(|e| e["event"] == "step" || e["event"] == "eval");
            kept.map(|e| (e["step"].clone(), e["loss"].clone(), e["metrics"].clone())).collect::<Vec<_>>()
        };
        assert_eq!(log(&one), log(&many), "{mesh} in {processes} processes");
        assert!(
            p.run_json(&many)["device_description"].as_str().unwrap().ends_with(&format!(" in {processes} processes"))
        );
    }
}

#[test]
fn strict_shards_have_the_bits_of_one_device() {
    let p = all("");
    let strict = ["--strict-shards", "4"];
    let ran = p.run(&args("one", &[&strict[..], &["--mesh", ""]].concat()));
    assert_eq!(ran.status, Some(0), "{}", ran.err);
    for r in ended(start(&[&p, &p], &args("two", &[&strict[..], &["--mesh", "dp=2,zero=1"]].concat()))) {
        assert_eq!((r.status, r.err.as_str()), (Some(0), ""));
    }
    assert_eq!(weights(&p, "one"), weights(&p, "two"));
}

/// Keys come to the queries of other processes by heads, whole, and in a ring.
#[test]
fn sequences_divided_among_processes_have_the_bits_of_one() {
    let p = place();
    p.file("sequences.lua", SEQUENCES);
    for (mesh, devices) in
        [("cp=2", 2), ("cp=2,keys=gather", 2), ("cp=2,keys=ring", 2), ("cp=4,keys=ring", 4), ("dp=2,cp=2,zero=3", 4)]
    {
        if !has_room(devices) {
            continue;
        }
        let args = |dir: &'static str| {
            ["run", "sequences.lua", "--device", device(), "--json", "--mesh", mesh, "--run-dir", dir, "--overwrite"]
        };
        let ran = p.run(&args("one"));
        assert_eq!(ran.status, Some(0), "{mesh}: {}", ran.err);
        for r in ended(start(&[&p, &p], &args("many"))) {
            assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{mesh}");
        }
        assert_eq!(weights(&p, "one"), weights(&p, "many"), "{mesh}");
    }
}

/// Every process finds the same placement of experts, and moves its part.
#[test]
fn experts_that_move_among_processes_have_the_bits_of_one() {
    if !has_room(2) {
        return;
    }
    let p = place();
    let recipe = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../recipes/llama.lua");
    let args = |dir: &'static str| {
        let mut all =
            vec!["run", recipe.to_str().unwrap(), "--device", device(), "--json", "--mesh", "ep=2", "--steps", "7"];
        for set in ["size=tiny", "vocab=64", "context=8", "batch=4", "experts=4", "rebalance=2", "replicas=2"] {
            all.extend(["--set", set]);
        }
        all.extend(["--run-dir", dir]);
        all
    };
    let ran = p.run(&args("one"));
    assert_eq!((ran.status, ran.err.as_str()), (Some(0), ""));
    for r in ended(start(&[&p, &p], &args("many"))) {
        assert_eq!((r.status, r.err.as_str()), (Some(0), ""));
    }
    assert_eq!(weights(&p, "one"), weights(&p, "many"));
}

#[test]
fn launch_starts_a_run_in_several_processes() {
    let p = all("");
    let r = p.run(&[
        "launch",
        "-n",
        "2",
        "run",
        "all.lua",
        "--device",
        device(),
        "--mesh",
        "dp=2",
        "--run-dir",
        "r",
        "--quiet",
    ]);
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{}", r.out);
    assert!(r.out.starts_with("valid loss"), "{}", r.out);
    assert_eq!(p.run_json("r")["steps_done"], 12);
}

#[test]
fn all_processes_run_the_text_of_process_0() {
    let (p, q) = (all(""), place());
    flag(&q, 0);
    q.file("all.lua", "this is no Lua");
    q.file("parts.lua", "nor is this");
    let ran = p.run(&args("one", &["--mesh", "dp=2"]));
    assert_eq!(ran.status, Some(0), "{}", ran.err);
    let (ours, theirs) =
        (args("many", &["--mesh", "dp=2", "--set", "width=8"]), args("x", &["--mesh", "dp=2", "--set", "width=16"]));
    let port = free_port();
    let job = vec![Process::start(&p, 0, 2, port, &ours), Process::start(&q, 1, 2, port, &theirs)];
    for r in ended(job) {
        assert_eq!((r.status, r.err.as_str()), (Some(0), ""));
    }
    assert_eq!(weights(&p, "one"), weights(&p, "many"));
    assert!(q.runs().is_empty() && !q.path("x").exists() && !q.path("many").exists());
}

#[test]
fn a_recipe_may_name_the_mesh() {
    let p = all("recipe.mesh = { dp = 2, zero = 1 }");
    for r in ended(start(&[&p, &p], &args("own", &[]))) {
        assert_eq!((r.status, r.err.as_str()), (Some(0), ""));
    }
    let found = p.run_json("own")["device_description"].as_str().unwrap().to_string();
    assert!(found.starts_with(&format!("mesh dp=2 of 2 x {}", device())), "{found}");
}

#[test]
fn jobs_that_cannot_work_are_refused_in_all_processes() {
    let p = all("");
    for (more, status, says) in [
        (vec![], 2, "the job has 2 processes and one device: each of them would do the same work"),
        (vec!["--mesh", "dp=3"], 2, "2 processes cannot share the 3 devices of mesh dp=3 evenly"),
    ] {
        for r in ended(start(&[&p, &p], &args("r", &more))) {
            assert!(r.status == Some(status) && r.err.contains(says), "{more:?}: {:?} {}", r.status, r.err);
        }
    }
    let port = free_port();
    let job = ["dp=2", "dp=4"].map(|mesh| args("r", &["--mesh", mesh]));
    let job = job.iter().enumerate().map(|(rank, args)| Process::start(&p, rank, 2, port, args)).collect();
    for r in ended(job) {
        assert!(r.status == Some(1) && r.err.contains("differ in the mesh: dp=4 and dp=2"), "{:?} {}", r.status, r.err);
    }
    let mut command = p.command(&args("r", &["--mesh", "dp=2"]));
    let r: Ran = command.env("RANK", "2").env("WORLD_SIZE", "2").env("MASTER_ADDR", "a").output().unwrap().into();
    assert!(r.status == Some(2) && r.err.contains("RANK=2: not less than WORLD_SIZE=2"), "{}", r.err);
    assert!(!p.path("r").exists());
}

#[test]
fn a_signal_to_one_process_stops_all_with_a_checkpoint() {
    let p = all("");
    for (rank, signal, status) in [(0, "-USR1", 75), (1, "-TERM", 143)] {
        let dir = format!("stopped-{rank}");
        let all = start(&[&p, &p], &args(&dir, &["--mesh", "dp=2,zero=1", "--steps", "1000000"]));
        all[0].wait_for(&["\"event\":\"step\"", "\"step\":20,"]);
        all[rank].signal(signal);
        let results = ended(all);
        for r in &results {
            assert_eq!(r.status, Some(status), "{signal}: {}", r.err);
        }
        let last: Value = serde_json::from_str(results[0].out.lines().last().unwrap()).unwrap();
        assert_eq!((last["event"].as_str(), last["status"].as_str()), (Some("done"), Some("interrupted")));
        let step = last["steps"].as_u64().unwrap();
        assert!(p.path(&format!("{dir}/checkpoints/step-{step}")).is_dir());
    }
}

#[test]
fn a_run_resumes_in_another_number_of_processes() {
    if !has_room(4) {
        return;
    }
    let p = all("");
    let mesh = ["--mesh", "dp=4,zero=3"];
    assert_eq!(p.run(&args("whole", &mesh)).status, Some(0));
    for (processes, steps) in [(2, "5"), (4, "8"), (1, "12")] {
        let resume: &[&str] = if steps == "5" { &[] } else { &["--resume"] };
        let more = [&mesh[..], &["--steps", steps], resume].concat();
        for r in ended(start(&vec![&p; processes], &args("parts", &more))) {
            assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{processes}");
        }
    }
    assert_eq!(weights(&p, "whole"), weights(&p, "parts"));
    // On another mesh: one process on one device goes on from it, and two processes from that.
    let moved = [(1, "", "9"), (2, "dp=2", "12")];
    assert_eq!(p.run(&args("moved", &["--mesh", "dp=4,zero=3", "--steps", "5"])).status, Some(0));
    for (processes, mesh, steps) in moved {
        for r in ended(start(&vec![&p; processes], &args("moved", &["--mesh", mesh, "--resume", "--steps", steps]))) {
            assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{mesh}");
        }
    }
    assert_eq!(p.run_json("moved")["steps_done"], 12);
}

#[test]
fn an_edit_is_applied_in_all_processes_or_in_none() {
    let (p, q) = (all(""), all(""));
    let watch = ["--mesh", "dp=2,zero=1", "--watch", "--steps", "1000000"];
    let all = start(&[&p, &q], &args("edited", &watch));
    all[0].wait_for(&["\"event\":\"step\"", "\"step\":10,"]);
    let text = RECIPE.replace(":mean()", ":mean() * 0.5");
    save(&p, "all.lua", &text);
    let event = all[0].wait_for(&["\"event\":\"reload\""]);
    assert!(event.contains("\"ok\":true"), "{event}");
    // A file of this edit is missing in the other process.
    flag(&p, 0);
    std::fs::copy(p.path("flag.safetensors"), p.path("more.safetensors")).unwrap();
    save(&p, "all.lua", &text.replace("-- more", "local more = pl.load('more.safetensors')"));
    let event = all[0].wait_for(&["\"event\":\"reload\""]);
    assert!(
        event.contains("\"ok\":false") && event.contains("rank 1") && event.contains("more.safetensors"),
        "{event}"
    );
    // A module, which process 0 sends.
    save(&p, "parts.lua", "return { squared = function(x) return x:abs() end }\n");
    save(&p, "all.lua", &text.replace("as planned", "as was planned"));
    let event = all[0].wait_for(&["\"event\":\"reload\""]);
    assert!(event.contains("\"ok\":true"), "{event}");
    let step: Value = serde_json::from_str(&all[0].wait_for(&["\"event\":\"step\""])).unwrap();
    all[0].wait_for(&["\"event\":\"step\"", &format!("\"step\":{},", step["step"].as_u64().unwrap() + 100)]);
    all[1].signal("-TERM");
    for r in ended(all) {
        assert_eq!(r.status, Some(143), "{}", r.err);
    }
}

/// SplitMix64, so that every run of the test uses the same moments as far as timing allows.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    Kill,
    Stop,
    Raise,
    MoreData,
    OtherRecipe,
    /// The connection is closed, carries nothing any more, or is slow.
    Close,
    Cut,
    Slow,
}

const FAULTS: [Fault; 8] = [
    Fault::Kill,
    Fault::Stop,
    Fault::Raise,
    Fault::MoreData,
    Fault::OtherRecipe,
    Fault::Close,
    Fault::Cut,
    Fault::Slow,
];

/// Carries the connection of two processes.
struct Proxy {
    port: u16,
    state: Arc<AtomicU8>,
}

const OPEN: u8 = 0;
const CLOSED: u8 = 1;
const CUT: u8 = 2;
const SLOW: u8 = 3;

impl Proxy {
    /// Listens for process 1 and connects it to process 0.
    fn start(to: u16, state: u8) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let state = Arc::new(AtomicU8::new(state));
        let shared = state.clone();
        std::thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                // Process 0 may not listen yet; the other one tries again.
                let Ok(far) = TcpStream::connect(("127.0.0.1", to)) else { continue };
                for (from, to) in [(near.try_clone().unwrap(), far.try_clone().unwrap()), (far, near)] {
                    let state = shared.clone();
                    std::thread::spawn(move || carry(from, to, &state));
                }
            }
        });
        Proxy { port, state }
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream, state: &AtomicU8) {
    let mut buffer = [0; 4096];
    let _ = from.set_read_timeout(Some(Duration::from_millis(20)));
    let _ = to.set_nodelay(true);
    loop {
        let read = from.read(&mut buffer);
        match state.load(Ordering::Relaxed) {
            CLOSED => break,
            CUT => {
                std::thread::sleep(Duration::from_millis(20));
                continue;
            }
            SLOW => std::thread::sleep(Duration::from_millis(1)),
            _ => {}
        }
        match read {
            Ok(0) => break,
            Ok(n) if to.write_all(&buffer[..n]).is_err() => break,
            Err(e) if !matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => break,
            _ => {}
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

const STEPS: &str = "200";

/// Lets a run of two processes fail at a random moment, continues it, and compares its weights with those of a run without a fault.
fn trial(fault: Fault, mesh: &str, expected: &str, rng: &mut Rng) {
    let (p, q) = (all(""), all(""));
    let mesh = ["--mesh", mesh, "--steps", STEPS, "--checkpoint-every", "3", "--keep", "2"];
    let victim = rng.below(2) as usize;
    let moment = 2 + rng.below(60);
    match fault {
        Fault::Raise => flag([&p, &q][victim], 2 * moment as u32),
        Fault::MoreData => q.file("flag.safetensors", [0; 8]),
        _ => {}
    }
    let port = free_port();
    let (ours, mut theirs) = (args("r", &mesh), args("r", &mesh));
    if let Fault::OtherRecipe = fault {
        theirs[1] = "other.lua";
    }
    let proxy = match fault {
        Fault::Close | Fault::Cut => Some(Proxy::start(port, OPEN)),
        Fault::Slow => Some(Proxy::start(port, SLOW)),
        _ => None,
    };
    let near = proxy.as_ref().map_or(port, |proxy| proxy.port);
    let mut job = vec![Process::start(&p, 0, 2, port, &ours), Process::start(&q, 1, 2, near, &theirs)];
    let begun = match fault {
        Fault::Kill | Fault::Stop => {
            job[0].wait_for(&["\"event\":\"step\"", &format!("\"step\":{moment},")]);
            std::thread::sleep(Duration::from_micros(rng.below(4000)));
            job[victim].signal(if matches!(fault, Fault::Kill) { "-KILL" } else { "-STOP" });
            Instant::now()
        }
        Fault::Close | Fault::Cut => {
            job[0].wait_for(&["\"event\":\"step\"", &format!("\"step\":{moment},")]);
            let state = if matches!(fault, Fault::Close) { CLOSED } else { CUT };
            proxy.as_ref().unwrap().state.store(state, Ordering::Relaxed);
            Instant::now()
        }
        _ => Instant::now(),
    };
    if let Fault::Stop = fault {
        // The stopped process cannot end; the other one has to.
        let stopped = job.remove(victim);
        let other = job.remove(0).end();
        let says = format!("error: rank {victim} has not answered for 4 s");
        assert!(
            other.status == Some(75) && other.err.starts_with(&says),
            "{fault:?}: {:?} {}",
            other.status,
            other.err
        );
        stopped.signal("-CONT");
        let late = stopped.end();
        assert!(
            late.status == Some(75) && late.err.contains("the other processes have given up on this one"),
            "{}",
            late.err
        );
    } else {
        let results = ended(job);
        let other = &results[1 - victim];
        match fault {
            Fault::Kill => {
                let says = format!("error: rank {victim} ended without a message: it was killed");
                assert!(other.status == Some(75) && other.err.starts_with(&says), "{:?} {}", other.status, other.err);
            }
            Fault::Raise => {
                let own = &results[victim];
                assert!(own.status == Some(3) && own.err.starts_with("all.lua:"), "{:?} {}", own.status, own.err);
                let says = format!("error: rank {victim} ended: all.lua:");
                assert!(other.status == Some(3) && other.err.starts_with(&says), "{:?} {}", other.status, other.err);
                assert!(other.err.lines().next().unwrap().contains("as planned"), "{}", other.err);
            }
            Fault::MoreData => {
                let first = &results[0];
                assert!(
                    first.err.starts_with("error: rank 1 ended: ") && first.err.contains("flag.safetensors"),
                    "{}",
                    first.err
                );
            }
            Fault::OtherRecipe => {
                for r in &results {
                    assert!(
                        r.status == Some(1) && r.err.contains("differ in the recipe: other.lua and all.lua"),
                        "{}",
                        r.err
                    );
                }
            }
            Fault::Close | Fault::Cut => {
                for (rank, r) in results.iter().enumerate() {
                    let other = format!("rank {}", 1 - rank);
                    let how =
                        if let Fault::Close = fault { "ended without a message" } else { "has not answered for 4 s" };
                    let own = "the other processes have given up on this one";
                    let named = r.err.contains(&other) && r.err.contains(how) || r.err.contains(own);
                    assert!(r.status == Some(75) && named, "{fault:?}, rank {rank}: {:?} {}", r.status, r.err);
                }
            }
            Fault::Slow => {
                for r in &results {
                    assert_eq!((r.status, r.err.as_str()), (Some(0), ""));
                }
                assert_eq!(weights(&p, "r"), expected);
            }
            Fault::Stop => {}
        }
    }
    assert!(begun.elapsed() < Duration::from_secs(30), "{fault:?}: {:?}", begun.elapsed());
    // Restarted, the run reaches the weights of one without a fault.
    flag(&p, 0);
    flag(&q, 0);
    // The flag of process 0 counts as data of the run.
    let changed: &[&str] = if let Fault::Raise = fault { &["--changed-data"] } else { &[] };
    let resume = [&mesh[..], &["--resume"], changed].concat();
    for r in ended(start(&[&p, &q], &args("r", &resume))) {
        assert_eq!(r.status, Some(0), "{fault:?}, resumed: {}", r.err);
        assert!(r.err.is_empty() || !changed.is_empty(), "{fault:?}, resumed: {}", r.err);
    }
    assert_eq!(weights(&p, "r"), expected, "{fault:?} at step {moment}");
}

#[test]
fn failures_end_all_processes_and_a_restart_continues_to_the_same_bits() {
    let p = all("");
    let meshes = ["dp=2,zero=1", "pp=2"];
    let expected = meshes.map(|mesh| {
        let dir = format!("straight-{mesh}");
        let ran = p.run(&args(&dir, &["--mesh", mesh, "--steps", STEPS]));
        assert_eq!(ran.status, Some(0), "{}", ran.err);
        weights(&p, &dir)
    });
    let trials = std::env::var("PERILUNE_TRIALS").map_or(FAULTS.len(), |n| n.parse().unwrap());
    let next = AtomicUsize::new(0);
    // A trial has two processes.
    let at_once = std::thread::available_parallelism().map_or(1, |n| n.get().div_ceil(2));
    std::thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                loop {
                    let k = next.fetch_add(1, Ordering::Relaxed);
                    if k >= trials {
                        break;
                    }
                    // Each fault in turn on one mesh, then on the other.
                    let which = (k + k / FAULTS.len()) % meshes.len();
                    trial(FAULTS[k % FAULTS.len()], meshes[which], &expected[which], &mut Rng(7 + k as u64));
                }
            });
        }
    });
}
