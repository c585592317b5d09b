//! Tests `perilune data check` and the check of a run before its first step: findings, reports, exit status, wrong usage.

#![allow(clippy::unwrap_used)]

mod support;

use support::{Place, place};

/// Distinct sentences of made-up words.
fn sentence(k: u64) -> String {
    let mut state = k.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut word = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        format!("w{:x}", state >> 44)
    };
    (0..30).map(|_| word()).collect::<Vec<_>>().join(" ")
}

fn lines(first: u64, n: u64) -> Vec<String> {
    (first..first + n).map(|k| serde_json::json!({ "text": sentence(k), "label": k % 4 }).to_string()).collect()
}

fn files(train: &[String], valid: &[String]) -> Place {
    let p = place();
    p.file("train.jsonl", train.join("\n"));
    p.file("valid.jsonl", valid.join("\n"));
    p
}

const RECIPE: &str = r#"
local pl = require "perilune"
local recipe = pl.recipe { name = "words", params = { steps = 1, seed = 1 } }
function recipe.data(p)
  local tok = pl.data.bytes()
  local function loader(path) return pl.data.jsonl(path):tokenize(tok):select { "ids", "label" }:pad { ids = 512 }:batch(4) end
  return { train = loader "train.jsonl", valid = loader "valid.jsonl" }
end
function recipe.model() return pl.nn.Sequential { pl.nn.Linear(512, 1) } end
function recipe.optimizer(p, model) return pl.optim.SGD(model, { lr = 1e-9 }) end
function recipe.loss(model, batch) return model(batch.ids:to "f32"):mean() end
return recipe
"#;

#[test]
fn clean_files_have_no_findings() {
    let p = files(&lines(1, 200), &lines(1000, 50));
    let r = p.run(&["data", "check", "train.jsonl", "valid.jsonl"]);
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{}", r.out);
    assert!(r.out.contains("train: 200 records") && r.out.contains("no faults found"), "{}", r.out);
    assert!(r.out.contains("taken as evaluation by their names: valid.jsonl"), "{}", r.out);
}

#[test]
fn faults_are_reported_with_file_and_line() {
    let (mut train, mut valid) = (lines(1, 200), lines(1000, 50));
    train[7] = valid[3].clone();
    train[20] = "{ broken".into();
    valid[9] = serde_json::json!({ "text": format!("\u{1b}[2J<script>{}", sentence(7777)), "label": 1 }).to_string();
    let p = files(&train, &valid);
    let r = p.run(&["data", "check", "train.jsonl", "--eval", "valid.jsonl", "--html", "out.html"]);
    assert_eq!((r.status, r.err.as_str()), (Some(1), ""), "{}", r.out);
    assert!(r.out.contains("error [leakage] valid: are training records too: 1 of 50 records"), "{}", r.out);
    assert!(r.out.contains("valid.jsonl:4 and train.jsonl:8"), "{}", r.out);
    assert!(r.out.contains("error [unreadable] train:") && r.out.contains("train.jsonl:21"), "{}", r.out);
    assert!(r.out.contains("[control-characters]") && !r.out.contains('\u{1b}'), "{}", r.out);
    let page = p.read("out.html");
    assert!(page.contains("<svg") && !page.contains("<script") && !page.contains('\u{1b}'), "{page}");
    let r = p.run(&["data", "check", "train.jsonl", "--eval", "valid.jsonl", "--json"]);
    let report = r.events().pop().unwrap();
    let rules: Vec<&str> = report["findings"].as_array().unwrap().iter().map(|f| f["rule"].as_str().unwrap()).collect();
    assert!(rules.contains(&"leakage") && rules.contains(&"unreadable"), "{rules:?}");
}

