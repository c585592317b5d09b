//! Implements the scalar functions that the vector loops are built from: [`Number`] for every element type, [`Float`] for
//! `f32` and `f64`.
//!
//! A loop over slices calls these functions, and LLVM vectorises it. Each function is therefore straight-line code with
//! selects instead of branches: no tables, no early returns, no calls. `f64.rs` names its exceptions. NaN propagates;
//! IEEE special values follow C99 Annex F.
//!
//! Rust never contracts `a * b + c`, and the fused multiply-adds of `simd_f32.rs` are explicit. The same source
//! therefore gives the same bits with SSE2, AVX2 and AVX-512, and a scalar tail agrees with the vector body.
//!
//! `f32` and `f64` have inherent methods with the same names, which call the system's libm. In code generic over `T:
//! Float`, `x.exp()` is the function of this module; on a concrete float it is the one of std, so write `Float::exp(x)`
//! there.

mod f32;
mod f64;
mod float;
mod fp8;
mod int;
mod number;
pub mod simd_f32;
#[cfg(test)]
mod tests;

pub use number::{Float, Number};
