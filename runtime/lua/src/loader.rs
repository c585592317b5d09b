//! Loads code into a Lua state: an explicit list of libraries, text chunks only, `require` of the standard library and of
//! files in the recipe's folder.

use crate::args::show;
use crate::boundary::{self, Guarded, memory_limit};
use crate::functions::{self, host};
use crate::host::INTERNAL;
use crate::module_files::{self, Found, MAX_TEXT};
use crate::runtime::{Failed, Place};
use crate::{errors, letter_case, library_env, no_tail_calls, source_text};
use mlua::{Lua, LuaOptions, MultiValue, StdLib, Table, Value};
use perilune_core::error::did_you_mean;
use perilune_policy::open_named;
use std::path::{Path, PathBuf};

include!(concat!(env!("OUT_DIR"), "/stdlib.rs"));

/// The parts of the standard library that are fields of the module.
pub const FIELDS: [&str; 14] = [
    "nn",
    "optim",
    "data",
    "metrics",
    "augment",
    "audio",
    "train",
    "run",
    "init",
    "tree",
    "gradcheck",
    "kernel",
    "kernel_check",
    "summary",
];

/// Public module names whose file has another name.
const ALIASES: [(&str, &str); 2] =
    [("perilune.init", "perilune.initializers"), ("perilune.kernel_check", "perilune.kernel.check")];

/// Returns BLAKE3 of the embedded standard library: two programs with one hash have the same one.
pub fn stdlib_hash() -> String {
    let mut hasher = blake3::Hasher::new();
    for (_, path, text) in stdlib_files() {
        for part in [path, text] {
            // Lengths first, so that no two libraries give the same bytes.
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
        }
    }
    hasher.finalize().to_hex().to_string()
}

/// (module, path under stdlib/, text) of the embedded standard library.
pub fn stdlib_files() -> &'static [(&'static str, &'static str, &'static str)] {
    STDLIB
}

/// Creates a Lua state with the libraries for recipes, without access to the system.
pub fn new_lua() -> mlua::Result<Lua> {
    let lua = bounded_lua()?;
    memory_limit::set(&lua, memory_limit::default_limit())?;
    Ok(lua)
}

/// Creates such a state without a memory limit, which the caller sets.
pub fn bounded_lua() -> mlua::Result<Lua> {
    let libs = StdLib::TABLE | StdLib::STRING | StdLib::MATH | StdLib::COROUTINE | StdLib::UTF8;
    let state = Lua::new_with(libs, LuaOptions::default())?;
    let lua = Guarded(&state);
    let globals = lua.globals();
    for name in ["dofile", "loadfile", "collectgarbage", "warn"] {
        globals.raw_set(name, Value::Nil)?;
    }
    let string: Table = globals.get("string")?;
    string.raw_set("dump", Value::Nil)?;
    globals.raw_set("load", lua.create_function(load)?)?;
    let setmetatable: mlua::Function = globals.get("setmetatable")?;
    globals.raw_set(
        "setmetatable",
        lua.create_function(move |lua, (t, meta): (Value, Value)| {
            // A finaliser would also run outside of all limits.
            if let Value::Table(m) = &meta
                && !m.raw_get::<Value>("__gc")?.is_nil()
            {
                let message = "setmetatable: __gc is not allowed in recipes: a finaliser runs at moments nobody chose";
                let hint = Some("release things where you are done with them".into());
                return Err(boundary::recipe_line::raised(lua, message.into(), hint, errors::Cause::Recipe));
            }
            setmetatable.call::<Value>((t, meta))
        })?,
    )?;
    boundary::install(&lua)?;
    letter_case::install(&state)?;
    library_env::protect_strings(&state)?;
    Ok(state)
}

/// The chunk name of text that a recipe loads: it names no file and never the library, whatever the recipe calls it.
fn loaded_name(given: Option<&str>) -> String {
    const MOST: usize = 40;
    let given = given.unwrap_or_default().trim_start_matches(['@', '=']);
    let plain: String = given.chars().take(MOST).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if plain.is_empty() { "=load".into() } else { format!("=load {plain}") }
}

