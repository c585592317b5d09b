//! The CPU backend: the embedded default, and the reference that every other backend is compared with.
//!
//! Fused regions run on a tile interpreter (`region`): straight-line lists of vector loops over tiles that fit the L1
//! cache, compiled for three instruction sets and picked once (`loops`). Matrix products have register tiles of their own,
//! or go to the `gemm` crate (`matmul`); the other library ops are plain loops (`library`). Threads park when idle and never spin
//! (`pool`).
//!
//! The one promise behind all of it: result bits depend on the program and the instruction-set class alone, never on the
//! thread count, the tile size or the path a region takes.

// The tile interpreter works on raw pointers: a register may be a tile, a weight in memory or an output, and an output may
// be an input. Every block states what makes it sound; the facts come from `plan::check`, which compile() runs.
#![allow(unsafe_code)]

mod backend;
mod gemm;
mod library;
mod loops;
pub mod math;
mod memory;
mod region;
mod worker_pool;

pub use backend::Cpu;
