//! Launches scatter_add and index_add: sorts contributions by destination, then adds each run in index order.

use super::call::{BLOCK, Call, Input, by_value, sum_type, typed, without};
use super::index::check_indices;
use super::movement::copy;
use super::sort::{key_for, sort};
use super::strided::Strided;
use crate::launch::Arg;
use perilune_core::Layout;
use perilune_core::error::Result;

/// Number of contributions that are added one by one (`RUN` in `kernels/index/add.cuh`).
const RUN_BITS: u32 = 6;
const RUN: usize = 1 << RUN_BITS;

/// How the result is partitioned into bins.
struct Bins {
    count: usize,
    /// Elements per bin.
    lanes: usize,
    /// Strides over the shape of the index: (index, bin at axis position 0), and the change of the bin per index value.
    keys: Strided,
    step: isize,
    /// Strides over the result: (x, src at axis position 0, bin, lane).
    strided: Strided,
    /// Strides over the lanes of a bin: (src).
    lane: Strided,
    /// The offset in src of position k of the index.
    place: Strided,
}

pub fn index_add(c: &mut Call) -> Result<()> {
    let (x, index, src, axis) = (c.input(0)?, c.input(1)?, c.input(2)?, c.axis());
    let shape = c.out_shape();
    let dims = shape.dims();
    let mut coordinate = vec![0; dims.len()];
    coordinate[axis] = 1;
    let others = without(dims, axis);
    let mut lane = Layout::contiguous(perilune_core::Shape::of(&others)).strides().to_vec();
    lane.insert(axis, 0);
    let bins = Bins {
        count: dims[axis],
        lanes: others.iter().product(),
        keys: Strided::new(index.shape().dims(), &[index.strides(), &[0]]),
        step: 1,
        strided: Strided::new(dims, &[x.strides(), &src.held(axis), &coordinate, &lane]),
        lane: Strided::new(&others, &[&without(src.strides(), axis)]),
        place: Strided { dims: vec![index.shape().numel()], strides: vec![vec![src.strides()[axis]]] },
    };
    add(c, &x, &index, &src, bins)
}

pub fn scatter_add(c: &mut Call) -> Result<()> {
    let (x, index, src, axis) = (c.input(0)?, c.input(1)?, c.input(2)?, c.axis());
    let shape = c.out_shape();
    let strides = shape.strides();
    let (strides, zero) = (&strides[..shape.rank()], vec![0; shape.rank()]);
    let mut held = strides.to_vec();
    held[axis] = 0;
    let bins = Bins {
        count: shape.numel(),
        lanes: 1,
        keys: Strided::new(index.shape().dims(), &[index.strides(), &held]),
        step: strides[axis],
        strided: Strided::new(shape.dims(), &[x.strides(), &zero, strides, &zero]),
        lane: Strided { dims: vec![1], strides: vec![vec![0]] },
        place: Strided::new(src.shape().dims(), &[src.strides()]),
    };
    add(c, &x, &index, &src, bins)
}

