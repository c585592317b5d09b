//! `f32` math. Largest errors in units in the last place, seen over all 2^32 inputs: exp2, log 0.9; rsqrt, expm1,
//! log1p 1.5; sin 0.501. Seen over every 499th input: exp 0.9, tanh, erf 1.5, sigmoid 2.0. Seen over samples: cos, tan,
//! pow, rem_floor 0.501. `tests.rs` holds every function to them.
//!
//! exp, tanh, sigmoid and erf are in `lane.rs`. log and its kin stay in f32 lanes too. sin, cos, tan, pow and rem_floor
//! work in f64 lanes, where plain arithmetic leaves only the final rounding; the trigonometric reduction is exact for
//! every finite input.
//!
//! Method: argument reduction as in Cody and Waite, "Software Manual for the Elementary Functions" (1980), then
//! polynomials fitted for this file with a Remez exchange in 200-bit mpmath, weighted for relative error of the
//! result. Each constant names its interval and error; rounding the coefficients costs nothing visible.

// Coefficients are printed as the shortest decimals that name the intended float.
#![allow(clippy::excessive_precision)]

use super::{Real, f64 as wide, fp8, lane, pow_specials};

/// `(exp(r) - 1 - r) / r^2` on ±0.3475, 2^-34.
const EXP: [f32; 6] = [0.5, 0.16666666, 0.04166629, 0.008333499, 0.0013944943, 0.00019790063];
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

/// 1.5 * 2^23: adding it leaves the nearest integer in the low bits, ties to even.
const MAGIC: f32 = 12_582_912.0;
/// ln 2 in two parts; the first has 10 bits, so its product with an exponent is exact.
const LN2_HI: f32 = 0.693359375;
const LN2_LO: f32 = -0.00021219444;
const SQRT_HALF_BITS: u32 = 0x3f35_04f3;
const ONE_BITS: u32 = 0x3f80_0000;

#[inline(always)]
fn polynomial<const N: usize>(x: f32, coefficients: &[f32; N]) -> f32 {
    let mut sum = coefficients[N - 1];
    for i in (0..N - 1).rev() {
        sum = sum * x + coefficients[i];
    }
    sum
}

/// The nearest integer to `x`, as float and as int, for |x| < 2^22. NaN gives NaN and any int.
#[inline(always)]
fn nearest(x: f32) -> (f32, i32) {
    let shifted = x + MAGIC;
    (shifted - MAGIC, shifted.to_bits().wrapping_sub(MAGIC.to_bits()) as i32)
}

/// `2^n` for n in -126..=127, and 0 for -127.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// Clamps without touching NaN.
#[inline(always)]
fn clamp(x: f32, low: f32, high: f32) -> f32 {
    let x = if x > high { high } else { x };
    if x < low { low } else { x }
}

/// expm1 for x in [-20, 89]; loses the last bits of subnormals.
#[inline(always)]
fn expm1_bounded(x: f32) -> f32 {
    let (nf, n) = nearest(x * std::f32::consts::LOG2_E);
    let (hi, lo) = (x - nf * LN2_HI, nf * LN2_LO);
    let r = hi - lo;
    let lost = (hi - r) - lo;
    // Half the scale, then doubled, since 2^128 is no float. The first sum is exact wherever cancellation could hurt.
    let h = power_of_two(n.wrapping_sub(1));
    let y = (h * r + (h - 0.5)) + h * (r * r * polynomial(r, &EXP) + lost);
    y + y
}

/// `x = 2^k * m` with m in [sqrt(1/2), sqrt(2)), for positive finite x, subnormals included.
#[inline(always)]
fn split(x: f32) -> (f32, i32) {
    let tiny = x < f32::MIN_POSITIVE;
    let scaled = if tiny { x * 33_554_432.0 } else { x };
    let bias = if tiny { 127 + 25 } else { 127 };
    let bits = scaled.to_bits().wrapping_add(ONE_BITS - SQRT_HALF_BITS);
    (f32::from_bits((bits & 0x7f_ffff) + SQRT_HALF_BITS), (bits >> 23) as i32 - bias)
}

/// log(2^k * (1 + f)).
#[inline(always)]
fn log_near(f: f32, k: i32) -> f32 {
    let kf = k as f32;
    let z = f * f;
    let tail = f * z * polynomial(f, &LOG) + kf * LN2_LO;
    (f + (tail - 0.5 * z)) + kf * LN2_HI
}

