//! Implements ops that read or write by index: gather, scatter, scatter_add, index_select, index_add, class_ids.
//!
//! Indices are checked before anything is written. Additions to one element run in index order for any thread count: tasks
//! own parts of the output, and each visits all indices that can address its part.

use super::movement::{copy, copy_all, part};
use super::{Call, Element, Input, by_size, by_type, split_at_axis};
use crate::math::Number;
use crate::memory::Pod;
use crate::region::walk;
use crate::worker_pool::SendPtr;
use perilune_core::error::{Error, Result};
use perilune_core::ops::index::{INDEX_SELECT, OF_EMBEDDING};
use perilune_core::ops::loss::{OF_CLASSES, cure_of_class};
use perilune_core::{Layout, Shape, host_memory};
use std::borrow::Cow;

/// The elements of a view in its order; borrowed if they are contiguous in memory, else copied.
pub fn dense<'a, T: Pod>(x: &Input<'a>) -> Result<Cow<'a, [T]>> {
    let (all, n) = (x.elements::<T>(), x.layout.numel());
    if n == 0 {
        return Ok(Cow::Borrowed(&[]));
    }
    if x.layout.is_dense() {
        let lo = x.layout.offset as usize;
        return Ok(Cow::Borrowed(&all[lo..lo + n]));
    }
    let mut out = host_memory::filled("cpu", n)?;
    copy(all, &x.layout.collapse(), 0, &mut out);
    Ok(Cow::Owned(out))
}

/// Input 1 as checked indices into `n` elements.
fn indices<'a>(c: &Call<'a>, n: usize) -> Result<Cow<'a, [i64]>> {
    let index = dense::<i64>(&c.input(1))?;
    match index.iter().find(|i| **i < 0 || **i >= n as i64) {
        None => Ok(index),
        Some(i) if c.name() == INDEX_SELECT.name && c.flag(1) == Some(OF_EMBEDDING) => {
            let message = format!("id {i} is out of range: the table has {n} rows");
            let cure = match n {
                0 => "there is nothing to look up".to_string(),
                n => format!("ids count from 0: here 0 to {}", n - 1),
            };
            Err(Error::argument("embedding", message).hint(cure))
        }
        Some(i) => {
            let message = format!("index {i} is out of range for dim {} of size {n}", c.axis());
            let cure = match n {
                0 => "there is nothing to index".to_string(),
                n => format!("indices count from 0: here 0 to {}", n - 1),
            };
            Err(Error::argument(c.name(), message).hint(cure))
        }
    }
}

/// Checks the indices of gather, scatter, scatter_add, index_select and index_add.
pub fn check(c: &Call) -> Result<()> {
    indices(c, c.input(0).shape().dims()[c.axis()]).map(drop)
}

/// Checks that each class id names a class.
pub fn check_class_ids(c: &Call) -> Result<()> {
    checked_class_ids(c).map(drop)
}

/// Copies class ids, after checking them.
pub fn class_ids(c: &Call) -> Result<()> {
    let ids = checked_class_ids(c)?;
    c.output::<i64>().copy_from_slice(&ids);
    Ok(())
}

fn checked_class_ids<'a>(c: &Call<'a>) -> Result<Cow<'a, [i64]>> {
    let (n, ignored) = (c.attr(0), c.attr(2));
    let ids = dense::<i64>(&c.input(0))?;
    if let Some(at) = ids.iter().position(|&id| (id < 0 || id >= n) && id != ignored) {
        let message = format!("target {at} is class {}, but there are {n} classes", ids[at]);
        let of = OF_CLASSES[c.attr(1) as usize];
        return Err(Error::argument(of, message).hint(cure_of_class(n, ignored)));
    }
    Ok(ids)
}

/// A layout over the shape of the index with stride 0 along the axis: the positions that index 0 addresses.
fn with_zero_stride(layout: &Layout, axis: usize, shape: Shape) -> Layout {
    let mut out = Layout { shape, ..*layout };
    out.strides[axis] = 0;
    out
}

pub fn gather(c: &Call) -> Result<()> {
    by_size!(c.out_dtype(), gather_of(c))
}

fn gather_of<T: Pod>(c: &Call) -> Result<()> {
    const GRAIN: usize = 4096;
    let (x, axis) = (c.input(0), c.axis());
    let index = indices(c, x.shape().dims()[axis])?;
    let (from, out) = (x.elements::<T>(), c.output::<T>());
    let (base, step) = (with_zero_stride(&x.layout, axis, c.out_shape()), x.layout.strides[axis]);
    c.pool().for_each_chunk(c.parallel(), out, GRAIN, |k, piece| {
        let index = &index[k * GRAIN..];
        walk(&base, k * GRAIN, piece.len(), |position, stride, count, done| {
            for i in done..done + count {
                piece[i] = from[(position + (i - done) as isize * stride + index[i] as isize * step) as usize];
            }
        });
    });
    Ok(())
}

/// Calls `write(element of out, position in index order)` for all writes of a scatter, in index order. Threads split the dims
/// before the axis: each owns whole slices of the output.
fn each_write<A: Send>(c: &Call, index: &[i64], out: &mut [A], write: impl Fn(&mut A, usize) + Sync) {
    let (axis, shape, to) = (c.axis(), c.input(1).shape(), c.out_shape());
    let (_, n, inner) = split_at_axis(&to, axis);
    let below: usize = shape.dims()[axis..].iter().product();
    if index.is_empty() {
        return;
    }
    c.pool().for_each_chunk(c.parallel(), out, n * inner, |outer, out| {
        // In other dims the index may be smaller than x, so this slice may have no writes.
        let (mut rest, mut at, mut span) = (outer, 0, 1);
        for d in (0..axis).rev() {
            let coordinate = rest % to.dims()[d];
            rest /= to.dims()[d];
            if coordinate >= shape.dims()[d] {
                return;
            }
            at += coordinate * span;
            span *= shape.dims()[d];
        }
        let inside = part(&Layout::contiguous(to), axis, 0);
        let base = with_zero_stride(&inside, 0, Shape::of(&shape.dims()[axis..]));
        let step = inside.strides[0];
        walk(&base, 0, below, |position, stride, count, done| {
            for i in 0..count {
                let k = at * below + done + i;
                let place = position + i as isize * stride + index[k] as isize * step;
                write(&mut out[place as usize], k);
            }
        });
    });
}

