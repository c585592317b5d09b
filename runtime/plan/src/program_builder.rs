//! Builds a program from clusters: registers, kernels, and storage for results and State writes.

use crate::buffer_desc::BufferDesc;
use crate::cluster::{self, Assignment, Fusion};
use crate::epilogue;
use crate::horizontal_fusion;
use crate::index_checks;
use crate::ir::*;
use crate::kernel_order::{self, ControlDeps};
use crate::key::Trace;
use crate::lanes;
use crate::lowered::Lowered;
use crate::memory;
use crate::pipeline::Options;
use crate::reading::{Reading, reading};
use crate::route::Route;
use perilune_core::graph::{Graph, NodeId};
use perilune_core::id_map::IdMap;
use perilune_core::ops::{Class, Generator, collective, create};
use perilune_core::{DType, Layout, Shape};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;
use std::collections::BinaryHeap;
use std::sync::Arc;

/// Shape and dtype of each input buffer, as recorded; of a divided step, those of a device's part.
fn inputs(low: &Lowered, recorded: &Graph, trace: &Trace) -> Vec<(Shape, DType)> {
    let whole = |x: &NodeId| (recorded.shape(*x), recorded.dtype(*x));
    let mut out: Vec<(Shape, DType)> = trace.input_nodes.iter().map(whole).collect();
    let written = low.state_writes.iter().zip(&trace.state_write_inputs);
    for (id, k) in written.chain(&low.inputs) {
        let (part, whole) = (low.graph.shape(*id), &mut out[*k as usize].0);
        if part.numel() != whole.numel() {
            *whole = part;
        }
    }
    out
}

/// Builds the program of a clustered step; `recorded` has the shapes of its inputs. Without fusion, every region is a separate
/// launch.
pub fn build(low: &Lowered, f: &Fusion, recorded: &Graph, trace: &Trace, options: Options) -> Program {
    let fusion = options.fusion;
    let mut b = Builder {
        low,
        f,
        values: Vec::new(),
        value_of: vec![ValueId::NONE; low.graph.len()],
        control_deps: ControlDeps::default(),
        layouts: FxHashMap::default(),
        tables: RegionTables::default(),
        program: Program {
            values: Vec::new(),
            kernels: Vec::new(),
            in_flight: Vec::new(),
            inputs: inputs(low, recorded, trace),
            outputs: Vec::new(),
            slots: trace.slot_dtypes.iter().copied().chain(low.starts.iter().map(|_| DType::I64)).collect(),
            starts: low.starts.clone(),
            results: Vec::new(),
            arena_bytes: 0,
            live_bytes: 0,
            exchanges: low.exchanges.clone(),
            stages: Vec::new(),
            route: Route::Links,
        },
    };
    b.name_values();
    let mut kernels = b.kernels();
    if fusion {
        let values = |ids: &[NodeId]| ids.iter().map(|id| b.value_of[id.index()]).collect();
        epilogue::fuse(&mut kernels, &b.values, &b.control_deps, &values(&low.roots), &values(&low.state_writes));
    }
    let kept = low.roots.iter().chain(&low.state_writes).map(|id| b.value_of[id.index()]).collect();
    let host = trace.division.as_ref().filter(|_| low.has_host_memory_route).map(|d| &d.mesh);
    let sorted = kernel_order::sort(kernels, &b.values, &b.control_deps, fusion, host);
    b.program.route = sorted.route;
    b.program.kernels = lanes::merge(sorted, &b.values, &b.control_deps, &kept, options.bucket);
    b.program.in_flight = lanes::in_flight(&b.program.kernels);
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
    /// By node; [`ValueId::NONE`] if it is not stored.
    value_of: Vec<ValueId>,
    control_deps: ControlDeps,
    layouts: FxHashMap<Layout, Arc<Layout>>,
    tables: RegionTables,
    program: Program,
}

