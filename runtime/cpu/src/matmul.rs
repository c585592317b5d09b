//! Products of matrices: the one place that sees the `gemm` crate.
//!
//! a (B..., M, K), b (B..., K, N) -> (B..., M, N), read through any strides. f32 and f64 go to `gemm` as they lie; 16-bit
//! floats are widened to f32 first and rounded once at the end; integers wrap in plain loops. Large matrices are shared
//! by `gemm` itself, many small ones are dealt out one by one. `gemm` gives the same bits for every thread count (tested
//! here), but not for every instruction set.

use crate::library::{Call, Element, Input, by_type};
use crate::loops::num::Num;
use crate::loops::{self, Arg, Body, cast};
use crate::memory::Plain;
use crate::pool::Shared;
use crate::region::walk;
use gemm::Parallelism;
use half::{bf16, f16};
use perilune_core::error::Result;
use perilune_core::{DType, Layout, Shape};

/// Multiply-adds below which a product is not worth sharing.
const SHARE_OPS: usize = 1 << 21;

/// One operand: its memory and how to find a matrix of the batch.
struct Matrices<'a, T> {
    all: &'a [T],
    batch: Layout,
    rows: isize,
    cols: isize,
}

impl<'a, T> Matrices<'a, T> {
    fn new(all: &'a [T], layout: &Layout) -> Matrices<'a, T> {
        let r = layout.shape.rank();
        let mut batch = *layout;
        batch.shape = Shape::of(&layout.shape.dims()[..r - 2]);
        Matrices { all, batch, rows: layout.strides[r - 2], cols: layout.strides[r - 1] }
    }

    /// Position of the first element of matrix `k`.
    fn start(&self, k: usize) -> isize {
        let (mut rest, mut at) = (k, self.batch.offset);
        for i in (0..self.batch.shape.rank()).rev() {
            let d = self.batch.shape.dims()[i];
            at += (rest % d) as isize * self.batch.strides[i];
            rest /= d;
        }
        at
    }
}

/// Sizes of a product.
#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    m: usize,
    n: usize,
    k: usize,
}

pub fn run(c: &Call) -> Result<()> {
    let (a, b) = (c.input(0), c.input(1));
    let (sa, out) = (a.shape(), c.out_shape());
    let r = out.rank();
    let (m, n, k) = (out.dims()[r - 2], out.dims()[r - 1], sa.dims()[r - 1]);
    let sizes = Sizes { batch: out.dims()[..r - 2].iter().product(), m, n, k };
    match c.out_dtype() {
        DType::F32 => singles(
            c,
            sizes,
            &Matrices::new(a.elements::<f32>(), &a.layout),
            &Matrices::new(b.elements(), &b.layout),
            c.output(),
        ),
        DType::F64 => floats(
            c,
            sizes,
            &Matrices::new(a.elements::<f64>(), &a.layout),
            &Matrices::new(b.elements(), &b.layout),
            c.output(),
        ),
        DType::BF16 => halves(c, sizes, &a, &b, c.output::<bf16>()),
        DType::F16 => halves(c, sizes, &a, &b, c.output::<f16>()),
        dtype => by_type!(dtype, integers(c, sizes, &a, &b)),
    }
    Ok(())
}

/// Up to this many left rows, dot products along K read the right side once, as it lies, and beat packing it.
const FEW_ROWS: usize = 16;

/// Dot products of up to four left rows (operands 0 to 3) with the right rows from operand 4 on: `cols` long, `rows` of
/// them, 16 lanes each. `out` holds four results a right row.
struct Dots;

