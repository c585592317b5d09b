//! Launches affine_sample (`kernels/movement/affine_sample.cuh`).

use super::call::{Call, typed};
use crate::launch::Arg;
use perilune_core::error::Result;
use perilune_core::ops::affine::Border;

pub fn affine_sample(c: &mut Call) -> Result<()> {
    let (x, m, to) = (c.input(0)?, c.input(1)?, c.out_shape());
    let border = Border::of(&c.library.attrs);
    let (from, to) = (x.shape().dims().to_vec(), to.dims().to_vec());
    // `library::Affine`: strides, then (N, C, H, W, OH, OW), then the fill.
    let strides = x.strides().iter().take(4).chain(m.strides().iter().take(3)).map(|s| *s as i64);
    let dims = [to[0], to[1], from[2], from[3], to[2], to[3]].map(|n| n as i64);
    let mut problem: Vec<u8> = strides.chain(dims).flat_map(i64::to_le_bytes).collect();
    problem.extend(border.fill.to_le_bytes());
    let (t, f, edge) = (typed(x.dtype), typed(c.out_dtype()), border.edge);
    let params = [
        (&*format!("const {t}* x"), x.pointer.clone()),
        (&*format!("const {f}* m"), m.pointer.clone()),
        (&*format!("{f}* out"), c.output(0)),
        ("const __grid_constant__ library::Affine p", Arg::Bytes(problem)),
    ];
    let body = format!("library::affine_sample<{t}, {f}, {edge}>(x, m, out, p);");
    c.each(&format!("affine_sample_{t}"), "movement/affine_sample.cuh", &params, &body, to[0] * to[2] * to[3])
}
