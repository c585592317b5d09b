//! Defines max and average pooling as fused nodes that reduce the windows of an image.

use super::spatial::{Attrs, FUSED, Sliding, Vec8, batched, check_ratio, per_dim, product, unbatched};
use super::{Args, Class, Expand, Grad, Op, Out, one};
use crate::error::{Error, Result};
use crate::graph::{Graph, Infer, Meta, NodeId};
use crate::shape::Dims;
use crate::{DType, Shape};
use smallvec::smallvec;

pub static OPS: &[&Op] =
    &[&MAX_POOL1D, &MAX_POOL2D, &MAX_POOL2D_BACKWARD, &AVG_POOL1D, &AVG_POOL2D, &ADAPTIVE_AVG_POOL2D];

/// Pools for which a device with kernels for convolutions has kernels too, for any layout of the images.
pub static POOLS: &[&Op] = &[&MAX_POOL2D, &MAX_POOL2D_BACKWARD];

/// `attrs` of a pool: [kernel.., stride.., before.., after.., dilation.., count_include_pad]. `after` exceeds `before`
/// by what the last window needs beyond the end (ceil_mode).
fn infer_pool(i: &Infer) -> Result<Meta> {
    i.float(0)?;
    let x = i.shape(0);
    let s = Sliding::of(i.attrs, x.rank() - 2);
    let mut dims: Vec8 = x.dims()[..2].into();
    dims.extend(s.out(i.op, &x.dims()[2..])?);
    // The windows are elements too, those beyond x included.
    let elements: u128 = dims.iter().chain(&s.kernel).map(|&d| d as u128).product();
    if elements > crate::shape::MAX_NUMEL as u128 {
        let message = format!("{elements} elements in windows of {} are more than 2^48", Dims(&s.kernel));
        return Err(Error::argument(i.op, message).hint("a kernel is smaller than the image with its padding"));
    }
    Ok(Meta { shape: Shape::new(&dims)?, dtype: i.dtype(0) })
}

/// Elements to append so that a window that starts inside x (or its padding before) is complete, as in PyTorch.
fn overhang(size: usize, kernel: i64, stride: i64, padding: i64, dilation: i64) -> i64 {
    let (size, reach) = (size as i64, dilation * (kernel - 1) + 1);
    let mut last = (size + 2 * padding - reach + stride - 1).div_euclid(stride);
    if last * stride >= size + padding {
        last -= 1;
    }
    (last * stride + reach - size - 2 * padding).max(0)
}

/// Arguments: x, kernel, stride?, padding, then for max pools dilation, for average pools count_include_pad; ceil_mode.
fn call_pool(g: &mut Graph, a: &Args, n: usize, max: bool) -> Result<Out> {
    let (x, added) = batched(g, a, n)?;
    let x = g.to_float(x)?;
    let kernel = per_dim(a, 1, "kernel", n, 1)?;
    let stride = if a.is_none(2) { kernel.clone() } else { per_dim(a, 2, "stride", n, 1)? };
    let padding = per_dim(a, 3, "padding", n, 0)?;
    for d in 0..n {
        if padding[d] > kernel[d] / 2 {
            let message = format!("padding is {}; it must be at most half the kernel ({})", padding[d], kernel[d]);
            return Err(Error::argument(a.op.name, message));
        }
    }
    let dilation = if max { per_dim(a, 4, "dilation", n, 1)? } else { smallvec![1; n] };
    let sizes = g.shape(x);
    let after = |d: usize| {
        let more = match a.bool(5) {
            true => overhang(sizes.dims()[d + 2], kernel[d], stride[d], padding[d], dilation[d]),
            false => 0,
        };
        padding[d] + more
    };
    let mut attrs: Attrs = kernel.iter().copied().collect();
    attrs.extend_from_slice(&stride);
    attrs.extend_from_slice(&padding);
    attrs.extend((0..n).map(after));
    attrs.extend(dilation);
    attrs.push(i64::from(max || a.bool(4)));
    let y = g.push(a.op, &[x], &attrs)?;
    unbatched(g, y, added)
}

const MAX_POOL_EXPAND: Expand = |g, x, attrs| {
    let s = Sliding::of(attrs, g.shape(x[0]).rank() - 2);
    let w = s.windows(g, x[0], f64::NEG_INFINITY)?;
    g.max(w, &s.kernel_axes(), false).map(one)
};

const MAX_POOL: Op = Op { class: Class::Fused(MAX_POOL_EXPAND), infer: infer_pool, smooth: false, ..FUSED };

