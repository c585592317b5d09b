//! Emits loads: index arithmetic, vector and scalar reads, and the registers that they fill.

use super::emitter::Emitter;
use super::expr;
use super::launch_template::ParamValue;
use crate::schedule::access::{self, Access, Reading};
use perilune_plan::ir::{Code, Level, Source};
use std::collections::{BTreeSet, HashMap};

/// A load, by its names in the text.
pub(super) struct Load {
    pub(super) source: Source,
    pub(super) reading: Reading,
    /// Address, if the load reads a stored value.
    pub(super) pointer: String,
    /// Whether this kernel does not write that value.
    pub(super) constant: bool,
    /// Names of seed and counter.
    pub(super) stream: (String, String),
    /// Where a device's part of a generated tensor begins: empty, or a name.
    pub(super) start: String,
    /// Names of the strides other than 0 and 1.
    pub(super) lead: Vec<String>,
    pub(super) tail: Vec<String>,
    /// The offset: empty, or a name.
    pub(super) from: String,
    /// The constant part of the index: empty, or a name.
    pub(super) base: String,
}

pub(super) type Coords = HashMap<Vec<usize>, Vec<String>>;

impl<'a> Emitter<'a> {
    /// Names what the loads in `set` need, and emits those that are one number for all elements.
    pub fn prologue(&mut self, set: &BTreeSet<usize>) {
        let region = self.analysis.region;
        for &i in set {
            let Code::Load { source, layout } = self.analysis.code(i) else { continue };
            let d = self.dtype(i);
            let reading = match source {
                Source::Slot(_) | Source::Constant(_) => {
                    Reading { access: Access::Invariant, offset: 0, lead: vec![], tail: vec![], flat: false }
                }
                _ if region.body[i].level == Level::Row => access::row(layout),
                _ => access::full(layout, self.cols, self.v),
            };
            let mut load = Load {
                source: *source,
                pointer: String::new(),
                constant: false,
                stream: Default::default(),
                start: String::new(),
                lead: vec![],
                tail: vec![],
                from: String::new(),
                base: String::new(),
                reading,
            };
            match source {
                Source::Value(v) => {
                    load.pointer = self.fields.pointer(*v, expr::stored(d));
                    load.constant = !self.analysis.is_written(*v);
                }
                Source::Block { input, start } => {
                    self.slots = true;
                    let (t, whole) = (expr::stored(d), self.fields.pointer(*input, expr::stored(d)));
                    let at = self.fields.number("slot", ParamValue::U32(*start));
                    load.pointer = format!("block{i}");
                    load.constant = !self.analysis.is_written(*input);
                    self.text.line(format!("const {t}* block{i} = {whole} + slots[{at}];"));
                }
                Source::Uniform { seed, counter, .. } => {
                    let mut word = |slot: u32| {
                        let at = self.fields.number("slot", ParamValue::U32(slot));
                        format!("slots[{at}]")
                    };
                    let (s, c) = (word(*seed), word(*counter));
                    self.slots = true;
                    load.stream = (format!("seed{i}"), format!("counter{i}"));
                    self.text.line(format!("const u64 seed{i} = {s}, counter{i} = {c};"));
                }
                _ => {}
            }
            if let Source::Uniform { start: Some(slot), .. } | Source::Iota { start: Some(slot) } = source {
                self.slots = true;
                let at = self.fields.number("slot", ParamValue::U32(*slot));
                load.start = format!("start{i}");
                self.text.line(format!("const u64 start{i} = slots[{at}];"));
            }
            let mut strides = |dims: &[(usize, isize)]| -> Vec<String> {
                dims.iter()
                    .map(|d| match d.1 {
                        0 | 1 => String::new(),
                        s => {
                            let fact = if self.wide { ParamValue::I64(s as i64) } else { ParamValue::I32(s as i32) };
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
                let fact = if self.wide { ParamValue::I64(offset as i64) } else { ParamValue::I32(offset as i32) };
                load.from = self.fields.number("from", fact);
                load.base = load.from.clone();
            }
            if load.reading.access == Access::Invariant {
                let x = match source {
                    Source::Constant(bits) => expr::constant(d, *bits),
                    Source::Slot(slot) => {
                        self.slots = true;
                        let at = self.fields.number("slot", ParamValue::U32(*slot));
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

    /// Coordinates of position `pos` in dims of the given sizes.
    pub(super) fn coords(&mut self, dims: &[(usize, isize)], pos: &str, memo: &mut Coords) -> Vec<String> {
        if dims.len() < 2 {
            return vec![pos.to_string(); dims.len()];
        }
        let sizes: Vec<usize> = dims.iter().map(|d| d.0).collect();
        let mut key = sizes.clone();
        // Positions of rows and of columns have different keys.
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
                    let (m, s) = access::reciprocal(d);
                    let m = self.fields.number("m", ParamValue::U32(m));
                    [n, m, self.fields.number("h", ParamValue::U32(s))]
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
            let quotient = if self.wide { format!("{rest} / {n}") } else { format!("fast_divide({rest}, {m}, {s})") };
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

    /// Emits what is fixed for a row (`row` is declared): the row's part of indices, and loads with one number per row.
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
            if self.early.contains(&i) {
                self.text.line(format!("const {} r{i} = next{i};", expr::computed(self.dtype(i))));
            } else if load.reading.access == Access::RowWise {
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

    /// Loads the per-row numbers of row `pos` ahead of time; `row_start` uses them a row later. Loading them at the
    /// start of their row would stall on memory.
    pub fn row_early(&mut self, set: &BTreeSet<usize>, pos: &str) {
        let first = self.early.is_empty();
        let once = |l: &Load| l.reading.access == Access::RowWise && l.constant && !l.reading.lead.is_empty();
        let early = set.iter().copied().filter(|i| self.loads.get(i).is_some_and(once)).collect::<Vec<_>>();
        if first {
            for i in &early {
                self.text.line(format!("{} next{i};", expr::computed(self.dtype(*i))));
            }
        }
        self.text.open("");
        let mut memo = Coords::new();
        for &i in &early {
            let dims = self.loads[&i].reading.lead.clone();
            let coords = self.coords(&dims, pos, &mut memo);
            let load = &self.loads[&i];
            let x = element(load, &format!("({})", self.sum(&load.from, &dims, &load.lead, &coords)));
            self.text.line(format!("next{i} = {x};"));
        }
        self.text.close();
        self.early = early;
    }

    /// Emits the load of pack `k` into `r{i}`.
    pub(super) fn load(&mut self, i: usize, partial: bool, memo: &mut Coords) {
        let v = self.v;
        if let Some(k) = self.intermediate.filter(|k| k.reg == i) {
            self.text.line(format!("smem_load_f32<{v}>(r{i} + k * {v}, {});", self.smem_args(k, " + at")));
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
            self.text.line(format!("load_vec<{v}, false>(r{i} + k * {v}, stage{i} + at);"));
            return;
        }
        let coords = self.coords(&reading.tail, pos, memo);
        let load = &self.loads[&i];
        let index = self.sum(&load.base, &reading.tail, &load.tail, &coords);
        let vector = reading.access == Access::Vector;
        match load.source {
            Source::Value(_) | Source::Block { .. } if vector => {
                let (p, nc) = (&load.pointer, load.constant);
                let line = match partial && !self.has_room(i) {
                    false => format!("load_vec<{v}, {nc}>(r{i} + k * {v}, {p} + ({index}));"),
                    true => format!("load_vec_tail<{v}, {nc}>(r{i} + k * {v}, {p} + ({index}), left);"),
                };
                self.text.line(line);
            }
            Source::Uniform { start: None, .. } if vector && v.is_multiple_of(4) => {
                let (s, c) = &load.stream;
                let line = format!("uniform_vec<{v}>(r{i} + k * {v}, {s}, {c}, (u64)({index}));");
                self.text.line(line);
            }
            _ => {
                let step = match reading.tail.last() {
                    Some((_, 1)) => format!("({t})e"),
                    Some((_, 0)) | None => String::new(),
                    _ => format!("({t})e * {}", load.tail[load.tail.len() - 1]),
                };
                let name = format!("index{i}");
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

    pub(super) fn flat(&mut self) {
        // Signed, so that compilers recognise indices that differ by a constant.
        let t = self.index_type();
        self.text.line(format!("const {t} flat = ({t})(row * cols) + ({t})at;"));
    }
}

/// Element `at` of a load's source.
pub(super) fn element(load: &Load, at: &str) -> String {
    match load.source {
        Source::Value(_) | Source::Block { .. } => format!("widen({}[{at}])", load.pointer),
        Source::Uniform { start, .. } => {
            let from = if start.is_some() { format!(" + {}", load.start) } else { String::new() };
            format!("uniform({}, {}, (u64){at}{from})", load.stream.0, load.stream.1)
        }
        Source::Iota { start: Some(_) } => format!("(i64)((u64){at} + {})", load.start),
        _ => format!("(i64){at}"),
    }
}
