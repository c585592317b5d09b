//! Compiles the instructions of a region to tile ops.
//!
//! Instructions keep their order. Loads, constants and broadcast row values are emitted at their first use, in the form that
//! a loop needs (see [`RegDef`]). Each phase is emitted separately, so a register that two phases use is computed in both.

mod conditional_store;
mod emit;
mod fuse;
mod phase;
mod row_pipeline;
mod scratch;

use super::load::{AccessPattern, Constant, Load, classify};
use super::*;
use crate::loops::map::RowBroadcast;
use crate::loops::{Isa, cast, map, reduce};
use perilune_core::error::{Error, Result};
use perilune_core::ops::ReduceFn;
use perilune_core::ops::elementwise::MapFn;
use perilune_core::{DType, Layout};
use perilune_plan::ir::{self, Code, Instr, LANES, Level, Program, Source, Storage, ValueId};
use std::collections::HashMap;

/// Minimum row length for a loop per row; the row values of shorter rows are expanded to tiles.
const SHORT_ROW: usize = 32;
/// Minimum row length without repetition: for shorter rows, column vectors are repeated for all rows of a block.
const REPEATED_ROW: usize = 256;

/// Maximum bytes of a row that a worker saves from phase to phase: half of an L2 cache.
const SAVED_BYTES: usize = 512 << 10;

/// How a register is defined.
#[derive(Clone, Copy, PartialEq, Debug)]
enum RegDef {
    Computed,
    Constant,
    /// A load that needs no copy.
    Memory(RowStride),
    /// A load that is the same for all rows.
    ColumnVector,
    /// A `Full` load with one f32 value per row.
    RowScalar,
    /// A load that is copied to a tile.
    Gathered,
    Broadcast,
}

/// A list of ops under construction, with the registers that it has bound.
#[derive(Default)]
struct List {
    ops: Vec<TileOp>,
    ready: HashMap<usize, View>,
    tiles: Vec<(View, usize)>,
}

struct Compiler<'a> {
    program: &'a Program,
    body: &'a [Instr],
    isa: Isa,
    space: IterSpace,
    segmented: bool,
    /// The register that holds a register's value; copies and widening casts are aliases.
    root: Vec<usize>,
    def: Vec<RegDef>,
    layouts: Vec<Option<Layout>>,
    depth: Vec<usize>,
    next_view: usize,
    constants: Vec<(View, Constant)>,
    constant_views: HashMap<usize, View>,
    loads: Vec<Load>,
    load_ids: HashMap<usize, u16>,
    hoisted: Vec<(View, usize, HoistedSource)>,
    hoisted_views: HashMap<usize, View>,
    row_ready: HashMap<usize, View>,
    row_views: Vec<(View, usize, usize)>,
    row_reductions: Vec<RowReduction>,
    col_reductions: Vec<ColReduction>,
    /// For registers saved from phase to phase: the phase that computes them, and their index among the saved ones.
    saved: HashMap<usize, (usize, u16)>,
    phase: usize,
    pipeline: Option<RowPipeline>,
    cost: f64,
}

fn bug(what: &str) -> Error {
    Error::system("cpu", format!("this is a bug: {what}"))
}

/// Compiles a region for an instruction set.
pub fn compile(program: &Program, region: &ir::Region, isa: Isa) -> Result<Region> {
    let body = &region.body[..];
    let mut root = roots(body);
    let predicate = conditional_store::take_predicate(program, region, &mut root);
    let mut needed = vec![false; body.len()];
    for (reg, _) in &region.stores {
        needed[root[*reg as usize]] = true;
    }
    for i in (0..body.len()).rev() {
        if needed[i] {
            for a in operands(&body[i].code) {
                needed[root[a]] = true;
            }
        }
    }
    let used = |i: &usize| needed[*i];
    let has_row = (0..body.len()).filter(used).any(|i| body[i].level == Level::Row);
    let has_col = (0..body.len()).filter(used).any(|i| body[i].level == Level::Col);
    let space = if has_row || has_col {
        IterSpace { batch: region.batch, rows: region.rows, cols: region.cols }
    } else {
        let layouts: Vec<Layout> = (0..body.len()).filter(used).filter_map(|i| layout_of(&body[i])).collect();
        collapse::choose(region.numel(), &layouts)
    };
    let segmented = space.cols > if has_row { ROWS_LIMIT } else { ROWS_LIMIT / 2 };
    let mut c = Compiler {
        program,
        body,
        isa,
        space,
        segmented,
        root,
        def: vec![RegDef::Computed; body.len()],
        layouts: vec![None; body.len()],
        depth: vec![0; body.len()],
        next_view: 0,
        constants: Vec::new(),
        constant_views: HashMap::new(),
        loads: Vec::new(),
        load_ids: HashMap::new(),
        hoisted: Vec::new(),
        hoisted_views: HashMap::new(),
        row_ready: HashMap::new(),
        row_views: Vec::new(),
        row_reductions: Vec::new(),
        col_reductions: Vec::new(),
        saved: HashMap::new(),
        phase: 0,
        pipeline: None,
        cost: 0.02,
    };
    c.classify(&needed);
    let mut out = c.region(region, &needed)?;
    out.predicate = predicate;
    Ok(out)
}

