//! Binds the sample log of a run for Lua: a thin wrapper of `perilune_data::sample_log`. `stdlib/train/sample_log.lua` builds the API on it.

use crate::errors;
use crate::functions::host;
use crate::recipe_files::fail;
use crate::records::RecordSet;
use crate::table;
use crate::tensor::Tensor;
use mlua::{AnyUserData, Lua, Table, UserData, UserDataMethods, Value};
use perilune_core::HostTensor;
use perilune_data::sample_log::{Entry, Order, SampleId, SampleLog, Stats};
use std::cell::RefCell;
use std::rc::Rc;

const OP: &str = "recipe.sample_log";

/// The sample log of a run, which the host that drives it writes to a file.
#[derive(Clone, Default)]
pub(crate) struct LogData(pub(crate) Rc<RefCell<SampleLog>>);

/// A micro-batch of a step: who its samples are, and a tensor (samples) for each value.
struct Part {
    ids: Vec<SampleId>,
    loss: HostTensor,
    weight: Option<HostTensor>,
    gradient: Option<HostTensor>,
}

fn part(lua: &Lua, log: &mut SampleLog, t: &Table) -> mlua::Result<Part> {
    let read = |name: &str| -> mlua::Result<Option<HostTensor>> {
        let Some(tensor) = t.get::<Option<AnyUserData>>(name)? else { return Ok(None) };
        table::read(lua, &*tensor.borrow::<Tensor>()?).map(Some)
    };
    let mut ids = Vec::new();
    if let Some(set) = t.get::<Option<AnyUserData>>("set")? {
        let set = set.borrow::<RecordSet>()?.0.clone();
        let (first, count): (u64, u64) = (t.get("first")?, t.get("count")?);
        for index in (0..count).map(|k| first.saturating_add(k)) {
            let host = host(lua)?;
            let origin = set.origins(index).map_err(|e| fail(&host, lua, OP, e))?.into_iter().next();
            // What is of no file is named by its place in an epoch.
            let (name, row, sub) = match origin {
                Some(o) => (o.file.display().to_string(), o.row, o.sub),
                None => ("records".into(), index % set.len().max(1), 0),
            };
            ids.push(SampleId { source: log.source(&name), row, sub });
        }
    } else {
        let source = log.source(&t.get::<String>("what")?);
        let rows: Vec<i64> = t.get("ids")?;
        ids.extend(rows.into_iter().map(|row| SampleId { source, row: row as u64, sub: 0 }));
    }
    let part = Part {
        ids,
        loss: read("loss")?
            .unwrap_or_else(|| HostTensor::from_f64(perilune_core::DType::F32, perilune_core::Shape::of(&[0]), &[])),
        weight: read("weight")?,
        gradient: read("gradient")?,
    };
    let n = part.ids.len();
    for (name, tensor) in
        [("loss", Some(&part.loss)), ("weight", part.weight.as_ref()), ("gradient", part.gradient.as_ref())]
    {
        if let Some(found) = tensor.map(HostTensor::numel).filter(|found| *found != n) {
            let message = format!("the {name} has {found} elements, and the batch {n} samples");
            let hint = "give one for each sample of the batch, a tensor (samples)";
            return Err(errors::argument(&host(lua)?, lua, OP, message, Some(hint.into())));
        }
    }
    Ok(part)
}

fn set_id(log: &SampleLog, t: &Table, id: SampleId) -> mlua::Result<()> {
    t.raw_set("source", log.sources().get(usize::from(id.source)).map_or("", String::as_str))?;
    t.raw_set("row", id.row)?;
    t.raw_set("sub", id.sub)
}

fn set_values(t: &Table, loss: f32, weight: f32, gradient: f32) -> mlua::Result<()> {
    let known = |x: f32| if x.is_nan() { Value::Nil } else { Value::Number(f64::from(x)) };
    t.raw_set("loss", known(loss))?;
    t.raw_set("weight", known(weight))?;
    t.raw_set("gradient", known(gradient))
}

fn set_stats(t: &Table, s: &Stats) -> mlua::Result<()> {
    t.raw_set("count", s.count)?;
    t.raw_set("step", s.step)?;
    set_values(t, s.loss, s.weight, s.gradient)?;
    if s.count > 0 {
        t.raw_set("mean", s.mean)?;
        t.raw_set("deviation", s.deviation())?;
    }
    Ok(())
}

