//! Holds the state that all strategies share while they emit a kernel: names, sizes and launch parameters.
//!
//! Names in the text: `r5` is register 5, either an array of a thread's elements or, if it does not vary within a row,
//! one number. `s5` is its value for the element being computed. `a5` are the accumulators of reduction 5. `o5` are
//! elements to be stored of a register that is one number. `row` and `cols` locate a thread; `at` is a column or, in a
//! pure map, a position.

use super::cp_async::SmemIntermediate;
use super::expr;
use super::launch_template::{LaunchTemplate, ParamValue, Params};
use super::load::Load;
use super::writer::Writer;
use crate::schedule::access::{self, Access};
use crate::schedule::region_analysis::RegionAnalysis;
use perilune_core::DType;
use perilune_core::ops::elementwise::MapFn;
use perilune_plan::ir::{Code, Level, Source};
use std::collections::{BTreeSet, HashMap};

pub struct Emitter<'a> {
    pub analysis: &'a RegionAnalysis<'a>,
    pub fields: Params,
    pub text: Writer,
    /// Elements of a pack.
    pub v: usize,
    /// Row length, if rows are processed separately.
    pub(super) cols: Option<usize>,
    pub(super) wide: bool,
    pub(super) loads: HashMap<usize, Load>,
    pub(super) sizes: HashMap<Vec<usize>, Vec<[String; 3]>>,
    /// Names of the row strides of stored values, if these exceed the number of columns.
    pub(super) pitches: HashMap<usize, String>,
    pub(super) names: usize,
    pub slots: bool,
    pub scratch: bool,
    /// Loads that are read from shared memory, at the same columns.
    pub(super) staged: Vec<usize>,
    pub intermediate: Option<SmemIntermediate>,
    /// Whether staged loads are in registers, and the slot of pack `k` in the text being written.
    pub in_registers: bool,
    pub prefetch_slot: Option<String>,
    /// Per-row loads that were prefetched for this row during the previous one.
    pub(super) early: Vec<usize>,
}

impl<'a> Emitter<'a> {
    pub fn new(analysis: &'a RegionAnalysis<'a>, cols: Option<usize>, v: usize) -> Emitter<'a> {
        let r = analysis.region;
        let layouts = r.body.iter().filter_map(|i| match &i.code {
            Code::Load { layout, .. } => Some(**layout),
            _ => None,
        });
        let stored = r.writes().map(|v| analysis.program.values[v.0 as usize].shape.numel());
        let numel = stored.fold(r.numel(), usize::max);
        Emitter {
            analysis,
            fields: Params::default(),
            text: Writer::default(),
            v,
            cols,
            wide: access::is_wide(numel, layouts),
            loads: HashMap::new(),
            sizes: HashMap::new(),
            pitches: HashMap::new(),
            names: 0,
            slots: false,
            scratch: false,
            staged: Vec::new(),
            intermediate: None,
            in_registers: false,
            prefetch_slot: None,
            early: Vec::new(),
        }
    }

    /// Types of positions and of indices.
    pub fn position(&self) -> &'static str {
        if self.wide { "u64" } else { "u32" }
    }

    pub(super) fn index_type(&self) -> &'static str {
        if self.wide { "i64" } else { "i32" }
    }

    /// Declares a size or count as a parameter with a unique name.
    pub fn size(&mut self, hint: &str, x: usize) -> String {
        let fact = if self.wide { ParamValue::I64(x as i64) } else { ParamValue::U32(x as u32) };
        self.fields.number(hint, fact)
    }

    /// A declared size: `const u32 name = fact;`.
    pub fn declare(&mut self, name: &str, x: usize) {
        let field = self.size("n", x);
        let t = self.position();
        self.text.line(format!("const {t} {name} = {field};"));
    }

    /// Whether packs may extend beyond the end of a row (see `row::row_vector_width`).
    pub fn ragged(&self) -> bool {
        self.cols.is_some_and(|cols| !cols.is_multiple_of(self.v))
    }

    /// The declarations of an `Indexing` whose packs begin at those columns.
    pub fn walked(&self, t: &str, at: String, partial: bool) -> Vec<String> {
        let left = partial.then(|| format!("const {t} left = cols - at;"));
        std::iter::once(format!("const {t} at = {at};")).chain(left).collect()
    }

    /// The index at which a row of store `k` begins in its value.
    pub(super) fn stored_row(&mut self, k: usize) -> String {
        format!("row * {}", self.pitch(k).unwrap_or_else(|| "cols".into()))
    }

    pub(super) fn pitch(&mut self, k: usize) -> Option<String> {
        let pitch = self.analysis.pitch(k)?;
        if !self.pitches.contains_key(&k) {
            let name = self.size("pitch", pitch);
            self.pitches.insert(k, name);
        }
        self.pitches.get(&k).cloned()
    }

    pub(super) fn fresh(&mut self, hint: &str) -> String {
        self.names += 1;
        format!("{hint}_{}", self.names)
    }

    pub fn dtype(&self, i: usize) -> DType {
        self.analysis.region.body[i].dtype
    }

    /// Whether register `i` is one number per row, or one for all rows.
    pub fn is_one(&self, i: usize) -> bool {
        match self.analysis.code(i) {
            Code::Broadcast(_) => true,
            Code::Load { .. } => {
                self.loads.get(&i).is_some_and(|l| matches!(l.reading.access, Access::Invariant | Access::RowWise))
            }
            _ => self.analysis.level(i) == Level::Row,
        }
    }

    /// Register `i` as an operand; `k` is the element, `computed` the registers that the pass has computed for it.
    pub(super) fn operand(&self, i: usize, k: &str, computed: &BTreeSet<usize>) -> String {
        match self.analysis.code(i) {
            Code::Broadcast(a) => format!("r{a}"),
            _ if self.is_one(i) => format!("r{i}"),
            _ if computed.contains(&i) => format!("s{i}"),
            _ => format!("r{i}[{k}]"),
        }
    }

    pub(super) fn value(&self, i: usize, args: &[String]) -> String {
        let d = self.dtype(i);
        match self.analysis.code(i) {
            Code::Map(f, _) => expr::map(*f, d, args),
            Code::Cast(a) => expr::cast(self.dtype(*a as usize), d, &args[0]),
            _ => args[0].clone(),
        }
    }

    pub fn template(self, strategy: &str, blocks: usize, threads: usize, most_threads: usize) -> LaunchTemplate {
        LaunchTemplate {
            label: label(self.analysis, strategy),
            fields: self.fields.list,
            body: self.text.finish(),
            blocks: blocks as u64,
            threads: threads as u32,
            most_threads: most_threads as u32,
            resident: 1,
            shared_bytes: 0,
            slots: self.slots,
            scratch: self.scratch,
            halts: false,
        }
    }
}

