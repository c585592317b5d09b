//! Ctrl-C, SIGTERM and SIGUSR1 (which asks for a checkpoint and to be started again). Handlers only set flags: the first
//! signal of a training run ends it after the step, the second one ends the process at once. Before training, and in plain
//! scripts, the first does. SIGHUP asks a training run to read its recipe again, unless it says that the terminal is gone.

use crate::failure::{Failure, plain};
use crate::hurry;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::flag;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

#[derive(Clone)]
pub struct Signals {
    /// The next signal ends the process.
    at_once: Arc<AtomicBool>,
    seen: Arc<AtomicUsize>,
    reload: Arc<AtomicBool>,
    /// There was a terminal at the start, and its end is to be the run's.
    on_terminal: bool,
}

fn terminal() -> bool {
    std::fs::File::open("/dev/tty").is_ok()
}

/// Whether SIGHUP was to be ignored, as `nohup` asks for.
fn nohup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|l| u64::from_str_radix(l.strip_prefix("SigIgn:")?.trim(), 16).ok());
    mask.is_some_and(|m| m & 1 << (SIGHUP - 1) != 0)
}

/// A signal that asked for the end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Asked {
    pub name: &'static str,
    pub status: u8,
}

impl Signals {
    pub fn install() -> Result<Signals, Failure> {
        let out = Signals {
            at_once: Arc::new(AtomicBool::new(true)),
            seen: Arc::default(),
            reload: Arc::default(),
            on_terminal: terminal() && !nohup(),
        };
        for signal in [SIGINT, SIGTERM, SIGUSR1] {
            // Actions run in the order of registration: look at the flag, then set it.
            flag::register_conditional_shutdown(signal, 128 + signal, out.at_once.clone())
                .and_then(|_| flag::register(signal, out.at_once.clone()))
                .and_then(|_| flag::register_usize(signal, out.seen.clone(), signal as usize))
                .map_err(|e| Failure::System(format!("cannot listen for signals: {}", plain(&e))))?;
        }
        Ok(out)
    }

    /// From now on SIGHUP asks to read the recipe again, instead of ending the process. A version that is being built then
    /// does not keep the other signals waiting.
    pub fn hear_reload(&self) -> Result<(), Failure> {
        let heard = flag::register(SIGHUP, self.reload.clone());
        let others = heard.and_then(|_| signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGUSR1]));
        let mut others = others.map_err(|e| Failure::System(format!("cannot listen for signals: {}", plain(&e))))?;
        std::thread::spawn(move || others.forever().for_each(|_| hurry::stop()));
        Ok(())
    }

    pub fn reload_asked(&self) -> bool {
        let asked = self.reload.swap(false, Ordering::SeqCst);
        if asked && self.on_terminal && !terminal() {
            self.seen.store(SIGHUP as usize, Ordering::SeqCst);
            return false;
        }
        asked
    }

    /// From now on the first signal is a request.
    pub fn soften(&self) {
        self.at_once.store(false, Ordering::SeqCst);
    }

    /// Runs a line that a person typed at a breakpoint: its first Ctrl-C is not one for the run, a second ends the process.
    pub fn set_aside<T>(&self, f: impl FnOnce() -> T) -> T {
        let (at_once, seen) = (self.at_once.swap(false, Ordering::SeqCst), self.seen.load(Ordering::SeqCst));
        let out = f();
        self.seen.store(seen, Ordering::SeqCst);
        self.at_once.store(at_once, Ordering::SeqCst);
        out
    }

    pub fn asked(&self) -> Option<Asked> {
        match self.seen.load(Ordering::SeqCst) as i32 {
            0 => None,
            SIGTERM => Some(Asked { name: "SIGTERM", status: 143 }),
            SIGHUP => Some(Asked { name: "SIGHUP", status: 129 }),
            SIGUSR1 => Some(Asked { name: "SIGUSR1", status: 75 }),
            _ => Some(Asked { name: "SIGINT", status: 130 }),
        }
    }
}