#[test]
fn a_recipe_is_checked_by_command_and_before_a_run() {
    let (mut train, valid) = (lines(1, 200), lines(1000, 52));
    let p = files(&train, &valid);
    p.file("words.lua", RECIPE);
    let r = p.run(&["data", "check", "words.lua"]);
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{}", r.out);
    let r = p.run(&["run", "words.lua", "--run-dir", "a", "--strict"]);
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{}", r.out);
    train[7] = valid[3].clone();
    p.file("train.jsonl", train.join("\n"));
    let r = p.run(&["data", "check", "words.lua"]);
    assert_eq!(r.status, Some(1), "{}", r.out);
    assert!(r.out.contains("valid.jsonl:4 and ") && r.out.contains("train.jsonl:8"), "{}", r.out);
    let r = p.run(&["run", "words.lua", "--run-dir", "b"]);
    assert_eq!(r.status, Some(0), "{}", r.err);
    assert_eq!(r.err.lines().count(), 1, "{}", r.err);
    assert!(r.err.contains("warning: data check: valid: are training records too: 1 of 52"), "{}", r.err);
    let r = p.run(&["run", "words.lua", "--run-dir", "c", "--strict"]);
    assert!(r.status == Some(4) && r.err.contains("are training records too"), "{:?} {}", r.status, r.err);
    assert!(!p.path("c/run.json").exists());
    let r = p.run(&["run", "words.lua", "--run-dir", "d", "--no-data-check"]);
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{}", r.out);
    p.file("words.lua", RECIPE.replace("name = \"words\",", "name = \"words\", strict = true,"));
    let r = p.run(&["run", "words.lua", "--run-dir", "e"]);
    assert_eq!(r.status, Some(4), "{}", r.err);
}

const PACKED: &str = r#"
local pl = require "perilune"
local nn = pl.nn
local recipe = pl.recipe {
  name = "packed",
  params = { separate = true, noise = 0.0, dropout = 0.1, places = "", steps = 2, seed = 1 },
}
local settings
function recipe.data(p)
  local tok = pl.data.bytes()
  settings = p
  return { train = pl.data.jsonl "train.jsonl":tokenize(tok):pack(1024):shuffle(1):batch(4) }
end
function recipe.model(p)
  local m = { tokens = nn.Embedding(256, 16), block = nn.TransformerBlock(16, 2, { causal = true, dropout = p.dropout }), head = nn.Linear(16, 256) }
  if p.places ~= "" then m.places = nn.Embedding(1024, 16) end
  function m:forward(x, options)
    local h = self.tokens(x)
    if self.places then h = h + self.places(options.positions or pl.arange(x.shape[2], { dtype = "i64" })) end
    return self.head(self.block(h, options))
  end
  return nn.module(m)
end
function recipe.optimizer(p, model) return pl.optim.SGD(model, { lr = 0.1 }) end
function recipe.loss(model, batch)
  local logits = model(batch.x, { documents = settings.separate and batch.documents or nil,
    positions = settings.places ~= "row" and batch.positions or nil })
  if settings.noise > 0 then logits = logits + pl.randn(logits.shape) * settings.noise end
  return pl.cross_entropy(logits:flatten(0, 1), batch.y:flatten())
end
return recipe
"#;

#[test]
fn packed_documents_that_read_each_other_are_found() {
    let p = files(&lines(1, 60), &lines(1000, 5));
    p.file("packed.lua", PACKED);
    let weights = |r: &support::Ran| r.events().pop().unwrap()["weights"].clone();
    let run = |dir: &str, more: &[&str]| p.run(&[&["run", "packed.lua", "--json", "--run-dir", dir], more].concat());
    let checked = run("a", &["--strict"]);
    assert_eq!((checked.status, checked.err.as_str()), (Some(0), ""), "{}", checked.out);
    // The check leaves no trace in the run, in its random numbers neither.
    let unchecked = run("b", &["--no-data-check"]);
    assert_eq!(weights(&checked), weights(&unchecked));
    assert!(weights(&checked).is_string());

    let leaking = ["--set", "separate=false"];
    let r = p.run(&[&["run", "packed.lua", "--run-dir", "c"], &leaking[..]].concat());
    assert_eq!(r.status, Some(0), "{}", r.err);
    assert!(r.err.contains("warning: data check: train: packed documents read each other"), "{}", r.err);
    assert!(r.err.contains("documents = batch.documents"), "{}", r.err);
    let r = run("d", &[&leaking[..], &["--strict"]].concat());
    assert!(r.status == Some(4) && !p.path("d/run.json").exists(), "{:?} {}", r.status, r.err);
    // Documents on a mesh.
    for dir in ["f", "g"] {
        let more = if dir == "f" { &leaking[..] } else { &["--set", "places=document"] };
        let r = run(dir, &[&["--strict", "--mesh", "dp=2,cp=2", "--device", "cpu"], more].concat());
        assert_eq!(r.status, Some(if dir == "f" { 4 } else { 0 }), "{dir}: {}", r.err);
        assert_eq!(r.err.contains("packed documents read each other"), dir == "f", "{}", r.err);
    }
    // Positions from the start of the row, not of the document.
    for (dir, places, precision) in [("h", "row", "f32"), ("i", "row", "bf16"), ("j", "document", "bf16")] {
        let places = format!("places={places}");
        let r = run(dir, &["--strict", "--set", &places, "--precision", precision]);
        assert_eq!(r.status, Some(if dir == "j" { 0 } else { 4 }), "{dir}: {}", r.err);
        assert_eq!(r.err.contains("depends on where it lies in its sequence"), dir != "j", "{}", r.err);
        assert_eq!(r.err.contains("positions = batch.positions"), dir != "j", "{}", r.err);
    }
    // A loss with random numbers of its own cannot be compared.
    let r = run("e", &["--strict", "--set", "noise=0.1"]);
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{}", r.out);
}

