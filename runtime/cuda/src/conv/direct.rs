//! Launches the kernel for convolutions with a bias whose groups have few channels (`kernels/conv/direct.cuh`).

use super::operands::{Scratch, copy};
use super::{Convolution, Kind, Parts, pair};
use crate::launch::{Arg, Function, Launch};
use crate::library::aligned;
use perilune_core::{DType, Layout, Shape};
use perilune_plan::ir::Operand;
use std::sync::Arc;

/// Channels of a vector.
const PACK: usize = 8;

pub(super) fn parts(c: &Convolution, bias: Operand) -> Parts {
    let mut room = Scratch::new(c.dtype);
    let back = c.kind == Kind::Input;
    let [image, weight] = if back { [c.operands[1], c.operands[0]] } else { c.operands };
    let of_group = |shape: Shape| shape.dims()[1] / c.groups;
    let (source, inner, outer) =
        if back { (c.y, of_group(c.y), of_group(c.x)) } else { (c.x, of_group(c.x), of_group(c.y)) };
    let x = room.channels_last(image);
    let (from, layout) = room.view(weight, Layout::contiguous);
    let w = room.take(layout.numel());
    room.work.launches.push(copy(from, &taps(&layout, c.groups, back), w.clone()));
    let (bias, each) = room.view(bias, Layout::contiguous);
    let result = c.result();
    let (d, s) = (result.dims(), source.dims());
    let wide = inner == 1 && outer == 1 && d[1].is_multiple_of(PACK) && aligned(&c.out) == 16;
    let v = if wide { PACK } else { 1 };
    let numel = result.numel() / v;
    let option = |k| pair(&c.library.attrs, k);
    let (stride, before, dilation) = (option(0), option(1), option(3));
    let sizes = [numel, d[2], d[3], d[1] / v, s[2], s[3], s[1], inner, outer, c.w.dims()[2], c.w.dims()[3]];
    let numbers = sizes
        .map(|n| n as i64)
        .into_iter()
        .chain([stride, before, dilation].concat())
        .chain([each.strides()[0] as i64]);
    let t = if c.dtype == DType::BF16 { "bf16" } else { "f16" };
    let index = if numel < 1 << 30 { "u32" } else { "i64" };
    let text = format!(
        "#include \"conv/direct.cuh\"\n\
         extern \"C\" __global__ void __launch_bounds__(256) KERNEL(const {t}* x, const {t}* w, const {t}* bias, {t}* y, const conv::Direct p) {{\n    \
         conv::direct<{t}, {v}, {back}, {index}>(x, w, bias, y, p);\n}}\n"
    );
    room.work.launches.push(Launch {
        function: Arc::new(Function { label: "conv_direct".into(), text }),
        grid: [numel.div_ceil(256) as u32, 1, 1],
        block: [256, 1, 1],
        shared_bytes: 0,
        args: vec![x, w, bias, c.out.clone(), Arg::Bytes(numbers.flat_map(i64::to_le_bytes).collect())],
    });
    Parts { before: room.work, ..Parts::default() }
}

/// A weight (groups * O, C, h, w) as (h, w, inner, channels of the result): (h, w, C, groups * O), or (h, w, O, groups, C) for the
/// input gradient.
fn taps(layout: &Layout, groups: usize, back: bool) -> Layout {
    if !back {
        return layout.permute(&[2, 3, 1, 0]);
    }
    let (d, s) = (layout.shape.dims(), layout.strides());
    let of_group = d[0] / groups;
    let mut out = *layout;
    out.shape = Shape::of(&[d[2], d[3], of_group, groups, d[1]]);
    out.strides[..5].copy_from_slice(&[s[2], s[3], s[0], of_group as isize * s[0], s[1]]);
    out
}
