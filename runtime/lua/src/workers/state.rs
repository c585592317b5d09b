//! Keeps the Lua states of a thread, one for each function that it calls, and calls functions in them under their limits.

use super::environment;
use super::random::Draws;
use super::{AUGMENT, LuaFunction, Takes, rebuild};
use crate::boundary::{OwnInterrupt, caught, memory_limit};
use crate::console::interrupt::listen_to;
use crate::errors::{Cause, RecipeError};
use crate::loader;
use crate::record_value::{self, Argument, Reader, Refused};
use mlua::state::{GcIncParams, GcMode};
use mlua::{Function, Lua, Table};
use perilune_core::Interrupt;
use perilune_data::records::{Record, Value};
use perilune_data::{Error, Result};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, Weak};

/// The most states that a thread keeps; beyond it the one that was used least recently is closed. States of functions that no
/// pipeline has any more are closed when the thread opens another one.
const MAX_STATES: usize = 32;
/// Garbage beside what lives in a state when it is collected, in bytes. What a record leaves is small beside the function and the
/// libraries: by Lua's default of as much garbage as live values, a tenth of the time would go into marking those.
const GARBAGE: usize = 4 << 20;

/// The states of a thread by the number of their function, each with the time of its last use.
#[derive(Default)]
pub struct States {
    by_function: HashMap<u64, (u64, Rc<State>)>,
    uses: u64,
}

impl States {
    /// Adds a state, and returns those to close.
    fn keep(&mut self, id: u64, state: Rc<State>) -> Vec<(u64, Rc<State>)> {
        let is_dead = |_: &u64, entry: &mut (u64, Rc<State>)| entry.1.function_lives.strong_count() == 0;
        let mut closed: Vec<_> = self.by_function.extract_if(is_dead).map(|(_, entry)| entry).collect();
        while self.by_function.len() >= MAX_STATES {
            let oldest = self.by_function.iter().min_by_key(|(_, (last, _))| *last).map(|(id, _)| *id);
            closed.extend(oldest.and_then(|id| self.by_function.remove(&id)));
        }
        self.by_function.insert(id, (self.uses, state));
        closed
    }

    #[cfg(test)]
    pub fn count() -> usize {
        STATES.with_borrow(|states| states.by_function.len())
    }
}

thread_local! {
    static STATES: RefCell<States> = RefCell::default();
}

/// The Lua state of one function in one thread.
struct State {
    lua: Lua,
    function: Function,
    /// `math.random`, for a function that takes it as an argument.
    random: Option<Function>,
    draws: Rc<Draws>,
    reader: RefCell<Reader>,
    /// Ends a record at its time limit, and with the run.
    interrupt: Interrupt,
    function_lives: Weak<()>,
}

/// Runs `f` with these states as those of the thread, and returns them with its result.
pub fn with_states<T>(states: States, f: impl FnOnce() -> T) -> (T, States) {
    let own = STATES.replace(states);
    let out = f();
    (out, STATES.replace(own))
}

/// Calls a function in this thread's state for it with each record and its index. Returns the results up to the first that fails,
/// and the error.
pub fn call_many(of: &LuaFunction, records: &[Record], indices: &[u64]) -> (Vec<Value>, Option<Error>) {
    let mut out = Vec::with_capacity(records.len());
    let Some(first) = indices.first() else { return (out, None) };
    let failed = state(of, *first).and_then(|state| state.call_many(of, records, indices, &mut out)).err();
    (out, failed)
}

/// Returns this thread's state for a function, opened for the record `index` if there is none.
fn state(of: &LuaFunction, index: u64) -> Result<Rc<State>> {
    let found = STATES.with_borrow_mut(|states| {
        states.uses += 1;
        let uses = states.uses;
        states.by_function.get_mut(&of.id).map(|(last, state)| {
            *last = uses;
            state.clone()
        })
    });
    if let Some(state) = found {
        return Ok(state);
    }
    let state = Rc::new(State::open(of).map_err(|e| failed(of, index, &e))??);
    // Closing a state may run code, so it happens after the borrow.
    let closed = STATES.with_borrow_mut(|states| states.keep(of.id, state.clone()));
    drop(closed);
    Ok(state)
}

