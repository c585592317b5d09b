//! Builds a version of the recipe beside the running one, and returns to earlier versions.

use super::{Candidate, Compiling, NextVersion, Reloader, Tried};
use crate::cancel::{self, Work};
use crate::error::{Error, Result};
use crate::history::{self, Files, Version};
use crate::params::{self, Params};
use crate::source::Source;
use crate::state_names::check_state_names;
use perilune_lua::{Memory, Recipe, Run, StateMigration, Taking};
use std::collections::BTreeMap;
use std::thread::JoinHandle;
use std::time::Instant;

/// Versions that can be returned to.
const HISTORY: usize = 100;

/// The result of building a version.
enum Built {
    Next(Box<NextVersion>),
    /// The version lacks machine code, which is being compiled; nothing has changed.
    Later(JoinHandle<()>),
}

/// A version as built, and the compilation of its machine code if that is still to be done.
type Parts = (Recipe, Run, StateMigration, Option<JoinHandle<()>>);

impl Reloader<'_> {
    /// Builds a version that takes over the States of `old`. On an error `old` is unchanged.
    pub fn load(&mut self, next: &Candidate, old: &Run, before: &Params) -> Result<NextVersion> {
        match self.try_load(next, old, before, false)? {
            Some(next) => Ok(next),
            None => Err(Error::System("this is a bug: a reload that cannot be cancelled was cancelled".into())),
        }
    }

    /// Builds a version like [`Reloader::load`], unless a newer save or a stop request cancels it. Returns `None` if it lacks
    /// machine code, which is compiled in the background: it becomes a candidate again when that is done.
    pub(crate) fn load_in_run(&mut self, next: &Candidate, old: &Run, before: &Params) -> Result<Option<NextVersion>> {
        let (runtime, control) = (self.runtime, self.control.clone());
        let may_wait = next.version.is_none() && next.compiled.is_none();
        let built = control.run(runtime, Work::Build, false, || self.try_load(next, old, before, may_wait))?;
        if built.as_ref().is_err_and(cancel::cancelled) {
            // A saved file is tried even if its text is unchanged.
            self.tried.saved.clear();
        }
        built.map_err(|failure| cancel::explain(failure, "being built"))
    }

    /// Builds a version; with `may_wait` it returns `None` instead of compiling machine code.
    fn try_load(
        &mut self,
        next: &Candidate,
        old: &Run,
        before: &Params,
        may_wait: bool,
    ) -> Result<Option<NextVersion>> {
        if next.version.as_ref().is_some_and(|v| v.resumed) {
            self.parked.clear();
        }
        self.tried = Tried { files: next.files.clone(), failed: true, ..Tried::default() };
        let now = self.runtime.params();
        let how = next.version.clone().unwrap_or_else(|| Version::of(next.files.clone()));
        let begun = Instant::now();
        let built = self.attempt(&how, (now.kept, now.defaults), old, before, may_wait);
        // A file that cannot be watched is reported by the next look.
        let _ = self.renew_watch();
        self.tried.saved = self.saved();
        self.tried.failed = built.is_err();
        match built? {
            Built::Next(mut built) => {
                built.begun = begun.checked_sub(next.compiled.unwrap_or_default()).unwrap_or(begun);
                Ok(Some(*built))
            }
            Built::Later(work) => {
                let stalled = begun.elapsed();
                self.compiling = Some(Compiling { files: self.tried.files.clone(), work, stalled });
                Ok(None)
            }
        }
    }

    /// Builds a version with these params, and restores the loader and the random numbers if that fails.
    fn attempt(
        &mut self,
        how: &Version,
        kept: (Vec<(String, String)>, BTreeMap<String, String>),
        old: &Run,
        before: &Params,
        may_wait: bool,
    ) -> Result<Built> {
        let begun = Instant::now();
        let (rng, memory) = (old.rng(), self.runtime.remember()?);
        self.runtime.set_texts(&how.files);
        self.runtime.keep_params(kept.0, kept.1);
        let result = self.build(how, old, may_wait);
        old.set_rng(rng);
        let mut files = how.files.clone();
        if self.replay.is_none() {
            // The fix of a failed version may be in a file that only this version requires, or in one that it did not load.
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
        let mut changed = params::changes(before, &params);
        changed.extend(history::places(&self.running, &files));
        Ok(Built::Next(Box::new(NextVersion { run, params, changed, handover, files, begun, memory })))
    }

    /// Loads a version, transfers the States that fit, and records one step of it.
    fn build(&self, how: &Version, old: &Run, may_wait: bool) -> Result<Parts> {
        let text = match how.files.first() {
            Some((path, text)) if *path == self.path => text.clone(),
            _ => Source::read(&self.path)?.text,
        };
        if let Some(params) = &how.params {
            self.runtime.offer_params(params::as_given(params));
        }
        let recipe = self.runtime.reload(&text, &format!("@{}", self.path.display()))?;
        let steps = how.steps.map(|n| n as i64).or(self.start.steps.map(i64::from));
        if let Some(steps) = steps
            && !self.runtime.params().names.iter().any(|n| n == "steps")
        {
            recipe.set_steps(steps)?;
        }
        let precision = how.precision.as_deref().or(self.start.precision.as_deref());
        let run = recipe.start(how.seed.or(self.start.seed), precision, self.start.memory_budget)?;
        check_state_names(&run)?;
        run.take_sample_log(old)?;
        let handover = run.take_over(perilune_lua::Source::Run(old), &self.parked, Taking::Fitting)?;
        let work = if may_wait { run.prepare()? } else { run.dry_run().map(|()| None)? };
        Ok((recipe, run, handover, work))
    }

    /// Makes this version the running one; the one before it, which had these params, can be returned to.
    pub fn accept(&mut self, files: Files, before: &Params) -> Result<()> {
        let was = std::mem::replace(&mut self.running, files);
        if self.history.len() == HISTORY {
            self.history.remove(0);
        }
        let values = params::to_json(before);
        self.history.push((was, values.as_object().map(params::as_given).unwrap_or_default()));
        self.renew_watch()
    }

    /// Builds the latest version before the running one that can be built, from the present States.
    pub(crate) fn step_back(&mut self, old: &Run, before: &Params) -> Option<NextVersion> {
        // The files on the disk have already failed.
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

    /// Restores the loader to its state before the version on trial.
    pub(crate) fn recall(&mut self, memory: Memory) -> Result<()> {
        self.tried.failed = true;
        Ok(self.runtime.recall(memory)?)
    }
}
