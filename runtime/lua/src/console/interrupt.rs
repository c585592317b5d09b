//! Interrupts Lua code on Ctrl-C: a hook that reads the flag of [`perilune_core::interrupt`].
//!
//! The hook costs nothing to speak of at every 10,000th instruction, and comes sooner where instructions are slow. Once the grace is over it is called at every
//! instruction, so that `while true do pcall(f) end` meets an error outside of its pcall too.

use crate::boundary::Guarded;
use crate::boundary::recipe_line::{own, raised};
use crate::errors::Cause;
use mlua::{Function, HookTriggers, Lua, Table, VmState};
use perilune_core::interrupt;
use std::cell::Cell;
use std::time::{Duration, Instant};

const RARELY: u32 = 10_000;
/// While an interrupt is pending: soon enough, and cheap enough for code that restores things.
const OFTEN: u32 = 100;
/// Time between two calls of the hook that makes it more frequent: instructions may be slow, as `..` of long strings is.
const SLOW: Duration = Duration::from_millis(50);
/// The library restores what it had changed and is not stopped; after this time it is.
const PATIENCE: Duration = Duration::from_secs(2);

thread_local! {
    /// Since when an interrupt has been overdue.
    static OVERDUE: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Lets Lua code be interrupted from now on. Each coroutine takes the rate over from its maker and changes its own.
pub fn listen(lua: &Lua) -> mlua::Result<()> {
    OVERDUE.set(None);
    arm(lua, OFTEN) // which becomes less often where instructions are quick
}

fn arm(lua: &Lua, every: u32) -> mlua::Result<()> {
    let last = Cell::new(Instant::now());
    lua.set_global_hook(HookTriggers::new().every_nth_instruction(every), move |lua, _| {
        let (asked, overdue) = (interrupt::asked(), interrupt::overdue());
        let now = Instant::now();
        let took = now.duration_since(last.replace(now));
        let wanted = match (asked, overdue) {
            (false, _) if took > SLOW => (every / 10).max(1),
            (false, _) if took < SLOW / 10 => every.saturating_mul(10).min(RARELY),
            (false, _) => every,
            (true, false) => OFTEN.min(every),
            (true, true) => 1,
        };
        if wanted != every {
            arm(lua, wanted)?;
        }
        if !overdue {
            OVERDUE.set(None);
        } else {
            let since = OVERDUE.get().unwrap_or(now);
            OVERDUE.set(Some(since));
            let in_library = lua.inspect_stack(0, |d| own(d).is_none()).unwrap_or(true);
            if in_library && now.duration_since(since) < PATIENCE {
                return Ok(VmState::Continue);
            }
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
