//! Defines the trait of functions of a record, such as those that a recipe writes in Lua.

use super::Fingerprint;
use super::value::{Record, Value};
use crate::error::Result;

/// A pure function of a record and of its index in the stream. Stages call it on any thread, in any order, and more than once.
pub trait RecordFn: Send + Sync + 'static {
    /// Computes the result: a map for `map`, a boolean for `filter`, a list of maps for `flat_map`, a key for `sort` and `group`.
    ///
    /// # Errors
    /// The function fails, or returns what is no value of a record. The stage adds the origin of the record.
    fn call(&self, record: Record, index: u64) -> Result<Value>;

    /// Where it is defined, for messages: "sft.lua:31".
    fn place(&self) -> &str;

    /// The hash of all that its result depends on besides the record: its code, its captured values, the modules that it loads.
    fn fingerprint(&self) -> Fingerprint;
}
