//! Binds what the training loop needs of a mesh: its axes, the placement of States, the division of batches.

use crate::args::{RefGuard, show};
use crate::errors;
use crate::functions::host;
use crate::tensor::{Ref, Tensor};
use mlua::{FromLua, Function, Lua, Table, Value};
use perilune_core::mesh::{Along, Axis};
use perilune_core::{Mesh, Placement};
use perilune_dist::MeshOptions;
use perilune_engine::Engine;
use perilune_plan::pipelining::split::MOST_DEVICES;
use perilune_plan::{Backend, Schedule};
use std::rc::Rc;
use std::sync::Arc;

/// What a recipe's mesh has opened.
pub struct OpenedMesh {
    /// Its devices; `None` if the engine is on such a mesh already.
    pub backend: Option<Arc<dyn Backend>>,
    pub options: MeshOptions,
}

/// Sets what the options of a mesh say beside its devices: how States are divided, the size of buckets, how attention gets its keys
/// and stages take turns.
pub fn set_mesh_options(engine: &mut Engine, options: MeshOptions) {
    let MeshOptions { mesh: _, zero, bucket, keys, schedule } = options;
    engine.zero = zero;
    engine.set_bucket(bucket);
    engine.set_key_exchange(keys);
    engine.mesh_schedule = schedule;
}

/// Opens the mesh that a text names. `now` is the mesh of the engine.
pub type OpenMesh = Rc<dyn Fn(&str, Mesh) -> perilune_core::error::Result<OpenedMesh>>;

/// `native.mesh()`: the sizes of the mesh's axes by name, and the stage `zero`; nil on one device.
fn mesh(lua: &Lua, (): ()) -> mlua::Result<Option<Table>> {
    let host = host(lua)?;
    let engine = host.engine.borrow();
    let mesh = engine.mesh();
    if mesh.devices() == 1 {
        return Ok(None);
    }
    let t = lua.create_table()?;
    for axis in Axis::ALL {
        t.set(axis.name(), mesh.size(axis))?;
    }
    t.set("zero", engine.zero_stage())?;
    Ok(Some(t))
}

/// `pl.mesh()`: the number of devices along each axis by name; all are 1 on one device.
pub fn sizes(lua: &Lua, (): ()) -> mlua::Result<Table> {
    let (t, mesh) = (lua.create_table()?, host(lua)?.engine.borrow().mesh());
    for axis in Axis::ALL {
        t.set(axis.name(), mesh.size(axis))?;
    }
    Ok(t)
}

/// `native.open_mesh("dp=2,zero=1")`: moves the engine to such a mesh of its devices. `--mesh` goes first.
fn open_mesh(lua: &Lua, text: String) -> mlua::Result<()> {
    let host = host(lua)?;
    let Some(open) = host.open_mesh.borrow().clone() else { return Ok(()) };
    let fail = |e: perilune_core::Error| errors::argument(&host, lua, "recipe.mesh", e.message, e.hint);
    let opened = open(&text, host.engine.borrow().mesh()).map_err(fail)?;
    if let Some(backend) = opened.backend {
        host.flush(lua)?;
        host.record(lua, |engine| engine.move_to(backend))?;
    }
    set_mesh_options(&mut host.engine.borrow_mut(), opened.options);
    Ok(())
}

/// What decides the strict shards of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum StrictShards {
    /// The recipe, if it states any.
    #[default]
    Recipe,
    /// The command line, whatever a recipe says.
    CommandLine,
    /// The first version of the recipe that runs.
    Running,
}

/// `native.strict_shards(n)`: cuts every batch into n logical shards, so that bits do not depend on the mesh; nil ends it. The option
/// --strict-shards goes first.
fn strict_shards(lua: &Lua, wanted: Option<usize>) -> mlua::Result<()> {
    let host = host(lua)?;
    let now = host.engine.borrow().strict_shards();
    let fail = |e: perilune_core::Error| errors::argument(&host, lua, "recipe.strict_shards", e.message, e.hint);
    let wanted = match host.strict_shards.get() {
        StrictShards::Recipe => wanted,
        StrictShards::CommandLine => now,
        StrictShards::Running if wanted == now => now,
        StrictShards::Running => {
            let number = |n: Option<usize>| n.map_or("none".to_string(), |n| n.to_string());
            let message = format!("a running job has {}, not {}", number(now), number(wanted));
            let error = perilune_core::Error::argument("recipe.strict_shards", message);
            return Err(fail(error.hint("other shards are other sums: stop the run and start another one")));
        }
    };
    // The recipe may have moved the engine to another mesh.
    let set = host.engine.borrow_mut().set_strict_shards(wanted);
    set.map_err(fail)
}

/// `native.shards()`: the logical shards of a batch; nil if they are not fixed.
fn shards(lua: &Lua, (): ()) -> mlua::Result<Option<usize>> {
    Ok(host(lua)?.engine.borrow().strict_shards())
}

/// `native.batch(samples)`: host tensors made from now on whose dim 0 is `samples` are divided among the devices; nil ends it.
/// Returns the value of before.
fn batch(lua: &Lua, samples: Option<usize>) -> mlua::Result<Option<usize>> {
    Ok(host(lua)?.engine.borrow_mut().set_batch(samples))
}

/// `native.positions(length)`: the numbers 0 ... length - 1, of which each device along `cp` has a block.
fn positions(lua: &Lua, length: usize) -> mlua::Result<Tensor> {
    let host = host(lua)?;
    let id = host.record(lua, |engine| Ok(engine.positions(length)))?;
    Ok(host.tensor(id))
}

