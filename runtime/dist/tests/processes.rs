//! Jobs of real processes on this machine: killed, stopped, panicking ones. Each process is this test binary, started again.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

use perilune_core::Mesh;
use perilune_core::mesh::Axis;
use perilune_dist::links::{Links, Options};
use perilune_dist::rendezvous::{self, Explicit};
use perilune_dist::{Exchange, Rank};
use perilune_plan::Peers;
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

const PROCESSES: usize = 3;
const SILENCE: Duration = Duration::from_secs(3);

fn options() -> Options {
    Options { join: Duration::from_secs(30), silence: SILENCE, ..Options::default() }
}

/// What each device leaves in a round: a size and bytes that depend on all numbers.
fn bytes(device: usize, run: u64) -> Vec<u8> {
    let size = [10, 3000, 400_000][(run % 3) as usize] + device;
    (0..size).map(|i| (i + device * 3 + run as usize * 5) as u8).collect()
}

fn digest(all: &[Arc<[u8]>]) -> u64 {
    all.iter().flat_map(|m| m.iter()).fold(7, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3))
}

/// One process of a job: exchanges until its orders say how it ends. Prints a line for each run.
#[test]
fn process() {
    let Ok(orders) = std::env::var("PERILUNE_TEST_PROCESS") else { return };
    let place = rendezvous::find(&Explicit::default(), &rendezvous::process_env).unwrap();
    let recipe = if orders == "other-recipe" { "b" } else { "a" };
    let links = match Links::join(&place, &[("recipe", recipe.into())], options()) {
        Ok(links) => links,
        Err(e) => return println!("failed: {e}"),
    };
    let mesh = Mesh::parse(&format!("dp={}", place.processes)).unwrap();
    let exchange = links.exchange(mesh, &(0..place.processes).collect::<Vec<_>>()).unwrap();
    for run in 1.. {
        if run == 20 {
            match orders.as_str() {
                "raise" => {
                    links.abort(3, "recipe.lua:12: no such thing");
                    println!("raised");
                    std::process::exit(3);
                }
                "panic" => panic!("as ordered"),
                "exit" => std::process::exit(5),
                "other-plan" => println!("going on"),
                "finish" => {
                    links.finish().unwrap();
                    return println!("finished");
                }
                "wait" | "other-recipe" => {}
                other => unreachable!("{other}"),
            }
        }
        let rank = Rank::new(exchange.clone(), run, place.rank);
        let plan = if run >= 20 && orders == "other-plan" { [1] } else { [2] };
        let agreed = match run % 10 {
            0 => links.agree("the plan of recipe.lua:7", &plan, || format!("recipe.lua:{}: matmul", 5 + plan[0])),
            _ => Ok(()),
        };
        match agreed.and_then(|()| rank.exchange(Axis::Dp, &bytes(place.rank, run))) {
            Ok(all) => println!("run {run} {}", digest(&all)),
            Err(e) => {
                let text = e.to_string();
                let cause = links.abort(1, &text);
                println!("failed: {text}");
                println!("cause: {}", links.message(&cause));
                return;
            }
        }
        exchange.end(run);
        std::thread::sleep(Duration::from_millis(2));
    }
}

struct Process {
    child: Child,
    lines: Receiver<String>,
}

impl Process {
    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Reads until a line that begins with a word; `None` at the end of the output.
    fn line(&self, word: &str) -> Option<String> {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let line = self.lines.recv_timeout(until.saturating_duration_since(Instant::now())).ok()?;
            // The test harness prints before the first line without a line break.
            if let Some(at) = line.find(word) {
                return Some(line[at + word.len()..].trim().to_string());
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Starts the processes of a job, with these orders.
fn start(orders: [&str; PROCESSES]) -> Vec<Process> {
    let port = free_port().to_string();
    let mut all = Vec::new();
    for (rank, orders) in orders.into_iter().enumerate() {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["process", "--exact", "--nocapture", "--test-threads=1"]);
        for (name, _) in std::env::vars() {
            if name.starts_with("SLURM_") || name.starts_with("PET_") || name.starts_with("TORCHELASTIC_") {
                command.env_remove(name);
            }
        }
        command.env("PERILUNE_TEST_PROCESS", orders).env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
        command.env("WORLD_SIZE", PROCESSES.to_string()).env("LOCAL_WORLD_SIZE", PROCESSES.to_string());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).stdin(Stdio::null()).spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let (send, lines) = channel();
        std::thread::spawn(move || out.lines().map_while(Result::ok).try_for_each(|line| send.send(line)));
        all.push(Process { child, lines });
    }
    all
}

fn anonymous(text: &str) -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    text.replace(&format!(" (host {host})"), "")
}

/// A message without who has observed it, and without whose it is.
fn observed(text: &str) -> &str {
    let text = text.strip_prefix("the other processes have given up on this one: ").unwrap_or(text);
    text.split_once(" (noticed by ").map_or(text, |(what, _)| what)
}

/// The messages with which processes fail, and the seconds until the last of them.
fn failures(all: &[Process], ranks: &[usize]) -> (Vec<String>, f64) {
    let start = Instant::now();
    let texts = ranks.iter().map(|rank| {
        let text = anonymous(&all[*rank].line("failed: ").expect("no failure"));
        let cause = anonymous(&all[*rank].line("cause: ").expect("no cause"));
        // A call of all processes fails with what rank 0 has seen.
        assert!(observed(&text).starts_with(observed(&cause)), "{text}\n{cause}");
        cause
    });
    let texts = texts.collect();
    (texts, start.elapsed().as_secs_f64())
}