impl UserData for LogData {
    fn add_methods<M: UserDataMethods<Self>>(methods: &mut M) {
        let methods = &mut crate::boundary::Methods(methods);
        // The micro-batches of a step: a list of { set =, first =, count = } or { what =, ids = } with loss, weight?, gradient?.
        methods.add_method("add", |lua, this, (step, parts): (u32, Table)| {
            let mut log = this.0.borrow_mut();
            let mut entries = Vec::new();
            for t in parts.sequence_values::<Table>() {
                let part = part(lua, &mut log, &t?)?;
                let of = |tensor: &Option<HostTensor>, k: usize, none: f32| {
                    tensor.as_ref().map_or(none, |t| t.get_f64(k) as f32)
                };
                entries.extend(part.ids.iter().enumerate().map(|(k, id)| Entry {
                    step,
                    id: *id,
                    loss: part.loss.get_f64(k) as f32,
                    weight: of(&part.weight, k, 1.0),
                    gradient: of(&part.gradient, k, f32::NAN),
                }));
            }
            log.add(step, entries).map_err(|e| host(lua).map_or_else(|e| e, |host| fail(&host, lua, OP, e)))
        });
        methods.add_method("samples", |lua, this, step: u32| {
            let log = this.0.borrow();
            let host = host(lua)?;
            let entries = log.samples(step).map_err(|e| fail(&host, lua, "run:samples", e))?;
            let out = lua.create_table_with_capacity(entries.len(), 0)?;
            for e in entries {
                let t = lua.create_table()?;
                set_id(&log, &t, e.id)?;
                set_values(&t, e.loss, e.weight, e.gradient)?;
                out.raw_push(t)?;
            }
            Ok(out)
        });
        methods.add_method("worst", |lua, this, (count, by): (usize, String)| {
            let order = match by.as_str() {
                "mean" => Order::Mean,
                "gradient" => Order::Gradient,
                _ => Order::Last,
            };
            let log = this.0.borrow();
            let out = lua.create_table()?;
            for (id, stats) in log.worst(count, order) {
                let t = lua.create_table()?;
                set_id(&log, &t, id)?;
                set_stats(&t, &stats)?;
                out.raw_push(t)?;
            }
            Ok(out)
        });
        methods.add_method("of", |lua, this, (source, row, sub): (Option<String>, u64, u32)| {
            let log = this.0.borrow();
            let at = match &source {
                Some(name) => log.sources().iter().position(|s| s == name),
                None => Some(0),
            };
            let found = at.and_then(|source| log.of(SampleId { source: source as u16, row, sub }));
            found.map(|stats| lua.create_table().and_then(|t| set_stats(&t, stats).map(|()| t))).transpose()
        });
        methods.add_method("sources", |_, this, ()| Ok(this.0.borrow().sources().to_vec()));
        methods.add_method("size", |_, this, ()| Ok(this.0.borrow().len()));
    }
}

/// `native.sample_log()`: creates the log of a run.
pub(crate) fn create(lua: &Lua, (): ()) -> mlua::Result<AnyUserData> {
    lua.create_userdata(LogData::default())
}

/// `native.sample_losses(loss, samples)`: returns the loss of each sample, and of cross-entropy the norm of its gradient with respect to
/// the logits; nothing if `loss` is no loss of the library over so many samples.
pub(crate) fn losses(lua: &Lua, (loss, samples): (Value, usize)) -> mlua::Result<(Option<Tensor>, Option<Tensor>)> {
    let host = host(lua)?;
    let what = loss.as_userdata().and_then(|u| u.borrow::<Tensor>().ok().map(|t| crate::args::RefGuard(t.what)));
    let Some(what) = what else { return Ok((None, None)) };
    let found = host.record(lua, |engine| {
        let node = what.node(engine)?;
        Ok(perilune_core::ops::loss::of_samples(&mut engine.recorder.graph, node, samples)?)
    })?;
    Ok(match found {
        Some(found) => (Some(host.tensor(found.losses)), found.gradient_norms.map(|n| host.tensor(n))),
        None => (None, None),
    })
}
