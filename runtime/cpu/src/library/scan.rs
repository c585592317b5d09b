//! Running sums and products along an axis, in order; 16-bit floats accumulate in f32 and round at each store.
//!
//! One line is a chain of additions that wait for each other. So lines that lie along memory go four at a time, and those
//! that lie across it side by side.

use super::movement::{GRAIN, part};
use super::{Call, Element, Input, around, by_type};
use crate::math::Number;
use crate::region::walk;
use crate::worker_pool::{SendPtr, TaskQueue};
use perilune_core::error::Result;

/// Lines at a time.
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
    match around(&c.out_shape(), c.axis()) {
        _ if out.is_empty() => {}
        (_, n, 1) => along(c, &x, out, n, identity, join),
        (outer, n, inner) => across(c, &x, out, (outer, n, inner), identity, join),
    }
    Ok(())
}

/// Lines of `n` elements side by side.
fn along<T: Element>(
    c: &Call,
    x: &Input,
    out: &mut [T],
    n: usize,
    identity: T::Acc,
    join: impl Fn(T::Acc, T::Acc) -> T::Acc + Sync,
) {
    let (from, stride) = (x.elements::<T>(), x.layout.strides()[c.axis()]);
    let lines = (GRAIN / n).next_multiple_of(LINES).min((out.len() / n).div_ceil(c.pool().threads())).max(1);
    c.pool().for_each_chunk(c.share(), out, lines * n, |k, piece| {
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
                    totals[0] = join(totals[0], xa[i].acc());
                    totals[1] = join(totals[1], xb[i].acc());
                    totals[2] = join(totals[2], xc[i].acc());
                    totals[3] = join(totals[3], xd[i].acc());
                    a[i] = T::back(totals[0]);
                    b[i] = T::back(totals[1]);
                    c[i] = T::back(totals[2]);
                    d[i] = T::back(totals[3]);
                }
                continue;
            }
            for (l, line) in out.chunks_mut(n).enumerate() {
                let mut position = start(l);
                for out in line {
                    totals[l] = join(totals[l], from[position as usize].acc());
                    *out = T::back(totals[l]);
                    position += stride;
                }
            }
        }
    });
}

/// Lines of `n` elements that are `inner` apart. A task takes some that are neighbours.
fn across<T: Element>(
    c: &Call,
    x: &Input,
    out: &mut [T],
    (outer, n, inner): (usize, usize, usize),
    identity: T::Acc,
    join: impl Fn(T::Acc, T::Acc) -> T::Acc + Sync,
) {
    const WIDTH: usize = 1024;
    let (from, stride) = (x.elements::<T>(), x.layout.strides()[c.axis()]);
    // Few lines are cut up further, down to some cache lines.
    let width = inner.div_ceil((4 * c.pool().threads()).div_ceil(outer)).next_multiple_of(64).min(WIDTH);
    let blocks = inner.div_ceil(width);
    let to = SendPtr(out.as_mut_ptr());
    c.pool().run(c.share(), outer * blocks, |tasks: &TaskQueue| {
        let to = &to;
        while let Some(t) = tasks.claim() {
            let (k, lo) = (t / blocks, t % blocks * width);
            let count = width.min(inner - lo);
            let mut row = part(&part(&x.layout, c.axis(), k), 1, 0).collapse();
            let mut totals = vec![identity; count];
            for i in 0..n {
                // SAFETY: a task has the columns `lo..lo + count` of its part of `out` to itself.
                let out = unsafe { std::slice::from_raw_parts_mut(to.0.add((k * n + i) * inner + lo), count) };
                walk(&row, lo, count, |position, stride, count, done| {
                    let pairs = totals[done..done + count].iter_mut().zip(&mut out[done..]);
                    let join = |total: &mut T::Acc, x: T| *total = join(*total, x.acc());
                    if stride == 1 {
                        for ((total, out), &x) in pairs.zip(&from[position as usize..]) {
                            join(total, x);
                            *out = T::back(*total);
                        }
                    } else {
                        for (i, (total, out)) in pairs.enumerate() {
                            join(total, from[(position + i as isize * stride) as usize]);
                            *out = T::back(*total);
                        }
                    }
                });
                row.offset += stride;
            }
        }
    });
}
