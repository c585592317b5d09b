//! Compiles frequent op sequences of the fused interpreter to native loops.
//!
//! The interpreter pays for every op of every block: a jump, an address, a prefetch. This file lists the sequences that
//! training runs most; each becomes one loop whose accumulator, sums and local buffers are registers. The region compiler
//! looks a finished group of ops up in the list ([`find`]) and replaces the interpreter if opcodes and buffers match an
//! entry. Each op computes what the interpreter's does, and sums keep their 16 lanes, so the bits are the same. A sequence
//! that is not listed is only slower, and so are rows that end within a cache line.

use super::fused_interpreter::{self, FusedLoop, FusedOp, MAX_LOCALS, MAX_SUMS, Opcode, Operand, PREFETCH_DISTANCE};
use super::reduce::fold_sum;
use super::simd::Vector;
use super::{Arg, Isa, prefetch};
use crate::math::simd_f32;
use perilune_plan::ir::LANES;

/// Ops of an entry at most.
const MAX: usize = 48;
/// Operands that are prefetched at most.
const MAX_PREFETCHES: usize = 8;

/// The state of one row: the start of each operand, row broadcasts, sums.
pub(super) struct RowState<V, const P: usize> {
    pub(super) at: [*mut f32; MAX],
    broadcast: [V; MAX],
    pub(super) sums: [[V; P]; MAX_SUMS],
}

impl<V: Vector, const P: usize> RowState<V, P> {
    #[inline(always)]
    pub(super) fn new() -> Self {
        let zero = V::splat(0.0);
        RowState { at: [std::ptr::null_mut(); MAX], broadcast: [zero; MAX], sums: [[zero; P]; MAX_SUMS] }
    }
}

/// An entry of the list: its opcodes, each with the number of its local buffer or sum. The functions are unrolled op by op,
/// so that every opcode and index is a compile-time constant.
pub(super) trait Superinstruction {
    const OPS: &'static [(Opcode, Option<u8>)];

    /// Resolves the operands of row `row`.
    ///
    /// # Safety
    /// As for `FusedLoop`; `ops` are those of the entry.
    unsafe fn bind<V: Vector, const P: usize>(ops: &[FusedOp], views: &[Arg], row: usize) -> RowState<V, P>;

    /// Runs all ops on 16 elements from `from` on. `nt`: with non-temporal stores.
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

/// Resolves the operand of one op in row `row`.
///
/// # Safety
/// As for `FusedLoop`.
#[inline(always)]
unsafe fn bind_operand<V: Vector, const P: usize>(
    opcode: Opcode,
    i: usize,
    op: &FusedOp,
    views: &[Arg],
    row: usize,
    to: &mut RowState<V, P>,
) {
    if let Operand::View(v) | Operand::RowBroadcast(v) = op.operand {
        // SAFETY: the caller's promise.
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
pub(super) unsafe fn read<V: Vector, const P: usize>(at: *const f32) -> [V; P] {
    let mut b = [V::splat(0.0); P];
    for (p, b) in b.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        *b = unsafe { V::load(at.add(p * V::LANES)) };
    }
    b
}

#[inline(always)]
pub(super) unsafe fn write<V: Vector, const P: usize>(a: [V; P], at: *mut f32, nt: bool) {
    for (p, a) in a.into_iter().enumerate() {
        // SAFETY: the caller's promise.
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
unsafe fn step<V: Vector, const P: usize>(
    (opcode, local): (Opcode, Option<u8>),
    i: usize,
    mut a: [V; P],
    row: &mut RowState<V, P>,
    locals: &mut [[V; P]; MAX_LOCALS],
    from: usize,
    nt: bool,
) -> [V; P] {
    // SAFETY: the caller's promise, here and below.
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
unsafe fn fold<V: Vector, const P: usize>(sum: [V; P], op: &FusedOp, views: &[Arg], row: usize) {
    if let Some(v) = op.operand.view() {
        let mut lanes = [0.0; LANES];
        // SAFETY: 16 elements, and one a row by the caller.
        unsafe {
            write::<V, P>(sum, lanes.as_mut_ptr(), false);
            *views.get_unchecked(v as usize).ptr.cast::<f32>().cast_mut().add(row) = fold_sum(lanes);
        }
    }
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
                        // SAFETY: the caller's promise; an entry has as many ops as `ops`.
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
                        // SAFETY: the caller's promise.
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
                            // SAFETY: the caller's promise.
                            unsafe { fold(of.sums[k as usize], ops.get_unchecked(i), views, row) };
                        }
                        i += 1;
                    )+
                    let _ = i;
                }
            }
        )*

        /// The loop of a listed sequence of ops.
        pub fn find(isa: Isa, ops: &[FusedOp]) -> Option<FusedLoop> {
            let ops = &ops[prefetch_len(ops)..];
            $(
                if matches($name::OPS, ops) {
                    return entry::<$name>(isa);
                }
            )*
            None
        }

