//! Drives a recipe and its training run from Rust: params, steps, evaluations, the content of a checkpoint.

use crate::boundary::Guarded;
use crate::host::Host;
use crate::library_env;
use crate::runtime::Failed;
use crate::sample_log::LogData;
use crate::table;
use crate::tensor::{Ref, Tensor};
use mlua::{AnyUserData, Function, Lua, Table, Value};
use perilune_core::HostTensor;
use perilune_core::graph::RngState;
use perilune_data::images::ImageFiles;
use perilune_data::records::Dataset;
use perilune_data::sample_log::SampleLog;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

/// Names of params read so far.
pub type ParamReads = Rc<RefCell<BTreeSet<String>>>;

/// A loaded recipe.
pub struct Recipe {
    pub table: Table,
    pub(crate) lua: Lua,
    pub(crate) host: Rc<Host>,
}

/// A param's value for display and JSON.
#[derive(Clone, PartialEq, Debug)]
pub enum ParamValue {
    Int(i64),
    Float(f64),
    Bool(bool),
    Str(String),
    Other(String),
}

impl ParamValue {
    pub(crate) fn of(v: Value) -> ParamValue {
        match v {
            Value::Integer(i) => ParamValue::Int(i),
            Value::Number(n) => ParamValue::Float(n),
            Value::Boolean(b) => ParamValue::Bool(b),
            Value::String(s) => ParamValue::Str(s.to_string_lossy()),
            other => ParamValue::Other(crate::args::show(&other)),
        }
    }
}

impl Recipe {
    pub fn name(&self) -> String {
        self.table.get::<Option<String>>("name").ok().flatten().unwrap_or_else(|| "recipe".into())
    }

    /// Returns the params with their final values, by name.
    pub fn params(&self) -> Result<Vec<(String, ParamValue)>, Failed> {
        let t: Table = self.table.get("params")?;
        let mut out = Vec::new();
        for pair in t.pairs::<String, Value>() {
            let (k, v) = pair?;
            out.push((k, ParamValue::of(v)));
        }
        out.sort_by(|a: &(String, _), b| a.0.cmp(&b.0));
        Ok(out)
    }

    /// Returns whether findings of the data check end the run.
    pub fn strict(&self) -> bool {
        self.table.get::<Option<bool>>("strict").ok().flatten().unwrap_or(false)
    }

    /// Returns whether it has a function of that name.
    pub fn has(&self, part: &str) -> bool {
        self.table.get::<Value>(part).is_ok_and(|v| v.is_function())
    }

    /// Sets the number of steps of a recipe without a param of that name.
    pub fn set_steps(&self, n: i64) -> Result<(), Failed> {
        Ok(self.table.set("steps", n)?)
    }

    /// Starts to record which params are read; the set grows as the recipe runs.
    pub fn track_params(&self) -> Result<ParamReads, Failed> {
        let read = ParamReads::default();
        let real: Table = self.table.get("params")?;
        let (seen, from) = (read.clone(), real.clone());
        let index = Guarded(&self.lua).create_function(move |_, (_, key): (Value, Value)| {
            if let Value::String(name) = &key {
                seen.borrow_mut().insert(name.to_string_lossy());
            }
            from.get::<Value>(key) // an unknown name raises, as in a run
        })?;
        let (seen, from, next) = (read.clone(), real.clone(), library_env::function(&self.lua, "next")?);
        let pairs = Guarded(&self.lua).create_function(move |_, _: Value| {
            seen.borrow_mut().extend(from.pairs::<String, Value>().flatten().map(|(name, _)| name));
            Ok((next.clone(), from.clone(), Value::Nil))
        })?;
        let meta = self.lua.create_table()?;
        meta.set("__index", index)?;
        meta.set("__newindex", real)?;
        meta.set("__pairs", pairs)?;
        let proxy = self.lua.create_table()?;
        proxy.set_metatable(Some(meta))?;
        self.table.set("params", proxy)?;
        Ok(read)
    }

