//! Launches max_pool2d and its gradient over images in any layout (`kernels/pool/max.cuh`).

use super::call::{Call, typed};
use crate::launch::Arg;
use perilune_core::error::{Error, Result};
use perilune_core::graph::Node;
use perilune_core::ops::pool::POOLS;
use perilune_core::{DType, Layout};

/// Whether a node is a pool with a kernel.
pub fn has_kernel(node: &Node) -> bool {
    POOLS.contains(&node.op) && node.dtype.is_float()
}

/// Whether the result can be stored through `layout`: always.
pub fn can_store_layout(node: &Node, output: usize, _: &Layout) -> bool {
    output == 0 && POOLS.contains(&node.op)
}

/// An image: address and layout.
struct Image {
    pointer: Arg,
    strides: [i64; 4],
    /// Alignment of its address in bytes, up to 16.
    aligned: usize,
}

fn strides(layout: &Layout) -> [i64; 4] {
    std::array::from_fn(|i| layout.strides[i] as i64)
}

fn input(c: &Call, k: usize) -> Result<Image> {
    let x = c.input(k)?;
    Ok(Image { pointer: x.pointer, strides: strides(&x.layout), aligned: x.aligned })
}

fn output(c: &Call) -> Image {
    let layout = c.library.layouts[0];
    let bytes = layout.offset as usize * c.out_dtype().size();
    let aligned = if bytes == 0 { c.out_aligned().min(16) } else { 1 << bytes.trailing_zeros().min(4) };
    Image { pointer: c.output(bytes), strides: strides(&layout), aligned }
}

/// Number of channels per thread, and whether adjacent threads of a block have adjacent channels.
fn strided(images: &[&Image], channels: usize, size: usize) -> (usize, bool) {
    let last = images[0].strides[1] == 1;
    let v = 16 / size;
    let whole = |i: &&Image| {
        let [n, c, h, w] = i.strides;
        c == 1 && i.aligned == 16 && [n, h, w].iter().all(|s| s % v as i64 == 0)
    };
    let vector = channels.is_multiple_of(v) && images.iter().all(whole);
    (if vector { v } else { 1 }, last)
}

/// Encodes `pool::Problem`; `big` is the pooled image, `small` the result.
fn problem(big: &[usize], small: &[usize], strides: [[i64; 4]; 4]) -> Result<Arg> {
    let mut bytes: Vec<u8> = strides.iter().flatten().flat_map(|s| s.to_le_bytes()).collect();
    let dims = [big[0], big[1], big[2], big[3], small[2], small[3]].map(|n| n as i64);
    for n in dims {
        let n = i32::try_from(n).map_err(|_| Error::system("max_pool2d", format!("a dim of {n} is more than 2^31")))?;
        bytes.extend(n.to_le_bytes());
    }
    Ok(Arg::Bytes(bytes))
}

pub fn max_pool2d(c: &mut Call) -> Result<()> {
    let (x, y) = (input(c, 0)?, output(c));
    let (big, small) = (c.input(0)?.shape(), c.library.layouts[0].shape);
    let p = problem(big.dims(), small.dims(), [x.strides, y.strides, [0; 4], [0; 4]])?;
    let (v, last) = strided(&[&x, &y], big.dims()[1], c.out_dtype().size());
    let list = [("x", x.pointer, false), ("y", y.pointer, true)];
    step(c, "maximum", list.to_vec(), p, small.numel() / v, (v, last))
}

pub fn backward(c: &mut Call) -> Result<()> {
    let (x, y, g, d) = (input(c, 0)?, input(c, 1)?, input(c, 2)?, output(c));
    let (big, small) = (c.input(0)?.shape(), c.input(1)?.shape());
    let p = problem(big.dims(), small.dims(), [x.strides, y.strides, g.strides, d.strides])?;
    let how = strided(&[&x, &y, &g, &d], big.dims()[1], c.out_dtype().size());
    let shares = Arg::Scratch(c.scratch(small.numel() * c.out_dtype().size()));
    let read = [("x", x.pointer, false), ("y", y.pointer, false)];
    let list = [&read[..], &[("g", g.pointer, false), ("shares", shares.clone(), true)]].concat();
    step(c, "share", list, p.clone(), small.numel() / how.0, how)?;
    let list = [&read[..], &[("shares", shares, false), ("dx", d.pointer, true)]].concat();
    step(c, "spread", list, p, big.numel() / how.0, how)
}

/// Adds one launch; each tensor comes with whether the kernel writes it.
fn step(
    c: &mut Call,
    name: &str,
    tensors: Vec<(&str, Arg, bool)>,
    problem: Arg,
    threads: usize,
    (v, last): (usize, bool),
) -> Result<()> {
    let t = typed(c.out_dtype());
    let wide = if c.out_dtype() == DType::F64 { "f64" } else { "f32" };
    let kinds: Vec<String> =
        tensors.iter().map(|(n, _, out)| format!("{}{t}* {n}", if *out { "" } else { "const " })).collect();
    let mut params: Vec<(&str, Arg)> = kinds.iter().zip(&tensors).map(|(k, x)| (k.as_str(), x.1.clone())).collect();
    params.push(("const __grid_constant__ pool::Problem p", problem));
    let names: Vec<&str> = tensors.iter().map(|x| x.0).collect();
    let attrs = &c.library.attrs;
    // Kernel size, stride, padding before the image, and dilation. The padding after the image has no effect here.
    let window: Vec<String> = attrs[..6].iter().chain(&attrs[8..10]).map(i64::to_string).collect();
    let index = if threads < 1 << 30 { "u32" } else { "i64" };
    let body = format!(
        "pool::{name}<pool::Window<{}>, {index}, {t}, {wide}, {v}, {last}>({}, p);",
        window.join(", "),
        names.join(", ")
    );
    c.each(&format!("max_pool2d_{name}_{t}"), "pool/max.cuh", &params, &body, threads)
}
