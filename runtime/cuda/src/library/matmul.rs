//! matmul without cuBLASLt.

use super::call::{Call, by_value, typed};
use super::space::Space;
use crate::launch::Arg;
use perilune_core::error::Result;

/// Side of the tile that a block makes.
const SIDE: usize = 64;

pub fn product(c: &mut Call) -> Result<()> {
    let (a, b, shape) = (c.input(0)?, c.input(1)?, c.out_shape());
    let r = shape.rank();
    let (batch, m, n) = (&shape.dims()[..r - 2], shape.dims()[r - 2], shape.dims()[r - 1]);
    if shape.numel() == 0 {
        return Ok(());
    }
    let k = a.shape().dims()[r - 1];
    let (sa, sb) = (a.strides(), b.strides());
    let space = Space::new(batch, &[&sa[..r - 2], &sb[..r - 2]]);
    let narrow = space.narrow();
    let (tiles_m, tiles_n) = (m.div_ceil(SIDE), n.div_ceil(SIDE));
    let numbers =
        [m as i64, n as i64, k as i64, sa[r - 2] as i64, sa[r - 1] as i64, sb[r - 2] as i64, sb[r - 1] as i64];
    let bytes = numbers.into_iter().chain([tiles_m as i64, tiles_n as i64]).flat_map(i64::to_ne_bytes).collect();
    let t = typed(c.out_dtype());
    let params = [
        (&*format!("const {t}* a"), a.pointer.clone()),
        (&*format!("const {t}* b"), b.pointer.clone()),
        (&*format!("{t}* out"), c.output(0)),
        (&*by_value(&space, narrow, "walk"), space.arg(narrow)),
        ("const __grid_constant__ library::Product product", Arg::Bytes(bytes)),
    ];
    let blocks = space.numel() * tiles_m * tiles_n;
    c.launch("matmul", "matmul/plain.cuh", &params, "library::product(a, b, out, walk, product);", blocks, 256)
}
