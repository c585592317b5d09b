//! `:plot`.

use crate::failure::Failure;
use perilune_lua::Console;

pub fn plot(_console: &Console, _text: &str, _color: bool) -> Result<String, Failure> {
    Err(Failure::Usage(":plot is not in this version yet".into()))
}
