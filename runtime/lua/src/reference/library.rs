//! Finds the public functions of the standard library: those in the tables that `pl.nn`, `pl.data` and the others are.

use super::annotations::{Doc, Place, above, arguments};
use crate::loader::stdlib_files;
use crate::{Failed, Runtime, RuntimeOptions};
use mlua::{Function, Table, Value};
use std::rc::Rc;
use std::sync::Arc;

/// A public function, such as `nn.Linear` or `augment.text.swap`.
pub struct Public {
    pub name: String,
    pub arguments: Vec<String>,
    pub doc: Doc,
    pub place: Place,
}

/// Returns the functions of a part of `pl`, sorted by name; those of tables in it too.
pub fn functions(runtime: &Runtime, part: &str) -> Result<Vec<Public>, mlua::Error> {
    let pl: Table = runtime.lua().load("return require \"perilune\"").eval()?;
    let mut out = Vec::new();
    match pl.get::<Value>(part)? {
        Value::Function(f) => out.extend(public(part, &f)),
        Value::Table(table) => collect(part, &table, 0, &mut out)?,
        _ => {}
    }
    out.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(out)
}

fn collect(name: &str, table: &Table, depth: usize, out: &mut Vec<Public>) -> Result<(), mlua::Error> {
    for pair in table.pairs::<Value, Value>() {
        let (key, value) = pair?;
        let Some(key) = key.as_string().map(|s| s.to_string_lossy()) else { continue };
        match value {
            Value::Function(f) => out.extend(public(&format!("{name}.{key}"), &f)),
            Value::Table(inner) if depth == 0 && !key.starts_with('_') => {
                collect(&format!("{name}.{key}"), &inner, depth + 1, out)?
            }
            _ => {}
        }
    }
    Ok(())
}

/// Describes a function of the standard library by the comment above it. Functions of Rust have none.
fn public(name: &str, f: &Function) -> Option<Public> {
    let info = f.info();
    let path = info.source.as_deref()?.strip_prefix("@perilune/")?.to_string();
    let (_, file, text) = stdlib_files().iter().find(|(_, file, _)| *file == path)?;
    let lines: Vec<&str> = text.lines().collect();
    let first = info.line_defined?.checked_sub(1).filter(|k| *k < lines.len())?;
    let place = Place { file, first, last: info.last_line_defined.unwrap_or(first + 1) };
    Some(Public { name: name.into(), arguments: arguments(lines[first]), doc: above(&lines, first), place })
}

/// Makes a runtime without a device, to look at the library.
pub fn runtime() -> Result<Runtime, Failed> {
    Runtime::new(RuntimeOptions {
        backend: Arc::new(perilune_plan::Null),
        params: Vec::new(),
        policy: perilune_policy::Policy::closed(),
        strict: false,
        print: Rc::new(|_: &str| ()),
    })
}
