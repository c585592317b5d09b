//! Schedules a region on threads: blocks of rows, or segments of long rows.
//!
//! Every kernel receives views that one worker owns, or parts of values that no other task accesses, since tasks are
//! disjoint ranges of rows or columns.

mod frame;

use super::*;
use crate::loops::Arg;
use crate::worker_pool::TaskQueue;
use perilune_core::error::Result;
use perilune_core::host_memory;
use perilune_plan::ir::{COL_CHUNK, LANES, ROW_CHUNK};
use smallvec::SmallVec;
use std::sync::{Mutex, PoisonError};

pub use frame::{Frame, TileRange};

/// The partials of a column reduction: `cols` elements for each chunk of rows.
pub struct Partial {
    /// Owns the memory at `start`; workers write to disjoint parts.
    _cells: Vec<u64>,
    start: SendPtr<u8>,
}

impl Partial {
    fn new(nbytes: usize) -> Result<Partial> {
        let mut words: Vec<u64> = host_memory::filled("cpu", nbytes.div_ceil(8))?;
        let start = SendPtr(words.as_mut_ptr().cast());
        Ok(Partial { _cells: words, start })
    }

    fn ptr(&self) -> *mut u8 {
        self.start.0
    }
}

/// Runs independent regions together through one task queue. A region that cannot be split into tasks runs separately
/// if it is large, otherwise as one task.
pub fn run_many(list: &[Region], context: &Context) -> Result<()> {
    let total = list.iter().map(Region::work).sum::<f64>();
    let threads = context.pool.threads();
    let large = |r: &Region| r.work() > (total / (2 * threads) as f64).max(PARALLEL_NS);
    let task_ns = (total / (TASKS_PER_THREAD * threads) as f64).clamp(TASK_NS, 8.0 * TASK_NS);
    // Each region with the number of its first task, and the lines per task: 0 if the region is one task.
    let mut parts: SmallVec<[(&Region, usize, usize); 32]> = SmallVec::new();
    let mut count = 0;
    for region in list {
        let size = if region.is_plain() { region.task_lines(task_ns) } else { 0 };
        if size == 0 && large(region) {
            region.run(context)?;
        } else if !region.is_predicated_off(context) {
            parts.push((region, count, size));
            count += if size > 0 { region.lines().div_ceil(size) } else { 1 };
        }
    }
    let failed = Mutex::new(None);
    context.pool.run(total > PARALLEL_NS, count, |tasks: &TaskQueue| {
        let mut frame: Option<(usize, Frame)> = None;
        while let Some(t) = tasks.claim() {
            let k = parts.partition_point(|p| p.1 <= t) - 1;
            let (region, first, size) = parts[k];
            if size == 0 {
                frame = None;
                if let Err(e) = region.run(context) {
                    *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(e);
                }
                continue;
            }
            if frame.as_ref().is_none_or(|f| f.0 != k) {
                // Releases the old frame's scratch memory for the new one.
                drop(frame.take());
                let mut new = Frame::new(region, context);
                new.enter(&region.phases[0]);
                frame = Some((k, new));
            }
            if let Some((_, frame)) = &mut frame {
                let lo = (t - first) * size;
                frame.plain(lo, (lo + size).min(region.lines()));
            }
        }
    });
    failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

impl Region {
    /// Whether the predicate is false.
    fn is_predicated_off(&self, context: &Context) -> bool {
        // SAFETY: the context holds the addresses of the program's values.
        self.predicate.as_ref().is_some_and(|g| unsafe { g.read(context) } == 0)
    }

    /// Whether the lines of the region (`lines`) can run in any order.
    fn is_plain(&self) -> bool {
        if self.segmented {
            self.row_reductions.is_empty()
                && self.row_views.is_empty()
                && self.prologue.is_empty()
                && self.saved == 0
                && self.col_reductions.is_empty()
                && self.phases.len() == 1
        } else {
            self.col_reductions.is_empty()
        }
    }

    /// The number of rows, or of chunks of all rows if rows are segmented.
    fn lines(&self) -> usize {
        let rows = self.space.batch * self.space.rows;
        if self.segmented { rows * self.space.cols.div_ceil(ROW_CHUNK) } else { rows }
    }

    /// Number of lines in a task of that many nanoseconds.
    fn task_lines(&self, ns: f64) -> usize {
        let line = if self.segmented { self.space.cols.min(ROW_CHUNK) } else { self.space.cols };
        let n = (ns / (self.cost * line.max(1) as f64)) as usize;
        if self.segmented { n.max(1) } else { n.max(1).next_multiple_of(self.block_rows) }
    }

    /// An upper bound of the bytes that a run on that many threads allocates besides the values: partials of column reductions, and
    /// what long rows keep.
    pub fn temporary_bytes(&self, threads: usize) -> usize {
        let IterSpace { batch, rows, cols } = self.space;
        let total = batch * rows;
        let area = |r: &ColReduction| (batch * rows.div_ceil(COL_CHUNK)).saturating_mul(cols).saturating_mul(r.size);
        let areas = self.col_reductions.iter().map(area).fold(0, usize::saturating_add);
        if !self.segmented {
            return areas;
        }
        let units = if self.col_reductions.is_empty() { total } else { batch * rows.div_ceil(COL_CHUNK) };
        let words = if self.work() <= PARALLEL_NS || units >= 4 * threads {
            self.saved.saturating_mul(cols).saturating_mul(threads)
        } else {
            let folded = self.phases.iter().map(|p| p.reductions.len()).max().unwrap_or(0);
            let chunks = total.saturating_mul(cols.div_ceil(ROW_CHUNK));
            let saved = self.saved.saturating_mul(total.saturating_mul(cols));
            (self.row_views.len().saturating_mul(total))
                .saturating_add(saved)
                .saturating_add(folded.saturating_mul(chunks))
        };
        areas.saturating_add(words.saturating_mul(8))
    }

    /// Runs the region on the threads of the pool.
    pub fn run(&self, context: &Context) -> Result<()> {
        if self.is_predicated_off(context) {
            return Ok(());
        }
        let chunks = self.space.rows.div_ceil(COL_CHUNK);
        let parallel = self.work() > PARALLEL_NS;
        let area = |r: &ColReduction| Partial::new(self.space.batch * chunks * self.space.cols * r.size);
        let areas = self.col_reductions.iter().map(area).collect::<Result<Vec<Partial>>>()?;
        if !self.segmented {
            self.blocks(context, parallel, &areas);
        } else {
            self.segments(context, parallel, &areas)?;
        }
        for (red, area) in self.col_reductions.iter().zip(&areas) {
            self.combine(context, red, area, chunks);
        }
        Ok(())
    }

    /// The rows of unit `unit`: a chunk of `COL_CHUNK` rows of one batch.
    fn unit_rows(&self, unit: usize) -> (usize, usize) {
        let (rows, chunks) = (self.space.rows, self.space.rows.div_ceil(COL_CHUNK));
        let (b, c) = (unit / chunks, unit % chunks);
        (b * rows + c * COL_CHUNK, b * rows + ((c + 1) * COL_CHUNK).min(rows))
    }

    fn blocks(&self, context: &Context, parallel: bool, areas: &[Partial]) {
        let IterSpace { batch, rows, cols } = self.space;
        let total = batch * rows;
        let (units, unit_rows) = if areas.is_empty() {
            let threads = context.pool.threads();
            let n = self.task_lines((self.work() / (TASKS_PER_THREAD * threads) as f64).clamp(TASK_NS, 8.0 * TASK_NS));
            (total.div_ceil(n), n)
        } else {
            (batch * rows.div_ceil(COL_CHUNK), 0)
        };
        context.pool.run(parallel, units, |tasks: &TaskQueue| {
            if let Some(pipeline) = &self.pipeline {
                return self.run_pipeline(pipeline, context, tasks, unit_rows);
            }
            let mut frame = Frame::new(self, context);
            let phase = &self.phases[0];
            frame.enter(phase);
            while let Some(u) = tasks.claim() {
                let (lo, hi) = if areas.is_empty() {
                    (u * unit_rows, ((u + 1) * unit_rows).min(total))
                } else {
                    frame.partials(areas, u, 0, cols, true);
                    self.unit_rows(u)
                };
                frame.rows(lo, hi);
            }
        });
    }

    fn segments(&self, context: &Context, parallel: bool, areas: &[Partial]) -> Result<()> {
        let IterSpace { batch, rows, cols } = self.space;
        let total = batch * rows;
        let units = if areas.is_empty() { total } else { batch * rows.div_ceil(COL_CHUNK) };
        if !parallel || units >= 4 * context.pool.threads() {
            // Each worker saves registers of its row (`Frame::reserve_saved`).
            let words = self.saved.saturating_mul(cols).saturating_mul(context.pool.threads());
            host_memory::check("cpu", words.saturating_mul(8))?;
            context.pool.run(parallel, units, |tasks: &TaskQueue| {
                let mut frame = Frame::new(self, context);
                frame.reserve_saved();
                while let Some(u) = tasks.claim() {
                    let (lo, hi) = if areas.is_empty() {
                        (u, u + 1)
                    } else {
                        frame.partials(areas, u, 0, cols, true);
                        self.unit_rows(u)
                    };
                    for row in lo..hi {
                        frame.long_row(row);
                    }
                }
            });
            return Ok(());
        }
        // Few rows: run phase by phase; a task is a chunk of columns of one unit.
        let chunks = cols.div_ceil(ROW_CHUNK);
        // Chunks per task: enough to use up packed panels, few enough to balance the load.
        let pack = self.loads.iter().filter_map(Load::pack_elements).max().unwrap_or(0);
        let group = (4 * pack / ROW_CHUNK).min(units * chunks / (4 * context.pool.threads())).max(1);
        let mut rows_area: Vec<u64> = host_memory::filled("cpu", self.row_views.len().saturating_mul(total))?;
        let shared = SendPtr(rows_area.as_mut_ptr().cast::<u8>());
        let mut saved_area: Vec<u64> = host_memory::filled("cpu", self.saved.saturating_mul(total * cols))?;
        let saved = SendPtr(saved_area.as_mut_ptr().cast::<u8>());
        let mut main = Frame::new(self, context);
        main.share_rows(shared.0, total, 0);
        main.run(&self.prologue, TileRange { row: 0, k: total, col: 0, w: 1 });
        for (p, phase) in self.phases.iter().enumerate() {
            let words = phase.reductions.len().saturating_mul(total * chunks);
            let mut folded: Vec<u64> = host_memory::filled("cpu", words)?;
            let out = SendPtr(folded.as_mut_ptr());
            context.pool.run(parallel, (units * chunks).div_ceil(group), |tasks: &TaskQueue| {
                let (shared, out, saved) = (&shared, &out, &saved);
                let mut frame = Frame::new(self, context);
                frame.share_saved(saved.0, total);
                frame.enter(phase);
                let group = |g: usize| g * group..((g + 1) * group).min(units * chunks);
                for t in std::iter::from_fn(|| tasks.claim()).flat_map(group) {
                    let (u, c) = (t / chunks, t % chunks);
                    let (lo, hi) = (c * ROW_CHUNK, ((c + 1) * ROW_CHUNK).min(cols));
                    let (first, last) = if areas.is_empty() { (u, u + 1) } else { self.unit_rows(u) };
                    frame.partials(areas, u, lo, hi, p == 0);
                    for row in first..last {
                        frame.share_rows(shared.0, total, row);
                        frame.chunk(phase, row, lo, hi);
                        for (i, &k) in phase.reductions.iter().enumerate() {
                            let reduction = &self.row_reductions[k as usize];
                            // SAFETY: the word of (reduction, row, chunk) belongs to this task.
                            unsafe { *out.0.add((i * total + row) * chunks + c) = frame.chunk_result(reduction) };
                        }
                    }
                }
            });
            for (i, &k) in phase.reductions.iter().enumerate() {
                let red = &self.row_reductions[k as usize];
                for row in 0..total {
                    // SAFETY: the total is a local; the workers have returned.
                    unsafe {
                        let mut cell = 0u64;
                        (red.loops.reset_total)((&raw mut cell).cast(), &Arg::NONE, 1, 1);
                        for c in 0..chunks {
                            let part = &raw const folded[(i * total + row) * chunks + c];
                            (red.loops.combine)((&raw mut cell).cast(), &Arg { ptr: part.cast(), step: 0 }, 1, 1);
                        }
                        main.finish(red, Arg { ptr: (&raw const cell).cast(), step: 0 }, row);
                    }
                }
            }
            main.run(&phase.row_ops, TileRange { row: 0, k: total, col: 0, w: 1 });
        }
        Ok(())
    }

    /// Combines the partials of a column reduction and stores the results.
    fn combine(&self, context: &Context, red: &ColReduction, area: &Partial, chunks: usize) {
        const WIDTH: usize = 512;
        let IterSpace { batch, cols, .. } = self.space;
        let pieces = cols.div_ceil(WIDTH);
        let parallel = (batch * chunks * cols) as f64 * 0.3 > PARALLEL_NS;
        context.pool.run(parallel, batch * pieces, |tasks: &TaskQueue| {
            let mut buffer = [0u64; WIDTH];
            while let Some(t) = tasks.claim() {
                let (b, lo) = (t / pieces, t % pieces * WIDTH);
                let w = WIDTH.min(cols - lo);
                let out = buffer.as_mut_ptr().cast::<u8>();
                // SAFETY: partials are laid out as in `Frame::partials`; each task stores its own columns.
                unsafe {
                    let ptr = area.ptr().add((b * chunks * cols + lo) * red.size);
                    (red.loops.partials)(out, &Arg { ptr, step: cols as isize }, chunks, w);
                    if let Some(round) = red.round {
                        round(out, &Arg::NONE, 1, w);
                    }
                    for &(value, size, kernel) in &red.stores {
                        let to = context.values[value as usize].0.add((b * cols + lo) * size);
                        kernel(to, &Arg { ptr: out, step: 0 }, 1, w);
                    }
                }
            }
        });
    }
}
