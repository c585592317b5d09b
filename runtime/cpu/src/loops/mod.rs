//! Defines the vector loops: plain Rust over slices, compiled once per instruction set and dispatched at run time.
//!
//! A loop is a type that implements [`Body`]; [`pick`] returns the entry compiled for an [`Isa`]. All loops share one
//! signature, so that an instruction of a region is a function pointer, some registers and a count. Scalar functions
//! come from `math` and are always inlined, so LLVM vectorises them at the width of the entry.
//!
//! Outputs must not overlap operands; otherwise LLVM would fall back to scalar code.

pub mod cast;
pub mod fused_interpreter;
pub mod map;
pub mod random;
pub mod reduce;
pub mod row_pipeline;
pub mod simd;
pub mod superinstructions;

use perilune_core::env_flags::{CPU_ISA, Setting};
use perilune_core::error::{Error, Result};
use std::sync::OnceLock;

/// An operand of a loop: the address of its first row, and its row stride in elements.
#[derive(Clone, Copy, Debug)]
pub struct Arg {
    pub ptr: *const u8,
    pub step: isize,
}

impl Arg {
    pub const NONE: Arg = Arg { ptr: std::ptr::null(), step: 0 };

    /// # Safety
    /// Row `r` must be within the memory that the operand was made for.
    #[inline(always)]
    pub unsafe fn row<T>(&self, r: usize) -> *const T {
        // SAFETY: guaranteed by the caller.
        unsafe { self.ptr.cast::<T>().offset(r as isize * self.step) }
    }
}

/// Prefetches the cache line of an element into the L1 cache; any address is valid.
#[inline(always)]
pub fn prefetch(at: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint that never faults.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Like `prefetch`, but into the L2 cache: for lines that are needed later.
#[inline(always)]
pub fn prefetch_l2(at: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint that never faults.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Like `prefetch`, for a line that will be written.
#[inline(always)]
pub fn prefetch_write(at: *mut f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint that never faults.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_ET0 }>(at.cast_const().cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Processes `rows` rows of `cols` elements; the output is dense unless the body states otherwise.
pub type Kernel = unsafe fn(out: *mut u8, args: *const Arg, rows: usize, cols: usize);

/// A loop, generic over the instruction set that it is compiled for.
pub trait Body {
    /// # Safety
    /// The output and the operands the body uses must be valid for `rows` x `cols` elements, aligned for their types,
    /// and the output must not overlap the operands.
    unsafe fn run(out: *mut u8, args: *const Arg, rows: usize, cols: usize);
}

/// Instruction-set classes. All loops here give the same bits on each of them; the `gemm` crates do not.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Isa {
    Baseline,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    /// In ascending order.
    pub const ALL: &[Isa] = &[
        Isa::Baseline,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512,
    ];

    /// Its name in `PERILUNE_CPU_ISA`.
    pub fn key(self) -> &'static str {
        match self {
            Isa::Baseline => {
                if cfg!(target_arch = "x86_64") {
                    "sse2"
                } else {
                    "baseline"
                }
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => "avx512",
        }
    }

    /// The instruction set that `PERILUNE_CPU_ISA` selects, or the best of this processor.
    pub fn chosen() -> Result<Isa> {
        let best = Isa::detect();
        let Some(Setting::Word(word)) = CPU_ISA.read()? else { return Ok(best) };
        let lacks = || Error::argument("", format!("{}={word}: this processor lacks it", CPU_ISA.name));
        let below = Isa::ALL.iter().take_while(|i| **i != best).chain([&best]);
        let found = below.into_iter().find(|i| i.key() == word).copied().ok_or_else(lacks);
        found.map_err(|e| e.hint(format!("it has at most {}", best.key())))
    }

    /// The best instruction set of this processor.
    pub fn detect() -> Isa {
        static ISA: OnceLock<Isa> = OnceLock::new();
        *ISA.get_or_init(|| {
            #[cfg(target_arch = "x86_64")]
            {
                let avx512 = is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512bw");
                if avx512 {
                    return Isa::Avx512;
                }
                if is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
                {
                    return Isa::Avx2;
                }
            }
            Isa::Baseline
        })
    }

    pub fn name(self) -> &'static str {
        match self {
            Isa::Baseline => "baseline",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => "AVX2",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => "AVX-512",
        }
    }
}

unsafe fn baseline<B: Body>(out: *mut u8, args: *const Arg, rows: usize, cols: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { B::run(out, args, rows, cols) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2<B: Body>(out: *mut u8, args: *const Arg, rows: usize, cols: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { B::run(out, args, rows, cols) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c")]
unsafe fn avx512<B: Body>(out: *mut u8, args: *const Arg, rows: usize, cols: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { B::run(out, args, rows, cols) }
}

/// The entry of a loop for an instruction set.
pub fn pick<B: Body>(isa: Isa) -> Kernel {
    match isa {
        Isa::Baseline => baseline::<B>,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => avx2::<B>,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => avx512::<B>,
    }
}
