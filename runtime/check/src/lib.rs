//! Checks datasets of records before training: schema, lengths, labels, duplicates, leakage, conversations, token ids, images, token corpora.
//!
//! [`check`] reads the records of all splits in parallel passes and returns a [`Report`] of findings. The evaluation splits are read first, so that
//! training records are compared with them as they are read. Memory is bounded by [`scan::MOST_ROWS`] records of a split.
//!
//! Not included: the command (`repl`) and how a recipe names its records (`runtime/lua`).

mod chat;
mod chi_square;
pub mod corpus;
mod duplicates;
mod field;
mod findings;
mod html;
pub mod images;
mod label_findings;
pub mod minhash;
mod near;
pub mod normal;
pub mod open;
mod overlap;
mod profile;
pub mod remote;
mod report;
mod roles;
pub mod scan;
mod token_leaks;
mod token_repeats;
mod token_runs;
mod token_sweep;
mod tokens;

pub use report::{Example, Finding, Report, Severity, SplitReport};
pub use scan::{Options, Split, check};
