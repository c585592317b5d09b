//! Writes a run to a file store of MLflow, the folder that `mlflow ui` and MLflow's clients read (`--mlflow DIR`).
//!
//! ```text
//! DIR/EXPERIMENT/meta.yaml         the experiment, named after the recipe
//! DIR/EXPERIMENT/RUN/meta.yaml     name, status, times in milliseconds
//! DIR/EXPERIMENT/RUN/params/NAME   a param
//! DIR/EXPERIMENT/RUN/metrics/NAME  a metric: lines "time value step"
//! DIR/EXPERIMENT/RUN/tags/NAME     a tag
//! DIR/EXPERIMENT/RUN/artifacts/    empty: what a run makes is in its own directory, which a tag names
//! ```
//!
//! The layout is that of `mlflow.store.tracking.file_store` (MLflow 2 and 3). A resumed run continues its MLflow run; metrics of steps
//! behind its checkpoint are removed from it.

use crate::error::{Error, Result, disk};
use crate::run_files::{now, text_in};
use perilune_policy::Directory;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

/// The field of `run.json` with the folder of the store, the experiment and the run.
pub(crate) const MLFLOW: &str = "mlflow";

/// The most characters of a param, by MLflow's rule.
const MAX_PARAM: usize = 6000;
/// The size limit of a metric's file.
const MAX_METRIC: u64 = 1 << 30;

/// `mlflow.entities.RunStatus`.
const RUNNING: u8 = 1;
const FINISHED: u8 = 3;
const FAILED: u8 = 4;
const KILLED: u8 = 5;

/// The MLflow run of a run.
pub(crate) struct Mlflow {
    dir: Directory,
    experiment: String,
    id: String,
    name: String,
    started: u64,
    /// Lines that have not been written, by metric.
    pending: BTreeMap<String, String>,
    flushed: Instant,
    /// The metrics that have a file, and those that cannot have one.
    names: BTreeSet<String>,
    refused: BTreeSet<String>,
}

/// Values are written at least this often, for readers that follow the run.
const FLUSH: Duration = Duration::from_secs(1);

fn milliseconds() -> u64 {
    (now() * 1e3) as u64
}

/// Quotes a string for YAML, which includes JSON.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// Returns the path of a named value: folders by `/`, and no other folder than those beneath.
fn inside(name: &str) -> PathBuf {
    let parts = Path::new(name).components().map(|c| match c {
        Component::Normal(part) => part.to_string_lossy().into_owned(),
        _ => "_".into(),
    });
    parts.collect()
}

/// Returns a param as MLflow shows it: a text without quotes.
fn shown(value: &Value) -> String {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_string);
    text.chars().take(MAX_PARAM).collect()
}

/// Opens the folder `path` beneath `dir`, and makes it if it is not there.
fn folder(dir: &Directory, path: &Path) -> Result<Directory> {
    Ok(dir.make_directories(path)?)
}

/// Splits a path into its folder and its name.
fn split(path: &Path) -> (&Path, String) {
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    (path.parent().unwrap_or(Path::new("")), name)
}

fn put(dir: &Directory, path: &Path, text: &str) -> Result<()> {
    let (above, name) = split(path);
    Ok(folder(dir, above)?.replace(&name, text.as_bytes())?)
}

