//! Trains on compressed records, whose text is kept in the program's cache folder.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

mod support;

use std::io::Write;
use support::place;

const RECIPE: &str = r#"
local pl = require "perilune"
local recipe = pl.recipe { name = "packed", params = { file = "rows.csv.gz", steps = 6 } }
function recipe.data(p) return { train = pl.data.records(p.file):shuffle(1):batch(2) } end
function recipe.model() return pl.nn.Linear(1, 1) end
function recipe.optimizer(p, model) return pl.optim.SGD(model, { lr = 0.01 }) end
function recipe.loss(model, batch)
  local error = model(batch.x:unsqueeze(-1)):squeeze(-1) - batch.y
  return (error * error):mean()
end
return recipe
"#;

fn gzip(text: &str) -> Vec<u8> {
    let mut to = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    to.write_all(text.as_bytes()).unwrap();
    to.finish().unwrap()
}

#[test]
fn compressed_records_train_as_plain_ones() {
    let p = place();
    let rows: String = (0..9).map(|k| format!("{k}.5,{}.0\n", 2 * k)).collect();
    let text = format!("x,y\n{rows}");
    p.file("r.lua", RECIPE);
    p.file("rows.csv", &text);
    p.file("rows.csv.gz", gzip(&text));
    let cache = p.path("cache");
    let run = |args: &[&str]| {
        let out = p.command(args).env("PERILUNE_CACHE", &cache).output().unwrap();
        assert!(
            out.status.success(),
            "{}{}",
            String::from_utf8_lossy(&out.stdout),
            String::from_utf8_lossy(&out.stderr)
        );
    };
    let entries = |dir: &str| -> Vec<String> {
        let list = std::fs::read_dir(p.path(dir)).into_iter().flatten();
        let mut names: Vec<String> = list.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    let before = entries(".");
    run(&["check", "r.lua"]);
    let made = entries("cache/records");
    assert!(made.iter().filter(|name| name.ends_with(".zst")).count() == 1, "{made:?}");
    let after: Vec<String> = entries(".").into_iter().filter(|name| name != "cache").collect();
    assert_eq!(before, after, "check writes to the cache alone");
    run(&["run", "r.lua", "--run-dir", "a"]);
    run(&["run", "r.lua", "--run-dir", "b", "--set", "file=rows.csv"]);
    assert_eq!(entries("cache/records"), made);
    let loss = |dir: &str| -> Vec<String> {
        let lines = p.read(&format!("{dir}/metrics.jsonl"));
        let steps = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        steps.filter_map(|e| e.get("loss").map(|loss| loss.to_string())).collect()
    };
    assert!(!loss("a").is_empty());
    assert_eq!(loss("a"), loss("b"));
    assert!(p.read("a/run.json").contains("rows.csv.gz"));
}
