//! Tests `--mesh` and meshes of recipes through the program: training, checkpoints that move between meshes, reports, errors.
//!
//! `PERILUNE_MESH=dp=2,zero=1 cargo test -p perilune` runs the other tests of this crate on a mesh.
#![allow(clippy::unwrap_used)]

mod support;

use support::{Place, Ran, SEQUENCES, place};

/// A recipe with everything that a run carries from step to step. Batches of 8 divide among up to 8 devices.
const RECIPE: &str = r#"
local pl = require "perilune"
local nn, optim = pl.nn, pl.optim
local recipe = pl.recipe { name = "all", params = { lr = 0.05, steps = 12, seed = 3, width = 8, eval_every = 4 } }
recipe.ema, recipe.accumulate = 0.9, 2
function recipe.data(p)
  local x = pl.randn { 80, 4 }
  local set = pl.data.tensors { x = x, y = x:sum(1) }
  return { train = set:split("train", 0.75, p.seed):shuffle(p.seed):batch(8), valid = set:split("valid", 0.25, p.seed):batch(8) }
end
function recipe.model(p)
  return nn.Sequential { nn.Linear(4, p.width, { bias = false }), nn.BatchNorm1d(p.width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(p.width, 1) }
end
function recipe.optimizer(p, model)
  return optim.AdamW(model, { lr = optim.cosine { peak = p.lr, warmup = 3, steps = 12 }, clip_norm = 1 })
end
function recipe.loss(model, batch)
  local error = model(batch.x):squeeze(-1) - batch.y
  return (error * error):mean()
end
-- more
return recipe
"#;

fn all(more: &str) -> Place {
    let p = place();
    p.file("all.lua", RECIPE.replace("-- more", more));
    p
}

fn run(p: &Place, dir: &str, more: &[&str]) -> Ran {
    let mut args = vec!["run", "all.lua", "--quiet", "--device", "cpu", "--run-dir", dir];
    args.extend(more);
    let ran = p.run(&args);
    assert_eq!(ran.status, Some(0), "{more:?}: {}", ran.err);
    ran
}

/// Losses of all steps and evaluations.
fn losses(p: &Place, dir: &str) -> Vec<f64> {
    let lines = p.read(&format!("{dir}/metrics.jsonl"));
    let events = lines.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap());
    events.filter_map(|e| e["loss"].as_f64().or_else(|| e["metrics"]["valid/loss"].as_f64())).collect()
}

fn weights(p: &Place, dir: &str) -> String {
    p.run_json(dir)["weights"].as_str().unwrap().to_string()
}

fn close(a: &[f64], b: &[f64], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (k, (a, b)) in a.iter().zip(b).enumerate() {
        assert!((a - b).abs() <= 1e-4 * a.abs().max(1.0), "{what}: value {k} is {b}, not {a}");
    }
}

#[test]
fn a_run_on_a_mesh_follows_the_curve_of_one_device_in_equal_bits_each_time() {
    let p = all("");
    run(&p, "one", &["--mesh", ""]);
    for mesh in ["dp=2", "dp=4,zero=1", "dp=2,shard=2", "dp=8,zero=3", "pp=2", "pp=2,dp=2,zero=1"] {
        run(&p, &format!("a-{mesh}"), &["--mesh", mesh]);
        close(&losses(&p, "one"), &losses(&p, &format!("a-{mesh}")), mesh);
        run(&p, &format!("b-{mesh}"), &["--mesh", mesh, "--threads", "1"]);
        assert_eq!(weights(&p, &format!("a-{mesh}")), weights(&p, &format!("b-{mesh}")), "{mesh}: another run");
    }
}

#[test]
fn a_run_resumes_on_its_mesh_to_the_bits_of_an_uninterrupted_one() {
    let p = all("");
    let mesh = ["--mesh", "dp=4,zero=3"];
    run(&p, "whole", &mesh);
    run(&p, "parts", &[&mesh[..], &["--steps", "5"]].concat());
    run(&p, "parts", &[&mesh[..], &["--resume", "--steps", "12"]].concat());
    assert_eq!(weights(&p, "whole"), weights(&p, "parts"));
}

