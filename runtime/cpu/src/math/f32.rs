//! Implements the functions of `f32`. Largest errors in units in the last place, over all 2^32 inputs: exp2, log 0.9;
//! rsqrt, expm1, log1p 1.5; sin 0.501. Over every 499th input: exp 0.9, tanh, erf 1.5, sigmoid 2.0. Over samples: cos,
//! tan, pow, rem_floor 0.501. `tests.rs` asserts these bounds.
//!
//! exp, tanh, sigmoid and erf are in `simd_f32.rs`. The logarithms compute in f32 lanes too. sin, cos, tan, pow and
//! rem_floor compute in f64 lanes, where plain arithmetic leaves only the final rounding; the trigonometric reduction is
//! exact for every finite input.
//!
//! Method: argument reduction as in Cody and Waite, "Software Manual for the Elementary Functions" (1980), then
//! polynomials fitted for this file with a Remez exchange in 200-bit mpmath, weighted for relative error of the result.
//! Each constant names its interval and error; rounding the coefficients does not change the stated errors.

// Coefficients are printed as the shortest decimals that name the intended float.
#![allow(clippy::excessive_precision)]

use super::float::{float_helpers, float_methods, number_methods};
use super::simd_f32::{self, EXP, LN2_HI, LN2_LO, MAGIC};
use super::{Float, Number, f64 as wide, fp8};

/// `(log(1 + f) - f + f^2/2) / f^3` on [sqrt(1/2) - 1, sqrt(2) - 1], 2^-30.
const LOG: [f32; 9] =
    [0.33333313, -0.2500001, 0.20002124, -0.16668005, 0.14219454, -0.12405341, 0.11888697, -0.1167751, 0.06747725];
/// `(sin(r) / r - 1) / r^2` in `r^2` for |r| <= pi/4, 2^-37.
const SIN: [f64; 4] = [-0.16666666640588113, 0.008333329280519252, -0.00019839304414558513, 2.718046466156871e-06];
/// `(cos(r) - 1 + r^2/2) / r^4` in `r^2` for |r| <= pi/4, 2^-43.
const COS: [f64; 4] = [0.04166666661910671, -0.0013888883467247852, 2.479945154803916e-05, -2.7205046129944937e-07];
/// `1 / (2 pi)` cut into digits of 28 bits, most significant first. 196 bits reach below the last bit that matters to
/// the largest f32, and a 24-bit significand times a digit is exact in f64.
const INV_TAU: [f64; 7] = [
    0.15915494039654732,
    2.6953480142255515e-09,
    4.038449450981451e-18,
    1.9241762118391763e-26,
    4.1707168783816406e-35,
    3.8770419007437455e-43,
    1.7634897189248905e-52,
];

const SQRT_HALF_BITS: u32 = 0x3f35_04f3;

float_helpers!(f32, i32, u32, bias 127, tiny 25);

/// log(2^k * (1 + f)).
#[inline(always)]
fn log_near(f: f32, k: i32) -> f32 {
    let kf = k as f32;
    let z = f * f;
    let tail = f * z * polynomial(f, &LOG) + kf * LN2_LO;
    (f + (tail - 0.5 * z)) + kf * LN2_HI
}

/// `x = (quarter + r / (pi/2)) * pi/2` with |r| <= pi/4 and `quarter` modulo 4. Whole turns are removed exactly from
/// each digit's product. The remainders are summed against the quadrant, largest first, so that cancellation is exact
/// too.
#[inline(always)]
fn reduce(x: f32) -> (f64, u64) {
    const MAGIC: f64 = 6_755_399_441_055_744.0;
    let x = x as f64;
    let mut parts = [0.0; 7];
    let mut turns = 0.0;
    for i in 0..7 {
        let product = x * INV_TAU[i];
        parts[i] = product - product.round_ties_even();
        turns += parts[i];
    }
    let shifted = turns * 4.0 + MAGIC;
    let mut rest = (shifted - MAGIC) * -0.25;
    for part in parts {
        rest += part;
    }
    (rest * std::f64::consts::TAU, shifted.to_bits())
}

#[inline(always)]
fn sin_cos_near(r: f64) -> (f64, f64) {
    let z = r * r;
    let sin = r + r * z * wide::polynomial(z, &SIN);
    let cos = (1.0 - 0.5 * z) + z * z * wide::polynomial(z, &COS);
    (sin, cos)
}

impl Number for f32 {
    number_methods!(f32);

    #[inline(always)]
    fn pow(self, exponent: Self) -> Self {
        let y = exponent as f64;
        let log = wide::log_positive(self.abs() as f64);
        let magnitude = wide::exp_normal(wide::clamp(y * log, -200.0, 200.0)) as f32;
        pow_specials(self, exponent, magnitude)
    }

