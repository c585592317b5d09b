//! `--watch`: a recipe that changes while it trains.
//!
//! A reload is a stop and a resume that never leaves the process: at a step boundary the new text makes a run of its own,
//! whose States take the old ones' values by path and shape, and which goes on from the same cursor and random numbers.
//! So it gives the bits that a checkpoint, an edit and `--resume --edited` would give. Before the new run takes over, one of
//! its steps is recorded and not run. If that step needs machine code that takes long to make, the new run is dropped again,
//! the old one goes on while the code is made beside it, and then the new one is built a second time. This file finds new versions and builds them; `edits.rs` says which of them runs.

use crate::failure::Failure;
pub use crate::ledger::Files;
use crate::ledger::{self, Version, dir_of};
use crate::replay::Script;
use crate::source::Source;
use notify::{RecommendedWatcher, RecursiveMode, Watcher as _};
use perilune_lua::{Handover, Memory, ParamValue, Parked, Recipe, Run, Runtime, Taking};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Saves this close together count once.
const SETTLE: Duration = Duration::from_millis(200);
/// A new version that throws within so many steps is taken back at no cost: the one before is still in memory.
pub const TRIAL: u64 = 3;
/// Versions that can be gone back to.
const HISTORY: usize = 100;

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
    /// Versions that worked before this one, with their params; the last one last.
    history: Vec<(Files, Vec<(String, String)>)>,
    /// What an edit dropped since the last checkpoint.
    pub parked: Parked,
    /// A version that waits for its machine code.
    coming: Option<Coming>,
    /// None in a replay, which watches nothing.
    listener: Option<Listener>,
    /// In a replay: the versions to come, the next one last.
    script: Option<Vec<Version>>,
}

/// Who hears of changed files.
struct Listener {
    watcher: RecommendedWatcher,
    watched: BTreeSet<PathBuf>,
    events: Receiver<()>,
    touched: Option<Instant>,
}

/// A version whose machine code is being made, while the one before it goes on.
struct Coming {
    files: Files,
    work: JoinHandle<()>,
    /// How long the loop has stood still for it.
    stood: Duration,
}

/// A version to be tried.
pub struct Candidate {
    pub files: Files,
    /// Its machine code has been made; how long the loop has stood still for it.
    made: Option<Duration>,
    /// Of a replay: how it was started.
    version: Option<Version>,
}

impl Candidate {
    /// In a replay: the run went back from a version on trial here.
    pub fn is_from_trial(&self) -> bool {
        self.version.as_ref().is_some_and(|v| v.from_trial)
    }
}

/// A new version, built and at the old one's place.
pub struct Next {
    pub run: Run,
    pub params: Vec<(String, ParamValue)>,
    /// What changed, for people: params and lines.
    pub changed: Vec<String>,
    /// Which States it took.
    pub handover: Handover,
    pub files: Files,
    /// When the loop began to stand still for it, as if it had done so in one go.
    pub begun: Instant,
    /// What was loaded before it.
    pub memory: Memory,
}

/// What an attempt at a version comes to.
enum Built {
    Next(Box<Next>),
    /// Nothing has changed; the version lacks machine code, which is being made.
    Later(JoinHandle<()>),
}

/// A version as built, and its machine code where that is still to be made.
type Parts = (Recipe, Run, Handover, Option<JoinHandle<()>>);

/// `lr 0.01 -> 0.02` for each param that differs.
pub fn params_changed(before: &[(String, ParamValue)], after: &[(String, ParamValue)]) -> Vec<String> {
    let show = crate::run::param;
    let of = |list: &[(String, ParamValue)], name: &str| list.iter().find(|p| p.0 == name).map(|p| p.1.clone());
    let mut out = Vec::new();
    for (name, value) in after {
        match of(before, name) {
            Some(was) if was == *value => {}
            Some(was) => out.push(format!("{name} {} -> {}", show(&was), show(value))),
            None => out.push(format!("{name} {}", show(value))),
        }
    }
    out.extend(before.iter().filter(|(n, _)| of(after, n).is_none()).map(|(n, _)| format!("no {n}")));
    out
}

/// Reading a file is no change, and what else is written beside a recipe (a log, say, line by line) must not keep it from
/// settling. Any Lua file may be one that a version requires; a lost event may have been one of those.
fn is_worth_a_look(event: &notify::Event, recipe: &Option<OsString>) -> bool {
    let counts = |p: &PathBuf| p.extension().is_some_and(|e| e == "lua") || p.file_name() == recipe.as_deref();
    !event.kind.is_access() && (event.need_rescan() || event.paths.is_empty() || event.paths.iter().any(counts))
}

