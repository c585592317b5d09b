//! Limits the memory of a recipe's Lua values: the default from the machine, the errors, and room for what comes after one.
//!
//! Lua's allocator refuses what would pass the limit. Lua first collects garbage and tries again; then the script meets an
//! error that `pcall` catches. Tensors are the engine's and are not counted here.

use super::recipe_line;
use crate::errors::Cause;
use mlua::Lua;
use perilune_core::byte_size;
use std::cell::Cell;

/// The share of the machine's memory that Lua may use by default is 1 / SHARE, within these bounds.
const SHARE: usize = 4;
const LEAST: usize = 256 << 20;
const MOST: usize = 8 << 30;
/// What the prompt leaves free for the line that is to let go of a value that fills the memory.
const HEADROOM: usize = 8 << 20;

thread_local! {
    /// The limit of the Lua state of this thread, for errors that reach Rust without the state.
    static LIMIT: Cell<usize> = const { Cell::new(0) };
}

/// The limit of a Lua state, in its app data.
struct Limit(usize);

/// The default limit: a quarter of the memory that the machine, or the control group of the process, has; at least 256 MiB,
/// at most 8 GiB.
pub fn default_limit() -> usize {
    (machine_memory().unwrap_or(MOST) / SHARE).clamp(LEAST, MOST)
}

/// The memory of the machine, or less where a control group limits the process.
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
        // A parent's limit holds for its children: version 2 has one hierarchy, version 1 one for memory.
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

/// Limits the memory of a Lua state from now on.
pub fn set(lua: &Lua, bytes: usize) -> mlua::Result<()> {
    lua.set_memory_limit(bytes)?;
    lua.set_app_data(Limit(bytes));
    LIMIT.set(bytes);
    Ok(())
}

fn limit(lua: &Lua) -> usize {
    lua.app_data_ref::<Limit>().map_or(usize::MAX, |l| l.0)
}

/// Bytes that are left, garbage not counted as free.
pub fn room(lua: &Lua) -> usize {
    limit(lua).saturating_sub(lua.used_memory())
}

/// `native.need(op, bytes)`: an error unless that much is left once garbage is collected.
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

/// `native.exhausted()`: raises what an exhausted memory is called.
pub fn exhausted(lua: &Lua, (): ()) -> mlua::Result<()> {
    let message = format!("out of Lua memory: {}", rule(limit(lua)));
    Err(recipe_line::raised(lua, message, Some(CURE.into()), Cause::System))
}

fn rule(limit: usize) -> String {
    format!("the values of a recipe (strings, tables, functions) may take {}", byte_size::show(limit))
}

/// Message and cure for a memory error that left Lua.
pub fn explain() -> (String, String) {
    (format!("out of Lua memory: {}", rule(LIMIT.get())), CURE.into())
}

/// Leaves room for a line of the prompt, whatever fills the memory: `big = nil` needs some.
pub fn make_room(lua: &Lua) -> mlua::Result<()> {
    let limit = limit(lua);
    let free = lua.used_memory().saturating_add(HEADROOM);
    let wanted = if free > limit { free } else { limit };
    lua.set_memory_limit(wanted)?;
    Ok(())
}
