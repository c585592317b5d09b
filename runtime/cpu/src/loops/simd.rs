//! Wraps f32 vector registers for loops that keep values in registers across functions.
//!
//! The types wrap intrinsics of `core::arch`: the compiler does not keep arrays of scalars in registers across the
//! dispatch of an interpreter. Each method performs one exactly rounded operation per lane, or one operation on bits,
//! as `f32` does, so the functions of `math::simd_f32` give the same bits on all of them.
//!
//! A vector may be created and used only within a function compiled for its instruction set; this condition makes every
//! intrinsic here sound. The callers in `fused_interpreter`, `superinstructions`, `row_pipeline`, `map` and
//! `gemm::microkernel` guarantee it.

use crate::math::simd_f32::SimdF32;

pub trait Vector: SimdF32 {
    const LANES: usize;

    /// # Safety
    /// `from` must be valid for all lanes. The same holds for the other three methods; the partial ones access `n`
    /// lanes.
    unsafe fn load(from: *const f32) -> Self;
    /// # Safety
    /// As for `load`.
    unsafe fn store(self, to: *mut f32);
    /// A non-temporal store: for results that are not read soon. `to` must be aligned to the vector, and the thread must
    /// call `fused_interpreter::store_fence` before other threads read the result.
    ///
    /// # Safety
    /// As for `load`.
    unsafe fn store_nt(self, to: *mut f32);
    /// Loads the first `n` lanes; the others are unspecified.
    ///
    /// # Safety
    /// As for `load`.
    unsafe fn load_partial(from: *const f32, n: usize) -> Self;
    /// # Safety
    /// As for `load`.
    unsafe fn store_partial(self, to: *mut f32, n: usize);
    fn sqrt(self) -> Self;
    fn neg(self) -> Self;
    fn relu(self) -> Self;
    /// Selects, in each lane, the operand whose bits are the larger integer.
    fn max_bits(self, other: Self) -> Self;
}

