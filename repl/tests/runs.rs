//! Tests `perilune runs`: status, filters, order, width, comparison.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use support::{Place, Ran, Running, place, tiny};

fn train(p: &Place, dir: &str, more: &[&str]) {
    let r = p.run(&[&["run", "tiny.lua", "--quiet", "--run-dir", dir][..], more].concat());
    assert_eq!(r.status, Some(0), "{}", r.err);
}

/// Three runs of one recipe below runs/, with different learning rates.
fn three() -> Place {
    let p = tiny();
    for (dir, lr) in [("runs/a", "0.1"), ("runs/b", "0.01"), ("runs/c", "0.001")] {
        train(&p, dir, &["--set", &format!("lr={lr}")]);
    }
    p
}

fn list(p: &Place, more: &[&str]) -> Vec<Value> {
    let r = p.run(&[&["runs", "--json"][..], more].concat());
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""));
    r.events()
}

fn names(runs: &[Value]) -> String {
    runs.iter().map(|run| run["name"].as_str().unwrap()).collect::<Vec<_>>().join(" ")
}

fn at_width(p: &Place, columns: usize, args: &[&str]) -> Ran {
    p.command(args).env("COLUMNS", columns.to_string()).output().unwrap().into()
}

#[test]
fn a_table_lists_status_best_metric_and_the_params_that_differ() {
    let p = three();
    let r = p.run(&["runs"]);
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""));
    let lines: Vec<Vec<&str>> = r.out.lines().map(|l| l.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["run", "started", "status", "step", "lowest", "valid/loss", "lr"], "{}", r.out);
    assert_eq!(lines.len(), 4);
    // The newest first; runs that started in the same second by name.
    let best = |dir: &str| p.run_json(dir)["metrics"]["valid/loss"].as_f64().unwrap();
    for (line, name) in lines[1..].iter().zip(["c", "b", "a"]) {
        assert_eq!((line[0], line[3], line[4]), (name, "finished", "6"), "{}", r.out);
        let shown: f64 = line[5].parse().unwrap();
        assert!((shown - best(&format!("runs/{name}"))).abs() < 1e-3, "{}", r.out);
    }
    assert_eq!(lines[1..].iter().map(|l| *l.last().unwrap()).collect::<Vec<_>>(), ["0.001", "0.01", "0.1"]);
}

#[test]
fn runs_are_sorted_and_filtered() {
    let p = three();
    train(&p, "runs/d", &["--steps", "3"]);
    assert_eq!(names(&list(&p, &["--sort", "name"])), "a b c d");
    assert_eq!(names(&list(&p, &["--sort", "step"])), "a b c d");
    let sorted = list(&p, &["--sort", "valid/loss", "--where", "steps=6"]);
    let losses: Vec<f64> = sorted.iter().map(|r| r["best"]["value"].as_f64().unwrap()).collect();
    assert!(losses.is_sorted() && losses.len() == 3, "{losses:?}");
    let worst = list(&p, &["--sort", "valid/loss:max", "--limit", "1", "--where", "steps=6"]);
    assert_eq!((worst.len(), worst[0]["best"]["value"].as_f64().unwrap()), (1, losses[2]));
    // A metric of steps, which only the whole log has.
    let off = list(&p, &["--sort", "off"]);
    assert!(off.iter().all(|r| r["best"]["metric"] == "off" && r["best"]["value"].is_f64()), "{off:?}");
    assert_eq!(names(&list(&p, &["--where", "lr=1e-2"])), "b");
    assert_eq!(names(&list(&p, &["--status", "finished,failed", "--recipe", "tiny", "--where", "steps=3"])), "d");
    assert_eq!(list(&p, &["--status", "running"]).len(), 0);
    let none = p.run(&["runs", "--status", "failed"]);
    assert_eq!((none.status, none.out.as_str()), (Some(0), "no runs in runs that the options select\n"));
    let differs = &list(&p, &[])[0]["differs"];
    assert_eq!(differs, &serde_json::json!({ "lr": 0.1, "steps": 3 }));
    // A single run, and a directory with another name.
    assert_eq!(names(&list(&p, &["runs/b"])), "b");
    assert_eq!(names(&list(&p, &["runs", "runs/b"])).split(' ').count(), 4, "none is listed twice");
}

