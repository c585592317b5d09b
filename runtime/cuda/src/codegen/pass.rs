//! Walks over a thread's elements: load, compute, feed reductions, store.

use super::body::operands;
use super::emit::Emit;
use super::expr;
use super::index::Access;
use super::load::Coords;
use super::space::OCTET;
use perilune_core::DType;
use perilune_core::ops::ReduceFn;
use perilune_core::ops::elementwise::MapFn;
use perilune_plan::ir::{Code, Level, Source};
use std::collections::BTreeSet;

/// Where the packs of a pass lie. Lines of `decl` may use `k`, the number of the pack, and must declare `at`.
pub struct Place {
    pub decl: Vec<String>,
    pub guard: String,
    /// The last pack may be partial: `decl` declares how many elements are `left`.
    pub partial: bool,
    /// The guard fails only where nothing is stored of what is computed: rows that there are not.
    pub full: bool,
    /// Elements of a row that a thread has in a pass, if column reductions are fed: the next are of another row.
    pub columns: usize,
}

/// One walk over a thread's elements.
pub struct Pass<'p> {
    pub packs: usize,
    pub place: &'p Place,
    /// Registers that arrays hold already, and those that must be arrays afterwards.
    pub held: &'p BTreeSet<usize>,
    pub keep: &'p BTreeSet<usize>,
    /// Reductions to feed.
    pub feeds: &'p [usize],
    /// Positions in the region's stores.
    pub stores: &'p [usize],
    /// Comparisons that hold for one element of a row at most (see `Emit::column`), which the caller sees to: here they
    /// hold for none.
    pub apart: &'p BTreeSet<usize>,
}

impl<'a> Emit<'a> {
    /// Writes the maps over rows among `set` at `depth` (their operands are there).
    pub fn row_maps(&mut self, set: &BTreeSet<usize>, depth: usize) {
        for &i in set {
            let wanted = self.body.level(i) == Level::Row && self.body.depth[i] == depth;
            if !wanted || !matches!(self.body.code(i), Code::Map(..) | Code::Cast(_)) {
                continue;
            }
            let args: Vec<String> = operands(self.body.code(i)).iter().map(|a| format!("r{a}")).collect();
            let (c, x) = (expr::computed(self.dtype(i)), self.value(i, &args));
            self.text.line(format!("const {c} r{i} = {x};"));
        }
    }

