//! matmul and linear without cuBLASLt.

use super::call::{Call, Input, by_value, typed};
use super::space::Space;
use crate::launch::Arg;
use perilune_core::error::Result;

/// Side of the tile that a block makes.
const SIDE: usize = 64;

pub fn product(c: &mut Call) -> Result<()> {
    let (a, b) = (c.input(0)?, c.input(1)?);
    launch(c, &a, &b, None)
}

/// x (M, K), weight (N, K), bias (N).
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
    let space = Space::new(batch, &[&sa[..r - 2], &sb[..r - 2]]);
    let narrow = space.narrow();
    let (tiles_m, tiles_n) = (m.div_ceil(SIDE), n.div_ceil(SIDE));
    let numbers =
        [m as i64, n as i64, k as i64, sa[r - 2] as i64, sa[r - 1] as i64, sb[r - 2] as i64, sb[r - 1] as i64];
    let step = bias.as_ref().map_or(0, |b| b.strides()[0] as i64);
    let bytes = numbers.into_iter().chain([tiles_m as i64, tiles_n as i64, step]).flat_map(i64::to_ne_bytes).collect();
    let t = typed(c.out_dtype());
    let operand = format!("const {t}* ");
    let names = [format!("{operand}a"), format!("{operand}b"), format!("{t}* out"), by_value(&space, narrow, "walk")];
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
    let body = format!("library::product(a, b, out, walk, product{last});");
    c.launch(label, "matmul/plain.cuh", &params, &body, blocks, 256)
}
