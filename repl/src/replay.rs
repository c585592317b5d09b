//! `perilune replay`: a run once more, with the edits it had, from its record and its ledger.
//!
//! The command of `run.json` is given again, with the recipe's files as they were and each later version applied after the
//! step it was applied after then. The same device kind and version give the same bits.

use crate::checkpoints::record_of;
use crate::failure::{Failure, disk};
use crate::run::{self, RunArgs};
use crate::watch::Files;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

#[derive(clap::Args, Debug)]
pub struct ReplayArgs {
    /// The directory of the run to repeat
    run: PathBuf,
    /// Where results go; a new directory below runs/ by default
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Print events as JSON, one object a line
    #[arg(long)]
    json: bool,
    /// Print only results and what the recipe prints
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
}

/// What a run is made to do again.
#[derive(Clone, Debug)]
pub struct Script {
    /// The recipe's files at the start.
    pub files: Files,
    /// Later versions, each with the step it follows.
    pub versions: Vec<(u64, Files)>,
    /// Where the run ended.
    pub steps: u64,
    /// The hash of its States there.
    pub weights: Option<String>,
}

impl Script {
    /// The recipe itself.
    pub fn text(&self) -> Result<&str, Failure> {
        let first = self.files.first().map(|f| f.1.as_str());
        first.ok_or_else(|| Failure::Refused("run.json: files: is empty".into()))
    }
}

fn files_below(dir: &Path, listed: &Value, home: &Path) -> Result<Files, Failure> {
    let names =
        listed.as_array().into_iter().flatten().filter_map(|f| Some((f["path"].as_str()?, f["blake3"].as_str()?)));
    let mut out = Files::new();
    for (name, hash) in names {
        let at = dir.join(name);
        let text = std::fs::read_to_string(&at).map_err(disk("read", &at))?;
        if blake3::hash(text.as_bytes()).to_hex().as_str() != hash {
            return Err(Failure::Refused(format!("{}: is not the file that ran: its hash is another", at.display())));
        }
        out.push((home.join(name), text));
    }
    Ok(out)
}

fn script(dir: &Path, record: &Map<String, Value>, recipe: &Path) -> Result<Script, Failure> {
    let home = recipe.parent().map(Path::to_path_buf).unwrap_or_default();
    let files = files_below(&dir.join("recipe"), record.get("files").unwrap_or(&Value::Null), &home)?;
    let at = dir.join("ledger.jsonl");
    let ledger = match std::fs::read_to_string(&at) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(e) => return Err(disk("read", &at)(e)),
    };
    let mut versions: Vec<(u64, Value)> = Vec::new();
    for line in ledger.lines() {
        let entry: Value = serde_json::from_str(line).unwrap_or_default();
        let (Some(step), Some(ok)) = (entry["step"].as_u64(), entry["ok"].as_bool()) else {
            return Err(Failure::Refused(format!("{}: is no ledger: {line}", at.display())));
        };
        if ok {
            // A version that another followed before a step was done never ran, and `recipe@STEP` holds the last one's files.
            versions.retain(|v| v.0 != step);
            versions.push((step, entry["files"].clone()));
        }
    }
    let read = |(step, files): (u64, Value)| {
        files_below(&dir.join(format!("recipe@{step}")), &files, &home).map(|files| (step, files))
    };
    let versions = versions.into_iter().map(read).collect::<Result<_, _>>()?;
    let steps = record.get("steps_done").and_then(Value::as_u64);
    let steps = steps.ok_or_else(|| {
        Failure::Usage(format!("{}: the run has not ended; only what has can be repeated", dir.display()))
    })?;
    let weights = record.get("weights").and_then(Value::as_str).map(String::from);
    Ok(Script { files, versions, steps, weights })
}

pub fn replay(args: ReplayArgs, parse: impl Fn(Vec<String>) -> Option<RunArgs>) -> Result<(), Failure> {
    let record = record_of(&args.run)?;
    let shown = args.run.display();
    if record.get("resumed").is_some() {
        return Err(Failure::Usage(format!(
            "{shown}: the run was stopped and resumed; a replay goes through from the start"
        )));
    }
    let words = record.get("command").and_then(Value::as_array).into_iter().flatten();
    let command = words.filter_map(|w| w.as_str().map(String::from)).collect();
    let mut again = parse(command)
        .ok_or_else(|| Failure::Refused(format!("{shown}/run.json: command: is no `perilune run` of this version")))?;
    let here = std::env::current_dir().map(|d| d.display().to_string()).unwrap_or_default();
    if let Some(was) = record.get("directory").and_then(Value::as_str)
        && was != here
    {
        crate::screen::complain("warning", &format!("the run was started in {was}: paths are taken from {here} now"));
    }
    again.again(args.run_dir, args.json, args.quiet);
    again.script = Some(script(&args.run, &record, again.recipe())?);
    run::run(again)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Two versions at one step: the first was followed by another before it did a step.
    #[test]
    fn of_two_versions_at_a_step_the_last_one_runs() {
        let dir = tempfile::tempdir().expect("a directory");
        let put = |at: &str, text: &str| {
            let at = dir.path().join(at);
            std::fs::create_dir_all(at.parent().expect("a parent")).expect("made");
            std::fs::write(at, text).expect("written");
        };
        let file = |text: &str| json!([{ "path": "a.lua", "blake3": blake3::hash(text.as_bytes()).to_hex().as_str() }]);
        let entry =
            |step: u64, text: &str, ok: bool| json!({ "step": step, "ok": ok, "files": file(text) }).to_string();
        put("recipe/a.lua", "one");
        put("recipe@7/a.lua", "three");
        let lines = [entry(7, "two", true), entry(7, "bad", false), entry(7, "three", true)];
        put("ledger.jsonl", &lines.join("\n"));
        let record = json!({ "files": file("one"), "steps_done": 9, "weights": "w" });
        let record = record.as_object().expect("an object").clone();
        let recipe = Path::new("here/a.lua");
        let s = script(dir.path(), &record, recipe).expect("a script");
        assert_eq!(s.files, [(recipe.to_path_buf(), "one".to_string())]);
        assert_eq!(s.versions, [(7, vec![(recipe.to_path_buf(), "three".to_string())])]);
        put("recipe@7/a.lua", "other");
        let e = script(dir.path(), &record, recipe).expect_err("refused").message();
        assert!(e.contains("recipe@7/a.lua: is not the file that ran"), "{e}");
        put("recipe@7/a.lua", "three");
        let e = script(dir.path(), &Map::new(), recipe).expect_err("refused").message();
        assert!(e.contains("the run has not ended"), "{e}");
    }
}
