//! Launches flash attention: kernels that never store the T x S scores (`kernels/attention/`), for bf16, f16 and f32 from sm_80.
//!
//! The forward pass is one launch. The backward pass is three: `delta` of each row (which the sm_90a kernels compute
//! themselves), then dq, then dk and dv. Each kernel sums in a fixed order, so a gradient has the same bits in every
//! run. Operands are read through their strides if rows are contiguous and 16-byte aligned, as in views of a fused
//! projection, and copied to the workspace otherwise. Masks given as tensors, head sizes that are not a multiple of 8
//! (of 4 in f32) and f64 are left to the decomposition. Segment ids (`documents`) need one more small launch in each
//! direction; tiles of unrelated segments are then skipped. Blocks of keys (`attention_block`) have variants of all kernels: they
//! store f32, read the shift between the positions of queries and keys from device memory, and the backward pass is two launches,
//! because delta is an operand.
//!
//! There are three families of kernels. `mma`: mma.sync on 16-bit floats, for every GPU since sm_80 ([`MMA_TILES`]).
//! `warpgroup`: wgmma and TMA on 16-bit floats, for sm_90a ([`WARPGROUP_TILES`]), if tensor maps can describe the
//! operands. `tf32`: f32 with one or three TF32 products per f32 product ([`TF32`]). Head size and GPU choose the tile;
//! `kernels/lab/attention_lab.py` reads the tables from these files and times them.

use crate::launch::{Arg, Launch, Props, Work};
use builder::{Builder, Tensors};
use perilune_core::error::{Error, Result};
use perilune_core::graph::Node;
use perilune_core::ops::attention::{ATTENTION, ATTENTION_BACKWARD};
use perilune_core::ops::attention_block::{ATTENTION_BLOCK, ATTENTION_BLOCK_BACKWARD, is_shifted};
use perilune_core::ops::real;
use perilune_core::{DType, Layout};
use perilune_plan::ir::{Library, Program, ValueId};
use preprocess::{delta_function, lanes};
use std::sync::Arc;
use strides::Strides;

mod builder;
mod mask;
mod mma;
mod preprocess;
mod strides;
mod tf32;
mod warpgroup;

pub use mask::Mask;
pub use mma::{MMA_TILES, MmaTile, SIZES, When, function};
pub(crate) use preprocess::{bits_of, copy};
pub use tf32::{TF32, Tf32};
pub use warpgroup::{WARPGROUP_TILES, WarpgroupTile};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pass {
    Forward,
    BackwardQ,
    BackwardKv,
}

/// Whether there is a kernel for this node, attention or its backward, of all keys or a block.
pub fn has_kernel(node: &Node) -> bool {
    let (inputs, block) = match node.op {
        op if op == &ATTENTION => (3, false),
        op if op == &ATTENTION_BACKWARD => (6, false),
        op if op == &ATTENTION_BLOCK => (3, true),
        op if op == &ATTENTION_BLOCK_BACKWARD => (6, true),
        _ => return false,
    };
    let &[_, scale, _, d, e, documents, ..] = &node.attrs[..] else { return false };
    let least = match node.dtype {
        DType::BF16 | DType::F16 => 8,
        // The result of a block is f32 for operands of 16 bits, too.
        DType::F32 if block => 8,
        DType::F32 => 4,
        _ => return false,
    };
    // A block has documents of queries and of keys.
    let documents = if documents == 0 { 0 } else { 1 + usize::from(block) };
    let more = documents + usize::from(block && is_shifted(&node.attrs));
    let fits = |n: i64| (least..=256).contains(&n) && n % least == 0;
    let scale = real(scale);
    // Further inputs mean a mask tensor. The kernels compute the maximum before they apply the scale.
    node.inputs.len() == inputs + more && fits(d) && fits(e) && (scale as f32).is_normal() && scale > 0.0
}

/// Whether the kernels can store an output through `layout`; rows need the same alignment as for reading.
pub fn can_store_layout(node: &Node, output: usize, layout: &Layout) -> bool {
    let outputs = match node.op {
        op if op == &ATTENTION || op == &ATTENTION_BLOCK => 1,
        op if op == &ATTENTION_BACKWARD || op == &ATTENTION_BLOCK_BACKWARD => 3,
        _ => 0,
    };
    output < outputs && Strides::of(layout, node.dtype).is_some()
}

fn element(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        _ => "f32",
    }
}

fn bug(message: String) -> Error {
    Error::system("cuda", format!("this is a bug: {message}"))
}

/// Stores `out` and, if the program has it as a second output, the logarithms of the row sums.
pub fn forward(program: &Program, l: &Library, props: &Props) -> Result<Work> {
    let mut b = Builder::new(program, l, props)?;
    let ((q, sq), (k, sk), (v, sv)) = (b.input(0), b.input(1), b.input(2));
    let (to, out) = b.output(0)?.ok_or_else(|| bug("attention without an output".into()))?;
    let x = Tensors { q: sq, k: sk, v: sv, out, ..Tensors::default() };
    // Contiguous: `can_store_layout` accepts only attention outputs.
    let lse = match l.outputs.get(1) {
        Some(&v) if v != ValueId::NONE => Arg::Value(v, 0),
        _ => Arg::I64(0),
    };
    let read = vec![q, k, v];
    let (kernel, read) = match b.groups(Pass::Forward, &x, &read) {
        Some(found) => found,
        None => (b.tile(Pass::Forward)?, read),
    };
    b.launch(Pass::Forward, kernel, &x, [read, vec![to, lse]].concat())?;
    Ok(b.work)
}

