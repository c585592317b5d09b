//! Finds functions whose results depend on more than their record: by calling them in two states, in one of them in reverse order.
//!
//! A function that counts in a captured variable, or shows the address of a table, gives other results when other workers call it.
//! The second state stays open beside the first, so that its tables have other addresses.

use super::LuaFunction;
use super::state::{States, with_states};
use perilune_data::records::{Dataset, Record, RecordFn, Value, hash};
use perilune_data::{Error, Result};

/// The number of records of a rehearsal.
pub const REHEARSED: u64 = 16;

/// Rehearses all functions of a pipeline on its first records.
///
/// # Errors
/// A record differs between the two states, or cannot be made.
pub(crate) fn rehearse(dataset: &dyn Dataset) -> Result<()> {
    let indices: Vec<u64> = (0..REHEARSED.min(dataset.len())).collect();
    let different = twice(&indices, |index| dataset.get(*index).map(Value::Map))?;
    let Some(index) = different.map(|k| indices[k]) else { return Ok(()) };
    let origin = dataset.origins(index).ok().and_then(|o| o.first().map(|o| format!(" ({o})"))).unwrap_or_default();
    Err(impure(format!("a function of the pipeline, record {index}{origin}")))
}

/// Rehearses a function on the first records of a dataset, for a stage that calls it in a scan.
///
/// # Errors
/// A result differs between the two states, or the function fails.
pub(crate) fn rehearse_function(function: &LuaFunction, dataset: &dyn Dataset) -> Result<()> {
    let indices: Vec<u64> = (0..REHEARSED.min(dataset.len())).collect();
    let records = dataset.get_many(&indices)?;
    let samples: Vec<(u64, Record)> = indices.into_iter().zip(records).collect();
    let different = twice(&samples, |(index, record)| function.call(record.clone(), *index))?;
    let Some((index, _)) = different.map(|k| &samples[k]) else { return Ok(()) };
    let origin = dataset.origins(*index).ok().and_then(|o| o.first().map(|o| format!(" ({o})"))).unwrap_or_default();
    Err(impure(format!("{} at {}, record {index}{origin}", function.op, function.place)))
}

/// Computes all results twice in fresh states of this thread, and returns the first place at which they differ.
fn twice<S>(samples: &[S], f: impl Fn(&S) -> Result<Value>) -> Result<Option<usize>> {
    let (forwards, first) = with_states(States::default(), || samples.iter().map(&f).collect::<Vec<_>>());
    let (backwards, second) = with_states(States::default(), || samples.iter().rev().map(&f).collect::<Vec<_>>());
    drop((first, second));
    for (k, (a, b)) in forwards.into_iter().zip(backwards.into_iter().rev()).enumerate() {
        match (a, b) {
            (Ok(a), Ok(b)) if hash::value(&a) == hash::value(&b) => {}
            (Err(e), Err(_)) => return Err(e),
            _ => return Ok(Some(k)),
        }
    }
    Ok(None)
}

fn impure(what: String) -> Error {
    Error::function(format!(
        "{what}: the results in two workers differ\n  hint: a result may depend on the record alone: not on variables that keep \
         values from one record to the next, nor on the address that tostring shows of a table"
    ))
}