#[test]
#[ignore = "starts, stops and kills processes; .ci/soak runs it"]
fn processes_exchange_what_threads_do() {
    let mesh = Mesh::parse("dp=3").unwrap();
    let exchange = Arc::new(Exchange::new(mesh));
    let all = start(["wait"; PROCESSES]);
    for run in 1..=30 {
        let found: Vec<String> = all.iter().map(|p| p.line(&format!("run {run} ")).unwrap()).collect();
        let expected: Vec<Arc<[u8]>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..PROCESSES)
                .map(|k| {
                    let rank = Rank::new(exchange.clone(), run, k);
                    scope.spawn(move || rank.exchange(Axis::Dp, &bytes(k, run)).unwrap())
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).next_back().unwrap()
        });
        assert!(found.iter().all(|line| *line == digest(&expected).to_string()), "{found:?}");
    }
}

/// Signals a process at some moment, and returns what the others say.
fn signalled(victim: usize, signal: Signal, moment: u64) -> (Vec<Process>, Vec<String>, f64) {
    let all = start(["wait"; PROCESSES]);
    all[victim].line(&format!("run {moment} ")).unwrap();
    kill_process(all[victim].pid(), signal).unwrap();
    let others: Vec<usize> = (0..PROCESSES).filter(|rank| *rank != victim).collect();
    let (texts, seconds) = failures(&all, &others);
    (all, texts, seconds)
}

/// One victim and moment each; `PERILUNE_PROCESSES=20` tries so many.
fn trials() -> impl Iterator<Item = (usize, u64)> {
    let count = std::env::var("PERILUNE_PROCESSES").map_or(1, |n| n.parse().unwrap());
    (0..count).map(|k: u64| ((k * 7 + 2) as usize % PROCESSES, 3 + k * 5 % 17))
}

#[test]
#[ignore = "starts, stops and kills processes; .ci/soak runs it"]
fn a_killed_process_is_named() {
    for (victim, moment) in trials() {
        let (_, texts, seconds) = signalled(victim, Signal::KILL, moment);
        for text in texts {
            assert!(text.starts_with(&format!("rank {victim} ended without a message: it was killed")), "{text}");
        }
        assert!(seconds < 5.0, "{seconds}");
    }
}

#[test]
#[ignore = "starts, stops and kills processes; .ci/soak runs it"]
fn a_stopped_process_is_named_and_learns_it_later() {
    for (victim, moment) in trials() {
        let (all, texts, seconds) = signalled(victim, Signal::STOP, moment);
        assert_eq!(texts, vec![format!("rank {victim} has not answered for 3 s"); 2]);
        assert!(seconds < SILENCE.as_secs_f64() + 5.0, "{seconds}");
        kill_process(all[victim].pid(), Signal::CONT).unwrap();
        let (own, _) = failures(&all, &[victim]);
        let expected = format!("the other processes have given up on this one: rank {victim} has not answered for 3 s");
        assert_eq!(own, [expected]);
    }
}

#[test]
#[ignore = "starts, stops and kills processes; .ci/soak runs it"]
fn a_short_stop_is_no_failure() {
    let all = start(["wait"; PROCESSES]);
    all[1].line("run 5 ").unwrap();
    kill_process(all[1].pid(), Signal::STOP).unwrap();
    std::thread::sleep(SILENCE / 3);
    kill_process(all[1].pid(), Signal::CONT).unwrap();
    for process in &all {
        process.line("run 60 ").unwrap();
    }
}

/// The orders of the last process, and what the two others say.
fn ordered(orders: &str) -> Vec<String> {
    let all = start(["wait", "wait", orders]);
    let (texts, seconds) = failures(&all, &[0, 1]);
    assert!(seconds < 20.0, "{seconds}");
    texts
}

#[test]
#[ignore = "starts, stops and kills processes; .ci/soak runs it"]
fn failures_of_one_process_are_those_of_all() {
    assert_eq!(ordered("raise"), ["rank 2 ended: recipe.lua:12: no such thing"; 2]);
    assert_eq!(ordered("panic"), ["rank 2 ended: a thread panicked"; 2]);
    for text in ordered("exit") {
        assert!(text.starts_with("rank 2 ended without a message: it was killed"), "{text}");
    }
    for text in ordered("finish") {
        assert!(text.contains("rank 2 has finished, but the other processes still wait for it"), "{text}");
    }
}

#[test]
#[ignore = "starts, stops and kills processes; .ci/soak runs it"]
fn differences_stop_all_processes() {
    let all = start(["wait", "wait", "other-plan"]);
    let expected = "rank 0 and rank 2 do not agree on the plan of recipe.lua:7";
    for process in &all {
        assert_eq!(anonymous(&process.line("failed: ").unwrap()), expected);
        assert_eq!(anonymous(&process.line("  ").unwrap()), "rank 0: recipe.lua:7: matmul");
        assert_eq!(anonymous(&process.line("  ").unwrap()), "rank 2: recipe.lua:6: matmul");
    }
    let all = start(["wait", "wait", "other-recipe"]);
    for (rank, process) in all.iter().enumerate() {
        let text = anonymous(&process.line("failed: ").unwrap());
        let start = if rank == 0 { "" } else { "refused by rank 0 at 127.0.0.1:" };
        assert!(text.starts_with(start) && text.contains("rank 2 and rank 0 differ in the recipe: b and a"), "{text}");
    }
}
