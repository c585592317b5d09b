//! Multiplies matrices: dispatches each product to the loops for its shape and dtype, and wraps the `gemm` crates.
//!
//! a (B..., M, K), b (B..., K, N) -> (B..., M, N), read through any strides. `skinny_gemm` computes vectors, few rows
//! and small results; `gemm_f32` all other f32 products, if the instruction set has vectors with fused multiply-adds.
//! The `gemm` crates compute f64, and f32 on other machines. 16-bit floats are widened to f32 first and rounded once at
//! the end, after the bias of a `linear`. Integers wrap and use plain loops. `grouped` runs one product for each group
//! of rows.
//!
//! Large products are partitioned among threads; many small ones are one task each. The bits are a function of shape
//! and dtype alone, not of strides or the thread count (tests/gemm.rs). Products by the `gemm` crates also depend on the
//! instruction set.

mod gemm_crates;
mod gemm_f32;
pub mod grouped;
mod microkernel;
mod skinny_gemm;

use crate::library::{Call, Element, Input, by_type};
use crate::loops::{Arg, Isa, cast};
use crate::math::Number;
use crate::memory::Pod;
use crate::region::walk;
use crate::worker_pool::SendPtr;
use gemm_common::Parallelism;
use half::{bf16, f16};
use perilune_core::error::{Error, Result};
use perilune_core::{DType, Layout, Shape, host_memory};

/// Minimum multiply-adds for more than one thread.
const PARALLEL_OPS: usize = 1 << 21;

/// An operand: a batch of matrices with strides.
struct BatchedMatrix<'a, T> {
    all: &'a [T],
    batch: Layout,
    rows: isize,
    cols: isize,
}

