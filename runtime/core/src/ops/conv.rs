//! Defines convolution, pooling and resampling as fused nodes that decompose into padding, window views and matrix
//! products.
//!
//! x is (N, C, spatial dims...), as in PyTorch; a tensor without the batch dim works too. A convolution reads its
//! windows as columns (N, groups, C/groups * kernel, positions), so the product with the weight already has the layout
//! of the result (im2col). One function handles every number of spatial dims; `attrs` hold one entry per dim and
//! option.

use super::{Args, Class, Expand, Grad, GradCtx, Grads, Op, Out, bits, index, movement, one, real};
use crate::amp::Amp;
use crate::error::{Error, Result};
use crate::graph::{Graph, Infer, Meta, NodeId};
use crate::op::times;
use crate::shape::{self, Dims};
use crate::{DType, Shape};
use smallvec::{SmallVec, smallvec};

pub static OPS: &[&Op] = &[
    &CONV1D,
    &CONV2D,
    &CONV2D_BACKWARD_INPUT,
    &CONV2D_BACKWARD_WEIGHT,
    &CONV_TRANSPOSE1D,
    &CONV_TRANSPOSE2D,
    &MAX_POOL1D,
    &MAX_POOL2D,
    &MAX_POOL2D_BACKWARD,
    &AVG_POOL1D,
    &AVG_POOL2D,
    &ADAPTIVE_AVG_POOL2D,
    &INTERPOLATE,
];

/// Convolutions of images (N, C, H, W) for which a device may have kernels, which may need channels last.
pub static OVER_IMAGES: &[&Op] = &[&CONV2D, &CONV2D_BACKWARD_INPUT, &CONV2D_BACKWARD_WEIGHT];

/// Pools for which such a device has kernels too, for any layout of the images.
pub static POOLS: &[&Op] = &[&MAX_POOL2D, &MAX_POOL2D_BACKWARD];

type Vec8 = SmallVec<[usize; 8]>;
type Attrs = SmallVec<[i64; 12]>;
/// One number for each spatial dim.
type Dims2 = SmallVec<[i64; 2]>;

const FUSED: Op = Op { grad: Grad::Expand, smooth: true, ..Op::BASE };

// ---- arguments ---------------------------------------------------------------------------------------------------

/// The largest number of a kernel, stride, padding or dilation: libraries of a device hold them in 32 bits.
const MAX_OPTION: i64 = i32::MAX as i64;

/// Argument `i`, one int for all spatial dims or one for each, from `min` to `MAX_OPTION`.
fn per_dim(a: &Args, i: usize, what: &str, n: usize, min: i64) -> Result<Dims2> {
    let given = a.ints(i)?;
    let all: Dims2 = match given.len() {
        1 => smallvec![given[0]; n],
        k if k == n => given.into(),
        k => {
            let rule = if n == 1 { "1".to_string() } else { format!("1 or {n}") };
            return Err(Error::argument(a.op.name, format!("{what} has {k} numbers; there must be {rule}")));
        }
    };
    if let Some(bad) = all.iter().find(|v| **v < min) {
        return Err(Error::argument(a.op.name, format!("{what} is {bad}; it must be {min} or more")));
    }
    if let Some(bad) = all.iter().find(|v| **v > MAX_OPTION) {
        return Err(Error::argument(a.op.name, format!("{what} is {bad}; it must be {MAX_OPTION} or less")));
    }
    Ok(all)
}

/// Adds a batch dim to x if it has none; returns whether it did.
fn batched(g: &mut Graph, a: &Args, n: usize) -> Result<(NodeId, bool)> {
    let x = a.tensor(0)?;
    let shape = g.shape(x);
    match shape.rank() {
        r if r == n + 2 => Ok((x, false)),
        r if r == n + 1 => Ok((g.unsqueeze(x, 0)?, true)),
        _ => {
            let want = if n == 1 { "(N, C, L)" } else { "(N, C, H, W)" };
            Err(Error::shape(a.op.name, format!("needs x {want}, or one without N, not shape {shape}")))
        }
    }
}

fn unbatched(g: &mut Graph, y: NodeId, added: bool) -> Result<Out> {
    if !added {
        return Ok(one(y));
    }
    let shape = g.shape(y).remove(0);
    movement::reshape(g, y, shape).map(one)
}

// ---- windows -----------------------------------------------------------------------------------------------------

