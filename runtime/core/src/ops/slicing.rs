//! Defines views of parts of a dim (slices and sliding windows), and their inverses, which write memory: padding and the sum
//! of overlapping windows (col2im).

use super::movement::reshape;
use super::{Class, Grad, Op, one};
use crate::Layout;
use crate::error::{Error, Result};
use crate::graph::{Graph, Meta, NodeId};
use crate::shape::size;
use smallvec::{SmallVec, smallvec};

pub static OPS: &[&Op] = &[&NARROW, &SELECT, &SLICE, &UNFOLD, &COL2IM, &STRIDED_PAD, &PAD];

pub fn slice(g: &mut Graph, x: NodeId, at: usize, lo: usize, hi: usize, step: usize) -> Result<NodeId> {
    let n = g.shape(x).dims()[at];
    if lo == 0 && hi == n && step == 1 {
        return Ok(x);
    }
    let len = hi.saturating_sub(lo).div_ceil(step);
    // A longer step takes one element too, and its product with a stride might not fit in 64 bits.
    let step = step.min(n.max(1));
    g.push(&SLICE, &[x], &[at as i64, lo as i64, step as i64, len as i64])
}

/// A half-open range given by the user: negative ends count from the back, and ends beyond the dim are clamped, as in
/// NumPy.
pub fn range(n: usize, lo: Option<i64>, hi: Option<i64>) -> (usize, usize) {
    let fix = |v: i64| (if v < 0 { v + n as i64 } else { v }).clamp(0, n as i64) as usize;
    let (lo, hi) = (lo.map_or(0, fix), hi.map_or(n, fix));
    (lo, hi.max(lo))
}

pub static SLICE: Op = Op {
    name: "slice",
    sig: "x: tensor, dim: int, start: int?, stop: int?, step: int = 1",
    doc: "x (...) -> elements start, start + step, ... below stop of dim `dim`. Negative ends count from the back; ends\n\
          beyond the dim are clamped. The same as `x[{ {start, stop} }]` on that dim. step must be 1 or more.",
    shard: Some(crate::sharding::linear_along_other_dims),
    regroups: Some(&crate::sharding::SLICING),
    class: Class::View(|l, attrs, out| {
        let (at, lo, step) = (attrs[0] as usize, attrs[1] as isize, attrs[2] as isize);
        let mut y = Layout { shape: *out, strides: l.strides, offset: l.offset + lo * l.strides[at] };
        y.strides[at] *= step;
        Some(y)
    }),
    infer: |i| Ok(Meta { shape: i.shape(0).with(i.attr(0), i.attr(3)), dtype: i.dtype(0) }),
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let at = g.shape(x).axis("slice", a.int(1)?)?;
        let (lo, hi) = range(g.shape(x).dims()[at], a.opt_int(2), a.opt_int(3));
        let step = a.int(4)?;
        if step < 1 {
            return Err(
                Error::argument("slice", format!("step is {step}; it must be 1 or more")).hint("x:flip(dim) reverses")
            );
        }
        slice(g, x, at, lo, hi, step as usize).map(one)
    }),
    grad: Grad::Rule(|g, c| {
        let total = g.shape(c.x(0)).dims()[c.attr(0)] as i64;
        Ok(smallvec![Some(strided_pad(g, c.grad, c.attr(0), c.attr(1), c.attr(2), total as usize, 0.0)?)])
    }),
    samples: &["f(5,3), 0, 1, 4", "f(5,3), 0, 0, 5, 2", "f(5,3), -1, -2, nil", "f(5,3), 0, 4, 2", "f(7), 0, 1, nil, 3"],
    smooth: true,
    ..Op::BASE
};

pub static NARROW: Op = Op {
    name: "narrow",
    sig: "x: tensor, dim: int, start: int, length: int",
    doc: "x (...) -> `length` elements of dim `dim` from `start` on.",
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let at = g.shape(x).axis("narrow", a.int(1)?)?;
        let n = g.shape(x).dims()[at] as i64;
        let (start, len) = (a.int(2)?, a.int(3)?);
        let lo = if start < 0 { start + n } else { start };
        if lo < 0 || len < 0 || lo > n || len > n - lo {
            let message = format!("start {start} and length {len} do not fit dim {} of size {n}", a.int(1)?);
            let hint = format!("start counts from 0, or from the back if negative; start + length is at most {n}");
            return Err(Error::argument("narrow", message).hint(hint));
        }
        slice(g, x, at, lo as usize, (lo + len) as usize, 1).map(one)
    }),
    samples: &["f(5,3), 0, 1, 2", "f(5,3), 1, -2, 2", "f(5), 0, 2, 0"],
    smooth: true,
    ..Op::BASE
};

