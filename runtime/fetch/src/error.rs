//! Defines the error of a fetch: what failed, the hint, and the host that a grant would have to name.

use serde::{Deserialize, Serialize};
use std::fmt;

pub type Result<T> = std::result::Result<T, Error>;

/// A failed fetch. It crosses from the fetching process to the one that asked.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Error {
    pub message: String,
    pub hint: Option<String>,
    /// The host that is not granted, if that is the reason.
    pub host: Option<String>,
    /// Whether another attempt may succeed.
    #[serde(skip)]
    pub(crate) transient: bool,
}

impl Error {
    pub fn new(message: impl Into<String>) -> Error {
        Error { message: message.into(), hint: None, host: None, transient: false }
    }

    #[must_use]
    pub fn hint(self, hint: impl Into<String>) -> Error {
        Error { hint: Some(hint.into()), ..self }
    }

    pub(crate) fn transient(message: impl Into<String>) -> Error {
        Error { transient: true, ..Error::new(message) }
    }

    /// The error of a file operation in the cache. A full disk has its own hint.
    pub(crate) fn disk(action: &str, path: &std::path::Path, e: &std::io::Error) -> Error {
        let error = Error::new(format!("cannot {action} {}: {e}", path.display()));
        match e.kind() {
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
                error.hint("free space, or set PERILUNE_CACHE to a folder of a larger disk; the download continues where it stopped")
            }
            _ => error,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.hint {
            Some(hint) => write!(f, "\n  hint: {hint}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {}
