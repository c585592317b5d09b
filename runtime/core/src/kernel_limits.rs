//! Defines the limits of kernels whose source is in a recipe, for all devices that a process opens.

use crate::error::Error;
use std::sync::OnceLock;
use std::time::Duration;

/// The limits of a recipe's kernels.
#[derive(Clone, Copy, Debug, Default)]
pub struct KernelLimits {
    /// Whether every access to memory is checked.
    pub check: bool,
    /// The time that one launch may take.
    pub time: Option<Duration>,
    /// Reports a launch that cannot be ended otherwise than by ending the process, and returns the exit status.
    pub expired: Option<fn(&Error) -> u8>,
}

/// The exit status of a process that a kernel held up beyond its limit, unless `expired` returns another one.
pub const EXPIRED_STATUS: u8 = 123;

static LIMITS: OnceLock<KernelLimits> = OnceLock::new();

/// Sets the limits of this process. The first call counts; it comes before a device is opened.
pub fn set(limits: KernelLimits) {
    let _ = LIMITS.set(limits);
}

/// Returns the limits of this process: none, unless they were set.
pub fn get() -> KernelLimits {
    LIMITS.get().copied().unwrap_or_default()
}