#[test]
fn wrong_usage_is_explained() {
    let p = files(&lines(1, 3), &lines(9, 3));
    p.file("table.xyz", "a");
    p.file("script.lua", "print(1)");
    for (args, message) in [
        (vec!["table.xyz"], "'.xyz' are not supported"),
        (vec!["none.jsonl"], "none.jsonl"),
        (vec!["script.lua"], "a plain script has no data to check"),
        (vec!["script.lua", "train.jsonl"], "give one recipe, or files of records"),
        (vec!["train.jsonl", "--similarity", "2"], "a number above 0 and at most 1"),
        (vec!["script.lua", "--eval", "valid.jsonl"], "--eval names files"),
    ] {
        let r = p.run(&[&["data", "check"], &args[..]].concat());
        assert!(r.status == Some(2) && r.err.contains(message), "{args:?}: {:?} {}", r.status, r.err);
    }
}

#[test]
fn a_folder_of_images_is_decoded() {
    let p = place();
    std::fs::create_dir_all(p.path("set/cat")).unwrap();
    p.file("set/cat/bad.png", "no image");
    let r = p.run(&["data", "check", "set", "--all"]);
    assert!(
        r.status == Some(1) && r.out.contains("error [image] set: cannot be decoded: 1 of 1 images"),
        "{} {}",
        r.out,
        r.err
    );
    let recipe = RECIPE
        .replace(r#"loader "train.jsonl""#, r#"pl.data.images("set", { pixels = 8 }):batch(1)"#)
        .replace(r#", valid = loader "valid.jsonl""#, "");
    p.file("pictures.lua", recipe);
    let r = p.run(&["data", "check", "pictures.lua"]);
    assert!(r.status == Some(1) && r.out.contains("error [image] train: cannot be decoded"), "{} {}", r.out, r.err);
    // A list is checked like a folder.
    p.file("list.jsonl", "{\"file\": \"set/cat/bad.png\", \"class\": \"cat\"}\n");
    let recipe = RECIPE
        .replace(
            r#"loader "train.jsonl""#,
            r#"pl.data.images("list.jsonl", { path = "file", label = "class", pixels = 8 }):batch(1)"#,
        )
        .replace(r#", valid = loader "valid.jsonl""#, "");
    p.file("listed.lua", recipe);
    let r = p.run(&["data", "check", "listed.lua"]);
    assert!(
        r.status == Some(1) && r.out.contains("error [image] train: cannot be decoded: 1 of 1 images"),
        "{} {}",
        r.out,
        r.err
    );
    p.file("points.lua", support::TINY);
    let r = p.run(&["data", "check", "points.lua"]);
    assert!(r.status == Some(0) && r.out.contains("train: 48 rows"), "{} {}", r.out, r.err);
}

const WINDOWS: &str = r#"
local pl = require "perilune"
local recipe = pl.recipe { name = "windows", params = { tokens = "all.bin", device = false, steps = 1, seed = 1 } }
function recipe.data(p)
  local all = pl.data.token_files(p.tokens)
  if p.device then all = pl.data.sequence(all:ids(0, all:size())) end
  return { train = all:split("train", 0.9):windows { length = 64, batch = 4, seed = 1 }, valid = all:split("valid", 0.1):windows { length = 64, batch = 4 } }
end
function recipe.model() return pl.nn.Sequential { pl.nn.Linear(64, 1) } end
function recipe.optimizer(p, model) return pl.optim.SGD(model, { lr = 1e-9 }) end
function recipe.loss(model, batch) return model(batch.x:to "f32"):mean() end
return recipe
"#;

#[test]
fn token_files_are_checked_by_command_and_before_a_run() {
    let p = place();
    let mut state = 1u64;
    let mut ids: Vec<u16> = (0..100_000)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) % 20_000) as u16
        })
        .collect();
    let bytes = |ids: &[u16]| ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>();
    p.file("all.bin", bytes(&ids));
    p.file("windows.lua", WINDOWS);
    for device in ["device=false", "device=true"] {
        let r = p.run(&["data", "check", "windows.lua", "--set", device]);
        assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{}", r.out);
        assert!(r.out.contains("train: 90000 tokens") && r.out.contains("valid: 10000 tokens"), "{}", r.out);
    }
    let r = p.run(&["run", "windows.lua", "--run-dir", "a", "--strict"]);
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{}", r.out);

    // A window of the evaluation part goes to the training part, which has a hole too.
    ids.copy_within(90_640..90_704, 5_000);
    ids[20_000..25_000].fill(0);
    p.file("all.bin", bytes(&ids));
    for (device, place) in [("device=false", "all.bin: token 90640"), ("device=true", "valid: token 90640")] {
        let r = p.run(&["data", "check", "windows.lua", "--set", device, "--html", "out.html"]);
        assert_eq!((r.status, r.err.as_str()), (Some(1), ""), "{}", r.out);
        assert!(r.out.contains("error [leakage] valid: stand in the training part: 1 of 156 windows"), "{}", r.out);
        assert!(r.out.contains(place) && r.out.contains("token 5000:"), "{}", r.out);
        assert!(r.out.contains("warning [constant-windows] train:") && r.out.contains("has 5000"), "{}", r.out);
        assert!(p.read("out.html").contains("constant-windows"));
    }
    let r = p.run(&["run", "windows.lua", "--run-dir", "b"]);
    assert!(r.status == Some(0) && r.err.lines().count() == 1, "{}", r.err);
    assert!(
        r.err.contains("warning: data check: valid: stand in the training part") && r.err.contains("1 other"),
        "{}",
        r.err
    );
    // On the devices of a mesh too.
    for more in [&[][..], &["--set", "device=true", "--device", "cpu", "--mesh", "dp=2"]] {
        let r = p.run(&[&["run", "windows.lua", "--run-dir", "c", "--strict"], more].concat());
        assert!(r.status == Some(4) && !p.path("c/run.json").exists(), "{more:?} {:?} {}", r.status, r.err);
        assert!(r.err.contains("valid: stand in the training part: 1 of 156 windows"), "{more:?} {}", r.err);
    }

    // The manifest of an encoder knows the vocabulary.
    let shard = serde_json::json!({ "file": "all.bin", "tokens": ids.len(), "documents": 1, "blake3": "" });
    let manifest = serde_json::json!({ "schema": "perilune.tokens/1", "dtype": "u16", "vocabulary": 19_000, "tokenizer": "",
                                       "template": null, "eot": null, "shards": [shard] });
    p.file("manifest.json", manifest.to_string());
    let r = p.run(&["data", "check", "windows.lua", "--set", "tokens=manifest.json", "--json"]);
    let report = r.events().pop().unwrap();
    let range = report["findings"].as_array().unwrap().iter().find(|f| f["rule"] == "token-range").unwrap().clone();
    let outside = ids.iter().take(90_000).filter(|id| **id >= 19_000).count();
    assert_eq!((range["count"].as_u64(), range["split"].as_str()), (Some(outside as u64), Some("train")), "{range}");
    assert_eq!(report["splits"][0]["unit"], "tokens");
}

