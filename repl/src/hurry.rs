//! A version that takes for ever to load or to build, or does not end at all: a newer save ends the attempt, and so does a
//! signal that asks the run to stop.

use perilune_core::interrupt;
use perilune_lua::{Failed, Runtime};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A save this long after the beginning is a newer one, and not a late word of the one that is being tried.
const NEWER: Duration = Duration::from_secs(1);

/// When the attempt of now began. The flag that it is asked to end by is one of the process, too.
static SINCE: Mutex<Option<Instant>> = Mutex::new(None);

fn set(since: Option<Instant>) {
    *SINCE.lock().unwrap_or_else(PoisonError::into_inner) = since;
}

fn ask_after(wait: Duration) {
    let since = SINCE.lock().unwrap_or_else(PoisonError::into_inner);
    if since.is_some_and(|t| t.elapsed() >= wait) {
        interrupt::ask();
    }
}

/// A file of the recipe was saved.
pub fn saved() {
    ask_after(NEWER);
}

/// The run is to stop.
pub fn stop() {
    ask_after(Duration::ZERO);
}

/// Does what may be asked to end.
pub fn during<T>(runtime: &Runtime, f: impl FnOnce() -> T) -> Result<T, Failed> {
    interrupt::clear();
    set(Some(Instant::now()));
    let out = runtime.interruptible(f);
    set(None);
    interrupt::clear();
    out
}