/// Kernel, stride, padding (before and after) and dilation of each spatial dim.
struct Sliding {
    kernel: Vec8,
    stride: Vec8,
    before: Vec8,
    after: Vec8,
    dilation: Vec8,
}

impl Sliding {
    /// Decodes `attrs` [kernel.., stride.., before.., after.., dilation..] with `n` dims each.
    fn of(attrs: &[i64], n: usize) -> Sliding {
        let take = |k: usize| attrs[k * n..(k + 1) * n].iter().map(|&v| v as usize).collect();
        Sliding { kernel: take(0), stride: take(1), before: take(2), after: take(3), dilation: take(4) }
    }

    fn n(&self) -> usize {
        self.kernel.len()
    }

    /// Number of positions of dim `d` of size `size`.
    fn positions(&self, d: usize, size: usize) -> usize {
        movement::windows(size + self.before[d] + self.after[d], self.kernel[d], self.stride[d], self.dilation[d])
    }

    /// The spatial dims of the result, or an error if the kernel does not fit.
    fn out(&self, op: &str, spatial: &[usize]) -> Result<Vec8> {
        let dims: Vec8 = spatial.iter().enumerate().map(|(d, &size)| self.positions(d, size)).collect();
        if let Some(d) = dims.iter().position(|&k| k == 0) {
            let message = format!(
                "a kernel of {} (dilation {}) does not fit dim {} of size {} (padding {})",
                self.kernel[d],
                self.dilation[d],
                d + 2,
                spatial[d],
                self.before[d]
            );
            return Err(Error::shape(op, message));
        }
        Ok(dims)
    }

    /// (N, C, spatial...) -> (N, C, positions..., kernel...), padded with `fill`.
    fn windows(&self, g: &mut Graph, x: NodeId, fill: f64) -> Result<NodeId> {
        let mut x = x;
        for (d, (&lo, &hi)) in self.before.iter().zip(&self.after).enumerate() {
            let size = g.shape(x).dims()[d + 2];
            x = movement::strided_pad(g, x, d + 2, lo, 1, size + lo + hi, fill)?;
        }
        for d in 0..self.n() {
            x = movement::window(g, x, d + 2, self.kernel[d], self.stride[d], self.dilation[d])?;
        }
        Ok(x)
    }

    /// The axes of the kernel in the result of `windows`.
    fn kernel_axes(&self) -> Vec8 {
        (2 + self.n()..2 + 2 * self.n()).collect()
    }
}

fn product(dims: &[usize]) -> usize {
    dims.iter().product()
}

