//! The generator that all strategies share: names, indices, and passes over elements.
//!
//! Names in the text: `r5` is register 5, an array of a thread's elements or one number if it does not differ within a
//! row; `s5` its value while a pass computes one element; `a5` the partial results of reduction 5; `o5` elements to be
//! stored of a register that is one number. `row` and `cols` say where a thread works; `at` is a column, or in a pure map
//! a position.

use super::body::{Body, operands};
use super::expr;
use super::index::{self, Access, Reading};
use super::space::OCTET;
use super::stage::{Fact, Fields, Stage};
use super::text::Text;
use perilune_core::DType;
use perilune_core::ops::ReduceFn;
use perilune_core::ops::elementwise::MapFn;
use perilune_plan::ir::{Code, Level, Source};
use std::collections::{BTreeSet, HashMap};

/// A load as the text names it.
pub(super) struct Load {
    source: Source,
    pub(super) reading: Reading,
    /// Address, if a stored value is read.
    pub(super) pointer: String,
    /// Whether nothing in this kernel writes that value.
    pub(super) constant: bool,
    /// Names of seed and counter.
    stream: (String, String),
    /// Names of the strides that are neither 0 nor 1.
    lead: Vec<String>,
    pub(super) tail: Vec<String>,
    /// The offset: empty, or a name.
    from: String,
    /// What to add to the walked part of the index: empty, or a name.
    pub(super) base: String,
}

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

/// A register that one pass leaves in shared memory for those after it: as f32, where a staged load lay.
#[derive(Clone, Copy)]
pub struct Kept {
    pub reg: usize,
    pub load: usize,
}

pub struct Emit<'a> {
    pub body: &'a Body<'a>,
    pub fields: Fields,
    pub text: Text,
    /// Elements of a pack.
    pub v: usize,
    /// Row length, if rows are walked one by one.
    cols: Option<usize>,
    wide: bool,
    pub(super) loads: HashMap<usize, Load>,
    sizes: HashMap<Vec<usize>, Vec<[String; 3]>>,
    /// Names of the elements from row to row of what is stored, where these are more than the columns.
    pitches: HashMap<usize, String>,
    names: usize,
    pub slots: bool,
    pub scratch: bool,
    /// Loads that are read from shared memory, at the same columns.
    pub(super) staged: Vec<usize>,
    pub kept: Option<Kept>,
    /// Whether staged loads wait in registers, and where pack `k` does in the text that is being written.
    pub in_registers: bool,
    pub held: Option<String>,
}

pub(super) type Coords = HashMap<Vec<usize>, Vec<String>>;

