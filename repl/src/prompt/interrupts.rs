//! Handles Ctrl-C while a line runs. The first interrupts the line; the second prints what the line waits for; the third ends the
//! process, for work that cannot be interrupted (one long kernel, a Lua pattern that takes hours).
//!
//! While a line is typed the terminal delivers Ctrl-C as a key, and the editor clears the line.

use crate::console_out;
use crate::failure::{Failure, plain};
use perilune_core::interrupt;
use signal_hook::consts::SIGINT;
use signal_hook::iterator::Signals;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// The installed handler.
pub struct Interrupts {
    /// Whether a line is running.
    busy: Arc<AtomicBool>,
    pressed: Arc<AtomicU32>,
}

impl Interrupts {
    /// Installs the handler.
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
                    1 => console_out::complain(
                        "",
                        "waiting for the end of the running kernel; Ctrl-C once more ends perilune",
                    ),
                    _ => std::process::exit(130),
                }
            }
        });
        Ok(out)
    }

    /// Runs a line that Ctrl-C interrupts.
    pub fn during<T>(&self, f: impl FnOnce() -> T) -> T {
        interrupt::clear();
        self.pressed.store(0, Ordering::SeqCst);
        // A line at a breakpoint runs inside another.
        let before = self.busy.swap(true, Ordering::SeqCst);
        let out = f();
        self.busy.store(before, Ordering::SeqCst);
        self.pressed.store(0, Ordering::SeqCst);
        interrupt::clear();
        out
    }
}
