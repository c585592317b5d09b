//! Defines, as macros, what `f32` and `f64` have in common; the integer type of the bits and the constants differ.

/// Defines helpers of argument reduction for a float type.
///
/// `$int`, `$uint`: integers of the type's size. `$bias`: of the exponent. `$tiny`: a power of two that makes subnormal
/// numbers normal. The module defines `MAGIC`, `LN2_HI`, `LN2_LO`, `EXP` and `SQRT_HALF_BITS`.
macro_rules! float_helpers {
    ($t:ident, $int:ident, $uint:ident, bias $bias:literal, tiny $tiny:literal) => {
        const MANTISSA_BITS: u32 = $t::MANTISSA_DIGITS - 1;

        #[inline(always)]
        pub(super) fn polynomial<const N: usize>(x: $t, coefficients: &[$t; N]) -> $t {
            let mut sum = coefficients[N - 1];
            for i in (0..N - 1).rev() {
                sum = sum * x + coefficients[i];
            }
            sum
        }

        /// The nearest integer to `x`, as float and as int, while `x + MAGIC` has a unit in the last place of 1. NaN gives
        /// NaN and any int.
        #[inline(always)]
        fn nearest(x: $t) -> ($t, $int) {
            let shifted = x + MAGIC;
            (shifted - MAGIC, shifted.to_bits().wrapping_sub(MAGIC.to_bits()) as $int)
        }

        /// `2^n` for exponents of normal numbers, and 0 for the one below them.
        #[inline(always)]
        pub(super) fn power_of_two(n: $int) -> $t {
            $t::from_bits((n.wrapping_add($bias) as $uint) << MANTISSA_BITS)
        }

        /// Clamps; NaN is kept.
        #[inline(always)]
        pub(super) fn clamp(x: $t, low: $t, high: $t) -> $t {
            let x = if x > high { high } else { x };
            if x < low { low } else { x }
        }

        /// expm1 between the argument where it is -1 and the one where it overflows; loses the last bits of subnormals.
        #[inline(always)]
        fn expm1_bounded(x: $t) -> $t {
            let (nf, n) = nearest(x * std::$t::consts::LOG2_E);
            let (hi, lo) = (x - nf * LN2_HI, nf * LN2_LO);
            let r = hi - lo;
            let lost = (hi - r) - lo;
            // Scales by half and doubles, since 2^(bias + 1) is not a float. The first sum is exact wherever
            // cancellation could matter.
            let h = power_of_two(n.wrapping_sub(1));
            let y = (h * r + (h - 0.5)) + h * (r * r * polynomial(r, &EXP) + lost);
            y + y
        }

        /// `x = 2^k * m` with m in [sqrt(1/2), sqrt(2)), for positive finite x, subnormals included.
        #[inline(always)]
        fn split(x: $t) -> ($t, $int) {
            const ONE_BITS: $uint = (1.0 as $t).to_bits();
            const SCALE: $t = ((1 as $uint) << $tiny) as $t;
            let tiny = x < $t::MIN_POSITIVE;
            let scaled = if tiny { x * SCALE } else { x };
            let bias = if tiny { $bias + $tiny } else { $bias };
            let bits = scaled.to_bits().wrapping_add(ONE_BITS - SQRT_HALF_BITS);
            let mantissa = bits & ((1 << MANTISSA_BITS) - 1);
            ($t::from_bits(mantissa + SQRT_HALF_BITS), (bits >> MANTISSA_BITS) as $int - bias)
        }

        /// Returns `finite` for positive finite x; otherwise -inf at zero, +inf at +inf, and NaN for the rest.
        #[inline(always)]
        fn log_specials(x: $t, finite: $t) -> $t {
            let zero = if x == 0.0 { $t::NEG_INFINITY } else { $t::NAN };
            let edge = if x == $t::INFINITY { x } else { zero };
            if (x > 0.0) & (x < $t::INFINITY) { finite } else { edge }
        }

        /// Applies the C99 special cases of `pow` to `magnitude`, which need only be right for finite `|x| > 0` and
        /// finite `y`.
        #[inline(always)]
        fn pow_specials(x: $t, y: $t, magnitude: $t) -> $t {
            let y_is_integer = y.floor() == y;
            let half = 0.5 * y;
            let y_is_odd = y_is_integer & (half.floor() != half);
            let ax = x.abs();
            let extreme = (ax == 0.0) | (ax == $t::INFINITY) | (y.abs() == $t::INFINITY);
            let grows = (ax > 1.0) == (y > 0.0);
            let limit = if grows { $t::INFINITY } else { 0.0 };
            let r = if extreme { limit } else { magnitude };
            let r = if (x < 0.0) & (ax != $t::INFINITY) & !y_is_integer { $t::NAN } else { r };
            let r = if y_is_odd { r.copysign(x) } else { r };
            let r = if x.is_nan() | y.is_nan() { $t::NAN } else { r };
            let one = (y == 0.0) | (x == 1.0) | ((ax == 1.0) & (y.abs() == $t::INFINITY));
            if one { 1.0 } else { r }
        }
    };
}

