//! `perilune completions`: prints a completion script for a shell.

use crate::console_out;
use crate::failure::Failure;

/// Prints the script that completes `command` in `shell`.
pub fn completions(shell: clap_complete::Shell, command: &mut clap::Command) -> Result<(), Failure> {
    let mut text = Vec::new();
    clap_complete::generate(shell, command, "perilune", &mut text);
    console_out::say(&String::from_utf8_lossy(&text))
}
