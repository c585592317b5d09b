//! Binds `native.guard` and `native.not_finite`, with which the training loop guards States against NaN and finds the op that
//! made the first one.

use crate::errors;
use crate::functions::host;
use crate::tensor::Tensor;
use mlua::{Lua, MultiValue, Table, Value};
use perilune_core::DType;
use perilune_core::graph::NodeId;

fn node(lua: &Lua, op: &str, v: &Value) -> mlua::Result<NodeId> {
    let host = host(lua)?;
    let what = v.as_userdata().and_then(|u| u.borrow::<Tensor>().ok().map(|t| crate::args::RefGuard(t.what)));
    match what {
        Some(what) => host.record(lua, |engine| Ok(what.node(engine)?)),
        None => Err(errors::argument(&host, lua, op, format!("it needs a tensor, not {}", crate::args::show(v)), None)),
    }
}

/// `native.guard(ok)`: in a step, every State keeps its value unless the bool scalar `ok` is true on the device.
fn guard(lua: &Lua, ok: Value) -> mlua::Result<()> {
    let id = node(lua, "guard", &ok)?;
    let host = host(lua)?;
    let fits = {
        let engine = host.engine.borrow();
        engine.in_step()
            && engine.recorder.graph.dtype(id) == DType::Bool
            && engine.recorder.graph.shape(id).numel() == 1
    };
    if !fits {
        return Err(errors::argument(&host, lua, "guard", "it needs a step and a bool scalar", None));
    }
    host.engine.borrow_mut().guard(id);
    Ok(())
}

/// `native.not_finite(x, ...)`: the origin of the NaN or infinity in the first non-finite argument: { op, shape, nan,
/// file, line, state, input }; nil if all are finite.
fn not_finite(lua: &Lua, roots: MultiValue) -> mlua::Result<Option<Table>> {
    let host = host(lua)?;
    let roots = roots.iter().map(|v| node(lua, "not_finite", v)).collect::<mlua::Result<Vec<_>>>()?;
    let Some(found) = host.record(lua, |engine| engine.not_finite(&roots))? else { return Ok(None) };
    let t = lua.create_table()?;
    t.set("op", found.op)?;
    t.set("shape", found.shape.to_string())?;
    t.set("nan", found.nan)?;
    t.set("input", found.input)?;
    let path = found.state.and_then(|id| host.engine.borrow().state_path(id));
    t.set("state", path.as_deref())?;
    if let Some((file, line)) = host.engine.borrow().recorder.source_map.get(found.loc) {
        t.set("file", file)?;
        t.set("line", line)?;
    }
    Ok(Some(t))
}

pub fn install(lua: &Lua, native: &Table) -> mlua::Result<()> {
    let lua = &crate::boundary::Guarded(lua);
    native.set("guard", lua.create_function(guard)?)?;
    native.set("not_finite", lua.create_function(not_finite)?)
}