#[test]
fn a_checkpoint_fits_any_mesh_and_one_device() {
    let p = all("");
    run(&p, "one", &["--mesh", ""]);
    run(&p, "moved", &["--mesh", "dp=4,zero=3", "--steps", "3"]);
    for (mesh, steps) in [("", "5"), ("dp=2,zero=1", "6"), ("pp=2,dp=2", "8"), ("dp=2,shard=4", "9"), ("", "12")] {
        run(&p, "moved", &["--mesh", mesh, "--resume", "--steps", steps]);
    }
    // Evaluations at the ends of the parts are extra: the steps are compared.
    let steps = |dir: &str| {
        let lines = p.read(&format!("{dir}/metrics.jsonl"));
        let events = lines.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap());
        events.filter(|e| e["event"] == "step").map(|e| e["loss"].as_f64().unwrap()).collect::<Vec<_>>()
    };
    close(&steps("one"), &steps("moved"), "five meshes in turns");
}

/// One hash of the weights on any number of devices, also when a run moves from mesh to mesh.
#[test]
fn strict_shards_give_one_hash_on_any_mesh_and_across_resumes() {
    let p = all("");
    let go = |dir: &str, more: &[&str]| run(&p, dir, &[&["--strict-shards", "8"][..], more].concat());
    go("one", &["--mesh", ""]);
    for mesh in ["dp=2", "dp=4,zero=1", "dp=8,zero=3", "dp=2,shard=4", "pp=2", "pp=2,dp=2"] {
        go(mesh, &["--mesh", mesh]);
        assert_eq!(weights(&p, mesh), weights(&p, "one"), "{mesh}");
    }
    go("moved", &["--mesh", "dp=4,zero=3", "--steps", "3"]);
    for (mesh, steps) in [("", "5"), ("dp=2,zero=1", "7"), ("pp=2,dp=2", "8"), ("dp=2,shard=4", "9"), ("dp=8", "12")] {
        let ran = go("moved", &["--mesh", mesh, "--resume", "--steps", steps]);
        assert!(!ran.err.contains("another order"), "{}", ran.err);
    }
    assert_eq!(weights(&p, "moved"), weights(&p, "one"));
    assert_eq!(p.run_json("moved")["strict_shards"], 8);
    close(&losses(&p, "one"), &losses(&p, "dp=8,zero=3"), "losses");
    let args = ["run", "all.lua", "--device", "cpu", "--run-dir", "moved", "--resume", "--steps", "13", "--mesh", ""];
    let ran = p.run(&args);
    assert!(ran.err.contains("resume with --strict-shards 8 for the same bits"), "{}{}", ran.out, ran.err);
    let ran = p.run(&["check", "all.lua", "--device", "cpu", "--mesh", "dp=2", "--strict-shards", "8"]);
    assert!(ran.out.contains("8 of each batch, 4 a device"), "{}{}", ran.out, ran.err);
    let ran = p.run(&["check", "all.lua", "--device", "cpu", "--mesh", "pp=2,dp=2", "--strict-shards", "8"]);
    assert!(ran.out.contains("8 of each batch, 4 a device"), "{}{}", ran.out, ran.err);
    for (more, status, says) in [
        (&["--strict-shards", "6"][..], 2, "--strict-shards 6: 6 is no power of two"),
        (&["--strict-shards", "4", "--mesh", "dp=8"], 2, "8 devices along dp and shard do not divide 4 shards"),
        (&["--strict-shards", "8", "--mesh", "tp=2"], 2, "tp=2 splits sums in a way that depends on the mesh"),
        (&["--strict-shards", "16"], 3, "16 shards do not divide a batch of 8 samples"),
        (&["--strict-shards", "many"], 2, "many"),
    ] {
        let ran = p.run(&[&["run", "all.lua", "--device", "cpu"][..], more].concat());
        assert_eq!(ran.status, Some(status), "{more:?}: {}", ran.err);
        assert!(ran.err.contains(says), "{more:?}: {}", ran.err);
    }
}

