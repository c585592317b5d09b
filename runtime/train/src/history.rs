//! Records the version history of a run: every version of the recipe that was applied or refused, every return to an
//! earlier one, every resume.
//!
//! `ledger.jsonl` has one line for each; the files of an applied version are in `recipe@STEP/`. Together with the start in
//! `run.json` and `recipe/` they define for a replay which version ran from which step on.

use crate::error::{Error, Result};
use crate::params::{self, Params};
use crate::run_files::text_in;
use crate::run_log::{self, LEDGER};
use crate::rundir::{RECIPE, RunDir, write_version};
use perilune_checkpoint::seal::LINE_SEAL;
use perilune_lua::Run;
use perilune_policy::Directory;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// The files of a version with their texts, the recipe itself first.
pub type Files = Vec<(PathBuf, String)>;

/// Returns the directory of a path; `.` for a bare file name.
pub fn dir_of(path: &Path) -> PathBuf {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_path_buf()
}

/// The outcome of a version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Change {
    /// An edit, or the return to the version before one. `from_trial`: the States of before the trial were still in memory.
    /// `owed`: the evaluation that was due after the step had not been done.
    Applied { from_trial: bool, owed: bool },
    /// It was refused or reverted; with a step, the steps after that one are void.
    Refused { back_to: Option<u64> },
    /// The run continued from the checkpoint of this step; the steps after it are void.
    Resumed,
}

/// One line of the history.
pub(crate) struct HistoryEntry<'a> {
    pub step: u64,
    pub kind: Change,
    pub changed: &'a [String],
    /// The version that ran before, and this one.
    pub before: &'a Files,
    pub files: &'a Files,
    /// The number of States that were kept, for display.
    pub states: Option<String>,
    pub error: Option<&'a str>,
    /// The run that continues with it, and its params.
    pub run: Option<(&'a Run, &'a Params)>,
    pub device: Option<&'a str>,
}

impl<'a> HistoryEntry<'a> {
    /// Returns the entry of an applied version; the caller sets the other fields.
    pub fn new(files: &'a Files) -> HistoryEntry<'a> {
        let (step, kind, changed) = (0, Change::Applied { from_trial: false, owed: false }, &[] as &[String]);
        HistoryEntry { step, kind, changed, before: files, files, states: None, error: None, run: None, device: None }
    }
}

/// Finds the lines that differ between two texts: the index where they begin in both, the old lines, the new ones.
fn difference<'a>(old: &'a str, new: &'a str) -> Option<(usize, Vec<&'a str>, Vec<&'a str>)> {
    let (a, b): (Vec<&str>, Vec<&str>) = (old.lines().collect(), new.lines().collect());
    let same = a.iter().zip(&b).take_while(|(x, y)| x == y).count();
    if same == a.len() && same == b.len() {
        return None;
    }
    let rest = a.len().min(b.len()) - same;
    let tail = a.iter().rev().zip(b.iter().rev()).take(rest).take_while(|(x, y)| x == y).count();
    Some((same, a[same..a.len() - tail].to_vec(), b[same..b.len() - tail].to_vec()))
}

/// Lists the changed lines of each file that differs, as in `recipe.lua:12` or `recipe.lua:12-14`, by lines of the new text.
pub fn places(before: &Files, files: &Files) -> Vec<String> {
    let mut out = Vec::new();
    for (path, text) in files {
        let was = before.iter().find(|(p, _)| p == path).map_or("", |(_, t)| t);
        if let Some((at, _, new)) = difference(was, text) {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let (first, last) = (at + 1, at + new.len().max(1));
            out.push(if first == last { format!("{name}:{first}") } else { format!("{name}:{first}-{last}") });
        }
    }
    out
}