fn layout_of(i: &Instr) -> Option<Layout> {
    match &i.code {
        Code::Load { source: Source::Slot(_) | Source::Constant(_), .. } => None,
        Code::Load { layout, .. } => Some(**layout),
        _ => None,
    }
}

fn operands(code: &Code) -> Vec<usize> {
    match code {
        Code::Load { .. } => Vec::new(),
        Code::Map(_, args) => args.iter().map(|a| *a as usize).collect(),
        Code::Cast(a) | Code::Broadcast(a) | Code::ReduceRow(_, a) | Code::ReduceCol(_, a) => vec![*a as usize],
    }
}

fn roots(body: &[Instr]) -> Vec<usize> {
    let mut root: Vec<usize> = (0..body.len()).collect();
    for (i, instr) in body.iter().enumerate() {
        match &instr.code {
            Code::Map(MapFn::Copy, args) => root[i] = root[args[0] as usize],
            Code::Cast(a) => {
                let from = body[*a as usize].dtype;
                if from == instr.dtype || (from.is_half() && instr.dtype == DType::F32) {
                    root[i] = root[*a as usize];
                }
            }
            _ => {}
        }
    }
    root
}

/// Whether two values share bytes.
fn overlap(p: &Program, a: ValueId, b: ValueId) -> bool {
    let (x, y) = (&p.values[a.0 as usize], &p.values[b.0 as usize]);
    match (x.storage, y.storage) {
        (Storage::Arena(s), Storage::Arena(t)) => s < t + y.nbytes() && t < s + x.nbytes(),
        (s, t) => s == t,
    }
}

