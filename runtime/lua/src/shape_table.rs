//! Makes the table that `x.shape` returns: dimensions from 1, as Lua counts. Index 0 and below, a habit of other languages, is an error.

use crate::errors;
use mlua::{Lua, Table, Value};
use perilune_core::Shape;

/// The registry key of the metatable that all shapes share.
const META: &str = "perilune.shape";

/// Returns a shape as a table.
pub(crate) fn table(lua: &Lua, shape: &Shape) -> mlua::Result<Table> {
    let out = lua.create_sequence_from(shape.dims().iter().copied())?;
    let meta = match lua.named_registry_value::<Value>(META)? {
        Value::Table(meta) => meta,
        _ => metatable(lua)?,
    };
    out.set_metatable(Some(meta))?;
    Ok(out)
}

fn metatable(lua: &Lua) -> mlua::Result<Table> {
    let meta = lua.create_table()?;
    let index = crate::boundary::Guarded(lua).create_function(|lua, (_, key): (Value, Value)| {
        // One above the rank is nil, as in any list: `for i = 1, #shape`, `shape[3] or 1`.
        let Some(i) = key.as_integer().filter(|i| *i < 1) else { return Ok(Value::Nil) };
        let cure = format!("shape[1] is the first dimension; x:size({i}) counts from 0, and from the end below it");
        Err(errors::in_any_state(lua, "shape", format!("there is no shape[{i}]: the list begins at 1"), Some(cure)))
    })?;
    meta.set("__index", index)?;
    lua.set_named_registry_value(META, &meta)?;
    Ok(meta)
}
