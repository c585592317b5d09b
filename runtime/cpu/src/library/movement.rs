//! Implements strided copies, `cat`, `strided_pad`, and `col2im`, which also adds.

use super::{Call, Element, Input, by_size, by_type, split_at_axis};
use crate::math::Number;
use crate::memory::Pod;
use crate::region::walk;
use perilune_core::error::Result;
use perilune_core::{Layout, MAX_RANK, Shape};
use smallvec::SmallVec;

/// Copies elements `start..start + out.len()` of a view, in its order.
pub fn copy<T: Pod>(x: &[T], layout: &Layout, start: usize, out: &mut [T]) {
    walk(layout, start, out.len(), |position, stride, count, done| {
        let out = &mut out[done..done + count];
        match stride {
            1 => out.copy_from_slice(&x[position as usize..position as usize + count]),
            0 => out.fill(x[position as usize]),
            _ => {
                for (i, o) in out.iter_mut().enumerate() {
                    *o = x[(position + i as isize * stride) as usize];
                }
            }
        }
    });
}

/// Elements that a task of a plain copy moves.
pub const GRAIN: usize = 1 << 15;

/// Copies a whole view in its order, on all threads.
pub fn copy_all<T: Pod>(c: &Call, x: &Input, out: &mut [T]) {
    let (from, layout) = (x.elements::<T>(), x.layout.collapse());
    c.pool().for_each_chunk(c.parallel(), out, GRAIN, |k, piece| copy(from, &layout, k * GRAIN, piece));
}

/// The slice of a view at the `outer`-th coordinates before `axis`; its layout has the remaining dims.
pub fn part(layout: &Layout, axis: usize, outer: usize) -> Layout {
    let dims = layout.shape.dims();
    let mut out =
        Layout { shape: Shape::of(&dims[axis..]), strides: [0; perilune_core::MAX_RANK], offset: layout.offset };
    out.strides[..dims.len() - axis].copy_from_slice(&layout.strides()[axis..]);
    let mut rest = outer;
    for i in (0..axis).rev() {
        out.offset += (rest % dims[i]) as isize * layout.strides[i];
        rest /= dims[i];
    }
    out
}

pub fn cat(c: &Call) -> Result<()> {
    by_size!(c.out_dtype(), cat_of(c))
}

fn cat_of<T: Pod>(c: &Call) -> Result<()> {
    let out = c.output::<T>();
    if out.is_empty() {
        return Ok(());
    }
    // In the memory order of the result.
    let layout = c.out_layout();
    let mut order: SmallVec<[usize; MAX_RANK]> = (0..layout.shape.rank()).collect();
    if !layout.is_dense() {
        order.sort_by_key(|&i| std::cmp::Reverse(layout.strides[i]));
    }
    let axis = order.iter().position(|&i| i == c.axis()).unwrap_or(0);
    let (outer, total, inner) = split_at_axis(&layout.permute(&order).shape, axis);
    if outer == 1 && layout.is_dense() {
        // The inputs are concatenated end to end.
        let mut rest = out;
        for k in 0..c.num_inputs() {
            let x = c.input(k);
            let (piece, more) = rest.split_at_mut(x.layout.numel());
            copy_all(c, &x, piece);
            rest = more;
        }
        return Ok(());
    }
    // Each input with its layout from the axis on. That layout is the same for all coordinates before the axis, except
    // for the offset.
    let inputs: Vec<(Input, Layout)> = (0..c.num_inputs())
        .map(|k| {
            let x = c.input(k);
            let x = Input { layout: x.layout.permute(&order), ..x };
            (x, part(&x.layout, axis, 0).collapse())
        })
        .collect();
    let row = total * inner;
    let rows = (GRAIN / row.max(1)).max(1);
    c.pool().for_each_chunk(c.parallel(), out, rows * row, |k, piece| {
        for (r, out) in piece.chunks_mut(row.max(1)).enumerate() {
            let mut rest = out;
            for (x, inner_layout) in &inputs {
                let offset = part(&x.layout, axis, k * rows + r).offset;
                let (piece, more) = rest.split_at_mut(inner_layout.numel());
                copy(x.elements::<T>(), &Layout { offset, ..*inner_layout }, 0, piece);
                rest = more;
            }
        }
    });
    Ok(())
}

pub fn strided_pad(c: &Call) -> Result<()> {
    by_size!(c.out_dtype(), strided_pad_of(c))
}

fn strided_pad_of<T: Pod>(c: &Call) -> Result<()> {
    let (lo, step) = (c.attr(1) as usize, c.attr(2) as usize);
    let fill = f64::from_bits(c.attr(4) as u64);
    let bits = perilune_core::Number::Float(fill).bits(c.out_dtype());
    let bytes = super::constant(c.out_dtype(), bits);
    let fill = super::first::<T>(&bytes);
    let (x, out) = (c.input(0), c.output::<T>());
    let (_, total, inner) = split_at_axis(&c.out_shape(), c.axis());
    let (_, n, _) = split_at_axis(&x.shape(), c.axis());
    let row = total * inner;
    let rows = (GRAIN / row.max(1)).max(1);
    let from = x.elements::<T>();
    c.pool().for_each_chunk(c.parallel(), out, rows * row, |k, piece| {
        for (r, out) in piece.chunks_mut(row.max(1)).enumerate() {
            out.fill(fill);
            let layout = part(&x.layout, c.axis(), k * rows + r);
            if step == 1 {
                copy(from, &layout.collapse(), 0, &mut out[lo * inner..(lo + n) * inner]);
            } else {
                for i in 0..n {
                    let at = (lo + i * step) * inner;
                    copy(from, &part(&layout, 1, i).collapse(), 0, &mut out[at..at + inner]);
                }
            }
        }
    });
    Ok(())
}

pub fn col2im(c: &Call) -> Result<()> {
    by_type!(c.out_dtype(), col2im_of(c))
}

/// Sums the windows that contain each element, in the order of their start.
fn col2im_of<T: Element>(c: &Call) -> Result<()> {
    let (size, step, dilation) = (c.attr(1) as usize, c.attr(2) as usize, c.attr(3) as usize);
    let (x, out) = (c.input(0), c.output::<T>());
    let (_, total, inner) = split_at_axis(&c.out_shape(), c.axis());
    let from = x.elements::<T>();
    let row = total * inner;
    let rows = (GRAIN / 8 / row.max(1)).max(1);
    c.pool().for_each_chunk(c.parallel(), out, rows * row, |k, piece| {
        let mut sums = vec![T::Acc::ZERO; row];
        for (r, out) in piece.chunks_mut(row.max(1)).enumerate() {
            sums.fill(T::Acc::ZERO);
            let layout = part(&x.layout, c.axis(), k * rows + r);
            let windows = layout.shape.dims()[0];
            for n in 0..windows {
                // Dims of one window: the inner ones first, then the window's.
                let window = part(&layout, 1, n);
                walk(&window.collapse(), 0, inner * size, |position, stride, count, done| {
                    for i in 0..count {
                        let (at, s) = ((done + i) / size, (done + i) % size);
                        let to = &mut sums[(n * step + s * dilation) * inner + at];
                        *to = to.add(from[(position + i as isize * stride) as usize].to_acc());
                    }
                });
            }
            for (o, &s) in out.iter_mut().zip(&sums) {
                *o = T::from_acc(s);
            }
        }
    });
    Ok(())
}
