//! Limits the memory of a recipe's Lua values: the default by the machine, the errors, and a reserve for code after an error.
//!
//! Lua's allocator refuses allocations above the limit. Lua first collects garbage and tries again; then the script gets an
//! error that `pcall` catches. Tensors belong to the engine and are not counted.

use super::recipe_line;
use crate::errors::Cause;
use mlua::Lua;
use perilune_core::byte_size;
use std::cell::Cell;

/// The share of the machine's memory that Lua may use by default is 1 / SHARE, within these bounds.
const SHARE: usize = 4;
const LEAST: usize = 256 << 20;
const MOST: usize = 8 << 30;
/// The reserve of the prompt, for a line that releases a value that fills the memory.
const HEADROOM: usize = 8 << 20;

thread_local! {
    /// The limit of the Lua state of this thread, for errors that reach Rust without the state.
    static LIMIT: Cell<usize> = const { Cell::new(0) };
}

/// The limit of a Lua state, in its app data.
struct Limit(usize);

/// Returns the default limit: a quarter of the memory of the machine or of the process's control group; at least 256 MiB,
/// at most 8 GiB.
pub fn default_limit() -> usize {
    (machine_memory().unwrap_or(MOST) / SHARE).clamp(LEAST, MOST)
}

/// Returns the memory of the machine, or less if a control group limits the process.
fn machine_memory() -> Option<usize> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let total = read("/proc/meminfo").and_then(|text| {
        let kib = text.lines().find_map(|l| l.strip_prefix("MemTotal:")?.trim().strip_suffix("kB"))?;
        kib.trim().parse::<usize>().ok()?.checked_mul(1024)
    });
    let number = |path: String| read(&path).and_then(|text| text.trim().parse::<usize>().ok());
    let groups = read("/proc/self/cgroup").unwrap_or_default();
    let limits = groups.lines().flat_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) =
            (parts.next().unwrap_or_default(), parts.next().unwrap_or_default().trim_end_matches('/'));
        // A parent's limit applies to its children: version 2 has one hierarchy, version 1 a separate one for memory.
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            c if c.split(',').any(|c| c == "memory") => ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            _ => return Vec::new(),
        };
        let mut folders = vec![String::new()];
        folders.extend(path.match_indices('/').skip(1).map(|(k, _)| path[..k].to_string()));
        folders.push(path.to_string());
        folders.iter().filter_map(|folder| number(format!("{root}{folder}/{file}"))).collect::<Vec<_>>()
    });
    limits.chain(total).min()
}

/// Sets the memory limit of the Lua state of this thread's recipe.
pub fn set(lua: &Lua, bytes: usize) -> mlua::Result<()> {
    set_of_worker(lua, bytes)?;
    LIMIT.set(bytes);
    Ok(())
}

/// Sets the memory limit of a further Lua state of this thread.
pub fn set_of_worker(lua: &Lua, bytes: usize) -> mlua::Result<()> {
    lua.set_memory_limit(bytes)?;
    lua.set_app_data(Limit(bytes));
    Ok(())
}

/// The limit of a Lua state.
pub fn limit(lua: &Lua) -> usize {
    lua.app_data_ref::<Limit>().map_or(usize::MAX, |l| l.0)
}

/// Returns the remaining bytes, without counting garbage as free.
pub fn room(lua: &Lua) -> usize {
    limit(lua).saturating_sub(lua.used_memory())
}

/// `native.need(op, bytes)`: raises unless that much remains after a garbage collection.
pub fn need(lua: &Lua, (op, bytes): (String, f64)) -> mlua::Result<()> {
    if bytes > room(lua) as f64 {
        lua.gc_collect()?;
    }
    if bytes <= room(lua) as f64 {
        return Ok(());
    }
    let message = format!("{op}: its result would take {}, and {}", byte_size::show(bytes as usize), what(lua));
    Err(recipe_line::raised(lua, message, Some(CURE.into()), Cause::System))
}

const CURE: &str = "keep large data in tensors, drop tables that are not needed, or allow more: --lua-memory=SIZE";

fn what(lua: &Lua) -> String {
    let (limit, used) = (limit(lua), lua.used_memory());
    format!("the recipe's Lua values take {} of at most {}", byte_size::show(used), byte_size::show(limit))
}

/// `native.exhausted()`: raises the out-of-memory error.
pub fn exhausted(lua: &Lua, (): ()) -> mlua::Result<()> {
    Err(out_of_memory(lua))
}

/// The error at the recipe's line.
pub fn out_of_memory(lua: &Lua) -> mlua::Error {
    let message = format!("out of Lua memory: {}", rule(limit(lua)));
    recipe_line::raised(lua, message, Some(CURE.into()), Cause::System)
}

fn rule(limit: usize) -> String {
    format!("the values of a recipe (strings, tables, functions) may take {}", byte_size::show(limit))
}

/// Returns message and cure for a memory error that left Lua.
pub fn explain() -> (String, String) {
    (format!("out of Lua memory: {}", rule(LIMIT.get())), CURE.into())
}

/// Lifts the limit until it is dropped.
struct Lifted<'a>(&'a Lua, usize);

impl Drop for Lifted<'_> {
    fn drop(&mut self) {
        // It only fails for a state whose allocator is not mlua's.
        let _ = self.0.set_memory_limit(self.1);
    }
}

/// Runs `f`, which makes at most `bytes` of Lua values and calls no Lua code. While a limit is set mlua makes every value in a
/// protected call, tens of nanoseconds each; where so much is left anyway `f` runs without.
pub fn with_room<T>(lua: &Lua, bytes: usize, f: impl FnOnce() -> mlua::Result<T>) -> mlua::Result<T> {
    let limit = lua.set_memory_limit(0)?;
    let lifted = Lifted(lua, limit);
    if limit.saturating_sub(lua.used_memory()) < bytes {
        drop(lifted);
        return f();
    }
    f()
}

/// Reserves memory for a line of the prompt, such as `big = nil`, even if the limit is reached.
pub fn make_room(lua: &Lua) -> mlua::Result<()> {
    let limit = limit(lua);
    let free = lua.used_memory().saturating_add(HEADROOM);
    let wanted = if free > limit { free } else { limit };
    lua.set_memory_limit(wanted)?;
    Ok(())
}