/// `load`, for text only.
fn load(
    lua: &Lua,
    (chunk, name, _mode, env): (Value, Option<String>, Value, Option<Table>),
) -> mlua::Result<MultiValue> {
    let text = match chunk {
        Value::String(s) => s.to_str()?.to_string(),
        Value::Function(f) => {
            let mut text = String::new();
            while let Some(piece) = f.call::<Option<String>>(())?.filter(|p| !p.is_empty()) {
                boundary::check_chunk(lua, text.len() + piece.len())?;
                text.push_str(&piece);
            }
            text
        }
        _ => return Err(mlua::Error::runtime("load: needs a string or a function")),
    };
    boundary::check_chunk(lua, text.len())?;
    let mut out = MultiValue::new();
    match no_tail_calls::compile(lua, &text, &loaded_name(name.as_deref()), env.as_ref()) {
        Ok(f) => out.push_back(Value::Function(f)),
        Err(e) => {
            out.push_back(Value::Nil);
            out.push_back(Value::String(lua.create_string(e.to_string())?));
        }
    }
    Ok(out)
}

/// Makes `perilune` requirable and guards the globals.
pub fn install(lua: &Lua, strict: bool) -> mlua::Result<Table> {
    let lua = &Guarded(lua);
    let pl = lua.create_table()?;
    functions::install(lua, &pl)?;
    crate::data_bindings::install(lua, &pl)?;
    let own = library_env::copy(lua, &pl)?;
    load_fields(lua, &pl)?;
    load_fields(lua, &own)?;
    let loaded = lua.create_table()?;
    loaded.set("perilune", pl.clone())?;
    lua.set_named_registry_value("perilune.loaded", loaded)?;
    let globals = lua.globals();
    globals.set("require", lua.create_function(|lua, name: String| require(lua, name))?)?;
    library_env::install(lua, &own)?;
    if strict {
        guard(lua, &globals)?;
    }
    guard(lua, &library_env::env(lua)?)?;
    lua.set_named_registry_value(PRISTINE, lua.create_table()?)?;
    for name in ["string", "table", "math", "coroutine", "utf8"] {
        keep(lua, &globals.raw_get(name)?)?;
    }
    keep(lua, &globals)?;
    keep(lua, &pl)?;
    Ok(pl)
}

/// Loads the parts of the standard library when they are first read as fields of the module (`pl.nn`).
fn load_fields(lua: &Guarded<'_>, pl: &Table) -> mlua::Result<()> {
    let meta = lua.create_table()?;
    meta.set(
        "__index",
        lua.create_function(|lua, (pl, key): (Table, Value)| {
            let name = key.as_string().map(|s| s.to_string_lossy()).unwrap_or_default();
            if FIELDS.contains(&name.as_str()) {
                let module = require(lua, format!("perilune.{name}"))?;
                if let Value::Table(t) = &module {
                    guard_module(lua, &name, t)?;
                }
                pl.raw_set(name, module.clone())?;
                return Ok(module);
            }
            let mut known: Vec<String> = FIELDS.iter().map(|f| f.to_string()).collect();
            for pair in pl.pairs::<String, Value>() {
                known.push(pair?.0);
            }
            let near = did_you_mean(&name, known.iter().map(String::as_str)).map(|n| format!("did you mean pl.{n}?"));
            Err::<Value, _>(errors::argument(&host(lua)?, lua, "", format!("perilune has no '{name}'"), near))
        })?,
    )?;
    pl.set_metatable(Some(meta))
}

/// The library's tables as keys, copies of their contents before any recipe as values.
const PRISTINE: &str = "perilune.pristine";

fn keep(lua: &Lua, t: &Table) -> mlua::Result<()> {
    let all: Table = lua.named_registry_value(PRISTINE)?;
    all.raw_set(t, library_env::copy(lua, t)?)
}

