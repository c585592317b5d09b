//! Builds the launches that copy, turn and pad the operands of a convolution, and write its bias.

use super::{dims, is_last};
use crate::attention;
use crate::dnn::ALIGNMENT;
use crate::launch::{Arg, Function, Launch, Work};
use crate::library::{Strided, aligned, by_value, sized, transpose_planes};
use perilune_core::{DType, Layout, MAX_RANK, Shape};
use perilune_plan::ir::Operand;
use perilune_plan::passes::nhwc;
use std::sync::Arc;

/// Minimum channels and positions of an image that is turned through tiles.
const LEAST_SIDE: usize = 16;

/// The launches before a convolution and the workspace that they fill.
pub(super) struct Scratch {
    pub work: Work,
    dtype: DType,
}

impl Scratch {
    pub fn new(dtype: DType) -> Scratch {
        Scratch { work: Work::default(), dtype }
    }

    /// Workspace for `n` elements.
    pub fn take(&mut self, n: usize) -> Arg {
        let at = self.work.scratch_bytes;
        self.work.scratch_bytes = (at + n * 2).next_multiple_of(256);
        Arg::Scratch(at)
    }

    /// An operand in memory: a constant is written to the workspace, with `layout`.
    pub fn view(&mut self, x: Operand, layout: impl Fn(Shape) -> Layout) -> (Arg, Layout) {
        match x {
            Operand::View(v, layout) => (Arg::Value(v, layout.offset as i64 * 2), layout),
            Operand::Constant(bits, shape, _) => {
                let to = self.take(shape.numel());
                let fill = attention::bits_of(bits, self.dtype);
                let flat = Layout::contiguous(Shape::of(&[shape.numel()]));
                self.work.launches.push(attention::copy(self.dtype, Arg::I64(0), &flat, fill, to.clone()));
                (to, layout(shape))
            }
        }
    }

    /// Returns where an image or a weight is dense and channels last, aligned for cuDNN; copies it there if need be.
    pub fn channels_last(&mut self, x: Operand) -> Arg {
        let (from, layout) = self.view(x, nhwc::last);
        if is_last(&layout) && is_aligned(&from) {
            return from;
        }
        let to = self.take(layout.numel());
        let launch = transposing(from.clone(), &layout, to.clone());
        let launch = launch.unwrap_or_else(|| copy(from, &layout.permute(&[0, 2, 3, 1]), to.clone()));
        self.work.launches.push(launch);
        to
    }

    /// Pads the channels of each group of an image to `channels` and, of a weight, the rows of each group to `rows`: (groups,
    /// rows, H, W, channels).
    pub fn padded(&mut self, x: Operand, groups: usize, of: Padding, channels: usize, rows: usize) -> Arg {
        let [mut n, mut c, h, w] = dims(x.shape());
        let (divided, axis) = match of {
            Padding::Image => (&mut c, 1),
            Padding::Weight => (&mut n, 0),
        };
        *divided /= groups as i64;
        let of_group = *divided;
        if groups == 1 && [c, n] == [channels as i64, rows as i64] {
            return self.channels_last(x);
        }
        let (from, layout) = self.view(x, nhwc::last);
        let s = layout.strides();
        let strides = [of_group * s[axis] as i64, s[0] as i64, s[1] as i64, s[2] as i64, s[3] as i64];
        let to = self.take(groups * rows * (h * w) as usize * channels);
        self.work.launches.push(pad_groups(from, strides, groups, [n, rows as i64, c, h, w], channels, to.clone()));
        to
    }

    /// Writes a bias to all positions of `groups` images of `shape` with `channels` channels, of which `real` have a bias.
    pub fn spread_groups(&mut self, bias: Operand, groups: usize, [real, channels]: [usize; 2], shape: Shape, to: Arg) {
        let (from, layout) = self.view(bias, Layout::contiguous);
        let ([n, _, h, w], step) = (dims(shape), layout.strides()[0] as i64);
        let strides = [real as i64 * step, 0, step, 0, 0];
        self.work.launches.push(pad_groups(from, strides, groups, [n, n, real as i64, h, w], channels, to));
    }
}

/// What [`Scratch::padded`] pads.
#[derive(Clone, Copy)]
pub(super) enum Padding {
    /// (N, groups * C, H, W).
    Image,
    /// (groups * O, C, h, w).
    Weight,
}

fn is_aligned(at: &Arg) -> bool {
    !matches!(at, Arg::Value(_, bytes) if bytes % ALIGNMENT != 0)
}

