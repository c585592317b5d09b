//! Converts dtypes: between compute types, to and from the 16-bit storage formats, and rounds to those formats.
//!
//! Registers of bf16 and f16 are f32 that represent a 16-bit value exactly. Floats become integers as in
//! `core::host_tensor::to_integer`, which is Rust's `as`: truncated, saturating, NaN to 0. Integers become narrower ones by their
//! low bits. All conversions are branch-free arithmetic, so they vectorise without f16c and give the same bits everywhere.

use super::{Arg, Body, Isa, Kernel, pick};
use perilune_core::DType;
use perilune_core::host_tensor::to_odd;
use std::marker::PhantomData;
use std::slice;

trait Convert {
    type From: Copy;
    type To: Copy;
    fn call(x: Self::From) -> Self::To;
}

struct CastLoop<C>(PhantomData<C>);

impl<C: Convert> Body for CastLoop<C> {
    #[inline(always)]
    unsafe fn run(out: *mut u8, args: *const Arg, rows: usize, cols: usize) {
        for r in 0..rows {
            // SAFETY: guaranteed by the caller (see `Body::run`).
            let (o, x) = unsafe {
                let o = slice::from_raw_parts_mut(out.cast::<C::To>().add(r * cols), cols);
                (o, slice::from_raw_parts((*args).row::<C::From>(r), cols))
            };
            for (o, &x) in o.iter_mut().zip(x) {
                *o = C::call(x);
            }
        }
    }
}

macro_rules! convert {
    ($($name:ident: $from:ident => $to:ident |$x:ident| $body:expr;)*) => { $(
        struct $name;
        impl Convert for $name {
            type From = $from;
            type To = $to;
            #[inline(always)]
            fn call($x: $from) -> $to { $body }
        }
    )* };
}

convert! {
    F32F64: f32 => f64 |x| x as f64;
    F32I64: f32 => i64 |x| x as i64;
    F32I32: f32 => i32 |x| x as i32;
    F32U8: f32 => u8 |x| x as u8;
    F32Bool: f32 => u8 |x| (x != 0.0) as u8;
    F64F32: f64 => f32 |x| x as f32;
    F64I64: f64 => i64 |x| x as i64;
    F64I32: f64 => i32 |x| x as i32;
    F64U8: f64 => u8 |x| x as u8;
    F64Bool: f64 => u8 |x| (x != 0.0) as u8;
    F64Bf16: f64 => f32 |x| round_bf16(to_odd(x));
    F64F16: f64 => f32 |x| round_f16(to_odd(x));
    I64F32: i64 => f32 |x| x as f32;
    I64F64: i64 => f64 |x| x as f64;
    I64I32: i64 => i32 |x| x as i32;
    I64U8: i64 => u8 |x| x as u8;
    I64Bool: i64 => u8 |x| (x != 0) as u8;
    I64Bf16: i64 => f32 |x| round_bf16(to_odd(x as f64));
    I64F16: i64 => f32 |x| round_f16(to_odd(x as f64));
    I32F32: i32 => f32 |x| x as f32;
    I32F64: i32 => f64 |x| x as f64;
    I32I64: i32 => i64 |x| x as i64;
    I32U8: i32 => u8 |x| x as u8;
    I32Bool: i32 => u8 |x| (x != 0) as u8;
    I32Bf16: i32 => f32 |x| round_bf16(to_odd(x as f64));
    I32F16: i32 => f32 |x| round_f16(to_odd(x as f64));
    U8F32: u8 => f32 |x| x as f32;
    U8F64: u8 => f64 |x| x as f64;
    U8I64: u8 => i64 |x| x as i64;
    U8I32: u8 => i32 |x| x as i32;
    U8Bool: u8 => u8 |x| (x != 0) as u8;
    U8U8: u8 => u8 |x| x;
    F32F32: f32 => f32 |x| x;
    FromBf16: u16 => f32 |x| f32::from_bits((x as u32) << 16);
    ToBf16: f32 => u16 |x| (round_bf16(x).to_bits() >> 16) as u16;
    FromF16: u16 => f32 |x| widen_f16(x);
    ToF16: f32 => u16 |x| narrow_f16(x);
}

/// The nearest bf16, ties to even; NaN stays a (quiet) NaN.
#[inline(always)]
pub fn round_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    let bits = if x.is_nan() { bits | 0x0040_0000 } else { rounded };
    f32::from_bits(bits & 0xffff_0000)
}

/// The nearest f16, ties to even, as f32.
#[inline(always)]
pub fn round_f16(x: f32) -> f32 {
    let a = x.abs();
    let bits = a.to_bits();
    let normal = f32::from_bits(bits.wrapping_add(0xfff + ((bits >> 13) & 1)) & 0xffff_e000);
    // Below 2^-14 the spacing is 2^-24, which is also the spacing of f32 between 0.5 and 1.
    let tiny = (a + 0.75) - 0.75;
    let y = if a < 6.103_515_6e-5 { tiny } else { normal };
    let y = if y > 65504.0 { f32::INFINITY } else { y };
    // A NaN keeps 10 bits of its payload and becomes quiet.
    let y = if x.is_nan() { f32::from_bits((bits | 0x0040_0000) & 0xffff_e000) } else { y };
    y.copysign(x)
}

