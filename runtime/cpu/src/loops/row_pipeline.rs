//! Pipelines three loops over rows: the third stage runs on one row while the second runs on the next row and the first on
//! the row after that.
//!
//! A normalisation reads a row from memory (stage 1), reduces it again (stage 2) and writes the result with
//! non-temporal stores (stage 3). If the stages run one after the other, each uses the memory bus in one direction or
//! not at all, and the few store buffers of a processor fill up. As a pipeline they read and write memory all the time.

use super::fused_interpreter::FusedOp;
use super::reduce::fold_max;
use super::simd::Vector;
use super::superinstructions::{self, RowState, Superinstruction};
use super::{Arg, Isa, prefetch};
use perilune_plan::ir::LANES;

/// A stage and the rows that it processes.
#[derive(Clone, Copy)]
pub struct Stage<'a> {
    pub ops: &'a [FusedOp],
    pub views: &'a [Arg],
}

/// Runs the stages on `rows` rows of `cols` elements each, first stage first. `prefetched`: one or two views of the
/// first stage whose next rows are prefetched.
pub type PipelineLoop = unsafe fn(stages: [Stage; 3], prefetched: &[u16], rows: usize, cols: usize);

/// What the first stage computes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FirstStage {
    Fused,
    /// The maximum of a row; its ops are the same as those of a sum.
    Max,
}

/// The maximum of the row, with NaN detection as in `reduce`.
struct RowMax;

impl Superinstruction for RowMax {
    const OPS: &'static [(super::fused_interpreter::Opcode, Option<u8>)] = &[];

    #[inline(always)]
    unsafe fn bind<V: Vector, const P: usize>(ops: &[FusedOp], views: &[Arg], row: usize) -> RowState<V, P> {
        // SAFETY: guaranteed by the caller, here and below.
        let mut to = unsafe { superinstructions::RowSum::bind::<V, P>(ops, views, row) };
        to.sums[0] = [V::splat(f32::NEG_INFINITY); P];
        to
    }

    #[inline(always)]
    unsafe fn run_lanes<V: Vector, const P: usize>(row: &mut RowState<V, P>, from: usize, _: bool) {
        // SAFETY: as above.
        let x = unsafe { superinstructions::read::<V, P>(row.at[0].add(from)) };
        for p in 0..P {
            row.sums[0][p] = x[p].clamp_min(row.sums[0][p]);
            row.sums[1][p] = x[p].abs().max_bits(row.sums[1][p]);
        }
    }

    #[inline(always)]
    unsafe fn finish<V: Vector, const P: usize>(
        of: &RowState<V, P>,
        ops: &[FusedOp],
        views: &[Arg],
        row: usize,
        cols: usize,
    ) {
        let (mut lanes, mut marks) = ([0.0; LANES], [0.0; LANES]);
        // SAFETY: as above; 16 lanes each.
        unsafe {
            superinstructions::write::<V, P>(of.sums[0], lanes.as_mut_ptr(), false);
            superinstructions::write::<V, P>(of.sums[1], marks.as_mut_ptr(), false);
            if let Some(v) = ops[1].operand.view() {
                let x = std::slice::from_raw_parts(of.at[0], cols);
                let out = views.get_unchecked(v as usize).ptr.cast::<f32>().cast_mut();
                *out.add(row) = fold_max(lanes, marks.map(f32::to_bits), x);
            }
        }
    }
}

macro_rules! pipelines {
    ($($(#[doc = $what:literal])+ $first:ident $second:ident $third:ident;)*) => {
        /// Returns the loop of three listed stages; rows must be a whole number of lanes.
        pub fn find(isa: Isa, first: FirstStage, ops: [&[FusedOp]; 3]) -> Option<PipelineLoop> {
            $(
                let begins = match first {
                    FirstStage::Fused => superinstructions::matches($first::OPS, ops[0]),
                    FirstStage::Max => $first::OPS.is_empty(),
                };
                if begins && superinstructions::matches($second::OPS, ops[1]) && superinstructions::matches($third::OPS, ops[2]) {
                    return entry::<$first, $second, $third>(isa);
                }
            )*
            None
        }
    };
}

use superinstructions::{CenteredSquares, LayerNorm, LayerNormNoBias, RowSum, SoftmaxExp, SoftmaxScale};

pipelines! {
    /// Layer norm.
    RowSum CenteredSquares LayerNorm;
    /// Layer norm without bias.
    RowSum CenteredSquares LayerNormNoBias;
    /// Softmax.
    RowMax SoftmaxExp SoftmaxScale;
}

fn entry<A: Superinstruction, B: Superinstruction, C: Superinstruction>(isa: Isa) -> Option<PipelineLoop> {
    match isa {
        Isa::Baseline => None,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => Some(avx2::<A, B, C>),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => Some(avx512::<A, B, C>),
    }
}

/// # Safety
/// As for `FusedLoop`, for each of the three stages; rows must be a whole number of lanes.
#[inline(always)]
unsafe fn run<A: Superinstruction, B: Superinstruction, C: Superinstruction, V: Vector, const P: usize>(
    [first, second, third]: [Stage; 3],
    prefetched: &[u16],
    rows: usize,
    cols: usize,
) {
    let nt = superinstructions::uses_nt_stores::<C>(third.ops, third.views, rows);
    let next_rows = |k: usize| {
        let view = &first.views[prefetched[k.min(prefetched.len() - 1)] as usize];
        (view.ptr.cast::<f32>().wrapping_add(rows * cols), view.step)
    };
    let (one, two) = (next_rows(0), next_rows(1));
    // SAFETY: the caller guarantees that rows and elements are within the views.
    unsafe {
        for r in 0..rows {
            let mut a = A::bind::<V, P>(first.ops, first.views, r);
            let mut b = B::bind::<V, P>(second.ops, second.views, r);
            let mut c = C::bind::<V, P>(third.ops, third.views, r);
            let one = one.0.wrapping_offset(r as isize * one.1);
            let two = two.0.wrapping_offset(r as isize * two.1);
            for from in (0..cols).step_by(LANES) {
                C::run_lanes(&mut c, from, nt);
                B::run_lanes(&mut b, from, false);
                A::run_lanes(&mut a, from, false);
                prefetch(one.wrapping_add(from));
                prefetch(two.wrapping_add(from));
            }
            A::finish(&a, first.ops, first.views, r, cols);
            B::finish(&b, second.ops, second.views, r, cols);
            C::finish(&c, third.ops, third.views, r, cols);
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn avx2<A: Superinstruction, B: Superinstruction, C: Superinstruction>(
    stages: [Stage; 3],
    prefetched: &[u16],
    rows: usize,
    cols: usize,
) {
    // SAFETY: guaranteed by the caller.
    unsafe { run::<A, B, C, super::simd::F32x8, 2>(stages, prefetched, rows, cols) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c")]
unsafe fn avx512<A: Superinstruction, B: Superinstruction, C: Superinstruction>(
    stages: [Stage; 3],
    prefetched: &[u16],
    rows: usize,
    cols: usize,
) {
    // SAFETY: guaranteed by the caller.
    unsafe { run::<A, B, C, super::simd::F32x16, 1>(stages, prefetched, rows, cols) }
}
