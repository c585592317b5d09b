//! Handles Ctrl-C while a line runs. The first interrupts the line. If the line does not end within a second, a note explains
//! that the next one ends the process, for work that cannot be interrupted (one long kernel). Presses within that second count
//! once.
//!
//! While a line is typed the terminal delivers Ctrl-C as a key, and the editor clears the line.

use crate::console_out;
use crate::failure::{Failure, plain};
use perilune_core::Interrupt;
use signal_hook::consts::SIGINT;
use signal_hook::iterator::Signals;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The time that an interrupt may take before another press ends the process.
const PATIENCE: Duration = Duration::from_secs(1);

/// The installed handler.
pub struct Interrupts {
    /// The interrupt of the line that runs.
    running: Arc<Mutex<Option<Interrupt>>>,
    pressed: Arc<AtomicU32>,
    /// The number of the line, to which a delayed note belongs.
    line: Arc<AtomicU32>,
}

fn lock(running: &Mutex<Option<Interrupt>>) -> MutexGuard<'_, Option<Interrupt>> {
    running.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Interrupts {
    /// Installs the handler.
    pub fn install() -> Result<Interrupts, Failure> {
        let failed = |e| Failure::System(format!("cannot listen for signals: {}", plain(&e)));
        let out = Interrupts { running: Arc::default(), pressed: Arc::default(), line: Arc::default() };
        let mut signals = Signals::new([SIGINT]).map_err(failed)?;
        crate::confined::child::note(&[SIGINT]).map_err(failed)?;
        let (running, pressed, line) = (out.running.clone(), out.pressed.clone(), out.line.clone());
        let work = move || {
            let mut first = Instant::now();
            for _ in signals.forever() {
                let Some(interrupt) = lock(&running).clone() else { continue };
                interrupt.request();
                if pressed.fetch_add(1, Ordering::SeqCst) == 0 {
                    first = Instant::now();
                    note_later(interrupt, line.clone());
                } else if first.elapsed() >= PATIENCE {
                    std::process::exit(130);
                }
            }
        };
        std::thread::Builder::new().name("interrupts".into()).spawn(work).map_err(failed)?;
        Ok(out)
    }

    /// Runs a line that Ctrl-C ends through `interrupt`.
    pub fn during<T>(&self, interrupt: &Interrupt, f: impl FnOnce() -> T) -> T {
        interrupt.clear();
        self.pressed.store(0, Ordering::SeqCst);
        self.line.fetch_add(1, Ordering::SeqCst);
        // A line at a breakpoint runs inside another.
        let before = lock(&self.running).replace(interrupt.clone());
        let out = f();
        *lock(&self.running) = before;
        self.pressed.store(0, Ordering::SeqCst);
        interrupt.clear();
        out
    }
}

/// Prints a note if the line still runs after the time for an interrupt.
fn note_later(interrupt: Interrupt, line: Arc<AtomicU32>) {
    let number = line.load(Ordering::SeqCst);
    let wait = move || {
        std::thread::sleep(PATIENCE);
        // The end of a line withdraws the request.
        if line.load(Ordering::SeqCst) == number && interrupt.is_requested() {
            console_out::complain("", "waiting for the end of the running kernel; Ctrl-C once more ends perilune");
        }
    };
    // If no thread can be created there is no note, but the next press still ends the process.
    let _ = std::thread::Builder::new().name("interrupt note".into()).spawn(wait);
}
