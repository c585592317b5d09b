//! Implements the functions of `f64`, for accuracy rather than speed. Largest errors against mpmath, in units in the
//! last place: exp, exp2, log, sin, cos, erf, pow 1.0; expm1, log1p 1.1; rsqrt 1.5; sigmoid, tan 2; tanh 2.3.
//! `tests.rs` compares them with libm.
//!
//! Everything is vectorised except rem_floor and div_floor, which call `fmod` (exact, so the same everywhere), and sin,
//! cos and tan, whose reduction branches for |x| > 1.6e6 into integer arithmetic on the bits of 2/pi (Payne and Hanek,
//! "Radian reduction for trigonometric functions", 1983) to stay accurate for every finite input.
//!
//! Polynomials were fitted as in `f32.rs`. pow carries the logarithm in two f64, with the splitting and exact product
//! of Dekker, "A floating-point technique for extending the available precision" (1971).

use super::float::{float_helpers, float_methods, number_methods};
use super::{Float, Number, fp8};
use perilune_core::host_tensor::to_odd;

/// `(exp(r) - 1 - r) / r^2` on ±0.3475, 2^-64.
const EXP: [f64; 11] = [
    0.5,
    0.16666666666666685,
    0.04166666666666608,
    0.008333333333316697,
    0.0013888888889120328,
    0.00019841269897236862,
    2.4801586920816735e-05,
    2.75572339931204e-06,
    2.7557584559227995e-07,
    2.511234485996931e-08,
    2.082636830672935e-09,
];
/// `(log((1 + s) / (1 - s)) / s - 2) / s^2` in `s^2` up to 0.0295, 2^-59.
const LOG: [f64; 7] = [
    0.6666666666666735,
    0.39999999999407015,
    0.28571428744256777,
    0.22222198365674142,
    0.18183575877846067,
    0.15313736397876873,
    0.1479927064591777,
];
/// `(atanh(s) / s - 1 - s^2/3) / s^4` in `s^2` up to 0.0295, 2^-80.
const ATANH: [f64; 9] = [
    0.2,
    0.14285714285714188,
    0.11111111111145561,
    0.09090909084583666,
    0.07692308380497469,
    0.06666620005961157,
    0.05884343730900276,
    0.05211331918512645,
    0.05507543720021302,
];
/// `erf(x) / x - 1` in `x^2` for |x| <= 1, 2^-63.
const ERF_NEAR: [f64; 13] = [
    0.1283791670955126,
    -0.3761263890318375,
    0.11283791670954857,
    -0.026866170645072893,
    0.005223977624780852,
    -0.0008548326978741331,
    0.00012055331036867143,
    -1.4925593506099666e-05,
    1.646097280417694e-06,
    -1.6350025084407604e-07,
    1.4657878896503733e-08,
    -1.1365662237358265e-09,
    5.945255321494931e-11,
];
/// `exp(x^2) * erfc(x)` in `(x - 3) / (x + 3)` for x in [1, 6], weighted by `exp(-x^2) / erf(x)`, 2^-61.
const ERF_FAR: [f64; 13] = [
    0.17900115118138996,
    -0.32623356004317033,
    0.24560380170764323,
    -0.1501159365459819,
    0.07166583747013971,
    -0.02439248950867646,
    0.004269236205484938,
    0.0007083215593486472,
    -0.0005949523179609725,
    5.031165747650641e-05,
    7.1738775295132e-05,
    -6.359643795220054e-06,
    -6.554129777492882e-06,
];
/// `(sin(r) / r - 1) / r^2` in `r^2` for |r| <= pi/4, 2^-58.
const SIN: [f64; 6] = [
    -0.1666666666666663,
    0.008333333333322005,
    -0.00019841269829495457,
    2.755731358760602e-06,
    -2.5050742305819887e-08,
    1.5895904622427357e-10,
];
/// `(cos(r) - 1 + r^2/2) / r^4` in `r^2` for |r| <= pi/4, 2^-64.
const COS: [f64; 6] = [
    0.041666666666666595,
    -0.0013888888888872895,
    2.480158728874821e-05,
    -2.755731414863001e-07,
    2.087569657345405e-09,
    -1.1358310533842208e-11,
];

