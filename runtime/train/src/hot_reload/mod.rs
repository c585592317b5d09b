//! Applies edits of the recipe to a run that continues.
//!
//! A reload is a stop and a resume within the process: at a step boundary the new text makes a new run, whose States
//! take the values of the old ones by path and shape, and which continues from the same cursor and random numbers. It
//! therefore gives the same bits as a checkpoint, an edit and a resume with `edited`. Before the new run takes over, one of
//! its steps is recorded and not executed. If that step needs machine code that takes long to compile, the new run is
//! dropped, the old one continues while the code is compiled in the background, and then the new one is built again.
//!
//! This file finds new versions, `build.rs` builds them, `trial.rs` decides which of them runs, and `file_watch.rs` detects
//! saved files.

mod build;
mod file_watch;
mod trial;

pub(crate) use trial::Trial;

use crate::cancel::{Control, Work};
use crate::error::Result;
use crate::history::{Files, Version};
use crate::job::Job;
use crate::replay::Replay;
use crate::source::Source;
use file_watch::FileWatch;
use perilune_lua::{DroppedStates, Failed, Memory, ParamValue, Run, Runtime, StateMigration};
use perilune_policy::Opener;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

/// The largest file of a recipe that is read, in bytes.
const MOST: u64 = 64 << 20;
/// A new version that raises within this many steps is reverted at no cost: the one before is still in memory.
const TRIAL: u64 = 3;

/// How a version is started; `None` leaves the choice to the recipe.
#[derive(Clone, Debug, Default)]
pub struct StartOptions {
    pub seed: Option<i64>,
    pub precision: Option<String>,
    /// Overrides the recipe's number of steps, unless it has a param of that name.
    pub steps: Option<u32>,
    pub memory_budget: Option<usize>,
    /// Changes every float element of the initial trainable States by one ulp, in a direction drawn from this seed. A resumed run
    /// has been changed at its beginning.
    pub perturb: Option<u64>,
}

/// Finds and builds new versions of the recipe of one run.
pub struct Reloader<'a> {
    runtime: &'a Runtime,
    control: Control,
    path: PathBuf,
    start: StartOptions,
    /// The version that runs.
    running: Files,
    tried: Tried,
    /// Versions that passed their trial before this one, with their params; the latest last.
    history: Vec<(Files, Vec<(String, String)>)>,
    /// States that edits dropped since the last checkpoint.
    pub(crate) parked: DroppedStates,
    /// A version whose machine code is compiled in the background.
    compiling: Option<Compiling>,
    /// The watch on saved files; without one a reload has to be requested.
    watch: Option<FileWatch>,
    /// In a replay: the versions to come, the next one last.
    replay: Option<Vec<Version>>,
}

/// The version that was tried last.
#[derive(Default)]
struct Tried {
    /// Its files; for one that failed also those of the version before.
    files: Files,
    /// Files that it required and that do not exist.
    missing: Vec<PathBuf>,
    /// Modification times of its files: a version that failed is tried again when it is saved again, even unchanged.
    saved: Vec<Option<SystemTime>>,
    failed: bool,
}

/// A version whose machine code is being compiled while the one before it continues.
struct Compiling {
    files: Files,
    work: JoinHandle<()>,
    /// How long the loop has waited for it.
    stalled: Duration,
}

/// A version to be tried.
pub struct Candidate {
    pub files: Files,
    /// Its machine code has been compiled; how long the loop has waited for it.
    compiled: Option<Duration>,
    /// In a replay: how it was started.
    version: Option<Version>,
}

impl Candidate {
    /// Returns in all processes of a job the version of process 0.
    pub(crate) fn shared(job: &Job, own: Option<Candidate>) -> Result<Option<Candidate>> {
        if !job.has_several() {
            return Ok(own);
        }
        let pair = |(path, text): &(PathBuf, String)| json!([path.display().to_string(), text]);
        let files = job.share("the files of an edit", || {
            Ok(own.iter().flat_map(|c| c.files.iter().map(pair)).collect::<Vec<_>>().into())
        })?;
        let text = |v: &Value| v.as_str().unwrap_or_default().to_string();
        let files = files.as_array().into_iter().flatten().map(|f| (PathBuf::from(text(&f[0])), text(&f[1]))).collect();
        Ok(Some(Candidate { files, compiled: None, version: None }))
    }

    /// In a replay: whether the run was resumed here.
    fn is_resumed(&self) -> bool {
        self.version.as_ref().is_some_and(|v| v.resumed)
    }

    /// In a replay: whether the run returned here from a version on trial.
    fn is_from_trial(&self) -> bool {
        self.version.as_ref().is_some_and(|v| v.from_trial)
    }
}

/// A new version that is ready to take over.
pub struct NextVersion {
    pub run: Run,
    pub params: Vec<(String, ParamValue)>,
    /// The params and lines that changed, for display.
    pub changed: Vec<String>,
    /// The States that it took over.
    pub handover: StateMigration,
    pub files: Files,
    /// When the loop began to wait for it, as if it had waited without a break.
    pub begun: Instant,
    /// The loader's state before it.
    pub(crate) memory: Memory,
}

