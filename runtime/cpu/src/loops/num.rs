//! The element types of loops and the methods that `map_fns!` calls on them, over `core::scalar`.
//!
//! [`Num`] serves ops defined on every number, [`Flt`] those on floats. Both only forward: the meaning is in `core`.

use perilune_core::scalar::{Int, Real};

pub trait Num: Copy + PartialOrd + Send + Sync + 'static {
    const ZERO: Self;
    const ONE: Self;
    /// The identity of `maximum`.
    const LOWEST: Self;
    /// The identity of `minimum`.
    const HIGHEST: Self;
    /// What partial reductions combine in.
    type Wide: Num;

    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;

    fn neg(self) -> Self;
    fn abs(self) -> Self;
    fn sign(self) -> Self;
    fn relu(self) -> Self;
    fn add(self, y: Self) -> Self;
    fn sub(self, y: Self) -> Self;
    fn mul(self, y: Self) -> Self;
    fn div_floor(self, y: Self) -> Self;
    fn rem_floor(self, y: Self) -> Self;
    fn pow(self, y: Self) -> Self;
    fn maximum(self, y: Self) -> Self;
    fn minimum(self, y: Self) -> Self;
    fn is_nan(self) -> bool;
    fn is_inf(self) -> bool;
}

macro_rules! forward {
    ($from:ident: $($name:ident($($arg:ident),*) -> $out:ty;)*) => { $(
        #[inline(always)]
        fn $name(self $(, $arg: Self)*) -> $out {
            $from::$name(self $(, $arg)*)
        }
    )* };
}

macro_rules! floats {
    ($($t:ident -> $wide:ident),*) => { $(
        impl Num for $t {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const LOWEST: Self = $t::NEG_INFINITY;
            const HIGHEST: Self = $t::INFINITY;
            type Wide = $wide;

            #[inline(always)]
            fn widen(self) -> $wide {
                self as $wide
            }

            #[inline(always)]
            fn narrow(wide: $wide) -> Self {
                wide as $t
            }

            #[inline(always)]
            fn neg(self) -> Self {
                -self
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

            forward! { Real:
                abs() -> Self; sign() -> Self; div_floor(y) -> Self; rem_floor(y) -> Self; pow(y) -> Self;
                maximum(y) -> Self; minimum(y) -> Self; is_nan() -> bool; is_inf() -> bool;
            }
        }

        impl Flt for $t {
            #[inline(always)]
            fn recip(self) -> Self {
                1.0 / self
            }

            #[inline(always)]
            fn div(self, y: Self) -> Self {
                self / y
            }

            forward! { Real:
                exp() -> Self; log() -> Self; log1p() -> Self; expm1() -> Self; sqrt() -> Self; rsqrt() -> Self;
                sin() -> Self; cos() -> Self; tan() -> Self; tanh() -> Self; sigmoid() -> Self; sigmoid2() -> Self;
                erf() -> Self;
                floor() -> Self; ceil() -> Self; round() -> Self;
                fp8_e4m3() -> u8; fp8_e5m2() -> u8; fp8_e4m3_value() -> Self; fp8_e5m2_value() -> Self;
            }
        }
    )* };
}

pub trait Flt: Num {
    fn exp(self) -> Self;
    fn log(self) -> Self;
    fn log1p(self) -> Self;
    fn expm1(self) -> Self;
    fn sqrt(self) -> Self;
    fn rsqrt(self) -> Self;
    fn recip(self) -> Self;
    fn sin(self) -> Self;
    fn cos(self) -> Self;
    fn tan(self) -> Self;
    fn tanh(self) -> Self;
    fn sigmoid(self) -> Self;
    fn sigmoid2(self) -> Self;
    fn erf(self) -> Self;
    fn floor(self) -> Self;
    fn ceil(self) -> Self;
    fn round(self) -> Self;
    fn fp8_e4m3(self) -> u8;
    fn fp8_e5m2(self) -> u8;
    fn fp8_e4m3_value(self) -> Self;
    fn fp8_e5m2_value(self) -> Self;
    fn div(self, y: Self) -> Self;
}

floats!(f32 -> f64, f64 -> f64);

macro_rules! integers {
    ($($t:ident),*) => { $(
        impl Num for $t {
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
            fn is_nan(self) -> bool {
                false
            }

            #[inline(always)]
            fn is_inf(self) -> bool {
                false
            }

            forward! { Int:
                abs() -> Self; sign() -> Self; div_floor(y) -> Self; rem_floor(y) -> Self; pow(y) -> Self;
                maximum(y) -> Self; minimum(y) -> Self;
            }
        }
    )* };
}

integers!(i64, i32, u8);
