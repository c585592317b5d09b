//! [`Int`]: integer scalar math with every case defined, because a kernel cannot trap in the middle of a tensor.
//!
//! Arithmetic wraps as in PyTorch. Division by zero yields 0, where torch raises; a caller that wants the error checks
//! the divisor first.

/// An integer element type.
pub trait Int: Copy + Ord + 'static {
    const ZERO: Self;
    const ONE: Self;

    fn wrapping_add(self, other: Self) -> Self;
    fn wrapping_sub(self, other: Self) -> Self;
    fn wrapping_mul(self, other: Self) -> Self;
    fn wrapping_neg(self) -> Self;
    /// Wraps at the most negative value, which has no positive.
    fn abs(self) -> Self;
    /// -1, 0 or 1.
    fn sign(self) -> Self;
    /// The quotient rounded towards -inf; 0 for a zero divisor; wraps at `MIN / -1`.
    fn div_floor(self, divisor: Self) -> Self;
    /// The remainder of `div_floor`, with the divisor's sign; 0 for a zero divisor.
    fn rem_floor(self, divisor: Self) -> Self;
    /// Wrapping power. A negative exponent gives the truncated reciprocal: 0, except for the bases 1 and -1.
    fn pow(self, exponent: Self) -> Self;

    #[inline(always)]
    fn maximum(self, other: Self) -> Self {
        if self > other { self } else { other }
    }

    #[inline(always)]
    fn minimum(self, other: Self) -> Self {
        if self < other { self } else { other }
    }
}

macro_rules! shared {
    () => {
        const ZERO: Self = 0;
        const ONE: Self = 1;

        #[inline(always)]
        fn wrapping_add(self, other: Self) -> Self {
            self.wrapping_add(other)
        }

        #[inline(always)]
        fn wrapping_sub(self, other: Self) -> Self {
            self.wrapping_sub(other)
        }

        #[inline(always)]
        fn wrapping_mul(self, other: Self) -> Self {
            self.wrapping_mul(other)
        }

        #[inline(always)]
        fn wrapping_neg(self) -> Self {
            self.wrapping_neg()
        }
    };
}

/// Square and multiply; `exponent` is read as unsigned.
macro_rules! power {
    ($base:expr, $exponent:expr) => {{
        let (mut base, mut exponent, mut product) = ($base, $exponent, 1);
        while exponent != 0 {
            product = if exponent & 1 == 1 { Int::wrapping_mul(product, base) } else { product };
            base = Int::wrapping_mul(base, base);
            exponent >>= 1;
        }
        product
    }};
}

macro_rules! signed {
    ($($int:ty => $unsigned:ty),*) => {$(
        impl Int for $int {
            shared!();

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

impl Int for u8 {
    shared!();

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
    use super::Int;

    #[test]
    fn division_rounds_down_and_is_total() {
        for (a, b, q, r) in
            [(7, 2, 3, 1), (-7, 2, -4, 1), (7, -2, -4, -1), (-7, -2, 3, -1), (6, -3, -2, 0), (5, 0, 0, 0)]
        {
            assert_eq!((Int::div_floor(a, b), Int::rem_floor(a, b)), (q, r), "{a} / {b}");
            let (wide_a, wide_b) = (a as i64, b as i64);
            assert_eq!((Int::div_floor(wide_a, wide_b), Int::rem_floor(wide_a, wide_b)), (q as i64, r as i64));
        }
        assert_eq!((Int::div_floor(i32::MIN, -1), Int::rem_floor(i32::MIN, -1)), (i32::MIN, 0));
        assert_eq!((Int::div_floor(i64::MIN, -1), Int::rem_floor(i64::MIN, -1)), (i64::MIN, 0));
        assert_eq!((Int::div_floor(200u8, 7), Int::rem_floor(200u8, 7)), (28, 4));
        assert_eq!((Int::div_floor(200u8, 0), Int::rem_floor(200u8, 0)), (0, 0));
    }

    #[test]
    fn powers_wrap_and_negative_exponents_truncate() {
        assert_eq!(Int::pow(3i64, 20), 3486784401);
        assert_eq!(Int::pow(3i32, 21), 3i32.wrapping_pow(21));
        assert_eq!(Int::pow(0i64, 0), 1);
        assert_eq!((Int::pow(2i32, -1), Int::pow(0i32, -1), Int::pow(1i32, -9)), (0, 0, 1));
        assert_eq!((Int::pow(-1i64, -3), Int::pow(-1i64, -4), Int::pow(-1i64, i64::MIN)), (-1, 1, 1));
        assert_eq!((Int::pow(-2i64, 63), Int::pow(2i64, 64)), (i64::MIN, 0));
        assert_eq!(Int::pow(7u8, 5), 7u8.wrapping_pow(5));
    }

    #[test]
    fn the_rest_wraps() {
        assert_eq!(Int::abs(i32::MIN), i32::MIN);
        assert_eq!((Int::abs(-5i64), Int::sign(-5i64), Int::sign(0i32), Int::sign(9u8)), (5, -1, 0, 1));
        assert_eq!(Int::wrapping_add(250u8, 10), 4);
        assert_eq!(Int::wrapping_sub(i32::MIN, 1), i32::MAX);
        assert_eq!((Int::maximum(-1i64, 2), Int::minimum(-1i64, 2)), (2, -1));
        assert_eq!(Int::wrapping_neg(1u8), 255);
    }
}
