//! Launches strided_pad, col2im and cat.

use super::call::{Call, Input, by_value, sized, stored, typed};
use super::strided::Strided;
use crate::launch::{Arg, Word};
use perilune_core::error::{Error, Result};
use perilune_core::{DType, Layout, Number};

/// The largest number of elements, up to 16 bytes, that `fits` allows to be moved as one.
fn group(size: usize, aligned: usize, fits: impl Fn(usize) -> bool) -> usize {
    [16, 8, 4, 2].into_iter().find(|&v| v * size <= aligned && fits(v)).unwrap_or(1)
}

/// Repeats an element over a word.
fn repeated(word: u64, size: usize) -> i64 {
    let bytes = word.to_ne_bytes();
    i64::from_ne_bytes(std::array::from_fn(|i| bytes[i % size]))
}

pub fn strided_pad(c: &mut Call) -> Result<()> {
    let (x, axis, shape) = (c.input(0)?, c.axis(), c.out_shape());
    let (low, step) = (c.attr(1), c.attr(2).max(1));
    let (mut low, mut count, mut x_step) = (low, x.shape().dims()[axis] as i64, x.strides()[axis] as i64);
    let number = f64::from_bits(c.attr(4) as u64);
    let dtype = c.out_dtype();
    let fill = stored(dtype, Number::Float(number).bits(dtype));
    if shape.numel() == 0 {
        return Ok(());
    }
    let mut coordinate = vec![0; shape.rank()];
    coordinate[axis] = 1;
    let mut space = Strided::new(shape.dims(), &[&x.held(axis), &coordinate]);
    let (size, aligned) = (x.dtype.size(), x.aligned.min(c.out_aligned()));
    let last = space.dims.len() - 1;
    let v = if space.strides[1][last] == 0 {
        // Whole slices along the last dims.
        let v = group(size, aligned, |v| space.packs(0, v) && space.still(1, v) && x_step % v as i64 == 0);
        space = space.grouped(v, &[0]);
        x_step /= v as i64;
        v
    } else if step == 1 && x_step == 1 {
        // The axis itself is the last dim: a group is entirely inside x or outside.
        let v = group(size, aligned, |v| {
            let all = [low, count, space.dims[last] as i64];
            all.iter().all(|n| n % v as i64 == 0) && space.strides[0][..last].iter().all(|s| s % v as isize == 0)
        });
        let pack = 16 / size;
        if v < pack && c.out_aligned() == 16 && space.still(0, pack) {
            return strided_pad_packs(c, &x, space.grouped(pack, &[]), low, count, fill);
        }
        space = space.grouped(v, &[0]);
        // Coordinates count groups too.
        space.strides[1][last] = 1;
        low /= v as i64;
        count /= v as i64;
        v
    } else {
        1
    };
    let t = sized(size * v);
    let narrow = space.narrow();
    let n = space.numel();
    let params = [
        (&*format!("const {t}* x"), x.pointer.clone()),
        (&*format!("{t}* out"), c.output(0)),
        (&*by_value(&space, narrow, "strided"), space.arg(narrow)),
        ("i64 n", Arg::I64(n as i64)),
        ("i64 low", Arg::I64(low)),
        ("i64 step", Arg::I64(step)),
        ("i64 count", Arg::I64(count)),
        ("i64 x_step", Arg::I64(x_step)),
        ("u64 fill", Arg::I64(repeated(fill, size))),
    ];
    let body = "library::strided_pad(x, out, strided, n, low, step, count, x_step, fill);";
    c.each("strided_pad", "movement/strided_pad.cuh", &params, body, n)
}

/// Pads along the last dim if the rows of the result begin at multiples of 16 bytes but those of x do not. `space`
/// iterates over packs of the result.
fn strided_pad_packs(c: &mut Call, x: &Input, space: Strided, low: i64, count: i64, fill: u64) -> Result<()> {
    let (size, narrow, n) = (x.dtype.size(), space.narrow(), space.numel());
    let t = sized(size);
    let params = [
        (&*format!("const {t}* x"), x.pointer.clone()),
        (&*format!("{t}* out"), c.output(0)),
        (&*by_value(&space, narrow, "strided"), space.arg(narrow)),
        ("i64 n", Arg::I64(n as i64)),
        ("i64 low", Arg::I64(low)),
        ("i64 count", Arg::I64(count)),
        ("u64 fill", Arg::I64(repeated(fill, size))),
    ];
    let body = format!("library::strided_pad_vec<{t}, {}>(x, out, strided, n, low, count, fill);", 16 / size);
    c.each("strided_pad_packs", "movement/strided_pad.cuh", &params, &body, n)
}

