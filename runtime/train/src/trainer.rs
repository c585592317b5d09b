//! Drives a run from start to end: loads the recipe, restores a checkpoint, trains, evaluates, and closes the record.

use crate::audit::{Audit, Audited};
use crate::branch::branch;
use crate::cancel::Control;
use crate::checkpoints::Checkpoints;
use crate::claim::Claim;
use crate::data_check;
use crate::data_record::{Compare, DATA, DataRecord, Entry};
use crate::digests::DigestLog;
use crate::error::{Error, Result};
use crate::events::{Event, Listener, Reporter, SCHEMA};
use crate::history;
use crate::hot_reload::{Reloader, StartOptions};
use crate::job::Job;
use crate::mlflow::{self, MLFLOW, Mlflow};
use crate::monitor::Monitor;
use crate::numbers::{self, object};
use crate::params;
use crate::performance::{PERFORMANCE, Performance};
use crate::perturb::perturb;
use crate::replay::Part;
use crate::restart::{Beginning, PERTURB, Restart, SET_PRECISION};
use crate::resume::Resume;
use crate::run_files::hostname;
use crate::rundir::{LogTail, RunDir};
use crate::sample_file;
use crate::saved_run::enable_load_run;
use crate::script_run::Script;
use crate::shared_run;
use crate::source::Source;
use crate::spec::RunSpec;
use crate::state_names::check_state_names;
use crate::training_loop::{End, TrainingLoop};
use crate::weights::weights_hash;
use perilune_core::mesh::Axis;
use perilune_data::sample_log::SampleLog;
use perilune_dist::Links;
use perilune_lua::{Cause, Loaded, Recipe, Run, Runtime, StateMigration};
use perilune_policy::Directory;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

/// A run that is ready to start.
pub struct Trainer {
    spec: RunSpec,
    control: Control,
    listener: Rc<dyn Listener>,
    /// The other processes of the job.
    links: Option<Arc<Links>>,
}

/// The result of a run that has not failed.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub end: End,
    /// Steps that the run has taken in all; 0 for a plain script.
    pub steps: u64,
    /// The run directory; none for a plain script.
    pub run_dir: Option<PathBuf>,
    /// The hash of all States; see [`crate::weights_hash`].
    pub weights: Option<String>,
    /// What the replay of a window has found.
    pub audit: Option<Audited>,
}

impl Trainer {
    /// Creates a trainer. Requests come through `control`, from any thread; events go to `listener`, on this one.
    pub fn new(spec: RunSpec, control: Control, listener: Rc<dyn Listener>) -> Trainer {
        Trainer { spec, control, listener, links: None }
    }

    /// Makes this process train together with the others of a job. All of them run what process 0 was given.
    #[must_use]
    pub fn in_job(self, links: Arc<Links>) -> Trainer {
        Trainer { links: Some(links), ..self }
    }

    /// Runs to the end, to a stop request, or to an error. `open` creates the runtime, with the params of the spec, once the
    /// recipe and the checkpoint have been found. An error is reported to the listener and recorded in `run.json`.
    pub fn run(self, open: impl FnOnce(&RunSpec) -> Result<Runtime>) -> Result<Outcome> {
        let begun = Instant::now();
        let mut reporter = Reporter::new(self.listener.clone());
        let result = self.start(open, &mut reporter, begun);
        let error = match result {
            Ok(outcome) => return Ok(outcome),
            Err(Error::Recipe(e)) if e.cause == Cause::LeftBreakpoint => {
                reporter.warning(&e.message);
                if let Some(dir) = reporter.dir.as_mut() {
                    dir.finish([("status", Value::from("interrupted"))])?;
                }
                let run_dir = reporter.dir.map(|d| d.path);
                return Ok(Outcome { end: End::LeftBreakpoint, steps: 0, run_dir, weights: None, audit: None });
            }
            Err(error) => error,
        };
        if let Some(dir) = reporter.dir.as_mut() {
            let fields = [
                ("status", Value::from("failed")),
                ("error", Value::from(error.to_string())),
                ("seconds", json!(begun.elapsed().as_secs_f64())),
                ("metrics", object(&reporter.latest)),
            ];
            // The caller needs to see the first error; a full disk may be its cause.
            let _ = dir.finish(fields);
        }
        let _ = reporter.finish_mlflow("failed");
        let run_dir = reporter.dir.as_ref().map(|d| d.path.as_path());
        reporter.tell(&Event::Failed { error: &error, run_dir });
        Err(error)
    }

