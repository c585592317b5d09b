//! Formats a value for the prompt: tensors and modules as `print` does, tables with their content.

use crate::tensor::{Ref, Tensor};
use mlua::{Function, Lua, Table, Value};

/// The maximum number of shown entries of a table, and of nested tables.
const ENTRIES: usize = 24;
const LEVELS: usize = 3;
/// The maximum number of named entries that are sorted and counted.
const COUNTED: usize = 10_000;
/// The maximum bytes of a string shown.
const TEXT: usize = 64 << 10;
/// The maximum width of a table shown on one line.
const WIDTH: usize = 100;

/// A result of a line.
pub fn show(lua: &Lua, v: &Value) -> mlua::Result<String> {
    if let Some(segments) = crate::tokenizer::segments(lua, v) {
        return Ok(crate::tokenizer::bracketed(&segments));
    }
    match v {
        Value::Table(t) if !speaks(t) => table(lua, t, 0),
        Value::Function(f) => Ok(function(f)),
        Value::String(s) if s.as_bytes().len() > TEXT => {
            let bytes = s.as_bytes();
            Ok(format!("{}… ({} bytes)", String::from_utf8_lossy(&bytes[..TEXT]), bytes.len()))
        }
        other => tostring(lua, other),
    }
}

pub fn tostring(lua: &Lua, v: &Value) -> mlua::Result<String> {
    let f = crate::library_env::function(lua, "tostring")?;
    Ok(f.call::<mlua::LuaString>(v)?.to_string_lossy())
}

/// Returns whether a table has its own `__tostring`.
fn speaks(t: &Table) -> bool {
    t.metatable().is_some_and(|m| m.raw_get::<Value>("__tostring").is_ok_and(|f| !f.is_nil()))
}

/// Formats a function: `function (digits.lua:23)`.
pub fn function(f: &Function) -> String {
    let info = f.info();
    match (info.source.as_deref().and_then(|s| s.strip_prefix(['@', '='])), info.line_defined) {
        (Some(file), Some(line)) if info.what != "C" => format!("function ({file}:{line})"),
        _ => "function (native)".into(),
    }
}

/// Formats shape and dtype without evaluating.
pub fn head(t: &Tensor) -> String {
    let state = if matches!(t.what, Ref::State(_)) { " state" } else { "" };
    match t.meta() {
        Ok((shape, dtype)) => format!("tensor {shape} {dtype}{state}"),
        Err(_) => "tensor (gone)".into(),
    }
}

fn inside(lua: &Lua, v: &Value, level: usize) -> mlua::Result<String> {
    Ok(match v {
        Value::String(s) if s.as_bytes().len() > TEXT => format!("a string of {} bytes", s.as_bytes().len()),
        Value::String(s) => format!("{:?}", s.to_string_lossy()),
        Value::Table(t) if speaks(t) => {
            let text = tostring(lua, v)?;
            let mut lines = text.lines();
            let first = lines.next().unwrap_or_default().to_string();
            if lines.next().is_some() { format!("{first} …") } else { first }
        }
        Value::Table(_) if level >= LEVELS => "{…}".into(),
        Value::Table(t) => table(lua, t, level)?,
        Value::Function(f) => function(f),
        Value::UserData(u) => match u.borrow::<Tensor>() {
            Ok(t) => head(&t),
            Err(_) => "userdata".into(),
        },
        other => tostring(lua, other)?,
    })
}

fn table(lua: &Lua, t: &Table, level: usize) -> mlua::Result<String> {
    let listed = t.raw_len();
    let mut named: Vec<(String, Value)> = Vec::new();
    let mut least = "";
    for pair in t.pairs::<Value, Value>() {
        if named.len() >= COUNTED {
            least = "at least ";
            break;
        }
        let (k, v) = pair?;
        match &k {
            Value::Integer(i) if *i >= 1 && *i as usize <= listed => {}
            Value::String(s) => named.push((s.to_string_lossy(), v)),
            other => named.push((format!("[{}]", crate::args::show(other)), v)),
        }
    }
    named.sort_by(|a, b| a.0.cmp(&b.0));
    let total = listed + named.len();
    let mut parts = Vec::new();
    for i in 1..=listed.min(ENTRIES) {
        parts.push(inside(lua, &t.raw_get::<Value>(i)?, level + 1)?);
    }
    for (k, v) in named.iter().take(ENTRIES.saturating_sub(listed.min(ENTRIES))) {
        parts.push(format!("{k} = {}", inside(lua, v, level + 1)?));
    }
    if total > parts.len() {
        parts.push(format!("… {least}{} more", total - parts.len()));
    }
    if parts.is_empty() {
        return Ok("{}".into());
    }
    let line = format!("{{ {} }}", parts.join(", "));
    if line.chars().count() <= WIDTH && !line.contains('\n') {
        return Ok(line);
    }
    let pad = "  ".repeat(level + 1);
    let body: Vec<String> = parts.iter().map(|p| format!("{pad}{p}")).collect();
    Ok(format!("{{\n{}\n{}}}", body.join(",\n"), "  ".repeat(level)))
}
