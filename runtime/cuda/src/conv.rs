//! Convolutions over images as cuDNN runs them (`dnn`): 16-bit floats, channels last.
//!
//! Plain data, as everything above `driver`: which nodes are kept, and what a call takes. An operand that does not lie
//! channels last is copied to the workspace first; the planner sees to it that this is rare (`plan::channels`).

use crate::attention;
use crate::dnn::ALIGNMENT;
use crate::launch::{Arg, Work};
use perilune_core::error::{Error, Result};
use perilune_core::graph::Node;
use perilune_core::ops::Op;
use perilune_core::ops::conv::{CONV2D, CONV2D_BACKWARD_INPUT, CONV2D_BACKWARD_WEIGHT};
use perilune_core::{DType, Layout, Shape};
use perilune_plan::channels;
use perilune_plan::ir::{Library, Operand};

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    Forward,
    /// The gradient of x.
    Input,
    /// The gradient of the weight.
    Weight,
}

/// A convolution of x (N, C, H, W) with w (O, C / groups, h, w) to y (N, O, ...); numbers of rows and columns in pairs.
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
}

/// A call: where x, w and y lie, and from which byte of the workspace on cuDNN may have its own.
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

/// Whether an op is one of these.
pub fn is(op: &Op) -> bool {
    kind(op).is_some()
}

/// Whether a node is a convolution that cuDNN can run. One with a bias is one without, and an addition.
pub fn keeps(node: &Node) -> bool {
    kind(node.op).is_some()
        && node.inputs.len() == 2
        && matches!(node.dtype, DType::BF16 | DType::F16)
        && node.shape.numel() > 0
}

/// Whether the result can be written through `layout`.
pub fn writes(node: &Node, output: usize, layout: &Layout) -> bool {
    output == 0 && kind(node.op).is_some() && is_last(layout)
}

/// Whether an image lies channels last, without holes.
fn is_last(layout: &Layout) -> bool {
    layout.shape.rank() == 4 && layout.permute(&[0, 2, 3, 1]).is_dense()
}

fn dims(shape: Shape) -> [i64; 4] {
    std::array::from_fn(|i| shape.dims()[i] as i64)
}

fn pair(attrs: &[i64], k: usize) -> [i64; 2] {
    [attrs[2 * k], attrs[2 * k + 1]]
}

/// What a library call takes: copies of operands that lie otherwise, and the convolution. Without elements to add up there is
/// only a result of zeros to fill.
pub fn call(l: &Library) -> Result<(Work, Option<Call>)> {
    let Some(kind) = kind(l.op) else { return Err(bug("no convolution")) };
    let result = l.layouts[0];
    if !is_last(&result) {
        return Err(bug("a convolution cannot write its result there"));
    }
    let mut work = Work::default();
    let out = Arg::Value(l.outputs[0], result.offset as i64 * 2);
    let [a, b] = [l.inputs[0], l.inputs[1]];
    if a.shape().numel() == 0 || b.shape().numel() == 0 {
        let zeros = Layout::contiguous(Shape::of(&[result.numel()]));
        work.launches.push(attention::copy(Arg::I64(0), &zeros, 0, out));
        return Ok((work, None));
    }
    let operand = |x: Operand, work: &mut Work| {
        let shape = x.shape();
        let (from, layout, fill) = match x {
            Operand::View(v, layout) => {
                let at = layout.offset as i64 * 2;
                if is_last(&layout) && at % ALIGNMENT == 0 {
                    return Arg::Value(v, at);
                }
                (Arg::Value(v, at), layout, 0)
            }
            Operand::Constant(bits, ..) => (Arg::I64(0), channels::last(shape), attention::bits16(bits, l.dtypes[0])),
        };
        let to = Arg::Scratch(work.scratch_bytes);
        work.scratch_bytes = (work.scratch_bytes + shape.numel() * 2).next_multiple_of(256);
        work.launches.push(attention::copy(from, &layout.permute(&[0, 2, 3, 1]), fill, to.clone()));
        to
    };
    let (a_at, b_at) = (operand(a, &mut work), operand(b, &mut work));
    let [a_dims, b_dims, out_dims] = [a.shape(), b.shape(), result.shape].map(dims);
    let (x, w, y) = match kind {
        Kind::Forward => ((a_at, a_dims), (b_at, b_dims), (out, out_dims)),
        Kind::Input => ((out, out_dims), (a_at, a_dims), (b_at, b_dims)),
        Kind::Weight => ((a_at, a_dims), (out, out_dims), (b_at, b_dims)),
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
    };
    let scratch = work.scratch_bytes;
    Ok((work, Some(Call { problem, x: x.0, w: w.0, y: y.0, scratch })))
}

fn bug(message: &str) -> Error {
    Error::system("cuda", format!("this is a bug: {message}"))
}
