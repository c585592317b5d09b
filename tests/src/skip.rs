//! Reports tests that this machine cannot run, as `skipped: TEST: REASON`.
//!
//! Tests of crates below the testkit include this file by its path, so it has no dependencies.

use std::io::Write;

/// Reports that the running test ends here without a result. The line bypasses the test runner's capture, which
/// hides the output of passing tests.
pub fn skipped(reason: &str) {
    let thread = std::thread::current();
    let _ = writeln!(std::io::stderr(), "skipped: {}: {reason}", thread.name().unwrap_or("a test"));
}

/// Reports that NVRTC is missing, and panics if `PERILUNE_TEST_NVRTC` requires it, as in CI.
#[allow(dead_code)] // not every includer compiles kernels
pub fn no_nvrtc() {
    assert!(std::env::var_os("PERILUNE_TEST_NVRTC").is_none(), "no libnvrtc, which PERILUNE_TEST_NVRTC requires");
    skipped("no libnvrtc (set LD_LIBRARY_PATH)");
}
