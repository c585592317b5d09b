//! Reports tests that this machine cannot run, as `skipped: TEST: REASON`.
//!
//! Tests below the testkit include this file by its path: it depends on nothing.

use std::io::Write;

/// Reports that the running test ends here without a verdict. The line is written past the test runner's capture, which
/// swallows what a passing test prints.
pub fn skipped(reason: &str) {
    let thread = std::thread::current();
    let _ = writeln!(std::io::stderr(), "skipped: {}: {reason}", thread.name().unwrap_or("a test"));
}

/// Reports that NVRTC is missing; panics where `PERILUNE_TEST_NVRTC` asks for it, as CI does.
#[allow(dead_code)] // not every includer compiles kernels
pub fn no_nvrtc() {
    assert!(std::env::var_os("PERILUNE_TEST_NVRTC").is_none(), "no libnvrtc, which PERILUNE_TEST_NVRTC asks for");
    skipped("no libnvrtc (set LD_LIBRARY_PATH)");
}