#[test]
fn a_recipe_names_its_mesh_and_the_command_line_goes_first() {
    let p = all("recipe.mesh = { dp = 2, zero = 1, bucket = '4M' }");
    let device = |dir: &str| p.run_json(dir)["device_description"].as_str().unwrap().to_string();
    let ran = p.run(&["run", "all.lua", "--device", "cpu", "--steps", "2", "--run-dir", "own"]);
    assert!(ran.out.starts_with("all · mesh dp=2 of 2 x cpu"), "{}{}", ran.out, ran.err);
    assert!(device("own").starts_with("mesh dp=2 of 2 x cpu"), "{}", device("own"));
    run(&p, "given", &["--mesh", "dp=4", "--steps", "2"]);
    assert!(device("given").starts_with("mesh dp=4 of 4 x cpu"), "{}", device("given"));
    run(&p, "one", &["--mesh", "dp=1", "--steps", "2"]);
    assert!(device("one").starts_with("cpu ("), "{}", device("one"));
}

/// Rules of the recipe divide layers that have none of their own.
#[test]
fn rules_of_a_recipe_divide_its_layers() {
    let p = all("recipe.sharding = { ['1'] = 'column', ['2'] = 'column', ['5'] = 'row' }");
    run(&p, "one", &["--mesh", ""]);
    for mesh in ["tp=2", "tp=4", "dp=2,tp=2,zero=3"] {
        run(&p, mesh, &["--mesh", mesh]);
        close(&losses(&p, "one"), &losses(&p, mesh), mesh);
    }
    let ran = p.run(&["check", "all.lua", "--device", "cpu", "--mesh", "tp=4"]);
    assert!(ran.out.contains("tp: split 0") && ran.out.contains("tp: split 1"), "{}{}", ran.out, ran.err);
}

#[test]
fn check_reports_placements_and_collectives() {
    let p = all("");
    let ran = p.run(&["check", "all.lua", "--device", "cpu", "--mesh", "dp=4,zero=1"]);
    assert_eq!(ran.status, Some(0), "{}", ran.err);
    let line = |what: &str| ran.out.lines().find(|l| l.contains(what)).unwrap_or_else(|| panic!("{what}: {}", ran.out));
    assert!(line("optim.adamw.m.*.weight  {8, 4} f32").contains("dp: split 0"), "{}", ran.out);
    assert!(line("model.*.weight          {8, 4} f32").contains("dp: split 0"), "{}", ran.out);
    assert!(line("model.*.bias            {1} f32").contains("replicated"), "{}", ran.out);
    assert!(line("all_gather").contains("all.lua:"), "{}", ran.out);
    assert!(line("collectives, ").contains(" in all"), "{}", ran.out);
    // Gradients share calls, unless each is to be sent alone.
    let calls = |out: &str| {
        let line = out.lines().find(|l| l.contains("collectives, ")).unwrap_or_default().to_string();
        let number = |before: &str| line.split(before).next()?.rsplit(' ').next()?.parse::<usize>().ok();
        (number(" collectives").unwrap(), number(" calls").unwrap())
    };
    let (tensors, merged) = calls(&ran.out);
    assert!(merged < tensors, "{}", ran.out);
    let ran = p.run(&["check", "all.lua", "--device", "cpu", "--mesh", "dp=4,zero=1,bucket=0"]);
    assert_eq!(calls(&ran.out), (tensors, tensors), "{}", ran.out);
    // Stage 1 keeps whole weights, stage 3 gathers them again.
    let ran = p.run(&["check", "all.lua", "--device", "cpu", "--mesh", "dp=4,zero=3"]);
    assert!(calls(&ran.out).0 > tensors, "{}", ran.out);
    // A mesh of GPUs that are not there.
    let ran = p.run(&["check", "all.lua", "--mesh", "dp=4,zero=1", "--for", "h200"]);
    assert_eq!(ran.status, Some(0), "{}", ran.err);
    assert!(ran.out.contains("mesh dp=4 of 4 x "), "{}", ran.out);
}

