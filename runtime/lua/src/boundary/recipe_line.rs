//! Raises errors at the recipe's line, found on the Lua stack alone: the engine may be borrowed, or in the middle of a panic.

use crate::errors::{Cause, Raised};
use crate::host::INTERNAL;
use mlua::Lua;
use mlua::debug::Debug;

/// The number of stack levels searched for a line of the recipe.
const DEPTH: usize = 32;

/// Returns file and line of a frame that belongs to a recipe or to the prompt.
pub fn own(d: &Debug<'_>) -> Option<(String, u32)> {
    let source = d.source();
    // Chunks of mlua implement the fields of userdata.
    let foreign = |n: &str| n.starts_with(INTERNAL) || n.starts_with("=__mlua") || !n.starts_with(['@', '=']);
    let name = source.source.as_deref().filter(|n| !foreign(n))?;
    Some((name[1..].to_string(), u32::try_from(d.current_line()?).ok()?))
}

/// Makes an error at the running line of the recipe.
pub fn raised(lua: &Lua, message: String, hint: Option<String>, cause: Cause) -> mlua::Error {
    let found = (0..DEPTH).map_while(|level| lua.inspect_stack(level, own)).flatten().next();
    let (file, line) = found.map_or((None, 0), |(file, line)| (Some(file), line));
    mlua::Error::external(Raised { file, line, message, hint, while_at: None, cause })
}
