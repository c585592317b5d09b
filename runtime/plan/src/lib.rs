//! Compiles a recorded graph to a device-neutral program of kernels. It knows no device and no Lua.
//!
//! A step passes through the modules in this order: [`trace`] collects the reachable nodes and writes the plan key;
//! [`cache`] looks the key up. On a miss, [`lower`] runs the graph rewrites of [`passes`], decomposes fused ops and
//! resolves views; [`output_layout`] chooses how library ops store their results; [`fuse`] groups primitives into
//! clusters; [`program_builder`] makes kernels of them, orders them and finds in-place updates; [`horizontal_fusion`]
//! merges like kernels into one launch; [`memory`] assigns addresses; [`check`] verifies the grammar of [`ir`]; and a
//! [`backend`] compiles the result.
#![forbid(unsafe_code)]

pub mod backend;
pub mod cache;
pub mod check;
pub mod fingerprint;
pub mod fuse;
pub mod horizontal_fusion;
pub mod ir;
pub mod lower;
pub mod memory;
pub mod output_layout;
pub mod passes;
pub mod program_builder;
pub mod show;
pub mod trace;

pub use backend::{
    Backend, Buffer, DeviceBuffer, Executable, Failure, Memory, Null, NullWith, Probe, Readings, Snapshot,
};
pub use cache::{Cache, Options, Plan, PlannedStep};
pub use fingerprint::Fingerprint;
pub use trace::{Guard, Request, Tracer};