impl Compiler<'_> {
    fn classify(&mut self, needed: &[bool]) {
        for i in (0..self.body.len()).filter(|i| needed[*i]) {
            let instr = &self.body[i];
            let size = instr.dtype.compute().size();
            self.depth[i] = operands(&instr.code).iter().map(|a| self.depth[self.root[*a]]).max().unwrap_or(0)
                + usize::from(matches!(instr.code, Code::ReduceRow(..)));
            self.def[i] = match &instr.code {
                Code::Load { source: Source::Slot(_) | Source::Constant(_), .. } => RegDef::Constant,
                Code::Load { source, layout } => {
                    self.layouts[i] = Some(**layout);
                    let memory = matches!(source, Source::Value(_)) && !instr.dtype.is_half();
                    let long = self.space.cols >= SHORT_ROW;
                    match classify(layout, &self.space) {
                        _ if layout.numel() == 0 => RegDef::Gathered,
                        AccessPattern::Constant => RegDef::Constant,
                        _ if instr.level == Level::Row => RegDef::Gathered,
                        AccessPattern::Dense if memory => RegDef::Memory(RowStride::Dense),
                        AccessPattern::StridedRows(stride) if memory && long => {
                            RegDef::Memory(RowStride::Elements(stride))
                        }
                        AccessPattern::ColumnVector { dense: true }
                            if memory && (self.segmented || self.space.cols >= REPEATED_ROW) =>
                        {
                            RegDef::Memory(RowStride::Zero)
                        }
                        AccessPattern::ColumnVector { .. } if !self.segmented => RegDef::ColumnVector,
                        AccessPattern::RowScalar(rows) if instr.dtype.compute() == DType::F32 && long => {
                            self.layouts[i] = Some(rows);
                            RegDef::RowScalar
                        }
                        _ => RegDef::Gathered,
                    }
                }
                Code::Broadcast(a) if self.def[self.root[*a as usize]] == RegDef::Constant => {
                    let a = self.root[*a as usize];
                    let view = self.constant(a);
                    self.constant_views.insert(i, view);
                    RegDef::Constant
                }
                Code::Broadcast(_) => RegDef::Broadcast,
                _ => RegDef::Computed,
            };
            debug_assert!(size <= 8);
        }
    }

    fn region(mut self, region: &ir::Region, needed: &[bool]) -> Result<Region> {
        let stores = self.stores(region, needed)?;
        for s in stores.iter().filter(|s| s.in_place) {
            if matches!(self.def[s.reg], RegDef::Memory(_)) {
                // Another store may overwrite that memory first.
                self.def[s.reg] = RegDef::Gathered;
            }
        }

        let last = stores.iter().map(|s| s.phase).max().unwrap_or(0);
        let live: Vec<usize> = (0..self.body.len()).filter(|i| needed[*i] && self.root[*i] == *i).collect();
        let mut prologue = List::default();
        let mut lists = Vec::new();
        if self.segmented {
            for &i in &live {
                let row = self.body[i].level == Level::Row;
                match (&self.body[i].code, self.def[i]) {
                    (Code::Load { .. }, RegDef::RowScalar) => drop(self.row(i, &mut prologue)),
                    (Code::Load { .. }, _) if row => drop(self.row(i, &mut prologue)),
                    (Code::Map(..) | Code::Cast(_), _) if row && self.depth[i] == 0 => {
                        self.compute_row(i, &mut prologue)?
                    }
                    _ => {}
                }
            }
            self.choose_saved(last, &stores, needed);
            for p in 0..=last {
                let (list, reductions) = self.phase(p, &stores, needed)?;
                let mut rows = List::default();
                for &i in &live {
                    let map = matches!(self.body[i].code, Code::Map(..) | Code::Cast(_));
                    if map && self.body[i].level == Level::Row && self.depth[i] == p + 1 {
                        self.compute_row(i, &mut rows)?;
                    }
                }
                if p == last {
                    for s in stores.iter().filter(|s| !s.full && !s.col) {
                        self.store(s.reg, s.value, &mut rows);
                    }
                }
                lists.push((list, reductions, rows.ops));
            }
        } else {
            let (list, reductions) = self.phase(0, &stores, needed)?;
            lists.push((list, reductions, Vec::new()));
        }
        if self.next_view > View::MAX as usize {
            return Err(bug("a region has too many registers"));
        }
        Ok(self.finish(prologue.ops, lists))
    }

    /// The stores in terms of root registers, each with its phase.
    fn stores(&self, region: &ir::Region, needed: &[bool]) -> Result<Vec<StoreTarget>> {
        let mut out = Vec::new();
        for &(reg, value) in &region.stores {
            let reg = self.root[reg as usize];
            let level = self.body[reg].level;
            let mut in_place = false;
            for (i, instr) in self.body.iter().enumerate().filter(|(i, _)| needed[*i]) {
                if let Code::Load { source: Source::Value(v), layout } = &instr.code
                    && overlap(self.program, *v, value)
                {
                    let values = &self.program.values;
                    let same = values[v.0 as usize].dtype.size() == values[value.0 as usize].dtype.size();
                    let identity = layout.is_contiguous() && instr.level == Level::Full && level == Level::Full && same;
                    if !identity && layout.numel() > 1 {
                        return Err(bug(&format!("a store overwrites what instruction {i} loads otherwise")));
                    }
                    in_place = true;
                }
            }
            // Phase d - 1 feeds a row reduction of depth d.
            let phase = if level == Level::Row { self.depth[reg].saturating_sub(1) } else { self.depth[reg] };
            out.push(StoreTarget { reg, value, full: level == Level::Full, col: level == Level::Col, in_place, phase });
        }
        let last = out.iter().map(|s| s.phase).max().unwrap_or(0);
        for s in out.iter_mut().filter(|s| s.in_place) {
            s.phase = last;
        }
        Ok(out)
    }
}

/// A store, in terms of the register that holds the value.
struct StoreTarget {
    reg: usize,
    value: ValueId,
    full: bool,
    col: bool,
    in_place: bool,
    phase: usize,
}
