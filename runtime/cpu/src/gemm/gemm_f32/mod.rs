//! Multiplies f32 matrices with the crate's own microkernels. It replaces the `gemm` crates at the sizes of small and
//! medium models.
//!
//! An element of the result is the sum, in order, of chunks of K (`chunk`: at most `CHUNK` steps, of equal length),
//! each one a chain of fused multiply-adds from zero. Nothing else fixes the bits: the partition into tasks and blocks,
//! and whether operands are packed, affect only speed.
//!
//! A task is a block of rows by columns (`partition`). It packs the right operand in panels: some steps of a chunk by
//! the columns of a tile. A panel stays in the L1 or L2 cache while all rows use it. The left operand is read in place,
//! unless its rows would evict each other from the cache (`pack`). Both are prefetched, also across tasks. Consecutive
//! tasks share rows if there are more rows than columns, else columns; threads begin at distant tasks (`worker_pool`).

mod pack;
mod partition;

use super::microkernel::{
    BURST_ELEMENTS, Microkernel, Microkernels, PrefetchLines, PrefetchQueue, RUN, TileArgs, microkernels,
};
use super::{BatchedMatrix, GemmShape};
use crate::library::Call;
use crate::worker_pool::{SendPtr, TaskQueue};
use pack::{pack_left, pack_pays, pack_rows};
use partition::{Partition, ROWS, RowTiles, WHOLE, chunk};
use perilune_core::Layout;
use std::cell::{Cell, RefCell};

/// Maximum steps of K in a panel: a panel of the right operand stays in the L1 cache while all rows use it. The next
/// panel of a chunk continues its sums.
const PANEL_STEPS: usize = 128;
/// Rows above which the right operand is packed even if its rows are contiguous.
const PACK_RIGHT_ROWS: usize = 64;
/// Elements of the left operand packed at a time.
const PACKED: usize = 1 << 22;
/// How many steps ahead packed elements are prefetched.
const PACKED_AHEAD: usize = 64;
/// Maximum elements of the right operand that a thread keeps packed for the next part of a task.
const KEPT_PANELS: usize = 1 << 16;

/// A matrix or a block of one.
#[derive(Clone, Copy)]
struct MatrixView {
    at: *const f32,
    rows: isize,
    cols: isize,
}

// SAFETY: a pointer alone accesses nothing; operands are only read.
unsafe impl Sync for MatrixView {}

impl MatrixView {
    /// The block that starts at an element; the element need not exist.
    fn from(self, row: usize, col: usize) -> MatrixView {
        MatrixView { at: self.at.wrapping_offset(row as isize * self.rows + col as isize * self.cols), ..self }
    }