#[test]
fn statuses_come_from_the_record_the_lock_and_the_log() {
    let p = tiny();
    train(&p, "runs/done", &[]);
    let failed = p.run(&["run", "tiny.lua", "--run-dir", "runs/failed", "--set", "lr=1e30", "--quiet"]);
    assert_eq!(failed.status, Some(3), "{}", failed.err);
    let status = |name: &str| {
        let runs = list(&p, &[&format!("runs/{name}")]);
        (runs[0]["status"].as_str().unwrap().to_string(), runs[0]["step"].as_u64().unwrap())
    };
    assert_eq!(status("done"), ("finished".into(), 6));
    assert_eq!(status("failed").0, "failed");
    assert!(list(&p, &["runs/failed"])[0]["error"].as_str().unwrap().contains("loss"), "the error is listed");

    let mut live = Running::start(&p, &["run", "tiny.lua", "--json", "--run-dir", "runs/live", "--steps", "1000000"]);
    live.until(3);
    assert_eq!(status("live").0, "running");
    live.signal("-TERM");
    assert_eq!(live.child.wait().unwrap().code(), Some(143));
    let (word, step) = status("live");
    assert_eq!(word, "stopped");
    assert_eq!(step, p.run_json("runs/live")["steps_done"].as_u64().unwrap());

    let mut killed =
        Running::start(&p, &["run", "tiny.lua", "--json", "--run-dir", "runs/killed", "--steps", "1000000"]);
    killed.until(3);
    killed.child.kill().unwrap();
    killed.child.wait().unwrap();
    assert_eq!(p.run_json("runs/killed")["status"], "running");
    assert_eq!(status("killed").0, "interrupted");

    // One that was changed is listed with the reason, and hides no other.
    let text = p.read("runs/done/run.json").replace("\"steps_done\": 6", "\"steps_done\": 7");
    p.file("runs/done/run.json", text);
    assert_eq!(status("done").0, "damaged");
    let all = p.run(&["runs"]);
    assert_eq!(all.out.lines().count(), 5, "{}", all.out);
    assert!(all.err.contains("warning: runs/done/run.json: blake3: is "), "{}", all.err);
    // An empty record of a process that was killed as it started; a directory of another program.
    std::fs::create_dir_all(p.path("runs/early")).unwrap();
    p.file("runs/early/run.json", "");
    std::fs::create_dir_all(p.path("runs/other")).unwrap();
    p.file("runs/other/run.json", "{\"a\": 1}");
    assert_eq!(status("early"), ("interrupted".into(), 0));
    assert_eq!(list(&p, &[]).len(), 5);
}

#[test]
fn listings_fit_terminals_of_all_widths() {
    let p = three();
    let compare = &["runs", "--compare", "a", "b"][..];
    for columns in [40, 60, 80, 120, 200] {
        let r = at_width(&p, columns, &["runs"]);
        assert_eq!(r.status, Some(0), "{}", r.err);
        assert!(r.out.lines().all(|l| l.chars().count() <= columns), "{columns}:\n{}", r.out);
        // Nothing is left out.
        for word in ["finished", "valid/loss", "0.001", "0.01"] {
            assert!(r.out.contains(word), "{columns}: no {word}\n{}", r.out);
        }
        let c = at_width(&p, columns, compare);
        let wide = |l: &&str| l.chars().count() > columns && !l.starts_with(['+', '-', ' ', '@']);
        assert_eq!((c.status, c.out.lines().find(wide)), (Some(0), None), "{columns}:\n{}", c.out);
    }
    let narrow = at_width(&p, 40, &["runs"]).out;
    assert!(narrow.starts_with("c\n  started "), "{narrow}");
    // A pipe gets a line for each run, whatever its length.
    assert_eq!(p.run(&["runs"]).out.lines().count(), 4);
}

#[test]
fn a_comparison_lists_all_that_differs() {
    let p = tiny();
    p.file("d.txt", "one");
    let text = support::TINY.replace(
        "local x = pl.randn { 64, 4 }",
        "local seen = pl.data.text(\"d.txt\")\n  local x = pl.randn { 64, 4 }",
    );
    p.file("tiny.lua", &text);
    train(&p, "runs/a", &[]);
    p.file("d.txt", "two");
    p.file(
        "tiny.lua",
        text.replace("{ off = error:abs():mean() }", "{ off = error:abs():mean(), top = pl.zeros({}) }"),
    );
    train(&p, "runs/b", &["--set", "lr=0.05", "--seed", "4"]);
    let r = p.run(&["runs", "--compare", "a", "runs/b"]);
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""));
    let has = |words: &[&str]| r.out.lines().any(|l| l.split_whitespace().collect::<Vec<_>>() == words);
    assert!(has(&["lr", "0.1", "0.05"]) && has(&["seed", "3", "4"]) && r.out.contains("2 equal"), "{}", r.out);
    assert!(r.out.lines().any(|l| l.starts_with("d.txt  3 bytes, blake3 ")), "{}", r.out);
    assert!(r.out.contains("\n-  return (error * error):mean(), { off = error:abs():mean() }\n+  return"), "{}", r.out);
    let row = |name: &str| r.out.lines().find(|l| l.starts_with(&format!("{name} "))).unwrap().to_string();
    assert_eq!(row("valid/loss").matches(" at 6").count(), 4, "{}", r.out);
    assert!(row("valid/top").matches(" at ").count() == 2, "only b has it: {}", r.out);

    let events = p.run(&["runs", "--compare", "a", "b", "--json"]).events();
    assert_eq!(events.len(), 1);
    let e = &events[0];
    let of = |key: &str, name: &str| e[key].as_array().unwrap().iter().find(|d| d["name"] == name).unwrap().clone();
    assert_eq!(of("params", "lr"), serde_json::json!({ "name": "lr", "a": "0.1", "b": "0.05" }));
    let loss = of("metrics", "valid/loss");
    assert_eq!(loss["a"]["last"]["value"], p.run_json("runs/a")["metrics"]["valid/loss"]);
    assert_eq!((&loss["max"], &of("metrics", "valid/top")["a"]), (&false.into(), &Value::Null));
    assert!(e["code"][0]["diff"].as_array().unwrap().iter().any(|l| l.as_str().unwrap().starts_with("+  return")));

    let same = p.run(&["runs", "--compare", "a", "a"]);
    assert!(same.out.contains("no difference (4 equal)") && same.out.contains("no difference"), "{}", same.out);
}