/// Returns the differences as `-` and `+` lines, for the history.
fn diff(before: &Files, files: &Files, inside: impl Fn(&Path) -> String) -> Vec<Value> {
    let of = |path: &PathBuf, text: &str| {
        let was = before.iter().find(|(p, _)| p == path).map_or("", |(_, t)| t);
        let (at, old, new) = difference(was, text)?;
        let minus = old.iter().map(|l| format!("-{l}"));
        let lines: Vec<String> = minus.chain(new.iter().map(|l| format!("+{l}"))).collect();
        Some(json!({ "path": inside(path), "line": at + 1, "lines": lines }))
    };
    // A file that this version no longer requires has no lines left.
    let gone = before.iter().filter(|(path, _)| !files.iter().any(|f| f.0 == *path));
    let gone = gone.filter_map(|(path, _)| of(path, ""));
    files.iter().filter_map(|(path, text)| of(path, text)).chain(gone).collect()
}

/// Returns names and hashes of files, as `run.json` and the history list them.
pub fn hashes(files: &Files, home: &Path) -> Value {
    let one = |(path, text): &(PathBuf, String)| {
        let inside = path.strip_prefix(home).unwrap_or(path).display().to_string();
        json!({ "path": inside, "blake3": blake3::hash(text.as_bytes()).to_hex().as_str() })
    };
    files.iter().map(one).collect()
}

/// Returns a free folder name for the files of a version: `recipe@57`, `recipe@57-2`.
fn folder(dir: &Directory, step: u64) -> Result<String> {
    for k in 1.. {
        let name = if k == 1 { format!("recipe@{step}") } else { format!("recipe@{step}-{k}") };
        if !dir.has(&name)? {
            return Ok(name);
        }
    }
    Err(Error::System(format!("cannot find a free name for recipe@{step}")))
}

/// Appends a line to the history of a run, and stores the files of an applied version.
pub(crate) fn record(dir: &mut RunDir, e: &HistoryEntry<'_>) -> Result<()> {
    let home = dir_of(&e.files.first().map(|f| f.0.clone()).unwrap_or_default());
    let inside = |p: &Path| p.strip_prefix(&home).unwrap_or(p).display().to_string();
    let ok = !matches!(e.kind, Change::Refused { .. });
    let mut line = Map::new();
    let mut put = |key: &str, value: Value| line.insert(key.into(), value);
    put("step", e.step.into());
    put("time", crate::run_files::now().into());
    put("ok", ok.into());
    put("changed", e.changed.into());
    put("diff", diff(e.before, e.files, inside).into());
    put("error", e.error.into());
    match e.kind {
        Change::Refused { back_to: Some(n) } => put("back_to", n.into()),
        Change::Resumed => put("resumed", true.into()),
        Change::Applied { from_trial, owed } => {
            for (key, _) in [("from_trial", from_trial), ("owed", owed)].iter().filter(|f| f.1) {
                put(key, true.into());
            }
            None
        }
        _ => None,
    };
    if let Some(text) = &e.states {
        put("states", text.as_str().into());
    }
    if let Some((run, params)) = e.run {
        put("params", params::to_json(params));
        put("steps", run.steps().into());
        put("seed", run.seed().into());
        put("precision", run.precision().into());
    }
    if let Some(device) = e.device {
        put("device", device.into());
    }
    put("files", hashes(e.files, &home));
    if ok {
        let name = folder(dir.handle(), e.step)?;
        let files: Files = e.files.iter().map(|(path, text)| (inside(path).into(), text.clone())).collect();
        write_version(dir.handle(), &name, &files)?;
        put("dir", name.into());
    }
    dir.append_history(&Value::Object(line))
}

/// A version that ran from a step on.
#[derive(Clone, PartialEq, Debug)]
pub struct Version {
    /// The step that it was applied after.
    pub since: u64,
    pub files: Files,
    /// The run was resumed here: States that edits had dropped were gone.
    pub resumed: bool,
    /// The return from a version on trial; and before the evaluation of the step.
    pub from_trial: bool,
    pub owed: bool,
    /// As recorded, where the history has them.
    pub params: Option<Map<String, Value>>,
    pub steps: Option<u64>,
    pub seed: Option<i64>,
    pub precision: Option<String>,
}

