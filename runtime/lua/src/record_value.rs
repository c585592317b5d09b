//! Converts the values of records to Lua and back, in any Lua state.
//!
//! A map is a table with string keys, a list one with the keys 1 to n; an empty table is either. `null` is a field that is absent, and in a
//! list the light userdata `data.null`. Maps that come from Lua have their fields in the order of their names, since tables have none.

mod stack;

pub(crate) use stack::Reader;

use mlua::{Function, Lua, Table, Value as LuaValue, ffi};
use perilune_data::records::{Record, Value};
use stack::{Step, Why};

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

    /// The refusal of a value at the end of `path`, which begins with the innermost key.
    fn of(why: Why, path: &[Step], value: &LuaValue) -> Refused {
        let key = match value {
            LuaValue::String(s) => s.to_string_lossy(),
            other => format!("[{}]", crate::args::show(other)),
        };
        let (found, key) = match (why, value) {
            (Why::Type, LuaValue::UserData(u)) if u.is::<crate::tensor::Tensor>() => {
                ("a tensor; use x:tolist()".into(), None)
            }
            (Why::Type, other) => (format!("a {}", other.type_name()), None),
            (Why::Depth, _) => (format!("a table in too many others ({DEPTH})"), None),
            (Why::Key, _) => ("a key that is no string".into(), Some(key)),
            (Why::Mixed, _) => ("a key of a table that is also a list from 1 to n".into(), Some(key)),
        };
        let mut text = String::new();
        let steps = path.iter().rev().map(|step| match step {
            Step::Name(name) => name.to_string(),
            Step::Place(k) => format!("[{k}]"),
        });
        for step in steps.chain(key) {
            if !text.is_empty() && !step.starts_with('[') {
                text.push('.');
            }
            text.push_str(&step);
        }
        Refused { path: text, found }
    }
}

/// Converts a record to a table.
pub(crate) fn table(lua: &Lua, record: &Record) -> mlua::Result<Table> {
    // SAFETY: exec_raw calls it protected, and returns what is on the stack.
    #[allow(unsafe_code)]
    unsafe {
        lua.exec_raw((), |state| stack::push_record(state, record))
    }
}

/// Converts a value.
pub(crate) fn to_lua(lua: &Lua, value: &Value) -> mlua::Result<LuaValue> {
    // SAFETY: that of `table`.
    #[allow(unsafe_code)]
    unsafe {
        lua.exec_raw((), |state| stack::push(state, value))
    }
}

/// Converts a Lua value.
///
/// # Errors
/// The outer one is that of Lua: its memory is exhausted.
pub(crate) fn from_lua(lua: &Lua, value: &LuaValue) -> mlua::Result<Result<Value, Refused>> {
    let (mut reader, mut read) = (Reader::default(), None);
    // SAFETY: exec_raw calls it protected, with the value on the stack; the closure owns nothing.
    #[allow(unsafe_code)]
    let top = unsafe { lua.exec_raw(value, |state| read = reader.read(state))? };
    Ok(read.ok_or_else(|| reader.refused(&top)))
}

/// Converts a table with string keys.
///
/// # Errors
/// Those of [`from_lua`].
pub(crate) fn record(lua: &Lua, value: &LuaValue) -> mlua::Result<Result<Record, Refused>> {
    Ok(match from_lua(lua, value)? {
        Ok(Value::Map(record)) => Ok(record),
        Ok(other) => Err(Refused { path: String::new(), found: other.type_name().into() }),
        Err(refused) => Err(refused),
    })
}

/// The argument of a function of records.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Argument<'a> {
    Record(&'a Record),
    Number(u64),
}

/// Calls a function with each of `arguments`, and with `more` where there is one, and converts what it returns, up to the first that
/// is refused: all in one protected call. What an error leaves in `out` are the results before it.
///
/// # Errors
/// That of the function, or of Lua: its memory is exhausted.
pub(crate) fn call_each<'a>(
    lua: &Lua,
    reader: &mut Reader,
    function: &Function,
    more: Option<&Function>,
    mut arguments: impl Iterator<Item = Argument<'a>>,
    out: &mut Vec<Value>,
) -> mlua::Result<Option<Refused>> {
    // The closure only borrows what owns memory, so an error of the function passes it by.
    let (arguments, count) = (&mut arguments, if more.is_some() { 2 } else { 1 });
    let mut whole = true;
    // SAFETY: exec_raw calls it protected, with the function and `more`, or nil, on the stack; there is room for copies and an argument.
    #[allow(unsafe_code)]
    let top = unsafe {
        lua.exec_raw((function, more), |state| {
            ffi::luaL_checkstack(state, 3, std::ptr::null());
            for argument in arguments {
                ffi::lua_settop(state, 2);
                ffi::lua_pushvalue(state, 1);
                match argument {
                    Argument::Record(record) => stack::push_record(state, record),
                    // Lua's integers have 64 bits with a sign; no dataset has 2^63 records.
                    Argument::Number(index) => ffi::lua_pushinteger(state, index as i64),
                }
                if count == 2 {
                    ffi::lua_pushvalue(state, 2);
                }
                ffi::lua_call(state, count, 1);
                match reader.read(state) {
                    Some(value) => out.push(value),
                    None => {
                        whole = false;
                        return;
                    }
                }
            }
            ffi::lua_settop(state, 1);
        })?
    };
    Ok((!whole).then(|| reader.refused(&top)))
}

#[cfg(test)]
mod tests;
