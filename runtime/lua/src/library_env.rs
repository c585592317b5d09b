//! Makes the global environment of the standard library: copies of the globals, of Lua's libraries and of `pl`, made before any recipe.
//!
//! A recipe may replace its globals and the fields of `string` or `pl`. The library's chunks, also those loaded later, read their own
//! copies, so that a replacement neither breaks them nor sees what they pass. Modules (`pl.nn`, `pl.optim`) are shared: a recipe
//! that replaces a method of a layer means to change it.

use crate::boundary::Guarded;
use crate::loader;
use mlua::{Function, Lua, LuaString, Table, Value};

/// The environment in Lua's registry.
const ENV: &str = "perilune.library_env";

pub fn copy(lua: &Lua, t: &Table) -> mlua::Result<Table> {
    let out = lua.create_table()?;
    for pair in t.pairs::<Value, Value>() {
        let (k, v) = pair?;
        out.raw_set(k, v)?;
    }
    Ok(out)
}

/// Makes the methods of strings (`text:format(…)`) independent of the global `string`. What a recipe adds to `string` is a method
/// too; what it replaces there is not.
pub fn protect_strings(lua: &Lua) -> mlua::Result<()> {
    let string: Table = lua.globals().raw_get("string")?;
    let (methods, meta) = (copy(lua, &string)?, lua.create_table()?);
    meta.raw_set("__index", string)?;
    methods.set_metatable(Some(meta))?;
    if let Some(of_strings) = lua.type_metatable::<LuaString>() {
        of_strings.raw_set("__index", methods)?;
        // `getmetatable("")` would give write access to the methods of all strings.
        of_strings.raw_set("__metatable", false)?;
    }
    Ok(())
}

/// Creates the environment from the globals. `pl` is the library's own copy of the module.
pub fn install(lua: &Lua, pl: &Table) -> mlua::Result<()> {
    let globals = lua.globals();
    let env = lua.create_table()?;
    for pair in globals.pairs::<Value, Value>() {
        let (name, value) = pair?;
        let value = match value {
            Value::Table(t) if t == globals => Value::Table(env.clone()),
            Value::Table(t) => Value::Table(copy(lua, &t)?),
            other => other,
        };
        env.raw_set(name, value)?;
    }
    let own = pl.clone();
    let require = move |lua: &Lua, name: String| match name.as_str() {
        "perilune" => Ok(Value::Table(own.clone())),
        _ => loader::require_own(lua, name),
    };
    env.raw_set("require", Guarded(lua).create_function(require)?)?;
    lua.set_named_registry_value(ENV, env)
}

/// Returns the environment.
pub fn env(lua: &Lua) -> mlua::Result<Table> {
    lua.named_registry_value(ENV)
}

/// Returns a function of the environment, such as `next` or `require`.
pub fn function(lua: &Lua, name: &str) -> mlua::Result<Function> {
    env(lua)?.raw_get(name)
}
