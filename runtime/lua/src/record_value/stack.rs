//! Converts values of records on the stack of a Lua state, for code that `Lua::exec_raw` runs in a protected call.
//!
//! A pipeline converts each record twice for each of its functions. mlua's handles cost more than the values: each takes a place on
//! the stack of another coroutine, and a protected call of its own while a memory limit is set.
//!
//! Lua raises errors by `longjmp`. So no frame here owns memory while it calls Lua: values that are read belong to a [`Reader`] of
//! the caller, and refusals are made of what is left on the stack.
#![allow(unsafe_code)]

use super::{DEPTH, Refused};
use mlua::{Value as LuaValue, ffi};
use perilune_core::{Category, HostTensor};
use perilune_data::records::{Record, Value};
use std::ffi::c_int;
use std::sync::Arc;

/// The names that a [`Reader`] keeps, of the fields that it has read.
const NAMES: usize = 64;

/// Why a value is none of a record.
#[derive(Clone, Copy, Debug)]
pub(super) enum Why {
    /// It is of a type that records do not hold.
    Type,
    /// It is a table in `DEPTH` others.
    Depth,
    /// It is a key that is no string.
    Key,
    /// It is a key beside those of a list.
    Mixed,
}

/// Reads values from a stack.
#[derive(Default, Debug)]
pub(crate) struct Reader {
    /// Values whose table is not whole.
    values: Vec<Value>,
    /// Their names, for those of maps.
    names: Vec<Arc<str>>,
    /// Names of earlier fields, which records share.
    known: Vec<Arc<str>>,
    refused: Option<Why>,
    /// Where the value is that was refused: keys, the innermost first.
    path: Vec<Step>,
}

/// A key on the path of a value.
#[derive(Debug)]
pub(super) enum Step {
    Name(Arc<str>),
    Place(usize),
}

/// Pushes the table of a record.
///
/// # Safety
/// The state is one of a protected call.
pub(super) unsafe fn push_record(state: *mut ffi::lua_State, record: &Record) {
    let fields = record.fields.iter().filter(|(_, value)| *value != Value::Null);
    // SAFETY: luaL_checkstack makes room for a table, a key and a value.
    unsafe {
        ffi::luaL_checkstack(state, 3, std::ptr::null());
        ffi::lua_createtable(state, 0, small(record.fields.len()));
        for (name, value) in fields {
            push_bytes(state, name.as_bytes());
            push(state, value);
            ffi::lua_rawset(state, -3);
        }
    }
}

/// Pushes a value.
///
/// # Safety
/// That of [`push_record`].
pub(super) unsafe fn push(state: *mut ffi::lua_State, value: &Value) {
    // SAFETY: luaL_checkstack makes room for a table and a value in it.
    unsafe {
        ffi::luaL_checkstack(state, 2, std::ptr::null());
        match value {
            Value::Null => ffi::lua_pushlightuserdata(state, std::ptr::null_mut()),
            Value::Bool(b) => ffi::lua_pushboolean(state, c_int::from(*b)),
            Value::Int(i) => ffi::lua_pushinteger(state, *i),
            Value::Float(x) => ffi::lua_pushnumber(state, *x),
            Value::Text(text) => push_bytes(state, text.as_bytes()),
            Value::Bytes(bytes) => push_bytes(state, bytes),
            Value::List(list) => {
                ffi::lua_createtable(state, small(list.len()), 0);
                for (k, item) in (1..).zip(list) {
                    push(state, item);
                    ffi::lua_rawseti(state, -2, k);
                }
            }
            Value::Map(record) => push_record(state, record),
            Value::Array(array) => push_elements(state, array, array.shape.dims(), &mut 0),
        }
    }
}

/// Pushes the part of an array with these dims that begins at element `at`.
///
/// # Safety
/// That of [`push_record`].
unsafe fn push_elements(state: *mut ffi::lua_State, array: &HostTensor, dims: &[usize], at: &mut usize) {
    // SAFETY: luaL_checkstack makes room for a table and an element.
    unsafe {
        ffi::luaL_checkstack(state, 2, std::ptr::null());
        let Some((n, rest)) = dims.split_first() else {
            match array.dtype.category() {
                Category::Bool => ffi::lua_pushboolean(state, c_int::from(array.get_i64(*at) != 0)),
                Category::Int => ffi::lua_pushinteger(state, array.get_i64(*at)),
                Category::Float => ffi::lua_pushnumber(state, array.get_f64(*at)),
            }
            *at += 1;
            return;
        };
        ffi::lua_createtable(state, small(*n), 0);
        for k in (1..).take(*n) {
            push_elements(state, array, rest, at);
            ffi::lua_rawseti(state, -2, k);
        }
    }
}

/// # Safety
/// That of [`push_record`], with room on the stack.
unsafe fn push_bytes(state: *mut ffi::lua_State, bytes: &[u8]) {
    // SAFETY: Lua copies that many bytes.
    unsafe { ffi::lua_pushlstring(state, bytes.as_ptr().cast(), bytes.len()) };
}

/// A hint for the size of a table.
fn small(n: usize) -> c_int {
    c_int::try_from(n).unwrap_or(c_int::MAX)
}