    fn start(
        &self,
        open: impl FnOnce(&RunSpec) -> Result<Runtime>,
        reporter: &mut Reporter,
        begun: Instant,
    ) -> Result<Outcome> {
        let job = &self.links.clone().map_or_else(Job::alone, |links| Ok(Job::new(links)))?;
        let mut spec = shared_run::spec(job, &self.spec)?;
        let part = spec.replay.as_ref().and_then(|replay| replay.window.clone());
        // A later version has all its params recorded; its recipe may lack one that the command sets.
        let recorded = part.as_ref().and_then(|part| part.params());
        if recorded.is_some() {
            spec.params.clear();
        }
        let spec = &spec;
        let source = shared_run::source(job, spec)?;
        let (resume, restart) = match spec.resume && job.is_first() {
            true => Beginning::find(spec, &source.path)?.parts(),
            false => (None, None),
        };
        // A run that starts anew keeps what it was given; its defaults are those of the present recipe.
        let given = restart.as_ref().map(Restart::given).or_else(|| resume.as_ref().map(Resume::given));
        let repeated = spec.replay.as_ref().map(|replay| &replay.given);
        let given = given.or_else(|| repeated.map(|given| given.params.clone()));
        let offered = spec.offered(given.unwrap_or_default())?;
        let start = match (&resume, &restart) {
            (Some(resume), _) => resume.start_options(&spec.start),
            (_, Some(restart)) => restart.start_options(&spec.start, &offered),
            _ => {
                let start = repeated.map_or_else(|| spec.start.clone(), |given| given.start_options(&spec.start));
                part.as_ref().map_or(start.clone(), |part| part.start_options(&start))
            }
        };
        let offered = recorded.unwrap_or(offered);
        let (offered, start) = shared_run::beginning(job, offered, start)?;
        let resume = shared_run::checkpoint(job, resume)?;
        let runtime = open(spec)?;
        enable_load_run(&runtime);
        let _held = job.connect(&runtime, spec.watch);
        let set = spec.params.iter().chain(&offered).map(|(k, v)| (k.clone(), Value::from(v.as_str()))).collect();
        runtime.offer_params(offered);
        if let Some(resume) = &resume {
            // A resumed run keeps its params, except those that are set now and those whose edited defaults are applied.
            let baseline = if spec.edited { resume.defaults() } else { Default::default() };
            runtime.keep_params(resume.params(), baseline);
        }
        if let Some(replay) = &spec.replay {
            runtime.set_texts(&replay.files);
        }
        if let Some(files) = &spec.files {
            runtime.set_texts(files);
        }
        if let Some(seed) = start.seed {
            runtime.host().engine.borrow_mut().recorder.seed(seed as u64);
        }
        let mut about = about(spec, &source, &runtime);
        about.insert("set".into(), Value::Object(set));
        let script = Script::enable(&runtime, (spec, job, &self.control), self.listener.clone(), &source, &about);
        let loaded = source.load(&runtime);
        if loaded.is_err()
            && let Some(begun) = script.take_reporter()
        {
            *reporter = begun;
        }
        match loaded? {
            Loaded::Script if spec.resume => Err(Error::Usage(format!(
                "--resume: {} is a plain script; only recipes have checkpoints",
                source.path.display()
            ))),
            Loaded::Script => {
                shared_run::check_mesh(job, &runtime)?;
                self.finish_script(reporter, &runtime, script.is_open());
                if let Some((end, steps, run_dir)) = script.finish()? {
                    return Ok(Outcome { end, steps, run_dir, weights: None, audit: None });
                }
                about.insert("params".into(), json!({}));
                reporter.tell(&Event::Start { fields: &about });
                let seconds = begun.elapsed().as_secs_f64();
                reporter.tell(&Event::Done { status: "done", steps: 0, seconds, metrics: &[], weights: None });
                Ok(Outcome { end: End::Finished, steps: 0, run_dir: None, weights: None, audit: None })
            }
            Loaded::Recipe(_) if script.is_open() => {
                *reporter = script.take_reporter().unwrap_or_else(|| Reporter::new(self.listener.clone()));
                Err(Error::Usage(format!(
                    "{} returns a recipe and calls pl.run; pl.run is for a script without one",
                    source.path.display()
                )))
            }
            Loaded::Recipe(recipe) => {
                *runtime.host().script.borrow_mut() = None;
                let (runtime, recipe, source) = (&runtime, &recipe, &source);
                let control = &self.control;
                let mut session = Session { spec, control, job, source, runtime, recipe, begun, start, resume };
                session.train(about, restart, reporter)
            }
        }
    }

