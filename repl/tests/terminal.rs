//! Control characters that a recipe, a file or a directory chooses: no output passes them to a terminal or a log.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod support;

use support::{Ran, TINY, place};

/// Erases the screen, returns the cursor, rings, sets the title, a C1 sequence, and reverses the direction of text.
const EVIL: &str = "\\27[2J\\r\\7\\27]0;owned\\7\\u{9b}31m\\u{202e}";

/// Whether nothing in it is obeyed by a terminal.
fn check(name: &str, text: &str) {
    let bad = text.chars().find(|c| {
        (c.is_control() && !matches!(c, '\n' | '\t')) || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    });
    assert_eq!(bad, None, "{name}: {text:?}");
}

fn clean(name: &str, ran: &Ran) {
    check(&format!("{name}, stdout"), &ran.out);
    check(&format!("{name}, stderr"), &ran.err);
}

#[test]
fn what_a_script_prints_and_raises_is_escaped() {
    let p = place();
    p.file("print.lua", format!("print('{EVIL}', 'tab\\tand\\nnewline')"));
    let ran = p.run(&["run", "print.lua"]);
    assert_eq!(ran.status, Some(0), "{}", ran.err);
    assert!(ran.out.contains("\\u{1b}[2J\\r\\u{7}") && ran.out.contains("tab\tand\nnewline"), "{}", ran.out);
    clean("print", &ran);
    for (name, text) in [
        ("error", format!("error('{EVIL}')")),
        ("argument", format!("require('perilune').zeros({{ 2 }}, {{ dtype = '{EVIL}' }})")),
        ("name", format!("return _G['{EVIL}']")),
        ("chunk", format!("load('error(1)', '@{EVIL}')()")),
        ("object", format!("error(setmetatable({{}}, {{ __tostring = function() return '{EVIL}' end }}))")),
    ] {
        p.file("raise.lua", text);
        let ran = p.run(&["run", "raise.lua"]);
        assert_eq!(ran.status, Some(3), "{name}: {}", ran.err);
        clean(name, &ran);
    }
    // The offending line itself holds raw bytes, and so does the name of the file.
    p.file("raw\x1b[2J.lua", "error('x') -- \x1b[2J\u{202e}");
    let ran = p.run(&["run", "raw\x1b[2J.lua"]);
    assert_eq!(ran.status, Some(3));
    assert!(ran.err.contains("\\u{1b}[2J"), "{}", ran.err);
    clean("file", &ran);
    clean("no file", &p.run(&["run", "none\x1b[2J\u{202e}.lua"]));
}

#[test]
fn names_metrics_and_params_of_a_run_are_escaped() {
    let p = place();
    let text = TINY
        .replace("name = \"tiny\"", &format!("name = '{EVIL}'"))
        .replace("{ off = ", &format!("{{ ['{EVIL}'] = error:mean(), off = "))
        .replace("width = 4 }", &format!("width = 4, note = '{EVIL}' }}"));
    p.file("tiny.lua", text);
    for args in [
        &["check", "tiny.lua"][..],
        &["run", "tiny.lua", "--run-dir", "r"],
        &["profile", "tiny.lua"],
        &["plot", "r"],
        &["plot", "r", "--ascii"],
    ] {
        let ran = p.run(args);
        assert_eq!(ran.status, Some(0), "{args:?}: {}", ran.err);
        clean(args[0], &ran);
    }
    let unknown = p.run(&["run", "tiny.lua", "--set", "x\x1b[2J=1"]);
    assert_eq!(unknown.status, Some(2));
    clean("--set", &unknown);
    let ran = p.run(&["run", "tiny.lua", "--json", "--run-dir", "j", "--log", "log.txt"]);
    assert_eq!(ran.status, Some(0), "{}", ran.err);
    clean("--json", &ran);
    let start = &ran.events()[0];
    assert!(start.to_string().contains("owned"), "{start}");
    check("the log", &p.read("log.txt"));
}
