//! From a region's instructions to steps.
//!
//! Instructions keep their order; loads, numbers and spread row values are fetched where first used, and only in the form
//! that some loop needs (see [`Kind`]). Each phase is emitted on its own, so what two phases need is computed in both.

use super::load::{Class, Constant, Load, classify};
use super::*;
use crate::loops::map::Still;
use crate::loops::{Isa, cast, map, reduce};
use perilune_core::error::{Error, Result};
use perilune_core::ops::elementwise::MapFn;
use perilune_core::{DType, Layout};
use perilune_plan::ir::{self, Code, Instr, LANES, Level, Program, Source, Storage, ValueId};
use std::collections::HashMap;

/// Rows shorter than this are not worth a loop of their own: row values are spread into tiles instead.
const SHORT_ROW: usize = 32;
/// Rows shorter than this have column vectors repeated for all rows of a block.
const REPEATED_ROW: usize = 256;

/// What a worker keeps of a row from phase to phase at most: half of an L2 cache.
const KEPT_BYTES: usize = 512 << 10;

/// Where a register's elements come from.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Kind {
    Computed,
    Constant,
    /// A load that is memory as it stands.
    Memory(Place),
    /// A load that differs from column to column only.
    Col,
    /// A `Full` load with one f32 number a row.
    RowLoad,
    Fetched,
    Spread,
}

/// A list of steps being written, with what it has made available.
#[derive(Default)]
struct List {
    steps: Vec<Step>,
    ready: HashMap<usize, View>,
    tiles: Vec<(View, usize)>,
}

struct Compiler<'a> {
    program: &'a Program,
    body: &'a [Instr],
    isa: Isa,
    grid: Grid,
    segmented: bool,
    /// The register that really holds a register's value: copies and widening casts are names only.
    root: Vec<usize>,
    kind: Vec<Kind>,
    layouts: Vec<Option<Layout>>,
    depth: Vec<usize>,
    next_view: usize,
    constants: Vec<(View, Constant)>,
    constant_views: HashMap<usize, View>,
    loads: Vec<Load>,
    load_ids: HashMap<usize, u16>,
    hoisted: Vec<(View, usize, HoistedKind)>,
    hoisted_views: HashMap<usize, View>,
    row_ready: HashMap<usize, View>,
    row_views: Vec<(View, usize, usize)>,
    row_reductions: Vec<RowReduction>,
    col_reductions: Vec<ColReduction>,
    /// For registers kept from phase to phase: the phase that computes it, and its place among them.
    kept: HashMap<usize, (usize, u16)>,
    phase: usize,
    cost: f64,
}

fn bug(what: &str) -> Error {
    Error::system("cpu", format!("this is a bug: {what}"))
}

pub fn compile(program: &Program, region: &ir::Region, isa: Isa) -> Result<Region> {
    let body = &region.body[..];
    let root = roots(body);
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
    let grid = if has_row || has_col {
        Grid { batch: region.batch, rows: region.rows, cols: region.cols }
    } else {
        let layouts: Vec<Layout> = (0..body.len()).filter(used).filter_map(|i| layout_of(&body[i])).collect();
        grid::choose(region.numel(), &layouts)
    };
    let segmented = grid.cols > if has_row { ROWS_LIMIT } else { ROWS_LIMIT / 2 };
    let mut c = Compiler {
        program,
        body,
        isa,
        grid,
        segmented,
        root,
        kind: vec![Kind::Computed; body.len()],
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
        kept: HashMap::new(),
        phase: 0,
        cost: 0.02,
    };
    c.classify(&needed);
    c.region(region, &needed)
}

fn layout_of(i: &Instr) -> Option<Layout> {
    match &i.code {
        Code::Load { source: Source::Slot(_) | Source::Constant(_), .. } => None,
        Code::Load { layout, .. } => Some(*layout),
        _ => None,
    }
}

