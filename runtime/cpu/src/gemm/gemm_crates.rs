//! Calls the crates `gemm-f32` and `gemm-f64`.
//!
//! They select kernels by the features of the processor and have no setting for it. If `PERILUNE_CPU_ISA` selects a lesser
//! instruction set than the processor's, this calls their driver with the kernels of that set, which reproduces the bits of
//! such a processor.

use super::Product;
use crate::loops::Isa;
use gemm_common::gemm::gemm_basic_generic;
use gemm_common::simd::{MixedSimd, Scalar, V3};

/// Rearranges the matrices as the driver wants them: column-major, without negative strides.
fn arrange<T>(p: Product<T>) -> Product<T> {
    let Product { sizes: (mut m, mut n, k), mut out, mut a, mut b, parallel } = p;
    if out.1.abs() < out.2.abs() {
        (m, n) = (n, m);
        (out.1, out.2) = (out.2, out.1);
        (a, b) = ((b.0, b.2, b.1), (a.0, a.2, a.1));
    }
    if a.1 < 0 && k > 0 {
        a.0 = a.0.wrapping_offset((k - 1) as isize * a.1);
        a.1 = -a.1;
        b.0 = b.0.wrapping_offset((k - 1) as isize * b.2);
        b.2 = -b.2;
    }
    Product { sizes: (m, n, k), out, a, b, parallel }
}

macro_rules! products {
    ($t:ident, $kernels:ident, $lanes:literal) => {
        /// Computes a product, with `add` added to what is in the result.
        ///
        /// # Safety
        /// As for `Gemm::gemm`, and the processor must have the instruction set.
        pub unsafe fn $t(isa: Isa, p: Product<$t>, add: bool) {
            let Product { sizes: (m, n, k), out, a, b, parallel } = arrange(p);
            let kept = if add { 1.0 } else { 0.0 };
            if isa == Isa::detect() {
                let run = $kernels::gemm::$t::get_gemm_fn();
                // SAFETY: guaranteed by the caller.
                return unsafe {
                    run(
                        m, n, k, out.0, out.1, out.2, add, a.0, a.1, a.2, b.0, b.1, b.2, kept, 1.0, false, false,
                        false, parallel,
                    )
                };
            }
            macro_rules! drive {
                ($class:ident, $simd:expr, $n:literal) => {{
                    use $kernels::microkernel::$class::$t::{H_M, H_N, H_UKR, MR_DIV_N, NR, UKR};
                    // SAFETY: guaranteed by the caller.
                    unsafe {
                        gemm_basic_generic::<_, $t, $n, { MR_DIV_N * $n }, NR, MR_DIV_N, H_M, H_N>(
                            $simd,
                            m,
                            n,
                            k,
                            out.0,
                            out.1,
                            out.2,
                            add,
                            a.0,
                            a.1,
                            a.2,
                            b.0,
                            b.1,
                            b.2,
                            kept,
                            1.0,
                            false,
                            false,
                            false,
                            |a, b, c| a * b + c,
                            &UKR,
                            &H_UKR,
                            false,
                            parallel,
                        )
                    }
                }};
            }
            #[cfg(target_arch = "x86_64")]
            if isa != Isa::Baseline
                && let Some(simd) = <V3 as MixedSimd<$t, $t, $t, $t>>::try_new()
            {
                return drive!(fma, simd, $lanes);
            }
            drive!(scalar, Scalar, 1)
        }
    };
}

products!(f32, gemm_f32, 8);
products!(f64, gemm_f64, 4);