    /// Builds data, model and optimizer. The arguments override the recipe.
    pub fn start(
        &self,
        seed: Option<i64>,
        precision: Option<&str>,
        memory_budget: Option<usize>,
    ) -> Result<Run, Failed> {
        let require = library_env::function(&self.lua, "require")?;
        let train: Table = require.call("perilune.train")?;
        let new: Function = train.get("new")?;
        let params: Table = self.table.get("params")?;
        let opts = self.lua.create_table()?;
        if let Some(seed) = seed {
            opts.set("seed", seed)?;
        }
        if let Some(precision) = precision {
            opts.set("precision", precision)?;
        }
        if let Some(bytes) = memory_budget {
            opts.set("memory_budget", bytes)?;
        }
        let table: Table = new.call((&self.table, params, opts))?;
        let run = Run { table, recipe: self.table.clone(), lua: self.lua.clone(), host: self.host.clone() };
        // Names the States for messages.
        run.list_states()?;
        Ok(run)
    }
}

/// A training run that the host drives, one step at a time.
pub struct Run {
    pub table: Table,
    pub(crate) recipe: Table,
    pub(crate) lua: Lua,
    pub(crate) host: Rc<Host>,
}

/// The records behind a loader.
#[derive(Clone)]
pub struct CheckedRecords {
    /// The records before they were encoded.
    pub texts: Arc<dyn Dataset>,
    /// Those with token ids, before they were packed.
    pub encoded: Option<Arc<dyn Dataset>>,
    /// The number of ids of the tokenizer.
    pub vocabulary: Option<u64>,
}

/// The result of a step: tensors that are read on demand.
pub struct StepResult {
    table: Table,
}

/// Learning rates that a ramp has replaced.
pub struct RateRamp {
    table: Table,
    /// The largest rate of the recipe's own schedule, of the first group that has one.
    pub peak: f64,
}

impl RateRamp {
    /// Returns the rate of the first group at a step of the ramp, from 0.
    pub fn rate(&self, step: u32) -> Result<f64, Failed> {
        Ok(self.table.get::<Function>("rate")?.call(step)?)
    }

    /// Whether no step has set another rate since.
    pub fn stands(&self) -> Result<bool, Failed> {
        Ok(self.table.get::<Function>("stands")?.call(())?)
    }
}

/// The checkpoint retention policy of a recipe.
#[derive(Clone, Default, Debug)]
pub struct KeepSaid {
    pub last: Option<usize>,
    pub every: Option<u64>,
    pub best: Option<String>,
    pub max: Option<bool>,
}

/// The origin of the first NaN or infinity of a step.
#[derive(Clone, Debug)]
pub struct NotFinite {
    pub op: String,
    pub shape: String,
    pub nan: bool,
    /// Whether it was in input data or in a constant of the recipe.
    pub input: bool,
    /// The State that already contained it.
    pub state: Option<String>,
    /// The file and line of the recipe.
    pub place: Option<(String, u32)>,
}

/// The metrics of a step.
#[derive(Clone, Debug, Default)]
pub struct StepNumbers {
    pub loss: f64,
    pub metrics: Vec<(String, f64)>,
    pub samples: u64,
}

fn to_number(lua: &Lua, v: &Value) -> mlua::Result<f64> {
    Ok(match v {
        Value::Integer(i) => *i as f64,
        Value::Number(n) => *n,
        Value::UserData(u) => {
            let t = u.borrow::<crate::Tensor>()?;
            let value = table::read(lua, &t)?;
            if value.numel() == 1 { value.get_f64(0) } else { f64::NAN }
        }
        _ => f64::NAN,
    })
}

fn numbers(lua: &Lua, t: &Table) -> mlua::Result<Vec<(String, f64)>> {
    let mut out = Vec::new();
    for pair in t.pairs::<String, Value>() {
        let (k, v) = pair?;
        out.push((k, to_number(lua, &v)?));
    }
    out.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(out)
}