/// 1.5 * 2^52: adding it leaves the nearest integer in the low bits, ties to even.
const MAGIC: f64 = 6_755_399_441_055_744.0;
/// ln 2 in two parts; the first has 32 bits, so its product with an exponent is exact.
const LN2_HI: f64 = 0.6931471803691238;
const LN2_LO: f64 = 1.9082149292705877e-10;
/// 1/3 - f64(1/3).
const THIRD_LO: f64 = 1.850371707708594e-17;
/// pi/2 in four parts; the first three have 33 bits, so their products with a count below 2^20 are exact.
const HALF_PI: [f64; 4] = [1.5707963267341256, 6.077100506303966e-11, 2.0222662487111665e-21, 8.4784276603689e-32];
/// pi/2 - f64(pi/2).
const HALF_PI_LO: f64 = 6.123233995736766e-17;
/// 2/pi after the point, with one word of leading zeros.
const TWO_OVER_PI: [u64; 22] = [
    0x0000000000000000,
    0xa2f9836e4e441529,
    0xfc2757d1f534ddc0,
    0xdb6295993c439041,
    0xfe5163abdebbc561,
    0xb7246e3a424dd2e0,
    0x06492eea09d1921c,
    0xfe1deb1cb129a73e,
    0xe88235f52ebb4484,
    0xe99c7026b45f7e41,
    0x3991d639835339f4,
    0x9c845f8bbdf9283b,
    0x1ff897ffde05980f,
    0xef2f118b5a0a6d1f,
    0x6d367ecf27cb09b7,
    0x4f463f669e5fea2d,
    0x7527bac7ebe5f17b,
    0x3d0739f78a5292ea,
    0x6bfb5fb11f8d5d08,
    0x56033046fc7b6bab,
    0xf0cfbc209af4361d,
    0xa9e391615ee61b08,
];
const SQRT_HALF_BITS: u64 = 0x3fe6_a09e_667f_3bcd;

float_helpers!(f64, i64, u64, bias 1023, tiny 54);

/// `n as f64` for |n| < 2^51, in integer and float adds that every vector unit has.
#[inline(always)]
fn float(n: i64) -> f64 {
    f64::from_bits(MAGIC.to_bits().wrapping_add(n as u64)) - MAGIC
}

/// The rounded sum and its rounding error, for operands of any size (Knuth).
#[inline(always)]
fn two_sum(a: f64, b: f64) -> (f64, f64) {
    let s = a + b;
    let back = s - a;
    (s, (a - (s - back)) + (b - back))
}

/// The same for |a| >= |b| (Dekker).
#[inline(always)]
fn fast_two_sum(a: f64, b: f64) -> (f64, f64) {
    let s = a + b;
    (s, b - (s - a))
}

/// The rounded product and its rounding error. Operands are split in halves by masking, which cannot overflow.
#[inline(always)]
fn two_product(a: f64, b: f64) -> (f64, f64) {
    let half = |x: f64| f64::from_bits(x.to_bits() & 0xffff_ffff_f800_0000);
    let p = a * b;
    let (ah, bh) = (half(a), half(b));
    let (al, bl) = (a - ah, b - bh);
    (p, ((ah * bh - p) + ah * bl + al * bh) + al * bl)
}

/// exp(r + lost) near 1 for |r| <= ln(2) / 2.
#[inline(always)]
fn exp_near(r: f64, lost: f64) -> f64 {
    1.0 + (r + (r * r * polynomial(r, &EXP) + lost))
}

