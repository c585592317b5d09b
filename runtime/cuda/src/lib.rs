//! Runs plans on NVIDIA GPUs from sm_80 on.
//!
//! - `schedule` analyses fused regions and `emit` generates CUDA C++ for them, `library` and `attention` launch the
//!   hand-written kernels of `kernels/`, `blas` calls cuBLASLt, `dnn` calls cuDNN if it is installed, and `nccl` calls NCCL for GPUs of several processes.
//! - Generated and hand-written kernels are [`launch::Work`]: plain data that needs no device. `nvrtc` compiles it and caches the
//!   machine code on disk.
//! - `guard` adds bounds checks and a limit of time to the kernels of recipes.
//! - `executable` runs a program through `driver`; `backend` implements the plan's `Backend` trait.
//! - `offline_target` plans and prints kernels without a GPU.
//!
//! No NVIDIA library is linked: `dylib` opens each at run time, and the error of a missing one states how to install
//! it.

// The wrappers of NVIDIA's libraries are C calls. Every unsafe block states why it is sound; `emit` and `library` have none.
#![allow(unsafe_code)]

pub mod attention;
mod autotune;
mod backend;
mod blas;
pub mod conv;
mod dnn;
mod driver;
pub mod dylib;
pub mod emit;
mod executable;
pub mod guard;
pub mod headers;
pub mod lab;
pub mod launch;
pub mod library;
pub mod nccl;
pub mod nvml;
pub mod nvrtc;
pub mod offline_target;
mod peak;
mod schedule;

pub use backend::Cuda;
pub use executable::STAGED_BYTES;

/// A compile-time assertion: a device, its buffers and its programs may move to and be shared with other threads.
const _: () = {
    const fn shared<T: Send + Sync>() {}
    shared::<Cuda>();
    shared::<driver::CudaBuffer>();
    shared::<executable::CudaExecutable>();
};
pub use offline_target::OfflineTarget;
