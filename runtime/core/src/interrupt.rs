//! Holds the flag of an interrupt from the prompt. Signals belong to the process, and so does this flag.
//!
//! Who asks also takes the wish back, once the line has ended. Long work looks between its parts: the Lua hook every few
//! thousand instructions, the engine before it runs a plan, a backend between kernels as long as no State has been written.
//! The first to look raises; then there is a moment of grace for code that puts things back (`<close>`, a caught error);
//! whatever still runs after that meets an error at every look.

use crate::error::{Error, Kind, Result};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

const GRACE_MS: u64 = 300;

static ASKED: AtomicBool = AtomicBool::new(false);
/// When it was first heard, in milliseconds from some moment, counted from 1; 0 is never.
static HEARD: AtomicU64 = AtomicU64::new(0);

fn now() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_millis() as u64 + 1
}

/// Asks whatever runs to stop soon. Returns whether somebody had asked already.
pub fn ask() -> bool {
    ASKED.swap(true, Ordering::SeqCst)
}

/// Takes the wish back; whether there was one.
pub fn clear() -> bool {
    HEARD.store(0, Ordering::SeqCst);
    ASKED.swap(false, Ordering::SeqCst)
}

pub fn asked() -> bool {
    ASKED.load(Ordering::Relaxed)
}

/// Nobody hears the wish until `resume`: for work that undoes what was interrupted.
pub fn pause() -> bool {
    ASKED.swap(false, Ordering::SeqCst)
}

pub fn resume(asked: bool) {
    if asked {
        ASKED.store(true, Ordering::SeqCst);
    }
}

/// Whether the moment of grace is over and something still runs.
pub fn overdue() -> bool {
    let heard = HEARD.load(Ordering::SeqCst);
    asked() && heard != 0 && now() > heard + GRACE_MS
}

/// An error if somebody has asked and what runs should stop now.
pub fn check() -> Result<()> {
    if !asked() {
        return Ok(());
    }
    let first = HEARD.compare_exchange(0, now(), Ordering::SeqCst, Ordering::SeqCst).is_ok();
    if first || overdue() { Err(Error::new(Kind::Interrupted, "", "interrupted")) } else { Ok(()) }
}
