//! Finds the folder of the user's configuration: trusted keys, and grants that are remembered.

use std::path::PathBuf;

/// `perilune` in `XDG_CONFIG_HOME`, or else in `~/.config`. A relative path counts as none (XDG Base Directory Specification 0.8).
pub fn config_folder() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    Some(set("XDG_CONFIG_HOME").or_else(|| Some(set("HOME")?.join(".config")))?.join("perilune"))
}
