//! Runs the snippets of the Markdown pages and resolves their links.
//!
//! Every ```lua block of README.md and of the pages in docs/guide is run alone, in the folder of the recipes. A block that returns
//! a recipe is trained for three steps. A ```text block right after it is its expected output; after a ```lua error block it is the
//! first line of the message. A ```lua base block needs a run, and belongs to repl/tests/book.rs. A ```repl block is a session of
//! the prompt with the digits recipe: input follows `> `, the other lines are the answer, and `…` in an answer matches any text.
//! Relative links of all pages must name an existing file, and their anchors an existing heading.
#![allow(clippy::unwrap_used)]

use perilune_lua::{Console, Loaded};
use perilune_tests::scripts::{script, train};
use std::path::{Path, PathBuf};

const PRELUDE: &str =
    "local pl = require \"perilune\"; local nn, optim, data, metrics = pl.nn, pl.optim, pl.data, pl.metrics; ";

struct Block {
    line: usize,
    info: String,
    text: String,
}

/// Returns the fenced blocks in order. Indented blocks count as prose.
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

/// Returns whether `text` matches `want`, where `…` matches any text.
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

/// Enters a session's lines at a prompt and returns the first answer that differs as an error.
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

/// Runs the snippets and sessions of a page. Fails with all differences, or if there are fewer than `least` snippets.
fn check(path: &str, name: &str, least: usize) -> usize {
    let page = std::fs::read_to_string(path).unwrap();
    let all = blocks(&page);
    let (mut wrong, mut n) = (Vec::new(), 0);
    for (k, block) in all.iter().enumerate().filter(|(_, b)| b.info.starts_with("lua") && b.info != "lua base") {
        n += 1;
        assert!(["lua", "lua error"].contains(&block.info.as_str()), "{path}:{}: ```{}", block.line, block.info);
        // The fence of the output is on the line after the end of the snippet.
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
    n
}

#[test]
fn snippets_of_the_readme_run() {
    check("../README.md", "readme", 2);
}

#[test]
fn snippets_of_the_guide_run() {
    let contents = std::fs::read_to_string("../docs/guide/README.md").unwrap();
    let mut listed: Vec<PathBuf> = links(&contents)
        .into_iter()
        .filter(|(_, target)| target.ends_with(".md") && !target.contains('/'))
        .map(|(_, target)| Path::new("../docs/guide").join(target))
        .collect();
    let mut pages = Vec::new();
    collect_pages(Path::new("../docs/guide"), &mut pages);
    pages.retain(|p| !p.ends_with("README.md"));
    pages.sort();
    listed.sort();
    listed.dedup();
    assert!(pages.len() >= 20, "only {} pages in docs/guide", pages.len());
    assert_eq!(pages, listed, "the pages of docs/guide, and those that its table of contents lists");
    let snippets: usize = pages.iter().map(|page| check(page.to_str().unwrap(), "recipe", 0)).sum();
    assert!(snippets >= 50, "only {snippets} snippets in docs/guide");
}

/// `perilune reference --out docs/reference` writes the pages.
#[test]
fn the_reference_is_up_to_date_and_explains_every_option() {
    let pages = perilune_lua::reference_pages().unwrap();
    let mut wrong = Vec::new();
    for page in &pages {
        let path = Path::new("../docs/reference").join(page.file);
        if std::fs::read_to_string(&path).ok().as_deref() != Some(&page.text) {
            wrong.push(format!("{} is not what is generated", path.display()));
        }
        let mut section = "";
        for line in page.text.lines() {
            section = line.strip_prefix("## ").or(line.strip_prefix("### ")).unwrap_or(section);
            if line.starts_with("| `") && line.ends_with("|  |") {
                wrong.push(format!("{}, {section}: an option without a meaning: {line}", page.file));
            }
        }
    }
    let functions: usize = pages.iter().map(|p| p.text.lines().filter(|l| l.starts_with("##")).count()).sum();
    assert!(functions >= 500, "only {functions} functions in the reference");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The first two commands build and run Perilune, and run its tests.
#[test]
fn the_readme_opens_with_the_two_commands() {
    let page = std::fs::read_to_string("../README.md").unwrap();
    let code: Vec<&str> = page.lines().filter(|l| l.starts_with("    ")).take(2).map(str::trim).collect();
    assert_eq!(code, ["cargo run --release -- run recipes/digits.lua", "cargo test --workspace"]);
}

/// Returns the lines of a page that are not code, with inline code spans blanked, each with its line number from 1.
fn prose(page: &str) -> Vec<(usize, String)> {
    let mut out = Vec::new();
    // A fence ends the block that an equal or longer fence began; indented code follows an empty line.
    let mut fence: Option<usize> = None;
    let (mut after_blank, mut indented) = (true, false);
    for (k, line) in page.lines().enumerate() {
        let ticks = line.trim_start().chars().take_while(|&c| c == '`').count();
        match fence {
            Some(open) if ticks >= open && line.trim().chars().all(|c| c == '`') => fence = None,
            Some(_) => {}
            None if ticks >= 3 => fence = Some(ticks),
            None => {
                indented = line.starts_with("    ") && (after_blank || indented);
                if !indented {
                    out.push((k + 1, without_code_spans(line)));
                }
            }
        }
        after_blank = line.trim().is_empty();
    }
    out
}

/// Replaces each code span of a line (`a`, ``a``) by spaces.
fn without_code_spans(line: &str) -> String {
    let (mut out, mut rest) = (String::new(), line);
    while let Some(at) = rest.find('`') {
        let ticks = rest[at..].chars().take_while(|&c| c == '`').count();
        let (fence, body) = (&rest[at..at + ticks], &rest[at + ticks..]);
        out.push_str(&rest[..at]);
        match body.find(fence) {
            Some(end) => {
                out.push_str(&" ".repeat(end + 2 * ticks));
                rest = &body[end + ticks..];
            }
            // Backticks without a partner are plain characters.
            None => {
                out.push_str(fence);
                rest = body;
            }
        }
    }
    out + rest
}

/// Returns the targets of the links of a page, `[text](target)`, each with its line number.
fn links(page: &str) -> Vec<(usize, String)> {
    let mut out = Vec::new();
    for (number, line) in prose(page) {
        for part in line.split("](").skip(1) {
            let target = part.split(')').next().unwrap_or_default();
            out.push((number, target.split_whitespace().next().unwrap_or_default().to_string()));
        }
    }
    out
}

/// Returns the anchors of a page's headings as GitHub makes them: lower case, punctuation dropped, spaces as hyphens, and
/// `-1`, `-2` … for repeated headings.
fn anchors(page: &str) -> Vec<String> {
    let code_lines: Vec<&str> = page.lines().collect();
    let mut out: Vec<String> = Vec::new();
    for (number, line) in prose(page) {
        let level = line.chars().take_while(|&c| c == '#').count();
        if !(1..=6).contains(&level) || !line[level..].starts_with(' ') {
            continue;
        }
        // The text of code spans counts here, so the heading is read from the page.
        let heading = code_lines[number - 1][level..].trim();
        let base: String = heading
            .to_lowercase()
            .chars()
            .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
            .map(|c| if c == ' ' { '-' } else { c })
            .collect();
        let mut anchor = base.clone();
        let mut repeats = 0;
        while out.contains(&anchor) {
            repeats += 1;
            anchor = format!("{base}-{repeats}");
        }
        out.push(anchor);
    }
    out
}

/// Returns an error for each relative link of the page at `path` whose file or heading does not exist.
fn broken_links(path: &Path, page: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    for (line, target) in links(page) {
        if target.contains("://") || target.starts_with("mailto:") {
            continue;
        }
        let (file, anchor) =
            target.split_once('#').map_or((target.as_str(), None), |(file, anchor)| (file, Some(anchor)));
        let at = if file.is_empty() { path.to_path_buf() } else { path.with_file_name(file) };
        if !file.is_empty() && (file.starts_with('/') || !at.exists()) {
            wrong.push(format!("{}:{line}: no file {target}", path.display()));
        } else if let Some(anchor) = anchor {
            let text =
                if file.is_empty() { page.to_string() } else { std::fs::read_to_string(&at).unwrap_or_default() };
            if !anchors(&text).iter().any(|a| a == anchor) {
                wrong.push(format!("{}:{line}: no heading for {target}", path.display()));
            }
        }
    }
    wrong
}

/// Appends the Markdown files of `folder` and of the folders in it.
fn collect_pages(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            collect_pages(&entry.path(), out);
        } else if entry.path().extension().is_some_and(|e| e == "md") {
            out.push(entry.path());
        }
    }
}