fn function(label: &str, header: &str, params: &str, body: &str) -> Arc<Function> {
    let text = format!(
        "#include \"{header}\"\n\
         extern \"C\" __global__ void __launch_bounds__(256) KERNEL({params}) {{\n    {body}\n}}\n"
    );
    Arc::new(Function { label: label.into(), text })
}

fn each(function: Arc<Function>, blocks: usize, args: Vec<Arg>) -> Launch {
    Launch { function, grid: [blocks as u32, 1, 1], block: [256, 1, 1], shared_bytes: 0, args }
}

/// Turns an image (N, C, H, W) with adjacent positions channels last through tiles. `None` if its positions are not adjacent, or
/// too few.
fn transposing(from: Arg, layout: &Layout, to: Arg) -> Option<Launch> {
    let ([n, c, h, w], s) = (layout.shape.dims().try_into().ok()?, layout.strides());
    let adjacent = (w == 1 || s[3] == 1) && (h == 1 || s[2] == w as isize);
    if !adjacent || c < LEAST_SIDE || h * w < LEAST_SIDE {
        return None;
    }
    transpose_planes(from, [n, c, h * w], [s[0], s[1]], to)
}

/// Copies elements of 16 bits with `layout` at `from`, which includes the layout's offset, to contiguous memory.
pub(super) fn copy(from: Arg, layout: &Layout, to: Arg) -> Launch {
    let dense = Layout::contiguous(layout.shape);
    let mut space = Strided::new(layout.shape.dims(), &[layout.strides(), dense.strides()]);
    let most = aligned(&from).min(aligned(&to)) / 2;
    let v = [8, 4, 2].into_iter().find(|v| *v <= most && space.packs(0, *v) && space.packs(1, *v)).unwrap_or(1);
    space = space.grouped(v, &[0, 1]);
    let (t, n, narrow) = (sized(2 * v), space.numel(), space.narrow());
    let params = format!("const {t}* x, {t}* out, {}, i64 n", by_value(&space, narrow, "strided"));
    let function = function("conv_copy", "movement/strided_pad.cuh", &params, "library::copy(x, out, strided, n);");
    each(function, n.div_ceil(256), vec![from, to, space.arg(narrow), Arg::I64(n as i64)])
}

/// Writes a number for each channel to all positions of a channels-last image of `shape`, in memory with that many channels.
pub(super) fn spread(bias: Operand, shape: Shape, channels: usize, dtype: DType, to: Arg) -> Launch {
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

/// Whether a kernel may number `numel` threads in 32 bits.
fn index_type(numel: i64) -> &'static str {
    if numel < 1 << 30 { "u32" } else { "i64" }
}

/// Pads the channels of an image to `to`.
pub(super) fn pad(from: Arg, layout: &Layout, channels: usize, to: Arg) -> Launch {
    let [n, c, h, w] = dims(layout.shape);
    let groups = (channels / 8) as i64;
    let numel = n * h * w * groups;
    let mut bytes: Vec<u8> = layout.strides().iter().flat_map(|s| (*s as i64).to_le_bytes()).collect();
    bytes.extend([c, h, w, groups].into_iter().flat_map(|n| (n as i32).to_le_bytes()));
    bytes.extend(numel.to_le_bytes());
    let body = format!("conv::pad<{}>(x, y, p);", index_type(numel));
    let function = function("conv_pad", "conv/pad.cuh", "const u16* x, uint4* y, const conv::Padded p", &body);
    each(function, (numel as usize).div_ceil(256), vec![from, to, Arg::Bytes(bytes)])
}

/// Pads channels, to a multiple of 8, and rows of each group with zeros; `strides` are those of (group, N, C, H, W).
fn pad_groups(
    from: Arg,
    strides: [i64; 5],
    groups: usize,
    [n, rows, c, h, w]: [i64; 5],
    channels: usize,
    to: Arg,
) -> Launch {
    let packs = (channels / 8) as i64;
    let numel = groups as i64 * rows * h * w * packs;
    let mut bytes: Vec<u8> = strides.into_iter().chain([numel]).flat_map(i64::to_le_bytes).collect();
    bytes.extend([n, rows, c, h, w, packs].into_iter().flat_map(|n| (n as i32).to_le_bytes()));
    let body = format!("conv::pad_groups<{}>(x, y, p);", index_type(numel));
    let function = function("conv_pad_groups", "conv/pad.cuh", "const u16* x, uint4* y, const conv::Groups p", &body);
    each(function, (numel as usize).div_ceil(256), vec![from, to, Arg::Bytes(bytes)])
}
