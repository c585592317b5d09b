//! Calls the observers of a run (`on_step`, `on_eval`, `on_end`, `sinks`), and queues what `run:log` is given until the driver takes it.
//!
//! An observer reads the run and changes nothing that a resumed run would have to repeat: it may assign none of the run's States, and the
//! random numbers that it draws are not taken from the run's. The driver calls it between two steps.

use crate::errors;
use crate::functions::host;
use crate::host::Host;
use crate::json;
use crate::recipe_files::fail;
use crate::run::{Run, StepNumbers};
use crate::runtime::Failed;
use crate::table;
use crate::tensor::Tensor;
use mlua::{AnyUserData, Function, Lua, Table, Value};
use perilune_core::graph::RngState;
use perilune_core::{DType, HostTensor};
use std::cell::{Cell, RefCell};
use std::path::PathBuf;
use std::rc::Rc;

const OP: &str = "run:log";

/// A named value that `run:log` was given.
#[derive(Clone, PartialEq, Debug)]
pub struct Logged {
    /// Steps done when the value was true.
    pub step: u64,
    pub name: String,
    pub value: LoggedValue,
}

#[derive(Clone, PartialEq, Debug)]
pub enum LoggedValue {
    Figure(f64),
    Text(String),
    Image(LoggedImage),
    Histogram(Histogram),
}

/// A picture as a PNG file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LoggedImage {
    pub width: usize,
    pub height: usize,
    pub channels: usize,
    pub png: Vec<u8>,
}

/// The distribution of the finite values of a tensor, in bins of equal width.
#[derive(Clone, PartialEq, Debug)]
pub struct Histogram {
    /// One more than `counts`, in ascending order.
    pub edges: Vec<f64>,
    pub counts: Vec<u64>,
    pub sum: f64,
    pub sum_squares: f64,
    /// Values that are NaN or infinite, which no bin has.
    pub not_finite: u64,
}

impl Histogram {
    /// Counts the values of a tensor in `bins` bins from the lowest to the highest finite one. The last bin includes its upper edge.
    pub fn of(values: &HostTensor, bins: usize) -> Histogram {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        each(values, |v| {
            if v.is_finite() {
                (low, high) = (low.min(v), high.max(v));
            }
        });
        if low > high {
            (low, high) = (0.0, 0.0);
        }
        // Equal values are in the middle of one bin of width 1.
        let (start, width) = if low < high { (low, high - low) } else { (low - 0.5, 1.0) };
        let bins = if low < high { bins.max(1) } else { 1 };
        let edges = (0..=bins).map(|k| start + width * k as f64 / bins as f64).collect();
        let mut out = Histogram { edges, counts: vec![0; bins], sum: 0.0, sum_squares: 0.0, not_finite: 0 };
        each(values, |v| {
            if !v.is_finite() {
                out.not_finite += 1;
                return;
            }
            let k = (((v - start) / width) * bins as f64) as usize;
            if let Some(count) = out.counts.get_mut(k.min(bins - 1)) {
                *count += 1;
            }
            out.sum += v;
            out.sum_squares += v * v;
        });
        out
    }
}

/// Calls `f` with every value of a tensor. Weights are f32, and may have millions of values.
fn each(values: &HostTensor, mut f: impl FnMut(f64)) {
    if values.dtype == DType::F32 {
        let (quads, _) = values.bytes.as_chunks::<4>();
        quads.iter().for_each(|quad| f(f64::from(f32::from_le_bytes(*quad))));
    } else {
        (0..values.numel()).for_each(|i| f(values.get_f64(i)));
    }
}

/// What the driver of a run and its observers share.
#[derive(Default)]
pub struct Observed {
    /// Values logged since the driver took the last ones; `None` while no driver keeps them.
    queue: RefCell<Option<Vec<Logged>>>,
    /// The run directory.
    dir: RefCell<Option<PathBuf>>,
    /// The step that an observer is called about.
    step: Cell<Option<u64>>,
}

impl Observed {
    /// Keeps the values that `run:log` is given from now on, for `take`, and tells recipes the run directory, if there is one.
    pub fn keep(&self, dir: Option<PathBuf>) {
        self.queue.borrow_mut().get_or_insert_default();
        *self.dir.borrow_mut() = dir;
    }

