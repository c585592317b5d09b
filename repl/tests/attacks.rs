//! Runs the scripts of `tests/attacks/` under the commands of the program: each must be contained.
//!
//! Contained means: the process ends by itself or within two seconds of two interrupts, with an exit status of its own; no
//! file outside the run directory changes; no output has the victim's secret, a control character or a Rust panic; memory
//! stays below a bound; and a run beside it keeps its bits.
//!
//! By default a sample runs, which `PERILUNE_SEED` shifts: each script under one command as one user. `PERILUNE_ATTACKS=all` runs each
//! script under all commands, with and without `--untrusted`, `PERILUNE_ATTACKS=GROUP,GROUP` those of some files, and
//! `PERILUNE_ATTACKS=GROUP/NAME` one script, whose output it prints. `replay` records the run first, and repeats it confined. A test
//! that runs as root also runs scripts as a user without privileges.
#![allow(clippy::unwrap_used)]

#[path = "support/sandbox.rs"]
mod sandbox;

use sandbox::{SECRET, Sandbox, User};
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A script.
struct Attack {
    name: String,
    tries: String,
    expect: Expect,
    text: String,
}

impl Attack {
    /// Whether the script is a recipe, of which one part attacks.
    fn is_recipe(&self) -> bool {
        self.text.trim_end().ends_with("recipe") || self.text.contains("return require \"base\"")
    }

    /// The file for a command. `check` and `profile` run recipes only: there a plain script runs in `recipe.model`.
    fn source(&self, command: &str, (outside, temp): (&str, &str)) -> String {
        let names = format!("local OUTSIDE, TEMP = {outside:?}, {temp:?}");
        if self.is_recipe() || matches!(command, "run" | "repl") {
            return format!("{names} {}", self.text);
        }
        let end = "return require(\"perilune\").nn.Linear(4, 1)";
        if command == "replay" {
            // The error is caught, so that there is a run to replay.
            let text = format!("pcall(function() {} end)", self.text);
            return format!("{names} return require \"base\" {{ model = function() {text}\n{end} end }}");
        }
        format!("{names} return require \"base\" {{ model = function() do {}\nend {end} end }}", self.text)
    }

    /// How it may end. The prompt builds a recipe and takes no step, so the part that attacks may not run.
    fn expected(&self, command: &str, is_confined: bool) -> Expect {
        match &self.expect {
            _ if command == "replay" || (command == "repl" && self.is_recipe()) => Expect::Any,
            // A stranger's recipe does not even read its own folder.
            Expect::Fine if is_confined => Expect::Any,
            Expect::Walled => {
                if is_confined {
                    Expect::Error
                } else {
                    Expect::Any
                }
            }
            other => other.clone(),
        }
    }
}

/// How a script may end.
#[derive(Clone, PartialEq, Debug)]
enum Expect {
    /// With status 0.
    Fine,
    /// With an error, by itself.
    Error,
    /// By an interrupt, or by an error before.
    Stops,
    /// With an error, by itself, where it is confined.
    Walled,
    /// In any contained way.
    Any,
}

/// The commands, with the arguments after the script's name.
const COMMANDS: [(&str, &[&str]); 4] =
    [("run", &["--quiet"]), ("check", &[]), ("repl", &[]), ("profile", &["--steps", "1"])];

/// The commands that confine.
const CONFINED: [(&str, &[&str]); 4] = [
    ("run", &["--quiet", "--untrusted"]),
    ("check", &["--untrusted"]),
    ("repl", &["--untrusted"]),
    ("replay", &["--quiet", "--untrusted", "--run-dir", "runs/again"]),
];
/// The files whose scripts are about confinement.
const ABOUT_WALLS: [&str; 4] = ["confined", "floods", "kernels", "walls"];
/// By default one script in so many runs: of those about confinement, of the others without it, and of the others with it.
const ONE_IN_ABOUT_WALLS: usize = 3;
const ONE_IN: usize = 5;
const ONE_IN_CONFINED: usize = 25;