    /// Warns about options that had no effect on a plain script, which has run.
    fn finish_script(&self, reporter: &Reporter, runtime: &Runtime, has_run: bool) {
        let idle = self.spec.ignored_by_script(&runtime.params().names, has_run);
        if !idle.is_empty() {
            let name = self.spec.recipe.display();
            reporter.warning(&format!("{name} is a plain script: {} had no effect", idle.join(" and ")));
        }
    }
}

/// Returns the fields of `run.json` that are known before the recipe is.
fn about(spec: &RunSpec, source: &Source, runtime: &Runtime) -> Map<String, Value> {
    let engine = runtime.host().engine.borrow();
    let backend = engine.backend();
    let mut out = Map::new();
    let name = source.path.file_stem().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let mut put = |key: &str, value: Value| out.insert(key.into(), value);
    put("schema", SCHEMA.into());
    put("versions", json!({ "perilune": env!("CARGO_PKG_VERSION"), "lua": "5.4" }));
    put("recipe", name.into());
    put("path", source.path.display().to_string().into());
    put("device", backend.name().into());
    put("device_description", backend.describe().into());
    put("threads", spec.threads.into());
    put("precision", spec.start.precision.as_deref().unwrap_or("f32").into());
    put("started", started().into());
    out
}

/// Returns the present time as `run.json` has it.
pub(crate) fn started() -> String {
    jiff::Zoned::now().strftime("%Y-%m-%dT%H:%M:%S%:z").to_string()
}

/// Returns the fields of `run.json` of a new run: those of `about`, and where, how and from what it was started.
pub(crate) fn start_record(spec: &RunSpec, source: &Source, about: &Map<String, Value>) -> Map<String, Value> {
    let mut record = about.clone();
    record.insert("command".into(), spec.command.clone().into());
    let here = std::env::current_dir().map(|d| d.display().to_string()).ok();
    record.insert("directory".into(), here.into());
    record.insert("commit".into(), crate::git::commit(source.dir()).into());
    record.insert("host".into(), hostname().into());
    record.insert("pid".into(), std::process::id().into());
    record
}

/// Returns a recipe's file and those it required: path below `recipe/`, text.
pub(crate) fn own_files(source: &Source, required: Vec<(PathBuf, String)>) -> Vec<(PathBuf, String)> {
    let name = source.path.file_name().map_or_else(|| PathBuf::from("recipe.lua"), PathBuf::from);
    let mut out = vec![(name, source.text.clone())];
    let inside = |path: &Path| path.strip_prefix(source.dir()).unwrap_or(path).to_path_buf();
    out.extend(required.into_iter().map(|(path, text)| (inside(&path), text)));
    out
}

/// Returns the status of a run that has ended without an error.
fn status(end: End) -> &'static str {
    if end == End::Finished { "done" } else { "interrupted" }
}