/// `y * 2^n` in two steps, so that subnormal results are rounded once and overflow is to infinity.
#[inline(always)]
fn scale(y: f64, n: i64) -> f64 {
    let half = n >> 1;
    y * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// exp(x) for |x| <= 700, where the result is normal.
#[inline(always)]
pub(super) fn exp_normal(x: f64) -> f64 {
    let (nf, n) = nearest(x * std::f64::consts::LOG2_E);
    exp_near((x - nf * LN2_HI) - nf * LN2_LO, 0.0) * power_of_two(n)
}

/// exp(x + tail) for any x and a tail below its last place.
#[inline(always)]
fn exp_with_tail(x: f64, tail: f64) -> f64 {
    let bounded = clamp(x, -746.0, 710.0);
    let tail = if bounded == x { tail } else { 0.0 };
    let (nf, n) = nearest(bounded * std::f64::consts::LOG2_E);
    let hi = bounded - nf * LN2_HI;
    let lo = tail - nf * LN2_LO;
    let r = hi + lo;
    scale(exp_near(r, (hi - r) + lo), n)
}

/// log(2^k * (1 + f)), as `f - f^2/2 + s * (f^2/2 + R(s^2))` with s = f / (2 + f): the large terms are nearly exact.
#[inline(always)]
fn log_near(f: f64, k: f64) -> f64 {
    let s = f / (2.0 + f);
    let z = s * s;
    let square = 0.5 * f * f;
    let tail = s * (square + z * polynomial(z, &LOG)) + k * LN2_LO;
    (f + (tail - square)) + k * LN2_HI
}

/// log for positive finite x.
#[inline(always)]
pub(super) fn log_positive(x: f64) -> f64 {
    let (m, k) = split(x);
    log_near(m - 1.0, float(k))
}

/// log in two f64, good to about 2^-65 relative, for positive finite x.
#[inline(always)]
fn log_two(x: f64) -> (f64, f64) {
    let (m, k) = split(x);
    let k = float(k);
    // s = (m - 1) / (m + 1)
    let f = m - 1.0;
    let (d, d_lost) = fast_two_sum(1.0, m);
    let sh = f / d;
    let (p, p_lost) = two_product(sh, d);
    let sl = (((f - p) - p_lost) - sh * d_lost) / d;
    // t = s^2 * (1/3 + s^2 * P(s^2)), so that log(m) = 2 s (1 + t)
    let (zh, zl) = two_product(sh, sh);
    let zl = zl + 2.0 * sh * sl;
    let (qh, ql) = fast_two_sum(1.0 / 3.0, zh * polynomial(zh, &ATANH));
    let ql = ql + THIRD_LO;
    let (th, tl) = two_product(zh, qh);
    let tl = tl + (zh * ql + zl * qh);
    let (ph, pl) = two_product(sh, th);
    let pl = pl + (sh * tl + sl * th);
    let (yh, yl) = fast_two_sum(sh, ph);
    let yl = yl + (sl + pl);
    let (hi, lo) = two_sum(k * LN2_HI, 2.0 * yh);
    fast_two_sum(hi, lo + (2.0 * yl + k * LN2_LO))
}

/// `x = (quarter + (hi + lo) / (pi/2)) * pi/2` with |hi + lo| <= pi/4 and `quarter` modulo 4.
#[inline(always)]
fn reduce(x: f64) -> (f64, f64, u64) {
    if x.abs() > 1.6e6 {
        return reduce_large(x);
    }
    let (n, quarter) = nearest(x * std::f64::consts::FRAC_2_PI);
    let (s, lost) = two_sum(x - n * HALF_PI[0], -(n * HALF_PI[1]));
    let (s, more) = two_sum(s, -(n * HALF_PI[2]));
    let (hi, lo) = fast_two_sum(s, (lost + more) - n * HALF_PI[3]);
    (hi, lo, quarter as u64)
}

/// The same for large x: 192 bits of 2/pi, from two bits above the point of the product, times the significand.
#[cold]
#[inline(never)]
fn reduce_large(x: f64) -> (f64, f64, u64) {
    if !x.is_finite() {
        return (f64::NAN, f64::NAN, 0);
    }
    let bits = x.abs().to_bits();
    let significand = (bits & 0xf_ffff_ffff_ffff) | (1 << 52);
    let start = (bits >> 52) as usize + 64 - 2 - 1075;
    let word = |i: usize| {
        let (at, shift) = (start / 64 + i, start % 64);
        let pair = ((TWO_OVER_PI[at] as u128) << 64) | TWO_OVER_PI[at + 1] as u128;
        (pair >> (64 - shift)) as u64
    };
    let low = significand as u128 * word(2) as u128;
    let middle = significand as u128 * word(1) as u128 + (low >> 64);
    let high = significand.wrapping_mul(word(0)).wrapping_add((middle >> 64) as u64);
    let top = ((high as u128) << 64) | (middle as u64) as u128;
    // The top two bits count quarter turns; the rest, as a signed number, is the fraction nearest to zero.
    let fraction = ((top << 2) | ((low as u64) >> 62) as u128) as i128;
    let quarter = (top >> 126) as u64 + (fraction < 0) as u64;
    let hi = fraction as f64;
    let unit = power_of_two(-128);
    let (hi, lo) = (hi * unit, (fraction.wrapping_sub(hi as i128)) as f64 * unit);
    let (p, lost) = two_product(hi, std::f64::consts::FRAC_PI_2);
    let (hi, lo) = fast_two_sum(p, lost + (hi * HALF_PI_LO + lo * std::f64::consts::FRAC_PI_2));
    if x < 0.0 { (-hi, -lo, quarter.wrapping_neg()) } else { (hi, lo, quarter) }
}

#[inline(always)]
fn sin_cos_near(hi: f64, lo: f64) -> (f64, f64) {
    let z = hi * hi;
    let half = 0.5 * z;
    let sin = hi + (hi * z * polynomial(z, &SIN) + lo * (1.0 - half));
    let first = 1.0 - half;
    let cos = first + (((1.0 - first) - half) + (z * z * polynomial(z, &COS) - hi * lo));
    (sin, cos)
}

/// `1 / (1 + e)`, or `e / (1 + e)` for a negative `x`.
#[inline(always)]
fn divide_by_one_plus(x: f64, e: f64) -> f64 {
    let numerator = if x < 0.0 { e } else { 1.0 };
    let sum = 1.0 + e;
    let quotient = numerator / sum;
    // Adds back most of the sum's rounding error: the exact correction would need a second division.
    quotient - quotient * (e - (sum - 1.0))
}

impl Number for f64 {
    number_methods!(f64);

    #[inline(always)]
    fn pow(self, exponent: Self) -> Self {
        let (hi, lo) = log_two(self.abs());
        // Beyond 2^65 every base but 1 has long overflowed or vanished, and the products below stay finite.
        let y = clamp(exponent, -3.6893488147419103e19, 3.6893488147419103e19);
        let (p, lost) = two_product(y, hi);
        let magnitude = exp_with_tail(p, lost + y * lo);
        pow_specials(self, exponent, magnitude)
    }

    #[inline(always)]
    fn rem_floor(self, divisor: Self) -> Self {
        let r = self % divisor;
        let lifted = if (r < 0.0) != (divisor < 0.0) { r + divisor } else { r };
        if r == 0.0 { (0.0f64).copysign(divisor) } else { lifted }
    }

    #[inline(always)]
    fn div_floor(self, divisor: Self) -> Self {
        let r = self % divisor;
        let q = (self - r) / divisor;
        let q = if (r != 0.0) & ((r < 0.0) != (divisor < 0.0)) { q - 1.0 } else { q };
        // (self - r) / divisor is an integer but for rounding.
        let near = q.round_ties_even();
        let whole = if near == 0.0 { (0.0f64).copysign(self / divisor) } else { near };
        if divisor == 0.0 { self / divisor } else { whole }
    }
}

impl Float for f64 {
    float_methods!(f64);

    #[inline(always)]
    fn exp(self) -> Self {
        exp_with_tail(self, 0.0)
    }

    #[inline(always)]
    fn exp2(self) -> Self {
        let x = clamp(self, -1076.0, 1025.0);
        let (nf, n) = nearest(x);
        scale(exp_near((x - nf) * std::f64::consts::LN_2, 0.0), n)
    }

    #[inline(always)]
    fn expm1(self) -> Self {
        let y = expm1_bounded(clamp(self, -40.0, 710.0));
        if self.abs() < 5.551115123125783e-17 { self } else { y }
    }

    #[inline(always)]
    fn log(self) -> Self {
        log_specials(self, log_positive(self))
    }

    #[inline(always)]
    fn log1p(self) -> Self {
        let u = 1.0 + self;
        let (_, lost) = two_sum(1.0, self);
        let (m, k) = split(u);
        // Adds back what `1 + x` lost, at the scale of m; beyond 2^54 the loss has no effect.
        let f = (m - 1.0) + lost * power_of_two(if k < 1022 { -k } else { -1022 });
        let y = log_specials(u, log_near(f, float(k)));
        if self.abs() < 5.551115123125783e-17 { self } else { y }
    }

    #[inline(always)]
    fn sin(self) -> Self {
        let (hi, lo, quarter) = reduce(self);
        let (sin, cos) = sin_cos_near(hi, lo);
        let y = if quarter & 1 == 1 { cos } else { sin };
        let y = f64::from_bits(y.to_bits() ^ ((quarter & 2) << 62));
        if self == 0.0 { self } else { y }
    }

    #[inline(always)]
    fn cos(self) -> Self {
        let (hi, lo, quarter) = reduce(self);
        let (sin, cos) = sin_cos_near(hi, lo);
        let y = if quarter & 1 == 1 { sin } else { cos };
        f64::from_bits(y.to_bits() ^ ((quarter.wrapping_add(1) & 2) << 62))
    }

    #[inline(always)]
    fn tan(self) -> Self {
        let (hi, lo, quarter) = reduce(self);
        let (sin, cos) = sin_cos_near(hi, lo);
        let odd = quarter & 1 == 1;
        let (top, bottom) = if odd { (-cos, sin) } else { (sin, cos) };
        let y = top / bottom;
        if self == 0.0 { self } else { y }
    }

    #[inline(always)]
    fn tanh(self) -> Self {
        let a = self.abs();
        let t = expm1_bounded(clamp(a + a, 0.0, 40.0));
        let y = (t / (t + 2.0)).copysign(self);
        if a < 5.551115123125783e-17 { self } else { y }
    }

    #[inline(always)]
    fn erf(self) -> Self {
        let a = clamp(self.abs(), 0.0, 6.0);
        let z = a * a;
        let near = a + a * polynomial(z, &ERF_NEAR);
        let far = 1.0 - exp_normal(-z) * polynomial((a - 3.0) / (a + 3.0), &ERF_FAR);
        let y = if a < 1.0 { near } else { far };
        y.copysign(self)
    }

    #[inline(always)]
    fn fp8_e4m3(self) -> u8 {
        fp8::e4m3(to_odd(self))
    }

    #[inline(always)]
    fn fp8_e5m2(self) -> u8 {
        fp8::e5m2(to_odd(self))
    }

    #[inline(always)]
    fn sigmoid(self) -> Self {
        divide_by_one_plus(self, Float::exp(-self.abs()))
    }

    #[inline(always)]
    fn sigmoid2(self) -> Self {
        divide_by_one_plus(self, Float::exp2(-self.abs()))
    }
}
