//! Multiplies skinny matrices: vectors, few rows, small results. For these sizes the `gemm` crates would choose its
//! algorithm, and so the bits, by strides.
//!
//! The shape alone decides which products are skinny ([`is_skinny`]) and the order of additions: element `k` of a row
//! is added to lane `k % LANES` in order, lanes are folded as a halving tree, and chunks of [`CHUNK`] are summed in
//! f64. Two loops implement that order and read each operand once: [`DotRows`] where rows are contiguous along K,
//! [`AxpyColumns`] where columns are. Any other layout is packed, a block at a time, for `DotRows`. Multiplies and adds
//! are separate, so the bits agree between instruction sets too.

use super::{BatchedMatrix, Gemm, GemmShape};
use crate::library::Call;
use crate::loops::{self, Arg, Body, Isa, Kernel};
use crate::math::Number;
use crate::worker_pool::SendPtr;
use std::marker::PhantomData;

/// Partial sums of a row.
const LANES: usize = 16;
/// Elements of K that are summed in lanes before they are added to the total.
const CHUNK: usize = 8192;
/// Left rows per call of `DotRows` and of `AxpyColumns`.
const LEFT: usize = 4;
const LEFT_AXPY: usize = 3;
/// Maximum left rows, of at least [`LONG`] elements each, for which these loops are faster than packing.
const FEW_ROWS: usize = 16;
const LONG: usize = 64;
/// Maximum bytes of the lanes of a block of columns, and of the part of the right operand that one lane reads at once.
const SUMS: usize = 512 << 10;
const WINDOW: usize = 16 << 10;
/// Maximum elements of a result for which the `gemm` crates consider strides.
const SMALL: usize = 16 * 16;

/// Whether a product is skinny; its smaller side then has at most 16 rows.
pub fn is_skinny(s: GemmShape) -> bool {
    let few = (2..=FEW_ROWS).contains(&s.m) && s.n >= LONG && s.k >= LONG;
    s.m == 1 || s.n == 1 || s.m * s.n <= SMALL || few
}

/// Folds the lanes of one row.
#[inline(always)]
fn fold<T: Number>(mut sum: [T; LANES]) -> T {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            sum[i] = sum[i].add(sum[i + width]);
        }
        width /= 2;
    }
    sum[0]
}

/// Returns `sum + x * y`, lane by lane.
#[inline(always)]
fn step<T: Number>(mut sum: [T; LANES], x: &[T; LANES], y: &[T; LANES]) -> [T; LANES] {
    for i in 0..LANES {
        sum[i] = sum[i].add(x[i].mul(y[i]));
    }
    sum
}

/// Computes the dot products of `L` left rows with `R` right rows, `L` results per right row.
#[inline(always)]
fn tile<T: Number, const L: usize, const R: usize>(left: [&[T]; L], right: [&[T]; R], out: &mut [T]) {
    let len = right[0].len();
    let n = len / LANES;
    let xs = left.map(|x| &x.as_chunks::<LANES>().0[..n]);
    let ys = right.map(|y| &y.as_chunks::<LANES>().0[..n]);
    let mut sums = [[[T::ZERO; LANES]; L]; R];
    for k in 0..n {
        for r in 0..R {
            for l in 0..L {
                sums[r][l] = step(sums[r][l], &xs[l][k], &ys[r][k]);
            }
        }
    }
    for r in 0..R {
        for l in 0..L {
            for k in n * LANES..len {
                let lane = &mut sums[r][l][k - n * LANES];
                *lane = lane.add(left[l][k].mul(right[r][k]));
            }
            out[r * L + l] = fold(sums[r][l]);
        }
    }
}

/// Computes the dot products of the left rows (operands 0 to `L - 1`) with `rows` right rows (from operand `L`), all
/// `cols` long. `out` holds `L` results per right row.
struct DotRows<T, const L: usize>(PhantomData<T>);

