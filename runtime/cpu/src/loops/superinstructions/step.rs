//! Runs one op on the registers of a row: the building block of the unrolled loops.

use crate::loops::Arg;
use crate::loops::fused_interpreter::{FusedOp, MAX_LOCALS, MAX_SUMS, Opcode, Operand};
use crate::loops::reduce::fold_sum;
use crate::loops::simd::Vector;
use crate::math::simd_f32;
use perilune_plan::ir::LANES;

/// Maximum ops of an entry.
pub const MAX: usize = 48;

/// The state of one row: the start of each operand, row broadcasts, sums.
pub struct RowState<V, const P: usize> {
    pub at: [*mut f32; MAX],
    broadcast: [V; MAX],
    pub sums: [[V; P]; MAX_SUMS],
}

impl<V: Vector, const P: usize> RowState<V, P> {
    #[inline(always)]
    pub fn new() -> Self {
        let zero = V::splat(0.0);
        RowState { at: [std::ptr::null_mut(); MAX], broadcast: [zero; MAX], sums: [[zero; P]; MAX_SUMS] }
    }
}

/// Resolves the operand of one op in row `row`.
///
/// # Safety
/// As for `FusedLoop`.
#[inline(always)]
pub unsafe fn bind_operand<V: Vector, const P: usize>(
    opcode: Opcode,
    i: usize,
    op: &FusedOp,
    views: &[Arg],
    row: usize,
    to: &mut RowState<V, P>,
) {
    if let Operand::View(v) | Operand::RowBroadcast(v) = op.operand {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let at = views.get_unchecked(v as usize).row::<f32>(row).cast_mut();
            if opcode.is_broadcast() {
                to.broadcast[i] = V::splat(*at);
            } else {
                to.at[i] = at;
            }
        }
    }
}

#[inline(always)]
pub unsafe fn read<V: Vector, const P: usize>(at: *const f32) -> [V; P] {
    let mut b = [V::splat(0.0); P];
    for (p, b) in b.iter_mut().enumerate() {
        // SAFETY: guaranteed by the caller.
        *b = unsafe { V::load(at.add(p * V::LANES)) };
    }
    b
}

#[inline(always)]
pub unsafe fn write<V: Vector, const P: usize>(a: [V; P], at: *mut f32, nt: bool) {
    for (p, a) in a.into_iter().enumerate() {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let at = at.add(p * V::LANES);
            if nt { a.store_nt(at) } else { a.store(at) }
        }
    }
}

#[inline(always)]
fn zip<V: Vector, const P: usize>(mut a: [V; P], b: [V; P], f: impl Fn(V, V) -> V) -> [V; P] {
    for p in 0..P {
        a[p] = f(a[p], b[p]);
    }
    a
}

/// Runs one op and returns the accumulator.
///
/// # Safety
/// As for `FusedLoop`.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub unsafe fn step<V: Vector, const P: usize>(
    (opcode, local): (Opcode, Option<u8>),
    i: usize,
    mut a: [V; P],
    row: &mut RowState<V, P>,
    locals: &mut [[V; P]; MAX_LOCALS],
    from: usize,
    nt: bool,
) -> [V; P] {
    // SAFETY: guaranteed by the caller, here and below.
    let operand = |row: &RowState<V, P>, locals: &[[V; P]; MAX_LOCALS]| match local {
        Some(k) => locals[k as usize],
        None => unsafe { read::<V, P>(row.at[i].add(from)) },
    };
    let broadcast = [row.broadcast[i]; P];
    match opcode {
        Opcode::PrefetchNear | Opcode::PrefetchNext => a,
        Opcode::Load => operand(row, locals),
        Opcode::Store | Opcode::StoreNt => {
            match local {
                Some(k) => locals[k as usize] = a,
                None => unsafe { write::<V, P>(a, row.at[i].add(from), nt && opcode == Opcode::StoreNt) },
            }
            a
        }
        Opcode::Sum => {
            let sum = &mut row.sums[local.unwrap_or(0) as usize];
            *sum = zip(*sum, a, |s, a| s + a);
            a
        }
        Opcode::Add => zip(a, operand(row, locals), |a, b| a + b),
        Opcode::AddBroadcast => zip(a, broadcast, |a, b| a + b),
        Opcode::Sub => zip(a, operand(row, locals), |a, b| a - b),
        Opcode::SubBroadcast => zip(a, broadcast, |a, b| a - b),
        Opcode::Rsub => zip(a, operand(row, locals), |a, b| b - a),
        Opcode::RsubBroadcast => zip(a, broadcast, |a, b| b - a),
        Opcode::Mul => zip(a, operand(row, locals), |a, b| a * b),
        Opcode::MulBroadcast => zip(a, broadcast, |a, b| a * b),
        Opcode::Div => zip(a, operand(row, locals), |a, b| a / b),
        Opcode::DivBroadcast => zip(a, broadcast, |a, b| a / b),
        Opcode::Rdiv => zip(a, operand(row, locals), |a, b| b / a),
        Opcode::RdivBroadcast => zip(a, broadcast, |a, b| b / a),
        Opcode::Square => zip(a, a, |a, _| a * a),
        Opcode::Neg => zip(a, a, |a, _| a.neg()),
        Opcode::Abs => zip(a, a, |a, _| a.abs()),
        Opcode::Relu => zip(a, a, |a, _| a.relu()),
        Opcode::Sqrt => zip(a, a, |a, _| a.sqrt()),
        Opcode::Rsqrt => zip(a, a, |a, _| V::splat(1.0) / a.sqrt()),
        Opcode::Reciprocal => zip(a, a, |a, _| V::splat(1.0) / a),
        // No closures for large functions: they must be inlined to be compiled for the instruction set.
        Opcode::Exp => {
            for a in &mut a {
                *a = simd_f32::exp(*a);
            }
            a
        }
        Opcode::Tanh => {
            for a in &mut a {
                *a = simd_f32::tanh(*a);
            }
            a
        }
        Opcode::Sigmoid => {
            for a in &mut a {
                *a = simd_f32::sigmoid(*a);
            }
            a
        }
        Opcode::Sigmoid2 => {
            for a in &mut a {
                *a = simd_f32::sigmoid2(*a);
            }
            a
        }
        Opcode::Sigmoid2Rest => {
            for a in &mut a {
                *a = simd_f32::sigmoid2(a.neg());
            }
            a
        }
        Opcode::Erf => {
            for a in &mut a {
                *a = simd_f32::erf(*a);
            }
            a
        }
    }
}

/// Folds and stores the sum of a row.
///
/// # Safety
/// As for `FusedLoop`.
#[inline(always)]
pub unsafe fn fold<V: Vector, const P: usize>(sum: [V; P], op: &FusedOp, views: &[Arg], row: usize) {
    if let Some(v) = op.operand.view() {
        let mut lanes = [0.0; LANES];
        // SAFETY: there are 16 lanes, and the caller guarantees one element per row.
        unsafe {
            write::<V, P>(sum, lanes.as_mut_ptr(), false);
            *views.get_unchecked(v as usize).ptr.cast::<f32>().cast_mut().add(row) = fold_sum(lanes);
        }
    }
}
