//! Converts the values of records to Lua and back, in any Lua state.
//!
//! A map is a table with string keys, a list one with the keys 1 to n; an empty table is either. `null` is a field that is absent, and in a
//! list the light userdata `data.null`. Maps that come from Lua have their fields in the order of their names, since tables have none.

use mlua::{Lua, Table, Value as LuaValue};
use perilune_core::{Category, HostTensor};
use perilune_data::records::{Record, Value};

/// The most tables that a value nests.
const DEPTH: usize = 64;

/// Why a Lua value is no value of a record.
#[derive(Debug)]
pub(crate) struct Refused {
    /// The path of the field: "messages[2].role".
    pub path: String,
    /// What is there: "a function".
    pub found: String,
}

impl Refused {
    pub fn message(&self) -> String {
        let Refused { path, found } = self;
        if path.is_empty() { format!("it is {found}") } else { format!("'{path}' is {found}") }
    }

    pub fn hint() -> &'static str {
        "records hold strings, numbers, booleans, lists and tables with string keys"
    }

    fn at(mut self, key: &str) -> Refused {
        let dot = if self.path.is_empty() || self.path.starts_with('[') { "" } else { "." };
        self.path = format!("{key}{dot}{}", self.path);
        self
    }
}

/// Converts a record to a table.
pub(crate) fn table(lua: &Lua, record: &Record) -> mlua::Result<Table> {
    let table = lua.create_table_with_capacity(0, record.fields.len())?;
    for (name, value) in record.fields.iter().filter(|(_, value)| *value != Value::Null) {
        table.raw_set(&**name, to_lua(lua, value)?)?;
    }
    Ok(table)
}

/// Converts a value.
pub(crate) fn to_lua(lua: &Lua, value: &Value) -> mlua::Result<LuaValue> {
    Ok(match value {
        Value::Null => LuaValue::NULL,
        Value::Bool(b) => LuaValue::Boolean(*b),
        Value::Int(i) => LuaValue::Integer(*i),
        Value::Float(x) => LuaValue::Number(*x),
        Value::Text(text) => LuaValue::String(lua.create_string(&**text)?),
        Value::Bytes(bytes) => LuaValue::String(lua.create_string(&**bytes)?),
        Value::List(list) => {
            let table = lua.create_table_with_capacity(list.len(), 0)?;
            for (k, item) in (1..).zip(list) {
                table.raw_set(k, to_lua(lua, item)?)?;
            }
            LuaValue::Table(table)
        }
        Value::Map(record) => LuaValue::Table(self::table(lua, record)?),
        Value::Array(array) => elements(lua, array, array.shape.dims(), &mut 0)?,
    })
}

/// Converts the part of an array with these dims that begins at element `at`.
fn elements(lua: &Lua, array: &HostTensor, dims: &[usize], at: &mut usize) -> mlua::Result<LuaValue> {
    let Some((n, rest)) = dims.split_first() else {
        let k = *at;
        *at += 1;
        return Ok(match array.dtype.category() {
            Category::Bool => LuaValue::Boolean(array.get_i64(k) != 0),
            Category::Int => LuaValue::Integer(array.get_i64(k)),
            Category::Float => LuaValue::Number(array.get_f64(k)),
        });
    };
    let table = lua.create_table_with_capacity(*n, 0)?;
    for k in 1..=*n {
        table.raw_set(k, elements(lua, array, rest, at)?)?;
    }
    Ok(LuaValue::Table(table))
}

/// Converts a Lua value.
pub(crate) fn from_lua(value: &LuaValue) -> Result<Value, Refused> {
    convert(value, 0)
}

/// Converts a table with string keys.
pub(crate) fn record(value: &LuaValue) -> Result<Record, Refused> {
    match from_lua(value)? {
        Value::Map(record) => Ok(record),
        other => Err(Refused { path: String::new(), found: other.type_name().into() }),
    }
}

fn convert(value: &LuaValue, depth: usize) -> Result<Value, Refused> {
    let refuse = |found: &str| Err(Refused { path: String::new(), found: found.into() });
    Ok(match value {
        LuaValue::Nil => Value::Null,
        LuaValue::LightUserData(p) if p.0.is_null() => Value::Null,
        LuaValue::Boolean(b) => Value::Bool(*b),
        LuaValue::Integer(i) => Value::Int(*i),
        LuaValue::Number(x) => Value::Float(*x),
        LuaValue::String(s) => match s.to_str() {
            Ok(text) => Value::Text((&*text).into()),
            Err(_) => Value::Bytes((&*s.as_bytes()).into()),
        },
        LuaValue::Table(_) if depth == DEPTH => return refuse("a table in too many others (64)"),
        LuaValue::Table(t) => fields(t, depth)?,
        LuaValue::UserData(u) if u.is::<crate::tensor::Tensor>() => {
            return refuse("a tensor; use x:tolist()");
        }
        other => return refuse(&format!("a {}", other.type_name())),
    })
}

fn fields(t: &Table, depth: usize) -> Result<Value, Refused> {
    let refuse = |path: String, found: String| Err(Refused { path, found });
    let length = t.raw_len();
    if length > 0 {
        let mut list = Vec::with_capacity(length);
        for k in 1..=length {
            let item = t.raw_get::<LuaValue>(k).unwrap_or(LuaValue::Nil);
            list.push(convert(&item, depth + 1).map_err(|e| e.at(&format!("[{k}]")))?);
        }
        let others = t.pairs::<LuaValue, LuaValue>().flatten().find(|(key, _)| match key {
            LuaValue::Integer(k) => !(1..=length as i64).contains(k),
            _ => true,
        });
        return match others {
            None => Ok(Value::List(list)),
            Some((key, _)) => refuse(shown(&key), "a key of a table that is also a list from 1 to n".into()),
        };
    }
    let mut record = Record::default();
    for pair in t.pairs::<LuaValue, LuaValue>() {
        let Ok((key, value)) = pair else { continue };
        let name = match &key {
            LuaValue::String(s) => s.to_string_lossy(),
            other => return refuse(shown(other), "a key that is no string".into()),
        };
        let value = convert(&value, depth + 1).map_err(|e| e.at(&name))?;
        record.fields.push((name.as_str().into(), value));
    }
    record.fields.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(Value::Map(record))
}

fn shown(key: &LuaValue) -> String {
    match key {
        LuaValue::String(s) => s.to_string_lossy(),
        other => format!("[{}]", crate::args::show(other)),
    }
}
