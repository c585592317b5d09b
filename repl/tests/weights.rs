//! Pins the weights of short runs of every recipe, bit for bit, for each instruction set of the CPU.
//!
//! A refactoring commit changes none of these hashes. A commit that must change one says in its message which, and why.
//! `tests/golden/recipes/weights.txt` holds them as `instruction-set recipe hash`; the hash is that of the `done` event. The
//! instruction sets that this processor lacks are skipped, their lines stay. `PERILUNE_BLESS=1` rewrites those it has.
#![allow(clippy::unwrap_used)]

#[path = "../../tests/src/skip.rs"]
mod skip;
mod support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

const ISAS: [&str; 3] = ["avx2", "avx512", "sse2"];

/// The runs, with the short settings of `.ci/recipes`. `PICTURES` stands for a folder of images.
const RUNS: [(&str, &str); 19] = [
    ("digits", "digits.lua --steps 100"),
    ("digits_cnn", "digits.lua --set net=cnn --steps 30"),
    ("autoencoder", "autoencoder.lua --steps 100"),
    ("gru", "gru.lua --steps 50"),
    ("chargpt", "chargpt.lua --set layers=2 --set width=64 --set sample_length=40 --steps 30"),
    ("clean", "clean.lua --set channels=4 --set review=20 --steps 60"),
    ("sft", "sft.lua --set layers=2 --set width=64 --set samples=1 --steps 20"),
    ("regression", "regression.lua --steps 100"),
    ("tabular", "tabular.lua --set rows=1000 --steps 60"),
    ("pseudo", "pseudo.lua --set channels=4 --set start=20 --set every=20 --set confidence=0.3 --steps 60"),
    ("dpo", "dpo.lua --set layers=1 --set width=32 --set count=100 --set supervised=12 --steps 20"),
    ("gan", "gan.lua --set hidden=32 --steps 40"),
    ("vae", "vae.lua --set hidden=32 --steps 40"),
    ("gpt2", "gpt2.lua --set size=tiny --set vocab=512 --set context=32 --set batch=2 --steps 3 --precision bf16"),
    (
        "llama",
        "llama.lua --set size=tiny --set vocab=512 --set context=32 --set batch=2 --set accumulate=2 --steps 3 --precision bf16",
    ),
    ("resnet50", "resnet50.lua --set size=tiny --set classes=10 --set pixels=32 --set batch=8 --steps 3"),
    ("fashion", "fashion.lua --set width=8 --steps 20"),
    ("speech", "speech.lua --set width=4 --set sounds=100 --set batch=16 --steps 10"),
    (
        "resnet50_folder",
        "resnet50.lua --set size=tiny --set images=PICTURES --set valid=PICTURES --set pixels=32 --set batch=8 --steps 3",
    ),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

/// Returns the hash of a run's weights, or `None` if the processor lacks the instruction set.
fn weights(isa: &str, threads: &str, args: &str) -> Option<String> {
    let place = support::place();
    let pictures = root().join("tests/golden/images/folder");
    let mut command = Command::new(env!("CARGO_BIN_EXE_perilune"));
    command.arg("run").current_dir(root().join("recipes"));
    command.args(args.split(' ').map(|a| a.replace("PICTURES", pictures.to_str().unwrap())));
    command.args(["--device", "cpu", "--threads", threads, "--json", "--run-dir"]).arg(place.path("run"));
    command.env("PERILUNE_CPU_ISA", isa).env("NO_COLOR", "1");
    let out = command.output().unwrap();
    let (text, complaint) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    if complaint.contains("PERILUNE_CPU_ISA") && complaint.contains("lacks") {
        return None;
    }
    let last: serde_json::Value = text.lines().last().and_then(|l| serde_json::from_str(l).ok()).unwrap_or_default();
    assert_eq!(last["event"], "done", "{isa} {args}: {complaint}");
    Some(last["weights"].as_str().unwrap().to_string())
}

#[test]
fn short_runs_end_with_the_pinned_weights() {
    let golden = root().join("tests/golden/recipes/weights.txt");
    let text = std::fs::read_to_string(&golden).unwrap_or_default();
    let mut pinned: BTreeMap<(String, String), String> = BTreeMap::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        pinned.insert((words[0].into(), words[1].into()), words[2].into());
    }
    let bless = std::env::var_os("PERILUNE_BLESS").is_some_and(|v| v == "1");
    let mut wrong = Vec::new();
    let present = |isa: &&str| {
        let has = weights(isa, "1", RUNS[0].1).is_some();
        if !has {
            skip::skipped(&format!("this processor lacks {isa}"));
        }
        has
    };
    let isas: Vec<&str> = ISAS.into_iter().filter(present).collect();
    let runs: Vec<(&str, usize)> = isas.iter().flat_map(|isa| (0..RUNS.len()).map(move |k| (*isa, k))).collect();
    // Every other run uses another number of threads, which changes no bit.
    let hash = |&(isa, k): &(&str, usize)| weights(isa, if k % 2 == 0 { "1" } else { "2" }, RUNS[k].1).unwrap();
    // Two at a time, as a run rarely occupies two processors.
    let (next, got) = (AtomicUsize::new(0), Mutex::new(BTreeMap::new()));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(run) = runs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let hash = hash(run);
                    got.lock().unwrap().insert(*run, hash);
                }
            });
        }
    });
    for ((isa, k), got) in got.into_inner().unwrap() {
        let name = RUNS[k].0;
        let want = pinned.insert((isa.to_string(), name.to_string()), got.clone());
        if want.as_deref() != Some(got.as_str()) {
            wrong.push(format!("{isa} {name}: {got}, pinned at {}", want.unwrap_or_default()));
        }
    }
    if bless {
        let lines: String = pinned.iter().map(|((isa, name), hash)| format!("{isa} {name} {hash}\n")).collect();
        return std::fs::write(&golden, lines).unwrap();
    }
    assert!(wrong.is_empty(), "PERILUNE_BLESS=1 accepts this:\n{}", wrong.join("\n"));
}