fn add(c: &mut Call, x: &Input, index: &Input, src: &Input, b: Bins) -> Result<()> {
    let (shape, dtype, n) = (c.out_shape(), c.out_dtype(), index.shape().numel());
    let size = shape.dims()[c.axis()];
    if shape.numel() == 0 {
        return check_indices(c, index, size);
    }
    if n == 0 {
        return copy(c, c.name(), x, dtype, &Layout::contiguous(shape), 0);
    }
    let header = "index/add.cuh";
    let (t, (sum, sum_bytes)) = (typed(dtype), sum_type(dtype));
    let long = |n: usize| Arg::I64(n as i64);

    // Map indices to bins, in order.
    let (key, key_bytes) = key_for(b.count);
    let keys = c.scratch(n * key_bytes);
    let narrow = b.keys.narrow();
    let params = [
        ("const i64* index", index.pointer.clone()),
        (&*format!("{key}* keys"), Arg::Scratch(keys)),
        (&*by_value(&b.keys, narrow, "strided"), b.keys.arg(narrow)),
        ("i64 n", long(n)),
        ("i64 step", Arg::I64(b.step as i64)),
        ("i64 size", long(size)),
        ("i64 bins", long(b.count)),
        ("Fault* fault", Arg::Fault),
    ];
    let body = "library::bin_keys(index, keys, strided, n, step, size, bins, fault);";
    c.each("bin_keys", header, &params, body, n)?;
    let sorted = sort(c, keys, n, b.count)?;
    let keys = (&*format!("const {key}* keys"), Arg::Scratch(sorted.keys));
    let order = ("const u32* order", Arg::Scratch(sorted.order));
    let starts = c.scratch((b.count + 1) * 4);
    let params = [
        keys.clone(),
        ("u32* starts", Arg::Scratch(starts)),
        ("i64 bins", long(b.count)),
        ("u32 n", Arg::I32(n as i32)),
    ];
    c.each("run_starts", header, &params, "library::run_starts(keys, starts, bins, n);", b.count + 1)?;
    let starts = ("const u32* starts", Arg::Scratch(starts));

    // Elements of a bin per thread.
    let (bytes, step) = (dtype.size(), b.place.strides[0][b.place.dims.len() - 1]);
    let aligned = src.aligned.min(c.out_aligned()) / bytes;
    let v = [8, 4, 2].into_iter().find(|&v| {
        let line = b.place.dims.len() == 1 && step % v as isize == 0;
        v <= aligned && line && b.strided.packs(1, v) && b.strided.still(2, v) && b.lane.packs(0, v)
    });
    let v = v.unwrap_or(1);
    let last = b.strided.dims.len() - 1;
    let (together, x_step) = (b.strided.packs(0, v) && x.aligned >= v * bytes, b.strided.strides[0][last]);
    let (strided, lane) = (b.strided.grouped(v, &[]), b.lane.grouped(v, &[]));
    let narrow = strided.narrow() && lane.narrow() && b.place.narrow();
    let (place_type, place) = if b.place.dims.len() == 1 {
        ("library::LinearPosition".to_string(), Arg::Bytes((step as i64).to_ne_bytes().to_vec()))
    } else {
        (format!("library::StridedPosition<{}>", b.place.device_type(narrow)), b.place.arg(narrow))
    };
    let place = (&*format!("const __grid_constant__ {place_type} place"), place);
    let source = (&*format!("const {t}* src"), src.pointer.clone());

    // Long runs: compute partial sums, level by level.
    let mut levels = Vec::new();
    let mut pieces = n.div_ceil(RUN);
    if n > RUN {
        levels.push(pieces);
        while pieces > RUN {
            pieces = pieces.div_ceil(RUN);
            levels.push(pieces);
        }
    }
    let level_bytes = |pieces: usize| pieces * 2 * b.lanes * sum_bytes;
    let partials = c.scratch(levels.iter().map(|p| level_bytes(*p)).sum());
    let (mut at, mut unit) = (partials, RUN_BITS);
    for (k, &pieces) in levels.iter().enumerate() {
        if k == 0 {
            let params = [
                source.clone(),
                keys.clone(),
                order.clone(),
                starts.clone(),
                (&*format!("{sum}* partials"), Arg::Scratch(at)),
                (&*by_value(&lane, narrow, "lane"), lane.arg(narrow)),
                place.clone(),
                ("i64 bins", long(b.count)),
                ("u32 n", Arg::I32(n as i32)),
                ("i64 lanes", long(b.lanes)),
            ];
            let body = format!(
                "library::chunk_sums<{t}, {v}>(src, keys, order, starts, partials, lane, place, bins, n, lanes);"
            );
            let columns = b.lanes / v;
            let blocks = match BLOCK / columns {
                0 => pieces * columns.div_ceil(BLOCK),
                several => pieces.div_ceil(several),
            };
            c.launch("chunk_sums", header, &params, &body, blocks, BLOCK)?;
            continue;
        }
        let below = at;
        at += level_bytes(levels[k - 1]);
        let params = [
            (&*format!("const {sum}* below"), Arg::Scratch(below)),
            (&*format!("{sum}* above"), Arg::Scratch(at)),
            keys.clone(),
            starts.clone(),
            ("i64 bins", long(b.count)),
            ("u32 n", Arg::I32(n as i32)),
            ("i64 lanes", long(b.lanes)),
            ("u32 unit", Arg::I32(unit as i32)),
        ];
        let body = "library::reduce_chunks(below, above, keys, starts, bins, n, lanes, unit);";
        c.launch("reduce_chunks", header, &params, body, pieces * b.lanes.div_ceil(BLOCK), BLOCK)?;
        unit += RUN_BITS;
    }

    let count = strided.numel();
    let params = [
        (&*format!("const {t}* x"), x.pointer.clone()),
        source,
        order,
        starts,
        (&*format!("const {sum}* partials"), Arg::Scratch(partials)),
        (&*format!("{t}* out"), c.output(0)),
        (&*by_value(&strided, narrow, "strided"), strided.arg(narrow)),
        place,
        ("i64 n", long(count)),
        ("i64 x_step", Arg::I64(x_step as i64)),
        ("i64 lanes", long(b.lanes)),
        ("i64 positions", long(n)),
    ];
    let body = format!(
        "library::bin_sums<{t}, {v}, {together}>(x, src, order, starts, partials, out, strided, place, n, x_step, lanes, \
         positions);"
    );
    c.each(c.name(), header, &params, &body, count)
}