    /// Returns the values logged since the last call, in order.
    pub fn take(&self) -> Vec<Logged> {
        self.queue.borrow_mut().as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Ends what `keep` began.
    pub fn end(&self) {
        *self.queue.borrow_mut() = None;
        *self.dir.borrow_mut() = None;
    }
}

impl Run {
    /// Returns whether the recipe has the field of an observer.
    pub fn has_observer(&self, name: &str) -> bool {
        self.recipe.get::<Value>(name).is_ok_and(|v| !v.is_nil())
    }

    /// Calls `recipe.on_step(run, event)` with the numbers of a step that have been read.
    pub fn on_step(&self, step: u64, seconds: f64, numbers: &StepNumbers) -> Result<(), Failed> {
        let Some(f) = self.observer("on_step")? else { return Ok(()) };
        let event = self.lua.create_table()?;
        event.set("step", step)?;
        event.set("loss", numbers.loss)?;
        event.set("samples", numbers.samples)?;
        event.set("seconds", seconds)?;
        let metrics = self.lua.create_table()?;
        for (name, value) in &numbers.metrics {
            metrics.set(name.as_str(), *value)?;
        }
        event.set("metrics", metrics)?;
        self.observe("recipe.on_step", step, || f.call::<()>((&self.table, event)))
    }

    /// Calls `recipe.on_eval(run, event)` after an evaluation of a split.
    pub fn on_eval(&self, step: u64, split: &str, values: &[(String, f64)]) -> Result<(), Failed> {
        let Some(f) = self.observer("on_eval")? else { return Ok(()) };
        let event = self.lua.create_table()?;
        event.set("step", step)?;
        event.set("split", split)?;
        let metrics = self.lua.create_table()?;
        for (name, value) in values {
            if name == "loss" {
                event.set("loss", *value)?;
            } else {
                metrics.set(name.as_str(), *value)?;
            }
        }
        event.set("metrics", metrics)?;
        self.observe("recipe.on_eval", step, || f.call::<()>((&self.table, event)))
    }

    /// Calls `recipe.on_end(run, status)` with "done" or "interrupted".
    pub fn on_end(&self, status: &str) -> Result<(), Failed> {
        let Some(f) = self.observer("on_end")? else { return Ok(()) };
        self.observe("recipe.on_end", self.count(), || f.call::<()>((&self.table, status)))
    }

    /// Passes an event, as the logs have it, to every function of `recipe.sinks`.
    pub fn sink(&self, step: u64, event: &serde_json::Value) -> Result<(), Failed> {
        let Some(sinks) = self.recipe.get::<Option<Table>>("sinks")? else { return Ok(()) };
        for f in sinks.sequence_values::<Function>() {
            let f = f?;
            let event = json::to_lua(&self.lua, event)?;
            self.observe("a sink of the recipe", step, || f.call::<()>(event))?;
        }
        Ok(())
    }

    fn observer(&self, name: &str) -> Result<Option<Function>, Failed> {
        Ok(self.recipe.get::<Option<Function>>(name)?)
    }