impl Mlflow {
    /// Creates the MLflow run of a run with this `run.json`, or continues the one that it names from `step` on. A branch begins one of its
    /// own.
    pub fn open(
        store: &Path,
        record: &Map<String, Value>,
        run_dir: &Path,
        (step, branch): (u64, bool),
    ) -> Result<Mlflow> {
        let top = open_store(store)?;
        let text = |key: &str| record.get(key).and_then(Value::as_str).unwrap_or_default().to_string();
        let known = record.get(MLFLOW).filter(|known| known["store"].as_str() == store.to_str() && !branch);
        let recipe = text("recipe");
        let (experiment, id, started) = match known {
            Some(known) => {
                let field = |key: &str| known[key].as_str().unwrap_or_default().to_string();
                (field("experiment"), field("run"), known["started"].as_u64().unwrap_or_default())
            }
            None => (experiment(&top, store, &recipe)?, run_id(&text("id"), run_dir), milliseconds()),
        };
        if inside(&experiment).components().count() != 1 || inside(&id).components().count() != 1 {
            return Err(Error::Refused(format!("run.json: {MLFLOW}: {experiment}/{id} is no run of MLflow")));
        }
        let dir = folder(&top, &Path::new(&experiment).join(&id))?;
        let (_, name) = split(run_dir);
        let mut mlflow = Mlflow {
            dir,
            experiment,
            id,
            name,
            started,
            pending: BTreeMap::new(),
            flushed: Instant::now(),
            names: BTreeSet::new(),
            refused: BTreeSet::new(),
        };
        for part in ["params", "metrics", "tags", "artifacts"] {
            mlflow.dir.make_directory(part)?;
        }
        if known.is_some() {
            mlflow.forget_after(step)?;
            let top = mlflow.dir.path().join("metrics");
            for path in files_beneath(&top)? {
                mlflow.names.extend(path.strip_prefix(&top).ok().map(|inside| inside.display().to_string()));
            }
        }
        mlflow.write_meta(RUNNING, None)?;
        for (key, value) in record.get("params").and_then(Value::as_object).into_iter().flatten() {
            put(&mlflow.dir, &Path::new("params").join(inside(key)), &shown(value))?;
        }
        let tags = [
            ("mlflow.runName", mlflow.name.clone()),
            ("mlflow.user", user()),
            ("mlflow.source.name", text("path")),
            ("mlflow.source.type", "LOCAL".into()),
            ("mlflow.source.git.commit", text("commit")),
            ("perilune.run_dir", absolute(run_dir).display().to_string()),
            ("perilune.device", text("device_description")),
            ("perilune.seed", record.get("seed").map(Value::to_string).unwrap_or_default()),
        ];
        for (key, value) in tags.into_iter().filter(|(_, value)| !value.is_empty()) {
            put(&mlflow.dir, &Path::new("tags").join(key), &value)?;
        }
        Ok(mlflow)
    }

    /// Returns the field of `run.json` by which a resume finds the MLflow run.
    pub fn record(&self, store: &Path) -> Value {
        serde_json::json!({
            "store": store.display().to_string(), "experiment": self.experiment, "run": self.id, "started": self.started,
        })
    }

