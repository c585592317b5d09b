//! How a command ends when it does not end well, and the exit status that says so.

use crate::screen;
use perilune_lua::{Failed, RecipeError};

#[derive(Debug)]
pub enum Failure {
    /// Wrong usage: an argument, a `--set`, a file that is not there.
    Usage(String),
    /// The recipe is wrong or raised an error.
    Recipe(Box<RecipeError>),
    /// Device, memory or disk.
    System(String),
    /// A checkpoint that is damaged or does not fit.
    Refused(String),
    /// Said already; only the exit status is left.
    Said(u8),
    /// Ended by a signal, after a clean stop that has been reported already.
    Signal(u8),
}

impl Failure {
    /// The exit status, as DESIGN section 10 lists them.
    pub fn status(&self) -> u8 {
        match self {
            Failure::System(_) => 1,
            Failure::Usage(_) => 2,
            Failure::Recipe(e) if e.system => 1,
            Failure::Recipe(_) => 3,
            Failure::Refused(_) => 4,
            Failure::Signal(status) | Failure::Said(status) => *status,
        }
    }

    /// What a person reads, without the word "error".
    pub fn message(&self) -> String {
        match self {
            Failure::Usage(text) | Failure::System(text) | Failure::Refused(text) => text.clone(),
            Failure::Recipe(e) => e.to_string(),
            Failure::Signal(_) | Failure::Said(_) => String::new(),
        }
    }

    /// Says it on stderr. An error in a recipe begins with its place, so that editors can jump to it.
    pub fn show(&self) {
        match self {
            Failure::Signal(_) | Failure::Said(_) => {}
            Failure::Recipe(e) if e.file.is_some() && e.line.is_some() => screen::complain("", &e.to_string()),
            other => screen::complain("error", &other.message()),
        }
    }
}

impl From<Failed> for Failure {
    fn from(e: Failed) -> Failure {
        match e {
            Failed::Usage(text) => Failure::Usage(text),
            Failed::Recipe(e) => Failure::Recipe(e),
        }
    }
}

/// `cannot create runs/x: permission denied`, with the path.
pub fn disk(what: &str, path: &std::path::Path) -> impl FnOnce(std::io::Error) -> Failure {
    let text = format!("cannot {what} {}", path.display());
    move |e| Failure::System(format!("{text}: {}", plain(&e)))
}

/// An I/O error without Rust's "(os error 13)".
pub fn plain(e: &std::io::Error) -> String {
    let text = e.to_string();
    let text = text.split(" (os error").next().unwrap_or(&text);
    let mut chars = text.chars();
    chars.next().map(|c| c.to_lowercase().chain(chars).collect()).unwrap_or_default()
}
