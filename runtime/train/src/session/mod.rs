//! Runs a recipe that has been loaded: builds it, opens its record (`record.rs`), trains, and closes the record (`finish.rs`).

mod finish;
mod record;

pub(crate) use record::{own_files, start_record, started};

use crate::audit::Audit;
use crate::branch::branch;
use crate::cancel::Control;
use crate::checkpoints::Checkpoints;
use crate::claim::Claim;
use crate::data_check;
use crate::data_record::DataRecord;
use crate::digests::DigestLog;
use crate::error::Result;
use crate::events::{Event, Reporter};
use crate::hot_reload::{Reloader, StartOptions};
use crate::job::Job;
use crate::monitor::Monitor;
use crate::performance::Performance;
use crate::perturb::perturb;
use crate::replay::Part;
use crate::restart::Restart;
use crate::resume::Resume;
use crate::rundir::{LogTail, RunDir};
use crate::shared_run;
use crate::source::Source;
use crate::spec::RunSpec;
use crate::state_names::check_state_names;
use crate::trainer::Outcome;
use crate::training_loop::{End, TrainingLoop};
use perilune_lua::{Recipe, Run, Runtime, StateMigration};
use serde_json::{Map, Value};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Instant;

/// The run of a recipe that has been loaded.
pub(crate) struct Session<'a> {
    pub spec: &'a RunSpec,
    pub control: &'a Control,
    pub job: &'a Job,
    pub source: &'a Source,
    pub runtime: &'a Runtime,
    pub recipe: &'a Recipe,
    pub begun: Instant,
    /// What overrides the recipe: options, and what a resumed run keeps.
    pub start: StartOptions,
    pub resume: Option<Resume>,
}

/// A run whose record is open.
struct Opened {
    checkpoints: Checkpoints,
    /// What the log of a resumed run ends with.
    tail: LogTail,
    /// The run directory, in all processes.
    dir: PathBuf,
    /// The directory of the run that this one branches from.
    origin: Option<PathBuf>,
}

