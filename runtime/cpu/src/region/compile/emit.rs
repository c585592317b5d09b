//! Emits single registers and ops: each register in the form that its readers need, at its first use.

use super::*;

impl Compiler<'_> {
    pub(super) fn size(&self, i: usize) -> usize {
        self.body[i].dtype.compute().size()
    }

    pub(super) fn is_f32(&self, i: usize) -> bool {
        self.body[i].dtype.compute() == DType::F32
    }

    pub(super) fn new_view(&mut self) -> View {
        self.next_view += 1;
        (self.next_view - 1) as View
    }

    pub(super) fn constant(&mut self, i: usize) -> View {
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

    pub(super) fn load(&mut self, i: usize) -> u16 {
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

    /// Returns a register with one element per row, bound in `list` or before it.
    pub(super) fn row(&mut self, i: usize, list: &mut List) -> View {
        if let Some(&v) = self.row_ready.get(&i) {
            return v;
        }
        let view = self.new_row(i);
        match self.def[i] {
            RegDef::Constant => {
                let (from, kernel) = (self.constant(i), map::fill(self.size(i), self.isa));
                list.ops.push(TileOp::Loop {
                    kernel,
                    out: view,
                    args: [from; 3],
                    shape: LoopShape::PerRow,
                    round: None,
                    fusable: None,
                });
            }
            RegDef::RowScalar | RegDef::Gathered => {
                let load = self.load(i);
                list.ops.push(TileOp::Gather { view, load, row: true });
            }
            _ => {}
        }
        view
    }

    pub(super) fn new_row(&mut self, i: usize) -> View {
        let view = self.new_view();
        self.row_views.push((view, self.size(i), 0));
        self.row_ready.insert(i, view);
        view
    }

    pub(super) fn new_tile(&mut self, i: usize, list: &mut List) -> View {
        let view = self.new_view();
        list.tiles.push((view, self.size(i)));
        view
    }

    /// Returns a `Full` register as rows of elements, and whether a block of it is one contiguous run.
    pub(super) fn vector(&mut self, i: usize, list: &mut List) -> (View, bool) {
        if let Some(&v) = list.ready.get(&i) {
            return (v, !matches!(self.def[i], RegDef::Memory(RowStride::Zero | RowStride::Elements(_))));
        }
        let hoisted = self.hoisted_views.get(&i).copied();
        let (view, dense) = match self.def[i] {
            RegDef::Computed => match self.saved.get(&i) {
                Some((first, _)) if *first < self.phase => (self.bind_saved(i, list), true),
                _ => unreachable!("this is a bug: register {i} is read before it is computed"),
            },
            RegDef::Constant => (hoisted.unwrap_or_else(|| self.hoist_constant(i)), true),
            RegDef::ColumnVector => {
                let dense = self.space.cols < REPEATED_ROW;
                return (hoisted.unwrap_or_else(|| self.hoist_load(i)), dense);
            }
            RegDef::Memory(stride) => {
                let view = self.new_view();
                if let (Code::Load { source: Source::Value(v), .. }, Some(layout)) =
                    (&self.body[i].code, self.layouts[i])
                {
                    let size = self.size(i) as u8;
                    list.ops.push(TileOp::Bind { view, value: v.0, offset: layout.offset, size, stride });
                }
                self.cost += 0.06;
                (view, matches!(stride, RowStride::Dense))
            }
            RegDef::Gathered => {
                let (view, load) = (self.new_tile(i, list), self.load(i));
                list.ops.push(TileOp::Gather { view, load, row: false });
                (view, true)
            }
            RegDef::Broadcast | RegDef::RowScalar => {
                let source = match self.body[i].code {
                    Code::Broadcast(a) => self.root[a as usize],
                    _ => i,
                };
                let from = self.row(source, list);
                let (view, kernel) = (self.new_tile(i, list), map::fill(self.size(i), self.isa));
                list.ops.push(TileOp::Loop {
                    kernel,
                    out: view,
                    args: [from; 3],
                    shape: LoopShape::Rows,
                    round: None,
                    fusable: None,
                });
                self.cost += 0.04;
                (view, true)
            }
        };
        list.ready.insert(i, view);
        (view, dense)
    }

    pub(super) fn hoist_constant(&mut self, i: usize) -> View {
        let (from, view) = (self.constant(i), self.new_view());
        let kernel = map::fill(self.size(i), self.isa);
        self.hoisted.push((view, self.size(i), HoistedSource::Fill(from, kernel)));
        self.hoisted_views.insert(i, view);
        view
    }

    pub(super) fn hoist_load(&mut self, i: usize) -> View {
        let (load, view) = (self.load(i), self.new_view());
        let copies = if self.space.cols < REPEATED_ROW { usize::MAX } else { 1 };
        self.hoisted.push((view, self.size(i), HoistedSource::Load(load, copies)));
        self.hoisted_views.insert(i, view);
        view
    }

    /// Returns an f32 register as a row broadcast, if it is one: its view, and whether all rows share one value.
    pub(super) fn broadcast(&mut self, i: usize, list: &mut List) -> Option<(View, bool)> {
        if self.body[i].dtype.compute() != DType::F32 {
            return None;
        }
        match self.def[i] {
            RegDef::Constant => Some((self.constant(i), true)),
            RegDef::RowScalar => Some((self.row(i, list), false)),
            RegDef::Broadcast if self.space.cols >= SHORT_ROW => match self.body[i].code {
                Code::Broadcast(a) => Some((self.row(self.root[a as usize], list), false)),
                _ => None,
            },
            _ => None,
        }
    }

    /// Emits a `Map` or `Cast` at level `Full` into view `out`.
    pub(super) fn compute(&mut self, i: usize, out: View, list: &mut List) -> Result<()> {
        let instr = &self.body[i];
        let args: Vec<usize> = operands(&instr.code).into_iter().map(|a| self.root[a]).collect();
        let mut views = [0; 3];
        let mut flat = true;
        let (mut broadcast, n) = (RowBroadcast::NONE, args.len());
        for k in (0..n).rev() {
            let may = match n {
                2 => k == 1 || !broadcast.y,
                3 => k > 0,
                _ => false,
            };
            let row_value = if may { self.broadcast(args[k], list) } else { None };
            let (view, whole) = match row_value {
                Some(v) => {
                    if k + 1 == n {
                        broadcast.y = true
                    } else {
                        broadcast.x = true
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
        let (kernel, round, cost) = self.function(i, &args, broadcast)?;
        let shape = if flat || self.segmented { LoopShape::Flat } else { LoopShape::Rows };
        let fusable = match self.body[i].code {
            Code::Map(f, _) if self.body[i].dtype == DType::F32 && args.iter().all(|a| self.is_f32(*a)) => {
                Some(Fusable::Map(f, broadcast))
            }
            _ => None,
        };
        list.ops.push(TileOp::Loop { kernel, out, args: views, shape, round, fusable });
        self.cost += cost;
        list.ready.insert(i, out);
        Ok(())
    }

    pub(super) fn function(
        &self,
        i: usize,
        args: &[usize],
        broadcast: RowBroadcast,
    ) -> Result<(Kernel, Option<Kernel>, f64)> {
        let (instr, isa) = (&self.body[i], self.isa);
        let from = self.body[*args.last().ok_or_else(|| bug("no operands"))?].dtype;
        let round = cast::round(instr.dtype, isa);
        match instr.code {
            Code::Map(f, _) => {
                let kernel =
                    map::map(f, from, isa, broadcast).ok_or_else(|| bug(&format!("{f:?} of {from} has no loop")))?;
                Ok((kernel, round.filter(|_| !f.is_exact()), 0.04 + 0.02 * f.flops() as f64))
            }
            _ => Ok((cast::cast(from, instr.dtype, isa), round.filter(|_| from.compute() == DType::F32), 0.05)),
        }
    }

    /// Emits a `Map` or `Cast` at level `Row`.
    pub(super) fn compute_row(&mut self, i: usize, list: &mut List) -> Result<()> {
        let args: Vec<usize> = operands(&self.body[i].code).into_iter().map(|a| self.root[a]).collect();
        let mut views = [0; 3];
        for (k, &a) in args.iter().enumerate() {
            views[k] = self.row(a, list);
        }
        let first = views[0];
        views[args.len()..].fill(first);
        let (kernel, round, _) = self.function(i, &args, RowBroadcast::NONE)?;
        let out = self.new_row(i);
        list.ops.push(TileOp::Loop { kernel, out, args: views, shape: LoopShape::PerRow, round, fusable: None });
        Ok(())
    }

    pub(super) fn store(&mut self, i: usize, value: ValueId, list: &mut List) {
        let row = self.body[i].level == Level::Row;
        let view = if row { self.row(i, list) } else { self.vector(i, list).0 };
        let dtype = self.program.values[value.0 as usize].dtype;
        let kernel = cast::store(dtype, self.isa);
        list.ops.push(TileOp::Store { view, value: value.0, size: dtype.size() as u8, kernel, row });
        if !row {
            self.cost += 0.15;
        }
    }
}
