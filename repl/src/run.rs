//! `perilune run`: trains a recipe, or runs a plain script.

use crate::checkpoints::Checkpoints;
use crate::device::{DeviceArgs, key_value};
use crate::events::{self, Events, SCHEMA};
use crate::failure::Failure;
use crate::format::{grouped, metrics};
use crate::keep::KeepArgs;
use crate::ledger;
use crate::monitor::Monitor;
use crate::progress::Progress;
use crate::prompt;
use crate::replay::Script;
use crate::resume::Resume;
use crate::rundir::{self, Kept, RunDir};
use crate::screen::{Mode, Screen};
use crate::signals::{Asked, Signals};
use crate::source::Source;
use crate::told;
use crate::train::{End, Trainer};
use crate::watch::Watch;
use perilune_lua::{Loaded, ParamValue, Recipe, Run, Runtime, RuntimeOptions, StateMigration};
use perilune_plan::Backend;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Instant;

#[derive(clap::Args, Debug)]
pub struct RunArgs {
    /// The recipe or script, a .lua file
    recipe: PathBuf,
    /// Set a param of the recipe; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    set: Vec<(String, String)>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Train this many steps, whatever the recipe says
    #[arg(long, value_name = "N")]
    steps: Option<u32>,
    /// The seed of all random numbers
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i64).range(0..))]
    seed: Option<i64>,
    /// Where results go; runs/NAME-DATE-TIME by default
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Print events as JSON, one object a line
    #[arg(long)]
    json: bool,
    /// Print only results and what the recipe prints
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
    /// Write a checkpoint every N steps; one is written at the end, and when a signal stops the run
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    checkpoint_every: Option<u64>,
    #[command(flatten)]
    keep: KeepArgs,
    /// Go on from the last checkpoint of the run in --run-dir, or of the recipe's newest run
    #[arg(long)]
    resume: bool,
    /// With --resume: the recipe was edited since; apply that as --watch would, with its own params and the States that fit
    #[arg(long, requires = "resume")]
    edited: bool,
    /// Apply edits of the recipe and of the files it requires while it trains
    #[arg(long)]
    watch: bool,
    /// When the loss or the norm of the gradients is NaN or infinite: stop, skip the update, or warn and go on
    #[arg(long, value_name = "stop|skip|warn", value_parser = ["stop", "skip", "warn"], hide_possible_values = true)]
    on_nan: Option<String>,
    /// When the loss leaps far above what it was: warn, skip the update, stop, or nothing (off)
    #[arg(long, value_name = "warn|skip|stop|off", value_parser = ["warn", "skip", "stop", "off"], hide_possible_values = true)]
    on_spike: Option<String>,
    /// What `perilune replay` repeats.
    #[arg(skip)]
    pub script: Option<Script>,
}

impl RunArgs {
    pub fn recipe(&self) -> &Path {
        &self.recipe
    }

    /// The same run once more, from its start, elsewhere.
    pub fn again(&mut self, run_dir: Option<PathBuf>, json: bool, quiet: bool) {
        (self.run_dir, self.json, self.quiet) = (run_dir, json, quiet);
        (self.resume, self.edited, self.watch) = (false, false, false);
    }

    /// What the command lines of the run say of params, this one first: `--steps` and `--seed` as values for params of those
    /// names, then what it was started with.
    fn offered(&self, resume: Option<&Resume>) -> Result<Vec<(String, String)>, Failure> {
        let mut out = Vec::new();
        for (name, value) in [("steps", self.steps.map(i64::from)), ("seed", self.seed)] {
            let Some(value) = value else { continue };
            if self.set.iter().any(|(key, _)| key == name) {
                return Err(Failure::Usage(format!(
                    "--{name} and --set {name}=… say the same thing twice; give one of them"
                )));
            }
            out.push((name.to_string(), value.to_string()));
        }
        for (name, value) in resume.map(Resume::given).unwrap_or_default() {
            if !out.iter().chain(&self.set).any(|(key, _)| *key == name) {
                out.push((name, value));
            }
        }
        Ok(out)
    }
}

