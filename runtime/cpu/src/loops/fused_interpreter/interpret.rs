//! Interprets a list of fused ops on blocks of up to eight vectors.

use super::opcode::{BLOCK, FusedLoop, FusedOp, MAX_LOCALS, MAX_OPS, MAX_SUMS, Opcode, Operand, PREFETCH_DISTANCE};
use crate::loops::reduce::fold_sum;
use crate::loops::simd::Vector;
use crate::loops::{Arg, Isa, prefetch};
use crate::math::simd_f32;
use perilune_plan::ir::LANES;
use std::mem::MaybeUninit;

/// The interpreter for an instruction set; `None` without vectors.
pub fn interpreter(isa: Isa) -> Option<FusedLoop> {
    match isa {
        Isa::Baseline => None,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => Some(avx2),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => Some(avx512),
    }
}

/// An op with the address of its operand in one row.
#[derive(Clone, Copy)]
struct BoundOp {
    at: *mut f32,
    /// A mask of the block's position: 0 for operands that do not advance with it.
    position_mask: usize,
    opcode: Opcode,
    /// Addresses to prefetch, offset by the block's position. They are spread over the ops because a processor tracks
    /// few outstanding lines and stalls on a burst of prefetches.
    prefetches: [*const f32; PREFETCHES],
}

/// Cache lines that one op prefetches.
const PREFETCHES: usize = 2;
/// Rows that groups with sums interleave, to hide the latency of additions within one row.
const INTERLEAVED_ROWS: usize = 4;
/// Bytes of a cache line, which is also the width of the widest vector.
const LINE: usize = 64;

/// Prefetches `n` elements, line by line; any address is allowed.
#[inline(always)]
fn prefetch_lines(at: *const f32, n: usize) {
    for k in (0..n).step_by(LANES) {
        prefetch(at.wrapping_add(k));
    }
}

#[inline(always)]
unsafe fn zip<V: Vector, const N: usize>(a: &mut [V; N], b: *const f32, n: usize, f: impl Fn(V, V) -> V) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if N == 1 {
            a[0] = f(a[0], V::load_partial(b, n));
        } else {
            for k in 0..N {
                a[k] = f(a[k], V::load(b.add(k * V::LANES)));
            }
        }
    }
}

#[inline(always)]
unsafe fn zip_broadcast<V: Vector, const N: usize>(a: &mut [V; N], b: *const f32, f: impl Fn(V, V) -> V) {
    // SAFETY: guaranteed by the caller.
    let b = unsafe { V::splat(*b) };
    for v in a {
        *v = f(*v, b);
    }
}

#[inline(always)]
fn each<V: Vector, const N: usize>(a: &mut [V; N], f: impl Fn(V) -> V) {
    for v in a {
        *v = f(*v);
    }
}

