//! Defines the error type of a training run, and turns I/O errors into it.

use perilune_lua::{Cause, Failed, RecipeError};
use std::fmt;

/// Classifies a failed run by what has to change before it can succeed.
#[derive(Debug)]
pub enum Error {
    /// An option, a param or a path that the caller gave.
    Usage(String),
    /// The recipe is wrong or raised an error.
    Recipe(Box<RecipeError>),
    /// Device, memory or disk.
    System(String),
    /// A checkpoint or record that is damaged or does not fit.
    Refused(String),
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Returns the cause of an error that came out of Lua.
    pub fn cause(&self) -> Option<Cause> {
        match self {
            Error::Recipe(e) => Some(e.cause),
            _ => None,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Usage(text) | Error::System(text) | Error::Refused(text) => f.write_str(text),
            Error::Recipe(e) => e.fmt(f),
        }
    }
}

impl std::error::Error for Error {}

impl From<Failed> for Error {
    fn from(e: Failed) -> Error {
        match e {
            Failed::Usage(text) => Error::Usage(text),
            Failed::Recipe(e) => Error::Recipe(e),
        }
    }
}

impl From<perilune_checkpoint::Error> for Error {
    fn from(e: perilune_checkpoint::Error) -> Error {
        use perilune_checkpoint::Error as Checkpoint;
        match &e {
            Checkpoint::Broken { .. } => Error::Refused(e.to_string()),
            Checkpoint::Data(perilune_data::Error::Io { .. } | perilune_data::Error::Denied(_))
            | Checkpoint::Io { .. }
            | Checkpoint::Device { .. }
            | Checkpoint::Lost(_) => Error::System(e.to_string()),
            Checkpoint::Data(_) => Error::Refused(e.to_string()),
        }
    }
}

/// What the handle of a run directory answered: a link or special file in it is refused.
impl From<perilune_policy::Error> for Error {
    fn from(error: perilune_policy::Error) -> Error {
        use perilune_policy::Error as Policy;
        let shown = error.path().display().to_string();
        match error {
            Policy::Io { path, action, source } => disk(action, &path)(source),
            Policy::NotDirectory { .. } => Error::Refused(format!("{shown}: folder: {}", error.rule())),
            _ => Error::Refused(format!("{shown}: file: {}", error.rule())),
        }
    }
}

/// Converts an I/O error on a path, as in `cannot create runs/x: permission denied`.
pub fn disk(what: &str, path: &std::path::Path) -> impl FnOnce(std::io::Error) -> Error {
    let text = format!("cannot {what} {}", path.display());
    move |e| Error::System(format!("{text}: {}", plain(&e)))
}

/// Formats an I/O error without Rust's `(os error 13)`.
pub fn plain(e: &std::io::Error) -> String {
    let text = e.to_string();
    let text = text.split(" (os error").next().unwrap_or(&text);
    let mut chars = text.chars();
    chars.next().map(|c| c.to_lowercase().chain(chars).collect()).unwrap_or_default()
}