pub fn run(args: RunArgs) -> Result<(), Failure> {
    let begun = Instant::now();
    let mode = if args.json {
        Mode::Json
    } else if args.quiet {
        Mode::Quiet
    } else {
        Mode::Human
    };
    let screen = Rc::new(Screen::new(mode));
    let mut events = Events::new(screen.clone());
    let signals = Signals::install()?;
    let mut result = with(&args, &mut events, &signals, begun);
    if let Err(Failure::Recipe(e)) = &result
        && e.message == perilune_lua::RecipeError::LEFT
    {
        events.warning(&e.message);
        if let Some(dir) = events.dir.as_mut() {
            dir.flush().and_then(|()| dir.update([("status", Value::from("interrupted"))]))?;
        }
        result = Err(Failure::Signal(130));
    }
    if let Err(failure) = &result
        && !matches!(failure, Failure::Signal(_))
    {
        events.error(failure);
        if let Some(dir) = events.dir.as_mut() {
            let fields = [
                ("status", Value::from("failed")),
                ("error", Value::from(failure.message())),
                ("seconds", json!(begun.elapsed().as_secs_f64())),
                ("metrics", events::object(&events.latest)),
            ];
            // The failure itself is what the person must hear of; a full disk may be its cause.
            let _ = dir.flush().and_then(|()| dir.update(fields));
            if mode == Mode::Human {
                screen.line(&screen.dim(&format!("the record of the failed run is in {}", dir.path.display())));
            }
        }
    }
    result
}

fn with(args: &RunArgs, events: &mut Events, signals: &Signals, begun: Instant) -> Result<(), Failure> {
    let source = match &args.script {
        Some(script) => Source { path: args.recipe.clone(), text: script.text()?.to_string() },
        None => Source::read(&args.recipe)?,
    };
    let resume = match args.resume {
        true => Some(Resume::find(args.run_dir.as_deref(), &source.path)?),
        false => None,
    };
    let offered = args.offered(resume.as_ref())?;
    let seed = args.seed.or_else(|| resume.as_ref().and_then(Resume::seed));
    let backend = args.device.open()?;
    let screen = events.screen.clone();
    let print = { move |text: &str| screen.print(text) };
    let options =
        RuntimeOptions { backend: backend.clone(), params: args.set.clone(), strict: true, print: Rc::new(print) };
    let runtime = Runtime::new(options)?;
    told::plans(&runtime, &events.screen);
    told::notices(&runtime, &events.screen);
    let set = args.set.iter().chain(&offered).map(|(k, v)| (k.clone(), Value::from(v.as_str()))).collect();
    runtime.offer_params(offered);
    let at_breakpoint =
        prompt::pause(prompt::InRun::new(signals), Some(events.screen.clone()), prompt::Desk::default());
    *runtime.host().pause.borrow_mut() = Some(at_breakpoint);
    if let Some(resume) = &resume {
        // A run that goes on has its params, unless the command line says otherwise, or an edit that is to be applied.
        let baseline = if args.edited { resume.defaults() } else { Default::default() };
        runtime.keep_params(resume.params(), baseline);
    }
    if let Some(script) = &args.script {
        runtime.set_texts(&script.files);
    }
    if let Some(seed) = seed {
        runtime.host().engine.borrow_mut().recorder.seed(seed as u64);
    }
    let mut about = about(args, &source, backend.as_ref(), args.device.threads());
    about.insert("set".into(), Value::Object(set));
    match source.load(&runtime)? {
        Loaded::Script if args.resume => Err(Failure::Usage(format!(
            "--resume: {} is a plain script; only recipes have checkpoints",
            source.path.display()
        ))),
        Loaded::Script => {
            finish_script(args, events, &runtime);
            about.insert("params".into(), json!({}));
            events.start(&about);
            events.done("done", 0, begun.elapsed().as_secs_f64(), None);
            Ok(())
        }
        Loaded::Recipe(recipe) => {
            let job = Job {
                args,
                source: &source,
                runtime: &runtime,
                recipe: &recipe,
                device: backend.describe(),
                backend: backend.clone(),
                begun,
                seed,
                resume,
            };
            job.train(about, events, signals)
        }
    }
}

