//! Emits cp.async copies that stage rows in shared memory: selects the loads, lays them out and prefetches the next
//! row.

use super::emitter::Emitter;
use super::expr;
use super::load::Coords;
use super::loop_nest::Indexing;
use crate::schedule::access::Access;
use perilune_plan::ir::Source;

/// A register that one pass stores in shared memory as f32 for later passes, in place of a staged load.
#[derive(Clone, Copy)]
pub struct SmemIntermediate {
    pub reg: usize,
    pub load: usize,
}

impl<'a> Emitter<'a> {
    /// Whether rows of load `i` are contiguous in memory, so that copies of 4 bytes or more can stage them.
    pub fn can_stage(&self, i: usize) -> bool {
        let Some(load) = self.loads.get(&i) else { return false };
        let r = &load.reading;
        let bytes = self.v * self.dtype(i).size();
        let plain = matches!((&r.tail[..], r.access), ([(_, 1)], Access::Vector)) && !r.flat;
        let room = !self.ragged() || self.has_room(i);
        plain
            && room
            && matches!(load.source, Source::Value(_))
            && (bytes.is_multiple_of(16) || [4, 8].contains(&bytes))
    }

    /// Whether whole packs of load `i` may be read even if a row ends within the last one: the next row follows it
    /// directly, and values start and end at multiples of the pack size.
    pub(super) fn has_room(&self, i: usize) -> bool {
        let (Some(cols), Some(load)) = (self.cols, self.loads.get(&i)) else { return false };
        let mut steps = load.reading.lead.iter().map(|d| d.1.unsigned_abs()).filter(|s| *s > 0).peekable();
        steps.peek().is_some() && steps.all(|s| s >= cols.next_multiple_of(self.v))
    }

    /// Bytes of a staged row of load `i`.
    pub fn staged_bytes(&self, i: usize) -> usize {
        let planes = if self.intermediate.is_some_and(|k| k.load == i) { 4 / self.dtype(i).size() } else { 1 };
        self.plane_bytes(i) * planes
    }

    /// Bytes of a staged row of the load alone. An intermediate that replaces it takes as many bytes again for each
    /// further 16 bits.
    pub(super) fn plane_bytes(&self, i: usize) -> usize {
        let size = self.dtype(i).size();
        (self.analysis.region.cols.next_multiple_of(self.v) * size).next_multiple_of(16)
    }

    /// The arguments that address the intermediate from column `at` on, for the functions of `device/vec.cuh`.
    pub(super) fn smem_args(&self, k: SmemIntermediate, at: &str) -> String {
        format!("stage{}{at}, {}", k.load, self.plane_bytes(k.load) / self.dtype(k.load).size())
    }

    /// Makes all later loads read from shared memory, which holds `rows` rows of each load side by side; returns their
    /// bytes.
    pub fn stage_rows(&mut self, loads: &[usize], rows: usize) -> usize {
        self.text.line("extern __shared__ uint4 staged[];");
        self.staged = loads.to_vec();
        loads.iter().map(|i| self.staged_bytes(*i) * rows).sum()
    }

    /// Declares the address of row `row` of each staged load, among `rows` adjacent rows in set `set`.
    pub fn staged_rows(&mut self, name: &str, set: &str, row: &str, rows: usize) {
        let all: usize = self.staged.iter().map(|i| self.staged_bytes(*i) * rows).sum();
        let mut at = 0;
        for i in self.staged.clone() {
            let (s, bytes) = (expr::stored(self.dtype(i)), self.staged_bytes(i));
            self.text
                .line(format!("{s}* const {name}{i} = ({s}*)((u8*)staged + {set} * {all} + {row} * {bytes} + {at});"));
            at += bytes * rows;
        }
    }

    /// Whether load `i` has different elements in different rows.
    pub fn differs_by_row(&self, i: usize) -> bool {
        self.loads.get(&i).is_some_and(|l| l.reading.lead.iter().any(|d| d.1 != 0))
    }

    /// Declares where row `pos` of the staged loads begins.
    pub fn row_begin(&mut self, pos: &str, name: &str) {
        let t = self.index_type();
        for i in self.staged.clone() {
            let dims = self.loads[&i].reading.lead.clone();
            let coords = self.coords(&dims, pos, &mut Coords::new());
            let load = &self.loads[&i];
            let base = self.sum(&load.from, &dims, &load.lead, &coords);
            self.text.line(format!("const {t} {name}{i} = {base};"));
        }
    }

    /// Copies the packs of `indexing`, of the rows that begin at `name`, to the staged rows `to`.
    pub fn cp_async(&mut self, packs: usize, indexing: &Indexing, name: &str, to: &str) {
        let (v, t) = (self.v, self.index_type());
        self.text.unrolled("k", packs);
        for line in &indexing.decl {
            self.text.line(line);
        }
        self.text.open(format!("if ({})", indexing.guard));
        for &i in &self.staged {
            let (pointer, bytes) = (&self.loads[&i].pointer, v * self.dtype(i).size());
            self.text.line(format!("cp_async<{bytes}>({to}{i} + at, {pointer} + ({name}{i} + ({t})at));"));
        }
        self.text.close();
        self.text.close();
    }

    /// Prefetches the staged rows that begin at `name` into L2.
    pub fn prefetch_l2_rows(&mut self, when: &str, name: &str) {
        for &i in &self.staged {
            let (size, pointer) = (self.dtype(i).size(), &self.loads[&i].pointer);
            // f32 rows gained nothing.
            if size == 2 && (self.v * size).is_multiple_of(16) {
                let bytes = self.analysis.region.cols.next_multiple_of(self.v) * size;
                self.text.line(format!("if ({when}) prefetch_l2({pointer} + {name}{i}, {bytes});"));
            }
        }
    }
}
