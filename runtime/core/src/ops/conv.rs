//! Defines convolution and its gradients as fused nodes that decompose into padding, window views and matrix products.
//!
//! A convolution reads its windows as columns (N, groups, C/groups * kernel, positions), so the product with the weight already
//! has the layout of the result (im2col).

use super::matmul::LINEAR;
use super::spatial::{Attrs, Dims2, FUSED, MAX_OPTION, Sliding, Vec8, batched, per_dim, product, unbatched};
use super::{Args, Class, Expand, Grad, GradCtx, Grads, Op, Out, movement, one, slicing};
use crate::amp::Amp;
use crate::error::{Error, Result};
use crate::graph::{Graph, Infer, Meta, NodeId};
use crate::op::times;
use crate::shape::Dims;
use crate::{DType, Shape};
use smallvec::{SmallVec, smallvec};

pub static OPS: &[&Op] = &[&CONV1D, &CONV2D, &CONV2D_BACKWARD_INPUT, &CONV2D_BACKWARD_WEIGHT];

/// Convolutions of images (N, C, H, W) for which a device may have kernels, which may need channels last.
pub static OVER_IMAGES: &[&Op] = &[&CONV2D, &CONV2D_BACKWARD_INPUT, &CONV2D_BACKWARD_WEIGHT];
/// `attrs` of a convolution: [stride.., before.., after.., dilation.., groups]. The weight's shape contains the kernel
/// size.
fn conv_sliding(attrs: &[i64], weight: Shape) -> (Sliding, usize) {
    let n = weight.rank() - 2;
    let mut all: Attrs = weight.dims()[2..].iter().map(|&k| k as i64).collect();
    all.extend_from_slice(&attrs[..4 * n]);
    (Sliding::of(&all, n), attrs[4 * n] as usize)
}

/// Weight (O, C/groups, kernel...) as (O, K), or (groups, O/groups, K).
fn weight_matrix(g: &mut Graph, w: NodeId, groups: usize) -> Result<NodeId> {
    let shape = g.shape(w);
    let (o, k) = (shape.dims()[0], product(&shape.dims()[1..]));
    if groups == 1 { g.reshape(w, &[o, k]) } else { g.reshape(w, &[groups, o / groups, k]) }
}

/// Adds bias (C) to y (N, C, ...).
pub(super) fn add_bias(g: &mut Graph, y: NodeId, bias: Option<&NodeId>) -> Result<NodeId> {
    let Some(&b) = bias else { return Ok(y) };
    let mut dims: Vec8 = smallvec![1; g.shape(y).rank() - 1];
    dims[0] = g.shape(b).numel();
    let b = g.reshape(b, &dims)?;
    g.add_(y, b)
}

/// Applies `f` to 16-bit inputs in f32 and rounds its result once; other inputs are passed on as they are.
///
/// 16-bit floats are exact in TF32 and `f` multiplies nothing else, so its products may run in TF32.
fn round_once(g: &mut Graph, x: &[NodeId], f: impl FnOnce(&mut Graph, &[NodeId]) -> Result<NodeId>) -> Result<NodeId> {
    let dtype = g.dtype(x[0]);
    if !dtype.is_half() {
        return f(g, x);
    }
    let mut g = g.scope();
    let wide = x.iter().map(|&x| g.widen(x)).collect::<Result<SmallVec<[NodeId; 4]>>>()?;
    g.modes.tf32 = true;
    let y = f(&mut g, &wide)?;
    g.cast(y, dtype)
}

/// One product, which rounds its sum itself; with a bias, the sum is rounded after the addition.
const CONV_EXPAND: Expand = |g, x, attrs| {
    if x.len() == 2 {
        return unfold_and_multiply(g, x, attrs).map(one);
    }
    round_once(g, x, |g, x| {
        let y = unfold_and_multiply(g, x, attrs)?;
        add_bias(g, y, x.get(2))
    })
    .map(one)
};

