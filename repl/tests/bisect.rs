//! Tests `perilune bundle diff --bisect`: planted differences are found at their step, in their tensor, with their line.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use support::{Place, Ran, place};

/// A recipe that learns from a table: lines that tests replace have a comment.
const RECIPE: &str = r#"local pl = require "perilune"
local nn = pl.nn
local recipe = pl.recipe { name = "table", params = { lr = 0.1, steps = 12, seed = 3 } }
function recipe.data(p)
  local set = pl.data.csv("points.csv"):tensors { x = { columns = { 0, 2 } }, y = { column = 2 } }
  return { train = set:batch(8) }
end
function recipe.model() return nn.Sequential { nn.Linear(2, 8), nn.GELU(), nn.Linear(8, 1) } end
function recipe.optimizer(p, model)
  return pl.optim.AdamW(model, { lr = p.lr }) -- rate
end
function recipe.loss(model, batch)
  local guess = model(batch.x):squeeze(-1)
  local error = guess - batch.y -- error
  return (error * error):mean(), { off = error:abs():mean() }
end
return recipe
"#;

/// 1-based line of a text in the recipe.
fn line_of(text: &str) -> u64 {
    RECIPE.lines().position(|line| line.contains(text)).unwrap() as u64 + 1
}

fn points() -> Vec<String> {
    (0..64).map(|i| format!("{},{},{}\n", i % 7, (i * 5) % 11, (i % 7) * 2 - (i * 5) % 11)).collect()
}

fn go(p: &Place, args: &[&str]) -> Ran {
    let mut command = p.command(args);
    if let Ok(device) = std::env::var("PERILUNE_DEVICE")
        && args[0] == "run"
    {
        command.args(["--device", &device]);
    }
    command.output().unwrap().into()
}

fn succeeds(ran: Ran) -> Ran {
    assert_eq!(ran.status, Some(0), "{}{}", ran.out, ran.err);
    ran
}

/// Trains a recipe in `dir` of its own and packs the run into `dir.plb`.
fn packed(p: &Place, dir: &str, recipe: &str, points: &[String], run: &[&str]) {
    trained(p, dir, recipe, points, run);
    pack(p, dir);
}

fn trained(p: &Place, dir: &str, recipe: &str, points: &[String], run: &[&str]) {
    std::fs::create_dir(p.path(dir)).unwrap();
    p.file(&format!("{dir}/table.lua"), recipe);
    p.file(&format!("{dir}/points.csv"), points.concat());
    let (recipe, out) = (format!("{dir}/table.lua"), format!("{dir}/run"));
    succeeds(go(p, &[&["run", &recipe, "--checkpoint-every", "4", "--run-dir", &out, "-q"], run].concat()));
}

fn pack(p: &Place, dir: &str) {
    let (run, out) = (format!("{dir}/run"), format!("{dir}.plb"));
    succeeds(go(p, &["bundle", "pack", &run, "--include-data", "--checkpoints", "-o", &out]));
}

/// The event `bisected`, and what a person is shown.
fn bisect(p: &Place, a: &str, b: &str) -> (Value, String) {
    let command = ["bundle", "diff", a, b, "--bisect", "--accept-missing-walls"];
    let ran = succeeds(go(p, &[&command[..], &["--json"]].concat()));
    let event = ran.out.lines().last().unwrap();
    (serde_json::from_str(event).unwrap(), succeeds(go(p, &command)).out)
}

#[test]
fn an_edit_is_found_in_its_line() {
    let p = place();
    packed(&p, "a", RECIPE, &points(), &[]);
    // The same run until step 6, and then with another loss.
    trained(&p, "b", RECIPE, &points(), &["--until", "6"]);
    p.file("b/table.lua", RECIPE.replace("guess - batch.y", "guess * 1.5 - batch.y"));
    succeeds(go(&p, &["run", "b/table.lua", "--resume", "b/run", "--edited", "-q"]));
    pack(&p, "b");
    let (found, shown) = bisect(&p, "a.plb", "b.plb");
    assert_eq!((&found["step"], &found["what"], &found["from"]), (&7.into(), &"tensor".into(), &4.into()), "{found}");
    assert_eq!(found["records"], serde_json::json!([null, null]));
    let (a, b) = (&found["a"], &found["b"]);
    assert_eq!(b["line"], line_of("-- error"), "{found}");
    assert!(a["file"].as_str().unwrap().ends_with("table.lua"), "{found}");
    assert!(shown.contains("step 7 is the first that differs") && shown.contains("table.lua:14"), "{shown}");
}

