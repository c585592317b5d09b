//! Running a region: blocks of rows, or segments of long rows, shared among threads.
//!
//! All kernels here get views that one worker owns, or parts of values that no other task touches: tasks are disjoint
//! ranges of rows or of columns.

use super::panel::Held;
use super::*;
use crate::loops::{Arg, chain};
use crate::memory::Block;
use crate::worker_pool::TaskQueue;
use perilune_core::error::{Error, Result};
use perilune_plan::ir::{COL_CHUNK, LANES, ROW_CHUNK};
use smallvec::SmallVec;
use std::cell::Cell;
use std::sync::{Mutex, PoisonError};

/// A block: `k` rows from `row` on, columns `col..col + w` of them. `k` is 1 unless `w` is all columns.
#[derive(Clone, Copy)]
pub(super) struct Span {
    pub row: usize,
    pub k: usize,
    pub col: usize,
    pub w: usize,
}

#[derive(Default)]
struct Scratch {
    block: Option<Block>,
    views: Vec<Arg>,
    partials: Vec<*mut u8>,
    /// For each load that goes by panels, the one fetched last.
    held: Vec<Held>,
    kept: Vec<u64>,
}

thread_local! {
    /// A stack: a thread that shares work holds one frame itself and takes another as a worker.
    static SCRATCH: Cell<Vec<Scratch>> = Cell::default();
}

/// One thread's registers.
pub(super) struct Frame<'a> {
    region: &'a Region,
    context: &'a Context<'a>,
    scratch: Scratch,
    base: *mut u8,
    /// Registers kept from phase to phase, each `kept_rows` rows of `cols` words: of this worker's row, or of all rows.
    kept: *mut u8,
    kept_rows: usize,
}

impl Drop for Frame<'_> {
    fn drop(&mut self) {
        chain::fence();
        let mut stack = SCRATCH.take();
        stack.push(std::mem::take(&mut self.scratch));
        SCRATCH.set(stack);
    }
}

