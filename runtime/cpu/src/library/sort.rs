//! Implements argmax, argmin and argsort along an axis.

use super::movement::{copy, part};
use super::{Call, Element, by_type, split_at_axis};
use perilune_core::error::Result;
use std::cmp::Ordering;

/// Calls `f` for each row of `n` elements along the axis, gathered into a buffer, and scatters its `width` results.
fn rows<T: Element>(c: &Call, f: impl Fn(&[T], &mut [i64]) + Sync, width: usize) {
    let (x, out) = (c.input(0), c.output::<i64>());
    let (_, n, inner) = split_at_axis(&x.shape(), c.axis());
    let from = x.elements::<T>();
    let each = width * inner;
    let rows = (4096 / (n * inner).max(1)).max(1);
    c.pool().for_each_chunk(c.parallel(), out, rows * each, |k, piece| {
        let (mut row, mut found) = (vec![T::default(); n], vec![0i64; width]);
        for (r, out) in piece.chunks_mut(each.max(1)).enumerate() {
            let layout = part(&x.layout, c.axis(), k * rows + r);
            let columns = perilune_core::Layout::contiguous(perilune_core::Shape::of(&layout.shape.dims()[1..]));
            let mut along = layout;
            along.shape = perilune_core::Shape::of(&[n]);
            along.strides = [0; perilune_core::MAX_RANK];
            along.strides[0] = layout.strides[0];
            for i in 0..inner {
                let (mut rest, mut offset) = (i, layout.offset);
                for d in (0..columns.shape.rank()).rev() {
                    offset += (rest % columns.shape.dims()[d]) as isize * layout.strides[d + 1];
                    rest /= columns.shape.dims()[d];
                }
                along.offset = offset;
                copy(from, &along, 0, &mut row);
                f(&row, &mut found);
                for (j, &p) in found.iter().enumerate() {
                    out[j * inner + i] = p;
                }
            }
        }
    });
}

pub fn argreduce(c: &Call) -> Result<()> {
    by_type!(c.input(0).dtype, arg_of(c))
}

fn arg_of<T: Element>(c: &Call) -> Result<()> {
    if c.attr(1) != 0 {
        rows::<T>(c, |row, out| out[0] = first(row, |a, b| a > b), 1);
    } else {
        rows::<T>(c, |row, out| out[0] = first(row, |a, b| a < b), 1);
    }
    Ok(())
}

/// The index of the first extremum; the first NaN if there is one.
fn first<T: PartialOrd + Copy>(row: &[T], is_better: impl Fn(T, T) -> bool) -> i64 {
    let mut best = 0;
    for (i, &x) in row.iter().enumerate() {
        if x.partial_cmp(&x).is_none() {
            return i as i64;
        }
        if is_better(x, row[best]) {
            best = i;
        }
    }
    best as i64
}

pub fn argsort(c: &Call) -> Result<()> {
    by_type!(c.input(0).dtype, argsort_of(c))
}

fn argsort_of<T: Element>(c: &Call) -> Result<()> {
    let (descending, (_, n, _)) = (c.attr(1) != 0, split_at_axis(&c.out_shape(), c.axis()));
    rows::<T>(
        c,
        |row, out| {
            for (i, o) in out.iter_mut().enumerate() {
                *o = i as i64;
            }
            match descending {
                false => out.sort_by(|&i, &j| order(row[i as usize], row[j as usize])),
                true => out.sort_by(|&i, &j| order(row[j as usize], row[i as usize])),
            }
        },
        n,
    );
    Ok(())
}

/// Orders NaN above every other value.
fn order<T: PartialOrd>(a: T, b: T) -> Ordering {
    let nan = |x: &T| x.partial_cmp(x).is_none();
    a.partial_cmp(&b).unwrap_or_else(|| nan(&a).cmp(&nan(&b)))
}