    /// Runs `f` as an observer about `step`.
    fn observe(&self, name: &'static str, step: u64, f: impl FnOnce() -> mlua::Result<()>) -> Result<(), Failed> {
        let host = &self.host;
        let (rng, before) = {
            let mut engine = host.engine.borrow_mut();
            (engine.recorder.graph.rng, engine.set_states_read_only(Some(name)))
        };
        let step = host.observed.step.replace(Some(step));
        let result = f();
        host.observed.step.set(step);
        let mut engine = host.engine.borrow_mut();
        engine.set_states_read_only(before);
        engine.recorder.graph.rng = rng;
        drop(engine);
        Ok(result?)
    }
}

/// Queues a value, unless no driver keeps them.
fn push(host: &Rc<Host>, step: u64, name: String, value: LoggedValue) {
    if let Some(queue) = &mut *host.observed.queue.borrow_mut() {
        queue.push(Logged { step, name, value });
    }
}

/// Returns the value of a tensor in host memory.
fn value_of(lua: &Lua, tensor: &AnyUserData) -> mlua::Result<HostTensor> {
    table::read(lua, &*tensor.borrow::<Tensor>()?)
}

/// `native.log_value(step, name, value)`: a number, a text, or a tensor of one element.
fn log_value(lua: &Lua, (step, name, value): (u64, String, Value)) -> mlua::Result<()> {
    let host = host(lua)?;
    let value = match &value {
        Value::Integer(i) => LoggedValue::Figure(*i as f64),
        Value::Number(x) => LoggedValue::Figure(*x),
        Value::UserData(u) => LoggedValue::Figure(value_of(lua, u)?.get_f64(0)),
        other => LoggedValue::Text(other.to_string()?),
    };
    push(&host, step, name, value);
    Ok(())
}

/// `native.log_image(step, name, image)`: a u8 tensor (H, W, C).
fn log_image(lua: &Lua, (step, name, image): (u64, String, AnyUserData)) -> mlua::Result<()> {
    let host = host(lua)?;
    let value = value_of(lua, &image)?;
    let png = perilune_data::image::encode(&value, &format!("the image '{name}'"));
    let png = png.map_err(|e| fail(&host, lua, OP, e))?;
    let [height, width, channels] = *value.shape.dims() else {
        return Err(errors::in_any_state(lua, OP, format!("the image '{name}' has shape {}", value.shape), None));
    };
    push(&host, step, name, LoggedValue::Image(LoggedImage { width, height, channels, png }));
    Ok(())
}

/// `native.log_histogram(step, name, values, bins)`.
fn log_histogram(lua: &Lua, (step, name, values, bins): (u64, String, AnyUserData, usize)) -> mlua::Result<()> {
    let host = host(lua)?;
    let histogram = Histogram::of(&value_of(lua, &values)?, bins);
    push(&host, step, name, LoggedValue::Histogram(histogram));
    Ok(())
}

/// `native.random_state()`: the counters of random numbers, for `native.set_random_state(…)`.
fn random_state(lua: &Lua, (): ()) -> mlua::Result<(u64, u32, u32)> {
    let rng = host(lua)?.engine.borrow().recorder.graph.rng;
    Ok((rng.seed, rng.step, rng.occurrence))
}

fn set_random_state(lua: &Lua, (seed, step, occurrence): (u64, u32, u32)) -> mlua::Result<()> {
    host(lua)?.engine.borrow_mut().recorder.graph.rng = RngState { seed, step, occurrence };
    Ok(())
}

pub(crate) fn install(lua: &Lua, native: &Table) -> mlua::Result<()> {
    let lua = &crate::boundary::Guarded(lua);
    native.set("random_state", lua.create_function(random_state)?)?;
    native.set("set_random_state", lua.create_function(set_random_state)?)?;
    native.set("log_value", lua.create_function(log_value)?)?;
    native.set("log_image", lua.create_function(log_image)?)?;
    native.set("log_histogram", lua.create_function(log_histogram)?)?;
    // The step that an observer is called about, if one is.
    native.set("observed_step", lua.create_function(|lua, ()| Ok(host(lua)?.observed.step.get()))?)?;
    native.set("keeps_logs", lua.create_function(|lua, ()| Ok(host(lua)?.observed.queue.borrow().is_some()))?)?;
    let dir = |lua: &Lua, ()| Ok(host(lua)?.observed.dir.borrow().as_ref().map(|d| d.display().to_string()));
    native.set("run_dir", lua.create_function(dir)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use perilune_core::Shape;

    fn of(values: &[f64], bins: usize) -> Histogram {
        Histogram::of(&HostTensor::from_f64(DType::F64, Shape::of(&[values.len()]), values), bins)
    }

    #[test]
    fn a_histogram_counts_every_finite_value_once() {
        let h = of(&[0.0, 1.0, 2.0, 3.0, 4.0, f64::NAN, f64::INFINITY], 4);
        assert_eq!((h.edges, h.counts), (vec![0.0, 1.0, 2.0, 3.0, 4.0], vec![1, 1, 1, 2]));
        assert_eq!((h.sum, h.sum_squares, h.not_finite), (10.0, 30.0, 2));
    }

    #[test]
    fn a_histogram_does_not_depend_on_the_dtype() {
        let values: Vec<f64> = (0..100).map(|k| f64::from(k * k % 37) - 9.5).collect();
        let single = HostTensor::from_f64(DType::F32, Shape::of(&[values.len()]), &values);
        assert_eq!(Histogram::of(&single, 7), of(&values, 7));
    }

    #[test]
    fn equal_values_and_none_have_one_bin() {
        let h = of(&[7.0, 7.0], 64);
        assert_eq!((h.edges, h.counts), (vec![6.5, 7.5], vec![2]));
        let h = of(&[], 64);
        assert_eq!((h.edges, h.counts), (vec![-0.5, 0.5], vec![0]));
    }
}
