//! The CUDA backend: NVIDIA GPUs from sm_80.
//!
//! Fused regions become CUDA text (`codegen`), library ops hand-written kernels of `kernels/` (`library`) or cuBLASLt
//! calls (`blas`), convolutions cuDNN's where it is found (`dnn`); both kinds of text yield [`launch::Work`], plain data that needs no device. NVRTC compiles it to machine
//! code that is kept on disk (`nvrtc`), and `compile` and `backend` run it on what `driver` offers. Nothing is linked: every
//! library is found at run time (`find`), and one that is missing is an error that says how to get it.

// The floors over NVIDIA's libraries are C calls. Every block states what makes it sound; codegen and library have none.
#![allow(unsafe_code)]

pub mod attention;
mod backend;
mod blas;
pub mod codegen;
mod compile;
pub mod conv;
mod dnn;
mod driver;
pub mod find;
pub mod headers;
pub mod lab;
pub mod launch;
pub mod library;
mod memory;
pub mod nvml;
pub mod nvrtc;
pub mod paper;
mod peak;
mod search;

pub use backend::Cuda;
pub use paper::Paper;