impl Version {
    /// Returns a version of these files that starts as the run did.
    pub fn of(files: Files) -> Version {
        Version {
            since: 0,
            files,
            resumed: false,
            from_trial: false,
            owed: false,
            params: None,
            steps: None,
            seed: None,
            precision: None,
        }
    }
}

/// The largest recipe file that is read, in bytes.
const MOST: u64 = 64 << 20;

/// Reads the listed files in `folder` of a run directory and checks their hashes. What a record names is opened beneath that
/// folder, and no link is followed.
fn files_below(dir: &Directory, folder: &str, listed: &Value, home: &Path) -> Result<Files> {
    let names =
        listed.as_array().into_iter().flatten().filter_map(|f| Some((f["path"].as_str()?, f["blake3"].as_str()?)));
    let mut out = Files::new();
    let inside = dir.subdirectory(folder)?;
    for (name, hash) in names {
        let at = inside.path().join(name);
        let text = text_in(&inside, Path::new(name), MOST)?;
        if blake3::hash(text.as_bytes()).to_hex().as_str() != hash {
            return Err(Error::Refused(format!("{}: is not the file that ran: its hash differs", at.display())));
        }
        out.push((home.join(name), text));
    }
    Ok(out)
}

/// Reads the files that a run began with, and the versions after them in the order in which they ran.
pub fn read(dir: &Path, record: &Map<String, Value>, recipe: &Path) -> Result<(Files, Vec<Version>)> {
    let home = recipe.parent().map(Path::to_path_buf).unwrap_or_default();
    let inside = &Directory::open(dir)?;
    let files = first_files(inside, record, &home)?;
    let device = record.get("device").and_then(Value::as_str);
    let applied = applied(inside, record, device)?;
    let versions = applied.into_iter().map(|entry| version(inside, entry, &home)).collect::<Result<_>>()?;
    Ok((files, versions))
}

/// Whether a version that was applied after step `since` ran when the checkpoint of `step` was taken. One that was `owed` the
/// evaluation of its step took over before it, and so before the checkpoint.
pub(crate) fn is_of_step(since: u64, owed: bool, step: u64) -> bool {
    since < step || (since == step && owed)
}

/// Reads the version of a run that took a step: the one whose States its checkpoint has. File names are relative to `home`.
pub(crate) fn version_at(inside: &Directory, record: &Map<String, Value>, home: &Path, step: u64) -> Result<Version> {
    match applied(inside, record, None)?.into_iter().rfind(|v| is_of_step(v.0, v.1["owed"] == true, step)) {
        Some(entry) => version(inside, entry, home),
        None => Ok(Version::of(first_files(inside, record, home)?)),
    }
}

/// Reads the history as it was when a checkpoint of `step` recorded its last seal, `head`: the lines of the log, and for every version
/// that ran until then the folder of its files and the files by their paths in it. Without a seal the steps of the lines decide.
pub(crate) fn until(
    inside: &Directory,
    record: &Map<String, Value>,
    head: Option<&str>,
    step: u64,
) -> Result<(Vec<String>, Vec<(String, Files)>)> {
    let ledger = run_log::text(inside, LEDGER)?;
    run_log::verify(inside.path(), LEDGER, &ledger, record, run_log::stood(record, LEDGER))?;
    let lines: Vec<&str> = run_log::complete(&ledger).collect();
    let entry = |line: &str| serde_json::from_str::<Value>(line).unwrap_or_default();
    let kept = match head {
        Some(head) => lines.iter().rposition(|line| entry(line)[LINE_SEAL] == head).map_or(0, |k| k + 1),
        None => lines.iter().take_while(|line| entry(line)["step"].as_u64().is_some_and(|at| at <= step)).count(),
    };
    let lines: Vec<String> = lines[..kept].iter().map(|line| (*line).to_string()).collect();
    let home = Path::new("");
    let mut versions = vec![(RECIPE.to_string(), first_files(inside, record, home)?)];
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    for entry in entries(inside.path(), &text, None)? {
        versions.push((folder_of(inside, &entry)?, version(inside, entry, home)?.files));
    }
    Ok((lines, versions))
}

