//! Compiles frequent op sequences of the fused interpreter to native loops.
//!
//! The interpreter spends a jump, an address computation and a prefetch on every op of every block. This file lists the
//! most frequent sequences of training; each becomes one loop whose accumulator, sums and local buffers are registers.
//! The region compiler looks up each finished group of ops in the list ([`find`]) and replaces the interpreter if
//! opcodes and buffers match an entry. Each op computes what the interpreter's does, and sums keep their 16 lanes, so
//! the bits are the same. Sequences that are not listed, and rows that end within a cache line, are only slower.

mod step;

use super::fused_interpreter::{self, FusedLoop, FusedOp, MAX_LOCALS, Opcode, Operand, PREFETCH_DISTANCE};
use super::simd::Vector;
use super::{Arg, Isa, prefetch};
use perilune_plan::ir::LANES;
use step::{bind_operand, fold, step};

pub use step::MAX as MAX_OPERANDS;
pub(super) use step::{RowState, read, write};

/// Maximum number of operands that are prefetched.
const MAX_PREFETCHES: usize = 8;

/// An entry of the list: its opcodes, each with the number of its local buffer or sum. The functions are unrolled op by
/// op, so every opcode and index is a compile-time constant.
pub(super) trait Superinstruction {
    const OPS: &'static [(Opcode, Option<u8>)];

    /// Resolves the operands of row `row`.
    ///
    /// # Safety
    /// As for `FusedLoop`; `ops` are those of the entry.
    unsafe fn bind<V: Vector, const P: usize>(ops: &[FusedOp], views: &[Arg], row: usize) -> RowState<V, P>;

    /// Runs all ops on 16 elements starting at `from`. `nt` selects non-temporal stores.
    ///
    /// # Safety
    /// As for `FusedLoop`.
    unsafe fn run_lanes<V: Vector, const P: usize>(row: &mut RowState<V, P>, from: usize, nt: bool);

    /// Stores the sums of a row of `cols` elements.
    ///
    /// # Safety
    /// As for `FusedLoop`.
    unsafe fn finish<V: Vector, const P: usize>(
        of: &RowState<V, P>,
        ops: &[FusedOp],
        views: &[Arg],
        row: usize,
        cols: usize,
    );
}

macro_rules! number {
    () => {
        None
    };
    ($k:literal) => {
        Some($k)
    };
}

