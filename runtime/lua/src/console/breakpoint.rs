//! Implements `pl.breakpoint()`: a prompt in the middle of a function, with its locals.
//!
//! The locals and upvalues of the function that called `pl.breakpoint` are read before a line of the prompt and, if the
//! line changed them, written back after it. The prompt's loop is native code, so the function keeps its level on
//! the stack.

use super::Console;
use crate::debug_library;
use crate::errors;
use crate::functions::host;
use crate::host::INTERNAL;
use mlua::{Function, Lua, Table, Value};
use std::collections::BTreeMap;
use std::rc::Rc;

/// How a stay at a breakpoint ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ended {
    Continue,
    /// The user leaves: the run is aborted.
    Quit,
}

/// Opens a prompt at a breakpoint, whose location is the text.
pub type Pause = Rc<dyn Fn(&Console, &str) -> Ended>;

/// The stack level of the calling function, seen from a debug function that native code calls.
const LEVEL: usize = 2;

#[derive(Clone, Copy)]
enum Slot {
    Local(usize),
    Upvalue(usize),
}

/// A function stopped at a breakpoint.
pub struct Frame {
    debug: Table,
    function: Function,
    slots: BTreeMap<String, Slot>,
    /// Values by name, as the prompt reads and sets them, and their original values.
    values: Table,
    read: Table,
}

impl Frame {
    fn find(lua: &Lua) -> mlua::Result<(Frame, String)> {
        let debug = debug_library::get(lua)?;
        let info: Table = debug.raw_get::<Function>("getinfo")?.call((LEVEL, "fSln"))?;
        let source: String = info.raw_get::<Option<String>>("source")?.unwrap_or_default();
        let line: i64 = info.raw_get::<Option<i64>>("currentline")?.unwrap_or(0);
        let name: Option<String> = info.raw_get("name")?;
        let what: String = info.raw_get("what")?;
        let file = source.trim_start_matches(['@', '=']);
        if source.starts_with(INTERNAL) || what == "C" {
            return Err(mlua::Error::runtime("breakpoint: call it from a recipe's function"));
        }
        // `function recipe.loss(…)` is called through a local of the training loop, so use the name in its definition.
        let first: i64 = info.raw_get::<Option<i64>>("linedefined")?.unwrap_or(0);
        let name = defined_as(file, first).or(name).filter(|_| what != "main");
        let name = name.map(|n| format!("{n} ")).unwrap_or_default();
        let (values, read) = (lua.create_table()?, lua.create_table()?);
        let frame = Frame { debug, function: info.raw_get("func")?, slots: BTreeMap::new(), values, read };
        Ok((frame, format!("{name}({file}:{line})")))
    }

    /// Reads the current locals and upvalues.
    pub fn fetch(&mut self) -> mlua::Result<()> {
        self.slots.clear();
        let keep = |frame: &mut Frame, name: String, value: Value, slot: Slot| -> mlua::Result<()> {
            if !name.starts_with('(') && name != "_ENV" {
                frame.values.raw_set(name.as_str(), value.clone())?;
                frame.read.raw_set(name.as_str(), value)?;
                frame.slots.insert(name, slot);
            }
            Ok(())
        };
        let getupvalue: Function = self.debug.raw_get("getupvalue")?;
        for i in 1.. {
            match getupvalue.call::<(Option<String>, Value)>((&self.function, i))? {
                (Some(name), value) => keep(self, name, value, Slot::Upvalue(i))?,
                _ => break,
            }
        }
        let getlocal: Function = self.debug.raw_get("getlocal")?;
        for i in 1.. {
            match getlocal.call::<(Option<String>, Value)>((LEVEL, i))? {
                // A later local shadows an earlier one of the same name.
                (Some(name), value) => keep(self, name, value, Slot::Local(i))?,
                _ => break,
            }
        }
        Ok(())
    }

    /// Writes changed values back.
    pub fn store(&self) -> mlua::Result<()> {
        for (name, slot) in &self.slots {
            let (now, before): (Value, Value) =
                (self.values.raw_get(name.as_str())?, self.read.raw_get(name.as_str())?);
            if same(&now, &before) {
                continue;
            }
            match slot {
                Slot::Local(i) => self.debug.raw_get::<Function>("setlocal")?.call::<()>((LEVEL, *i, now))?,
                Slot::Upvalue(i) => {
                    self.debug.raw_get::<Function>("setupvalue")?.call::<()>((&self.function, *i, now))?;
                }
            }
        }
        Ok(())
    }

    pub fn has(&self, name: &str) -> bool {
        self.slots.contains_key(name)
    }

    pub fn get(&self, name: &str) -> mlua::Result<Value> {
        self.values.raw_get(name)
    }

    pub fn set(&self, name: &str, value: Value) -> mlua::Result<()> {
        self.values.raw_set(name, value)
    }

    pub fn names(&self) -> Vec<String> {
        self.slots.keys().cloned().collect()
    }

    /// Drops the values, so that those that the line released can be collected.
    pub fn clear(&self) -> mlua::Result<()> {
        self.values.clear()?;
        self.read.clear()
    }
}

/// Returns the name in the first line of a function: `loss` for `function recipe.loss(model, batch)`.
fn defined_as(file: &str, line: i64) -> Option<String> {
    let line = crate::source_text::line(file, u32::try_from(line).ok()?)?;
    let name = line.split_once("function ")?.1.split('(').next()?.trim();
    let last = name.rsplit(['.', ':']).next()?;
    (!last.is_empty()).then(|| last.to_string())
}

/// Lua's raw equality, without metamethods.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Integer(x), Value::Integer(y)) => x == y,
        (Value::Number(x), Value::Number(y)) => x.to_bits() == y.to_bits(),
        (Value::UserData(x), Value::UserData(y)) => x.to_pointer() == y.to_pointer(),
        (Value::Integer(_), Value::Number(_)) | (Value::Number(_), Value::Integer(_)) => false,
        _ => a == b,
    }
}

/// `pl.breakpoint()`.
pub fn breakpoint(lua: &Lua, (): ()) -> mlua::Result<()> {
    let host = host(lua)?;
    let pause = host.pause.borrow().clone();
    let Some(pause) = pause else { return Ok(()) };
    let (frame, place) = Frame::find(lua)?;
    let console = Console::paused(lua, frame)?;
    if pause(&console, &place) == Ended::Continue {
        return Ok(());
    }
    Err(errors::left_breakpoint(&host, lua))
}
