//! Copies a Lua function and what it captures out of its state.

use super::carried::{Carried, Copied, CopiedFunction, CopiedTable, Portable};
use super::modules::Modules;
use crate::boundary::recipe_line;
use crate::errors::Cause;
use crate::options::PARAMS;
use crate::tensor::{Ref, Tensor};
use crate::{debug_library, library_env, loader};
use mlua::{AnyUserData, Function, Lua, Table, Value};
use perilune_core::byte_size;
use std::cmp::Ordering;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;

/// The most bytes that the values a function captures may take.
const MAX_BYTES: usize = 16 << 20;
/// The bytes counted for an entry of a table, besides its texts.
const ENTRY: usize = 32;
/// The deepest nesting of tables and functions.
const MAX_DEPTH: usize = 100;
/// The libraries of a worker.
pub const LIBRARIES: [&str; 5] = ["string", "table", "math", "coroutine", "utf8"];

/// Returns the shared object of a userdata, for each type that has one.
type Recognise = fn(&AnyUserData) -> Option<Arc<dyn Portable>>;

/// The types of native objects that workers share.
const PORTABLE: &[Recognise] = &[
    |object| Some(crate::tokenizer::shared(&Value::UserData(object.clone()))?),
    #[cfg(test)]
    super::tests::recognise,
];

/// The way from the function to a value, for messages.
struct Trail<'a> {
    parent: Option<&'a Trail<'a>>,
    step: Step<'a>,
}

enum Step<'a> {
    /// A captured variable of the function at this place; `None` for the function itself.
    Upvalue(&'a str, Option<&'a str>),
    Key(&'a Value),
}

impl std::fmt::Display for Trail<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (mut keys, mut at) = (Vec::new(), Some(self));
        while let Some(trail) = at {
            match &trail.step {
                Step::Key(key) => keys.push(*key),
                Step::Upvalue(name, place) => {
                    write!(f, "upvalue '{name}")?;
                    for key in keys.iter().rev() {
                        match key {
                            Value::String(s) if is_name(&s.as_bytes()) => write!(f, ".{}", s.to_string_lossy())?,
                            key => write!(f, "[{}]", crate::args::show(key))?,
                        }
                    }
                    f.write_str("'")?;
                    return place.map_or(Ok(()), |place| write!(f, " of the function at {place}"));
                }
            }
            at = trail.parent;
        }
        Ok(())
    }
}

fn is_name(bytes: &[u8]) -> bool {
    bytes.len() <= 40 && !bytes.is_empty() && bytes.iter().all(|b| b.is_ascii_alphanumeric() || *b == b'_')
}

struct Collector<'a> {
    lua: &'a Lua,
    op: &'a str,
    place: String,
    getupvalue: Function,
    upvalueid: Function,
    /// What workers have themselves: libraries and modules, by identity.
    known: HashMap<*const c_void, Copied>,
    /// The tables and functions that were copied, by identity.
    seen: HashMap<*const c_void, Copied>,
    variables: HashMap<*const c_void, usize>,
    bytes: usize,
    depth: usize,
    out: Carried,
}

/// Copies a function for the stage `op` ("map"). Returns it with its place ("sft.lua:31").
///
/// # Errors
/// It captures a value that cannot be copied; the message names the variable.
pub fn carry(lua: &Lua, op: &str, function: &Function) -> mlua::Result<(Carried, String)> {
    let debug = debug_library::get(lua)?;
    let mut collector = Collector {
        lua,
        op,
        place: place_of(function),
        getupvalue: debug.raw_get("getupvalue")?,
        upvalueid: debug.raw_get("upvalueid")?,
        known: known(lua)?,
        seen: HashMap::new(),
        variables: HashMap::new(),
        bytes: 0,
        depth: 0,
        out: Carried { modules: Modules::of(lua), ..Carried::default() },
    };
    if !is_lua(function) {
        let message = format!("{op}: its function is not written in Lua");
        let hint = format!("wrap it: :{op}(function(record) return … end)");
        return Err(recipe_line::raised(lua, message, Some(hint), Cause::Recipe));
    }
    collector.function(function, None)?;
    Ok((collector.out, collector.place))
}

/// Returns "file:line" of a function's definition.
fn place_of(function: &Function) -> String {
    let info = function.info();
    let file = info.source.unwrap_or_default();
    let file = file.trim_start_matches(['@', '=']);
    info.line_defined.map_or_else(|| file.to_string(), |line| format!("{file}:{line}"))
}

fn is_lua(function: &Function) -> bool {
    function.info().what != "C"
}