fn first_files(inside: &Directory, record: &Map<String, Value>, home: &Path) -> Result<Files> {
    files_below(inside, RECIPE, record.get("files").unwrap_or(&Value::Null), home)
}

/// Reads the entries of the versions that ran, with the steps that they were applied after. With a device, a run that went to
/// another one is an error.
fn applied(inside: &Directory, record: &Map<String, Value>, device: Option<&str>) -> Result<Vec<(u64, Value)>> {
    let ledger = run_log::text(inside, LEDGER)?;
    run_log::verify(inside.path(), LEDGER, &ledger, record, run_log::stood(record, LEDGER))?;
    entries(inside.path(), &ledger, device)
}

/// Parses the text of a history, whose seals have been checked.
fn entries(dir: &Path, ledger: &str, device: Option<&str>) -> Result<Vec<(u64, Value)>> {
    let at = dir.join(LEDGER);
    let mut applied: Vec<(u64, Value)> = Vec::new();
    let lines: Vec<&str> = ledger.lines().collect();
    for (k, line) in lines.iter().enumerate() {
        let entry: Value = serde_json::from_str(line).unwrap_or_default();
        let (Some(step), Some(ok)) = (entry["step"].as_u64(), entry["ok"].as_bool()) else {
            // The last line may be incomplete: its process may have been killed.
            if k + 1 == lines.len() && !ledger.ends_with('\n') {
                break;
            }
            return Err(Error::Refused(format!("{}: is not a ledger entry: {line}", at.display())));
        };
        if let Some(now) = entry["device"].as_str()
            && let Some(was) = device
            && now != was
        {
            let dir = dir.display();
            return Err(Error::Usage(format!(
                "{dir}: the run went from {was} to {now} at step {step}; only a run on one device can be repeated"
            )));
        }
        if !ok {
            // The run returned to the step of the last edit.
            if entry["back_to"].is_u64() {
                applied.pop();
            }
            continue;
        }
        // A resume makes void what came after its checkpoint. Older histories store one folder a step: the last version.
        let resumed = entry["resumed"] == true;
        applied.retain(|v| v.0 < step || (v.0 == step && !resumed && v.1["dir"].is_string()));
        applied.push((step, entry));
    }
    Ok(applied)
}

/// Returns the folder with the files of an entry.
fn folder_of(inside: &Directory, (since, e): &(u64, Value)) -> Result<String> {
    let folder = e["dir"].as_str().map_or_else(|| format!("recipe@{since}"), String::from);
    if folder.contains(['/', '\\']) || folder.starts_with('.') {
        let at = inside.path().join(LEDGER);
        return Err(Error::Refused(format!("{}: dir: is not a folder of the run: {folder}", at.display())));
    }
    Ok(folder)
}