/// Lua's limit, low so that it is soon full, and what the process may have in all.
const LUA_MEMORY: &str = "64MiB";
const MAX_BYTES: u64 = 1536 << 20;

/// Time before the first interrupt: for scripts that end by themselves, on a busy machine too, for those that may, and for those that do
/// not.
const PATIENCE: Duration = Duration::from_secs(90);
const A_WHILE: Duration = Duration::from_secs(10);
const SOON: Duration = Duration::from_millis(1500);
/// Time between two interrupts, and from the second to the end.
const BETWEEN: Duration = Duration::from_millis(1200);
const GRACE: Duration = Duration::from_secs(2);

fn attacks() -> Vec<Attack> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/attacks");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    let mut out: Vec<Attack> = Vec::new();
    for file in files {
        let group = file.file_stem().unwrap().to_string_lossy().into_owned();
        for block in std::fs::read_to_string(&file).unwrap().split("\n--# ").skip(1) {
            if let Some(rest) = block.strip_prefix("expect: ") {
                let (expect, text) = rest.split_once('\n').unwrap();
                let last = out.last_mut().unwrap();
                last.text = text.to_string();
                last.expect = match expect {
                    "fine" => Expect::Fine,
                    "error" => Expect::Error,
                    "stops" => Expect::Stops,
                    "any" => Expect::Any,
                    "walled" => Expect::Walled,
                    other => panic!("{}: expect: {other}", last.name),
                };
            } else {
                let (name, tries) = block.split_once(": ").unwrap();
                let (name, tries) = (format!("{group}/{name}"), tries.trim().to_string());
                out.push(Attack { name, tries, expect: Expect::Any, text: String::new() });
            }
        }
    }
    assert!(out.len() >= 150 && out.iter().all(|a| !a.text.is_empty() && !a.tries.is_empty()));
    out
}

/// What became of a process.
struct Ended {
    status: Option<ExitStatus>,
    out: String,
    /// It was interrupted.
    interrupted: bool,
    most_bytes: u64,
    seconds: f64,
}

fn interrupt(child: &Child) {
    let _ = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).stderr(Stdio::null()).status();
}

/// The peak of a process's memory so far.
fn peak(child: &Child) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    line.and_then(|l| l.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) << 10
}

fn follow(mut child: Child, patience: Duration) -> Ended {
    let mut pipes =
        [Box::new(child.stdout.take().unwrap()) as Box<dyn Read + Send>, Box::new(child.stderr.take().unwrap())];
    let readers = pipes.each_mut().map(|pipe| {
        let mut pipe = std::mem::replace(pipe, Box::new(std::io::empty()));
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            // An output without end is cut, and read on so that the process does not wait.
            let _ = (&mut pipe).take(4 << 20).read_to_end(&mut bytes);
            let _ = std::io::copy(&mut pipe, &mut std::io::sink());
            String::from_utf8_lossy(&bytes).into_owned()
        })
    });
    let (begun, mut interrupts, mut most_bytes) = (Instant::now(), 0, 0);
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break Some(status);
        }
        most_bytes = peak(&child).max(most_bytes);
        let passed = begun.elapsed();
        if passed > patience + BETWEEN * interrupts && interrupts < 2 {
            interrupt(&child);
            interrupts += 1;
        }
        if passed > patience + BETWEEN * 2 + GRACE || most_bytes > MAX_BYTES {
            child.kill().unwrap();
            child.wait().unwrap();
            break None;
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let out = readers.map(|r| r.join().unwrap()).concat();
    Ended { status, out, interrupted: interrupts > 0, most_bytes, seconds: begun.elapsed().as_secs_f64() }
}