impl Reader {
    /// Reads the value on top of the stack. If it is refused, what is refused in it replaces all else on the stack.
    ///
    /// # Safety
    /// That of [`push_record`].
    pub(super) unsafe fn read(&mut self, state: *mut ffi::lua_State) -> Option<Value> {
        // What an earlier value left that an error ended; names stay known.
        self.values.clear();
        self.names.clear();
        self.path.clear();
        self.refused = None;
        // SAFETY: that of this function; there is a value.
        unsafe {
            self.refused = self.read_value(state, 0).err();
            if self.refused.is_some() {
                ffi::lua_copy(state, -1, 1);
                ffi::lua_settop(state, 1);
                return None;
            }
        }
        Some(self.values.pop().unwrap_or(Value::Null))
    }

    /// What was refused when nothing was read; `top` is what is left on the stack.
    pub(super) fn refused(&self, top: &LuaValue) -> Refused {
        Refused::of(self.refused.unwrap_or(Why::Type), &self.path, top)
    }

    /// Reads the value on top of the stack, and leaves it there. A refusal leaves what is refused on top.
    ///
    /// # Safety
    /// That of [`push_record`].
    unsafe fn read_value(&mut self, state: *mut ffi::lua_State, depth: usize) -> Result<(), Why> {
        // SAFETY: each function is called for a value of its type; the bytes of a string live as long as it is on the stack.
        let value = unsafe {
            match ffi::lua_type(state, -1) {
                ffi::LUA_TNIL => Value::Null,
                ffi::LUA_TLIGHTUSERDATA if ffi::lua_touserdata(state, -1).is_null() => Value::Null,
                ffi::LUA_TBOOLEAN => Value::Bool(ffi::lua_toboolean(state, -1) != 0),
                ffi::LUA_TNUMBER if ffi::lua_isinteger(state, -1) != 0 => Value::Int(ffi::lua_tointeger(state, -1)),
                ffi::LUA_TNUMBER => Value::Float(ffi::lua_tonumber(state, -1)),
                ffi::LUA_TSTRING => match std::str::from_utf8(bytes_at(state, -1)) {
                    Ok(text) => Value::Text(text.into()),
                    Err(_) => Value::Bytes(bytes_at(state, -1).into()),
                },
                ffi::LUA_TTABLE if depth == DEPTH => return Err(Why::Depth),
                ffi::LUA_TTABLE => {
                    ffi::luaL_checkstack(state, 3, std::ptr::null());
                    return match ffi::lua_rawlen(state, -1) {
                        0 => self.read_map(state, depth),
                        length => self.read_list(state, length, depth),
                    };
                }
                _ => return Err(Why::Type),
            }
        };
        self.values.push(value);
        Ok(())
    }

    /// # Safety
    /// That of [`push_record`], for a table with the border `length`.
    unsafe fn read_list(&mut self, state: *mut ffi::lua_State, length: usize, depth: usize) -> Result<(), Why> {
        let first = self.values.len();
        // SAFETY: the caller has made room for a key and a value. The table is not changed while it is walked.
        unsafe {
            for k in 1..=length {
                ffi::lua_rawgeti(state, -1, k as i64);
                self.read_value(state, depth + 1).inspect_err(|_| self.path.push(Step::Place(k)))?;
                ffi::lua_pop(state, 1);
            }
            ffi::lua_pushnil(state);
            while ffi::lua_next(state, -2) != 0 {
                ffi::lua_pop(state, 1);
                let is_place =
                    ffi::lua_isinteger(state, -1) != 0 && (1..=length as i64).contains(&ffi::lua_tointeger(state, -1));
                if !is_place {
                    return Err(Why::Mixed);
                }
            }
        }
        let list = self.values.drain(first..).collect();
        self.values.push(Value::List(list));
        Ok(())
    }

    /// # Safety
    /// That of [`push_record`], for a table.
    unsafe fn read_map(&mut self, state: *mut ffi::lua_State, depth: usize) -> Result<(), Why> {
        let (first, first_name) = (self.values.len(), self.names.len());
        // SAFETY: the caller has made room for a key and a value. The table is not changed while it is walked, nor is a key that is
        // no string converted.
        unsafe {
            ffi::lua_pushnil(state);
            while ffi::lua_next(state, -2) != 0 {
                if ffi::lua_type(state, -2) != ffi::LUA_TSTRING {
                    ffi::lua_pop(state, 1);
                    return Err(Why::Key);
                }
                let name = self.name(bytes_at(state, -2));
                self.names.push(name);
                if let Err(why) = self.read_value(state, depth + 1) {
                    self.path.extend(self.names.pop().map(Step::Name));
                    return Err(why);
                }
                ffi::lua_pop(state, 1);
            }
        }
        let mut fields: Vec<_> = self.names.drain(first_name..).zip(self.values.drain(first..)).collect();
        fields.sort_by(|a, b| a.0.cmp(&b.0));
        self.values.push(Value::Map(Record { fields }));
        Ok(())
    }

    /// A name, shared with earlier records.
    fn name(&mut self, bytes: &[u8]) -> Arc<str> {
        if let Some(name) = self.known.iter().find(|name| name.as_bytes() == bytes) {
            return name.clone();
        }
        let name: Arc<str> = String::from_utf8_lossy(bytes).into();
        if self.known.len() < NAMES {
            self.known.push(name.clone());
        }
        name
    }
}

/// The bytes of a string on the stack.
///
/// # Safety
/// There is a string, and it stays there as long as the bytes are used.
unsafe fn bytes_at<'a>(state: *mut ffi::lua_State, index: c_int) -> &'a [u8] {
    let mut length = 0;
    // SAFETY: for a string Lua returns its own bytes, never null, and their number.
    unsafe {
        let start = ffi::lua_tolstring(state, index, &mut length);
        std::slice::from_raw_parts(start.cast(), length)
    }
}
