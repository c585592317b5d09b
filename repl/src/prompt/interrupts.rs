//! Handles Ctrl-C while a line runs. The first interrupts the line. If the line does not end within a second, a note explains that the
//! next one ends the process, for work that cannot be interrupted (one long kernel). Presses within that second count once.
//!
//! While a line is typed the terminal delivers Ctrl-C as a key, and the editor clears the line.

use crate::console_out;
use crate::failure::{Failure, plain};
use perilune_core::interrupt;
use signal_hook::consts::SIGINT;
use signal_hook::iterator::Signals;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The time that an interrupt may take before another press ends the process.
const PATIENCE: Duration = Duration::from_secs(1);

/// The installed handler.
pub struct Interrupts {
    /// Whether a line is running.
    busy: Arc<AtomicBool>,
    pressed: Arc<AtomicU32>,
    /// The number of the line, to which a delayed note belongs.
    line: Arc<AtomicU32>,
}

impl Interrupts {
    /// Installs the handler.
    pub fn install() -> Result<Interrupts, Failure> {
        let failed = |e| Failure::System(format!("cannot listen for signals: {}", plain(&e)));
        let out = Interrupts { busy: Arc::default(), pressed: Arc::default(), line: Arc::default() };
        let mut signals = Signals::new([SIGINT]).map_err(failed)?;
        let (busy, pressed, line) = (out.busy.clone(), out.pressed.clone(), out.line.clone());
        let work = move || {
            let mut first = Instant::now();
            for _ in signals.forever() {
                if !busy.load(Ordering::SeqCst) {
                    continue;
                }
                interrupt::ask();
                if pressed.fetch_add(1, Ordering::SeqCst) == 0 {
                    first = Instant::now();
                    let (busy, line) = (busy.clone(), line.clone());
                    note_later(busy, line);
                } else if first.elapsed() >= PATIENCE {
                    std::process::exit(130);
                }
            }
        };
        std::thread::Builder::new().name("interrupts".into()).spawn(work).map_err(failed)?;
        Ok(out)
    }

    /// Runs a line that Ctrl-C interrupts.
    pub fn during<T>(&self, f: impl FnOnce() -> T) -> T {
        interrupt::clear();
        self.pressed.store(0, Ordering::SeqCst);
        self.line.fetch_add(1, Ordering::SeqCst);
        // A line at a breakpoint runs inside another.
        let before = self.busy.swap(true, Ordering::SeqCst);
        let out = f();
        self.busy.store(before, Ordering::SeqCst);
        self.pressed.store(0, Ordering::SeqCst);
        interrupt::clear();
        out
    }
}

/// Prints a note if the line still runs after the time for an interrupt.
fn note_later(busy: Arc<AtomicBool>, line: Arc<AtomicU32>) {
    let number = line.load(Ordering::SeqCst);
    let wait = move || {
        std::thread::sleep(PATIENCE);
        if busy.load(Ordering::SeqCst) && line.load(Ordering::SeqCst) == number && interrupt::asked() {
            console_out::complain("", "waiting for the end of the running kernel; Ctrl-C once more ends perilune");
        }
    };
    // If no thread can be created there is no note, but the next press still ends the process.
    let _ = std::thread::Builder::new().name("interrupt note".into()).spawn(wait);
}
