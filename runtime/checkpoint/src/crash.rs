//! Kills the process at numbered points of a save, for tests of power failures. With `PERILUNE_TEST_CRASH=N` the process
//! kills itself at the Nth point, without flushing or cleaning up. Without the variable a point costs one comparison.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

static AT: OnceLock<Option<u64>> = OnceLock::new();
static PASSED: AtomicU64 = AtomicU64::new(0);

pub(crate) fn point() {
    let at = AT.get_or_init(|| std::env::var("PERILUNE_TEST_CRASH").ok()?.parse().ok());
    if at.is_some_and(|n| PASSED.fetch_add(1, Ordering::SeqCst) + 1 == n) {
        #[cfg(unix)]
        if std::process::Command::new("kill").args(["-9", &std::process::id().to_string()]).status().is_ok() {
            // The signal may arrive late; this thread must not continue.
            std::thread::sleep(std::time::Duration::from_secs(60));
        }
        std::process::abort();
    }
}
