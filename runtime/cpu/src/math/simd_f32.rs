//! Implements exp, exp2, tanh, sigmoid and erf in f32, generic over a single element and vectors.
//!
//! [`SimdF32`] is the set of operations they need. `f32` implements it, and so do the vector types of `loops::simd`, which
//! keep values in registers across several functions. All give the same bits, since every method is one exactly rounded
//! operation or an operation on bits.
//!
//! The functions use explicit fused multiply-adds: one rounding instead of two, for half the instructions. The result
//! is the same on every machine; a machine without the instruction (x86 before 2013) emulates it slowly.
//!
//! Polynomials were fitted as in `f32.rs`; those of erf by least squares, rounding one coefficient after the other to
//! f32.

// Coefficients are printed as the shortest decimals that name the intended float.
#![allow(clippy::excessive_precision)]

use std::ops::{Add, Div, Mul, Sub};

/// An f32, or a vector of them.
pub trait SimdF32: Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self> {
    /// A vector of integers of the same size and number.
    type Int: Copy;

    fn splat(x: f32) -> Self;
    /// `self * y + z`, rounded once.
    fn mul_add(self, y: Self, z: Self) -> Self;
    /// `high` where `self` is greater; NaN is kept.
    fn clamp_max(self, high: Self) -> Self;
    /// `low` where `self` is less; NaN is kept.
    fn clamp_min(self, low: Self) -> Self;
    fn abs(self) -> Self;
    fn copysign(self, sign: Self) -> Self;
    /// `yes` where `self < limit`, else `no`.
    fn select_less(self, limit: Self, yes: Self, no: Self) -> Self;

    fn to_bits(self) -> Self::Int;
    fn from_bits(bits: Self::Int) -> Self;
    /// A logical shift right by one bit.
    fn shift_right_1(bits: Self::Int) -> Self::Int;
    /// A wrapping difference.
    fn int_sub(x: Self::Int, y: Self::Int) -> Self::Int;
    /// A shift left by 23 bits: the low nine bits become sign and exponent.
    fn shift_left_23(bits: Self::Int) -> Self::Int;
    /// The element of a table at the index in the low four bits.
    fn lookup(table: &[f32; 16], at: Self::Int) -> Self;
}

impl SimdF32 for f32 {
    type Int = u32;

    #[inline(always)]
    fn splat(x: f32) -> f32 {
        x
    }

    #[inline(always)]
    fn mul_add(self, y: f32, z: f32) -> f32 {
        f32::mul_add(self, y, z)
    }

    #[inline(always)]
    fn clamp_max(self, high: f32) -> f32 {
        if self > high { high } else { self }
    }