pub fn scatter(c: &Call) -> Result<()> {
    by_size!(c.out_dtype(), scatter_of(c))
}

fn scatter_of<T: Pod>(c: &Call) -> Result<()> {
    let x = c.input(0);
    let index = indices(c, x.shape().dims()[c.axis()])?;
    let (src, out) = (dense::<T>(&c.input(2))?, c.output::<T>());
    copy_all(c, &x, out);
    each_write(c, &index, out, |o, k| *o = src[k]);
    Ok(())
}

pub fn scatter_add(c: &Call) -> Result<()> {
    by_type!(c.out_dtype(), scatter_add_of(c))
}

fn scatter_add_of<T: Element>(c: &Call) -> Result<()> {
    let x = c.input(0);
    let index = indices(c, x.shape().dims()[c.axis()])?;
    let src = dense::<T>(&c.input(2))?;
    accumulate::<T>(c, |sums| each_write(c, &index, sums, |o, k| *o = o.add(src[k].to_acc())))
}

/// Converts x to the accumulator type, applies `add`, then stores: 16-bit floats are rounded once.
fn accumulate<T: Element>(c: &Call, add: impl FnOnce(&mut [T::Acc])) -> Result<()> {
    let (x, out) = (c.input(0), c.output::<T>());
    copy_all(c, &x, out);
    if size_of::<T>() == size_of::<T::Acc>() {
        // SAFETY: of one size, `T` and its accumulator are the same type (`Element`).
        add(unsafe { std::slice::from_raw_parts_mut(out.as_mut_ptr().cast::<T::Acc>(), out.len()) });
        return Ok(());
    }
    let mut sums: Vec<T::Acc> = host_memory::reserve("cpu", out.len())?;
    sums.extend(out.iter().map(|v| v.to_acc()));
    add(&mut sums);
    for (o, &s) in out.iter_mut().zip(&sums) {
        *o = T::from_acc(s);
    }
    Ok(())
}

pub fn index_select(c: &Call) -> Result<()> {
    by_size!(c.out_dtype(), index_select_of(c))
}

fn index_select_of<T: Pod>(c: &Call) -> Result<()> {
    let (x, axis) = (c.input(0), c.axis());
    let index = indices(c, x.shape().dims()[axis])?;
    let (_, k, inner) = split_at_axis(&c.out_shape(), axis);
    let (from, out) = (x.elements::<T>(), c.output::<T>());
    if out.is_empty() {
        return Ok(());
    }
    let rows = (super::movement::GRAIN / inner).max(1);
    c.pool().for_each_chunk(c.parallel(), out, rows * inner, |t, piece| {
        let mut slice = (usize::MAX, x.layout, x.layout);
        for (r, out) in piece.chunks_mut(inner).enumerate() {
            let row = t * rows + r;
            if slice.0 != row / k {
                let outer = part(&x.layout, axis, row / k);
                slice = (row / k, outer, part(&outer, 1, 0).collapse());
            }
            let mut layout = slice.2;
            layout.offset += index[row % k] as isize * slice.1.strides[0];
            copy(from, &layout, 0, out);
        }
    });
    Ok(())
}

pub fn index_add(c: &Call) -> Result<()> {
    by_type!(c.out_dtype(), index_add_of(c))
}

fn index_add_of<T: Element>(c: &Call) -> Result<()> {
    /// Columns of a task: a few cache lines, to avoid false sharing.
    const WIDTH: usize = 128;
    let axis = c.axis();
    let index = indices(c, c.input(0).shape().dims()[axis])?;
    let src = c.input(2);
    let (outer, n, inner) = split_at_axis(&c.out_shape(), axis);
    if index.is_empty() {
        return accumulate::<T>(c, |_| {});
    }
    let from = src.elements::<T>();
    let pieces = inner.div_ceil(WIDTH);
    accumulate::<T>(c, |sums| {
        let base = SendPtr(sums.as_mut_ptr());
        c.pool().run(c.parallel(), outer * pieces, |tasks| {
            let base = &base;
            while let Some(t) = tasks.claim() {
                let (o, lo) = (t / pieces, t % pieces * WIDTH);
                let w = WIDTH.min(inner - lo);
                let slice = part(&src.layout, axis, o);
                let first = part(&slice, 1, 0).collapse();
                for (k, &i) in index.iter().enumerate() {
                    let mut layout = first;
                    layout.offset += k as isize * slice.strides[0];
                    // SAFETY: columns `lo..lo + w` of slice `o` belong to this task alone; the index was checked.
                    let to =
                        unsafe { std::slice::from_raw_parts_mut(base.0.add((o * n + i as usize) * inner + lo), w) };
                    walk(&layout, lo, w, |position, stride, count, done| {
                        let to = &mut to[done..done + count];
                        if stride == 1 {
                            for (t, v) in to.iter_mut().zip(&from[position as usize..position as usize + count]) {
                                *t = t.add(v.to_acc());
                            }
                        } else {
                            for (j, t) in to.iter_mut().enumerate() {
                                *t = t.add(from[(position + j as isize * stride) as usize].to_acc());
                            }
                        }
                    });
                }
            }
        });
    })
}