impl Listener {
    fn new(recipe: &Path) -> Result<Listener, Failure> {
        let (send, events) = channel();
        let recipe = recipe.file_name().map(|n| n.to_os_string());
        let heard = move |event: notify::Result<notify::Event>| {
            if event.map_or(true, |e| is_worth_a_look(&e, &recipe)) {
                let _ = send.send(());
            }
        };
        let watcher = notify::recommended_watcher(heard)
            .map_err(|e| Failure::System(format!("--watch: cannot listen for changed files: {e}")))?;
        Ok(Listener { watcher, watched: BTreeSet::new(), events, touched: None })
    }

    /// Directories, not files: editors save by renaming, and a watch on a file ends with that.
    fn listen(&mut self, files: &Files) -> Result<(), Failure> {
        let dirs: BTreeSet<PathBuf> = files.iter().map(|(p, _)| dir_of(p)).collect();
        for dir in dirs {
            if self.watched.insert(dir.clone()) {
                let watched = self.watcher.watch(&dir, RecursiveMode::NonRecursive);
                watched.map_err(|e| Failure::System(format!("--watch: cannot watch {}: {e}", dir.display())))?;
            }
        }
        Ok(())
    }

    /// Whether something was touched, and has been left alone for a moment since.
    fn settled(&mut self, at_once: bool) -> bool {
        while self.events.try_recv().is_ok() {
            self.touched = Some(Instant::now());
        }
        let settled = at_once || self.touched.is_some_and(|t| t.elapsed() >= SETTLE);
        if settled {
            self.touched = None;
        }
        settled
    }
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
        let mut watch = Watch {
            runtime,
            path: source.path.clone(),
            seed,
            precision,
            steps,
            memory_budget,
            running: Vec::new(),
            tried: Vec::new(),
            history: Vec::new(),
            parked: Parked::default(),
            coming: None,
            listener: None,
            script: script.map(|s| s.versions.iter().rev().cloned().collect()),
        };
        if let Some(script) = script {
            watch.running = script.files.clone();
            return Ok(watch);
        }
        let mut listener = Listener::new(&source.path)?;
        watch.running = watch.read();
        watch.tried = watch.running.clone();
        listener.listen(&watch.running)?;
        watch.listener = Some(listener);
        Ok(watch)
    }

    /// The recipe and what it required, as they are on the disk. A file that cannot be read is left out: loading says why.
    fn read(&self) -> Files {
        let mut paths = vec![self.path.clone()];
        paths.extend(self.runtime.required());
        let text = |p: &PathBuf| Some(std::fs::read_to_string(p).ok()?.trim_start_matches('\u{feff}').to_string());
        paths.into_iter().filter_map(|p| Some((p.clone(), text(&p)?))).collect()
    }

    /// The files, if they differ from what was tried last and nobody has touched them for a moment. In a replay, the
    /// version that follows this step.
    pub fn changed(&mut self, at_once: bool, step: u64) -> Option<Candidate> {
        if let Some(script) = &mut self.script {
            let version = script.pop_if(|v| v.since <= step)?;
            return Some(Candidate { files: version.files.clone(), made: None, version: Some(version) });
        }
        if self.listener.as_mut().is_some_and(|l| l.settled(at_once)) {
            let files = self.read();
            if files != self.tried {
                self.coming = None;
                return Some(Candidate { files, made: None, version: None });
            }
        }
        let made = self.coming.take_if(|c| c.work.is_finished())?;
        Some(Candidate { files: made.files, made: Some(made.stood), version: None })
    }

    /// In a replay: whether the next version takes over after this step, before its evaluation.
    pub fn owed(&self, step: u64) -> bool {
        let next = self.script.as_ref().and_then(|s| s.last());
        next.is_some_and(|v| v.owed && v.since <= step)
    }

    /// Whether versions come from a ledger, not from the disk.
    pub fn scripted(&self) -> bool {
        self.script.is_some()
    }

    /// Builds a version and puts it where `old` is. On an error `old` is as it was.
    pub fn load(&mut self, next: &Candidate, old: &Run, before: &[(String, ParamValue)]) -> Result<Next, Failure> {
        match self.try_load(next, old, before, false)? {
            Some(next) => Ok(next),
            None => Err(Failure::System("this is a bug: a version waits for nothing".into())),
        }
    }

    /// The same; but if the version lacks machine code, and has not waited for it yet, `None`: it is a candidate again when that
    /// is made.
    pub fn load_when_made(
        &mut self,
        next: &Candidate,
        old: &Run,
        before: &[(String, ParamValue)],
    ) -> Result<Option<Next>, Failure> {
        self.try_load(next, old, before, next.version.is_none() && next.made.is_none())
    }

    fn try_load(
        &mut self,
        next: &Candidate,
        old: &Run,
        before: &[(String, ParamValue)],
        may_wait: bool,
    ) -> Result<Option<Next>, Failure> {
        if next.version.as_ref().is_some_and(|v| v.resumed) {
            self.parked.clear();
        }
        self.tried = next.files.clone();
        let now = self.runtime.params();
        let how = next.version.clone().unwrap_or_else(|| Version::of(next.files.clone()));
        let begun = Instant::now();
        match self.attempt(&how, (now.kept, now.defaults), old, before, may_wait)? {
            Built::Next(mut built) => {
                self.tried = built.files.clone();
                built.begun = begun.checked_sub(next.made.unwrap_or_default()).unwrap_or(begun);
                Ok(Some(*built))
            }
            Built::Later(work) => {
                self.coming = Some(Coming { files: next.files.clone(), work, stood: begun.elapsed() });
                Ok(None)
            }
        }
    }

    fn attempt(
        &mut self,
        how: &Version,
        kept: (Vec<(String, String)>, BTreeMap<String, String>),
        old: &Run,
        before: &[(String, ParamValue)],
        may_wait: bool,
    ) -> Result<Built, Failure> {
        let begun = Instant::now();
        let (rng, memory) = (old.rng(), self.runtime.remember()?);
        self.runtime.set_texts(&how.files);
        self.runtime.keep_params(kept.0, kept.1);
        let result = self.build(how, old, may_wait);
        old.set_rng(rng);
        let (recipe, run, handover) = match result {
            Ok((recipe, run, handover, None)) => (recipe, run, handover),
            Ok((.., Some(work))) => {
                self.runtime.recall(memory)?;
                return Ok(Built::Later(work));
            }
            Err(failure) => {
                self.runtime.recall(memory)?;
                return Err(failure);
            }
        };
        let params = recipe.params()?;
        let files = if self.script.is_some() { how.files.clone() } else { self.complete(&how.files) };
        let mut changed = params_changed(before, &params);
        changed.extend(ledger::places(&self.running, &files));
        Ok(Built::Next(Box::new(Next { run, params, changed, handover, files, begun, memory })))
    }

    /// `files` with what the loaded version requires besides.
    fn complete(&self, files: &Files) -> Files {
        let mut out: Files = files.iter().take(1).cloned().collect();
        for path in self.runtime.required() {
            match files.iter().find(|f| f.0 == path) {
                Some(known) => out.push(known.clone()),
                None => out.extend(std::fs::read_to_string(&path).map(|text| (path, text))),
            }
        }
        out
    }

    fn build(&self, how: &Version, old: &Run, may_wait: bool) -> Result<Parts, Failure> {
        let text = match how.files.first() {
            Some((path, text)) if *path == self.path => text.clone(),
            _ => Source::read(&self.path)?.text,
        };
        if let Some(params) = &how.params {
            self.runtime.offer_params(ledger::as_given(params));
        }
        let recipe = self.runtime.reload(&text, &format!("@{}", self.path.display()))?;
        let steps = how.steps.map(|n| n as i64).or(self.steps.map(i64::from));
        if let Some(steps) = steps
            && !self.runtime.params().names.iter().any(|n| n == "steps")
        {
            recipe.set_steps(steps)?;
        }
        let precision = how.precision.as_deref().or(self.precision.as_deref());
        let run = recipe.start(how.seed.or(self.seed), precision, self.memory_budget)?;
        let handover = run.take_over(perilune_lua::Source::Run(old), &self.parked, Taking::Fitting)?;
        let work = if may_wait { run.prepare()? } else { run.rehearse().map(|()| None)? };
        Ok((recipe, run, handover, work))
    }

    /// From now on this version runs, and the one before it, which had these params, can be gone back to.
    pub fn accept(&mut self, files: Files, before: &[(String, ParamValue)]) -> Result<(), Failure> {
        let was = std::mem::replace(&mut self.running, files);
        if self.history.len() == HISTORY {
            self.history.remove(0);
        }
        let params = crate::events::params(before);
        self.history.push((was, params.as_object().map(ledger::as_given).unwrap_or_default()));
        match &mut self.listener {
            Some(l) => l.listen(&self.running),
            None => Ok(()),
        }
    }

    /// Builds the last version before the running one that can be built, from the present States. None is left: nothing.
    pub fn step_back(&mut self, old: &Run, before: &[(String, ParamValue)]) -> Option<Next> {
        while let Some((files, params)) = self.history.pop() {
            let built = self.attempt(&Version::of(files), (params, BTreeMap::new()), old, before, false);
            if let Ok(Built::Next(next)) = built {
                self.running = next.files.clone();
                return Some(*next);
            }
        }
        None
    }

    /// The version on trial has gone: what was loaded before it is loaded again.
    pub fn recall(&self, memory: Memory) -> Result<(), Failure> {
        Ok(self.runtime.recall(memory)?)
    }

    pub fn running(&self) -> Files {
        self.running.clone()
    }

    /// The defaults of the params of the loaded version, as text.
    pub fn defaults(&self) -> BTreeMap<String, String> {
        self.runtime.params().defaults
    }
}
