//! Narrow products: vectors, few rows, small results. `gemm` would choose among ways here by how the operands lie.
//!
//! Which products are narrow is said by the shape alone ([`is_narrow`]), and so is the order of additions: element `k` of
//! a row goes to lane `k % LANES` in order, lanes fold as a halving tree, chunks of [`CHUNK`] add up in f64. Two loops
//! keep that order and read the operands once: [`Dots`] where rows lie along K, [`Across`] where they lie side by side.
//! Any other layout is copied, a block at a time, to where `Dots` can read it. Multiplies and adds are separate, so the
//! bits agree between instruction sets too.

use super::{Gemm, Matrices, Sizes};
use crate::library::Call;
use crate::loops::num::Num;
use crate::loops::{self, Arg, Body, Isa, Kernel};
use crate::pool::Shared;
use std::marker::PhantomData;

/// Partial sums a row is dealt out to.
const LANES: usize = 16;
/// Elements of K that add up in lanes before they go to the total.
const CHUNK: usize = 8192;
/// Left rows a loop takes at once.
const LEFT: usize = 4;
/// Up to this many left rows of length and number [`LONG`] the loops here beat packing.
const FEW_ROWS: usize = 16;
const LONG: usize = 64;
/// Elements of a result up to which `gemm` looks at strides first.
const SMALL: usize = 16 * 16;

/// Whether a product goes this way. Then the smaller side has at most 16 rows.
pub fn is_narrow(s: Sizes) -> bool {
    let few = (2..=FEW_ROWS).contains(&s.m) && s.n >= LONG && s.k >= LONG;
    s.m == 1 || s.n == 1 || s.m * s.n <= SMALL || few
}

/// Sums of one row in lanes, folded.
#[inline(always)]
fn fold<T: Num>(mut sum: [T; LANES]) -> T {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            sum[i] = sum[i].add(sum[i + width]);
        }
        width /= 2;
    }
    sum[0]
}

/// `sum + x * y`, lane by lane.
#[inline(always)]
fn step<T: Num>(mut sum: [T; LANES], x: &[T; LANES], y: &[T; LANES]) -> [T; LANES] {
    for i in 0..LANES {
        sum[i] = sum[i].add(x[i].mul(y[i]));
    }
    sum
}

