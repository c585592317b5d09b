//! Analyses a region's instructions: their dependences on reductions, aliasing of stores and loads, and liveness.

use perilune_plan::ir::{Code, Level, Program, Region, Storage, ValueId};
use std::collections::BTreeSet;

/// Facts about the instructions of a region.
#[derive(Debug)]
pub struct RegionAnalysis<'a> {
    pub program: &'a Program,
    pub region: &'a Region,
    /// How many row reductions an instruction depends on in sequence. Pass d computes the reductions of depth d + 1.
    pub depth: Vec<usize>,
    /// Which stores alias a load of the region. They must wait until no later pass loads it.
    pub over_load: Vec<bool>,
    /// Instructions needed in addition to those that are stored.
    pub roots: BTreeSet<usize>,
}

pub fn operands(code: &Code) -> &[u32] {
    match code {
        Code::Load { .. } => &[],
        Code::Map(_, args) => args,
        Code::Cast(a) | Code::Broadcast(a) | Code::ReduceRow(_, a) | Code::ReduceCol(_, a) => std::slice::from_ref(a),
    }
}

impl<'a> RegionAnalysis<'a> {
    pub fn new(program: &'a Program, region: &'a Region) -> RegionAnalysis<'a> {
        let mut depth = vec![0; region.body.len()];
        for (i, instr) in region.body.iter().enumerate() {
            let below = operands(&instr.code).iter().map(|a| depth[*a as usize]).max().unwrap_or(0);
            depth[i] = below + usize::from(matches!(instr.code, Code::ReduceRow(..)));
        }
        let over_load = region.writes().map(|w| region.reads().any(|r| overlap(program, r, w))).collect();
        RegionAnalysis { program, region, depth, over_load, roots: BTreeSet::new() }
    }

    pub fn is_written(&self, v: ValueId) -> bool {
        self.region.writes().any(|w| overlap(self.program, v, w))
    }

    /// The instructions that `roots` depend on, in order, without the dependences of those where `stop` holds. Roots
    /// that stop are excluded; other instructions that stop are included.
    pub fn closure(&self, roots: impl IntoIterator<Item = usize>, stop: impl Fn(usize) -> bool) -> BTreeSet<usize> {
        let mut found = BTreeSet::new();
        let mut queue: Vec<usize> = roots.into_iter().collect();
        while let Some(i) = queue.pop() {
            if found.insert(i) && !stop(i) {
                queue.extend(operands(&self.region.body[i].code).iter().map(|a| *a as usize));
            }
        }
        found
    }

    pub fn level(&self, i: usize) -> Level {
        self.region.body[i].level
    }

    pub fn code(&self, i: usize) -> &'a Code {
        &self.region.body[i].code
    }

    /// The operand of a reduction.
    pub fn operand(&self, i: usize) -> usize {
        operands(self.code(i)).first().map_or(0, |a| *a as usize)
    }

    /// The instructions that a store or the caller needs.
    pub fn needed(&self) -> BTreeSet<usize> {
        let stores = self.region.stores.iter().map(|s| s.0 as usize);
        self.closure(stores.chain(self.roots.iter().copied()), |_| false)
    }

    pub fn has(&self, level: Level) -> bool {
        self.needed().into_iter().any(|i| self.level(i) == level)
    }

    /// The last pass over the elements: that of the deepest reduction, or of a store that must follow it.
    pub fn last_pass(&self) -> usize {
        let needed = self.needed();
        let feeds = needed.iter().filter(|i| self.is_reduction(**i)).map(|i| self.depth[self.operand(*i)]);
        let stores = self.full_stores().map(|k| self.depth[self.region.stores[k].0 as usize]);
        feeds.chain(stores).max().unwrap_or(0)
    }

    pub fn is_reduction(&self, i: usize) -> bool {
        matches!(self.code(i), Code::ReduceRow(..) | Code::ReduceCol(..))
    }

    /// Positions in `region.stores` of the stores with one element for each element of the space.
    pub fn full_stores(&self) -> impl Iterator<Item = usize> + '_ {
        self.stores(Level::Full)
    }

    pub fn stores(&self, level: Level) -> impl Iterator<Item = usize> + '_ {
        (0..self.region.stores.len()).filter(move |k| self.level(self.region.stores[*k].0 as usize) == level)
    }

    /// The row stride in elements of store `k`'s value, if it exceeds the row length of the space (see
    /// `Region::pitch`).
    pub fn pitch(&self, k: usize) -> Option<usize> {
        let (reg, v) = self.region.stores[k];
        let full = self.level(reg as usize) == Level::Full;
        self.region.pitch(&self.program.values[v.0 as usize]).filter(|_| full)
    }
}

/// Whether two values share bytes.
pub fn overlap(p: &Program, a: ValueId, b: ValueId) -> bool {
    let (x, y) = (&p.values[a.0 as usize], &p.values[b.0 as usize]);
    match (x.storage, y.storage) {
        (Storage::Arena(s), Storage::Arena(t)) => s < t + y.nbytes() && t < s + x.nbytes(),
        (s, t) => s == t,
    }
}
