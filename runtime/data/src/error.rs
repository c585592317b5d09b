//! Defines the error type of `data`: file, value, rule, and a hint if a cure is known.
//!
//! Callers match on the variant, never on text. Names and cells from a file are escaped and truncated,
//! so a hostile file cannot write to the terminal. The recipe's line is added by the Lua layer.

use std::fmt;
use std::path::{Path, PathBuf};

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    // The file system.
    #[error("{path}: cannot {action}: {source}{hint}")]
    Io { path: PathBuf, action: &'static str, source: std::io::Error, hint: Hint },

    /// The boundary of the command: the path may not be read or written.
    #[error("{0}")]
    Denied(perilune_policy::Error),

    // Contents of files.
    /// The file violates its format. `place` is a field, a tensor or a member.
    #[error("{path}: {place}: {rule}{hint}")]
    Malformed { path: PathBuf, place: String, rule: String, hint: Hint },
    /// Valid, but not supported by this crate (a dtype, a compression method).
    #[error("{path}: {place}: {rule}{hint}")]
    Unsupported { path: PathBuf, place: String, rule: String, hint: Hint },
    /// Above a stated limit.
    #[error("{path}: {what} is {found}, and the limit is {limit}{hint}")]
    TooLarge { path: PathBuf, what: String, found: u64, limit: u64, hint: Hint },
    /// A cell or a line of a text file. Lines count from 1, as in an editor; columns from 0, as in `columns = {0, 64}`.
    #[error("{path}:{line}: {place}{rule}{hint}")]
    Line { path: PathBuf, line: u64, place: String, rule: String, hint: Hint },

    /// A function of the recipe failed for a record, which `place` names: "train.jsonl:12".
    #[error("{place}{rule}{hint}")]
    Function { place: String, rule: String, hint: Hint },

    /// The run was interrupted while it waited.
    #[error("interrupted")]
    Interrupted,

    // Requests of the caller.
    /// A column, name or dtype that this file or tensor lacks.
    #[error("{subject}: {rule}{hint}")]
    Argument { subject: String, rule: String, hint: Hint },
}

/// A cure, printed on a separate line; empty if none is known.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Hint(pub Option<String>);

impl fmt::Display for Hint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(hint) => write!(f, "\n  hint: {hint}"),
            None => Ok(()),
        }
    }
}

impl Error {
    pub fn io(path: &Path, action: &'static str, source: std::io::Error) -> Error {
        let error = Error::Io { path: path.to_path_buf(), action, hint: Hint::default(), source };
        match &error {
            Error::Io { source, .. } if source.kind() == std::io::ErrorKind::UnexpectedEof => {
                error.hint("the file is shorter than it says: copy or download it again")
            }
            _ => error,
        }
    }

    pub fn malformed(path: &Path, place: impl Into<String>, rule: impl Into<String>) -> Error {
        let (place, rule) = (place.into(), rule.into());
        Error::Malformed { path: path.to_path_buf(), place, rule, hint: Hint::default() }
    }

    pub fn unsupported(path: &Path, place: impl Into<String>, rule: impl Into<String>) -> Error {
        let (place, rule) = (place.into(), rule.into());
        Error::Unsupported { path: path.to_path_buf(), place, rule, hint: Hint::default() }
    }

    pub fn too_large(path: &Path, what: impl Into<String>, found: u64, limit: u64) -> Error {
        Error::TooLarge { path: path.to_path_buf(), what: what.into(), found, limit, hint: Hint::default() }
    }

    pub fn line(path: &Path, line: u64, place: impl Into<String>, rule: impl Into<String>) -> Error {
        let (place, rule) = (place.into(), rule.into());
        Error::Line { path: path.to_path_buf(), line, place, rule, hint: Hint::default() }
    }

    pub fn argument(subject: impl Into<String>, rule: impl Into<String>) -> Error {
        Error::Argument { subject: subject.into(), rule: rule.into(), hint: Hint::default() }
    }

    /// The error of a function for a record, whose stage adds its origin.
    pub fn function(rule: impl Into<String>) -> Error {
        Error::Function { place: String::new(), rule: rule.into(), hint: Hint::default() }
    }

    /// Names the record of a function's error, unless a stage before has.
    pub(crate) fn of_record(mut self, origin: &str) -> Error {
        if let Error::Function { place, .. } = &mut self
            && place.is_empty()
        {
            *place = format!("{origin}: ");
        }
        self
    }

    #[must_use]
    pub fn hint(mut self, text: impl Into<String>) -> Error {
        let (Error::Io { hint, .. }
        | Error::Malformed { hint, .. }
        | Error::Unsupported { hint, .. }
        | Error::TooLarge { hint, .. }
        | Error::Line { hint, .. }
        | Error::Function { hint, .. }
        | Error::Argument { hint, .. }) = &mut self
        else {
            // A denial has its own cure.
            return self;
        };
        hint.0 = Some(text.into());
        self
    }
}

impl From<perilune_policy::Error> for Error {
    fn from(error: perilune_policy::Error) -> Error {
        match error {
            perilune_policy::Error::Io { path, action, source } => Error::io(&path, action, source),
            perilune_policy::Error::NotRegular { ref path, .. } => Error::unsupported(path, "path", error.rule()),
            other => Error::Denied(other),
        }
    }
}

/// Converts to the error type of `core` for higher layers. The hint becomes part of the message.
impl From<Error> for perilune_core::Error {
    fn from(error: Error) -> perilune_core::Error {
        match error {
            Error::Interrupted => perilune_core::Error::new(perilune_core::Kind::Interrupted, "", error.to_string()),
            Error::Io { .. } => perilune_core::Error::system("", error.to_string()),
            _ => perilune_core::Error::argument("", error.to_string()),
        }
    }
}

/// Formats text from a file for display: quoted, escaped, at most 60 characters.
pub fn quote(text: &str) -> String {
    let mut out = String::from("'");
    for (i, c) in text.chars().enumerate() {
        if i == 60 {
            out.push('…');
            break;
        }
        match c {
            '\'' | '"' => out.push(c),
            _ => out.extend(c.escape_debug()),
        }
    }
    out.push('\'');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_carry_place_rule_and_cure() {
        let e = Error::line(Path::new("a.csv"), 7, "column 2: ", "'x' is not a number").hint("drop it");
        assert_eq!(e.to_string(), "a.csv:7: column 2: 'x' is not a number\n  hint: drop it");
        assert_eq!(perilune_core::Error::from(e).kind, perilune_core::Kind::Argument);
    }

    #[test]
    fn quoted_text_is_harmless() {
        assert_eq!(quote("a\x1b[2J\n"), "'a\\u{1b}[2J\\n'");
        assert_eq!(quote(&"x".repeat(1000)).chars().count(), 63);
    }
}
