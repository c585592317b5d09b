//! Lowers convolutions over images to cuDNN calls: 16-bit floats, channels last.
//!
//! The result is plain data that needs no device: which nodes have a kernel, and the problem and operands of a call. An
//! operand that is not channels last is copied to the workspace first; `plan::passes::nhwc` keeps that rare.
//!
//! A bias is written to all positions of the result first, and cuDNN adds its sums to it (y = conv(x, w) + beta y with beta
//! 1). Most engines add in f32 and round once; some, for odd numbers of channels and for groups, round their sums first.

use crate::attention;
use crate::dnn::ALIGNMENT;
use crate::launch::{Arg, Function, Launch, Work};
use perilune_core::error::{Error, Result};
use perilune_core::graph::Node;
use perilune_core::ops::Op;
use perilune_core::ops::conv::{CONV2D, CONV2D_BACKWARD_INPUT, CONV2D_BACKWARD_WEIGHT};
use perilune_core::{DType, Layout, MAX_RANK, Shape};
use perilune_plan::ir::{Library, Operand};
use perilune_plan::passes::nhwc;
use std::sync::Arc;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    Forward,
    /// The gradient of x.
    Input,
    /// The gradient of the weight.
    Weight,
}

/// A convolution of x (N, C, H, W) with w (O, C / groups, h, w) to y (N, O, ...). Pairs are for rows and columns.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    pub kind: Kind,
    pub dtype: DType,
    pub x: [i64; 4],
    pub w: [i64; 4],
    pub y: [i64; 4],
    pub stride: [i64; 2],
    pub before: [i64; 2],
    pub after: [i64; 2],
    pub dilation: [i64; 2],
    /// Whether the sums are added to what the result's memory holds.
    pub adds: bool,
}

/// A cuDNN call: the addresses of x, w and y, and the offset of cuDNN's workspace.
#[derive(Clone, PartialEq, Debug)]
pub struct Call {
    pub problem: Problem,
    pub x: Arg,
    pub w: Arg,
    pub y: Arg,
    pub scratch: usize,
}

fn kind(op: &Op) -> Option<Kind> {
    match op {
        op if op == &CONV2D => Some(Kind::Forward),
        op if op == &CONV2D_BACKWARD_INPUT => Some(Kind::Input),
        op if op == &CONV2D_BACKWARD_WEIGHT => Some(Kind::Weight),
        _ => None,
    }
}

/// What cuDNN must be able to add a bias for, if a node is a convolution with one.
pub fn adds(node: &Node) -> Option<(Kind, DType)> {
    Some((kind(node.op).filter(|_| node.inputs.len() > 2)?, node.dtype))
}

/// Whether an op is a convolution or one of its gradients.
pub fn is(op: &Op) -> bool {
    kind(op).is_some()
}

/// Whether a node is a convolution that cuDNN can run, with its bias if it has one. Asymmetric padding ("same" with an even
/// kernel) is left to the decomposition.
pub fn has_kernel(node: &Node) -> bool {
    kind(node.op).is_some()
        && matches!(node.dtype, DType::BF16 | DType::F16)
        && node.shape.numel() > 0
        && pair(&node.attrs, 1) == pair(&node.attrs, 2)
}

/// Whether the result can be stored through `layout`.
pub fn can_store_layout(node: &Node, output: usize, layout: &Layout) -> bool {
    output == 0 && kind(node.op).is_some() && is_last(layout)
}

/// Whether an image is dense and channels last.
fn is_last(layout: &Layout) -> bool {
    layout.shape.rank() == 4 && layout.permute(&[0, 2, 3, 1]).is_dense()
}

fn dims(shape: Shape) -> [i64; 4] {
    std::array::from_fn(|i| shape.dims()[i] as i64)
}

fn pair(attrs: &[i64], k: usize) -> [i64; 2] {
    [attrs[2 * k], attrs[2 * k + 1]]
}

/// Minimum channels for cuDNN's fast kernels. Padding fewer channels with zeros is faster than cuDNN's kernels for 3
/// channels.
const LEAST: usize = 8;

/// The launches and the cuDNN call of a library call.
#[derive(Debug)]
pub struct Parts {
    /// Copies of operands with other layouts.
    pub before: Work,
    /// `None` if there is nothing to sum and the result was filled with zeros.
    pub call: Option<Call>,
    /// A copy of the result from the workspace, without the padded channels.
    pub after: Work,
}