// ---- convolution -------------------------------------------------------------------------------------------------

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
fn add_bias(g: &mut Graph, y: NodeId, bias: Option<&NodeId>) -> Result<NodeId> {
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
fn of_one_row(g: &mut Graph, op: &'static Op, x: &[NodeId], attrs: &[i64], plain: [i64; 4]) -> Result<Out> {
    let mut inputs: SmallVec<[NodeId; 4]> = x.into();
    for x in &mut inputs[..2] {
        *x = g.unsqueeze(*x, 2)?;
    }
    let (options, groups) = attrs.split_at(plain.len());
    let mut all: Attrs = plain.iter().zip(options).flat_map(|(&row, &column)| [row, column]).collect();
    all.extend_from_slice(groups);
    let y = g.push(op, &inputs, &all)?;
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
fn conv_inputs(
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
    let y = g.push(a.op, &inputs, &attrs)?;
    unbatched(g, y, added)
}

const CONV: Op = Op {
    infer: infer_conv,
    amp: Amp::Low,
    flops: Some(|w| times([2, w.out.numel() as u64, filter(w.inputs[1])])),
    ..FUSED
};

/// Elements of one filter of a weight: the products summed for one element of the result.
fn filter(weight: Shape) -> u64 {
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
    class: Class::Fused(BACKWARD_WEIGHT_EXPAND),
    flops: Some(|w| times([2, w.numel(1), filter(w.out)])),
    infer: infer_conv_backward,
    ..FUSED
};

// ---- transposed convolution --------------------------------------------------------------------------------------

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
        y = movement::strided_pad(g, y, d + 2, 0, 1, size + extra[d] / s.stride[d], 0.0)?;
    }
    let padding = s.before.iter().chain(&s.after);
    let options = s.stride.iter().chain(padding).chain(&s.dilation).chain([&groups]).chain(out.dims());
    let attrs: SmallVec<[i64; 16]> = options.map(|&v| v as i64).collect();
    let mut inputs: SmallVec<[NodeId; 4]> = smallvec![x[1], y];
    inputs.extend(x.get(2).copied());
    g.push(&CONV2D_BACKWARD_INPUT, &inputs, &attrs).map(one)
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

// ---- pooling -----------------------------------------------------------------------------------------------------

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

/// An error unless positions of `n` elements resampled to `out` can be computed in i64.
fn check_ratio(op: &str, out: usize, n: usize) -> Result<()> {
    if out as i128 * n as i128 <= i128::from(i64::MAX) {
        return Ok(());
    }
    Err(Error::argument(
        op,
        format!("a dim of size {n} cannot become one of {out}: positions would not fit in 64 bits"),
    ))
}

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

// ---- resampling --------------------------------------------------------------------------------------------------

/// Nearest: out element i reads element floor(i n / out), or floor(i / scale) if a scale is given.
fn nearest(g: &mut Graph, x: NodeId, at: usize, out: usize, step: f64) -> Result<NodeId> {
    let shape = g.shape(x);
    let n = shape.dims()[at];
    check_ratio("interpolate", out, n)?;
    if step == 0.0 && out.is_multiple_of(n) {
        // Whole multiples are a view.
        let y = g.unsqueeze(x, at + 1)?;
        let y = g.expand(y, shape.insert(at + 1, out / n)?)?;
        return movement::reshape(g, y, shape.with(at, out));
    }
    let i = super::create::iota(g, out)?;
    let i = if step == 0.0 {
        let (size, parts) = (g.constant_like(n as f64, i), g.constant_like(out as f64, i));
        let i = g.mul(i, size)?;
        g.map(&super::elementwise::FLOOR_DIV, &[i, parts])?
    } else {
        let i = g.cast(i, DType::F64)?;
        let i = g.mul_c(i, step)?;
        g.cast(i, DType::I64)?
    };
    let i = g.minimum_c(i, n as f64 - 1.0)?;
    index::index_select(g, x, at, i)
}

/// Linear: out element i is at (i + 1/2) step - 1/2, or at i step with aligned corners; clamped at the ends.
fn linear(g: &mut Graph, x: NodeId, at: usize, out: usize, step: f64, align: bool) -> Result<NodeId> {
    let (n, rank, dtype) = (g.shape(x).dims()[at], g.shape(x).rank(), g.dtype(x));
    let i = super::create::iota(g, out)?;
    let mut p = g.cast(i, dtype)?;
    if align {
        p = g.mul_c(p, step)?;
    } else {
        p = g.add_c(p, 0.5)?;
        p = g.mul_c(p, step)?;
        p = g.add_c(p, -0.5)?;
        p = g.maximum_c(p, 0.0)?;
    }
    let lo = g.cast(p, DType::I64)?;
    let lo = g.minimum_c(lo, n as f64 - 1.0)?;
    let hi = g.add_c(lo, 1.0)?;
    let hi = g.minimum_c(hi, n as f64 - 1.0)?;
    let base = g.cast(lo, dtype)?;
    let part = g.sub(p, base)?;
    let mut dims: Vec8 = smallvec![1; rank];
    dims[at] = out;
    let part = g.reshape(part, &dims)?;
    let rest = g.rsub_c(1.0, part)?;
    let (a, b) = (index::index_select(g, x, at, lo)?, index::index_select(g, x, at, hi)?);
    let (a, b) = (g.mul(a, rest)?, g.mul(b, part)?);
    g.add_(a, b)
}

/// `attrs`: [1 for linear, 1 for align_corners, out.., step bits..]; a step of 0 in nearest mode means size / out exactly.
pub static INTERPOLATE: Op = Op {
    name: "interpolate",
    sig: "x: tensor, *, size: ints?, scale: float?, mode: 'nearest'|'linear'|'bilinear' = 'nearest', align_corners: bool = false",
    doc: "x (N, C, L) or (N, C, H, W) -> (N, C, out...): resampled to `size`, one int or one for each dim, or by the factor\n\
          `scale` (sizes rounded down). Coordinates as in PyTorch: element centres coincide at the ends of the image, or the\n\
          centres of the corner elements if align_corners. \"linear\" is for one dim, \"bilinear\" for two; f32 for 16-bit\n\
          floats. Nearest computes its indices exactly.",
    class: Class::Fused(|g, x, attrs| {
        let n = g.shape(x[0]).rank() - 2;
        let (out, steps) = (&attrs[2..2 + n], &attrs[2 + n..]);
        if attrs[0] == 0 {
            let mut y = x[0];
            for d in 0..n {
                y = nearest(g, y, d + 2, out[d] as usize, real(steps[d]))?;
            }
            return Ok(one(y));
        }
        g.island(x[0], |g, mut y| {
            for d in 0..n {
                y = linear(g, y, d + 2, out[d] as usize, real(steps[d]), attrs[1] != 0)?;
            }
            Ok(y)
        })
        .map(one)
    }),
    infer: |i| {
        i.float(0)?;
        let mut shape = i.shape(0);
        for d in 2..shape.rank() {
            shape = shape.with(d, i.attr(d));
        }
        Ok(Meta { shape: Shape::new(shape.dims())?, dtype: i.dtype(0) })
    },
    call: Some(|g, a| {
        let op = a.op.name;
        let x = g.to_float(a.tensor(0)?)?;
        let shape = g.shape(x);
        if !(3..=4).contains(&shape.rank()) || shape.dims()[2..].contains(&0) {
            return Err(Error::shape(
                op,
                format!("needs x (N, C, L) or (N, C, H, W) with elements, not shape {shape}"),
            ));
        }
        let n = shape.rank() - 2;
        let (mode, align) = (a.str(3), a.bool(4));
        let fitting = if n == 1 { "linear" } else { "bilinear" };
        if mode != "nearest" && mode != fitting {
            return Err(Error::argument(op, format!("mode \"{mode}\" does not fit x {shape}"))
                .hint(format!("use \"{fitting}\"")));
        }
        if mode == "nearest" && align {
            return Err(Error::argument(op, "align_corners has no meaning with mode \"nearest\""));
        }
        let (sizes, scale): (SmallVec<[i64; 2]>, Option<f64>) = match (a.is_none(1), a.opt_float(2)) {
            (false, None) => (per_dim(a, 1, "size", n, 1)?, None),
            (true, Some(s)) if s > 0.0 && s.is_finite() => {
                (shape.dims()[2..].iter().map(|&d| (d as f64 * s).floor() as i64).collect(), Some(s))
            }
            (true, Some(s)) => return Err(Error::argument(op, format!("scale is {s}; it must be above 0"))),
            (false, Some(s)) => {
                let message = format!(
                    "size {} and scale {s} are both given; one of them says the result's size",
                    Dims(a.ints(1)?)
                );
                return Err(Error::argument(op, message));
            }
            _ => return Err(Error::argument(op, "neither size nor scale is given").hint("x:interpolate { scale = 2 }")),
        };
        let mut attrs: Attrs = smallvec![i64::from(mode != "nearest"), i64::from(align)];
        attrs.extend_from_slice(&sizes);
        for (d, &out) in sizes.iter().enumerate() {
            let size = shape.dims()[d + 2] as f64;
            if out > MAX_OPTION {
                let message = format!(
                    "scale {} makes dim {} of size {size} larger than {MAX_OPTION}",
                    scale.unwrap_or(0.0),
                    d + 2
                );
                return Err(Error::argument(op, message));
            }
            if out < 1 {
                return Err(Error::argument(
                    op,
                    format!("scale {} reduces dim {} of size {size} to 0", scale.unwrap_or(0.0), d + 2),
                ));
            }
            attrs.push(bits(match (mode, align, scale) {
                // A factor that yields an exact size is equivalent to that size.
                ("nearest", _, Some(s)) if size * s != out as f64 => 1.0 / s,
                ("nearest", ..) => 0.0,
                (_, true, _) => {
                    if out > 1 {
                        (size - 1.0) / (out as f64 - 1.0)
                    } else {
                        0.0
                    }
                }
                (_, _, Some(s)) => 1.0 / s,
                _ => size / out as f64,
            }));
        }
        g.push(&INTERPOLATE, &[x], &attrs).map(one)
    }),
    samples: &[
        "f(2,3,4,5), size=[8,10]",
        "f(2,3,4,5), size=[7,3]",
        "f(2,3,4,5), scale=2",
        "f(2,3,5), scale=1.5",
        "f(2,3,4,5), size=[7,9], mode='bilinear'",
        "f(2,3,4,5), size=[7,3], mode='bilinear', align_corners=true",
        "f(2,3,5), size=8, mode='linear'",
        "f(1,1,4,4), scale=0.5, mode='bilinear'",
        "f(1,1,4,4), scale=1.7, mode='bilinear'",
        "f(1,2,3,3), size=1, mode='bilinear', align_corners=true",
    ],
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