/// Runs the ops on `N` vectors from element `from` of the row; if `N` is 1, on `n` elements of one vector.
///
/// # Safety
/// As for `FusedLoop`.
#[inline(always)]
unsafe fn block<V: Vector, const N: usize, const PREFETCH: bool>(ops: &[BoundOp], from: usize, n: usize, tile: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut a = [V::splat(0.0); N];
        for op in ops {
            let b = op.at.wrapping_add(from & op.position_mask);
            if PREFETCH {
                for at in op.prefetches {
                    prefetch(at.wrapping_add(from));
                }
            }
            match op.opcode {
                Opcode::PrefetchNear => prefetch_lines(b.wrapping_add(PREFETCH_DISTANCE), N * V::LANES),
                Opcode::PrefetchNext => prefetch_lines(b.wrapping_add(tile), N * V::LANES),
                Opcode::Load => zip(&mut a, b, n, |_, b| b),
                Opcode::Store => {
                    if N == 1 {
                        a[0].store_partial(b, n);
                    } else {
                        for k in 0..N {
                            a[k].store(b.add(k * V::LANES));
                        }
                    }
                }
                Opcode::StoreNt => {
                    if N == 1 {
                        a[0].store_partial(b, n);
                    } else {
                        for k in 0..N {
                            a[k].store_nt(b.add(k * V::LANES));
                        }
                    }
                }
                Opcode::Sum => {
                    // `b` points to the 16 lanes; an 8-lane vector is added to their lower and upper half in turn.
                    if N == 1 {
                        let mut some = [0.0; LANES];
                        a[0].store_partial(some.as_mut_ptr(), n);
                        for k in 0..n {
                            *b.add(from % LANES + k) += some[k];
                        }
                    } else {
                        let parts = LANES / V::LANES;
                        for part in 0..parts {
                            let at = b.add(part * V::LANES);
                            let mut lanes = V::load(at);
                            for k in (part..N).step_by(parts) {
                                lanes = lanes + a[k];
                            }
                            lanes.store(at);
                        }
                    }
                }
                Opcode::Add => zip(&mut a, b, n, |a, b| a + b),
                Opcode::AddBroadcast => zip_broadcast(&mut a, b, |a, b| a + b),
                Opcode::Sub => zip(&mut a, b, n, |a, b| a - b),
                Opcode::SubBroadcast => zip_broadcast(&mut a, b, |a, b| a - b),
                Opcode::Rsub => zip(&mut a, b, n, |a, b| b - a),
                Opcode::RsubBroadcast => zip_broadcast(&mut a, b, |a, b| b - a),
                Opcode::Mul => zip(&mut a, b, n, |a, b| a * b),
                Opcode::MulBroadcast => zip_broadcast(&mut a, b, |a, b| a * b),
                Opcode::Div => zip(&mut a, b, n, |a, b| a / b),
                Opcode::DivBroadcast => zip_broadcast(&mut a, b, |a, b| a / b),
                Opcode::Rdiv => zip(&mut a, b, n, |a, b| b / a),
                Opcode::RdivBroadcast => zip_broadcast(&mut a, b, |a, b| b / a),
                Opcode::Square => each(&mut a, |a| a * a),
                Opcode::Neg => each(&mut a, |a| a.neg()),
                Opcode::Abs => each(&mut a, |a| a.abs()),
                Opcode::Relu => each(&mut a, |a| a.relu()),
                Opcode::Sqrt => each(&mut a, |a| a.sqrt()),
                Opcode::Rsqrt => {
                    let one = V::splat(1.0);
                    each(&mut a, |a| one / a.sqrt())
                }
                Opcode::Reciprocal => {
                    let one = V::splat(1.0);
                    each(&mut a, |a| one / a)
                }
                // No closures here: they would be too large to inline, and must be inlined to be compiled for the
                // instruction set.
                Opcode::Exp => {
                    for v in &mut a {
                        *v = simd_f32::exp(*v);
                    }
                }
                Opcode::Tanh => {
                    for v in &mut a {
                        *v = simd_f32::tanh(*v);
                    }
                }
                Opcode::Sigmoid => {
                    for v in &mut a {
                        *v = simd_f32::sigmoid(*v);
                    }
                }
                Opcode::Sigmoid2 => {
                    for v in &mut a {
                        *v = simd_f32::sigmoid2(*v);
                    }
                }
                Opcode::Sigmoid2Rest => {
                    for v in &mut a {
                        *v = simd_f32::sigmoid2(v.neg());
                    }
                }
                Opcode::Erf => {
                    for v in &mut a {
                        *v = simd_f32::erf(*v);
                    }
                }
            }
        }
    }
}