impl<T: Number, const L: usize> Body for DotRows<T, L> {
    #[inline(always)]
    unsafe fn run(out: *mut u8, args: *const Arg, rows: usize, cols: usize) {
        // SAFETY: guaranteed by the caller (see `Body::run`), for all rows below `rows`.
        let row = |i: usize, r: usize| unsafe { std::slice::from_raw_parts((*args.add(i)).row::<T>(r), cols) };
        // SAFETY: as above.
        let out = unsafe { std::slice::from_raw_parts_mut(out.cast::<T>(), rows * L) };
        let left: [&[T]; L] = std::array::from_fn(|l| row(l, 0));
        let mut r = 0;
        while L == 1 && r + 4 <= rows {
            tile::<T, L, 4>(left, std::array::from_fn(|i| row(L, r + i)), &mut out[r * L..]);
            r += 4;
        }
        while L == 2 && r + 2 <= rows {
            tile::<T, L, 2>(left, std::array::from_fn(|i| row(L, r + i)), &mut out[r * L..]);
            r += 2;
        }
        while r < rows {
            tile::<T, L, 1>(left, [row(L, r)], &mut out[r * L..]);
            r += 1;
        }
    }
}

/// Multiplies where the columns of the right operand are contiguous. A call adds `rows` steps of one lane: it reads
/// memory sequentially, a few rows of the right operand at a time, and keeps sums in registers. `out` holds the lane's
/// sums of `L` left rows, `cols` each. Operands 0 to `L - 1` are left rows with one element per step; operand `L` is
/// the right side with `cols` elements per step.
struct AxpyColumns<T, const L: usize>(PhantomData<T>);

impl<T: Number, const L: usize> AxpyColumns<T, L> {
    /// Processes `V * LANES` columns starting at `c`. With four left rows or `V` = 4, LLVM leaves sums in memory.
    ///
    /// # Safety
    /// See `Body::run`.
    #[inline(always)]
    unsafe fn columns<const V: usize>(sums: &mut [T], args: &[Arg], rows: usize, cols: usize, c: usize) {
        let mut acc = [[[T::ZERO; LANES]; V]; L];
        for l in 0..L {
            acc[l].copy_from_slice(sums[l * cols + c..][..V * LANES].as_chunks().0);
        }
        for r in 0..rows {
            // SAFETY: guaranteed by the caller; an array is aligned as its elements are.
            let y = unsafe { &*args[L].row::<T>(r).add(c).cast::<[[T; LANES]; V]>() };
            for l in 0..L {
                // SAFETY: guaranteed by the caller.
                let x = [unsafe { *args[l].row::<T>(r) }; LANES];
                for v in 0..V {
                    acc[l][v] = step(acc[l][v], &x, &y[v]);
                }
            }
        }
        for l in 0..L {
            sums[l * cols + c..][..V * LANES].copy_from_slice(acc[l].as_flattened());
        }
    }
}

impl<T: Number, const L: usize> Body for AxpyColumns<T, L> {
    #[inline(always)]
    unsafe fn run(out: *mut u8, args: *const Arg, rows: usize, cols: usize) {
        // SAFETY: guaranteed by the caller (see `Body::run`).
        let (sums, args) = unsafe {
            (std::slice::from_raw_parts_mut(out.cast::<T>(), L * cols), std::slice::from_raw_parts(args, L + 1))
        };
        let mut c = 0;
        while c + 2 * LANES <= cols {
            // SAFETY: guaranteed by the caller, columns below `cols`.
            unsafe { Self::columns::<2>(sums, args, rows, cols, c) };
            c += 2 * LANES;
        }
        while c + LANES <= cols {
            // SAFETY: as above.
            unsafe { Self::columns::<1>(sums, args, rows, cols, c) };
            c += LANES;
        }
        for r in 0..if c < cols { rows } else { 0 } {
            for l in 0..L {
                // SAFETY: guaranteed by the caller.
                let (x, y) = unsafe { (*args[l].row::<T>(r), std::slice::from_raw_parts(args[L].row::<T>(r), cols)) };
                for (sum, &y) in sums[l * cols..][c..cols].iter_mut().zip(&y[c..]) {
                    *sum = sum.add(x.mul(y));
                }
            }
        }
    }
}

/// Folds the lanes of `AxpyColumns`: `cols` sums per lane. The results are in lane 0.
struct Fold<T>(PhantomData<T>);