    /// Builds the prefetches of the first `len` rows and `cols` columns, spread over `runs` runs. There are none unless
    /// rows or columns are contiguous.
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

/// Buffers of one thread.
#[derive(Default)]
struct ThreadScratch {
    /// Partial sums of a chunk between two panels.
    parts: Vec<f32>,
    /// Packed panels of the right operand: some steps of K by the columns of a tile. All panels of a block are kept if
    /// they are small, because the next part of a task reuses them.
    panels: Vec<CacheLine>,
    /// First element and number of columns of the right operand, once all its panels are packed.
    packed: Option<(*const f32, usize)>,
}

#[derive(Clone, Copy)]
#[repr(align(64))]
struct CacheLine(#[expect(dead_code, reason = "read through pointers")] [f32; 16]);

impl ThreadScratch {
    /// Reserves panels of that many elements.
    fn reserve(&mut self, elements: usize) -> *mut f32 {
        let lines = elements.div_ceil(16);
        if self.panels.len() < lines {
            self.packed = None;
            self.panels.resize(lines, CacheLine([0.0; 16]));
        }
        self.panels.as_mut_ptr().cast()
    }
}

/// The matrices of a result: their start addresses and their row stride.
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

/// Computes the product, if the instruction set has microkernels and rows of the result are contiguous; returns whether it did.
pub fn run(
    c: &Call,
    s: GemmShape,
    a: &BatchedMatrix<f32>,
    b: &BatchedMatrix<f32>,
    out: &mut [f32],
    layout: &Layout,
) -> bool {
    let Some(tiles) = microkernels(c.isa()) else { return false };
    let of = BatchedMatrix::new(&[], layout);
    if (of.cols != 1 && s.n > 1) || (of.rows < s.n as isize && s.m > 1) {
        return false;
    }
    let out = OutputMatrices { at: SendPtr(out.as_mut_ptr()), rows: of.rows.max(0) as usize, of };
    let threads = if c.parallel() { c.pool().threads() } else { 1 };
    let matrix = |m: &BatchedMatrix<f32>, k: usize| MatrixView {
        at: m.all.as_ptr().wrapping_offset(m.start(k)),
        rows: m.rows,
        cols: m.cols,
    };
    if !pack_pays(s, a) {
        let partition = Partition::new(s, threads);
        run_tasks(
            c,
            tiles,
            s,
            &partition,
            |k| (matrix(a, k), matrix(b, k)),
            (|k, i, j| out.at(k, i, j), out.rows),
            None,
        );
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
                pack_left(c, tiles, part, &partition, left, &mut scratch[..part.m * s.k]);
                run_tasks(
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
    /// A packed left operand: at most [`PACKED`] elements or [`ROWS`] rows.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    static THREAD_SCRATCH: Cell<ThreadScratch> = const { Cell::new(ThreadScratch { parts: Vec::new(), panels: Vec::new(), packed: None }) };
}

/// Runs the tasks of a batch of products on the threads of the pool.
fn run_tasks(
    c: &Call,
    t: &'static Microkernels,
    s: GemmShape,
    partition: &Partition,
    operands: impl Fn(usize) -> (MatrixView, MatrixView) + Sync,
    (out, out_step): (impl Fn(usize, usize, usize) -> *mut f32 + Sync, usize),
    packed: Option<&[f32]>,
) {
    // Returns both operands of a block.
    let sides = |(k, i, j): (usize, usize, usize)| {
        let (left, right) = operands(k);
        (left.from(i, 0), right.from(0, j))
    };
    let block_start = |task: usize| {
        let (k, i, j) = partition.block_of(task);
        (k, i * partition.rows, j * partition.cols)
    };
    let count = partition.count(s.batch);
    c.pool().run(c.parallel(), partition.parts(s.batch), |tasks: &TaskQueue| {
        let mut scratch = ThreadScratch { packed: None, ..THREAD_SCRATCH.take() };
        let mut cached = None;
        while let Some(part) = tasks.claim() {
            let (task, lo, hi) = partition.task_of(part, s.batch);
            let (first, i, j) = block_start(task);
            let end = s.batch.min(first + partition.group);
            for k in first..end {
                let this = match cached {
                    Some((at, sides)) if at == (k, i, j) => sides,
                    _ => sides((k, i, j)),
                };
                // The next block of this thread, unless another thread claims it.
                let then = if k + 1 < end {
                    (k + 1, i, j)
                } else if hi == WHOLE && task + 1 < count {
                    block_start(task + 1)
                } else {
                    (k, i, j)
                };
                let next = if then == (k, i, j) { this } else { sides(then) };
                cached = Some((then, next));
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

/// Computes `m` rows by `n` columns of a product, or its tiles from `lo` to `hi` (in eighths). Rows of the result are
/// `step` elements apart. `next` holds the operands of the next block, to prefetch.
///
/// # Safety
/// Operands and result must be valid for the block.
unsafe fn block(
    t: &Microkernels,
    (m, n, k): (usize, usize, usize),
    (lo, hi): (usize, usize),
    (a, b): (MatrixView, MatrixView),
    next: (MatrixView, MatrixView),
    packed: Option<*const f32>,
    out: *mut f32,
    step: usize,
    scratch: &mut ThreadScratch,
) {
    let (chunk, widest) = (chunk(k), t.by_size.len());
    let keeps = packed.is_none() && n <= widest * t.lanes && k * n.next_multiple_of(t.lanes) <= KEPT_PANELS;
    let room = scratch.reserve(if keeps { k } else { PANEL_STEPS } * widest * t.lanes);
    let kept = keeps && scratch.packed == Some((b.at, n));
    // Columns of the tile that begins at column `j`; all tiles are about equally wide.
    let width = |j: usize| {
        let vectors = (n - j).div_ceil(t.lanes);
        (vectors.div_ceil(vectors.div_ceil(widest)) * t.lanes).min(n - j)
    };
    for p in (0..k).step_by(chunk) {
        let whole = chunk.min(k - p);
        let steps = whole.div_ceil(whole.div_ceil(PANEL_STEPS)).next_multiple_of(RUN);
        let mut j = 0;
        while j < n {
            let cols = width(j);
            let vectors = cols.div_ceil(t.lanes);
            // A packed operand has the same row tiles for all widths.
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
                let (y, y_step) = if right.cols == 1 && cols % t.lanes == 0 && m <= PACK_RIGHT_ROWS {
                    (right.at, right.rows)
                } else {
                    let panel = room.wrapping_add(if keeps { p * partial_row } else { 0 });
                    if !kept {
                        // SAFETY: the caller guarantees the operands; the buffer holds all steps, or those of a panel,
                        // for the widest tile.
                        unsafe { pack_rows(t, right, len, cols, panel, partial_row) };
                        scratch.packed = keeps.then_some((b.at, n));
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
                        // SAFETY: the packed rows have these elements, in the order of `pack_left`.
                        Some(all) => {
                            MatrixView { at: unsafe { all.add(i * k + p * rows) }, rows: 1, cols: rows as isize }
                        }
                        None => a.from(i, p),
                    };
                    let below = if tile + 1 < last { left.from(rows, 0) } else { left_then };
                    let next = match (left.rows, left.cols) {
                        // A packed operand is read sequentially.
                        _ if packed.is_some() => PrefetchLines {
                            at: left.from(0, PACKED_AHEAD).at,
                            line: left.cols,
                            row: RUN as isize * left.cols,
                        },
                        // From the second panel on, the rows are in a cache.
                        _ if j > 0 => PrefetchLines { at: left.at, line: 0, row: 0 },
                        (row, 1) => PrefetchLines { at: below.at, line: row, row: RUN as isize },
                        (_, step) => {
                            PrefetchLines { at: below.from(rows - 1, 0).at, line: step, row: RUN as isize * step }
                        }
                    };
                    let tile: Microkernel = t.by_size[vectors - 1][rows - 1];
                    // SAFETY: the caller guarantees the operands. The right operand has whole vectors, either in the
                    // panel or because `cols` is a multiple of them; so have the partial sums.
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
