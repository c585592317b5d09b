//! Kills runs of every quick recipe with SIGKILL at seeded moments, half of them during a save: at sixty, forty on a mesh, two hundred with
//! `PERILUNE_SOAK`. Each run must finish with the weights of an uninterrupted run.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod support;

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use support::{Place, place};

/// A recipe file, params that make it small, and the number of steps of a run.
struct Case {
    file: &'static str,
    set: &'static [&'static str],
    steps: u64,
    /// In the long version of the test.
    kills: u32,
}

impl Case {
    fn kills(&self) -> u32 {
        let is_set = |name: &str| std::env::var_os(name).is_some();
        match (is_set("PERILUNE_SOAK"), is_set("PERILUNE_MESH")) {
            (true, _) => self.kills,
            (false, true) => self.kills / 5,
            (false, false) => self.kills * 3 / 10,
        }
    }
}

const TRANSFORMER: &[&str] = &["size=tiny", "vocab=256", "context=16", "batch=2"];

const SMALL: [Case; 15] = [
    Case { file: "digits.lua", set: &["hidden=16", "batch=16"], steps: 40, kills: 10 },
    Case { file: "autoencoder.lua", set: &["hidden=16", "batch=16"], steps: 40, kills: 10 },
    Case { file: "gru.lua", set: &["hidden=16", "batch=16"], steps: 20, kills: 10 },
    Case { file: "regression.lua", set: &["hidden=8"], steps: 40, kills: 10 },
    Case { file: "clean.lua", set: &["channels=2", "batch=32", "review=4", "shown=0"], steps: 20, kills: 10 },
    Case { file: "tabular.lua", set: &["rows=200", "hidden=8", "batch=16"], steps: 30, kills: 10 },
    Case {
        file: "pseudo.lua",
        set: &["channels=2", "batch=16", "start=4", "every=3", "confidence=0.2"],
        steps: 20,
        kills: 10,
    },
    Case {
        file: "dpo.lua",
        set: &["layers=1", "heads=2", "width=16", "context=40", "count=40", "batch=4", "supervised=8"],
        steps: 20,
        kills: 10,
    },
    Case { file: "gan.lua", set: &["hidden=16", "batch=16"], steps: 30, kills: 10 },
    Case { file: "vae.lua", set: &["hidden=16", "batch=16"], steps: 30, kills: 10 },
    Case { file: "digits.lua", set: &["net=cnn", "batch=8"], steps: 20, kills: 10 },
    Case { file: "fashion.lua", set: &["width=2", "batch=16"], steps: 20, kills: 10 },
    Case { file: "speech.lua", set: &["width=2", "sounds=60", "batch=8"], steps: 15, kills: 10 },
    Case {
        file: "chargpt.lua",
        set: &["layers=1", "heads=2", "width=16", "context=16", "dropout=0.1", "samples=0"],
        steps: 30,
        kills: 10,
    },
    Case {
        file: "sft.lua",
        set: &["layers=1", "heads=2", "width=16", "context=32", "batch=4", "samples=0"],
        steps: 20,
        kills: 10,
    },
];

const LARGER: [Case; 3] = [
    Case { file: "gpt2.lua", set: TRANSFORMER, steps: 24, kills: 20 },
    Case { file: "llama.lua", set: TRANSFORMER, steps: 24, kills: 20 },
    Case { file: "resnet50.lua", set: &["size=tiny", "classes=4", "pixels=32", "batch=2"], steps: 20, kills: 10 },
];

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

/// The crash points of a save; some occur only in later saves (`runtime/checkpoint/src/crash.rs`).
const POINTS: u64 = 14;

fn was_killed(status: ExitStatus) -> bool {
    std::os::unix::process::ExitStatusExt::signal(&status) == Some(9)
}

fn weights(p: &Place, dir: &str) -> String {
    p.run_json(dir)["weights"].as_str().unwrap().to_string()
}

fn has_checkpoint(p: &Place, dir: &str) -> bool {
    let entries = std::fs::read_dir(p.path(&format!("{dir}/checkpoints")));
    entries.is_ok_and(|e| e.flatten().any(|e| e.file_name().to_string_lossy().starts_with("step-")))
}

