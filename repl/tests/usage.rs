//! Tests wrong usage and wrong recipes: exit status 2 or 3, and a message with a cure.

#![allow(clippy::unwrap_used)]

mod support;

use support::{TINY, place, tiny};

#[track_caller]
fn says(args: &[&str], status: i32, message: &str) {
    let p = tiny();
    std::fs::create_dir(p.path("dir")).unwrap();
    p.file("dir/inner.lua", "");
    p.file("latin.lua", b"print('ok')\nprint('\xe9')");
    p.file("byte.lua", b"\x1bLuaT\0");
    p.file("table.csv", "1,2");
    p.file("plain.lua", "return { loss = function() end }");
    p.file("lost.lua", TINY.replace("return recipe", ""));
    p.file("script.lua", "print(1)");
    p.file("syntax.lua", "local x = {1, 2\nprint(x)\n");
    let r = p.run(args);
    assert_eq!(r.err.trim_end(), message);
    assert_eq!(r.status, Some(status));
}

#[test]
fn params() {
    says(
        &["run", "tiny.lua", "--set", "leraning_rate=1"],
        2,
        "error: unknown param 'leraning_rate' for recipe tiny (params: lr, seed, steps, width). Did you mean 'lr'?",
    );
    says(&["run", "tiny.lua", "--set", "lr=fast"], 2, "error: param 'lr' is 'fast'; it must be a number (default 0.1)");
    says(
        &["run", "tiny.lua", "--set", "steps=many"],
        2,
        "error: param 'steps' is 'many'; it must be a number (default 6)",
    );
    says(
        &["run", "script.lua", "--set", "n=1"],
        2,
        "error: --set n: the script has no params (it calls neither pl.params nor pl.recipe)",
    );
    says(
        &["run", "tiny.lua", "--steps", "2", "--set", "steps=3"],
        2,
        "error: --steps and --set steps=… set the same param; give one of them",
    );
    says(
        &["run", "tiny.lua", "--set", "lr"],
        2,
        "error: invalid value 'lr' for '--set <KEY=VALUE>': write it as lr=VALUE\n\nFor more information, try '--help'.",
    );
}

#[test]
fn files() {
    says(&["run", "tyni.lua"], 2, "error: there is no file tyni.lua. Did you mean tiny.lua?");
    says(&["run", "tiny"], 2, "error: there is no file tiny. Did you mean tiny.lua?");
    says(&["run", "dir"], 2, "error: dir is a directory, not a recipe; recipes in it: inner.lua");
    says(
        &["run", "latin.lua"],
        2,
        "error: latin.lua is not UTF-8 text: line 2 contains the byte 0xe9; save it as UTF-8",
    );
    says(&["run", "byte.lua"], 2, "error: byte.lua is compiled Lua bytecode; recipes are loaded as text only");
    says(&["check", "table.csv"], 2, "error: table.csv is not a Lua file: a recipe's name ends in .lua");
}

/// Clap's messages, with tips that it cannot have.
#[test]
fn options_and_commands() {
    let p = tiny();
    let cases: [(&[&str], &str); 8] = [
        (&["run", "tiny.lua", "--lr", "1e-3"], "tip: params of a recipe are set by --set: --set lr=VALUE"),
        (&["run", "tiny.lua", "--epochs=3"], "--set epochs=VALUE"),
        (&["run", "tiny.lua", "--weight-decay", "1"], "--set weight_decay=VALUE"),
        (&["run", "tiny.lua", "--sede", "3"], "tip: there is an option --seed"),
        (&["run", "tiny.lua", "--steps", "-1"], "tip: -1 is below 0; --steps takes numbers from 0"),
        (&["tiny"], "tip: to train the recipe: perilune run tiny.lua"),
        (&["rnu"], "tip: did you mean run?"),
        (&["plot", "runs/none"], "there is no run runs/none"),
    ];
    for (args, message) in cases {
        let r = p.run(args);
        assert!(r.status == Some(2) && r.err.contains(message), "{args:?}: {}", r.err);
        assert!(!r.err.contains("local-world-size") && !r.out.contains("tip"), "{args:?}: {}", r.err);
    }
}