        #[cfg(test)]
        const ALL: &[(&str, &[(Opcode, Option<u8>)])] = &[$((stringify!($name), $name::OPS)),*];
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

/// How many ops at the start are prefetches.
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

/// Whether every `StoreNt` of the entry is one of the sequence too, and aligned to cache lines.
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
/// As for `FusedLoop`; rows of whole cache lines.
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
    // SAFETY: rows and elements lie within the views, by the caller.
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
    // SAFETY: the caller's promise.
    unsafe {
        if cols.is_multiple_of(LANES) {
            run::<S, super::simd::F32x8, 2>(ops, views, rows, cols)
        } else {
            fused_interpreter::avx2(ops, views, rows, cols)
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,f16c")]
unsafe fn avx512<S: Superinstruction>(ops: &[FusedOp], views: &[Arg], rows: usize, cols: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        if cols.is_multiple_of(LANES) {
            run::<S, super::simd::F32x16, 1>(ops, views, rows, cols)
        } else {
            fused_interpreter::avx512(ops, views, rows, cols)
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use crate::memory::Block;

    /// Numbers of moderate size, with zeros, infinities and NaN among them.
    fn fill(block: &Block, n: usize, seed: u32) {
        let mut state = seed.wrapping_mul(747_796_405) | 1;
        for i in 0..n {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let x = match state >> 24 {
                0 => 0.0,
                1 => f32::NAN,
                2 => f32::INFINITY,
                _ => (state >> 8) as f32 / 4e6 - 1.7,
            };
            // SAFETY: the block has `n` elements.
            unsafe { *block.ptr().cast::<f32>().add(i) = x };
        }
    }

    fn bits(block: &Block, n: usize) -> Vec<u32> {
        // SAFETY: the block has `n` elements.
        let x = unsafe { std::slice::from_raw_parts(block.ptr().cast::<f32>(), n) };
        x.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
    }

    /// The operands after a run, each in memory of its own, `shift` elements off cache-line alignment.
    fn after(run: FusedLoop, ops: &[FusedOp], rows: usize, cols: usize, shift: usize) -> Vec<Vec<u32>> {
        let n = rows * cols;
        let blocks: Vec<Block> = (0..ops.len()).map(|_| Block::new(4 * (n + 32)).expect("memory")).collect();
        blocks.iter().enumerate().for_each(|(k, b)| fill(b, n + 32, k as u32 + 1));
        let view = |(op, block): (&FusedOp, &Block)| {
            let step =
                if matches!(op.operand, Operand::RowBroadcast(_) | Operand::Sum(..)) { 1 } else { cols as isize };
            Arg { ptr: block.ptr().wrapping_add(4 * shift), step }
        };
        let views: Vec<Arg> = ops[prefetch_len(ops)..].iter().zip(&blocks).map(view).collect();
        // SAFETY: every view has its rows and columns.
        unsafe { run(ops, &views, rows, cols) };
        blocks.iter().map(|b| bits(b, n + 32)).collect()
    }

    #[test]
    fn entries_give_the_bits_of_the_interpreter() {
        for (name, entry) in ALL {
            assert!(entry.len() <= MAX, "{name} has too many ops");
            for (stream, ahead) in [(false, false), (true, true)] {
                let ops: Vec<FusedOp> = entry
                    .iter()
                    .enumerate()
                    .map(|(i, &(opcode, local))| {
                        let v = i as u16;
                        let operand = match (opcode, local) {
                            (Opcode::Sum, k) => Operand::Sum(k.expect("a sum has a number"), v),
                            (_, Some(k)) => Operand::Local(k),
                            (opcode, _) if opcode.is_broadcast() => Operand::RowBroadcast(v),
                            _ => Operand::View(v),
                        };
                        let opcode = if opcode == Opcode::StoreNt && !stream { Opcode::Store } else { opcode };
                        FusedOp { opcode, operand }
                    })
                    .collect();
                let prefetches = [
                    FusedOp { opcode: Opcode::PrefetchNext, operand: Operand::View(0) },
                    FusedOp { opcode: Opcode::PrefetchNear, operand: Operand::View(0) },
                ];
                let ops: Vec<FusedOp> = if ahead { prefetches.into_iter().chain(ops).collect() } else { ops };
                let other: Vec<Isa> =
                    if Isa::detect() == Isa::Avx512 { vec![Isa::Avx2, Isa::Avx512] } else { vec![Isa::detect()] };
                for isa in other.into_iter().filter(|i| *i != Isa::Baseline) {
                    let compiled = find(isa, &ops).expect("it is listed");
                    for (rows, cols) in [(1, 5), (1, 64), (3, 128), (4, 100), (5, 16), (9, 131), (8, 7), (1, 1003)] {
                        for shift in [0, 1] {
                            let want = after(
                                fused_interpreter::interpreter(isa).expect("a vector class"),
                                &ops,
                                rows,
                                cols,
                                shift,
                            );
                            let got = after(compiled, &ops, rows, cols, shift);
                            assert!(got == want, "{name} on {isa:?}, {rows} x {cols}, stream {stream}, shift {shift}");
                        }
                    }
                }
            }
        }
    }
}
