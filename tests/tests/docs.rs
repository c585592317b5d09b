//! The Markdown pages tell the truth: every ```lua block of README.md and docs/guide.md is run.
//!
//! A block that returns a recipe is trained for three steps. A ```text block right behind it is what it prints; behind a
//! ```lua error block it is the first line of the message. Blocks run by themselves, beside the recipes.
#![allow(clippy::unwrap_used)]

use perilune_lua::Loaded;
use perilune_tests::scripts::{script, train};
use std::path::Path;

const PRELUDE: &str =
    "local pl = require \"perilune\"; local nn, optim, data, metrics = pl.nn, pl.optim, pl.data, pl.metrics; ";

struct Block {
    line: usize,
    info: String,
    text: String,
}

/// Fenced blocks in order; indented ones are prose here.
fn blocks(page: &str) -> Vec<Block> {
    let mut out = Vec::new();
    let mut open: Option<Block> = None;
    for (k, line) in page.lines().enumerate() {
        match (&mut open, line.strip_prefix("```")) {
            (Some(_), Some("")) => out.extend(open.take()),
            (Some(block), _) => {
                block.text.push_str(line);
                block.text.push('\n');
            }
            (None, Some(info)) => open = Some(Block { line: k + 1, info: info.to_string(), text: String::new() }),
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "a block is not closed");
    out
}

fn run(name: &str, block: &Block, expected: Option<&str>) -> Result<(), String> {
    let source = if block.text.contains("require \"perilune\"") {
        block.text.clone()
    } else {
        format!("{PRELUDE}{}", block.text)
    };
    let s = script(2, &[]).unwrap();
    s.runtime.set_place(Path::new("../recipes"));
    let result = s.runtime.load_text(&source, &format!("@{name}.lua")).and_then(|loaded| match loaded {
        Loaded::Recipe(recipe) => train(&recipe, 3),
        Loaded::Script => Ok(()),
    });
    match (block.info.as_str(), result) {
        ("lua", Ok(())) => match expected {
            Some(want) if want != s.output() => Err(format!("prints\n{}not\n{want}", s.output())),
            _ => Ok(()),
        },
        ("lua", Err(e)) => Err(e.to_string()),
        (_, Ok(())) => Err("no error was raised".into()),
        (_, Err(e)) => {
            let text = e.to_string();
            let (first, want) = (text.lines().next().unwrap_or_default(), expected.unwrap_or_default().trim_end());
            if first == want { Ok(()) } else { Err(format!("says\n{first}\nnot\n{want}")) }
        }
    }
}

fn check(path: &str, name: &str, least: usize) {
    let page = std::fs::read_to_string(path).unwrap();
    let all = blocks(&page);
    let (mut wrong, mut n) = (Vec::new(), 0);
    for (k, block) in all.iter().enumerate().filter(|(_, b)| b.info.starts_with("lua")) {
        n += 1;
        assert!(["lua", "lua error"].contains(&block.info.as_str()), "{path}:{}: ```{}", block.line, block.info);
        // The answer follows at once: its fence stands right below the other's end.
        let end = block.line + block.text.lines().count() + 1;
        let expected = all.get(k + 1).filter(|b| b.info == "text" && b.line == end + 1).map(|b| b.text.as_str());
        if let Err(e) = run(name, block, expected) {
            wrong.push(format!("{path}:{}: {e}", block.line));
        }
    }
    assert!(n >= least, "only {n} snippets in {path}");
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn snippets_of_the_readme_run() {
    check("../README.md", "readme", 2);
}

#[test]
fn snippets_of_the_guide_run() {
    check("../docs/guide.md", "guide", 12);
}

/// The page begins with the two commands that everything depends on.
#[test]
fn the_readme_opens_with_the_two_commands() {
    let page = std::fs::read_to_string("../README.md").unwrap();
    let code: Vec<&str> = page.lines().filter(|l| l.starts_with("    ")).take(2).map(str::trim).collect();
    assert_eq!(code, ["cargo run --release -- run recipes/digits.lua", "cargo test --workspace"]);
}
