//! `perilune check`: finds mistakes in a recipe by a dry run of one step.
//!
//! It builds data, model and optimizer, takes one step, evaluates one batch of each split, and discards the result. Nothing is
//! written: a recipe that saves a file passes, if it may write there, and leaves no file. A plain script, a file that returns no
//! recipe, runs until its first step has ended.

use super::check_against::against;
use super::check_search::Search;
use super::{check_mesh, check_predict};
use crate::confined::{self, Terms, UntrustedArgs};
use crate::console_out::{ConsoleOut, Mode};
use crate::device::{DeviceArgs, key_value};
use crate::diagnostics;
use crate::failure::Failure;
use crate::format::{bytes, grouped, metrics, parameters};
use crate::policy_args::PolicyArgs;
use crate::target::{OVERHEAD, Target};
use perilune_core::byte_size::show;
use perilune_lua::{Cause, Loaded, ParamReads, ParamValue, Recipe, Run, Runtime, RuntimeOptions};
use perilune_plan::predict::{Calibration, Machine, Prediction};
use perilune_train::{Error, Source, check_state_names, mentions, params};
use std::path::PathBuf;
use std::rc::Rc;

#[derive(clap::Args, Debug)]
pub struct CheckArgs {
    /// The recipe, a .lua file
    recipe: PathBuf,
    /// Set a param of the recipe; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = key_value)]
    set: Vec<(String, String)>,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    files: PolicyArgs,
    /// Estimate the memory on a GPU that is not in this machine: h200, a100, rtx4090 …, or an amount such as 24GiB. The step is
    /// planned and not run
    #[arg(long = "for", value_name = "GPU", value_parser = Target::parse, conflicts_with_all = ["device", "against"])]
    target: Option<Target>,
    /// With --for: the hosts that the devices of the mesh are in, for the times of what they send [default: 8 devices each]
    #[arg(long, value_name = "N", requires = "target")]
    hosts: Option<usize>,
    /// With --for: rank all meshes of --devices by the predicted time of a step, and say why the others lose
    #[arg(long, requires = "target", requires = "devices", conflicts_with = "mesh")]
    search: bool,
    /// With --search: the number of devices
    #[arg(long, value_name = "N", requires = "search", value_parser = clap::value_parser!(u32).range(1..=65536))]
    devices: Option<u32>,
    /// Report what the recipe would change in the run in this directory
    #[arg(long, value_name = "RUN_DIR")]
    against: Option<PathBuf>,
    #[command(flatten)]
    untrusted: UntrustedArgs,
}

impl CheckArgs {
    /// What the command may touch when it is confined.
    fn terms(&self) -> Terms {
        let mut terms = Terms { recipe: Some(self.recipe.clone()), ..Terms::default() };
        terms.opens.extend(self.against.clone());
        self.files.add_grants(&mut terms);
        self.untrusted.add_to(&mut terms);
        terms
    }
}

/// Params that the training loop reads.
const OF_THE_LOOP: [&str; 10] = [
    "steps",
    "epochs",
    "accumulate",
    "eval_every",
    "seed",
    "memory_budget",
    "on_nan",
    "on_spike",
    "mesh",
    "strict_shards",
];

/// Checks a recipe, or a plain script up to the end of its first step.
pub fn check(args: CheckArgs) -> Result<(), Failure> {
    let source = Source::read(&args.recipe)?;
    if args.untrusted.supervises()? {
        return confined::supervise(std::env::args_os().collect(), &args.terms());
    }
    let backend = match &args.target {
        Some(target) => {
            args.device.check_precision()?;
            target.open(args.device.place.mesh())
        }
        None => args.device.open()?,
    };
    let screen = Rc::new(ConsoleOut::new(Mode::Human));
    let print = {
        let screen = screen.clone();
        move |text: &str| screen.note(text)
    };
    // A search opens a runtime for each mesh.
    confined::child::seal()?;
    // A save is checked like any other call; nothing is written.
    let policy = args.files.recipe(&args.recipe, &args.set)?.read_only(true).build();
    if let (true, Some(devices), Some(target)) = (args.search, args.devices, &args.target) {
        let search = Search {
            source: &source,
            target,
            params: args.set,
            policy,
            devices: devices as usize,
            hosts: args.hosts,
            precision: args.device.precision.as_deref(),
            budget: args.device.memory_budget,
        };
        return search.run(&screen);
    }
    let options =
        RuntimeOptions { backend: backend.clone(), params: args.set, policy, strict: true, print: Rc::new(print) };
    let runtime = args.device.runtime(options)?;
    if let Some(target) = args.target.clone().filter(|_| !args.device.place.has_mesh()) {
        *runtime.host().open_mesh.borrow_mut() = Some(target.opener());
    }
    diagnostics::plans(&runtime, &screen);
    if let Some(dir) = &args.against {
        return against(&runtime, &source, dir, &args.device, &screen);
    }
    let report = Report { screen, source: &source, target: args.target.as_ref(), hosts: args.hosts };
    match runtime.until_first_step(|| source.load(&runtime)) {
        Ok(Loaded::Recipe(recipe)) => report.recipe(&runtime, &recipe, &backend.describe(), &args.device),
        Ok(Loaded::Script) => {
            report.row("script", "a plain script (it returns no recipe): it ran to its end without an error");
            Ok(())
        }
        Err(Error::Recipe(e)) if e.cause == Cause::FirstStep => {
            let line = e.line.map(|line| format!(", line {line}")).unwrap_or_default();
            let text = format!("a plain script (it returns no recipe): no error up to the end of its first step{line}");
            report.row("script", &text);
            Ok(())
        }
        Err(e) => Err(e.into()),
    }
}

