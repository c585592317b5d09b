//! Reads and writes data: file formats to and from [`perilune_core::HostTensor`], and the order of samples.
//!
//! Readers take files from strangers. Each checks what a header claims against what the file can hold before it
//! allocates, and says what is wrong with file, place and rule. Writers are atomic. The order of samples is a set of
//! pure functions of (seed, index): nothing here keeps a position that a checkpoint would have to save.
//!
//! Not here: the graph, devices, Lua, and anything that fetches from a network.
#![forbid(unsafe_code)]

pub mod csv;
mod csv_records;
pub mod error;
pub mod file;
pub mod gather;
mod gzip_text;
pub mod image;
pub mod images;
pub mod npy;
pub mod npz;
pub mod safetensors;
pub mod sample_order;
pub mod shards;
pub mod split;
pub mod text;
pub mod tokens;

pub use error::{Error, Result};
