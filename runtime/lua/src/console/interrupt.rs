//! Ctrl-C in the middle of Lua code: a hook that looks at the flag of [`perilune_core::interrupt`].
//!
//! The hook costs nothing to speak of at every 10,000th instruction. Once the grace is over it is called at every
//! instruction, so that `while true do pcall(f) end` meets an error outside of its pcall too.

use mlua::{HookTriggers, Lua, VmState};
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
        interrupt::check().map_err(mlua::Error::external)?;
        Ok(VmState::Continue)
    })
}