/// A script has run already; options that had no effect are named.
fn finish_script(args: &RunArgs, events: &Events, runtime: &Runtime) {
    let names = runtime.params().names;
    let given = [
        ("--steps", args.steps.is_some() && !names.iter().any(|n| n == "steps")),
        ("--run-dir", args.run_dir.is_some()),
        ("--precision", args.device.precision.is_some()),
        ("--memory-budget", args.device.memory_budget.is_some()),
        ("--checkpoint-every", args.checkpoint_every.is_some()),
        ("--watch", args.watch),
        ("--on-nan", args.on_nan.is_some()),
        ("--on-spike", args.on_spike.is_some()),
    ];
    let idle: Vec<&str> = given.into_iter().chain(args.keep.given()).filter(|o| o.1).map(|o| o.0).collect();
    if !idle.is_empty() {
        let name = args.recipe.display();
        events.warning(&format!("{name} is a plain script: {} had no effect", idle.join(" and ")));
    }
}

/// What `start` and `run.json` say before the recipe is known.
fn about(args: &RunArgs, source: &Source, backend: &dyn Backend, threads: usize) -> Map<String, Value> {
    let mut out = Map::new();
    let name = source.path.file_stem().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let mut put = |key: &str, value: Value| out.insert(key.into(), value);
    put("schema", SCHEMA.into());
    put("versions", json!({ "perilune": env!("CARGO_PKG_VERSION"), "lua": "5.4" }));
    put("recipe", name.into());
    put("path", source.path.display().to_string().into());
    put("device", backend.name().into());
    put("device_description", backend.describe().into());
    put("threads", threads.into());
    put("precision", args.device.precision.as_deref().unwrap_or("f32").into());
    put("started", jiff::Zoned::now().strftime("%Y-%m-%dT%H:%M:%S%:z").to_string().into());
    out
}

/// A recipe's file and those it required: path below `recipe/`, text.
fn own_files(source: &Source, required: Vec<(PathBuf, String)>) -> Vec<(PathBuf, String)> {
    let name = source.path.file_name().map_or_else(|| PathBuf::from("recipe.lua"), PathBuf::from);
    let mut out = vec![(name, source.text.clone())];
    let inside = |path: &Path| path.strip_prefix(source.dir()).unwrap_or(path).to_path_buf();
    out.extend(required.into_iter().map(|(path, text)| (inside(&path), text)));
    out
}

struct Job<'a> {
    args: &'a RunArgs,
    source: &'a Source,
    runtime: &'a Runtime,
    recipe: &'a Recipe,
    device: String,
    backend: Rc<dyn Backend>,
    begun: Instant,
    seed: Option<i64>,
    resume: Option<Resume>,
}

