//! From a recorded graph to a program of kernels, device-neutral: no device, no Lua.
//!
//! The way of a step: [`trace`] walks what is wanted and writes the canonical key; [`cache`] looks the key up; on a miss
//! [`lower`] expands fused ops and resolves views, [`channels`] turns images channels last where the device wants that, [`outputs`] lays out what kept ops write, [`fuse`] groups primitives, [`build`] makes registers, order and
//! in-place updates, [`group`] gathers like kernels into one launch and hangs maps on products, [`memory`] lays out the arena, [`check`] proves the grammar, and a [`backend`] compiles the result.
#![forbid(unsafe_code)]

pub mod align;
pub mod backend;
pub mod budget;
pub mod build;
pub mod cache;
pub mod channels;
pub mod check;
pub mod fuse;
pub mod group;
pub mod ir;
pub mod lower;
pub mod memory;
pub mod outline;
pub mod outputs;
pub mod remat;
pub mod show;
pub mod trace;

pub use backend::{
    Backend, Buffer, DeviceBuffer, Executable, Failure, Memory, Null, NullWith, Probe, Readings, Snapshot,
};
pub use cache::{Cache, Options, Plan, Sketch};
pub use outline::Outline;
pub use trace::{Guard, Request, Tracer};
