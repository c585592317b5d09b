//! Tests the accuracy of every math function against the `libm` crate: f32 against libm in f64, f64 against libm in its
//! own precision, so that the f64 bounds include libm's own error. Sweeps of f32 take every 499th bit pattern; `--ignored` takes all of them.

use super::{Float, Number};
use rayon::prelude::*;

/// Distance in units in the last place of f32 at `want`; 0 for equal specials, infinite for unequal ones.
fn ulps_f32(got: f32, want: f64) -> f64 {
    let rounded = want as f32;
    if got.to_bits() == rounded.to_bits() || (got.is_nan() && rounded.is_nan()) {
        return 0.0;
    }
    if !got.is_finite() || (got == 0.0 && rounded == 0.0) {
        return f64::INFINITY;
    }
    let exponent = ((want.abs().to_bits() >> 52) as i32 - 1023).clamp(-126, 127);
    (got as f64 - want).abs() / f64::from_bits(((exponent - 23 + 1023) as u64) << 52)
}

fn ulps_f64(got: f64, want: f64) -> f64 {
    if got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()) {
        return 0.0;
    }
    if !got.is_finite() || !want.is_finite() || (got < 0.0) != (want < 0.0) || got == want {
        return f64::INFINITY;
    }
    got.to_bits().abs_diff(want.to_bits()) as f64
}

const EDGES: [f64; 24] = [
    0.0,
    -0.0,
    f64::INFINITY,
    f64::NEG_INFINITY,
    f64::NAN,
    1.0,
    -1.0,
    0.5,
    -0.5,
    2.0,
    1.5,
    -3.0,
    f64::MAX,
    f64::MIN,
    f64::MIN_POSITIVE,
    5e-324,
    -5e-324,
    1e-310,
    709.78,
    -745.1,
    0.999_999_999_999_999_9,
    1.000_000_000_000_000_2,
    1.6e6,
    // The f64 nearest to a multiple of pi/2.
    5.319372648326541e255,
];

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns any bit pattern, a number within ±`range`, or a number arbitrarily close to 0 or 1.
    fn float(&mut self, range: f64) -> f64 {
        let (kind, u) = (self.next() % 4, self.unit() * 2.0 - 1.0);
        match kind {
            0 => f64::from_bits(self.next()),
            1 => u * range,
            2 => u * range * libm::exp2(-60.0 * self.unit()),
            _ => 1.0 + u * libm::exp2(-50.0 * self.unit()),
        }
    }
}

/// The largest error in ulps among some inputs, and the first input that has it.
fn worst_f32(ours: impl Fn(f32) -> f32, oracle: impl Fn(f64) -> f64, inputs: impl Iterator<Item = f32>) -> (f64, f32) {
    let mut worst = (0.0, 0.0);
    for x in inputs {
        let e = ulps_f32(ours(x), oracle(x as f64));
        if e > worst.0 {
            worst = (e, x);
        }
    }
    worst
}

/// Compares a function at `EDGES` and at every `stride`-th bit pattern, on all processors.
fn sweep_f32(
    name: &str,
    ours: impl Fn(f32) -> f32 + Sync,
    oracle: impl Fn(f64) -> f64 + Sync,
    bound: f64,
    stride: u32,
) {
    const PARTS: u64 = 256;
    let count = u64::from(u32::MAX / stride) + 1;
    let parts = (0..PARTS).into_par_iter().map(|part| {
        let patterns = (part..count).step_by(PARTS as usize).map(|k| k as u32 * stride);
        worst_f32(&ours, &oracle, patterns.map(f32::from_bits))
    });
    let edges = worst_f32(&ours, &oracle, EDGES.iter().map(|&x| x as f32));
    let (worst, at) = parts.collect::<Vec<_>>().into_iter().fold(edges, |a, b| if b.0 > a.0 { b } else { a });
    println!("f32 {name}: {worst:.3} ulp at {at:e}");
    assert!(worst <= bound, "f32 {name}: {worst} ulp at {at:e}: got {:e}, want {:e}", ours(at), oracle(at as f64));
}

fn sweep_f64(name: &str, ours: impl Fn(f64) -> f64, oracle: impl Fn(f64) -> f64, bound: f64) {
    let (mut worst, mut at) = (0.0, 0.0);
    let mut check = |x: f64| {
        let e = ulps_f64(ours(x), oracle(x));
        if e > worst {
            (worst, at) = (e, x);
        }
    };
    EDGES.iter().for_each(|&x| check(x));
    let mut random = Random(7);
    (0..200_000).for_each(|i| check(random.float([1.0, 30.0, 750.0][i % 3])));
    println!("f64 {name}: {worst:.0} ulp at {at:e}");
    assert!(worst <= bound, "f64 {name}: {worst} ulp at {at:e}: got {:e}, want {:e}", ours(at), oracle(at));
}

