//! The Markdown pages tell the truth: every ```lua block of README.md and docs/guide.md is run.
//!
//! A block that returns a recipe is trained for three steps. A ```text block right behind it is what it prints; behind a
//! ```lua error block it is the first line of the message. Blocks run by themselves, beside the recipes. A ```repl block is
//! a session of the prompt with the digits recipe: what stands behind `> ` is typed, what follows is the answer, and `…` in it
//! stands for anything.
#![allow(clippy::unwrap_used)]

use perilune_lua::{Console, Loaded};
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

/// Whether `…` in `want` can be filled so that it becomes `text`.
fn fits(text: &str, want: &str) -> bool {
    let mut parts = want.split('…');
    let Some(mut rest) = parts.next().and_then(|head| text.strip_prefix(head)) else { return false };
    let mut last = None;
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
        last = Some(part);
    }
    rest.is_empty() || last.is_some_and(|l| l.is_empty() || rest.ends_with(l))
}

/// Types a session's lines at a prompt; the first answer that differs is the error.
fn session(block: &Block) -> Result<(), String> {
    let s = script(2, &[]).unwrap();
    let recipe = s.recipe(Path::new("../recipes/digits.lua")).map_err(|e| e.to_string())?;
    let console = Console::new(&s.runtime, "prompt").map_err(|e| e.to_string())?;
    console.set_run(&recipe.start(None, None, None).map_err(|e| e.to_string())?).map_err(|e| e.to_string())?;
    for part in block.text.split("\n> ").map(|p| p.trim_start_matches("> ")) {
        let (line, want) = part.split_once('\n').unwrap_or((part, ""));
        let answer = match line.split_once(' ') {
            Some((command @ (":plan" | ":grad" | ":summary"), rest)) => console.command(&command[1..], rest),
            _ if line.starts_with('?') => Ok(console.describe(&line[1..])),
            _ => console.eval(line).map(|a| a.shown.join("\n")),
        };
        let answer = answer.unwrap_or_else(|e| e.to_string());
        let (answer, want) = (format!("{}{answer}", s.output()), want.trim_end());
        s.printed.borrow_mut().clear();
        if !fits(answer.trim_end(), want) {
            return Err(format!("> {line}\nanswers\n{answer}\nnot\n{want}"));
        }
    }
    Ok(())
}

#[test]
fn dots_fit_anything() {
    assert!(fits("loss 0.41 · accuracy 0.9", "loss … · accuracy …") && fits("a", "a") && fits("ab", "a…"));
    assert!(!fits("loss 0.41", "loss … · accuracy …") && !fits("ab", "a") && !fits("xa", "a…"));
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
    for block in all.iter().filter(|b| b.info == "repl") {
        if let Err(e) = session(block) {
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
