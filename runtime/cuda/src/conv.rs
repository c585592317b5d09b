//! Lowers convolutions over images to cuDNN calls: 16-bit floats, channels last.
//!
//! The result is plain data that needs no device: which nodes have a kernel, and the problem and operands of a call. An
//! operand that is not channels last is copied to the workspace first; `plan::passes::nhwc` keeps that rare.
//!
//! A bias is written to all positions of the result first, and cuDNN adds its sums to it (y = conv(x, w) + beta y with beta
//! 1). Its engines for numbers of channels that are multiples of 8, without groups, add in f32 and round once. Others round
//! their sums to 16 bits first, so a convolution with a bias takes one of three routes ([`Route`]), by its shape alone.

mod direct;
mod operands;
mod padded;

use crate::launch::{Arg, Work};
use operands::{Scratch, copy, pad, spread};
use perilune_core::error::{Error, Result};
use perilune_core::graph::Node;
use perilune_core::ops::Op;
use perilune_core::ops::conv::{CONV2D, CONV2D_BACKWARD_INPUT, CONV2D_BACKWARD_WEIGHT};
use perilune_core::{DType, Layout, Shape};
use perilune_plan::ir::{Library, Operand};

/// Which result of a convolution is computed.
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

/// Minimum channels of a group, of x and of y, for a call of cuDNN for each group. With fewer, the calls would be many and their
/// products small.
const LEAST_OF_GROUP: usize = 16;

/// How a convolution is computed so that its sums and its bias are rounded once, together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Route {
    /// One call of cuDNN over the operands as they are, if they are channels last.
    Whole,
    /// Channels padded to multiples of 8, and a call of cuDNN for each group.
    Padded,
    /// A kernel of our own, for groups of few channels.
    Direct,
}

/// The route of a convolution between `inputs` and `outputs` channels. It depends on nothing else, so that a program is
/// computed alike everywhere.
pub fn route(biased: bool, groups: usize, inputs: usize, outputs: usize) -> Route {
    if !biased {
        return Route::Whole;
    }
    let whole = |channels: usize| channels.is_multiple_of(LEAST);
    match groups {
        1 if whole(inputs) && whole(outputs) => Route::Whole,
        1 => Route::Padded,
        _ if (inputs / groups).min(outputs / groups) >= LEAST_OF_GROUP => Route::Padded,
        _ => Route::Direct,
    }
}

/// The launches and the cuDNN calls of a library call.
#[derive(Debug, Default)]
pub struct Parts {
    /// Copies of operands with other layouts, or the whole result.
    pub before: Work,
    /// One for each group, over equal problems; empty if `before` computes the result.
    pub calls: Vec<Call>,
    /// A copy of the result from the workspace, without the padded channels.
    pub after: Work,
}

/// A convolution of a program: its operands in the order of the op, and its options.
struct Convolution<'a> {
    kind: Kind,
    library: &'a Library,
    dtype: DType,
    operands: [Operand; 2],
    bias: Option<Operand>,
    /// The shapes of x, the weight and y.
    x: Shape,
    w: Shape,
    y: Shape,
    groups: usize,
    out: Arg,
}

