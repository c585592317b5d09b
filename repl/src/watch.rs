//! `--watch`, and SIGHUP: a recipe that changes while it trains.
//!
//! A reload is a stop and a resume that never leaves the process: at a step boundary the new text makes a run of its own,
//! whose States take the old ones' values by path and shape, and which goes on from the same cursor and random numbers.
//! So it gives the bits that a checkpoint, an edit and `--resume --edited` would give. Before the new run takes over, one of
//! its steps is recorded and not run. If that step needs machine code that takes long to make, the new run is dropped again,
//! the old one goes on while the code is made beside it, and then the new one is built a second time. This file finds new
//! versions and builds them; `edits.rs` says which of them runs.

use crate::failure::Failure;
use crate::hurry::{self, Work};
pub use crate::ledger::Files;
use crate::ledger::{self, Version, dir_of};
use crate::replay::Script;
use crate::source::Source;
use notify::{RecommendedWatcher, RecursiveMode, Watcher as _};
use perilune_lua::{DroppedStates, Failed, Memory, ParamValue, Recipe, Run, Runtime, StateMigration, Taking};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

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
    /// The version that runs.
    running: Files,
    tried: Tried,
    /// Versions that worked before this one, with their params; the last one last.
    history: Vec<(Files, Vec<(String, String)>)>,
    /// What an edit dropped since the last checkpoint.
    pub parked: DroppedStates,
    /// A version that waits for its machine code.
    coming: Option<Coming>,
    /// With `--watch`.
    listener: Option<Listener>,
    /// In a replay: the versions to come, the next one last.
    script: Option<Vec<Version>>,
}

/// The version that was tried last.
#[derive(Default)]
struct Tried {
    /// Its files, and those that it would have had if it could be loaded.
    files: Files,
    /// Files that it looked for in vain.
    missing: Vec<PathBuf>,
    /// When each of its files was written: one that failed is tried again when it is saved again, with the same text too.
    saved: Vec<Option<SystemTime>>,
    failed: bool,
}

/// Who hears of changed files.
struct Listener {
    watcher: RecommendedWatcher,
    /// The files that count, as events name them: others in the same directory may be written at every step.
    names: Arc<Mutex<BTreeSet<PathBuf>>>,
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
    pub handover: StateMigration,
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
type Parts = (Recipe, Run, StateMigration, Option<JoinHandle<()>>);

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

/// A directory that is there, with links followed, and the path of the file as a watch on it names that.
fn place_of(path: &Path) -> Option<(PathBuf, PathBuf)> {
    let (mut dir, mut rest) = (dir_of(path), PathBuf::from(path.file_name()?));
    loop {
        if let Ok(real) = dir.canonicalize() {
            return Some((real.clone(), real.join(rest)));
        }
        rest = Path::new(dir.file_name()?).join(rest);
        dir = dir_of(&dir);
    }
}

impl Listener {
    fn new() -> Result<Listener, Failure> {
        let (send, events) = channel();
        let names: Arc<Mutex<BTreeSet<PathBuf>>> = Arc::default();
        let ours = names.clone();
        let counts = move |path: &PathBuf| {
            let names = ours.lock().unwrap_or_else(PoisonError::into_inner);
            // Also of a directory that such a file lies in.
            names.iter().any(|name| name.starts_with(path))
        };
        let heard = move |event: notify::Result<notify::Event>| {
            // Reading a file is no change; anything else, a lost event too, is worth a look.
            let passed = |e: &notify::Event| e.kind.is_access() || !(e.paths.is_empty() || e.paths.iter().any(&counts));
            if !event.as_ref().is_ok_and(passed) {
                let _ = send.send(());
                hurry::saved();
            }
        };
        let watcher = notify::recommended_watcher(heard)
            .map_err(|e| Failure::System(format!("--watch: cannot listen for changed files: {e}")))?;
        // What was saved since it was loaded counts.
        Ok(Listener { watcher, names, events, touched: Some(Instant::now()) })
    }