/// The first rule that an end breaks.
fn judge(expect: &Expect, end: &Ended) -> Result<(), String> {
    let Some(status) = end.status else {
        let rule = if end.most_bytes > MAX_BYTES { "takes too much memory" } else { "does not end" };
        return Err(format!("{rule} ({} MiB, {:.1} s)", end.most_bytes >> 20, end.seconds));
    };
    // An interrupt that no handler takes ends the process as the shell expects it.
    let code = status.code().or((status.signal() == Some(2) && end.interrupted).then_some(130));
    let Some(code) = code else { return Err(format!("is killed: {status}")) };
    let wrong = match expect {
        Expect::Fine => code != 0,
        Expect::Error => !(1..=4).contains(&code) || end.out.trim().is_empty() || end.interrupted,
        Expect::Stops => !matches!(code, 1..=4 | 130),
        Expect::Any | Expect::Walled => !matches!(code, 0..=4 | 130),
    };
    let cut = |text: &str| text.chars().take(600).collect::<String>();
    if wrong {
        return Err(format!("ends with status {code}, expected {expect:?}: {}", cut(&end.out)));
    }
    for bad in [SECRET, "panicked at", "4711", "internal error"] {
        if end.out.contains(bad) {
            return Err(format!("prints {bad}: {}", cut(&end.out)));
        }
    }
    let controls = |c: &char| {
        (c.is_control() && !matches!(c, '\n' | '\t')) || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    match end.out.chars().find(controls) {
        Some(c) => Err(format!("prints U+{:04X}: {}", c as u32, cut(&end.out).escape_debug())),
        None => Ok(()),
    }
}

/// Runs a script under a command in a sandbox of its own.
fn attempt(attack: &Attack, (command, more): (&str, &[&str]), user: User, print: bool) -> Result<f64, String> {
    let mut sandbox = Sandbox::new();
    let path = |name: &str| sandbox.path(name).display().to_string();
    let text = attack.source(command, (&path("victim"), &path("temp")));
    std::fs::write(sandbox.path("work/attack.lua"), text).unwrap();
    sandbox.give_to(user);
    let before = sandbox.snapshot();
    let device = sandbox::device();
    let mut args = vec![command, "attack.lua", "--device", &device, "--lua-memory", LUA_MEMORY];
    if command == "replay" {
        let record =
            ["run", "attack.lua", "--quiet", "--device", &device, "--lua-memory", LUA_MEMORY, "--run-dir", "runs/one"];
        let child = sandbox.command(&record).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        judge(&Expect::Any, &follow(child, A_WHILE))?;
        // Lua's limit is in the recorded command, and the device in the record.
        args = vec![command, "runs/one"];
    }
    args.extend(more);
    let expect = attack.expected(command, more.contains(&"--untrusted"));
    let mut child = sandbox.command(&args);
    let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The prompt ends with its input.
    let _ = child.stdin.take().unwrap().write_all(b"print(1 + 1)\n");
    let patience = match expect {
        Expect::Stops => SOON,
        Expect::Any => A_WHILE,
        _ => PATIENCE,
    };
    let end = follow(child, patience);
    if print {
        println!("{:?} after {:.2} s, {} MiB\n{}", end.status, end.seconds, end.most_bytes >> 20, end.out);
    }
    judge(&expect, &end)?;
    let after = sandbox.snapshot();
    if before != after {
        let changed = after.iter().filter(|(k, v)| before.get(*k) != Some(v)).map(|(k, _)| k);
        let gone = before.keys().filter(|k| !after.contains_key(*k));
        return Err(format!("changes {:?}", changed.chain(gone).collect::<Vec<_>>()));
    }
    Ok(end.seconds)
}

/// Runs the base recipe; the hash of its weights.
fn neutral(sandbox: &Sandbox) -> String {
    let words = ["run", "neutral.lua", "--seed", "3", "--json", "--device", &sandbox::device()];
    let out = sandbox.command(&words).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let done: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    done["weights"].as_str().unwrap().to_string()
}

/// A script, the command that runs it with its arguments, and the user.
type Job<'a> = (&'a Attack, (&'static str, &'static [&'static str]), User);

/// Each script under all commands as all users.
fn every<'a>(attacks: impl Iterator<Item = &'a Attack>) -> Vec<Job<'a>> {
    let mut jobs = Vec::new();
    for attack in attacks {
        for command in COMMANDS.iter().chain(&CONFINED) {
            // An endless script leaves no run to replay.
            if command.0 != "replay" || attack.expect != Expect::Stops {
                jobs.extend(User::all().iter().map(|user| (attack, *command, *user)));
            }
        }
    }
    jobs
}

/// Scripts under one command as one user each, which `PERILUNE_SEED` shifts.
fn sample(attacks: &[Attack]) -> Vec<Job<'_>> {
    let seed = std::env::var("PERILUNE_SEED").ok().and_then(|text| text.parse::<usize>().ok()).unwrap_or(7);
    let users = User::all();
    let mut jobs = Vec::new();
    for (k, attack) in attacks.iter().enumerate() {
        let group = attack.name.split('/').next().unwrap_or_default();
        let about_walls = ABOUT_WALLS.contains(&group);
        let due = |one_in: usize| k % one_in == seed % one_in;
        if due(ONE_IN) && !about_walls {
            let turn = (k + seed) / ONE_IN;
            // A fourth as the user without privileges, under another command each time.
            let (round, command) = (turn / COMMANDS.len(), turn % COMMANDS.len());
            let user = if round % 4 == command { users[users.len() - 1] } else { users[0] };
            jobs.push((attack, COMMANDS[command], user));
        }
        let one_in = if about_walls { ONE_IN_ABOUT_WALLS } else { ONE_IN_CONFINED };
        let turn = (k + seed) / one_in;
        let command = CONFINED[turn % CONFINED.len()];
        if due(one_in) && !(command.0 == "replay" && attack.expect == Expect::Stops) {
            jobs.push((attack, command, users[(turn / CONFINED.len() + turn) % users.len()]));
        }
    }
    jobs
}

