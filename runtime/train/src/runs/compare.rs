//! Compares two runs: params, environment, data, recipe text and metrics.

use super::measured::{self, Measurement};
use super::metrics::{At, Extent, Goal};
use super::summary::RunSummary;
use super::varying::value;
use crate::error::Result;
use crate::history::{self, Files};
use crate::numbers;
use perilune_policy::Directory;
use serde_json::{Map, Value, json};
use similar::TextDiff;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A value that two runs do not share; `None` where a run lacks it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Difference {
    pub name: String,
    pub values: [Option<String>; 2],
}

/// A file of the recipe that differs: its unified diff with three lines of context, without the two lines of file names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileDiff {
    pub path: PathBuf,
    pub lines: Vec<String>,
}

/// A metric of two runs: its last value and its best.
#[derive(Clone, PartialEq, Debug)]
pub struct MetricPair {
    pub goal: Goal,
    pub values: [Option<Extent>; 2],
}

impl MetricPair {
    /// Returns the best value of a run.
    pub fn best(&self, run: usize) -> Option<At> {
        self.values[run].and_then(|extent| extent.best(&self.goal))
    }
}

/// What differs between two runs, and the metrics of both.
#[derive(Clone, Debug)]
pub struct Comparison {
    pub runs: [RunSummary; 2],
    /// Params that differ, and how many are equal.
    pub params: Vec<Difference>,
    pub equal_params: usize,
    /// Release, device and options that differ.
    pub environment: Vec<Difference>,
    /// Data files that differ, and how many are equal.
    pub data: Vec<Difference>,
    pub equal_data: usize,
    /// The recipe and the files that it requires, as they ran last.
    pub code: Vec<FileDiff>,
    pub metrics: Vec<MetricPair>,
    /// What the runs have taken.
    pub measured: Vec<Measurement>,
}

/// Fields of `run.json` that describe the environment of a run.
const ENVIRONMENT: [&str; 14] = [
    "recipe",
    "seed",
    "steps",
    "precision",
    "device",
    "device_description",
    "threads",
    "mesh",
    "zero",
    "keys",
    "strict_shards",
    "parameters",
    "commit",
    "host",
];

/// Compares two runs. The metrics of their steps are read too.
///
/// # Errors
/// The text of a recipe in a run directory is damaged.
pub fn compare(mut a: RunSummary, mut b: RunSummary) -> Result<Comparison> {
    a.read_steps()?;
    b.read_steps()?;
    let (params, equal_params) = differences(&texts(&a.record, "params"), &texts(&b.record, "params"));
    let known: BTreeSet<&str> = params.iter().map(|d| d.name.as_str()).collect();
    let pair = |name: &str, of: &dyn Fn(&Map<String, Value>) -> Option<String>| Difference {
        name: name.into(),
        values: [of(&a.record), of(&b.record)],
    };
    let version =
        |key: &'static str| move |record: &Map<String, Value>| Some(record.get("versions")?[key].as_str()?.to_string());
    let mut environment = vec![pair("perilune", &version("perilune")), pair("lua", &version("lua"))];
    let is_param = |name: &str| {
        known.contains(name)
            || [&a, &b].iter().any(|run| run.record.get("params").is_some_and(|p| p.get(name).is_some()))
    };
    let options = ENVIRONMENT.iter().filter(|name| !is_param(name));
    environment.extend(options.map(|name| pair(name, &|record| text(record.get(*name)?))));
    environment.retain(|d| d.values[0] != d.values[1]);
    let (data, equal_data) = differences(&data(&a.record), &data(&b.record));
    let code = recipe_diff(&last_files(&a)?, &last_files(&b)?);
    let mut names: Vec<&String> = a.metrics.by_name.keys().chain(b.metrics.by_name.keys()).collect();
    names.sort();
    names.dedup();
    // The metrics of evaluations first, and of each group the loss.
    names.sort_by_key(|name| (!name.contains('/'), name.rsplit('/').next() != Some("loss")));
    let metric = |name: &String| {
        let record = if a.metric(name).is_some() { &a.record } else { &b.record };
        MetricPair { goal: Goal::of(name, record), values: [a.metric(name), b.metric(name)] }
    };
    let metrics = names.into_iter().map(metric).collect();
    let measured = measured::compare(&a.record, &b.record);
    Ok(Comparison { measured, params, equal_params, environment, data, equal_data, code, metrics, runs: [a, b] })
}

fn text(v: &Value) -> Option<String> {
    match v {
        Value::Null => None,
        Value::String(s) => Some(s.clone()),
        other => Some(other.to_string()),
    }
}

fn texts(record: &Map<String, Value>, key: &str) -> BTreeMap<String, String> {
    let object = record.get(key).and_then(Value::as_object);
    object.into_iter().flatten().filter_map(|(name, _)| Some((name.clone(), value(record, name)?))).collect()
}

/// Returns the data files of a run by path, each described by what identifies it.
fn data(record: &Map<String, Value>) -> BTreeMap<String, String> {
    let entries = record.get("data").and_then(Value::as_array).into_iter().flatten();
    let one = |entry: &Value| {
        let count = |key: &str, unit: &str| Some(format!("{} {unit}", entry[key].as_u64()?));
        let hash = entry["blake3"].as_str().map(|hash| format!("blake3 {}", hash.get(..16).unwrap_or(hash)));
        // Without a hash the time of modification has to do.
        let identity = hash.or_else(|| Some(format!("modified {}", entry["mtime_ns"].as_u64()?)));
        let parts = [count("files", "files"), count("bytes", "bytes"), identity];
        let text = parts.into_iter().flatten().collect::<Vec<_>>().join(", ");
        Some((entry["path"].as_str()?.to_string(), text))
    };
    entries.filter_map(one).collect()
}

