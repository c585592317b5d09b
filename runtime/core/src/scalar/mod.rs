//! The scalar math that elementwise CPU kernels are built from: [`Real`] for `f32` and `f64`, [`Int`] for the
//! integers.
//!
//! A kernel is a plain loop over slices that calls these; LLVM vectorises it. So each function is straight-line code
//! with selects for branches: no tables, no early returns, no calls. The `f64` exceptions are named in `f64.rs`. NaN
//! goes in and comes out, IEEE special values follow C99 Annex F.
//!
//! Rust never contracts `a * b + c`, and the fused multiply-adds of `lane.rs` are spelt out, so the same source gives
//! the same bits with SSE2, AVX2 and AVX-512, and a scalar tail agrees with the vector body.
//!
//! The trick to know: `f32` and `f64` have inherent methods of the same names that call the system libm. In code
//! generic over `T: Real`, `x.exp()` is ours; on a concrete float it is std's, so write `Real::exp(x)` there.

mod f32;
mod f64;
pub mod fp8;
mod int;
pub mod lane;
#[cfg(test)]
mod tests;

use std::ops::{Add, Div, Mul, Neg, Sub};

pub use int::Int;

/// A float type with vectorisable math. Largest errors against a wider or better reference stand in `f32.rs`,
/// `f64.rs`.
pub trait Real:
    Copy
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + 'static
{
    const ZERO: Self;
    const ONE: Self;
    const INFINITY: Self;
    const NAN: Self;

    /// Rounds to nearest even when `Self` is narrower.
    fn from_f64(x: f64) -> Self;
    fn to_f64(self) -> f64;

    fn exp(self) -> Self;
    fn exp2(self) -> Self;
    /// `exp(x) - 1`, accurate near 0.
    fn expm1(self) -> Self;
    /// The natural logarithm: -inf at ±0, NaN below.
    fn log(self) -> Self;
    /// `log(1 + x)`, accurate near 0.
    fn log1p(self) -> Self;
    fn sqrt(self) -> Self;
    fn sin(self) -> Self;
    fn cos(self) -> Self;
    fn tan(self) -> Self;
    fn tanh(self) -> Self;
    fn erf(self) -> Self;
    /// C99 `pow`: `pow(x, 0)` and `pow(1, y)` are 1 even for NaN; a negative base needs an integer exponent.
    fn pow(self, exponent: Self) -> Self;

    fn abs(self) -> Self;
    fn floor(self) -> Self;
    fn ceil(self) -> Self;
    /// To the nearest integer, halves to even (as PyTorch and NumPy, unlike C's `round`).
    fn round(self) -> Self;
    fn copysign(self, sign: Self) -> Self;

    /// The remainder of division rounded down, as Python's and PyTorch's `%`: exact before its one rounding, and with
    /// the divisor's sign. NaN for a zero divisor or an infinite dividend.
    fn rem_floor(self, divisor: Self) -> Self;
    /// `floor(self / divisor)` as `torch.div(rounding_mode="floor")`: ±inf or NaN for a zero divisor.
    fn div_floor(self, divisor: Self) -> Self;

    /// The byte of the nearest number of 8 bits (see `fp8.rs`).
    fn fp8_e4m3(self) -> u8;
    fn fp8_e5m2(self) -> u8;
    /// What the byte of that number, 0 to 255, means.
    fn fp8_e4m3_value(self) -> Self;
    fn fp8_e5m2_value(self) -> Self;

    #[allow(clippy::eq_op)]
    #[inline(always)]
    fn is_nan(self) -> bool {
        self != self
    }

    #[inline(always)]
    fn is_inf(self) -> bool {
        self.abs() == Self::INFINITY
    }

    #[inline(always)]
    fn rsqrt(self) -> Self {
        Self::ONE / self.sqrt()
    }

    /// `1 / (1 + exp(-x))` through `exp(-|x|)`: cannot overflow, and keeps its relative accuracy as it nears 0.
    #[inline(always)]
    fn sigmoid(self) -> Self {
        self.share((-self.abs()).exp())
    }

    /// `1 / (1 + 2^-x)`, alike.
    #[inline(always)]
    fn sigmoid2(self) -> Self {
        self.share((-self.abs()).exp2())
    }

    /// `1 / (1 + e)`, or for a negative number `e / (1 + e)`.
    #[inline(always)]
    fn share(self, e: Self) -> Self {
        let numerator = if self < Self::ZERO { e } else { Self::ONE };
        let sum = Self::ONE + e;
        let quotient = numerator / sum;
        // Most of what the sum lost: the exact correction would divide by it once more.
        quotient - quotient * (e - (sum - Self::ONE))
    }

    /// -1, 0 or 1; NaN stays NaN. Adding zero turns -0 into 0.
    #[inline(always)]
    fn sign(self) -> Self {
        let negative = if self < Self::ZERO { -Self::ONE } else { self + Self::ZERO };
        if self > Self::ZERO { Self::ONE } else { negative }
    }

    /// The larger, or NaN if either is NaN.
    #[inline(always)]
    fn maximum(self, other: Self) -> Self {
        if (self > other) | self.is_nan() { self } else { other }
    }

    /// The smaller, or NaN if either is NaN.
    #[inline(always)]
    fn minimum(self, other: Self) -> Self {
        if (self < other) | self.is_nan() { self } else { other }
    }
}

/// The C99 special cases of `pow`, laid over `magnitude`, which need only be right for finite `|x| > 0` and finite
/// `y`.
#[inline(always)]
fn pow_specials<T: Real>(x: T, y: T, magnitude: T, y_is_integer: bool, y_is_odd: bool) -> T {
    let ax = x.abs();
    let extreme = (ax == T::ZERO) | (ax == T::INFINITY) | (y.abs() == T::INFINITY);
    let grows = (ax > T::ONE) == (y > T::ZERO);
    let limit = if grows { T::INFINITY } else { T::ZERO };
    let r = if extreme { limit } else { magnitude };
    let r = if (x < T::ZERO) & (ax != T::INFINITY) & !y_is_integer { T::NAN } else { r };
    let r = if y_is_odd { r.copysign(x) } else { r };
    let r = if x.is_nan() | y.is_nan() { T::NAN } else { r };
    let one = (y == T::ZERO) | (x == T::ONE) | ((ax == T::ONE) & (y.abs() == T::INFINITY));
    if one { T::ONE } else { r }
}