impl Run {
    /// Takes one optimizer step.
    pub fn step(&self) -> Result<StepResult, Failed> {
        let f: Function = self.table.get("step")?;
        Ok(StepResult { table: f.call(&self.table)? })
    }

    pub fn read(&self, result: &StepResult) -> Result<StepNumbers, Failed> {
        let loss: Value = result.table.get("loss")?;
        let metrics: Option<Table> = result.table.get("metrics")?;
        Ok(StepNumbers {
            loss: to_number(&self.lua, &loss)?,
            metrics: metrics.map(|m| numbers(&self.lua, &m)).transpose()?.unwrap_or_default(),
            samples: result.table.get::<Option<i64>>("samples")?.unwrap_or(0) as u64,
        })
    }

    /// Returns the policies for non-finite losses or gradients and for loss spikes: `on_nan` and `on_spike`.
    pub fn policies(&self) -> (String, String) {
        let get = |name: &str, default: &str| self.table.get(name).unwrap_or_else(|_| default.to_string());
        (get("on_nan", "stop"), get("on_spike", "warn"))
    }

    /// Overrides the policies of the recipe by those of the command line.
    pub fn set_policies(&self, on_nan: Option<&str>, on_spike: Option<&str>) -> Result<(), Failed> {
        for (name, value) in [("on_nan", on_nan), ("on_spike", on_spike)] {
            if let Some(value) = value {
                self.table.set(name, value)?;
            }
        }
        Ok(())
    }

    /// Sets, for `on_spike` = "skip", the loss above which the next step changes no State.
    pub fn set_loss_limit(&self, limit: f64) -> Result<(), Failed> {
        Ok(self.table.set("loss_limit", limit)?)
    }

    /// Returns whether the recipe has its own step, which may have side effects that cannot be repeated.
    pub fn own_step(&self) -> bool {
        self.recipe.get::<Value>("step").is_ok_and(|f| !f.is_nil())
    }

    /// Returns the sample log, if the recipe has one.
    pub fn sample_log(&self) -> Option<Rc<RefCell<SampleLog>>> {
        let log = self.table.get::<Option<AnyUserData>>("sample_log").ok().flatten()?;
        log.borrow::<LogData>().ok().map(|log| log.0.clone())
    }

    /// Reads the values of the last step into the sample log, if the run has one.
    ///
    /// # Errors
    /// Those of the step.
    pub fn settle_sample_log(&self) -> Result<(), Failed> {
        if self.sample_log().is_some() {
            self.table.get::<Function>("settle_sample_log")?.call::<()>(&self.table)?;
        }
        Ok(())
    }

    /// Takes the sample log of another version of the run, with the values of its last step.
    ///
    /// # Errors
    /// Those of the step.
    pub fn take_sample_log(&self, other: &Run) -> Result<(), Failed> {
        if self.sample_log().is_some() && other.sample_log().is_some() {
            other.settle_sample_log()?;
            self.table.set("sample_log", other.table.get::<Value>("sample_log")?)?;
        }
        Ok(())
    }

    /// Returns the samples of step `k`, if the data numbers them: their unit and their numbers.
    pub fn samples_of(&self, k: u64) -> Result<Option<(String, Vec<i64>)>, Failed> {
        let f: Function = self.table.get("samples_of")?;
        let (what, ids): (Option<String>, Option<Vec<i64>>) = f.call((&self.table, k as i64))?;
        Ok(what.zip(ids))
    }

    /// Repeats step `k` with its random numbers but the current States, and returns the op that made the first NaN or
    /// infinity. Nothing is written.
    pub fn diagnose(&self, k: u64, rng: (u64, u32)) -> Result<Option<NotFinite>, Failed> {
        let now = self.rng();
        self.set_rng(rng);
        self.list_states()?; // sets the paths of States, which the result may name
        let f: Function = self.table.get("diagnose")?;
        let found = f.call::<Option<Table>>((&self.table, k as i64));
        self.set_rng(now);
        let Some(t) = found? else { return Ok(None) };
        let state = t.get::<Option<String>>("state")?;
        let place = t.get::<Option<String>>("file")?.zip(t.get::<Option<u32>>("line")?);
        let (op, shape, nan, input) = (t.get("op")?, t.get("shape")?, t.get("nan")?, t.get("input")?);
        Ok(Some(NotFinite { op, shape, nan, input, state, place }))
    }