/// The convolution of x with the weight, without a bias.
fn unfold_and_multiply(g: &mut Graph, x: &[NodeId], attrs: &[i64]) -> Result<NodeId> {
    let (s, groups) = conv_sliding(attrs, g.shape(x[1]));
    let n = s.n();
    let cols = s.windows(g, x[0], 0.0)?;
    let shape = g.shape(cols);
    let (batch, c) = (shape.dims()[0], shape.dims()[1]);
    let out: Vec8 = shape.dims()[2..2 + n].into();
    // (N, C, positions, kernel) -> (N, C, kernel, positions): each row of the columns matrix belongs to one weight
    // element.
    let mut axes: Vec8 = smallvec![0, 1];
    axes.extend(s.kernel_axes());
    axes.extend(2..2 + n);
    let cols = g.permute(cols, &axes)?;
    let k = c / groups * product(&s.kernel);
    let cols = if groups == 1 {
        g.reshape(cols, &[batch, k, product(&out)])?
    } else {
        g.reshape(cols, &[batch, groups, k, product(&out)])?
    };
    let w = weight_matrix(g, x[1], groups)?;
    let y = g.matmul(w, cols)?;
    let mut dims: Vec8 = smallvec![batch, g.shape(x[1]).dims()[0]];
    dims.extend(out);
    g.reshape(y, &dims)
}

/// A one-dimensional convolution is one of an image of one row. `plain` is the value of each option along the rows.
pub(super) fn of_one_row(g: &mut Graph, op: &'static Op, x: &[NodeId], attrs: &[i64], plain: [i64; 4]) -> Result<Out> {
    let mut inputs: SmallVec<[NodeId; 4]> = x.into();
    for x in &mut inputs[..2] {
        *x = g.unsqueeze(*x, 2)?;
    }
    let (options, groups) = attrs.split_at(plain.len());
    let mut all: Attrs = plain.iter().zip(options).flat_map(|(&row, &column)| [row, column]).collect();
    all.extend_from_slice(groups);
    let y = record(g, op, &inputs, &all)?;
    let shape = g.shape(y).remove(2);
    movement::reshape(g, y, shape).map(one)
}

fn infer_conv(i: &Infer) -> Result<Meta> {
    let (s, _) = conv_sliding(i.attrs, i.shape(1));
    let mut dims: Vec8 = smallvec![i.shape(0).dims()[0], i.shape(1).dims()[0]];
    dims.extend(s.out(i.op, &i.shape(0).dims()[2..])?);
    Ok(Meta { shape: Shape::new(&dims)?, dtype: i.dtype(0) })
}

/// Promotes x (with batch), weight and bias to one dtype; the weight must have `rank` dims and the bias `out` elements.
pub(super) fn conv_inputs(
    g: &mut Graph,
    a: &Args,
    x: NodeId,
    n: usize,
    want: &str,
    out: impl Fn(Shape) -> usize,
) -> Result<SmallVec<[NodeId; 4]>> {
    let op = a.op.name;
    let w = a.tensor(1)?;
    let shape = g.shape(w);
    if shape.rank() != n + 2 || shape.numel() == 0 {
        return Err(Error::shape(op, format!("weight must be {want}, not {shape}")));
    }
    let mut inputs: SmallVec<[NodeId; 4]> = smallvec![x, w];
    if let Some(b) = a.opt_tensor(2) {
        let o = out(shape);
        if g.shape(b).dims() != [o] {
            return Err(Error::shape(op, format!("bias is {}, but must be {}", g.shape(b), Dims(&[o]))));
        }
        inputs.push(b);
    }
    let dtype = inputs.iter().fold(g.dtype(x), |d, &t| DType::promote(d, g.dtype(t))).to_float();
    for t in &mut inputs {
        *t = g.cast(*t, dtype)?;
    }
    Ok(inputs)
}

/// The padding of a convolution's input: for each dim the zeros before, then for each dim the zeros after.
fn conv_padding(a: &Args, n: usize, stride: &[i64], dilation: &[i64], weight: Shape) -> Result<(Dims2, Dims2)> {
    match a.str(4) {
        "" => {
            let padding = per_dim(a, 4, "padding", n, 0)?;
            Ok((padding.clone(), padding))
        }
        "valid" => Ok((smallvec![0; n], smallvec![0; n])),
        _ => {
            if let Some(s) = stride.iter().find(|s| **s != 1) {
                return Err(Error::argument(
                    a.op.name,
                    format!("padding is \"same\" and stride is {s}; \"same\" needs stride 1"),
                )
                .hint("a stride above 1 changes the size: give padding as numbers"));
            }
            // If the total is odd, the extra zero is at the end, as in PyTorch.
            let (mut before, mut after) = (Dims2::new(), Dims2::new());
            for d in 0..n {
                let (dilation, kernel) = (dilation[d], weight.dims()[2 + d]);
                let total = i128::from(dilation) * (kernel as i128 - 1);
                if total > i128::from(MAX_OPTION) {
                    let message = format!(
                        "padding \"same\" for a kernel of {kernel} with dilation {dilation} is {total}; at most {MAX_OPTION} is allowed"
                    );
                    return Err(Error::argument(a.op.name, message));
                }
                before.push(total as i64 / 2);
                after.push(total as i64 - total as i64 / 2);
            }
            Ok((before, after))
        }
    }
}