pub fn parts(l: &Library) -> Result<Parts> {
    let Some(kind) = kind(l.op) else { return Err(bug("no convolution")) };
    let result = l.layouts[0];
    if !is_last(&result) {
        return Err(bug("a convolution cannot store its result in this layout"));
    }
    let (mut before, mut after) = (Work::default(), Work::default());
    let out = Arg::Value(l.outputs[0], result.offset as i64 * 2);
    let [a, b] = [l.inputs[0], l.inputs[1]];
    let bias = l.inputs.get(2).copied();
    if a.shape().numel() == 0 || b.shape().numel() == 0 {
        let zero = Operand::Constant(0, Shape::of(&[result.shape.dims()[1]]), l.dtypes[0]);
        before.launches.push(spread(bias.unwrap_or(zero), result.shape, result.shape.dims()[1], l.dtypes[0], out));
        return Ok(Parts { before, call: None, after });
    }
    let (x, w) = match kind {
        Kind::Forward => (a.shape(), b.shape()),
        Kind::Input => (result.shape, a.shape()),
        Kind::Weight => (a.shape(), result.shape),
    };
    let c = x.dims()[1];
    // Only without groups; a constant operand is not worth padding.
    let views = [a, b].iter().all(|o| matches!(o, Operand::View(..)));
    let padded = (c < LEAST && w.dims()[1] == c && views).then_some(LEAST);
    // The channels of x and w may be padded, those of y never.
    let mut operand = |x: Operand, pads: bool| -> (Arg, [i64; 4]) {
        let (shape, mut dims) = (x.shape(), dims(x.shape()));
        let mut room = |bytes: usize| {
            let at = before.scratch_bytes;
            before.scratch_bytes = (at + bytes).next_multiple_of(256);
            Arg::Scratch(at)
        };
        let (from, layout, fill) = match x {
            Operand::View(v, layout) => {
                let at = layout.offset as i64 * 2;
                if let Some(p) = padded.filter(|_| pads) {
                    dims[1] = p as i64;
                    let to = room(shape.numel() / c * p * 2);
                    before.launches.push(pad(Arg::Value(v, at), &layout, p, to.clone()));
                    return (to, dims);
                }
                if is_last(&layout) && at % ALIGNMENT == 0 {
                    return (Arg::Value(v, at), dims);
                }
                (Arg::Value(v, at), layout, 0)
            }
            Operand::Constant(bits, ..) => (Arg::I64(0), nhwc::last(shape), attention::bits_of(bits, l.dtypes[0])),
        };
        let to = room(shape.numel() * 2);
        before.launches.push(attention::copy(l.dtypes[0], from, &layout.permute(&[0, 2, 3, 1]), fill, to.clone()));
        (to, dims)
    };
    let (a, b) = (operand(a, true), operand(b, kind == Kind::Forward));
    let mut to = (out.clone(), dims(result.shape));
    if let Some(p) = padded.filter(|_| kind != Kind::Forward) {
        to = (Arg::Scratch(before.scratch_bytes), to.1);
        to.1[1] = p as i64;
        before.scratch_bytes = (before.scratch_bytes + result.numel() / c * p * 2).next_multiple_of(256);
        let d = result.shape.dims();
        let whole = Layout::contiguous(Shape::of(&[d[0], d[2], d[3], p]));
        let kept = Layout { shape: Shape::of(&[d[0], d[2], d[3], c]), ..whole };
        after.launches.push(attention::copy(l.dtypes[0], to.0.clone(), &kept, 0, out));
    }
    if let Some(bias) = bias {
        before.launches.push(spread(bias, result.shape, to.1[1] as usize, l.dtypes[0], to.0.clone()));
    }
    let (x, w, y) = match kind {
        Kind::Forward => (a, b, to),
        Kind::Input => (to, a, b),
        Kind::Weight => (a, to, b),
    };
    let problem = Problem {
        kind,
        dtype: l.dtypes[0],
        x: x.1,
        w: w.1,
        y: y.1,
        stride: pair(&l.attrs, 0),
        before: pair(&l.attrs, 1),
        after: pair(&l.attrs, 2),
        dilation: pair(&l.attrs, 3),
        adds: bias.is_some(),
    };
    let call = Some(Call { problem, x: x.0, w: w.0, y: y.0, scratch: before.scratch_bytes });
    Ok(Parts { before, call, after })
}

/// Writes a number for each channel to all positions of a channels-last image of `shape`, in memory with that many channels.
fn spread(bias: Operand, shape: Shape, channels: usize, dtype: DType, to: Arg) -> Launch {
    let (from, fill, offset, stride) = match bias {
        Operand::View(v, layout) => (Arg::Value(v, layout.offset as i64 * 2), 0, layout.offset, layout.strides[0]),
        Operand::Constant(bits, ..) => (Arg::I64(0), attention::bits_of(bits, dtype), 0, 0),
    };
    let mut strides = [0; MAX_RANK];
    if matches!(bias, Operand::View(..)) && channels.is_multiple_of(8) {
        strides[1] = stride;
        return pad(from, &Layout { shape, strides, offset }, channels, to);
    }
    strides[3] = stride;
    let d = shape.dims();
    let shape = Shape::of(&[d[0], d[2], d[3], channels]);
    attention::copy(dtype, from, &Layout { shape, strides, offset }, fill, to)
}

/// Pads the channels of an image to `to`.
fn pad(from: Arg, layout: &Layout, channels: usize, to: Arg) -> Launch {
    let [n, c, h, w] = dims(layout.shape);
    let groups = (channels / 8) as i64;
    let numel = n * h * w * groups;
    let mut bytes: Vec<u8> = layout.strides().iter().flat_map(|s| (*s as i64).to_le_bytes()).collect();
    bytes.extend([c, h, w, groups].into_iter().flat_map(|n| (n as i32).to_le_bytes()));
    bytes.extend(numel.to_le_bytes());
    let index = if numel < 1 << 30 { "u32" } else { "i64" };
    let text = format!(
        "#include \"conv/pad.cuh\"\n\
         extern \"C\" __global__ void __launch_bounds__(256) KERNEL(const u16* x, uint4* y, const conv::Padded p) {{\n    \
         conv::pad<{index}>(x, y, p);\n}}\n"
    );
    Launch {
        function: Arc::new(Function { label: "conv_pad".into(), text }),
        grid: [(numel as u64).div_ceil(256) as u32, 1, 1],
        block: [256, 1, 1],
        shared_bytes: 0,
        args: vec![from, to, Arg::Bytes(bytes)],
    }
}

fn bug(message: &str) -> Error {
    Error::system("cuda", format!("this is a bug: {message}"))
}
