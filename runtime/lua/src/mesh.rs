//! Binds what the training loop needs of a mesh: its axes, the placement of States, the division of batches.

use crate::args::{RefGuard, show};
use crate::errors;
use crate::functions::host;
use crate::tensor::{Ref, Tensor};
use mlua::{Lua, Table, Value};
use perilune_core::Placement;
use perilune_core::mesh::{Along, Axis};

/// `native.mesh()`: the sizes of the mesh's axes by name, and `zero` if it was given; nil on one device.
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
    t.set("zero", engine.zero)?;
    Ok(Some(t))
}

/// `native.batch(samples)`: host tensors made from now on whose dim 0 is `samples` are divided among the devices; nil ends it.
/// Returns the value of before.
fn batch(lua: &Lua, samples: Option<usize>) -> mlua::Result<Option<usize>> {
    Ok(host(lua)?.engine.borrow_mut().set_batch(samples))
}

/// `native.place_state(state, dims)`: divides a State: `dims` names for some axes the dim that devices along it have a block of.
fn place_state(lua: &Lua, (state, dims): (Value, Table)) -> mlua::Result<()> {
    let host = host(lua)?;
    let what = state.as_userdata().and_then(|u| u.borrow::<Tensor>().ok().map(|t| RefGuard(t.what)));
    let Some(Ref::State(id)) = what.as_ref().map(|w| w.0) else {
        let message = format!("it needs a State, not {}", show(&state));
        return Err(errors::argument(&host, lua, "place_state", message, None));
    };
    let mut placement = Placement::REPLICATED;
    for pair in dims.pairs::<String, u8>() {
        let (name, dim) = pair?;
        let Some(axis) = Axis::ALL.into_iter().find(|axis| axis.name() == name) else {
            return Err(errors::argument(&host, lua, "place_state", format!("there is no axis {name:?}"), None));
        };
        placement = placement.with(axis, Along::Split(dim));
    }
    // A State with a value moves: what was recorded before reads the old place.
    if host.engine.borrow().has_memory(id) && host.engine.borrow().is_dirty() {
        host.flush(lua)?;
    }
    host.record(lua, |engine| engine.place_state(id, placement))
}

pub fn install(lua: &Lua, native: &Table) -> mlua::Result<()> {
    let lua = &crate::boundary::Guarded(lua);
    native.set("mesh", lua.create_function(mesh)?)?;
    native.set("batch", lua.create_function(batch)?)?;
    native.set("place_state", lua.create_function(place_state)?)
}
