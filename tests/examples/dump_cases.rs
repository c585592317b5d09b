//! Writes the cases of every op as JSON, which `golden/ops/make.py` reads:
//! `cargo build --workspace --example dump_cases`, then `target/debug/examples/dump_cases FILE`.
#![allow(clippy::unwrap_used)]

use perilune_tests::case::{self, Case};

fn main() {
    let path = std::env::args().nth(1).expect("FILE to write");
    let cases: Vec<_> = case::all().iter().map(Case::json).collect();
    std::fs::write(path, serde_json::to_string(&cases).unwrap()).unwrap();
}
