//! Runs bundles where they were not made: downloaded by their hash, as another user, with folders of data inside.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

#[path = "support/sandbox.rs"]
mod sandbox;
#[path = "../../runtime/fetch/tests/support/server.rs"]
mod server;
mod support;

use sandbox::{Sandbox, User};
use serde_json::Value;
use server::Server;
use std::path::Path;
use support::{Place, Ran, TINY, place};

const SAME: &str = "the weights are those of the bundle";

fn succeeds(ran: Ran) -> Ran {
    assert_eq!(ran.status, Some(0), "{}{}", ran.out, ran.err);
    ran
}

/// A run of a recipe that reads a table, in the run directory `one`, and the table.
fn author() -> Place {
    let p = place();
    let table = "pl.data.csv('points.csv')\n  local x = ";
    p.file("tiny.lua", TINY.replacen("local x = ", table, 1));
    p.file("points.csv", "1,2,3\n4,5,6\n");
    succeeds(p.run(&["run", "tiny.lua", "--checkpoint-every", "2", "--run-dir", "one", "-q"]));
    p
}

fn pack(p: &Place, more: &[&str]) -> Vec<u8> {
    succeeds(p.run(&[&["bundle", "pack", "one", "-o", "t.plb", "--no-envelope"], more].concat()));
    std::fs::read(p.path("t.plb")).unwrap()
}

fn weights(record: &Path) -> String {
    let record: Value = serde_json::from_slice(&std::fs::read(record).unwrap()).unwrap();
    record["weights"].as_str().unwrap().to_string()
}

#[test]
fn a_bundle_is_downloaded_by_its_hash() {
    let p = author();
    let bytes: &'static [u8] = pack(&p, &["--include-data", "--checkpoints"]).leak();
    let hash = blake3::hash(bytes).to_hex();
    let server = Server::of(bytes);
    let stranger = place();
    let go = |address: &str, command: &str, more: &[&str]| -> Ran {
        let mut all = stranger.command(&[&[command, address, "--accept-missing-walls"], more].concat());
        all.env("PERILUNE_CACHE", stranger.path("cache")).env_remove("HF_HUB_OFFLINE").output().unwrap().into()
    };
    let allow = "--allow-net=127.0.0.1";
    let url = server.url("/tables/t.plb");
    let right = format!("{url}#blake3:{hash}");
    // Nothing is asked without a hash and a grant.
    let ran = go(&url, "run", &[allow]);
    assert!(ran.status == Some(2) && ran.err.contains("needs its hash"), "{:?} {}", ran.status, ran.err);
    for flags in [&[][..], &["--offline"], &["--allow-net=localhost"]] {
        let ran = go(&right, "run", flags);
        assert!(ran.status == Some(1), "{flags:?}: {:?} {}", ran.status, ran.err);
        let hint = if flags == ["--offline"] { "forbids connections" } else { allow };
        assert!(ran.err.contains(hint), "{flags:?}: {}", ran.err);
    }
    assert!(server.asked().is_empty());
    // Another content than the hash says is not kept, let alone run.
    let ran = go(&format!("{url}#blake3:{}", "0".repeat(64)), "run", &[allow]);
    assert!(ran.status == Some(1) && ran.err.contains("another hash"), "{:?} {}", ran.status, ran.err);
    let ran = go(&format!("{url}#sha256:{}", "0".repeat(64)), "run", &[allow]);
    assert!(ran.status == Some(1) && ran.err.contains("another hash"), "{:?} {}", ran.status, ran.err);
    assert!(!stranger.path("runs").exists());
    assert_eq!(cached(&stranger), 0, "nothing is left behind");
    let before = server.asked().len();
    let ran = succeeds(go(&right, "run", &[allow, "--run-dir", "a"]));
    assert!(ran.out.contains(SAME) && ran.err.contains("verified · not signed"), "{}{}", ran.out, ran.err);
    assert_eq!(weights(&stranger.path("a/run.json")), weights(&p.path("one/run.json")));
    // From now on it is in the cache.
    succeeds(go(&right, "run", &["--offline", "--run-dir", "b"]));
    let ran = succeeds(go(&right, "replay", &["--steps", "2..4"]));
    assert!(ran.out.contains("same bits"), "{}", ran.out);
    assert_eq!((server.asked().len(), cached(&stranger)), (before + 1, 1));
    assert!(!stranger.path("runs").exists());
    // A damaged bundle under its own hash is refused by its checks.
    let mut damaged = bytes.to_vec();
    damaged[500] ^= 4;
    let hash = blake3::hash(&damaged).to_hex();
    let server = Server::of(damaged.leak());
    let ran = go(&format!("{}#blake3:{hash}", server.url("/t.plb")), "run", &[allow, "--run-dir", "c"]);
    assert!(ran.status == Some(4) && ran.err.contains("byte 500 is"), "{:?} {}", ran.status, ran.err);
    assert!(!stranger.path("c").exists());
}

