//! `--watch`: a recipe that changes while it trains.
//!
//! A reload is a stop and a resume that never leaves the process: at a step boundary the new text makes a run of its own,
//! whose States take the old ones' values by path and shape, and which goes on from the same cursor and random numbers.
//! So it gives the bits that a checkpoint, an edit and `--resume` would give. The old run stays at hand, untouched, until
//! the new one has done some steps: an edit that cannot be loaded, or throws soon, changes nothing.

use crate::failure::{Failure, disk};
use crate::replay::Script;
use crate::source::Source;
use notify::{RecommendedWatcher, RecursiveMode, Watcher as _};
use perilune_lua::{ParamValue, Recipe, Run, Runtime};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Saves this close together count once.
const SETTLE: Duration = Duration::from_millis(200);
/// A new version that throws within so many steps is taken back.
pub const TRIAL: u64 = 3;

/// What a version of the recipe consists of: each file with its text.
pub type Files = Vec<(PathBuf, String)>;

pub struct Watch<'a> {
    runtime: &'a Runtime,
    path: PathBuf,
    seed: Option<i64>,
    precision: Option<String>,
    steps: Option<u32>,
    memory_budget: Option<usize>,
    /// The version that runs, and the one that was tried last.
    running: Files,
    tried: Files,
    watcher: RecommendedWatcher,
    watched: BTreeSet<PathBuf>,
    events: Receiver<()>,
    touched: Option<Instant>,
    /// In a replay: the versions to come, the next one last.
    script: Option<Vec<(u64, Files)>>,
}

/// A new version, built and at the old one's place.
pub struct Next {
    pub run: Run,
    pub params: Vec<(String, ParamValue)>,
    /// What changed, for people: params and lines.
    pub changed: Vec<String>,
    pub files: Files,
    pub begun: Instant,
}

fn dir_of(path: &Path) -> PathBuf {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_path_buf()
}

/// The lines that differ between two texts, from the first to the last, counted from 1 in the new one.
fn lines_changed(old: &str, new: &str) -> Option<(usize, usize)> {
    let (a, b): (Vec<&str>, Vec<&str>) = (old.lines().collect(), new.lines().collect());
    let same = a.iter().zip(&b).take_while(|(x, y)| x == y).count();
    if same == a.len() && same == b.len() {
        return None;
    }
    let rest = a.len().min(b.len()) - same;
    let tail = a.iter().rev().zip(b.iter().rev()).take(rest).take_while(|(x, y)| x == y).count();
    Some((same + 1, (b.len() - tail).max(same + 1)))
}

fn show(v: &ParamValue) -> String {
    crate::run::param(v)
}