/// What a region is built with; empty between two regions, which use the same memory.
#[derive(Default)]
struct RegionTables {
    here: FxHashSet<NodeId>,
    regs: FxHashMap<NodeId, Reg>,
    memo: FxHashMap<Memo, Reg>,
}

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
        self.value_of[id.index()] = v;
        v
    }

    fn name_values(&mut self) {
        for (k, (shape, dtype)) in self.program.inputs.iter().enumerate() {
            let origin = Origin::NONE;
            self.values.push(Value { shape: *shape, dtype: *dtype, storage: Storage::Input(k as u32), origin });
        }
        for (&id, &k) in &self.low.inputs {
            self.value_of[id.index()] = ValueId(k);
        }
        for id in self.low.graph.ids() {
            // Excludes slices of another node's buffer.
            let owner = self.low.views.owner(id) == id;
            if owner && self.f.stored[id.index()] && !matches!(self.f.assignment[id.index()], Assignment::None) {
                self.add_value(id, Storage::UNPLACED);
            }
        }
    }

    /// All kernels, unordered, each with its anchor: the position in the lowered graph that decides its order.
    fn kernels(&mut self) -> Vec<(u32, Kernel)> {
        let (g, f) = (&self.low.graph, self.f);
        let is_library = |id: &NodeId| matches!(f.assignment[id.index()], Assignment::Library { .. });
        let calls = g.ids().filter(is_library).count();
        let mut out = Vec::with_capacity(calls + self.f.clusters.len());
        let mut parts: FxHashMap<NodeId, Vec<(usize, NodeId)>> = FxHashMap::default();
        for id in g.ids().filter(is_library) {
            let node = g.node(id);
            if node.op == &create::TUPLE_GET && self.value_of[self.low.views.owner(id).index()] != ValueId::NONE {
                parts.entry(node.inputs[0]).or_default().push((node.attrs[0] as usize, id));
            }
        }
        for id in g.ids().filter(is_library) {
            let node = g.node(id);
            if matches!(node.op.class, Class::TupleGet) {
                continue;
            }
            let lies = |id: NodeId| {
                let (base, layout) = self.low.view(id);
                (self.value_of[base.index()], layout)
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

    /// Adds the control dependencies of node `id` to value `made`.
    fn hold(&mut self, made: ValueId, id: NodeId) {
        for w in self.low.control_deps(id) {
            let base = self.low.views.owner(*w);
            self.control_deps.entry(made).or_default().push(self.value_of[base.index()]);
        }
    }

    fn operand(&self, x: NodeId) -> Operand {
        let g = &self.low.graph;
        let (base, layout) = self.low.view(x);
        match g.generator(base) {
            Some(_) => Operand::Constant(g.node(base).attrs[0] as u64, g.shape(x), g.dtype(x)),
            None => Operand::View(self.value_of[base.index()], layout),
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
        let RegionTables { mut here, mut regs, mut memo } = std::mem::take(&mut self.tables);
        // The nodes computed here: the stored ones, and those that they need through registers or recomputation.
        here.extend(roots.iter().copied());
        let mut queue: BinaryHeap<NodeId> = roots.iter().copied().collect();
        let mut ordered = Vec::new();
        while let Some(id) = queue.pop() {
            ordered.push(id);
            for (base, layout) in cluster::reads(low, id) {
                if self.computed_here(k, id, base, &layout) && here.insert(base) {
                    queue.push(base);
                }
            }
        }
        ordered.reverse();
        for id in ordered {
            self.hold(self.value_of[roots[0].index()], id);
            let node = g.node(id);
            let origin = Origin(g.loc_of(id).0);
            let n = cluster::source_numel(low, id);
            let level = match f.cluster_of(id) == Some(k) {
                true => f.level[id.index()],
                // Recomputed here. The size determines the level, since a row is longer than one element.
                false if n == cluster.numel => Level::Full,
                false => Level::Row,
            };
            let operand_level = if matches!(node.op.class, Class::Reduce(_)) { Level::Full } else { level };
            let mut args: SmallVec<[Reg; 3]> = SmallVec::new();
            for (i, (base, layout)) in cluster::reads(low, id).into_iter().enumerate() {
                let dtype = g.dtype(node.inputs[i]);
                let reg = if self.computed_here(k, id, base, &layout) {
                    let from = regs[&base];
                    if region.body[from as usize].level == Level::Row && operand_level == Level::Full {
                        emit(&mut region, &mut memo, Code::Broadcast(from), dtype, Level::Full, origin)
                    } else {
                        from
                    }
                } else {
                    let (source, layout) = (self.source(base), self.shared(layout));
                    emit(&mut region, &mut memo, Code::Load { source, layout }, dtype, operand_level, origin)
                };
                args.push(reg);
            }
            if matches!(node.op.class, Class::Library) {
                // Rows to be padded are stored unchanged to a value with longer rows.
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
        region.stores = roots.iter().map(|id| (regs[id], self.value_of[id.index()])).collect();
        here.clear();
        regs.clear();
        memo.clear();
        self.tables = RegionTables { here, regs, memo };
        Some((anchor, region))
    }

    /// Whether `base`, read by `id` in cluster `k`, is a register there.
    fn computed_here(&self, k: usize, id: NodeId, base: NodeId, layout: &Layout) -> bool {
        if !matches!(self.f.assignment[base.index()], Assignment::Cluster(_)) {
            return false;
        }
        cluster::in_register(self.low, self.f, k, base, layout, cluster::source_numel(self.low, id))
            || !self.f.stored[base.index()]
    }

    /// Returns the layout that equal loads of the program share.
    fn shared(&mut self, layout: Layout) -> Arc<Layout> {
        self.layouts.entry(layout).or_insert_with(|| Arc::new(layout)).clone()
    }

    fn source(&self, base: NodeId) -> Source {
        let (g, slots) = (&self.low.graph, &self.low.slots);
        let (start, node) = match g.generator(base) {
            Some(Generator::Shard) => (Some(slots[&base]), g.node(base).inputs[0]),
            _ => (None, base),
        };
        let inputs = &g.node(node).inputs;
        match g.generator(node) {
            None => match start {
                Some(start) => Source::Block { input: self.value_of[node.index()], start },
                None => Source::Value(self.value_of[base.index()]),
            },
            Some(Generator::Scalar) => Source::Slot(slots[&node]),
            Some(Generator::Constant) => Source::Constant(g.node(node).attrs[0] as u64),
            Some(Generator::Iota) => Source::Iota { start },
            Some(Generator::Uniform) => Source::Uniform { seed: slots[&inputs[0]], counter: slots[&inputs[1]], start },
            Some(Generator::Shard) => unreachable!("this is a bug: a part of a part"),
        }
    }

    /// Gives each root an output buffer, or refers to the input that it is.
    fn results(&mut self) {
        let mut outputs: FxHashMap<ValueId, u32> = FxHashMap::default();
        for (number, id) in self.low.roots.iter().enumerate() {
            let v = self.value_of[id.index()];
            let result = match self.values[v.0 as usize].storage {
                Storage::Input(k) => Root::Input(k),
                _ => {
                    let next = self.program.outputs.len() as u32;
                    let o = *outputs.entry(v).or_insert(next);
                    if o == next {
                        let value = &self.values[v.0 as usize];
                        let placed = self.low.placed_roots.get(&number).copied();
                        self.program.outputs.push(placed.unwrap_or_else(|| BufferDesc::new(value.shape, value.dtype)));
                        self.values[v.0 as usize].storage = Storage::Output(o);
                    }
                    Root::Output(o)
                }
            };
            self.program.results.push(result);
        }
    }

    /// Computes each State's new value in the State's own memory if no later kernel reads the old one; otherwise copies
    /// it there at the end.
    fn state_writes(&mut self, trace: &Trace) {
        let mut writer: IdMap<ValueId, Part> = IdMap::default();
        let mut readers: IdMap<ValueId, SmallVec<[Part; 2]>> = IdMap::default();
        for (kernel, k) in self.program.kernels.iter().enumerate() {
            if let Kernel::Library(l) = k {
                let call = Part { kernel, region: None };
                writer.extend(l.outputs.iter().map(|v| (*v, call)));
                for o in &l.inputs {
                    if let Operand::View(v, _) = o {
                        readers.entry(*v).or_default().push(call);
                    }
                }
            }
            for (n, r) in k.regions().iter().enumerate() {
                let part = Part { kernel, region: Some(n) };
                writer.extend(r.writes().map(|v| (v, part)));
                for v in r.reads() {
                    readers.entry(v).or_default().push(part);
                }
            }
        }
        // A collective reads until it is waited for.
        let until: FxHashMap<usize, usize> = self.program.in_flight.iter().map(|f| (f.start, f.wait - 1)).collect();
        let deferred = self.low.defers_index_faults;
        let last_check = if deferred { index_checks::last(&self.program.kernels) } else { None };
        // Where bad indices are reported late, only a region behind the last check can be suppressed in time.
        // The first State write waits for the devices of all stages, so it may not come before a transfer.
        let is_transfer = |k: &Kernel| matches!(k, Kernel::Library(l) if collective::is_transfer(l.op));
        let last_transfer = self.program.kernels.iter().rposition(is_transfer);
        let suppressible = |w: &Part| {
            if last_transfer.is_some_and(|transfer| w.kernel < transfer) {
                return false;
            }
            let is_region = !matches!(self.program.kernels[w.kernel], Kernel::Library(_));
            !deferred || is_region && last_check.is_none_or(|check| w.kernel > check)
        };
        let mut copies = Vec::new();
        for (id, &input) in self.low.state_writes.iter().zip(&trace.state_write_inputs) {
            let (v, state) = (self.value_of[id.index()], ValueId(input));
            let free = self.values[v.0 as usize].storage == Storage::UNPLACED;
            let by = writer.get(&v);
            // The parts of one kernel run in no fixed order, so only the part that writes may read the old value.
            let before = |r: &Part| match by {
                Some(w) if r == w => r.of(&self.program).is_some_and(|region| in_place(region, v, state)),
                Some(w) => until.get(&r.kernel).copied().unwrap_or(r.kernel) < w.kernel,
                None => true,
            };
            let safe = free && by.is_none_or(suppressible) && readers.get(&state).into_iter().flatten().all(before);
            if safe {
                self.values[v.0 as usize].storage = Storage::Input(input);
            } else {
                copies.push((v, state));
            }
        }
        // Values come first, then copies: a copy must not overwrite what another kernel still reads.
        let mut alike: Vec<Region> = Vec::new();
        for (v, state) in copies {
            let value = &self.values[v.0 as usize];
            let (shape, dtype, origin) = (value.shape, value.dtype, value.origin);
            let n = shape.numel();
            let layout = self.shared(Layout::contiguous(shape).collapse());
            let load = Code::Load { source: Source::Value(v), layout };
            let body = vec![Instr { code: load, dtype, level: Level::Full, origin }];
            let region = Region { batch: 1, rows: 1, cols: n, body, stores: vec![(0, state)], origin };
            // Copies of values of their own are independent, so they share launches.
            if deferred && self.values[v.0 as usize].storage == Storage::UNPLACED {
                alike.push(region);
            } else {
                self.program.kernels.push(Kernel::Region(region));
            }
        }
        self.program.kernels.extend(horizontal_fusion::grouped(alike));
    }
}

/// A library call itself, or one region of a kernel.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Part {
    kernel: usize,
    region: Option<usize>,
}

impl Part {
    fn of(self, p: &Program) -> Option<&Region> {
        p.kernels[self.kernel].regions().get(self.region?)
    }
}

/// Whether `r`, which reads `old`, may overwrite it with `v`: only if it reads element for element.
fn in_place(r: &Region, v: ValueId, old: ValueId) -> bool {
    let full = |reg: &Reg| r.body[*reg as usize].level == Level::Full;
    let n = r.numel();
    r.stores.iter().all(|(reg, s)| *s != v || full(reg))
        && r.body.iter().all(|i| match &i.code {
            Code::Load { source, layout } if source.value() == Some(old) => {
                *source == Source::Value(old) && i.level == Level::Full && reading(layout, n, n) == Reading::Same
            }
            _ => true,
        })
}

/// What makes two instructions equal.
#[derive(PartialEq, Eq, Hash)]
enum Memo {
    /// With the address of the shared layout.
    Load(Source, usize, DType, Level),
    Broadcast(Reg),
}

fn emit(
    region: &mut Region,
    memo: &mut FxHashMap<Memo, Reg>,
    code: Code,
    dtype: DType,
    level: Level,
    origin: Origin,
) -> Reg {
    let key = match &code {
        Code::Load { source, layout } => Some(Memo::Load(*source, Arc::as_ptr(layout) as usize, dtype, level)),
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