/// Element `index` of axis `at`; the axis is removed.
pub fn select(g: &mut Graph, x: NodeId, at: usize, index: i64, op: &str) -> Result<NodeId> {
    let shape = g.shape(x);
    let n = shape.dims()[at] as i64;
    let i = if index < 0 { index + n } else { index };
    if i < 0 || i >= n {
        return Err(Error::argument(op, format!("index {index} is out of range for dim {at} of size {n}"))
            .hint("tensor coordinates count from 0"));
    }
    let y = slice(g, x, at, i as usize, i as usize + 1, 1)?;
    reshape(g, y, shape.remove(at))
}

pub static SELECT: Op = Op {
    name: "select",
    sig: "x: tensor, dim: int, index: int",
    doc: "x (...) -> the slice at `index` of dim `dim`, which is removed. Indices count from 0, negative ones from the\n\
          back.",
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let at = g.shape(x).axis("select", a.int(1)?)?;
        select(g, x, at, a.int(2)?, "select").map(one)
    }),
    samples: &["f(2,3), 0, 1", "f(2,3,4), -1, -1", "f(2,3,4), 1, 0"],
    smooth: true,
    ..Op::BASE
};

/// The inverse of `slice` (strided padding): `attrs` [axis, lo, step, total, fill bits].
pub static STRIDED_PAD: Op = Op {
    name: "strided_pad",
    shard: Some(crate::sharding::pad),
    regroups: Some(&crate::sharding::PADDING),
    class: Class::Library,
    infer: |i| Ok(Meta { shape: i.shape(0).with(i.attr(0), i.attr(3)), dtype: i.dtype(0) }),
    grad: Grad::Rule(|g, c| {
        let (at, lo, step) = (c.attr(0), c.attr(1), c.attr(2));
        let n = g.shape(c.x(0)).dims()[at];
        if n == 0 {
            return Ok(smallvec![None]);
        }
        Ok(smallvec![Some(slice(g, c.grad, at, lo, lo + (n - 1) * step + 1, step)?)])
    }),
    smooth: true,
    ..Op::BASE
};

/// `x` at positions `lo + i * step` of an axis of size `total`, `fill` elsewhere.
pub fn strided_pad(
    g: &mut Graph,
    x: NodeId,
    at: usize,
    lo: usize,
    step: usize,
    total: usize,
    fill: f64,
) -> Result<NodeId> {
    if g.shape(x).dims()[at] == total && lo == 0 && step == 1 {
        return Ok(x);
    }
    g.push(&STRIDED_PAD, &[x], &[at as i64, lo as i64, step as i64, total as i64, fill.to_bits() as i64])
}

pub static PAD: Op = Op {
    name: "pad",
    sig: "x: tensor, pads: ints, *, value: float = 0.0",
    doc: "x (...) -> padded with a constant: pads = {before, after} of the last dim, then of the one before it, and so on,\n\
          as in PyTorch. Negative pads crop.",
    call: Some(|g, a| {
        let mut x = a.tensor(0)?;
        let pads = a.ints(1)?;
        let rank = g.shape(x).rank();
        if pads.len() % 2 != 0 || pads.len() > 2 * rank {
            let message =
                format!("{} pads for a tensor of rank {rank}; there must be two per dim, last dim first", pads.len());
            return Err(Error::argument("pad", message));
        }
        for (k, pair) in pads.chunks(2).enumerate() {
            let at = rank - 1 - k;
            let n = g.shape(x).dims()[at] as i128;
            let (before, after) = (i128::from(pair[0]), i128::from(pair[1]));
            let (cut, end) = ((-before).max(0), n + after.min(0));
            if end < cut {
                let message = format!("pads {{{before}, {after}}} would give dim {at} of size {n} a negative size");
                return Err(
                    Error::shape("pad", message).hint(format!("together, negative pads cut at most {n} elements"))
                );
            }
            let total = size(
                "pad",
                format_args!("dim {at} of size {n}, padded by {{{before}, {after}}},"),
                n + before + after,
            )?;
            x = slice(g, x, at, cut as usize, end as usize, 1)?;
            x = strided_pad(g, x, at, before.max(0) as usize, 1, total, a.float(2)?)?;
        }
        Ok(one(x))
    }),
    samples: &["f(2,3), [1,2]", "f(2,3), [1,0,0,2], value=1.5", "f(2,3), [-1,1]", "f(2,0), [1,1]", "f(2,3), [0,0]"],
    smooth: true,
    ..Op::BASE
};

