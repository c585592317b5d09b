//! Checks the options and params of recipes at their source line, with suggestions.

use crate::args::show;
use crate::errors;
use crate::functions::host;
use crate::host::{Host, INTERNAL};
use crate::runtime::Params;
use mlua::{Function, Lua, Table, Value};
use perilune_core::error::did_you_mean;
use perilune_core::source_loc::SourceLoc;
use std::collections::BTreeMap;

/// The kind of a Lua value, for the rule "an option has the type of its default".
fn kind(v: &Value) -> &'static str {
    match v {
        Value::Integer(_) | Value::Number(_) => "number",
        other => other.type_name(),
    }
}

/// Returns a new table of `defaults` overridden by `given`; unknown keys and other types are errors.
pub fn fill(lua: &Lua, op: &str, given: Value, defaults: &Table) -> mlua::Result<Table> {
    let host = host(lua)?;
    let out = lua.create_table()?;
    let mut names = Vec::new();
    for pair in defaults.pairs::<String, Value>() {
        let (k, v) = pair?;
        out.raw_set(k.as_str(), v)?;
        names.push(k);
    }
    names.sort();
    let given = match given {
        Value::Nil => return Ok(out),
        Value::Table(t) => t,
        other => {
            let message = format!("its options are {}; they must be a table", show(&other));
            return Err(errors::argument(
                &host,
                lua,
                op,
                message,
                Some(format!("{op}(…, {{ {} = … }})", names.first().map_or("name", |n| n))),
            ));
        }
    };
    for pair in given.pairs::<Value, Value>() {
        let (key, value) = pair?;
        let name = match &key {
            Value::String(s) => s.to_string_lossy(),
            other => show(other),
        };
        if !names.contains(&name) {
            let near = did_you_mean(&name, names.iter().map(String::as_str)).or_else(|| alias(&name, &names));
            let near = near.map(|n| format!(" Did you mean '{n}'?")).unwrap_or_default();
            let known = if names.is_empty() { "it has none".into() } else { format!("options: {}", names.join(", ")) };
            return Err(errors::argument(&host, lua, op, format!("unknown option '{name}' ({known}).{near}"), None));
        }
        let default: Value = defaults.raw_get(name.as_str())?;
        if kind(&default) != kind(&value) {
            let message = format!("option '{name}' is {}; it must be a {}", show(&value), kind(&default));
            return Err(errors::argument(&host, lua, op, message, None));
        }
        out.raw_set(name, value)?;
    }
    Ok(out)
}

/// `pl.options(op, given, defaults)`.
pub fn options(lua: &Lua, (op, given, defaults): (String, Value, Table)) -> mlua::Result<Table> {
    fill(lua, &op, given, &defaults)
}

/// Returns the recipe line on which a function begins; `None` for the runtime's own functions.
pub fn written_at(host: &Host, f: &Function) -> SourceLoc {
    let info = f.info();
    match info.source.zip(info.line_defined) {
        Some((source, line)) if source.starts_with('@') && !source.starts_with(INTERNAL) => {
            let source_map = &mut host.engine.borrow_mut().recorder.source_map;
            let file = source_map.file(&source[1..]);
            source_map.intern(file, line as u32)
        }
        _ => SourceLoc::NONE,
    }
}

/// `pl.error(op, message, hint, fn)`: raises at the recipe line, or at the definition of `fn` if it is at fault.
pub fn error(
    lua: &Lua,
    (op, message, hint, at): (String, String, Option<String>, Option<Function>),
) -> mlua::Result<()> {
    let host = host(lua)?;
    let loc = at.map_or(SourceLoc::NONE, |f| written_at(&host, &f));
    if loc != SourceLoc::NONE {
        let mut error = perilune_core::Error::argument(&op, message);
        error.hint = hint;
        return Err(errors::raise(&host, errors::Raise::Fault(error.into(), loc)));
    }
    Err(errors::argument(&host, lua, &op, message, hint))
}

/// Params that must be at least 1, by the names that the library uses too. A wrong value would
/// fail far from its definition. (The training loop checks its own: `accumulate`, `steps`.)
const COUNTS: [&str; 2] = ["batch", "context"];

/// Params of the training loop that `--set` gives to any recipe, with a value of their type.
const OF_ANY_RECIPE: [(&str, Value); 4] = [
    ("accumulate", Value::Integer(1)),
    ("epochs", Value::Number(1.0)),
    ("eval_every", Value::Integer(1)),
    ("steps", Value::Integer(1)),
];

/// Returns a value of the type that a param has: its default, or that of the training loop's own params in a recipe.
fn typed(defaults: &Table, key: &str, in_recipe: bool) -> mlua::Result<Option<Value>> {
    let default: Value = defaults.raw_get(key)?;
    if !default.is_nil() {
        return Ok(Some(default));
    }
    Ok(OF_ANY_RECIPE.into_iter().find(|(name, _)| *name == key && in_recipe).map(|(_, value)| value))
}