/// The constants and methods of `Number` that both float types define alike.
macro_rules! number_methods {
    ($t:ident) => {
        const ZERO: Self = 0.0;
        const ONE: Self = 1.0;
        const LOWEST: Self = $t::NEG_INFINITY;
        const HIGHEST: Self = $t::INFINITY;
        type Wide = f64;

        #[inline(always)]
        fn widen(self) -> f64 {
            self as f64
        }

        #[inline(always)]
        fn narrow(wide: f64) -> Self {
            wide as $t
        }

        #[inline(always)]
        fn neg(self) -> Self {
            -self
        }

        #[inline(always)]
        fn abs(self) -> Self {
            $t::abs(self)
        }

        /// Adding zero turns -0 into 0.
        #[inline(always)]
        fn sign(self) -> Self {
            let negative = if self < 0.0 { -1.0 } else { self + 0.0 };
            if self > 0.0 { 1.0 } else { negative }
        }

        #[inline(always)]
        fn relu(self) -> Self {
            if self < 0.0 { 0.0 } else { self }
        }

        #[inline(always)]
        fn add(self, y: Self) -> Self {
            self + y
        }

        #[inline(always)]
        fn sub(self, y: Self) -> Self {
            self - y
        }

        #[inline(always)]
        fn mul(self, y: Self) -> Self {
            self * y
        }

        #[inline(always)]
        fn maximum(self, y: Self) -> Self {
            if (self > y) | $t::is_nan(self) { self } else { y }
        }

        #[inline(always)]
        fn minimum(self, y: Self) -> Self {
            if (self < y) | $t::is_nan(self) { self } else { y }
        }

        #[inline(always)]
        fn is_nan(self) -> bool {
            $t::is_nan(self)
        }

        #[inline(always)]
        fn is_inf(self) -> bool {
            $t::abs(self) == $t::INFINITY
        }
    };
}

/// The constants and methods of `Float` that both float types define alike.
macro_rules! float_methods {
    ($t:ident) => {
        const INFINITY: Self = $t::INFINITY;
        const NAN: Self = $t::NAN;

        #[inline(always)]
        fn from_f64(x: f64) -> Self {
            x as $t
        }

        #[inline(always)]
        fn to_f64(self) -> f64 {
            self as f64
        }

        #[inline(always)]
        fn sqrt(self) -> Self {
            $t::sqrt(self)
        }

        #[inline(always)]
        fn rsqrt(self) -> Self {
            1.0 / $t::sqrt(self)
        }

        #[inline(always)]
        fn recip(self) -> Self {
            1.0 / self
        }

        #[inline(always)]
        fn div(self, y: Self) -> Self {
            self / y
        }

        #[inline(always)]
        fn floor(self) -> Self {
            $t::floor(self)
        }

        #[inline(always)]
        fn ceil(self) -> Self {
            $t::ceil(self)
        }

        #[inline(always)]
        fn round(self) -> Self {
            self.round_ties_even()
        }

        #[inline(always)]
        fn fp8_e4m3_value(self) -> Self {
            $t::from(fp8::e4m3_value(self as u32 & 0xff))
        }

        #[inline(always)]
        fn fp8_e5m2_value(self) -> Self {
            $t::from(fp8::e5m2_value(self as u32 & 0xff))
        }
    };
}

pub(super) use {float_helpers, float_methods, number_methods};