/// The files that were downloaded to the cache.
fn cached(p: &Place) -> usize {
    let folders = ["blake3", "sha256"].map(|name| p.path("cache/data").join(name));
    let files = folders.iter().filter_map(|dir| std::fs::read_dir(dir).ok()).flatten().flatten();
    files.filter(|entry| entry.file_name().len() == 64 && entry.metadata().is_ok_and(|m| m.is_file())).count()
}

#[test]
fn another_user_gets_the_same_bits() {
    let p = author();
    let bundle = pack(&p, &[]);
    let hash = blake3::hash(p.read("points.csv").as_bytes()).to_hex();
    for user in User::all() {
        let mut sandbox = Sandbox::new();
        std::fs::write(sandbox.path("work/t.plb"), &bundle).unwrap();
        std::fs::create_dir(sandbox.path("work/mine")).unwrap();
        sandbox.give_to(*user);
        let run = |sandbox: &Sandbox, more: &[&str]| -> Ran {
            let args = [&["run", "t.plb", "--accept-missing-walls", "--run-dir", "runs/again"], more].concat();
            sandbox.command(&args).output().unwrap().into()
        };
        for more in [&[][..], &["--data", "mine"], &["--data", "inside"]] {
            let ran = run(&sandbox, more);
            assert_eq!(ran.status, Some(2), "{user:?} {more:?}: {}{}", ran.out, ran.err);
            for part in ["points.csv", "12 B", &format!("blake3:{hash}"), "--data DIR"] {
                assert!(ran.err.contains(part), "{user:?}: no {part} in {}", ran.err);
            }
        }
        assert!(!sandbox.path("work/runs").exists());
        // A copy under another name.
        std::fs::copy(p.path("points.csv"), sandbox.path("work/mine/renamed.bin")).unwrap();
        sandbox.give_to(*user);
        let ran = succeeds(run(&sandbox, &["--data", "mine"]));
        assert!(ran.out.contains(SAME), "{user:?}: {}", ran.out);
        assert_eq!(weights(&sandbox.path("work/runs/again/run.json")), weights(&p.path("one/run.json")));
    }
}

#[test]
fn folders_of_images_travel_inside() {
    let p = place();
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/images/folder");
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/../recipes/resnet50.lua");
    std::fs::copy(recipe, p.path("resnet50.lua")).unwrap();
    let copied = std::process::Command::new("cp").arg("-r").arg(golden).arg(p.path("images")).status().unwrap();
    assert!(copied.success());
    let set = ["size=tiny", "images=images", "valid=images", "pixels=32", "batch=8"];
    let set: Vec<&str> = set.iter().flat_map(|s| ["--set", s]).collect();
    succeeds(p.run(&[&["run", "resnet50.lua", "--steps", "2", "--run-dir", "one", "-q"], &set[..]].concat()));
    let files = |dir: &Path| support::snapshot_of(dir).len();
    let count = files(&p.path("images"));
    assert!(count > 15);
    let bundle = pack(&p, &["--include-data"]);
    let was = weights(&p.path("one/run.json"));
    let without = pack(&p, &[]);
    drop(p);
    let stranger = place();
    stranger.file("t.plb", &bundle);
    let ran = succeeds(stranger.run(&["bundle", "inspect", "t.plb"]));
    assert!(ran.out.contains("images, ") && ran.out.contains("(included)"), "{}", ran.out);
    let ran = succeeds(stranger.run(&["run", "t.plb", "--accept-missing-walls", "--run-dir", "again"]));
    assert!(ran.out.contains(SAME), "{}", ran.out);
    assert_eq!(weights(&stranger.path("again/run.json")), was);
    assert!(!stranger.path("images").exists(), "the folder is built where the bundle is unpacked");
    // Without them, the whole folder is needed under its names.
    stranger.file("u.plb", &without);
    let copied = std::process::Command::new("cp").arg("-r").arg(golden).arg(stranger.path("mine")).status().unwrap();
    assert!(copied.success());
    let run =
        |data: &str| stranger.run(&["run", "u.plb", "--accept-missing-walls", "--run-dir", "third", "--data", data]);
    std::fs::rename(stranger.path("mine/car/rgb.jpg"), stranger.path("mine/car/other.jpg")).unwrap();
    let ran = run("mine");
    assert!(ran.status == Some(2) && ran.err.contains("images/car/rgb.jpg"), "{:?} {}", ran.status, ran.err);
    assert!(!ran.err.contains("images/car/grey.jpg"), "only what is missing is listed: {}", ran.err);
    std::fs::rename(stranger.path("mine/car/other.jpg"), stranger.path("mine/car/rgb.jpg")).unwrap();
    succeeds(run("mine"));
    assert_eq!(weights(&stranger.path("third/run.json")), was);
}
