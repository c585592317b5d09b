//! Builds a program from clusters: registers, kernel order, storage.

use crate::fuse::{self, Assignment, Fusion};
use crate::horizontal_fusion;
use crate::ir::*;
use crate::lower::Lowered;
use crate::memory;
use crate::trace::Trace;
use perilune_core::graph::NodeId;
use perilune_core::ops::{Class, Generator, create};
use perilune_core::{DType, Layout, Shape};
use smallvec::{SmallVec, smallvec};
use std::collections::{BTreeSet, BinaryHeap, HashMap, HashSet};

/// Builds the program of a fused step; without `fusion`, every region stays a launch of its own.
pub fn build(low: &Lowered, f: &Fusion, trace: &Trace, fusion: bool) -> Program {
    let mut b = Builder {
        low,
        f,
        values: Vec::new(),
        value_of: HashMap::new(),
        control_deps: ControlDeps::new(),
        program: Program {
            values: Vec::new(),
            kernels: Vec::new(),
            inputs: trace.metas.clone(),
            outputs: Vec::new(),
            slots: trace.slot_dtypes.clone(),
            results: Vec::new(),
            arena_bytes: 0,
            live_bytes: 0,
        },
    };
    b.name_values(trace);
    let mut kernels = b.kernels();
    if fusion {
        let values = |ids: &[NodeId]| ids.iter().map(|id| b.value_of[id]).collect();
        horizontal_fusion::epilogues(
            &mut kernels,
            &b.values,
            &b.control_deps,
            &values(&low.roots),
            &values(&low.state_writes),
        );
    }
    b.program.kernels = sort(kernels, &b.values, &b.control_deps, fusion);
    b.results();
    b.state_writes(trace);
    let Builder { values, mut program, .. } = b;
    program.values = values;
    memory::assign(&mut program);
    program
}

struct Builder<'a> {
    low: &'a Lowered,
    f: &'a Fusion,
    values: Vec<Value>,
    value_of: HashMap<NodeId, ValueId>,
    control_deps: ControlDeps,
    program: Program,
}

/// Values by the values that may not be made before them (see `Lowered::control_deps`).
pub(crate) type ControlDeps = HashMap<ValueId, SmallVec<[ValueId; 2]>>;

/// Marks a value that has no storage yet.
pub(crate) const UNPLACED: Storage = Storage::Arena(usize::MAX);