/// `native.place_state(state, dims, stage, device)`: divides a State, and stores it on the device of one pipeline stage only, if they are
/// given. `dims` names for some axes the dim that devices along it have a block of, or
/// { dim, segments } or { dim, sections = { 4, 1, 1 } }: of each of the equal segments, or of the sections of these relative sizes.
fn place_state(lua: &Lua, (state, dims, stage, device): (Value, Table, Option<u8>, Option<u8>)) -> mlua::Result<()> {
    let host = host(lua)?;
    let what = state.as_userdata().and_then(|u| u.borrow::<Tensor>().ok().map(|t| RefGuard(t.what)));
    let Some(Ref::State(id)) = what.as_ref().map(|w| w.0) else {
        let message = format!("it needs a State, not {}", show(&state));
        return Err(errors::argument(&host, lua, "place_state", message, None));
    };
    let mut placement = Placement::REPLICATED;
    if let Some((stage, device)) = stage.zip(device) {
        placement = placement.with(Axis::Pp, Along::Stage { device, stage });
    }
    for pair in dims.pairs::<String, Value>() {
        let (name, cut) = pair?;
        let along = match &cut {
            Value::Table(t) => match t.get::<Option<[u8; 3]>>("sections")? {
                Some(sections) => Along::Sections(t.get(1)?, sections),
                None => Along::Segments(t.get(1)?, t.get(2)?),
            },
            dim => Along::Split(u8::from_lua(dim.clone(), lua)?),
        };
        let Some(axis) = Axis::ALL.into_iter().find(|axis| axis.name() == name) else {
            return Err(errors::argument(&host, lua, "place_state", format!("there is no axis {name:?}"), None));
        };
        placement = placement.with(axis, along);
    }
    // A State with a value moves: what was recorded before reads the old place.
    if host.engine.borrow().has_memory(id) && host.engine.borrow().is_dirty() {
        host.flush(lua)?;
    }
    host.record(lua, |engine| engine.place_state(id, placement))
}

/// `native.cut_stages(fn, stages, states)`: records `fn` as a step, drops it, and cuts it into pipeline stages. Returns for each State the
/// number of its stage, or false if no forward pass reads it, and for each stage { flops =, received = }.
fn cut_stages(lua: &Lua, (f, stages, states): (Function, usize, Vec<Value>)) -> mlua::Result<(Table, Table)> {
    let cut = crate::dry_run::recorded(lua, &f, |engine, nodes| engine.cut_stages(nodes, stages))?;
    let (places, costs) = (lua.create_table()?, lua.create_table()?);
    for state in &states {
        let what = state.as_userdata().and_then(|u| u.borrow::<Tensor>().ok().map(|t| RefGuard(t.what)));
        let stage = match what.as_ref().map(|w| w.0) {
            Some(Ref::State(id)) => cut.stages.get(&id.0).copied(),
            _ => None,
        };
        places.push(stage.map_or(Value::Boolean(false), |stage| Value::Integer(stage as i64)))?;
    }
    for cost in &cut.costs {
        let t = lua.create_table()?;
        t.set("flops", cost.flops)?;
        t.set("received", cost.received)?;
        costs.push(t)?;
    }
    Ok((places, costs))
}

/// `native.schedule(text, devices, micros)`: sets how pipeline stages take turns, by name or as a table; nil: by default. One that the mesh
/// names goes first. Checks it for so many devices and micro-batches. Returns the device of each stage.
fn schedule(lua: &Lua, (text, devices, micros): (Option<String>, usize, usize)) -> mlua::Result<Vec<usize>> {
    let host = host(lua)?;
    if devices > MOST_DEVICES {
        let message = format!("pp={devices}: a mesh has at most {MOST_DEVICES} devices along pp");
        return Err(errors::argument(&host, lua, "mesh", message, Some("use a smaller pp".into())));
    }
    let of_mesh = host.engine.borrow().mesh_schedule.clone();
    let parsed = match (of_mesh, text) {
        (Some(schedule), _) => Ok(schedule),
        (None, Some(text)) => Schedule::parse(&text),
        (None, None) => Ok(Schedule::default()),
    };
    let checked = parsed.and_then(|schedule| schedule.table(devices, micros).map(|_| schedule));
    let fail = |e: perilune_core::Error| errors::argument(&host, lua, "recipe.pipeline", e.message, e.hint);
    let schedule = checked.map_err(fail)?;
    let places = schedule.devices(devices);
    host.engine.borrow_mut().set_schedule(schedule, micros);
    Ok(places)
}

/// `native.fails(error)`: says that an error ends the enclosing block of this process, before the block is cleaned up. Returns whether the
/// clean-up may compute anything: in a job the other processes may not do the same.
fn fails(lua: &Lua, error: Value) -> mlua::Result<bool> {
    let host = host(lua)?;
    let Some(hook) = host.fails.borrow().clone() else { return Ok(true) };
    let error = match error {
        Value::Error(e) => *e,
        other => mlua::Error::runtime(other.to_string()?),
    };
    Ok(hook(&error.into()))
}

pub fn install(lua: &Lua, native: &Table) -> mlua::Result<()> {
    let lua = &crate::boundary::Guarded(lua);
    native.set("fails", lua.create_function(fails)?)?;
    native.set("open_mesh", lua.create_function(open_mesh)?)?;
    native.set("mesh", lua.create_function(mesh)?)?;
    native.set("strict_shards", lua.create_function(strict_shards)?)?;
    native.set("shards", lua.create_function(shards)?)?;
    native.set("batch", lua.create_function(batch)?)?;
    native.set("positions", lua.create_function(positions)?)?;
    native.set("cut_stages", lua.create_function(cut_stages)?)?;
    native.set("schedule", lua.create_function(schedule)?)?;
    native.set("place_state", lua.create_function(place_state)?)
}
