//! A version that takes for ever: to load, to build, or in one of its first steps. A newer save ends the attempt, and so
//! does a signal that asks the run to stop.

use crate::failure::Failure;
use perilune_core::interrupt;
use perilune_lua::{Failed, RecipeError, Runtime};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A save this long after a build began is a newer one, and not a late word of the version that is being built.
const NEWER: Duration = Duration::from_secs(1);

/// What `perilune_core::interrupt` raises.
const INTERRUPTED: &str = "interrupted";

/// What may be asked to end.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Nothing is lost with it: it ends at the first wish.
    Build,
    /// A step or an evaluation, which gets this long even if somebody waits.
    Step(Duration),
}

/// The work of now. The flag that it is asked to end by is one of the process, too.
struct Current {
    number: u64,
    work: Option<(Work, Instant)>,
}

static CURRENT: Mutex<Current> = Mutex::new(Current { number: 0, work: None });

fn current() -> MutexGuard<'static, Current> {
    CURRENT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Asks this work to end once its time is over, if it has not ended by then.
fn ask_after(number: u64, left: Duration) {
    let ask = move || {
        std::thread::sleep(left);
        let now = current();
        if now.number == number && now.work.is_some() {
            interrupt::ask();
        }
    };
    // Without a thread to wait in it is asked by the next save or signal.
    let _ = std::thread::Builder::new().name("hurry".into()).spawn(ask);
}

fn wish(newer: Duration) {
    let now = current();
    match now.work {
        Some((Work::Build, since)) if since.elapsed() >= newer => drop(interrupt::ask()),
        Some((Work::Step(time), since)) => ask_after(now.number, time.saturating_sub(since.elapsed())),
        _ => {}
    }
}

/// A file of the recipe was saved.
pub fn saved() {
    wish(NEWER);
}

/// The run is to stop.
pub fn stop() {
    wish(Duration::ZERO);
}

/// Does what may be asked to end, or has been already.
pub fn during<T>(runtime: &Runtime, work: Work, wished: bool, f: impl FnOnce() -> T) -> Result<T, Failed> {
    interrupt::clear();
    {
        let mut now = current();
        now.number += 1;
        now.work = Some((work, Instant::now()));
    }
    if wished {
        wish(Duration::ZERO);
    }
    let out = runtime.interruptible(f);
    current().work = None;
    interrupt::clear();
    out
}

/// Whether this is how something ends that was asked to.
pub fn ended(failure: &Failure) -> bool {
    matches!(failure, Failure::Recipe(e) if e.message == INTERRUPTED)
}

/// What was asked to end says what it was; any other failure is as it was.
pub fn explain(failure: Failure, was: &str) -> Failure {
    match failure {
        Failure::Recipe(e) if e.message == INTERRUPTED => {
            let message =
                format!("this version was still {was} when a newer one was saved, or the run was asked to stop");
            let hint = Some("look for a loop that does not end".to_string());
            Failure::Recipe(Box::new(RecipeError::at(&e.file.unwrap_or_default(), e.line, message, hint)))
        }
        other => other,
    }
}