    /// Tests whether documents that are packed into one sequence are trained as if alone. Returns "documents" if they read each
    /// other, "positions" if their losses depend on where they lie; none if neither is found, the training data is not packed, or
    /// the losses cannot be compared. Nothing is written.
    pub fn fault_of_packing(&self) -> Result<Option<String>, Failed> {
        // With the number of draws, which the model's initial weights have advanced.
        let now = self.host.engine.borrow().recorder.graph.rng;
        let f: Function = self.table.get("fault_of_packing")?;
        let fault = f.call(&self.table);
        self.host.engine.borrow_mut().recorder.graph.rng = now;
        Ok(fault?)
    }

    /// Computes loss and metrics over a split.
    pub fn evaluate(&self, split: &str) -> Result<Vec<(String, f64)>, Failed> {
        self.evaluate_batches(split, None)
    }

    /// Computes loss and metrics over at most `limit` batches of a split.
    pub fn evaluate_batches(&self, split: &str, limit: Option<u64>) -> Result<Vec<(String, f64)>, Failed> {
        let f: Function = self.table.get("evaluate")?;
        let t: Table = f.call((&self.table, split, limit.map(|n| n as i64)))?;
        Ok(numbers(&self.lua, &t)?)
    }

    /// Returns the splits of the data, "train", "valid" and "test" first.
    pub fn splits(&self) -> Vec<String> {
        let Ok(data) = self.table.get::<Table>("data") else { return Vec::new() };
        let mut out: Vec<String> = data
            .pairs::<Value, Value>()
            .flatten()
            .filter_map(|(k, _)| k.as_string().map(|s| s.to_string_lossy()))
            .collect();
        out.retain(|name| self.has_split(name));
        let rank = |name: &str| ["train", "valid", "test"].iter().position(|n| *n == name).unwrap_or(3);
        out.sort_by(|a, b| rank(a).cmp(&rank(b)).then(a.cmp(b)));
        out
    }

    /// Returns the splits that a run evaluates: all but "train", in the order of [`Run::splits`]. None if the recipe cannot evaluate.
    pub fn evaluated_splits(&self) -> Vec<String> {
        let mut splits = if self.can_evaluate() { self.splits() } else { Vec::new() };
        splits.retain(|name| name != "train");
        splits
    }

    pub fn has_split(&self, split: &str) -> bool {
        self.loader(split).is_some_and(|l| l.get::<Value>("batch_at").is_ok_and(|f| f.is_function()))
    }

    /// Returns whether the recipe can be evaluated (one with its own `step` need not have a loss).
    pub fn can_evaluate(&self) -> bool {
        ["evaluate", "loss"].iter().any(|name| self.recipe.get::<Value>(*name).is_ok_and(|f| !f.is_nil()))
    }

    /// Returns the file and line where the recipe's `step`, or else its `loss`, begins.
    pub fn loss_place(&self) -> Option<(String, u32)> {
        let get = |name: &str| self.recipe.get::<Option<Function>>(name).ok().flatten();
        let info = get("step").or_else(|| get("loss"))?.info();
        Some((info.source?.strip_prefix('@')?.to_string(), info.line_defined? as u32))
    }

    pub(crate) fn loader(&self, split: &str) -> Option<Table> {
        let data: Table = self.table.get("data").ok()?;
        data.get::<Option<Table>>(split).ok().flatten()
    }

    /// Returns the records behind the loader of a split, for checks of the data; none if it has no records.
    pub fn records(&self, split: &str) -> Option<CheckedRecords> {
        let checked: Table = self.loader(split)?.get::<Option<Table>>("checked").ok()??;
        let set = |name: &str| -> Option<Arc<dyn Dataset>> {
            let set = checked.get::<Option<mlua::AnyUserData>>(name).ok()??;
            Some(set.borrow::<crate::records::RecordSet>().ok()?.0.clone())
        };
        let vocabulary = checked.get::<Option<i64>>("vocabulary").ok().flatten().and_then(|n| u64::try_from(n).ok());
        Some(CheckedRecords { texts: set("texts")?, encoded: set("encoded"), vocabulary })
    }

