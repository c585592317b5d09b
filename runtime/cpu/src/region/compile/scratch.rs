//! Scratch memory: which tiles may share a slot, how large tiles are, and where everything lies.

use super::*;

impl Compiler<'_> {
    /// Scratch memory and the size of tiles.
    pub(super) fn finish(mut self, before: Vec<Step>, lists: Vec<(List, Vec<u16>, Vec<Step>)>) -> Region {
        let slots: Vec<Slots> = lists.iter().map(|(l, ..)| Slots::assign(&l.steps, &l.tiles)).collect();
        let per_element =
            slots.iter().map(Slots::bytes).max().unwrap_or(0) + self.hoisted.iter().map(|h| h.1).sum::<usize>();
        let fit = L1_BYTES / per_element.max(8);
        let elements = (1usize << fit.max(1).ilog2()).clamp(MIN_TILE, MAX_TILE);
        let Grid { batch, rows, cols } = self.grid;
        let block_rows = if self.segmented { 1 } else { (elements / cols.max(1)).clamp(1, (batch * rows).max(1)) };
        // Loops take rows by fours.
        let block_rows = if block_rows > 4 { block_rows / 4 * 4 } else { block_rows };
        // Three blocks are under way at a time.
        let block_rows = if self.relay.is_some() { (RELAY_TILE / cols).clamp(1, block_rows) } else { block_rows };
        let tile = if self.segmented { elements } else { block_rows * cols };

        let mut scratch = Areas::default();
        // Constants first, 8 bytes each: `run` counts on it.
        scratch.take(8 * self.constants.len());
        for r in &mut self.row_views {
            r.2 = scratch.take(8 * block_rows);
        }
        for r in &mut self.row_reductions {
            r.lanes = scratch.take(8 * LANES);
            r.total = scratch.take(8);
        }
        let mut hoisted = Vec::new();
        for (view, size, what) in std::mem::take(&mut self.hoisted) {
            let what = match what {
                HoistedKind::Load(load, copies) => HoistedKind::Load(load, copies.min(block_rows)),
                fill => fill,
            };
            hoisted.push(Hoisted { view, at: scratch.take(tile * size), what });
        }
        let start = scratch.at;
        let mut end = start;
        let mut phases = Vec::new();
        for ((list, reductions, row_steps), slots) in lists.into_iter().zip(&slots) {
            scratch.at = start;
            let at: Vec<usize> = slots.sizes.iter().map(|size| scratch.take(tile * size)).collect();
            end = end.max(scratch.at);
            let tiles = slots.of.iter().map(|&(view, slot)| (view, at[slot])).collect();
            phases.push(Phase { steps: list.steps, tiles, reductions, row_steps });
        }
        Region {
            guard: None,
            grid: self.grid,
            segmented: self.segmented,
            block_rows,
            tile,
            views: self.next_view,
            constants: self.constants,
            loads: self.loads,
            hoisted,
            row_views: self.row_views,
            before,
            phases,
            row_reductions: self.row_reductions,
            col_reductions: self.col_reductions,
            relay: self.relay.map(Box::new),
            scratch: end,
            kept: self.kept.len(),
            cost: self.cost,
        }
    }
}

/// Offsets handed out one after the other, each on a cache line of its own.
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

/// Tiles that share memory when their lives do not meet.
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

    /// Linear scan. A step's output is placed before its operands are given up, so that no loop works in place.
    fn assign(steps: &[Step], tiles: &[(View, usize)]) -> Slots {
        let size_of: HashMap<View, usize> = tiles.iter().copied().collect();
        let mut last: HashMap<View, usize> = HashMap::new();
        for (k, s) in steps.iter().enumerate() {
            for v in touched(s) {
                last.insert(v, k);
            }
        }
        let mut out = Slots { sizes: Vec::new(), of: Vec::new() };
        let mut slot_of: HashMap<View, usize> = HashMap::new();
        let mut free: Vec<usize> = Vec::new();
        for (k, s) in steps.iter().enumerate() {
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

/// The views a step reads or writes.
pub(super) fn touched(s: &Step) -> Vec<View> {
    match s {
        Step::Bind { view, .. } | Step::Kept { view, .. } | Step::Fetch { view, .. } | Step::Out { view, .. } => {
            vec![*view]
        }
        Step::Run { out, args, .. } => vec![*out, args[0], args[1], args[2]],
        Step::Chain { links, .. } => links.iter().filter_map(|l| l.place.view()).collect(),
        Step::Lanes { view, .. } | Step::Columns { view, .. } | Step::Store { view, .. } => vec![*view],
    }
}
