//! Makes the global environment of a worker: the standard libraries, with the same results in every state.

use super::modules::Modules;
use super::random::{self, Draws};
use crate::boundary::{Guarded, recipe_line};
use crate::errors::Cause;
use crate::host::INTERNAL;
use crate::{loader, no_tail_calls};
use mlua::{Function, Lua, Table, Value};
use perilune_core::error::did_you_mean;
use std::rc::Rc;

fn raised(lua: &Lua, message: impl Into<String>, hint: Option<String>) -> mlua::Error {
    recipe_line::raised(lua, message.into(), hint, Cause::Recipe)
}

/// Fills the globals of a new state and returns its `require`.
pub fn install(lua: &Lua, modules: Modules, draws: Rc<Draws>) -> mlua::Result<Function> {
    let (globals, guarded) = (lua.globals(), Guarded(lua));
    let chunk = lua.load(include_str!("library.lua")).set_name(format!("{INTERNAL}workers/library.lua"));
    let own: Table = chunk.call(())?;
    for name in ["pairs", "next"] {
        globals.raw_set(name, own.raw_get::<Function>(name)?)?;
    }
    globals.raw_get::<Table>("table")?.raw_set("sort", own.raw_get::<Function>("sort")?)?;
    let math: Table = globals.raw_get("math")?;
    math.raw_set("random", random::function(lua, draws)?)?;
    let unseeded = |lua: &Lua, _: mlua::MultiValue| -> mlua::Result<()> {
        Err(raised(
            lua,
            "math.randomseed: in a worker the seed is that of the stage",
            Some("pass { seed = … } to it".into()),
        ))
    };
    math.raw_set("randomseed", guarded.create_function(unseeded)?)?;
    let print = |lua: &Lua, _: mlua::MultiValue| -> mlua::Result<()> {
        let message = "print: a function of a pipeline prints nothing, since it runs in several workers at once";
        Err(raised(
            lua,
            message,
            Some("return the value as a field, and print a record: print(records:get(0).field)".into()),
        ))
    };
    globals.raw_set("print", guarded.create_function(print)?)?;
    let loaded = lua.create_table()?;
    let require = guarded.create_function(move |lua, name: String| require(lua, &modules, &loaded, &name))?;
    globals.raw_set("require", &require)?;
    guard(lua, &globals)?;
    Ok(require)
}

/// The modules of the runtime that need no engine: functions of values of records.
const PURE: [&str; 1] = ["perilune.augment.text"];

/// Loads a module of [`PURE`].
fn pure(lua: &Lua, name: &str) -> mlua::Result<Value> {
    let found = loader::stdlib_files().iter().find(|(module, ..)| *module == name);
    let (_, path, text) = found.ok_or_else(|| mlua::Error::runtime(format!("this is a bug: no module {name}")))?;
    no_tail_calls::compile(lua, text, &format!("{INTERNAL}{path}"), None)?.call(name)
}

/// `require` of the files that the recipe has required. Modules of the runtime need its engine: their fields are errors.
fn require(lua: &Lua, modules: &Modules, loaded: &Table, name: &str) -> mlua::Result<Value> {
    let found: Value = loaded.raw_get(name)?;
    if !found.is_nil() {
        return Ok(found);
    }
    let value = if PURE.contains(&name) {
        pure(lua, name)?
    } else if loader::is_library(name) {
        Value::Table(absent(lua, name)?)
    } else {
        let Some((file, text)) = modules.find(name) else {
            let message = format!("require: a worker has no module \"{name}\", since the recipe has not required it");
            return Err(raised(
                lua,
                message,
                Some("require it at the top of the recipe: workers open no files".into()),
            ));
        };
        no_tail_calls::compile(lua, text, &loader::chunk_name(file), None)?.call(name)?
    };
    let value = if value.is_nil() { Value::Boolean(true) } else { value };
    loaded.raw_set(name, value.clone())?;
    Ok(value)
}

/// A module of the runtime in a worker: its functions are missing, and reading them is the error.
fn absent(lua: &Lua, module: &str) -> mlua::Result<Table> {
    let (out, meta) = (lua.create_table()?, lua.create_table()?);
    let short = module.replacen("perilune", "pl", 1);
    let (module, own) = (module.to_string(), module == "perilune");
    let missing = move |lua: &Lua, (_, key): (Value, Value)| -> mlua::Result<Value> {
        let name = key.as_string().map(|s| s.to_string_lossy()).unwrap_or_default();
        let child = format!("{module}.{name}");
        if PURE.contains(&child.as_str()) {
            return pure(lua, &child);
        }
        if PURE.iter().any(|pure| pure.strip_prefix(&child).is_some_and(|rest| rest.starts_with('.'))) {
            return absent(lua, &child).map(Value::Table);
        }
        let message =
            format!("{short}.{name}: a function of a pipeline runs in workers, which have no device and no '{short}'");
        Err(raised(lua, message, Some("use it after :batch, or before the function".into())))
    };
    if own {
        out.raw_set("version", env!("CARGO_PKG_VERSION"))?;
    }
    meta.raw_set("__index", Guarded(lua).create_function(missing)?)?;
    out.set_metatable(Some(meta))?;
    Ok(out)
}

/// Makes reading and writing undefined globals an error: what one record writes there, another one of the worker would read.
fn guard(lua: &Lua, globals: &Table) -> mlua::Result<()> {
    let (meta, lua) = (lua.create_table()?, Guarded(lua));
    let read = |lua: &Lua, (globals, key): (Table, Value)| -> mlua::Result<()> {
        let name = key.as_string().map(|s| s.to_string_lossy()).unwrap_or_default();
        let known: Vec<String> = globals.pairs::<String, Value>().flatten().map(|(name, _)| name).collect();
        let hint = did_you_mean(&name, known.iter().map(String::as_str)).map(|n| format!("did you mean '{n}'?"));
        let hint = hint.unwrap_or_else(|| "workers have the standard libraries: capture others as locals".into());
        Err(raised(lua, format!("global '{name}' is not defined in a worker"), Some(hint)))
    };
    let write = |lua: &Lua, (_, key, _): (Table, Value, Value)| -> mlua::Result<()> {
        let name = key.as_string().map(|s| s.to_string_lossy()).unwrap_or_default();
        Err(raised(
            lua,
            format!("assignment to the undeclared global '{name}'"),
            Some(format!("write: local {name} = …")),
        ))
    };
    meta.raw_set("__index", lua.create_function(read)?)?;
    meta.raw_set("__newindex", lua.create_function(write)?)?;
    meta.raw_set("__metatable", false)?;
    globals.set_metatable(Some(meta))
}