#[test]
fn an_error_marks_the_column_and_lists_what_there_is() {
    let p = tiny();
    let cases = [
        ("print(x.shape[0])", "there is no shape[0]", "x:size(0) counts from 0", "x.shape"),
        ("print(x:matmul(pl.zeros { 5, 5 }))", "matmul: shapes", "", "  |         ^^^^^^"),
        ("prnt(x)", "global 'prnt' is not defined", "did you mean 'print'?", "  | ^^^^"),
    ];
    for (line, message, hint, marks) in cases {
        p.file("line.lua", format!("local pl = require 'perilune' local x = pl.zeros {{ 2, 3 }}\n{line}"));
        let r = p.run(&["run", "line.lua"]);
        assert!(
            r.err.starts_with("line.lua:2: ") && [message, hint, marks].iter().all(|m| r.err.contains(m)),
            "{}",
            r.err
        );
    }
    p.file("batch.lua", TINY.replace("model(batch.x)", "model(batch.inputs)"));
    let r = p.run(&["run", "batch.lua"]);
    assert!(r.err.contains("hint: the batch has no field 'inputs'; it has x and y"), "{}", r.err);
    // A field that may be missing is nil.
    p.file("optional.lua", TINY.replace("model(batch.x)", "model(batch.inputs or batch.x)"));
    assert_eq!(p.run(&["run", "optional.lua", "--quiet"]).status, Some(0));
}

#[test]
fn recipes() {
    says(
        &["run", "plain.lua"],
        3,
        "error: plain.lua returns a plain table, not a recipe\n  hint: begin with `local recipe = pl.recipe { name = \"…\", params = { … } }` and return that",
    );
    says(
        &["run", "lost.lua"],
        3,
        "error: lost.lua makes a recipe but does not return it\n  hint: end it with `return recipe`",
    );
    says(
        &["run", "syntax.lua"],
        3,
        "syntax.lua:2: '}' expected (to close '{' at line 1) near 'print'\n  2 | print(x)\n    | ^^^^^",
    );
    says(
        &["check", "syntax.lua"],
        3,
        "syntax.lua:2: '}' expected (to close '{' at line 1) near 'print'\n  2 | print(x)\n    | ^^^^^",
    );
}

#[test]
fn what_is_not_built_yet_is_refused() {
    says(
        &["run", "tiny.lua", "--resume"],
        2,
        "error: --resume: there is no run of tiny.lua below runs/; name its directory with --run-dir",
    );
    says(
        &["run", "tiny.lua", "--device", "cuda:0,1"],
        2,
        "error: --device cuda:0,1: several GPUs need a mesh, such as --mesh dp=2",
    );
    says(
        &["run", "tiny.lua", "--device", "gpu"],
        2,
        "error: --device gpu: there is no such device; use cpu, cuda, cuda:N or auto",
    );
    says(
        &["run", "tiny.lua", "--precision", "int8"],
        2,
        "error: --precision int8: there is no such precision; use f32, tf32, bf16, fp16 or fp8",
    );
}

#[test]
fn a_disk_that_refuses_is_status_1() {
    let p = tiny();
    p.file("file", "");
    let r = p.run(&["run", "tiny.lua", "--run-dir", "file/x"]);
    assert_eq!(
        (r.status, r.err.trim_end()),
        (Some(1), "error: cannot create the run directory file/x: not a directory")
    );
}

#[test]
fn an_error_in_a_step_names_the_line_and_leaves_a_failed_run() {
    let p = place();
    p.file("tiny.lua", TINY);
    let r = p.run(&["run", "tiny.lua", "--json", "--set", "width=5"]);
    assert_eq!(r.status, Some(3));
    let events = r.events();
    let last = events.last().unwrap();
    assert_eq!((last["event"].as_str(), last["line"].as_u64()), (Some("error"), Some(12)));
    assert!(r.err.starts_with("tiny.lua:12: linear: "), "{}", r.err);
    assert!(r.err.contains("  12 |   local error = model(batch.x)"), "{}", r.err);
    assert_eq!(p.run_json(&format!("runs/{}", p.runs()[0]))["status"], "failed");
}