    /// Returns the images behind the loader of a split, for checks of the data; none if it has no images.
    pub fn images(&self, split: &str) -> Option<Arc<ImageFiles>> {
        let folder = self.loader(split)?.get::<Option<mlua::AnyUserData>>("images").ok()??;
        Some(folder.borrow::<crate::images::ImageData>().ok()?.0.clone())
    }

    /// Returns the batches in an epoch of a split, if its loader states them.
    pub fn batches(&self, split: &str) -> Option<u64> {
        self.count_of(split, "batches")
    }

    fn count_of(&self, split: &str, method: &str) -> Option<u64> {
        let loader = self.loader(split)?;
        let f: Function = loader.get(method).ok()?;
        f.call::<i64>(&loader).ok().map(|n| n.max(0) as u64)
    }

    /// Starts to add the host's seconds for making training batches to `spent`.
    pub fn time_data(&self, spent: Rc<Cell<f64>>) -> Result<(), Failed> {
        if let Some(loader) = self.loader("train") {
            let (make, total) = (loader.get::<Function>("batch_at")?, spent);
            let timed = Guarded(&self.lua).create_function(move |_, args: mlua::MultiValue| {
                let _span = tracing::debug_span!("data").entered();
                let start = std::time::Instant::now();
                let out = make.call::<mlua::MultiValue>(args);
                total.set(total.get() + start.elapsed().as_secs_f64());
                out
            })?;
            loader.raw_set("batch_at", timed)?;
        }
        Ok(())
    }

    /// Returns the steps in an epoch of the training data, if the loader counts its batches.
    pub fn steps_per_epoch(&self) -> Option<f64> {
        let batches = self.batches("train").filter(|n| *n > 0)? as f64;
        let accumulate = self.table.get::<i64>("accumulate").ok().filter(|n| *n > 0)? as f64;
        Some(batches / accumulate)
    }

    /// Returns the tokens in a training sample, if its loader states them.
    pub fn tokens_per_sample(&self) -> Option<u64> {
        self.loader("train")?.get::<Option<i64>>("tokens").ok().flatten().map(|n| n.max(0) as u64)
    }

    /// Returns the samples of a split, if its loader states them.
    pub fn samples(&self, split: &str) -> Option<u64> {
        self.count_of(split, "samples")
    }

    pub fn finished(&self) -> Result<bool, Failed> {
        let f: Function = self.table.get("finished")?;
        Ok(f.call(&self.table)?)
    }

    /// Returns why early stopping has ended the run, if it has.
    pub fn stop_reason(&self) -> Result<Option<String>, Failed> {
        let f: Function = self.table.get("stop_reason")?;
        Ok(f.call(&self.table)?)
    }

    pub fn steps(&self) -> u64 {
        self.table.get::<i64>("steps").map(|n| n.max(0) as u64).unwrap_or(0)
    }

    pub fn set_steps(&self, n: u64) -> Result<(), Failed> {
        Ok(self.table.set("steps", n as i64)?)
    }

    pub fn count(&self) -> u64 {
        self.table.get::<i64>("count").map(|n| n.max(0) as u64).unwrap_or(0)
    }

    pub fn seed(&self) -> i64 {
        self.table.get::<i64>("seed").unwrap_or(0)
    }

    /// Returns the precision, such as `f32` or `bf16`.
    pub fn precision(&self) -> String {
        self.table.get("precision").unwrap_or_else(|_| "f32".into())
    }

    pub fn eval_every(&self) -> Option<u64> {
        self.table.get::<Option<i64>>("eval_every").ok().flatten().filter(|n| *n > 0).map(|n| n as u64)
    }