impl<'a> Watch<'a> {
    pub fn new(
        runtime: &'a Runtime,
        source: &Source,
        seed: Option<i64>,
        precision: Option<String>,
        steps: Option<u32>,
        memory_budget: Option<usize>,
        script: Option<&Script>,
    ) -> Result<Watch<'a>, Failure> {
        let (send, events) = channel();
        let heard = move |event: notify::Result<notify::Event>| {
            // Reading a file is no change; anything else, a lost event too, is worth a look.
            if !event.is_ok_and(|e| e.kind.is_access()) {
                let _ = send.send(());
            }
        };
        let watcher = notify::recommended_watcher(heard)
            .map_err(|e| Failure::System(format!("--watch: cannot listen for changed files: {e}")))?;
        let path = source.path.clone();
        let mut watch = Watch {
            runtime,
            path,
            seed,
            precision,
            steps,
            memory_budget,
            running: Vec::new(),
            tried: Vec::new(),
            watcher,
            watched: BTreeSet::new(),
            events,
            touched: None,
            script: script.map(|s| s.versions.iter().rev().cloned().collect()),
        };
        if let Some(script) = script {
            watch.running = script.files.clone();
            return Ok(watch);
        }
        watch.running = watch.read();
        watch.tried = watch.running.clone();
        watch.listen()?;
        Ok(watch)
    }

    /// The recipe and what it required, as they are on the disk. A file that cannot be read counts as empty: loading says why.
    fn read(&self) -> Files {
        let mut paths = vec![self.path.clone()];
        paths.extend(self.runtime.required());
        let text = |p: &PathBuf| std::fs::read_to_string(p).unwrap_or_default();
        paths.iter().map(|p| (p.clone(), text(p))).collect()
    }

    /// Directories, not files: editors save by renaming, and a watch on a file ends with that.
    fn listen(&mut self) -> Result<(), Failure> {
        let dirs: BTreeSet<PathBuf> = self.running.iter().map(|(p, _)| dir_of(p)).collect();
        for dir in dirs {
            if self.watched.insert(dir.clone()) {
                let watched = self.watcher.watch(&dir, RecursiveMode::NonRecursive);
                watched.map_err(|e| Failure::System(format!("--watch: cannot watch {}: {e}", dir.display())))?;
            }
        }
        Ok(())
    }

    /// The files, if they differ from what was tried last and nobody has touched them for a moment. In a replay, the
    /// version that follows this step.
    pub fn changed(&mut self, at_once: bool, step: u64) -> Option<Files> {
        if let Some(script) = &mut self.script {
            return script.pop_if(|v| v.0 <= step).map(|v| v.1);
        }
        while self.events.try_recv().is_ok() {
            self.touched = Some(Instant::now());
        }
        if !at_once && self.touched.is_none_or(|t| t.elapsed() < SETTLE) {
            return None;
        }
        self.touched = None;
        let files = self.read();
        (files != self.tried).then_some(files)
    }

    /// Builds the version in `files` and puts it where `old` is. On an error `old` is as it was.
    pub fn load(&mut self, files: Files, old: &Run, before: &[(String, ParamValue)]) -> Result<Next, Failure> {
        let begun = Instant::now();
        self.tried = files.clone();
        let rng = old.rng();
        let result = self.build(&files, old);
        old.set_rng(rng);
        let (recipe, run) = result?;
        let params = recipe.params()?;
        let mut changed = Vec::new();
        for (name, value) in &params {
            match before.iter().find(|(n, _)| n == name) {
                Some((_, was)) if was == value => {}
                Some((_, was)) => changed.push(format!("{name} {} -> {}", show(was), show(value))),
                None => changed.push(format!("{name} {}", show(value))),
            }
        }
        changed
            .extend(before.iter().filter(|(n, _)| !params.iter().any(|p| p.0 == *n)).map(|(n, _)| format!("no {n}")));
        for (path, text) in &files {
            let was = self.running.iter().find(|(p, _)| p == path).map_or("", |(_, t)| t);
            if let Some((first, last)) = lines_changed(was, text) {
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                changed.push(if first == last { format!("{name}:{first}") } else { format!("{name}:{first}-{last}") });
            }
        }
        if self.script.is_some() {
            return Ok(Next { run, params, changed, files, begun });
        }
        // What it requires may be other files than before.
        let files = self.read();
        self.tried = files.clone();
        Ok(Next { run, params, changed, files, begun })
    }

    fn build(&self, files: &Files, old: &Run) -> Result<(Recipe, Run), Failure> {
        let source = match (&self.script, files.first()) {
            (Some(_), Some((_, text))) => {
                self.runtime.set_texts(files);
                Source { path: self.path.clone(), text: text.clone() }
            }
            _ => Source::read(&self.path)?,
        };
        let recipe = self.runtime.reload(&source.text, &format!("@{}", source.path.display()))?;
        if let Some(steps) = self.steps
            && !self.runtime.params().names.iter().any(|n| n == "steps")
        {
            recipe.set_steps(i64::from(steps))?;
        }
        let run = recipe.start(self.seed, self.precision.as_deref(), self.memory_budget)?;
        run.take_over(old)?;
        Ok((recipe, run))
    }

    /// From now on this version runs.
    pub fn accept(&mut self, files: Files) -> Result<(), Failure> {
        self.running = files;
        if self.script.is_some() { Ok(()) } else { self.listen() }
    }

    pub fn running(&self) -> Files {
        self.running.clone()
    }
}

/// An entry of the run's ledger: every version that was applied or refused, its files beside it.
pub fn record(dir: &Path, step: u64, changed: &[String], files: &Files, error: Option<&str>) -> Result<(), Failure> {
    let at = dir.join("ledger.jsonl");
    let root = dir_of(&files.first().map(|f| f.0.clone()).unwrap_or_default());
    let inside = |p: &Path| p.strip_prefix(&root).unwrap_or(p).to_path_buf();
    let hashes: Vec<Value> = files
        .iter()
        .map(|(p, text)| json!({ "path": inside(p).display().to_string(), "blake3": blake3::hash(text.as_bytes()).to_hex().as_str() }))
        .collect();
    let entry = json!({
        "step": step, "time": crate::rundir::now(), "ok": error.is_none(), "changed": changed, "error": error, "files": hashes,
    });
    if error.is_none() {
        for (path, text) in files {
            let to = dir.join(format!("recipe@{step}")).join(inside(path));
            let parent = dir_of(&to);
            std::fs::create_dir_all(&parent).map_err(disk("create", &parent))?;
            std::fs::write(&to, text).map_err(disk("write", &to))?;
        }
    }
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(&at).map_err(disk("write to", &at))?;
    writeln!(file, "{entry}").map_err(disk("write to", &at))
}

/// A version on trial, and the one to go back to.
pub struct Trial {
    pub old: Rc<Run>,
    pub old_params: Vec<(String, ParamValue)>,
    pub old_files: Files,
    pub files: Files,
    pub changed: Vec<String>,
    /// The step it was applied after.
    pub since: u64,
    pub begun: Instant,
    pub misses: u64,
    /// Whether new plans are reported, from its second step on.
    pub reported: bool,
    /// The random numbers at that step.
    pub rng: (u64, u32),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_lines() {
        assert_eq!(lines_changed("a\nb\nc", "a\nb\nc"), None);
        assert_eq!(lines_changed("a\nb\nc", "a\nx\nc"), Some((2, 2)));
        assert_eq!(lines_changed("a\nb\nc", "a\nx\ny\nc"), Some((2, 3)));
        assert_eq!(lines_changed("a\nb\nc", "a\nc"), Some((2, 2)));
        assert_eq!(lines_changed("", "a"), Some((1, 1)));
        assert_eq!(lines_changed("a\na\na", "a\na"), Some((3, 3)));
    }
}
