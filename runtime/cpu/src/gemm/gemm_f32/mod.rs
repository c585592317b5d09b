//! f32 products by register tiles of our scratch (`tile`): what `gemm` does, for the sizes of small and middle models.
//!
//! An element of the result is the sum, in order, of chunks of K (`chunk`: at most [`CHUNK`], alike in length), each one a
//! chain of fused multiply-adds from zero. That is the whole of what fixes the bits, so how a product is partition into tasks
//! and blocks, and whether the right side is copied, follows from speed alone.
//!
//! A task is a block of rows by [`COLS`] columns. It copies the right side, a chunk by the columns of a tile at a time,
//! which stays in the first or second cache while the rows go by; the left side is read where it lies, unless its rows would push each
//! other out of the cache (`pack_pays`): then it is packed first. Both are asked for ahead, from task to task too. TaskQueue that follow each other share rows if there are more
//! rows than columns, else columns: so threads begin at ends that lie apart (`pool`).

use super::microkernel::{
    BURST_ELEMENTS, Microkernel, Microkernels, PrefetchLines, PrefetchQueue, RUN, TileArgs, microkernels,
};
use super::{BatchedMatrix, GemmShape};
use crate::library::Call;
use crate::worker_pool::{SendPtr, TaskQueue};
use perilune_core::Layout;
use std::cell::{Cell, RefCell};
use std::mem::MaybeUninit;

/// Steps of K that are added up before they join the result.
const CHUNK: usize = 256;
/// Steps of a panel at most: of the right side this much lies in the first cache while the rows go by. A chunk goes on where the
/// panel before left its sums.
const STEPS: usize = 128;
/// Columns of a task at most: one tile or more of any instruction set.
const COLS: usize = 64;
/// Rows of a task at least, so that copying the right side pays.
const ROWS: usize = 48;
/// Multiply-adds of a task at least.
const OPS: usize = 1 << 18;
/// Rows above which the right side is copied even if its rows lie side by side.
const IN_PLACE: usize = 64;
/// Columns from which on packing the left side pays.
const PACK_COLS: usize = 256;
/// Elements between rows that then share lines of the first cache.
const ALIASED: usize = 1024;
/// Elements packed at a time, and those that a task goes through.
const PACKED: usize = 1 << 22;
const PACKED_PART: usize = 1 << 18;
/// Steps that packed elements are asked for ahead.
const AHEAD: usize = 64;
/// Where the last task of a thread is partition, in eighths of its tiles: threads seldom run equally fast, and the one that is
/// through first helps with what is left, which should be little.
const TAIL: [usize; 5] = [0, 4, 6, 7, 8];
/// Cuts that this makes.
const TAIL_CUTS: usize = TAIL.len() - 2;
/// All tiles of a task, in eighths.
const WHOLE: usize = TAIL[TAIL_CUTS + 1];
/// Elements of the right side that a thread keeps for the next piece of a task.
const KEPT: usize = 1 << 16;

/// The length of a chunk.
fn chunk(k: usize) -> usize {
    k.div_ceil(k.div_ceil(CHUNK)).next_multiple_of(16)
}

/// Columns of a task: about as many in each, in whole vectors.
fn columns(n: usize) -> usize {
    n.div_ceil(n.div_ceil(COLS)).next_multiple_of(16)
}

/// How a batch of products is partition into tasks.
struct Partition {
    rows: usize,
    cols: usize,
    row_parts: usize,
    col_parts: usize,
    /// Whole products of a task, if they are not partition.
    group: usize,
    /// Whether tasks that follow each other share rows.
    by_rows: bool,
    /// Threads whose last tasks are partition once more; 0 if none are.
    tails: usize,
}