#[test]
fn every_attack_is_contained() {
    let wanted = std::env::var("PERILUNE_ATTACKS").unwrap_or_default();
    let one = wanted.contains('/');
    let named = |attack: &Attack| {
        let group = attack.name.split('/').next().unwrap_or_default();
        wanted.split(',').any(|w| w == "all" || w == group || w == attack.name)
    };
    let attacks = attacks();
    let jobs = if wanted.is_empty() { sample(&attacks) } else { every(attacks.iter().filter(|a| named(a))) };
    assert!(!jobs.is_empty(), "PERILUNE_ATTACKS={wanted}: there is no such script");
    let beside = Sandbox::new();
    std::fs::write(beside.path("work/neutral.lua"), "return require \"base\" { params = { steps = 20 } }").unwrap();
    let weights = neutral(&beside);
    let (next, broken, times) = (AtomicUsize::new(0), Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    let threads = std::thread::available_parallelism().map_or(2, |n| n.get()).clamp(2, 16);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((attack, command, user)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    match attempt(attack, *command, *user, one) {
                        Ok(seconds) => times.lock().unwrap().push((seconds, &attack.name, command.0)),
                        Err(why) => broken
                            .lock()
                            .unwrap()
                            .push(format!("{} ({}) under {} as {user:?}: {why}", attack.name, attack.tries, command.0)),
                    }
                }
            });
        }
        while next.load(Ordering::Relaxed) < jobs.len() {
            assert_eq!(neutral(&beside), weights, "a run beside the attacks");
            std::thread::sleep(Duration::from_secs(5));
        }
    });
    let mut times = times.into_inner().unwrap();
    times.sort_by(|a, b| b.0.total_cmp(&a.0));
    times.iter().take(10).for_each(|(seconds, name, command)| println!("{seconds:6.1} s: {name} under {command}"));
    println!("{} attempts", jobs.len());
    let broken = broken.into_inner().unwrap();
    assert!(broken.is_empty(), "{} of {} are not contained:\n{}", broken.len(), jobs.len(), broken.join("\n"));
}