struct Report<'a> {
    screen: Rc<ConsoleOut>,
    source: &'a Source,
    /// The device of an estimate, which computes no values.
    target: Option<&'a Target>,
    hosts: Option<usize>,
}

impl Report<'_> {
    fn row(&self, name: &str, text: &str) {
        self.screen.line(&format!("  {:<12}{text}", name));
    }

    fn recipe(&self, runtime: &Runtime, recipe: &Recipe, device: &str, args: &DeviceArgs) -> Result<(), Failure> {
        let params = recipe.params()?;
        self.screen.line(&format!(
            "{} · {} · {device}",
            self.screen.bold(&crate::terminal::one_line(&recipe.name())),
            self.source.path.display()
        ));
        if !params.is_empty() {
            let list: Vec<String> = params.iter().map(|(name, v)| format!("{name} {}", params::literal(v))).collect();
            self.row("params", &list.join(", "));
        }
        let reads = recipe.track_params()?;
        let run = recipe.start(None, args.precision.as_deref(), args.memory_budget)?;
        self.built(&run)?;
        self.dry_step(runtime, &run)?;
        self.mesh(runtime, &run)?;
        // After the step, which creates the moments.
        check_state_names(&run)?;
        self.dry_evaluation(&run)?;
        self.fit(runtime)?;
        let mut warnings = self.params(&params, &reads);
        warnings.append(&mut runtime.host().engine.borrow_mut().diagnostics.notices.take());
        for text in &warnings {
            self.screen.warn(text);
        }
        let verdict = match warnings.len() {
            0 => "no mistakes found".to_string(),
            1 => "no mistakes found, 1 warning".to_string(),
            n => format!("no mistakes found, {n} warnings"),
        };
        self.screen.line(&verdict);
        Ok(())
    }

    fn built(&self, run: &Run) -> Result<(), Failure> {
        let model = format!(
            "{}, {} States with the optimizer's",
            parameters(run.num_parameters(), run.num_frozen()),
            run.num_states()?
        );
        self.row("model", &model);
        for split in run.splits() {
            let samples = run.samples(&split).map(|n| format!("{} samples", grouped(n)));
            let batches = run.batches(&split).map(|n| format!("{} batches an epoch", grouped(n)));
            let text: Vec<String> = [samples, batches].into_iter().flatten().collect();
            self.row(&split, &text.join(", "));
        }
        self.row("steps", &grouped(run.steps()));
        Ok(())
    }

    fn dry_step(&self, runtime: &Runtime, run: &Run) -> Result<(), Failure> {
        let before = runtime.host().engine.borrow().stats();
        let numbers = run.read(&run.step()?)?;
        let stats = runtime.host().engine.borrow().stats();
        let mut values = vec![("loss".to_string(), numbers.loss)];
        values.extend(numbers.metrics);
        let kernels = grouped(stats.kernels as u64);
        let step = match self.target {
            Some(_) => format!("{kernels} kernels, planned and not run"),
            None => format!("{} · {kernels} kernels", metrics(&values)),
        };
        self.row("step", &step);
        if !numbers.loss.is_finite() {
            self.screen.warn("the loss of the first step is not a finite number");
        }
        if stats.splits > before.splits {
            let n = stats.splits - before.splits;
            self.screen
                .warn(&format!("the step reads values {n} times while it is recorded; each read waits for the device"));
        }
        let data = stats.held_bytes.saturating_sub(stats.state_bytes + stats.output_bytes);
        let total = stats.state_bytes + stats.arena_bytes + data + stats.output_bytes;
        self.row(
            "memory",
            &format!(
                "{} in all: States {}, intermediate values {}, data {}",
                bytes(total),
                bytes(stats.state_bytes),
                bytes(stats.arena_bytes),
                bytes(data + stats.output_bytes),
            ),
        );
        let engine = runtime.host().engine.borrow();
        for (k, line) in engine.show_owners(&engine.memory(), 4).iter().enumerate() {
            self.row(if k == 0 { "owners" } else { "" }, line);
        }
        Ok(())
    }

    /// On a mesh: what a device stores of each State, and what the devices send each other in the step. Of an estimate, the
    /// predicted times too.
    fn mesh(&self, runtime: &Runtime, run: &Run) -> Result<(), Failure> {
        let (mesh, transfers, strict) = {
            let engine = runtime.host().engine.borrow();
            (engine.mesh(), engine.transfers(), engine.strict_shards())
        };
        if let Some(shards) = strict {
            let own = shards / perilune_plan::shard_devices(&mesh);
            self.row("strict shards", &format!("{shards} of each batch, {own} a device, summed in a fixed tree"));
        }
        let predicted = self.predicted(runtime)?;
        if let Some((_, prediction)) = &predicted {
            self.table("time", &check_predict::step(prediction));
        }
        if mesh.devices() == 1 {
            return Ok(());
        }
        let infos = run.state_infos()?;
        let states = check_mesh::states(&mesh, &infos);
        let engine = runtime.host().engine.borrow();
        let show = |loc| engine.recorder.source_map.show(loc);
        let sent = match &predicted {
            Some((_, prediction)) => check_predict::sent(&prediction.sent, show),
            None => check_mesh::transfers(&mesh, &transfers, show),
        };
        let stages = check_mesh::stages(&mesh, &engine.stage_costs, engine.schedule(), engine.micro_batches, &infos);
        self.table("stages", &stages);
        if let Some((_, prediction)) = &predicted {
            let (schedule, micros) = (engine.schedule(), engine.micro_batches);
            let slots = engine.slot_bytes();
            self.table("devices", &check_predict::devices(prediction, &mesh, schedule, micros, &infos, &slots));
        }
        self.table("States", &states);
        self.table("attention", &check_mesh::keys(&engine.exchanges(), show));
        self.table("sent a step", &sent);
        Ok(())
    }

    fn table(&self, name: &str, lines: &[String]) {
        for (k, line) in lines.iter().enumerate() {
            self.row(if k == 0 { name } else { "" }, line);
        }
    }

    /// The predicted time of the step that has been planned, if there are rates of the target.
    fn predicted(&self, runtime: &Runtime) -> Result<Option<(Machine, Prediction)>, Failure> {
        let Some(target) = self.target else { return Ok(None) };
        let engine = runtime.host().engine.borrow();
        let rates = match Calibration::of(target.gpu) {
            Ok(rates) => rates,
            Err(e) => {
                let hint = e.hint.unwrap_or_default();
                self.row("time", &format!("not predicted for {}: {hint}", target.name));
                return Ok(None);
            }
        };
        let machine = Machine::new(rates, engine.mesh(), self.hosts).map_err(|e| Error::Usage(e.to_string()))?;
        Ok(engine.predict(&machine).map(|prediction| (machine, prediction)))
    }

    fn dry_evaluation(&self, run: &Run) -> Result<(), Failure> {
        for split in run.evaluated_splits() {
            let values = run.evaluate_batches(&split, Some(1))?;
            let shown = if self.target.is_some() { "planned".into() } else { metrics(&values) };
            self.row("evaluation", &format!("{split} {shown} (first batch)"));
        }
        Ok(())
    }

    /// Compares the peak of an estimate with the memory of its GPU.
    fn fit(&self, runtime: &Runtime) -> Result<(), Failure> {
        let Some(target) = self.target else { return Ok(()) };
        let peak = runtime.host().engine.borrow().memory().device.peak.saturating_add(OVERHEAD);
        let (needs, has, overhead) = (show(peak), show(target.bytes), show(OVERHEAD));
        if peak > target.bytes {
            return Err(Failure::System(format!(
                "the run needs {needs}, with {overhead} for the driver and its libraries, and {} has {has}\n  \
                 hint: a smaller batch, --memory-budget, --precision bf16, or an optimizer that keeps less",
                target.name
            )));
        }
        let share = 100.0 * peak as f64 / target.bytes as f64;
        self.row("fit", &format!("{needs} of {has} ({share:.0} %) on {}, with {overhead} for the driver", target.name));
        let engine = runtime.host().engine.borrow();
        let slots = engine.slot_bytes().into_iter().max().unwrap_or(0);
        self.row("a device", &check_predict::memory(engine.memory().by_role(), slots, OVERHEAD));
        Ok(())
    }

    /// Lists params that nothing reads.
    fn params(&self, params: &[(String, ParamValue)], reads: &ParamReads) -> Vec<String> {
        let (reads, text) = (reads.borrow(), &self.source.text);
        let unread = |name: &str| !reads.contains(name) && !OF_THE_LOOP.contains(&name) && !mentions(text, name);
        let path = self.source.path.display();
        let names = params.iter().map(|(name, _)| name).filter(|name| unread(name));
        names.map(|name| format!("param '{name}' is read nowhere in {path}")).collect()
    }
}
