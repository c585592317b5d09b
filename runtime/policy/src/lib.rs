//! Restricts which files a recipe may open.
//!
//! A [`Policy`] holds open directories: the roots that may be read and those that may be written. A path is opened relative to
//! the handle of a root, and the kernel refuses every step that leaves it, so no checked string is ever followed by an open.
//! What no root holds is denied. Readers of data take an [`Opened`] file or an [`Opener`], never a path; writers take a
//! [`Staged`] file, which replaces its target whole or not at all.
//!
//! Links that stay beneath a root, or lead into another root, are followed; others are denied with the flag that would allow
//! them. Only regular files are opened: a FIFO, device, socket or directory is refused by its kind, and never waited for.
//!
//! ```
//! use perilune_policy::{Opener, Policy};
//! use std::io::Read;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let data = tempfile::tempdir()?;
//! std::fs::write(data.path().join("a.csv"), "1,2\n")?;
//! let policy = Policy::builder().allow_read(data.path())?.build();
//! let mut text = String::new();
//! policy.open(&data.path().join("a.csv"))?.read_to_string(&mut text)?;
//! assert!(policy.open("/etc/hostname".as_ref()).is_err());
//! # Ok(())
//! # }
//! ```
//!
//! Not here: what the program opens for itself (its own libraries, its cache), and limits of memory and time
//! (`runtime/lua/src/boundary`).
#![forbid(unsafe_code)]

#[cfg(not(unix))]
compile_error!("perilune-policy resolves paths by directory handles of Unix");

mod builder;
mod directory;
mod entries;
mod error;
mod fetched;
mod opened;
mod opener;
mod policy;
mod reads;
mod resolve;
mod staged;

pub use builder::PolicyBuilder;
pub use directory::Directory;
pub use error::{Access, Error, Result};
pub use fetched::{Fetched, Fetcher, Unfetched, is_address};
pub use opened::{Opened, open_named};
pub use opener::{Entry, Kind, Opener, near};
pub use policy::{Policy, WriteHold};
pub use reads::{DataRead, FileList, ReadKind};
pub use resolve::Resolution;
pub use staged::Staged;