pub static MAX_POOL1D: Op = Op {
    name: "max_pool1d",
    sig: "x: tensor, kernel: ints, *, stride: ints?, padding: ints = 0, dilation: ints = 1, ceil_mode: bool = false",
    doc: "x (N, C, L) -> (N, C, M): the largest element of each window. See max_pool2d.",
    call: Some(|g, a| call_pool(g, a, 1, true)),
    samples: &[
        "f(2,3,8), 2",
        "f(2,3,8), 3, stride=2, padding=1",
        "f(3,8), 2, dilation=2",
        "f(2,3,8), 3, ceil_mode=true",
        "f(2,3,6), 2, stride=3, padding=1, ceil_mode=true",
    ],
    ..MAX_POOL
};

pub static MAX_POOL2D: Op = Op {
    name: "max_pool2d",
    sig: "x: tensor, kernel: ints, *, stride: ints?, padding: ints = 0, dilation: ints = 1, ceil_mode: bool = false",
    doc: "x (N, C, H, W) -> (N, C, OH, OW): the largest element of each window of `kernel`, one int or {h, w}, `stride` apart\n\
          (the kernel's size unless given). Padding counts as -inf. Equal elements share the gradient (PyTorch gives it to\n\
          the first). Sizes as in conv2d; with ceil_mode they are rounded up, so that the last window may extend beyond the\n\
          end if it starts inside x or the padding before it. x may be (C, H, W).",
    shard: Some(crate::sharding::images_and_channels),
    call: Some(|g, a| call_pool(g, a, 2, true)),
    grad: Grad::Rule(|g, c| Ok(smallvec![Some(g.push(&MAX_POOL2D_BACKWARD, &[c.x(0), c.out, c.grad], c.attrs)?)])),
    samples: &[
        "f(2,3,6,8), 2",
        "f(2,3,6,7), 3, stride=2, padding=1",
        "f(3,6,6), [2,3], dilation=[2,1]",
        "f(0,3,4,4), 2",
        "f(2,3,6,7), 3, stride=2, ceil_mode=true",
        "f(2,3,6,7), [2,3], stride=[3,2], padding=1, dilation=[2,1], ceil_mode=true",
    ],
    ..MAX_POOL
};

/// Inputs: x, the result, its gradient; `attrs` as the pool. The decomposition does not use the result.
pub static MAX_POOL2D_BACKWARD: Op = Op {
    name: "max_pool2d_backward",
    shard: Some(crate::sharding::images_and_channels),
    class: Class::Fused(|g, x, attrs| {
        let found = crate::grad::through(g, MAX_POOL_EXPAND, &x[..1], attrs, &[Some(x[2])], &[true])?;
        match found.into_iter().flat_map(|f| f.1).next() {
            Some(d) => Ok(one(d)),
            None => {
                let (shape, dtype) = (g.shape(x[0]), g.dtype(x[0]));
                g.filled(0.0, shape, dtype).map(one)
            }
        }
    }),
    infer: |i| Ok(Meta { shape: i.shape(0), dtype: i.dtype(0) }),
    smooth: false,
    ..FUSED
};

/// Divides sums over windows by their element counts. Without count_include_pad the counts exclude the padding; they
/// always exclude what the last window covers beyond it.
const AVG_POOL: Op = Op {
    class: Class::Fused(|g, x, attrs| {
        let shape = g.shape(x[0]);
        let s = Sliding::of(attrs, shape.rank() - 2);
        let axes = s.kernel_axes();
        let w = s.windows(g, x[0], 0.0)?;
        let (all, plain) = (attrs[5 * s.n()] != 0, s.before == s.after);
        let whole = plain && (all || s.before.iter().all(|&p| p == 0));
        g.island(w, |g, w| {
            let sum = g.sum(w, &axes, false)?;
            if whole {
                return g.mul_c(sum, 1.0 / product(&s.kernel) as f64);
            }
            let mut counts = shape.with(0, 1).with(1, 1);
            let mut inner = Sliding::of(attrs, s.n());
            if all {
                for d in 0..s.n() {
                    counts = counts.with(d + 2, shape.dims()[d + 2] + 2 * s.before[d]);
                    inner.before[d] = 0;
                    inner.after[d] -= s.before[d];
                }
            }
            let inside = g.filled(1.0, counts, g.dtype(w))?;
            let count = inner.windows(g, inside, 0.0)?;
            let count = g.sum(count, &axes, false)?;
            g.div(sum, count)
        })
        .map(one)
    }),
    infer: infer_pool,
    ..FUSED
};

pub static AVG_POOL1D: Op = Op {
    name: "avg_pool1d",
    sig: "x: tensor, kernel: ints, *, stride: ints?, padding: ints = 0, count_include_pad: bool = true, ceil_mode: bool = false",
    doc: "x (N, C, L) -> (N, C, M): the mean of each window. See avg_pool2d.",
    call: Some(|g, a| call_pool(g, a, 1, false)),
    samples: &[
        "f(2,3,8), 2",
        "f(2,3,8), 3, stride=2, padding=1",
        "f(3,8), 3, padding=1, count_include_pad=false",
        "f(2,3,8), 3, ceil_mode=true",
        "f(2,3,6), 4, stride=3, padding=2, ceil_mode=true",
    ],
    ..AVG_POOL
};