    #[inline(always)]
    fn clamp_min(self, low: f32) -> f32 {
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
    fn select_less(self, limit: f32, yes: f32, no: f32) -> f32 {
        if self < limit { yes } else { no }
    }

    #[inline(always)]
    fn to_bits(self) -> u32 {
        f32::to_bits(self)
    }

    #[inline(always)]
    fn from_bits(bits: u32) -> f32 {
        f32::from_bits(bits)
    }

    #[inline(always)]
    fn shift_right_1(bits: u32) -> u32 {
        bits >> 1
    }

    #[inline(always)]
    fn int_sub(x: u32, y: u32) -> u32 {
        x.wrapping_sub(y)
    }

    #[inline(always)]
    fn shift_left_23(bits: u32) -> u32 {
        bits << 23
    }

    #[inline(always)]
    fn lookup(table: &[f32; 16], at: u32) -> f32 {
        table[(at & 15) as usize]
    }
}

/// `(exp(r) - 1 - r) / r^2` on ±0.3475, 2^-34.
pub(super) const EXP: [f32; 6] = [0.5, 0.16666666, 0.04166629, 0.008333499, 0.0013944943, 0.00019790063];
/// erf near multiples of 1/4: the coefficients of `t = 4 x - n` for n from 0 to 15, ordered by power. Those of n = 0
/// approximate `erf(x) - x`, relative to erf. The last ones end in 1 where all larger floats round to 1.
#[rustfmt::skip]
const ERF: [[f32; 16]; 6] = [
    [
        0.0, 0.2763264, 0.5204999, 0.71115565, 0.8427008, 0.92290014, 0.96610516, 0.9866717, 0.9953223, 0.9985373, 0.999593, 0.9998994, 0.9999779, 0.9999957, 0.9999993, 0.9999999,
    ],
    [
        0.03209479, 0.26500353, 0.21969564, 0.16073278, 0.10377688, 0.05913028, 0.029732572, 0.013193748, 0.005166746, 0.0017855797, 0.0005445711, 0.00014656938, 3.4813304e-5, 7.2972744e-6, 1.3498628e-6, 2.2035977e-7,
    ],
    [
        1.5927169e-8, -0.016562419, -0.02746174, -0.030137524, -0.025944032, -0.018478546, -0.01115011, -0.0057725646, -0.0025837296, -0.001004667, -0.0003398823, -0.00010090383, -2.573978e-5, -6.1071696e-6, -1.6260824e-6, 1.6125726e-7,
    ],
    [
        -0.0058771917, -0.004830759, -0.0022884796, 0.00041842775, 0.0021619208, 0.002617732, 0.0021680144, 0.0014087327, 0.00075349223, 0.000339448, 0.00013046873, 4.312893e-5, 1.2328396e-5, 3.0589545e-6, 6.6067156e-7, 1.2447036e-7,
    ],
    [
        1.0332167e-6, 0.0004924655, 0.00071126566, 0.00058731704, 0.00026994437, -2.1633454e-5, -0.0001717137, -0.00018636585, -0.0001333791, -7.383872e-5, -3.5379002e-5, -1.2393533e-5, -5.311645e-6, -5.6630546e-7, 1.1543254e-6, -1.232411e-6,
    ],
    [
        0.00010846436, 7.780133e-5, 7.1960035e-6, -5.1259027e-5, -6.702512e-5, -4.597038e-5, -1.463968e-5, 6.2935123e-6, 1.27003495e-5, 1.0391012e-5, 5.9872523e-6, 2.7084109e-6, 1.0031472e-6, 3.1100325e-7, 8.1754266e-8, 1.8378339e-8,
    ],
];
/// `(tanh(x) / x - 1) / x^2` in `x^2` for |x| <= 0.6, 2^-28.
const TANH: [f32; 5] = [-0.333333, 0.13331924, -0.05378383, 0.020795973, -0.005895158];

/// 1.5 * 2^23: adding it leaves the nearest integer in the low bits, ties to even.
pub(super) const MAGIC: f32 = 12_582_912.0;
/// ln 2 in two parts; the first has 10 bits, so its product with an exponent is exact.
pub(super) const LN2_HI: f32 = 0.693359375;
pub(super) const LN2_LO: f32 = -0.00021219444;

#[inline(always)]
fn polynomial<L: SimdF32, const N: usize>(x: L, coefficients: &[f32; N]) -> L {
    let mut sum = L::splat(coefficients[N - 1]);
    for i in (0..N - 1).rev() {
        sum = sum.mul_add(x, L::splat(coefficients[i]));
    }
    sum
}

/// `exp(x) / 2^n`, and `n + bias` in the low bits of a float near `MAGIC`.
#[inline(always)]
fn exp_parts<L: SimdF32>(x: L, bias: f32) -> (L, L) {
    let magic = L::splat(MAGIC + bias);
    let n = x.mul_add(L::splat(std::f32::consts::LOG2_E), magic);
    let whole = n - magic;
    let r = whole.mul_add(L::splat(-LN2_HI), x);
    let r = whole.mul_add(L::splat(-LN2_LO), r);
    (exp_near(r), n)
}

/// exp(r) for |r| <= 0.3475: 1 + r (1 + r p), where the inner sum's rounding counts for a third.
#[inline(always)]
fn exp_near<L: SimdF32>(r: L) -> L {
    let one = L::splat(1.0);
    polynomial(r, &EXP).mul_add(r, one).mul_add(r, one)
}

/// exp(x) for x in [-87, 88], where the result is normal.
#[inline(always)]
fn exp_normal<L: SimdF32>(x: L) -> L {
    let (y, n) = exp_parts(x, 127.0);
    y * L::from_bits(L::shift_left_23(n.to_bits()))
}

#[inline(always)]
pub fn exp<L: SimdF32>(x: L) -> L {
    // Below -104 the result is 0. Smaller arguments are clamped to -176, where both factors are 0. A product that
    // underflows to 0 would take an x86 processor hundreds of cycles, and masked scores are all -inf.
    let x = x.clamp_max(L::splat(89.0)).clamp_min(L::splat(-176.0));
    // 2^n in two steps, so that subnormal results are rounded once and overflow is to infinity; 254 is both biases.
    let (y, n) = exp_parts(x, 254.0);
    scale(y, n.to_bits())
}

/// `y` times 2^(n - 254), in two steps.
#[inline(always)]
fn scale<L: SimdF32>(y: L, n: L::Int) -> L {
    let first = L::shift_right_1(n);
    y * L::from_bits(L::shift_left_23(first)) * L::from_bits(L::shift_left_23(L::int_sub(n, first)))
}

/// Like `exp`: the result is 0 below -150, and both factors are 0 at -254.
#[inline(always)]
pub fn exp2<L: SimdF32>(x: L) -> L {
    let (x, magic) = (x.clamp_max(L::splat(129.0)).clamp_min(L::splat(-254.0)), L::splat(MAGIC + 254.0));
    let n = x + magic;
    let r = (x - (n - magic)) * L::splat(std::f32::consts::LN_2);
    scale(exp_near(r), n.to_bits())
}

#[inline(always)]
pub fn tanh<L: SimdF32>(x: L) -> L {
    let a = x.abs().clamp_max(L::splat(10.0));
    let z = a * a;
    let near = (a * z).mul_add(polynomial(z, &TANH), a);
    let far = L::splat(1.0) - L::splat(2.0) / (exp_normal(a + a) + L::splat(1.0));
    a.select_less(L::splat(0.6), near, far).copysign(x)
}

/// `1 / (1 + exp(-x))`, computed from `exp(-|x|)`: it cannot overflow and keeps its relative accuracy as it approaches
/// 0.
#[inline(always)]
pub fn sigmoid<L: SimdF32>(x: L) -> L {
    divide_by_one_plus(x, exp(L::splat(0.0) - x.abs()))
}

/// `1 / (1 + 2^-x)`, computed in the same way.
#[inline(always)]
pub fn sigmoid2<L: SimdF32>(x: L) -> L {
    divide_by_one_plus(x, exp2(L::splat(0.0) - x.abs()))
}

/// `1 / (1 + e)`, or `e / (1 + e)` where `x` is negative.
#[inline(always)]
fn divide_by_one_plus<L: SimdF32>(x: L, e: L) -> L {
    let one = L::splat(1.0);
    let numerator = x.select_less(L::splat(0.0), e, one);
    let sum = one + e;
    let quotient = numerator / sum;
    // Adds back most of the sum's rounding error: the exact correction would need a second division.
    quotient - quotient * (e - (sum - one))
}

#[inline(always)]
pub fn erf<L: SimdF32>(x: L) -> L {
    let (a, four, magic) = (x.abs().clamp_max(L::splat(3.87)), L::splat(4.0), L::splat(MAGIC));
    let n = a.mul_add(four, magic);
    let t = a.mul_add(four, magic - n);
    let n = n.to_bits();
    let mut sum = L::lookup(&ERF[5], n);
    for c in ERF[1..5].iter().rev() {
        sum = sum.mul_add(t, L::lookup(c, n));
    }
    // The float after 1/8, which itself belongs to n = 0: ties go to even.
    let base = a.select_less(L::splat(0.125_000_015), a, L::lookup(&ERF[0], n));
    sum.mul_add(t, base).copysign(x)
}
