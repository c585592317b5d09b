//! Times opening and reading of files of records, for tests/bench/records.py.
//!
//! `read_records FORMAT FILE ROUNDS CACHE [FIELD...]`: FORMAT is jsonl or table, CACHE a cache folder or `none`. Prints the seconds of
//! opening and of reading all records on one thread, the best of ROUNDS, and how many records and bytes of text they have. With 0 rounds it
//! opens the file once and reads nothing.

use perilune_core::Interrupt;
use perilune_data::records::stages::Fields;
use perilune_data::records::{Dataset, LineFormat, Lines, Opening, Table, TableFormat, Value};
use perilune_policy::Policy;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Records that are read together, as stages do.
const TOGETHER: u64 = 256;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [format, file, rounds, cache, fields @ ..] = &args[..] else {
        return Err("usage: read_records FORMAT FILE ROUNDS CACHE [FIELD...]".into());
    };
    let path = PathBuf::from(file);
    let policy = Policy::builder().allow_read(path.parent().unwrap_or(Path::new(".")))?.build();
    let interrupt = Interrupt::default();
    let open = || -> Result<Arc<dyn Dataset>, Box<dyn std::error::Error>> {
        let cache = (cache != "none").then(|| PathBuf::from(cache));
        let opening = Opening { opener: policy.clone(), cache, interrupt: &interrupt, observe: &mut |_| {} };
        let paths = std::slice::from_ref(&path);
        let table = TableFormat { delimiter: b',', columns: None, types: Vec::new(), skip_malformed: false };
        let set: Arc<dyn Dataset> = match format.as_str() {
            "jsonl" => Arc::new(Lines::open(paths, LineFormat::Json, opening)?),
            "table" => Arc::new(Table::open(paths, table, opening)?),
            other => return Err(format!("the format '{other}' is jsonl or table").into()),
        };
        Ok(if fields.is_empty() { set } else { Arc::new(Fields::select(set, fields)) })
    };
    let (mut opening, mut reading, mut records, mut bytes) = (f64::MAX, f64::MAX, 0, 0);
    let rounds = rounds.parse::<u32>()?;
    for _ in 0..rounds.max(1) {
        let start = Instant::now();
        let set = open()?;
        opening = opening.min(start.elapsed().as_secs_f64());
        (records, bytes) = (set.len(), 0);
        if rounds == 0 {
            reading = 0.0;
            break;
        }
        let start = Instant::now();
        let mut first = 0;
        while first < records {
            let last = records.min(first + TOGETHER);
            for record in set.get_many(&(first..last).collect::<Vec<_>>())? {
                for (_, value) in &record.fields {
                    bytes += if let Value::Text(text) = value { text.len() } else { 0 };
                }
            }
            first = last;
        }
        reading = reading.min(start.elapsed().as_secs_f64());
    }
    println!("{{\"open\": {opening}, \"read\": {reading}, \"records\": {records}, \"bytes\": {bytes}}}");
    Ok(())
}
