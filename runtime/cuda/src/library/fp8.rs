//! Lowers matmul_fp8 to cuBLASLt: which products it supports, and which operands are copied first.
//!
//! cuBLASLt's fp8 kernels need both operands with K contiguous. Other operands, as in a backward pass, are transposed or copied
//! into the workspace first.

use super::call::{Call, Input};
use crate::blas::{ALIGNMENT, Problem};
use crate::launch::{Arg, Work};
use perilune_core::DType;
use perilune_core::error::Result;
use perilune_core::graph::Node;
use perilune_core::ops::Op;
use perilune_core::ops::fp8::{Format, MATMUL_FP8, Product};
use perilune_plan::ir::{Library, Program};

/// N and K must be multiples of this.
const MULTIPLE: usize = 16;
/// Side of the tiles in `transpose.cuh`.
const TILE: usize = 128;
/// The first architecture with fp8 products.
const FIRST: (u32, u32) = (8, 9);

pub fn is(op: &Op) -> bool {
    op == &MATMUL_FP8
}

/// Whether a node is a product that cuBLASLt supports on a device of that architecture.
pub fn has_kernel(node: &Node, arch: (u32, u32)) -> bool {
    is(node.op) && arch >= FIRST && takes(node)
}

fn takes(node: &Node) -> bool {
    let k = node.attrs[4] as usize;
    let n = node.shape.dims()[1];
    let formats = Product::read(&node.attrs).formats;
    node.shape.numel() > 0
        && k > 0
        && k.is_multiple_of(MULTIPLE)
        && n.is_multiple_of(MULTIPLE)
        && formats != [Format::E5M2; 2]
}

/// A product and the addresses of its operands.
#[derive(Clone, PartialEq, Debug)]
pub struct Operands {
    pub problem: Problem,
    pub a: Arg,
    pub b: Arg,
    pub scales: [Arg; 2],
    pub bias: Option<Arg>,
    pub out: Arg,
}

/// Copies of operands with other layouts, and the product.
pub fn parts(program: &Program, l: &Library) -> Result<(Work, Operands)> {
    let mut c = Call::new(program, l)?;
    let (a, b) = (c.input(0)?, c.input(1)?);
    let (m, n, k) = (a.shape().dims()[0], b.shape().dims()[0], a.shape().dims()[1]);
    let problem = Problem::fp8(Product::read(&l.attrs), c.out_dtype(), m, n, k);
    let (a, b) = (bytes(&mut c, &a)?, bytes(&mut c, &b)?);
    let scales = [number(&mut c, 2)?, number(&mut c, 3)?];
    let bias = if c.inputs.len() > 4 { Some(vector(&mut c, 4)?) } else { None };
    let out = c.output(0);
    Ok((c.finish(), Operands { problem, a, b, scales, bias, out }))
}

/// Returns an fp8 operand with K contiguous.
fn bytes(c: &mut Call, x: &Input) -> Result<Arg> {
    let (rows, k) = (x.shape().dims()[0], x.shape().dims()[1]);
    let (down, along) = (x.strides()[0], x.strides()[1]);
    let dense = along == 1 && (down == k as isize || rows == 1);
    if dense && x.aligned >= ALIGNMENT as usize {
        return Ok(x.pointer.clone());
    }
    let to = c.scratch(rows * k);
    let aligned = |n: isize| n >= 0 && n.unsigned_abs().is_multiple_of(ALIGNMENT as usize);
    let turned = down == 1 && aligned(along) && aligned(rows as isize) && x.aligned >= ALIGNMENT as usize;
    if !turned || !k.is_multiple_of(ALIGNMENT as usize) {
        return copy(c, x, [rows, k], [down, along], "u8", to);
    }
    let params = [
        ("const u8* x", x.pointer.clone()),
        ("u8* y", Arg::Scratch(to)),
        ("i64 rows", Arg::I64(k as i64)),
        ("i64 cols", Arg::I64(rows as i64)),
        ("i64 stride", Arg::I64(along as i64)),
    ];
    let body = "library::transpose_bytes(x, y, rows, cols, stride);";
    let blocks = k.div_ceil(TILE) * rows.div_ceil(TILE);
    c.launch("transpose", "movement/transpose.cuh", &params, body, blocks, 256)?;
    Ok(Arg::Scratch(to))
}

fn copy(c: &mut Call, x: &Input, dims: [usize; 2], strides: [isize; 2], t: &str, to: usize) -> Result<Arg> {
    let (from, result) = (format!("const {t}* x"), format!("{t}* y"));
    let params = [
        (&*from, x.pointer.clone()),
        (&*result, Arg::Scratch(to)),
        ("i64 rows", Arg::I64(dims[0] as i64)),
        ("i64 cols", Arg::I64(dims[1] as i64)),
        ("i64 row_stride", Arg::I64(strides[0] as i64)),
        ("i64 col_stride", Arg::I64(strides[1] as i64)),
    ];
    let body = "library::dense(x, y, rows, cols, row_stride, col_stride);";
    c.each("dense", "movement/transpose.cuh", &params, body, dims[0] * dims[1])?;
    Ok(Arg::Scratch(to))
}

/// Returns the address of an f32. Constants of the program are in a table that only a kernel can address, so they are
/// copied.
fn number(c: &mut Call, i: usize) -> Result<Arg> {
    let x = c.input(i)?;
    if matches!(x.pointer, Arg::Value(..)) {
        return Ok(x.pointer);
    }
    let to = c.scratch(size_of::<f32>());
    copy(c, &x, [1, 1], [0, 0], "f32", to)
}

/// Returns the address of a contiguous bias.
fn vector(c: &mut Call, i: usize) -> Result<Arg> {
    let x = c.input(i)?;
    let (n, step) = (x.shape().numel(), x.strides()[0]);
    if matches!(x.pointer, Arg::Value(..)) && step == 1 && x.aligned >= ALIGNMENT as usize {
        return Ok(x.pointer);
    }
    let to = c.scratch(n * size_of::<u16>());
    let t = if x.dtype == DType::BF16 { "bf16" } else { "f16" };
    copy(c, &x, [1, n], [0, step], t, to)
}