impl<T: Number> Body for Fold<T> {
    #[inline(always)]
    unsafe fn run(out: *mut u8, _: *const Arg, rows: usize, cols: usize) {
        // SAFETY: guaranteed by the caller (see `Body::run`).
        let sums = unsafe { std::slice::from_raw_parts_mut(out.cast::<T>(), rows * cols) };
        let mut width = rows / 2;
        while width > 0 {
            let (low, high) = sums.split_at_mut(width * cols);
            for (a, &b) in low.iter_mut().zip(&high[..width * cols]) {
                *a = a.add(b);
            }
            width /= 2;
        }
    }
}

fn dot_rows<T: Number>(isa: Isa) -> [Kernel; LEFT] {
    use loops::pick;
    [pick::<DotRows<T, 1>>(isa), pick::<DotRows<T, 2>>(isa), pick::<DotRows<T, 3>>(isa), pick::<DotRows<T, 4>>(isa)]
}

fn axpy_columns<T: Number>(isa: Isa) -> [Kernel; LEFT_AXPY] {
    use loops::pick;
    [pick::<AxpyColumns<T, 1>>(isa), pick::<AxpyColumns<T, 2>>(isa), pick::<AxpyColumns<T, 3>>(isa)]
}

/// One operand, read as rows along K.
struct Rows<'a, T> {
    of: &'a BatchedMatrix<'a, T>,
    count: usize,
    /// Row stride and element stride.
    pitch: isize,
    step: isize,
}

impl<T: Gemm> Rows<'_, T> {
    /// Element `k` of row `r` of matrix `batch`.
    fn at(&self, batch: usize, r: usize, k: usize) -> *const T {
        let position = self.of.start(batch) + r as isize * self.pitch + k as isize * self.step;
        self.of.all.as_ptr().wrapping_offset(position)
    }

    /// Copies elements `k..k + out.len()` of a row.
    fn copy(&self, batch: usize, r: usize, k: usize, out: &mut [T]) {
        let from = self.at(batch, r, k);
        for (i, o) in out.iter_mut().enumerate() {
            // SAFETY: `plan::check` holds the operand's layout within its value.
            *o = unsafe { *from.offset(i as isize * self.step) };
        }
    }
}

/// How the right operand is read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RightAccess {
    RowMajor,
    ColumnMajor,
    Packed,
}