/// Reads the files of an entry.
fn version(inside: &Directory, entry: (u64, Value), home: &Path) -> Result<Version> {
    let folder = folder_of(inside, &entry)?;
    let (since, e) = entry;
    Ok(Version {
        since,
        files: files_below(inside, &folder, &e["files"], home)?,
        resumed: e["resumed"] == true,
        from_trial: e["from_trial"] == true,
        owed: e["owed"] == true,
        params: e["params"].as_object().cloned(),
        steps: e["steps"].as_u64(),
        seed: e["seed"].as_i64(),
        precision: e["precision"].as_str().map(String::from),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_lines() {
        let lines = |a, b| {
            let at = |text: &str| vec![(PathBuf::from("x"), text.to_string())];
            places(&at(a), &at(b)).pop()
        };
        assert_eq!(lines("a\nb\nc", "a\nb\nc"), None);
        assert_eq!(lines("a\nb\nc", "a\nx\nc").as_deref(), Some("x:2"));
        assert_eq!(lines("a\nb\nc", "a\nx\ny\nc").as_deref(), Some("x:2-3"));
        assert_eq!(lines("a\nb\nc", "a\nc").as_deref(), Some("x:2"));
        assert_eq!(lines("", "a").as_deref(), Some("x:1"));
        assert_eq!(lines("a\na\na", "a\na").as_deref(), Some("x:3"));
        assert_eq!(difference("a\nb\nc", "a\nx\nc"), Some((1, vec!["b"], vec!["x"])));
    }

    /// A diff includes files that were added or removed.
    #[test]
    fn changed_files() {
        let files =
            |list: &[(&str, &str)]| list.iter().map(|(p, t)| (PathBuf::from(p), t.to_string())).collect::<Files>();
        let (before, after) = (files(&[("a", "1\n2"), ("b", "3")]), files(&[("a", "1\n4"), ("c", "5")]));
        let said = diff(&before, &after, |p| p.display().to_string());
        let said: Vec<String> = said.iter().map(|d| format!("{}:{} {}", d["path"], d["line"], d["lines"])).collect();
        assert_eq!(said, [r#""a":2 ["-2","+4"]"#, r#""c":1 ["+5"]"#, r#""b":1 ["-3"]"#]);
    }

    /// Later lines make earlier ones void: another version at the same step, a return, a resume.
    #[test]
    fn what_ran_from_which_step() {
        let dir = tempfile::tempdir().expect("a directory");
        let put = |at: &str, text: &str| {
            let at = dir.path().join(at);
            std::fs::create_dir_all(at.parent().expect("a parent")).expect("made");
            std::fs::write(at, text).expect("written");
        };
        let file = |text: &str| json!([{ "path": "a.lua", "blake3": blake3::hash(text.as_bytes()).to_hex().as_str() }]);
        put("recipe/a.lua", "one");
        let record = json!({ "files": file("one"), "steps_done": 9, "weights": "w", "device": "cpu" });
        let record = record.as_object().expect("an object").clone();
        let recipe = Path::new("here/a.lua");
        let versions = |lines: &[Value]| {
            let lines: Vec<String> = lines.iter().map(Value::to_string).collect();
            put("ledger.jsonl", &lines.join("\n"));
            let (files, versions) = read(dir.path(), &record, recipe)?;
            assert_eq!(files, [(recipe.to_path_buf(), "one".to_string())]);
            Ok(versions.into_iter().map(|v| (v.since, v.files[0].1.clone(), v.resumed)).collect::<Vec<_>>())
        };
        let entry = |step: u64, text: &str| json!({ "step": step, "ok": true, "files": file(text) });
        put("recipe@7/a.lua", "three");
        let bad = json!({ "step": 7, "ok": false, "files": file("bad") });
        let two = [entry(7, "two"), bad, entry(7, "three")];
        assert_eq!(versions(&two).map_err(|e: Error| e.to_string()), Ok(vec![(7, "three".into(), false)]));
        put("recipe@9/a.lua", "four");
        let back = json!({ "step": 12, "ok": false, "back_to": 9, "files": file("four") });
        let gone = [entry(7, "three"), entry(9, "four"), back]; // the last one is void
        assert_eq!(versions(&gone).map_err(|e| e.to_string()), Ok(vec![(7, "three".into(), false)]));
        put("recipe@8/a.lua", "two");
        let resumed = json!({ "step": 8, "ok": true, "resumed": true, "dir": "recipe@8", "files": file("two") });
        let twice = [entry(7, "three"), entry(9, "four"), resumed];
        let said = vec![(7, "three".into(), false), (8, "two".into(), true)];
        assert_eq!(versions(&twice).map_err(|e| e.to_string()), Ok(said));
        let fails = |lines: &[Value], text: &str| {
            let e = versions(lines).expect_err("refused").to_string();
            assert!(e.contains(text), "{e}");
        };
        fails(&[json!({ "step": 8, "ok": true, "device": "cuda:0", "files": [] })], "from cpu to cuda:0 at step 8");
        fails(&[json!({ "step": 8, "ok": true, "dir": "../x", "files": [] })], "is not a folder of the run");
        put("recipe@7/a.lua", "other");
        fails(&two, "recipe@7/a.lua: is not the file that ran");
    }
}