/// Lists what workers have themselves.
fn known(lua: &Lua) -> mlua::Result<HashMap<*const c_void, Copied>> {
    let mut known = HashMap::new();
    let (globals, env) = (lua.globals(), library_env::env(lua)?);
    for table in [&env, &globals] {
        known.insert(table.to_pointer(), Copied::Globals);
        for name in LIBRARIES {
            if let Value::Table(library) = table.raw_get::<Value>(name)? {
                known.insert(library.to_pointer(), Copied::Library(name.into()));
            }
        }
    }
    // A recipe's own functions may have replaced globals: the library's copies are the originals.
    for pair in env.pairs::<Value, Value>() {
        match pair? {
            (Value::String(name), Value::Function(f)) => {
                let name = name.to_string_lossy();
                known.insert(f.to_pointer(), Copied::LibraryFunction("".into(), name.as_str().into()));
            }
            (Value::String(library), Value::Table(functions)) if LIBRARIES.iter().any(|name| library == *name) => {
                let library: Arc<str> = library.to_string_lossy().as_str().into();
                for pair in functions.pairs::<String, Value>() {
                    if let (name, Value::Function(f)) = pair? {
                        known.insert(f.to_pointer(), Copied::LibraryFunction(library.clone(), name.as_str().into()));
                    }
                }
            }
            _ => {}
        }
    }
    let require = Copied::LibraryFunction("".into(), "require".into());
    for table in [&env, &globals] {
        if let Value::Function(f) = table.raw_get::<Value>("require")?
            && !is_lua(&f)
        {
            known.insert(f.to_pointer(), require.clone());
        }
    }
    for (name, value) in loader::loaded(lua)? {
        if matches!(value, Value::Table(_) | Value::Function(_)) {
            known.insert(value.to_pointer(), Copied::Module(name.as_str().into()));
        }
    }
    let own: Value = library_env::function(lua, "require")?.call("perilune")?;
    known.insert(own.to_pointer(), Copied::Module("perilune".into()));
    Ok(known)
}

