//! Carries stop, reload and cancellation requests from other threads to one run.
//!
//! A stop ends the run after the current step, with a checkpoint. A reload makes the loop look for a new version of the
//! recipe. Both are flags that the loop polls at step boundaries. Cancellation reaches work that has no step boundary: a
//! version that is being built, or one of its first steps, which may never end. A newer save or a stop request cancels it,
//! through the interrupt of the runtime that does the work; Lua and the backends check it.

use crate::error::Error;
use perilune_core::Interrupt;
use perilune_lua::{Cause, Failed, RecipeError, Runtime};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A save this long after a build began is a newer one, and not a late event of the version that is being built.
const NEWER: Duration = Duration::from_secs(1);

/// Requests to one run. Clones share their state; any thread may use one.
#[derive(Clone, Default)]
pub struct Control {
    stop: Arc<AtomicUsize>,
    reload: Arc<AtomicBool>,
    current: Arc<Mutex<Current>>,
}

/// Selects when running work may be cancelled.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// Building a version changes nothing: it is cancelled at the first request.
    Build,
    /// A step or an evaluation, which runs for at least this long.
    Step(Duration),
}

/// The work that runs now. The number tells a delayed cancellation whether its work is still the current one.
#[derive(Default)]
struct Current {
    number: u64,
    work: Option<Running>,
}

/// Running work: its kind, its start, and its interrupt.
struct Running {
    work: Work,
    since: Instant,
    interrupt: Interrupt,
}

impl Control {
    /// Ends the run after the current step, and cancels a build. `code` must not be 0; [`crate::End::Stopped`] returns it.
    pub fn stop(&self, code: usize) {
        self.stop.store(code, Ordering::SeqCst);
        self.cancel();
    }

    /// Makes the loop look for a new version of the recipe at the next step boundary.
    pub fn reload(&self) {
        self.reload.store(true, Ordering::SeqCst);
    }

    /// The stop request: 0, or its code. A signal handler may store to it; [`Control::cancel`] then has to be called from
    /// a thread.
    pub fn stop_flag(&self) -> Arc<AtomicUsize> {
        self.stop.clone()
    }

    /// Cancels what the run is building, or a step that exceeds its time.
    pub fn cancel(&self) {
        self.request(Duration::ZERO);
    }

    /// Returns the code of a stop request.
    pub fn stop_requested(&self) -> Option<usize> {
        Some(self.stop.load(Ordering::SeqCst)).filter(|code| *code != 0)
    }

    pub(crate) fn take_reload(&self) -> bool {
        self.reload.swap(false, Ordering::SeqCst)
    }

    /// Cancels a build that a newly saved file makes obsolete.
    pub(crate) fn file_saved(&self) {
        self.request(NEWER);
    }

    /// Cancels work that has run for `age`: a build at once, a step when its time is over.
    fn request(&self, age: Duration) {
        let now = self.current();
        let Some(Running { work, since, interrupt }) = &now.work else { return };
        match work {
            Work::Build if since.elapsed() >= age => drop(interrupt.request()),
            Work::Build => {}
            Work::Step(time) => self.cancel_after(now.number, time.saturating_sub(since.elapsed())),
        }
    }

    /// Cancels work number `number` after `left`, unless it has ended by then.
    fn cancel_after(&self, number: u64, left: Duration) {
        let control = self.clone();
        let wait = move || {
            std::thread::sleep(left);
            let now = control.current();
            if let Some(running) = now.work.as_ref().filter(|_| now.number == number) {
                running.interrupt.request();
            }
        };
        // If no thread can be created, the next save or stop request cancels it.
        let _ = std::thread::Builder::new().name("cancel".into()).spawn(wait);
    }

    /// Runs cancellable work. `requested`: a request came before it began.
    pub(crate) fn run<T>(
        &self,
        runtime: &Runtime,
        work: Work,
        requested: bool,
        f: impl FnOnce() -> T,
    ) -> Result<T, Failed> {
        let interrupt = runtime.host().interrupt.clone();
        interrupt.clear();
        {
            let mut now = self.current();
            now.number += 1;
            now.work = Some(Running { work, since: Instant::now(), interrupt: interrupt.clone() });
        }
        if requested {
            self.cancel();
        }
        let out = runtime.interruptible(f);
        self.current().work = None;
        interrupt.clear();
        out
    }

    fn current(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the error is a cancellation.
pub(crate) fn cancelled(error: &Error) -> bool {
    error.cause() == Some(Cause::Interrupted)
}

/// Rewrites a cancellation into a message with its subject and its reason; returns any other error unchanged.
pub(crate) fn explain(error: Error, was: &str) -> Error {
    match error {
        Error::Recipe(e) if e.cause == Cause::Interrupted => {
            let message = format!("this version was still {was} when a newer one was saved or a stop was requested");
            let hint = Some("look for a loop that does not end".to_string());
            Error::Recipe(Box::new(RecipeError::at(&e.file.unwrap_or_default(), e.line, message, hint)))
        }
        other => other,
    }
}
