//! Reads records (JSON objects, rows of a table) and composes them into pipelines.
//!
//! A [`Dataset`] is a sequence of records that are numbered in one stream, epoch after epoch. Reading a record is a pure function
//! of its index in the stream, for a file and for every stage of a pipeline alike. So the order does not depend on threads, on
//! prefetching or on the devices of a mesh; a seek costs nothing; and a cursor is one number.
//!
//! Stages that depend on the data (filter, flat_map, pack) scan it once and store what they found as an index.
//!
//! [`batch`] makes tensors of records. Not included: functions written in Lua (`runtime/lua`), tokenizers, and prefetching (`source`).

pub mod batch;
pub mod columns;
mod dataset;
mod files;
mod function;
mod generate;
pub mod hash;
mod json;
mod json_fields;
mod json_text;
mod list;
pub mod stages;
mod value;

pub use dataset::{Dataset, Fingerprint, MEMORY, Origin};
pub use files::{Arrow, ColumnType, JsonArray, LineFormat, Lines, Opening, Parquet, Table, TableFormat};
pub use function::{Field, Length, RecordFn};
pub use generate::Generate;
pub use list::List;
pub use value::{Record, Value};
