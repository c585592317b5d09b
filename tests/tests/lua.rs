//! Runs the Lua tests in `lua/*.lua`, which use `lua/support.lua`. A failure shows its Lua file and line.
#![allow(clippy::unwrap_used)]

use perilune_tests::scripts::{files, script};
use std::path::Path;

/// Every file is one test per number of threads, since results must not depend on it.
fn run(path: &Path, threads: usize) -> Result<usize, String> {
    let s = script(threads, &[]).map_err(|e| e.to_string())?;
    s.runtime.load(path).map_err(|e| e.to_string())?;
    s.runtime.load_text("require('support').report()", "=report").map_err(|e| e.to_string())?;
    let (mut passed, mut failed) = (0, Vec::new());
    for line in s.output().lines() {
        if let Some(n) = line.strip_prefix("passed ") {
            passed = n.parse().unwrap();
        } else if line.starts_with("failed ") || !failed.is_empty() {
            failed.push(line.to_string());
        }
    }
    if failed.is_empty() { Ok(passed) } else { Err(failed.join("\n")) }
}

#[test]
fn lua_tests_pass() {
    let all: Vec<_> = files(Path::new("lua"), "lua").into_iter().filter(|p| !p.ends_with("support.lua")).collect();
    let (mut total, mut wrong) = (0, Vec::new());
    for path in &all {
        match run(path, 2) {
            Ok(n) => {
                println!("{}: {n} passed", path.display());
                assert!(n > 0, "{}: no test ran", path.display());
                total += n;
            }
            Err(e) => wrong.push(format!("{}\n{e}", path.display())),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    assert!(total >= 100, "only {total} tests ran");
}