/// Dot products of `L` left rows with `R` right rows, `L` results for each right row.
#[inline(always)]
fn tile<T: Num, const L: usize, const R: usize>(left: [&[T]; L], right: [&[T]; R], out: &mut [T]) {
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

/// Dot products of the left rows (operands 0 to `L - 1`) with the right rows from operand `L` on: `rows` of them, all
/// `cols` long. `out` holds `L` results a right row.
struct Dots<T, const L: usize>(PhantomData<T>);

impl<T: Num, const L: usize> Body for Dots<T, L> {
    #[inline(always)]
    unsafe fn run(out: *mut u8, args: *const Arg, rows: usize, cols: usize) {
        // SAFETY: the caller's promise (see `Body::run`), for all rows below `rows`.
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

/// What [`Across`] reads of the right side: `rows` steps of K, `cols` right rows.
#[derive(Clone, Copy)]
struct Block {
    rows: usize,
    cols: usize,
}

impl Block {
    /// All lanes of `V * LANES` columns from `c` on, `G` lanes at a time in registers.
    #[inline(always)]
    fn sums<'a, T: Num, const L: usize, const G: usize, const V: usize>(
        self,
        lanes: &mut [T],
        left: [&[T]; L],
        right: impl Fn(usize) -> &'a [T],
        c: usize,
    ) {
        for first in (0..LANES).step_by(G) {
            let mut sums = [[[[T::ZERO; LANES]; V]; G]; L];
            let mut add = |k: usize, g: usize| {
                let y = right(k)[c..c + V * LANES].as_chunks::<LANES>().0;
                for v in 0..V {
                    for l in 0..L {
                        sums[l][g][v] = step(sums[l][g][v], &[left[l][k]; LANES], &y[v]);
                    }
                }
            };
            let mut base = first;
            while base + G <= self.rows {
                for g in 0..G {
                    add(base + g, g);
                }
                base += LANES;
            }
            // At most one step more, for some of the lanes.
            for k in base..self.rows.min(base + G) {
                add(k, k - base);
            }
            for l in 0..L {
                for g in 0..G {
                    let at = (l * LANES + first + g) * self.cols + c;
                    lanes[at..at + V * LANES].copy_from_slice(sums[l][g].as_flattened());
                }
            }
        }
    }
}

/// The same where the right rows lie side by side: operand `L` has `rows` steps of K, each with one element of `cols`
/// right rows. `out` has room for all lanes, `L * LANES * cols`; the results are in lane 0 of each left row.
struct Across<T, const L: usize>(PhantomData<T>);

impl<T: Num, const L: usize> Body for Across<T, L> {
    #[inline(always)]
    unsafe fn run(out: *mut u8, args: *const Arg, rows: usize, cols: usize) {
        // SAFETY: the caller's promise (see `Body::run`).
        let lanes = unsafe { std::slice::from_raw_parts_mut(out.cast::<T>(), L * LANES * cols) };
        // SAFETY: left rows are dense and `rows` long.
        let left: [&[T]; L] =
            std::array::from_fn(|l| unsafe { std::slice::from_raw_parts((*args.add(l)).row::<T>(0), rows) });
        // SAFETY: the caller's promise, for `k` below `rows`.
        let right = |k: usize| unsafe { std::slice::from_raw_parts((*args.add(L)).row::<T>(k), cols) };
        let block = Block { rows, cols };
        let (mut c, small) = (0, size_of::<T>() == 4);
        // As many sums as registers hold: 128 columns of two lanes for one left row, 64 of one lane for more.
        let wide = if L == 1 { 8 } else { 4 } / if small { 1 } else { 2 } * LANES;
        while c + wide <= cols {
            match (L, small) {
                (1, true) => block.sums::<T, L, 2, 8>(lanes, left, right, c),
                (1, false) => block.sums::<T, L, 2, 4>(lanes, left, right, c),
                (_, true) => block.sums::<T, L, 1, 4>(lanes, left, right, c),
                (_, false) => block.sums::<T, L, 1, 2>(lanes, left, right, c),
            }
            c += wide;
        }
        while c + LANES <= cols {
            block.sums::<T, L, 4, 1>(lanes, left, right, c);
            c += LANES;
        }
        if c < cols {
            for lane in lanes.chunks_exact_mut(cols) {
                lane[c..].fill(T::ZERO);
            }
            for k in 0..rows {
                for l in 0..L {
                    let at = (l * LANES + k % LANES) * cols;
                    for (sum, &y) in lanes[at + c..at + cols].iter_mut().zip(&right(k)[c..]) {
                        *sum = sum.add(left[l][k].mul(y));
                    }
                }
            }
        }
        for lanes in lanes.chunks_exact_mut((LANES * cols).max(1)) {
            let mut width = LANES / 2;
            while width > 0 {
                let (low, high) = lanes.split_at_mut(width * cols);
                for (a, &b) in low.iter_mut().zip(&high[..width * cols]) {
                    *a = a.add(b);
                }
                width /= 2;
            }
        }
    }
}

fn dots<T: Num>(isa: Isa) -> [Kernel; LEFT] {
    use loops::pick;
    [pick::<Dots<T, 1>>(isa), pick::<Dots<T, 2>>(isa), pick::<Dots<T, 3>>(isa), pick::<Dots<T, 4>>(isa)]
}

fn across<T: Num>(isa: Isa) -> [Kernel; LEFT] {
    use loops::pick;
    [pick::<Across<T, 1>>(isa), pick::<Across<T, 2>>(isa), pick::<Across<T, 3>>(isa), pick::<Across<T, 4>>(isa)]
}

/// One operand as rows along K.
struct Rows<'a, T> {
    of: &'a Matrices<'a, T>,
    count: usize,
    /// From row to row, and from element to element.
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

/// How the right rows are read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Along,
    Across,
    Copied,
}

pub fn run<T: Gemm>(c: &Call, s: Sizes, a: &Matrices<T>, b: &Matrices<T>, out: &mut [T]) {
    let rows = Rows { of: a, count: s.m, pitch: a.rows, step: a.cols };
    let cols = Rows { of: b, count: s.n, pitch: b.cols, step: b.rows };
    // The side of fewer rows is read again and again; x * y = y * x, so it does not matter to the result which it is.
    let swap = s.n < s.m;
    let (left, right) = if swap { (cols, rows) } else { (rows, cols) };
    let (down, along) = if swap { (1, s.n) } else { (s.n, 1) };

    let dense = left.step == 1;
    let mut copied = vec![T::ZERO; if dense { 0 } else { s.batch * left.count * s.k }];
    c.pool().pieces(c.share(), &mut copied, s.k, |row, out| left.copy(row / left.count, row % left.count, 0, out));

    let way = match (right.pitch, right.step) {
        (1, _) if right.count > 1 => Way::Across,
        (_, 1) => Way::Along,
        _ => Way::Copied,
    };
    let kernels = if way == Way::Across { across::<T>(c.isa()) } else { dots::<T>(c.isa()) };
    let width = match way {
        Way::Across if left.count == 1 => 256,
        Way::Across => 64,
        _ => 32,
    };
    let width = width.min(right.count);
    let (groups, chunk, height) = (right.count.div_ceil(width), CHUNK.min(s.k), LEFT.min(left.count));
    let base = Shared(out.as_mut_ptr());
    c.pool().run(c.share(), s.batch * groups, |tasks| {
        let base = &base;
        let mut results = vec![T::ZERO; height * width * if way == Way::Across { LANES } else { 1 }];
        let mut totals = vec![T::Wide::ZERO; left.count * width];
        let mut scratch = vec![T::ZERO; if way == Way::Copied { width * chunk } else { 0 }];
        while let Some(t) = tasks.claim() {
            let (batch, lo) = (t / groups, t % groups * width);
            let n = width.min(right.count - lo);
            for k in (0..s.k).step_by(CHUNK) {
                let len = CHUNK.min(s.k - k);
                let operand = match way {
                    Way::Along => Arg { ptr: right.at(batch, lo, k).cast(), step: right.pitch },
                    Way::Across => Arg { ptr: right.at(batch, lo, k).cast(), step: right.step },
                    Way::Copied => {
                        for (r, row) in scratch.chunks_exact_mut(len).take(n).enumerate() {
                            right.copy(batch, lo + r, k, row);
                        }
                        Arg { ptr: scratch.as_ptr().cast(), step: len as isize }
                    }
                };
                for i in (0..left.count).step_by(LEFT) {
                    let l = LEFT.min(left.count - i);
                    let mut args = [Arg::NONE; LEFT + 1];
                    for (j, arg) in args[..l].iter_mut().enumerate() {
                        arg.ptr = match dense {
                            true => left.at(batch, i + j, k).cast(),
                            false => copied[(batch * left.count + i + j) * s.k + k..].as_ptr().cast(),
                        };
                    }
                    args[l] = operand;
                    let (rows, cols) = if way == Way::Across { (len, n) } else { (n, len) };
                    // SAFETY: `plan::check` holds the operands' layouts within their values, copies are as long as what
                    // is read of them; `results` has room for the lanes or results of `l` x `n`.
                    unsafe { kernels[l - 1](results.as_mut_ptr().cast(), args.as_ptr(), rows, cols) };
                    for j in 0..l {
                        for (r, total) in totals[(i + j) * width..][..n].iter_mut().enumerate() {
                            let v = if way == Way::Across { results[j * LANES * n + r] } else { results[r * l + j] };
                            *total = if k == 0 { v.widen() } else { total.add(v.widen()) };
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