    /// Returns the retention policy of `recipe.keep`.
    pub fn keep(&self) -> KeepSaid {
        let Ok(Some(t)) = self.table.get::<Option<Table>>("keep") else { return KeepSaid::default() };
        let mode: Option<String> = t.get("mode").ok().flatten();
        KeepSaid {
            last: t.get::<Option<i64>>("last").ok().flatten().and_then(|n| usize::try_from(n).ok()),
            every: t.get::<Option<i64>>("every").ok().flatten().and_then(|n| u64::try_from(n).ok()),
            best: t.get("best").ok().flatten(),
            max: mode.map(|m| m == "max"),
        }
    }

    /// Calls `recipe.finish(run)`, if there is one.
    pub fn finish(&self) -> Result<(), Failed> {
        if let Value::Function(f) = self.recipe.get::<Value>("finish")? {
            f.call::<()>(&self.table)?;
        }
        Ok(())
    }

    /// Calls `recipe.sample(run, prompt)`, and returns its result as text; none if it returns nothing. A list is joined by newlines.
    ///
    /// # Errors
    /// The recipe has no such function, or it fails.
    pub fn generate(&self, prompt: Option<&str>) -> Result<Option<String>, Failed> {
        let f: Function = self.table.get("generate")?;
        let tostring = library_env::function(&self.lua, "tostring")?;
        let text = |v: Value| -> mlua::Result<String> { Ok(tostring.call::<mlua::LuaString>(v)?.to_string_lossy()) };
        match f.call::<Value>((&self.table, prompt))? {
            Value::Nil => Ok(None),
            Value::Table(list) if list.raw_len() > 0 && list.metatable().is_none() => {
                let lines = list.sequence_values::<Value>().map(|v| text(v?)).collect::<mlua::Result<Vec<_>>>()?;
                Ok(Some(lines.join("\n")))
            }
            other => Ok(Some(text(other)?)),
        }
    }

    /// Calls `f` with path and value of every State in path order. Only one value at a time is on the host.
    pub fn each_state(&self, mut f: impl FnMut(String, HostTensor)) -> Result<(), Failed> {
        for (path, state) in self.list_states()? {
            let t = state.borrow::<crate::Tensor>()?;
            f(path, table::read(&self.lua, &t)?);
        }
        Ok(())
    }

    /// Describes every State, a line each, in path order: path, shape, dtype, placement on the mesh.
    pub fn state_lines(&self) -> Result<String, Failed> {
        let mut out = String::new();
        for (path, state) in self.list_states()? {
            let id = crate::state_migration::id_of(&state)?;
            let info = self.host.engine.borrow().state_info(id).map_err(mlua::Error::external)?;
            out.push_str(&format!("{path}: {} {}, {}\n", info.shape, info.dtype, info.placement));
        }
        Ok(out)
    }

    /// Returns the paths of all States in order, and copies of their values, which another thread may read during the run.
    pub fn snapshot(&self) -> Result<(Vec<String>, perilune_engine::Copies), Failed> {
        let (mut paths, mut ids) = (Vec::new(), Vec::new());
        for (path, state) in self.list_states()? {
            ids.push(crate::state_migration::id_of(&state)?);
            paths.push(path);
        }
        Ok((paths, self.host.record(&self.lua, |engine| engine.snapshot(&ids))?))
    }

    /// Returns the counters of a run besides its States: position in the data, counts of updates, early stopping.
    pub fn cursor(&self) -> Result<Vec<(String, ParamValue)>, Failed> {
        let f: Function = self.table.get("cursor")?;
        let t: Table = f.call(&self.table)?;
        let mut out = Vec::new();
        for pair in t.pairs::<String, Value>() {
            let (k, v) = pair?;
            out.push((k, ParamValue::of(v)));
        }
        out.sort_by(|a: &(String, _), b| a.0.cmp(&b.0));
        Ok(out)
    }

