//! `perilune stubs`: prints type stubs for lua-language-server.

use crate::console_out;
use crate::failure::Failure;

/// Prints the stubs in LuaCATS notation.
pub fn stubs() -> Result<(), Failure> {
    console_out::say(&perilune_lua::stubs())
}