impl Partition {
    fn new(s: GemmShape, threads: usize) -> Partition {
        let wanted = 4 * threads;
        let ops = s.m * s.n * s.k;
        let by_rows = s.m >= s.n;
        if s.batch >= wanted || ops < 2 * OPS || threads == 1 {
            let group = (OPS / ops).clamp(1, s.batch.div_ceil(wanted).max(1));
            return Partition { rows: s.m, cols: s.n, row_parts: 1, col_parts: 1, group, by_rows, tails: 0 };
        }
        let col_parts = s.n.div_ceil(COLS);
        let most = s.m.div_ceil(ROWS).min(ops / (col_parts * OPS)).max(1);
        // Few: each copies its columns of the right side. What that costs in balance, the tails give back.
        let row_parts = (2 * threads).div_ceil(s.batch * col_parts).max(if by_rows { threads } else { 1 });
        let rows = s.m.div_ceil(row_parts.min(most));
        let partition = Partition {
            rows,
            cols: columns(s.n),
            row_parts: s.m.div_ceil(rows),
            col_parts,
            group: 1,
            by_rows,
            tails: 0,
        };
        partition.with_tails(s, threads)
    }

    /// With a packed left side, whose rows of a task stay in a second cache from task to task.
    fn packed(s: GemmShape, threads: usize) -> Partition {
        let parts = s.m.div_ceil((PACKED_PART / s.k).max(ROWS)).max(threads).min(s.m.div_ceil(ROWS));
        let rows = s.m.div_ceil(parts);
        let (row_parts, col_parts) = (s.m.div_ceil(rows), s.n.div_ceil(COLS));
        let partition = Partition { rows, cols: columns(s.n), row_parts, col_parts, group: 1, by_rows: true, tails: 0 };
        partition.with_tails(s, threads)
    }

    fn with_tails(self, s: GemmShape, threads: usize) -> Partition {
        let pays = threads > 1 && self.count(s.batch) >= threads && self.rows * self.cols * s.k >= 4 * OPS;
        Partition { tails: if pays { threads } else { 0 }, ..self }
    }

    fn count(&self, batch: usize) -> usize {
        batch.div_ceil(self.group) * self.row_parts * self.col_parts
    }

    /// As `count`, with the last task of each thread's part (`TaskQueue`) in pieces.
    fn pieces(&self, batch: usize) -> usize {
        self.count(batch) + self.tails * TAIL_CUTS
    }

    /// The task that a piece is of, and which of its tiles: from where to where, in eighths.
    fn piece(&self, v: usize, batch: usize) -> (usize, usize, usize) {
        let start = |k: usize| self.count(batch) * k / self.tails + k * TAIL_CUTS;
        match (0..self.tails).rev().find(|k| start(*k) <= v) {
            Some(k) => {
                let (task, end) = (v - k * TAIL_CUTS, start(k + 1) - k * TAIL_CUTS - TAIL_CUTS);
                let piece = (task + 1).saturating_sub(end);
                if task + 1 < end { (task, 0, WHOLE) } else { (end - 1, TAIL[piece], TAIL[piece + 1]) }
            }
            None => (v, 0, WHOLE),
        }
    }

    /// Matrix, row part and column part of a task; the matrix is the first of a group.
    fn part(&self, t: usize) -> (usize, usize, usize) {
        let (k, t) = (t / (self.row_parts * self.col_parts), t % (self.row_parts * self.col_parts));
        let (i, j) = if self.by_rows {
            (t / self.col_parts, t % self.col_parts)
        } else {
            (t % self.row_parts, t / self.row_parts)
        };
        (k * self.group, i, j)
    }
}

/// One matrix, or a block of one: its first element and its strides.
#[derive(Clone, Copy)]
struct Block {
    at: *const f32,
    rows: isize,
    cols: isize,
}

// SAFETY: a pointer alone touches nothing; operands are only read.
unsafe impl Sync for Block {}

impl Block {
    /// The block from there on. No element need be there.
    fn from(self, row: usize, col: usize) -> Block {
        Block { at: self.at.wrapping_offset(row as isize * self.rows + col as isize * self.cols), ..self }
    }
}

