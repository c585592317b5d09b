//! Tests `perilune bench` on its smallest case, alone and against a shell script in place of PyTorch.
#![allow(clippy::unwrap_used)]

mod support;

use support::place;

const QUICK: [&str; 7] = ["bench", "--device", "cpu", "--rounds", "1", "--seconds", "0.01"];

fn args<'a>(more: &[&'a str]) -> Vec<&'a str> {
    QUICK.iter().chain(more).copied().collect()
}

#[test]
fn bench_without_pytorch() {
    let r = place().run(&args(&["--no-rival", "--json", "matmul_64"]));
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""));
    let events = r.events();
    let kinds: Vec<&str> = events.iter().map(|e| e["event"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["start", "case", "done"]);
    assert_eq!((&events[1]["name"], events[1].get("ratio")), (&"matmul_64".into(), None));
    assert!(events[1]["ours"].as_f64().unwrap() > 0.0 && events[1]["first"].as_f64().unwrap() > 0.0, "{}", r.out);
    assert_eq!(events[1].get("ours_bytes"), None, "peaks are for a GPU: {}", r.out);
}

#[test]
fn a_missing_python_is_reported() {
    let r = place().run(&args(&["--python", "no-such-python", "matmul_64"]));
    assert_eq!(r.status, Some(0), "{}", r.err);
    assert!(r.out.contains("without PyTorch (cannot start no-such-python: "), "{}", r.out);
}

#[cfg(unix)]
#[test]
fn the_ratio_is_theirs_over_ours() {
    use std::os::unix::fs::PermissionsExt;
    let p = place();
    let answer = r#"{"eager": 5000000.0, "eager_bytes": 4096, "compile_bytes": 2048, "first": 0.5, "goal": 2.0, "compile_mode": "m"}"#;
    let text = format!("#!/bin/sh\necho '{{\"version\": \"9.9\"}}'\nwhile read line; do echo '{answer}'; done\n");
    p.file("rival", text);
    std::fs::set_permissions(p.path("rival"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let rival = p.path("rival");
    let r = p.run(&args(&["--json", "--python", rival.to_str().unwrap(), "matmul_64"]));
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""));
    let events = r.events();
    assert_eq!(events[0]["versions"]["torch"], "9.9");
    let case = &events[1];
    let ratio = case["eager"].as_f64().unwrap() / case["ours"].as_f64().unwrap();
    assert!((case["ratio"].as_f64().unwrap() - ratio).abs() < 1e-9 && case["goal"] == 2.0, "{case}");
    assert!(case["compile_mode"] == "m" && case["eager_bytes"] == 4096 && case["compile_bytes"] == 2048, "{case}");
}

/// Perilune and PyTorch have the same cases, and goals exist only for these.
#[test]
fn both_sides_have_the_same_cases() {
    for family in ["cpu", "cuda"] {
        let at = |name: &str| format!("{}/../tests/bench/{name}", env!("CARGO_MANIFEST_DIR"));
        let r = place().run(&["run", &at(&format!("{family}.lua")), "--device", "cpu", "--quiet"]);
        assert_eq!((r.status, r.err.as_str()), (Some(0), ""));
        let text = std::fs::read_to_string(at(&format!("rival_{family}.py"))).unwrap();
        // A case is the first word of a line in one of the tables.
        let case = |line: &str| Some(line.strip_prefix("    \"")?.split_once("\": ")?.0.to_string());
        let mut theirs: Vec<String> = text.lines().filter_map(case).collect();
        let mut ours: Vec<String> = r.out.lines().map(str::to_string).collect();
        theirs.sort();
        ours.sort();
        assert_eq!(ours, theirs, "{family}");
        assert!(ours.len() >= 20, "{}", r.out);
        let goals = text.lines().find(|l| l.starts_with("GOALS = ")).unwrap_or_default();
        for name in goals.split('"').skip(1).step_by(2) {
            assert!(ours.iter().any(|n| n == name), "a goal for {name}, which is not a case");
        }
    }
}

#[test]
fn invalid_options_are_rejected() {
    let p = place();
    let r = p.run(&args(&["matmul_46"]));
    assert_eq!(r.status, Some(2));
    assert!(r.err.contains("there is no case 'matmul_46' on cpu") && r.err.contains("Did you mean"), "{}", r.err);
    let r = p.run(&["bench", "--precision", "bf16"]);
    assert!(r.status == Some(2) && r.err.contains("unexpected argument '--precision'"), "{}", r.err);
    let r = p.run(&["bench", "--seconds", "0"]);
    assert!(r.status == Some(2) && r.err.contains("it must be above 0"), "{}", r.err);
    let r = p.run(&["bench", "--memory-budget", "1GiB"]);
    assert!(r.status == Some(2) && r.err.contains("unexpected argument '--memory-budget'"), "{}", r.err);
    let help = p.run(&["bench", "--help"]).out;
    assert!(help.contains("--threads") && !help.contains("--precision") && !help.contains("--memory-budget"), "{help}");
}
