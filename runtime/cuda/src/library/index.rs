//! Launches gather, index_select, scatter and index checks.

use super::call::{Call, Input, by_value, sized};
use super::strided::Strided;
use crate::launch::Arg;
use perilune_core::Layout;
use perilune_core::error::Result;

/// Launches only the check of indices, for results without elements.
pub fn check_indices(c: &mut Call, index: &Input, size: usize) -> Result<()> {
    let space = Strided::new(index.shape().dims(), &[index.strides()]);
    let (n, narrow) = (space.numel(), space.narrow());
    let params = [
        ("const i64* index", index.pointer.clone()),
        (&*by_value(&space, narrow, "strided"), space.arg(narrow)),
        ("i64 n", Arg::I64(n as i64)),
        ("i64 size", Arg::I64(size as i64)),
        ("Fault* fault", Arg::Fault),
    ];
    c.each("check_indices", "index/gather.cuh", &params, "library::check(index, strided, n, size, fault);", n)
}

/// `attrs`: [classes, which loss, the ignored id].
pub fn class_ids(c: &mut Call) -> Result<()> {
    let ids = c.input(0)?;
    let space = Strided::new(ids.shape().dims(), &[ids.strides()]);
    let (n, narrow) = (space.numel(), space.narrow());
    let params = [
        ("const i64* ids", ids.pointer.clone()),
        ("i64* out", c.output(0)),
        (&*by_value(&space, narrow, "strided"), space.arg(narrow)),
        ("i64 n", Arg::I64(n as i64)),
        ("i64 size", Arg::I64(c.attr(0))),
        ("i64 ignored", Arg::I64(c.attr(2))),
        ("Fault* fault", Arg::Fault),
    ];
    let body = "library::class_ids(ids, out, strided, n, size, ignored, fault);";
    c.each("class_ids", "index/gather.cuh", &params, body, n)
}

pub fn gather(c: &mut Call) -> Result<()> {
    let (x, index, axis) = (c.input(0)?, c.input(1)?, c.axis());
    let strides = index.strides().to_vec();
    by_index(c, &x, &index, axis, &strides)
}

pub fn index_select(c: &mut Call) -> Result<()> {
    let (x, index, axis) = (c.input(0)?, c.input(1)?, c.axis());
    if c.out_shape().numel() == 0 {
        return check_indices(c, &index, x.shape().dims()[axis]);
    }
    let mut strides = vec![0; x.shape().rank()];
    strides[axis] = index.strides()[0];
    by_index(c, &x, &index, axis, &strides)
}

/// Reads x at the given indices; `strides` are those of the index over the dims of the result.
fn by_index(c: &mut Call, x: &Input, index: &Input, axis: usize, strides: &[isize]) -> Result<()> {
    let (shape, size) = (c.out_shape(), x.dtype.size());
    let mut space = Strided::new(shape.dims(), &[&x.held(axis), strides]);
    let mut step = x.strides()[axis];
    // Contiguous slices move in accesses of up to 16 bytes.
    let most = x.aligned.min(c.out_aligned()) / size;
    let v = [16, 8, 4, 2]
        .into_iter()
        .find(|&v| v <= most && v * size <= 16 && space.packs(0, v) && space.still(1, v) && step % v as isize == 0);
    if let Some(v) = v {
        space = space.grouped(v, &[0]);
        step /= v as isize;
    }
    let t = sized(size * v.unwrap_or(1));
    let (n, narrow) = (space.numel(), space.narrow());
    let params = [
        (&*format!("const {t}* x"), x.pointer.clone()),
        ("const i64* index", index.pointer.clone()),
        (&*format!("{t}* out"), c.output(0)),
        (&*by_value(&space, narrow, "strided"), space.arg(narrow)),
        ("i64 n", Arg::I64(n as i64)),
        ("i64 step", Arg::I64(step as i64)),
        ("i64 size", Arg::I64(x.shape().dims()[axis] as i64)),
        ("Fault* fault", Arg::Fault),
    ];
    let body = "library::gather(x, index, out, strided, n, step, size, fault);";
    c.each(c.name(), "index/gather.cuh", &params, body, n)
}

pub fn scatter(c: &mut Call) -> Result<()> {
    let (x, index, src, axis) = (c.input(0)?, c.input(1)?, c.input(2)?, c.axis());
    let shape = c.out_shape();
    if shape.numel() == 0 {
        return check_indices(c, &index, shape.dims()[axis]);
    }
    let out = Layout::contiguous(shape);
    let mut held = out.strides().to_vec();
    held[axis] = 0;
    let claims = Strided::new(index.shape().dims(), &[index.strides(), &held]);
    let (to, from) = (Strided::new(shape.dims(), &[x.strides()]), Strided::new(src.shape().dims(), &[src.strides()]));
    let narrow = claims.narrow() && to.narrow() && from.narrow();
    let (n, writes) = (shape.numel(), claims.numel());
    let word = if narrow { "u32" } else { "u64" };
    let table = c.scratch(n * if narrow { 4 } else { 8 });
    let params = [(&*format!("{word}* table"), Arg::Scratch(table)), ("i64 n", Arg::I64(n as i64))];
    c.each("scatter_clear", "index/scatter.cuh", &params, "library::clear(table, n);", n)?;
    let params = [
        ("const i64* index", index.pointer.clone()),
        (&*format!("{word}* table"), Arg::Scratch(table)),
        (&*by_value(&claims, narrow, "strided"), claims.arg(narrow)),
        ("i64 n", Arg::I64(writes as i64)),
        ("i64 step", Arg::I64(out.strides[axis] as i64)),
        ("i64 size", Arg::I64(shape.dims()[axis] as i64)),
        ("Fault* fault", Arg::Fault),
    ];
    let body = "library::claim(index, table, strided, n, step, size, fault);";
    c.each("scatter_claim", "index/scatter.cuh", &params, body, writes)?;
    let t = sized(x.dtype.size());
    let params = [
        (&*format!("const {t}* x"), x.pointer.clone()),
        (&*format!("const {t}* src"), src.pointer.clone()),
        (&*format!("const {word}* table"), Arg::Scratch(table)),
        (&*format!("{t}* out"), c.output(0)),
        (&*by_value(&to, narrow, "to"), to.arg(narrow)),
        (&*by_value(&from, narrow, "from"), from.arg(narrow)),
        ("i64 n", Arg::I64(n as i64)),
    ];
    c.each("scatter", "index/scatter.cuh", &params, "library::pick(x, src, table, out, to, from, n);", n)
}