fn call_conv(g: &mut Graph, a: &Args, n: usize) -> Result<Out> {
    let op = a.op.name;
    let (x, added) = batched(g, a, n)?;
    let groups = a.int(6)?;
    let want = if n == 1 { "(O, C / groups, k)" } else { "(O, C / groups, kh, kw)" };
    let (stride, dilation) = (per_dim(a, 3, "stride", n, 1)?, per_dim(a, 5, "dilation", n, 1)?);
    let inputs = conv_inputs(g, a, x, n, want, |w| w.dims()[0])?;
    let (c, w) = (g.shape(x).dims()[1], g.shape(inputs[1]));
    let (before, after) = conv_padding(a, n, &stride, &dilation, w)?;
    let fits = groups >= 1
        && c.is_multiple_of(groups as usize)
        && w.dims()[0].is_multiple_of(groups as usize)
        && w.dims()[1] == c / groups as usize;
    if !fits {
        let message = format!(
            "x has {c} channels, weight is {w}, groups is {groups}: weight must be (O, {c} / groups, ...) and groups must divide O and {c}"
        );
        return Err(Error::shape(op, message));
    }
    let mut attrs: Attrs = stride.into_iter().collect();
    attrs.extend(before);
    attrs.extend(after);
    attrs.extend(dilation);
    attrs.push(groups);
    let y = record(g, a.op, &inputs, &attrs)?;
    unbatched(g, y, added)
}

/// Records a convolution of images or a transposed one.
///
/// With a kernel of one element and a bias, products take the place of the node in 16 bits: engines of cuDNN for such kernels round
/// their sums before they add the bias, and one product over the channels of each position is what they compute.
pub(super) fn record(g: &mut Graph, op: &'static Op, x: &[NodeId], attrs: &[i64]) -> Result<NodeId> {
    let weight = usize::from(op == &CONV2D);
    let of_images = op == &CONV2D || op == &CONV2D_BACKWARD_INPUT;
    if !of_images || x.len() < 3 || g.shape(x[weight]).dims()[2..] != [1, 1] {
        return g.push(op, x, attrs);
    }
    let mut x: SmallVec<[NodeId; 4]> = x.into();
    if let Some(low) = g.modes.autocast {
        x = crate::amp::cast_inputs(g, op.amp, low, &x)?;
    }
    if !g.dtype(x[0]).is_half() {
        return g.push(op, &x, attrs);
    }
    let (stride, padding, groups) = (&attrs[..2], &attrs[2..6], attrs[8]);
    let dense = groups == 1 && padding.iter().all(|p| *p == 0);
    match op == &CONV2D {
        true if dense => {
            let mut image = x[0];
            for d in 0..2 {
                let n = g.shape(image).dims()[2 + d];
                image = slicing::slice(g, image, 2 + d, 0, n, stride[d] as usize)?;
            }
            let weight = weight_matrix(g, x[1], 1)?;
            of_positions(g, image, weight, x[2])
        }
        false if dense && *stride == [1, 1] => {
            let weight = weight_matrix(g, x[0], 1)?;
            let weight = g.t(weight)?;
            of_positions(g, x[1], weight, x[2])
        }
        forward => Ok(if forward { CONV_EXPAND(g, &x, attrs)? } else { BACKWARD_INPUT_EXPAND(g, &x, attrs)? }[0]),
    }
}