impl Block {
    /// The lines of the first `len` rows and `cols` columns, to be asked for within `runs` runs; none unless rows or columns
    /// lie along memory.
    fn prefetches(self, (len, cols): (usize, usize), runs: usize) -> PrefetchQueue {
        let (rows, length, row) = match (self.rows, self.cols) {
            (step, 1) => (len, cols, step),
            (1, step) => (cols, len, step),
            _ => (0, 0, 0),
        };
        let per_row = length.div_ceil(BURST_ELEMENTS).max(1);
        PrefetchQueue { at: self.at, left: per_row, row, per_row, count: rows * per_row, runs, due: 0 }
    }
}

/// A thread's memory.
#[derive(Default)]
struct ThreadScratch {
    /// Sums of a chunk between two of its panels.
    parts: Vec<f32>,
    /// Panels of the right side: some steps of K by the columns of a tile. All of a block's stay if they are few, as the next
    /// piece of a task has the same.
    panels: Vec<CacheLine>,
    /// First element and columns of the right side whose panels are all there.
    of: Option<(*const f32, usize)>,
}

#[derive(Clone, Copy)]
#[repr(align(64))]
struct CacheLine(#[expect(dead_code, reason = "read through pointers")] [f32; 16]);

impl ThreadScratch {
    /// Room for panels of that many elements.
    fn room(&mut self, elements: usize) -> *mut f32 {
        let lines = elements.div_ceil(16);
        if self.panels.len() < lines {
            self.of = None;
            self.panels.resize(lines, CacheLine([0.0; 16]));
        }
        self.panels.as_mut_ptr().cast()
    }
}

/// The tiles of `m` rows: all of about the same height.
#[derive(Clone, Copy)]
struct RowTiles {
    tiles: usize,
    /// Rows of most tiles, and how many tiles have one more: the first ones.
    low: usize,
    more: usize,
}

impl RowTiles {
    fn new(m: usize, tallest: usize) -> RowTiles {
        let tiles = m.div_ceil(tallest);
        RowTiles { tiles, low: m / tiles, more: m % tiles }
    }

    /// First row and number of rows of a tile.
    fn tile(self, t: usize) -> (usize, usize) {
        (t * self.low + t.min(self.more), self.low + usize::from(t < self.more))
    }
}

/// Where the matrices of a result lie: each begins somewhere, and has rows that are some elements apart.
struct OutputMatrices<'a> {
    at: SendPtr<f32>,
    of: BatchedMatrix<'a, f32>,
    rows: usize,
}

impl OutputMatrices<'_> {
    /// Element (`i`, `j`) of matrix `k`.
    fn at(&self, k: usize, i: usize, j: usize) -> *mut f32 {
        self.at.0.wrapping_offset(self.of.start(k)).wrapping_add(i * self.rows + j)
    }
}

/// The product, if this machine has tiles and rows of the result are one run of memory each.
pub fn run(
    c: &Call,
    s: GemmShape,
    a: &BatchedMatrix<f32>,
    b: &BatchedMatrix<f32>,
    out: &mut [f32],
    lies: &Layout,
) -> bool {
    let Some(tiles) = microkernels(c.isa()) else { return false };
    let of = BatchedMatrix::new(&[], lies);
    if (of.cols != 1 && s.n > 1) || (of.rows < s.n as isize && s.m > 1) {
        return false;
    }
    let out = OutputMatrices { at: SendPtr(out.as_mut_ptr()), rows: of.rows.max(0) as usize, of };
    let threads = if c.share() { c.pool().threads() } else { 1 };
    let matrix = |m: &BatchedMatrix<f32>, k: usize| Block {
        at: m.all.as_ptr().wrapping_offset(m.start(k)),
        rows: m.rows,
        cols: m.cols,
    };
    if !pack_pays(s, a) {
        let partition = Partition::new(s, threads);
        tasks(c, tiles, s, &partition, |k| (matrix(a, k), matrix(b, k)), (|k, i, j| out.at(k, i, j), out.rows), None);
        return true;
    }
    SCRATCH.with_borrow_mut(|scratch| {
        let most = (PACKED / s.k).max(ROWS).min(s.m);
        if scratch.len() < most * s.k {
            scratch.resize(most * s.k, 0.0);
        }
        for k in 0..s.batch {
            for lo in (0..s.m).step_by(most) {
                let part = GemmShape { batch: 1, m: most.min(s.m - lo), ..s };
                let (left, right, partition) =
                    (matrix(a, k).from(lo, 0), matrix(b, k), Partition::packed(part, threads));
                pack(c, tiles, part, &partition, left, &mut scratch[..part.m * s.k]);
                tasks(
                    c,
                    tiles,
                    part,
                    &partition,
                    |_| (left, right),
                    (|_, i, j| out.at(k, lo + i, j), out.rows),
                    Some(scratch),
                );
            }
        }
    });
    true
}

