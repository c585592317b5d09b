//! Emits the correction of one-hot columns: the one column of a row where a comparison with the column index holds
//! (`x[target]`).
//!
//! The loops over the row treat the comparison as false everywhere; the thread that owns the column corrects its
//! element.

use super::emitter::Emitter;
use super::expr;
use super::load::{Coords, element};
use crate::schedule::region_analysis::operands;
use perilune_plan::ir::{Code, Level};
use std::collections::BTreeSet;

/// Comparisons that hold for the same column of a row.
pub struct OneHotColumn {
    /// The first of them, after which the text names the column.
    pub name: usize,
    hits: BTreeSet<usize>,
    column: String,
}

/// Groups the comparisons in `hits` by column.
pub fn group_by_column(g: &Emitter, hits: &BTreeSet<usize>) -> Vec<OneHotColumn> {
    let mut out: Vec<OneHotColumn> = Vec::new();
    for &h in hits {
        let Some(column) = g.column(h, "0") else { continue };
        match out.iter_mut().find(|a| a.column == column) {
            Some(a) => _ = a.hits.insert(h),
            None => out.push(OneHotColumn { name: h, hits: BTreeSet::from([h]), column }),
        }
    }
    out
}

/// The work of a pass: reductions, and stores (positions in the region's list).
pub struct LoopWork<'p> {
    pub feeds: &'p [usize],
    pub stores: &'p [usize],
    pub live_in: &'p BTreeSet<usize>,
    /// Comparisons that the pass treats as false.
    pub assumed_false: &'p BTreeSet<usize>,
}

impl OneHotColumn {
    /// Declares the column and its owner, the thread with number `owner` (an expression in which `at` is the column).
    pub fn declare(&self, g: &mut Emitter, owner: &str) {
        let (h, t) = (self.name, g.position());
        g.text.line(format!("const u64 column{h} = {};", self.column));
        g.text.line(format!("const {t} only{h} = ({t})column{h};"));
        let owner = owner.replace("at", &format!("only{h}"));
        g.text.line(format!("const bool mine{h} = column{h} < cols && threadIdx.x == {owner};"));
    }

    /// Whether reduction `i` uses only the element of this column.
    pub fn picks(&self, g: &Emitter, i: usize) -> bool {
        g.picks(i).is_some_and(|h| self.hits.contains(&h))
    }

    /// Positions of stores that the pass computes incorrectly in this column.
    fn stores(&self, g: &Emitter, asked: &LoopWork) -> Vec<(usize, usize)> {
        let root = |k: usize| g.analysis.region.stores[k].0 as usize;
        let wrong = |i: usize| {
            let mut need = g.analysis.closure([i], |j| asked.live_in.contains(&j) || g.analysis.level(j) == Level::Row);
            need.retain(|j| self.hits.contains(j) && asked.assumed_false.contains(j));
            !need.is_empty()
        };
        asked.stores.iter().map(|k| (*k, root(*k))).filter(|s| wrong(s.1)).collect()
    }

    /// Emitted before a pass: computes the element, stores the picked numbers where all threads can read them, and
    /// keeps what is to be stored.
    pub fn before(&self, g: &mut Emitter, asked: &LoopWork) {
        let picks: Vec<usize> = asked.feeds.iter().copied().filter(|i| self.picks(g, *i)).collect();
        let stores = self.stores(g, asked);
        if picks.is_empty() && stores.is_empty() {
            return;
        }
        let (h, t) = (self.name, g.position());
        for (_, i) in &stores {
            g.text.line(format!("{} only{h}_{i} = 0;", expr::computed(g.dtype(*i))));
        }
        let chosen = |i: usize| operands(g.analysis.code(g.analysis.operand(i)))[1] as usize;
        let picks: Vec<(usize, usize)> = picks.into_iter().map(|i| (i, chosen(i))).collect();
        g.text.open(format!("if (mine{h})"));
        g.text.line(format!("const {t} at = only{h};"));
        g.element(picks.iter().chain(&stores).map(|s| s.1), asked.live_in);
        for (i, x) in picks {
            let x = g.alone(x);
            g.text.line(format!("pick{i}[flip] = {x};"));
        }
        for (_, i) in &stores {
            let x = g.alone(*i);
            g.text.line(format!("only{h}_{i} = {x};"));
        }
        g.text.close();
    }

    /// Emitted after the pass: overwrites the element that the pass stored. The same thread wrote it.
    pub fn after(&self, g: &mut Emitter, asked: &LoopWork) {
        let stores = self.stores(g, asked);
        if stores.is_empty() {
            return;
        }
        let h = self.name;
        g.text.open(format!("if (mine{h})"));
        for (k, i) in stores {
            let pointer = g.fields.pointer(g.analysis.region.stores[k].1, expr::stored(g.dtype(i)));
            let row = g.stored_row(k);
            g.text.line(format!("narrow({pointer}[{row} + only{h}], only{h}_{i});"));
        }
        g.text.close();
    }
}

impl Emitter<'_> {
    /// Register `i` of a single element.
    fn alone(&self, i: usize) -> String {
        self.operand(i, "0", &BTreeSet::from([i]))
    }

    /// Emits the values of `roots` at column `at`, each as `s` and its number.
    fn element(&mut self, roots: impl Iterator<Item = usize>, live_in: &BTreeSet<usize>) {
        let analysis = self.analysis;
        let need = analysis.closure(roots, |i| live_in.contains(&i) || analysis.level(i) == Level::Row);
        let need: Vec<usize> =
            need.into_iter().filter(|i| analysis.level(*i) == Level::Full && !self.is_one(*i)).collect();
        if need.iter().any(|i| self.loads.get(i).is_some_and(|l| l.reading.flat)) {
            self.flat();
        }
        let mut computed = BTreeSet::new();
        for i in need {
            let value = match analysis.code(i) {
                _ if live_in.contains(&i) => self.smem_load_f32_at(i),
                Code::Load { .. } if self.is_column_index(i) => self.column_index(i, "at"),
                Code::Load { .. } if self.staged.contains(&i) && !self.in_registers => format!("widen(stage{i}[at])"),
                Code::Load { .. } => {
                    let reading = self.loads[&i].reading.clone();
                    let pos = if reading.flat { "flat" } else { "at" };
                    let coords = self.coords(&reading.tail, pos, &mut Coords::new());
                    let load = &self.loads[&i];
                    element(load, &format!("({})", self.sum(&load.base, &reading.tail, &load.tail, &coords)))
                }
                code => {
                    let args: Vec<String> =
                        operands(code).iter().map(|a| self.operand(*a as usize, "0", &computed)).collect();
                    self.value(i, &args)
                }
            };
            self.text.line(format!("const {} s{i} = {value};", expr::computed(self.dtype(i))));
            computed.insert(i);
        }
    }

    /// Reads column `at` of an intermediate in shared memory.
    fn smem_load_f32_at(&self, i: usize) -> String {
        match self.intermediate.filter(|k| k.reg == i) {
            Some(k) => format!("smem_load_f32_at<{}>({}, at)", self.v, self.smem_args(k, "")),
            None => format!("r{i}[0]"),
        }
    }
}
