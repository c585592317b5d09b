//! Declares the traits of element types, with the methods that `map_fns!` calls on them.

/// An element type: a float, or an integer whose arithmetic wraps.
pub trait Number: Copy + PartialOrd + Send + Sync + 'static {
    const ZERO: Self;
    const ONE: Self;
    /// The identity of `maximum`.
    const LOWEST: Self;
    /// The identity of `minimum`.
    const HIGHEST: Self;
    /// The type in which partial reductions are combined.
    type Wide: Number;

    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;

    fn neg(self) -> Self;
    /// The absolute value. The most negative integer, which has no positive counterpart, yields itself.
    fn abs(self) -> Self;
    /// -1, 0 or 1; NaN for NaN.
    fn sign(self) -> Self;
    fn relu(self) -> Self;
    fn add(self, y: Self) -> Self;
    fn sub(self, y: Self) -> Self;
    fn mul(self, y: Self) -> Self;
    /// The quotient rounded down, as `torch.div(rounding_mode="floor")`. Division by zero gives ±inf or NaN for floats,
    /// 0 for integers. Integers wrap at `MIN / -1`.
    fn div_floor(self, divisor: Self) -> Self;
    /// The remainder of division rounded down, as Python's and PyTorch's `%`: exact before its one rounding, with the
    /// divisor's sign. For floats, NaN if the divisor is zero or the dividend infinite; for integers, 0 if the divisor
    /// is zero.
    fn rem_floor(self, divisor: Self) -> Self;
    /// C99 `pow` for floats: `pow(x, 0)` and `pow(1, y)` are 1 even for NaN, and a negative base needs an integer exponent.
    /// For integers a wrapping power; a negative exponent gives the truncated reciprocal: 0, except for the bases 1 and -1.
    fn pow(self, exponent: Self) -> Self;
    /// The larger, or NaN if either is NaN.
    fn maximum(self, y: Self) -> Self;
    /// The smaller, or NaN if either is NaN.
    fn minimum(self, y: Self) -> Self;
    fn is_nan(self) -> bool;
    fn is_inf(self) -> bool;
}

/// A float with vectorisable functions. `f32.rs` and `f64.rs` state the largest errors.
pub trait Float: Number {
    const INFINITY: Self;
    const NAN: Self;

    /// Rounds to nearest even when `Self` is narrower.
    fn from_f64(x: f64) -> Self;
    fn to_f64(self) -> f64;

    fn exp(self) -> Self;
    fn exp2(self) -> Self;
    /// `exp(x) - 1`, accurate near 0.
    fn expm1(self) -> Self;
    /// The natural logarithm: -inf at ±0, NaN for negative arguments.
    fn log(self) -> Self;
    /// `log(1 + x)`, accurate near 0.
    fn log1p(self) -> Self;
    fn sqrt(self) -> Self;
    fn rsqrt(self) -> Self;
    fn recip(self) -> Self;
    fn div(self, y: Self) -> Self;
    fn sin(self) -> Self;
    fn cos(self) -> Self;
    fn tan(self) -> Self;
    fn tanh(self) -> Self;
    /// `1 / (1 + exp(-x))`, computed from `exp(-|x|)`: it cannot overflow and keeps its relative accuracy as it
    /// approaches 0.
    fn sigmoid(self) -> Self;
    /// `1 / (1 + 2^-x)`, computed in the same way.
    fn sigmoid2(self) -> Self;
    fn erf(self) -> Self;
    fn floor(self) -> Self;
    fn ceil(self) -> Self;
    /// Rounds to the nearest integer, ties to even (as PyTorch and NumPy do, unlike C's `round`).
    fn round(self) -> Self;

    /// The byte of the nearest 8-bit float (see `fp8.rs`).
    fn fp8_e4m3(self) -> u8;
    fn fp8_e5m2(self) -> u8;
    /// The value of an 8-bit float, given its byte, 0 to 255.
    fn fp8_e4m3_value(self) -> Self;
    fn fp8_e5m2_value(self) -> Self;
}