/// Copies the current contents of the library's tables, which a recipe may have modified.
pub fn library(lua: &Lua) -> mlua::Result<Vec<(Table, Table)>> {
    let all: Table = lua.named_registry_value(PRISTINE)?;
    all.pairs::<Table, Value>()
        .map(|pair| pair.and_then(|(t, _)| Ok((t.clone(), library_env::copy(lua, &t)?))))
        .collect()
}

/// Restores the contents of the library's tables. Only globals that existed before are restored: at the prompt
/// the others belong to the user.
pub fn restore(lua: &Lua, tables: Vec<(Table, Table)>) -> mlua::Result<()> {
    let globals = lua.globals();
    for (t, was) in tables {
        let added = |key: &Value| was.raw_get::<Value>(key).is_ok_and(|v| v.is_nil());
        let keys = t.pairs::<Value, Value>().flatten().map(|(k, _)| k).filter(added).collect::<Vec<_>>();
        for key in keys.into_iter().filter(|_| t != globals) {
            t.raw_set(key, Value::Nil)?;
        }
        for pair in was.pairs::<Value, Value>() {
            let (k, v) = pair?;
            t.raw_set(k, v)?;
        }
    }
    Ok(())
}

/// The library as it was before any recipe.
pub fn renew(lua: &Lua) -> mlua::Result<()> {
    let all: Table = lua.named_registry_value(PRISTINE)?;
    restore(lua, all.pairs::<Table, Table>().collect::<mlua::Result<_>>()?)
}

/// Makes misspelt fields of `pl.nn` and similar tables an error; nil would cause an error elsewhere.
fn guard_module(lua: &Lua, module: &str, t: &Table) -> mlua::Result<()> {
    if t.metatable().is_some() {
        return Ok(());
    }
    let lua = &Guarded(lua);
    let (meta, module) = (lua.create_table()?, module.to_string());
    meta.set(
        "__index",
        lua.create_function(move |lua, (t, key): (Table, Value)| {
            let name = key.as_string().map(|s| s.to_string_lossy()).unwrap_or_else(|| show(&key));
            let mut known = Vec::new();
            for pair in t.pairs::<String, Value>() {
                known.push(pair?.0);
            }
            known.sort();
            let hint = match (did_you_mean(&name, known.iter().map(String::as_str)), torch_name(&name)) {
                (_, Some(op)) => format!("losses are functions: pl.{op}(…)"),
                (Some(near), _) => format!("did you mean pl.{module}.{near}?"),
                _ => format!("it has {}", known.join(", ")),
            };
            Err::<Value, _>(errors::argument(&host(lua)?, lua, "", format!("pl.{module} has no '{name}'"), Some(hint)))
        })?,
    )?;
    t.set_metatable(Some(meta))
}

/// Returns the op for a loss module of PyTorch: `CrossEntropyLoss` is `cross_entropy`.
fn torch_name(name: &str) -> Option<&'static str> {
    let stem = name.strip_suffix("Loss")?;
    let known = [
        ("CrossEntropy", "cross_entropy"),
        ("NLL", "nll_loss"),
        ("MSE", "mse_loss"),
        ("L1", "l1_loss"),
        ("SmoothL1", "smooth_l1_loss"),
        ("Huber", "huber_loss"),
        ("BCEWithLogits", "bce_with_logits"),
        ("KLDiv", "kl_div"),
    ];
    known.iter().find(|(torch, _)| *torch == stem).map(|(_, op)| *op)
}

