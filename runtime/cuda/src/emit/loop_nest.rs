//! Emits loops over a thread's elements: load, compute, accumulate reductions, store.

use super::emitter::Emitter;
use super::expr;
use super::load::Coords;
use crate::schedule::access::Access;
use crate::schedule::reduction_order::OCTET;
use crate::schedule::region_analysis::operands;
use perilune_core::DType;
use perilune_core::ops::ReduceFn;
use perilune_core::ops::elementwise::MapFn;
use perilune_plan::ir::{Code, Level, Source};
use std::collections::BTreeSet;

/// The elements that the vectors of a loop cover. Lines of `decl` may use `k`, the index of the vector, and must
/// declare `at`.
pub struct Indexing {
    pub decl: Vec<String>,
    pub guard: String,
    /// Whether the last pack may be partial: `decl` then declares how many elements are `left`.
    pub partial: bool,
    /// The guard is false only for out-of-range rows, which store nothing.
    pub full: bool,
    /// Elements of a row that a thread processes in a pass, if column reductions are fed; further elements belong to
    /// another row.
    pub columns: usize,
}

/// One loop over a thread's elements.
pub struct LoopNest<'p> {
    pub packs: usize,
    pub indexing: &'p Indexing,
    /// Registers that are arrays before the loop, and those that must be arrays after it.
    pub live_in: &'p BTreeSet<usize>,
    pub live_out: &'p BTreeSet<usize>,
    /// Reductions to feed.
    pub feeds: &'p [usize],
    /// Positions in the region's stores.
    pub stores: &'p [usize],
    /// Comparisons that hold for at most one element of a row (see `Emitter::column`). They are false here; the caller
    /// corrects that element.
    pub assumed_false: &'p BTreeSet<usize>,
}

impl<'a> Emitter<'a> {
    /// Emits the maps over rows in `set` at `depth`; their operands have been emitted.
    pub fn row_maps(&mut self, set: &BTreeSet<usize>, depth: usize) {
        for &i in set {
            let wanted = self.analysis.level(i) == Level::Row && self.analysis.depth[i] == depth;
            if !wanted || !matches!(self.analysis.code(i), Code::Map(..) | Code::Cast(_)) {
                continue;
            }
            let args: Vec<String> = operands(self.analysis.code(i)).iter().map(|a| format!("r{a}")).collect();
            let (c, x) = (expr::computed(self.dtype(i)), self.value(i, &args));
            self.text.line(format!("const {c} r{i} = {x};"));
        }
    }

    pub fn reduction(&self, i: usize) -> ReduceFn {
        match self.analysis.code(i) {
            Code::ReduceRow(f, _) | Code::ReduceCol(f, _) => *f,
            _ => ReduceFn::Sum,
        }
    }

    /// Declares the partial results of reductions.
    pub fn partials(&mut self, feeds: &[usize]) {
        for &i in feeds {
            self.partial(i, OCTET);
        }
    }

    /// Declares the partial results of one reduction, `n` elements.
    pub fn partial(&mut self, i: usize, n: usize) {
        let d = self.dtype(i);
        let id = vec![expr::identity(self.reduction(i), d); n].join(", ");
        self.text.line(format!("{} a{i}[{n}] = {{{id}}};", expr::computed(d)));
    }