/// Multiplies the channels of each position of an image (N, C, H, W) with a weight (O, C), and adds a bias (O).
fn of_positions(g: &mut Graph, image: NodeId, weight: NodeId, bias: NodeId) -> Result<NodeId> {
    let &[n, c, h, w] = g.shape(image).dims() else {
        return Err(Error::shape("conv2d", "this is a bug: a convolution that is not of images"));
    };
    let rows = g.permute(image, &[0, 2, 3, 1])?;
    let rows = g.reshape(rows, &[n * h * w, c])?;
    let y = g.push(&LINEAR, &[rows, weight, bias], &[])?;
    let outputs = g.shape(y).dims()[1];
    let y = g.reshape(y, &[n, h, w, outputs])?;
    g.permute(y, &[0, 3, 1, 2])
}

const CONV: Op = Op {
    infer: infer_conv,
    amp: Amp::Low,
    flops: Some(|w| times([2, w.out.numel() as u64, filter(w.inputs[1])])),
    ..FUSED
};

/// Elements of one filter of a weight: the products summed for one element of the result.
pub(super) fn filter(weight: Shape) -> u64 {
    weight.dims().iter().skip(1).map(|d| *d as u64).product()
}

/// Inputs: x, weight, bias?; `attrs`: [stride, padding before, after, dilation, groups].
pub static CONV1D: Op = Op {
    name: "conv1d",
    class: Class::Fused(|g, x, attrs| of_one_row(g, &CONV2D, x, attrs, [1, 0, 0, 1])),
    sig: "x: tensor, weight: tensor, bias: tensor?, *, stride: ints = 1, padding: ints|'same'|'valid' = 0, dilation: ints = 1, groups: int = 1",
    doc: "x (N, C, L), weight (O, C / groups, k), bias (O) -> (N, O, M): cross-correlation, as in PyTorch.\n\
          M = (L + 2 padding - dilation (k - 1) - 1) // stride + 1. x may be (C, L). padding \"same\" adds zeros so that M =\n\
          L and needs a stride of 1 (if their number is odd, the extra one is at the end); \"valid\" adds none. 16-bit floats\n\
          are summed in f32, with the bias, and rounded once.",
    call: Some(|g, a| call_conv(g, a, 1)),
    samples: &[
        "f(2,3,7), f(4,3,3), f(4)",
        "f(2,3,7), f(4,3,3), nil, stride=2, padding=1",
        "f(2,4,9), f(6,2,3), f(6), groups=2, dilation=2",
        "f(3,5), f(2,3,5)",
        "f(0,3,7), f(4,3,3)",
        "f(2,3,7), f(4,3,4), f(4), padding='same'",
        "f(2,3,7), f(4,3,3), padding='valid'",
    ],
    ..CONV
};

/// Inputs: x, weight, bias?; `attrs`: [stride h, w, padding before h, w, after h, w, dilation h, w, groups].
pub static CONV2D: Op = Op {
    name: "conv2d",
    shard: Some(crate::sharding::convolution),
    class: Class::Fused(CONV_EXPAND),
    sig: "x: tensor, weight: tensor, bias: tensor?, *, stride: ints = 1, padding: ints|'same'|'valid' = 0, dilation: ints = 1, groups: int = 1",
    doc: "x (N, C, H, W), weight (O, C / groups, kh, kw), bias (O) -> (N, O, OH, OW): cross-correlation, as in PyTorch.\n\
          OH = (H + 2 padding - dilation (kh - 1) - 1) // stride + 1, OW likewise. Options are one int or {h, w}.\n\
          x may be (C, H, W). padding \"same\" adds zeros so that OH = H and OW = W and needs a stride of 1 (if their number\n\
          is odd, the extra one is at the end); \"valid\" adds none. 16-bit floats are summed in f32, with the bias, and\n\
          rounded once; so are the gradients.",
    call: Some(|g, a| call_conv(g, a, 2)),
    grad: Grad::Rule(conv2d_rule),
    samples: &[
        "f(2,3,6,5), f(4,3,3,3), f(4)",
        "f(2,3,6,5), f(4,3,3,2), nil, stride=2, padding=1",
        "f(1,4,5,5), f(4,1,3,3), f(4), groups=4, padding=1",
        "f(2,4,7,6), f(6,2,3,2), f(6), groups=2, dilation=[2,1], stride=[1,2]",
        "f(3,4,4), f(2,3,1,1)",
        "f(0,3,5,5), f(4,3,3,3)",
        "f(2,3,5,4), f(4,3,3,2), f(4), padding='same'",
        "f(2,4,5,6), f(4,2,3,4), padding='same', dilation=[1,3], groups=2",
    ],
    ..CONV
};