/// Runs until the process is killed, in a save or anywhere, or ends. Returns whether it was killed.
fn run_and_kill(p: &Place, args: &[String], in_save: bool, rng: &mut Rng) -> bool {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let mut command = p.command(&args);
    if in_save {
        command.env("PERILUNE_TEST_CRASH", (1 + rng.below(POINTS)).to_string());
        let status = command.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap();
        assert!(was_killed(status) || status.success(), "{status}");
        return was_killed(status);
    }
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let (mut line, mut left) = (String::new(), 1 + rng.below(9));
    while left > 0 && out.read_line(&mut line).unwrap() > 0 {
        line.clear();
        left -= 1;
    }
    std::thread::sleep(Duration::from_micros(rng.below(4000)));
    child.kill().unwrap();
    let status = child.wait().unwrap();
    assert!(was_killed(status) || status.success(), "{status}");
    was_killed(status)
}

fn survives(case: &Case, mesh: &str, seed: u64) {
    let p = place();
    let recipe = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../recipes").join(case.file);
    let args = |dir: &str, more: &[&str]| -> Vec<String> {
        let mut out: Vec<String> =
            ["run", recipe.to_str().unwrap(), "--json", "--threads", "1"].map(String::from).into();
        out.extend(["--run-dir".into(), dir.into(), "--steps".into(), case.steps.to_string()]);
        if !mesh.is_empty() {
            out.extend(["--mesh".into(), mesh.into()]);
        }
        out.extend(case.set.iter().flat_map(|s| ["--set".into(), s.to_string()]));
        out.extend(more.iter().map(|m| m.to_string()));
        out
    };
    let straight: Vec<String> = args("straight", &[]);
    let r = p.run(&straight.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{}", case.file);
    let expected = weights(&p, "straight");

    let mut rng = Rng(seed);
    let (mut saves, mut others, mut round) = (0, 0, 0);
    while saves + others < case.kills() {
        round += 1;
        let dir = format!("killed-{round}");
        let mut attempts = 0;
        loop {
            let resume = has_checkpoint(&p, &dir);
            if !resume {
                let _ = std::fs::remove_dir_all(p.path(&dir));
            }
            let more: &[&str] = if resume { &["--resume"] } else { &[] };
            let args = args(&dir, &[&["--checkpoint-every", "1", "--keep", "2"], more].concat());
            let (enough, in_save) = (saves + others >= case.kills(), saves <= others);
            if enough {
                let r = p.run(&args.iter().map(String::as_str).collect::<Vec<_>>());
                assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{} {dir}", case.file);
                break;
            }
            match run_and_kill(&p, &args, in_save, &mut rng) {
                true if in_save => saves += 1,
                true => others += 1,
                false => break,
            }
            attempts += 1;
            assert!(attempts < 400, "{}: it does not get anywhere", case.file);
        }
        assert_eq!(weights(&p, &dir), expected, "{} {dir}, killed {saves} and {others} times", case.file);
    }
    assert!(saves * 2 >= case.kills(), "{saves} of {} kills in a save", case.kills());
}

#[test]
fn small_recipes_survive_being_killed() {
    SMALL.iter().enumerate().for_each(|(k, case)| survives(case, "", 100 + k as u64));
}

#[test]
fn larger_recipes_survive_being_killed() {
    LARGER.iter().enumerate().for_each(|(k, case)| survives(case, "", 200 + k as u64));
}

/// Experts move before the step that follows a checkpoint, again after a resume.
#[test]
fn experts_that_move_survive_being_killed() {
    let set = &["size=tiny", "vocab=64", "context=8", "batch=4", "experts=4", "rebalance=2", "replicas=2"];
    survives(&Case { file: "llama.lua", set, steps: 12, kills: 10 }, "ep=2", 300);
}

/// Every recipe of the folder is in the list, except plain scripts, which cannot be resumed.
#[test]
fn no_recipe_is_left_out() {
    let entries = std::fs::read_dir(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../recipes")).unwrap().flatten();
    for path in entries.map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "lua")) {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if std::fs::read_to_string(&path).unwrap().contains("pl.recipe") {
            assert!(SMALL.iter().chain(&LARGER).any(|c| c.file == name), "{name} is in neither list");
        }
    }
    assert_eq!(SMALL.iter().chain(&LARGER).map(|c| c.kills).sum::<u32>(), 200);
}