impl Builder<'_> {
    fn add_value(&mut self, id: NodeId, storage: Storage) -> ValueId {
        let node = self.low.graph.node(id);
        let v = ValueId(self.values.len() as u32);
        self.values.push(Value {
            shape: node.shape,
            dtype: node.dtype,
            storage,
            origin: Origin(self.low.graph.loc_of(id).0),
        });
        self.value_of.insert(id, v);
        v
    }

    fn name_values(&mut self, trace: &Trace) {
        for (k, (shape, dtype)) in trace.metas.iter().enumerate() {
            let origin = Origin::NONE;
            self.values.push(Value { shape: *shape, dtype: *dtype, storage: Storage::Input(k as u32), origin });
        }
        for (&id, &k) in &self.low.inputs {
            self.value_of.insert(id, ValueId(k));
        }
        for id in self.low.graph.ids() {
            // Not what lies in another's buffer.
            let owner = self.low.views[id.index()].0 == id;
            if owner && self.f.stored[id.index()] && !matches!(self.f.assignment[id.index()], Assignment::None) {
                self.add_value(id, UNPLACED);
            }
        }
    }

    /// All kernels with the recording position they are anchored at, in no particular order.
    fn kernels(&mut self) -> Vec<(u32, Kernel)> {
        let mut out = Vec::new();
        let g = &self.low.graph;
        let mut parts: HashMap<NodeId, Vec<(usize, NodeId)>> = HashMap::new();
        for id in g.ids() {
            let node = g.node(id);
            if node.op == &create::TUPLE_GET && self.value_of.contains_key(&self.low.views[id.index()].0) {
                parts.entry(node.inputs[0]).or_default().push((node.attrs[0] as usize, id));
            }
        }
        for id in g.ids() {
            let node = g.node(id);
            if !matches!(self.f.assignment[id.index()], Assignment::Library { .. })
                || matches!(node.op.class, Class::TupleGet)
            {
                continue;
            }
            let lies = |id: NodeId| {
                let (base, layout) = self.low.views[id.index()];
                (self.value_of[&base], layout)
            };
            let mut outputs = vec![lies(id)];
            let mut wanted = parts.remove(&id).unwrap_or_default();
            wanted.sort_unstable();
            for (k, part) in wanted {
                outputs.resize(outputs.len().max(k), (ValueId::NONE, Layout::contiguous(Shape::SCALAR)));
                outputs.push(lies(part));
            }
            let (outputs, layouts): (Vec<ValueId>, Vec<Layout>) = outputs.into_iter().unzip();
            let inputs = node.inputs.iter().map(|x| self.operand(*x)).collect();
            let dtypes = node.inputs.iter().map(|x| g.dtype(*x)).collect();
            self.hold(outputs[0], id);
            let (op, attrs, origin) = (node.op, node.attrs.clone(), Origin(g.loc_of(id).0));
            let call = Library { op, attrs, inputs, dtypes, outputs, layouts, epilogue: None, tf32: node.tf32, origin };
            out.push((id.0, Kernel::Library(call)));
        }
        for k in 0..self.f.clusters.len() {
            if let Some((anchor, region)) = self.region(k) {
                out.push((anchor, Kernel::Region(region)));
            }
        }
        out
    }

    /// Notes that `made` is not to be made before what node `id` waits for.
    fn hold(&mut self, made: ValueId, id: NodeId) {
        for w in self.low.control_deps(id) {
            let base = self.low.views[w.index()].0;
            self.control_deps.entry(made).or_default().push(self.value_of[&base]);
        }
    }

    fn operand(&self, x: NodeId) -> Operand {
        let g = &self.low.graph;
        let (base, layout) = self.low.views[x.index()];
        match g.generator(base) {
            Some(_) => Operand::Constant(g.node(base).attrs[0] as u64, g.shape(x), g.dtype(x)),
            None => Operand::View(self.value_of[&base], layout),
        }
    }

    /// The region of cluster `k`, if it stores anything.
    fn region(&mut self, k: usize) -> Option<(u32, Region)> {
        let (low, f) = (self.low, self.f);
        let g = &low.graph;
        let cluster = &f.clusters[k];
        let mut roots: Vec<NodeId> = cluster.nodes.iter().copied().filter(|id| f.stored[id.index()]).collect();
        if roots.is_empty() {
            return None;
        }
        roots.sort_unstable();
        let (batch, rows, cols) = cluster.space();
        let anchor = roots[roots.len() - 1].0;
        let mut region =
            Region { batch, rows, cols, body: Vec::new(), stores: Vec::new(), origin: Origin(g.loc_of(roots[0]).0) };
        // Which nodes are computed here: those stored, and what they need through registers or by recomputation.
        let mut here: HashSet<NodeId> = roots.iter().copied().collect();
        let mut queue: BinaryHeap<NodeId> = roots.iter().copied().collect();
        let mut ordered = Vec::new();
        while let Some(id) = queue.pop() {
            ordered.push(id);
            for (base, layout) in fuse::reads(low, id) {
                if self.computed_here(k, id, base, &layout) && here.insert(base) {
                    queue.push(base);
                }
            }
        }
        ordered.reverse();
        let mut regs: HashMap<NodeId, Reg> = HashMap::new();
        let mut memo: HashMap<Memo, Reg> = HashMap::new();
        for id in ordered {
            self.hold(self.value_of[&roots[0]], id);
            let node = g.node(id);
            let origin = Origin(g.loc_of(id).0);
            let n = fuse::source_numel(low, id);
            let level = match f.cluster_of(id) == Some(k) {
                true => f.level[id.index()],
                // Computed again here: by size, since a row is longer than one element.
                false if n == cluster.numel => Level::Full,
                false => Level::Row,
            };
            let operand_level = if matches!(node.op.class, Class::Reduce(_)) { Level::Full } else { level };
            let mut args: SmallVec<[Reg; 3]> = SmallVec::new();
            for (i, (base, layout)) in fuse::reads(low, id).into_iter().enumerate() {
                let dtype = g.dtype(node.inputs[i]);
                let reg = if self.computed_here(k, id, base, &layout) {
                    let from = regs[&base];
                    if region.body[from as usize].level == Level::Row && operand_level == Level::Full {
                        emit(&mut region, &mut memo, Code::Broadcast(from), dtype, Level::Full, origin)
                    } else {
                        from
                    }
                } else {
                    let source = self.source(base);
                    emit(&mut region, &mut memo, Code::Load { source, layout }, dtype, operand_level, origin)
                };
                args.push(reg);
            }
            if matches!(node.op.class, Class::Library) {
                // Rows to be filled up: as they are, stored to a value of longer rows.
                regs.insert(id, args[0]);
                continue;
            }
            let code = match node.op.class {
                Class::Map(m) => Code::Map(m, args),
                Class::Cast => Code::Cast(args[0]),
                Class::Reduce(r) if level == Level::Col => Code::ReduceCol(r, args[0]),
                Class::Reduce(r) => Code::ReduceRow(r, args[0]),
                _ => unreachable!("this is a bug: {} in a region", node.op.name),
            };
            let reg = emit(&mut region, &mut memo, code, node.dtype, level, origin);
            regs.insert(id, reg);
        }
        region.stores = roots.iter().map(|id| (regs[id], self.value_of[id])).collect();
        Some((anchor, region))
    }

    /// Whether `base`, read by `id` in cluster `k`, is a register there.
    fn computed_here(&self, k: usize, id: NodeId, base: NodeId, layout: &Layout) -> bool {
        if !matches!(self.f.assignment[base.index()], Assignment::Cluster(_)) {
            return false;
        }
        fuse::in_register(self.low, self.f, k, base, layout, fuse::source_numel(self.low, id))
            || !self.f.stored[base.index()]
    }

    fn source(&self, base: NodeId) -> Source {
        let g = &self.low.graph;
        let node = g.node(base);
        match g.generator(base) {
            None => Source::Value(self.value_of[&base]),
            Some(Generator::Scalar) => Source::Slot(self.low.slots[&base]),
            Some(Generator::Constant) => Source::Constant(node.attrs[0] as u64),
            Some(Generator::Iota) => Source::Iota,
            Some(Generator::Uniform) => {
                Source::Uniform { seed: self.low.slots[&node.inputs[0]], counter: self.low.slots[&node.inputs[1]] }
            }
        }
    }

    /// Gives each root an output buffer, or names the input it is.
    fn results(&mut self) {
        let mut outputs: HashMap<ValueId, u32> = HashMap::new();
        for id in &self.low.roots {
            let v = self.value_of[id];
            let result = match self.values[v.0 as usize].storage {
                Storage::Input(k) => Root::Input(k),
                _ => {
                    let next = self.program.outputs.len() as u32;
                    let o = *outputs.entry(v).or_insert(next);
                    if o == next {
                        self.program.outputs.push(self.values[v.0 as usize].nbytes());
                        self.values[v.0 as usize].storage = Storage::Output(o);
                    }
                    Root::Output(o)
                }
            };
            self.program.results.push(result);
        }
    }

    /// Lets each commit's value be computed in the State's own memory where nothing still reads the old one; else
    /// copies it there at the end.
    fn state_writes(&mut self, trace: &Trace) {
        let mut writer: HashMap<ValueId, usize> = HashMap::new();
        let mut readers: HashMap<ValueId, Vec<usize>> = HashMap::new();
        for (k, kernel) in self.program.kernels.iter().enumerate() {
            for v in kernel.writes() {
                writer.insert(v, k);
            }
            for v in kernel.reads() {
                readers.entry(v).or_default().push(k);
            }
        }
        let mut copies = Vec::new();
        for (id, &input) in self.low.state_writes.iter().zip(&trace.state_write_inputs) {
            let (v, state) = (self.value_of[id], ValueId(input));
            let free = self.values[v.0 as usize].storage == UNPLACED;
            let at = writer.get(&v).copied().unwrap_or(usize::MAX);
            let safe = free
                && readers
                    .get(&state)
                    .into_iter()
                    .flatten()
                    .all(|&r| r < at || (r == at && in_place(&self.program.kernels[r], v, state)));
            if safe {
                self.values[v.0 as usize].storage = Storage::Input(input);
            } else {
                copies.push((v, state));
            }
        }
        // Values first, then copies: a copy must not change what another kernel still reads.
        for (v, state) in copies {
            let value = &self.values[v.0 as usize];
            let (n, dtype, origin) = (value.shape.numel(), value.dtype, value.origin);
            let layout = Layout::contiguous(value.shape).collapse();
            let load = Code::Load { source: Source::Value(v), layout };
            let body = vec![Instr { code: load, dtype, level: Level::Full, origin }];
            let region = Region { batch: 1, rows: 1, cols: n, body, stores: vec![(0, state)], origin };
            self.program.kernels.push(Kernel::Region(region));
        }
    }
}

