//! Starts a run: finds the recipe and the checkpoint, opens the runtime, loads the recipe, and reports how its run ends.
//!
//! The run of the recipe is in `session`.

use crate::audit::Audited;
use crate::cancel::Control;
use crate::error::{Error, Result};
use crate::events::{Event, Listener, Reporter, SCHEMA};
use crate::job::Job;
use crate::numbers::object;
use crate::restart::{Beginning, Restart};
use crate::resume::Resume;
use crate::saved_run::enable_load_run;
use crate::script_run::Script;
use crate::session::{Session, started};
use crate::shared_run;
use crate::source::Source;
use crate::spec::RunSpec;
use crate::training_loop::End;
use perilune_dist::Links;
use perilune_lua::{Cause, Loaded, Runtime};
use serde_json::{Map, Value, json};
use std::path::PathBuf;
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
