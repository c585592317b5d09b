//! The device-neutral heart of Perilune: shapes, dtypes, the graph a recipe records, the op registry and autograd.
//!
//! Nothing here allocates a tensor's bytes or knows a device. A recipe's calls become nodes of a [`graph::Graph`];
//! `plan` turns graphs into launches, the backends run them.
#![forbid(unsafe_code)]

pub mod amp;
pub mod bytes;
pub mod dtype;
pub mod error;
pub mod grad;
pub mod graph;
pub mod host;
pub mod interrupt;
pub mod ops;
pub mod philox;
pub mod scalar;
pub mod shape;
pub mod site;
pub mod switch;

pub use dtype::{Category, DType};
pub use error::{Error, Kind, Result};
pub use graph::{Graph, NodeId, Number};
pub use host::HostTensor;
pub use shape::{Layout, MAX_RANK, Shape};
