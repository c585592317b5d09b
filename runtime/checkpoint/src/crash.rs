//! Points of a save at which a test may end the process, as a power cut would: with `PERILUNE_TEST_CRASH=N` the process
//! kills itself at the Nth point passed, with nothing flushed or cleaned up. Without the variable a point is a comparison.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

static AT: OnceLock<Option<u64>> = OnceLock::new();
static PASSED: AtomicU64 = AtomicU64::new(0);

pub(crate) fn point() {
    let at = AT.get_or_init(|| std::env::var("PERILUNE_TEST_CRASH").ok()?.parse().ok());
    if at.is_some_and(|n| PASSED.fetch_add(1, Ordering::SeqCst) + 1 == n) {
        #[cfg(unix)]
        if std::process::Command::new("kill").args(["-9", &std::process::id().to_string()]).status().is_ok() {
            // The signal is on its way; this thread gets no further.
            std::thread::sleep(std::time::Duration::from_secs(60));
        }
        std::process::abort();
    }
}
