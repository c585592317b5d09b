//! Keeps the run of a plain script that calls `pl.run`: its directory, its events and its stop requests.

use crate::cancel::Control;
use crate::claim::Claim;
use crate::error::{Error, Result};
use crate::events::{Event, Listener, Reporter};
use crate::history;
use crate::job::Job;
use crate::numbers::{self, object};
use crate::params;
use crate::rundir::RunDir;
use crate::session::{own_files, start_record};
use crate::source::Source;
use crate::spec::RunSpec;
use crate::training_loop::End;
use perilune_lua::{Logged, LoggedValue, Runtime, ScriptDriver, ScriptRun, StepNumbers};
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};
use std::time::Instant;

/// The run that a script may begin.
pub(crate) struct Script {
    runtime: Weak<perilune_lua::Host>,
    spec: RunSpec,
    job: Job,
    control: Control,
    listener: Rc<dyn Listener>,
    source: Source,
    /// The fields of `run.json` that are known before the script runs.
    about: Map<String, Value>,
    open: RefCell<Option<Open>>,
}

/// A run that has begun.
struct Open {
    reporter: Reporter,
    begun: Instant,
    /// The length of the run, if the script gave one.
    length: Option<u64>,
    /// The last step that was reported, and when.
    step: u64,
    at: Instant,
}

impl Script {
    /// Lets the script of a runtime begin a run.
    pub fn enable(
        runtime: &Runtime,
        (spec, job, control): (&RunSpec, &Job, &Control),
        listener: Rc<dyn Listener>,
        source: &Source,
        about: &Map<String, Value>,
    ) -> Rc<Script> {
        let script = Rc::new(Script {
            runtime: Rc::downgrade(runtime.host()),
            spec: spec.clone(),
            job: job.clone(),
            control: control.clone(),
            listener,
            source: source.clone(),
            about: about.clone(),
            open: RefCell::default(),
        });
        *runtime.host().script.borrow_mut() = Some(script.clone());
        script
    }

    /// Whether the script has begun a run.
    pub fn is_open(&self) -> bool {
        self.open.borrow().is_some()
    }

    /// Returns the reporter of a run whose script has failed, if it has begun one.
    pub fn take_reporter(&self) -> Option<Reporter> {
        let mut open = self.open.borrow_mut().take()?;
        // The error of the script is the one to report.
        let _ = self.drain(&mut open, None);
        Some(open.reporter)
    }

    /// Ends the run of a script that has ended: reports what it has logged since its last step, and completes `run.json`. Returns
    /// the end and the steps.
    pub fn finish(&self) -> Result<Option<(End, u64, Option<PathBuf>)>> {
        let Some(mut open) = self.open.borrow_mut().take() else { return Ok(None) };
        self.drain(&mut open, None)?;
        open.reporter.tell(&Event::LoopEnded);
        let run_dir = open.reporter.dir.as_ref().map(|dir| dir.path.clone());
        let shown = run_dir.clone().unwrap_or_default();
        let end = self.job.stop_requested(&self.control)?.map_or(End::Finished, |code| End::Stopped { code });
        let steps = open.step;
        match end {
            End::Stopped { code } => {
                let length = open.length.unwrap_or(steps);
                open.reporter.tell(&Event::Stopped {
                    code,
                    step: steps,
                    steps: length,
                    run_dir: &shown,
                    checkpoint: None,
                });
            }
            _ => open.reporter.tell(&Event::Finished { steps, evaluations: &[], run_dir: &shown }),
        }
        let status = if end == End::Finished { "done" } else { "interrupted" };
        let seconds = open.begun.elapsed().as_secs_f64();
        let metrics = object(&open.reporter.latest);
        if let Some(dir) = open.reporter.dir.as_mut() {
            dir.finish([
                ("status", status.into()),
                ("steps_done", steps.into()),
                ("seconds", numbers::json(seconds)),
                ("metrics", metrics),
            ])?;
        }
        open.reporter.tell(&Event::Done { status, steps, seconds, metrics: &open.reporter.latest, weights: None });
        Ok(Some((end, steps, run_dir)))
    }

