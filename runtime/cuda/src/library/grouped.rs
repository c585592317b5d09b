//! Launches grouped matrix products: selects a kernel from `kernels/matmul/grouped*.cuh` and copies operands that it
//! cannot read.

use super::call::{Call, Input, typed};
use crate::launch::{Arg, Props};
use perilune_core::error::{Error, Result};
use perilune_core::ops::grouped::GROUPED_MATMUL;
use perilune_core::{DType, Layout, Shape};

/// Side of the output tiles of `plain.cuh`.
const PLAIN_SIDE: usize = 64;
/// Elements that the tensor-core kernels read at a time; rows must begin at multiples of it.
const UNIT: usize = 8;
/// Maximum row stride in elements that these kernels support (`Tile::load`).
const LONGEST: usize = 1 << 22;

/// The tile and configuration of a tensor-core kernel: see `Warps` in `grouped.cuh`, `Warpgroups` in
/// `grouped_sm90.cuh`.
#[derive(Clone, Copy)]
struct Tile {
    header: &'static str,
    kind: &'static str,
    rows: usize,
    cols: usize,
    deep: usize,
    stages: usize,
    threads: usize,
    /// Number of blocks that fit on a multiprocessor.
    resident: &'static str,
}

const WARPS: Tile = Tile {
    header: "matmul/grouped.cuh",
    kind: "Warps",
    rows: 128,
    cols: 128,
    deep: 32,
    stages: 4,
    threads: 128,
    resident: "2",
};
const WARPGROUPS: Tile = Tile {
    header: "matmul/grouped_sm90.cuh",
    kind: "Warpgroups",
    rows: 128,
    cols: 128,
    deep: 64,
    stages: 3,
    threads: 256,
    resident: "2",
};
/// Reads three quarters of what the narrow configuration reads, but only one block fits.
const WIDE_WARPGROUPS: Tile = Tile { cols: 256, stages: 4, resident: "1", ..WARPGROUPS };

impl Tile {
    /// Selects the configuration for results of `n` columns; `count` returns the number of tiles. All configurations
    /// add in the same order.
    fn of(props: &Props, n: usize, count: impl Fn(&Tile) -> usize) -> Tile {
        if props.arch != (9, 0) {
            return WARPS;
        }
        let wide = n > WARPGROUPS.cols && count(&WIDE_WARPGROUPS) >= props.sms as usize;
        if wide { WIDE_WARPGROUPS } else { WARPGROUPS }
    }

    fn text(&self) -> String {
        format!("library::{}<{}, {}, {}, {}>", self.kind, self.rows, self.cols, self.deep, self.stages)
    }

    fn shared_bytes(&self) -> usize {
        self.stages * (self.rows + self.cols) * self.deep * 2
    }
}

/// An operand as the tensor-core kernels read it.
struct Side {
    pointer: Arg,
    /// The strides between rows and between matrices.
    row: usize,
    matrix: usize,
    /// Whether its last dim is contiguous, rather than the one before.
    down: bool,
}

/// Encodes `GroupEnds` of `groups.cuh`.
fn bytes_of(ends: &Input, rows: usize) -> Result<Vec<u8>> {
    let (Ok(groups), Ok(rows)) = (i32::try_from(ends.shape().numel()), i32::try_from(rows)) else {
        return Err(Error::system(GROUPED_MATMUL.name, "the operands are too large for one launch"));
    };
    let mut bytes = (ends.strides()[0] as i64).to_ne_bytes().to_vec();
    bytes.extend(groups.to_ne_bytes());
    bytes.extend(rows.to_ne_bytes());
    Ok(bytes)
}

/// Whether the tensor-core kernels support these dtypes and sizes.
fn has_tensor_cores(dtype: DType, dims: &[usize]) -> bool {
    matches!(dtype, DType::BF16 | DType::F16) && dims.iter().all(|d| d.next_multiple_of(UNIT) <= LONGEST)
}

/// Maximum number of tiles of `side` rows for `rows` rows in `groups` groups, including the rows after the last end.
fn most_tiles(rows: usize, groups: usize, side: usize) -> usize {
    (rows + (groups + 1).min(rows) * (side - 1)) / side
}

/// Launches only the check of the ends, for results without elements.
fn check(c: &mut Call, e: &Input, rows: usize) -> Result<()> {
    let params = [
        ("const i64* ends", e.pointer.clone()),
        ("const __grid_constant__ library::GroupEnds p", Arg::Bytes(bytes_of(e, rows)?)),
        ("Fault* fault", Arg::Fault),
    ];
    c.launch("check_ends", "matmul/groups.cuh", &params, "library::check_ends(ends, p, fault);", 1, 256)
}

