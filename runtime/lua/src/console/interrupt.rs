//! Interrupts Lua code on Ctrl-C: a hook that reads the flag of [`perilune_core::interrupt`].
//!
//! The hook costs nothing to speak of at every 10,000th instruction. Once the grace is over it is called at every
//! instruction, so that `while true do pcall(f) end` meets an error outside of its pcall too.

use crate::boundary::Guarded;
use crate::boundary::recipe_line::{own, raised};
use crate::errors::Cause;
use mlua::{Function, HookTriggers, Lua, Table, VmState};
use perilune_core::interrupt;

const RARELY: u32 = 10_000;
/// While somebody waits: soon enough, and cheap enough for code that puts things back.
const OFTEN: u32 = 100;

/// Lets Lua code be interrupted from now on. Each coroutine takes the rate over from its maker and changes its own.
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
        // What ends, ends in a person's code: the library's puts back what it had changed.
        if interrupt::overdue() && lua.inspect_stack(0, |d| own(d).is_none()).unwrap_or(true) {
            return Ok(VmState::Continue);
        }
        match interrupt::check() {
            Ok(()) => Ok(VmState::Continue),
            Err(e) => Err(raised(lua, e.message, None, Cause::Interrupted)),
        }
    })
}

/// `native.undisturbed(fn)`: nobody who asks for the end is heard before `fn` has ended.
pub fn install(lua: &Lua, native: &Table) -> mlua::Result<()> {
    let undisturbed = Guarded(lua).create_function(|_, f: Function| {
        let asked = interrupt::pause();
        let out = f.call::<()>(());
        interrupt::resume(asked);
        out
    })?;
    native.set("undisturbed", undisturbed)
}