#[test]
fn sequences_are_divided_along_cp() {
    let p = place();
    p.file("sequences.lua", SEQUENCES);
    let check = |mesh: &str| {
        let ran = p.run(&["check", "sequences.lua", "--device", "cpu", "--mesh", mesh]);
        assert_eq!(ran.status, Some(0), "{mesh}: {}", ran.err);
        ran.out
    };
    for (mesh, has, not) in [
        ("cp=2", "all_to_all", "collective_permute"),
        ("cp=4", "all_gather", "all_to_all"),
        ("cp=2,keys=ring", "collective_permute", "all_to_all"),
        // The form of the exchange, with the line of the block.
        ("cp=4,keys=ring", "zig-zag ring", "all_to_all"),
        ("dp=2,cp=2,keys=gather", "all_gather", "all_to_all"),
    ] {
        let out = check(mesh);
        let along = |op: &str| out.lines().any(|l| l.contains(op) && l.contains(" cp "));
        assert!(along(has) && !along(not), "{mesh}: {out}");
    }
    let losses = |mesh: &str| {
        let ran = p.run(&[
            "run",
            "sequences.lua",
            "--device",
            "cpu",
            "--json",
            "--mesh",
            mesh,
            "--run-dir",
            &format!("dir-{mesh}"),
        ]);
        assert_eq!(ran.status, Some(0), "{mesh}: {}", ran.err);
        let events = ran.out.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap());
        events.filter(|e| e["event"] == "step").map(|e| e["loss"].as_f64().unwrap()).collect::<Vec<_>>()
    };
    let one = losses("dp=1");
    for mesh in ["cp=2", "cp=8", "cp=2,keys=ring"] {
        let many = losses(mesh);
        assert!(!one.is_empty() && one.len() == many.len(), "{mesh}");
        assert!(one.iter().zip(&many).all(|(a, b)| (a - b).abs() < 1e-5), "{mesh}: {one:?} and {many:?}");
    }
    // Along tp a block divides positions too, between its products.
    let out = check("tp=2");
    for op in ["reduce_scatter", "all_gather"] {
        assert!(out.lines().any(|l| l.contains(op) && l.contains(" tp ")), "{op}: {out}");
    }
    let many = losses("tp=2");
    assert!(one.iter().zip(&many).all(|(a, b)| (a - b).abs() < 1e-5), "tp=2: {one:?} and {many:?}");
    for (mesh, set, says) in [
        ("cp=2", "context=1", "sequences of 16 positions, and no tensor of the batch has so many in dim 1"),
        ("cp=32", "context=16", "sequences of 16 positions leave some of the 32 devices along cp without one"),
        ("cp=4,keys=heads", "context=16", "keys=heads along cp=4: the devices do not divide the key heads"),
    ] {
        let ran = p.run(&["run", "sequences.lua", "--device", "cpu", "--mesh", mesh, "--set", set]);
        assert!(ran.status == Some(3) && ran.err.contains(says), "{mesh}: {:?} {}", ran.status, ran.err);
        assert!(ran.err.contains("hint"), "{mesh}: {}", ran.err);
        assert!(ran.err.contains("sequences.lua:"), "{mesh}: {}", ran.err);
    }
    // The line of the attention that cannot have its keys so.
    let ran = p.run(&["check", "sequences.lua", "--device", "cpu", "--mesh", "cp=4,keys=heads"]);
    let line = 1 + SEQUENCES.lines().position(|l| l.contains("self.block(")).unwrap();
    assert!(ran.err.contains(&format!("sequences.lua:{line}:")), "{}", ran.err);
}

