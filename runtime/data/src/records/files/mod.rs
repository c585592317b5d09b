//! Reads files of records by position.
//!
//! Opening a dataset indexes its files once and hashes their contents; a record is then read by its position. `lines` reads JSONL and
//! text, `table` CSV and `json` arrays of objects; these may be compressed (`text_files`, `unpack`). `parquet` and `arrow` read columnar
//! files, whose unit is a row group or a record batch.

mod arrow;
mod arrow_messages;
mod arrow_value;
mod cache;
mod calendar;
mod columnar;
mod footer;
mod frames;
mod index_cache;
mod json_array;
mod json_scan;
mod line_index;
mod lines;
mod numbered;
mod pages;
mod parquet;
mod row_index;
mod starts;
mod table;
mod table_cells;
mod text_files;
mod unpack;

pub use arrow::Arrow;
pub use json_array::JsonArray;
pub use lines::{LineFormat, Lines};
pub use parquet::Parquet;
pub use table::{ColumnType, Table, TableFormat};
pub use text_files::Opening;

use crate::error::{Error, Result};
use std::path::Path;

/// The most memory that one decoded unit of a columnar file may take: a row group of Parquet, a record batch of Arrow.
pub(crate) const MAX_UNIT: u64 = 2 << 30;

/// Makes room for more entries of a file's index, where the machine has the memory.
fn reserve<T>(path: &Path, list: &mut Vec<T>, more: usize) -> Result<()> {
    let needed = list.len().saturating_add(more);
    if needed <= list.capacity() {
        return Ok(());
    }
    let room = needed.max(list.capacity().saturating_mul(2));
    let refused = |e: perilune_core::Error| {
        let rule = format!("has more than {} records, whose index needs too much memory ({e})", list.len());
        Error::unsupported(path, "file", rule).hint("divide it into several files, or convert it to Parquet")
    };
    perilune_core::host_memory::check("records", room.saturating_mul(size_of::<T>())).map_err(refused)?;
    list.reserve_exact(room - list.len());
    Ok(())
}
