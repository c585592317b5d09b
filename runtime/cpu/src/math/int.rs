//! Implements [`Number`] for the integers, with every case defined, because a kernel cannot trap in the middle of a tensor.
//!
//! Arithmetic wraps as in PyTorch. Division by zero yields 0, where PyTorch raises; a caller that needs an error must
//! check the divisor first.

use super::Number;

macro_rules! shared {
    ($t:ident) => {
        const ZERO: Self = 0;
        const ONE: Self = 1;
        const LOWEST: Self = $t::MIN;
        const HIGHEST: Self = $t::MAX;
        type Wide = $t;

        #[inline(always)]
        fn widen(self) -> $t {
            self
        }

        #[inline(always)]
        fn narrow(wide: $t) -> Self {
            wide
        }

        #[inline(always)]
        fn neg(self) -> Self {
            self.wrapping_neg()
        }

        #[inline(always)]
        fn relu(self) -> Self {
            if self > 0 { self } else { 0 }
        }

        #[inline(always)]
        fn add(self, y: Self) -> Self {
            self.wrapping_add(y)
        }

        #[inline(always)]
        fn sub(self, y: Self) -> Self {
            self.wrapping_sub(y)
        }

        #[inline(always)]
        fn mul(self, y: Self) -> Self {
            self.wrapping_mul(y)
        }

        #[inline(always)]
        fn maximum(self, y: Self) -> Self {
            if self > y { self } else { y }
        }

        #[inline(always)]
        fn minimum(self, y: Self) -> Self {
            if self < y { self } else { y }
        }

        #[inline(always)]
        fn is_nan(self) -> bool {
            false
        }

        #[inline(always)]
        fn is_inf(self) -> bool {
            false
        }
    };
}

/// Exponentiation by squaring; `exponent` is unsigned.
macro_rules! power {
    ($base:expr, $exponent:expr) => {{
        let (mut base, mut exponent, mut product) = ($base, $exponent, 1);
        while exponent != 0 {
            product = if exponent & 1 == 1 { Number::mul(product, base) } else { product };
            base = Number::mul(base, base);
            exponent >>= 1;
        }
        product
    }};
}

macro_rules! signed {
    ($($int:ident => $unsigned:ident),*) => {$(
        impl Number for $int {
            shared!($int);

            #[inline(always)]
            fn abs(self) -> Self {
                self.wrapping_abs()
            }

            #[inline(always)]
            fn sign(self) -> Self {
                self.signum()
            }

            #[inline(always)]
            fn div_floor(self, divisor: Self) -> Self {
                let d = if divisor == 0 { 1 } else { divisor };
                let (q, r) = (self.wrapping_div(d), self.wrapping_rem(d));
                let q = if (r != 0) & ((r < 0) != (d < 0)) { q - 1 } else { q };
                if divisor == 0 { 0 } else { q }
            }

            #[inline(always)]
            fn rem_floor(self, divisor: Self) -> Self {
                let d = if divisor == 0 { 1 } else { divisor };
                let r = self.wrapping_rem(d);
                if (r != 0) & ((r < 0) != (d < 0)) { r + d } else { r }
            }

            #[inline(always)]
            fn pow(self, exponent: Self) -> Self {
                let unit = (self == 1) | (self == -1);
                let n = if (exponent < 0) & !unit { 0 } else { exponent as $unsigned };
                let p: Self = power!(self, n);
                if (exponent < 0) & !unit { 0 } else { p }
            }
        }
    )*};
}

signed!(i32 => u32, i64 => u64);

impl Number for u8 {
    shared!(u8);

    #[inline(always)]
    fn abs(self) -> Self {
        self
    }

    #[inline(always)]
    fn sign(self) -> Self {
        (self != 0) as u8
    }

    #[inline(always)]
    fn div_floor(self, divisor: Self) -> Self {
        let q = self / divisor.max(1);
        if divisor == 0 { 0 } else { q }
    }

    #[inline(always)]
    fn rem_floor(self, divisor: Self) -> Self {
        self % divisor.max(1)
    }

    #[inline(always)]
    fn pow(self, exponent: Self) -> Self {
        power!(self, exponent)
    }
}

#[cfg(test)]
mod tests {
    use super::Number;

    #[test]
    fn division_rounds_down_and_is_total() {
        for (a, b, q, r) in
            [(7, 2, 3, 1), (-7, 2, -4, 1), (7, -2, -4, -1), (-7, -2, 3, -1), (6, -3, -2, 0), (5, 0, 0, 0)]
        {
            assert_eq!((Number::div_floor(a, b), Number::rem_floor(a, b)), (q, r), "{a} / {b}");
            let (wide_a, wide_b) = (a as i64, b as i64);
            assert_eq!((Number::div_floor(wide_a, wide_b), Number::rem_floor(wide_a, wide_b)), (q as i64, r as i64));
        }
        assert_eq!((Number::div_floor(i32::MIN, -1), Number::rem_floor(i32::MIN, -1)), (i32::MIN, 0));
        assert_eq!((Number::div_floor(i64::MIN, -1), Number::rem_floor(i64::MIN, -1)), (i64::MIN, 0));
        assert_eq!((Number::div_floor(200u8, 7), Number::rem_floor(200u8, 7)), (28, 4));
        assert_eq!((Number::div_floor(200u8, 0), Number::rem_floor(200u8, 0)), (0, 0));
    }

    #[test]
    fn powers_wrap_and_negative_exponents_truncate() {
        assert_eq!(Number::pow(3i64, 20), 3486784401);
        assert_eq!(Number::pow(3i32, 21), 3i32.wrapping_pow(21));
        assert_eq!(Number::pow(0i64, 0), 1);
        assert_eq!((Number::pow(2i32, -1), Number::pow(0i32, -1), Number::pow(1i32, -9)), (0, 0, 1));
        assert_eq!((Number::pow(-1i64, -3), Number::pow(-1i64, -4), Number::pow(-1i64, i64::MIN)), (-1, 1, 1));
        assert_eq!((Number::pow(-2i64, 63), Number::pow(2i64, 64)), (i64::MIN, 0));
        assert_eq!(Number::pow(7u8, 5), 7u8.wrapping_pow(5));
    }

    #[test]
    fn integer_arithmetic_wraps() {
        assert_eq!(Number::abs(i32::MIN), i32::MIN);
        assert_eq!((Number::abs(-5i64), Number::sign(-5i64), Number::sign(0i32), Number::sign(9u8)), (5, -1, 0, 1));
        assert_eq!(Number::add(250u8, 10), 4);
        assert_eq!(Number::sub(i32::MIN, 1), i32::MAX);
        assert_eq!((Number::maximum(-1i64, 2), Number::minimum(-1i64, 2)), (2, -1));
        assert_eq!(Number::neg(1u8), 255);
    }
}