impl Body for Dots {
    #[inline(always)]
    unsafe fn run(out: *mut u8, args: *const Arg, rows: usize, cols: usize) {
        // SAFETY: the caller's promise (see `Body::run`); unused left rows repeat the first.
        let (out, left) = unsafe {
            let row = |i: usize| std::slice::from_raw_parts((*args.add(i)).row::<f32>(0), cols);
            (std::slice::from_raw_parts_mut(out.cast::<[f32; 4]>(), rows), [row(0), row(1), row(2), row(3)])
        };
        let lanes = |x: &[f32; 16], y: &[f32; 16], mut sum: [f32; 16]| {
            for k in 0..16 {
                sum[k] += x[k] * y[k];
            }
            sum
        };
        for (r, out) in out.iter_mut().enumerate() {
            // SAFETY: `r` is below `rows`.
            let y = unsafe { std::slice::from_raw_parts((*args.add(4)).row::<f32>(r), cols) };
            let (mut a, mut b, mut c, mut d) = ([0f32; 16], [0f32; 16], [0f32; 16], [0f32; 16]);
            let (y, tail) = y.as_chunks::<16>();
            let [x0, x1, x2, x3] = left.map(|x| x.as_chunks::<16>().0);
            for ((((y, x0), x1), x2), x3) in y.iter().zip(x0).zip(x1).zip(x2).zip(x3) {
                a = lanes(x0, y, a);
                b = lanes(x1, y, b);
                c = lanes(x2, y, c);
                d = lanes(x3, y, d);
            }
            for (k, mut sum) in [a, b, c, d].into_iter().enumerate() {
                for (i, &y) in tail.iter().enumerate() {
                    sum[i] += left[k][cols - tail.len() + i] * y;
                }
                let mut width = 8;
                while width > 0 {
                    for i in 0..width {
                        sum[i] += sum[i + width];
                    }
                    width /= 2;
                }
                out[k] = sum[0];
            }
        }
    }
}

/// The product where both sides lie along K and the left has few rows.
fn few_rows(c: &Call, s: Sizes, a: &Matrices<f32>, b: &Matrices<f32>, out: &mut [f32]) {
    const RIGHT: usize = 32;
    let (kernel, groups) = (loops::pick::<Dots>(c.isa()), s.n.div_ceil(RIGHT));
    let base = Shared(out.as_mut_ptr());
    c.pool().run(c.share(), s.batch * groups, |tasks| {
        let base = &base;
        let mut results = [[0f32; 4]; RIGHT];
        while let Some(t) = tasks.claim() {
            let (k, lo) = (t / groups, t % groups * RIGHT);
            let n = RIGHT.min(s.n - lo);
            for i in (0..s.m).step_by(4) {
                let rows = 4.min(s.m - i);
                // SAFETY: `plan::check` holds the operands' layouts within their values; columns `lo..lo + n` of product
                // `k` belong to this task.
                unsafe {
                    let left = |j: usize| {
                        let row = i + if j < rows { j } else { 0 };
                        Arg { ptr: a.all.as_ptr().offset(a.start(k) + row as isize * a.rows).cast(), step: 0 }
                    };
                    let right = b.all.as_ptr().offset(b.start(k) + lo as isize * b.cols).cast();
                    let args = [left(0), left(1), left(2), left(3), Arg { ptr: right, step: b.cols }];
                    kernel(results.as_mut_ptr().cast(), args.as_ptr(), n, s.k);
                    for j in 0..rows {
                        for (r, result) in results[..n].iter().enumerate() {
                            *base.0.add((k * s.m + i + j) * s.n + lo + r) = result[j];
                        }
                    }
                }
            }
        }
    });
}

/// A float that `gemm` multiplies.
trait Gemm: Num + Plain {}
impl Gemm for f32 {}
impl Gemm for f64 {}

fn singles(c: &Call, s: Sizes, a: &Matrices<f32>, b: &Matrices<f32>, out: &mut [f32]) {
    let along = a.cols == 1 && b.rows == 1;
    if along && (2..=FEW_ROWS).contains(&s.m) && s.n >= 64 && s.k >= 64 {
        return few_rows(c, s, a, b, out);
    }
    floats(c, s, a, b, out);
}