/// The attributes of a gradient: those of the convolution and the shape of the result.
fn with_shape(attrs: &[i64], shape: Shape) -> Attrs {
    attrs[..9].iter().copied().chain(shape.dims().iter().map(|&d| d as i64)).collect()
}

/// The gradient of x, of the shape of `like`.
fn input_gradient(g: &mut Graph, w: NodeId, grad: NodeId, attrs: &[i64], like: NodeId) -> Result<NodeId> {
    let attrs = with_shape(attrs, g.shape(like));
    g.push(&CONV2D_BACKWARD_INPUT, &[w, grad], &attrs)
}

/// The gradient of the weight, of the shape of `like`.
fn weight_gradient(g: &mut Graph, x: NodeId, grad: NodeId, attrs: &[i64], like: NodeId) -> Result<NodeId> {
    let attrs = with_shape(attrs, g.shape(like));
    g.push(&CONV2D_BACKWARD_WEIGHT, &[x, grad], &attrs)
}

/// The gradients of the first two inputs if wanted, and of the bias if there is one.
fn gradients(
    g: &mut Graph,
    c: &GradCtx,
    first: impl FnOnce(&mut Graph) -> Result<NodeId>,
    second: impl FnOnce(&mut Graph) -> Result<NodeId>,
) -> Result<Grads> {
    let mut out: Grads = smallvec![None, None];
    if c.needs[0] {
        out[0] = Some(first(g)?);
    }
    if c.needs[1] {
        out[1] = Some(second(g)?);
    }
    if c.inputs.len() > 2 {
        out.push(if c.needs[2] { Some(g.sum(c.grad, &[0, 2, 3], false)?) } else { None });
    }
    Ok(out)
}

/// Records the gradients as separate nodes, for which a backend may have kernels. With y = conv(x, w) and its gradient
/// g, each of the three ops is linear in two of (x, w, g), and its gradients are the other two ops.
fn conv2d_rule(g: &mut Graph, c: &GradCtx) -> Result<Grads> {
    let (x, w, grad, attrs) = (c.x(0), c.x(1), c.grad, c.attrs);
    gradients(g, c, |g| input_gradient(g, w, grad, attrs, x), |g| weight_gradient(g, x, grad, attrs, w))
}

/// As `conv2d_rule`; the gradient of this op's result takes the place of x.
fn backward_input_rule(g: &mut Graph, c: &GradCtx) -> Result<Grads> {
    let (w, d, x, attrs) = (c.x(0), c.x(1), c.grad, c.attrs);
    gradients(g, c, |g| weight_gradient(g, x, d, attrs, w), |g| g.push(&CONV2D, &[x, w], &attrs[..9]))
}

/// As `conv2d_rule`; the gradient of this op's result takes the place of the weight.
fn backward_weight_rule(g: &mut Graph, c: &GradCtx) -> Result<Grads> {
    let (x, d, w, attrs) = (c.x(0), c.x(1), c.grad, c.attrs);
    gradients(g, c, |g| input_gradient(g, w, d, attrs, x), |g| g.push(&CONV2D, &[x, w], &attrs[..9]))
}

/// The shape at the end of the attributes of a backward op.
fn shape_at_end(attrs: &[i64]) -> Shape {
    let dims: Vec8 = attrs[9..].iter().map(|&d| d as usize).collect();
    Shape::of(&dims)
}

/// The gradient of one input of the convolution through its decomposition. Zeros replace that input, since its gradient
/// does not depend on it.
fn through_decomposition(g: &mut Graph, x: &[NodeId], attrs: &[i64], wanted: usize) -> Result<NodeId> {
    let (other, grad) = (x[0], x[1]);
    let dtype = g.dtype(other);
    let own = g.filled(0.0, shape_at_end(attrs), dtype)?;
    let inputs = if wanted == 0 { [own, other] } else { [other, own] };
    let wants = [wanted == 0, wanted == 1];
    let found = crate::grad::through(g, CONV_EXPAND, &inputs, &attrs[..9], &[Some(grad)], &wants)?;
    let mut sum: Option<NodeId> = None;
    for d in found.into_iter().flat_map(|f| f.1) {
        sum = Some(match sum {
            Some(sum) => g.add_(sum, d)?,
            None => d,
        });
    }
    // Without parts there is nothing to sum.
    sum.map_or_else(|| g.filled(0.0, shape_at_end(attrs), dtype), Ok)
}