    /// Emits a pass.
    pub fn loop_nest(&mut self, p: &LoopNest) {
        let analysis = self.analysis;
        let stored: Vec<usize> = p.stores.iter().map(|k| analysis.region.stores[*k].0 as usize).collect();
        let roots = p
            .feeds
            .iter()
            .map(|i| analysis.operand(*i))
            .chain(stored.iter().copied())
            .chain(p.live_out.iter().copied());
        let read = analysis.closure(roots, |i| p.live_in.contains(&i) || analysis.level(i) == Level::Row);
        let fresh: Vec<usize> = read
            .iter()
            .copied()
            .filter(|i| !p.live_in.contains(i) && analysis.level(*i) == Level::Full && !self.is_one(*i))
            .collect();
        let (loads, maps): (Vec<usize>, Vec<usize>) = fresh
            .into_iter()
            .partition(|i| matches!(analysis.code(*i), Code::Load { .. }) && !self.is_column_index(*i));
        let n = p.packs * self.v;
        let v = self.v;
        // The intermediate in shared memory.
        let kept = self.intermediate.filter(|k| p.live_in.contains(&k.reg) && read.contains(&k.reg)).map(|k| k.reg);
        let loads: Vec<usize> = loads.into_iter().chain(kept).collect();
        if !loads.is_empty() {
            for &i in &loads {
                let c = expr::computed(self.dtype(i));
                self.text.line(format!("{c} r{i}[{n}] = {{}};"));
            }
            self.pack_loop(p, true);
            let mut memo = Coords::new();
            if loads.iter().any(|i| self.loads.get(i).is_some_and(|l| l.reading.flat)) {
                self.flat();
            }
            for &i in &loads {
                self.load(i, p.indexing.partial, &mut memo);
            }
            self.text.close();
            self.text.close();
        }
        for &i in maps.iter().filter(|i| p.live_out.contains(i) || stored.contains(i)) {
            let c = expr::computed(self.dtype(i));
            self.text.line(format!("{c} r{i}[{n}];"));
        }
        let singles: BTreeSet<usize> = stored.iter().copied().filter(|i| self.is_one(*i)).collect();
        for &i in &singles {
            let c = expr::computed(self.dtype(i));
            self.text.line(format!("{c} o{i}[{n}];"));
        }
        if !maps.is_empty() || !p.feeds.is_empty() || !singles.is_empty() {
            // Use one branch per pack: one per element would serialise the elements.
            let idle = p.feeds.is_empty() && p.live_in.iter().all(|i| Some(*i) == kept);
            let guarded = !(p.indexing.full || idle);
            self.pack_loop(p, guarded);
            let all: BTreeSet<usize> = maps.iter().copied().filter(|i| self.column(*i, "0").is_some()).collect();
            let hits: Vec<usize> = all.difference(p.assumed_false).copied().collect();
            if hits.is_empty() {
                self.elements(p, &maps, &stored, &singles, p.assumed_false);
            } else {
                // A pack rarely holds the one element of a row whose index is compared.
                let near: Vec<String> =
                    hits.iter().filter_map(|i| self.column(*i, "at")).map(|c| format!("{c} < {v}")).collect();
                self.text.open(format!("if ({})", near.join(" || ")));
                self.elements(p, &maps, &stored, &singles, p.assumed_false);
                self.text.close();
                self.text.open("else");
                self.elements(p, &maps, &stored, &singles, &all);
                self.text.close();
            }
            if guarded {
                self.text.close();
            }
            self.text.close();
        }
        if let Some(k) = self.intermediate.filter(|k| p.live_out.contains(&k.reg)) {
            self.pack_loop(p, true);
            self.text.line(format!("smem_store_f32<{v}>({}, r{} + k * {v});", self.smem_args(k, " + at"), k.reg));
            self.text.close();
            self.text.close();
        }
        if !stored.is_empty() {
            self.pack_loop(p, true);
            if self.cols.is_some() && p.stores.iter().any(|k| analysis.pitch(*k).is_none()) {
                self.flat();
            }
            let at = if self.cols.is_some() { "flat" } else { "at" };
            for (&k, &i) in p.stores.iter().zip(&stored) {
                let (_, value) = analysis.region.stores[k];
                let pointer = self.fields.pointer(value, expr::stored(self.dtype(i)));
                let array = if singles.contains(&i) { "o" } else { "r" };
                let from = format!("{array}{i} + k * {v}");
                if let Some(pitch) = self.pitch(k) {
                    let t = self.index_type();
                    let to = format!("{pointer} + (({t})(row * {pitch}) + ({t})at)");
                    // If only the last pack of a row is partial, every whole pack has another one after it.
                    self.text.line(match self.ragged() && !p.indexing.partial {
                        true => format!("store_vec<{v}>({to}, {from});"),
                        false => {
                            format!("store_vec_padded<{v}>({to}, {from}, ({t})cols - ({t})at, ({t})({pitch} - cols));")
                        }
                    });
                    continue;
                }
                self.text.line(match p.indexing.partial {
                    false => format!("store_vec<{v}>({pointer} + {at}, {from});"),
                    true => format!("store_vec_tail<{v}>({pointer} + {at}, {from}, left);"),
                });
            }
            self.text.close();
            self.text.close();
        }
    }

    /// Emits the elements of pack `k`, treating the comparisons in `never` as false.
    fn elements(
        &mut self,
        p: &LoopNest,
        maps: &[usize],
        stored: &[usize],
        singles: &BTreeSet<usize>,
        never: &BTreeSet<usize>,
    ) {
        let (analysis, v) = (self.analysis, self.v);
        self.text.unrolled("e", v);
        self.text.line(format!("const int x = k * {v} + e;"));
        let mut computed = BTreeSet::new();
        let only_stored = |i: usize| {
            let read = |j: &usize| operands(analysis.code(*j)).contains(&(i as u32));
            stored.contains(&i) && !p.live_out.contains(&i) && !maps.iter().chain(p.feeds).any(read)
        };
        for &i in maps {
            let args: Vec<String> =
                operands(analysis.code(i)).iter().map(|a| self.operand(*a as usize, "x", &computed)).collect();
            let c = expr::computed(self.dtype(i));
            let value = match self.analysis.code(i) {
                _ if never.contains(&i) => "0".into(),
                Code::Load { .. } => self.column_index(i, "(at + e)"),
                // The store rounds the value.
                code if self.dtype(i).is_half() && only_stored(i) => match code {
                    Code::Cast(a) if expr::computed(self.dtype(*a as usize)) == "f32" => args[0].clone(),
                    Code::Map(f, _) => expr::map(*f, DType::F32, &args),
                    _ => self.value(i, &args),
                },
                _ => self.value(i, &args),
            };
            self.text.line(format!("const {c} s{i} = {value};"));
            computed.insert(i);
            if p.live_out.contains(&i) || stored.contains(&i) {
                self.text.line(format!("r{i}[x] = s{i};"));
            }
        }
        for &i in singles {
            let value = self.operand(i, "x", &computed);
            self.text.line(format!("o{i}[x] = {value};"));
        }
        for &i in p.feeds {
            if self.adds_zero(i, never) {
                continue;
            }
            let value = self.operand(analysis.operand(i), "x", &computed);
            let f = expr::functor(self.reduction(i));
            // One slot per column, or the eight slots of a block.
            let slot = match self.analysis.level(i) {
                Level::Col => format!("x % {}", p.indexing.columns),
                _ => format!("x % {OCTET}"),
            };
            // Columns out of range have their own slots.
            let within = if p.indexing.partial && analysis.level(i) != Level::Col { "if (e < left) " } else { "" };
            self.text.line(format!("{within}a{i}[{slot}] = {f}::combine(a{i}[{slot}], {value});"));
        }
        self.text.close();
    }

