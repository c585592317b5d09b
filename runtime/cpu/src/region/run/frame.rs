//! Interprets tile ops: the registers and scratch memory of one thread, and the op loop.

use super::*;
use crate::loops::{Arg, fused_interpreter};
use crate::memory::Block;
use crate::region::pack_transposed::PackBuffer;
use std::cell::Cell;

/// The part of the iteration space that one run of the ops covers: rows `row..row + k`, columns `col..col + w`. `k` is
/// 1 unless `w` is all columns.
#[derive(Clone, Copy)]
pub struct TileRange {
    pub row: usize,
    pub k: usize,
    pub col: usize,
    pub w: usize,
}

/// Memory of a frame, reused from region to region.
#[derive(Default)]
struct Scratch {
    block: Option<Block>,
    views: Vec<Arg>,
    partials: Vec<*mut u8>,
    /// The last panel of each packed load.
    packs: Vec<PackBuffer>,
    saved: Vec<u64>,
}

thread_local! {
    /// A stack, since a thread that forks holds one frame itself and takes another as a worker.
    static SCRATCH: Cell<Vec<Scratch>> = Cell::default();
}

/// The registers of one thread.
pub struct Frame<'a> {
    region: &'a Region,
    context: &'a Context<'a>,
    scratch: Scratch,
    /// The start of scratch memory.
    base: *mut u8,
    /// Registers saved from phase to phase, each with `saved_rows` rows of `cols` words: either this worker's row or
    /// all rows.
    saved: *mut u8,
    saved_rows: usize,
}

impl Drop for Frame<'_> {
    fn drop(&mut self) {
        fused_interpreter::store_fence();
        let mut stack = SCRATCH.take();
        stack.push(std::mem::take(&mut self.scratch));
        SCRATCH.set(stack);
    }
}

