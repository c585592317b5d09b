//! The CUDA backend: NVIDIA GPUs from sm_80.
//!
//! Fused regions become CUDA text (`codegen`), library ops hand-written kernels of `kernels/` (`library`) or cuBLASLt
//! calls (`blas`); both yield [`launch::Work`], plain data that needs no device. NVRTC compiles it to machine code that is
//! kept on disk (`nvrtc`), and `backend` runs it. Nothing is linked: every library is found at run time (`find`), and one
//! that is missing is an error that says how to get it.

pub mod attention;
pub mod codegen;
pub mod headers;
pub mod launch;
pub mod library;