/// `finite` for positive finite x; else -inf at zero, +inf at +inf, and NaN for the rest.
#[inline(always)]
fn log_specials(x: f32, finite: f32) -> f32 {
    let zero = if x == 0.0 { f32::NEG_INFINITY } else { f32::NAN };
    let edge = if x == f32::INFINITY { x } else { zero };
    if (x > 0.0) & (x < f32::INFINITY) { finite } else { edge }
}

/// `x = (quarter + r / (pi/2)) * pi/2` with |r| <= pi/4 and `quarter` modulo 4. Whole turns of each digit's product
/// drop out exactly; the rest is summed against the quadrant, largest first, so that cancellation is exact too.
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

impl Real for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const INFINITY: Self = f32::INFINITY;
    const NAN: Self = f32::NAN;

    #[inline(always)]
    fn from_f64(x: f64) -> Self {
        x as f32
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        self as f64
    }

    #[inline(always)]
    fn exp(self) -> Self {
        lane::exp(self)
    }

    #[inline(always)]
    fn exp2(self) -> Self {
        lane::exp2(self)
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
        // What `1 + x` lost goes back in at the scale of m; beyond 2^25 it no longer matters.
        let f = (m - 1.0) + lost * power_of_two(if k < 126 { -k } else { -126 });
        let y = log_specials(u, log_near(f, k));
        if self.abs() < 2.9802322e-8 { self } else { y }
    }

    #[inline(always)]
    fn sqrt(self) -> Self {
        f32::sqrt(self)
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
        lane::tanh(self)
    }

    #[inline(always)]
    fn erf(self) -> Self {
        lane::erf(self)
    }

    #[inline(always)]
    fn sigmoid(self) -> Self {
        lane::sigmoid(self)
    }

    #[inline(always)]
    fn sigmoid2(self) -> Self {
        lane::sigmoid2(self)
    }

    #[inline(always)]
    fn pow(self, exponent: Self) -> Self {
        let y = exponent as f64;
        let log = wide::log_positive(self.abs() as f64);
        let magnitude = wide::exp_normal(wide::clamp(y * log, -200.0, 200.0)) as f32;
        let integer = exponent.floor() == exponent;
        let half = 0.5 * exponent;
        pow_specials(self, exponent, magnitude, integer, integer & (half.floor() != half))
    }

    #[inline(always)]
    fn fp8_e4m3(self) -> u8 {
        fp8::e4m3(self)
    }

    #[inline(always)]
    fn fp8_e4m3_value(self) -> Self {
        fp8::e4m3_value(self as u32 & 0xff)
    }

    #[inline(always)]
    fn fp8_e5m2(self) -> u8 {
        fp8::e5m2(self)
    }

    #[inline(always)]
    fn fp8_e5m2_value(self) -> Self {
        fp8::e5m2_value(self as u32 & 0xff)
    }

    #[inline(always)]
    fn abs(self) -> Self {
        f32::abs(self)
    }

    #[inline(always)]
    fn floor(self) -> Self {
        f32::floor(self)
    }

    #[inline(always)]
    fn ceil(self) -> Self {
        f32::ceil(self)
    }

    #[inline(always)]
    fn round(self) -> Self {
        self.round_ties_even()
    }

    #[inline(always)]
    fn copysign(self, sign: Self) -> Self {
        f32::copysign(self, sign)
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
        let y = if divisor.is_inf() & (self.abs() < f32::INFINITY) { towards } else { lifted };
        let y = if (r == 0.0) | ((a == 0.0) & (b.abs() > 0.0)) { 0.0f64.copysign(b) } else { y };
        y as f32
    }

    #[inline(always)]
    fn div_floor(self, divisor: Self) -> Self {
        // f64 holds a quotient of two f32 finely enough never to round it up onto an integer that f32 can tell apart.
        let q = (self as f64 / divisor as f64).floor() as f32;
        let opposite = ((self < 0.0) & (divisor > 0.0)) | ((self > 0.0) & (divisor < 0.0));
        let q = if divisor.is_inf() & opposite { -1.0 } else { q };
        if self.is_inf() & (divisor != 0.0) { f32::NAN } else { q }
    }
}
