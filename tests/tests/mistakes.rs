//! Compares error messages with golden files: each `golden/mistakes/NAME.lua` has one mistake, and `NAME.txt` is its message:
//! value, rule, cure, file and line. A first line `-- set: key=value …` has the effect of `--set`.
//!
//! The messages are part of the product: review the diff of a changed message.
//! `PERILUNE_BLESS=1 cargo test -p perilune-tests --test mistakes` rewrites them.
#![allow(clippy::unwrap_used)]

use perilune_lua::{Failed, Loaded};
use perilune_tests::harness;
use perilune_tests::scripts::{files, golden, script, train};
use std::path::Path;

const DIR: &str = "golden/mistakes";

/// Runs a file up to its mistake and returns the message.
fn message(path: &Path) -> Result<String, String> {
    let text = std::fs::read_to_string(path).unwrap();
    let first = text.lines().next().unwrap_or_default();
    let set: Vec<(&str, &str)> = first
        .strip_prefix("-- set: ")
        .unwrap_or_default()
        .split_whitespace()
        .filter_map(|s| s.split_once('='))
        .collect();
    let run = || -> Result<(), Failed> {
        let s = script(1, &set)?;
        if let Loaded::Recipe(recipe) = s.runtime.load(path)? {
            train(&recipe, 3)?;
        }
        Ok(())
    };
    match run() {
        Err(e) => Ok(without_memory(&format!("{e}\n").replace(&format!("{DIR}/"), ""))),
        Ok(()) => Err(format!("{}: no error was raised", path.display())),
    }
}

/// The message without the memory that this machine has just now.
fn without_memory(text: &str) -> String {
    let available = |line: &str| {
        let (before, after) = line.split_once(" more were requested, ")?;
        let (_, rest) = after.split_once(" of the machine's memory")?;
        Some(format!("{before} more were requested, … of the machine's memory{rest}"))
    };
    text.lines().map(|l| available(l).unwrap_or_else(|| l.to_string()) + "\n").collect()
}

#[test]
fn every_mistake_gives_its_message() {
    if harness::on_gpu() {
        println!("skipped: the golden messages are those of the CPU");
        return;
    }
    let all = files(Path::new(DIR), "lua");
    assert!(all.len() >= 60, "only {} mistakes", all.len());
    let mut wrong = Vec::new();
    for path in &all {
        if let Err(e) = message(path).and_then(|text| golden(&path.with_extension("txt"), &text)) {
            wrong.push(e);
        }
    }
    assert!(wrong.is_empty(), "{} of {} messages differ\n\n{}", wrong.len(), all.len(), wrong.join("\n"));
}

/// Checks the rules for all messages.
#[test]
fn messages_name_a_line_and_speak_no_rust() {
    if perilune_tests::scripts::blessing() {
        return perilune_tests::skip::skipped("PERILUNE_BLESS=1: the other test is writing the messages");
    }
    let mut wrong = Vec::new();
    for path in files(Path::new(DIR), "txt") {
        let name = path.file_stem().unwrap().to_string_lossy().to_string();
        let text = std::fs::read_to_string(&path).unwrap();
        let first = text.lines().next().unwrap_or_default();
        // A mistake on the command line, or one of a whole file, has no line.
        let whole = name.starts_with("set_") || ["recipe_not_returned", "recipe_plain_table"].contains(&name.as_str());
        let at = first.split_once(".lua:").is_some_and(|(_, rest)| rest.starts_with(|c: char| c.is_ascii_digit()));
        if !whole && !at || whole && name.starts_with("set_") && first.is_empty() {
            wrong.push(format!("{name}: no file and line: {first}"));
        }
        for word in
            ["__mlua", "perilune/", "Option<", "NodeId", "i64 (", "userdata", "0x5", "panicked", "this is a bug"]
        {
            if text.contains(word) {
                wrong.push(format!("{name}: says '{word}'"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
