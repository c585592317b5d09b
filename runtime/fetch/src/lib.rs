//! Downloads files of data by address and content hash into a cache that all runs share.
//!
//! An [`Address`] is `https://`, `hf://` or `s3://`. A [`ContentHash`] names the content; what arrives is hashed before it gets its
//! name in the [`Cache`]. A recipe never connects: [`ProcessFetcher`] looks in the cache and starts the program's own binary
//! as a second process, [`serve`], which receives one [`Request`] by its standard input and alone opens sockets. It connects to
//! hosts of [`Grants`] only, redirects included.
//!
//! ```
//! use perilune_fetch::{Address, Grants};
//!
//! let address = Address::parse("https://example.org/train.jsonl").expect("an address");
//! assert_eq!(address.host(), Ok("example.org".into()));
//! assert!(!Grants::default().allows("example.org"));
//! ```
//!
//! Not here: which files a recipe may open (`runtime/policy`), and the terminal (`repl/src/fetching.rs`).
#![forbid(unsafe_code)]

mod address;
mod cache;
mod client;
mod download;
mod error;
mod grants;
mod hash;
mod origin;
mod process;
mod sigv4;
mod url;

pub use address::Address;
pub use cache::{Cache, Cached};
pub use download::{Download, Limits, download};
pub use error::{Error, Result};
pub use grants::Grants;
pub use hash::{Algorithm, ContentHash};
pub use process::{Console, Event, ProcessFetcher, Request, serve};
