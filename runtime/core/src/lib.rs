//! Provides the device-neutral core of Perilune: shapes, dtypes, the graph that a recipe records, the op registry and
//! autograd.
//!
//! This crate allocates no tensor memory and depends on no device. A recipe's calls become nodes of a [`graph::Graph`];
//! `plan` turns graphs into launches, and the backends run them.
#![forbid(unsafe_code)]

pub mod amp;
pub mod byte_size;
pub mod cache_folder;
pub mod dtype;
pub mod env_flags;
pub mod error;
pub mod foreign_panic;
pub mod grad;
pub mod graph;
pub mod host_memory;
pub mod host_tensor;
pub mod id_map;
pub mod interrupt;
pub mod kernel_limits;
pub mod mesh;
pub mod modes;
pub mod op;
pub mod ops;
pub mod philox;
pub mod placement;
pub mod shape;
pub mod sharding;
pub mod source_loc;

pub use dtype::{Category, DType};
pub use error::{Error, Kind, Result};
pub use graph::{Graph, NodeId, Number};
pub use host_tensor::HostTensor;
pub use interrupt::Interrupt;
pub use kernel_limits::KernelLimits;
pub use mesh::{Mesh, Placement};
pub use shape::{Layout, MAX_RANK, Shape};