impl<'a, T> BatchedMatrix<'a, T> {
    fn new(all: &'a [T], layout: &Layout) -> BatchedMatrix<'a, T> {
        let r = layout.shape.rank();
        let mut batch = *layout;
        batch.shape = Shape::of(&layout.shape.dims()[..r - 2]);
        BatchedMatrix { all, batch, rows: layout.strides[r - 2], cols: layout.strides[r - 1] }
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

/// The sizes of a batch of products.
#[derive(Clone, Copy)]
struct GemmShape {
    batch: usize,
    m: usize,
    n: usize,
    k: usize,
}

/// Implements `matmul`.
pub fn run(c: &Call) -> Result<()> {
    let (a, b) = (c.input(0), c.input(1));
    let (sa, out) = (a.shape(), c.out_shape());
    let r = out.rank();
    let (m, n, k) = (out.dims()[r - 2], out.dims()[r - 1], sa.dims()[r - 1]);
    let sizes = GemmShape { batch: out.dims()[..r - 2].iter().product(), m, n, k };
    check_room(c, &[&a, &b])?;
    match c.out_dtype() {
        DType::F32 => {
            let (a, b) =
                (BatchedMatrix::new(a.elements::<f32>(), &a.layout), BatchedMatrix::new(b.elements(), &b.layout));
            f32_to_layout(c, sizes, &a, &b)
        }
        DType::F64 => float_gemm(
            c,
            sizes,
            &BatchedMatrix::new(a.elements::<f64>(), &a.layout),
            &BatchedMatrix::new(b.elements(), &b.layout),
            c.output(),
        ),
        DType::BF16 => half_gemm(c, sizes, &a, &b, None, c.output::<bf16>()),
        DType::F16 => half_gemm(c, sizes, &a, &b, None, c.output::<f16>()),
        dtype => by_type!(dtype, integer_gemm_to_output(c, sizes, &a, &b)),
    }
    Ok(())
}

/// An error unless there is memory for what a product keeps beside its output: 16-bit operands and their product in f32, or f32 that
/// are stored through another layout afterwards.
fn check_room(c: &Call, inputs: &[&Input]) -> Result<()> {
    let out = c.out_shape().numel();
    let elements = if c.out_dtype().is_half() {
        inputs.iter().map(|x| x.layout.numel()).fold(out, usize::saturating_add)
    } else if c.out_layout().is_dense() {
        0
    } else {
        out
    };
    host_memory::check("cpu", elements.saturating_mul(size_of::<f32>()))
}

/// A product of f32, stored through the layout of its output.
fn f32_to_layout(c: &Call, s: GemmShape, a: &BatchedMatrix<f32>, b: &BatchedMatrix<f32>) {
    let (out, layout) = (c.output::<f32>(), c.out_layout());
    if layout.is_dense() {
        return float_gemm(c, s, a, b, out);
    }
    if s.k > 0 && !skinny_gemm::is_skinny(s) && !out.is_empty() && gemm_f32::run(c, s, a, b, out, &layout) {
        return;
    }
    let mut product = vec![0.0; out.len()];
    float_gemm(c, s, a, b, &mut product);
    let mut next = product.iter();
    walk(&layout, 0, product.len(), |position, stride, count, _| {
        for (i, v) in (0..count as isize).zip(&mut next) {
            out[(position + i * stride) as usize] = *v;
        }
    });
}

/// Implements `linear` for 16-bit floats: x (M, K), weight (N, K), bias (N) -> (M, N). Other dtypes are decomposed.
pub fn linear(c: &Call) -> Result<()> {
    let (x, mut w, bias) = (c.input(0), c.input(1), c.input(2));
    let (m, n, k) = (x.shape().dims()[0], w.shape().dims()[0], x.shape().dims()[1]);
    w.layout = w.layout.permute(&[1, 0]);
    check_room(c, &[&x, &w])?;
    let (sizes, bias) = (GemmShape { batch: 1, m, n, k }, widen(c, &bias));
    match c.out_dtype() {
        DType::BF16 => half_gemm(c, sizes, &x, &w, Some(&bias), c.output::<bf16>()),
        DType::F16 => half_gemm(c, sizes, &x, &w, Some(&bias), c.output::<f16>()),
        dtype => return Err(Error::system("cpu", format!("this is a bug: linear in {dtype} was not decomposed"))),
    }
    Ok(())
}

/// A float that the `gemm` crates support.
trait Gemm: Number + Pod {
    /// Computes the product with this crate's own loops; returns false if it has none for it.
    fn native(_: &Call, _: GemmShape, _: &BatchedMatrix<Self>, _: &BatchedMatrix<Self>, _: &mut [Self]) -> bool {
        false
    }

    /// Computes the product with the `gemm` crates.
    ///
    /// # Safety
    /// The operands must be valid for their sizes and strides, and the result must not overlap them.
    unsafe fn gemm(isa: Isa, p: Product<Self>);
}

/// A product in the form of the `gemm` crates: each matrix is an address and the strides of columns and rows.
pub struct Product<T> {
    /// M, N and K.
    sizes: (usize, usize, usize),
    out: (*mut T, isize, isize),
    a: (*const T, isize, isize),
    b: (*const T, isize, isize),
    parallel: Parallelism,
}

/// The most of K that one call of the `gemm` crates sums. They sum K in blocks of at least this, whose size follows from the
/// caches of the processor: a longer sum would have other bits on another machine.
const ONE_BLOCK: usize = 512;

impl<T: Number> Product<T> {
    /// Calls `f` with products over parts of K in order, and whether the result is added to the one so far.
    fn over_blocks(self, mut f: impl FnMut(Product<T>, bool)) {
        let Product { sizes: (m, n, k), out, a, b, parallel } = self;
        for from in (0..k).step_by(ONE_BLOCK) {
            let part = Product {
                sizes: (m, n, (k - from).min(ONE_BLOCK)),
                out,
                a: (a.0.wrapping_offset(from as isize * a.1), a.1, a.2),
                b: (b.0.wrapping_offset(from as isize * b.2), b.1, b.2),
                parallel,
            };
            f(part, from > 0);
        }
    }
}

impl Gemm for f32 {
    unsafe fn gemm(isa: Isa, p: Product<f32>) {
        // SAFETY: guaranteed by the caller.
        p.over_blocks(|p, add| unsafe { gemm_crates::f32(isa, p, add) });
    }

    fn native(c: &Call, s: GemmShape, a: &BatchedMatrix<f32>, b: &BatchedMatrix<f32>, out: &mut [f32]) -> bool {
        gemm_f32::run(c, s, a, b, out, &Layout::contiguous(Shape::of(&[s.batch, s.m, s.n])))
    }
}
impl Gemm for f64 {
    unsafe fn gemm(isa: Isa, p: Product<f64>) {
        // SAFETY: guaranteed by the caller.
        p.over_blocks(|p, add| unsafe { gemm_crates::f64(isa, p, add) });
    }
}

fn float_gemm<T: Gemm>(c: &Call, s: GemmShape, a: &BatchedMatrix<T>, b: &BatchedMatrix<T>, out: &mut [T]) {
    if out.is_empty() {
        return;
    }
    if s.k == 0 {
        return out.fill(T::ZERO);
    }
    if skinny_gemm::is_skinny(s) {
        return skinny_gemm::run(c, s, a, b, out);
    }
    if T::native(c, s, a, b, out) {
        return;
    }
    if b.rows < 0 {
        // Repack: the `gemm` crates would run over K in reverse.
        let mut dense = vec![T::ZERO; s.batch * s.k * s.n];
        c.pool().for_each_chunk(c.parallel(), &mut dense, s.n, |row, out| {
            let start = b.start(row / s.k) + (row % s.k) as isize * b.rows;
            for (j, o) in out.iter_mut().enumerate() {
                *o = b.all[(start + j as isize * b.cols) as usize];
            }
        });
        let layout = Layout::contiguous(Shape::of(&[s.batch, s.k, s.n]));
        return float_gemm(c, s, a, &BatchedMatrix::new(&dense, &layout), out);
    }
    let (ops, pool) = (s.m * s.n * s.k, c.pool());
    let share = c.parallel() && ops * s.batch > PARALLEL_OPS && pool.can_fork();
    let multiply = |k: usize, out: &mut [T], parallel: Parallelism| {
        let product = Product {
            sizes: (s.m, s.n, s.k),
            out: (out.as_mut_ptr(), 1, s.n as isize),
            a: (a.all.as_ptr().wrapping_offset(a.start(k)), a.cols, a.rows),
            b: (b.all.as_ptr().wrapping_offset(b.start(k)), b.cols, b.rows),
            parallel,
        };
        // SAFETY: `plan::check` holds the operands' layouts within their values; `out` is a dense m x n matrix and
        // shares no memory with them.
        unsafe { T::gemm(c.isa(), product) }
    };
    let whole = share && ops > PARALLEL_OPS && s.batch < 2 * pool.threads();
    if whole {
        return pool.with_rayon(|| {
            for (k, out) in out.chunks_mut(s.m * s.n).enumerate() {
                multiply(k, out, Parallelism::Rayon(pool.threads()));
            }
        });
    }
    let group = (PARALLEL_OPS / 4 / ops.max(1)).clamp(1, s.batch.div_ceil(2 * pool.threads()));
    pool.for_each_chunk(share, out, group * s.m * s.n, |g, piece| {
        for (k, out) in piece.chunks_mut(s.m * s.n).enumerate() {
            multiply(g * group + k, out, Parallelism::None);
        }
    });
}

/// Converts a view to dense f32.
fn widen(c: &Call, x: &Input) -> Vec<f32> {
    const GRAIN: usize = 1 << 14;
    let mut out = vec![0f32; x.layout.numel()];
    let (from, layout) = (x.elements::<u16>(), x.layout.collapse());
    let kernel = cast::load(x.dtype, c.isa());
    c.pool().for_each_chunk(c.parallel(), &mut out, GRAIN, |k, piece| {
        walk(&layout, k * GRAIN, piece.len(), |position, stride, count, done| {
            let to = SendPtr(piece[done..].as_mut_ptr());
            // One element per row, unless elements are contiguous.
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

/// Converts an operand to f32, in the order of its memory if that is the operand or its transpose.
fn widen_operand(c: &Call, x: &Input) -> (Vec<f32>, Layout) {
    let rank = x.shape().rank();
    let mut axes: Vec<usize> = (0..rank).collect();
    axes.swap(rank - 2, rank - 1);
    let mut transpose = *x;
    transpose.layout = x.layout.permute(&axes);
    if transpose.layout.is_dense() {
        return (widen(c, &transpose), Layout::contiguous(transpose.shape()).permute(&axes));
    }
    (widen(c, x), Layout::contiguous(x.shape()))
}

fn half_gemm<T: Pod>(c: &Call, s: GemmShape, a: &Input, b: &Input, bias: Option<&[f32]>, out: &mut [T]) {
    const GRAIN: usize = 1 << 14;
    let ((wa, la), (wb, lb)) = (widen_operand(c, a), widen_operand(c, b));
    let mut product = vec![0f32; out.len()];
    float_gemm(c, s, &BatchedMatrix::new(&wa, &la), &BatchedMatrix::new(&wb, &lb), &mut product);
    if let (Some(bias), true) = (bias, s.n > 0) {
        let rows = (GRAIN / s.n).max(1);
        c.pool().for_each_chunk(c.parallel(), &mut product, rows * s.n, |_, piece| {
            for row in piece.chunks_exact_mut(s.n) {
                row.iter_mut().zip(bias).for_each(|(x, b)| *x += b);
            }
        });
    }
    let kernel = cast::store(c.out_dtype(), c.isa());
    c.pool().for_each_chunk(c.parallel(), out, GRAIN, |k, piece| {
        let arg = Arg { ptr: product[k * GRAIN..].as_ptr().cast(), step: 0 };
        // SAFETY: both sides have the same number of elements; `T` is the 16-bit float of the kernel.
        unsafe { kernel(piece.as_mut_ptr().cast(), &arg, 1, piece.len()) };
    });
}

fn integer_gemm_to_output<T: Element>(c: &Call, s: GemmShape, a: &Input, b: &Input) {
    integer_gemm(c, s, a, b, c.output::<T>());
}

/// Sums products with wrapping, one row of the output at a time.
fn integer_gemm<T: Element>(c: &Call, s: GemmShape, a: &Input, b: &Input, out: &mut [T]) {
    let (a, b) = (BatchedMatrix::new(a.elements::<T>(), &a.layout), BatchedMatrix::new(b.elements::<T>(), &b.layout));
    if s.n == 0 {
        return;
    }
    c.pool().for_each_chunk(c.parallel(), out, s.n, |row, out| {
        let (k, i) = (row / s.m, row % s.m);
        let (sa, sb) = (a.start(k) + i as isize * a.rows, b.start(k));
        let mut sums = vec![T::Acc::ZERO; s.n];
        for p in 0..s.k as isize {
            let x = a.all[(sa + p * a.cols) as usize].to_acc();
            for (j, sum) in sums.iter_mut().enumerate() {
                let y = b.all[(sb + p * b.rows + j as isize * b.cols) as usize].to_acc();
                *sum = sum.add(x.mul(y));
            }
        }
        for (o, &v) in out.iter_mut().zip(&sums) {
            *o = T::from_acc(v);
        }
    });
}
