//! Writes and reads checkpoints: the state of a run after a step, as files from which another process continues.
//!
//! ```text
//! checkpoints/step-N/model.safetensors        the weights, for any reader of the format; large ones in shards with an index
//!                    optimizer.safetensors    every other State by path name
//!                    run.json                 step, cursor, random numbers, params …, the hash of each file and its own
//! ```
//!
//! Data, never code. A checkpoint is written to a hidden directory beside its place, flushed to the disk and renamed: after
//! a crash at any instant it is whole or not there, and the ones before it are untouched; one that it replaces counts until then. Reading trusts nothing: the
//! files are opened beneath the handle of their directory without following a link, and every file is checked against its BLAKE3 hash and its format's rules before a byte of it is used.

#![deny(unsafe_code)]

mod crash;
mod read;
mod saver;
mod write;

pub use perilune_data::shards::LIMIT as SHARD_LIMIT;
pub use read::{Found, about, list, read};
pub use saver::{Keep, Saver};
pub use write::write;

use perilune_core::HostTensor;
use serde_json::{Map, Value};
use std::path::PathBuf;

/// What the files of weights, and those of all other States, are called before `.safetensors`.
pub const MODEL: &str = "model";
pub const OPTIMIZER: &str = "optimizer";
pub const RECORD: &str = "run.json";
/// Version of the layout, `schema` in `run.json`; from 2 on the record has a hash of itself.
pub const SCHEMA: u64 = 2;

/// All that a run is after a step.
#[derive(Clone, PartialEq, Debug)]
pub struct Snapshot {
    pub step: u64,
    /// Weights by path.
    pub model: Vec<(String, HostTensor)>,
    /// Every other State by path: moments, averages, the loss scale.
    pub optimizer: Vec<(String, HostTensor)>,
    /// What `run.json` says besides `schema`, `step` and `files`.
    pub record: Map<String, Value>,
}

/// What becomes a snapshot on the thread that writes it. It is dropped when all is on the disk.
pub trait Source: Send + 'static {
    fn snapshot(&mut self) -> Result<Snapshot>;
}

impl Source for Snapshot {
    fn snapshot(&mut self) -> Result<Snapshot> {
        let empty = Snapshot { step: self.step, model: Vec::new(), optimizer: Vec::new(), record: Map::new() };
        Ok(std::mem::replace(self, empty))
    }
}

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path}: cannot {action}: {source}")]
    Io { path: PathBuf, action: &'static str, source: std::io::Error },
    /// Not what a checkpoint must be: `field` of the file at `path` breaks `rule`.
    #[error("{path}: {field}: {rule}")]
    Broken { path: PathBuf, field: String, rule: String },
    /// The States did not come off the device.
    #[error("the checkpoint of step {step} was not written: {source}")]
    Device { step: u64, source: perilune_core::Error },
    #[error(transparent)]
    Data(#[from] perilune_data::Error),
    /// The thread that writes checkpoints is gone.
    #[error("the checkpoint of step {0} was not written: its thread ended")]
    Lost(u64),
}

/// What opening a file of a checkpoint found: a link or special file breaks the rules of one.
impl From<perilune_policy::Error> for Error {
    fn from(error: perilune_policy::Error) -> Error {
        match error {
            perilune_policy::Error::Io { path, action, source } => Error::Io { path, action, source },
            other => Error::Broken { path: other.path().to_path_buf(), field: "file".into(), rule: other.rule() },
        }
    }
}

fn io(path: &std::path::Path, action: &'static str) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_path_buf();
    move |source| Error::Io { path, action, source }
}
