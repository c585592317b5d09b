//! Measures a check: makes records of 500 characters in a JSONL file, checks them, and prints the times.
//!
//!   cargo run --release -p perilune-check --example million -- 1000000

use perilune_check::{Options, Split, check, open};
use perilune_core::Interrupt;
use perilune_policy::{Entry, Opened, Opener, open_named};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

#[derive(Debug)]
struct Named;

impl Opener for Named {
    fn open(&self, path: &Path) -> perilune_policy::Result<Opened> {
        open_named(path)
    }

    fn list(&self, _: &Path) -> perilune_policy::Result<Vec<Entry>> {
        Ok(Vec::new())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let count: u64 = std::env::args().nth(1).map_or(Ok(1_000_000), |n| n.parse())?;
    let path = std::env::temp_dir().join(format!("million-{}.jsonl", std::process::id()));
    let mut file = std::io::BufWriter::new(std::fs::File::create(&path)?);
    let mut state = 88_172_645_463_325_252u64;
    for k in 0..count {
        let mut text = String::with_capacity(512);
        while text.len() < 500 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            // Words of a vocabulary of 32,768.
            text.push_str(&format!("{:x} ", (state >> 40) % 32_768 * 7919));
        }
        text.truncate(500);
        writeln!(file, "{{\"text\": \"{text}\", \"label\": {}}}", k % 10)?;
    }
    file.flush()?;
    let begun = Instant::now();
    let records = open::files(Arc::new(Named), &[PathBuf::from(&path)], &Interrupt::default())?;
    println!("opened {count} records in {:.1} s", begun.elapsed().as_secs_f64());
    let begun = Instant::now();
    let split = Split::new("train", records);
    let report = check(&[split], &Options::full(Interrupt::default()))?;
    println!("checked in {:.1} s", begun.elapsed().as_secs_f64());
    println!("{}", report.text());
    std::fs::remove_file(&path)?;
    Ok(())
}
