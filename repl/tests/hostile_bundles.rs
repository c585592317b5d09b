//! Opens hostile bundles with every command that takes one: each must be contained.
//!
//! Contained means: the command ends by itself within its time, with an exit status of its own; it prints no panic, no control
//! character, no secret of the victim and not more than a screenful of what the bundle says; its memory stays below a bound; no file
//! outside the run directory changes; and where it refuses, the message names the rule.
//!
//! `hostile/` has the bundles: `archives.rs` those whose bytes are forged, `manifests.rs`, `signatures.rs`, and `records.rs`
//! those that are whole and whose run is not. By default a bundle is opened by two of the commands, which `PERILUNE_SEED` shifts.
//! `PERILUNE_ATTACKS=all` opens it with all, and as another user too if the test runs as root. `PERILUNE_HOSTILE=NAME` opens one
//! with all, and prints what they do.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

#[path = "../../runtime/bundle/tests/support/forge.rs"]
mod archive;
mod hostile;
#[path = "support/forge.rs"]
mod record;
#[path = "support/sandbox.rs"]
mod sandbox;
mod support;

use hostile::{Expect, Hostile};
use sandbox::{SECRET, Sandbox, User};
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The commands, where `BAD` is the bundle and `GOOD` another one. Results are written below `runs/`.
const COMMANDS: [(&str, &[&str]); 12] = [
    ("verify", &["bundle", "verify", "BAD"]),
    ("inspect", &["bundle", "inspect", "BAD"]),
    ("inspect --json", &["bundle", "inspect", "BAD", "--json"]),
    ("diff as a", &["bundle", "diff", "BAD", "GOOD"]),
    ("diff as b", &["bundle", "diff", "GOOD", "BAD"]),
    ("diff --bisect as a", &["bundle", "diff", "BAD", "GOOD", "--bisect", "--accept-missing-walls", "--time", "30s"]),
    ("diff --bisect as b", &["bundle", "diff", "GOOD", "BAD", "--bisect", "--accept-missing-walls", "--time", "30s"]),
    ("extract", &["bundle", "extract", "BAD", "runs/out"]),
    ("run", &["run", "BAD", "--run-dir", "runs/run", "--accept-missing-walls", "--time", "30s"]),
    // Its run directory has the name that the bundle chooses.
    ("run --json", &["run", "BAD", "--json", "--accept-missing-walls", "--time", "30s"]),
    ("replay", &["replay", "BAD", "--run-dir", "runs/replay", "--accept-missing-walls", "--time", "30s"]),
    ("replay --steps", &["replay", "BAD", "--steps", "2..4", "--accept-missing-walls", "--time", "30s"]),
];

/// A bound on the time of a command, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(60);
/// A bound on the memory of a process and of those that it starts.
const MAX_BYTES: u64 = 1 << 30;
/// A bound on the output of commands that do not print all of the manifest.
const MAX_OUTPUT: usize = 64 << 10;