/// Stores the gradients of a block: dq and, if the program has them as further outputs, dk and dv. Operands 4 and 5 are delta and lse.
pub fn block_backward(program: &Program, l: &Library, props: &Props) -> Result<Work> {
    let mut b = Builder::new(program, l, props)?;
    let ((q, sq), (k, sk), (v, sv), (grad, sg)) = (b.input(0), b.input(1), b.input(2), b.input(3));
    let (delta, lse) = (b.numbers(4), b.numbers(5));
    let (dq, sdq) = b.output(0)?.ok_or_else(|| bug("attention's backward without an output".into()))?;
    let both = b.gradients_of_keys()?;
    let (sdk, sdv) = both.as_ref().map_or_else(Default::default, |[dk, dv]| (dk.1, dv.1));
    let x = Tensors { q: sq, k: sk, v: sv, grad: sg, dq: sdq, dk: sdk, dv: sdv, ..Tensors::default() };
    let read = [q, k, v, grad];
    let by_groups = b.groups(Pass::BackwardQ, &x, &read).zip(b.groups(Pass::BackwardKv, &x, &read));
    let ((kernel_q, for_q), (kernel_kv, for_kv)) = match by_groups {
        Some(((kernel_q, q), (kernel_kv, kv))) => {
            // What the kernel of dq leaves for that of dk and dv.
            let stats = b.scratch(b.b * b.h * b.padded() * 8);
            ((kernel_q, [q, vec![delta, lse, stats.clone()]].concat()), (kernel_kv, [kv, vec![stats]].concat()))
        }
        None => {
            let read = [&read[..], &[lse, delta]].concat();
            ((b.tile(Pass::BackwardQ)?, read.clone()), (b.tile(Pass::BackwardKv)?, read))
        }
    };
    b.launch(Pass::BackwardQ, kernel_q, &x, [for_q, vec![dq]].concat())?;
    if let Some([(dk, _), (dv, _)]) = both {
        b.launch(Pass::BackwardKv, kernel_kv, &x, [for_kv, vec![dk, dv]].concat())?;
    }
    Ok(b.work)
}

/// Stores dq and, if the program has them as further outputs, dk and dv.
pub fn backward(program: &Program, l: &Library, props: &Props) -> Result<Work> {
    let mut b = Builder::new(program, l, props)?;
    let ((q, sq), (k, sk), (v, sv)) = (b.input(0), b.input(1), b.input(2));
    let ((grad, sg), (out, so)) = (b.input(3), b.input(4));
    let lse = b.saved(5)?;
    let (dq, sdq) = b.output(0)?.ok_or_else(|| bug("attention's backward without an output".into()))?;
    let both = b.gradients_of_keys()?;
    let (sdk, sdv) = both.as_ref().map_or_else(Default::default, |[dk, dv]| (dk.1, dv.1));
    let x = Tensors { q: sq, k: sk, v: sv, out: so, grad: sg, dq: sdq, dk: sdk, dv: sdv };
    let read = [q, k, v, grad.clone()];
    let by_groups = b.groups(Pass::BackwardQ, &x, &read).zip(b.groups(Pass::BackwardKv, &x, &read));

    // Per row: its delta, or the values that warpgroup kernels read.
    let pairs = b.b * b.h;
    let ((kernel_q, for_q), (kernel_kv, for_kv)) = match by_groups {
        Some(((kernel_q, q), (kernel_kv, kv))) => {
            let numbers = b.scratch(pairs * b.padded() * 8);
            ((kernel_q, [q, vec![grad, out, lse, numbers.clone()]].concat()), (kernel_kv, [kv, vec![numbers]].concat()))
        }
        None => {
            let delta = b.scratch(pairs * b.t * 4);
            let blocks = pairs * b.t.div_ceil(256 / lanes(b.size) as usize);
            if blocks > i32::MAX as usize {
                return Err(Error::system("scaled_dot_product_attention", "the rows do not fit in one launch"));
            }
            if blocks > 0 {
                b.work.launches.push(Launch {
                    function: Arc::new(delta_function(b.size, b.dtype)),
                    grid: [blocks as u32, 1, 1],
                    block: [256, 1, 1],
                    shared_bytes: 0,
                    args: vec![grad, out, delta.clone(), b.problem(&x, pairs, 1)],
                });
            }
            let read = [&read[..], &[lse, delta]].concat();
            ((b.tile(Pass::BackwardQ)?, read.clone()), (b.tile(Pass::BackwardKv)?, read))
        }
    };
    b.launch(Pass::BackwardQ, kernel_q, &x, [for_q, vec![dq]].concat())?;
    if let Some([(dk, _), (dv, _)]) = both {
        b.launch(Pass::BackwardKv, kernel_kv, &x, [for_kv, vec![dk, dv]].concat())?;
    }
    Ok(b.work)
}
