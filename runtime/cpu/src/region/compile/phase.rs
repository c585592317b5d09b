//! Emits the ops of one phase, a pass over the rows between two reductions: the registers it computes, those it reads from earlier phases, and the stores of its
//! results.

use super::*;

impl Compiler<'_> {
    /// The `Full` registers that phase `p`, or the only phase, reads or computes. The operands of a saved register
    /// belong only to the phase that computes it.
    pub(super) fn live_registers(&self, p: usize, outputs: &[StoreTarget], needed: &[bool]) -> Vec<bool> {
        let mut live_registers = vec![false; self.body.len()];
        for s in outputs.iter().filter(|s| s.full) {
            live_registers[s.reg] |= !self.segmented || s.phase == p;
        }
        for i in (0..self.body.len()).rev().filter(|i| needed[*i]) {
            let feeds = match self.body[i].code {
                Code::ReduceRow(..) => !self.segmented || self.depth[i] == p + 1,
                Code::ReduceCol(..) => !self.segmented || self.depth[i] == p,
                _ => {
                    let made = self.saved.get(&i).is_none_or(|k| k.0 == p);
                    made && live_registers[i] && self.body[i].level == Level::Full && self.def[i] == RegDef::Computed
                }
            };
            if feeds {
                for a in operands(&self.body[i].code) {
                    live_registers[self.root[a]] = true;
                }
            }
        }
        live_registers
    }

    /// Chooses the registers that are saved for later phases: those that cost more to recompute than to load.
    pub(super) fn choose_saved(&mut self, last: usize, outputs: &[StoreTarget], needed: &[bool]) {
        let phases: Vec<Vec<bool>> = (0..=last).map(|p| self.live_registers(p, outputs, needed)).collect();
        for i in 0..self.body.len() {
            let expensive = match &self.body[i].code {
                Code::Map(f, _) => {
                    f.flops() >= 8 && self.body[i].level == Level::Full && self.def[i] == RegDef::Computed
                }
                _ => false,
            };
            let fits = (self.saved.len() + 1) * self.space.cols * 8 <= SAVED_BYTES;
            let mut uses = (0..=last).filter(|p| phases[*p][i]);
            if let (true, true, Some(first), Some(_)) = (expensive, fits, uses.next(), uses.next()) {
                self.saved.insert(i, (first, self.saved.len() as u16));
            }
        }
    }

    /// Binds a new view to the memory that register `i` is saved in.
    pub(super) fn bind_saved(&mut self, i: usize, list: &mut List) -> View {
        let (view, slot, size) = (self.new_view(), self.saved[&i].1, self.size(i) as u8);
        list.ops.push(TileOp::BindSaved { view, slot, size });
        view
    }

    /// Emits phase `p`, or the only phase.
    pub(super) fn phase(&mut self, p: usize, outputs: &[StoreTarget], needed: &[bool]) -> Result<(List, Vec<u16>)> {
        let mut list = List::default();
        let mut reductions = Vec::new();
        self.phase = p;
        let here = |c: &Compiler, i: usize| !c.segmented || c.depth[i] == p;
        let live_registers = self.live_registers(p, outputs, needed);
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
                        list.ops.push(TileOp::ReduceLanes { view: arg, reduction });
                    } else {
                        let kernel = loops.rows;
                        let fusable = match f {
                            ReduceFn::Sum if dtype == DType::F32 => Some(Fusable::Sum),
                            ReduceFn::Max if dtype == DType::F32 => Some(Fusable::Max),
                            _ => None,
                        };
                        list.ops.push(TileOp::Loop {
                            kernel,
                            out,
                            args: [arg; 3],
                            shape: LoopShape::Reduce,
                            round,
                            fusable,
                        });
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
                    list.ops.push(TileOp::ReduceColumns { view: arg, reduction });
                    self.cost += 0.06;
                }
                (Code::Map(..) | Code::Cast(_), Level::Row) if !self.segmented => self.compute_row(i, &mut list)?,
                (Code::Map(..) | Code::Cast(_), Level::Full)
                    if live_registers[i] && self.saved.get(&i).is_none_or(|k| k.0 == p) =>
                {
                    self.full(i, p, outputs, &mut list)?;
                }
                _ => {}
            }
        }
        // In-place stores come last, and their registers are in tiles before the first of them.
        let late = |s: &&StoreTarget| {
            let now = if s.full { !self.segmented || s.phase == p } else { !s.col && !self.segmented };
            let saved_earlier = self.saved.get(&s.reg).is_some_and(|k| k.0 < p);
            now && (s.in_place || saved_earlier || self.def[s.reg] != RegDef::Computed || !s.full)
        };
        let (last, first): (Vec<&StoreTarget>, Vec<&StoreTarget>) =
            outputs.iter().filter(late).partition(|s| s.in_place);
        for s in first {
            self.store(s.reg, s.value, &mut list);
        }
        for s in &last {
            self.vector(s.reg, &mut list);
        }
        for s in last {
            self.store(s.reg, s.value, &mut list);
        }
        self.fuse(&mut list);
        self.pipeline = self.pipeline(&mut list);
        Ok((list, reductions))
    }

    /// Computes a `Full` register, directly into an output if no conversion is needed.
    pub(super) fn full(&mut self, i: usize, p: usize, outputs: &[StoreTarget], list: &mut List) -> Result<()> {
        let stores = || outputs.iter().filter(|s| s.reg == i && !s.in_place && (!self.segmented || s.phase == p));
        let saved = self.saved.contains_key(&i);
        let direct = stores().next().filter(|_| !self.body[i].dtype.is_half() && !saved).map(|s| s.value);
        let rest: Vec<ValueId> = stores().map(|s| s.value).filter(|v| Some(*v) != direct).collect();
        match direct {
            Some(value) => {
                let (view, size) = (self.new_view(), self.size(i) as u8);
                list.ops.push(TileOp::BindOutput { view, value: value.0, size });
                self.cost += 0.1;
                self.compute(i, view, list)?;
            }
            None => {
                let out = if saved { self.bind_saved(i, list) } else { self.new_tile(i, list) };
                self.compute(i, out, list)?;
            }
        }
        for value in rest {
            self.store(i, value, list);
        }
        Ok(())
    }
}
