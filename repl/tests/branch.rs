//! Tests resuming at a chosen step: in place, and as a branch in a new run directory.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::{Value, json};
use support::{Place, Ran, Running, TINY, place, save, snapshot_of};

const STEPS: &str = "12";

/// A recipe whose steps depend on random numbers, with a log of samples.
fn recipe() -> String {
    TINY.replace("{ pl.nn.Linear(p.width, 1) }", "{ pl.nn.Dropout(0.25), pl.nn.Linear(p.width, 1) }")
        .replace(
            "return (error * error):mean(), { off = error:abs():mean() }",
            "return (error * error):mean(), { off = error:abs():mean() }, nil, error * error",
        )
        .replace("return recipe", "recipe.sample_log, recipe.eval_every = true, 3\nreturn recipe")
}

fn ok(r: Ran) -> Ran {
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{}", r.out);
    r
}

/// A run of twelve steps with checkpoints at 3, 6, 9 and 12.
fn origin() -> Place {
    let p = place();
    p.file("tiny.lua", recipe());
    ok(p.run(&[
        "run",
        "tiny.lua",
        "--quiet",
        "--run-dir",
        "runs/a",
        "--steps",
        STEPS,
        "--checkpoint-every",
        "3",
        "--keep",
        "0",
    ]));
    p
}

fn events(p: &Place, dir: &str, kind: &str) -> Vec<Value> {
    let text = p.read(&format!("{dir}/metrics.jsonl"));
    let all = text.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
    all.filter(|e| e["event"] == kind).collect()
}

fn losses(p: &Place, dir: &str) -> Vec<(u64, f64)> {
    events(p, dir, "step").iter().map(|e| (e["step"].as_u64().unwrap(), e["loss"].as_f64().unwrap())).collect()
}

fn checkpoints(p: &Place, dir: &str) -> Vec<String> {
    let entries = std::fs::read_dir(p.path(&format!("{dir}/checkpoints"))).unwrap();
    let mut names: Vec<String> = entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn a_branch_has_the_bits_of_the_run_and_leaves_it_as_it_is() {
    let p = origin();
    let before = snapshot_of(&p.path("runs/a"));
    let r = p.run(&[
        "run",
        "tiny.lua",
        "--resume",
        "runs/a",
        "--at",
        "6",
        "--branch",
        "--run-dir",
        "runs/b",
        "--checkpoint-every",
        "3",
        "--json",
    ]);
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""));
    let all = r.events();
    let branch = all.iter().find(|e| e["event"] == "branch").unwrap();
    assert_eq!(branch, &json!({ "event": "branch", "step": 6, "from": "runs/a", "run_dir": "runs/b" }));
    assert_eq!(snapshot_of(&p.path("runs/a")), before, "the origin is as it was");

    let (a, b) = (p.run_json("runs/a"), p.run_json("runs/b"));
    assert_eq!(b["weights"], a["weights"], "the same steps");
    assert_eq!(losses(&p, "runs/b"), losses(&p, "runs/a"), "the curve begins with that of the origin");
    assert_eq!(
        std::fs::read(p.path("runs/b/samples.bin")).unwrap(),
        std::fs::read(p.path("runs/a/samples.bin")).unwrap()
    );
    assert_eq!((&b["status"], &b["steps_done"], &b["resumed"]), (&"done".into(), &12.into(), &json!([6])));
    let origin = p.path("runs/a").canonicalize().unwrap();
    assert_eq!(b["branch"], json!({ "run": origin.to_str().unwrap(), "step": 6, "started": a["started"] }));
    assert_eq!(checkpoints(&p, "runs/b"), ["step-12", "step-6", "step-9"]);

    // It is a run like any other: it can be repeated from its first step, resumed and listed.
    let r = p.run(&["replay", "runs/b", "--run-dir", "runs/again", "--quiet"]);
    assert_eq!(r.status, Some(0), "{}", r.err);
    let r = ok(p.run(&["run", "--resume", "runs/b", "--steps", "15"]));
    assert!(r.out.contains("continuing from step 12 of runs/b"), "{}", r.out);
    let runs = p.run(&["runs", "--json", "--where", "steps=15"]).events();
    assert_eq!((runs.len(), &runs[0]["branch"]["step"]), (1, &6.into()));
}

