//! Implements the CPU backend: the embedded default, and the reference for every other backend.
//!
//! A tile interpreter runs fused regions (`region`): straight-line lists of vector loops over tiles that fit the L1 cache,
//! compiled for three instruction sets and dispatched once (`loops`, from the functions of `math`). Matrix products use the
//! crate's own microkernels or the `gemm` crates (`gemm`); the other library ops are plain loops (`library`). A fork-join pool
//! runs kernels on several threads (`worker_pool`).
//!
//! One invariant holds throughout: result bits depend on the program and the instruction-set class alone, never on the
//! thread count, the tile size or the schedule of a region.

// The tile interpreter uses raw pointers: a register may be a tile, a weight in memory or an output, and an output may
// alias an input. Every block states what makes it sound; `plan::check`, which compile() runs, establishes the facts.
#![allow(unsafe_code)]

mod backend;
pub mod fingerprint;
mod gemm;
mod lanes;
mod library;
// Public for its tests, `tests/loops`: as unit tests they would compile every loop a second time.
pub mod loops;
pub mod math;
mod memory;
mod region;
mod worker_pool;

pub use backend::Cpu;
pub use library::has_routine;
pub use loops::Isa;