macro_rules! entries {
    ($($(#[doc = $what:literal])+ $name:ident: $($opcode:ident $(@ $local:literal)?)+;)*) => {
        $(
            $(#[doc = $what])+
            pub(super) struct $name;

            impl Superinstruction for $name {
                const OPS: &'static [(Opcode, Option<u8>)] = &[$((Opcode::$opcode, number!($($local)?))),+];

                #[inline(always)]
                unsafe fn bind<V: Vector, const P: usize>(ops: &[FusedOp], views: &[Arg], row: usize) -> RowState<V, P> {
                    let mut to = RowState::new();
                    let mut i = 0;
                    $(
                        // SAFETY: guaranteed by the caller; an entry has as many ops as `ops`.
                        unsafe { bind_operand(Opcode::$opcode, i, ops.get_unchecked(i), views, row, &mut to) };
                        i += 1;
                    )+
                    let _ = i;
                    to
                }

                #[inline(always)]
                unsafe fn run_lanes<V: Vector, const P: usize>(row: &mut RowState<V, P>, from: usize, nt: bool) {
                    let mut locals = [[V::splat(0.0); P]; MAX_LOCALS];
                    let mut a = [V::splat(0.0); P];
                    let mut i = 0;
                    $(
                        // SAFETY: guaranteed by the caller.
                        a = unsafe {
                            let op = (Opcode::$opcode, number!($($local)?));
                            step::<V, P>(op, i, a, row, &mut locals, from, nt)
                        };
                        i += 1;
                    )+
                    let _ = (a, i);
                }

                #[inline(always)]
                unsafe fn finish<V: Vector, const P: usize>(
                    of: &RowState<V, P>,
                    ops: &[FusedOp],
                    views: &[Arg],
                    row: usize,
                    _: usize,
                ) {
                    let mut i = 0;
                    $(
                        let sum: Option<u8> = number!($($local)?);
                        if let (Opcode::Sum, Some(k)) = (Opcode::$opcode, sum) {
                            // SAFETY: guaranteed by the caller.
                            unsafe { fold(of.sums[k as usize], ops.get_unchecked(i), views, row) };
                        }
                        i += 1;
                    )+
                    let _ = i;
                }
            }
        )*

        /// Returns the loop of a listed sequence of ops.
        pub fn find(isa: Isa, ops: &[FusedOp]) -> Option<FusedLoop> {
            let ops = &ops[prefetch_len(ops)..];
            $(
                if matches($name::OPS, ops) {
                    return entry::<$name>(isa);
                }
            )*
            None
        }

        /// The listed sequences, with their names.
        pub const ALL: &[(&str, &[(Opcode, Option<u8>)])] = &[$((stringify!($name), $name::OPS)),*];
    };
}

entries! {
    /// The sum of the row.
    RowSum: Load Sum@0;
    /// Layer norm: the sum of squares of the row minus its mean.
    CenteredSquares: Load SubBroadcast Square Sum@0;
    /// Layer norm: normalisation with weight and bias.
    LayerNorm: Load SubBroadcast MulBroadcast Mul Add StoreNt;
    /// The same without bias.
    LayerNormNoBias: Load SubBroadcast MulBroadcast Mul StoreNt;
    /// RMS norm.
    RmsNorm: Load MulBroadcast Mul StoreNt;
    /// Softmax: exponentials of the row minus its maximum, and their sum.
    SoftmaxExp: Load SubBroadcast Exp Store Sum@0;
    /// Softmax: division by the sum.
    SoftmaxScale: Load MulBroadcast StoreNt;
    /// Softmax backward: the dot product of the row and its gradient.
    SoftmaxDot: Load Mul Sum@0;
    /// Softmax backward: the gradient minus that product, times the row.
    SoftmaxGrad: Load SubBroadcast Mul MulBroadcast StoreNt;
    /// A residual addition, and its row sums.
    ResidualSum: Load Add Store Sum@0;
    /// Layer norm backward: row sums.
    LayerNormGradSums: Load SubBroadcast MulBroadcast Store Load Mul Store Mul Sum@0;
    /// Layer norm backward: the gradient of the row, and the weight's summands.
    LayerNormGrad: Load MulBroadcast Store@0 Load SubBroadcast Sub@0 MulBroadcast Store Load Mul StoreNt;
    /// The backward of a residual addition.
    ResidualGrad: Load MulBroadcast Add StoreNt;
    /// GELU by erf.
    Gelu: Load MulBroadcast Erf AddBroadcast MulBroadcast Mul StoreNt;
    /// The backward of GELU by erf.
    GeluGrad: Load MulBroadcast Erf AddBroadcast MulBroadcast Store@0 Load Square MulBroadcast Exp MulBroadcast Mul Add@0 Mul StoreNt;
    /// The sum of the squares of the row.
    Squares: Load Square Sum@0;
    /// AdamW.
    AdamW: Load Sub MulBroadcast Add Store Load Square Sub MulBroadcast Add Store Sqrt MulBroadcast AddBroadcast Store@0
        Load MulBroadcast Div@0 Store@0 Load MulBroadcast Sub@0 Store;
    /// AdamW with a scaled gradient.
    AdamWScaled: Load MulBroadcast Store@0 Sub MulBroadcast Add Store Load@0 Square Sub MulBroadcast Add Store Sqrt MulBroadcast AddBroadcast
        Store@0 Load MulBroadcast Div@0 Store@0 Load MulBroadcast Sub@0 Store;
}

/// Returns the number of leading prefetch ops.
pub fn prefetch_len(ops: &[FusedOp]) -> usize {
    ops.iter().take_while(|l| l.opcode.is_prefetch()).count()
}

/// Whether a sequence is an entry. `StoreNt` in an entry matches both kinds of store.
pub(super) fn matches(entry: &[(Opcode, Option<u8>)], ops: &[FusedOp]) -> bool {
    entry.len() == ops.len()
        && entry.iter().zip(ops).all(|((opcode, local), op)| {
            let number = match op.operand {
                Operand::Local(k) | Operand::Sum(k, _) => Some(k),
                _ => None,
            };
            let either = *opcode == Opcode::StoreNt && op.opcode == Opcode::Store;
            (*opcode == op.opcode || either) && *local == number
        })
}

fn entry<S: Superinstruction>(isa: Isa) -> Option<FusedLoop> {
    match isa {
        Isa::Baseline => None,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => Some(avx2::<S>),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => Some(avx512::<S>),
    }
}

/// Whether every `StoreNt` of the entry is also one in the sequence, and is aligned to cache lines.
#[inline(always)]
pub(super) fn uses_nt_stores<S: Superinstruction>(ops: &[FusedOp], views: &[Arg], rows: usize) -> bool {
    let mut any = false;
    for ((opcode, _), op) in S::OPS.iter().zip(ops) {
        if *opcode == Opcode::StoreNt {
            let Some(v) = op.operand.view() else { return false };
            let view = &views[v as usize];
            let whole = view.ptr.addr().is_multiple_of(4 * LANES) && (rows == 1 || view.step % LANES as isize == 0);
            if op.opcode != Opcode::StoreNt || !whole {
                return false;
            }
            any = true;
        }
    }
    any
}

/// # Safety
/// As for `FusedLoop`; rows must be a whole number of cache lines.
#[inline(always)]
unsafe fn run<S: Superinstruction, V: Vector, const P: usize>(
    ops: &[FusedOp],
    views: &[Arg],
    rows: usize,
    cols: usize,
) {
    let (ahead, ops) = ops.split_at(prefetch_len(ops));
    let nt = uses_nt_stores::<S>(ops, views, rows);
    let mut prefetches = [(std::ptr::null(), 0isize); MAX_PREFETCHES];
    let count = ahead.len().min(MAX_PREFETCHES);
    for (prefetch, op) in prefetches.iter_mut().zip(ahead) {
        let view = &views[op.operand.view().unwrap_or(0) as usize];
        let far = if op.opcode == Opcode::PrefetchNear { PREFETCH_DISTANCE } else { rows * cols };
        *prefetch = (view.ptr.cast::<f32>().wrapping_add(far), view.step);
    }
    let prefetch_row = |row: usize, from: usize| {
        for (at, step) in &prefetches[..count] {
            prefetch(at.wrapping_offset(row as isize * step).wrapping_add(from));
        }
    };
    let sums = S::OPS.iter().any(|l| l.0 == Opcode::Sum);
    let mut at = 0;
    // SAFETY: the caller guarantees that rows and elements are within the views.
    unsafe {
        // Entries with sums interleave four rows, to hide the latency of additions. Unrolled by hand, because LLVM keeps
        // an array of rows in memory.
        while sums && at + 4 <= rows {
            let mut a = S::bind::<V, P>(ops, views, at);
            let mut b = S::bind::<V, P>(ops, views, at + 1);
            let mut c = S::bind::<V, P>(ops, views, at + 2);
            let mut d = S::bind::<V, P>(ops, views, at + 3);
            for from in (0..cols).step_by(LANES) {
                S::run_lanes(&mut a, from, nt);
                prefetch_row(at, from);
                S::run_lanes(&mut b, from, nt);
                prefetch_row(at + 1, from);
                S::run_lanes(&mut c, from, nt);
                prefetch_row(at + 2, from);
                S::run_lanes(&mut d, from, nt);
                prefetch_row(at + 3, from);
            }
            S::finish(&a, ops, views, at, cols);
            S::finish(&b, ops, views, at + 1, cols);
            S::finish(&c, ops, views, at + 2, cols);
            S::finish(&d, ops, views, at + 3, cols);
            at += 4;
        }
        while at < rows {
            let mut row = S::bind::<V, P>(ops, views, at);
            for from in (0..cols).step_by(LANES) {
                S::run_lanes(&mut row, from, nt);
                prefetch_row(at, from);
            }
            S::finish(&row, ops, views, at, cols);
            at += 1;
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2<S: Superinstruction>(ops: &[FusedOp], views: &[Arg], rows: usize, cols: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if cols.is_multiple_of(LANES) {
            run::<S, crate::loops::simd::F32x8, 2>(ops, views, rows, cols)
        } else {
            fused_interpreter::avx2(ops, views, rows, cols)
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c")]
unsafe fn avx512<S: Superinstruction>(ops: &[FusedOp], views: &[Arg], rows: usize, cols: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if cols.is_multiple_of(LANES) {
            run::<S, crate::loops::simd::F32x16, 1>(ops, views, rows, cols)
        } else {
            fused_interpreter::avx512(ops, views, rows, cols)
        }
    }
}