#[test]
fn a_branch_takes_other_params_and_the_recipe_of_the_run() {
    let p = origin();
    let before = snapshot_of(&p.path("runs/a"));
    // The file is gone: the run directory has the recipe.
    std::fs::remove_file(p.path("tiny.lua")).unwrap();
    let r = ok(p.run(&["run", "--resume", "a", "--at", "9", "--branch", "--set", "lr=0.5"]));
    assert!(r.out.contains("branching from step 9 of runs/a into runs/tiny-"), "{}", r.out);
    assert!(r.out.contains("changed since: lr 0.1 -> 0.5"), "{}", r.out);
    assert_eq!(snapshot_of(&p.path("runs/a")), before);
    let name = p.runs().into_iter().find(|n| n.starts_with("tiny-")).unwrap();
    let dir = format!("runs/{name}");
    let (old, new) = (losses(&p, "runs/a"), losses(&p, &dir));
    assert_eq!(new[..10], old[..10], "the loss of step 10 is that of the old weights");
    assert_ne!(new[10..], old[10..]);
    assert_eq!((&p.run_json(&dir)["params"]["lr"], &p.run_json("runs/a")["params"]["lr"]), (&json!(0.5), &json!(0.1)));

    // A branch of a branch names the whole line.
    ok(p.run(&["run", "--resume", &dir, "--branch", "--run-dir", "runs/c", "--steps", "14"]));
    let branch = p.run_json("runs/c")["branch"].clone();
    assert_eq!((&branch["step"], &branch["of"]["step"]), (&12.into(), &9.into()), "{branch}");
    assert!(branch["of"]["run"].as_str().unwrap().ends_with("runs/a"), "{branch}");
    let r = p.run(&["replay", "runs/c", "--quiet"]);
    assert_eq!(r.status, Some(0), "{}", r.err);
}

/// A run with an edit at one of its steps: a branch from before it has the first version, one from after it the second.
#[test]
fn a_branch_has_the_history_up_to_its_step() {
    let p = place();
    let text = TINY.replace("steps = 6", "steps = 400");
    p.file("tiny.lua", &text);
    let mut run = Running::start(
        &p,
        &[
            "run",
            "tiny.lua",
            "--json",
            "--run-dir",
            "runs/a",
            "--watch",
            "--steps",
            "1000000",
            "--checkpoint-every",
            "1",
            "--keep",
            "0",
        ],
    );
    run.until(4);
    save(&p, "tiny.lua", &text.replace("lr = 0.1", "lr = 0.02"));
    let edit = run.next("reload");
    assert_eq!(edit["ok"], true, "{edit}");
    let edited = edit["step"].as_u64().unwrap();
    run.until(edited + 5);
    // Of a run that is being written too.
    let (early, late) = (edited - 1, edited + 2);
    for (dir, step) in [("early", early), ("late", late)] {
        let at = step.to_string();
        let steps = (step + 4).to_string();
        let dir = format!("runs/{dir}");
        ok(p.run(&["run", "--resume", "a", "--at", &at, "--branch", "--run-dir", &dir, "--steps", &steps, "--quiet"]));
    }
    run.signal("-TERM");
    assert_eq!(run.child.wait().unwrap().code(), Some(143));
    assert_eq!(p.run_json("runs/early")["params"]["lr"], json!(0.1));
    assert_eq!(p.run_json("runs/late")["params"]["lr"], json!(0.02));
    assert!(!p.path(&format!("runs/early/recipe@{edited}")).exists());
    assert!(p.path(&format!("runs/late/recipe@{edited}")).exists());
    let (old, late_losses) = (losses(&p, "runs/a"), losses(&p, "runs/late"));
    assert_eq!(late_losses[..], old[..late_losses.len()], "the steps after the edit are those of the run");
    for dir in ["early", "late"] {
        let r = p.run(&["replay", &format!("runs/{dir}"), "--quiet", "--run-dir", &format!("runs/again-{dir}")]);
        assert_eq!(r.status, Some(0), "{dir}: {}", r.err);
    }
    // An evaluation takes the version of its step.
    let r = p.run(&["runs", "--json", "runs/a"]);
    assert_eq!(r.events()[0]["status"], "stopped");
    for step in [early, late] {
        ok(p.run(&["eval", "a", "--at", &step.to_string()]));
    }
}