impl<'a> Frame<'a> {
    pub(super) fn new(region: &'a Region, context: &'a Context<'a>) -> Frame<'a> {
        let mut stack = SCRATCH.take();
        let mut scratch = stack.pop().unwrap_or_default();
        SCRATCH.set(stack);
        if scratch.block.as_ref().is_none_or(|b| b.capacity() < region.scratch) {
            // A few hundred KiB; a machine without them cannot go on.
            scratch.block = Some(Block::new(region.scratch.max(1 << 18)).unwrap_or_else(|e| panic!("{e}")));
        }
        scratch.views.clear();
        scratch.views.resize(region.views, Arg::NONE);
        scratch.partials.clear();
        for held in &mut scratch.held {
            held.forget();
        }
        if scratch.held.len() < region.loads.len() {
            scratch.held.resize_with(region.loads.len(), Held::default);
        }
        let base = scratch.block.as_ref().map_or(std::ptr::null_mut(), Block::ptr);
        let mut frame = Frame { region, context, scratch, base, kept: std::ptr::null_mut(), kept_rows: 1 };
        frame.fill();
        frame
    }

    /// What holds for all blocks: constants, row registers, hoisted tiles.
    fn fill(&mut self) {
        let r = self.region;
        // SAFETY: `compile` laid these areas out within `scratch` bytes; loads stay within their values (`plan::check`).
        unsafe {
            for (k, (view, constant)) in r.constants.iter().enumerate() {
                let cell = self.base.add(8 * k);
                *cell.cast::<u64>() = constant.read(self.context).to_le();
                self.scratch.views[*view as usize] = Arg { ptr: cell, step: 0 };
            }
            for &(view, _, at) in &r.row_views {
                self.scratch.views[view as usize] = Arg { ptr: self.base.add(at), step: 1 };
            }
            for h in &r.hoisted {
                let out = self.base.add(h.at);
                let cols = r.grid.cols;
                let step = match h.what {
                    HoistedKind::Fill(from, kernel) => {
                        kernel(out, &self.scratch.views[from as usize], 1, r.tile);
                        cols
                    }
                    HoistedKind::Load(load, copies) => {
                        let size = r.loads[load as usize].size();
                        for c in 0..copies {
                            r.loads[load as usize].fetch(self.context, 0, cols, out.add(c * cols * size));
                        }
                        if copies > 1 { cols } else { 0 }
                    }
                };
                self.scratch.views[h.view as usize] = Arg { ptr: out, step: step as isize };
            }
        }
    }

    /// Makes room for the kept registers of one row.
    fn keep_row(&mut self) {
        let words = self.region.kept * self.region.grid.cols;
        if self.scratch.kept.len() < words {
            self.scratch.kept.resize(words, 0);
        }
        self.kept = self.scratch.kept.as_mut_ptr().cast();
    }

    pub(super) fn views(&self) -> &[Arg] {
        &self.scratch.views
    }

    pub(super) fn enter(&mut self, phase: &Phase) {
        for &(view, at) in &phase.tiles {
            // SAFETY: within the scratch area, by `compile`.
            let ptr = unsafe { self.base.add(at) };
            self.scratch.views[view as usize] = Arg { ptr, step: self.region.grid.cols as isize };
        }
    }

    /// Points the row registers at row `row` of an area shared by all threads.
    fn share_rows(&mut self, area: *mut u8, rows: usize, row: usize) {
        for (k, &(view, size, _)) in self.region.row_views.iter().enumerate() {
            // SAFETY: the area has 8 bytes for each row of each register.
            let ptr = unsafe { area.add(8 * k * rows + row * size) };
            self.scratch.views[view as usize] = Arg { ptr, step: 1 };
        }
    }

    fn value(&self, value: u32) -> *mut u8 {
        self.context.values[value as usize].0
    }

    pub(super) fn run(&mut self, steps: &[Step], span: Span) {
        let cols = self.region.grid.cols;
        let Span { row, k, col, w } = span;
        let first = row * cols + col;
        // SAFETY: views are tiles of this worker, large enough for a block, or parts of values that `plan::check` holds
        // within bounds; outputs never share bytes with operands, because tiles of one step differ (`Slots::assign`) and a
        // store in place goes through a tile.
        unsafe {
            for step in steps {
                match *step {
                    Step::Run { kernel, out, args, form, round, .. } => {
                        let v = &self.scratch.views;
                        let args = [v[args[0] as usize], v[args[1] as usize], v[args[2] as usize]];
                        let out = v[out as usize].ptr.cast_mut();
                        let (rows, cols) = match form {
                            Form::Flat => (1, k * w),
                            Form::Rows | Form::Reduce => (k, w),
                            Form::Row => (1, k),
                        };
                        kernel(out, args.as_ptr(), rows, cols);
                        if let Some(round) = round {
                            let n = if matches!(form, Form::Row | Form::Reduce) { k } else { k * w };
                            round(out, args.as_ptr(), 1, n);
                        }
                    }
                    Step::Chain { kernel, ref links, form } => {
                        let (rows, cols) = if form == Form::Flat { (1, k * w) } else { (k, w) };
                        kernel(links, &self.scratch.views, rows, cols);
                    }
                    Step::Bind { view, value, offset, size, place } => {
                        let (at, step) = match place {
                            Place::Dense => (first as isize, cols as isize),
                            Place::Col => (col as isize, 0),
                            Place::Rows(stride) => (row as isize * stride + col as isize, stride),
                        };
                        let ptr = self.value(value).offset((offset + at) * size as isize);
                        self.scratch.views[view as usize] = Arg { ptr, step };
                    }
                    Step::Kept { view, slot, size } => {
                        let at = slot as usize * self.kept_rows + if self.kept_rows == 1 { 0 } else { row };
                        let ptr = self.kept.add(8 * at * cols + col * size as usize);
                        self.scratch.views[view as usize] = Arg { ptr, step: cols as isize };
                    }
                    Step::Out { view, value, size } => {
                        let ptr = self.value(value).add(first * size as usize);
                        self.scratch.views[view as usize] = Arg { ptr, step: cols as isize };
                    }
                    Step::Fetch { view, load, row: one } => {
                        let out = self.scratch.views[view as usize].ptr.cast_mut();
                        let (start, len) = if one { (row, k) } else { (first, k * w) };
                        let (load, held) = (&self.region.loads[load as usize], &mut self.scratch.held[load as usize]);
                        load.fetch_by_panel(self.context, start, len, out, held);
                    }
                    Step::Lanes { view, reduction } => {
                        let r = &self.region.row_reductions[reduction as usize];
                        (r.loops.lanes)(self.base.add(r.lanes), &self.scratch.views[view as usize], 1, w);
                    }
                    Step::Columns { view, reduction } => {
                        let r = &self.region.col_reductions[reduction as usize];
                        let out = self.scratch.partials[reduction as usize].add(col * r.size);
                        (r.loops.columns)(out, &self.scratch.views[view as usize], k, w);
                    }
                    Step::Store { view, value, size, kernel, row: one } => {
                        let at = if one { row } else { first };
                        let out = self.value(value).add(at * size as usize);
                        let (rows, cols) = if one { (1, k) } else { (k, w) };
                        kernel(out, &self.scratch.views[view as usize], rows, cols);
                    }
                }
            }
        }
    }

    /// Columns `lo..hi` of a row, at most `ROW_CHUNK` of them from a multiple of it: the chunk's results are left at the
    /// start of the lanes of each reduction.
    fn chunk(&mut self, phase: &Phase, row: usize, lo: usize, hi: usize) {
        let r = self.region;
        // SAFETY: lanes lie in the scratch area, by `compile`.
        unsafe {
            for &k in &phase.reductions {
                let red = &r.row_reductions[k as usize];
                (red.loops.reset)(self.base.add(red.lanes), &Arg::NONE, 1, LANES);
            }
            for col in (lo..hi).step_by(r.tile) {
                self.run(&phase.steps, Span { row, k: 1, col, w: r.tile.min(hi - col) });
            }
            for &k in &phase.reductions {
                let red = &r.row_reductions[k as usize];
                let mut folded = 0u64;
                let lanes = Arg { ptr: self.base.add(red.lanes), step: 0 };
                (red.loops.fold)((&raw mut folded).cast(), &lanes, 1, 1);
                *self.base.add(red.lanes).cast::<u64>() = folded;
            }
        }
    }

    /// Rows `lo..hi`, block by block.
    fn rows(&mut self, lo: usize, hi: usize) {
        let r = self.region;
        for row in (lo..hi).step_by(r.block_rows) {
            self.run(&r.phases[0].steps, Span { row, k: r.block_rows.min(hi - row), col: 0, w: r.grid.cols });
        }
    }

    /// Lines `lo..hi` of a plain region (`Region::lines`).
    fn plain(&mut self, lo: usize, hi: usize) {
        let (r, cols) = (self.region, self.region.grid.cols);
        if !r.segmented {
            return self.rows(lo, hi);
        }
        let chunks = cols.div_ceil(ROW_CHUNK);
        for line in lo..hi {
            let from = line % chunks * ROW_CHUNK;
            self.chunk(&r.phases[0], line / chunks, from, (from + ROW_CHUNK).min(cols));
        }
    }

    /// A whole long row: phase after phase.
    fn long_row(&mut self, row: usize) {
        let r = self.region;
        let whole = Span { row, k: 1, col: 0, w: 1 };
        self.run(&r.before, whole);
        for phase in &r.phases {
            self.enter(phase);
            // SAFETY: totals and lanes lie in the scratch area, by `compile`.
            unsafe {
                for &k in &phase.reductions {
                    let red = &r.row_reductions[k as usize];
                    (red.loops.reset_total)(self.base.add(red.total), &Arg::NONE, 1, 1);
                }
                for lo in (0..r.grid.cols).step_by(ROW_CHUNK) {
                    self.chunk(phase, row, lo, (lo + ROW_CHUNK).min(r.grid.cols));
                    for &k in &phase.reductions {
                        let red = &r.row_reductions[k as usize];
                        let folded = Arg { ptr: self.base.add(red.lanes), step: 0 };
                        (red.loops.combine)(self.base.add(red.total), &folded, 1, 1);
                    }
                }
                for &k in &phase.reductions {
                    let red = &r.row_reductions[k as usize];
                    self.finish(red, Arg { ptr: self.base.add(red.total), step: 0 }, 0);
                }
            }
            self.run(&phase.row_steps, whole);
        }
    }

    /// A total becomes element `row` of the reduction's register.
    ///
    /// # Safety
    /// `total` must hold one.
    unsafe fn finish(&self, red: &RowReduction, total: Arg, row: usize) {
        // SAFETY: the register has an element for the row; the rest is the caller's promise.
        unsafe {
            let out = self.scratch.views[red.out as usize].ptr.cast_mut().add(row * red.size);
            (red.loops.finish)(out, &total, 1, 1);
            if let Some(round) = red.round {
                round(out, &Arg::NONE, 1, 1);
            }
        }
    }

    /// Points column reductions at the partial of unit `unit`, and sets columns `lo..hi` of it to the identity.
    fn partials(&mut self, areas: &[Partial], unit: usize, lo: usize, hi: usize, reset: bool) {
        let r = self.region;
        self.scratch.partials.clear();
        for (red, area) in r.col_reductions.iter().zip(areas) {
            // SAFETY: an area has `cols` elements for each unit, and this worker alone has the unit's columns.
            unsafe {
                let ptr = area.ptr().add(unit * r.grid.cols * red.size);
                if reset {
                    (red.loops.reset)(ptr.add(lo * red.size), &Arg::NONE, 1, hi - lo);
                }
                self.scratch.partials.push(ptr);
            }
        }
    }
}

/// Partials of a column reduction: `cols` elements for each chunk of rows.
struct Partial {
    /// Keeps what `start` points at; workers write to parts that do not meet.
    _cells: Vec<u64>,
    start: SendPtr<u8>,
}

impl Partial {
    fn new(nbytes: usize) -> Result<Partial> {
        let mut cells: Vec<u64> = Vec::new();
        if cells.try_reserve_exact(nbytes.div_ceil(8)).is_err() {
            let message = format!("out of memory: partial sums over rows need {nbytes} bytes");
            return Err(
                Error::system("cpu", message).hint("reduce over the last dim, or over fewer elements at a time")
            );
        }
        cells.resize(nbytes.div_ceil(8), 0);
        let start = SendPtr(cells.as_mut_ptr().cast());
        Ok(Partial { _cells: cells, start })
    }