#[test]
fn runs_have_costs_and_a_worse_one_is_an_alarm() {
    let p = three();
    for run in list(&p, &[]) {
        let value = |key: &str| run["performance"][key].as_f64();
        assert!(value("step_ms").unwrap() > 0.0 && value("device_hours").unwrap() > 0.0, "{run}");
        assert!(value("peak_memory_bytes").unwrap() > 0.0 && value("energy_joules").is_none(), "{run}");
    }
    for columns in [40, 200] {
        let r = at_width(&p, columns, &["runs", "--price", "1000000"]);
        assert!(r.out.contains("device h") && r.out.contains("cost"), "{}", r.out);
        assert!(r.out.lines().all(|l| l.chars().count() <= columns), "{}", r.out);
    }
    // Of two runs one is slower, by however little.
    let both = [["a", "b"], ["b", "a"]].map(|[a, b]| p.run(&["runs", "--compare", a, b, "--alarm", "0"]));
    for ([a, b], r) in [["a", "b"], ["b", "a"]].into_iter().zip(&both) {
        let e = &p.run(&["runs", "--compare", a, b, "--json"]).events()[0];
        let is_loss = |m: &Value| m["loss_percent"].as_f64().is_some_and(|loss| loss > 0.0);
        let worse = e["measured"].as_array().unwrap().iter().any(is_loss);
        assert_eq!(r.status, Some(i32::from(worse)), "{e}{}", r.err);
    }
    assert!(both.iter().any(|r| r.status == Some(1)), "{}{}", both[0].out, both[1].out);
    for r in both.iter().filter(|r| r.status == Some(1)) {
        assert!(r.err.contains(" is worse than ") && r.err.contains("--alarm 0 allows less"), "{}", r.err);
    }
    assert_eq!(p.run(&["runs", "--compare", "a", "b", "--alarm", "1e9"]).status, Some(0));
    assert_eq!(p.run(&["runs", "--alarm", "5"]).status, Some(2));
}

#[test]
fn wrong_usage_of_runs_names_the_cure() {
    let p = three();
    let cases: [(&[&str], &str); 8] = [
        (&["runs", "--sort", "valid/los"], "--sort valid/los: no such metric was logged (there are date, name, step, "),
        (&["runs", "--sort", "valid/los"], "Did you mean 'valid/loss'?"),
        (
            &["runs", "--recipe", "tinyy"],
            "--recipe tinyy: no run has the recipe 'tinyy' (there are tiny). Did you mean 'tiny'?",
        ),
        (&["runs", "--where", "lrr=1"], "--where lrr=1: no run has the param 'lrr'"),
        (&["runs", "--status", "finishd"], "a similar value exists: 'finished'"),
        (
            &["runs", "--compare", "a", "bb"],
            "there is no run bb: neither in the current directory nor below runs/. Did you mean runs/b?",
        ),
        (&["runs", "--compare", "a", "."], "--compare: . is not a run directory"),
        (&["runs", "nowhere"], "nowhere"),
    ];
    for (args, message) in cases {
        let r = p.run(args);
        assert!(matches!(r.status, Some(1 | 2)), "{args:?}: {:?}", r.status);
        assert!(r.err.contains(message), "{args:?}: {}", r.err);
    }
    let r = place().run(&["runs"]);
    assert_eq!(r.status, Some(2));
    assert!(r.err.contains("there is no directory runs/ here\n  hint: `perilune run RECIPE` makes it"), "{}", r.err);
}
