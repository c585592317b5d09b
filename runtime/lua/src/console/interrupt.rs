//! Interrupts Lua code on Ctrl-C: a hook that checks the [`Interrupt`] of the runtime.
//!
//! The hook costs nothing to speak of at every 10,000th instruction, and comes sooner where instructions are slow. Once the
//! grace is over it is called at every instruction, so that `while true do pcall(f) end` meets an error outside of its pcall
//! too.

use crate::boundary::Guarded;
use crate::boundary::recipe_line::{own, raised};
use crate::errors::Cause;
use crate::functions::host;
use mlua::{Function, HookTriggers, Lua, Table, VmState};
use perilune_core::Interrupt;
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

/// Installs the hook. Each coroutine inherits the rate of its creator and changes its own.
pub fn listen(lua: &Lua) -> mlua::Result<()> {
    OVERDUE.set(None);
    arm(lua, OFTEN, host(lua)?.interrupt.clone()) // which becomes less often where instructions are quick
}

fn arm(lua: &Lua, every: u32, interrupt: Interrupt) -> mlua::Result<()> {
    let last = Cell::new(Instant::now());
    lua.set_global_hook(HookTriggers::new().every_nth_instruction(every), move |lua, _| {
        let (requested, overdue) = (interrupt.is_requested(), interrupt.is_overdue());
        let now = Instant::now();
        let took = now.duration_since(last.replace(now));
        let wanted = match (requested, overdue) {
            (false, _) if took > SLOW => (every / 10).max(1),
            (false, _) if took < SLOW / 10 => every.saturating_mul(10).min(RARELY),
            (false, _) => every,
            (true, false) => OFTEN.min(every),
            (true, true) => 1,
        };
        if wanted != every {
            arm(lua, wanted, interrupt.clone())?;
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
        match interrupt.check() {
            Ok(()) => Ok(VmState::Continue),
            Err(e) => Err(raised(lua, e.message, None, Cause::Interrupted)),
        }
    })
}

/// `native.undisturbed(fn)`: a pending request is set aside until `fn` has ended.
pub fn install(lua: &Lua, native: &Table) -> mlua::Result<()> {
    let undisturbed = Guarded(lua).create_function(|lua, f: Function| {
        let _restoring = host(lua)?.interrupt.set_aside();
        f.call::<()>(())
    })?;
    native.set("undisturbed", undisturbed)
}