/// The longest packs for 16-byte accesses. Of the dtypes read and written in order, the narrowest fills 16 bytes, and
/// the widest takes at most 32.
pub fn vector_width(analysis: &RegionAnalysis, set: &BTreeSet<usize>, most: usize) -> usize {
    let mut sizes: Vec<usize> = Vec::new();
    let mut random = false;
    for &i in set {
        if let Code::Load { source, layout } = analysis.code(i) {
            random |= matches!(source, Source::Uniform { .. });
            let inner = layout.strides().last().copied();
            if analysis.level(i) == Level::Full && inner == Some(1) && source.value().is_some() {
                sizes.push(analysis.region.body[i].dtype.size());
            }
        }
    }
    sizes.extend(
        analysis.full_stores().map(|k| analysis.region.body[analysis.region.stores[k].0 as usize].dtype.size()),
    );
    let (low, high) = (sizes.iter().min().copied().unwrap_or(4), sizes.iter().max().copied().unwrap_or(4));
    let least = if random && high < 8 { 4 } else { 1 };
    (16 / low).min(32 / high).min(most).max(least)
}

/// Maximum length of a kernel's label.
const LABEL: usize = 48;

/// The label of a kernel in profiles: its strategy and as many of the region's operations as fit.
fn label(analysis: &RegionAnalysis, strategy: &str) -> String {
    let mut words: Vec<String> = vec![strategy.to_string()];
    for i in analysis.needed() {
        let word = match analysis.code(i) {
            Code::ReduceRow(f, _) => format!("row_{f:?}").to_lowercase(),
            Code::ReduceCol(f, _) => format!("col_{f:?}").to_lowercase(),
            Code::Map(MapFn::Copy, _) => continue,
            Code::Map(f, _) => expr::snake(*f),
            Code::Cast(_) => "cast".into(),
            Code::Load { source: Source::Uniform { .. }, .. } => "uniform".into(),
            _ => continue,
        };
        if !words.contains(&word) {
            words.push(word);
        }
    }
    if words.len() == 1 {
        words.push("copy".into());
    }
    let mut out = String::new();
    for w in words {
        if out.len() + w.len() + 1 > LABEL {
            break;
        }
        if !out.is_empty() {
            out.push('_');
        }
        out.push_str(&w);
    }
    out
}