/// Sliding windows along an axis: `attrs` [axis, size, step, dilation]; the window is a new last dim.
pub fn window(g: &mut Graph, x: NodeId, at: usize, size: usize, step: usize, dilation: usize) -> Result<NodeId> {
    // As in `slice`: a larger step or dilation gives the same windows.
    let n = g.shape(x).dims()[at].max(1);
    let (step, dilation) = (step.min(n), dilation.min(n));
    g.push(&UNFOLD, &[x], &[at as i64, size as i64, step as i64, dilation as i64])
}

/// Number of windows that fit.
pub fn windows(n: usize, size: usize, step: usize, dilation: usize) -> usize {
    let reach = dilation.saturating_mul(size.saturating_sub(1)).saturating_add(1);
    if n < reach { 0 } else { (n - reach) / step + 1 }
}

pub static UNFOLD: Op = Op {
    name: "unfold",
    sig: "x: tensor, dim: int, size: int, step: int = 1",
    doc: "x (..., L, ...) -> (..., N, ..., size): all windows of `size` elements along `dim`, `step` apart, as a new last dim.\n\
          N = (L - size) // step + 1. This is a view: overlapping windows share memory.",
    shard: Some(crate::sharding::windows),
    class: Class::View(|l, attrs, out| {
        let (at, step, dilation) = (attrs[0] as usize, attrs[2] as isize, attrs[3] as isize);
        let mut y = Layout { shape: *out, strides: l.strides, offset: l.offset };
        y.strides[out.rank() - 1] = l.strides[at] * dilation;
        y.strides[at] = l.strides[at] * step;
        Some(y)
    }),
    infer: |i| {
        let (at, size) = (i.attr(0), i.attr(1));
        let n = windows(i.shape(0).dims()[at], size, i.attr(2), i.attr(3));
        let shape = i.shape(0).with(at, n);
        Ok(Meta { shape: shape.insert(shape.rank(), size)?, dtype: i.dtype(0) })
    },
    call: Some(|g, a| {
        let x = a.tensor(0)?;
        let at = g.shape(x).axis("unfold", a.int(1)?)?;
        let (n, size, step) = (g.shape(x).dims()[at] as i64, a.int(2)?, a.int(3)?);
        if size < 1 || size > n || step < 1 {
            let message = format!("windows of size {size} and step {step} do not fit a dim of size {n}");
            return Err(Error::argument("unfold", message).hint("size must be 1 to the dim's size, step 1 or more"));
        }
        window(g, x, at, size as usize, step as usize, 1).map(one)
    }),
    grad: Grad::Rule(|g, c| {
        let total = g.shape(c.x(0)).dims()[c.attr(0)] as i64;
        let mut attrs: SmallVec<[i64; 6]> = c.attrs.into();
        attrs.push(total);
        Ok(smallvec![Some(g.push(&COL2IM, &[c.grad], &attrs)?)])
    }),
    samples: &["f(7), 0, 3", "f(2,6), 1, 2, 2", "f(5,2), 0, 3, 2"],
    smooth: true,
    ..Op::BASE
};

/// The inverse of a window view, with overlaps summed (col2im): `attrs` [axis, size, step, dilation, total].
pub static COL2IM: Op = Op {
    name: "col2im",
    shard: Some(crate::sharding::windows),
    class: Class::Library,
    infer: |i| {
        let shape = i.shape(0);
        Ok(Meta { shape: shape.remove(shape.rank() - 1).with(i.attr(0), i.attr(4)), dtype: i.dtype(0) })
    },
    grad: Grad::Rule(|g, c| Ok(smallvec![Some(g.push(&UNFOLD, &[c.grad], &c.attrs[..4])?)])),
    smooth: true,
    ..Op::BASE
};
