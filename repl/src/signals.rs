//! Ctrl-C, SIGTERM and SIGUSR1 (which asks for a checkpoint and to be started again). Handlers only set flags: the first signal of a training run ends it after the step, the second one
//! ends the process at once. Before training, and in plain scripts, the first does.

use crate::failure::{Failure, plain};
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::flag;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

#[derive(Clone)]
pub struct Signals {
    /// The next signal ends the process.
    at_once: Arc<AtomicBool>,
    seen: Arc<AtomicUsize>,
    reload: Arc<AtomicBool>,
}

/// A signal that asked for the end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Asked {
    pub name: &'static str,
    pub status: u8,
}

impl Signals {
    pub fn install() -> Result<Signals, Failure> {
        let out = Signals { at_once: Arc::new(AtomicBool::new(true)), seen: Arc::default(), reload: Arc::default() };
        for signal in [SIGINT, SIGTERM, SIGUSR1] {
            // Actions run in the order of registration: look at the flag, then set it.
            flag::register_conditional_shutdown(signal, 128 + signal, out.at_once.clone())
                .and_then(|_| flag::register(signal, out.at_once.clone()))
                .and_then(|_| flag::register_usize(signal, out.seen.clone(), signal as usize))
                .map_err(|e| Failure::System(format!("cannot listen for signals: {}", plain(&e))))?;
        }
        Ok(out)
    }

    /// From now on SIGHUP asks to read the recipe again, instead of ending the process.
    pub fn hear_reload(&self) -> Result<(), Failure> {
        let heard = flag::register(signal_hook::consts::SIGHUP, self.reload.clone());
        heard.map(|_| ()).map_err(|e| Failure::System(format!("cannot listen for signals: {}", plain(&e))))
    }

    pub fn reload_asked(&self) -> bool {
        self.reload.swap(false, Ordering::SeqCst)
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
            SIGUSR1 => Some(Asked { name: "SIGUSR1", status: 75 }),
            _ => Some(Asked { name: "SIGINT", status: 130 }),
        }
    }
}