    pub fn reduction(&self, i: usize) -> ReduceFn {
        match self.body.code(i) {
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

    /// The same of one, of `n` elements.
    pub fn partial(&mut self, i: usize, n: usize) {
        let d = self.dtype(i);
        let id = vec![expr::identity(self.reduction(i), d); n].join(", ");
        self.text.line(format!("{} a{i}[{n}] = {{{id}}};", expr::computed(d)));
    }

    /// Writes a pass.
    pub fn pass(&mut self, p: &Pass) {
        let body = self.body;
        let stored: Vec<usize> = p.stores.iter().map(|k| body.region.stores[*k].0 as usize).collect();
        let roots =
            p.feeds.iter().map(|i| body.operand(*i)).chain(stored.iter().copied()).chain(p.keep.iter().copied());
        let read = body.closure(roots, |i| p.held.contains(&i) || body.level(i) == Level::Row);
        let fresh: Vec<usize> = read
            .iter()
            .copied()
            .filter(|i| !p.held.contains(i) && body.level(*i) == Level::Full && !self.is_one(*i))
            .collect();
        let (loads, maps): (Vec<usize>, Vec<usize>) =
            fresh.into_iter().partition(|i| matches!(body.code(*i), Code::Load { .. }) && !self.is_ramp(*i));
        let n = p.packs * self.v;
        let v = self.v;
        // Held in shared memory.
        let kept = self.kept.filter(|k| p.held.contains(&k.reg) && read.contains(&k.reg)).map(|k| k.reg);
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
                self.load(i, p.place.partial, &mut memo);
            }
            self.text.close();
            self.text.close();
        }
        for &i in maps.iter().filter(|i| p.keep.contains(i) || stored.contains(i)) {
            let c = expr::computed(self.dtype(i));
            self.text.line(format!("{c} r{i}[{n}];"));
        }
        let singles: BTreeSet<usize> = stored.iter().copied().filter(|i| self.is_one(*i)).collect();
        for &i in &singles {
            let c = expr::computed(self.dtype(i));
            self.text.line(format!("{c} o{i}[{n}];"));
        }
        if !maps.is_empty() || !p.feeds.is_empty() || !singles.is_empty() {
            // One branch for a pack: one for each element would put them one after the other.
            let idle = p.feeds.is_empty() && p.held.iter().all(|i| Some(*i) == kept);
            let guarded = !(p.place.full || idle);
            self.pack_loop(p, guarded);
            let all: BTreeSet<usize> = maps.iter().copied().filter(|i| self.column(*i, "0").is_some()).collect();
            let hits: Vec<usize> = all.difference(p.apart).copied().collect();
            if hits.is_empty() {
                self.elements(p, &maps, &stored, &singles, p.apart);
            } else {
                // A pack seldom holds the one element of a row whose index is asked for.
                let near: Vec<String> =
                    hits.iter().filter_map(|i| self.column(*i, "at")).map(|c| format!("{c} < {v}")).collect();
                self.text.open(format!("if ({})", near.join(" || ")));
                self.elements(p, &maps, &stored, &singles, p.apart);
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
        if let Some(k) = self.kept.filter(|k| p.keep.contains(&k.reg)) {
            self.pack_loop(p, true);
            self.text.line(format!("keep_pack<{v}>({}, r{} + k * {v});", self.kept_place(k, " + at"), k.reg));
            self.text.close();
            self.text.close();
        }
        if !stored.is_empty() {
            self.pack_loop(p, true);
            if self.cols.is_some() && p.stores.iter().any(|k| body.pitch(*k).is_none()) {
                self.flat();
            }
            let at = if self.cols.is_some() { "flat" } else { "at" };
            for (&k, &i) in p.stores.iter().zip(&stored) {
                let (_, value) = body.region.stores[k];
                let pointer = self.fields.pointer(value, expr::stored(self.dtype(i)));
                let array = if singles.contains(&i) { "o" } else { "r" };
                let from = format!("{array}{i} + k * {v}");
                if let Some(pitch) = self.pitch(k) {
                    let t = self.index_type();
                    let to = format!("{pointer} + (({t})(row * {pitch}) + ({t})at)");
                    // A pack that is whole in rows whose last one is not has another behind it.
                    self.text.line(match self.ragged() && !p.place.partial {
                        true => format!("store_pack<{v}>({to}, {from});"),
                        false => {
                            format!("store_filled<{v}>({to}, {from}, ({t})cols - ({t})at, ({t})({pitch} - cols));")
                        }
                    });
                    continue;
                }
                self.text.line(match p.place.partial {
                    false => format!("store_pack<{v}>({pointer} + {at}, {from});"),
                    true => format!("store_some<{v}>({pointer} + {at}, {from}, left);"),
                });
            }
            self.text.close();
            self.text.close();
        }
    }

    /// Writes the elements of pack `k`, with what `never` holds false.
    fn elements(
        &mut self,
        p: &Pass,
        maps: &[usize],
        stored: &[usize],
        singles: &BTreeSet<usize>,
        never: &BTreeSet<usize>,
    ) {
        let (body, v) = (self.body, self.v);
        self.text.unrolled("e", v);
        self.text.line(format!("const int x = k * {v} + e;"));
        let mut computed = BTreeSet::new();
        let only_stored = |i: usize| {
            let read = |j: &usize| operands(body.code(*j)).contains(&(i as u32));
            stored.contains(&i) && !p.keep.contains(&i) && !maps.iter().chain(p.feeds).any(read)
        };
        for &i in maps {
            let args: Vec<String> =
                operands(body.code(i)).iter().map(|a| self.operand(*a as usize, "x", &computed)).collect();
            let c = expr::computed(self.dtype(i));
            let value = match self.body.code(i) {
                _ if never.contains(&i) => "0".into(),
                Code::Load { .. } => self.ramp(i, "(at + e)"),
                // Rounded by the store.
                code if self.dtype(i).is_half() && only_stored(i) => match code {
                    Code::Cast(a) if expr::computed(self.dtype(*a as usize)) == "f32" => args[0].clone(),
                    Code::Map(f, _) => expr::map(*f, DType::F32, &args),
                    _ => self.value(i, &args),
                },
                _ => self.value(i, &args),
            };
            self.text.line(format!("const {c} s{i} = {value};"));
            computed.insert(i);
            if p.keep.contains(&i) || stored.contains(&i) {
                self.text.line(format!("r{i}[x] = s{i};"));
            }
        }
        for &i in singles {
            let value = self.operand(i, "x", &computed);
            self.text.line(format!("o{i}[x] = {value};"));
        }
        for &i in p.feeds {
            if self.adds_nothing(i, never) {
                continue;
            }
            let value = self.operand(body.operand(i), "x", &computed);
            let f = expr::functor(self.reduction(i));
            // Each column of its own, or the eight slots of a block.
            let slot = match self.body.level(i) {
                Level::Col => format!("x % {}", p.place.columns),
                _ => format!("x % {OCTET}"),
            };
            // Columns that there are not are columns of their own.
            let within = if p.place.partial && body.level(i) != Level::Col { "if (e < left) " } else { "" };
            self.text.line(format!("{within}a{i}[{slot}] = {f}::join(a{i}[{slot}], {value});"));
        }
        self.text.close();
    }

    /// Whether load `i` is the number of the column plus something fixed: made where it is used, not kept.
    pub fn is_ramp(&self, i: usize) -> bool {
        let Some(load) = self.loads.get(&i) else { return false };
        let r = &load.reading;
        let walked = matches!((&r.tail[..], r.access), ([(_, 1)], Access::Vector | Access::Run));
        load.source == Source::Iota && walked && !r.flat
    }

    /// Its number at column `at`.
    pub(super) fn ramp(&self, i: usize, at: &str) -> String {
        let t = self.index_type();
        let load = &self.loads[&i];
        let base = if load.base.is_empty() { String::new() } else { format!("{} + ", load.base) };
        format!("(i64)({base}({t}){at})")
    }

    /// For a comparison of the column's number with one number a row: how far after column `at` the one lies where it holds.
    /// A number too large where none does.
    pub fn column(&self, i: usize, at: &str) -> Option<String> {
        let Code::Map(MapFn::Eq, args) = self.body.code(i) else { return None };
        let ramp = |a: u32| self.is_ramp(a as usize).then_some(a as usize);
        let (a, b) = match (ramp(args[0]), ramp(args[1])) {
            (Some(a), None) => (a, args[1]),
            (None, Some(b)) => (b, args[0]),
            _ => return None,
        };
        let wanted = self.operand(b as usize, "", &BTreeSet::new());
        self.is_one(b as usize).then(|| format!("(u64)({wanted} - {})", self.ramp(a, at)))
    }

    /// For a reduction that sums what is 0 but in one column: the comparison that tells which.
    pub fn picks(&self, i: usize) -> Option<usize> {
        let Code::Map(MapFn::Where, args) = self.body.code(self.body.operand(i)) else { return None };
        let hit = args[0] as usize;
        self.column(hit, "0")?;
        (self.adds_nothing(i, &BTreeSet::from([hit])) && expr::computed(self.dtype(i)) == "f32").then_some(hit)
    }

    /// Loads packs that stay what they are for all rows.
    pub fn load_once(&mut self, loads: &[usize], packs: usize, place: &Place) {
        let n = packs * self.v;
        for &i in loads {
            self.text.line(format!("{} r{i}[{n}] = {{}};", expr::computed(self.dtype(i))));
        }
        self.text.unrolled("k", packs);
        for line in &place.decl {
            self.text.line(line);
        }
        self.text.open("if (at < cols)");
        for &i in loads {
            self.load(i, place.partial, &mut Coords::new());
        }
        self.text.close();
        self.text.close();
    }

    /// Whether reduction `i` sums a choice between something and +0 that `never` settles: no sum from +0 becomes -0, so
    /// that adding +0 changes nothing.
    fn adds_nothing(&self, i: usize, never: &BTreeSet<usize>) -> bool {
        let Code::Map(MapFn::Where, args) = self.body.code(self.body.operand(i)) else { return false };
        let zero = matches!(self.body.code(args[2] as usize), Code::Load { source: Source::Constant(0), .. });
        self.reduction(i) == ReduceFn::Sum && zero && never.contains(&(args[0] as usize))
    }

    fn pack_loop(&mut self, p: &Pass, guarded: bool) {
        self.text.unrolled("k", p.packs);
        for line in &p.place.decl {
            self.text.line(line);
        }
        if guarded {
            self.text.open(format!("if ({})", p.place.guard));
        }
    }

    /// Writes the stores of values with one element for each row, at index `row`.
    pub fn row_stores(&mut self) {
        let stores: Vec<usize> = self.body.stores(Level::Row).collect();
        for k in stores {
            let (reg, value) = self.body.region.stores[k];
            let pointer = self.fields.pointer(value, expr::stored(self.dtype(reg as usize)));
            self.text.line(format!("narrow({pointer}[row], r{reg});"));
        }
    }
}