    fn ptr(&self) -> *mut u8 {
        self.start.0
    }
}

/// Regions that do not depend on each other, cut in pieces that all threads share; those that cannot be cut that way run
/// one by one, if they are large, or as a piece.
pub fn run_many(list: &[Region], context: &Context) -> Result<()> {
    let total = list.iter().map(Region::work).sum::<f64>();
    let threads = context.pool.threads();
    let large = |r: &Region| r.work() > (total / (2 * threads) as f64).max(PARALLEL_NS);
    let piece = (total / (PIECES * threads) as f64).clamp(PIECE_NS, 8.0 * PIECE_NS);
    // Each region with the number of its first piece, and how many rows or chunks a piece has: 0 if it is one piece.
    let mut parts: SmallVec<[(&Region, usize, usize); 32]> = SmallVec::new();
    let mut count = 0;
    for region in list {
        let size = if region.is_plain() { region.piece(piece) } else { 0 };
        if size == 0 && large(region) {
            region.run(context)?;
        } else if !region.is_off(context) {
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
                // The old one's scratch memory serves the new one.
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
    /// Whether its guard says that nothing is to be done.
    fn is_off(&self, context: &Context) -> bool {
        // SAFETY: the caller's values are where the context says.
        self.guard.as_ref().is_some_and(|g| unsafe { g.read(context) } == 0)
    }

    /// Whether it can be done line by line (`lines`), in any order.
    fn is_plain(&self) -> bool {
        if self.segmented {
            self.row_reductions.is_empty()
                && self.row_views.is_empty()
                && self.before.is_empty()
                && self.kept == 0
                && self.col_reductions.is_empty()
                && self.phases.len() == 1
        } else {
            self.col_reductions.is_empty()
        }
    }

    /// Rows, or chunks of all rows if rows are cut.
    fn lines(&self) -> usize {
        let rows = self.grid.batch * self.grid.rows;
        if self.segmented { rows * self.grid.cols.div_ceil(ROW_CHUNK) } else { rows }
    }

    /// How many lines a piece of that many nanoseconds has.
    fn piece(&self, ns: f64) -> usize {
        let line = if self.segmented { self.grid.cols.min(ROW_CHUNK) } else { self.grid.cols };
        let n = (ns / (self.cost * line.max(1) as f64)) as usize;
        if self.segmented { n.max(1) } else { n.max(1).next_multiple_of(self.block_rows) }
    }

    pub fn run(&self, context: &Context) -> Result<()> {
        if self.is_off(context) {
            return Ok(());
        }
        let chunks = self.grid.rows.div_ceil(COL_CHUNK);
        let share = self.work() > PARALLEL_NS;
        let area = |r: &ColReduction| Partial::new(self.grid.batch * chunks * self.grid.cols * r.size);
        let areas = self.col_reductions.iter().map(area).collect::<Result<Vec<Partial>>>()?;
        if !self.segmented {
            self.blocks(context, share, &areas);
        } else {
            self.segments(context, share, &areas);
        }
        for (red, area) in self.col_reductions.iter().zip(&areas) {
            self.combine(context, red, area, chunks);
        }
        Ok(())
    }

    /// The rows of unit `unit`: a chunk of `COL_CHUNK` rows of one batch.
    fn unit_rows(&self, unit: usize) -> (usize, usize) {
        let (rows, chunks) = (self.grid.rows, self.grid.rows.div_ceil(COL_CHUNK));
        let (b, c) = (unit / chunks, unit % chunks);
        (b * rows + c * COL_CHUNK, b * rows + ((c + 1) * COL_CHUNK).min(rows))
    }

    fn blocks(&self, context: &Context, share: bool, areas: &[Partial]) {
        let Grid { batch, rows, cols } = self.grid;
        let total = batch * rows;
        let (units, unit_rows) = if areas.is_empty() {
            let threads = context.pool.threads();
            let n = self.piece((self.work() / (PIECES * threads) as f64).clamp(PIECE_NS, 8.0 * PIECE_NS));
            (total.div_ceil(n), n)
        } else {
            (batch * rows.div_ceil(COL_CHUNK), 0)
        };
        context.pool.run(share, units, |tasks: &TaskQueue| {
            if let Some(relay) = &self.relay {
                return self.relayed(relay, context, tasks, unit_rows);
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

    fn segments(&self, context: &Context, share: bool, areas: &[Partial]) {
        let Grid { batch, rows, cols } = self.grid;
        let total = batch * rows;
        let units = if areas.is_empty() { total } else { batch * rows.div_ceil(COL_CHUNK) };
        if !share || units >= 4 * context.pool.threads() {
            context.pool.run(share, units, |tasks: &TaskQueue| {
                let mut frame = Frame::new(self, context);
                frame.keep_row();
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
            return;
        }
        // Few rows: phase by phase, a task is a chunk of columns of one unit.
        let chunks = cols.div_ceil(ROW_CHUNK);
        // Chunks claimed together: enough to use panels up, but enough claims for balance.
        let panel = self.loads.iter().filter_map(Load::panel).max().unwrap_or(0);
        let group = (4 * panel / ROW_CHUNK).min(units * chunks / (4 * context.pool.threads())).max(1);
        let mut rows_area = vec![0u64; self.row_views.len() * total];
        let shared = SendPtr(rows_area.as_mut_ptr().cast::<u8>());
        let mut kept_area = vec![0u64; self.kept * total * cols];
        let kept = SendPtr(kept_area.as_mut_ptr().cast::<u8>());
        let mut main = Frame::new(self, context);
        main.share_rows(shared.0, total, 0);
        main.run(&self.before, Span { row: 0, k: total, col: 0, w: 1 });
        for (p, phase) in self.phases.iter().enumerate() {
            let mut folded = vec![0u64; phase.reductions.len() * total * chunks];
            let out = SendPtr(folded.as_mut_ptr());
            context.pool.run(share, (units * chunks).div_ceil(group), |tasks: &TaskQueue| {
                let (shared, out, kept) = (&shared, &out, &kept);
                let mut frame = Frame::new(self, context);
                (frame.kept, frame.kept_rows) = (kept.0, total);
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
                            let lanes = self.row_reductions[k as usize].lanes;
                            // SAFETY: (reduction, row, chunk) is this task's own cell.
                            unsafe {
                                *out.0.add((i * total + row) * chunks + c) = *frame.base.add(lanes).cast::<u64>()
                            };
                        }
                    }
                }
            });
            for (i, &k) in phase.reductions.iter().enumerate() {
                let red = &self.row_reductions[k as usize];
                for row in 0..total {
                    // SAFETY: the total is a cell here; the workers have returned.
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
            main.run(&phase.row_steps, Span { row: 0, k: total, col: 0, w: 1 });
        }
    }

    /// Partials of a column reduction to its outputs.
    fn combine(&self, context: &Context, red: &ColReduction, area: &Partial, chunks: usize) {
        const WIDTH: usize = 512;
        let Grid { batch, cols, .. } = self.grid;
        let pieces = cols.div_ceil(WIDTH);
        let share = (batch * chunks * cols) as f64 * 0.3 > PARALLEL_NS;
        context.pool.run(share, batch * pieces, |tasks: &TaskQueue| {
            let mut buffer = [0u64; WIDTH];
            while let Some(t) = tasks.claim() {
                let (b, lo) = (t / pieces, t % pieces * WIDTH);
                let w = WIDTH.min(cols - lo);
                let out = buffer.as_mut_ptr().cast::<u8>();
                // SAFETY: partials lie as `partials` cut them; each task stores its own columns.
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
