//! Reads files of records by position.
//!
//! Opening a dataset indexes its files once and hashes their contents; a record is then read where it lies. `lines` reads JSONL and
//! text, `parquet` and `arrow` read columnar files, whose unit is a row group or a record batch.

mod arrow;
mod arrow_messages;
mod arrow_value;
mod cache;
mod calendar;
mod columnar;
mod footer;
mod lines;
mod numbered;
mod parquet;

pub use arrow::Arrow;
pub use lines::{LineFormat, Lines};
pub use parquet::Parquet;

/// The most memory that one decoded unit of a columnar file may take: a row group of Parquet, a record batch of Arrow.
pub(crate) const MAX_UNIT: u64 = 2 << 30;
