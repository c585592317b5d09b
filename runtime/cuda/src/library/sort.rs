//! Launches argsort and the stable sorts of index lists: bitonic for short rows, radix for long ones.

use super::call::{BLOCK, Call, by_value, typed, without};
use super::strided::Strided;
use crate::launch::Arg;
use perilune_core::DType;
use perilune_core::error::{Error, Result};

/// Maximum length of lists that are sorted by comparisons, in shared memory.
const SHORT: usize = 2048;
/// Minimum length of rows for radix sort instead, as long as a row fits a block (`MIDDLE`, or half of it for 64 bits).
const SHORT_ROW: usize = 512;
const MIDDLE: usize = 4096;
/// Number of values of a digit.
const RADIX: usize = 256;

/// The unsigned type of an element's key, its bytes, and its number of significant bits.
fn key_of(dtype: DType) -> (&'static str, usize, usize) {
    match dtype {
        DType::F64 | DType::I64 => ("u64", 8, 64),
        DType::F32 | DType::I32 => ("u32", 4, 32),
        DType::BF16 | DType::F16 => ("u32", 4, 16),
        DType::U8 | DType::Bool => ("u32", 4, 8),
    }
}

/// Positions are 32-bit.
fn sortable(c: &Call, n: usize) -> Result<()> {
    if n < 1 << 31 {
        return Ok(());
    }
    Err(Error::argument(c.name(), format!("{n} elements: a GPU sorts at most 2^31 at once")))
}

pub fn argsort(c: &mut Call) -> Result<()> {
    let (x, axis, shape) = (c.input(0)?, c.axis(), c.out_shape());
    if shape.numel() == 0 {
        return Ok(());
    }
    let n = shape.dims()[axis];
    let inner: usize = shape.dims()[axis + 1..].iter().product();
    let space = Strided::new(&without(shape.dims(), axis), &[&without(x.strides(), axis)]);
    let (rows, narrow, step) = (space.numel(), space.narrow(), x.strides()[axis]);
    sortable(c, n)?;
    let (t, descending) = (typed(x.dtype), i32::from(c.attr(1) != 0));
    let source = (&*format!("const {t}* x"), x.pointer.clone());
    let strided = (&*by_value(&space, narrow, "strided"), space.arg(narrow));
    let [length, step] = [("i64 n", Arg::I64(n as i64)), ("i64 step", Arg::I64(step as i64))];
    let descending = ("i32 descending", Arg::I32(descending));
    if n <= SHORT_ROW {
        let p = n.next_power_of_two().max(2);
        let params = [
            source,
            ("i64* out", c.output(0)),
            strided,
            ("i64 rows", Arg::I64(rows as i64)),
            length,
            step,
            ("i64 inner", Arg::I64(inner as i64)),
            descending,
        ];
        let body = format!("library::sort_rows<{t}, {p}>(x, out, strided, rows, n, step, inner, descending != 0);");
        let blocks = rows.div_ceil(512_usize.div_ceil(p));
        return c.launch("argsort_short", "sort/block.cuh", &params, &body, blocks, BLOCK);
    }
    let (key, bytes, bits) = key_of(x.dtype);
    if n <= if bytes == 8 { MIDDLE / 2 } else { MIDDLE } {
        let items = n.next_power_of_two() / RADIX;
        let params = [
            source,
            ("i64* out", c.output(0)),
            strided,
            ("u32 n", Arg::I32(n as i32)),
            step,
            ("i64 inner", Arg::I64(inner as i64)),
            descending,
            ("u32 bits", Arg::I32(bits as i32)),
        ];
        let body = format!("library::radix_row<{t}, {items}>(x, out, strided, n, step, inner, descending != 0, bits);");
        let size = [rows, RADIX];
        return c.launch_resident("argsort_row", "sort/radix.cuh", &params, &body, size, "library::ROW_BLOCKS");
    }
    let keys = [c.scratch(rows * n * bytes), c.scratch(rows * n * bytes)];
    let params = [source, (&*format!("{key}* keys"), Arg::Scratch(keys[0])), strided, length, step, descending];
    let body = format!("library::row_keys<{t}>(x, keys, strided, n, step, descending != 0);");
    c.launch("argsort_keys", "sort/radix.cuh", &params, &body, rows * n.div_ceil(BLOCK), BLOCK)?;
    let order = [c.scratch(rows * n * 4), c.scratch(rows * n * 4)];
    radix(c, Keys { key, bytes, bits, rows, n }, keys, order, Some(inner)).map(|_| ())
}

/// Unsigned keys to be sorted: `rows` lists of `n`.
#[derive(Clone, Copy)]
struct Keys {
    key: &'static str,
    bytes: usize,
    bits: usize,
    rows: usize,
    n: usize,
}