/// Runs a command in a sandbox, and returns its exit status and its output.
fn run(sandbox: &Sandbox, words: &[&str], bad: &str) -> Result<(i32, String), String> {
    let args: Vec<&str> = words
        .iter()
        .map(|w| {
            if *w == "BAD" {
                bad
            } else if *w == "GOOD" {
                "good.plb"
            } else {
                w
            }
        })
        .collect();
    let (out, err) = (sandbox.path("temp/out"), sandbox.path("temp/err"));
    let file = |path| Stdio::from(std::fs::File::create(path).unwrap());
    // The memory limit of the program counts tensors; this one counts everything.
    let mut command = sandbox.command(&args);
    let mut child = command.stdout(file(&out)).stderr(file(&err)).spawn().unwrap();
    let begun = Instant::now();
    let mut most = 0;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        most = sandbox::peak_with_children(child.id()).max(most);
        if begun.elapsed() > PATIENCE || most > MAX_BYTES {
            child.kill().unwrap();
            child.wait().unwrap();
            return Err(format!(
                "does not end, or takes too much memory: {} s, {} MiB",
                begun.elapsed().as_secs(),
                most >> 20
            ));
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let text = [&out, &err].map(|path| String::from_utf8_lossy(&std::fs::read(path).unwrap()).into_owned()).concat();
    for path in [out, err] {
        std::fs::remove_file(path).unwrap();
    }
    let code = status.code().ok_or_else(|| format!("is killed: {:?}", status.signal()))?;
    Ok((code, text))
}

/// The first rule that the end of a command breaks.
fn judge(bundle: &Hostile, name: &str, code: i32, text: &str) -> Result<(), String> {
    let cut = |text: &str| text.chars().take(800).collect::<String>().escape_debug().to_string();
    if !(0..=4).contains(&code) {
        return Err(format!("ends with status {code}: {}", cut(text)));
    }
    for bad in [SECRET, "panicked at", "this is a bug", "internal error"] {
        if text.contains(bad) {
            return Err(format!("prints {bad}: {}", cut(text)));
        }
    }
    let obeyed = |c: &char| {
        (c.is_control() && !matches!(c, '\n' | '\t')) || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    if let Some(c) = text.chars().find(obeyed) {
        return Err(format!("prints U+{:04X}: {}", c as u32, cut(text)));
    }
    if text.len() > MAX_OUTPUT && name != "inspect --json" && !name.starts_with("diff") {
        return Err(format!("prints {} bytes: {}", text.len(), cut(text)));
    }
    if name == "inspect --json" && code == 0 {
        serde_json::from_str::<serde_json::Value>(text).map_err(|e| format!("prints no JSON: {e}"))?;
    }
    let refused = |rule: &str| match code != 0 && text.contains(rule) {
        true => Ok(()),
        false => Err(format!("status {code}, and the message does not say {rule:?}: {}", cut(text))),
    };
    match &bundle.expect {
        Expect::Refused(rule) => refused(rule),
        Expect::Where(commands, rule) if commands.contains(&name) => refused(rule),
        Expect::Where(..) | Expect::Contained => Ok(()),
    }
}

/// Opens a bundle with all commands in a sandbox of its own.
fn attempt(bundle: &Hostile, good: &[u8], user: User, commands: &[usize], print: bool) -> Vec<String> {
    let mut sandbox = Sandbox::new();
    std::fs::write(sandbox.path("work/good.plb"), good).unwrap();
    std::fs::create_dir(sandbox.path("work/runs")).unwrap();
    let bad = sandbox.path("work/bad.plb");
    (bundle.write)(&bad);
    sandbox.give_to(user);
    let before = sandbox.snapshot();
    let mut broken = Vec::new();
    for (name, words) in commands.iter().map(|c| COMMANDS[*c]) {
        let begun = Instant::now();
        let ended = run(&sandbox, words, "bad.plb");
        if print {
            println!("{name}, {:.2} s: {ended:?}", begun.elapsed().as_secs_f64());
        }
        let mut found = ended.and_then(|(code, text)| judge(bundle, name, code, &text));
        // What is extracted stays in its folder.
        let mut beside = std::fs::read_dir(sandbox.path("work/runs")).unwrap().flatten();
        if name == "extract" && beside.any(|entry| entry.file_name() != "out") {
            found = found.and(Err("writes beside the folder".into()));
        }
        if sandbox.snapshot() != before {
            let after = sandbox.snapshot();
            let changed: Vec<_> = after.iter().filter(|(k, v)| before.get(*k) != Some(v)).map(|(k, _)| k).collect();
            found = found.and(Err(format!("changes {changed:?} or removes a file")));
        }
        if let Err(why) = found {
            broken.push(format!("{} under {name} as {user:?}: {why}", bundle.name));
        }
    }
    broken
}

#[test]
fn every_hostile_bundle_is_contained() {
    let wanted = std::env::var("PERILUNE_HOSTILE").ok();
    let all = std::env::var("PERILUNE_ATTACKS").is_ok_and(|text| text == "all");
    let author = hostile::records::author();
    let good = std::fs::read(author.path("good.plb")).unwrap();
    let bundles = hostile::all(&author);
    assert!(bundles.len() >= 60, "{} bundles", bundles.len());
    let users = if all { User::all() } else { &[User::Own] };
    let seed = std::env::var("PERILUNE_SEED").ok().and_then(|text| text.parse::<usize>().ok()).unwrap_or(7);
    let commands = |k: usize| -> Vec<usize> {
        let is_due = |c: &usize| all || wanted.is_some() || [0, 6].contains(&((c + k + seed) % COMMANDS.len()));
        (0..COMMANDS.len()).filter(is_due).collect()
    };
    let jobs: Vec<_> = (bundles.iter().enumerate())
        .filter(|(_, bundle)| wanted.as_ref().is_none_or(|name| *name == bundle.name))
        .flat_map(|(k, bundle)| users.iter().map(move |user| (bundle, *user, k)))
        .collect();
    assert!(!jobs.is_empty(), "there is no such bundle");
    let (next, broken) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let threads = std::thread::available_parallelism().map_or(2, |n| n.get()).clamp(2, 8);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((bundle, user, k)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let found = attempt(bundle, &good, *user, &commands(*k), wanted.is_some());
                    broken.lock().unwrap().extend(found);
                }
            });
        }
    });
    println!("{} bundles, {} commands each", jobs.len(), commands(0).len());
    let broken = broken.into_inner().unwrap();
    assert!(broken.is_empty(), "{} are not contained:\n{}", broken.len(), broken.join("\n"));
}
