//! Computes a convolution with a bias as dense ones, a call of cuDNN for each group, whose channels are multiples of 8.
//!
//! Operands are copied so that the channels of a group are adjacent and followed by zeros: images (groups, N, H, W, C),
//! weights (groups, O, h, w, C). Padded channels add zeros to a sum, and those of the result are not copied back.

use super::operands::{Padding, Scratch, copy};
use super::{Convolution, Kind, Parts, dims};
use crate::launch::{Arg, Work};
use crate::library::aligned;
use perilune_core::{Layout, Shape};
use perilune_plan::ir::Operand;

pub(super) fn parts(c: &Convolution, bias: Operand) -> Parts {
    let groups = c.groups;
    let of_group = |shape: Shape| shape.dims()[1] / groups;
    let up = |channels: usize| channels.next_multiple_of(8);
    let (inputs, outputs) = (up(of_group(c.x)), up(of_group(c.y)));
    let with = |shape: Shape, rows: i64, channels: usize| {
        let [_, _, h, w] = dims(shape);
        [rows, channels as i64, h, w]
    };
    let n = dims(c.x)[0];
    let (x, w, y) = (with(c.x, n, inputs), with(c.w, outputs as i64, inputs), with(c.y, n, outputs));
    let numel = |d: [i64; 4]| d.iter().product::<i64>() as usize;
    let mut room = Scratch::new(c.dtype);
    let (a, b, to_dims) = if c.kind == Kind::Forward {
        let image = room.padded(c.operands[0], groups, Padding::Image, inputs, n as usize);
        let weight = room.padded(c.operands[1], groups, Padding::Weight, inputs, outputs);
        ((image, numel(x)), (weight, numel(w)), y)
    } else {
        let weight = room.padded(c.operands[0], groups, Padding::Weight, inputs, outputs);
        let image = room.padded(c.operands[1], groups, Padding::Image, outputs, n as usize);
        ((weight, numel(w)), (image, numel(y)), x)
    };
    let (real, channels) = (of_group(c.result()), to_dims[1] as usize);
    let (mut to, mut after) = (c.out.clone(), Work::default());
    if groups > 1 || real != channels || aligned(&c.out) < 16 {
        to = room.take(groups * numel(to_dims));
        after.launches.push(copy(to.clone(), &joined(c.result(), groups, real, channels), c.out.clone()));
    }
    room.spread_groups(bias, groups, [real, channels], c.result(), to.clone());
    let (problem, scratch) = (c.problem(x, w, y), room.work.scratch_bytes);
    let calls = (0..groups).map(|g| {
        let at = |(arg, numel): &(Arg, usize)| match arg {
            Arg::Scratch(at) => Arg::Scratch(at + g * numel * 2),
            whole => whole.clone(),
        };
        c.call(problem, [at(&a), at(&b), at(&(to.clone(), numel(to_dims)))], scratch)
    });
    Parts { calls: calls.collect(), before: room.work, after }
}

/// The result (N, H, W, groups * C) in memory of (groups, N, H, W, `channels`), of which the first `real` of each group count.
fn joined(shape: Shape, groups: usize, real: usize, channels: usize) -> Layout {
    let d = shape.dims();
    let padded = Layout::contiguous(Shape::of(&[groups, d[0], d[2], d[3], channels])).permute(&[1, 2, 3, 0, 4]);
    Layout { shape: Shape::of(&[d[0], d[2], d[3], groups, real]), ..padded }
}