/// The record has the way in which attention gets keys; a resume with another one says so.
#[test]
fn the_exchange_of_keys_is_recorded_and_compared() {
    let p = place();
    p.file("sequences.lua", SEQUENCES);
    let go = |dir: &str, mesh: &str, more: &[&str]| {
        let args = ["run", "sequences.lua", "--device", "cpu", "--run-dir", dir, "--mesh", mesh];
        let ran = p.run(&[&args[..], more].concat());
        assert_eq!(ran.status, Some(0), "{mesh}: {}", ran.err);
        ran.err
    };
    go("ring", "cp=2,keys=ring", &[]);
    go("auto", "cp=2", &[]);
    go("none", "dp=2", &[]);
    let keys = |dir: &str| p.run_json(dir)["keys"].as_str().map(String::from);
    assert_eq!(["ring", "auto", "none"].map(keys), [Some("ring".into()), Some("auto".into()), None]);
    let more = ["--resume", "--steps", "3"];
    let says = "attention adds in another order than before; resume with keys=ring in the mesh for the same bits";
    assert!(!go("ring", "cp=2,keys=ring", &more).contains("another order"));
    let err = go("ring", "cp=2", &["--resume", "--steps", "4"]);
    assert!(err.contains(says), "{err}");
    // Another mesh has other bits in any case, and one without cp no keys.
    assert!(!go("none", "cp=2", &more).contains("another order"));
}

#[test]
fn a_replay_has_the_strict_shards_of_the_run() {
    let p = all("recipe.strict_shards = 4");
    run(&p, "own", &["--mesh", "dp=2"]);
    run(&p, "given", &["--mesh", "dp=2", "--strict-shards", "8"]);
    assert_ne!(weights(&p, "own"), weights(&p, "given"));
    for dir in ["own", "given"] {
        let again = format!("again-{dir}");
        let ran = p.run(&["replay", dir, "--run-dir", &again]);
        assert_eq!(ran.status, Some(0), "{dir}: {}{}", ran.out, ran.err);
        assert_eq!(p.run_json(&again)["strict_shards"], p.run_json(dir)["strict_shards"], "{dir}");
        assert_eq!(weights(&p, &again), weights(&p, dir), "{dir}");
    }
}

#[test]
fn check_reports_stages_and_what_they_send() {
    let p = all("");
    let ran = p.run(&["check", "all.lua", "--device", "cpu", "--mesh", "pp=2"]);
    assert_eq!(ran.status, Some(0), "{}", ran.err);
    let line = |what: &str| ran.out.lines().find(|l| l.contains(what)).unwrap_or_else(|| panic!("{what}: {}", ran.out));
    assert!(line("forward  share").contains("received a micro-batch"), "{}", ran.out);
    assert!(line("schedule 1f1b, 2 micro-batches").contains("devices wait"), "{}", ran.out);
    for stage in ["pp: stage 0", "pp: stage 1"] {
        assert!(ran.out.lines().any(|l| l.contains("model.") && l.contains(stage)), "{stage}: {}", ran.out);
    }
    assert!(line("send  pp").contains("all.lua:"), "{}", ran.out);
    // Of GPUs that are not there, with times and the memory of each device.
    let ran = p.run(&["check", "all.lua", "--mesh", "pp=2", "--for", "h200"]);
    assert_eq!(ran.status, Some(0), "{}", ran.err);
    let line = |what: &str| ran.out.lines().find(|l| l.contains(what)).unwrap_or_else(|| panic!("{what}: {}", ran.out));
    assert!(line("schedule 1f1b").contains("2 micro-batches"), "{}", ran.out);
    assert!(line("mean of the 2 devices along pp").contains("for other stages"), "{}", ran.out);
    assert!(line("passes kept").contains("intermediate"), "{}", ran.out);
    assert!(line("through NVLink").trim().starts_with("pp: "), "{}", ran.out);
    // A search ranks meshes with stages among the others.
    let search = ["check", "all.lua", "--for", "h200", "--devices", "2", "--search", "--set", "lr=0.1"];
    let ran = p.run(&search);
    assert_eq!(ran.status, Some(0), "{}", ran.err);
    let row = ran.out.lines().find(|l| l.trim().starts_with("pp=2")).unwrap_or_else(|| panic!("{}", ran.out));
    assert!(!row.contains(" - "), "{row}");
    for schedule in ["zb-h1", "zbv"] {
        let begins = format!("pp=2,schedule={schedule} ");
        assert!(ran.out.lines().any(|l| l.trim().starts_with(&begins)), "{schedule}: {}", ran.out);
    }
    assert!(!ran.out.contains("ep="), "the model has no experts: {}", ran.out);
    // The command line names a schedule.
    let ran = p.run(&["check", "all.lua", "--mesh", "pp=2,schedule=zb-h1"]);
    assert!(ran.status == Some(0) && ran.out.contains("schedule zb-h1"), "{}{}", ran.out, ran.err);
}

