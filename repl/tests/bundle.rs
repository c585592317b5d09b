//! Tests of bundles on the command line: pack, sign, verify, inspect, run, diff, extract.
#![allow(clippy::unwrap_used)]

mod support;

use serde_json::Value;
use std::path::{Path, PathBuf};
use support::{Place, Ran, place};

/// Runs a command. Bundles run where a system lacks walls too, and on the device that `PERILUNE_DEVICE` names.
fn go(p: &Place, args: &[&str]) -> Ran {
    let mut command = p.command(args);
    if args[0] == "run" && args[1].ends_with(".plb") {
        command.arg("--accept-missing-walls");
    }
    if let Ok(device) = std::env::var("PERILUNE_DEVICE")
        && args[0] == "run"
    {
        command.args(["--device", &device]);
    }
    command.output().unwrap().into()
}

/// A recipe that learns from a table, with a module and a folder of its own.
const RECIPE: &str = r#"
local pl = require "perilune"
local parts = require "parts"
local recipe = pl.recipe { name = "table", params = { lr = 0.1, steps = 12, seed = 3 } }
function recipe.data(p)
  local rows = pl.data.csv("data/points.csv")
  local set = rows:tensors { x = { columns = { 0, 2 } }, y = { column = 2 } }
  return { train = set:split("train", 0.75, p.seed):shuffle(p.seed):batch(8), valid = set:split("valid", 0.25, p.seed):batch(8) }
end
function recipe.model(p) return parts.model() end
function recipe.optimizer(p, model) return pl.optim.AdamW(model, { lr = p.lr }) end
function recipe.loss(model, batch)
  local error = model(batch.x):squeeze(-1) - batch.y
  return (error * error):mean(), { off = error:abs():mean() }
end
return recipe
"#;

const PARTS: &str = r#"
local nn = require("perilune").nn
return { model = function() return nn.Sequential { nn.Linear(2, 8), nn.GELU(), nn.Linear(8, 1) } end }
"#;

fn points() -> String {
    (0..64).map(|i| format!("{},{},{}\n", i % 7, (i * 5) % 11, (i % 7) * 2 - (i * 5) % 11)).collect()
}

/// The folder of an author: the recipe, its module, its data.
fn author() -> Place {
    let p = place();
    p.file("table.lua", RECIPE);
    p.file("parts.lua", PARTS);
    std::fs::create_dir(p.path("data")).unwrap();
    p.file("data/points.csv", points());
    p
}

fn succeeds(ran: Ran) -> Ran {
    assert_eq!(ran.status, Some(0), "{}{}", ran.out, ran.err);
    ran
}

/// An author's run and its bundle.
fn packed(p: &Place, more: &[&str]) -> PathBuf {
    succeeds(go(p, &["run", "table.lua", "--checkpoint-every", "4", "--run-dir", "one", "-q"]));
    succeeds(go(p, &[&["bundle", "pack", "one", "-o", "table.plb"], more].concat()));
    p.path("table.plb")
}

