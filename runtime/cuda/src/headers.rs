//! Embeds the CUDA headers of `kernels/`, which generated and hand-written kernels include by path.
//!
//! [`HEADERS`] lists (path under `kernels/`, text), sorted by path; `build.rs` collects it.

include!(concat!(env!("OUT_DIR"), "/headers.rs"));
