//! Interrupts Lua code on Ctrl-C: a hook that checks the [`Interrupt`] of the runtime.
//!
//! The hook costs nothing to speak of at every 10,000th instruction. Once the grace is over it is called at every
//! instruction, so that `while true do pcall(f) end` meets an error outside of its pcall too.

use crate::errors::{Cause, Raised};
use crate::functions::host;
use crate::host::INTERNAL;
use mlua::debug::Debug;
use mlua::{Function, HookTriggers, Lua, Table, VmState};
use perilune_core::Interrupt;

const RARELY: u32 = 10_000;
/// Calls deep that a line of a person's own is looked for.
const DEPTH: usize = 32;
/// While somebody waits: soon enough, and cheap enough for code that puts things back.
const OFTEN: u32 = 100;

/// Lets Lua code be interrupted from now on. Each coroutine takes the rate over from its maker and changes its own.
pub fn listen(lua: &Lua) -> mlua::Result<()> {
    arm(lua, RARELY, host(lua)?.interrupt.clone())
}

fn arm(lua: &Lua, every: u32, interrupt: Interrupt) -> mlua::Result<()> {
    lua.set_global_hook(HookTriggers::new().every_nth_instruction(every), move |lua, _| {
        let wanted = match (interrupt.is_requested(), interrupt.is_overdue()) {
            (false, _) => RARELY,
            (true, false) => OFTEN,
            (true, true) => 1,
        };
        if wanted != every {
            arm(lua, wanted, interrupt.clone())?;
        }
        // What ends, ends in a person's code: the library's puts back what it had changed.
        if interrupt.is_overdue() && lua.inspect_stack(0, |d| own(d).is_none()).unwrap_or(true) {
            return Ok(VmState::Continue);
        }
        match interrupt.check() {
            Ok(()) => Ok(VmState::Continue),
            Err(e) => Err(raised(lua, e.message)),
        }
    })
}

/// Of a function of a recipe or of the prompt: its file and line.
fn own(d: &Debug<'_>) -> Option<(String, u32)> {
    let source = d.source();
    let name = source.source.as_deref().filter(|n| n.starts_with(['@', '=']) && !n.starts_with(INTERNAL))?;
    Some((name[1..].to_string(), u32::try_from(d.current_line()?).ok()?))
}

/// The error at the line of a person's own that runs.
fn raised(lua: &Lua, message: String) -> mlua::Error {
    let found = (0..DEPTH).map_while(|level| lua.inspect_stack(level, own)).flatten().next();
    let (file, line) = found.map_or((None, 0), |(file, line)| (Some(file), line));
    mlua::Error::external(Raised { file, line, message, hint: None, while_at: None, cause: Cause::Interrupted })
}

/// `native.undisturbed(fn)`: nobody who asks for the end is heard before `fn` has ended.
pub fn install(lua: &Lua, native: &Table) -> mlua::Result<()> {
    let undisturbed = lua.create_function(|lua, f: Function| {
        let _restoring = host(lua)?.interrupt.set_aside();
        f.call::<()>(())
    })?;
    native.set("undisturbed", undisturbed)
}