#[test]
fn a_resume_in_place_deletes_no_checkpoints_unless_told() {
    let p = origin();
    let before = snapshot_of(&p.path("runs/a"));
    let weights = p.run_json("runs/a")["weights"].clone();
    let r = p.run(&["run", "tiny.lua", "--resume", "a", "--at", "6"]);
    assert_eq!(r.status, Some(2));
    assert!(
        r.err.contains(
            "--at 6: the run in runs/a has later checkpoints (of step 9, 12), which continuing there would replace"
        ),
        "{}",
        r.err
    );
    assert!(
        r.err.contains("hint: --branch continues in a new directory") && r.err.contains("--discard-later deletes"),
        "{}",
        r.err
    );
    let same = |now: &support::Snapshot| {
        now.iter()
            .filter(|(path, _)| !path.ends_with(".lock"))
            .eq(before.iter().filter(|(path, _)| !path.ends_with(".lock")))
    };
    assert!(same(&snapshot_of(&p.path("runs/a"))), "nothing was deleted");

    // Edits of the recipe since then do not hide that the checkpoints go.
    ok(p.run(&["run", "tiny.lua", "--resume", "a", "--at", "6", "--discard-later", "--steps", "7", "--quiet"]));
    assert_eq!(checkpoints(&p, "runs/a"), ["step-3", "step-6", "step-7"]);
    assert_eq!(losses(&p, "runs/a").len(), 7);
    ok(p.run(&["run", "tiny.lua", "--run-dir", "runs/a", "--resume", "--steps", STEPS, "--quiet"]));
    assert_eq!(p.run_json("runs/a")["weights"], weights, "the same steps again");
    assert_eq!(p.run(&["replay", "runs/a", "--quiet"]).status, Some(0));
    // The last checkpoint has no later ones.
    ok(p.run(&["run", "tiny.lua", "--resume", "a", "--at", STEPS, "--quiet"]));
}

#[test]
fn wrong_usage_of_branches_names_the_cure() {
    let p = origin();
    std::fs::create_dir(p.path("other")).unwrap();
    let cases: [(&[&str], &str); 9] = [
        (&["run", "tiny.lua", "--branch"], "--resume"),
        (&["run", "tiny.lua", "--at", "3"], "--resume"),
        (&["run"], "RECIPE"),
        (&["run", "--resume"], "--resume: there is neither a RUN nor a RECIPE"),
        (
            &["run", "--resume", "aa"],
            "there is no run aa: neither in the current directory nor below runs/. Did you mean runs/a?",
        ),
        (
            &["run", "--resume", "a", "--at", "7", "--branch"],
            "--at 7: the run in runs/a has no checkpoint of step 7 (it has 3, 6, 9, 12)",
        ),
        (&["run", "--resume", "a", "--branch", "--run-dir", "runs/a"], "--run-dir runs/a: it already contains a run"),
        (&["run", "--resume", "a", "--run-dir", "other"], "hint: --branch continues it in other"),
        (&["run", "--resume", "a", "--watch"], "--watch: the recipe that the run stores is not edited"),
    ];
    for (args, message) in cases {
        let r = p.run(args);
        assert_eq!(r.status, Some(2), "{args:?}: {}{}", r.out, r.err);
        assert!(r.err.contains(message), "{args:?}: {}", r.err);
    }
    // The word after --resume may be the recipe, as in earlier releases.
    ok(p.run(&["run", "--resume", "tiny.lua", "--run-dir", "runs/a", "--quiet"]));
    // An origin with a damaged log is refused, and leaves no directory that looks like a run.
    let text = p.read("runs/a/metrics.jsonl").replacen("\"step\":2", "\"step\":8", 1);
    p.file("runs/a/metrics.jsonl", text);
    let r = p.run(&["run", "--resume", "a", "--branch", "--run-dir", "runs/b"]);
    assert_eq!(r.status, Some(4), "{}", r.err);
    assert!(r.err.contains("metrics.jsonl:"), "{}", r.err);
}
