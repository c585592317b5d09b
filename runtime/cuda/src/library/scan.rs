//! Launches cumulative sums and products (cumsum, cumprod).

use super::call::{BLOCK, Call, by_value, sum_type, typed, without};
use super::reduce::{BUSY, Share};
use super::strided::Strided;
use crate::launch::Arg;
use perilune_core::error::Result;

/// Strips that a warp processes per step (`STRIPS` in `kernels/scan/scan.cuh`).
const STRIPS: usize = 4;

pub fn scan(c: &mut Call) -> Result<()> {
    let (x, axis, shape) = (c.input(0)?, c.axis(), c.out_shape());
    if shape.numel() == 0 {
        return Ok(());
    }
    let out_strides = shape.strides();
    let space = Strided::new(
        &without(shape.dims(), axis),
        &[&without(x.strides(), axis), &without(&out_strides[..shape.rank()], axis)],
    );
    let (rows, narrow) = (space.numel(), space.narrow());
    let (n, step, out_step) = (shape.dims()[axis], x.strides()[axis], out_strides[axis]);
    let size = x.dtype.size();
    // Elements per load: 16 bytes, or what the registers allow.
    let v = match size {
        1 => 4,
        2 if c.name() == "cumprod" => 4,
        size => 16 / size,
    };
    // If there are enough rows to fill the GPU, one warp scans a row of any length, without barriers.
    let warp = if rows * 32 >= BUSY { usize::MAX } else { 2048 };
    // Depends only on the shape, not on strides: the partition of a row determines the order of additions.
    let share = Share::new(rows, n, rows > 1 && out_step > 1, v * STRIPS, warp);
    let whole = |k: usize, step: isize, aligned: usize| {
        step == 1 && aligned >= v * size && space.strides[k].iter().all(|s| s % v as isize == 0)
    };
    let (packed, out_packed) = (whole(0, step, x.aligned), whole(1, out_step, c.out_aligned()));
    let t = typed(x.dtype);
    let op = if c.name() == "cumsum" { "library::Plus" } else { "library::Times" };
    let (sum, sum_bytes) = sum_type(x.dtype);
    let totals = if share.chunks > 1 { Arg::Scratch(c.scratch(rows * share.chunks * sum_bytes)) } else { Arg::I64(0) };
    let kind = format!("{t}, {op}, {}", share.group);
    let source = (&*format!("const {t}* x"), x.pointer.clone());
    let strided = (&*by_value(&space, narrow, "strided"), space.arg(narrow));
    let sizes = [("i64 rows", Arg::I64(rows as i64)), ("i64 n", Arg::I64(n as i64))];
    let [row_arg, n_arg] = sizes;
    let step_arg = ("i64 step", Arg::I64(step as i64));
    let [chunks, chunk] = [("i64 chunks", Arg::I64(share.chunks as i64)), ("i64 chunk", Arg::I64(share.chunk as i64))];
    if share.chunks > 1 {
        let params = [
            source.clone(),
            (&*format!("{sum}* totals"), totals.clone()),
            strided.clone(),
            row_arg.clone(),
            n_arg.clone(),
            step_arg.clone(),
            chunks.clone(),
            chunk.clone(),
        ];
        let body =
            format!("library::scan_totals<{kind}, {v}, {packed}>(x, totals, strided, rows, n, step, chunks, chunk);");
        let blocks = (rows * (share.chunks - 1) * share.group).div_ceil(BLOCK);
        c.launch("scan_totals", "scan/scan.cuh", &params, &body, blocks, BLOCK)?;
    }
    let params = [
        source,
        (&*format!("{t}* out"), c.output(0)),
        (&*format!("const {sum}* totals"), totals),
        strided,
        row_arg,
        n_arg,
        step_arg,
        ("i64 out_step", Arg::I64(out_step as i64)),
        chunks,
        chunk,
    ];
    let body = format!(
        "library::scan_rows<{kind}, {v}, {packed}, {out_packed}>(x, out, totals, strided, rows, n, step, out_step, chunks, \
         chunk);"
    );
    let blocks = (rows * share.chunks * share.group).div_ceil(BLOCK);
    c.launch(c.name(), "scan/scan.cuh", &params, &body, blocks, BLOCK)
}
