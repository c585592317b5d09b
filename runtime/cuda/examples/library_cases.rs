//! Writes every case of the library tests with the CPU's results to a directory, for kernels/lab/library_lab.py:
//! `cargo run -p perilune-cuda --example library_cases DIR`.
#![allow(clippy::expect_used, dead_code)]

#[path = "../tests/common_library/mod.rs"]
mod common_library;

use common_library::{bench, cases, dump::Dump};

fn main() {
    let to = std::path::PathBuf::from(std::env::args_os().nth(1).expect("DIR to write to"));
    let mut dump = Dump::new(&to);
    cases().iter().chain(&bench::cases()).for_each(|c| dump.write(c));
}