thread_local! {
    /// A packed left side; at most [`PACKED`] elements, or [`ROWS`] rows.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    static THREAD_SCRATCH: Cell<ThreadScratch> = const { Cell::new(ThreadScratch { parts: Vec::new(), panels: Vec::new(), of: None }) };
}

/// Whether the left side is packed first: if many columns go by it and its rows begin at places that share few lines of
/// a cache.
fn pack_pays(s: GemmShape, a: &BatchedMatrix<f32>) -> bool {
    let apart = (a.rows.unsigned_abs()).max(a.cols.unsigned_abs());
    s.n >= PACK_COLS && s.m >= ROWS && s.k >= CHUNK && apart.is_multiple_of(ALIASED)
}

/// Copies the left side, tile after tile and chunk after chunk: the elements of a step side by side.
fn pack(c: &Call, t: &Microkernels, s: GemmShape, partition: &Partition, a: Block, to: &mut [f32]) {
    let (tallest, chunk, to) = (t.tallest(t.by_size.len()), chunk(s.k), SendPtr(to.as_mut_ptr()));
    let tiles = partition.rows.div_ceil(tallest);
    c.pool().run(c.share(), partition.row_parts * tiles, |tasks: &TaskQueue| {
        let to = &to;
        while let Some(task) = tasks.claim() {
            let (first, tile) = (task / tiles * partition.rows, task % tiles);
            let row_tiles = RowTiles::new(partition.rows.min(s.m - first), tallest);
            if tile >= row_tiles.tiles {
                continue;
            }
            let (i, rows) = row_tiles.tile(tile);
            let from = a.from(first + i, 0);
            for p in (0..s.k).step_by(chunk) {
                // The chunk with steps as rows, as the right side has them.
                let part = Block { at: from.from(0, p).at, rows: from.cols, cols: from.rows };
                let len = chunk.min(s.k - p);
                // SAFETY: the rows are the left side's, and their place in `to` is this task's alone.
                unsafe { copy(t, part, len, rows, to.0.add((first + i) * s.k + p * rows), rows) };
            }
        }
    });
}

