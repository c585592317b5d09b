//! Tests the log: empty by default, spans and events of a run if requested.

#![allow(clippy::unwrap_used)]

mod support;

use support::tiny;

#[test]
fn a_log_names_plans_steps_data_and_checkpoints() {
    let p = tiny();
    let r = p.run(&["run", "tiny.lua", "--quiet", "--run-dir", "r", "--log", "log.txt"]);
    assert_eq!(r.status, Some(0), "{}", r.err);
    let log = p.read("log.txt");
    let missing = [
        "compiled a plan kernels=",
        "step{step=6}",
        "data: ",
        "close time.busy=",
        "checkpoint step=6 path=",
        "evaluated step=6",
    ]
    .into_iter()
    .find(|part| !log.contains(part));
    assert_eq!(missing, None, "{log}");
    assert!(!log.contains("run_plan") && !log.contains('\x1b'), "{log}");
    // To stderr, and only what the filter names.
    let mut c = p.command(&["run", "tiny.lua", "--quiet"]);
    let r: support::Ran = c.env("PERILUNE_LOG", "perilune_engine=trace").output().unwrap().into();
    assert!(r.err.contains("run_plan{kernels=") && !r.err.contains("checkpoint"), "{}", r.err);
    // Without a request nothing is logged.
    assert_eq!(p.run(&["run", "tiny.lua", "--quiet"]).err, "");
}

#[test]
fn an_invalid_filter_is_reported() {
    let p = tiny();
    let mut c = p.command(&["run", "tiny.lua"]);
    let r: support::Ran = c.env("PERILUNE_LOG", "perilune=loud").output().unwrap().into();
    assert_eq!(r.status, Some(2));
    assert!(r.err.contains("PERILUNE_LOG=perilune=loud: ") && r.err.contains("give a level"), "{}", r.err);
}
