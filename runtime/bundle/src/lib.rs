//! Packs a run or a recipe into one file, `NAME.plb`, that a stranger can verify, inspect and repeat.
//!
//! A bundle is a tar file in Zstandard (`archive.rs`), followed by checks that locate damage (`checks.rs`). Its first entry is the
//! [`Manifest`]: all other entries with their hashes, the command that it repeats, the data that it needs, and what it asks for.
//! [`pack()`] writes one, [`Bundle`] verifies, reads and unpacks one, [`sign`] signs and checks signatures of minisign.
//!
//! `tar --zstd -tf NAME.plb` lists a bundle without Perilune.
//!
//! Not here: what a run directory has (`runtime/train`), the commands (`repl/src/cmd/bundle`), and the walls around a recipe
//! that is somebody else's (`runtime/confine`).
#![forbid(unsafe_code)]

mod archive;
mod checks;
mod error;
pub mod find;
pub mod manifest;
pub mod name;
mod pack;
mod read;
pub mod sign;
#[cfg(test)]
mod tests;

pub use checks::Damage;
pub use error::{Error, Result};
pub use manifest::Manifest;
pub use pack::{Content, Item, Packed, pack};
pub use read::Bundle;