fn sigmoid_oracle(x: f64) -> f64 {
    if x < 0.0 { libm::exp(x) / (1.0 + libm::exp(x)) } else { 1.0 / (1.0 + libm::exp(-x)) }
}

fn sigmoid2_oracle(x: f64) -> f64 {
    if x < 0.0 { libm::exp2(x) / (1.0 + libm::exp2(x)) } else { 1.0 / (1.0 + libm::exp2(-x)) }
}

fn sign_oracle(x: f64) -> f64 {
    if x == 0.0 || x.is_nan() { x + 0.0 } else { 1f64.copysign(x) }
}

/// Defines one test per function: name, oracle, bound in f32, bound in f64.
macro_rules! unary {
    ($($name:ident, $oracle:expr, $single:expr, $double:expr;)*) => {
        /// The functions as methods of a generic float: `abs` and `sign` belong to `Number`, the others to `Float`.
        mod ours {
            use super::*;
            $(pub fn $name<T: Float>(x: T) -> T {
                x.$name()
            })*
        }

        mod unary {
            use super::*;
            $(#[test]
            fn $name() {
                sweep_f32(stringify!($name), ours::$name::<f32>, $oracle, $single, 499);
                sweep_f64(stringify!($name), ours::$name::<f64>, $oracle, $double);
            })*
        }

        mod every_f32 {
            use super::*;
            $(#[test]
            #[ignore = "all 2^32 inputs"]
            fn $name() {
                sweep_f32(stringify!($name), ours::$name::<f32>, $oracle, $single, 1);
            })*
        }
    };
}

unary! {
    exp, libm::exp, 0.9, 1.0;
    exp2, libm::exp2, 0.95, 1.0;
    expm1, libm::expm1, 1.5, 2.0;
    log, libm::log, 0.9, 1.0;
    log1p, libm::log1p, 1.5, 2.0;
    sqrt, libm::sqrt, 0.5, 0.0;
    rsqrt, |x| 1.0 / libm::sqrt(x), 1.5, 0.0;
    sin, libm::sin, 0.501, 1.0;
    cos, libm::cos, 0.501, 1.0;
    tan, libm::tan, 0.501, 3.0;
    tanh, libm::tanh, 1.5, 3.0;
    sigmoid, sigmoid_oracle, 2.0, 2.0;
    sigmoid2, sigmoid2_oracle, 2.0, 2.0;
    erf, libm::erf, 1.5, 2.0;
    abs, libm::fabs, 0.0, 0.0;
    floor, libm::floor, 0.0, 0.0;
    ceil, libm::ceil, 0.0, 0.0;
    round, libm::rint, 0.0, 0.0;
    sign, sign_oracle, 0.0, 0.0;
}

#[test]
fn powers_match_libm() {
    let (mut worst, mut at) = (0.0, (0.0, 0.0));
    let mut check = |x: f32, y: f32| {
        let e = ulps_f32(Number::pow(x, y), libm::pow(x as f64, y as f64));
        if e > worst {
            (worst, at) = (e, (x, y));
        }
    };
    let mut random = Random(1);
    EDGES.iter().for_each(|&x| EDGES.iter().for_each(|&y| check(x as f32, y as f32)));
    for i in 0..2_000_000 {
        let x = if i % 2 == 0 { f32::from_bits(random.next() as u32) } else { random.float(10.0) as f32 };
        check(x, random.float([1.0, 8.0, 200.0][i % 3]) as f32);
        check(x, (random.next() % 41) as f32 - 20.0);
    }
    println!("f32 pow: {worst:.3} ulp at {at:?}");
    assert!(worst <= 0.501, "f32 pow: {worst} ulp at {at:?}");

    let (mut worst, mut at) = (0.0, (0.0, 0.0));
    let mut check = |x: f64, y: f64| {
        // libm 0.2.16 loses up to 1e3 ulp beyond: pow(0.9999999158521281, 8221673881.777196) is pinned below instead.
        if y.abs() >= 2147483648.0 && (x.abs() - 1.0).abs() < 1e-3 {
            return;
        }
        let e = ulps_f64(Number::pow(x, y), libm::pow(x, y));
        if e > worst {
            (worst, at) = (e, (x, y));
        }
    };
    EDGES.iter().for_each(|&x| EDGES.iter().for_each(|&y| check(x, y)));
    for i in 0..500_000 {
        let x = random.float(10.0);
        check(x, random.float([1.0, 8.0, 200.0][i % 3]));
        // Targets the ends of the exponent range, where an error in the logarithm has the largest effect.
        check(x, (random.unit() * 1450.0 - 745.0) / libm::log(x.abs()));
        check(x, (random.next() % 41) as f64 - 20.0);
    }
    println!("f64 pow: {worst:.0} ulp at {at:?}");
    assert!(worst <= 2.0, "f64 pow: {worst} ulp at {at:?}");
    // mpmath: 3.461573780641272913379261e-301.
    assert_eq!(Number::pow(0.9999999158521281f64, 8221673881.777196), 3.461573780641273e-301);
}

