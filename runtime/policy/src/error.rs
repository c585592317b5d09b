//! Defines the error of a refused or failed open: the path, the violated rule and a hint.
//!
//! Crates that use the policy convert it to their own error types; the Lua layer adds the recipe's line.

use std::fmt;
use std::path::{Path, PathBuf};

pub type Result<T> = std::result::Result<T, Error>;

/// What a path is opened for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    Read,
    Write,
}

impl Access {
    /// The command-line flag that adds a root.
    pub fn flag(self) -> &'static str {
        match self {
            Access::Read => "--allow-read",
            Access::Write => "--allow-write",
        }
    }

    fn verb(self) -> &'static str {
        match self {
            Access::Read => "read",
            Access::Write => "written",
        }
    }
}

#[derive(Debug)]
pub enum Error {
    /// The operating system's answer.
    Io { path: PathBuf, action: &'static str, source: std::io::Error },
    /// No root holds the path. `left`: a link of it, or `..`, leads out of the root that holds its name.
    /// `params`: a param that names the file would grant it too.
    Denied { path: PathBuf, access: Access, left: bool, directory: PathBuf, params: bool },
    /// A directory, FIFO, device, socket or link where a regular file is needed.
    NotRegular { path: PathBuf, found: &'static str },
    /// A link, file or device where a directory is needed.
    NotDirectory { path: PathBuf, found: &'static str },
    /// A file that must not be written for its name.
    Name { path: PathBuf, rule: String },
    /// An address without a file. `refused`: its host is not granted.
    Fetch { address: PathBuf, message: String, hint: Option<String>, refused: bool },
}

impl Error {
    pub(crate) fn io(path: &Path, action: &'static str, source: impl Into<std::io::Error>) -> Error {
        Error::Io { path: path.to_path_buf(), action, source: source.into() }
    }

    /// The path that was asked for, as it was written.
    pub fn path(&self) -> &Path {
        match self {
            Error::Io { path, .. }
            | Error::Denied { path, .. }
            | Error::NotRegular { path, .. }
            | Error::NotDirectory { path, .. }
            | Error::Name { path, .. } => path,
            Error::Fetch { address, .. } => address,
        }
    }

    /// Whether a grant is missing, and nothing else.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Error::Denied { .. } | Error::Fetch { refused: true, .. })
    }

    /// Whether there is nothing of that name.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Error::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound)
    }

    /// Whether something has the name of what was to be created.
    pub fn is_already_there(&self) -> bool {
        matches!(self, Error::Io { source, .. } if source.kind() == std::io::ErrorKind::AlreadyExists)
    }

    /// Whether a root's boundary was reached: a link or `..` leads out of it.
    pub(crate) fn leaves(&self) -> bool {
        matches!(self, Error::Io { source, .. } if source.raw_os_error() == Some(rustix::io::Errno::XDEV.raw_os_error()))
    }

    /// The rule that is broken, without path and cure.
    pub fn rule(&self) -> String {
        match self {
            Error::Io { action, source, .. } => format!("cannot {action}: {source}"),
            Error::Denied { access, left: true, .. } => {
                format!("leads out of the directories that may be {}", access.verb())
            }
            Error::Denied { access, .. } => format!("is not in a directory that may be {}", access.verb()),
            Error::NotRegular { found, .. } => format!("is {found}; a regular file is needed"),
            Error::NotDirectory { found, .. } => format!("is {found}; a directory is needed"),
            Error::Name { rule, .. } => rule.clone(),
            Error::Fetch { message, .. } => message.clone(),
        }
    }

    /// What would allow it or mend it, where that is known.
    pub fn cure(&self) -> Option<String> {
        match self {
            Error::Denied { access: Access::Read, directory, .. } => {
                Some(format!("allow it on the command line: --allow-read={}", directory.display()))
            }
            Error::Denied { access: Access::Write, directory, params, .. } => {
                let param = if *params { ", or a param that names the file, as in --set out=FILE" } else { "" };
                Some(format!("allow it on the command line: --allow-write={}{param}", directory.display()))
            }
            Error::Fetch { hint, .. } => hint.clone(),
            _ => None,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Io { path, .. } => write!(f, "{}: {}", path.display(), self.rule())?,
            Error::Fetch { message, .. } => f.write_str(message)?,
            _ => write!(f, "{} {}", path_of(self.path()), self.rule())?,
        }
        match self.cure() {
            Some(cure) => write!(f, "\n  hint: {cure}"),
            None => Ok(()),
        }
    }
}

fn path_of(path: &Path) -> String {
    format!("{:?}", path.display().to_string())
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}
