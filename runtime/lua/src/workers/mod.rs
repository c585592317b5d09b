//! Runs Lua functions of a recipe on records, in the threads of a pipeline.
//!
//! [`carry`] copies a function out of the recipe's state: its code, and the values that it captures (`collect.rs`, `carried.rs`).
//! Each thread that calls it builds it in a Lua state of its own (`rebuild.rs`, `state.rs`), which has the standard libraries only
//! (`environment.rs`), with the limits of the recipe and a time limit for each record. So a result depends on the record, its index
//! and the function alone; a rehearsal (`rehearsal.rs`) finds functions whose results depend on more.
//!
//! Not included: the stages that call functions (`perilune_data::records::stages`), and the conversion of values (`record_value.rs`).

mod carried;
mod collect;
mod environment;
mod modules;
mod random;
mod rebuild;
mod rehearsal;
mod state;

pub(crate) use carried::Portable;
pub(crate) use rehearsal::{rehearse, rehearse_function};

use crate::boundary::memory_limit;
use carried::Carried;
use mlua::{Function, Lua};
use perilune_core::Interrupt;
use perilune_data::records::{Fingerprint, Record, RecordFn, Value};
use perilune_data::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The time that a function may take for one record.
const TIME: Duration = Duration::from_secs(10);
/// A worker's state may take this share of the memory of the recipe's own state, and not less than the minimum.
const MEMORY_SHARE: usize = 16;
const MIN_MEMORY: usize = 64 << 20;

/// The stage whose functions get `math.random` as their second argument, since they are made to draw.
pub(crate) const AUGMENT: &str = "records:augment";

/// The limits of a function in each of its states.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// The bytes of its Lua values.
    pub memory: usize,
    /// The time for one record.
    pub time: Duration,
}

impl Limits {
    /// The limits that follow from those of the recipe.
    pub fn of(lua: &Lua) -> Limits {
        Limits { memory: (memory_limit::limit(lua) / MEMORY_SHARE).max(MIN_MEMORY), time: TIME }
    }
}

/// What a function takes for a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Takes {
    Record,
    /// The number of the record: the function makes it.
    Number,
}

/// A function of a recipe, which any thread may call.
pub(crate) struct LuaFunction {
    /// The number of the function in this process, which names its states.
    id: u64,
    /// The stage, for messages: "records:map".
    op: String,
    place: String,
    carried: Carried,
    takes: Takes,
    fingerprint: Fingerprint,
    /// The key of its random numbers.
    seed: u64,
    limits: Limits,
    /// The interrupt of the run.
    interrupt: Interrupt,
    /// Gone with the function, for the threads that have states for it.
    lives: Arc<()>,
}

/// Copies a function for the stage `op`. `seed` is that of its random numbers.
///
/// # Errors
/// It captures a value that cannot be copied, such as a State; the message names the variable.
pub(crate) fn carry(lua: &Lua, op: &str, function: &Function, seed: u64) -> mlua::Result<Arc<LuaFunction>> {
    carry_with(lua, op, function, seed, Takes::Record, Limits::of(lua))
}

/// Copies a function that makes records of their numbers, for the source `op`.
///
/// # Errors
/// Those of [`carry`].
pub(crate) fn carry_maker(lua: &Lua, op: &str, function: &Function, seed: u64) -> mlua::Result<Arc<LuaFunction>> {
    carry_with(lua, op, function, seed, Takes::Number, Limits::of(lua))
}

/// Copies a function with limits of its own.
fn carry_with(
    lua: &Lua,
    op: &str,
    function: &Function,
    seed: u64,
    takes: Takes,
    limits: Limits,
) -> mlua::Result<Arc<LuaFunction>> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let (carried, place) = collect::carry(lua, op, function)?;
    Ok(Arc::new(LuaFunction {
        id: NEXT.fetch_add(1, Ordering::Relaxed),
        op: op.to_string(),
        place,
        fingerprint: carried.fingerprint(seed),
        seed: key(&carried, seed),
        carried,
        takes,
        limits,
        interrupt: crate::functions::host(lua)?.interrupt.clone(),
        lives: Arc::new(()),
    }))
}

/// The key of a function's random numbers: two functions of one seed draw different ones, and one function draws the same with other
/// values of the variables that it captures.
fn key(carried: &Carried, seed: u64) -> u64 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes());
    carried.functions.first().map(|f| hasher.update(&f.hash));
    let mut bytes = [0; 8];
    hasher.finalize_xof().fill(&mut bytes);
    u64::from_le_bytes(bytes)
}

impl RecordFn for LuaFunction {
    fn call(&self, record: Record, index: u64) -> Result<Value> {
        let (mut values, failed) = state::call_many(self, &[record], &[index]);
        failed.map_or_else(|| Ok(values.pop().unwrap_or(Value::Null)), Err)
    }

    fn call_many(&self, records: Vec<Record>, indices: &[u64]) -> (Vec<Value>, Option<Error>) {
        state::call_many(self, &records, indices)
    }

    fn place(&self) -> &str {
        &self.place
    }

    fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }
}

#[cfg(test)]
mod tests;
