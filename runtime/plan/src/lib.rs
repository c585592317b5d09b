//! Compiles a recorded graph to a device-neutral program of kernels. It depends on no device and not on Lua.
//!
//! A step passes through the modules in this order: [`reachability`] marks the nodes that a [`request`] needs; [`key`]
//! writes the plan key; [`cache`] looks it up. On a miss, [`pipeline`] runs the graph rewrites of [`passes`], each from
//! one [`lowered`] step to the next; [`fuse`] groups primitives into clusters and [`recompute`] decides what is stored;
//! [`program_builder`] makes kernels of the clusters; [`epilogue`] fuses maps onto products; [`kernel_order`] orders
//! the kernels and merges similar ones into one launch by the rules of [`horizontal_fusion`]; [`lanes`] lets collectives run
//! beside them, [`late_products`] products beside the last of those, and
//! [`gathered_updates`] updates beside gatherings; [`memory`] assigns addresses; [`check`] verifies the grammar of [`ir`]; and a [`backend`] compiles the result.
//! [`agreement`] describes a planned step so that several processes can compare theirs.
#![forbid(unsafe_code)]

pub mod agreement;
pub mod backend;
mod buffer_desc;
pub mod cache;
pub mod check;
pub mod cluster;
pub mod epilogue;
pub mod estimate;
pub mod fingerprint;
pub mod fuse;
mod gathered_updates;
pub mod horizontal_fusion;
mod index_checks;
pub mod ir;
pub mod kernel_order;
pub mod key;
pub mod lanes;
mod late_products;
pub mod lowered;
pub mod memory;
mod message_slots;
pub mod null;
pub mod passes;
pub mod pipeline;
pub mod pipelining;
pub mod predict;
pub mod program_builder;
pub mod reachability;
pub mod reading;
pub mod recompute;
pub mod request;
pub mod route;
pub mod show;
mod transfers;
mod unplanned;
mod view_table;

pub use backend::{
    Backend, Buffer, DeviceBuffer, Executable, Failure, Memory, Peers, Probe, Readings, RunContext, Snapshot, Ticket,
};
pub use buffer_desc::BufferDesc;
pub use cache::{Cache, Plan, PlannedStep};
pub use fingerprint::Fingerprint;
pub use key::Tracer;
pub use message_slots::MessageSlots;
pub use null::{Null, NullWith};
pub use passes::shard::{check_strict_shards, shard_devices};
pub use pipeline::Options;
pub use pipelining::Schedule;
pub use request::{Guard, InputBuffer, KeyExchange, Request};
pub use transfers::{Transfer, exchanges, transfers};