#[inline(always)]
fn widen_f16(h: u16) -> f32 {
    let rest = ((h & 0x7fff) as u32) << 13;
    let finite = f32::from_bits(rest) * f32::from_bits(0x7780_0000);
    let y = if rest >= 0x0f80_0000 { f32::from_bits(rest | 0x7f80_0000) } else { finite };
    f32::from_bits(y.to_bits() | ((h & 0x8000) as u32) << 16)
}

#[inline(always)]
fn narrow_f16(x: f32) -> u16 {
    let x = round_f16(x);
    let sign = (x.to_bits() >> 16) & 0x8000;
    let a = f32::from_bits(x.to_bits() & 0x7fff_ffff);
    let normal = (a.to_bits() >> 13).wrapping_sub(112 << 10);
    let tiny = (a + 0.5).to_bits().wrapping_sub(0x3f00_0000);
    let y = if a < 6.103_515_6e-5 { tiny } else { normal };
    let special = 0x7c00 | ((a.to_bits() >> 13) & 0x3ff);
    let y = if a.to_bits() >= 0x7f80_0000 { special } else { y };
    (sign | y) as u16
}

/// Converts from the compute type of `from` to that of `to`; the caller rounds to 16 bits.
pub fn cast(from: DType, to: DType, isa: Isa) -> Kernel {
    use DType::*;
    macro_rules! table {
        ($($from:pat => { $($to:pat => $name:ident),* $(,)? })*) => {
            match from { $( $from => match to { $( $to => pick::<CastLoop<$name>>(isa), )* }, )* }
        };
    }
    table! {
        F32 | BF16 | F16 => { F32 | BF16 | F16 => F32F32, F64 => F32F64, I64 => F32I64, I32 => F32I32, U8 => F32U8, Bool => F32Bool }
        F64 => { F32 => F64F32, BF16 => F64Bf16, F16 => F64F16, F64 => Same8, I64 => F64I64, I32 => F64I32, U8 => F64U8, Bool => F64Bool }
        I64 => { F32 => I64F32, BF16 => I64Bf16, F16 => I64F16, F64 => I64F64, I64 => Same8, I32 => I64I32, U8 => I64U8, Bool => I64Bool }
        I32 => { F32 => I32F32, BF16 => I32Bf16, F16 => I32F16, F64 => I32F64, I64 => I32I64, I32 => Same4, U8 => I32U8, Bool => I32Bool }
        U8 | Bool => { F32 | BF16 | F16 => U8F32, F64 => U8F64, I64 => U8I64, I32 => U8I32, U8 => U8U8, Bool => U8Bool }
    }
}

convert! {
    Same8: u64 => u64 |x| x;
    Same4: u32 => u32 |x| x;
}

/// Loads from memory into a register: widens 16-bit floats, copies other dtypes.
pub fn load(dtype: DType, isa: Isa) -> Kernel {
    match dtype {
        DType::BF16 => pick::<CastLoop<FromBf16>>(isa),
        DType::F16 => pick::<CastLoop<FromF16>>(isa),
        d => super::map::copy_rows(d.size(), isa),
    }
}

/// Stores a register to memory: the inverse of `load`.
pub fn store(dtype: DType, isa: Isa) -> Kernel {
    match dtype {
        DType::BF16 => pick::<CastLoop<ToBf16>>(isa),
        DType::F16 => pick::<CastLoop<ToF16>>(isa),
        d => super::map::copy_rows(d.size(), isa),
    }
}

struct RoundBf16;
struct RoundF16;

impl Body for RoundBf16 {
    #[inline(always)]
    unsafe fn run(out: *mut u8, _: *const Arg, rows: usize, cols: usize) {
        // SAFETY: guaranteed by the caller (see `Body::run`); the operand is the output itself.
        for x in unsafe { slice::from_raw_parts_mut(out.cast::<f32>(), rows * cols) } {
            *x = round_bf16(*x);
        }
    }
}

impl Body for RoundF16 {
    #[inline(always)]
    unsafe fn run(out: *mut u8, _: *const Arg, rows: usize, cols: usize) {
        // SAFETY: as above.
        for x in unsafe { slice::from_raw_parts_mut(out.cast::<f32>(), rows * cols) } {
            *x = round_f16(*x);
        }
    }
}

/// Rounds a register in place to `dtype`, if its compute type is wider.
pub fn round(dtype: DType, isa: Isa) -> Option<Kernel> {
    match dtype {
        DType::BF16 => Some(pick::<RoundBf16>(isa)),
        DType::F16 => Some(pick::<RoundF16>(isa)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn sixteen_bit_conversions_are_those_of_half() {
        for h in 0..=u16::MAX {
            let (got, want) = (widen_f16(h), f16::from_bits(h).to_f32_const());
            assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "{h:x}");
        }
        for k in 0..(1u32 << 22) {
            // Spread over all exponents, with the tie-breaking bits set and unset.
            let x = f32::from_bits(k.wrapping_mul(1025) ^ (k << 12));
            let (f, b) = (f16::from_f32_const(x), bf16::from_f32(x));
            if !x.is_nan() {
                assert_eq!(narrow_f16(x), f.to_bits(), "{x:e}");
                assert_eq!(round_f16(x).to_bits(), f.to_f32_const().to_bits(), "{x:e}");
                assert_eq!(ToBf16::call(x), b.to_bits(), "{x:e}");
            } else {
                assert!(f16::from_bits(narrow_f16(x)).is_nan() && round_f16(x).is_nan() && round_bf16(x).is_nan());
            }
        }
    }
}