    /// Long division in base 2^28, ten digits for the largest ratio of two f32. Each step is exact in f64: a digit
    /// has 29 bits, the divisor 24.
    #[inline(always)]
    fn rem_floor(self, divisor: Self) -> Self {
        const SHIFTS: [i32; 10] = [252, 224, 196, 168, 140, 112, 84, 56, 28, 0];
        let (a, b) = (self as f64, divisor as f64);
        let inverse = 1.0 / b;
        let mut r = a;
        for shift in SHIFTS {
            let digit = (r * (inverse * wide::power_of_two(-shift as i64))).round_ties_even();
            r -= digit * (b * wide::power_of_two(shift as i64));
        }
        let lifted = if (r < 0.0) != (b < 0.0) { r + b } else { r };
        let towards = if (a < 0.0) == (b < 0.0) { a } else { b };
        let y = if Number::is_inf(divisor) & (self.abs() < f32::INFINITY) { towards } else { lifted };
        let y = if (r == 0.0) | ((a == 0.0) & (b.abs() > 0.0)) { 0.0f64.copysign(b) } else { y };
        y as f32
    }

    #[inline(always)]
    fn div_floor(self, divisor: Self) -> Self {
        // f64 represents a quotient of two f32 precisely enough never to round it up to an integer that f32 could
        // distinguish.
        let q = (self as f64 / divisor as f64).floor() as f32;
        let opposite = ((self < 0.0) & (divisor > 0.0)) | ((self > 0.0) & (divisor < 0.0));
        let q = if Number::is_inf(divisor) & opposite { -1.0 } else { q };
        if Number::is_inf(self) & (divisor != 0.0) { f32::NAN } else { q }
    }
}

impl Float for f32 {
    float_methods!(f32);

    #[inline(always)]
    fn exp(self) -> Self {
        simd_f32::exp(self)
    }

    #[inline(always)]
    fn exp2(self) -> Self {
        simd_f32::exp2(self)
    }

    #[inline(always)]
    fn expm1(self) -> Self {
        let y = expm1_bounded(clamp(self, -20.0, 89.0));
        if self.abs() < 2.9802322e-8 { self } else { y }
    }

    #[inline(always)]
    fn log(self) -> Self {
        let (m, k) = split(self);
        log_specials(self, log_near(m - 1.0, k))
    }

    #[inline(always)]
    fn log1p(self) -> Self {
        let u = 1.0 + self;
        let back = u - 1.0;
        let lost = (1.0 - (u - back)) + (self - back);
        let (m, k) = split(u);
        // Adds back what `1 + x` lost, at the scale of m; beyond 2^25 the loss has no effect.
        let f = (m - 1.0) + lost * power_of_two(if k < 126 { -k } else { -126 });
        let y = log_specials(u, log_near(f, k));
        if self.abs() < 2.9802322e-8 { self } else { y }
    }

    #[inline(always)]
    fn sin(self) -> Self {
        let (r, quarter) = reduce(self);
        let (sin, cos) = sin_cos_near(r);
        let y = if quarter & 1 == 1 { cos } else { sin };
        let y = f64::from_bits(y.to_bits() ^ ((quarter & 2) << 62)) as f32;
        if self == 0.0 { self } else { y }
    }

    #[inline(always)]
    fn cos(self) -> Self {
        let (r, quarter) = reduce(self);
        let (sin, cos) = sin_cos_near(r);
        let y = if quarter & 1 == 1 { sin } else { cos };
        f64::from_bits(y.to_bits() ^ ((quarter.wrapping_add(1) & 2) << 62)) as f32
    }

    #[inline(always)]
    fn tan(self) -> Self {
        let (r, quarter) = reduce(self);
        let (sin, cos) = sin_cos_near(r);
        let odd = quarter & 1 == 1;
        let (top, bottom) = if odd { (-cos, sin) } else { (sin, cos) };
        let y = (top / bottom) as f32;
        if self == 0.0 { self } else { y }
    }

    #[inline(always)]
    fn tanh(self) -> Self {
        simd_f32::tanh(self)
    }

    #[inline(always)]
    fn erf(self) -> Self {
        simd_f32::erf(self)
    }

    #[inline(always)]
    fn sigmoid(self) -> Self {
        simd_f32::sigmoid(self)
    }

    #[inline(always)]
    fn sigmoid2(self) -> Self {
        simd_f32::sigmoid2(self)
    }

    #[inline(always)]
    fn fp8_e4m3(self) -> u8 {
        fp8::e4m3(self)
    }

    #[inline(always)]
    fn fp8_e5m2(self) -> u8 {
        fp8::e5m2(self)
    }
}
