//! Checks token ids against the vocabulary, and masks that train nothing, in a sample of the encoded records.

use crate::field::Rows;
use crate::scan::{Options, spread};
use perilune_data::records::{Dataset, Value};
use perilune_data::{Error, Result};
use std::sync::Arc;
use std::time::Instant;

/// Records that are encoded.
const SAMPLE: u64 = 20_000;
/// Those of a quick check.
const QUICK: u64 = 500;

/// Faults of encoded records.
#[derive(Default)]
pub struct TokenFaults {
    pub checked: u64,
    pub outside: Rows,
    pub untrained: Rows,
    pub empty: Rows,
    /// The first places of each, in the order of the fields above.
    pub places: [Vec<String>; 3],
}

fn integers(value: &Value) -> Option<Vec<i64>> {
    match value {
        Value::Array(array) => Some(array.to_i64()),
        Value::List(list) => list
            .iter()
            .map(|v| match v {
                Value::Int(i) => Some(*i),
                Value::Bool(b) => Some(i64::from(*b)),
                _ => None,
            })
            .collect(),
        _ => None,
    }
}

/// Checks the fields `ids` (or `input_ids`, `tokens`) and `mask` of records.
pub fn check(
    set: &Arc<dyn Dataset>,
    vocabulary: Option<u64>,
    options: &Options,
    started: Instant,
) -> Result<TokenFaults> {
    let set = set.unshuffled().map_or_else(|| set.clone(), |(inner, _)| inner);
    let mut out = TokenFaults::default();
    let sample = if options.seconds.is_some() { QUICK } else { SAMPLE.min(options.rows) };
    let wanted = set.len().min(sample);
    for place in 0..wanted {
        if options.interrupt.is_requested() {
            return Err(Error::Interrupted);
        }
        if options.seconds.is_some_and(|limit| started.elapsed() > limit) {
            break;
        }
        let index = spread(place, wanted, set.len());
        // A record that cannot be made is a finding of the records, or an error of the step that reads it.
        let record = match set.get(index) {
            Ok(record) => record,
            Err(e @ (Error::Interrupted | Error::Io { .. })) => return Err(e),
            Err(_) => continue,
        };
        out.checked += 1;
        let field = |names: &[&str]| names.iter().find_map(|n| record.get(n)).and_then(integers);
        let ids = field(&["ids", "input_ids", "tokens"]);
        let mask = field(&["mask", "loss_mask"]);
        let outside = |id: &i64| *id < 0 || vocabulary.is_some_and(|v| u64::try_from(*id).is_ok_and(|id| id >= v));
        let faults = [
            ids.as_ref().is_some_and(|ids| ids.iter().any(outside)),
            mask.is_some_and(|mask| mask.iter().all(|m| *m == 0)),
            ids.is_some_and(|ids| ids.is_empty()),
        ];
        for ((fault, rows), places) in
            faults.into_iter().zip([&mut out.outside, &mut out.untrained, &mut out.empty]).zip(&mut out.places)
        {
            if fault {
                rows.add(index);
                if places.len() < 5 {
                    let origin = set.origins(index).ok().and_then(|o| o.into_iter().next());
                    places.push(origin.map_or_else(|| format!("record {index}"), |o| o.to_string()));
                }
            }
        }
    }
    Ok(out)
}