pub static AVG_POOL2D: Op = Op {
    name: "avg_pool2d",
    sig: "x: tensor, kernel: ints, *, stride: ints?, padding: ints = 0, count_include_pad: bool = true, ceil_mode: bool = false",
    doc: "x (N, C, H, W) -> (N, C, OH, OW): the mean of each window of `kernel`, one int or {h, w}, `stride` apart (the\n\
          kernel's size unless given). Padding counts as 0, or not at all if count_include_pad is false. Sizes as in\n\
          conv2d; with ceil_mode they are rounded up, so that the last window may extend beyond the end if it starts inside\n\
          x or the padding before it. Elements beyond the padding never count. x may be (C, H, W).",
    call: Some(|g, a| call_pool(g, a, 2, false)),
    samples: &[
        "f(2,3,6,8), 2",
        "f(2,3,6,7), 3, stride=2, padding=1",
        "f(3,6,6), [2,3], padding=1, count_include_pad=false",
        "f(0,3,4,4), 2",
        "f(2,3,6,7), 3, stride=2, ceil_mode=true",
        "f(2,3,6,7), [2,3], stride=[3,2], padding=1, ceil_mode=true",
        "f(2,3,6,7), 3, stride=2, padding=1, count_include_pad=false, ceil_mode=true",
    ],
    ..AVG_POOL
};

/// The matrix (out, n) whose row i averages elements floor(i n / out) to ceil((i + 1) n / out) - 1.
fn averaging(g: &mut Graph, out: usize, n: usize, dtype: DType) -> Result<NodeId> {
    check_ratio("adaptive_avg_pool2d", out, n)?;
    let i = g.iota_along(out, 0, 2)?;
    let size = g.constant_like(n as f64, i);
    let parts = g.constant_like(out as f64, i);
    let lo = g.mul(i, size)?;
    let hi = g.add_(lo, size)?;
    let hi = g.add_c(hi, out as f64 - 1.0)?;
    let lo = g.map(&super::elementwise::FLOOR_DIV, &[lo, parts])?;
    let hi = g.map(&super::elementwise::FLOOR_DIV, &[hi, parts])?;
    let j = g.iota_along(n, 1, 2)?;
    let (a, b) = (g.ge(j, lo)?, g.lt(j, hi)?);
    let inside = g.logical_and(a, b)?;
    let inside = g.cast(inside, dtype)?;
    let count = g.sub(hi, lo)?;
    let count = g.cast(count, dtype)?;
    g.div(inside, count)
}

/// `attrs`: [out h, out w].
pub static ADAPTIVE_AVG_POOL2D: Op = Op {
    name: "adaptive_avg_pool2d",
    sig: "x: tensor, size: ints",
    doc: "x (N, C, H, W) -> (N, C, OH, OW) for size OH = OW or {OH, OW}: means of windows that cover x as evenly as\n\
          possible with whole elements. Window i of OH is rows floor(i H / OH) to ceil((i + 1) H / OH) - 1. x may be (C, H,\n\
          W).",
    class: Class::Fused(|g, x, attrs| {
        let shape = g.shape(x[0]);
        let (h, w) = (shape.dims()[2], shape.dims()[3]);
        let (oh, ow) = (attrs[0] as usize, attrs[1] as usize);
        if h.is_multiple_of(oh) && w.is_multiple_of(ow) {
            let y = g.reshape(x[0], &[shape.dims()[0], shape.dims()[1], oh, h / oh, ow, w / ow])?;
            return g.mean(y, &[3, 5], false).map(one);
        }
        g.island(x[0], |g, x| {
            let dtype = g.dtype(x);
            let (rows, cols) = (averaging(g, oh, h, dtype)?, averaging(g, ow, w, dtype)?);
            let cols = g.t(cols)?;
            let y = g.matmul(x, cols)?;
            g.matmul(rows, y)
        })
        .map(one)
    }),
    infer: |i| {
        i.float(0)?;
        Ok(Meta { shape: Shape::new(i.shape(0).with(2, i.attr(0)).with(3, i.attr(1)).dims())?, dtype: i.dtype(0) })
    },
    call: Some(|g, a| {
        let (x, added) = batched(g, a, 2)?;
        let x = g.to_float(x)?;
        let size = per_dim(a, 1, "size", 2, 1)?;
        if g.shape(x).dims()[2..].contains(&0) {
            return Err(Error::shape(a.op.name, format!("no elements to average in shape {}", g.shape(x))));
        }
        let y = g.push(a.op, &[x], &size)?;
        unbatched(g, y, added)
    }),
    samples: &["f(2,3,6,8), 1", "f(2,3,6,8), [3,4]", "f(2,3,5,7), [3,2]", "f(3,4,4), 6"],
    ..FUSED
};
