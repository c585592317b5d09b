//! Converts Lua values to JSON, for chat templates, and JSON to Lua values, for sinks.
//!
//! A table with entries 1 to n and no others is an array, another one an object with its keys in sorted order: Lua orders none, and
//! a template may print them. An empty table is an object.

use crate::args::show;
use crate::errors;
use mlua::{Lua, Value};
use serde_json::{Map, Number, Value as Json};

/// Tables within each other; deeper ones, and cycles, are an error.
const DEEPEST: usize = 64;

/// Converts a value; `what` names it in errors.
pub(crate) fn from_lua(lua: &Lua, op: &str, what: &str, value: &Value) -> mlua::Result<Json> {
    convert(lua, op, what, value, 0)
}

fn convert(lua: &Lua, op: &str, what: &str, value: &Value, depth: usize) -> mlua::Result<Json> {
    let wrong = |message: String| -> mlua::Result<Json> { Err(errors::in_any_state(lua, op, message, None)) };
    Ok(match value {
        Value::Nil => Json::Null,
        Value::Boolean(b) => Json::Bool(*b),
        Value::Integer(i) => Json::Number((*i).into()),
        Value::Number(x) => match Number::from_f64(*x) {
            Some(n) => Json::Number(n),
            None => return wrong(format!("{what} has the number {x}, which JSON does not have")),
        },
        Value::String(s) => Json::String(s.to_string_lossy()),
        Value::Table(_) if depth == DEEPEST => {
            return wrong(format!("{what} has more than {DEEPEST} tables within each other"));
        }
        Value::Table(t) => {
            let listed = t.raw_len();
            let (mut list, mut map) = (Vec::new(), Vec::new());
            for pair in t.pairs::<Value, Value>() {
                let (key, value) = pair?;
                match &key {
                    Value::Integer(i) if *i >= 1 && *i as usize <= listed => {}
                    Value::String(name) => {
                        map.push((name.to_string_lossy(), convert(lua, op, what, &value, depth + 1)?))
                    }
                    other => return wrong(format!("{what} has the key {}; keys are names, or 1, 2, …", show(other))),
                }
            }
            if listed > 0 && !map.is_empty() {
                return wrong(format!("{what} has a table with both list entries and names"));
            }
            if listed > 0 {
                crate::boundary::look(lua)?;
                for k in 1..=listed {
                    list.push(convert(lua, op, what, &t.raw_get::<Value>(k)?, depth + 1)?);
                }
                return Ok(Json::Array(list));
            }
            map.sort_by(|a, b| a.0.cmp(&b.0));
            Json::Object(Map::from_iter(map))
        }
        other => return wrong(format!("{what} has {}; it holds texts, numbers, booleans and tables", show(other))),
    })
}

/// Converts JSON to a Lua value. Null is nil, also in a list, which ends there.
pub(crate) fn to_lua(lua: &Lua, value: &Json) -> mlua::Result<Value> {
    Ok(match value {
        Json::Null => Value::Nil,
        Json::Bool(b) => Value::Boolean(*b),
        Json::Number(n) => match n.as_i64() {
            Some(i) => Value::Integer(i),
            None => Value::Number(n.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::String(lua.create_string(text)?),
        Json::Array(list) => {
            let table = lua.create_table_with_capacity(list.len(), 0)?;
            for (k, item) in (1..).zip(list) {
                table.raw_set(k, to_lua(lua, item)?)?;
            }
            Value::Table(table)
        }
        Json::Object(map) => {
            let table = lua.create_table_with_capacity(0, map.len())?;
            for (name, item) in map {
                table.raw_set(name.as_str(), to_lua(lua, item)?)?;
            }
            Value::Table(table)
        }
    })
}
