//! Launches argmax and argmin.

use super::call::{BLOCK, Call, Input, by_value, typed, without};
use super::strided::Strided;
use crate::launch::Arg;
use perilune_core::error::Result;

/// Number of threads that keep a GPU busy. It is a constant, so that results do not depend on the model of GPU.
pub const BUSY: usize = 1 << 18;

/// How rows are partitioned: threads per group, parts per row, elements per part.
#[derive(Clone, Copy)]
pub struct Share {
    pub group: usize,
    pub chunks: usize,
    pub chunk: usize,
}

impl Share {
    /// Partitions `rows` rows of `n` elements. `across`: adjacent elements in memory belong to different rows. A group
    /// of threads processes multiples of `each` elements per thread.
    pub fn new(rows: usize, n: usize, across: bool, each: usize, warp: usize) -> Share {
        let group = match n {
            _ if across || n <= 16 => 1,
            n if n <= warp => 32,
            _ => 256,
        };
        let least = if group == 1 { 64 } else { group * each };
        let wanted = (BUSY / group / rows.max(1)).clamp(1, n.div_ceil(least).max(1));
        let chunk = n.div_ceil(wanted).next_multiple_of(least);
        Share { group, chunks: n.div_ceil(chunk).max(1), chunk }
    }
}

/// The rows along the axis: where they start in x.
pub fn rows(x: &Input, axis: usize) -> Strided {
    Strided::new(&without(x.shape().dims(), axis), &[&without(x.strides(), axis)])
}

pub fn argreduce(c: &mut Call) -> Result<()> {
    let (x, axis) = (c.input(0)?, c.axis());
    if c.out_shape().numel() == 0 {
        return Ok(());
    }
    let space = rows(&x, axis);
    let (rows, narrow) = (space.numel(), space.narrow());
    let (n, step) = (x.shape().dims()[axis], x.strides()[axis]);
    let beside = space.strides[0].last().map_or(0, |s| s.unsigned_abs());
    let share = Share::new(rows, n, rows > 1 && beside < step.unsigned_abs(), 32, 1024);
    let (t, group) = (typed(x.dtype), share.group);
    let [row_arg, chunks] = [("i64 rows", Arg::I64(rows as i64)), ("i64 chunks", Arg::I64(share.chunks as i64))];
    let partials = if share.chunks > 1 { Arg::Scratch(c.scratch(rows * share.chunks * 16)) } else { Arg::I64(0) };
    let params = [
        (&*format!("const {t}* x"), x.pointer.clone()),
        ("i64* out", c.output(0)),
        ("library::Best* partials", partials.clone()),
        (&*by_value(&space, narrow, "strided"), space.arg(narrow)),
        row_arg.clone(),
        ("i64 n", Arg::I64(n as i64)),
        ("i64 step", Arg::I64(step as i64)),
        chunks.clone(),
        ("i64 chunk", Arg::I64(share.chunk as i64)),
        ("i32 max", Arg::I32(i32::from(c.attr(1) != 0))),
    ];
    let body = format!(
        "library::arg_reduce<{t}, {group}>(x, out, partials, strided, rows, n, step, chunks, chunk, max != 0);"
    );
    let blocks = (rows * share.chunks * group).div_ceil(BLOCK);
    c.launch("argreduce", "sort/argreduce.cuh", &params, &body, blocks, BLOCK)?;
    if share.chunks > 1 {
        let params = [("const library::Best* partials", partials), ("i64* out", c.output(0)), row_arg, chunks];
        let body = "library::arg_finish(partials, out, rows, chunks);";
        c.each("arg_finish", "sort/argreduce.cuh", &params, body, rows * 32)?;
    }
    Ok(())
}