/// Where windows overlap or a bias is added, sums follow the product, and the result is rounded after them.
const BACKWARD_INPUT_EXPAND: Expand = |g, x, attrs| {
    let (s, _) = conv_sliding(attrs, g.shape(x[0]));
    let apart = |d: usize| s.kernel[d] == 1 || (s.dilation[d] == 1 && s.stride[d] >= s.kernel[d]);
    if x.len() == 2 && (0..s.n()).all(apart) {
        return through_decomposition(g, x, attrs, 0).map(one);
    }
    round_once(g, x, |g, x| {
        let sum = through_decomposition(g, x, attrs, 0)?;
        add_bias(g, sum, x.get(2))
    })
    .map(one)
};

/// In 16 bits one product over the positions of all images, which rounds its sum itself; wider floats add a product for each
/// image.
const BACKWARD_WEIGHT_EXPAND: Expand = |g, x, attrs| {
    if !g.dtype(x[0]).is_half() {
        return through_decomposition(g, x, attrs, 1).map(one);
    }
    let shape = shape_at_end(attrs);
    let (s, groups) = conv_sliding(attrs, shape);
    let cols = s.windows(g, x[0], 0.0)?;
    let &[batch, c, oh, ow, kh, kw] = g.shape(cols).dims() else {
        return Err(Error::shape("conv2d", "this is a bug: a convolution that is not of images"));
    };
    let (o, per, positions) = (shape.dims()[0], c / groups, batch * oh * ow);
    // (groups, C / groups, kernel, N, positions): copied along the rows of images.
    let cols = g.reshape(cols, &[batch, groups, per, oh, ow, kh, kw])?;
    let cols = g.permute(cols, &[1, 2, 5, 6, 0, 3, 4])?;
    let d = g.reshape(x[1], &[batch, groups, o / groups, oh * ow])?;
    let d = g.permute(d, &[1, 2, 0, 3])?;
    let (left, right) = ([groups, o / groups, positions], [groups, per * kh * kw, positions]);
    let lead = usize::from(groups == 1);
    let (d, cols) = (g.reshape(d, &left[lead..])?, g.reshape(cols, &right[lead..])?);
    let cols = g.t(cols)?;
    let y = g.matmul(d, cols)?;
    movement::reshape(g, y, shape).map(one)
};

fn infer_conv_backward(i: &Infer) -> Result<Meta> {
    Ok(Meta { shape: shape_at_end(i.attrs), dtype: i.dtype(0) })
}

/// Inputs: weight, gradient, and a bias of x's channels if this is a transposed convolution; `attrs`: those of conv2d and
/// the four dims of x.
pub static CONV2D_BACKWARD_INPUT: Op = Op {
    name: "conv2d_backward_input",
    amp: Amp::Low,
    grad: Grad::Rule(backward_input_rule),
    shard: Some(crate::sharding::convolution_backward_input),
    class: Class::Fused(BACKWARD_INPUT_EXPAND),
    // Each element of the gradient is multiplied with each weight of its filter.
    flops: Some(|w| times([2, w.numel(1), filter(w.inputs[0])])),
    infer: infer_conv_backward,
    ..FUSED
};