/// The run of a recipe that has been loaded.
struct Session<'a> {
    spec: &'a RunSpec,
    control: &'a Control,
    job: &'a Job,
    source: &'a Source,
    runtime: &'a Runtime,
    recipe: &'a Recipe,
    begun: Instant,
    /// What overrides the recipe: options, and what a resumed run keeps.
    start: StartOptions,
    resume: Option<Resume>,
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

    fn train(
        &mut self,
        mut about: Map<String, Value>,
        restart: Option<Restart>,
        reporter: &mut Reporter,
    ) -> Result<Outcome> {
        let values = self.recipe.params()?;
        let (run, handover) = self.build()?;
        self.runtime.host().fix_mesh();
        shared_run::check_mesh(self.job, self.runtime)?;
        let samples: Vec<(String, u64)> =
            run.splits().into_iter().filter_map(|s| Some((s.clone(), run.samples(&s)?))).collect();
        {
            // The recipe may have chosen its mesh.
            let engine = self.runtime.host().engine.borrow();
            about.insert("device_description".into(), engine.backend().describe().into());
            if engine.mesh().devices() > 1 {
                about.insert("mesh".into(), engine.mesh().to_string().into());
                about.insert("zero".into(), engine.zero.into());
            }
            if engine.mesh().size(Axis::Cp) > 1 {
                about.insert("keys".into(), engine.key_exchange().name().into());
            }
            if let Some(shards) = engine.strict_shards() {
                about.insert("strict_shards".into(), shards.into());
            }
            let before = self.resume.as_ref().map(|resume| resume.record.get("strict_shards").and_then(Value::as_u64));
            let now = engine.strict_shards().map(|n| n as u64);
            if let Some(before) = before.filter(|before| *before != now) {
                let cure = before.map_or("without --strict-shards".into(), |n| format!("with --strict-shards {n}"));
                reporter
                    .warning(&format!("sums are added in another order than before; resume {cure} for the same bits"));
            }
            // On another mesh, bits are others anyway.
            let recorded = self.resume.as_ref().map(|resume| &resume.record);
            let text = |key: &str| recorded.and_then(|record| record.get(key)).and_then(Value::as_str);
            if let Some(before) = text("keys").filter(|before| *before != engine.key_exchange().name())
                && text("mesh") == Some(&engine.mesh().to_string())
            {
                reporter.warning(&format!(
                    "attention adds in another order than before; resume with keys={before} in the mesh for the same bits"
                ));
            }
        }
        about.insert("recipe".into(), self.recipe.name().into());
        about.insert("params".into(), params::to_json(&values));
        about.insert("defaults".into(), json!(self.runtime.params().defaults));
        about.insert("seed".into(), run.seed().into());
        about.insert("precision".into(), run.precision().into());
        about.insert("steps".into(), run.steps().into());
        about.insert("parameters".into(), run.num_parameters().into());
        about.insert("frozen_parameters".into(), run.num_frozen().into());
        let sizes = samples.iter().map(|(s, n)| (s.clone(), Value::from(*n))).collect();
        about.insert("samples".into(), Value::Object(sizes));

        shared_run::agree(self.job, &about, &run, self.runtime)?;
        let mut data = self.data();
        // Nothing has been written, and no step taken.
        if self.job.is_first() {
            for text in data.begin(run.count(), &|path, bytes| reporter.tell(&Event::ComparesData { path, bytes }))? {
                reporter.warning(&text);
            }
        }
        // The data of a resumed run and of a replay are those that were checked before.
        let repeated = self.resume.is_some() || self.spec.replay.is_some();
        if self.job.is_first() && !repeated && !self.spec.no_data_check {
            let strict = self.spec.strict || self.recipe.strict();
            data_check::before_first_step(&run, strict, self.job, self.runtime.host().interrupt.clone(), reporter)?;
        }
        reporter.tell(&Event::Training);
        if let Some(store) = self.spec.mlflow.as_ref().filter(|_| self.job.is_first()) {
            // Before anything is written.
            mlflow::open_store(store)?;
        }
        let origin = self.branch(&run)?;
        let anew = restart.as_ref().map(|r| (r.dir.clone(), r.reason.clone()));
        let mut checkpoints = self.checkpoints((&about, data.json()), restart, &run, reporter)?;
        let mut tail = LogTail::default();
        if let Some(resume) = &self.resume {
            if self.job.is_first() {
                let (mut dir, found) = resume.open_dir()?;
                dir.update_soon([(DATA, data.json())])?;
                (reporter.dir, tail) = (Some(dir), found);
            }
            tail = shared_run::tail(self.job, tail)?;
            shared_run::sample_log(self.job, resume, &run)?;
            about.insert("resumed".into(), resume.step().into());
        }
        if let Some(part) = self.part() {
            tail = part.recording.tail(part.start_step());
            if let Some(start) = &part.start {
                shared_run::sample_log(self.job, start, &run)?;
            }
        }
        if self.resume.is_none()
            && self.part().is_none_or(|part| part.start.is_none())
            && let (Some(dir), Some(log)) = (&reporter.dir, run.sample_log())
        {
            *log.borrow_mut() = SampleLog::new(&sample_file::chain_name(dir.id()));
        }
        self.open_mlflow(&run, reporter)?;
        let dir = reporter.dir.as_ref().map(|d| d.path.clone()).unwrap_or_default();
        let dir = self.share_dir(dir)?;
        about.insert("run_dir".into(), dir.display().to_string().into());
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
        let start = StartOptions { precision: Some(run.precision()), ..self.start.clone() };
        let replay = self.spec.replay.as_ref();
        let mut reloader = Reloader::new(self.runtime, self.source, start, self.control.clone(), replay);
        if self.spec.watch && self.job.is_first() {
            reloader.watch_files()?;
        }
        let run = Rc::new(run);
        let mut training = TrainingLoop::new(
            run.clone(),
            values,
            reporter,
            (self.control, self.job),
            (&mut checkpoints, &mut data),
            Some(reloader),
        );
        training.run.time_data(training.data_time.clone())?;
        training.announce_version();
        training.monitor = self.runtime.host().engine.borrow().backend().probe().and_then(Monitor::start);
        {
            let devices = self.runtime.host().engine.borrow().mesh().devices();
            training.performance = Performance::new(training.reporter.dir.as_ref().map(RunDir::record), devices);
        }
        training.is_observed = replay.is_none();
        if training.is_observed {
            let dir = Some(dir).filter(|dir| !dir.as_os_str().is_empty());
            self.runtime.host().observed.keep(dir);
        }
        training.pass_on()?;
        training.set_policies((self.spec.on_nan.clone(), self.spec.on_spike.clone()))?;
        training.remember(&tail.history);
        training.evaluated = tail.evaluated.into_iter().map(|(split, values)| (split, (run.count(), values))).collect();
        training.until = replay.map(|r| r.steps);
        training.pause = self.spec.until;
        training.audit = self.part().map(|part| self.audit(part, &training)).transpose()?;
        if let Some(options) = replay.and_then(|replay| replay.digests.clone()) {
            let dir = training.reporter.dir.as_ref().map(RunDir::handle);
            training.digests = dir.map(|dir| DigestLog::create(dir, options)).transpose()?;
        }
        let end = loop {
            let end = training.train()?;
            if end == End::Paused && training.audit.is_none() {
                self.pause(&mut training)?;
            }
            if end != End::Finished {
                break end;
            }
            match self.conclude(&mut training) {
                Ok(end) => break end,
                // The version before may have more steps.
                Err(error) => training.recover(error)?,
            }
        };
        training.settle()?;
        training.observe_end(status(end))?;
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

    /// Begins or continues the run in MLflow, if it is asked for.
    fn open_mlflow(&self, run: &Run, reporter: &mut Reporter) -> Result<()> {
        let Some(dir) = reporter.dir.as_mut() else { return Ok(()) };
        let known = dir.record().get(MLFLOW).and_then(|known| known["store"].as_str()).map(PathBuf::from);
        let Some(store) = self.spec.mlflow.clone().or(known) else { return Ok(()) };
        let mlflow = Mlflow::open(&store, dir.record(), &dir.path, (run.count(), self.spec.branch))?;
        dir.update_soon([(MLFLOW, mlflow.record(&store))])?;
        reporter.mlflow = Some(mlflow);
        Ok(())
    }

    /// Creates the record of the data that the run reads, with what it is compared with.
    fn data(&self) -> DataRecord {
        let spec = self.spec;
        let (known, compare) = match (&spec.replay, &self.resume) {
            (Some(replay), _) => (replay.data.clone(), Compare::Replay),
            (_, Some(resume)) => {
                (Entry::all(&resume.record), if spec.changed_data { Compare::Accept } else { Compare::Resume })
            }
            _ => (Vec::new(), Compare::New),
        };
        DataRecord::new(self.runtime.policy().clone(), known, compare, spec.verify_data)
    }

    /// Creates the schedule of checkpoints, and the run directory unless the run is resumed.
    fn checkpoints(
        &self,
        (about, data): (&Map<String, Value>, Value),
        restart: Option<Restart>,
        run: &Run,
        reporter: &mut Reporter,
    ) -> Result<Checkpoints> {
        let fields: Map<String, Value> = ["recipe", "params", "seed", "precision", "versions"]
            .iter()
            .map(|k| (k.to_string(), about[*k].clone()))
            .collect();
        let create = |dir: Option<&Directory>, record| {
            let (every, retention) = (self.spec.checkpoint_every, self.spec.retention.clone());
            Checkpoints::new(dir, every, retention, fields, run, record)
        };
        if !self.job.is_first() {
            return create(None, self.resume.as_ref().map(|resume| &resume.record));
        }
        if let Some(resume) = &self.resume {
            self.grant(&resume.dir)?;
            let mut out = create(Some(&resume.open()?), Some(&resume.record))?;
            if self.spec.discard_later {
                out.forget_after(resume.step(), reporter)?;
            }
            return Ok(out);
        }
        // Wrong options are reported before a directory is made.
        self.spec.retention.choose(run)?;
        let dir = self.create_dir((about, data), restart)?;
        self.grant(&dir.path)?;
        let out = create(Some(dir.handle()), None)?;
        reporter.dir = Some(dir);
        Ok(out)
    }

    /// Returns the run directory in all processes. What the recipe writes there is written by process 0 only; the others make the
    /// same checks where they can see the directory.
    fn share_dir(&self, dir: PathBuf) -> Result<PathBuf> {
        let shared = self.job.share("the run directory", || Ok(dir.display().to_string().into()))?;
        let dir = if self.job.is_first() { dir } else { PathBuf::from(shared.as_str().unwrap_or_default()) };
        if !self.job.is_first() && dir.is_dir() {
            self.grant(&dir)?;
        }
        Ok(dir)
    }

    /// Lets the recipe write in the run directory.
    fn grant(&self, dir: &Path) -> Result<()> {
        self.runtime.policy().grant_directory(dir).map_err(|e| Error::System(e.to_string()))
    }

    fn create_dir(&self, (about, data): (&Map<String, Value>, Value), restart: Option<Restart>) -> Result<RunDir> {
        let files = own_files(self.source, self.runtime.required());
        let mut record = start_record(self.spec, self.source, about);
        record.insert("files".into(), history::hashes(&files, Path::new("")));
        record.insert(DATA.into(), data);
        if let Some(precision) = &self.start.precision {
            record.insert(SET_PRECISION.into(), precision.as_str().into());
        }
        if let Some(seed) = self.start.perturb {
            record.insert(PERTURB.into(), seed.into());
        }
        let claim = match restart {
            Some(restart) => restart.claim()?,
            None => Claim::take(self.spec.run_dir.as_deref(), &self.recipe.name(), self.spec.overwrite)?,
        };
        RunDir::create(claim, record, &files)
    }

    /// Evaluates a run that stops before its last step. Its checkpoint has been written, so the evaluation changes nothing for the
    /// run that continues. The test split waits for the end.
    fn pause(&self, training: &mut TrainingLoop<'_>) -> Result<()> {
        let splits = training.run.evaluated_splits();
        let mut evaluations = Vec::new();
        for split in splits.iter().filter(|name| *name != "test") {
            evaluations.push((split.as_str(), training.evaluate(split)?));
        }
        let run_dir = training.reporter.dir.as_ref().map(|d| d.path.clone()).unwrap_or_default();
        let (step, steps) = (training.run.count(), training.run.steps());
        training.reporter.tell(&Event::Paused { step, steps, evaluations: &evaluations, run_dir: &run_dir });
        Ok(())
    }

    /// Runs the last evaluations and `recipe.finish`.
    fn conclude(&self, training: &mut TrainingLoop<'_>) -> Result<End> {
        if let Some(reason) = training.run.stop_reason()? {
            training.reporter.stopped_early(training.run.count(), &reason)?;
        }
        let mut evaluations = Vec::new();
        let splits = training.run.evaluated_splits();
        for split in &splits {
            if let Some(code) = self.job.stop_requested(self.control)? {
                return Ok(End::Stopped { code });
            }
            evaluations.push((split.as_str(), training.evaluate(split)?));
        }
        let dir = training.reporter.dir.as_ref().map(|d| d.path.clone()).unwrap_or_default();
        let steps = training.run.count();
        training.reporter.tell(&Event::Finished { steps, evaluations: &evaluations, run_dir: &dir });
        training.rng = training.run.rng();
        training.aside(|run| run.finish())?;
        training.pass_on()?;
        Ok(self.job.stop_requested(self.control)?.map_or(End::Finished, |code| End::Stopped { code }))
    }

    /// Passes the events of the end to the sinks.
    fn sink_last(&self, run: &Run, reporter: &Reporter) -> Result<()> {
        if self.spec.replay.is_some() {
            return Ok(());
        }
        for (step, event) in reporter.take_events(false) {
            run.sink(step, &event)?;
        }
        self.runtime.host().observed.end();
        Ok(())
    }

    /// Hashes the weights, waits for the hashes of the data, completes `run.json`, and compares a replay with its original.
    fn close(
        &self,
        run: &Run,
        (end, measured): (End, Value),
        mut audit: Option<Audit>,
        data: &mut DataRecord,
        reporter: &mut Reporter,
    ) -> Result<Outcome> {
        let seconds = self.begun.elapsed().as_secs_f64();
        let weights = weights_hash(run)?;
        self.job.agree("the States after the last step", || format!("BLAKE3 of all States: {weights}"))?;
        let (step, steps) = (run.count(), run.steps());
        let status = status(end);
        if let End::Stopped { code } = end {
            let run_dir = reporter.dir.as_ref().map(|d| d.path.clone()).unwrap_or_default();
            let checkpoint = reporter.checkpointed.as_deref();
            reporter.tell(&Event::Stopped { code, step, steps, run_dir: &run_dir, checkpoint });
        }
        if end == End::Finished && self.job.is_first() {
            data.finish(|| self.control.stop_requested().is_some(), || reporter.tell(&Event::HashesData));
        }
        let metrics = object(&reporter.latest);
        if let Some(dir) = reporter.dir.as_mut() {
            if let Some(log) = run.sample_log().filter(|_| audit.is_none()) {
                run.settle_sample_log()?;
                dir.write_samples(&mut log.borrow_mut(), true)?;
            }
            dir.finish([
                ("status", status.into()),
                ("steps_done", step.into()),
                ("seconds", numbers::json(seconds)),
                ("metrics", metrics),
                (PERFORMANCE, measured),
                ("weights", weights.as_str().into()),
                (DATA, data.json()),
            ])?;
        }
        reporter.finish_mlflow(status)?;
        let (metrics, hash) = (&reporter.latest, Some(weights.as_str()));
        reporter.tell(&Event::Done { status, steps: step, seconds, metrics, weights: hash });
        if let Some(audit) = audit.as_mut().filter(|_| !matches!(end, End::Stopped { .. })) {
            audit.end(run, &weights)?;
        }
        if let Some(was) = self.spec.replay.as_ref().and_then(|r| r.weights.as_ref())
            && end == End::Finished
        {
            if *was != weights {
                let text = format!(
                    "the weights differ from those of the run: {weights}, then {was}\n  hint: --steps .. finds the first step that differs"
                );
                return Err(Error::Refused(text));
            }
            reporter.tell(&Event::Reproduced);
        }
        let run_dir = reporter.dir.as_ref().map(|d| d.path.clone());
        let audit = audit.map(|audit| audit.result);
        Ok(Outcome { end, steps: step, run_dir, weights: Some(weights), audit })
    }
}