    /// Directories, not files: editors save by renaming, and a watch on a file ends with that. One that was removed and
    /// made anew must be watched anew.
    fn listen<'f>(&mut self, files: impl Iterator<Item = &'f PathBuf>) -> Result<(), Failure> {
        let (mut dirs, mut names) = (BTreeSet::new(), BTreeSet::new());
        for path in files {
            // Who writes through a link changes another file.
            let target = path.canonicalize().ok();
            for (dir, name) in [Some(path), target.as_ref()].into_iter().flatten().filter_map(|p| place_of(p)) {
                dirs.insert(dir);
                names.insert(name);
            }
        }
        *self.names.lock().unwrap_or_else(PoisonError::into_inner) = names;
        for dir in dirs {
            let watched = self.watcher.watch(&dir, RecursiveMode::NonRecursive);
            watched.map_err(|e| Failure::System(format!("--watch: cannot watch {}: {e}", dir.display())))?;
        }
        Ok(())
    }

    /// Whether something was touched and has not been looked at.
    fn heard(&mut self) -> bool {
        while self.events.try_recv().is_ok() {
            self.touched = Some(Instant::now());
        }
        self.touched.is_some()
    }

    /// Whether something was touched, and has been left alone for a moment since.
    fn settled(&mut self, at_once: bool) -> bool {
        self.heard();
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
    ) -> Watch<'a> {
        let mut watch = Watch {
            runtime,
            path: source.path.clone(),
            seed,
            precision,
            steps,
            memory_budget,
            running: Vec::new(),
            tried: Tried::default(),
            history: Vec::new(),
            parked: DroppedStates::default(),
            coming: None,
            listener: None,
            script: script.map(|s| s.versions.iter().rev().cloned().collect()),
        };
        if let Some(script) = script {
            watch.running = script.files.clone();
            return watch;
        }
        watch.running = vec![(source.path.clone(), source.text.clone())];
        watch.running.extend(runtime.required());
        watch.tried = Tried { files: watch.running.clone(), missing: runtime.missing(), ..Tried::default() };
        watch
    }

    /// `--watch`. Without it only SIGHUP, or `:reload` at the prompt, asks for a look.
    pub fn listen_to_saves(&mut self) -> Result<(), Failure> {
        self.listener = Some(Listener::new()?);
        self.listen()
    }

    /// The recipe and what its last version required or looked for.
    fn paths(&self) -> Vec<PathBuf> {
        let mut out = vec![self.path.clone()];
        for path in self.tried.files.iter().map(|f| &f.0).chain(&self.tried.missing) {
            if !out.contains(path) {
                out.push(path.clone());
            }
        }
        out
    }

    fn listen(&mut self) -> Result<(), Failure> {
        let paths = self.paths();
        self.listener.as_mut().map_or(Ok(()), |l| l.listen(paths.iter()))
    }

    /// These files as they are on the disk. One that cannot be read is left out: loading says why.
    fn read(&self) -> Files {
        let text = |p: &PathBuf| Some(std::fs::read_to_string(p).ok()?.trim_start_matches('\u{feff}').to_string());
        self.paths().into_iter().filter_map(|p| Some((p.clone(), text(&p)?))).collect()
    }

    fn saved(&self) -> Vec<Option<SystemTime>> {
        let when = |p: PathBuf| std::fs::metadata(p).and_then(|m| m.modified()).ok();
        self.paths().into_iter().map(when).collect()
    }

    /// The files, if they differ from what was tried last and nobody has touched them for a moment. In a replay, the
    /// version that follows this step.
    pub fn changed(&mut self, at_once: bool, step: u64) -> Option<Candidate> {
        if let Some(script) = &mut self.script {
            let version = script.pop_if(|v| v.since <= step)?;
            return Some(Candidate { files: version.files.clone(), made: None, version: Some(version) });
        }
        let settled = self.listener.as_mut().map_or(at_once, |l| l.settled(at_once));
        if settled {
            // A directory may have come or gone. What cannot be watched now was said when the version began.
            let _ = self.listen();
            let files = self.read();
            let known: BTreeMap<_, _> = self.tried.files.iter().map(|f| (&f.0, &f.1)).collect();
            let same = files.iter().map(|f| (&f.0, &f.1)).collect::<BTreeMap<_, _>>() == known;
            let again = self.tried.failed && (at_once || self.saved() != self.tried.saved);
            if !same || again {
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

    /// The same while a run waits: a newer save or a signal may end it.
    pub fn load_in_run(
        &mut self,
        next: &Candidate,
        old: &Run,
        before: &[(String, ParamValue)],
    ) -> Result<Option<Next>, Failure> {
        let runtime = self.runtime;
        let built = hurry::during(runtime, Work::Build, false, || self.load_when_made(next, old, before))?;
        if built.as_ref().is_err_and(hurry::ended) {
            // What was saved is tried, even if it is the same text.
            self.tried.saved.clear();
        }
        built.map_err(|failure| hurry::explain(failure, "being built"))
    }

    /// Does a step or an evaluation that may turn out to be endless: after `time` a newer save ends it, or a signal.
    /// `wished`: a signal has come already.
    pub fn patiently<T>(
        &mut self,
        time: Duration,
        wished: bool,
        f: impl FnOnce() -> Result<T, Failed>,
    ) -> Result<T, Failed> {
        let wished = wished || self.listener.as_mut().is_some_and(|l| l.heard());
        hurry::during(self.runtime, Work::Step(time), wished, f)?
    }

    /// The next look finds what was saved: something was ended for its sake, so the save is long over.
    pub fn look_at_once(&mut self) {
        if let Some(l) = &mut self.listener
            && l.heard()
        {
            l.touched = Instant::now().checked_sub(SETTLE).or(l.touched);
        }
    }

    /// Whether saves are listened to.
    pub fn listens(&self) -> bool {
        self.listener.is_some()
    }

    /// Whether there is a version to go back to.
    pub fn can_step_back(&self) -> bool {
        !self.history.is_empty()
    }

    /// As `load`; but if the version lacks machine code, and has not waited for it yet, `None`: it is a candidate again when that
    /// is made.
    fn load_when_made(
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
        self.tried = Tried { files: next.files.clone(), failed: true, ..Tried::default() };
        let now = self.runtime.params();
        let how = next.version.clone().unwrap_or_else(|| Version::of(next.files.clone()));
        let begun = Instant::now();
        let built = self.attempt(&how, (now.kept, now.defaults), old, before, may_wait);
        // Of what could not be watched the next look says more.
        let _ = self.listen();
        self.tried.saved = self.saved();
        self.tried.failed = built.is_err();
        match built? {
            Built::Next(mut built) => {
                built.begun = begun.checked_sub(next.made.unwrap_or_default()).unwrap_or(begun);
                Ok(Some(*built))
            }
            Built::Later(work) => {
                self.coming = Some(Coming { files: self.tried.files.clone(), work, stood: begun.elapsed() });
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
        let mut files = how.files.clone();
        if self.script.is_none() {
            // Of one that failed a fix of a file that it alone requires is to be seen, and of those that it did not come to.
            let required = self.runtime.required();
            files.truncate(if result.is_ok() { 1 } else { files.len() });
            let new = required.into_iter().filter(|f| !files.iter().any(|known| known.0 == f.0)).collect::<Files>();
            files.extend(new);
            (self.tried.files, self.tried.missing) = (files.clone(), self.runtime.missing());
        }
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
        let mut changed = params_changed(before, &params);
        changed.extend(ledger::places(&self.running, &files));
        Ok(Built::Next(Box::new(Next { run, params, changed, handover, files, begun, memory })))
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
        self.listen()
    }

    /// Builds the last version before the running one that can be built, from the present States. None is left: nothing.
    pub fn step_back(&mut self, old: &Run, before: &[(String, ParamValue)]) -> Option<Next> {
        // What lies on the disk has been tried, and has failed.
        let tried = Tried { failed: true, ..std::mem::take(&mut self.tried) };
        let mut found = None;
        while found.is_none()
            && let Some((files, params)) = self.history.pop()
        {
            let built = self.attempt(&Version::of(files), (params, BTreeMap::new()), old, before, false);
            found = match built {
                Ok(Built::Next(next)) => Some(*next),
                _ => None,
            };
        }
        self.tried = tried;
        self.running = found.as_ref().map_or_else(|| self.running.clone(), |next| next.files.clone());
        found
    }

    /// The version on trial has gone: what was loaded before it is loaded again.
    pub fn recall(&mut self, memory: Memory) -> Result<(), Failure> {
        self.tried.failed = true;
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