/// Python's `%`, computed with the exact `fmod`.
fn remainder(a: f64, b: f64) -> f64 {
    let r = libm::fmod(a, b);
    if r == 0.0 {
        0f64.copysign(b)
    } else if (r < 0.0) != (b < 0.0) {
        r + b
    } else {
        r
    }
}

#[test]
fn floored_division_matches_f64() {
    let mut random = Random(3);
    let check = |a: f32, b: f32| {
        let (got, want) = (Number::rem_floor(a, b), remainder(a as f64, b as f64));
        assert!(ulps_f32(got, want) <= 0.5, "{a:e} % {b:e}: got {got:e}, want {want:e}");
        let (got, q) = (Number::div_floor(a, b), Number::div_floor(a as f64, b as f64));
        assert!(ulps_f32(got, q) <= 0.5, "{a:e} // {b:e}: got {got:e}, want {q:e}");
        let wide = Number::rem_floor(a as f64, b as f64);
        assert!(ulps_f64(wide, want) == 0.0, "f64 {a:e} % {b:e}: got {wide:e}, want {want:e}");
    };
    EDGES.iter().for_each(|&x| EDGES.iter().for_each(|&y| check(x as f32, y as f32)));
    for _ in 0..150_000 {
        let (a, b) = (f32::from_bits(random.next() as u32), f32::from_bits(random.next() as u32));
        check(a, b);
        check(random.float(50.0) as f32, random.float(5.0) as f32);
        check((random.next() % 2001) as f32 - 1000.0, (random.next() % 41) as f32 - 20.0);
    }
    for (a, b, r, q) in [(7.0, 3.0, 1.0, 2.0), (-7.0, 3.0, 2.0, -3.0), (7.0, -3.0, -2.0, -3.0), (-7.0, -3.0, -1.0, 2.0)]
    {
        assert_eq!((Number::rem_floor(a, b), Number::div_floor(a, b)), (r, q));
    }
    assert_eq!(Number::div_floor(-1.0f64, f64::INFINITY), -1.0);
    assert_eq!(Number::div_floor(1.0f64, 0.0), f64::INFINITY);
    assert_eq!(Number::rem_floor(-1.0f32, f32::INFINITY), f32::INFINITY);
    assert!(Number::rem_floor(1.0f32, 0.0).is_nan() && Number::div_floor(f32::INFINITY, 2.0).is_nan());
}

fn special_values<T: Float + std::fmt::Debug>() {
    let f = T::from_f64;
    let (inf, nan, zero, one) = (T::INFINITY, T::NAN, T::ZERO, T::ONE);
    let same = |got: T, want: T| {
        let (g, w) = (got.to_f64(), want.to_f64());
        assert!(g.to_bits() == w.to_bits() || (g.is_nan() && w.is_nan()), "got {got:?}, want {want:?}");
    };
    same(inf.exp(), inf);
    same(inf.neg().exp(), zero);
    same(inf.neg().expm1(), one.neg());
    same(zero.log(), inf.neg());
    same(zero.neg().log(), inf.neg());
    same(one.neg().log(), nan);
    same(one.neg().log1p(), inf.neg());
    same(inf.log1p(), inf);
    same(inf.neg().tanh(), one.neg());
    same(inf.erf(), one);
    same(inf.neg().sigmoid(), zero);
    same(inf.sigmoid(), one);
    same(inf.sin(), nan);
    same(f(2.5).round(), f(2.0));
    same(f(-3.5).round(), f(-4.0));
    same(zero.neg().sign(), zero);
    same(nan.sign(), nan);
    same(zero.rsqrt(), inf);
    for x in [one, one.neg(), inf, inf.neg(), nan, zero] {
        same(x.maximum(nan), nan);
        same(nan.minimum(x), nan);
        same(x.pow(zero), one);
        same(one.pow(x), one);
    }
    same(f(2.0).maximum(one.neg()), f(2.0));
    same(f(2.0).minimum(one.neg()), one.neg());
    assert!(inf.is_inf() && inf.neg().is_inf() && !one.is_inf() && nan.is_nan() && !inf.is_nan());
    same(zero.neg().pow(f(-3.0)), inf.neg());
    same(zero.neg().pow(f(-2.0)), inf);
    same(zero.neg().pow(f(3.0)), zero.neg());
    same(f(-2.0).pow(f(3.0)), f(-8.0));
    same(f(-2.0).pow(f(0.5)), nan);
    same(inf.neg().pow(f(0.5)), inf);
    same(inf.neg().pow(f(-3.0)), zero.neg());
    same(one.neg().pow(inf), one);
    same(f(0.5).pow(inf), zero);
    same(f(0.5).pow(inf.neg()), inf);
    same(f(3.0).pow(f(2.0)), f(9.0));
}

#[test]
fn special_values_of_both_widths() {
    special_values::<f32>();
    special_values::<f64>();
}