/// Returns `x`, a stack of matrices, if its last dim (or, with `either`, the one before) is contiguous in whole units;
/// otherwise a copy whose rows are padded with zeros.
fn readable(c: &mut Call, x: &Input, either: bool) -> Result<Side> {
    let (dims, s) = (x.shape(), x.strides());
    let &[matrices, rows, cols] = dims.dims() else { return Err(c.bug("an operand of three dims")) };
    let whole = |n: isize| n >= 0 && n.unsigned_abs().is_multiple_of(UNIT);
    let fits = |along: usize, across: usize| {
        let step = if dims.dims()[across] == 1 { 0 } else { s[across] };
        let matrix = if matrices == 1 { 0 } else { s[0] };
        let lies = s[along] == 1 && whole(step) && whole(matrix) && step.unsigned_abs() <= LONGEST;
        (lies && dims.dims()[along].is_multiple_of(UNIT) && x.aligned >= 2 * UNIT).then_some((step, matrix))
    };
    let ways: &[(usize, usize)] = if either { &[(2, 1), (1, 2)] } else { &[(2, 1)] };
    for &(along, across) in ways {
        if let Some((row, matrix)) = fits(along, across) {
            let [row, matrix] = [row, matrix].map(isize::unsigned_abs);
            return Ok(Side { pointer: x.pointer.clone(), row, matrix, down: along == 2 });
        }
    }
    let (t, pitch) = (typed(x.dtype), cols.next_multiple_of(UNIT));
    let all = matrices * rows * pitch;
    let to = c.scratch(all * x.dtype.size());
    let (from, result) = (format!("const {t}* x"), format!("{t}* y"));
    let long = |n: usize| Arg::I64(n as i64);
    let params = [
        (&*from, x.pointer.clone()),
        (&*result, Arg::Scratch(to)),
        ("i64 all", long(all)),
        ("i64 rows", long(rows)),
        ("i64 cols", long(cols)),
        ("i64 pitch", long(pitch)),
        ("i64 matrix", Arg::I64(s[0] as i64)),
        ("i64 row", Arg::I64(s[1] as i64)),
        ("i64 col", Arg::I64(s[2] as i64)),
    ];
    let body = "library::pad_rows(x, y, all, rows, cols, pitch, matrix, row, col);";
    c.each("pad_rows", "matmul/grouped.cuh", &params, body, all)?;
    Ok(Side { pointer: Arg::Scratch(to), row: pitch, matrix: rows * pitch, down: true })
}

/// Views a matrix as a stack of one.
fn stacked(x: &Input) -> Input {
    let (dims, s) = (x.shape(), x.strides());
    let mut layout = Layout::contiguous(Shape::of(&[1, dims.dims()[0], dims.dims()[1]]));
    layout.strides[1..3].copy_from_slice(s);
    Input { layout, ..x.clone() }
}

/// Computes x (T, K), w (E, K, N), ends (E) -> (T, N).
pub fn rows(c: &mut Call, props: &Props) -> Result<()> {
    let (x, w, e) = (c.input(0)?, c.input(1)?, c.input(2)?);
    let (rows, k, n) = (x.shape().dims()[0], x.shape().dims()[1], c.out_shape().dims()[1]);
    if c.out_shape().numel() == 0 {
        return check(c, &e, rows);
    }
    let groups = e.shape().numel();
    if !has_tensor_cores(c.out_dtype(), &[k, n]) {
        let tiles_n = n.div_ceil(PLAIN_SIDE);
        let (sx, sw) = (x.strides(), w.strides());
        let numbers = [rows as isize, n as isize, k as isize, sx[0], sx[1], sw[1], sw[2], 0, tiles_n as isize];
        let blocks = most_tiles(rows, groups, PLAIN_SIDE) * tiles_n;
        let matrix = ("i64 matrix", Arg::I64(sw[0] as i64));
        return plain(c, ["x", "w"], [&x, &w, &e], rows, &numbers, Some(matrix), blocks);
    }
    let (left, right) = (readable(c, &stacked(&x), false)?, readable(c, &w, true)?);
    let tiles = |t: &Tile| (most_tiles(rows, groups, t.rows), n.div_ceil(t.cols));
    let tile = Tile::of(props, n, |t| tiles(t).0 * tiles(t).1);
    let (tiles_m, tiles_n) = tiles(&tile);
    let sizes = [0, n, k, tiles_m, tiles_n];
    let call = format!("grouped_rows<{}, {}, {}>", tile.text(), typed(c.out_dtype()), right.down);
    launch(c, &tile, ["x", "w"], &call, [left, right], (&e, rows), sizes, tiles_m * tiles_n)
}

