//! Tests `perilune cache`, and that the cache stays within its bound beside running processes.

#![allow(clippy::unwrap_used)]

mod support;

use std::path::{Path, PathBuf};
use support::{Place, place};

/// Runs a command with the cache of the place and this bound.
fn run(p: &Place, limit: &str, args: &[&str]) -> (Option<i32>, String, String) {
    let out =
        p.command(args).env("PERILUNE_CACHE", p.path("cache")).env("PERILUNE_CACHE_LIMIT", limit).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (out.status.code(), text(&out.stdout), text(&out.stderr))
}

fn kept(folder: &Path) -> Vec<PathBuf> {
    let found = std::fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path());
    let mut found: Vec<PathBuf> = found.filter(|p| p.extension().is_some_and(|e| e == "zst" || e == "json")).collect();
    found.sort();
    found
}

#[test]
fn the_cache_is_shown_bounded_and_cleared() {
    let p = place();
    for name in ["sums.jsonl.gz", "list.json.gz"] {
        std::fs::copy(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/lua/files/").to_string() + name, p.path(name))
            .unwrap();
    }
    let open = "local pl = require 'perilune' print(pl.data.records(NAME):get(0) ~= nil)\n\
                pl.data.train_tokenizer(pl.data.list { { text = ('some words '):rep(99) } }, { vocab = 300 })";
    p.file("one.lua", open.replace("NAME", "'sums.jsonl.gz'"));
    p.file("two.lua", open.replace("NAME", "'list.json.gz'"));
    let (status, out, err) = run(&p, "none", &["run", "one.lua"]);
    assert!(status == Some(0) && out.contains("data.train_tokenizer: trained "), "{out} {err}");
    let records = p.path("cache/records");
    let (first, tokenizers) = (kept(&records), kept(&p.path("cache/tokenizers")));
    assert_eq!((first.len(), tokenizers.len()), (1, 1));

    let (status, out, err) = run(&p, "50GiB", &["cache"]);
    assert!(status == Some(0) && out.contains("records           1 files"), "{out} {err}");
    assert!(out.contains("of 53.7 GB") && out.contains("downloads"), "{out}");
    let (_, out, _) = run(&p, "none", &["cache", "--list", "--json"]);
    let parts: Vec<String> = out
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["part"].as_str().unwrap().into())
        .collect();
    assert_eq!(parts, ["records", "tokenizers"]);

    // A second start with the same texts trains nothing.
    let (status, out, err) = run(&p, "none", &["run", "one.lua"]);
    assert!(status == Some(0) && !out.contains("trained"), "{out} {err}");
    // Beyond the bound older files go, not the one in use.
    let (status, out, err) = run(&p, "1", &["run", "two.lua"]);
    assert!(status == Some(0) && out.contains("trained"), "{out} {err}");
    let second = kept(&records);
    assert!(second.len() == 1 && second != first, "{second:?}");

    let (status, out, _) = run(&p, "none", &["cache", "--clear", "records"]);
    assert!(status == Some(0) && out.starts_with("1 files of ") && kept(&records).is_empty(), "{out}");
    let (status, out, _) = run(&p, "none", &["cache", "--clear"]);
    assert!(status == Some(0) && out.contains("0 B left") && kept(&p.path("cache/tokenizers")).is_empty(), "{out}");
    let (status, out, _) = run(&p, "none", &["cache", "--prune", "1G"]);
    assert!(status == Some(0) && out.starts_with("0 files"), "{out}");
}

#[test]
fn wrong_sizes_and_parts_are_explained() {
    let p = place();
    for (limit, args, message) in [
        ("lots", vec!["cache"], "PERILUNE_CACHE_LIMIT: \"lots\" is not an amount of memory"),
        ("none", vec!["cache", "--prune", "lots"], "--prune lots: no size"),
        ("none", vec!["cache", "--clear", "kernel"], "kernels"),
    ] {
        let (status, out, err) = run(&p, limit, &args);
        assert!(status == Some(2) && err.contains(message), "{args:?}: {out} {err}");
    }
    p.file("a.jsonl", "{\"a\": 1}\n");
    p.file("read.lua", "require('perilune').data.jsonl 'a.jsonl'");
    let (status, _, err) = run(&p, "lots", &["run", "read.lua"]);
    assert!(status == Some(3) && err.contains("PERILUNE_CACHE_LIMIT") && err.contains("read.lua:1"), "{err}");
}