/// Applies `--set` values to the defaults of `params`; each value takes the type of its default.
fn apply(lua: &Lua, defaults: &Table, name: &str, in_recipe: bool) -> mlua::Result<Table> {
    let host = host(lua)?;
    let out = lua.create_table()?;
    let mut names = Vec::new();
    for pair in defaults.pairs::<Value, Value>() {
        let (k, v) = pair?;
        let Value::String(k) = &k else {
            let message = format!("params has the key {}; params are named: {{ lr = 1e-3, steps = 100 }}", show(&k));
            return Err(errors::argument(&host, lua, "recipe", message, None));
        };
        names.push(k.to_string_lossy());
        out.raw_set(k.to_string_lossy(), v)?;
    }
    names.sort();
    let Some(params) = lua.app_data_ref::<Params>().map(|p| p.clone()) else { return Ok(out) };
    for (key, text) in &params.given {
        let Some(default) = typed(defaults, key, in_recipe)? else {
            let near = did_you_mean(key, names.iter().map(String::as_str)).or_else(|| alias(key, &names));
            let near = near.map(|n| format!(". Did you mean '{n}'?")).unwrap_or_default();
            let known = if names.is_empty() { "it has none".into() } else { format!("params: {}", names.join(", ")) };
            let message = format!("unknown param '{key}' for recipe {name} ({known}){near}");
            return Err(mlua::Error::external(BadParam(message)));
        };
        out.raw_set(key.as_str(), parse(lua, key, text, &default)?)?;
    }
    for (key, text) in &params.offered {
        if let Some(default) = typed(defaults, key, in_recipe)? {
            out.raw_set(key.as_str(), parse(lua, key, text, &default)?)?;
        }
    }
    for key in COUNTS {
        let v: Value = out.raw_get(key)?;
        let below = match &v {
            Value::Integer(n) => *n < 1,
            Value::Number(x) => *x < 1.0,
            _ => false,
        };
        if below {
            let message = format!("param {key} = {} must be at least 1", show(&v));
            return Err(errors::argument(&host, lua, "recipe", message, None));
        }
    }
    let mut texts = BTreeMap::new();
    for key in &names {
        let text = match defaults.raw_get::<Value>(key.as_str())? {
            Value::String(s) => format!("\"{}\"", s.to_string_lossy()), // whole: an edit may change its end
            other => show(&other),
        };
        texts.insert(key.clone(), text);
    }
    // A resumed run keeps its params, except those whose default was edited since.
    let said = |key: &String| params.given.iter().chain(&params.offered).any(|(name, _)| name == key);
    let same = |key: &String| match texts.get(key) {
        Some(text) => params.baseline.get(key).is_none_or(|was| text == was),
        None => in_recipe && OF_ANY_RECIPE.iter().any(|(name, _)| name == key),
    };
    let kept: Vec<_> = params.kept.iter().filter(|(key, _)| !said(key) && same(key)).cloned().collect();
    for (key, text) in &kept {
        if let Some(default) = typed(defaults, key, in_recipe)? {
            out.raw_set(key.as_str(), parse(lua, key, text, &default)?)?;
        }
    }
    // Epochs that were asked for replace the recipe's own number of steps.
    let asked = |name: &str| params.given.iter().chain(&params.offered).chain(&kept).any(|(key, _)| key == name);
    if asked("epochs") {
        if params.given.iter().filter(|(key, _)| key == "epochs" || key == "steps").count() == 2 {
            let message = "--set steps=… and --set epochs=… both set the length of the run; give one of them";
            return Err(mlua::Error::external(BadParam(message.into())));
        }
        if !asked("steps") {
            out.raw_set("steps", Value::Nil)?;
        }
    }
    if let Some(mut seen) = lua.app_data_mut::<Params>() {
        seen.used = true;
        seen.names = names.clone();
        (seen.kept, seen.defaults) = (kept, texts);
    }
    let meta = lua.create_table()?;
    let unknown = crate::boundary::Guarded(lua)
        .create_function(move |lua, (_, key): (Value, Value)| unknown_param(lua, &key, &names))?;
    meta.set("__index", unknown)?;
    meta.set(PARAMS, true)?;
    out.set_metatable(Some(meta))?;
    Ok(out)
}

/// The mark of params in their metatable.
pub const PARAMS: &str = "perilune.params";