/// Makes reading or writing an undefined global an error, since it is nearly always a mistake.
fn guard(lua: &Lua, globals: &Table) -> mlua::Result<()> {
    let lua = &Guarded(lua);
    let meta = lua.create_table()?;
    meta.set(
        "__index",
        lua.create_function(|lua, (globals, key): (Table, Value)| {
            let name = key.as_string().map(|s| s.to_string_lossy()).unwrap_or_default();
            let mut known = Vec::new();
            for pair in globals.pairs::<String, Value>() {
                known.push(pair?.0);
            }
            let hint = match name.as_str() {
                "os" | "io" | "debug" | "package" => {
                    Some("recipes have no access to the system; see docs/guide/data-files.md".into())
                }
                "torch" | "pl" => Some("write: local pl = require \"perilune\"".into()),
                _ => did_you_mean(&name, known.iter().map(String::as_str)).map(|n| format!("did you mean '{n}'?")),
            };
            Err::<Value, _>(errors::argument(&host(lua)?, lua, "", format!("global '{name}' is not defined"), hint))
        })?,
    )?;
    meta.set(
        "__newindex",
        lua.create_function(|lua, (_, key, _): (Table, Value, Value)| {
            let name = key.as_string().map(|s| s.to_string_lossy()).unwrap_or_default();
            let hint = Some(format!("write: local {name} = …"));
            Err::<(), _>(errors::argument(
                &host(lua)?,
                lua,
                "",
                format!("assignment to the undeclared global '{name}'"),
                hint,
            ))
        })?,
    )?;
    globals.set_metatable(Some(meta))
}

/// Returns the loaded modules.
pub fn loaded(lua: &Lua) -> mlua::Result<Vec<(String, Value)>> {
    let loaded: Table = lua.named_registry_value("perilune.loaded")?;
    loaded.pairs::<String, Value>().collect()
}

/// Whether a name is that of a module of the runtime.
pub fn is_library(name: &str) -> bool {
    name == "perilune" || STDLIB.iter().any(|(m, ..)| *m == name) || ALIASES.iter().any(|(public, _)| *public == name)
}

/// Returns the loaded modules that are files of the recipe.
pub fn own(lua: &Lua) -> mlua::Result<Vec<(String, Value)>> {
    Ok(loaded(lua)?.into_iter().filter(|(name, _)| !is_library(name)).collect())
}

/// Unloads the modules that are files of the recipe.
pub fn forget_own(lua: &Lua) -> mlua::Result<()> {
    let loaded: Table = lua.named_registry_value("perilune.loaded")?;
    own(lua)?.into_iter().try_for_each(|(name, _)| loaded.raw_set(name, Value::Nil))
}

/// Restores modules that `own` listed.
pub fn recall(lua: &Lua, own: Vec<(String, Value)>) -> mlua::Result<()> {
    let loaded: Table = lua.named_registry_value("perilune.loaded")?;
    own.into_iter().try_for_each(|(name, value)| loaded.raw_set(name, value))
}

/// `require`: searches the standard library, then the recipe's folder. Each module runs once.
fn require(lua: &Lua, name: String) -> mlua::Result<Value> {
    require_from(lua, name, false)
}

/// `require` of the library's own chunks, which may load private modules.
pub fn require_own(lua: &Lua, name: String) -> mlua::Result<Value> {
    find_module(lua, name, false, true)
}

/// Like `require`; with `here` also in the current directory.
pub fn require_from(lua: &Lua, name: String, here: bool) -> mlua::Result<Value> {
    find_module(lua, name, here, false)
}