    /// Adds values of a step; they are written within about a second, and by `flush`. Returns the names that are left out from now on: a
    /// metric is a file, so `loss` and `loss/x` cannot both be one.
    pub fn metrics<'a>(&mut self, step: u64, values: impl Iterator<Item = (&'a str, f64)>) -> Result<Vec<String>> {
        let (time, mut left_out) = (milliseconds(), Vec::new());
        for (name, v) in values {
            if !self.can_store(name) {
                if self.refused.insert(name.to_string()) {
                    left_out.push(name.to_string());
                }
                continue;
            }
            let lines = self.pending.entry(name.to_string()).or_default();
            // As Python reads them: nan, inf.
            let _ = writeln!(lines, "{time} {} {step}", v.to_string().to_lowercase());
        }
        if self.flushed.elapsed() > FLUSH {
            self.flush()?;
        }
        Ok(left_out)
    }

    /// Whether a metric can have a file beside those that have one, and notes it.
    fn can_store(&mut self, name: &str) -> bool {
        if self.names.contains(name) {
            return true;
        }
        let is_below = |a: &str, b: &str| a.strip_prefix(b).is_some_and(|rest| rest.starts_with('/'));
        if self.names.iter().any(|known| is_below(known, name) || is_below(name, known)) {
            return false;
        }
        self.names.insert(name.to_string())
    }

    /// Writes the values added so far.
    pub fn flush(&mut self) -> Result<()> {
        self.flushed = Instant::now();
        for (name, lines) in std::mem::take(&mut self.pending) {
            let path = Path::new("metrics").join(inside(&name));
            let (above, file) = split(&path);
            let above = folder(&self.dir, above)?;
            let written = above.append(&file)?.write_all(lines.as_bytes());
            written.map_err(disk("write to", &above.path().join(&file)))?;
        }
        Ok(())
    }

    /// Records the end of the run: `done`, `interrupted` or `failed`.
    pub fn finish(&mut self, status: &str) -> Result<()> {
        self.flush()?;
        let status = match status {
            "done" => FINISHED,
            "interrupted" => KILLED,
            _ => FAILED,
        };
        self.write_meta(status, Some(milliseconds()))
    }

    /// Removes the metrics of steps after `step`.
    pub fn forget_after(&mut self, step: u64) -> Result<()> {
        self.flush()?;
        let metrics = self.dir.make_directory("metrics")?;
        for path in files_beneath(metrics.path())? {
            let Ok(inside) = path.strip_prefix(metrics.path()) else { continue };
            let text = text_in(&metrics, inside, MAX_METRIC)?;
            let stays =
                |line: &&str| line.rsplit(' ').next().and_then(|s| s.parse::<u64>().ok()).is_some_and(|s| s <= step);
            let kept: String = text.lines().filter(stays).flat_map(|line| [line, "\n"]).collect();
            if kept.len() < text.len() {
                put(&metrics, inside, &kept)?;
            }
        }
        Ok(())
    }

    fn write_meta(&self, status: u8, end: Option<u64>) -> Result<()> {
        let Mlflow { experiment, id, name, started, .. } = self;
        let artifacts = uri(&self.dir.path().join("artifacts"));
        let end = end.map_or("null".into(), |t| t.to_string());
        let text = format!(
            "artifact_uri: {}\nend_time: {end}\nentry_point_name: ''\nexperiment_id: '{experiment}'\nlifecycle_stage: active\n\
             run_id: {id}\nrun_name: {}\nrun_uuid: {id}\nsource_name: ''\nsource_type: 4\nsource_version: ''\n\
             start_time: {started}\nstatus: {status}\ntags: []\nuser_id: {}\n",
            quoted(&artifacts),
            quoted(name),
            quoted(&user())
        );
        put(&self.dir, Path::new("meta.yaml"), &text)
    }
}

/// Opens the folder of a store, and makes it if it is not there.
pub(crate) fn open_store(store: &Path) -> Result<Directory> {
    if store.exists() && !store.is_dir() {
        let rule = "it is a file; give a folder, such as mlruns, which is made if it is not there";
        return Err(Error::Usage(format!("--mlflow {}: {rule}", store.display())));
    }
    std::fs::create_dir_all(store).map_err(disk("create", store))?;
    Ok(Directory::open(store)?)
}

/// Returns the id of the experiment named after the recipe, which is made if it is not there. The id follows from the name, so that two
/// runs that start at once make one experiment.
fn experiment(top: &Directory, store: &Path, name: &str) -> Result<String> {
    let hash = blake3::hash(name.as_bytes());
    let number = hash.as_bytes().iter().take(8).fold(0u64, |n, b| n << 8 | u64::from(*b));
    let id = format!("{:018}", number % 900_000_000_000_000_000 + 100_000_000_000_000_000);
    let dir = top.make_directory(&id)?;
    if !dir.has("meta.yaml")? {
        let time = milliseconds();
        let text = format!(
            "artifact_location: {}\ncreation_time: {time}\nexperiment_id: '{id}'\nlast_update_time: {time}\n\
             lifecycle_stage: active\nname: {}\n",
            quoted(&uri(&store.join(&id))),
            quoted(name)
        );
        put(&dir, Path::new("meta.yaml"), &text)?;
    }
    Ok(id)
}

/// Returns the id of an MLflow run. Runs that branch have the id of their origin in `run.json`, and a directory of their own.
fn run_id(id: &str, run_dir: &Path) -> String {
    blake3::hash(format!("{id} {}", absolute(run_dir).display()).as_bytes()).to_hex()[..32].to_string()
}