/// # Safety
/// Views must be valid for `rows` x `cols` elements, row broadcasts and sums for one element per row. A stored view may
/// alias a loaded one element for element, but must not overlap others.
#[inline(always)]
unsafe fn run<V: Vector>(ops: &[FusedOp], views: &[Arg], rows: usize, cols: usize) {
    let tile = rows * cols;
    // Uninitialised: tiles are small, and clearing a few KiB would cost measurable time.
    let mut sums = [const { MaybeUninit::<[[f32; LANES]; MAX_SUMS]>::uninit() }; INTERLEAVED_ROWS];
    let mut locals = [MaybeUninit::<[f32; BLOCK]>::uninit(); MAX_LOCALS];
    // Ops address both through raw pointers.
    let (sums, locals) = (sums.as_mut_ptr(), locals.as_mut_ptr());
    let sum = |r: usize, k: u8| sums.wrapping_add(r).cast::<[f32; LANES]>().wrapping_add(k as usize);
    let mut bound = [const { [const { MaybeUninit::<BoundOp>::uninit() }; MAX_OPS] }; INTERLEAVED_ROWS];
    // Row strides of an op's operand and of its prefetches.
    let mut steps = [const { MaybeUninit::<[isize; 1 + PREFETCHES]>::uninit() }; MAX_OPS];
    let summed = ops.iter().any(|l| matches!(l.operand, Operand::Sum(..)));
    let side = if summed { rows.clamp(1, INTERLEAVED_ROWS) } else { 1 };
    // Prefetched operands, interleaved line by line and spread over the ops.
    let lines = 8 * V::LANES / LANES;
    let first = ops.iter().take_while(|l| l.opcode.is_prefetch()).count();
    let spread = first.min(PREFETCHES * (ops.len() - first) / lines);
    let (ahead, ops) = ops.split_at(spread);
    let (slots, total) = (PREFETCHES * ops.len(), spread * lines);
    let (mut due, mut operand, mut depth) = (0, 0, 0);
    for (i, op) in ops.iter().enumerate() {
        let (at, position_mask, step) = match op.operand {
            Operand::None => (std::ptr::null_mut(), 0, 0),
            Operand::View(v) | Operand::RowBroadcast(v) => {
                let view = &views[v as usize];
                let position_mask = if matches!(op.operand, Operand::View(_)) { usize::MAX } else { 0 };
                (view.ptr.cast::<f32>().cast_mut(), position_mask, view.step)
            }
            Operand::Sum(k, _) => {
                for r in 0..side {
                    // SAFETY: `sums` holds `MAX_SUMS` for each interleaved row.
                    unsafe { sum(r, k).write([0.0; LANES]) };
                }
                (sum(0, k).cast(), 0, 0)
            }
            Operand::Local(k) => (locals.wrapping_add(k as usize).cast(), 0, 0),
        };
        let opcode = match op.opcode {
            Opcode::StoreNt if at.addr() % LINE != 0 || (rows > 1 && step % LANES as isize != 0) => Opcode::Store,
            opcode => opcode,
        };
        let (mut prefetches, mut prefetch_steps) = ([at.cast_const(); PREFETCHES], [0; PREFETCHES]);
        for k in 0..if spread > 0 { PREFETCHES } else { 0 } {
            let op = &ahead[operand];
            let view = &views[op.operand.view().unwrap_or(0) as usize];
            let far = depth + if op.opcode == Opcode::PrefetchNear { PREFETCH_DISTANCE } else { tile };
            (prefetches[k], prefetch_steps[k]) = (view.ptr.cast::<f32>().wrapping_add(far), view.step);
            due += total;
            if due >= slots {
                due -= slots;
                operand += 1;
                if operand == spread {
                    (operand, depth) = (0, depth + LANES);
                }
            }
        }
        steps[i].write([step, prefetch_steps[0], prefetch_steps[1]]);
        for (r, bound) in bound[..side].iter_mut().enumerate() {
            let at = match op.operand {
                Operand::Sum(k, _) => sum(r, k).cast(),
                _ => at.wrapping_offset(r as isize * step),
            };
            let prefetches = [0, 1].map(|k| prefetches[k].wrapping_offset(r as isize * prefetch_steps[k]));
            bound[i].write(BoundOp { at, position_mask, opcode, prefetches });
        }
    }
    for first in (0..rows).step_by(side) {
        let now = side.min(rows - first);
        // SAFETY: as many entries were written as there are ops, for each interleaved row.
        let row = |bound: &[[MaybeUninit<BoundOp>; MAX_OPS]], r: usize| unsafe {
            std::slice::from_raw_parts(bound[r].as_ptr().cast::<BoundOp>(), ops.len())
        };
        let mut from = 0;
        // SAFETY: the caller guarantees the rows of views, and blocks are within them. A local is written before it is
        // read and holds 8 vectors.
        unsafe {
            while from + 8 * V::LANES <= cols {
                for r in 0..now {
                    if spread > 0 {
                        block::<V, 8, true>(row(&bound, r), from, 0, tile);
                    } else {
                        block::<V, 8, false>(row(&bound, r), from, 0, tile);
                    }
                }
                from += 8 * V::LANES;
            }
            while from + 4 * V::LANES <= cols {
                for r in 0..now {
                    block::<V, 4, false>(row(&bound, r), from, 0, tile);
                }
                from += 4 * V::LANES;
            }
            while from < cols {
                let n = V::LANES.min(cols - from);
                for r in 0..now {
                    block::<V, 1, false>(row(&bound, r), from, n, tile);
                }
                from += n;
            }
            if summed {
                for r in 0..now {
                    for op in ops {
                        if let Operand::Sum(k, v) = op.operand {
                            let sum = &mut *sum(r, k);
                            *views[v as usize].ptr.cast::<f32>().cast_mut().add(first + r) = fold_sum(*sum);
                            *sum = [0.0; LANES];
                        }
                    }
                }
            }
        }
        if first + side >= rows {
            break;
        }
        for i in 0..ops.len() {
            // SAFETY: written above, here and below.
            let [step, prefetch_steps @ ..] = unsafe { steps[i].assume_init() };
            for bound in &mut bound[..side] {
                let op = unsafe { bound[i].assume_init_mut() };
                op.at = op.at.wrapping_offset(side as isize * step);
                for k in 0..PREFETCHES {
                    op.prefetches[k] = op.prefetches[k].wrapping_offset(side as isize * prefetch_steps[k]);
                }
            }
        }
    }
}

/// The interpreter on AVX2.
///
/// # Safety
/// The processor has the instruction set; otherwise as for [`FusedLoop`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn avx2(ops: &[FusedOp], views: &[Arg], rows: usize, cols: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { run::<crate::loops::simd::F32x8>(ops, views, rows, cols) }
}

/// The interpreter on AVX-512.
///
/// # Safety
/// The processor has the instruction set; otherwise as for [`FusedLoop`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c")]
pub unsafe fn avx512(ops: &[FusedOp], views: &[Arg], rows: usize, cols: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { run::<crate::loops::simd::F32x16>(ops, views, rows, cols) }
}