    /// Whether load `i` is the column index plus a constant, which is computed at its use instead of kept.
    pub fn is_column_index(&self, i: usize) -> bool {
        let Some(load) = self.loads.get(&i) else { return false };
        let r = &load.reading;
        let walked = matches!((&r.tail[..], r.access), ([(_, 1)], Access::Vector | Access::Run));
        load.source == Source::Iota { start: None } && walked && !r.flat
    }

    /// The column index of the load at column `at`.
    pub(super) fn column_index(&self, i: usize, at: &str) -> String {
        let t = self.index_type();
        let load = &self.loads[&i];
        let base = if load.base.is_empty() { String::new() } else { format!("{} + ", load.base) };
        format!("(i64)({base}({t}){at})")
    }

    /// For a comparison of the column index with one number per row: the distance from column `at` to the column where
    /// it holds, or a larger number than any column if there is none.
    pub fn column(&self, i: usize, at: &str) -> Option<String> {
        let Code::Map(MapFn::Eq, args) = self.analysis.code(i) else { return None };
        let column_index = |a: u32| self.is_column_index(a as usize).then_some(a as usize);
        let (a, b) = match (column_index(args[0]), column_index(args[1])) {
            (Some(a), None) => (a, args[1]),
            (None, Some(b)) => (b, args[0]),
            _ => return None,
        };
        let wanted = self.operand(b as usize, "", &BTreeSet::new());
        self.is_one(b as usize).then(|| format!("(u64)({wanted} - {})", self.column_index(a, at)))
    }

    /// For a reduction whose summands are 0 except in one column: the comparison that selects the column.
    pub fn picks(&self, i: usize) -> Option<usize> {
        let Code::Map(MapFn::Where, args) = self.analysis.code(self.analysis.operand(i)) else { return None };
        let hit = args[0] as usize;
        self.column(hit, "0")?;
        (self.adds_zero(i, &BTreeSet::from([hit])) && expr::computed(self.dtype(i)) == "f32").then_some(hit)
    }

    /// Loads packs that are the same for all rows.
    pub fn load_once(&mut self, loads: &[usize], packs: usize, indexing: &Indexing) {
        let n = packs * self.v;
        for &i in loads {
            self.text.line(format!("{} r{i}[{n}] = {{}};", expr::computed(self.dtype(i))));
        }
        self.text.unrolled("k", packs);
        for line in &indexing.decl {
            self.text.line(line);
        }
        self.text.open("if (at < cols)");
        for &i in loads {
            self.load(i, indexing.partial, &mut Coords::new());
        }
        self.text.close();
        self.text.close();
    }

    /// Whether reduction `i` sums a select between a value and +0 whose condition is in `never`. No sum that starts at
    /// +0 becomes -0, so adding +0 changes nothing.
    fn adds_zero(&self, i: usize, never: &BTreeSet<usize>) -> bool {
        let Code::Map(MapFn::Where, args) = self.analysis.code(self.analysis.operand(i)) else { return false };
        let zero = matches!(self.analysis.code(args[2] as usize), Code::Load { source: Source::Constant(0), .. });
        self.reduction(i) == ReduceFn::Sum && zero && never.contains(&(args[0] as usize))
    }

    fn pack_loop(&mut self, p: &LoopNest, guarded: bool) {
        self.text.unrolled("k", p.packs);
        for line in &p.indexing.decl {
            self.text.line(line);
        }
        if guarded {
            self.text.open(format!("if ({})", p.indexing.guard));
        }
    }

    /// Emits the stores of values with one element per row, at index `row`.
    pub fn row_stores(&mut self) {
        let stores: Vec<usize> = self.analysis.stores(Level::Row).collect();
        for k in stores {
            let (reg, value) = self.analysis.region.stores[k];
            let pointer = self.fields.pointer(value, expr::stored(self.dtype(reg as usize)));
            self.text.line(format!("narrow({pointer}[row], r{reg});"));
        }
    }
}
