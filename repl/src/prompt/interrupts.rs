//! Handles Ctrl-C while a line runs. The first interrupts the line; the second prints what it waits for; the third ends the
//! process, for work that cannot be interrupted (one long kernel, a Lua pattern that takes hours).
//!
//! While a line is typed the terminal delivers Ctrl-C as a key, and the editor clears the line.

use crate::console_out;
use crate::failure::{Failure, plain};
use perilune_core::Interrupt;
use signal_hook::consts::SIGINT;
use signal_hook::iterator::Signals;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The installed handler.
pub struct Interrupts {
    /// The interrupt of the line that runs.
    running: Arc<Mutex<Option<Interrupt>>>,
    pressed: Arc<AtomicU32>,
}

fn lock(running: &Mutex<Option<Interrupt>>) -> MutexGuard<'_, Option<Interrupt>> {
    running.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Interrupts {
    /// Installs the handler.
    pub fn install() -> Result<Interrupts, Failure> {
        let out = Interrupts { running: Arc::default(), pressed: Arc::default() };
        let mut signals =
            Signals::new([SIGINT]).map_err(|e| Failure::System(format!("cannot listen for signals: {}", plain(&e))))?;
        let (running, pressed) = (out.running.clone(), out.pressed.clone());
        std::thread::spawn(move || {
            for _ in signals.forever() {
                match &*lock(&running) {
                    Some(interrupt) => interrupt.request(),
                    None => continue,
                };
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

    /// Runs a line that Ctrl-C ends through `interrupt`.
    pub fn during<T>(&self, interrupt: &Interrupt, f: impl FnOnce() -> T) -> T {
        interrupt.clear();
        self.pressed.store(0, Ordering::SeqCst);
        // A line at a breakpoint runs inside another.
        let before = lock(&self.running).replace(interrupt.clone());
        let out = f();
        *lock(&self.running) = before;
        self.pressed.store(0, Ordering::SeqCst);
        interrupt.clear();
        out
    }
}
