//! Tests `--watch`: compares a run whose recipe is edited during training with one that is stopped and restarted at each edit.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use support::{MIGRATE, Running, place, save};

/// Edits replace `ACT`, `WIDTH`, `OPT`, `LR`, `STEPS` and `LOSS`.
const RECIPE: &str = r#"
local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local parts = require "parts"
local recipe = pl.recipe { name = "edited", params = { lr = LR, steps = STEPS, seed = 3, width = WIDTH } }
function recipe.data(p)
  local x = pl.randn { 80, 4 }
  local set = pl.data.tensors { x = x, y = x:sum(1) }
  return { train = set:split("train", 0.75, p.seed):shuffle(p.seed):batch(8) }
end
function recipe.model(p)
  return nn.Sequential { nn.Linear(4, p.width), nn.ACT(), nn.Dropout(0.1), nn.Linear(p.width, 1) }
end
function recipe.optimizer(p, model) return optim.OPT end
local calls = 0
function recipe.loss(model, batch)
  calls = calls + 1
  local error = model(batch.x):squeeze(-1) - batch.y
  LOSS
  return parts.square(error):mean()
end
MIGRATE
return recipe
"#;

const PARTS: &str = "local parts = {}\nfunction parts.square(x) return x * x end\nreturn parts\n";

#[derive(Clone)]
struct Version {
    lr: &'static str,
    width: u32,
    act: &'static str,
    opt: &'static str,
    loss: &'static str,
    steps: u64,
    migrate: &'static str,
}

impl Version {
    fn text(&self) -> String {
        RECIPE
            .replace("STEPS", &self.steps.to_string())
            .replace("LR", self.lr)
            .replace("WIDTH", &self.width.to_string())
            .replace("nn.ACT", &format!("nn.{}", self.act))
            .replace("optim.OPT", &format!("optim.{}", self.opt))
            .replace("LOSS", self.loss)
            .replace("MIGRATE", self.migrate)
    }
}

const FIRST: Version = Version {
    lr: "0.01",
    width: 8,
    act: "Tanh",
    opt: "SGD(model, { lr = p.lr, momentum = 0.5 })",
    loss: "",
    steps: 1_000_000,
    migrate: "",
};

const ARGS: [&str; 8] = ["run", "edited.lua", "--json", "--watch", "--run-dir", "r", "--threads", "1"];

