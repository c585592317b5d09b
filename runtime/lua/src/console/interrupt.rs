//! Interrupts Lua code on Ctrl-C: a hook that reads the flag of [`perilune_core::interrupt`].
//!
//! The hook runs at every 10,000th instruction, at negligible cost. After the grace period it runs at every
//! instruction, so that `while true do pcall(f) end` raises outside of its pcall too.

use crate::errors::{Cause, Raised};
use crate::host::INTERNAL;
use mlua::debug::Debug;
use mlua::{Function, HookTriggers, Lua, Table, VmState};
use perilune_core::interrupt;

const RARELY: u32 = 10_000;
/// The number of stack levels searched for a line of the user's code.
const DEPTH: usize = 32;
/// The interval after an interrupt: short, but cheap enough for clean-up code.
const OFTEN: u32 = 100;

/// Installs the hook. Each coroutine inherits the rate of its creator and changes its own.
pub fn listen(lua: &Lua) -> mlua::Result<()> {
    arm(lua, RARELY)
}

fn arm(lua: &Lua, every: u32) -> mlua::Result<()> {
    lua.set_global_hook(HookTriggers::new().every_nth_instruction(every), move |lua, _| {
        let wanted = match (interrupt::asked(), interrupt::overdue()) {
            (false, _) => RARELY,
            (true, false) => OFTEN,
            (true, true) => 1,
        };
        if wanted != every {
            arm(lua, wanted)?;
        }
        // Raise in the user's code only, because library code restores what it has changed.
        if interrupt::overdue() && lua.inspect_stack(0, |d| own(d).is_none()).unwrap_or(true) {
            return Ok(VmState::Continue);
        }
        match interrupt::check() {
            Ok(()) => Ok(VmState::Continue),
            Err(e) => Err(raised(lua, e.message)),
        }
    })
}

/// Returns the file and line of a function of a recipe or of the prompt.
fn own(d: &Debug<'_>) -> Option<(String, u32)> {
    let source = d.source();
    let name = source.source.as_deref().filter(|n| n.starts_with(['@', '=']) && !n.starts_with(INTERNAL))?;
    Some((name[1..].to_string(), u32::try_from(d.current_line()?).ok()?))
}

/// Makes the error at the running line of the user's code.
fn raised(lua: &Lua, message: String) -> mlua::Error {
    let found = (0..DEPTH).map_while(|level| lua.inspect_stack(level, own)).flatten().next();
    let (file, line) = found.map_or((None, 0), |(file, line)| (Some(file), line));
    mlua::Error::external(Raised { file, line, message, hint: None, while_at: None, cause: Cause::Interrupted })
}

/// `native.undisturbed(fn)`: defers interrupts until `fn` has ended.
pub fn install(lua: &Lua, native: &Table) -> mlua::Result<()> {
    let undisturbed = lua.create_function(|_, f: Function| {
        let asked = interrupt::pause();
        let out = f.call::<()>(());
        interrupt::resume(asked);
        out
    })?;
    native.set("undisturbed", undisturbed)
}
