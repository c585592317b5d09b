//! Stores the interrupt flag that the prompt sets on a signal. Signals belong to the process, so the flag is global.
//!
//! The prompt sets the flag and clears it after the line has ended. Long operations poll it: the Lua hook every few
//! thousand instructions, the engine before it runs a plan, a backend between kernels as long as no State has been
//! written. The first poll raises an error. A grace period of 300 ms follows for code that cleans up (`<close>`, a
//! caught error); after it, every poll raises an error.

use crate::error::{Error, Kind, Result};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

const GRACE_MS: u64 = 300;

static ASKED: AtomicBool = AtomicBool::new(false);
/// When the first poll saw the flag, in milliseconds since an arbitrary start, counted from 1; 0 means never.
static HEARD: AtomicU64 = AtomicU64::new(0);

fn now() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_millis() as u64 + 1
}

/// Requests that the running operation stop soon. Returns whether that had already been requested.
pub fn ask() -> bool {
    ASKED.swap(true, Ordering::SeqCst)
}

/// Clears the request; returns whether there was one.
pub fn clear() -> bool {
    HEARD.store(0, Ordering::SeqCst);
    ASKED.swap(false, Ordering::SeqCst)
}

pub fn asked() -> bool {
    ASKED.load(Ordering::Relaxed)
}

/// Hides the request until `resume`, for work that undoes an interrupted operation.
pub fn pause() -> bool {
    ASKED.swap(false, Ordering::SeqCst)
}

pub fn resume(asked: bool) {
    if asked {
        ASKED.store(true, Ordering::SeqCst);
    }
}

/// Whether the grace period has ended and something still runs.
pub fn overdue() -> bool {
    let heard = HEARD.load(Ordering::SeqCst);
    asked() && heard != 0 && now() > heard + GRACE_MS
}

/// Fails if an interrupt was requested and the caller should stop now.
pub fn check() -> Result<()> {
    if !asked() {
        return Ok(());
    }
    let first = HEARD.compare_exchange(0, now(), Ordering::SeqCst, Ordering::SeqCst).is_ok();
    if first || overdue() { Err(Error::new(Kind::Interrupted, "", "interrupted")) } else { Ok(()) }
}