#[test]
fn edits_land_and_bad_ones_leave_the_run_going() {
    let p = place();
    p.file("parts.lua", PARTS);
    p.file("edited.lua", FIRST.text());
    let mut run = Running::start(&p, &ARGS);
    run.next("step");

    // The versions that ran, with their first steps, to be repeated by stopping and restarting.
    let mut history: Vec<(u64, Version)> = vec![(0, FIRST)];
    let mut now = FIRST;
    let mut good = |run: &mut Running, next: Version, says: &str| {
        save(&p, "edited.lua", &next.text());
        let event = run.next("reload");
        assert_eq!(event["ok"], true, "{event}");
        assert!(event["changed"].to_string().contains(says), "{says}: {event}");
        history.push((event["step"].as_u64().unwrap(), next));
    };
    let bad = |run: &mut Running, name: &str, text: &str, says: &str| {
        save(&p, name, text);
        let event = run.next("reload");
        assert_eq!(event["ok"], false, "{event}");
        assert!(event["error"].as_str().unwrap().contains(says), "{says}: {event}");
        run.next("step");
    };

    now.lr = "0.02";
    good(&mut run, now.clone(), "lr 0.01 -> 0.02");
    bad(&mut run, "edited.lua", &now.text().replace("return recipe", "return recipe }"), "edited.lua:");
    bad(
        &mut run,
        "edited.lua",
        &now.text().replace("nn.Linear(p.width, 1)", "nn.Linear(p.width + 1, 1)"),
        "linear: x {8, 8} and weight {1, 9}",
    );
    bad(&mut run, "edited.lua", &now.text().replace("p.seed):batch", "p.sead):batch"), "did you mean 'seed'?");
    now.act = "ReLU";
    good(&mut run, now.clone(), "edited.lua:");
    (now.width, now.migrate) = (12, MIGRATE);
    good(&mut run, now.clone(), "width 8 -> 12");
    now.opt = "AdamW(model, { lr = p.lr })";
    good(&mut run, now.clone(), "edited.lua:");
    bad(&mut run, "parts.lua", "return {", "parts.lua:");
    std::fs::remove_file(p.path("parts.lua")).unwrap();
    let gone = run.next("reload");
    assert!(gone["error"].as_str().unwrap().contains("there is no module \"parts\""), "{gone}");
    // The restored text is loaded again without a change.
    save(&p, "parts.lua", PARTS);
    let back = run.next("reload");
    assert_eq!((&back["ok"], &back["changed"]), (&Value::Bool(true), &serde_json::json!([])));

    // It raises in its third step; its first two steps count. The first call was the recorded step.
    let late = Version { loss: "if calls == 4 then error('three is too many') end", ..now.clone() };
    save(&p, "edited.lua", &late.text());
    let applied = run.next("reload");
    assert_eq!(applied["ok"], true);
    let refused = run.next("reload");
    assert!(refused["error"].as_str().unwrap().contains("three is too many"), "{refused}");
    let (from, to) = (applied["step"].as_u64().unwrap(), refused["step"].as_u64().unwrap());
    assert_eq!(to, from + 2);
    history.push((from, late));
    history.push((to, now.clone()));

    run.next("step");
    let step = run.next("step")["step"].as_u64().unwrap();
    now.steps = step + 2000;
    save(&p, "edited.lua", &now.text());
    let event = run.next("reload");
    history.push((event["step"].as_u64().unwrap(), now.clone()));
    let done = run.next("done");
    assert!(run.child.wait().unwrap().success());
    assert_eq!(done["steps"], now.steps);

    // A replay of the run and its edits gives the same bits.
    p.file("parts.lua", "error('nobody reads this')");
    let again = p.run(&["replay", "r", "--run-dir", "again"]);
    assert_eq!((again.status, again.complaints()), (Some(0), vec![]), "{}", again.out);
    assert!(again.out.contains("the weights equal those of the run"), "{}", again.out);
    assert_eq!(p.run_json("again")["weights"], done["weights"]);

    // The ledger has every applied version and its files.
    let ledger: Vec<Value> = p.read("r/ledger.jsonl").lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert!(ledger.iter().filter(|e| e["ok"] == false).count() >= 6);
    for (step, version) in &history[1..] {
        let entry = ledger.iter().find(|e| e["ok"] == true && e["step"] == *step);
        assert!(entry.is_some(), "no entry for step {step}");
        if version.loss.is_empty() {
            assert_eq!(p.read(&format!("r/recipe@{step}/edited.lua")), version.text());
        }
    }
}

