//! Connects the signals of the process to a run.
//!
//! SIGINT, SIGTERM and SIGUSR1 (which requests a checkpoint and a restart) stop the run; the handlers only set flags. The first
//! signal of a training run ends it after the step, which a note says at once; the second one ends the process immediately.
//! Before training, and in plain scripts, the first one does. SIGHUP makes a training run reload its recipe, unless the terminal
//! has been closed.

use crate::console_out::Notifier;
use crate::failure::Failure;
use perilune_train::{Control, plain};
use serde_json::json;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::flag;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The handlers of one run.
#[derive(Clone)]
pub struct Signals {
    control: Control,
    /// Whether the next signal ends the process.
    at_once: Arc<AtomicBool>,
    /// Whether a signal is a stop request that has not been answered yet, and is announced.
    announced: Arc<AtomicBool>,
    /// Whether there was a terminal at the start; closing it ends the run.
    on_terminal: bool,
}

fn terminal() -> bool {
    std::fs::File::open("/dev/tty").is_ok()
}

/// Whether SIGHUP was ignored at the start, as `nohup` does.
pub fn nohup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|l| u64::from_str_radix(l.strip_prefix("SigIgn:")?.trim(), 16).ok());
    mask.is_some_and(|m| m & 1 << (SIGHUP - 1) != 0)
}

fn cannot_listen(e: std::io::Error) -> Failure {
    Failure::System(format!("cannot listen for signals: {}", plain(&e)))
}

/// Returns the name of the signal with the code of a stop.
pub fn name(code: usize) -> &'static str {
    match code as i32 {
        SIGTERM => "SIGTERM",
        SIGHUP => "SIGHUP",
        SIGUSR1 => "SIGUSR1",
        _ => "SIGINT",
    }
}

/// Returns the exit status after a stop by a signal; 75 requests a restart.
pub fn exit_status(code: usize) -> u8 {
    match code as i32 {
        SIGTERM => 143,
        SIGHUP => 129,
        SIGUSR1 => 75,
        _ => 130,
    }
}

/// Says what the first signal of a training run does.
fn announce(signal: i32, notifier: &Notifier) {
    let again = if signal == SIGINT { "Ctrl-C again stops at once" } else { "a second signal stops at once" };
    let name = name(signal as usize);
    let text = format!("{name}: stopping after this step; a checkpoint will be written; {again}");
    notifier.note(&text, &json!({ "event": "stopping", "signal": name, "message": text }));
}

impl Signals {
    /// Installs handlers that end the process at the first signal.
    pub fn install(control: &Control) -> Result<Signals, Failure> {
        let out = Signals {
            control: control.clone(),
            at_once: Arc::new(AtomicBool::new(true)),
            announced: Arc::default(),
            on_terminal: terminal() && !nohup(),
        };
        crate::confined::child::note(&[SIGINT, SIGTERM, SIGUSR1]).map_err(cannot_listen)?;
        for signal in [SIGINT, SIGTERM, SIGUSR1] {
            // Actions run in the order of registration: test the flag, then set it.
            flag::register_conditional_shutdown(signal, 128 + signal, out.at_once.clone())
                .and_then(|_| flag::register(signal, out.at_once.clone()))
                .and_then(|_| flag::register_usize(signal, control.stop_flag(), signal as usize))
                .map_err(cannot_listen)?;
        }
        Ok(out)
    }

    /// Makes the first signal from now on a stop request, and SIGHUP a reload request. A thread says what the signal does, and
    /// passes it on to work that has no step boundary.
    pub fn begin_training(&self, notifier: Notifier) -> Result<(), Failure> {
        self.at_once.store(false, Ordering::SeqCst);
        self.announced.store(true, Ordering::SeqCst);
        let all = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGUSR1, SIGHUP]);
        let mut all = all.map_err(cannot_listen)?;
        crate::confined::child::note(&[SIGHUP]).map_err(cannot_listen)?;
        let (control, on_terminal, announced) = (self.control.clone(), self.on_terminal, self.announced.clone());
        let pass_on = move || {
            for signal in all.forever() {
                match signal {
                    SIGHUP if on_terminal && !terminal() => control.stop(SIGHUP as usize),
                    SIGHUP => control.reload(),
                    _ => {
                        if announced.swap(false, Ordering::SeqCst) {
                            announce(signal, &notifier);
                        }
                        control.cancel();
                    }
                }
            }
        };
        std::thread::Builder::new().name("signals".into()).spawn(pass_on).map_err(cannot_listen)?;
        Ok(())
    }

    /// Ends the announcements: the run has stopped.
    pub fn stopped(&self) {
        self.announced.store(false, Ordering::SeqCst);
    }

    /// Runs a line typed at a breakpoint. Its first Ctrl-C does not stop the run; a second one ends the process.
    pub fn set_aside<T>(&self, f: impl FnOnce() -> T) -> T {
        let stop = self.control.stop_flag();
        let (at_once, seen) = (self.at_once.swap(false, Ordering::SeqCst), stop.load(Ordering::SeqCst));
        let announced = self.announced.swap(false, Ordering::SeqCst);
        let out = f();
        self.announced.store(announced, Ordering::SeqCst);
        stop.store(seen, Ordering::SeqCst);
        self.at_once.store(at_once, Ordering::SeqCst);
        out
    }
}
