//! Builds a function and what it captures in the Lua state of a worker.

use super::carried::{Carried, Copied};
use crate::boundary::{Guarded, recipe_line};
use crate::debug_library;
use crate::errors::Cause;
use mlua::chunk::ChunkMode;
use mlua::{Function, Lua, Table, Value};

/// Returns the function. `require` makes the modules that it captures.
pub fn build(lua: &Lua, carried: &Carried, require: &Function) -> mlua::Result<Function> {
    let debug = debug_library::get(lua)?;
    let (set, join): (Function, Function) = (debug.raw_get("setupvalue")?, debug.raw_get("upvaluejoin")?);
    let load = |code: &[u8]| lua.load(code).set_mode(ChunkMode::Binary).into_function();
    let functions = carried.functions.iter().map(|f| load(&f.code)).collect::<mlua::Result<Vec<_>>>()?;
    let tables = carried.tables.iter().map(|_| lua.create_table()).collect::<mlua::Result<Vec<_>>>()?;
    let built = Built { lua, require, functions: &functions, tables: &tables };
    for (copied, table) in carried.tables.iter().zip(&tables) {
        for (key, value) in &copied.entries {
            table.raw_set(built.value(key)?, built.value(value)?)?;
        }
        if copied.is_strict {
            strict(lua, table)?;
        }
    }
    // The function and the upvalue that hold each variable.
    let mut holders = vec![None; carried.variables.len()];
    for (copied, function) in carried.functions.iter().zip(&functions) {
        for (i, variable) in (1i64..).zip(&copied.upvalues) {
            match &holders[*variable] {
                Some((other, j)) => join.call::<()>((function, i, other, *j))?,
                None => {
                    // The main function of a chunk begins with the globals as its only upvalue, which its variable replaces.
                    set.call::<Value>((function, i, built.value(&carried.variables[*variable])?))?;
                    holders[*variable] = Some((function.clone(), i));
                }
            }
        }
    }
    functions.first().cloned().ok_or_else(|| mlua::Error::runtime("this is a bug: a function without code"))
}

struct Built<'a> {
    lua: &'a Lua,
    require: &'a Function,
    functions: &'a [Function],
    tables: &'a [Table],
}

impl Built<'_> {
    fn value(&self, copied: &Copied) -> mlua::Result<Value> {
        Ok(match copied {
            Copied::Nil => Value::Nil,
            Copied::Bool(b) => Value::Boolean(*b),
            Copied::Int(i) => Value::Integer(*i),
            Copied::Float(x) => Value::Number(*x),
            Copied::Text(bytes) => Value::String(self.lua.create_string(bytes)?),
            Copied::Null => Value::NULL,
            Copied::Globals => Value::Table(self.lua.globals()),
            Copied::Library(name) => self.lua.globals().raw_get(&**name)?,
            Copied::LibraryFunction(library, name) if library.is_empty() => self.lua.globals().raw_get(&**name)?,
            Copied::LibraryFunction(library, name) => {
                self.lua.globals().raw_get::<Table>(&**library)?.raw_get(&**name)?
            }
            Copied::Module(name) => self.require.call(&**name)?,
            Copied::Table(k) => Value::Table(self.tables[*k].clone()),
            Copied::Function(k) => Value::Function(self.functions[*k].clone()),
            Copied::Object(object) => object.clone().bring(self.lua)?,
        })
    }
}

/// Makes reading a missing field an error, as it is for the params of a recipe.
fn strict(lua: &Lua, table: &Table) -> mlua::Result<()> {
    let meta = lua.create_table()?;
    let missing = |lua: &Lua, (_, key): (Value, Value)| -> mlua::Result<()> {
        let message = format!("a worker's copy of params or of the recipe has no {}", crate::args::show(&key));
        let hint = "workers see the params of a recipe, not its functions";
        Err(recipe_line::raised(lua, message, Some(hint.into()), Cause::Recipe))
    };
    meta.raw_set("__index", Guarded(lua).create_function(missing)?)?;
    table.set_metatable(Some(meta))
}