impl Job<'_> {
    fn start(&self) -> Result<(Run, StateMigration), Failure> {
        if let Some(steps) = self.args.steps.or_else(|| self.resume.as_ref().and_then(Resume::steps))
            && !self.runtime.params().names.iter().any(|n| n == "steps")
        {
            self.recipe.set_steps(i64::from(steps))?;
        }
        let recorded = self.resume.as_ref().and_then(Resume::precision);
        let precision = self.args.device.precision.clone().or(recorded);
        let run = self.recipe.start(self.seed, precision.as_deref(), self.args.device.memory_budget)?;
        let mut handover = StateMigration::default();
        if let Some(resume) = &self.resume {
            handover = resume.restore(&run, self.args.edited)?;
            if self.args.edited {
                run.rehearse()?;
            }
        }
        Ok((run, handover))
    }

    fn train(&self, mut about: Map<String, Value>, events: &mut Events, signals: &Signals) -> Result<(), Failure> {
        let params = self.recipe.params()?;
        let (run, handover) = self.start()?;
        let splits = run.splits();
        about.insert("recipe".into(), self.recipe.name().into());
        about.insert("params".into(), events::params(&params));
        about.insert("defaults".into(), json!(self.runtime.params().defaults));
        about.insert("seed".into(), run.seed().into());
        about.insert("precision".into(), run.precision().into());
        about.insert("steps".into(), run.steps().into());
        about.insert("parameters".into(), run.num_parameters().into());
        let sizes = splits.iter().filter_map(|s| Some((s.clone(), Value::from(run.samples(s)?)))).collect();
        about.insert("samples".into(), Value::Object(sizes));

        events.screen.training.set(true);
        signals.soften();
        let said: Map<String, Value> = ["recipe", "params", "seed", "precision", "versions"]
            .iter()
            .map(|k| (k.to_string(), about[*k].clone()))
            .collect();
        let record = self.resume.as_ref().map(|r| &r.record);
        let mut checkpoints = {
            let dir = self.resume.as_ref().map(|r| r.dir.clone());
            let found = |dir: &Path| {
                let (every, keep) = (self.args.checkpoint_every, self.args.keep.clone());
                Checkpoints::new(dir, every, keep, said, &run, record)
            };
            match dir {
                Some(dir) => found(&dir)?,
                None => {
                    // What is wrong with the arguments is said before a directory is made.
                    self.args.keep.choose(&run)?;
                    let made = self.run_dir(&about)?;
                    let out = found(&made.path)?;
                    events.dir = Some(made);
                    out
                }
            }
        };
        let mut kept = Kept::default();
        if let Some(resume) = &self.resume {
            let (dir, found) = RunDir::resume(&resume.dir, resume.record.clone(), resume.step())?;
            (events.dir, kept) = (Some(dir), found);
            about.insert("resumed".into(), resume.step().into());
        }
        let dir = events.dir.as_ref().map(|d| d.path.clone()).unwrap_or_default();
        about.insert("run_dir".into(), dir.display().to_string().into());
        events.start(&about);
        self.header(&run, &splits, events);
        if let Some(resume) = &self.resume {
            let files = own_files(self.source, self.runtime.required());
            resume.enter(&files, (&run, &params), &handover, &about, self.args.edited, events)?;
        }

        events.begin(kept.seconds);
        let mut progress = Progress::new(events.screen.clone(), run.steps());
        signals.hear_reload()?;
        let steps = self.args.steps.or_else(|| self.resume.as_ref().and_then(Resume::steps));
        let mut watch = Watch::new(
            self.runtime,
            self.source,
            self.seed,
            Some(run.precision()),
            steps,
            self.args.device.memory_budget,
            self.args.script.as_ref(),
        );
        if self.args.watch {
            watch.listen_to_saves()?;
        }
        let run = Rc::new(run);
        let mut trainer =
            Trainer::new(run.clone(), params, events, &mut progress, signals, &mut checkpoints, Some(watch));
        trainer.run.time_data(trainer.progress.data())?;
        trainer.new_pace();
        trainer.monitor = self.backend.probe().and_then(Monitor::start);
        trainer.set_policies((self.args.on_nan.clone(), self.args.on_spike.clone()))?;
        trainer.remember(&kept.history);
        trainer.evaluated = kept.evaluated.map(|values| (run.count(), values));
        trainer.until = self.args.script.as_ref().map(|s| s.steps);
        let end = loop {
            let end = trainer.train()?;
            if end != End::Finished {
                break end;
            }
            match self.conclude(&mut trainer) {
                Ok(end) => break end,
                // The version before may have more steps to do.
                Err(failure) => trainer.bad_edit(failure)?,
            }
        };
        let run = trainer.run.clone();
        drop(trainer);
        checkpoints.finish(events)?;
        self.close(&run, end, events)
    }

    fn run_dir(&self, about: &Map<String, Value>) -> Result<RunDir, Failure> {
        let files = own_files(self.source, self.runtime.required());
        let mut record = about.clone();
        record.insert("files".into(), ledger::hashes(&files, Path::new("")));
        let command: Vec<String> = std::env::args_os().map(|a| a.to_string_lossy().into_owned()).collect();
        record.insert("command".into(), command.into());
        let here = std::env::current_dir().map(|d| d.display().to_string()).ok();
        record.insert("directory".into(), here.into());
        record.insert("commit".into(), crate::git::commit(self.source.dir()).into());
        record.insert("host".into(), rundir::hostname().into());
        record.insert("pid".into(), std::process::id().into());
        RunDir::create(self.args.run_dir.as_deref(), &self.recipe.name(), record, &files)
    }

    /// `digits · cpu (2 threads, AVX-512) · 26,122 parameters · 1,438 train / 359 valid · seed 1`
    fn header(&self, run: &Run, splits: &[String], events: &Events) {
        let sizes: Vec<String> =
            splits.iter().filter_map(|s| Some(format!("{} {s}", grouped(run.samples(s)?)))).collect();
        let mut parts = vec![events.screen.bold(&self.recipe.name()), self.device.clone()];
        parts.push(format!("{} parameters", grouped(run.num_parameters())));
        if !sizes.is_empty() {
            parts.push(sizes.join(" / "));
        }
        parts.push(format!("seed {}", run.seed()));
        events.screen.line(&parts.join(" · "));
    }

    /// The last evaluations, and the recipe's own end.
    fn conclude(&self, trainer: &mut Trainer<'_>) -> Result<End, Failure> {
        let mut lines = Vec::new();
        for split in ["valid", "test"] {
            if let Some(asked) = trainer.signals.asked() {
                return Ok(End::Asked(asked));
            }
            if trainer.can_evaluate(split) {
                lines.push(format!("{split} {}", metrics(&trainer.evaluate(split)?)));
            }
        }
        if lines.is_empty() {
            let n = trainer.run.count();
            lines.push(format!("trained {} step{}", grouped(n), if n == 1 { "" } else { "s" }));
        }
        let dir = trainer.events.dir.as_ref().map(|d| d.path.clone()).unwrap_or_default();
        if let Some(last) = lines.last_mut() {
            *last = beside(last, &dir, &trainer.events.screen);
        }
        for line in lines {
            trainer.events.screen.result(&line);
        }
        trainer.rng = trainer.run.rng();
        trainer.aside(|run| run.finish())?;
        Ok(trainer.signals.asked().map_or(End::Finished, End::Asked))
    }

    /// The last event, the last state of `run.json`, the exit status.
    fn close(&self, run: &Run, end: End, events: &mut Events) -> Result<(), Failure> {
        let seconds = self.begun.elapsed().as_secs_f64();
        let weights = weights(run)?;
        let status = if end == End::Finished { "done" } else { "interrupted" };
        if let End::Asked(Asked { name, .. }) = end {
            events.warning(&format!("{name}: stopped after step {} of {}", run.count(), run.steps()));
        }
        let metrics = events::object(&events.latest);
        if let Some(dir) = events.dir.as_mut() {
            dir.flush()?;
            dir.update([
                ("status", status.into()),
                ("steps_done", run.count().into()),
                ("seconds", crate::format::number(seconds)),
                ("metrics", metrics),
                ("weights", weights.as_str().into()),
            ])?;
        }
        events.done(status, run.count(), seconds, Some(&weights));
        if let Some(was) = self.args.script.as_ref().and_then(|s| s.weights.as_ref())
            && end == End::Finished
        {
            if *was != weights {
                let text = format!("the weights differ from the run's: {weights}, then {was}");
                return Err(Failure::System(text));
            }
            events.screen.line("the weights are those of the run");
        }
        match end {
            End::Finished => Ok(()),
            End::Asked(asked) => Err(Failure::Signal(asked.status)),
        }
    }
}