fn operands(code: &Code) -> Vec<usize> {
    match code {
        Code::Load { .. } => Vec::new(),
        Code::Map(_, args) => args.iter().map(|a| *a as usize).collect(),
        Code::Cast(a) | Code::Spread(a) | Code::ReduceRow(_, a) | Code::ReduceCol(_, a) => vec![*a as usize],
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

/// Functions whose result on 16-bit floats is one already.
fn is_exact(f: MapFn) -> bool {
    use MapFn::*;
    matches!(f, Neg | Abs | Sign | Relu | Maximum | Minimum | Where | Floor | Ceil | Round)
}

impl Compiler<'_> {
    fn classify(&mut self, needed: &[bool]) {
        for i in (0..self.body.len()).filter(|i| needed[*i]) {
            let instr = &self.body[i];
            let size = instr.dtype.compute().size();
            self.depth[i] = operands(&instr.code).iter().map(|a| self.depth[self.root[*a]]).max().unwrap_or(0)
                + usize::from(matches!(instr.code, Code::ReduceRow(..)));
            self.kind[i] = match &instr.code {
                Code::Load { source: Source::Slot(_) | Source::Constant(_), .. } => Kind::Constant,
                Code::Load { source, layout } => {
                    self.layouts[i] = Some(*layout);
                    let memory = matches!(source, Source::Value(_)) && !instr.dtype.is_half();
                    let long = self.grid.cols >= SHORT_ROW;
                    match classify(layout, &self.grid) {
                        _ if layout.numel() == 0 => Kind::Fetched,
                        Class::Constant => Kind::Constant,
                        _ if instr.level == Level::Row => Kind::Fetched,
                        Class::Dense if memory => Kind::Memory(Place::Dense),
                        Class::Rows(stride) if memory && long => Kind::Memory(Place::Rows(stride)),
                        Class::Col { dense: true } if memory && (self.segmented || self.grid.cols >= REPEATED_ROW) => {
                            Kind::Memory(Place::Col)
                        }
                        Class::Col { .. } if !self.segmented => Kind::Col,
                        Class::Row(rows) if instr.dtype.compute() == DType::F32 && long => {
                            self.layouts[i] = Some(rows);
                            Kind::RowLoad
                        }
                        _ => Kind::Fetched,
                    }
                }
                Code::Spread(a) if self.kind[self.root[*a as usize]] == Kind::Constant => {
                    let a = self.root[*a as usize];
                    let view = self.constant(a);
                    self.constant_views.insert(i, view);
                    Kind::Constant
                }
                Code::Spread(_) => Kind::Spread,
                _ => Kind::Computed,
            };
            debug_assert!(size <= 8);
        }
    }

    fn size(&self, i: usize) -> usize {
        self.body[i].dtype.compute().size()
    }

    fn new_view(&mut self) -> View {
        self.next_view += 1;
        (self.next_view - 1) as View
    }

    fn constant(&mut self, i: usize) -> View {
        if let Some(&v) = self.constant_views.get(&i) {
            return v;
        }
        let view = self.new_view();
        if let Code::Load { source, layout } = &self.body[i].code {
            self.constants.push((view, Constant::new(*source, &layout.collapse(), self.body[i].dtype)));
        }
        self.constant_views.insert(i, view);
        view
    }

    fn load(&mut self, i: usize) -> u16 {
        if let Some(&l) = self.load_ids.get(&i) {
            return l;
        }
        if let (Code::Load { source, .. }, Some(layout)) = (&self.body[i].code, self.layouts[i]) {
            self.loads.push(Load::new(*source, layout, self.body[i].dtype, self.isa));
        }
        let id = (self.loads.len() - 1) as u16;
        self.load_ids.insert(i, id);
        self.cost +=
            if matches!(self.body[i].code, Code::Load { source: Source::Uniform { .. }, .. }) { 0.8 } else { 0.3 };
        id
    }

    /// A register of one element a row; made available in `list` or before it.
    fn row(&mut self, i: usize, list: &mut List) -> View {
        if let Some(&v) = self.row_ready.get(&i) {
            return v;
        }
        let view = self.new_row(i);
        match self.kind[i] {
            Kind::Constant => {
                let (from, kernel) = (self.constant(i), map::fill(self.size(i), self.isa));
                list.steps.push(Step::Run { kernel, out: view, args: [from; 3], form: Form::Row, round: None });
            }
            Kind::RowLoad | Kind::Fetched => {
                let load = self.load(i);
                list.steps.push(Step::Fetch { view, load, row: true });
            }
            _ => {}
        }
        view
    }

    fn new_row(&mut self, i: usize) -> View {
        let view = self.new_view();
        self.row_views.push((view, self.size(i), 0));
        self.row_ready.insert(i, view);
        view
    }

    fn new_tile(&mut self, i: usize, list: &mut List) -> View {
        let view = self.new_view();
        list.tiles.push((view, self.size(i)));
        view
    }

    /// A `Full` register as rows of elements, and whether a block of it is one run.
    fn vector(&mut self, i: usize, list: &mut List) -> (View, bool) {
        if let Some(&v) = list.ready.get(&i) {
            return (v, !matches!(self.kind[i], Kind::Memory(Place::Col | Place::Rows(_))));
        }
        let hoisted = self.hoisted_views.get(&i).copied();
        let (view, dense) = match self.kind[i] {
            Kind::Computed => match self.kept.get(&i) {
                Some((first, _)) if *first < self.phase => (self.keep(i, list), true),
                _ => unreachable!("this is a bug: register {i} is read before it is computed"),
            },
            Kind::Constant => (hoisted.unwrap_or_else(|| self.hoist_constant(i)), true),
            Kind::Col => {
                let dense = self.grid.cols < REPEATED_ROW;
                return (hoisted.unwrap_or_else(|| self.hoist_load(i)), dense);
            }
            Kind::Memory(place) => {
                let view = self.new_view();
                if let (Code::Load { source: Source::Value(v), .. }, Some(layout)) =
                    (&self.body[i].code, self.layouts[i])
                {
                    let size = self.size(i) as u8;
                    list.steps.push(Step::Bind { view, value: v.0, offset: layout.offset, size, place });
                }
                self.cost += 0.1;
                (view, matches!(place, Place::Dense))
            }
            Kind::Fetched => {
                let (view, load) = (self.new_tile(i, list), self.load(i));
                list.steps.push(Step::Fetch { view, load, row: false });
                (view, true)
            }
            Kind::Spread | Kind::RowLoad => {
                let source = match self.body[i].code {
                    Code::Spread(a) => self.root[a as usize],
                    _ => i,
                };
                let from = self.row(source, list);
                let (view, kernel) = (self.new_tile(i, list), map::fill(self.size(i), self.isa));
                list.steps.push(Step::Run { kernel, out: view, args: [from; 3], form: Form::Rows, round: None });
                self.cost += 0.04;
                (view, true)
            }
        };
        list.ready.insert(i, view);
        (view, dense)
    }

    fn hoist_constant(&mut self, i: usize) -> View {
        let (from, view) = (self.constant(i), self.new_view());
        let kernel = map::fill(self.size(i), self.isa);
        self.hoisted.push((view, self.size(i), HoistedKind::Fill(from, kernel)));
        self.hoisted_views.insert(i, view);
        view
    }

    fn hoist_load(&mut self, i: usize) -> View {
        let (load, view) = (self.load(i), self.new_view());
        let copies = if self.grid.cols < REPEATED_ROW { usize::MAX } else { 1 };
        self.hoisted.push((view, self.size(i), HoistedKind::Load(load, copies)));
        self.hoisted_views.insert(i, view);
        view
    }

    /// An f32 register as one number a row, if it is that: its view, and whether all rows share it.
    fn still(&mut self, i: usize, list: &mut List) -> Option<(View, bool)> {
        if self.body[i].dtype.compute() != DType::F32 {
            return None;
        }
        match self.kind[i] {
            Kind::Constant => Some((self.constant(i), true)),
            Kind::RowLoad => Some((self.row(i, list), false)),
            Kind::Spread if self.grid.cols >= SHORT_ROW => match self.body[i].code {
                Code::Spread(a) => Some((self.row(self.root[a as usize], list), false)),
                _ => None,
            },
            _ => None,
        }
    }

    /// A `Map` or `Cast` at level `Full` into view `out`.
    fn compute(&mut self, i: usize, out: View, list: &mut List) -> Result<()> {
        let instr = &self.body[i];
        let args: Vec<usize> = operands(&instr.code).into_iter().map(|a| self.root[a]).collect();
        let mut views = [0; 3];
        let mut flat = true;
        let (mut still, n) = (Still::NONE, args.len());
        for k in (0..n).rev() {
            let may = match n {
                2 => k == 1 || !still.y,
                3 => k > 0,
                _ => false,
            };
            let held = if may { self.still(args[k], list) } else { None };
            let (view, whole) = match held {
                Some(v) => {
                    if k + 1 == n {
                        still.y = true
                    } else {
                        still.x = true
                    }
                    v
                }
                None => self.vector(args[k], list),
            };
            views[k] = view;
            flat &= whole;
        }
        let first = views[0];
        views[n..].fill(first);
        let (kernel, round, cost) = self.function(i, &args, still)?;
        let form = if flat || self.segmented { Form::Flat } else { Form::Rows };
        list.steps.push(Step::Run { kernel, out, args: views, form, round });
        self.cost += cost;
        list.ready.insert(i, out);
        Ok(())
    }

    fn function(&self, i: usize, args: &[usize], still: Still) -> Result<(Kernel, Option<Kernel>, f64)> {
        let (instr, isa) = (&self.body[i], self.isa);
        let from = self.body[*args.last().ok_or_else(|| bug("no operands"))?].dtype;
        let round = cast::round(instr.dtype, isa);
        match instr.code {
            Code::Map(f, _) => {
                let kernel =
                    map::map(f, from, isa, still).ok_or_else(|| bug(&format!("{f:?} of {from} has no loop")))?;
                Ok((kernel, round.filter(|_| !is_exact(f)), 0.04 + 0.02 * f.flops() as f64))
            }
            _ => Ok((cast::cast(from, instr.dtype, isa), round.filter(|_| from.compute() == DType::F32), 0.05)),
        }
    }

    /// A `Map` or `Cast` at level `Row`.
    fn compute_row(&mut self, i: usize, list: &mut List) -> Result<()> {
        let args: Vec<usize> = operands(&self.body[i].code).into_iter().map(|a| self.root[a]).collect();
        let mut views = [0; 3];
        for (k, &a) in args.iter().enumerate() {
            views[k] = self.row(a, list);
        }
        let first = views[0];
        views[args.len()..].fill(first);
        let (kernel, round, _) = self.function(i, &args, Still::NONE)?;
        let out = self.new_row(i);
        list.steps.push(Step::Run { kernel, out, args: views, form: Form::Row, round });
        Ok(())
    }

    fn store(&mut self, i: usize, value: ValueId, list: &mut List) {
        let row = self.body[i].level == Level::Row;
        let view = if row { self.row(i, list) } else { self.vector(i, list).0 };
        let dtype = self.program.values[value.0 as usize].dtype;
        let kernel = cast::store(dtype, self.isa);
        list.steps.push(Step::Store { view, value: value.0, size: dtype.size() as u8, kernel, row });
        if !row {
            self.cost += 0.15;
        }
    }

    /// The `Full` registers that phase `p`, or the only one, reads or computes; of kept ones, what they are made from only
    /// in the phase that makes them.
    fn wanted(&self, p: usize, region: &Region_, needed: &[bool]) -> Vec<bool> {
        let mut wanted = vec![false; self.body.len()];
        for s in region.stores.iter().filter(|s| s.full) {
            wanted[s.reg] |= !self.segmented || s.phase == p;
        }
        for i in (0..self.body.len()).rev().filter(|i| needed[*i]) {
            let feeds = match self.body[i].code {
                Code::ReduceRow(..) => !self.segmented || self.depth[i] == p + 1,
                Code::ReduceCol(..) => !self.segmented || self.depth[i] == p,
                _ => {
                    let made = self.kept.get(&i).is_none_or(|k| k.0 == p);
                    made && wanted[i] && self.body[i].level == Level::Full && self.kind[i] == Kind::Computed
                }
            };
            if feeds {
                for a in operands(&self.body[i].code) {
                    wanted[self.root[a]] = true;
                }
            }
        }
        wanted
    }

    /// Chooses the registers that later phases take from memory: those that cost more to compute than to read.
    fn choose_kept(&mut self, last: usize, region: &Region_, needed: &[bool]) {
        let phases: Vec<Vec<bool>> = (0..=last).map(|p| self.wanted(p, region, needed)).collect();
        for i in 0..self.body.len() {
            let dear = match &self.body[i].code {
                Code::Map(f, _) => {
                    f.flops() >= 8 && self.body[i].level == Level::Full && self.kind[i] == Kind::Computed
                }
                _ => false,
            };
            let fits = (self.kept.len() + 1) * self.grid.cols * 8 <= KEPT_BYTES;
            let mut uses = (0..=last).filter(|p| phases[*p][i]);
            if let (true, true, Some(first), Some(_)) = (dear, fits, uses.next(), uses.next()) {
                self.kept.insert(i, (first, self.kept.len() as u16));
            }
        }
    }

    /// Points a new view at where register `i` is kept.
    fn keep(&mut self, i: usize, list: &mut List) -> View {
        let (view, slot, size) = (self.new_view(), self.kept[&i].1, self.size(i) as u8);
        list.steps.push(Step::Kept { view, slot, size });
        view
    }

    /// The steps of phase `p`, or of the only one.
    fn phase(&mut self, p: usize, region: &Region_, needed: &[bool]) -> Result<(List, Vec<u16>)> {
        let mut list = List::default();
        let mut reductions = Vec::new();
        self.phase = p;
        let here = |c: &Compiler, i: usize| !c.segmented || c.depth[i] == p;
        let wanted = self.wanted(p, region, needed);
        for i in 0..self.body.len() {
            if !needed[i] || self.root[i] != i {
                continue;
            }
            match (&self.body[i].code, self.body[i].level) {
                (Code::ReduceRow(f, a), _) if !self.segmented || self.depth[i] == p + 1 => {
                    let arg = self.vector(self.root[*a as usize], &mut list).0;
                    let dtype = self.body[i].dtype;
                    let loops = reduce::reduction(*f, dtype, self.isa);
                    let (out, round) = (self.new_row(i), cast::round(dtype, self.isa));
                    self.cost += 0.06;
                    if self.segmented {
                        let reduction = self.row_reductions.len() as u16;
                        let size = self.size(i);
                        self.row_reductions.push(RowReduction { loops, out, size, round, lanes: 0, total: 0 });
                        reductions.push(reduction);
                        list.steps.push(Step::Lanes { view: arg, reduction });
                    } else {
                        let kernel = loops.rows;
                        list.steps.push(Step::Run { kernel, out, args: [arg; 3], form: Form::Reduce, round });
                    }
                }
                (Code::ReduceCol(f, a), _) if here(self, i) => {
                    let arg = self.vector(self.root[*a as usize], &mut list).0;
                    let dtype = self.body[i].dtype;
                    let mut stores = Vec::new();
                    for s in region.stores.iter().filter(|s| s.reg == i) {
                        let d = self.program.values[s.value.0 as usize].dtype;
                        stores.push((s.value.0, d.size(), cast::store(d, self.isa)));
                    }
                    let reduction = self.col_reductions.len() as u16;
                    self.col_reductions.push(ColReduction {
                        loops: reduce::reduction(*f, dtype, self.isa),
                        size: self.size(i),
                        round: cast::round(dtype, self.isa),
                        stores,
                    });
                    list.steps.push(Step::Columns { view: arg, reduction });
                    self.cost += 0.06;
                }
                (Code::Map(..) | Code::Cast(_), Level::Row) if !self.segmented => self.compute_row(i, &mut list)?,
                (Code::Map(..) | Code::Cast(_), Level::Full)
                    if wanted[i] && self.kept.get(&i).is_none_or(|k| k.0 == p) =>
                {
                    self.full(i, p, region, &mut list)?;
                }
                _ => {}
            }
        }
        // Stores in place come last, and all that they store is in tiles before the first of them.
        let late = |s: &&Store_| {
            let now = if s.full { !self.segmented || s.phase == p } else { !s.col && !self.segmented };
            let recalled = self.kept.get(&s.reg).is_some_and(|k| k.0 < p);
            now && (s.in_place || recalled || self.kind[s.reg] != Kind::Computed || !s.full)
        };
        let (last, first): (Vec<&Store_>, Vec<&Store_>) = region.stores.iter().filter(late).partition(|s| s.in_place);
        for s in first {
            self.store(s.reg, s.value, &mut list);
        }
        for s in &last {
            self.vector(s.reg, &mut list);
        }
        for s in last {
            self.store(s.reg, s.value, &mut list);
        }
        Ok((list, reductions))
    }

    /// A computed `Full` register, straight into an output if it has one of its own.
    fn full(&mut self, i: usize, p: usize, region: &Region_, list: &mut List) -> Result<()> {
        let stores = || region.stores.iter().filter(|s| s.reg == i && !s.in_place && (!self.segmented || s.phase == p));
        let kept = self.kept.contains_key(&i);
        let direct = stores().next().filter(|_| !self.body[i].dtype.is_half() && !kept).map(|s| s.value);
        let rest: Vec<ValueId> = stores().map(|s| s.value).filter(|v| Some(*v) != direct).collect();
        match direct {
            Some(value) => {
                let (view, size) = (self.new_view(), self.size(i) as u8);
                list.steps.push(Step::Out { view, value: value.0, size });
                self.cost += 0.15;
                self.compute(i, view, list)?;
            }
            None => {
                let out = if kept { self.keep(i, list) } else { self.new_tile(i, list) };
                self.compute(i, out, list)?;
            }
        }
        for value in rest {
            self.store(i, value, list);
        }
        Ok(())
    }

    fn region(mut self, region: &ir::Region, needed: &[bool]) -> Result<Region> {
        let stores = self.stores(region, needed)?;
        for s in stores.iter().filter(|s| s.in_place) {
            if matches!(self.kind[s.reg], Kind::Memory(_)) {
                // Another store may overwrite the memory first.
                self.kind[s.reg] = Kind::Fetched;
            }
        }
        let region = Region_ { stores };
        let last = region.stores.iter().map(|s| s.phase).max().unwrap_or(0);
        let live: Vec<usize> = (0..self.body.len()).filter(|i| needed[*i] && self.root[*i] == *i).collect();
        let mut before = List::default();
        let mut lists = Vec::new();
        if self.segmented {
            for &i in &live {
                let row = self.body[i].level == Level::Row;
                match (&self.body[i].code, self.kind[i]) {
                    (Code::Load { .. }, Kind::RowLoad) => drop(self.row(i, &mut before)),
                    (Code::Load { .. }, _) if row => drop(self.row(i, &mut before)),
                    (Code::Map(..) | Code::Cast(_), _) if row && self.depth[i] == 0 => {
                        self.compute_row(i, &mut before)?
                    }
                    _ => {}
                }
            }
            self.choose_kept(last, &region, needed);
            for p in 0..=last {
                let (list, reductions) = self.phase(p, &region, needed)?;
                let mut rows = List::default();
                for &i in &live {
                    let map = matches!(self.body[i].code, Code::Map(..) | Code::Cast(_));
                    if map && self.body[i].level == Level::Row && self.depth[i] == p + 1 {
                        self.compute_row(i, &mut rows)?;
                    }
                }
                if p == last {
                    for s in region.stores.iter().filter(|s| !s.full && !s.col) {
                        self.store(s.reg, s.value, &mut rows);
                    }
                }
                lists.push((list, reductions, rows.steps));
            }
        } else {
            let (list, reductions) = self.phase(0, &region, needed)?;
            lists.push((list, reductions, Vec::new()));
        }
        if self.next_view > View::MAX as usize {
            return Err(bug("a region has too many registers"));
        }
        Ok(self.finish(before.steps, lists))
    }

    /// The stores in terms of roots, each with its phase.
    fn stores(&self, region: &ir::Region, needed: &[bool]) -> Result<Vec<Store_>> {
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
            // A row reduction of depth d is fed by phase d - 1.
            let phase = if level == Level::Row { self.depth[reg].saturating_sub(1) } else { self.depth[reg] };
            out.push(Store_ { reg, value, full: level == Level::Full, col: level == Level::Col, in_place, phase });
        }
        let last = out.iter().map(|s| s.phase).max().unwrap_or(0);
        for s in out.iter_mut().filter(|s| s.in_place) {
            s.phase = last;
        }
        Ok(out)
    }

    /// Scratch memory and the size of tiles.
    fn finish(mut self, before: Vec<Step>, lists: Vec<(List, Vec<u16>, Vec<Step>)>) -> Region {
        let slots: Vec<Slots> = lists.iter().map(|(l, ..)| Slots::assign(&l.steps, &l.tiles)).collect();
        let per_element =
            slots.iter().map(Slots::bytes).max().unwrap_or(0) + self.hoisted.iter().map(|h| h.1).sum::<usize>();
        let fit = L1_BYTES / per_element.max(8);
        let elements = (1usize << fit.max(1).ilog2()).clamp(MIN_TILE, MAX_TILE);
        let Grid { batch, rows, cols } = self.grid;
        let block_rows = if self.segmented { 1 } else { (elements / cols.max(1)).clamp(1, (batch * rows).max(1)) };
        let tile = if self.segmented { elements } else { block_rows * cols };

        let mut scratch = Layout_::default();
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
            scratch: end,
            kept: self.kept.len(),
            cost: self.cost,
        }
    }
}

/// What the compiler keeps of the region itself.
struct Region_ {
    stores: Vec<Store_>,
}

struct Store_ {
    reg: usize,
    value: ValueId,
    full: bool,
    col: bool,
    in_place: bool,
    phase: usize,
}

/// Offsets handed out one after the other, each on a cache line of its own.
#[derive(Default)]
struct Layout_ {
    at: usize,
}

impl Layout_ {
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
fn touched(s: &Step) -> Vec<View> {
    match s {
        Step::Bind { view, .. } | Step::Kept { view, .. } | Step::Fetch { view, .. } | Step::Out { view, .. } => {
            vec![*view]
        }
        Step::Run { out, args, .. } => vec![*out, args[0], args[1], args[2]],
        Step::Lanes { view, .. } | Step::Columns { view, .. } | Step::Store { view, .. } => vec![*view],
    }
}