fn weights(p: &Place, dir: &str) -> String {
    p.run_json(dir)["weights"].as_str().unwrap().to_string()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_stranger_gets_the_same_bits() {
    let p = author();
    let bundle = packed(&p, &["--include-data"]);
    // Another folder, without the recipe and its data; and the author's folder is gone.
    let stranger = place();
    std::fs::copy(&bundle, stranger.path("t.plb")).unwrap();
    let was = weights(&p, "one");
    drop(p);
    let ran = succeeds(go(&stranger, &["run", "t.plb", "--run-dir", "again"]));
    assert!(ran.err.contains("verified · not signed"), "{}", ran.err);
    assert!(ran.out.contains("the weights are those of the bundle"), "{}", ran.out);
    assert_eq!(weights(&stranger, "again"), was);
    // The short form.
    let ran = succeeds(go(&stranger, &["t.plb", "--run-dir", "short", "--accept-missing-walls"]));
    assert!(ran.out.contains("the weights are those of the bundle"), "{}", ran.out);
}

#[test]
fn data_are_found_by_their_hash_and_refused_on_a_mismatch() {
    let p = author();
    let bundle = packed(&p, &[]);
    let stranger = place();
    std::fs::copy(&bundle, stranger.path("t.plb")).unwrap();
    let ran = go(&stranger, &["run", "t.plb", "--run-dir", "a"]);
    assert_eq!(ran.status, Some(2), "{}", ran.err);
    assert!(ran.err.contains("data/points.csv") && ran.err.contains("--data DIR"), "{}", ran.err);
    assert!(!stranger.path("a").exists());
    // Under another name, in a folder below.
    std::fs::create_dir_all(stranger.path("mine/deep")).unwrap();
    stranger.file("mine/other.csv", points().replace('1', "2"));
    let ran = go(&stranger, &["run", "t.plb", "--data", "mine", "--run-dir", "a"]);
    assert_eq!(ran.status, Some(2), "another content is not taken: {}", ran.err);
    stranger.file("mine/deep/renamed.csv", points());
    let ran = succeeds(go(&stranger, &["run", "t.plb", "--data", "mine", "--run-dir", "a"]));
    assert!(ran.out.contains("the weights are those of the bundle"), "{}", ran.out);
    assert_eq!(weights(&stranger, "a"), weights(&p, "one"));
    // At the place where the author had it.
    std::fs::create_dir(stranger.path("data")).unwrap();
    stranger.file("data/points.csv", points());
    succeeds(go(&stranger, &["run", "t.plb", "--run-dir", "b"]));
}

#[test]
fn changed_data_are_not_packed() {
    let p = author();
    succeeds(go(&p, &["run", "table.lua", "--run-dir", "one", "-q"]));
    p.file("data/points.csv", points().replace('1', "2"));
    let ran = go(&p, &["bundle", "pack", "one"]);
    assert_eq!(ran.status, Some(4), "{}", ran.err);
    assert!(ran.err.contains("data/points.csv: is not what the run read"), "{}", ran.err);
    std::fs::remove_file(p.path("data/points.csv")).unwrap();
    assert!(go(&p, &["bundle", "pack", "one"]).err.contains("is not there"));
    assert!(!p.path("table.plb").exists());
}

#[test]
fn a_run_with_edits_and_resumes_is_repeated() {
    let p = author();
    let args = ["run", "table.lua", "--checkpoint-every", "4", "--run-dir", "one", "-q"];
    succeeds(go(&p, &[&args[..], &["--until", "4"]].concat()));
    p.file("table.lua", RECIPE.replace("lr = 0.1", "lr = 0.05"));
    succeeds(go(&p, &[&args[..], &["--resume", "--edited"]].concat()));
    let ran = succeeds(go(&p, &["bundle", "pack", "one", "--include-data", "--checkpoints"]));
    assert!(ran.out.contains("1 resume") && ran.out.contains("3 checkpoints"), "{}", ran.out);
    let stranger = place();
    std::fs::copy(p.path("table.plb"), stranger.path("t.plb")).unwrap();
    let ran = succeeds(go(&stranger, &["run", "t.plb", "--run-dir", "again"]));
    assert!(ran.out.contains("the weights are those of the bundle"), "{}", ran.out);
    assert_eq!(weights(&stranger, "again"), weights(&p, "one"));
}

#[test]
fn a_recipe_is_packed_without_a_run() {
    let p = author();
    let ran =
        succeeds(go(&p, &["bundle", "pack", "table.lua", "--set", "steps=5", "--include-data", "--license", "MIT"]));
    assert!(ran.out.contains("1 file that it requires"), "{}", ran.out);
    let stranger = place();
    std::fs::copy(p.path("table.plb"), stranger.path("t.plb")).unwrap();
    succeeds(go(&stranger, &["run", "t.plb", "--run-dir", "five"]));
    assert_eq!(stranger.run_json("five")["steps_done"], 5);
    // Params of the person win.
    succeeds(go(&stranger, &["run", "t.plb", "--set", "steps=7", "--set", "lr=0.2", "--run-dir", "seven"]));
    let record = stranger.run_json("seven");
    assert_eq!((&record["steps_done"], &record["params"]["lr"]), (&Value::from(7), &Value::from(0.2)));
}

#[test]
fn other_instruction_sets_stay_within_the_envelope() {
    let p = author();
    let bundle = packed(&p, &["--include-data"]);
    let listed = succeeds(go(&p, &["bundle", "inspect", text(&bundle)]));
    assert!(listed.out.contains("envelope.json"), "{}", listed.out);
    let again = |isa: &str, dir: &str| {
        let mut command = p.command(&["run", "table.plb", "--accept-missing-walls", "--run-dir", dir]);
        Ran::from(command.env("PERILUNE_CPU_ISA", isa).output().unwrap())
    };
    let ran = succeeds(again("sse2", "sse2"));
    let same = ran.out.contains("the weights are those of the bundle");
    assert!(same || ran.out.contains("within the envelope of the bundle"), "{}", ran.out);
    // Without an envelope bits decide.
    succeeds(go(&p, &["bundle", "pack", "one", "--no-envelope", "--include-data"]));
    let ran = again("sse2", "bits");
    assert!(same == (ran.status == Some(0)), "{}{}", ran.out, ran.err);
}

#[test]
fn forged_results_are_found() {
    let p = author();
    let bundle = packed(&p, &["--include-data"]);
    // The author claims other weights; the bundle is whole.
    succeeds(go(&p, &["bundle", "extract", text(&bundle), "out"]));
    let was = weights(&p, "one");
    let mut manifest: perilune_bundle::Manifest = serde_json::from_str(&p.read("out/manifest.json")).unwrap();
    let first = if was.starts_with('0') { "1" } else { "0" };
    manifest.run.as_mut().unwrap().weights = format!("{first}{}", &was[1..]);
    let content = |name: &str| perilune_bundle::Content::File(p.path("out").join(name));
    let items: Vec<_> = manifest
        .files
        .iter()
        .map(|f| perilune_bundle::Item { name: f.path.clone(), content: content(&f.path) })
        .collect();
    perilune_bundle::pack(&p.path("forged.plb"), &mut manifest, &items).unwrap();
    let ran = go(&p, &["run", "forged.plb", "--run-dir", "forged"]);
    assert_eq!(ran.status, Some(4), "{}{}", ran.out, ran.err);
    assert!(ran.err.contains("the weights differ") && ran.err.contains("which give the same bits"), "{}", ran.err);
    // And another learning rate than the one that made the metrics.
    let record = p.read("out/run/run.json");
    assert!(record.contains("table.lua"));
    let lua = p.read("out/run/recipe/table.lua");
    p.file("out/run/recipe/table.lua", lua.replace("lr = 0.1", "lr = 0.2"));
    perilune_bundle::pack(&p.path("rate.plb"), &mut manifest, &items).unwrap();
    let ran = go(&p, &["run", "rate.plb", "--run-dir", "rate"]);
    assert_eq!(ran.status, Some(4), "{}{}", ran.out, ran.err);
    assert!(ran.err.contains("is not the file that ran"), "{}", ran.err);
}

#[test]
fn a_changed_run_is_not_compared() {
    let p = author();
    packed(&p, &["--include-data"]);
    let ran = succeeds(go(&p, &["run", "table.plb", "--set", "lr=0.01", "--steps", "3", "--run-dir", "two"]));
    assert!(!ran.out.contains("of the bundle"), "{}", ran.out);
    let record = p.run_json("two");
    assert_eq!((&record["steps_done"], &record["params"]["lr"]), (&Value::from(3), &Value::from(0.01)));
    for flag in ["--watch", "--resume", "--until=3"] {
        let ran = go(&p, &["run", "table.plb", flag]);
        assert_eq!(ran.status, Some(2), "{flag}: {}", ran.err);
    }
    let ran = go(&p, &["run", "table.lua", "--data", "."]);
    assert!(ran.status == Some(2) && ran.err.contains("--data: is an option of bundles"), "{}", ran.err);
}

#[test]
fn signatures_name_the_key_and_are_checked() {
    let p = author();
    succeeds(go(&p, &["bundle", "key", "me.key", "--no-password"]));
    succeeds(go(&p, &["bundle", "key", "other.key", "--no-password"]));
    let public = p.read("me.pub").lines().nth(1).unwrap().to_string();
    packed(&p, &["--include-data", "--sign", "me.key"]);
    let ran = succeeds(go(&p, &["bundle", "verify", "table.plb"]));
    assert!(ran.out.contains(&public) && ran.out.contains("not among your trusted keys"), "{}", ran.out);
    succeeds(go(&p, &["bundle", "verify", "table.plb", "--key", &public]));
    succeeds(go(&p, &["bundle", "verify", "table.plb", "--key", "me.pub"]));
    for (command, key) in [("verify", "other.pub"), ("run", "other.pub")] {
        let args: Vec<&str> = if command == "run" { vec!["run"] } else { vec!["bundle", "verify"] };
        let ran = go(&p, &[&args[..], &["table.plb", "--key", key]].concat());
        assert_eq!(ran.status, Some(4), "{}", ran.err);
        assert!(ran.err.contains("is by another key"), "{}", ran.err);
    }
    // A trusted key has a name.
    std::fs::create_dir_all(p.path("config/perilune/keys")).unwrap();
    std::fs::copy(p.path("me.pub"), p.path("config/perilune/keys/ada.pub")).unwrap();
    let out = p.command(&["bundle", "verify", "table.plb"]).env("XDG_CONFIG_HOME", p.path("config")).output().unwrap();
    assert!(Ran::from(out).out.contains("signed by ada"));
    // The signature of another bundle, and a damaged one.
    let signature = p.read("table.plb.minisig");
    succeeds(go(&p, &["bundle", "pack", "one", "-o", "two.plb"]));
    p.file("two.plb.minisig", &signature);
    let ran = go(&p, &["bundle", "verify", "two.plb"]);
    assert!(ran.status == Some(4) && ran.err.contains("is not the signature of two.plb"), "{}", ran.err);
    let mut lines: Vec<String> = signature.lines().map(String::from).collect();
    lines[2] += " forged";
    p.file("table.plb.minisig", lines.join("\n") + "\n");
    let ran = go(&p, &["bundle", "verify", "table.plb"]);
    assert!(ran.status == Some(4) && ran.err.contains("is not the signature"), "{}", ran.err);
    for bad in ["", "x", "untrusted comment: x\n\n\n\n", &signature[..100]] {
        p.file("table.plb.minisig", bad);
        let ran = go(&p, &["run", "table.plb"]);
        assert_eq!(ran.status, Some(4), "{bad:?}: {}", ran.err);
    }
    std::fs::remove_file(p.path("table.plb.minisig")).unwrap();
    assert_eq!(go(&p, &["bundle", "verify", "table.plb", "--key", "me.pub"]).status, Some(4));
}

#[test]
fn minisign_checks_a_signature() {
    let p = author();
    succeeds(go(&p, &["bundle", "key", "me.key", "--no-password"]));
    packed(&p, &["--sign", "me.key"]);
    let Ok(out) = std::process::Command::new("minisign")
        .args(["-Vm", "table.plb", "-p", "me.pub"])
        .current_dir(p.dir.path())
        .output()
    else {
        assert!(std::env::var_os("PERILUNE_TEST_MINISIGN").is_none(), "minisign is not in the path");
        println!("skipped: minisign is not installed");
        return;
    };
    let ran = Ran::from(out);
    assert!(
        ran.status == Some(0) && ran.out.contains("Signature and comment signature verified"),
        "{}{}",
        ran.out,
        ran.err
    );
    // And the other way round: a key and a signature of minisign.
    let made = std::process::Command::new("minisign")
        .args(["-GW", "-p", "theirs.pub", "-s", "theirs.key"])
        .current_dir(p.dir.path())
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", Ran::from(made).err);
    succeeds(go(&p, &["bundle", "pack", "one", "-o", "table.plb", "--sign", "theirs.key"]));
    succeeds(go(&p, &["bundle", "verify", "table.plb", "--key", "theirs.pub"]));
    let made = std::process::Command::new("minisign")
        .args(["-Sm", "table.plb", "-s", "theirs.key"])
        .current_dir(p.dir.path())
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", Ran::from(made).err);
    succeeds(go(&p, &["bundle", "verify", "table.plb", "--key", "theirs.pub"]));
    let ran = go(&p, &["bundle", "verify", "table.plb"]);
    assert!(ran.status == Some(4) && ran.err.contains("is by a key that it does not contain"), "{}", ran.err);
}

#[test]
fn a_damaged_bundle_is_refused_by_every_command() {
    let p = author();
    let bundle = packed(&p, &["--include-data"]);
    let mut bytes = std::fs::read(&bundle).unwrap();
    bytes[1000] ^= 0x10;
    std::fs::write(&bundle, &bytes).unwrap();
    for args in [
        &["bundle", "verify", "table.plb"][..],
        &["bundle", "inspect", "table.plb"],
        &["bundle", "diff", "table.plb", "table.plb"],
        &["bundle", "extract", "table.plb", "out"],
        &["run", "table.plb"],
    ] {
        let ran = go(&p, args);
        assert_eq!(ran.status, Some(4), "{args:?}: {}", ran.err);
        assert!(ran.err.contains("byte 1000 is"), "{args:?}: {}", ran.err);
    }
    assert!(!p.path("out").exists() && !p.path("runs").exists());
    let ran = go(&p, &["bundle", "verify", "table.lua"]);
    assert!(ran.status == Some(4) && ran.err.contains("it is no bundle"), "{}", ran.err);
    assert_eq!(go(&p, &["bundle", "verify", "gone.plb"]).status, Some(2));
}

#[test]
fn a_bundle_is_listed_without_running_it() {
    let p = author();
    p.file("readme.txt", "# Points\n");
    // Were it run, the recipe would print.
    p.file("table.lua", format!("print('ran')\n{RECIPE}"));
    packed(&p, &["--license", "Apache-2.0", "--readme", "readme.txt", "--weights"]);
    let ran = succeeds(go(&p, &["bundle", "inspect", "table.plb"]));
    for part in [
        "not signed",
        "Apache-2.0",
        "reading data/points.csv (by hash)",
        "nothing else",
        "run/parts.lua",
        "12 steps",
        "README.md",
    ] {
        let part = part.replace("run/parts.lua", "run/recipe/parts.lua");
        assert!(ran.out.contains(&part), "{part}: {}", ran.out);
    }
    assert!(!ran.out.contains("ran\n"), "{}", ran.out);
    let json: Value =
        serde_json::from_str(&succeeds(go(&p, &["bundle", "inspect", "table.plb", "--json"])).out).unwrap();
    assert_eq!(json["run"]["weights"].as_str().unwrap(), weights(&p, "one"));
    assert_eq!(json["run"]["checkpoints"], serde_json::json!([12]));
    // Nothing names the machine.
    let all = p.path("out");
    succeeds(go(&p, &["bundle", "extract", "table.plb", "out"]));
    let record: Value = serde_json::from_str(&std::fs::read_to_string(all.join("run/run.json")).unwrap()).unwrap();
    for field in ["host", "pid", "directory"] {
        assert!(record.get(field).is_none(), "{field}");
    }
    // What was unpacked is a run directory.
    let ran = succeeds(go(&p, &["eval", text(&all.join("run"))]));
    assert!(ran.out.contains("valid loss"), "{}", ran.out);
    assert_eq!(go(&p, &["bundle", "extract", "table.plb", "out"]).status, Some(2));
}

#[test]
fn two_bundles_are_compared() {
    let p = author();
    packed(&p, &[]);
    succeeds(go(&p, &["run", "table.lua", "--set", "lr=0.2", "--run-dir", "two", "-q"]));
    succeeds(go(&p, &["bundle", "pack", "two", "-o", "two.plb"]));
    let ran = succeeds(go(&p, &["bundle", "diff", "table.plb", "two.plb"]));
    for part in ["lr", "0.1", "0.2", "the first step that differs: step 2"] {
        assert!(ran.out.contains(part), "{part}: {}", ran.out);
    }
    let ran = succeeds(go(&p, &["bundle", "diff", "table.plb", "table.plb"]));
    assert!(ran.out.contains("the same metrics at every step, and the same weights"), "{}", ran.out);
    succeeds(go(&p, &["bundle", "pack", "table.lua", "-o", "r.plb"]));
    p.file("parts.lua", PARTS.replace('8', "9"));
    succeeds(go(&p, &["bundle", "pack", "table.lua", "-o", "s.plb"]));
    let ran = succeeds(go(&p, &["bundle", "diff", "r.plb", "s.plb"]));
    assert!(ran.out.contains("parts.lua") && ran.out.contains("+return"), "{}", ran.out);
}

#[test]
fn the_recipe_of_a_bundle_reads_its_own_data_only() {
    let p = author();
    let tries = r#"function recipe.data(p)
  for _, path in ipairs { "/etc/hostname", "mine.csv", "../mine.csv", "data/../mine.csv", "table.lua" } do
    print(path, (pcall(pl.data.csv, path)))
  end
"#;
    p.file("table.lua", RECIPE.replace("function recipe.data(p)\n", tries));
    packed(&p, &["--include-data"]);
    let stranger = place();
    std::fs::copy(p.path("table.plb"), stranger.path("t.plb")).unwrap();
    for name in ["mine.csv", "table.lua"] {
        stranger.file(name, points());
    }
    let ran = succeeds(go(&stranger, &["run", "t.plb", "--run-dir", "again"]));
    assert_eq!(ran.out.matches("false").count(), 5, "{}", ran.out);
    assert!(!ran.out.contains("true"), "{}", ran.out);
    // The person who runs it grants more.
    let ran = succeeds(go(&stranger, &["run", "t.plb", "--allow-read", ".", "--run-dir", "granted"]));
    assert!(ran.out.contains("/etc/hostname\tfalse"), "{}", ran.out);
}

#[test]
fn windows_of_a_bundle_are_repeated() {
    let p = author();
    packed(&p, &["--include-data", "--checkpoints"]);
    let stranger = place();
    std::fs::copy(p.path("table.plb"), stranger.path("t.plb")).unwrap();
    let replay =
        |more: &[&str]| succeeds(go(&stranger, &[&["replay", "t.plb", "--accept-missing-walls"], more].concat()));
    let ran = replay(&["--steps", "4..8"]);
    assert!(ran.out.contains("steps 4..8") && ran.out.contains("same bits"), "{}", ran.out);
    let ran = replay(&["--windows", "3", "--seed", "1"]);
    assert_eq!(ran.out.matches("same bits").count(), 3, "{}", ran.out);
    replay(&["--run-dir", "whole"]);
    assert_eq!(weights(&stranger, "whole"), weights(&p, "one"));
    assert!(!stranger.path("runs").exists());
    succeeds(go(&p, &["bundle", "pack", "table.lua", "-o", "recipe.plb"]));
    let ran = go(&p, &["replay", "recipe.plb", "--accept-missing-walls"]);
    assert!(ran.status == Some(2) && ran.err.contains("has no run to repeat"), "{}", ran.err);
}
