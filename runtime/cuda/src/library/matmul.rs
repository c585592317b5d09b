//! Launches matmul and linear without cuBLASLt: for dtypes that it does not support, and for products so small that its
//! launch takes longer.

use super::call::{Call, Input, by_value, typed};
use super::strided::Strided;
use crate::launch::Arg;
use perilune_core::DType;
use perilune_core::error::Result;

/// Sides of a block's output tile, in `plain.cuh` and in `small.cuh`.
const SIDES: [usize; 2] = [64, 16];
/// Maximum blocks of `small.cuh` and maximum sum length of a float product that uses it instead of cuBLASLt.
const SMALL_BLOCKS: usize = 264;
const SMALL_DEPTH: usize = 256;

/// Whether a product (B, M, K) x (B, K, N) takes less time than starting a cuBLASLt kernel. The rule depends only on
/// the shape, because the choice of kernel determines the order of additions.
pub fn is_small(dtype: DType, batch: usize, m: usize, n: usize, k: usize) -> bool {
    let blocks = batch * m.div_ceil(SIDES[1]) * n.div_ceil(SIDES[1]);
    matches!(dtype, DType::F32 | DType::BF16 | DType::F16) && k <= SMALL_DEPTH && blocks <= SMALL_BLOCKS
}

pub fn product(c: &mut Call) -> Result<()> {
    let (a, b) = (c.input(0)?, c.input(1)?);
    launch(c, &a, &b, None)
}

/// Computes x (M, K), weight (N, K), bias (N) -> (M, N).
pub fn linear(c: &mut Call) -> Result<()> {
    let (x, w, bias) = (c.input(0)?, c.input(1)?, c.input(2)?);
    let wt = Input { layout: w.layout.permute(&[1, 0]), ..w };
    launch(c, &x, &wt, Some(bias))
}

fn launch(c: &mut Call, a: &Input, b: &Input, bias: Option<Input>) -> Result<()> {
    let shape = c.out_shape();
    let r = shape.rank();
    let (batch, m, n) = (&shape.dims()[..r - 2], shape.dims()[r - 2], shape.dims()[r - 1]);
    if shape.numel() == 0 {
        return Ok(());
    }
    let k = a.shape().dims()[r - 1];
    let (sa, sb) = (a.strides(), b.strides());
    let space = Strided::new(batch, &[&sa[..r - 2], &sb[..r - 2]]);
    let narrow = space.narrow();
    let small = is_small(c.out_dtype(), space.numel(), m, n, k);
    let side = SIDES[usize::from(small)];
    let (tiles_m, tiles_n) = (m.div_ceil(side), n.div_ceil(side));
    let numbers =
        [m as i64, n as i64, k as i64, sa[r - 2] as i64, sa[r - 1] as i64, sb[r - 2] as i64, sb[r - 1] as i64];
    let step = bias.as_ref().map_or(0, |b| b.strides()[0] as i64);
    let bytes = numbers.into_iter().chain([tiles_m as i64, tiles_n as i64, step]).flat_map(i64::to_ne_bytes).collect();
    let t = typed(c.out_dtype());
    let operand = format!("const {t}* ");
    let names =
        [format!("{operand}a"), format!("{operand}b"), format!("{t}* out"), by_value(&space, narrow, "strided")];
    let mut params = vec![
        (&*names[0], a.pointer.clone()),
        (&*names[1], b.pointer.clone()),
        (&*names[2], c.output(0)),
        (&*names[3], space.arg(narrow)),
        ("const __grid_constant__ library::Product product", Arg::Bytes(bytes)),
    ];
    let blocks = space.numel() * tiles_m * tiles_n;
    let name = format!("{operand}bias");
    let (label, last) = match bias {
        Some(b) => {
            params.push((&name, b.pointer));
            ("linear", ", bias")
        }
        None => ("matmul", ""),
    };
    let (header, name) = if small { ("matmul/small.cuh", "product_small") } else { ("matmul/plain.cuh", "product") };
    let body = format!("library::{name}(a, b, out, strided, product{last});");
    c.launch(label, header, &params, &body, blocks, 256)
}