/// With edits that keep the States, the run has the weights of one that was stopped, edited and resumed each time.
#[test]
fn a_reload_gives_the_bits_of_a_stop_and_a_resume() {
    let p = place();
    p.file("parts.lua", PARTS);
    p.file("edited.lua", FIRST.text());
    let mut run = Running::start(&p, &ARGS);
    let mut history = vec![(0, FIRST)];
    run.next("step");
    let edits: [fn(&mut Version); 3] =
        [|v| v.lr = "0.03", |v| v.act = "ReLU", |v| v.loss = "if calls > 0 then error = error * 0.5 end"];
    for edit in edits {
        let mut next = history.last().unwrap().1.clone();
        edit(&mut next);
        save(&p, "edited.lua", &next.text());
        let event = run.next("reload");
        assert_eq!(event["ok"], true, "{event}");
        history.push((event["step"].as_u64().unwrap(), next));
    }
    let mut last = history.last().unwrap().1.clone();
    last.steps = history.last().unwrap().0 + 3000;
    save(&p, "edited.lua", &last.text());
    let event = run.next("reload");
    assert_eq!(event["ok"], true, "{event}");
    history.push((event["step"].as_u64().unwrap(), last.clone()));
    let done = run.next("done");
    assert!(run.child.wait().unwrap().success());

    for (k, (_, version)) in history.iter().enumerate() {
        let end = history.get(k + 1).map_or(last.steps, |next| next.0);
        p.file("edited.lua", version.text());
        let (lr, steps) = (format!("lr={}", version.lr), format!("steps={end}"));
        let mut args = vec!["run", "edited.lua", "--quiet", "--run-dir", "s", "--threads", "1"];
        args.extend(["--set", &lr, "--set", &steps]);
        if k > 0 {
            args.push("--resume");
        }
        let r = p.run(&args);
        // An edit may cause a loss spike, which is reported.
        assert_eq!(r.status, Some(0), "part {k}: {}", r.err);
    }
    assert_eq!(p.run_json("s")["weights"], done["weights"]);
    // Stops and resumes are repeated too; a changed recipe file is refused.
    let r = p.run(&["replay", "s", "--run-dir", "t"]);
    assert_eq!(r.status, Some(0), "{}", r.err);
    assert_eq!(p.run_json("t")["weights"], done["weights"]);
    p.file("r/recipe/parts.lua", "return {}");
    let r = p.run(&["replay", "r"]);
    assert_eq!(r.status, Some(4));
    assert!(r.err.contains("r/recipe/parts.lua: is not the file that ran"), "{}", r.err);
    // A later resume uses the params of that time.
    assert_eq!((&p.run_json("r")["params"]["lr"], &p.run_json("r")["steps"]), (&0.03.into(), &last.steps.into()));
}