#[test]
fn a_rate_is_found_as_a_number() {
    let p = place();
    packed(&p, "a", RECIPE, &points(), &[]);
    let schedule = "lr = function(step) return step < 9 and p.lr or p.lr * 0.5 end";
    packed(&p, "b", &RECIPE.replace("lr = p.lr", schedule), &points(), &[]);
    let (found, shown) = bisect(&p, "a.plb", "b.plb");
    assert_eq!((&found["what"], &found["from"]), (&"tensor".into(), &8.into()), "{found}");
    let step = found["step"].as_u64().unwrap();
    assert!([9, 10].contains(&step), "{found}");
    assert!(["scalar", "constant"].contains(&found["a"]["op"].as_str().unwrap()), "{found}");
    assert!(shown.contains("A: number") && shown.contains("· 0.99") && shown.contains("table.lua:10"), "{shown}");
}

#[test]
fn a_changed_row_is_found_as_an_input() {
    let p = place();
    packed(&p, "a", RECIPE, &points(), &[]);
    // Rows are read in order, eight a step: this one in step 3.
    let mut other = points();
    other[17] = "1,2,99\n".into();
    packed(&p, "b", RECIPE, &other, &[]);
    let (found, shown) = bisect(&p, "a.plb", "b.plb");
    assert_eq!((&found["step"], &found["what"], &found["from"]), (&3.into(), &"tensor".into(), &0.into()), "{found}");
    assert_eq!((&found["a"]["op"], &found["b"]["op"]), (&"leaf".into(), &"leaf".into()), "{found}");
    assert!(shown.contains("A: input f32"), "{shown}");
}

#[test]
fn initial_states_are_found_before_the_first_step() {
    let p = place();
    packed(&p, "a", RECIPE, &points(), &[]);
    packed(&p, "b", RECIPE, &points(), &["--seed", "4"]);
    let (found, shown) = bisect(&p, "a.plb", "b.plb");
    assert_eq!((&found["step"], &found["what"]), (&1.into(), &"state".into()), "{found}");
    assert!(found["a"]["state"].as_str().unwrap().starts_with("model.1."), "{found}");
    assert!(shown.contains("step 1 finds other States"), "{shown}");
}

#[test]
fn equal_runs_have_no_difference() {
    let p = place();
    packed(&p, "a", RECIPE, &points(), &[]);
    // Another recipe, of the same computation.
    packed(&p, "b", &RECIPE.replace("-- error", "-- the error of each row"), &points(), &[]);
    let (found, shown) = bisect(&p, "a.plb", "b.plb");
    assert_eq!((&found["step"], &found["to"]), (&Value::Null, &12.into()), "{found}");
    assert!(shown.contains("no step differs: both have the same bits"), "{shown}");
}

#[test]
fn a_record_that_is_not_repeated_is_told() {
    let p = place();
    packed(&p, "a", RECIPE, &points(), &[]);
    // One ulp in the initial weights stands for another device: the record says nothing of it.
    trained(&p, "b", RECIPE, &points(), &["--perturb", "5"]);
    pack(&p, "b");
    let (found, _) = bisect(&p, "a.plb", "b.plb");
    assert_eq!((&found["step"], &found["what"]), (&1.into(), &"state".into()), "{found}");
}

#[test]
fn options_of_bisect_need_it() {
    let p = place();
    packed(&p, "a", RECIPE, &points(), &[]);
    for option in [&["--data", "."][..], &["--time", "5s"]] {
        let ran = go(&p, &[&["bundle", "diff", "a.plb", "a.plb"], option].concat());
        assert_eq!(ran.status, Some(2), "{}", ran.err);
        assert!(ran.err.contains(option[0]), "{}", ran.err);
    }
    std::fs::create_dir(p.path("c")).unwrap();
    p.file("c/points.csv", points().concat());
    p.file("c/table.lua", RECIPE);
    succeeds(go(&p, &["bundle", "pack", "c/table.lua", "-o", "c.plb"]));
    let ran = go(&p, &["bundle", "diff", "a.plb", "c.plb", "--bisect"]);
    assert_eq!(ran.status, Some(2), "{}", ran.err);
    assert!(ran.err.contains("a bundle of a recipe has none"), "{}", ran.err);
}