/// Shares the blocks of a batch of products among threads.
fn tasks(
    c: &Call,
    t: &'static Microkernels,
    s: GemmShape,
    partition: &Partition,
    operands: impl Fn(usize) -> (Block, Block) + Sync,
    (out, out_step): (impl Fn(usize, usize, usize) -> *mut f32 + Sync, usize),
    packed: Option<&[f32]>,
) {
    // Both sides of the product that a block belongs to, from the block on.
    let sides = |(k, i, j): (usize, usize, usize)| {
        let (left, right) = operands(k);
        (left.from(i, 0), right.from(0, j))
    };
    let place = |task: usize| {
        let (k, i, j) = partition.part(task);
        (k, i * partition.rows, j * partition.cols)
    };
    let count = partition.count(s.batch);
    c.pool().run(c.share(), partition.pieces(s.batch), |tasks: &TaskQueue| {
        let mut scratch = ThreadScratch { of: None, ..THREAD_SCRATCH.take() };
        let mut known = None;
        while let Some(piece) = tasks.claim() {
            let (task, lo, hi) = partition.piece(piece, s.batch);
            let (first, i, j) = place(task);
            let end = s.batch.min(first + partition.group);
            for k in first..end {
                let this = match known {
                    Some((at, sides)) if at == (k, i, j) => sides,
                    _ => sides((k, i, j)),
                };
                // What this thread will do next, if no other one is faster.
                let then = if k + 1 < end {
                    (k + 1, i, j)
                } else if hi == WHOLE && task + 1 < count {
                    place(task + 1)
                } else {
                    (k, i, j)
                };
                let next = if then == (k, i, j) { this } else { sides(then) };
                known = Some((then, next));
                let packed = packed.map(|all| all[i * s.k..].as_ptr());
                // SAFETY: `plan::check` holds the operands' layouts within their values; tasks are disjoint blocks of
                // the result, which shares no memory with the operands.
                unsafe {
                    let out = out(k, i, j);
                    let size = (partition.rows.min(s.m - i), partition.cols.min(s.n - j), s.k);
                    block(t, size, (lo, hi), this, next, packed, out, out_step, &mut scratch);
                }
            }
        }
        THREAD_SCRATCH.set(scratch);
    });
}