/// A mixture of 4 experts, of which a sample takes 2.
const MIXTURE: &str = r#"
local pl = require "perilune"
local nn = pl.nn
local recipe = pl.recipe { name = "mixture", params = { steps = 6, seed = 3, experts = 4 } }
function recipe.data(p)
  local x = pl.randn { 64, 8 }
  return { train = pl.data.tensors { x = x, y = x:abs():sum(1) }:shuffle(p.seed):batch(16) }
end
function recipe.model(p)
  local m = { mix = nn.MoE(8, p.experts, { hidden = 32 }), head = nn.Linear(8, 1) }
  function m:forward(x)
    local y, uneven = self.mix(x)
    return self.head(x + y):squeeze(-1), uneven
  end
  return nn.module(m)
end
function recipe.optimizer(p, model) return pl.optim.AdamW(model, { lr = 0.01, clip_norm = 1 }) end
function recipe.loss(model, batch)
  local y, uneven = model(batch.x)
  local error = y - batch.y
  return (error * error):mean() + uneven * 0.01
end
return recipe
"#;

#[test]
fn experts_are_divided_along_ep() {
    let p = place();
    p.file("all.lua", MIXTURE);
    let check = |more: &[&str]| {
        let args: Vec<&str> = ["check", "all.lua"].into_iter().chain(more.iter().copied()).collect();
        let ran = p.run(&args);
        assert_eq!(ran.status, Some(0), "{more:?}: {}", ran.err);
        ran.out
    };
    let text = check(&["--device", "cpu", "--mesh", "dp=2,ep=2,zero=1"]);
    let line = |text: &str, what: &str| {
        text.lines().find(|l| l.contains(what)).unwrap_or_else(|| panic!("{what}: {text}")).to_string()
    };
    assert!(line(&text, "model.mix.up").contains("ep: split 0"), "{text}");
    assert!(line(&text, "model.head.weight").contains("dp: split 1"), "{text}");
    let sent = line(&text, "all_to_all");
    assert!(sent.contains(" ep ") && sent.contains("all.lua:"), "{text}");
    // Of GPUs that are not there, with a time on the link.
    let text = check(&["--mesh", "ep=4", "--for", "h200"]);
    let sent = text.lines().filter(|l| l.contains("all_to_all") && l.contains("NVLink"));
    assert!(sent.count() >= 1, "{text}");
    let text = check(&["--for", "h200", "--devices", "4", "--search"]);
    for mesh in ["ep=4 ", "dp=2,ep=2,zero=1 ", "dp=4 "] {
        assert!(text.lines().any(|l| l.trim().starts_with(mesh) && !l.contains(" - ")), "{mesh}: {text}");
    }
    run(&p, "one", &["--mesh", ""]);
    for mesh in ["ep=2", "ep=4,zero=3", "dp=2,ep=2"] {
        run(&p, mesh, &["--mesh", mesh]);
        close(&losses(&p, "one"), &losses(&p, mesh), mesh);
    }
    // Processes exchange rows too: the same bits.
    let ran = p.run(&[
        "launch",
        "-n",
        "2",
        "run",
        "all.lua",
        "--quiet",
        "--device",
        "cpu",
        "--mesh",
        "ep=2",
        "--run-dir",
        "processes",
    ]);
    assert_eq!(ran.status, Some(0), "{}", ran.err);
    assert_eq!(weights(&p, "ep=2"), weights(&p, "processes"));
    // A checkpoint of experts fits another mesh.
    run(&p, "moved", &["--mesh", "ep=4", "--steps", "3"]);
    run(&p, "moved", &["--mesh", "ep=2", "--resume", "--steps", "6"]);
    close(&losses(&p, "one"), &losses(&p, "moved"), "moved");
    let ran = p.run(&["run", "all.lua", "--device", "cpu", "--mesh", "ep=4", "--set", "experts=6"]);
    assert!(ran.status == Some(3) && ran.err.contains("ep=4 does not divide the 6 experts"), "{}", ran.err);
    let ran = p.run(&["run", "all.lua", "--device", "cpu", "--mesh", "ep=2", "--strict-shards", "4"]);
    assert!(ran.status == Some(2) && ran.err.contains("ep=2 splits sums"), "{:?} {}", ran.status, ran.err);
}

