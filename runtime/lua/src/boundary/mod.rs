//! Sandboxes a recipe's Lua code: limits its memory and the time of library functions, and catches panics of native functions.

pub mod memory_limit;
pub mod panics;
mod pattern;
pub mod recipe_line;
mod string_lib;

pub use panics::{Guarded, Methods, caught};

use mlua::{Function, Lua, Table};
use perilune_core::Interrupt;

/// Replaces library functions with unbounded time or memory.
pub fn install(lua: &Lua) -> mlua::Result<()> {
    let string: Table = lua.globals().raw_get("string")?;
    string_lib::install(lua, &string)?;
    let native = lua.create_table()?;
    native.raw_set("need", Guarded(lua).create_function(memory_limit::need)?)?;
    native.raw_set("exhausted", Guarded(lua).create_function(memory_limit::exhausted)?)?;
    let bounded = lua.load(include_str!("bounded.lua")).set_name("@perilune/bounded.lua").into_function()?;
    let globals = lua.globals();
    for library in bounded.call::<Table>(native)?.pairs::<String, Table>() {
        let (name, functions) = library?;
        let to = if name == "_G" { globals.clone() } else { globals.raw_get(name.as_str())? };
        for function in functions.pairs::<String, Function>() {
            let (part, function) = function?;
            to.raw_set(part, function)?;
        }
    }
    Ok(())
}

/// The number of list entries between polls of the interrupt.
const LOOK_EVERY: u64 = 1 << 12;

/// Collects the values of `f` for `first` .. `first + count - 1`, interruptible and within the memory limit.
pub fn numbers(lua: &Lua, op: &str, first: u64, count: u64, f: impl Fn(u64) -> i64) -> mlua::Result<Vec<i64>> {
    memory_limit::need(lua, (op.to_string(), count as f64 * 8.0))?;
    let mut out = Vec::with_capacity(count as usize);
    for k in 0..count {
        if k.is_multiple_of(LOOK_EVERY) {
            look(lua)?;
        }
        out.push(f(first.wrapping_add(k)));
    }
    Ok(out)
}

/// The interrupt of a state of a worker, which has no engine, in its app data.
pub struct OwnInterrupt(pub Interrupt);

/// Returns the interrupt of the run, or of the record that a worker computes.
pub fn interrupt(lua: &Lua) -> mlua::Result<Interrupt> {
    if let Some(own) = lua.app_data_ref::<OwnInterrupt>() {
        return Ok(own.0.clone());
    }
    Ok(crate::functions::host(lua)?.interrupt.clone())
}

/// Raises an error at the recipe's line if an interrupt was requested.
pub fn look(lua: &Lua) -> mlua::Result<()> {
    interrupt(lua)?.check().map_err(|e| recipe_line::raised(lua, e.message, None, crate::errors::Cause::Interrupted))
}

/// The maximum bytes of a text for `load`, since Lua's parser is not interruptible.
const LARGEST_CHUNK: usize = 16 << 20;

/// Raises for a chunk that is too long for `load`, and for an interrupt while its pieces arrive.
pub fn check_chunk(lua: &Lua, bytes: usize) -> mlua::Result<()> {
    look(lua)?;
    if bytes <= LARGEST_CHUNK {
        return Ok(());
    }
    let message = format!("load: the chunk has {bytes} bytes; at most {LARGEST_CHUNK} are compiled");
    let hint = Some("keep data in files, and read them: pl.load, pl.data".into());
    Err(recipe_line::raised(lua, message, hint, crate::errors::Cause::Recipe))
}