#[cfg(target_arch = "x86_64")]
pub use x86::{F32x8, F32x16};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use std::arch::x86_64::*;
    use std::ops::{Add, Div, Mul, Sub};

    /// AVX-512.
    #[derive(Clone, Copy)]
    pub struct F32x16(__m512);
    /// AVX2 with fused multiply-adds.
    #[derive(Clone, Copy)]
    pub struct F32x8(__m256);

    macro_rules! arithmetic {
        ($t:ident: $($tr:ident $method:ident $op:ident;)*) => { $(
            impl $tr for $t {
                type Output = $t;
                #[inline(always)]
                fn $method(self, y: $t) -> $t {
                    // SAFETY: the instruction set is available (see the module), here and below.
                    unsafe { $t($op(self.0, y.0)) }
                }
            }
        )* };
    }
    arithmetic! { F32x16: Add add _mm512_add_ps; Sub sub _mm512_sub_ps; Mul mul _mm512_mul_ps; Div div _mm512_div_ps; }
    arithmetic! { F32x8: Add add _mm256_add_ps; Sub sub _mm256_sub_ps; Mul mul _mm256_mul_ps; Div div _mm256_div_ps; }

    impl SimdF32 for F32x16 {
        type Int = __m512i;

        #[inline(always)]
        fn splat(x: f32) -> Self {
            // SAFETY: as above.
            unsafe { F32x16(_mm512_set1_ps(x)) }
        }

        #[inline(always)]
        fn mul_add(self, y: Self, z: Self) -> Self {
            // SAFETY: as above.
            unsafe { F32x16(_mm512_fmadd_ps(self.0, y.0, z.0)) }
        }

        #[inline(always)]
        fn clamp_max(self, high: Self) -> Self {
            // SAFETY: as above.
            unsafe {
                // minps returns the second operand unless the first is less.
                F32x16(_mm512_min_ps(high.0, self.0))
            }
        }

        #[inline(always)]
        fn clamp_min(self, low: Self) -> Self {
            // SAFETY: as above.
            unsafe { F32x16(_mm512_max_ps(low.0, self.0)) }
        }

        #[inline(always)]
        fn abs(self) -> Self {
            // SAFETY: as above.
            unsafe { F32x16(_mm512_andnot_ps(_mm512_set1_ps(-0.0), self.0)) }
        }

        #[inline(always)]
        fn copysign(self, sign: Self) -> Self {
            // SAFETY: as above.
            unsafe {
                let mask = _mm512_set1_ps(-0.0);
                F32x16(_mm512_or_ps(_mm512_andnot_ps(mask, self.0), _mm512_and_ps(mask, sign.0)))
            }
        }

        #[inline(always)]
        fn select_less(self, limit: Self, yes: Self, no: Self) -> Self {
            // SAFETY: as above.
            unsafe { F32x16(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, limit.0), no.0, yes.0)) }
        }

        #[inline(always)]
        fn to_bits(self) -> Self::Int {
            // SAFETY: as above.
            unsafe { _mm512_castps_si512(self.0) }
        }

        #[inline(always)]
        fn from_bits(bits: Self::Int) -> Self {
            // SAFETY: as above.
            unsafe { F32x16(_mm512_castsi512_ps(bits)) }
        }

        #[inline(always)]
        fn shift_right_1(bits: Self::Int) -> Self::Int {
            // SAFETY: as above.
            unsafe { _mm512_srli_epi32::<1>(bits) }
        }

        #[inline(always)]
        fn int_sub(x: Self::Int, y: Self::Int) -> Self::Int {
            // SAFETY: as above.
            unsafe { _mm512_sub_epi32(x, y) }
        }

        #[inline(always)]
        fn shift_left_23(bits: Self::Int) -> Self::Int {
            // SAFETY: as above.
            unsafe { _mm512_slli_epi32::<23>(bits) }
        }

        #[inline(always)]
        fn lookup(table: &[f32; 16], at: Self::Int) -> Self {
            // SAFETY: as above; the table has 16 elements.
            unsafe { F32x16(_mm512_permutexvar_ps(at, _mm512_loadu_ps(table.as_ptr()))) }
        }
    }

    impl Vector for F32x16 {
        const LANES: usize = 16;

        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: as above; the caller guarantees the address.
            unsafe { F32x16(_mm512_loadu_ps(from)) }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: as above; the caller guarantees the address.
            unsafe { _mm512_storeu_ps(to, self.0) }
        }

        #[inline(always)]
        unsafe fn store_nt(self, to: *mut f32) {
            // SAFETY: as above; the caller guarantees the address.
            unsafe { _mm512_stream_ps(to, self.0) }
        }

        #[inline(always)]
        unsafe fn load_partial(from: *const f32, n: usize) -> Self {
            // SAFETY: as above; the caller guarantees the address.
            unsafe { F32x16(_mm512_maskz_loadu_ps(((1u32 << n) - 1) as u16, from)) }
        }

        #[inline(always)]
        unsafe fn store_partial(self, to: *mut f32, n: usize) {
            // SAFETY: as above; the caller guarantees the address.
            unsafe { _mm512_mask_storeu_ps(to, ((1u32 << n) - 1) as u16, self.0) }
        }

        #[inline(always)]
        fn sqrt(self) -> Self {
            // SAFETY: as above.
            unsafe { F32x16(_mm512_sqrt_ps(self.0)) }
        }

        #[inline(always)]
        fn neg(self) -> Self {
            // SAFETY: as above.
            unsafe { F32x16(_mm512_xor_ps(self.0, _mm512_set1_ps(-0.0))) }
        }

        #[inline(always)]
        fn relu(self) -> Self {
            // SAFETY: as above.
            unsafe {
                // maxps returns the second operand unless the first is greater, so NaN and -0 are kept.
                F32x16(_mm512_max_ps(_mm512_setzero_ps(), self.0))
            }
        }

        #[inline(always)]
        fn max_bits(self, other: Self) -> Self {
            // SAFETY: as above.
            unsafe {
                F32x16(_mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(self.0), _mm512_castps_si512(other.0))))
            }
        }
    }

    /// A mask with all ones in the first `n` lanes.
    #[inline(always)]
    fn first(n: usize) -> __m256i {
        // SAFETY: as above.
        unsafe { _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)) }
    }

    impl SimdF32 for F32x8 {
        type Int = __m256i;

        #[inline(always)]
        fn splat(x: f32) -> Self {
            // SAFETY: as above.
            unsafe { F32x8(_mm256_set1_ps(x)) }
        }

        #[inline(always)]
        fn mul_add(self, y: Self, z: Self) -> Self {
            // SAFETY: as above.
            unsafe { F32x8(_mm256_fmadd_ps(self.0, y.0, z.0)) }
        }

        #[inline(always)]
        fn clamp_max(self, high: Self) -> Self {
            // SAFETY: as above.
            unsafe {
                // minps returns the second operand unless the first is less.
                F32x8(_mm256_min_ps(high.0, self.0))
            }
        }

        #[inline(always)]
        fn clamp_min(self, low: Self) -> Self {
            // SAFETY: as above.
            unsafe { F32x8(_mm256_max_ps(low.0, self.0)) }
        }

        #[inline(always)]
        fn abs(self) -> Self {
            // SAFETY: as above.
            unsafe { F32x8(_mm256_andnot_ps(_mm256_set1_ps(-0.0), self.0)) }
        }

        #[inline(always)]
        fn copysign(self, sign: Self) -> Self {
            // SAFETY: as above.
            unsafe {
                let mask = _mm256_set1_ps(-0.0);
                F32x8(_mm256_or_ps(_mm256_andnot_ps(mask, self.0), _mm256_and_ps(mask, sign.0)))
            }
        }

        #[inline(always)]
        fn select_less(self, limit: Self, yes: Self, no: Self) -> Self {
            // SAFETY: as above.
            unsafe { F32x8(_mm256_blendv_ps(no.0, yes.0, _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, limit.0))) }
        }

        #[inline(always)]
        fn to_bits(self) -> Self::Int {
            // SAFETY: as above.
            unsafe { _mm256_castps_si256(self.0) }
        }

        #[inline(always)]
        fn from_bits(bits: Self::Int) -> Self {
            // SAFETY: as above.
            unsafe { F32x8(_mm256_castsi256_ps(bits)) }
        }

        #[inline(always)]
        fn shift_right_1(bits: Self::Int) -> Self::Int {
            // SAFETY: as above.
            unsafe { _mm256_srli_epi32::<1>(bits) }
        }

        #[inline(always)]
        fn int_sub(x: Self::Int, y: Self::Int) -> Self::Int {
            // SAFETY: as above.
            unsafe { _mm256_sub_epi32(x, y) }
        }

        #[inline(always)]
        fn shift_left_23(bits: Self::Int) -> Self::Int {
            // SAFETY: as above.
            unsafe { _mm256_slli_epi32::<23>(bits) }
        }

        #[inline(always)]
        fn lookup(table: &[f32; 16], at: Self::Int) -> Self {
            // SAFETY: as above; the table has 16 elements.
            unsafe {
                let low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table.as_ptr()), at);
                let high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table.as_ptr().add(8)), at);
                // Selected by the sign bit: bit 3 of the index.
                F32x8(_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32::<28>(at))))
            }
        }
    }

    impl Vector for F32x8 {
        const LANES: usize = 8;

        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: as above; the caller guarantees the address.
            unsafe { F32x8(_mm256_loadu_ps(from)) }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: as above; the caller guarantees the address.
            unsafe { _mm256_storeu_ps(to, self.0) }
        }

        #[inline(always)]
        unsafe fn store_nt(self, to: *mut f32) {
            // SAFETY: as above; the caller guarantees the address.
            unsafe { _mm256_stream_ps(to, self.0) }
        }

        #[inline(always)]
        unsafe fn load_partial(from: *const f32, n: usize) -> Self {
            // SAFETY: as above; the caller guarantees the address.
            unsafe { F32x8(_mm256_maskload_ps(from, first(n))) }
        }

        #[inline(always)]
        unsafe fn store_partial(self, to: *mut f32, n: usize) {
            // SAFETY: as above; the caller guarantees the address.
            unsafe { _mm256_maskstore_ps(to, first(n), self.0) }
        }

        #[inline(always)]
        fn sqrt(self) -> Self {
            // SAFETY: as above.
            unsafe { F32x8(_mm256_sqrt_ps(self.0)) }
        }

        #[inline(always)]
        fn neg(self) -> Self {
            // SAFETY: as above.
            unsafe { F32x8(_mm256_xor_ps(self.0, _mm256_set1_ps(-0.0))) }
        }

        #[inline(always)]
        fn relu(self) -> Self {
            // SAFETY: as above.
            unsafe {
                // maxps returns the second operand unless the first is greater, so NaN and -0 are kept.
                F32x8(_mm256_max_ps(_mm256_setzero_ps(), self.0))
            }
        }

        #[inline(always)]
        fn max_bits(self, other: Self) -> Self {
            // SAFETY: as above.
            unsafe {
                F32x8(_mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(self.0), _mm256_castps_si256(other.0))))
            }
        }
    }
}
