//! Defines transposed convolution: the gradient of a convolution with respect to its input, as an op of its own.

use super::conv::{CONV2D_BACKWARD_INPUT, add_bias, conv_inputs, filter, of_one_row, record};
use super::spatial::{Attrs, FUSED, Sliding, Vec8, batched, per_dim, unbatched};
use super::{Args, Class, Expand, Op, Out, one, slicing};
use crate::Shape;
use crate::amp::Amp;
use crate::error::{Error, Result};
use crate::graph::{Graph, Infer, Meta, NodeId};
use crate::op::times;
use crate::shape;
use smallvec::{SmallVec, smallvec};

pub static OPS: &[&Op] = &[&CONV_TRANSPOSE1D, &CONV_TRANSPOSE2D];

/// `attrs`: [stride.., padding.., dilation.., output padding.., groups].
fn transpose_sliding(attrs: &[i64], weight: Shape) -> (Sliding, Vec8, usize) {
    let n = weight.rank() - 2;
    let mut all: Attrs = weight.dims()[2..].iter().map(|&k| k as i64).collect();
    for part in [0, 1, 1, 2] {
        all.extend_from_slice(&attrs[part * n..(part + 1) * n]);
    }
    let s = Sliding::of(&all, n);
    let extra = attrs[3 * n..4 * n].iter().map(|&v| v as usize).collect();
    (s, extra, attrs[4 * n] as usize)
}

/// The size that dim `d` of `size` positions spans before padding is removed.
fn span(s: &Sliding, d: usize, size: usize) -> i128 {
    let wide = |n: usize| n as i128;
    if size == 0 { 0 } else { wide(size - 1) * wide(s.stride[d]) + wide(s.dilation[d]) * wide(s.kernel[d] - 1) + 1 }
}

/// The size of dim `d` of the result of a transposed convolution.
fn transposed_size(s: &Sliding, extra: &[usize], d: usize, size: usize) -> i128 {
    span(s, d, size) + extra[d] as i128 - 2 * s.before[d] as i128
}

/// The gradient of conv2d with respect to an input of the result's size.
const CONV_TRANSPOSE_EXPAND: Expand = |g, x, attrs| {
    let (s, extra, groups) = transpose_sliding(attrs, g.shape(x[1]));
    let (xs, ws) = (g.shape(x[0]), g.shape(x[1]));
    let mut dims: Vec8 = smallvec![xs.dims()[0], ws.dims()[1] * groups];
    for (d, &size) in xs.dims()[2..].iter().enumerate() {
        dims.push(shape::size("conv_transpose", format_args!("dim {}", d + 2), transposed_size(&s, &extra, d, size))?);
    }
    let (out, dtype) = (Shape::new(&dims)?, g.dtype(x[0]));
    if xs.dims()[2..].contains(&0) {
        let y = g.filled(0.0, out, dtype)?;
        return add_bias(g, y, x.get(2)).map(one);
    }
    // An output padding of a stride or more has the size of further positions, where x is zero.
    let mut y = x[0];
    for d in 0..s.n() {
        let size = xs.dims()[d + 2];
        y = slicing::strided_pad(g, y, d + 2, 0, 1, size + extra[d] / s.stride[d], 0.0)?;
    }
    let padding = s.before.iter().chain(&s.after);
    let options = s.stride.iter().chain(padding).chain(&s.dilation).chain([&groups]).chain(out.dims());
    let attrs: SmallVec<[i64; 16]> = options.map(|&v| v as i64).collect();
    let mut inputs: SmallVec<[NodeId; 4]> = smallvec![x[1], y];
    inputs.extend(x.get(2).copied());
    record(g, &CONV2D_BACKWARD_INPUT, &inputs, &attrs).map(one)
};

fn infer_conv_transpose(i: &Infer) -> Result<Meta> {
    let (s, extra, groups) = transpose_sliding(i.attrs, i.shape(1));
    let channels = shape::size(i.op, "dim 1", i.shape(1).dims()[1] as i128 * groups as i128)?;
    let mut dims: Vec8 = smallvec![i.shape(0).dims()[0], channels];
    for (d, &size) in i.shape(0).dims()[2..].iter().enumerate() {
        let n = transposed_size(&s, &extra, d, size);
        if n <= 0 {
            let message = format!("padding {} leaves nothing of dim {} of size {size}", s.before[d], d + 2);
            return Err(Error::shape(i.op, message));
        }
        let what = format_args!("dim {} (stride {}, dilation {})", d + 2, s.stride[d], s.dilation[d]);
        dims.push(shape::size(i.op, what, n)?);
    }
    Ok(Meta { shape: Shape::new(&dims)?, dtype: i.dtype(0) })
}