/// A result with the run directory at the right end of the line, dimmed.
fn beside(text: &str, dir: &Path, screen: &Screen) -> String {
    let pad = 79usize.saturating_sub(text.chars().count()).max(4);
    format!("{text}{}{}", " ".repeat(pad), screen.dim(&dir.display().to_string()))
}

/// BLAKE3 over every State in path order: path, dtype, shape, bytes; texts and lists with their lengths before them.
/// States are fetched one after the other, so that a large model needs the host memory of its largest only.
fn weights(run: &Run) -> Result<String, Failure> {
    let mut hash = blake3::Hasher::new();
    let text = |hash: &mut blake3::Hasher, t: &[u8]| {
        hash.update(&(t.len() as u64).to_le_bytes());
        hash.update(t);
    };
    run.each_state(|path, t| {
        text(&mut hash, path.as_bytes());
        text(&mut hash, t.dtype.name().as_bytes());
        hash.update(&(t.shape.rank() as u64).to_le_bytes());
        for d in t.shape.dims() {
            hash.update(&(*d as u64).to_le_bytes());
        }
        text(&mut hash, &t.bytes);
    })?;
    Ok(hash.finalize().to_hex().to_string())
}

/// A param as a person writes it.
pub fn param(v: &ParamValue) -> String {
    match v {
        ParamValue::Int(i) => i.to_string(),
        ParamValue::Float(f) => f.to_string(),
        ParamValue::Bool(b) => b.to_string(),
        ParamValue::Str(s) => format!("\"{s}\""),
        ParamValue::Other(s) => s.clone(),
    }
}