/// `m` rows by `n` columns of a product, or the tiles from `lo` to `hi` eighths of them; rows of the result are `step`
/// elements apart. `next`: what will be multiplied after that.
unsafe fn block(
    t: &Microkernels,
    (m, n, k): (usize, usize, usize),
    (lo, hi): (usize, usize),
    (a, b): (Block, Block),
    next: (Block, Block),
    packed: Option<*const f32>,
    out: *mut f32,
    step: usize,
    scratch: &mut ThreadScratch,
) {
    let (chunk, widest) = (chunk(k), t.by_size.len());
    let keeps = packed.is_none() && n <= widest * t.lanes && k * n.next_multiple_of(t.lanes) <= KEPT;
    let room = scratch.room(if keeps { k } else { STEPS } * widest * t.lanes);
    let kept = keeps && scratch.of == Some((b.at, n));
    // Columns of the tile that begins at column `j`: all about as wide.
    let width = |j: usize| {
        let vectors = (n - j).div_ceil(t.lanes);
        (vectors.div_ceil(vectors.div_ceil(widest)) * t.lanes).min(n - j)
    };
    for p in (0..k).step_by(chunk) {
        let whole = chunk.min(k - p);
        let steps = whole.div_ceil(whole.div_ceil(STEPS)).next_multiple_of(RUN);
        let mut j = 0;
        while j < n {
            let cols = width(j);
            let vectors = cols.div_ceil(t.lanes);
            // What is packed is partition alike for tiles of all widths.
            let row_tiles = RowTiles::new(m, t.tallest(if packed.is_some() { widest } else { vectors }));
            let (first, last) = (row_tiles.tiles * lo / WHOLE, row_tiles.tiles * hi / WHOLE);
            if first == last {
                j += cols;
                continue;
            }
            let (top, end) = (row_tiles.tile(first).0, row_tiles.tile(last - 1).0 + row_tiles.tile(last - 1).1);
            let partial_row = vectors * t.lanes;
            if steps < whole && scratch.parts.len() < (end - top) * partial_row {
                scratch.parts.resize((end - top) * partial_row, 0.0);
            }
            for q in (0..whole).step_by(steps) {
                let (p, len) = (p + q, steps.min(whole - q));
                let right = b.from(p, j);
                let (y, y_step) = if right.cols == 1 && cols % t.lanes == 0 && m <= IN_PLACE {
                    (right.at, right.rows)
                } else {
                    let panel = room.wrapping_add(if keeps { p * partial_row } else { 0 });
                    if !kept {
                        // SAFETY: the caller's promise; there is room for all steps, or for those of a panel, by the widest tile.
                        unsafe { copy(t, right, len, cols, panel, partial_row) };
                        scratch.of = keeps.then_some((b.at, n));
                    }
                    (panel.cast_const(), partial_row as isize)
                };
                // The panel after this one.
                let (next_p, next_j) = if q + len < whole {
                    (p + len, j)
                } else if j + cols < n {
                    (p + len - whole, j + cols)
                } else {
                    (p + len, 0)
                };
                let (left_then, right_then) =
                    if next_p < k { (a.from(top, next_p), b.from(next_p, next_j)) } else { next };
                let next_len = steps.min(k - if next_p < k { next_p } else { 0 });
                let mut prefetches =
                    right_then.prefetches((next_len, width(next_j)), (last - first) * len.div_ceil(RUN));
                for tile in first..last {
                    let (i, rows) = row_tiles.tile(tile);
                    let left = match packed {
                        // SAFETY: as long as the rows, in the order of `pack`.
                        Some(all) => Block { at: unsafe { all.add(i * k + p * rows) }, rows: 1, cols: rows as isize },
                        None => a.from(i, p),
                    };
                    let below = if tile + 1 < last { left.from(rows, 0) } else { left_then };
                    let next = match (left.rows, left.cols) {
                        // What is packed is read in order.
                        _ if packed.is_some() => {
                            PrefetchLines { at: left.from(0, AHEAD).at, line: left.cols, row: RUN as isize * left.cols }
                        }
                        // From the second panel on it is in a cache already.
                        _ if j > 0 => PrefetchLines { at: left.at, line: 0, row: 0 },
                        (row, 1) => PrefetchLines { at: below.at, line: row, row: RUN as isize },
                        (_, step) => {
                            PrefetchLines { at: below.from(rows - 1, 0).at, line: step, row: RUN as isize * step }
                        }
                    };
                    let tile: Microkernel = t.by_size[vectors - 1][rows - 1];
                    // SAFETY: the caller's promise; the right side has whole vectors, in the panel or because `cols` does, and
                    // so have the sums in parts, if there are some.
                    unsafe {
                        let args = TileArgs {
                            k: len,
                            n: cols,
                            a: left.at,
                            a_row: left.rows,
                            a_step: left.cols,
                            b: y,
                            b_step: y_step,
                            c: out.add(i * step + j),
                            c_row: step,
                            add: p > q,
                            partial: scratch.parts.as_mut_ptr().wrapping_add((i - top) * partial_row),
                            partial_row,
                            loads_partial: q > 0,
                            stores_partial: q + len < whole,
                            next,
                        };
                        tile(&args, &mut prefetches);
                    }
                }
            }
            j += cols;
        }
    }
}

/// `len` rows of `cols` columns to rows of `width` side by side, the rest of each zero.
unsafe fn copy(t: &Microkernels, from: Block, len: usize, cols: usize, to: *mut f32, width: usize) {
    // SAFETY: the caller's promise, for all of this function.
    unsafe {
        if cols < width {
            std::slice::from_raw_parts_mut(to.cast::<MaybeUninit<f32>>(), len * width).fill(MaybeUninit::new(0.0));
        }
        if from.cols == 1 {
            return (t.rows)(from.at, from.rows, (len, cols), to, width);
        }
        let (mut whole_p, mut whole_j) = (0, 0);
        if let (1, Some(transpose)) = (from.rows, t.transpose) {
            (whole_p, whole_j) = (len / 16 * 16, cols);
            for p in (0..whole_p).step_by(16) {
                for j in (0..cols).step_by(16) {
                    transpose(from.from(p, j).at, from.cols, 16.min(cols - j), to.add(p * width + j), width);
                }
            }
        }
        for j in 0..cols {
            for p in if j < whole_j { whole_p } else { 0 }..len {
                *to.add(p * width + j) = *from.from(p, j).at;
            }
        }
    }
}