pub fn col2im(c: &mut Call) -> Result<()> {
    let (x, axis, shape) = (c.input(0)?, c.axis(), c.out_shape());
    let dims = [c.attr(1), c.attr(2), c.attr(3), x.shape().dims()[axis] as i64];
    let mut small = [0i32; 4];
    for (to, n) in small.iter_mut().zip(dims) {
        *to = i32::try_from(n).map_err(|_| Error::system("col2im", "windows of more than 2^31 elements"))?;
    }
    let [size, step, dilation, windows] = small;
    let (window_step, r) = (x.strides()[axis], x.shape().rank());
    let mut held = x.held(axis);
    held.truncate(r - 1);
    let mut coordinate = vec![0; shape.rank()];
    coordinate[axis] = 1;
    let space = Strided::new(shape.dims(), &[&held, &coordinate]);
    let (n, narrow) = (space.numel(), space.narrow());
    let t = typed(c.out_dtype());
    let params = [
        (&*format!("const {t}* x"), x.pointer.clone()),
        (&*format!("{t}* out"), c.output(0)),
        (&*by_value(&space, narrow, "strided"), space.arg(narrow)),
        ("i64 n", Arg::I64(n as i64)),
        ("i32 size", Arg::I32(size)),
        ("i32 step", Arg::I32(step.max(1))),
        ("i32 dilation", Arg::I32(dilation.max(1))),
        ("i32 windows", Arg::I32(windows)),
        ("i64 window_step", Arg::I64(window_step as i64)),
        ("i64 x_step", Arg::I64(x.strides()[r - 1] as i64)),
    ];
    let body = "library::col2im(x, out, strided, n, size, step, dilation, windows, window_step, x_step);";
    c.each("col2im", "movement/col2im.cuh", &params, body, n)
}

/// Maximum elements of `cat` inputs that share a launch.
const SMALL: usize = 1 << 16;

pub fn cat(c: &mut Call) -> Result<()> {
    if let Some(parts) = small_parts(c) {
        return cat_small(c, &parts);
    }
    let (axis, shape, dtype) = (c.axis(), c.out_shape(), c.out_dtype());
    let out = Layout::contiguous(shape);
    let mut low = 0;
    for k in 0..c.inputs.len() {
        let x = c.input(k)?;
        copy(c, "cat", &x, dtype, &out, low * out.strides[axis] as usize)?;
        low += x.shape().dims()[axis];
    }
    Ok(())
}

/// Address and element count of each input, if all are small and contiguous in the output.
fn small_parts(c: &Call) -> Option<Vec<(Word, usize)>> {
    let outer: usize = c.out_shape().dims()[..c.axis()].iter().product();
    let part = |x: &Input| match x.pointer {
        Arg::Value(v, bytes) if x.layout.is_contiguous() && x.shape().numel() <= SMALL => {
            Some((Word::Value(v, bytes), x.shape().numel()))
        }
        _ => None,
    };
    let parts: Option<Vec<_>> = c.inputs.iter().map(part).collect();
    parts.filter(|p| outer == 1 && p.len() > 2)
}

/// Concatenates many scalars in one launch, such as the norms of an optimizer's gradients.
fn cat_small(c: &mut Call, parts: &[(Word, usize)]) -> Result<()> {
    let mut table = Vec::with_capacity(3 * parts.len());
    let mut start = 0;
    for (address, n) in parts {
        table.extend([*address, Word::Number(start as u64), Word::Number(*n as u64)]);
        start += n;
    }
    let t = sized(c.out_dtype().size());
    let params = [("const u64* table", Arg::Table(table.into())), (&*format!("{t}* out"), c.output(0))];
    c.launch("cat_small", "movement/strided_pad.cuh", &params, "library::cat_small(table, out);", parts.len(), 256)
}

/// Copies x into the output, starting at element `start`.
pub fn copy(c: &mut Call, label: &str, x: &Input, dtype: DType, out: &Layout, start: usize) -> Result<()> {
    let (size, start) = (dtype.size(), start * dtype.size());
    let mut space = Strided::new(x.shape().dims(), &[x.strides(), out.strides()]);
    if space.numel() == 0 {
        return Ok(());
    }
    let to = c.out_aligned().min(1 << start.trailing_zeros().min(4));
    let v = group(size, x.aligned.min(to), |v| space.packs(0, v) && space.packs(1, v));
    space = space.grouped(v, &[0, 1]);
    let (t, n, narrow) = (sized(size * v), space.numel(), space.narrow());
    let params = [
        (&*format!("const {t}* x"), x.pointer.clone()),
        (&*format!("{t}* out"), c.output(start)),
        (&*by_value(&space, narrow, "strided"), space.arg(narrow)),
        ("i64 n", Arg::I64(n as i64)),
    ];
    c.each(label, "movement/strided_pad.cuh", &params, "library::copy(x, out, strided, n);", n)
}
