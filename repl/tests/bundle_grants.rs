//! Tests the question for what a bundle asks for, at a terminal: no, yes, always; and what is remembered of the answer.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod support;

use std::io::{Read, Write};
use support::{Place, Ran, TINY, place};

const QUESTION: &str = "Grant it? [y/N/always]";

/// An author's bundle of a recipe with a kernel, packed again with each text of `readme`.
fn author() -> Place {
    let p = place();
    let kernel = "local k = pl.kernel { name = 'k', inputs = 'x: f32', source = '__global__ void k(const float* x, float* y) { y[0] = x[0]; }', \
                  cpu = function(x) return x end }\nfunction recipe.model(p)\n";
    p.file("tiny.lua", TINY.replace("function recipe.model(p) ", kernel));
    succeeds(p.run(&["bundle", "key", "me.key", "--no-password"]));
    succeeds(p.run(&["bundle", "key", "other.key", "--no-password"]));
    pack(&p, "first", "me.key");
    p
}

fn pack(p: &Place, readme: &str, key: &str) {
    p.file("readme.txt", readme);
    let args = ["bundle", "pack", "tiny.lua", "-o", "t.plb", "--readme", "readme.txt", "--sign", key];
    succeeds(p.run(&args));
}

fn succeeds(ran: Ran) {
    assert_eq!(ran.status, Some(0), "{}{}", ran.out, ran.err);
}

/// Runs the bundle at a terminal and types an answer at each question. Returns the exit status and what was printed.
fn at_terminal(p: &Place, more: &[&str], answer: &str) -> (i32, String) {
    let (pty, pts) = pty_process::blocking::open().unwrap();
    pty.resize(pty_process::Size::new(40, 200)).unwrap();
    let dir = tempfile::tempdir_in(p.dir.path()).unwrap();
    let command = pty_process::blocking::Command::new(env!("CARGO_BIN_EXE_perilune"));
    let command =
        command.args(["run", "t.plb", "--quiet", "--accept-missing-walls", "--run-dir"]).arg(dir.path().join("run"));
    let command = command.args(more).current_dir(p.dir.path()).env("XDG_CONFIG_HOME", p.path("config"));
    let mut child = command.env("NO_COLOR", "1").env("PERILUNE_CACHE", p.path("cache")).spawn(pts).unwrap();
    let mut terminal = std::fs::File::from(std::os::fd::OwnedFd::from(pty));
    let (mut all, mut buffer, mut answered) = (String::new(), [0; 4096], 0);
    // On Linux the end of the output is an error.
    while let Ok(n @ 1..) = terminal.read(&mut buffer) {
        all.push_str(&String::from_utf8_lossy(&buffer[..n]));
        if all.matches(QUESTION).count() > answered {
            answered += 1;
            terminal.write_all(answer.as_bytes()).unwrap();
        }
    }
    (child.wait().unwrap().code().unwrap_or(-1), all)
}

#[test]
fn a_grant_is_asked_for_and_remembered_for_the_bundle_and_its_key() {
    let p = author();
    let asked = |all: &str| {
        all.contains("The bundle asks for to compile") || all.contains("kernels of its own (--allow-kernels)")
    };
    // No, in every form: the recipe is refused where it comes to the act.
    for answer in ["\n", "n\n", "no\n", "yess\n", "\u{4}"] {
        let (status, all) = at_terminal(&p, &[], answer);
        assert!(status == 4 && asked(&all) && all.matches(QUESTION).count() == 1, "{answer:?}: {status} {all}");
        assert!(all.contains("--allow-kernels"), "{all}");
    }
    assert!(!p.path("config").exists(), "nothing is remembered");
    // Yes is for this run.
    let (status, all) = at_terminal(&p, &[], "y\n");
    assert!(status == 0 && asked(&all), "{status} {all}");
    assert!(!p.path("config").exists(), "nothing is remembered");
    // A flag is an answer.
    let (status, all) = at_terminal(&p, &["--allow-kernels", "--untrusted"], "n\n");
    assert!(status == 0 && !all.contains(QUESTION), "{status} {all}");
    // Always is for this bundle, signed by this key.
    let (status, all) = at_terminal(&p, &[], "always\n");
    assert!(status == 0 && asked(&all), "{status} {all}");
    let (status, all) = at_terminal(&p, &[], "n\n");
    assert!(status == 0 && !all.contains(QUESTION), "{status} {all}");
    let piped =
        p.command(&["run", "t.plb", "--accept-missing-walls"]).env("XDG_CONFIG_HOME", p.path("config")).output();
    succeeds(piped.unwrap().into());
    // Not for another key, not without one, and not for a bundle that changed.
    let signed = p.read("t.plb.minisig");
    pack(&p, "first", "other.key");
    let (status, all) = at_terminal(&p, &[], "n\n");
    assert!(status == 4 && all.contains(QUESTION), "{status} {all}");
    std::fs::remove_file(p.path("t.plb.minisig")).unwrap();
    let (status, all) = at_terminal(&p, &[], "n\n");
    assert!(status == 4 && all.contains(QUESTION), "{status} {all}");
    pack(&p, "second", "me.key");
    let (status, all) = at_terminal(&p, &[], "n\n");
    assert!(status == 4 && all.contains(QUESTION), "{status} {all}");
    // The first one again.
    pack(&p, "first", "me.key");
    assert_eq!(p.read("t.plb.minisig").lines().nth(2), signed.lines().nth(2));
    let (status, all) = at_terminal(&p, &[], "n\n");
    assert!(status == 0 && !all.contains(QUESTION), "{status} {all}");
}

#[test]
fn without_a_terminal_nothing_is_asked_or_granted() {
    let p = author();
    let mut command = p.command(&["run", "t.plb", "--accept-missing-walls"]);
    let mut child = command
        .env("XDG_CONFIG_HOME", p.path("config"))
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let _ = child.stdin.take().unwrap().write_all(b"y\nalways\n");
    let ran: Ran = child.wait_with_output().unwrap().into();
    assert!(ran.status == Some(4) && !ran.err.contains("Grant it?"), "{}", ran.err);
    assert!(ran.err.contains("--allow-kernels"), "{}", ran.err);
    // What a damaged file says was granted is nothing.
    std::fs::create_dir_all(p.path("config/perilune")).unwrap();
    p.file("config/perilune/grants.json", "{\"x\": {\"kernels\": true");
    let ran: Ran = p
        .command(&["run", "t.plb", "--accept-missing-walls"])
        .env("XDG_CONFIG_HOME", p.path("config"))
        .output()
        .unwrap()
        .into();
    assert!(ran.status == Some(4) && ran.err.contains("--allow-kernels"), "{}", ran.err);
}