/// Inputs: x, gradient; `attrs`: those of conv2d and the four dims of the weight.
pub static CONV2D_BACKWARD_WEIGHT: Op = Op {
    name: "conv2d_backward_weight",
    amp: Amp::Low,
    grad: Grad::Rule(backward_weight_rule),
    shard: Some(crate::sharding::convolution_backward_weight),
    class: Class::Fused(BACKWARD_WEIGHT_EXPAND),
    flops: Some(|w| times([2, w.numel(1), filter(w.out)])),
    infer: infer_conv_backward,
    ..FUSED
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{Value, call, create};

    fn conv(x: &[usize], w: &[usize], stride: &[i64], padding: &[i64]) -> Result<Shape> {
        let g = &mut Graph::new();
        let mut leaf = |dims: &[usize]| Value::Tensor(g.leaf(&create::LEAF, Shape::of(dims), DType::F32, &[], 0));
        let (x, w) = (leaf(x), leaf(w));
        let ints = |v: &[i64]| Value::Ints(v.into());
        let groups = Value::Number(crate::Number::Int(1));
        let args = Args::new(&CONV2D, [x, w, Value::None, ints(stride), ints(padding), ints(&[1]), groups]);
        call(g, &CONV2D, &args).map(|out| g.shape(out[0]))
    }

    #[test]
    fn shapes_follow_stride_and_padding() {
        assert_eq!(conv(&[2, 3, 8, 7], &[4, 3, 3, 3], &[2, 1], &[1]).unwrap().dims(), [2, 4, 4, 7]);
        assert_eq!(conv(&[3, 8, 8], &[4, 3, 3, 3], &[1], &[0]).unwrap().dims(), [4, 6, 6]);
    }

    /// The dtype of the products that an op decomposes into, and whether they may run in TF32.
    fn products(op: &'static Op, dims: &[&[usize]], attrs: &[i64]) -> (DType, bool) {
        let g = &mut Graph::new();
        let inputs: Vec<NodeId> =
            dims.iter().map(|d| g.leaf(&create::LEAF, Shape::of(d), DType::BF16, &[], 0)).collect();
        let Class::Fused(expand) = op.class else { panic!() };
        let out = expand(g, &inputs, attrs).unwrap()[0];
        assert_eq!((g.dtype(out), g.modes.tf32), (DType::BF16, false));
        // The last one: the decomposition of a gradient also records the forward product.
        let last = g.nodes().iter().rfind(|n| n.op == &crate::ops::matmul::MATMUL).unwrap();
        (last.dtype, last.tf32)
    }

    #[test]
    fn sums_after_a_product_are_in_f32() {
        let attrs =
            |stride: i64, shape: &[i64]| -> Vec<i64> { [&[stride, stride, 0, 0, 0, 0, 1, 1, 1], shape].concat() };
        let (image, w) = (&[2, 3, 6, 6][..], &[4, 3, 3, 3][..]);
        assert_eq!(products(&CONV2D, &[image, w], &attrs(1, &[])), (DType::BF16, false));
        assert_eq!(products(&CONV2D, &[image, w, &[4]], &attrs(1, &[])), (DType::F32, true));
        // Windows three apart do not overlap.
        let back = |stride, d: usize, bias: bool| {
            let inputs: &[&[usize]] = &[w, &[2, 4, d, d], &[3]];
            products(&CONV2D_BACKWARD_INPUT, &inputs[..2 + usize::from(bias)], &attrs(stride, &[2, 3, 6, 6]))
        };
        assert_eq!(back(1, 4, false), (DType::F32, true));
        assert_eq!(back(3, 2, false), (DType::BF16, false));
        assert_eq!(back(3, 2, true), (DType::F32, true));
        let weight = products(&CONV2D_BACKWARD_WEIGHT, &[image, &[2, 4, 4, 4]], &attrs(1, &[4, 3, 3, 3]));
        assert_eq!(weight, (DType::BF16, false));
    }

    #[test]
    fn mistakes_name_the_numbers() {
        let message = |x: &[usize], w: &[usize], stride: &[i64]| conv(x, w, stride, &[0]).unwrap_err().to_string();
        assert_eq!(
            message(&[2, 3, 8, 8], &[4, 1, 3, 3], &[1]),
            "conv2d: x has 3 channels, weight is {4, 1, 3, 3}, groups is 1: weight must be (O, 3 / groups, ...) and groups \
             must divide O and 3"
        );
        assert_eq!(
            message(&[2, 3, 2, 8], &[4, 3, 3, 3], &[1]),
            "conv2d: a kernel of 3 (dilation 1) does not fit dim 2 of size 2 (padding 0)"
        );
        assert_eq!(message(&[2, 3, 8, 8], &[4, 3, 3, 3], &[0]), "conv2d: stride is 0; it must be 1 or more");
        assert_eq!(
            message(&[8, 8], &[4, 3, 3, 3], &[1]),
            "conv2d: needs x (N, C, H, W), or one without N, not shape {8, 8}"
        );
    }
}