/// Whether kernel `k` may write `v` over `old`, which it reads: element for element only.
fn in_place(k: &Kernel, v: ValueId, old: ValueId) -> bool {
    if let Kernel::Library(l) = k
        && l.inputs.iter().any(|o| matches!(o, Operand::View(x, _) if *x == old))
    {
        return false;
    }
    k.regions().iter().all(|r| {
        if !r.writes().any(|s| s == v) {
            // Beside the one that writes, in no order.
            return r.reads().all(|x| x != old);
        }
        let full = |reg: &Reg| r.body[*reg as usize].level == Level::Full;
        let n = r.numel();
        r.stores.iter().all(|(reg, s)| *s != v || full(reg))
            && r.body.iter().all(|i| match &i.code {
                Code::Load { source: Source::Value(x), layout } if *x == old => {
                    i.level == Level::Full && fuse::reading(layout, n, n) == fuse::Reading::Same
                }
                _ => true,
            })
    })
}

/// What makes two instructions the same.
#[derive(PartialEq, Eq, Hash)]
enum Memo {
    Load(Source, Layout, DType, Level),
    Broadcast(Reg),
}

fn emit(
    region: &mut Region,
    memo: &mut HashMap<Memo, Reg>,
    code: Code,
    dtype: DType,
    level: Level,
    origin: Origin,
) -> Reg {
    let key = match &code {
        Code::Load { source, layout } => Some(Memo::Load(*source, *layout, dtype, level)),
        Code::Broadcast(r) => Some(Memo::Broadcast(*r)),
        _ => None,
    };
    if let Some(found) = key.as_ref().and_then(|k| memo.get(k)) {
        return *found;
    }
    let reg = region.body.len() as Reg;
    region.body.push(Instr { code, dtype, level, origin });
    if let Some(key) = key {
        memo.insert(key, reg);
    }
    reg
}

