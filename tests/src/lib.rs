//! Helpers of the test-suite: samples, cases, references, random graphs. The tests themselves stand in `tests/tests`.
//!
//! - [`sample`] parses the samples that ops carry, [`case`] fills them with numbers;
//! - [`harness`] runs a case on an engine in a chosen dtype and layout;
//! - [`reference`](mod@reference) reads what PyTorch said (`golden/ops`), and compares;
//! - [`machine`] compiles plans for GPUs that are not there;
//! - [`recording`] collects the programs of a run that computes nothing, [`fingerprint`] and [`ptx`] make hashes of them;
//! - [`random`] makes random graphs;
//! - [`skip`] reports tests that this machine cannot run;
//! - [`scripts`] runs Lua files and compares what they say with golden texts.
#![allow(clippy::unwrap_used)]

pub mod case;
pub mod fingerprint;
pub mod harness;
pub mod machine;
pub mod ptx;
pub mod random;
pub mod recording;
pub mod reference;
pub mod rng;
pub mod sample;
pub mod scripts;
pub mod skip;
