//! Finds the params in which runs differ, and labels runs by them.

use serde_json::{Map, Value};
use std::collections::BTreeMap;

type Record = Map<String, Value>;

/// Fields of `run.json` besides the params that a command line chooses.
const OPTIONS: [&str; 5] = ["seed", "steps", "precision", "device", "mesh"];

/// Returns a param of a run, or else the option of that name.
pub(crate) fn field<'a>(record: &'a Record, name: &str) -> Option<&'a Value> {
    let param = record.get("params").and_then(|params| params.get(name));
    param.or_else(|| record.get(name).filter(|_| OPTIONS.contains(&name))).filter(|v| !v.is_null())
}

/// Returns a param of a run, or else the option of that name, as `--set` would give it.
pub fn value(record: &Record, name: &str) -> Option<String> {
    field(record, name).map(|v| v.as_str().map_or_else(|| v.to_string(), String::from))
}

/// Lists the params that differ between two runs of one recipe, by name, then the options that do. Runs of different recipes are
/// not compared with each other: all their params would differ.
pub fn varying(records: &[&Record]) -> Vec<String> {
    let mut recipes: BTreeMap<&str, Vec<&Record>> = BTreeMap::new();
    // A damaged run has no params.
    for record in records.iter().filter(|record| record.contains_key("params")) {
        recipes.entry(record.get("recipe").and_then(Value::as_str).unwrap_or_default()).or_default().push(record);
    }
    let params = records.iter().filter_map(|r| r.get("params").and_then(Value::as_object)).flat_map(Map::keys);
    let mut names: Vec<&str> = params.map(String::as_str).collect();
    names.sort_unstable();
    names.extend(OPTIONS);
    let mut out: Vec<String> = Vec::new();
    for name in names {
        let differs = |runs: &Vec<&Record>| runs.iter().any(|run| field(run, name) != field(runs[0], name));
        if !out.iter().any(|known| known == name) && recipes.values().any(differs) {
            out.push(name.into());
        }
    }
    out
}

/// Labels each run by the values of the params that differ, as in `lr=0.1 seed=2`. An empty text stands for a run that they do not
/// tell from another one.
pub fn labels(records: &[&Record]) -> Vec<String> {
    let names = varying(records);
    let label = |record: &&Record| {
        let parts = names.iter().filter_map(|name| Some(format!("{name}={}", value(record, name)?)));
        parts.collect::<Vec<_>>().join(" ")
    };
    let all: Vec<String> = records.iter().map(label).collect();
    let is_unique = |label: &String| all.iter().filter(|other| *other == label).count() == 1;
    all.iter().map(|label| if is_unique(label) { label.clone() } else { String::new() }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn run(recipe: &str, params: Value, seed: u64) -> Record {
        let v = json!({ "recipe": recipe, "params": params, "seed": seed, "device": "cpu" });
        v.as_object().expect("an object").clone()
    }

    #[test]
    fn params_differ_within_a_recipe() {
        let a = run("one", json!({ "lr": 0.1, "width": 4, "name": "x" }), 1);
        let b = run("one", json!({ "lr": 0.2, "width": 4, "name": "x" }), 1);
        let c = run("two", json!({ "lr": 0.1, "depth": 9 }), 7);
        assert_eq!(varying(&[&a, &b, &c]), ["lr"]);
        assert_eq!(labels(&[&a, &b, &c]), ["", "lr=0.2", ""], "a and c have the same label");
        assert!(varying(&[&a, &c]).is_empty() && varying(&[]).is_empty());
        assert_eq!(labels(&[&a]), [""]);
        // A param that an edit added, and an option that is no param.
        let d = run("one", json!({ "lr": 0.1, "width": 4, "name": "x", "drop": 0.5 }), 2);
        assert_eq!(varying(&[&a, &d]), ["drop", "seed"]);
        assert_eq!(labels(&[&a, &d]), ["seed=1", "drop=0.5 seed=2"]);
        assert_eq!(value(&a, "name").as_deref(), Some("x"));
        let damaged = Record::new();
        assert_eq!(varying(&[&a, &damaged, &b]), ["lr"]);
    }
}