/// Lists the names whose values differ, and counts those whose values are equal.
fn differences(a: &BTreeMap<String, String>, b: &BTreeMap<String, String>) -> (Vec<Difference>, usize) {
    let names: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    let total = names.len();
    let all = names
        .into_iter()
        .map(|name| Difference { name: name.clone(), values: [a.get(name).cloned(), b.get(name).cloned()] });
    let differ: Vec<Difference> = all.filter(|d| d.values[0] != d.values[1]).collect();
    let equal = total - differ.len();
    (differ, equal)
}

/// Returns the files of the version that ran last; none for a damaged run, whose record names none.
fn last_files(run: &RunSummary) -> Result<Files> {
    if run.record.is_empty() {
        return Ok(Files::new());
    }
    Ok(history::version_at(&Directory::open(&run.dir)?, &run.record, Path::new(""), u64::MAX)?.files)
}

/// The time after which a difference need no longer be the shortest: to find that takes the product of the lengths at worst.
const MAX_TIME: Duration = Duration::from_secs(5);

/// Compares the texts of two recipes: the recipe itself, whatever its names, then the files that it requires.
pub fn recipe_diff(a: &Files, b: &Files) -> Vec<FileDiff> {
    let mut out = Vec::new();
    let mut add = |path: &Path, old: &str, new: &str| {
        if old != new {
            let diff = TextDiff::configure().timeout(MAX_TIME).diff_lines(old, new);
            let text = diff.unified_diff().missing_newline_hint(false).to_string();
            out.push(FileDiff { path: path.to_path_buf(), lines: text.lines().map(String::from).collect() });
        }
    };
    if let (Some(first), Some(second)) = (a.first(), b.first()) {
        add(&second.0, &first.1, &second.1);
    }
    let (a, b) = (a.get(1..).unwrap_or_default(), b.get(1..).unwrap_or_default());
    let of = |files: &[(PathBuf, String)], path: &Path| files.iter().find(|f| f.0 == path).map(|f| f.1.clone());
    let paths: BTreeSet<&PathBuf> = a.iter().chain(b).map(|f| &f.0).collect();
    for path in paths {
        add(path, &of(a, path).unwrap_or_default(), &of(b, path).unwrap_or_default());
    }
    out
}

impl Comparison {
    /// Returns the event `compare` of `--json`.
    pub fn json(&self) -> Value {
        let runs = self.runs.each_ref().map(|run| run.json(run.goal().as_ref(), &[]));
        let list = |all: &[Difference]| -> Value {
            all.iter().map(|d| json!({ "name": d.name, "a": d.values[0], "b": d.values[1] })).collect()
        };
        let code: Value =
            self.code.iter().map(|f| json!({ "path": f.path.display().to_string(), "diff": f.lines })).collect();
        let metric = |pair: &MetricPair| {
            let of = |run: usize| {
                let at = |at: At| json!({ "step": at.step, "value": numbers::json(at.value) });
                pair.values[run].map(|extent| json!({ "last": at(extent.last), "best": pair.best(run).map(at) }))
            };
            json!({ "name": pair.goal.metric, "max": pair.goal.max, "a": of(0), "b": of(1) })
        };
        let metrics: Value = self.metrics.iter().map(metric).collect();
        let measured: Value = self.measured.iter().map(Measurement::json).collect();
        json!({
            "event": "compare", "measured": measured, "a": runs[0], "b": runs[1], "params": list(&self.params),
            "environment": list(&self.environment), "data": list(&self.data), "code": code, "metrics": metrics,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recipes_are_compared_by_their_place_and_modules_by_name() {
        let files =
            |list: &[(&str, &str)]| list.iter().map(|(p, t)| (PathBuf::from(p), t.to_string())).collect::<Files>();
        let lines: String = (0..20).map(|k| format!("line {k}\n")).collect();
        let a = files(&[("a.lua", &lines), ("same.lua", "x"), ("gone.lua", "1\n")]);
        let edited = lines.replace("line 2\n", "line two\n").replace("line 17\n", "");
        let b = files(&[("b.lua", &edited), ("same.lua", "x"), ("new.lua", "2\n")]);
        let found = recipe_diff(&a, &b);
        let names: Vec<_> = found.iter().map(|f| f.path.display().to_string()).collect();
        assert_eq!(names, ["b.lua", "gone.lua", "new.lua"]);
        let changed: Vec<&String> = found[0].lines.iter().filter(|l| !l.starts_with(' ')).collect();
        assert_eq!(changed, ["@@ -1,6 +1,6 @@", "-line 2", "+line two", "@@ -15,6 +15,5 @@", "-line 17"]);
        assert_eq!(found[1].lines, ["@@ -1 +0,0 @@", "-1"]);
        assert!(recipe_diff(&a, &a).is_empty());
    }

    #[test]
    fn data_is_identified_by_its_hash() {
        let record = |hash: &str| {
            let v =
                json!({ "data": [{ "path": "d.csv", "bytes": 10, "mtime_ns": 7, "blake3": hash }, { "omitted": 3 }] });
            v.as_object().expect("an object").clone()
        };
        let (a, b) = (data(&record("00112233445566778899")), data(&record("ff")));
        let (differ, equal) = differences(&a, &b);
        assert_eq!((differ.len(), equal), (1, 0));
        assert_eq!(differ[0].values[0].as_deref(), Some("10 bytes, blake3 0011223344556677"));
        assert_eq!(differences(&a, &a), (Vec::new(), 1));
    }
}
