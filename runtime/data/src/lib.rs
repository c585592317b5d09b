//! Reads and writes data: file formats to and from [`perilune_core::HostTensor`], and the order of samples.
//!
//! Input files are untrusted. Every reader checks the claims of a header against the size of the file before it
//! allocates, and reports errors with file, position and rule. Writers are atomic. The order of samples is a set of
//! pure functions of (seed, index), so a checkpoint stores no position of it.
//!
//! Not included: the graph, devices, Lua, and downloads.

pub mod cache;
pub mod csv;
mod csv_lines;
mod csv_records;
pub mod error;
mod expansion;
pub mod file;
pub mod gather;
mod gzip_text;
pub mod idx;
pub mod image;
pub mod images;
pub mod npy;
pub mod npz;
mod open_files;
pub mod records;
pub mod safetensors;
pub mod sample_log;
pub mod sample_order;
pub mod shards;
pub mod source;
pub mod split;
pub mod text;
pub mod tokens;
pub mod wav;

pub use error::{Error, Result};