impl<'a> Emit<'a> {
    pub fn new(body: &'a Body<'a>, cols: Option<usize>, v: usize) -> Emit<'a> {
        let r = body.region;
        let layouts = r.body.iter().filter_map(|i| match &i.code {
            Code::Load { layout, .. } => Some(*layout),
            _ => None,
        });
        let stored = r.writes().map(|v| body.program.values[v.0 as usize].shape.numel());
        let numel = stored.fold(r.numel(), usize::max);
        Emit {
            body,
            fields: Fields::default(),
            text: Text::default(),
            v,
            cols,
            wide: index::is_wide(numel, layouts),
            loads: HashMap::new(),
            sizes: HashMap::new(),
            pitches: HashMap::new(),
            names: 0,
            slots: false,
            scratch: false,
            staged: Vec::new(),
            kept: None,
            in_registers: false,
            held: None,
        }
    }

    /// Types of positions and of indices.
    pub fn position(&self) -> &'static str {
        if self.wide { "u64" } else { "u32" }
    }

    pub(super) fn index_type(&self) -> &'static str {
        if self.wide { "i64" } else { "i32" }
    }

    /// A size or count as a fact, under a name of its own.
    pub fn size(&mut self, hint: &str, x: usize) -> String {
        let fact = if self.wide { Fact::I64(x as i64) } else { Fact::U32(x as u32) };
        self.fields.number(hint, fact)
    }

    /// A declared size: `const u32 name = fact;`.
    pub fn declare(&mut self, name: &str, x: usize) {
        let field = self.size("n", x);
        let t = self.position();
        self.text.line(format!("const {t} {name} = {field};"));
    }

    /// Whether packs may be longer than what is left of a row (see `row::row_pack`).
    pub fn ragged(&self) -> bool {
        self.cols.is_some_and(|cols| !cols.is_multiple_of(self.v))
    }

    /// The lines of a `Place` whose packs begin at those columns.
    pub fn walked(&self, t: &str, at: String, partial: bool) -> Vec<String> {
        let left = partial.then(|| format!("const {t} left = cols - at;"));
        std::iter::once(format!("const {t} at = {at};")).chain(left).collect()
    }

    /// Where a row of store `k` begins in its value: an index.
    pub(super) fn stored_row(&mut self, k: usize) -> String {
        format!("row * {}", self.pitch(k).unwrap_or_else(|| "cols".into()))
    }

    fn pitch(&mut self, k: usize) -> Option<String> {
        let pitch = self.body.pitch(k)?;
        if !self.pitches.contains_key(&k) {
            let name = self.size("pitch", pitch);
            self.pitches.insert(k, name);
        }
        self.pitches.get(&k).cloned()
    }

    fn fresh(&mut self, hint: &str) -> String {
        self.names += 1;
        format!("{hint}_{}", self.names)
    }

    pub fn dtype(&self, i: usize) -> DType {
        self.body.region.body[i].dtype
    }

    /// Whether register `i` is one number for each row, or for all.
    pub fn is_one(&self, i: usize) -> bool {
        match self.body.code(i) {
            Code::Spread(_) => true,
            Code::Load { .. } => {
                self.loads.get(&i).is_some_and(|l| matches!(l.reading.access, Access::Invariant | Access::RowWise))
            }
            _ => self.body.level(i) == Level::Row,
        }
    }

    /// Register `i` as an operand; `k` is the element, `computed` what the pass has computed for it.
    pub(super) fn operand(&self, i: usize, k: &str, computed: &BTreeSet<usize>) -> String {
        match self.body.code(i) {
            Code::Spread(a) => format!("r{a}"),
            _ if self.is_one(i) => format!("r{i}"),
            _ if computed.contains(&i) => format!("s{i}"),
            _ => format!("r{i}[{k}]"),
        }
    }

    pub(super) fn value(&self, i: usize, args: &[String]) -> String {
        let d = self.dtype(i);
        match self.body.code(i) {
            Code::Map(f, _) => expr::map(*f, d, args),
            Code::Cast(a) => expr::cast(self.dtype(*a as usize), d, &args[0]),
            _ => args[0].clone(),
        }
    }

    /// Names what the loads among `set` need, and writes those that are one number for all elements.
    pub fn prologue(&mut self, set: &BTreeSet<usize>) {
        let region = self.body.region;
        for &i in set {
            let Code::Load { source, layout } = self.body.code(i) else { continue };
            let d = self.dtype(i);
            let reading = match source {
                Source::Slot(_) | Source::Constant(_) => {
                    Reading { access: Access::Invariant, offset: 0, lead: vec![], tail: vec![], flat: false }
                }
                _ if region.body[i].level == Level::Row => index::row(layout),
                _ => index::full(layout, self.cols, self.v),
            };
            let mut load = Load {
                source: *source,
                pointer: String::new(),
                constant: false,
                stream: Default::default(),
                lead: vec![],
                tail: vec![],
                from: String::new(),
                base: String::new(),
                reading,
            };
            match source {
                Source::Value(v) => {
                    load.pointer = self.fields.pointer(*v, expr::stored(d));
                    load.constant = !self.body.is_written(*v);
                }
                Source::Uniform { seed, counter } => {
                    let mut word = |slot: u32| {
                        let at = self.fields.number("slot", Fact::U32(slot));
                        format!("slots[{at}]")
                    };
                    let (s, c) = (word(*seed), word(*counter));
                    self.slots = true;
                    load.stream = (format!("seed{i}"), format!("counter{i}"));
                    self.text.line(format!("const u64 seed{i} = {s}, counter{i} = {c};"));
                }
                _ => {}
            }
            let mut strides = |dims: &[(usize, isize)]| -> Vec<String> {
                dims.iter()
                    .map(|d| match d.1 {
                        0 | 1 => String::new(),
                        s => {
                            let fact = if self.wide { Fact::I64(s as i64) } else { Fact::I32(s as i32) };
                            self.fields.number("by", fact)
                        }
                    })
                    .collect()
            };
            load.lead = strides(&load.reading.lead);
            load.tail = strides(&load.reading.tail);
            let t = self.index_type();
            if load.reading.offset != 0 {
                let offset = load.reading.offset;
                let fact = if self.wide { Fact::I64(offset as i64) } else { Fact::I32(offset as i32) };
                load.from = self.fields.number("from", fact);
                load.base = load.from.clone();
            }
            if load.reading.access == Access::Invariant {
                let x = match source {
                    Source::Constant(bits) => expr::constant(d, *bits),
                    Source::Slot(slot) => {
                        self.slots = true;
                        let at = self.fields.number("slot", Fact::U32(*slot));
                        expr::slot(d, &format!("slots[{at}]"))
                    }
                    _ => {
                        let at = if load.base.is_empty() { format!("({t})0") } else { load.base.clone() };
                        element(&load, &at)
                    }
                };
                self.text.line(format!("const {} r{i} = {x};", expr::computed(d)));
            }
            self.loads.insert(i, load);
        }
    }

    /// Coordinates of position `pos` in dims of those sizes.
    pub(super) fn coords(&mut self, dims: &[(usize, isize)], pos: &str, memo: &mut Coords) -> Vec<String> {
        if dims.len() < 2 {
            return vec![pos.to_string(); dims.len()];
        }
        let sizes: Vec<usize> = dims.iter().map(|d| d.0).collect();
        let mut key = sizes.clone();
        // Positions of rows and of columns are told apart.
        key.push(usize::from(pos == "row"));
        key.push(usize::from(pos == "flat"));
        if let Some(found) = memo.get(&key) {
            return found.clone();
        }
        if !self.sizes.contains_key(&sizes) {
            let names = sizes[1..]
                .iter()
                .map(|&d| {
                    let n = self.size("d", d);
                    if self.wide {
                        return [n, String::new(), String::new()];
                    }
                    let (m, s) = index::reciprocal(d);
                    let m = self.fields.number("m", Fact::U32(m));
                    [n, m, self.fields.number("h", Fact::U32(s))]
                })
                .collect();
            self.sizes.insert(sizes.clone(), names);
        }
        let names = self.sizes[&sizes].clone();
        let t = self.position();
        let mut out = vec![String::new(); dims.len()];
        let mut rest = pos.to_string();
        for (k, [n, m, s]) in names.iter().enumerate().rev() {
            let (q, c) = (self.fresh("q"), self.fresh("c"));
            let quotient = if self.wide { format!("{rest} / {n}") } else { format!("divide({rest}, {m}, {s})") };
            self.text.line(format!("const {t} {q} = {quotient}, {c} = {rest} - {q} * {n};"));
            out[k + 1] = c;
            rest = q;
        }
        out[0] = rest;
        memo.insert(key, out.clone());
        out
    }

    /// The sum of base and coordinates times strides.
    pub(super) fn sum(&self, base: &str, dims: &[(usize, isize)], names: &[String], coords: &[String]) -> String {
        let t = self.index_type();
        let mut terms: Vec<String> = Vec::new();
        if !base.is_empty() {
            terms.push(base.to_string());
        }
        for ((d, name), c) in dims.iter().zip(names).zip(coords) {
            match d.1 {
                0 => {}
                1 => terms.push(format!("({t}){c}")),
                _ => terms.push(format!("({t}){c} * {name}")),
            }
        }
        if terms.is_empty() { format!("({t})0") } else { terms.join(" + ") }
    }

    /// Writes what is fixed for a row (`row` is declared): the row's part of indices, and loads with one number a row.
    pub fn row_start(&mut self, set: &BTreeSet<usize>) {
        let mut memo = Coords::new();
        for &i in set {
            let Some(load) = self.loads.get(&i) else { continue };
            if load.reading.access == Access::Invariant || (load.reading.lead.is_empty() && load.base.is_empty()) {
                continue;
            }
            let dims = load.reading.lead.clone();
            let coords = self.coords(&dims, "row", &mut memo);
            let load = &self.loads[&i];
            let base = self.sum(&load.from, &dims, &load.lead, &coords);
            let t = self.index_type();
            if load.reading.access == Access::RowWise {
                let x = element(load, &format!("({base})"));
                let c = expr::computed(self.dtype(i));
                self.text.line(format!("const {c} r{i} = {x};"));
            } else {
                self.text.line(format!("const {t} b{i} = {base};"));
                if let Some(load) = self.loads.get_mut(&i) {
                    load.base = format!("b{i}");
                }
            }
        }
    }

    /// Whether rows of load `i` are neighbours in memory that copies of 4 bytes or more can move.
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

    /// Whether whole packs of load `i` may be read although a row ends within the last one: the next row begins behind it, and
    /// values begin and end at multiples of more bytes than a pack has.
    fn has_room(&self, i: usize) -> bool {
        let (Some(cols), Some(load)) = (self.cols, self.loads.get(&i)) else { return false };
        let mut steps = load.reading.lead.iter().map(|d| d.1.unsigned_abs()).filter(|s| *s > 0).peekable();
        steps.peek().is_some() && steps.all(|s| s >= cols.next_multiple_of(self.v))
    }

    /// Bytes of a row of load `i`, as it is staged.
    pub fn staged_bytes(&self, i: usize) -> usize {
        let planes = if self.kept.is_some_and(|k| k.load == i) { 4 / self.dtype(i).size() } else { 1 };
        self.plane_bytes(i) * planes
    }

    /// The same of the load alone. What is kept in its place takes as much once more for each further 16 bits.
    pub(super) fn plane_bytes(&self, i: usize) -> usize {
        let size = self.dtype(i).size();
        (self.body.region.cols.next_multiple_of(self.v) * size).next_multiple_of(16)
    }

    /// Where kept results of the columns from `at` on lie: the arguments of functions of `device/pack.cuh`.
    pub(super) fn kept_place(&self, k: Kept, at: &str) -> String {
        format!("stage{}{at}, {}", k.load, self.plane_bytes(k.load) / self.dtype(k.load).size())
    }

    /// From here on loads are read from shared memory, where each has so many rows side by side: their bytes.
    pub fn stage_rows(&mut self, loads: &[usize], rows: usize) -> usize {
        self.text.line("extern __shared__ uint4 staged[];");
        self.staged = loads.to_vec();
        loads.iter().map(|i| self.staged_bytes(*i) * rows).sum()
    }

    /// Declares where row `row` of each staged load lies, of the `rows` that are side by side, in set `set` of them.
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

    /// Whether load `i` has other elements in another row.
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

    /// Whether the lanes of a warp copy what lies side by side where a pack takes two accesses, not each its own pack.
    pub fn spreads(&self, i: usize) -> bool {
        self.v * self.dtype(i).size() == 32
    }

    /// Copies the packs of a place, of the rows that begin at `name`, to the staged rows `to`. With `warp`, each lane is one of
    /// 32 and may copy what another one reads.
    pub fn copy_ahead(&mut self, packs: usize, place: &Place, name: &str, to: &str, warp: bool) {
        let (v, t) = (self.v, self.index_type());
        self.text.unrolled("k", packs);
        for line in &place.decl {
            self.text.line(line);
        }
        let (apart, own): (Vec<usize>, Vec<usize>) = self.staged.iter().partition(|i| warp && self.spreads(**i));
        if !own.is_empty() {
            self.text.open(format!("if ({})", place.guard));
            for i in own {
                let bytes = v * self.dtype(i).size();
                let pointer = &self.loads[&i].pointer;
                self.text.line(format!("copy_ahead<{bytes}>({to}{i} + at, {pointer} + ({name}{i} + ({t})at));"));
            }
            self.text.close();
        }
        if !apart.is_empty() {
            let half = v / 2;
            self.text.unrolled("h", 2);
            self.text.line(format!("const {} beside = at - lane * {half} + h * {};", self.position(), 32 * half));
            self.text.open(format!("if ({})", place.guard.replace("at <", "beside <")));
            for i in apart {
                let pointer = &self.loads[&i].pointer;
                self.text.line(format!("copy_ahead<16>({to}{i} + beside, {pointer} + ({name}{i} + ({t})beside));"));
            }
            self.text.close();
            self.text.close();
        }
        self.text.close();
    }

    /// Asks for the staged rows that begin at `name`, so that their copies find them in L2.
    pub fn fetch_rows(&mut self, when: &str, name: &str) {
        for &i in &self.staged {
            let (size, pointer) = (self.dtype(i).size(), &self.loads[&i].pointer);
            // Rows of f32 gained nothing.
            if size == 2 && (self.v * size).is_multiple_of(16) {
                let bytes = self.body.region.cols.next_multiple_of(self.v) * size;
                self.text.line(format!("if ({when}) fetch_row({pointer} + {name}{i}, {bytes});"));
            }
        }
    }

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

    pub(super) fn flat(&mut self) {
        // Signed, so that compilers see what differs by a constant only.
        let t = self.index_type();
        self.text.line(format!("const {t} flat = ({t})(row * cols) + ({t})at;"));
    }

    /// Writes the load of pack `k` into `r{i}`.
    fn load(&mut self, i: usize, partial: bool, memo: &mut Coords) {
        let v = self.v;
        if let Some(k) = self.kept.filter(|k| k.reg == i) {
            self.text.line(format!("kept_pack<{v}>(r{i} + k * {v}, {});", self.kept_place(k, " + at")));
            return;
        }
        let reading = self.loads[&i].reading.clone();
        let pos = if reading.flat { "flat" } else { "at" };
        let t = self.index_type();
        if reading.access == Access::Each {
            self.text.unrolled("e", v);
            if partial {
                self.text.open("if (e < left)");
            }
            let p = self.position();
            let each = self.fresh("e");
            self.text.line(format!("const {p} {each} = {pos} + e;"));
            let coords = self.coords(&reading.tail, &each, &mut Coords::new());
            let load = &self.loads[&i];
            let x = element(load, &format!("({})", self.sum(&load.base, &reading.tail, &load.tail, &coords)));
            self.text.line(format!("r{i}[k * {v} + e] = {x};"));
            if partial {
                self.text.close();
            }
            self.text.close();
            return;
        }
        if let Some(words) = self.words(i).filter(|_| self.staged.contains(&i)) {
            self.text.line(format!("unpack_words<{v}>(r{i} + k * {v}, {words});"));
            return;
        }
        if self.staged.contains(&i) {
            self.text.line(format!("load_pack<{v}, false>(r{i} + k * {v}, stage{i} + at);"));
            return;
        }
        let coords = self.coords(&reading.tail, pos, memo);
        let load = &self.loads[&i];
        let index = self.sum(&load.base, &reading.tail, &load.tail, &coords);
        let vector = reading.access == Access::Vector;
        match load.source {
            Source::Value(_) if vector => {
                let (p, nc) = (&load.pointer, load.constant);
                let line = match partial && !self.has_room(i) {
                    false => format!("load_pack<{v}, {nc}>(r{i} + k * {v}, {p} + ({index}));"),
                    true => format!("load_some<{v}, {nc}>(r{i} + k * {v}, {p} + ({index}), left);"),
                };
                self.text.line(line);
            }
            Source::Uniform { .. } if vector && v.is_multiple_of(4) => {
                let (s, c) = &load.stream;
                let line = format!("uniform_pack<{v}>(r{i} + k * {v}, {s}, {c}, (u64)({index}));");
                self.text.line(line);
            }
            _ => {
                let step = match reading.tail.last() {
                    Some((_, 1)) => format!("({t})e"),
                    Some((_, 0)) | None => String::new(),
                    _ => format!("({t})e * {}", load.tail[load.tail.len() - 1]),
                };
                let name = format!("i{i}");
                let at = if step.is_empty() { name.clone() } else { format!("({name} + {step})") };
                let x = element(load, &at);
                self.text.line(format!("const {t} {name} = {index};"));
                if step.is_empty() {
                    let c = expr::computed(self.dtype(i));
                    self.text.line(format!("const {c} same{i} = {x};"));
                }
                self.text.unrolled("e", v);
                let x = if step.is_empty() { format!("same{i}") } else { x };
                let guard = if partial && !step.is_empty() { "if (e < left) " } else { "" };
                self.text.line(format!("{guard}r{i}[k * {v} + e] = {x};"));
                self.text.close();
            }
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

    pub fn stage(self, strategy: &str, blocks: usize, threads: usize, most_threads: usize) -> Stage {
        Stage {
            label: self.body.label(strategy),
            fields: self.fields.list,
            body: self.text.finish(),
            blocks: blocks as u64,
            threads: threads as u32,
            most_threads: most_threads as u32,
            resident: 1,
            shared_bytes: 0,
            slots: self.slots,
            scratch: self.scratch,
        }
    }
}

/// Element `at` of a load's source.
pub(super) fn element(load: &Load, at: &str) -> String {
    match load.source {
        Source::Value(_) => format!("widen({}[{at}])", load.pointer),
        Source::Uniform { .. } => format!("uniform({}, {}, (u64){at})", load.stream.0, load.stream.1),
        _ => format!("(i64){at}"),
    }
}

/// The longest packs that 16-byte accesses ask for: of the dtypes read and written in order, the narrowest fills 16 bytes,
/// and the widest takes no more than 32.
pub fn pack(body: &Body, set: &BTreeSet<usize>, most: usize) -> usize {
    let mut sizes: Vec<usize> = Vec::new();
    let mut random = false;
    for &i in set {
        if let Code::Load { source, layout } = body.code(i) {
            random |= matches!(source, Source::Uniform { .. });
            let inner = layout.strides().last().copied();
            if body.level(i) == Level::Full && inner == Some(1) && matches!(source, Source::Value(_)) {
                sizes.push(body.region.body[i].dtype.size());
            }
        }
    }
    sizes.extend(body.full_stores().map(|k| body.region.body[body.region.stores[k].0 as usize].dtype.size()));
    let (low, high) = (sizes.iter().min().copied().unwrap_or(4), sizes.iter().max().copied().unwrap_or(4));
    let least = if random && high < 8 { 4 } else { 1 };
    (16 / low).min(32 / high).min(most).max(least)
}