fn call_conv_transpose(g: &mut Graph, a: &Args, n: usize) -> Result<Out> {
    let op = a.op.name;
    let (x, added) = batched(g, a, n)?;
    let groups = a.int(6)?;
    let (stride, dilation, extra) =
        (per_dim(a, 3, "stride", n, 1)?, per_dim(a, 7, "dilation", n, 1)?, per_dim(a, 5, "output_padding", n, 0)?);
    for d in 0..n {
        if extra[d] >= stride[d].max(dilation[d]) {
            let message = format!(
                "output_padding is {}; it must be below stride ({}) or dilation ({})",
                extra[d], stride[d], dilation[d]
            );
            return Err(Error::argument(op, message));
        }
    }
    let mut attrs: Attrs = stride.into_iter().collect();
    attrs.extend(per_dim(a, 4, "padding", n, 0)?);
    attrs.extend(dilation);
    attrs.extend(extra);
    attrs.push(groups);
    let want = if n == 1 { "(C, O / groups, k)" } else { "(C, O / groups, kh, kw)" };
    let c = g.shape(x).dims()[1];
    if groups < 1 || !c.is_multiple_of(groups as usize) {
        return Err(Error::argument(op, format!("{c} channels cannot be split into {groups} equal groups")));
    }
    let inputs = conv_inputs(g, a, x, n, want, |w| w.dims()[1].saturating_mul(groups as usize))?;
    let w = g.shape(inputs[1]);
    if w.dims()[0] != c {
        return Err(Error::shape(op, format!("x has {c} channels, weight is {w}; its first dim must be {c}")));
    }
    let y = g.push(a.op, &inputs, &attrs)?;
    unbatched(g, y, added)
}

const CONV_TRANSPOSE: Op = Op {
    infer: infer_conv_transpose,
    amp: Amp::Low,
    flops: Some(|w| times([2, w.numel(0), filter(w.inputs[1])])),
    ..FUSED
};

/// Inputs: x, weight, bias?; `attrs`: [stride, padding, dilation, output padding, groups].
pub static CONV_TRANSPOSE1D: Op = Op {
    name: "conv_transpose1d",
    class: Class::Fused(|g, x, attrs| of_one_row(g, &CONV_TRANSPOSE2D, x, attrs, [1, 0, 1, 0])),
    sig: "x: tensor, weight: tensor, bias: tensor?, *, stride: ints = 1, padding: ints = 0, output_padding: ints = 0, groups: int = 1, dilation: ints = 1",
    doc: "x (N, C, L), weight (C, O / groups, k), bias (O) -> (N, O, M): the gradient of conv1d with respect to its input.\n\
          M = (L - 1) stride - 2 padding + dilation (k - 1) + output_padding + 1. x may be (C, L). Rounds as conv1d does.",
    call: Some(|g, a| call_conv_transpose(g, a, 1)),
    samples: &[
        "f(2,3,5), f(3,4,3), f(4)",
        "f(2,3,5), f(3,4,3), nil, stride=2, padding=1, output_padding=1",
        "f(2,4,5), f(4,3,2), f(6), groups=2",
        "f(3,5), f(3,2,2)",
    ],
    ..CONV_TRANSPOSE
};

/// Inputs: x, weight, bias?; `attrs`: [stride h, w, padding h, w, dilation h, w, output padding h, w, groups].
pub static CONV_TRANSPOSE2D: Op = Op {
    name: "conv_transpose2d",
    class: Class::Fused(CONV_TRANSPOSE_EXPAND),
    sig: "x: tensor, weight: tensor, bias: tensor?, *, stride: ints = 1, padding: ints = 0, output_padding: ints = 0, groups: int = 1, dilation: ints = 1",
    doc: "x (N, C, H, W), weight (C, O / groups, kh, kw), bias (O) -> (N, O, OH, OW): the gradient of conv2d with respect to\n\
          its input. OH = (H - 1) stride - 2 padding + dilation (kh - 1) + output_padding + 1, OW likewise. Options are one\n\
          int or {h, w}. x may be (C, H, W). Rounds as conv2d does.",
    call: Some(|g, a| call_conv_transpose(g, a, 2)),
    samples: &[
        "f(2,3,4,5), f(3,4,3,3), f(4)",
        "f(2,3,4,5), f(3,4,3,2), nil, stride=2, padding=1, output_padding=1",
        "f(1,4,3,3), f(4,2,3,3), f(4), groups=2, dilation=2",
        "f(3,4,4), f(3,2,2,2), nil, stride=[2,3]",
        "f(1,2,3,3), f(2,2,1,1), nil, stride=2, output_padding=1",
    ],
    ..CONV_TRANSPOSE
};