impl<'a> Reloader<'a> {
    /// Creates a reloader for a run of `source`, which has been loaded. With a replay, its versions are applied instead of
    /// those on the disk.
    pub fn new(
        runtime: &'a Runtime,
        source: &Source,
        start: StartOptions,
        control: Control,
        replay: Option<&Replay>,
    ) -> Reloader<'a> {
        let mut out = Reloader {
            runtime,
            control,
            path: source.path.clone(),
            start,
            running: Vec::new(),
            tried: Tried::default(),
            history: Vec::new(),
            parked: DroppedStates::default(),
            compiling: None,
            watch: None,
            replay: replay.map(|r| r.versions.iter().rev().cloned().collect()),
        };
        if let Some(replay) = replay {
            out.running = replay.files.clone();
            return out;
        }
        out.running = vec![(source.path.clone(), source.text.clone())];
        out.running.extend(runtime.required());
        out.tried = Tried { files: out.running.clone(), missing: runtime.missing(), ..Tried::default() };
        out
    }

    /// Starts to watch the files. Without it a reload happens on request only.
    pub fn watch_files(&mut self) -> Result<()> {
        self.watch = Some(FileWatch::new(self.control.clone())?);
        self.renew_watch()
    }

    /// Returns the recipe and the files that its last version required, existing or not.
    fn paths(&self) -> Vec<PathBuf> {
        let mut out = vec![self.path.clone()];
        for path in self.tried.files.iter().map(|f| &f.0).chain(&self.tried.missing) {
            if !out.contains(path) {
                out.push(path.clone());
            }
        }
        out
    }

    fn renew_watch(&mut self) -> Result<()> {
        let paths = self.paths();
        self.watch.as_mut().map_or(Ok(()), |w| w.watch(paths.iter()))
    }

    /// Reads these files. One that cannot be read is left out: loading reports why.
    fn read(&self) -> Files {
        // The recipe is named by the command; what it requires is under its policy.
        let open = |p: &PathBuf| match *p == self.path {
            true => perilune_policy::open_named(p),
            false => self.runtime.policy().open(p),
        };
        let text = |p: &PathBuf| Some(open(p).ok()?.text(MOST).ok()?.trim_start_matches('\u{feff}').to_string());
        self.paths().into_iter().filter_map(|p| Some((p.clone(), text(&p)?))).collect()
    }

    /// Returns the modification times of these files.
    fn saved(&self) -> Vec<Option<SystemTime>> {
        let when = |p: PathBuf| std::fs::metadata(p).and_then(|m| m.modified()).ok();
        self.paths().into_iter().map(when).collect()
    }

    /// Returns a version to be tried: the files, if they differ from those tried last and no save followed for a moment. In
    /// a replay, the version that follows this step.
    pub fn changed(&mut self, at_once: bool, step: u64) -> Option<Candidate> {
        if let Some(replay) = &mut self.replay {
            let version = replay.pop_if(|v| v.since <= step)?;
            return Some(Candidate { files: version.files.clone(), compiled: None, version: Some(version) });
        }
        let settled = self.watch.as_mut().map_or(at_once, |w| w.settled(at_once));
        if settled {
            // A directory may have been made or removed. A failure was reported when the version began.
            let _ = self.renew_watch();
            let files = self.read();
            let known: BTreeMap<_, _> = self.tried.files.iter().map(|f| (&f.0, &f.1)).collect();
            let same = files.iter().map(|f| (&f.0, &f.1)).collect::<BTreeMap<_, _>>() == known;
            let again = self.tried.failed && (at_once || self.saved() != self.tried.saved);
            if !same || again {
                self.compiling = None;
                return Some(Candidate { files, compiled: None, version: None });
            }
        }
        let ready = self.compiling.take_if(|c| c.work.is_finished())?;
        Some(Candidate { files: ready.files, compiled: Some(ready.stalled), version: None })
    }

    /// In a replay: whether the next version takes over after this step, before its evaluation.
    pub(crate) fn owed(&self, step: u64) -> bool {
        let next = self.replay.as_ref().and_then(|s| s.last());
        next.is_some_and(|v| v.owed && v.since <= step)
    }

    /// Whether versions come from a history instead of the disk.
    pub(crate) fn replays(&self) -> bool {
        self.replay.is_some()
    }

    /// Runs a step or an evaluation that may never end: after `time` a newer save or a stop request cancels it.
    /// `requested`: a stop was requested before.
    pub(crate) fn cancellable<T>(
        &mut self,
        time: Duration,
        requested: bool,
        f: impl FnOnce() -> std::result::Result<T, Failed>,
    ) -> std::result::Result<T, Failed> {
        let requested = requested || self.watch.as_mut().is_some_and(|w| w.touched());
        self.control.run(self.runtime, Work::Step(time), requested, f)?
    }

    /// Makes the next look find a saved file without waiting: work was cancelled because of it.
    pub(crate) fn skip_wait(&mut self) {
        if let Some(watch) = &mut self.watch {
            watch.skip_wait();
        }
    }

    /// Whether saved files are watched.
    pub(crate) fn watches_files(&self) -> bool {
        self.watch.is_some()
    }

    /// Whether there is an earlier version to return to.
    pub(crate) fn can_step_back(&self) -> bool {
        !self.history.is_empty()
    }

    /// Returns the files of the version that runs.
    pub(crate) fn running(&self) -> Files {
        self.running.clone()
    }

    /// Returns the defaults of the params of the loaded version, as text.
    pub(crate) fn defaults(&self) -> BTreeMap<String, String> {
        self.runtime.params().defaults
    }
}
