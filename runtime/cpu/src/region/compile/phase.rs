//! The steps of one phase: what it must compute, what it takes from earlier phases, and where results go.

use super::*;

impl Compiler<'_> {
    /// The `Full` registers that phase `p`, or the only one, reads or computes; of kept ones, what they are made from only
    /// in the phase that makes them.
    pub(super) fn wanted(&self, p: usize, outputs: &[Output], needed: &[bool]) -> Vec<bool> {
        let mut wanted = vec![false; self.body.len()];
        for s in outputs.iter().filter(|s| s.full) {
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
    pub(super) fn choose_kept(&mut self, last: usize, outputs: &[Output], needed: &[bool]) {
        let phases: Vec<Vec<bool>> = (0..=last).map(|p| self.wanted(p, outputs, needed)).collect();
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
    pub(super) fn keep(&mut self, i: usize, list: &mut List) -> View {
        let (view, slot, size) = (self.new_view(), self.kept[&i].1, self.size(i) as u8);
        list.steps.push(Step::Kept { view, slot, size });
        view
    }

    /// The steps of phase `p`, or of the only one.
    pub(super) fn phase(&mut self, p: usize, outputs: &[Output], needed: &[bool]) -> Result<(List, Vec<u16>)> {
        let mut list = List::default();
        let mut reductions = Vec::new();
        self.phase = p;
        let here = |c: &Compiler, i: usize| !c.segmented || c.depth[i] == p;
        let wanted = self.wanted(p, outputs, needed);
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
                        let link = match f {
                            ReduceFn::Sum if dtype == DType::F32 => Some(Linked::Sum),
                            ReduceFn::Max if dtype == DType::F32 => Some(Linked::Max),
                            _ => None,
                        };
                        list.steps.push(Step::Run { kernel, out, args: [arg; 3], form: Form::Reduce, round, link });
                    }
                }
                (Code::ReduceCol(f, a), _) if here(self, i) => {
                    let arg = self.vector(self.root[*a as usize], &mut list).0;
                    let dtype = self.body[i].dtype;
                    let mut stores = Vec::new();
                    for s in outputs.iter().filter(|s| s.reg == i) {
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
                    self.full(i, p, outputs, &mut list)?;
                }
                _ => {}
            }
        }
        // Stores in place come last, and all that they store is in tiles before the first of them.
        let late = |s: &&Output| {
            let now = if s.full { !self.segmented || s.phase == p } else { !s.col && !self.segmented };
            let recalled = self.kept.get(&s.reg).is_some_and(|k| k.0 < p);
            now && (s.in_place || recalled || self.kind[s.reg] != Kind::Computed || !s.full)
        };
        let (last, first): (Vec<&Output>, Vec<&Output>) = outputs.iter().filter(late).partition(|s| s.in_place);
        for s in first {
            self.store(s.reg, s.value, &mut list);
        }
        for s in &last {
            self.vector(s.reg, &mut list);
        }
        for s in last {
            self.store(s.reg, s.value, &mut list);
        }
        self.chains(&mut list);
        self.relay = self.relay(&mut list);
        Ok((list, reductions))
    }

    /// A computed `Full` register, straight into an output if it has one of its own.
    pub(super) fn full(&mut self, i: usize, p: usize, outputs: &[Output], list: &mut List) -> Result<()> {
        let stores = || outputs.iter().filter(|s| s.reg == i && !s.in_place && (!self.segmented || s.phase == p));
        let kept = self.kept.contains_key(&i);
        let direct = stores().next().filter(|_| !self.body[i].dtype.is_half() && !kept).map(|s| s.value);
        let rest: Vec<ValueId> = stores().map(|s| s.value).filter(|v| Some(*v) != direct).collect();
        match direct {
            Some(value) => {
                let (view, size) = (self.new_view(), self.size(i) as u8);
                list.steps.push(Step::Out { view, value: value.0, size });
                self.cost += 0.1;
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
}
