//! Allocates scratch memory: assigns tiles to slots by linear scan, chooses the tile size and lays out all areas.

use super::*;

impl Compiler<'_> {
    /// Lays out scratch memory and completes the region.
    pub(super) fn finish(mut self, prologue: Vec<TileOp>, lists: Vec<(List, Vec<u16>, Vec<TileOp>)>) -> Region {
        let slots: Vec<Slots> = lists.iter().map(|(l, ..)| Slots::assign(&l.ops, &l.tiles)).collect();
        let per_element =
            slots.iter().map(Slots::bytes).max().unwrap_or(0) + self.hoisted.iter().map(|h| h.1).sum::<usize>();
        let fit = L1_BYTES / per_element.max(8);
        let elements = (1usize << fit.max(1).ilog2()).clamp(MIN_TILE, MAX_TILE);
        let IterSpace { batch, rows, cols } = self.space;
        let block_rows = if self.segmented { 1 } else { (elements / cols.max(1)).clamp(1, (batch * rows).max(1)) };
        // Loops interleave four rows.
        let block_rows = if block_rows > 4 { block_rows / 4 * 4 } else { block_rows };
        // A row pipeline has three blocks in flight.
        let block_rows = if self.pipeline.is_some() { (PIPELINE_TILE / cols).clamp(1, block_rows) } else { block_rows };
        let tile = if self.segmented { elements } else { block_rows * cols };

        let mut scratch = Areas::default();
        // Constants first, 8 bytes each: `Frame` relies on it.
        scratch.take(8 * self.constants.len());
        for r in &mut self.row_views {
            r.2 = scratch.take(8 * block_rows);
        }
        for r in &mut self.row_reductions {
            r.lanes = scratch.take(8 * LANES);
            r.total = scratch.take(8);
        }
        let mut hoisted = Vec::new();
        for (view, size, source) in std::mem::take(&mut self.hoisted) {
            let source = match source {
                HoistedSource::Load(load, copies) => HoistedSource::Load(load, copies.min(block_rows)),
                fill => fill,
            };
            hoisted.push(Hoisted { view, at: scratch.take(tile * size), source });
        }
        let start = scratch.at;
        let mut end = start;
        let mut phases = Vec::new();
        for ((list, reductions, row_ops), slots) in lists.into_iter().zip(&slots) {
            scratch.at = start;
            let at: Vec<usize> = slots.sizes.iter().map(|size| scratch.take(tile * size)).collect();
            end = end.max(scratch.at);
            let tiles = slots.of.iter().map(|&(view, slot)| (view, at[slot])).collect();
            phases.push(Phase { ops: list.ops, tiles, reductions, row_ops });
        }
        Region {
            predicate: None,
            space: self.space,
            segmented: self.segmented,
            block_rows,
            tile,
            views: self.next_view,
            constants: self.constants,
            loads: self.loads,
            hoisted,
            row_views: self.row_views,
            prologue,
            phases,
            row_reductions: self.row_reductions,
            col_reductions: self.col_reductions,
            pipeline: self.pipeline.map(Box::new),
            scratch: end,
            saved: self.saved.len(),
            cost: self.cost,
        }
    }
}

/// A bump allocator of offsets, each aligned to a cache line.
#[derive(Default)]
struct Areas {
    at: usize,
}

impl Areas {
    fn take(&mut self, nbytes: usize) -> usize {
        let at = self.at;
        self.at += nbytes.next_multiple_of(crate::memory::ALIGN);
        at
    }
}

/// Tiles that share memory if their live ranges are disjoint.
struct Slots {
    /// Element size of each slot.
    sizes: Vec<usize>,
    /// The slot of each tile.
    of: Vec<(View, usize)>,
}

impl Slots {
    fn bytes(&self) -> usize {
        self.sizes.iter().sum()
    }

    /// Assigns slots by linear scan. An op's output is assigned before its operands are freed, so that no loop runs in
    /// place.
    fn assign(ops: &[TileOp], tiles: &[(View, usize)]) -> Slots {
        let size_of: HashMap<View, usize> = tiles.iter().copied().collect();
        let mut last: HashMap<View, usize> = HashMap::new();
        for (k, s) in ops.iter().enumerate() {
            for v in touched(s) {
                last.insert(v, k);
            }
        }
        let mut out = Slots { sizes: Vec::new(), of: Vec::new() };
        let mut slot_of: HashMap<View, usize> = HashMap::new();
        let mut free: Vec<usize> = Vec::new();
        for (k, s) in ops.iter().enumerate() {
            for v in touched(s) {
                let Some(&size) = size_of.get(&v) else { continue };
                if slot_of.contains_key(&v) {
                    continue;
                }
                let found = free.iter().rposition(|&f| out.sizes[f] == size);
                let slot = match found {
                    Some(f) => free.remove(f),
                    None => {
                        out.sizes.push(size);
                        out.sizes.len() - 1
                    }
                };
                slot_of.insert(v, slot);
                out.of.push((v, slot));
            }
            let mut done: Vec<View> = touched(s);
            done.sort_unstable();
            done.dedup();
            for v in done {
                if last[&v] == k
                    && let Some(&slot) = slot_of.get(&v)
                {
                    free.push(slot);
                }
            }
        }
        out
    }
}

/// The views that an op reads or writes.
pub(super) fn touched(s: &TileOp) -> Vec<View> {
    match s {
        TileOp::Bind { view, .. }
        | TileOp::BindSaved { view, .. }
        | TileOp::Gather { view, .. }
        | TileOp::BindOutput { view, .. } => {
            vec![*view]
        }
        TileOp::Loop { out, args, .. } => vec![*out, args[0], args[1], args[2]],
        TileOp::Fused { ops, .. } => ops.iter().filter_map(|l| l.operand.view()).collect(),
        TileOp::ReduceLanes { view, .. } | TileOp::ReduceColumns { view, .. } | TileOp::Store { view, .. } => {
            vec![*view]
        }
    }
}