    fn begin(&self, run: ScriptRun) -> Result<(String, Option<PathBuf>)> {
        if self.is_open() {
            return Err(Error::Usage("the script has begun a run already; a script has one".into()));
        }
        let host = self.runtime.upgrade().ok_or_else(|| Error::System("the runtime has ended".into()))?;
        let file = self.about.get("recipe").and_then(Value::as_str).unwrap_or("script").to_string();
        let name = run.name.unwrap_or(file);
        let mut record = start_record(&self.spec, &self.source, &self.about);
        record.insert("recipe".into(), name.as_str().into());
        record.insert("params".into(), params::to_json(&run.params));
        record.insert("steps".into(), run.steps.unwrap_or(0).into());
        let files = own_files(&self.source, Vec::new());
        record.insert("files".into(), history::hashes(&files, Path::new("")));
        let mut reporter = Reporter::new(self.listener.clone());
        if self.job.is_first() {
            let claim = Claim::take(self.spec.run_dir.as_deref(), &name, self.spec.overwrite)?;
            let dir = RunDir::create(claim, record.clone(), &files)?;
            host.policy.grant_directory(&dir.path).map_err(|e| Error::System(e.to_string()))?;
            reporter.dir = Some(dir);
        }
        let dir = reporter.dir.as_ref().map(|dir| dir.path.clone());
        host.observed.keep(dir.clone());
        record.insert("run_dir".into(), dir.as_ref().map(|d| d.display().to_string()).into());
        reporter.tell(&Event::Training);
        reporter.tell(&Event::Start { fields: &record });
        if let Some(steps) = run.steps {
            reporter.tell(&Event::Version { steps, epoch: None, tokens_per_sample: None, peak: None });
        }
        let now = Instant::now();
        reporter.begin(0.0);
        *self.open.borrow_mut() = Some(Open { reporter, begun: now, length: run.steps, step: 0, at: now });
        Ok((name, dir))
    }

    /// Reports what has been logged. The figures of `step`, the one that has ended, are its metrics, if `loss` is among them.
    fn drain(&self, open: &mut Open, step: Option<u64>) -> Result<()> {
        let Some(host) = self.runtime.upgrade() else { return Ok(()) };
        let logged = host.observed.take();
        let figure = |v: &Logged| match v.value {
            LoggedValue::Figure(x) if Some(v.step) == step => Some((v.name.clone(), x)),
            _ => None,
        };
        let mut metrics: Vec<(String, f64)> = logged.iter().filter_map(figure).collect();
        let Some(at) = metrics.iter().position(|(name, _)| name == "loss") else {
            return open.reporter.logged(&logged);
        };
        let (_, loss) = metrics.remove(at);
        // Of two values of one name the last one stands.
        let others = metrics.into_iter().filter(|(name, _)| name != "loss");
        let named: std::collections::BTreeMap<String, f64> = others.collect();
        let numbers = StepNumbers { loss, metrics: named.into_iter().collect(), samples: 0 };
        open.reporter.step(step.unwrap_or_default(), &numbers)?;
        let others: Vec<Logged> = logged.into_iter().filter(|v| figure(v).is_none()).collect();
        open.reporter.logged(&others)
    }

    fn report(&self, step: u64) -> Result<bool> {
        let mut open = self.open.borrow_mut();
        let Some(open) = open.as_mut() else { return Ok(true) };
        if step > open.step {
            let seconds = open.at.elapsed().as_secs_f64();
            (open.step, open.at) = (step, Instant::now());
            open.reporter.tell(&Event::Issued { step, seconds, data_seconds: 0.0, flops: 0.0, rate: None });
        }
        self.drain(open, Some(step))?;
        Ok(self.job.stop_requested(&self.control)?.is_none())
    }
}

impl ScriptDriver for Script {
    fn open(&self, run: ScriptRun) -> std::result::Result<(String, Option<PathBuf>), String> {
        self.begin(run).map_err(|e| e.to_string())
    }

    fn step(&self, step: u64) -> std::result::Result<bool, String> {
        self.report(step).map_err(|e| e.to_string())
    }
}