impl State {
    /// Opens a state and builds the function in it. An outer error is one of the recipe's modules, an inner one the end of the run.
    fn open(of: &LuaFunction) -> mlua::Result<Result<State>> {
        let lua = loader::bounded_lua()?;
        memory_limit::set_of_worker(&lua, of.limits.memory)?;
        let interrupt = of.interrupt.child();
        lua.set_app_data(OwnInterrupt(interrupt.clone()));
        let draws = Rc::new(Draws::new(of.seed));
        let require = environment::install(&lua, of.carried.modules.clone(), draws.clone())?;
        let random = match of.op == AUGMENT {
            true => Some(lua.globals().raw_get::<Table>("math")?.raw_get::<Function>("random")?),
            false => None,
        };
        listen_to(&lua, interrupt.clone())?;
        interrupt.begin(of.limits.time);
        let built = caught(&lua, || rebuild::build(&lua, &of.carried, &require));
        let late = interrupt.is_late();
        interrupt.end();
        match built {
            Ok(function) => {
                collect_rarely(&lua)?;
                let (reader, function_lives) = (RefCell::default(), Arc::downgrade(&of.lives));
                Ok(Ok(State { lua, function, random, draws, reader, interrupt, function_lives }))
            }
            Err(_) if of.interrupt.is_requested() => Ok(Err(Error::Interrupted)),
            Err(e) if late => Err(too_slow(of, &e)),
            Err(e) => Err(e),
        }
    }

    /// Calls the function with each record, and adds the results to `out`, which has none. An error is that of the record behind them.
    fn call_many(&self, of: &LuaFunction, records: &[Record], indices: &[u64], out: &mut Vec<Value>) -> Result<()> {
        let arguments = records.iter().zip(indices).map(|(record, index)| {
            self.draws.begin(*index);
            self.interrupt.begin(of.limits.time);
            match of.takes {
                Takes::Record => Argument::Record(record),
                Takes::Number => Argument::Number(*index),
            }
        });
        let result = caught(&self.lua, || {
            let mut reader = self.reader.borrow_mut();
            record_value::call_each(&self.lua, &mut reader, &self.function, self.random.as_ref(), arguments, out)
        });
        let late = result.is_err() && self.interrupt.is_late();
        self.interrupt.end();
        let index = indices.get(out.len()).copied().unwrap_or(0);
        match result {
            Ok(None) => Ok(()),
            Ok(Some(refused)) => {
                let text = format!("of what it returns, {}\n  hint: {}", refused.message(), Refused::hint());
                Err(Error::function(format!("{}: {text}", named(of, index))))
            }
            Err(_) if of.interrupt.is_requested() => Err(Error::Interrupted),
            Err(e) if late => Err(failed(of, index, &too_slow(of, &e))),
            Err(e) => Err(failed(of, index, &e)),
        }
    }
}

/// Lets garbage grow to as much as what lives now and [`GARBAGE`] before it is collected, or to nine times what lives.
fn collect_rarely(lua: &Lua) -> mlua::Result<()> {
    lua.gc_collect()?;
    let live = lua.used_memory().max(1);
    // In percent of what lives after a collection.
    let pause = (200 + GARBAGE.saturating_mul(100) / live).min(1000);
    lua.gc_set_mode(GcMode::Incremental(GcIncParams::default().pause(pause as i32)));
    Ok(())
}

/// "records:map at sft.lua:31, record 17".
fn named(of: &LuaFunction, index: u64) -> String {
    format!("{} at {}, record {index}", of.op, of.place)
}

/// The error of an interrupted function that has run too long, at the line where it was.
fn too_slow(of: &LuaFunction, e: &mlua::Error) -> mlua::Error {
    let at = RecipeError::new(e);
    let message = format!("it has not ended within {} s", of.limits.time.as_secs_f64());
    let hint = Some("work on one record at a time, and compute what they share before the function".into());
    let (file, line) = (at.file, at.line.unwrap_or(0));
    mlua::Error::external(crate::errors::Raised { file, line, message, hint, while_at: None, cause: Cause::Recipe })
}

/// The error of a function for a record, with its line.
fn failed(of: &LuaFunction, index: u64, e: &mlua::Error) -> Error {
    let e = RecipeError::new(e);
    let place = e.file.zip(e.line).map(|(file, line)| format!("{file}:{line}: ")).unwrap_or_default();
    let hint = e.hint.map(|hint| format!("\n  hint: {hint}")).unwrap_or_default();
    Error::function(format!("{}: {place}{}{hint}", named(of, index), e.message))
}