/// Computes a (T, M), b (T, N), ends (E) -> (E, M, N).
pub fn sums(c: &mut Call, props: &Props) -> Result<()> {
    let (a, b, e) = (c.input(0)?, c.input(1)?, c.input(2)?);
    let rows = a.shape().dims()[0];
    let (groups, m, n) = (c.out_shape().dims()[0], c.out_shape().dims()[1], c.out_shape().dims()[2]);
    if c.out_shape().numel() == 0 {
        return check(c, &e, rows);
    }
    if !has_tensor_cores(c.out_dtype(), &[m, n]) {
        let (tiles_m, tiles_n) = (m.div_ceil(PLAIN_SIDE), n.div_ceil(PLAIN_SIDE));
        let (sa, sb) = (a.strides(), b.strides());
        let size = |n: usize| n as isize;
        let numbers = [size(m), size(n), size(rows), sa[1], sa[0], sb[0], sb[1], size(tiles_m), size(tiles_n)];
        return plain(c, ["a", "b"], [&a, &b, &e], rows, &numbers, None, groups * tiles_m * tiles_n);
    }
    let (left, right) = (readable(c, &stacked(&a), false)?, readable(c, &stacked(&b), false)?);
    let tiles = |t: &Tile| (m.div_ceil(t.rows), n.div_ceil(t.cols));
    let tile = Tile::of(props, n, |t| groups * tiles(t).0 * tiles(t).1);
    let (tiles_m, tiles_n) = tiles(&tile);
    let call = format!("grouped_sums<{}, {}>", tile.text(), typed(c.out_dtype()));
    let blocks = groups * tiles_m * tiles_n;
    launch(c, &tile, ["a", "b"], &call, [left, right], (&e, rows), [m, n, 0, tiles_m, tiles_n], blocks)
}

#[allow(clippy::too_many_arguments)] // the parameters of a launch
fn launch(
    c: &mut Call,
    tile: &Tile,
    names: [&str; 2],
    call: &str,
    [left, right]: [Side; 2],
    (e, rows): (&Input, usize),
    sizes: [usize; 5],
    blocks: usize,
) -> Result<()> {
    let t = typed(c.out_dtype());
    let mut bytes = bytes_of(e, rows)?;
    bytes.extend([left.row, right.row, right.matrix].into_iter().flat_map(|n| (n as i64).to_ne_bytes()));
    bytes.extend(sizes.into_iter().chain([0]).flat_map(|n| (n as i32).to_ne_bytes()));
    let params = [format!("const {t}* {}", names[0]), format!("const {t}* {}", names[1]), format!("{t}* out")];
    let params = [
        (&*params[0], left.pointer),
        (&*params[1], right.pointer),
        ("const i64* ends", e.pointer.clone()),
        (&*params[2], c.output(0)),
        ("const __grid_constant__ library::Grouped p", Arg::Bytes(bytes)),
        ("Fault* fault", Arg::Fault),
    ];
    let body = format!("library::{call}({}, {}, ends, out, p, fault);", names[0], names[1]);
    let shape = [blocks, tile.threads, tile.shared_bytes()];
    c.launch_shared(c.name(), tile.header, &params, &body, shape, tile.resident)
}

fn plain(
    c: &mut Call,
    names: [&str; 2],
    [a, b, e]: [&Input; 3],
    rows: usize,
    numbers: &[isize; 9],
    matrix: Option<(&str, Arg)>,
    blocks: usize,
) -> Result<()> {
    let t = typed(c.out_dtype());
    let given = [format!("const {t}* {}", names[0]), format!("const {t}* {}", names[1]), format!("{t}* out")];
    let bytes = numbers.iter().chain([&0]).flat_map(|n| (*n as i64).to_ne_bytes()).collect();
    let mut params = vec![
        (&*given[0], a.pointer.clone()),
        (&*given[1], b.pointer.clone()),
        ("const i64* ends", e.pointer.clone()),
        (&*given[2], c.output(0)),
        ("const __grid_constant__ library::GroupEnds e", Arg::Bytes(bytes_of(e, rows)?)),
        ("const __grid_constant__ library::Product p", Arg::Bytes(bytes)),
    ];
    let (which, more) = if matrix.is_some() { ("rows", " matrix,") } else { ("sums", "") };
    params.extend(matrix);
    params.push(("Fault* fault", Arg::Fault));
    let [x, w] = names;
    let body = format!("library::grouped_{which}_plain({x}, {w}, ends, out, e, p,{more} fault);");
    c.launch(c.name(), "matmul/grouped_plain.cuh", &params, &body, blocks, 256)
}