pub fn run<T: Gemm>(c: &Call, s: GemmShape, a: &BatchedMatrix<T>, b: &BatchedMatrix<T>, out: &mut [T]) {
    let rows = Rows { of: a, count: s.m, pitch: a.rows, step: a.cols };
    let cols = Rows { of: b, count: s.n, pitch: b.cols, step: b.rows };
    // The side with fewer rows is read repeatedly. x * y = y * x, so the result does not depend on the side.
    let swap = s.n < s.m;
    let (left, right) = if swap { (cols, rows) } else { (rows, cols) };
    let (down, along) = if swap { (1, s.n) } else { (s.n, 1) };

    let dense = left.step == 1;
    let mut packed_left = vec![T::ZERO; if dense { 0 } else { s.batch * left.count * s.k }];
    c.pool().for_each_chunk(c.parallel(), &mut packed_left, s.k, |row, out| {
        left.copy(row / left.count, row % left.count, 0, out)
    });

    let access = match (right.pitch, right.step) {
        (1, _) if right.count > 1 => RightAccess::ColumnMajor,
        (_, 1) => RightAccess::RowMajor,
        _ => RightAccess::Packed,
    };
    let (dots, axpys) = (dot_rows::<T>(c.isa()), axpy_columns::<T>(c.isa()));
    let fold = loops::pick::<Fold<T>>(c.isa());
    let width = match access {
        // As wide as possible with all lanes in the L2 cache, but with work for all threads.
        RightAccess::ColumnMajor => {
            let threads = if c.parallel() { c.pool().threads() } else { 1 };
            let most = (SUMS / (LANES * left.count * size_of::<T>())).clamp(64, 1024);
            right.count.div_ceil(threads.div_ceil(s.batch)).next_multiple_of(LANES).clamp(64, most)
        }
        _ => 32,
    };
    let width = width.min(right.count);
    let steps = (WINDOW / size_of::<T>() / width).clamp(8, CHUNK / LANES);
    let (groups, chunk, height) = (right.count.div_ceil(width), CHUNK.min(s.k), LEFT.min(left.count));
    let base = SendPtr(out.as_mut_ptr());
    c.pool().run(c.parallel(), s.batch * groups, |tasks| {
        let base = &base;
        let room = if access == RightAccess::ColumnMajor { left.count * LANES } else { height };
        let mut results = vec![T::ZERO; room * width];
        let mut totals = vec![T::Wide::ZERO; left.count * width];
        let mut scratch = vec![T::ZERO; if access == RightAccess::Packed { width * chunk } else { 0 }];
        while let Some(t) = tasks.claim() {
            let (batch, lo) = (t / groups, t % groups * width);
            let n = width.min(right.count - lo);
            // The elements of the left rows, starting at row `i`.
            let lefts = |i: usize, k: usize| {
                let mut args = [Arg::NONE; LEFT + 1];
                for (i, arg) in (i..left.count).zip(&mut args[..LEFT]) {
                    arg.step = LANES as isize;
                    arg.ptr = match dense {
                        true => left.at(batch, i, k).cast(),
                        false => packed_left[(batch * left.count + i) * s.k + k..].as_ptr().cast(),
                    };
                }
                args
            };
            for k in (0..s.k).step_by(CHUNK) {
                let len = CHUNK.min(s.k - k);
                let mut add = |i: usize, r: usize, v: T| {
                    let total = &mut totals[i * width + r];
                    *total = if k == 0 { v.widen() } else { total.add(v.widen()) };
                };
                if access == RightAccess::ColumnMajor {
                    results.fill(T::ZERO);
                    for window in (0..len).step_by(steps * LANES) {
                        let size = (steps * LANES).min(len - window);
                        for lane in 0..LANES.min(size) {
                            let k = k + window + lane;
                            for i in (0..left.count).step_by(LEFT_AXPY) {
                                let (l, mut args) = (LEFT_AXPY.min(left.count - i), lefts(i, k));
                                args[l] = Arg {
                                    ptr: right.at(batch, lo, k).cast(),
                                    step: right.step.wrapping_mul(LANES as isize),
                                };
                                let sums = &mut results[(lane * left.count + i) * n..][..l * n];
                                // SAFETY: `plan::check` holds the operands' layouts within their values; copies are as
                                // long as the part that is read; `sums` has `l` x `n` elements.
                                unsafe {
                                    let rows = (size - lane).div_ceil(LANES);
                                    axpys[l - 1](sums.as_mut_ptr().cast(), args.as_ptr(), rows, n);
                                }
                            }
                        }
                    }
                    // SAFETY: `results` holds all lanes of all left rows.
                    unsafe { fold(results.as_mut_ptr().cast(), std::ptr::null(), LANES, left.count * n) };
                    for i in 0..left.count {
                        for r in 0..n {
                            add(i, r, results[i * n + r]);
                        }
                    }
                    continue;
                }
                let operand = if access == RightAccess::RowMajor {
                    Arg { ptr: right.at(batch, lo, k).cast(), step: right.pitch }
                } else {
                    for (r, row) in scratch.chunks_exact_mut(len).take(n).enumerate() {
                        right.copy(batch, lo + r, k, row);
                    }
                    Arg { ptr: scratch.as_ptr().cast(), step: len as isize }
                };
                for i in (0..left.count).step_by(LEFT) {
                    let (l, mut args) = (LEFT.min(left.count - i), lefts(i, k));
                    args[l] = operand;
                    // SAFETY: as above; `results` has room for `n` times `l` results.
                    unsafe { dots[l - 1](results.as_mut_ptr().cast(), args.as_ptr(), n, len) };
                    for j in 0..l {
                        for r in 0..n {
                            add(i + j, r, results[r * l + j]);
                        }
                    }
                }
            }
            for i in 0..left.count {
                for (r, &total) in totals[i * width..][..n].iter().enumerate() {
                    // SAFETY: right rows `lo..lo + n` of product `batch` belong to this task.
                    unsafe { *base.0.add(batch * s.m * s.n + i * down + (lo + r) * along) = T::narrow(total) };
                }
            }
        }
    });
}