impl<'a> Frame<'a> {
    pub fn new(region: &'a Region, context: &'a Context<'a>) -> Frame<'a> {
        let mut stack = SCRATCH.take();
        let mut scratch = stack.pop().unwrap_or_default();
        SCRATCH.set(stack);
        if scratch.block.as_ref().is_none_or(|b| b.capacity() < region.scratch) {
            // A few hundred KiB; no region can run without them.
            scratch.block = Some(Block::new(region.scratch.max(1 << 18)).unwrap_or_else(|e| panic!("{e}")));
        }
        scratch.views.clear();
        scratch.views.resize(region.views, Arg::NONE);
        scratch.partials.clear();
        for packed in &mut scratch.packs {
            packed.clear();
        }
        if scratch.packs.len() < region.loads.len() {
            scratch.packs.resize_with(region.loads.len(), PackBuffer::default);
        }
        let base = scratch.block.as_ref().map_or(std::ptr::null_mut(), Block::ptr);
        let mut frame = Frame { region, context, scratch, base, saved: std::ptr::null_mut(), saved_rows: 1 };
        frame.fill();
        frame
    }

    /// Initialises what is the same for all blocks: constants, row registers, hoisted tiles.
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
                let cols = r.space.cols;
                let step = match h.source {
                    HoistedSource::Fill(from, kernel) => {
                        kernel(out, &self.scratch.views[from as usize], 1, r.tile);
                        cols
                    }
                    HoistedSource::Load(load, copies) => {
                        let size = r.loads[load as usize].size();
                        for c in 0..copies {
                            r.loads[load as usize].gather(self.context, 0, cols, out.add(c * cols * size));
                        }
                        if copies > 1 { cols } else { 0 }
                    }
                };
                self.scratch.views[h.view as usize] = Arg { ptr: out, step: step as isize };
            }
        }
    }

    /// Reserves memory for the saved registers of one row.
    pub fn reserve_saved(&mut self) {
        let words = self.region.saved * self.region.space.cols;
        if self.scratch.saved.len() < words {
            self.scratch.saved.resize(words, 0);
        }
        self.saved = self.scratch.saved.as_mut_ptr().cast();
    }

    pub fn views(&self) -> &[Arg] {
        &self.scratch.views
    }

    /// Binds the tiles of a phase.
    pub fn enter(&mut self, phase: &Phase) {
        for &(view, at) in &phase.tiles {
            // SAFETY: `compile` placed the tile within the scratch area.
            let ptr = unsafe { self.base.add(at) };
            self.scratch.views[view as usize] = Arg { ptr, step: self.region.space.cols as isize };
        }
    }

    /// Binds the row registers to row `row` of an area shared by all threads.
    pub fn share_rows(&mut self, area: *mut u8, rows: usize, row: usize) {
        for (k, &(view, size, _)) in self.region.row_views.iter().enumerate() {
            // SAFETY: the area has 8 bytes for each row of each register.
            let ptr = unsafe { area.add(8 * k * rows + row * size) };
            self.scratch.views[view as usize] = Arg { ptr, step: 1 };
        }
    }

    /// Binds saved registers to an area of `rows` rows, shared by all threads.
    pub fn share_saved(&mut self, area: *mut u8, rows: usize) {
        (self.saved, self.saved_rows) = (area, rows);
    }

    /// The result of a row reduction after `chunk`.
    ///
    /// # Safety
    /// A chunk of a phase that feeds the reduction must have run.
    pub unsafe fn chunk_result(&self, reduction: &RowReduction) -> u64 {
        // SAFETY: `compile` placed the lanes in the scratch area; the caller guarantees the rest.
        unsafe { *self.base.add(reduction.lanes).cast::<u64>() }
    }

    fn value(&self, value: u32) -> *mut u8 {
        self.context.values[value as usize].0
    }

    /// Runs a list of ops.
    pub fn run(&mut self, ops: &[TileOp], range: TileRange) {
        let cols = self.region.space.cols;
        let TileRange { row, k, col, w } = range;
        let first = row * cols + col;
        // SAFETY: views are tiles of this worker, large enough for a block, or parts of values that `plan::check` holds
        // within bounds; outputs never share bytes with operands, because tiles of one op differ (`Slots::assign`) and
        // an in-place store uses a tile.
        unsafe {
            for op in ops {
                match *op {
                    TileOp::Loop { kernel, out, args, shape, round, .. } => {
                        let v = &self.scratch.views;
                        let args = [v[args[0] as usize], v[args[1] as usize], v[args[2] as usize]];
                        let out = v[out as usize].ptr.cast_mut();
                        let (rows, cols) = match shape {
                            LoopShape::Flat => (1, k * w),
                            LoopShape::Rows | LoopShape::Reduce => (k, w),
                            LoopShape::PerRow => (1, k),
                        };
                        kernel(out, args.as_ptr(), rows, cols);
                        if let Some(round) = round {
                            let n = if matches!(shape, LoopShape::PerRow | LoopShape::Reduce) { k } else { k * w };
                            round(out, args.as_ptr(), 1, n);
                        }
                    }
                    TileOp::Fused { kernel, ref ops, shape } => {
                        let (rows, cols) = if shape == LoopShape::Flat { (1, k * w) } else { (k, w) };
                        kernel(ops, &self.scratch.views, rows, cols);
                    }
                    TileOp::Bind { view, value, offset, size, stride } => {
                        let (at, step) = match stride {
                            RowStride::Dense => (first as isize, cols as isize),
                            RowStride::Zero => (col as isize, 0),
                            RowStride::Elements(stride) => (row as isize * stride + col as isize, stride),
                        };
                        let ptr = self.value(value).offset((offset + at) * size as isize);
                        self.scratch.views[view as usize] = Arg { ptr, step };
                    }
                    TileOp::BindSaved { view, slot, size } => {
                        let at = slot as usize * self.saved_rows + if self.saved_rows == 1 { 0 } else { row };
                        let ptr = self.saved.add(8 * at * cols + col * size as usize);
                        self.scratch.views[view as usize] = Arg { ptr, step: cols as isize };
                    }
                    TileOp::BindOutput { view, value, size } => {
                        let ptr = self.value(value).add(first * size as usize);
                        self.scratch.views[view as usize] = Arg { ptr, step: cols as isize };
                    }
                    TileOp::Gather { view, load, row: one } => {
                        let out = self.scratch.views[view as usize].ptr.cast_mut();
                        let (start, len) = if one { (row, k) } else { (first, k * w) };
                        let (load, packed) =
                            (&self.region.loads[load as usize], &mut self.scratch.packs[load as usize]);
                        load.gather_packed(self.context, start, len, out, packed);
                    }
                    TileOp::ReduceLanes { view, reduction } => {
                        let r = &self.region.row_reductions[reduction as usize];
                        (r.loops.lanes)(self.base.add(r.lanes), &self.scratch.views[view as usize], 1, w);
                    }
                    TileOp::ReduceColumns { view, reduction } => {
                        let r = &self.region.col_reductions[reduction as usize];
                        let out = self.scratch.partials[reduction as usize].add(col * r.size);
                        (r.loops.columns)(out, &self.scratch.views[view as usize], k, w);
                    }
                    TileOp::Store { view, value, size, kernel, row: one } => {
                        let at = if one { row } else { first };
                        let out = self.value(value).add(at * size as usize);
                        let (rows, cols) = if one { (1, k) } else { (k, w) };
                        kernel(out, &self.scratch.views[view as usize], rows, cols);
                    }
                }
            }
        }
    }

    /// Runs columns `lo..hi` of a row, at most `ROW_CHUNK` of them from a multiple of it. The result of each reduction is
    /// stored at the start of its lanes.
    pub fn chunk(&mut self, phase: &Phase, row: usize, lo: usize, hi: usize) {
        let r = self.region;
        // SAFETY: `compile` placed the lanes in the scratch area.
        unsafe {
            for &k in &phase.reductions {
                let red = &r.row_reductions[k as usize];
                (red.loops.reset)(self.base.add(red.lanes), &Arg::NONE, 1, LANES);
            }
            for col in (lo..hi).step_by(r.tile) {
                self.run(&phase.ops, TileRange { row, k: 1, col, w: r.tile.min(hi - col) });
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

    /// Runs rows `lo..hi`, block by block.
    pub fn rows(&mut self, lo: usize, hi: usize) {
        let r = self.region;
        for row in (lo..hi).step_by(r.block_rows) {
            self.run(&r.phases[0].ops, TileRange { row, k: r.block_rows.min(hi - row), col: 0, w: r.space.cols });
        }
    }

    /// Runs lines `lo..hi` of a plain region (`Region::lines`).
    pub fn plain(&mut self, lo: usize, hi: usize) {
        let (r, cols) = (self.region, self.region.space.cols);
        if !r.segmented {
            return self.rows(lo, hi);
        }
        let chunks = cols.div_ceil(ROW_CHUNK);
        for line in lo..hi {
            let from = line % chunks * ROW_CHUNK;
            self.chunk(&r.phases[0], line / chunks, from, (from + ROW_CHUNK).min(cols));
        }
    }

    /// Runs a whole long row, phase by phase.
    pub fn long_row(&mut self, row: usize) {
        let r = self.region;
        let whole = TileRange { row, k: 1, col: 0, w: 1 };
        self.run(&r.prologue, whole);
        for phase in &r.phases {
            self.enter(phase);
            // SAFETY: `compile` placed totals and lanes in the scratch area.
            unsafe {
                for &k in &phase.reductions {
                    let red = &r.row_reductions[k as usize];
                    (red.loops.reset_total)(self.base.add(red.total), &Arg::NONE, 1, 1);
                }
                for lo in (0..r.space.cols).step_by(ROW_CHUNK) {
                    self.chunk(phase, row, lo, (lo + ROW_CHUNK).min(r.space.cols));
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
            self.run(&phase.row_ops, whole);
        }
    }

    /// Stores a total as element `row` of the reduction's register.
    ///
    /// # Safety
    /// `total` must point to a total.
    pub unsafe fn finish(&self, red: &RowReduction, total: Arg, row: usize) {
        // SAFETY: the register has an element for the row; the caller guarantees the rest.
        unsafe {
            let out = self.scratch.views[red.out as usize].ptr.cast_mut().add(row * red.size);
            (red.loops.finish)(out, &total, 1, 1);
            if let Some(round) = red.round {
                round(out, &Arg::NONE, 1, 1);
            }
        }
    }

    /// Binds column reductions to the partial of unit `unit`, and sets columns `lo..hi` of it to the identity.
    pub fn partials(&mut self, areas: &[Partial], unit: usize, lo: usize, hi: usize, reset: bool) {
        let r = self.region;
        self.scratch.partials.clear();
        for (red, area) in r.col_reductions.iter().zip(areas) {
            // SAFETY: an area has `cols` elements for each unit, and only this worker accesses these columns of the
            // unit.
            unsafe {
                let ptr = area.ptr().add(unit * r.space.cols * red.size);
                if reset {
                    (red.loops.reset)(ptr.add(lo * red.size), &Arg::NONE, 1, hi - lo);
                }
                self.scratch.partials.push(ptr);
            }
        }
    }
}
