//! The `f32` functions that training spends its time in, written once for one element and for vectors of them.
//!
//! [`Lane`] is what they need of a number. `f32` is one; a backend that keeps vectors in registers across several
//! functions makes its vector types others, and gets the same bits, since every method is one exactly rounded operation
//! or an operation on bits.
//!
//! These four use fused multiply-adds, spelt out: one rounding instead of two, for half the instructions. The result is
//! the same on every machine, but one without the instruction (x86 before 2013) computes it slowly.
//!
//! Polynomials as in `f32.rs`; that of 2^r by Chebyshev interpolation.

// Coefficients are printed as the shortest decimals that name the intended float.
#![allow(clippy::excessive_precision)]

use std::ops::{Add, Div, Mul, Sub};

/// An f32, or a vector of them.
pub trait Lane: Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self> {
    /// The same as an integer.
    type Bits: Copy;

    fn splat(x: f32) -> Self;
    /// `self * y + z`, rounded once.
    fn mul_add(self, y: Self, z: Self) -> Self;
    /// `high` where `self` is greater; NaN stays.
    fn at_most(self, high: Self) -> Self;
    /// `low` where `self` is less; NaN stays.
    fn at_least(self, low: Self) -> Self;
    fn abs(self) -> Self;
    fn copysign(self, sign: Self) -> Self;
    /// `yes` where `self < limit`.
    fn if_less(self, limit: Self, yes: Self, no: Self) -> Self;

    fn bits(self) -> Self::Bits;
    fn of_bits(bits: Self::Bits) -> Self;
    /// Without a sign.
    fn half(bits: Self::Bits) -> Self::Bits;
    fn difference(x: Self::Bits, y: Self::Bits) -> Self::Bits;
    /// The low nine bits as sign and exponent.
    fn raise(bits: Self::Bits) -> Self::Bits;
}

impl Lane for f32 {
    type Bits = u32;

    #[inline(always)]
    fn splat(x: f32) -> f32 {
        x
    }

    #[inline(always)]
    fn mul_add(self, y: f32, z: f32) -> f32 {
        f32::mul_add(self, y, z)
    }

    #[inline(always)]
    fn at_most(self, high: f32) -> f32 {
        if self > high { high } else { self }
    }

    #[inline(always)]
    fn at_least(self, low: f32) -> f32 {
        if self < low { low } else { self }
    }

    #[inline(always)]
    fn abs(self) -> f32 {
        f32::abs(self)
    }

    #[inline(always)]
    fn copysign(self, sign: f32) -> f32 {
        f32::copysign(self, sign)
    }

    #[inline(always)]
    fn if_less(self, limit: f32, yes: f32, no: f32) -> f32 {
        if self < limit { yes } else { no }
    }

    #[inline(always)]
    fn bits(self) -> u32 {
        self.to_bits()
    }

    #[inline(always)]
    fn of_bits(bits: u32) -> f32 {
        f32::from_bits(bits)
    }

    #[inline(always)]
    fn half(bits: u32) -> u32 {
        bits >> 1
    }

    #[inline(always)]
    fn difference(x: u32, y: u32) -> u32 {
        x.wrapping_sub(y)
    }

    #[inline(always)]
    fn raise(bits: u32) -> u32 {
        bits << 23
    }
}

/// `(exp(r) - 1 - r) / r^2` on ±0.3475, 2^-34.
const EXP: [f32; 6] = [0.5, 0.16666666, 0.04166629, 0.008333499, 0.0013944943, 0.00019790063];
/// `(2^r - 1) / r` on ±0.5, 2^-27.
const EXP2: [f32; 6] = [std::f32::consts::LN_2, 0.2402265, 0.05550357, 0.009618083, 0.0013390863, 0.00015453163];
/// `erf(x) / x - 1` in `x^2` for |x| < 0.93, 2^-31.
const ERF_NEAR: [f32; 7] =
    [0.12837917, -0.37612632, 0.112836875, -0.02685894, 0.005199907, -0.0008130013, 8.316777e-05];
/// `log2(1 - erf(x))` on [0.91, 4], weighted by `erfc / erf`, 2^-29.
const ERF_FAR: [f32; 7] =
    [-0.00026073284, -1.6269815, -0.91910845, -0.15007469, 0.03213103, -0.0044066286, 0.00028433313];
