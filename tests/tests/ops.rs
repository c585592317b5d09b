//! Every op of the registry against PyTorch's numbers, in every dtype and layout, fused and not.
#![allow(clippy::unwrap_used)]

use perilune_tests::case;

/// Writes what `golden/ops/make.py` reads, if asked to.
#[test]
fn dump_cases() {
    let Ok(path) = std::env::var("PERILUNE_DUMP_CASES") else { return };
    let cases: Vec<_> = case::all().iter().map(case::Case::json).collect();
    std::fs::write(path, serde_json::to_string(&cases).unwrap()).unwrap();
}
