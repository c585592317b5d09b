//! Interrupts Lua code on Ctrl-C: a hook that checks the [`Interrupt`] of the runtime.
//!
//! The hook runs at every 10,000th instruction, at negligible cost, and sooner where instructions are slow. After the grace
//! period it runs at every instruction, so that `while true do pcall(f) end` raises outside of its pcall too.

use crate::boundary::Guarded;
use crate::boundary::recipe_line::{own, raised};
use crate::errors::Cause;
use crate::functions::host;
use mlua::{Function, HookTriggers, Lua, Table, VmState};
use perilune_core::Interrupt;
use std::cell::Cell;
use std::time::{Duration, Instant};

const RARELY: u32 = 10_000;
/// The interval after an interrupt: short, but cheap enough for clean-up code.
const OFTEN: u32 = 100;
/// The time between two calls of the hook above which it becomes more frequent: instructions may be slow, such as `..` of long
/// strings.
const SLOW: Duration = Duration::from_millis(50);
/// The time after which library code is interrupted too; until then it may restore what it has changed.
const PATIENCE: Duration = Duration::from_secs(2);

thread_local! {
    /// The time since which an interrupt has been overdue.
    static OVERDUE: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Installs the hook. Each coroutine inherits the rate of its creator and changes its own.
pub fn listen(lua: &Lua) -> mlua::Result<()> {
    OVERDUE.set(None);
    listen_to(lua, host(lua)?.interrupt.clone())
}

/// Installs the hook for an interrupt that is not the run's.
pub fn listen_to(lua: &Lua, interrupt: Interrupt) -> mlua::Result<()> {
    arm(lua, OFTEN, interrupt) // which becomes less often where instructions are quick
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

/// `native.undisturbed(fn)`: defers a pending request until `fn` has ended.
pub fn install(lua: &Lua, native: &Table) -> mlua::Result<()> {
    let undisturbed = Guarded(lua).create_function(|lua, f: Function| {
        let _restoring = host(lua)?.interrupt.set_aside();
        f.call::<()>(())
    })?;
    native.set("undisturbed", undisturbed)
}