/// `(tanh(x) / x - 1) / x^2` in `x^2` for |x| <= 0.6, 2^-28.
const TANH: [f32; 5] = [-0.333333, 0.13331924, -0.05378383, 0.020795973, -0.005895158];

/// 1.5 * 2^23: adding it leaves the nearest integer in the low bits, ties to even.
const MAGIC: f32 = 12_582_912.0;
/// ln 2 in two parts; the first has 10 bits, so its product with an exponent is exact.
const LN2_HI: f32 = 0.693359375;
const LN2_LO: f32 = -0.00021219444;

#[inline(always)]
fn polynomial<L: Lane, const N: usize>(x: L, coefficients: &[f32; N]) -> L {
    let mut sum = L::splat(coefficients[N - 1]);
    for i in (0..N - 1).rev() {
        sum = sum.mul_add(x, L::splat(coefficients[i]));
    }
    sum
}

/// `exp(x) / 2^n`, and `n + bias` in the low bits of a float near `MAGIC`.
#[inline(always)]
fn exp_parts<L: Lane>(x: L, bias: f32) -> (L, L) {
    let magic = L::splat(MAGIC + bias);
    let n = x.mul_add(L::splat(std::f32::consts::LOG2_E), magic);
    let whole = n - magic;
    let r = whole.mul_add(L::splat(-LN2_HI), x);
    let r = whole.mul_add(L::splat(-LN2_LO), r);
    // 1 + r (1 + r p): the inner sum's rounding counts for a third.
    let one = L::splat(1.0);
    (polynomial(r, &EXP).mul_add(r, one).mul_add(r, one), n)
}

/// exp(x) for x in [-87, 88], where the result is normal.
#[inline(always)]
fn exp_normal<L: Lane>(x: L) -> L {
    let (y, n) = exp_parts(x, 127.0);
    y * L::of_bits(L::raise(n.bits()))
}

#[inline(always)]
pub fn exp<L: Lane>(x: L) -> L {
    // From -104 on the result is 0. What is far below comes out at -176, where both factors are 0: rounding a product down
    // to 0 instead takes an x86 processor hundreds of cycles, and masked scores are all -inf.
    let x = x.at_most(L::splat(89.0)).at_least(L::splat(-176.0));
    // 2^n in two steps, so that subnormal results are rounded once and overflow is to infinity; 254 is both biases.
    let (y, n) = exp_parts(x, 254.0);
    let n = n.bits();
    let first = L::half(n);
    y * L::of_bits(L::raise(first)) * L::of_bits(L::raise(L::difference(n, first)))
}

#[inline(always)]
pub fn tanh<L: Lane>(x: L) -> L {
    let a = x.abs().at_most(L::splat(10.0));
    let z = a * a;
    let near = (a * z).mul_add(polynomial(z, &TANH), a);
    let far = L::splat(1.0) - L::splat(2.0) / (exp_normal(a + a) + L::splat(1.0));
    a.if_less(L::splat(0.6), near, far).copysign(x)
}

/// `1 / (1 + exp(-x))` through `exp(-|x|)`: cannot overflow, and keeps its relative accuracy as it nears 0.
#[inline(always)]
pub fn sigmoid<L: Lane>(x: L) -> L {
    let one = L::splat(1.0);
    let e = exp(L::splat(0.0) - x.abs());
    let numerator = x.if_less(L::splat(0.0), e, one);
    let sum = one + e;
    let quotient = numerator / sum;
    // Most of what the sum lost: the exact correction would divide by it once more.
    quotient - quotient * (e - (sum - one))
}

#[inline(always)]
pub fn erf<L: Lane>(x: L) -> L {
    let a = x.abs().at_most(L::splat(4.0));
    let near = a.mul_add(polynomial(a * a, &ERF_NEAR), a);
    // 1 - 2^p for p in [-26, -2].
    let p = polynomial(a, &ERF_FAR);
    let magic = L::splat(MAGIC + 127.0);
    let n = p + magic;
    let r = p - (n - magic);
    let y = r.mul_add(polynomial(r, &EXP2), L::splat(1.0));
    let power = L::of_bits(L::raise(n.bits()));
    let far = L::splat(1.0) - y * power;
    a.if_less(L::splat(0.92), near, far).copysign(x)
}
