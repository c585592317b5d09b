//! Finds the folder in which the program keeps what it can make again: compiled kernels, the text of compressed files.

use std::path::PathBuf;

/// Another cache that is read and never written, `$PERILUNE_SHARED_CACHE`: that of the user, for a confined process whose own cache is a
/// temporary one.
pub fn shared_cache() -> Option<PathBuf> {
    std::env::var_os("PERILUNE_SHARED_CACHE").filter(|v| !v.is_empty()).map(PathBuf::from)
}

/// `$PERILUNE_CACHE`, or `perilune` in the user's cache directory.
pub fn cache_folder() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let home = || set("HOME").map(|h| h.join(".cache"));
    set("PERILUNE_CACHE").or_else(|| set("XDG_CACHE_HOME").or_else(home).map(|d| d.join("perilune")))
}
