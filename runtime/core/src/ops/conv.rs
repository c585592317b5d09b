//! To be written.

use super::Op;

pub static OPS: &[&Op] = &[];
