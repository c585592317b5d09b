//! Ctrl-C while a line runs. The first asks the line to stop; the second says what it waits for; the third ends perilune, for
//! the rare thing that cannot be interrupted (one long kernel, a pattern that Lua matches for hours).
//!
//! While a line is typed the terminal gives Ctrl-C as a key, and the editor clears the line.

use crate::failure::{Failure, plain};
use crate::screen;
use perilune_core::interrupt;
use signal_hook::consts::SIGINT;
use signal_hook::iterator::Signals;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

pub struct Interrupts {
    /// A line runs.
    busy: Arc<AtomicBool>,
    pressed: Arc<AtomicU32>,
}

impl Interrupts {
    pub fn install() -> Result<Interrupts, Failure> {
        let out = Interrupts { busy: Arc::default(), pressed: Arc::default() };
        let mut signals =
            Signals::new([SIGINT]).map_err(|e| Failure::System(format!("cannot listen for signals: {}", plain(&e))))?;
        let (busy, pressed) = (out.busy.clone(), out.pressed.clone());
        std::thread::spawn(move || {
            for _ in signals.forever() {
                if !busy.load(Ordering::SeqCst) {
                    continue;
                }
                interrupt::ask();
                match pressed.fetch_add(1, Ordering::SeqCst) {
                    0 => {}
                    1 => screen::complain(
                        "",
                        "waiting for the end of the running kernel; Ctrl-C once more ends perilune",
                    ),
                    _ => std::process::exit(130),
                }
            }
        });
        Ok(out)
    }

    /// Runs a line.
    pub fn during<T>(&self, f: impl FnOnce() -> T) -> T {
        interrupt::clear();
        self.pressed.store(0, Ordering::SeqCst);
        // A breakpoint's line runs inside another.
        let before = self.busy.swap(true, Ordering::SeqCst);
        let out = f();
        self.busy.store(before, Ordering::SeqCst);
        self.pressed.store(0, Ordering::SeqCst);
        interrupt::clear();
        out
    }
}