/// Resolves a missing param: nil if the runtime reads an optional one, else an error.
fn unknown_param(lua: &Lua, key: &Value, names: &[String]) -> mlua::Result<Value> {
    let name = key.as_string().map(|s| s.to_string_lossy()).unwrap_or_else(|| show(key));
    let of_the_loop = [
        "steps",
        "epochs",
        "seed",
        "accumulate",
        "eval_every",
        "memory_budget",
        "mesh",
        "strict_shards",
        "pipeline",
        "on_nan",
        "on_spike",
    ];
    if of_the_loop.contains(&name.as_str()) {
        return Ok(Value::Nil);
    }
    let hint = match did_you_mean(&name, names.iter().map(String::as_str)) {
        Some(near) => format!("did you mean '{near}'?"),
        None => format!("declare it in params: {{ {name} = … }}; there are {}", names.join(", ")),
    };
    Err(errors::argument(&host(lua)?, lua, "", format!("the recipe has no param '{name}'"), Some(hint)))
}

/// Long names of params that are usually abbreviated.
fn alias<'a>(key: &str, names: &'a [String]) -> Option<&'a str> {
    let lower = key.to_lowercase();
    let table = [
        ("learn", "lr"),
        ("lera", "lr"),
        ("rate", "lr"),
        ("iter", "steps"),
        ("epoch", "steps"),
        ("batch", "batch"),
        ("layer", "layers"),
        ("head", "heads"),
        ("hidden", "width"),
        ("dim", "width"),
    ];
    table
        .iter()
        .find(|(part, name)| lower.contains(part) && names.iter().any(|n| n == name))
        .and_then(|(_, name)| names.iter().find(|n| n == name).map(String::as_str))
}

/// Makes the error for a wrong `--set`, attributed to the command line, not the recipe.
#[derive(Clone, Debug)]
pub struct BadParam(pub String);

impl std::fmt::Display for BadParam {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadParam {}

fn parse(lua: &Lua, key: &str, text: &str, default: &Value) -> mlua::Result<Value> {
    let bad = |want: &str| {
        Err(mlua::Error::external(BadParam(format!(
            "param '{key}' is '{text}'; it must be {want} (default {})",
            show(default)
        ))))
    };
    Ok(match default {
        Value::Integer(_) | Value::Number(_) if key == "memory_budget" => {
            match perilune_core::byte_size::amount(text) {
                Ok(n) => Value::Integer(n as i64),
                Err(_) => return bad("an amount of memory, as in 20GiB or 512M"),
            }
        }
        Value::Integer(_) => match (text.parse::<i64>(), text.parse::<f64>()) {
            (Ok(i), _) => Value::Integer(i),
            (_, Ok(f)) if f.fract() == 0.0 && f.abs() < 9e15 => Value::Integer(f as i64),
            (_, Ok(f)) if f.is_finite() => Value::Number(f), // `dropout = 0` also accepts fractions
            _ => return bad("a number"),
        },
        Value::Number(_) => match text.parse::<f64>() {
            Ok(f) => Value::Number(f),
            Err(_) => return bad("a number"),
        },
        Value::Boolean(_) => match text {
            "true" | "yes" | "1" | "on" => Value::Boolean(true),
            "false" | "no" | "0" | "off" => Value::Boolean(false),
            _ => return bad("true or false"),
        },
        Value::String(_) => Value::String(lua.create_string(text)?),
        other => return bad(&format!("set in the recipe: its default is {}", show(other))),
    })
}

/// `pl.recipe { name =, params =, … }`: marks the table and applies `--set`.
pub fn recipe(lua: &Lua, given: Value) -> mlua::Result<Table> {
    let host = host(lua)?;
    let Value::Table(t) = given else {
        let message = format!("its argument is {}; it must be a table", show(&given));
        return Err(errors::argument(
            &host,
            lua,
            "recipe",
            message,
            Some("pl.recipe { name = \"…\", params = { … } }".into()),
        ));
    };
    let name: Value = t.get("name")?;
    let Value::String(name) = name else {
        let message = format!("its name is {}; it must be a string", show(&name));
        return Err(errors::argument(
            &host,
            lua,
            "recipe",
            message,
            Some("pl.recipe { name = \"digits\", params = { … } }".into()),
        ));
    };
    let params: Value = t.get("params")?;
    let params = match params {
        Value::Table(p) => p,
        Value::Nil => lua.create_table()?,
        other => {
            let message = format!("params is {}; it must be a table", show(&other));
            return Err(errors::argument(
                &host,
                lua,
                "recipe",
                message,
                Some("params = { lr = 1e-3, steps = 100 }".into()),
            ));
        }
    };
    t.set("params", apply(lua, &params, &name.to_string_lossy(), true)?)?;
    let loc = host.loc(lua);
    if let Some(mut seen) = lua.app_data_mut::<Params>() {
        seen.recipe = Some(loc);
    }
    let meta = lua.create_table()?;
    meta.set("__name", "perilune.recipe")?;
    t.set_metatable(Some(meta))?;
    Ok(t)
}

/// `pl.params { samples = 1e6 }`: the params of a plain script, with `--set` applied.
pub fn params(lua: &Lua, defaults: Table) -> mlua::Result<Table> {
    apply(lua, &defaults, "script", false)
}