const ROWS: &str = r#"
local pl = require "perilune"
local recipe = pl.recipe { name = "rows", params = { fault = "none", steps = 1, seed = 1 } }
function recipe.data(p)
  local a, b, y = pl.randn { 200, 4, 4 }, pl.randn { 52, 4, 4 }, pl.arange(200) % 4
  if p.fault == "leak" then b = pl.cat({ b:narrow(0, 0, 50), a:narrow(0, 3, 2) }, 0) end
  if p.fault == "nan" then a = pl.where(pl.arange(200):view(200, 1, 1):eq(17), 0 / 0, a) end
  if p.fault == "label" then y = pl.where(pl.arange(200):eq(5), 99, y) end
  if p.fault == "twice" then a = pl.cat({ a:narrow(0, 0, 190), a:narrow(0, 0, 10) }, 0) end
  local train, valid = pl.data.tensors { x = a, y = y }, pl.data.tensors { x = b, y = pl.arange(52) % 4 }
  local scaled = train:shuffle(1):map(function(batch) return { x = batch.x * 0, y = batch.y } end)
  return { train = scaled:batch(4), valid = valid:batch(4) }
end
function recipe.model() return pl.nn.Sequential { pl.nn.Linear(16, 1) } end
function recipe.optimizer(p, model) return pl.optim.SGD(model, { lr = 1e-9 }) end
function recipe.loss(model, batch) return model(batch.x:flatten(1)):mean() end
return recipe
"#;

