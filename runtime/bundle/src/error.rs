//! Defines the errors of bundle files.

use std::path::{Path, PathBuf};

/// Why a bundle cannot be written, read or trusted.
#[derive(thiserror::Error, Debug)]
pub enum Error {
    /// A file of this machine cannot be read or written.
    #[error("cannot {action} {path}: {source}", path = path.display())]
    Io { action: &'static str, path: PathBuf, source: std::io::Error },
    /// The bundle is damaged, malformed, or not what its manifest or signature says.
    #[error("{0}")]
    Refused(String),
    /// What was asked for cannot be packed or signed.
    #[error("{0}")]
    Usage(String),
}

pub type Result<T> = std::result::Result<T, Error>;

/// Returns a closure for `map_err` that names the file.
pub(crate) fn io(action: &'static str, path: &Path) -> impl Fn(std::io::Error) -> Error {
    let path = path.to_path_buf();
    move |source| Error::Io { action, path: path.clone(), source }
}

/// Returns the error of a bundle that breaks a rule.
pub(crate) fn refused<T>(rule: impl Into<String>) -> Result<T> {
    Err(Error::Refused(rule.into()))
}

/// Bytes of a rule that repeats text of a bundle.
const LONGEST: usize = 400;

/// Cuts a text that a bundle may have made long.
pub(crate) fn cut(text: &str) -> String {
    let end = (0..=LONGEST.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    if end == text.len() { text.into() } else { format!("{}… ({} bytes)", &text[..end], text.len()) }
}