fn find_module(lua: &Lua, name: String, here: bool, by_library: bool) -> mlua::Result<Value> {
    let name = ALIASES.iter().find(|(public, _)| *public == name).map_or(name, |(_, file)| file.to_string());
    let loaded: Table = lua.named_registry_value("perilune.loaded")?;
    let hidden = PRIVATE.contains(&name.as_str()) && !by_library;
    let found: Value = if hidden { Value::Nil } else { loaded.raw_get(name.as_str())? };
    if !found.is_nil() {
        return Ok(found);
    }
    let host = host(lua)?;
    let value = if let Some((_, path, text)) = STDLIB.iter().find(|(m, ..)| *m == name && !hidden) {
        let native: Table = lua.named_registry_value(NATIVE)?;
        let env = library_env::env(lua)?;
        let chunk = no_tail_calls::compile(lua, text, &format!("{INTERNAL}{path}"), Some(&env))?;
        let module = chunk.call::<Value>((name.as_str(), native))?;
        if let Value::Table(t) = &module {
            keep(lua, t)?;
        }
        module
    } else {
        let parts: Vec<&str> = name.split('.').collect();
        let sane = |p: &&str| !p.is_empty() && p.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
        if !parts.iter().all(sane) {
            let message = format!("\"{name}\" is not a module name: letters, digits, _ and - between dots");
            let hint = "a file beside the recipe is required without .lua, one in a folder there with dots: require \"parts.block\"";
            return Err(errors::argument(&host, lua, "require", message, Some(hint.into())));
        }
        let place = lua.app_data_ref::<Place>().map(|p| p.clone()).unwrap_or_default();
        let tail: PathBuf = parts.iter().collect();
        let (file, folder) = (tail.with_extension("lua"), tail.join("init.lua"));
        let mut tries = vec![place.at(&file), place.at(&folder)];
        if here {
            tries.extend([file, folder]);
        }
        let search = || module_files::find(&host, &place, &tries);
        let share = host.share.borrow().clone();
        let found = match share {
            None => search(),
            Some(share) => {
                let shared = share(&format!("module {name}"), &|| module_files::encode(&search()));
                let shared = shared.map_err(|e| errors::fault(&host, lua, e))?;
                module_files::decode(&shared)
            }
        };
        let found = match found {
            Found::Module(file, text) => Some((file, text)),
            Found::Nothing => None,
            Found::Wrong(message, hint) => return Err(errors::argument(&host, lua, "require", message, hint)),
        };
        let Some((file, text)) = found else {
            if let Some(mut place) = lua.app_data_mut::<Place>() {
                place.missing.extend(tries.iter().cloned());
            }
            let known: Vec<&str> = public_modules().chain(["perilune"]).collect();
            let near = did_you_mean(&name, known).map(|n| format!("did you mean \"{n}\"?"));
            let message = match name.strip_prefix("perilune.") {
                Some(part) => format!("the standard library has no module \"perilune.{part}\""),
                None => format!(
                    "there is no module \"{name}\": neither in the standard library nor at {}",
                    tries[0].display()
                ),
            };
            return Err(errors::argument(&host, lua, "require", message, near));
        };
        let file = &file;
        let text = text.strip_prefix('\u{feff}').map(str::to_string).unwrap_or(text);
        if let Some(mut place) = lua.app_data_mut::<Place>()
            && !place.required.iter().any(|f| f.0 == *file)
        {
            place.required.push((file.clone(), text.clone()));
        }
        source_text::keep(&chunk_name(file), &text);
        no_tail_calls::compile(lua, &text, &chunk_name(file), None)?.call::<Value>(name.as_str())?
    };
    let value = if value.is_nil() { Value::Boolean(true) } else { value };
    loaded.raw_set(name, value.clone())?;
    Ok(value)
}

/// Modules that only the library may require.
const PRIVATE: [&str; 1] = ["perilune.data.native"];

/// Modules of the standard library that a recipe may require.
pub fn public_modules() -> impl Iterator<Item = &'static str> {
    STDLIB.iter().map(|(m, ..)| *m).filter(|m| !PRIVATE.contains(m))
}

/// The registry's name of what the library calls and recipes do not see; its chunks get it as their second argument.
pub const NATIVE: &str = "perilune.native";

/// Reads a file that the command line or a line of the prompt names, under no policy.
pub fn text_of(path: &Path) -> Result<String, Failed> {
    let no = |e: String| Failed::Usage(format!("cannot read {}: {e}", path.display()));
    let file = open_named(path).map_err(|e| match e {
        perilune_policy::Error::Io { source, .. } => no(source.to_string()),
        e => no(format!("it {}", e.rule())),
    })?;
    file.text(MAX_TEXT).map_err(|e| no(e.to_string()))
}

/// Returns the chunk name `@file`, with the path as given.
pub fn chunk_name(file: &Path) -> String {
    own_name(&format!("@{}", file.display()))
}

/// The name of a chunk that is not the library's: a folder that is called like the library's chunks gets `./` before it.
pub fn own_name(chunk: &str) -> String {
    match chunk.starts_with(INTERNAL) {
        true => format!("@./{}", &chunk[1..]),
        false => chunk.to_string(),
    }
}
