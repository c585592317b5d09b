//! Collects helpers of the test suite: samples, cases, references, random graphs. The tests are in `tests/tests`.
//!
//! - [`sample`] parses the samples that ops carry, [`case`] fills them with numbers;
//! - [`harness`] runs a case on an engine in a chosen dtype and layout;
//! - [`reference`](mod@reference) reads PyTorch's results (`golden/ops`) and compares with them;
//! - [`machine`] compiles plans for GPUs without having them;
//! - [`known`] remembers what compilations came to;
//! - [`recording`] collects the programs of a run that computes nothing, and [`fingerprint`] and [`ptx`] hash them;
//! - [`outcome`] collects and compares what training comes to;
//! - [`random`] makes random graphs;
//! - [`skip`] reports tests that this machine cannot run;
//! - [`virtual_devices`] runs programs on the CPU devices of a mesh;
//! - [`scripts`] runs Lua files and compares their output with golden texts.
#![allow(clippy::unwrap_used)]

pub mod case;
pub mod fingerprint;
pub mod harness;
pub mod known;
pub mod machine;
pub mod outcome;
pub mod ptx;
pub mod random;
pub mod recording;
pub mod reference;
pub mod rng;
pub mod sample;
pub mod scripts;
pub mod skip;
pub mod virtual_devices;

/// That of the program.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;
