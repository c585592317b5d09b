//! Multiplies groups of rows, each with a matrix of its own (grouped GEMM). Each group is one product and uses the
//! loops for its size.
//!
//! All threads share a large group, one group after the other; groups smaller than a thread's share are one task each.
//! The bits of a product depend only on its own shape, never on the schedule.

use super::{BatchedMatrix, Gemm, GemmShape, float_gemm, half_gemm, integer_gemm};
use crate::library::{Call, Element, Input, by_type, dense};
use crate::worker_pool::SendPtr;
use half::{bf16, f16};
use perilune_core::Shape;
use perilune_core::error::Result;
use perilune_core::ops::grouped::bad_end;
use std::ops::Range;

/// An element type for which this module can multiply matrices.
trait Product: Element {
    fn product(c: &Call, s: GemmShape, a: &Input, b: &Input, out: &mut [Self]);
}

macro_rules! products {
    ($($t:ty => $f:ident),*) => { $(
        impl Product for $t {
            fn product(c: &Call, s: GemmShape, a: &Input, b: &Input, out: &mut [$t]) {
                $f(c, s, a, b, out);
            }
        }
    )* };
}

products!(f32 => full_precision, f64 => full_precision, bf16 => half_precision, f16 => half_precision, i64 => integer_gemm, i32 => integer_gemm, u8 => integer_gemm);

fn full_precision<T: Gemm + Element>(c: &Call, s: GemmShape, a: &Input, b: &Input, out: &mut [T]) {
    float_gemm(
        c,
        s,
        &BatchedMatrix::new(a.elements::<T>(), &a.layout),
        &BatchedMatrix::new(b.elements::<T>(), &b.layout),
        out,
    );
}

fn half_precision<T: Product>(c: &Call, s: GemmShape, a: &Input, b: &Input, out: &mut [T]) {
    half_gemm(c, s, a, b, None, out);
}

/// Checks the ends of either product.
pub fn check(c: &Call) -> Result<()> {
    groups(c, c.input(0).shape().dims()[0]).map(drop)
}

/// The rows of each group; an error unless the ends are in order.
fn groups(c: &Call, rows: usize) -> Result<Vec<Range<usize>>> {
    let ends = dense::<i64>(&c.input(2))?;
    let mut start = 0;
    let group = |(e, &end): (usize, &i64)| {
        if end < start || end > rows as i64 {
            return Err(bad_end(Some(e), end, rows as i64));
        }
        Ok(std::mem::replace(&mut start, end) as usize..end as usize)
    };
    ends.iter().enumerate().map(group).collect()
}

/// Slices an operand along one dim.
fn part<'a>(x: &Input<'a>, dim: usize, range: &Range<usize>) -> Input<'a> {
    let mut y = *x;
    y.layout.offset += range.start as isize * y.layout.strides[dim];
    y.layout.shape = y.layout.shape.with(dim, range.len());
    y
}

/// Returns matrix `e` of a stack.
fn matrix<'a>(x: &Input<'a>, e: usize) -> Input<'a> {
    let mut y = *x;
    y.layout.offset += e as isize * y.layout.strides[0];
    y.layout.strides.copy_within(1..3, 0);
    y.layout.shape = Shape::of(&x.shape().dims()[1..]);
    y
}

/// Computes x (T, K), w (E, K, N), ends (E) -> (T, N).
pub fn rows(c: &Call) -> Result<()> {
    by_type!(c.out_dtype(), rows_of(c))
}

fn rows_of<T: Product>(c: &Call) -> Result<()> {
    let (x, w, out) = (c.input(0), c.input(1), c.output::<T>());
    let (k, n) = (x.shape().dims()[1], c.out_shape().dims()[1]);
    let groups = groups(c, x.shape().dims()[0])?;
    let end = groups.last().map_or(0, |g| g.end);
    out[end * n..].fill(T::default());
    let sizes: Vec<usize> = groups.iter().map(|g| g.len() * n).collect();
    each(c, &groups, &sizes, out, |e, rows, out| {
        let s = GemmShape { batch: 1, m: rows.len(), n, k };
        T::product(c, s, &part(&x, 0, rows), &matrix(&w, e), out);
    });
    Ok(())
}

/// Computes a (T, M), b (T, N), ends (E) -> (E, M, N).
pub fn sums(c: &Call) -> Result<()> {
    by_type!(c.out_dtype(), sums_of(c))
}

fn sums_of<T: Product>(c: &Call) -> Result<()> {
    let (a, b, out) = (c.input(0), c.input(1), c.output::<T>());
    let (m, n) = (c.out_shape().dims()[1], c.out_shape().dims()[2]);
    let groups = groups(c, a.shape().dims()[0])?;
    each(c, &groups, &vec![m * n; groups.len()], out, |_, rows, out| {
        let mut left = part(&a, 0, rows);
        left.layout = left.layout.permute(&[1, 0]);
        T::product(c, GemmShape { batch: 1, m, n, k: rows.len() }, &left, &part(&b, 0, rows), out);
    });
    Ok(())
}

/// Calls `f(group, its rows, its part of out)` for every group; `sizes` holds the lengths of the consecutive parts of `out`.
fn each<T: Send>(
    c: &Call,
    groups: &[Range<usize>],
    sizes: &[usize],
    out: &mut [T],
    f: impl Fn(usize, &Range<usize>, &mut [T]) + Sync,
) {
    let mut at = 0;
    let parts: Vec<Range<usize>> = sizes
        .iter()
        .map(|n| {
            at += n;
            at - n..at
        })
        .collect();
    // A thread's share of the rows; larger products are partitioned internally.
    let most = groups.iter().map(Range::len).sum::<usize>() / (2 * c.pool().threads());
    let is_large = |e: &usize| groups[*e].len() > most;
    for e in (0..groups.len()).filter(is_large) {
        f(e, &groups[e], &mut out[parts[e].clone()]);
    }
    let small: Vec<usize> = (0..groups.len()).filter(|e| !is_large(e)).collect();
    let base = SendPtr(out.as_mut_ptr());
    c.pool().run(c.parallel(), small.len(), |tasks| {
        let base = &base;
        while let Some(k) = tasks.claim() {
            let (e, range) = (small[k], &parts[small[k]]);
            debug_assert!(range.end <= at, "this is a bug: a group beyond the result");
            // SAFETY: parts follow each other within `out`, which is borrowed mutably, and each is claimed once.
            let out = unsafe { std::slice::from_raw_parts_mut(base.0.add(range.start), range.len()) };
            f(e, &groups[e], out);
        }
    });
}
