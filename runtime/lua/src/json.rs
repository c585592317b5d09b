//! Converts Lua values to JSON, for chat templates.
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
