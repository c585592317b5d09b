//! Writes and reads checkpoints: the state of a run after a step, as files from which another process continues.
//!
//! ```text
//! checkpoints/step-N/model.safetensors        the weights, for any reader of the format; large ones in shards with an index
//!                    optimizer.safetensors    every other State by path name
//!                    run.json                 step, cursor, random numbers, params …, the hash of each file and its own
//! ```
//!
//! A checkpoint contains data, never code. It is written to a hidden directory, flushed to the disk and renamed. After a crash
//! at any instant it is complete or absent, and earlier checkpoints are unchanged; a checkpoint that it replaces is valid
//! until the rename. Writer and reader work beneath the handle of a directory and follow no link, so a directory that is
//! replaced by a link redirects nothing. The reader trusts no file: it checks the BLAKE3 hash and the rules of the format
//! before it uses a byte.

#![deny(unsafe_code)]

mod crash;
mod read;
mod saver;
pub mod seal;
mod write;

pub use perilune_data::safetensors::check_name;
pub use perilune_data::shards::LIMIT as SHARD_LIMIT;
pub use read::{Found, about, is_checkpoint_name, list, list_in, read, read_in};
pub use saver::{Keep, Saver};
pub use write::write;

use perilune_core::HostTensor;
use serde_json::{Map, Value};
use std::path::PathBuf;

/// The directory of a run's checkpoints, in its run directory.
pub const CHECKPOINTS: &str = "checkpoints";
/// File names, without `.safetensors`, of the weights and of all other States.
pub const MODEL: &str = "model";
pub const OPTIMIZER: &str = "optimizer";
pub const RECORD: &str = "run.json";
/// Version of the layout, `schema` in `run.json`; from 2 on the record has a hash of itself.
pub const SCHEMA: u64 = 2;

/// The complete state of a run after a step.
#[derive(Clone, PartialEq, Debug)]
pub struct Snapshot {
    pub step: u64,
    /// Weights by path.
    pub model: Vec<(String, HostTensor)>,
    /// Every other State by path: moments, averages, the loss scale.
    pub optimizer: Vec<(String, HostTensor)>,
    /// The fields of `run.json` besides `schema`, `step` and `files`.
    pub record: Map<String, Value>,
}

/// The source of a snapshot, evaluated on the thread that writes it and dropped when the checkpoint is on the disk.
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
    /// The checkpoint is invalid: `field` of the file at `path` breaks `rule`.
    #[error("{path}: {field}: {rule}")]
    Broken { path: PathBuf, field: String, rule: String },
    /// The States could not be downloaded from the device.
    #[error("the checkpoint of step {step} was not written: {source}")]
    Device { step: u64, source: perilune_core::Error },
    #[error(transparent)]
    Data(#[from] perilune_data::Error),
    /// The thread that writes checkpoints has ended.
    #[error("the checkpoint of step {0} was not written: its thread ended")]
    Lost(u64),
}

/// What opening a file of a checkpoint found: a link or special file breaks the rules of one.
impl From<perilune_policy::Error> for Error {
    fn from(error: perilune_policy::Error) -> Error {
        match error {
            perilune_policy::Error::Io { path, action, source } => Error::Io { path, action, source },
            perilune_policy::Error::NotDirectory { ref path, .. } => {
                Error::Broken { path: path.clone(), field: "directory".into(), rule: error.rule() }
            }
            other => Error::Broken { path: other.path().to_path_buf(), field: "file".into(), rule: other.rule() },
        }
    }
}

fn io(path: &std::path::Path, action: &'static str) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_path_buf();
    move |source| Error::Io { path, action, source }
}