impl Session<'_> {
    /// Returns the part of a recorded run that is recomputed.
    fn part(&self) -> Option<&Part> {
        self.spec.replay.as_ref()?.window.as_deref()
    }

    /// Builds the run, and restores the checkpoint of a resumed one, or of the window of a replay.
    fn build(&self) -> Result<(Run, StateMigration)> {
        if let Some(steps) = self.start.steps
            && !self.runtime.params().names.iter().any(|n| n == "steps")
        {
            self.recipe.set_steps(i64::from(steps))?;
        }
        let (start, precision) = (&self.start, self.start.precision.as_deref());
        let run = self.recipe.start(start.seed, precision, start.memory_budget)?;
        check_state_names(&run)?;
        let mut handover = StateMigration::default();
        let start = self.part().and_then(|part| part.start.as_ref());
        if let Some(seed) = self.start.perturb.filter(|_| self.resume.is_none() && start.is_none()) {
            perturb(&run, seed)?;
        }
        if let Some(start) = start {
            handover = start.load_into(&run, false)?;
            if !handover.exact() {
                return Err(
                    start.misfit(&handover, "the recipe or the checkpoint in the run directory is not that of the run")
                );
            }
        }
        if let Some(resume) = &self.resume {
            handover = resume.restore(&run, self.spec.edited)?;
            if self.spec.edited {
                run.dry_run()?;
            }
        }
        Ok((run, handover))
    }

    /// Trains to the end, to a pause or to a stop request. `about`: the fields of `run.json` that are known so far.
    pub fn train(
        &mut self,
        mut about: Map<String, Value>,
        restart: Option<Restart>,
        reporter: &mut Reporter,
    ) -> Result<Outcome> {
        let values = self.recipe.params()?;
        let (run, handover) = self.build()?;
        self.runtime.host().fix_mesh();
        shared_run::check_mesh(self.job, self.runtime)?;
        self.describe_mesh(&mut about);
        self.warn_of_other_sums(reporter);
        let samples: Vec<(String, u64)> =
            run.splits().into_iter().filter_map(|s| Some((s.clone(), run.samples(&s)?))).collect();
        self.describe(&run, &values, &samples, &mut about);
        shared_run::agree(self.job, &about, &run, self.runtime)?;
        let mut data = self.check_data(&run, reporter)?;
        reporter.tell(&Event::Training);
        let anew = restart.as_ref().map(|r| (r.dir.clone(), r.reason.clone()));
        let Opened { mut checkpoints, tail, dir, origin } =
            self.open_record(&run, &mut about, restart, &mut data, reporter)?;

        reporter.take_events(self.spec.replay.is_none() && run.has_observer("sinks"));
        reporter.tell(&Event::Start { fields: &about });
        let device = self.runtime.host().engine.borrow().backend().describe();
        let (name, parameters, frozen) = (self.recipe.name(), run.num_parameters(), run.num_frozen());
        let seed = run.seed();
        reporter.tell(&Event::Recipe { name: &name, device: &device, parameters, frozen, samples: &samples, seed });
        if let Some((from, resume)) = origin.as_ref().zip(self.resume.as_ref()) {
            reporter.tell(&Event::Branched { step: resume.step(), from, dir: &resume.dir });
        }
        if let Some((dir, reason)) = &anew {
            reporter.tell(&Event::Restarted { dir, reason });
        }
        if let Some(resume) = self.resume.as_ref().filter(|_| self.job.is_first()) {
            let files = own_files(self.source, self.runtime.required());
            let loaded = self.runtime.params();
            resume.enter(&files, (&run, &values), &handover, &about, (self.spec.edited, &loaded), reporter)?;
        }

        reporter.begin(tail.seconds);
        let reloader = self.reloader(&run)?;
        let run = Rc::new(run);
        let (ends, records) = ((self.control, self.job), (&mut checkpoints, &mut data));
        let mut training = TrainingLoop::new(run.clone(), values, reporter, ends, records, Some(reloader));
        self.prepare(&mut training, tail, dir)?;
        let end = self.train_to_end(&mut training)?;
        training.settle()?;
        training.observe_end(finish::status(end))?;
        let audit = training.finish_audit()?;
        if let Some(digests) = training.digests.take() {
            digests.finish(audit.as_ref().and_then(|audit| audit.result.difference.as_ref()))?;
        }
        let (run, measured) = (training.run.clone(), training.measured());
        drop(training);
        checkpoints.finish(reporter)?;
        let outcome = self.close(&run, (end, measured), audit, &mut data, reporter)?;
        self.sink_last(&run, reporter)?;
        Ok(outcome)
    }

    /// Compares the data with those of the run that is continued or repeated, and checks those of a new run. Nothing has been
    /// written, and no step taken.
    fn check_data(&self, run: &Run, reporter: &mut Reporter) -> Result<DataRecord> {
        let mut data = self.data();
        if !self.job.is_first() {
            return Ok(data);
        }
        for text in data.begin(run.count(), &|path, bytes| reporter.tell(&Event::ComparesData { path, bytes }))? {
            reporter.warning(&text);
        }
        // The data of a resumed run and of a replay are those that were checked before.
        let repeated = self.resume.is_some() || self.spec.replay.is_some();
        if !repeated && !self.spec.no_data_check {
            let strict = self.spec.strict || self.recipe.strict();
            data_check::before_first_step(run, strict, self.job, self.runtime.host().interrupt.clone(), reporter)?;
        }
        Ok(data)
    }

    /// Reloads the recipe when it changes, if the run watches it, or where the recorded run has.
    fn reloader(&self, run: &Run) -> Result<Reloader<'_>> {
        let start = StartOptions { precision: Some(run.precision()), ..self.start.clone() };
        let replay = self.spec.replay.as_ref();
        let mut reloader = Reloader::new(self.runtime, self.source, start, self.control.clone(), replay);
        if self.spec.watch && self.job.is_first() {
            reloader.watch_files()?;
        }
        Ok(reloader)
    }

    /// Sets what a loop starts with. `dir`: the run directory, empty without one.
    fn prepare(&self, training: &mut TrainingLoop<'_>, tail: LogTail, dir: PathBuf) -> Result<()> {
        let replay = self.spec.replay.as_ref();
        training.run.time_data(training.data_time.clone())?;
        training.announce_version();
        training.monitor = self.runtime.host().engine.borrow().backend().probe().and_then(Monitor::start);
        let devices = self.runtime.host().engine.borrow().mesh().devices();
        training.performance = Performance::new(training.reporter.dir.as_ref().map(RunDir::record), devices);
        training.is_observed = replay.is_none();
        if training.is_observed {
            self.runtime.host().observed.keep(Some(dir).filter(|dir| !dir.as_os_str().is_empty()));
        }
        training.pass_on()?;
        training.set_policies((self.spec.on_nan.clone(), self.spec.on_spike.clone()))?;
        training.remember(&tail.history);
        let count = training.run.count();
        training.evaluated = tail.evaluated.into_iter().map(|(split, values)| (split, (count, values))).collect();
        training.until = replay.map(|r| r.steps);
        training.pause = self.spec.until;
        training.audit = self.part().map(|part| self.audit(part, training)).transpose()?;
        if let Some(options) = replay.and_then(|replay| replay.digests.clone()) {
            let dir = training.reporter.dir.as_ref().map(RunDir::handle);
            training.digests = dir.map(|dir| DigestLog::create(dir, options)).transpose()?;
        }
        Ok(())
    }

    /// Takes steps until the run has ended, and evaluates it.
    fn train_to_end(&self, training: &mut TrainingLoop<'_>) -> Result<End> {
        loop {
            let end = training.train()?;
            if end == End::Paused && training.audit.is_none() {
                self.pause(training)?;
            }
            if end != End::Finished {
                return Ok(end);
            }
            match self.conclude(training) {
                Ok(end) => return Ok(end),
                // The version before may have more steps.
                Err(error) => training.recover(error)?,
            }
        }
    }

    /// Creates the comparison of a window with its record.
    fn audit(&self, part: &Part, training: &TrainingLoop<'_>) -> Result<Audit> {
        let steps = (part.start_step(), part.from, part.to);
        let mut audit = Audit::new(part.recording.clone(), steps, part.resumed.clone());
        let of_checkpoint = part.start.as_ref().and_then(|start| start.snapshot.record.get("params"));
        if let Some(recorded) = of_checkpoint.and_then(Value::as_object) {
            audit.params(part.start_step(), recorded, &training.params);
        }
        if part.is_unedited {
            audit.last_version(part.start_step(), &training.run, &training.params);
        }
        Ok(audit)
    }

    /// Moves a run that branches to its new directory, which begins as a copy of the run up to the checkpoint. Returns the directory of the
    /// origin.
    fn branch(&mut self, run: &Run) -> Result<Option<PathBuf>> {
        if !(self.spec.branch && self.job.is_first()) {
            return Ok(None);
        }
        let Some(resume) = self.resume.take() else { return Ok(None) };
        // Wrong options are reported before a directory is made.
        self.spec.retention.choose(run)?;
        let from = resume.dir.clone();
        let claim = || Claim::take(self.spec.run_dir.as_deref(), &self.recipe.name(), false);
        self.resume = Some(branch(resume, claim)?);
        Ok(Some(from))
    }
}