/// Lists the files beneath a folder.
fn files_beneath(top: &Path) -> Result<Vec<PathBuf>> {
    let (mut out, mut folders) = (Vec::new(), vec![top.to_path_buf()]);
    while let Some(dir) = folders.pop() {
        for entry in std::fs::read_dir(&dir).map_err(disk("read", &dir))? {
            let entry = entry.map_err(disk("read", &dir))?;
            let kind = entry.file_type().map_err(disk("read", &entry.path()))?;
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file() {
                out.push(entry.path());
            }
        }
    }
    Ok(out)
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf())
}

/// Returns the address of a local path. Characters that are not allowed in one are percent-encoded.
fn uri(path: &Path) -> String {
    let path = absolute(path);
    let mut out = String::from("file://");
    for b in path.to_string_lossy().bytes() {
        if b.is_ascii_alphanumeric() || b"/-._~".contains(&b) {
            out.push(char::from(b));
        } else {
            let _ = write!(out, "%{b:02X}");
        }
    }
    out
}

fn user() -> String {
    std::env::var("USER").or_else(|_| std::env::var("LOGNAME")).unwrap_or_else(|_| "unknown".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::fs;

    fn record(store: &Path) -> (Map<String, Value>, PathBuf) {
        let record = json!({ "recipe": "digits", "id": "ab12", "params": { "lr": 0.001, "net": "cnn" }, "seed": 1 });
        (record.as_object().cloned().unwrap_or_default(), store.join("runs/digits-1"))
    }

    #[test]
    fn metrics_behind_a_checkpoint_are_removed_on_resume() {
        let top = tempfile::tempdir().expect("a directory");
        let store = top.path().join("mlruns");
        let (mut about, run_dir) = record(top.path());
        let mut run = Mlflow::open(&store, &about, &run_dir, (0, false)).expect("created");
        for step in 1..=5 {
            run.metrics(step, [("loss", f64::NAN), ("valid/loss", step as f64)].into_iter()).expect("added");
        }
        run.finish("interrupted").expect("written");
        let dir = run.dir.path().to_path_buf();
        let steps = |name: &str| -> Vec<String> {
            let text = fs::read_to_string(dir.join("metrics").join(name)).expect("a metric");
            text.lines().map(|line| line.split(' ').skip(1).collect::<Vec<_>>().join(" ")).collect()
        };
        assert_eq!(steps("loss").first().map(String::as_str), Some("nan 1"));
        assert_eq!(steps("valid/loss").len(), 5);
        assert_eq!(fs::read_to_string(dir.join("params/net")).expect("a param"), "cnn");
        assert!(fs::read_to_string(dir.join("meta.yaml")).expect("meta").contains("status: 5"));

        about.insert(MLFLOW.into(), run.record(&store));
        let again = Mlflow::open(&store, &about, &run_dir, (3, false)).expect("continued");
        assert_eq!(again.id, run.id);
        assert_eq!(steps("valid/loss"), ["1 1", "2 2", "3 3"]);
        assert!(fs::read_to_string(dir.join("meta.yaml")).expect("meta").contains("status: 1"));
        let branch = Mlflow::open(&store, &about, &top.path().join("runs/digits-2"), (3, true)).expect("created");
        let mut again = again;
        let both = [("valid", 1.0), ("valid/loss/top", 1.0), ("valid/other", 1.0)];
        let left_out = again.metrics(4, both.into_iter()).expect("added");
        assert_eq!(left_out, ["valid", "valid/loss/top"]);
        assert!(again.metrics(5, both.into_iter()).expect("added").is_empty(), "they are named once");
        again.flush().expect("written");
        assert_eq!(steps("valid/other"), ["1 4", "1 5"]);
        assert!(branch.id != run.id && branch.experiment == run.experiment);
    }

    #[test]
    fn a_name_stays_inside_its_folder() {
        assert_eq!(inside("valid/loss"), Path::new("valid/loss"));
        assert_eq!(inside("../../x"), Path::new("_/_/x"));
        assert_eq!(inside("/etc/x"), Path::new("_/etc/x"));
    }
}
