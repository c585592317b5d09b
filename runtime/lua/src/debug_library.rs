//! Opens Lua's debug library for Rust code: breakpoints, and functions that are carried to workers. Recipes never see it.

use mlua::{Lua, Table, Value};

/// The functions of the debug library that Rust code uses, in the registry.
pub fn get(lua: &Lua) -> mlua::Result<Table> {
    const KEY: &str = "perilune.debug";
    if let Value::Table(t) = lua.named_registry_value::<Value>(KEY)? {
        return Ok(t);
    }
    // SAFETY: luaopen_debug is a lua_CFunction that needs no arguments and pushes one table; exec_raw calls it protected, with
    // room on the stack. The table goes to the registry, never to Lua code.
    #[allow(unsafe_code)]
    let all: Table = unsafe {
        lua.exec_raw((), |state| {
            mlua::ffi::luaopen_debug(state);
        })?
    };
    let out = lua.create_table()?;
    for name in ["getlocal", "setlocal", "getupvalue", "setupvalue", "upvalueid", "upvaluejoin", "getinfo"] {
        out.raw_set(name, all.raw_get::<Value>(name)?)?;
    }
    lua.set_named_registry_value(KEY, &out)?;
    Ok(out)
}
