//! Implements cumulative sums and products along an axis, in order. 16-bit floats accumulate in f32 and are rounded at
//! each store.
//!
//! The additions of one line depend on each other. Contiguous lines are therefore interleaved four at a time, and
//! strided lines run side by side.

use super::movement::{GRAIN, part};
use super::{Call, Element, Input, by_type, split_at_axis};
use crate::math::Number;
use crate::region::walk;
use crate::worker_pool::{SendPtr, TaskQueue};
use perilune_core::error::Result;

/// Interleaved lines.
const LINES: usize = 4;

pub fn cumsum(c: &Call) -> Result<()> {
    by_type!(c.out_dtype(), sums(c))
}

pub fn cumprod(c: &Call) -> Result<()> {
    by_type!(c.out_dtype(), products(c))
}

fn sums<T: Element>(c: &Call) -> Result<()> {
    scan::<T>(c, T::Acc::ZERO, T::Acc::add)
}

fn products<T: Element>(c: &Call) -> Result<()> {
    scan::<T>(c, T::Acc::ONE, T::Acc::mul)
}

fn scan<T: Element>(c: &Call, identity: T::Acc, join: impl Fn(T::Acc, T::Acc) -> T::Acc + Sync) -> Result<()> {
    let (x, out) = (c.input(0), c.output::<T>());
    match split_at_axis(&c.out_shape(), c.axis()) {
        _ if out.is_empty() => {}
        (_, n, 1) => contiguous(c, &x, out, n, identity, join),
        (outer, n, inner) => strided(c, &x, out, (outer, n, inner), identity, join),
    }
    Ok(())
}

/// Scans contiguous lines of `n` elements.
fn contiguous<T: Element>(
    c: &Call,
    x: &Input,
    out: &mut [T],
    n: usize,
    identity: T::Acc,
    join: impl Fn(T::Acc, T::Acc) -> T::Acc + Sync,
) {
    let (from, stride) = (x.elements::<T>(), x.layout.strides()[c.axis()]);
    let lines = (GRAIN / n).next_multiple_of(LINES).min((out.len() / n).div_ceil(c.pool().threads())).max(1);
    c.pool().for_each_chunk(c.parallel(), out, lines * n, |k, piece| {
        for (g, out) in piece.chunks_mut(LINES * n).enumerate() {
            let start = |i: usize| part(&x.layout, c.axis(), k * lines + g * LINES + i).offset;
            let mut totals = [identity; LINES];
            if out.len() == LINES * n && stride == 1 {
                let [xa, xb, xc, xd] = std::array::from_fn(|i| &from[start(i) as usize..][..n]);
                let (a, rest) = out.split_at_mut(n);
                let (b, rest) = rest.split_at_mut(n);
                let (c, d) = rest.split_at_mut(n);
                let d = &mut d[..n];
                for i in 0..n {
                    totals[0] = join(totals[0], xa[i].to_acc());
                    totals[1] = join(totals[1], xb[i].to_acc());
                    totals[2] = join(totals[2], xc[i].to_acc());
                    totals[3] = join(totals[3], xd[i].to_acc());
                    a[i] = T::from_acc(totals[0]);
                    b[i] = T::from_acc(totals[1]);
                    c[i] = T::from_acc(totals[2]);
                    d[i] = T::from_acc(totals[3]);
                }
                continue;
            }
            for (l, line) in out.chunks_mut(n).enumerate() {
                let mut position = start(l);
                for out in line {
                    totals[l] = join(totals[l], from[position as usize].to_acc());
                    *out = T::from_acc(totals[l]);
                    position += stride;
                }
            }
        }
    });
}

/// Scans lines of `n` elements at stride `inner`. A task processes adjacent lines.
fn strided<T: Element>(
    c: &Call,
    x: &Input,
    out: &mut [T],
    (outer, n, inner): (usize, usize, usize),
    identity: T::Acc,
    join: impl Fn(T::Acc, T::Acc) -> T::Acc + Sync,
) {
    const WIDTH: usize = 1024;
    let (from, stride) = (x.elements::<T>(), x.layout.strides()[c.axis()]);
    // A small outer size splits the lines further, down to a few cache lines.
    let width = inner.div_ceil((4 * c.pool().threads()).div_ceil(outer)).next_multiple_of(64).min(WIDTH);
    let blocks = inner.div_ceil(width);
    let to = SendPtr(out.as_mut_ptr());
    c.pool().run(c.parallel(), outer * blocks, |tasks: &TaskQueue| {
        let to = &to;
        while let Some(t) = tasks.claim() {
            let (k, lo) = (t / blocks, t % blocks * width);
            let count = width.min(inner - lo);
            let mut row = part(&part(&x.layout, c.axis(), k), 1, 0).collapse();
            let mut totals = vec![identity; count];
            for i in 0..n {
                // SAFETY: columns `lo..lo + count` of this part of `out` belong to this task alone.
                let out = unsafe { std::slice::from_raw_parts_mut(to.0.add((k * n + i) * inner + lo), count) };
                walk(&row, lo, count, |position, stride, count, done| {
                    let pairs = totals[done..done + count].iter_mut().zip(&mut out[done..]);
                    let join = |total: &mut T::Acc, x: T| *total = join(*total, x.to_acc());
                    if stride == 1 {
                        for ((total, out), &x) in pairs.zip(&from[position as usize..]) {
                            join(total, x);
                            *out = T::from_acc(*total);
                        }
                    } else {
                        for (i, (total, out)) in pairs.enumerate() {
                            join(total, from[(position + i as isize * stride) as usize]);
                            *out = T::from_acc(*total);
                        }
                    }
                });
                row.offset += stride;
            }
        }
    });
}