#[test]
fn rows_of_tensors_are_checked_by_command_and_before_a_run() {
    let p = place();
    p.file("rows.lua", ROWS);
    let r = p.run(&["data", "check", "rows.lua"]);
    assert_eq!((r.status, r.err.as_str()), (Some(0), ""), "{}", r.out);
    assert!(r.out.contains("train: 200 rows") && r.out.contains("guessed as labels: y"), "{}", r.out);
    for (fault, message, place) in [
        ("leak", "error [leakage] valid: are training rows too: 2 of 52 rows", "valid row 50 and train row 3"),
        ("nan", "error [not-finite] train: field 'x' has NaN or infinity: 1 of 200 rows", "train row 17"),
        ("label", "error [label-range] train: field 'y' is outside", "train row 5: 99"),
        (
            "twice",
            "warning [exact-duplicates] train: repeat an earlier row: 10 of 200 rows",
            "train row 190 and train row 0",
        ),
    ] {
        let set = format!("fault={fault}");
        let r = p.run(&["data", "check", "rows.lua", "--set", &set]);
        assert_eq!((r.status, r.err.as_str()), (Some(1), ""), "{fault}: {}", r.out);
        assert!(r.out.contains(message) && r.out.contains(place), "{fault}: {}", r.out);
        for mesh in [&[][..], &["--device", "cpu", "--mesh", "dp=2"]] {
            let r = p.run(&[&["run", "rows.lua", "--set", &set, "--run-dir", fault, "--strict"], mesh].concat());
            assert!(
                r.status == Some(4) && !p.path(fault).join("run.json").exists(),
                "{fault} {mesh:?}: {:?} {}",
                r.status,
                r.err
            );
        }
    }
    // The check changes no random number of a run.
    let weights = |r: &support::Ran| r.events().pop().unwrap()["weights"].clone();
    for (mesh, dirs) in [(&[][..], ["a", "b"]), (&["--device", "cpu", "--mesh", "dp=2"], ["c", "d"])] {
        let run = |dir, check| p.run(&[&["run", "rows.lua", "--json", "--run-dir", dir, check], mesh].concat());
        let (checked, unchecked) = (run(dirs[0], "--strict"), run(dirs[1], "--no-data-check"));
        assert_eq!((checked.status, checked.err.as_str()), (Some(0), ""), "{mesh:?} {}", checked.out);
        assert!(weights(&checked).is_string() && weights(&checked) == weights(&unchecked), "{mesh:?}");
    }
}
