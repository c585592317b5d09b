//! Makes the globals of the prompt: `pl`, its own `require` and `help`, those of recipes, and the parts of the module by their names.

use super::help;
use crate::boundary::Guarded;
use crate::errors;
use crate::functions::host as host_of;
use mlua::{Lua, Table, Value};
use perilune_core::error::did_you_mean;

/// Makes the table of the prompt's globals, over those of recipes.
pub(super) fn scope(lua: &Lua, declared: Table) -> mlua::Result<Table> {
    let (env, meta) = (lua.create_table()?, lua.create_table()?);
    meta.raw_set("__index", Guarded(lua).create_function(undefined(declared))?)?;
    meta.raw_set("__metatable", false)?;
    env.set_metatable(Some(meta))?;
    let loaded: Table = lua.named_registry_value("perilune.loaded")?;
    env.raw_set("pl", loaded.raw_get::<Value>("perilune")?)?;
    // Lines of the prompt may require files of the current directory; recipes only files of their folder.
    env.raw_set(
        "require",
        Guarded(lua).create_function(|lua, name: String| crate::loader::require_from(lua, name, true))?,
    )?;
    env.raw_set("help", Guarded(lua).create_function(help::help)?)?;
    Ok(env)
}

/// The parts of the module that the prompt knows by their own names, as recipes call their locals.
pub(crate) const PARTS: [&str; 6] = ["nn", "optim", "data", "metrics", "augment", "audio"];

/// Returns a part of the module by its name, loading it on first use.
pub(crate) fn part(lua: &Lua, name: &str) -> Option<Table> {
    let module: Table = lua.named_registry_value::<Table>("perilune.loaded").ok()?.raw_get("perilune").ok()?;
    PARTS.contains(&name).then(|| module.get::<Table>(name).ok()).flatten()
}

/// Resolves a name that the prompt's environment lacks: a global, nil if it was declared, a part of the module, else an error.
fn undefined(declared: Table) -> impl Fn(&Lua, (Table, Value)) -> mlua::Result<Value> {
    move |lua, (env, key)| {
        let globals = lua.globals();
        let found: Value = globals.raw_get(key.clone())?;
        if !found.is_nil() || declared.raw_get::<bool>(key.clone())? {
            return Ok(found);
        }
        let name = key.as_string().map(|s| s.to_string_lossy()).unwrap_or_default();
        if let Some(part) = part(lua, &name) {
            return Ok(Value::Table(part));
        }
        let mut known = PARTS.map(str::to_string).to_vec();
        for table in [&env, &globals] {
            known.extend(
                table.pairs::<Value, Value>().flatten().filter_map(|(k, _)| Some(k.as_string()?.to_string_lossy())),
            );
        }
        let hint = match name.as_str() {
            "os" | "io" | "debug" | "package" => {
                Some("code at the prompt has no access to the system either; :load and :edit read files".into())
            }
            "run" => Some("there is a run where the prompt has a recipe: perilune repl RECIPE".into()),
            "_" => Some("_ is the first result of the last line that had one".into()),
            _ if perilune_core::ops::by_name(&name).is_some_and(|o| !o.sig.is_empty()) => {
                Some(format!("write pl.{name}"))
            }
            _ => did_you_mean(&name, known.iter().map(String::as_str)).map(|n| format!("did you mean '{n}'?")),
        };
        Err(errors::argument(&host_of(lua)?, lua, "", format!("'{name}' is not defined"), hint))
    }
}