impl Collector<'_> {
    fn refuse<T>(&self, trail: &Trail<'_>, what: &str) -> mlua::Result<T> {
        let message = format!("{} at {}: {trail} is {what}", self.op, self.place);
        let hint = "the function runs in workers, which get copies of nil, booleans, numbers, strings, tables of them, functions, \
                    and modules by their name: read what it needs into a local variable before it";
        Err(recipe_line::raised(self.lua, message, Some(hint.into()), Cause::Recipe))
    }

    fn count(&mut self, bytes: usize, trail: Option<&Trail<'_>>) -> mlua::Result<()> {
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes <= MAX_BYTES {
            return Ok(());
        }
        let trail = trail.map(|trail| format!(" up to {trail}")).unwrap_or_default();
        let message = format!(
            "{} at {}: the values that it captures take more than {}{trail}",
            self.op,
            self.place,
            byte_size::show(MAX_BYTES)
        );
        let hint = "every worker has its own copy: keep large data in a file of records, and join it";
        Err(recipe_line::raised(self.lua, message, Some(hint.into()), Cause::Recipe))
    }

    /// Copies a function and its captured variables. `trail` is `None` for the function itself.
    fn function(&mut self, function: &Function, trail: Option<&Trail<'_>>) -> mlua::Result<usize> {
        let code = CopiedFunction::new(function.dump(false), &function.dump(true));
        self.count(code.code.len(), trail)?;
        let at = self.out.functions.len();
        self.out.functions.push(code);
        self.seen.insert(function.to_pointer(), Copied::Function(at));
        let place = place_of(function);
        let mut upvalues = Vec::new();
        for i in 1..=i64::from(function.info().num_upvalues) {
            let (name, value): (Option<String>, Value) = self.getupvalue.call((function, i))?;
            let id = self.upvalueid.call::<Value>((function, i))?.to_pointer();
            if let Some(known) = self.variables.get(&id) {
                upvalues.push(*known);
                continue;
            }
            let variable = self.out.variables.len();
            self.out.variables.push(Copied::Nil);
            self.variables.insert(id, variable);
            upvalues.push(variable);
            let name = name.unwrap_or_default();
            let step = Step::Upvalue(&name, trail.map(|_| place.as_str()));
            self.out.variables[variable] = self.value(&value, &Trail { parent: trail, step })?;
        }
        self.out.functions[at].upvalues = upvalues;
        Ok(at)
    }

    fn value(&mut self, value: &Value, trail: &Trail<'_>) -> mlua::Result<Copied> {
        let pointer = value.to_pointer();
        Ok(match value {
            Value::Nil => Copied::Nil,
            Value::Boolean(b) => Copied::Bool(*b),
            Value::Integer(i) => Copied::Int(*i),
            Value::Number(x) => Copied::Float(*x),
            Value::String(text) => {
                let bytes = text.as_bytes();
                self.count(bytes.len(), Some(trail))?;
                Copied::Text(bytes[..].into())
            }
            Value::LightUserData(p) if p.0.is_null() => Copied::Null,
            Value::Table(_) | Value::Function(_) if self.known.contains_key(&pointer) => {
                let known = self.known[&pointer].clone();
                if let Copied::Module(name) = &known
                    && !self.out.required.contains(name)
                {
                    self.out.required.push(name.clone());
                }
                known
            }
            Value::Table(_) | Value::Function(_) if self.seen.contains_key(&pointer) => self.seen[&pointer].clone(),
            Value::Table(table) => self.deeper(trail, |this| Ok(Copied::Table(this.table(table, trail)?)))?,
            Value::Function(f) if is_lua(f) => {
                self.deeper(trail, |this| Ok(Copied::Function(this.function(f, Some(trail))?)))?
            }
            Value::Function(f) => {
                let what = match self.name_in_module(f) {
                    Some(name) => format!("pl.{name}, which workers do not have"),
                    None => "a function of the runtime".to_string(),
                };
                return self.refuse(trail, &what);
            }
            Value::UserData(object) => {
                if let Some(object) = PORTABLE.iter().find_map(|recognise| recognise(object)) {
                    return Ok(Copied::Object(object));
                }
                let what = match object.borrow::<Tensor>().map(|t| matches!(t.what, Ref::State(_))) {
                    Ok(true) => "a State; use it after :batch",
                    Ok(false) => "a tensor; use it after :batch",
                    Err(_) => "an object of the runtime",
                };
                return self.refuse(trail, what);
            }
            Value::Thread(_) => return self.refuse(trail, "a coroutine"),
            other => return self.refuse(trail, &format!("a value of the type {}", other.type_name())),
        })
    }

    fn deeper<T>(&mut self, trail: &Trail<'_>, f: impl FnOnce(&mut Self) -> mlua::Result<T>) -> mlua::Result<T> {
        if self.depth >= MAX_DEPTH {
            return self.refuse(trail, &format!("nested deeper than {MAX_DEPTH} tables and functions"));
        }
        self.depth += 1;
        let out = f(self);
        self.depth -= 1;
        out
    }

    fn table(&mut self, table: &Table, trail: &Trail<'_>) -> mlua::Result<usize> {
        let (mut is_strict, mut only) = (false, None);
        if let Some(meta) = table.metatable() {
            let name: Option<String> = meta.raw_get::<Value>("__name")?.as_string().map(|s| s.to_string_lossy());
            // Workers see the params of a recipe, not its functions.
            only = (name.as_deref() == Some("perilune.recipe")).then_some(["name", "params"]);
            is_strict = only.is_some() || meta.raw_get::<Value>(PARAMS)?.as_boolean() == Some(true);
            if !is_strict {
                let what = name.map_or("a table with a metatable".into(), |name| format!("an object ({name})"));
                return self.refuse(trail, &what);
            }
        }
        let at = self.out.tables.len();
        self.out.tables.push(CopiedTable { entries: Vec::new(), is_strict });
        self.seen.insert(table.to_pointer(), Copied::Table(at));
        let mut entries = Vec::new();
        for pair in table.pairs::<Value, Value>() {
            let (key, value) = pair?;
            match &key {
                Value::String(name) if only.is_none_or(|only| only.iter().any(|field| name == *field)) => {}
                _ if only.is_some() => continue,
                Value::Boolean(_) | Value::Integer(_) | Value::Number(_) => {}
                _ => return self.refuse(trail, &format!("a table with {} as a key", crate::args::show(&key))),
            }
            self.count(ENTRY, Some(trail))?;
            entries.push((key, value));
        }
        entries.sort_by(|a, b| order(&a.0, &b.0));
        let mut copied = Vec::with_capacity(entries.len());
        for (key, value) in &entries {
            let trail = Trail { parent: Some(trail), step: Step::Key(key) };
            copied.push((self.value(key, &trail)?, self.value(value, &trail)?));
        }
        self.out.tables[at].entries = copied;
        Ok(at)
    }

    /// The name of a native function in the `perilune` module.
    fn name_in_module(&self, f: &Function) -> Option<String> {
        let loaded = loader::loaded(self.lua).ok()?;
        let pl = loaded.into_iter().find(|(name, _)| name == "perilune")?.1;
        let found = pl.as_table()?.pairs::<String, Value>().flatten().find(|(_, v)| v.as_function() == Some(f));
        found.map(|(name, _)| name)
    }
}

/// Orders keys: booleans, numbers, strings.
fn order(a: &Value, b: &Value) -> Ordering {
    let rank = |v: &Value| match v {
        Value::Boolean(_) => 0,
        Value::Integer(_) | Value::Number(_) => 1,
        _ => 2,
    };
    // An integer beyond 2^53 rounds as a float, so equal floats are ordered as integers.
    let float = |v: &Value| match v {
        Value::Integer(i) => *i as f64,
        Value::Number(x) => *x,
        _ => 0.0,
    };
    rank(a).cmp(&rank(b)).then_with(|| match (a, b) {
        (Value::Boolean(a), Value::Boolean(b)) => a.cmp(b),
        (Value::String(a), Value::String(b)) => a.as_bytes().cmp(&b.as_bytes()),
        (a, b) => float(a).total_cmp(&float(b)).then_with(|| a.as_integer().cmp(&b.as_integer())),
    })
}
