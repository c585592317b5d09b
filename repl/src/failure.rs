//! Defines how a command fails, and the exit status for it.

use crate::console_out;
use perilune_lua::{Cause, Failed, RecipeError};
pub use perilune_train::{disk, plain};

#[derive(Debug)]
pub enum Failure {
    /// Wrong usage: an argument, a `--set`, a missing file.
    Usage(String),
    /// The recipe is wrong or raised an error.
    Recipe(Box<RecipeError>),
    /// Device, memory or disk.
    System(String),
    /// A checkpoint that is damaged or does not fit, or a grant that is missing.
    Refused(String),
    /// Already reported; carries only the exit status.
    Said(u8),
    /// Ended by a signal, after a clean stop that has been reported.
    Signal(u8),
}

impl Failure {
    /// Returns the exit status.
    pub fn status(&self) -> u8 {
        match self {
            Failure::System(_) => 1,
            Failure::Usage(_) => 2,
            Failure::Recipe(e) if matches!(e.cause, Cause::System | Cause::Internal) => 1,
            Failure::Recipe(e) if e.cause == Cause::Refused => 4,
            Failure::Recipe(_) => 3,
            Failure::Refused(_) => 4,
            Failure::Signal(status) | Failure::Said(status) => *status,
        }
    }

    /// Returns the message, without the word "error".
    pub fn message(&self) -> String {
        match self {
            Failure::Usage(text) | Failure::System(text) | Failure::Refused(text) => text.clone(),
            Failure::Recipe(e) => e.to_string(),
            Failure::Signal(_) | Failure::Said(_) => String::new(),
        }
    }

    /// Prints the failure on stderr. An error in a recipe begins with its file and line, which editors recognise; on a terminal the word
    /// "error" is in front of it.
    pub fn show(&self) {
        match self {
            Failure::Signal(_) | Failure::Said(_) => {}
            Failure::Recipe(e) if e.file.is_some() && e.line.is_some() => console_out::complain_at(&e.to_string()),
            other => console_out::complain("error", &other.message()),
        }
    }
}

impl From<perilune_train::Error> for Failure {
    fn from(e: perilune_train::Error) -> Failure {
        use perilune_train::Error;
        match e {
            Error::Usage(text) => Failure::Usage(text),
            Error::Recipe(e) => Failure::Recipe(e),
            Error::System(text) => Failure::System(text),
            Error::Refused(text) => Failure::Refused(text),
        }
    }
}

impl From<Failed> for Failure {
    fn from(e: Failed) -> Failure {
        perilune_train::Error::from(e).into()
    }
}

impl From<perilune_checkpoint::Error> for Failure {
    fn from(e: perilune_checkpoint::Error) -> Failure {
        perilune_train::Error::from(e).into()
    }
}