    /// Returns the learning rates of the next update, one per group; none if the optimizer has none, or a schedule raises.
    pub fn rates(&self) -> Option<Vec<f64>> {
        let f: Function = self.table.get("rates").ok()?;
        f.call(&self.table).ok()?
    }

    /// Replaces the learning rates by a geometric ramp over `steps` updates; the groups keep the ratios of their largest rates.
    ///
    /// # Errors
    /// The recipe has no optimizer, all its rates are 0, or a schedule raises.
    pub fn ramp_rates(&self, from: f64, to: f64, steps: u32) -> Result<RateRamp, Failed> {
        let require = library_env::function(&self.lua, "require")?;
        let optimizers: Table = require.call("perilune.train.optimizers")?;
        let ramp: Function = optimizers.get("ramp")?;
        let table: Table = ramp.call((&self.table, from, to, steps))?;
        Ok(RateRamp { peak: table.get("peak")?, table })
    }

    /// Returns the number of updates that each State of the optimizers has had, by path.
    pub(crate) fn updates_of_states(&self) -> Result<BTreeMap<String, i64>, Failed> {
        let f: Function = self.table.get("updates_of_states")?;
        Ok(f.call(&self.table)?)
    }

    /// Moves to the position of a `cursor`. `slots` has the updates of the States of optimizers that are not from where the cursor is.
    pub(crate) fn seek(&self, cursor: &[(String, ParamValue)], slots: BTreeMap<String, i64>) -> Result<(), Failed> {
        let t = self.lua.create_table()?;
        for (k, v) in cursor {
            match v {
                ParamValue::Int(i) => t.set(k.as_str(), *i)?,
                ParamValue::Float(f) => t.set(k.as_str(), *f)?,
                ParamValue::Bool(b) => t.set(k.as_str(), *b)?,
                ParamValue::Str(s) | ParamValue::Other(s) => t.set(k.as_str(), s.as_str())?,
            }
        }
        let f: Function = self.table.get("seek")?;
        Ok(f.call((&self.table, t, slots))?)
    }

    /// Returns the seed and step of the random numbers.
    pub fn rng(&self) -> (u64, u32) {
        let rng = self.host.engine.borrow().recorder.graph.rng;
        (rng.seed, rng.step)
    }

    pub fn set_rng(&self, (seed, step): (u64, u32)) {
        self.host.engine.borrow_mut().recorder.graph.rng = RngState { seed, step, occurrence: 0 };
    }

    /// Returns the number of States.
    pub fn num_states(&self) -> Result<usize, Failed> {
        self.list_states().map(|list| list.len())
    }

    /// Returns the number of trainable values.
    pub fn num_parameters(&self) -> u64 {
        let get = || -> mlua::Result<i64> {
            let model: Table = self.table.get("model")?;
            let f: Function = model.get("num_parameters")?;
            f.call(&model)
        };
        get().map(|n| n.max(0) as u64).unwrap_or(0)
    }

    /// Returns the number of values of the model's frozen weights: States that were created trainable.
    pub fn num_frozen(&self) -> u64 {
        let Ok(states) = self.state_ids("model.") else { return 0 };
        let engine = self.host.engine.borrow();
        let mut seen = BTreeSet::new();
        let frozen = states.into_iter().filter(|id| seen.insert(*id)).filter_map(|id| engine.state_info(id).ok());
        frozen.filter(|info| info.frozen).map(|info| info.shape.numel() as u64).sum()
    }

    /// Returns the States below a path.
    fn state_ids(&self, prefix: &str) -> mlua::Result<Vec<perilune_engine::StateId>> {
        let list: Table = self.table.get::<Function>("states")?.call(&self.table)?;
        let mut out = Vec::new();
        for entry in list.sequence_values::<Table>() {
            let entry = entry?;
            let state: mlua::AnyUserData = entry.get("state")?;
            if let Ref::State(id) = state.borrow::<Tensor>()?.what
                && entry.get::<String>("path")?.starts_with(prefix)
            {
                out.push(id);
            }
        }
        Ok(out)
    }

    pub fn host(&self) -> &Rc<Host> {
        &self.host
    }
}