fn floats<T: Gemm>(c: &Call, s: Sizes, a: &Matrices<T>, b: &Matrices<T>, out: &mut [T]) {
    if out.is_empty() {
        return;
    }
    if s.k == 0 {
        return out.fill(T::ZERO);
    }
    let (ops, pool) = (s.m * s.n * s.k, c.pool());
    let share = c.share() && ops * s.batch > SHARE_OPS && pool.inside();
    let alone = |k: usize, out: &mut [T], parallel: Parallelism| {
        // SAFETY: `plan::check` holds the operands' layouts within their values; `out` is one dense matrix of m x n and
        // shares no memory with them.
        unsafe {
            gemm::gemm(
                s.m,
                s.n,
                s.k,
                out.as_mut_ptr(),
                1,
                s.n as isize,
                false,
                a.all.as_ptr().offset(a.start(k)),
                a.cols,
                a.rows,
                b.all.as_ptr().offset(b.start(k)),
                b.cols,
                b.rows,
                T::ZERO,
                T::ONE,
                false,
                false,
                false,
                parallel,
            );
        }
    };
    let whole = share && ops > SHARE_OPS && s.batch < 2 * pool.threads();
    if whole {
        for (k, out) in out.chunks_mut(s.m * s.n).enumerate() {
            alone(k, out, Parallelism::Rayon(pool.threads()));
        }
        return;
    }
    let group = (SHARE_OPS / 4 / ops.max(1)).clamp(1, s.batch.div_ceil(2 * pool.threads()));
    pool.pieces(share, out, group * s.m * s.n, |g, piece| {
        for (k, out) in piece.chunks_mut(s.m * s.n).enumerate() {
            alone(g * group + k, out, Parallelism::None);
        }
    });
}

/// A view as dense f32.
fn widen(c: &Call, x: &Input) -> Vec<f32> {
    const GRAIN: usize = 1 << 14;
    let mut out = vec![0f32; x.layout.numel()];
    let (from, layout) = (x.elements::<u16>(), x.layout.collapse());
    let kernel = cast::load(x.dtype, c.isa());
    c.pool().pieces(c.share(), &mut out, GRAIN, |k, piece| {
        walk(&layout, k * GRAIN, piece.len(), |position, stride, count, done| {
            let to = Shared(piece[done..].as_mut_ptr());
            // One element a row unless they lie side by side.
            let (rows, cols) = if stride == 1 { (1, count) } else { (count, 1) };
            // SAFETY: `plan::check` holds the layout within the value; `piece` has room for the run.
            unsafe {
                let arg = Arg { ptr: from.as_ptr().offset(position).cast(), step: stride };
                kernel(to.0.cast(), &arg, rows, cols);
            }
        });
    });
    out
}

fn halves<T: Plain>(c: &Call, s: Sizes, a: &Input, b: &Input, out: &mut [T]) {
    const GRAIN: usize = 1 << 14;
    let (wa, wb) = (widen(c, a), widen(c, b));
    let mut product = vec![0f32; out.len()];
    let (la, lb) = (Layout::contiguous(a.shape()), Layout::contiguous(b.shape()));
    singles(c, s, &Matrices::new(&wa, &la), &Matrices::new(&wb, &lb), &mut product);
    let kernel = cast::store(c.out_dtype(), c.isa());
    c.pool().pieces(c.share(), out, GRAIN, |k, piece| {
        let arg = Arg { ptr: product[k * GRAIN..].as_ptr().cast(), step: 0 };
        // SAFETY: as many elements on both sides; `T` is the 16-bit float of the kernel.
        unsafe { kernel(piece.as_mut_ptr().cast(), &arg, 1, piece.len()) };
    });
}

/// Wrapping sums of products, a row of the output at a time.
fn integers<T: Element>(c: &Call, s: Sizes, a: &Input, b: &Input) {
    let out = c.output::<T>();
    let (a, b) = (Matrices::new(a.elements::<T>(), &a.layout), Matrices::new(b.elements::<T>(), &b.layout));
    if s.n == 0 {
        return;
    }
    c.pool().pieces(c.share(), out, s.n, |row, out| {
        let (k, i) = (row / s.m, row % s.m);
        let (sa, sb) = (a.start(k) + i as isize * a.rows, b.start(k));
        let mut sums = vec![T::Acc::ZERO; s.n];
        for p in 0..s.k as isize {
            let x = a.all[(sa + p * a.cols) as usize].acc();
            for (j, sum) in sums.iter_mut().enumerate() {
                let y = b.all[(sb + p * b.rows + j as isize * b.cols) as usize].acc();
                *sum = sum.add(x.mul(y));
            }
        }
        for (o, &v) in out.iter_mut().zip(&sums) {
            *o = T::back(v);
        }
    });
}