/// Sorts `keys[0]`; the other buffers have the same sizes. Returns which buffers of keys and positions hold the result.
/// With `positions` (the elements after the axis), only the output is written, as i64.
fn radix(c: &mut Call, k: Keys, keys: [usize; 2], order: [usize; 2], positions: Option<usize>) -> Result<usize> {
    // Pairs per thread: few if larger tiles would leave multiprocessors idle.
    let items = match k.bytes {
        _ if k.rows * k.n <= 1 << 18 => 4,
        8 => 8,
        _ => 16,
    };
    let tiles = k.n.div_ceil(RADIX * items);
    let stride = tiles.next_multiple_of(4);
    let lists = k.rows * RADIX;
    let (counts, totals) = (c.scratch(lists * stride * 4), c.scratch(lists * 4));
    let passes = k.bits.div_ceil(8).max(1);
    let (t, mut at) = (k.key, 0);
    let number = |n: usize| Arg::I32(n as u32 as i32);
    for pass in 0..passes {
        let (first, last) = (pass == 0, pass + 1 == passes && positions.is_some());
        let source = (&*format!("const {t}* keys"), Arg::Scratch(keys[at]));
        let sizes = [("u32 n", number(k.n)), ("u32 tiles", number(tiles)), ("u32 stride", number(stride))];
        let [n, tiles_arg, stride_arg] = sizes;
        let shift = ("u32 shift", number(pass * 8));
        let params = [
            source.clone(),
            ("u32* counts", Arg::Scratch(counts)),
            n.clone(),
            tiles_arg.clone(),
            stride_arg.clone(),
            shift.clone(),
        ];
        let body = format!("library::radix_count<{t}, {items}>(keys, counts, n, tiles, stride, shift);");
        c.launch("radix_count", "sort/radix.cuh", &params, &body, k.rows * tiles, RADIX)?;
        let params = [
            ("u32* counts", Arg::Scratch(counts)),
            ("u32* totals", Arg::Scratch(totals)),
            ("i64 lists", Arg::I64(lists as i64)),
            tiles_arg.clone(),
            stride_arg.clone(),
        ];
        let body = "library::radix_scan(counts, totals, lists, tiles, stride);";
        c.each("radix_scan", "sort/radix.cuh", &params, body, lists * 32)?;
        let params = [
            source,
            ("const u32* order", Arg::Scratch(order[at])),
            (&*format!("{t}* keys_out"), Arg::Scratch(keys[1 - at])),
            ("u32* order_out", Arg::Scratch(order[1 - at])),
            ("i64* out", if last { c.output(0) } else { Arg::I64(0) }),
            ("const u32* counts", Arg::Scratch(counts)),
            ("const u32* totals", Arg::Scratch(totals)),
            n,
            tiles_arg,
            stride_arg,
            shift,
            ("i64 inner", Arg::I64(positions.unwrap_or(1) as i64)),
        ];
        let body = format!(
            "library::radix_place<{t}, {items}, {first}, {last}>(keys, order, keys_out, order_out, out, counts, totals, n, tiles, \
             stride, shift, inner);"
        );
        let size = [k.rows * tiles, RADIX];
        c.launch_resident("radix_place", "sort/radix.cuh", &params, &body, size, "library::PLACE_BLOCKS")?;
        at = 1 - at;
    }
    Ok(at)
}

/// A sorted list of keys and the original position of each, as offsets in the workspace.
pub struct Sorted {
    pub keys: usize,
    pub order: usize,
}

/// The key type for numbers up to `largest`, and its bytes.
pub fn key_for(largest: usize) -> (&'static str, usize) {
    if largest < u32::MAX as usize { ("u32", 4) } else { ("u64", 8) }
}

/// Sorts `n` keys of at most `largest` in the workspace.
pub fn sort(c: &mut Call, keys: usize, n: usize, largest: usize) -> Result<Sorted> {
    sortable(c, n)?;
    let (key, bytes) = key_for(largest);
    let sorted = c.scratch(n * bytes);
    let order = [c.scratch(n * 4), c.scratch(n * 4)];
    if n <= SHORT {
        let params = [
            (&*format!("const {key}* from"), Arg::Scratch(keys)),
            (&*format!("{key}* keys"), Arg::Scratch(sorted)),
            ("u32* order", Arg::Scratch(order[0])),
            ("u32 n", Arg::I32(n as i32)),
        ];
        let p = n.next_power_of_two().max(2);
        let body = format!("library::sort_list<{key}, {p}>(from, keys, order, n);");
        c.launch("sort_list", "sort/block.cuh", &params, &body, 1, BLOCK)?;
        return Ok(Sorted { keys: sorted, order: order[0] });
    }
    let bits = (usize::BITS - largest.leading_zeros()) as usize;
    let both = [keys, sorted];
    let at = radix(c, Keys { key, bytes, bits, rows: 1, n }, both, order, None)?;
    Ok(Sorted { keys: both[at], order: order[at] })
}