/// Puts kernels in an order that respects reads and writes; among the ready ones, the earliest recorded first. With
/// `group`, like kernels that are ready together run as one.
fn sort(kernels: Vec<(u32, Kernel)>, values: &[Value], control_deps: &ControlDeps, group: bool) -> Vec<Kernel> {
    let mut writer: Vec<Option<usize>> = vec![None; values.len()];
    for (k, (_, kernel)) in kernels.iter().enumerate() {
        for v in kernel.writes() {
            writer[v.0 as usize] = Some(k);
        }
    }
    let mut users: Vec<SmallVec<[usize; 4]>> = vec![smallvec![]; kernels.len()];
    let mut waits = vec![0usize; kernels.len()];
    for (k, (_, kernel)) in kernels.iter().enumerate() {
        let mut from = kernel.reads();
        if !control_deps.is_empty() {
            from.extend(kernel.writes().iter().filter_map(|v| control_deps.get(v)).flatten());
        }
        let mut from: Vec<usize> = from.iter().filter_map(|v| writer[v.0 as usize]).collect();
        from.sort_unstable();
        from.dedup();
        waits[k] = from.len();
        for w in from {
            users[w].push(k);
        }
    }
    let movable = if group { horizontal_fusion::movable(&kernels, values) } else { vec![false; kernels.len()] };
    let mut ready = Ready::default();
    for k in (0..kernels.len()).filter(|k| waits[*k] == 0) {
        ready.add(k, &kernels[k], movable[k]);
    }
    let mut order: Vec<Vec<usize>> = Vec::with_capacity(kernels.len());
    let mut done = 0;
    while let Some(batch) = ready.next(&kernels) {
        done += batch.len();
        for &k in &batch {
            for &u in &users[k] {
                waits[u] -= 1;
                if waits[u] == 0 {
                    ready.add(u, &kernels[u], movable[u]);
                }
            }
        }
        order.push(batch);
    }
    assert_eq!(done, kernels.len(), "this is a bug: kernels wait for each other in a circle");
    let mut kernels: Vec<Option<Kernel>> = kernels.into_iter().map(|k| Some(k.1)).collect();
    let mut take = |k: usize| kernels[k].take();
    order
        .into_iter()
        .filter_map(|batch| match batch[..] {
            [k] => take(k),
            _ => Some(Kernel::Multi(batch.into_iter().filter_map(|k| take(k)?.into_region()).collect())),
        })
        .collect()
}

/// Kernels that wait for nothing.
#[derive(Default)]
struct Ready {
    queue: BTreeSet<(u32, usize)>,
    /// Of the movable ones, those with one signature.
    alike: HashMap<u64, BTreeSet<(u32, usize)>>,
    signatures: HashMap<usize, u64>,
}

impl Ready {
    fn add(&mut self, k: usize, (anchor, kernel): &(u32, Kernel), movable: bool) {
        self.queue.insert((*anchor, k));
        if let (true, Kernel::Region(r)) = (movable, kernel) {
            let s = horizontal_fusion::signature(r);
            self.signatures.insert(k, s);
            self.alike.entry(s).or_default().insert((*anchor, k));
        }
    }

    /// The earliest recorded one, and those that join it.
    fn next(&mut self, kernels: &[(u32, Kernel)]) -> Option<Vec<usize>> {
        let (_, first) = self.queue.pop_first()?;
        let Some(s) = self.signatures.get(&first) else { return Some(vec![first]) };
        let mut batch = Vec::new();
        if let (Some(alike), Kernel::Region(r)) = (self.alike.get_mut(s), &kernels[first].1) {
            let joins = |k: usize| matches!(&kernels[k].1, Kernel::Region(other) if horizontal_fusion::same(r, other));
            let joined: Vec<(u32, usize)> =
                alike.iter().copied().filter(|&(_, k)| joins(k)).take(horizontal_fusion::MOST).collect();
            for at in joined {
                batch.push(at.1);
                alike.remove(&at);
                self.queue.remove(&at);
            }
        }
        Some(batch)
    }
}