#[test]
fn links_lead_to_files_and_headings() {
    let mut pages: Vec<PathBuf> =
        ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"].map(|p| Path::new("..").join(p)).to_vec();
    for folder in ["docs", "kernels", "recipes", "repl", "runtime", "stdlib", "tests"] {
        collect_pages(&Path::new("..").join(folder), &mut pages);
    }
    let (mut wrong, mut count) = (Vec::new(), 0);
    for path in &pages {
        let page = std::fs::read_to_string(path).unwrap();
        count += links(&page).len();
        wrong.extend(broken_links(path, &page));
    }
    assert!(count >= 200, "only {count} links in {} pages", pages.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn broken_links_are_found() {
    let page = "# A page, `with code`\n\n\
        [file](glossary.md) [web](https://example.org/x) [self](#a-page-with-code) [again](#again-1)\n\
        `[code](missing.md)` [gone](missing.md) [up](../docs/guide/tensors.md#states) [no](glossary.md#no-such-heading) [none](#none)\n\n    \
        t[1](x)\n\n```lua\nt[2](x)\n# Not a heading\n```\n\n## Again\n\n## Again\n";
    let wrong = broken_links(Path::new("../docs/page.md"), page);
    let places = ["no file missing.md", "no heading for glossary.md#no-such-heading", "no heading for #none"];
    assert_eq!(wrong, places.map(|p| format!("../docs/page.md:4: {p}")));
    assert_eq!(anchors(page), ["a-page-with-code", "again", "again-1"]);
}
