//! Remembers the last field that a batch was asked for and does not have, for the hint of an error on the same line.
//!
//! A missing field is nil, since recipes ask for optional ones such as `batch.documents`. If nil then is an error, the names that there are
//! explain it.

use crate::args::show;
use crate::functions::host;
use crate::host::Host;
use mlua::{Lua, Table, Value};
use perilune_core::error::did_you_mean;
use std::cell::RefCell;
use std::rc::Rc;

/// A field that was asked for.
struct Missed {
    file: String,
    line: u32,
    hint: String,
}

thread_local! {
    static LAST: RefCell<Option<Missed>> = const { RefCell::new(None) };
}

/// Returns the hint for an error about nil at a line, if a field was missing there.
pub(crate) fn hint(file: &str, line: u32, message: &str) -> Option<String> {
    let about_nil = [" is missing", "nil", "no value"].iter().any(|word| message.contains(word));
    LAST.with_borrow(|last| {
        last.as_ref().filter(|m| about_nil && m.file == file && m.line == line).map(|m| m.hint.clone())
    })
}

fn note(host: &Rc<Host>, lua: &Lua, batch: &Table, key: &str) {
    let loc = host.loc(lua);
    let found = host.engine.borrow().recorder.source_map.get(loc).map(|(file, line)| (file.to_string(), line));
    let Some((file, line)) = found else { return };
    let mut names: Vec<String> = batch
        .pairs::<Value, Value>()
        .flatten()
        .map(|(k, _)| k.as_string().map_or_else(|| show(&k), |s| s.to_string_lossy()))
        .collect();
    names.sort();
    let near = did_you_mean(key, names.iter().map(String::as_str)).map(|near| format!("; did you mean batch.{near}?"));
    let list = match names.split_last() {
        None => "nothing".to_string(),
        Some((only, [])) => only.clone(),
        Some((last, others)) => format!("{} and {last}", others.join(", ")),
    };
    let hint = format!("the batch has no field '{key}'; it has {list}{}", near.unwrap_or_default());
    LAST.set(Some(Missed { file, line, hint }));
}

/// `native.missed(batch, key)`: notes that a batch has no such field.
pub(crate) fn missed(lua: &Lua, (batch, key): (Table, Value)) -> mlua::Result<()> {
    if let Value::String(key) = &key {
        note(&host(lua)?, lua, &batch, &key.to_string_lossy());
    }
    Ok(())
}