#[test]
fn a_learning_rate_or_a_comment_compiles_nothing() {
    let p = place();
    p.file("parts.lua", PARTS);
    p.file("edited.lua", FIRST.text());
    let args = ["run", "edited.lua", "--watch", "--run-dir", "r", "--threads", "1"];
    let mut child = p.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut next = || {
        let mut line = String::new();
        while !line.contains("applied at step") {
            line.clear();
            assert_ne!(out.read_line(&mut line).unwrap(), 0, "the run ended early");
        }
        line
    };
    std::thread::sleep(std::time::Duration::from_millis(500));
    save(&p, "edited.lua", &Version { lr: "0.02", ..FIRST }.text());
    let line = next();
    assert!(line.contains("lr 0.01 -> 0.02, edited.lua:5 ") && line.contains(" 0 plans compiled"), "{line}");
    std::thread::sleep(std::time::Duration::from_millis(300));
    save(&p, "edited.lua", &Version { lr: "0.02", ..FIRST }.text().replace("local calls", "-- why not\nlocal calls"));
    let line = next();
    assert!(line.contains(" 0 plans compiled"), "{line}");
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

/// `run.json` has the sizes of the version that ran last.
#[test]
fn an_edit_updates_the_count_of_parameters() {
    let p = place();
    p.file("parts.lua", PARTS);
    p.file("edited.lua", FIRST.text());
    let mut run = Running::start(&p, &ARGS);
    run.next("step");
    let parameters = || {
        let text = std::fs::read_to_string(p.path("r/run.json")).unwrap();
        serde_json::from_str::<Value>(&text).unwrap()["parameters"].as_u64()
    };
    let of = |width: u32| Some(u64::from(6 * width + 1));
    assert_eq!(parameters(), of(FIRST.width));
    save(&p, "edited.lua", &Version { width: FIRST.width + 3, ..FIRST }.text());
    assert_eq!(run.next("reload")["ok"], true);
    run.next("step");
    run.signal("-INT");
    assert_eq!(run.child.wait().unwrap().code(), Some(130));
    assert_eq!(parameters(), of(FIRST.width + 3));
}

/// Saves within 200 ms count once: only the last of a burst is loaded.
#[test]
fn a_burst_of_saves_is_one_reload() {
    let p = place();
    p.file("parts.lua", PARTS);
    p.file("edited.lua", FIRST.text());
    let mut run = Running::start(&p, &ARGS);
    run.next("step");
    let mut bursts = 0;
    for k in 1..=20 {
        let begun = std::time::Instant::now();
        for part in 1..=3 {
            save(&p, "edited.lua", &FIRST.text().replace("lr = 0.01", &format!("lr = 0.1{k:02}{part}")));
        }
        // On a busy machine two saves may be too far apart for a burst.
        let quick = begun.elapsed().as_millis() < 150;
        let mut reloads = 1;
        while !run.next("reload")["changed"].to_string().contains(&format!("-> 0.1{k:02}3")) {
            reloads += 1;
        }
        if quick {
            assert_eq!(reloads, 1, "burst {k}");
            bursts += 1;
        }
        if bursts == 3 {
            break;
        }
    }
    assert!(bursts > 0, "the machine is too busy");
    run.signal("-INT");
    assert_eq!(run.child.wait().unwrap().code(), Some(130));
}

/// The fault may be in a file that only the new version requires: saving that file triggers another attempt, as does saving the
/// same text again. Other files of the directory, such as a log, cause no delay.
#[test]
fn files_required_by_a_rejected_version_are_watched() {
    let p = place();
    p.file("parts.lua", PARTS);
    p.file("edited.lua", FIRST.text());
    let mut run = Running::start(&p, &ARGS);
    run.next("step");
    let over = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let (log, done) = (p.path("log.txt"), over.clone());
    let writer = std::thread::spawn(move || {
        while !done.load(std::sync::atomic::Ordering::SeqCst) {
            std::fs::write(&log, "a line\n").unwrap();
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    });
    let mut outcome = |says: &str| {
        let event = run.next("reload");
        assert!(event.to_string().contains(says), "{says}: {event}");
        run.until(event["step"].as_u64().unwrap() + 5);
    };
    let text = FIRST.text().replace("local parts =", "local more = require \"below.more\"\nlocal parts =");
    save(&p, "edited.lua", &text);
    outcome("there is no module \\\"below.more\\\"");
    std::fs::create_dir(p.path("below")).unwrap();
    p.file("below/more.lua", "return {");
    outcome("below/more.lua:1: ");
    p.file("below/more.lua", "return { ");
    outcome("below/more.lua:1: ");
    p.file("below/more.lua", "return {}");
    outcome("\"ok\":true");
    // A directory that is removed and made again, as by `git checkout`.
    std::fs::remove_dir_all(p.path("below")).unwrap();
    outcome("there is no module");
    std::fs::create_dir(p.path("below")).unwrap();
    p.file("below/more.lua", "return { 1 }");
    outcome("\"ok\":true");
    p.file("below/more.lua", "return { 2 }");
    outcome("\"ok\":true");
    // The fault may have been elsewhere, so the same text is tried when it is saved again.
    let reads = text.replace("local calls", "assert(pl.data.csv('rows.csv'))\nlocal calls");
    save(&p, "edited.lua", &reads);
    outcome("rows.csv");
    p.file("rows.csv", "1,2\n3,4\n");
    save(&p, "edited.lua", &reads);
    outcome("\"ok\":true");
    // Also through a link.
    p.file("elsewhere.lua", &reads);
    std::os::unix::fs::symlink(p.path("elsewhere.lua"), p.path("link~")).unwrap();
    std::fs::rename(p.path("link~"), p.path("edited.lua")).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(600));
    p.file("elsewhere.lua", reads.replace("lr = 0.01", "lr = 0.02"));
    outcome("lr 0.01 -> 0.02");
    over.store(true, std::sync::atomic::Ordering::SeqCst);
    writer.join().unwrap();
    run.signal("-INT");
    assert_eq!(run.child.wait().unwrap().code(), Some(130));
}

/// A newer save or a signal cancels a version whose build does not end.
#[test]
fn an_endless_version_does_not_hold_the_run_up() {
    let p = place();
    p.file("parts.lua", PARTS);
    p.file("edited.lua", FIRST.text());
    let mut run = Running::start(&p, &ARGS);
    run.next("step");
    let endless =
        FIRST.text().replace("local calls", "while true do pcall(function() while true do end end) end\nlocal calls");
    save(&p, "edited.lua", &endless);
    run.hangs();
    save(&p, "edited.lua", &FIRST.text().replace("lr = 0.01", "lr = 0.02"));
    let event = run.next("reload");
    assert!(event["error"].as_str().unwrap().contains("when a newer one was saved"), "{event}");
    let event = run.next("reload");
    assert!(event["ok"] == true && event["changed"].to_string().contains("lr 0.01 -> 0.02"), "{event}");
    run.until(event["step"].as_u64().unwrap() + 5);
    // Nor does a search that backtracks forever, a chunk that poses as the library's, or a message handler.
    for code in [
        "while true do pcall(string.find, (\"a\"):rep(5000), (\".-\"):rep(20) .. \"b\") end",
        "load(\"while true do pcall(function() while true do end end) end\", \"@perilune/tree.lua\")()",
        "load(\"while true do pcall(function() while true do end end) end\", \"no place\")()",
        "while true do xpcall(error, function() while true do end end) end",
        "table.move({}, 1, 1 << 62, 2)",
    ] {
        save(&p, "edited.lua", &FIRST.text().replace("local calls", &format!("{code}\nlocal calls")));
        run.hangs();
        save(&p, "edited.lua", &FIRST.text().replace("lr = 0.01", "lr = 0.02"));
        let event = run.next("reload");
        assert!(event["error"].as_str().unwrap().contains("when a newer one was saved"), "{code}: {event}");
        let step = event["step"].as_u64().unwrap();
        run.until(step + 5);
    }
    save(&p, "edited.lua", &endless);
    run.hangs();
    run.signal("-INT");
    let saved = run.next("checkpoint");
    assert_eq!(run.next("done")["steps"], saved["step"]);
    assert_eq!(run.child.wait().unwrap().code(), Some(130));
}

/// A newer save or a signal cancels a version whose second step or evaluation does not end.
#[test]
fn an_endless_step_or_evaluation_does_not_hold_the_run_up() {
    const ENDLESS: &str = "while true do pcall(function() while true do end end) end";
    let p = place();
    p.file("parts.lua", PARTS);
    let first =
        FIRST.text().replace("train = set:split(\"train\", 0.75, p.seed)", "valid = set:batch(80), train = set");
    let first = first.replace("local calls", "recipe.eval_every, recipe.ema = 50, 0.9\nlocal calls");
    let quick = first.replace("lr = 0.01", "lr = 0.02");
    p.file("edited.lua", first.as_str());
    let mut run = Running::start(&p, &ARGS);
    run.next("eval");

    let mut ends = |text: String, then: &dyn Fn(&Running)| {
        save(&p, "edited.lua", &text);
        let applied = run.next("reload");
        assert_eq!(applied["ok"], true, "{applied}");
        run.hangs();
        then(&run);
        let refused = run.next("reload");
        let error = refused["error"].as_str().unwrap_or_default();
        assert!(error.contains("was still in a step or an evaluation") && error.contains("edited.lua:"), "{refused}");
    };
    let late = format!("if calls == 4 then {ENDLESS} end\n  local error");
    ends(first.replace("local error", &late), &|_| save(&p, "edited.lua", &quick));
    let evaluate =
        format!("function recipe.evaluate(...)\n  if calls > 5 then {ENDLESS} end\n  return recipe.loss(...)\nend");
    ends(quick.replace("return recipe", &format!("{evaluate}\nreturn recipe")), &|run| run.signal("-INT"));
    let saved = run.next("checkpoint");
    assert_eq!(run.next("done")["steps"], saved["step"]);
    assert_eq!(run.child.wait().unwrap().code(), Some(130));
    // The model has its own weights again instead of the averages used by the evaluation.
    let again = p.run(&["replay", "r"]);
    assert_eq!(again.status, Some(0), "{}{}", again.out, again.err);
}

/// A newer save or a signal cancels a step that does not end long after the trial of its edit, or in the first version. What
/// follows continues from the last finished step: a replay of the history computes the same bits.
#[test]
fn an_endless_step_after_the_trial_gives_way() {
    let endless = "while true do pcall(function() while true do end end) end";
    let slow = "while true do pl.randn({ 64, 64 }):sum():item() end";
    let spun = "coroutine.wrap(function() while true do end end)()";
    for (edited, code, stops) in [(true, endless, false), (true, slow, true), (false, spun, false), (false, slow, true)]
    {
        let p = place();
        p.file("parts.lua", PARTS);
        let late = format!("if calls == 60 then {code} end\n  local error");
        let late = FIRST.text().replace("lr = 0.01", "lr = 0.02").replace("local error", &late);
        p.file("edited.lua", if edited { FIRST.text() } else { late.clone() });
        let mut run = Running::start(&p, &ARGS);
        run.next("step");
        let mut since = 0;
        if edited {
            save(&p, "edited.lua", &late);
            let applied = run.next("reload");
            assert_eq!(applied["ok"], true, "{applied}");
            since = applied["step"].as_u64().unwrap();
        }
        run.hangs();
        if stops {
            run.signal("-INT");
        } else {
            save(&p, "edited.lua", &FIRST.text().replace("lr = 0.01", "lr = 0.03"));
        }
        let (event, key) = if edited { ("reload", "error") } else { ("warning", "message") };
        let said = run.next(event);
        let text = said[key].as_str().unwrap_or_default();
        assert!(
            text.contains("was still in a step or an evaluation") && text.contains("edited.lua:"),
            "{code}: {said}"
        );
        if !stops {
            let applied = run.next("reload");
            assert!(applied["ok"] == true && applied["step"].as_u64().unwrap() > since + 50, "{code}: {applied}");
            run.until(applied["step"].as_u64().unwrap() + 50);
            run.signal("-INT");
        }
        let saved = run.next("checkpoint");
        assert_eq!(run.next("done")["steps"], saved["step"], "{code}");
        assert_eq!(run.child.wait().unwrap().code(), Some(130), "{code}");
        let again = p.run(&["replay", "r"]);
        assert_eq!(again.status, Some(0), "{code}: {}{}", again.out, again.err);
    }
}

/// The first version has no predecessor: its evaluation is cancelled once, and the newer version continues.
#[test]
fn an_endless_evaluation_of_the_first_version_gives_way() {
    let p = place();
    p.file("parts.lua", PARTS);
    let text = FIRST.text().replace("train = set:split(\"train\", 0.75, p.seed)", "valid = set:batch(80), train = set");
    let text = text.replace("local calls", "recipe.eval_every = 50\nlocal evaluations = 0\nlocal calls");
    let evaluate = "function recipe.evaluate(...)\n  evaluations = evaluations + 1\n  if evaluations > 2 then while true do end end\n  \
                    return recipe.loss(...)\nend\nreturn recipe";
    p.file("edited.lua", text.replace("return recipe", evaluate));
    let mut run = Running::start(&p, &ARGS);
    let last = [run.next("eval"), run.next("eval")][1]["step"].as_u64().unwrap();
    run.hangs();
    save(&p, "edited.lua", &text);
    let warned = run.next("warning");
    let message = warned["message"].as_str().unwrap();
    assert!(message.contains("edited.lua:") && message.contains("was still in a step or an evaluation"), "{warned}");
    let applied = run.next("reload");
    assert!(applied["ok"] == true && applied["step"].as_u64() == Some(last + 50), "{applied}");
    run.until(last + 200);
    run.signal("-INT");
    assert_eq!(run.child.wait().unwrap().code(), Some(130));
}

/// A version starts with the original library tables; after a rollback a version finds what it wrote to them.
#[test]
fn a_version_finds_no_trace_of_the_one_before() {
    let p = place();
    p.file("parts.lua", PARTS);
    let writes = "math.half = 0.5\nfunction nn.twice(x) return x + x end\nprint = nil\n";
    let uses = |text: String| text.replace("  LOSS", "").replace("parts.square(error)", "nn.twice(error * math.half)");
    let first = uses(FIRST.text());
    p.file("edited.lua", first.replace("local recipe", &format!("{writes}local recipe")));
    let mut run = Running::start(&p, &ARGS);
    run.next("step");
    // It raises in its second step, and the version that continues uses what it wrote itself.
    let late = Version { loss: "if calls == 3 then error('late') end", ..FIRST };
    save(&p, "edited.lua", &late.text());
    assert_eq!(run.next("reload")["ok"], true);
    let event = run.next("reload");
    assert!(event["error"].as_str().unwrap().contains("late"), "{event}");
    run.until(event["step"].as_u64().unwrap() + 5);
    for (line, says) in [("nn.twice(x)", "has no 'twice'"), ("math.half", "half"), ("print('here')", "")] {
        let text =
            FIRST.text().replace("local calls", &format!("local x = pl.zeros {{}} local _ = {line} + 0\nlocal calls"));
        let text = if says.is_empty() { text.replace("local _ = print('here') + 0", "print('here')") } else { text };
        save(&p, "edited.lua", &text);
        let event = run.next("reload");
        assert_eq!(event["ok"], says.is_empty(), "{line}: {event}");
        assert!(event["error"].as_str().unwrap_or_default().contains(says), "{line}: {event}");
    }
    run.signal("-INT");
    assert_eq!(run.child.wait().unwrap().code(), Some(130));
}

/// A log file that grows in the recipe's folder does not delay an edit.
#[test]
fn other_files_beside_the_recipe_may_change_all_the_time() {
    let p = place();
    p.file("parts.lua", PARTS);
    p.file("edited.lua", FIRST.text());
    let mut run = Running::start(&p, &ARGS);
    run.next("step");
    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for n in 0..600 {
                if over.load(std::sync::atomic::Ordering::Relaxed) {
                    return true;
                }
                p.file("log.txt", "line\n".repeat(n));
                std::thread::sleep(std::time::Duration::from_millis(50));
            }
            false
        });
        save(&p, "edited.lua", &Version { lr: "0.02", ..FIRST }.text());
        run.next("reload");
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(writer.join().unwrap(), "the edit waited until nothing else was written");
    });
    run.signal("-INT");
    assert_eq!(run.child.wait().unwrap().code(), Some(130));
}

/// The displayed share of time for making batches is that of the running version.
#[test]
fn data_is_timed_after_an_edit() {
    let p = place();
    p.file("parts.lua", PARTS);
    p.file("edited.lua", FIRST.text());
    let mut run = Running::start(&p, &ARGS);
    run.next("step");
    let slow = ":map(function(b) local n = 0 for i = 1, 500000 do n = n + i end return b end):batch(8)";
    save(&p, "edited.lua", &FIRST.text().replace(":batch(8)", slow));
    let event = run.next("reload");
    assert_eq!(event["ok"], true, "{event}");
    run.until(event["step"].as_u64().unwrap() + 150);
    run.signal("-INT");
    run.child.wait().unwrap();
    let again = p.run(&["replay", "r"]);
    let last =
        again.out.lines().rfind(|l| l.contains(" · data ")).unwrap_or_else(|| panic!("{}{}", again.out, again.err));
    let share = last.split(" · data ").nth(1).and_then(|l| l.split(' ').next()).unwrap();
    assert!(share.parse::<f64>().unwrap() > 25.0, "{}", again.out);
}