impl<'a> Convolution<'a> {
    fn new(l: &'a Library) -> Result<Convolution<'a>> {
        let Some(kind) = kind(l.op) else { return Err(bug("no convolution")) };
        let result = l.layouts[0];
        if !is_last(&result) {
            return Err(bug("a convolution cannot store its result in this layout"));
        }
        let [a, b] = [l.inputs[0], l.inputs[1]];
        let (x, w, y) = match kind {
            Kind::Forward => (a.shape(), b.shape(), result.shape),
            Kind::Input => (result.shape, a.shape(), b.shape()),
            Kind::Weight => (a.shape(), result.shape, b.shape()),
        };
        let groups = usize::try_from(l.attrs[8]).unwrap_or(1).max(1);
        let out = Arg::Value(l.outputs[0], result.offset as i64 * 2);
        let bias = l.inputs.get(2).copied();
        Ok(Convolution { kind, library: l, dtype: l.dtypes[0], operands: [a, b], bias, x, w, y, groups, out })
    }

    fn result(&self) -> Shape {
        self.library.layouts[0].shape
    }

    fn problem(&self, x: [i64; 4], w: [i64; 4], y: [i64; 4]) -> Problem {
        let option = |k| pair(&self.library.attrs, k);
        Problem {
            kind: self.kind,
            dtype: self.dtype,
            x,
            w,
            y,
            stride: option(0),
            before: option(1),
            after: option(2),
            dilation: option(3),
            adds: self.bias.is_some(),
        }
    }

    /// A call over operands in the order of the op.
    fn call(&self, problem: Problem, [a, b, to]: [Arg; 3], scratch: usize) -> Call {
        let (x, w, y) = match self.kind {
            Kind::Forward => (a, b, to),
            Kind::Input => (to, a, b),
            Kind::Weight => (a, to, b),
        };
        Call { problem, x, w, y, scratch }
    }
}

pub fn parts(l: &Library) -> Result<Parts> {
    let c = Convolution::new(l)?;
    if c.operands.iter().any(|o| o.shape().numel() == 0) {
        // There is nothing to sum.
        let mut parts = Parts::default();
        let channels = c.result().dims()[1];
        let bias = c.bias.unwrap_or(Operand::Constant(0, Shape::of(&[channels]), c.dtype));
        parts.before.launches.push(spread(bias, c.result(), channels, c.dtype, c.out));
        return Ok(parts);
    }
    let route = route(c.bias.is_some(), c.groups, c.x.dims()[1], c.y.dims()[1]);
    Ok(match (route, c.bias) {
        (Route::Padded, Some(bias)) => padded::parts(&c, bias),
        (Route::Direct, Some(bias)) => direct::parts(&c, bias),
        _ => whole(&c),
    })
}

/// One call over all channels. Fewer than 8 channels of x are padded.
fn whole(c: &Convolution) -> Parts {
    let channels = c.x.dims()[1];
    // Only without groups; a constant operand is not worth padding.
    let views = c.operands.iter().all(|o| matches!(o, Operand::View(..)));
    let pads = (channels < LEAST && c.w.dims()[1] == channels && views).then_some(LEAST);
    let mut room = Scratch::new(c.dtype);
    // The channels of x and the weight may be padded, those of y never.
    let mut operand = |x: Operand, of_x: bool| match (x, pads.filter(|_| of_x)) {
        (Operand::View(v, layout), Some(p)) => {
            let to = room.take(layout.numel() / channels * p);
            room.work.launches.push(pad(Arg::Value(v, layout.offset as i64 * 2), &layout, p, to.clone()));
            to
        }
        _ => room.channels_last(x),
    };
    let (a, b) = (operand(c.operands[0], true), operand(c.operands[1], c.kind == Kind::Forward));
    let (mut to, mut after) = (c.out.clone(), Work::default());
    if let Some(p) = pads.filter(|_| c.kind != Kind::Forward) {
        let result = c.result();
        let d = result.dims();
        to = room.take(result.numel() / channels * p);
        let padded = Layout::contiguous(Shape::of(&[d[0], d[2], d[3], p]));
        let kept = Layout { shape: Shape::of(&[d[0], d[2], d[3], channels]), ..padded };
        after.launches.push(copy(to.clone(), &kept, c.out.clone()));
    }
    if let Some(bias) = c.bias {
        room.work.launches.push(spread(bias, c.result(), c.result().dims()[1], c.dtype, to.clone()));
    }
    let with = |shape: Shape, pads: Option<usize>| {
        let mut d = dims(shape);
        d[1] = pads.map_or(d[1], |p| p as i64);
        d
    };
    let problem = c.problem(with(c.x, pads), with(c.w, pads), dims(c.y));
    let call = c.call(problem, [a, b, to], room.work.scratch_bytes);
    Parts { before: room.work, calls: vec![call], after }
}

fn bug(message: &str) -> Error {
    Error::system("cuda", format!("this is a bug: {message}"))
}
