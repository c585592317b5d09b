//! Ends work that runs: a handle that any thread may set, and that long work checks between its parts.
//!
//! Each run has a handle of its own. The Lua hook checks it every few thousand instructions, the engine before it runs a plan, a
//! backend between kernels as long as no State has been written. The first check after a request raises; then there is a grace for
//! code that restores things (`<close>`, a caught error); every check after the grace raises.
//!
//! A part of a run that has a time limit of its own, such as the function of a record, has a child: [`Interrupt::child`].

use crate::error::{Error, Kind, Result};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

const GRACE_MS: u64 = 300;

/// The interrupt of one run. Clones share their state; any thread may use one.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<Flags>);

#[derive(Debug, Default)]
struct Flags {
    requested: AtomicBool,
    /// When a check first saw the request, in milliseconds counted from 1; 0 is never.
    seen: AtomicU64,
    /// The end of the time limit, in the same milliseconds; 0 without one.
    due: AtomicU64,
    parent: Option<Interrupt>,
}

/// Milliseconds since the first call, counted from 1.
fn now() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_millis() as u64 + 1
}

impl Interrupt {
    /// Requests the end of what runs. Returns whether a request was pending already.
    pub fn request(&self) -> bool {
        self.0.requested.swap(true, Ordering::SeqCst)
    }

    /// Returns an interrupt with a request and a time limit of its own, which a request of this one ends too.
    pub fn child(&self) -> Interrupt {
        Interrupt(Arc::new(Flags { parent: Some(self.clone()), ..Flags::default() }))
    }

    /// Begins a part of the work: it forgets what was seen, and requests the end after `limit`.
    pub fn begin(&self, limit: Duration) {
        self.0.seen.store(0, Ordering::SeqCst);
        let limit = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX).max(1);
        self.0.due.store(now().saturating_add(limit), Ordering::SeqCst);
    }

    /// Lifts the time limit.
    pub fn end(&self) {
        self.0.due.store(0, Ordering::SeqCst);
        self.0.seen.store(0, Ordering::SeqCst);
    }

    /// Whether the time limit of [`Interrupt::begin`] is over.
    pub fn is_late(&self) -> bool {
        let due = self.0.due.load(Ordering::Relaxed);
        due != 0 && now() > due
    }

    /// Withdraws the request. Returns whether there was one.
    pub fn clear(&self) -> bool {
        self.0.seen.store(0, Ordering::SeqCst);
        self.0.requested.swap(false, Ordering::SeqCst)
    }

    /// Whether a request is pending, here or at the parent, or the time limit is over.
    pub fn is_requested(&self) -> bool {
        self.0.requested.load(Ordering::Relaxed)
            || self.0.parent.as_ref().is_some_and(Interrupt::is_requested)
            || self.is_late()
    }

    /// Sets a pending request aside until the guard is dropped, for work that undoes what was interrupted.
    pub fn set_aside(&self) -> SetAside {
        SetAside { requested: self.0.requested.swap(false, Ordering::SeqCst), interrupt: self.clone() }
    }

    /// Whether the grace is over and something still runs.
    pub fn is_overdue(&self) -> bool {
        let seen = self.0.seen.load(Ordering::SeqCst);
        self.is_requested() && seen != 0 && now() > seen + GRACE_MS
    }

    /// Returns an error if a request is pending and what runs should stop now.
    pub fn check(&self) -> Result<()> {
        if !self.is_requested() {
            return Ok(());
        }
        let first = self.0.seen.compare_exchange(0, now(), Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if first || self.is_overdue() { Err(Error::new(Kind::Interrupted, "", "interrupted")) } else { Ok(()) }
    }
}

/// Restores a request that was set aside, on drop.
#[derive(Debug)]
pub struct SetAside {
    interrupt: Interrupt,
    requested: bool,
}

impl Drop for SetAside {
    fn drop(&mut self) {
        if self.requested {
            self.interrupt.0.requested.store(true, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_first_check_raises_and_then_those_after_the_grace() {
        let (one, other) = (Interrupt::default(), Interrupt::default());
        assert!(!one.request() && one.clone().request());
        assert!(one.check().is_err());
        assert!(one.check().is_ok() && !one.is_overdue());
        std::thread::sleep(Duration::from_millis(GRACE_MS + 20));
        assert!(one.check().is_err() && one.check().is_err());
        assert!(other.check().is_ok() && !other.is_requested());
        assert!(one.clear() && one.check().is_ok() && !one.clear());
    }

    #[test]
    fn a_child_ends_with_its_parent_and_at_its_limit() {
        let parent = Interrupt::default();
        let child = parent.child();
        child.begin(Duration::from_secs(600));
        assert!(child.check().is_ok() && !child.is_late());
        parent.request();
        assert!(child.is_requested() && child.check().is_err() && !child.is_late());
        parent.clear();
        assert!(child.check().is_ok());
        child.begin(Duration::ZERO);
        std::thread::sleep(Duration::from_millis(5));
        assert!(child.is_late() && child.check().is_err() && parent.check().is_ok());
        child.end();
        assert!(child.check().is_ok() && !child.is_late());
        child.request();
        assert!(child.check().is_err() && !parent.is_requested());
    }

    #[test]
    fn a_request_that_was_set_aside_comes_back() {
        let interrupt = Interrupt::default();
        interrupt.request();
        {
            let _undoing = interrupt.set_aside();
            assert!(interrupt.check().is_ok());
        }
        assert!(interrupt.check().is_err());
        interrupt.clear();
        drop(interrupt.set_aside());
        assert!(interrupt.check().is_ok());
    }
}
