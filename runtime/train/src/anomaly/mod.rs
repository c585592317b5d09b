//! Watches a run's loss and gradient norm: detects values that are not finite and spikes, and applies the policy for them.

mod detector;
mod report;

pub(crate) use detector::{Detector, Finding, Limit, MAX_SKIPPED, Policy};
