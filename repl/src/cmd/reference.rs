//! `perilune reference`: prints the reference of all tensor operations.

use crate::console_out;
use crate::failure::Failure;

/// Prints the reference as Markdown.
pub fn reference() -> Result<(), Failure> {
    console_out::say(&perilune_lua::reference_markdown())
}