#[test]
fn wrong_meshes_are_refused_with_the_rule() {
    let p = all("");
    for (mesh, says) in [
        ("dp=2,dq=2", "there is no axis \"dq\" (did you mean dp?)"),
        ("dp=0", "dp=0: an axis has at least 1 device"),
        ("tp=2,zero=1", "zero=1 divides States over dp, shard or ep, but the mesh has none"),
        ("dp=2,zero=7", "zero=7: there is no such stage"),
        ("dp=2,bucket=many", "bucket=many: it is not an amount of memory"),
        ("dp=2,buckt=4M", "there is no axis \"buckt\" (did you mean bucket?)"),
    ] {
        let ran = p.run(&["run", "all.lua", "--mesh", mesh]);
        assert_eq!(ran.status, Some(2), "{mesh}");
        assert!(ran.err.contains(says), "{mesh}: {}", ran.err);
    }
    let ran = p.run(&["bench", "--mesh", "dp=2", "--no-rival", "matmul_64"]);
    assert!(ran.status == Some(2) && ran.err.contains("the cases measure one device"), "{}", ran.err);
    for (more, says) in [
        ("recipe.mesh = { dp = 'two' }", "recipe.mesh: dp is 'two'"),
        ("recipe.mesh = 'dp=2,tq=2'", "recipe.mesh: there is no axis \"tq\""),
        (
            "recipe.mesh, recipe.sharding = 'tp=2', { ['7.*'] = 'column' }",
            "recipe.sharding: no State has the path '7.*'",
        ),
        ("recipe.mesh, recipe.sharding = 'tp=2', { ['1'] = 'col' }", "column"),
        ("recipe.mesh = 'tp=2'", "mesh: tp=2 divides no layer of the model"),
        (
            "recipe.mesh = { dp = 16 }",
            "mesh: a batch of 8 samples leaves some of the 16 devices along dp and shard without one",
        ),
        ("recipe.mesh = { cp = 2 }", "mesh: cp=2 divides sequences, and a loader states none"),
        ("recipe.mesh, recipe.accumulate = 'pp=2', 1", "pp=2: a step has 1 micro-batch, fewer than devices along pp"),
        ("recipe.mesh, recipe.accumulate = 'pp=4', 4", "of the 4 layers with weights that as many stages need"),
        ("recipe.mesh, recipe.pipeline = 'pp=2', { schedule = 'zbh1' }", "there is no schedule \"zbh1\""),
        ("recipe.mesh, recipe.pipeline = 'pp=2', { shedule = 'zb-h1' }", "schedule"),
        ("recipe.mesh, recipe.pipeline = 'pp=2', { chunks = 2 }", "chunks = 2, and no schedule"),
        ("recipe.mesh, recipe.pipeline = 'pp=2', { schedule = 'interleaved', chunks = 1 }", "chunks"),
    ] {
        let p = all(more);
        let ran = p.run(&["run", "all.lua"]);
        assert_eq!(ran.status, Some(3), "{more}: {}", ran.err);
        assert!(ran.err.contains(says) && ran.err.contains("all.lua:"), "{more}: {}", ran.err);
    }
}
