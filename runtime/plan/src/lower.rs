//! Lowers the reachable part of a recording to primitives with resolved views.
//!
//! Fused ops that the backend does not keep are replaced by their decompositions, equal nodes merge (a backward pass
//! through a decomposition computes again what the forward did), trivial nodes vanish, and every view becomes a layout
//! over the node whose elements it reads. Where strides cannot say a reshape, and where a library op or a root needs
//! elements in memory of their own, a copy is put in.

use crate::backend::Backend;
use crate::output_layout::Readers;
use crate::passes::nhwc;
use crate::passes::pad_gemm;
use crate::passes::remat::{self, Spans};
use crate::trace::{Request, Source, Trace, Tracer};
use perilune_core::error::Result;
use perilune_core::graph::{Graph, Node, NodeId};
use perilune_core::ops::{Class, Generator, create, elementwise, matmul, movement, source};
use perilune_core::{Layout, Shape};
use smallvec::{SmallVec, smallvec};
use std::collections::{HashMap, HashSet};

/// A lowered step.
#[derive(Debug)]
pub struct Lowered {
    pub graph: Graph,
    /// For each node: the node that owns its elements, and where they lie in it.
    pub views: Vec<(NodeId, Layout)>,
    pub roots: Vec<NodeId>,
    /// Values of the state_writes, in the order of `Trace::state_write_inputs`.
    pub state_writes: Vec<NodeId>,
    /// The bool that guards state_writes, until it has become selects.
    pub ok: Option<NodeId>,
    /// Slot number of each `scalar` node.
    pub slots: HashMap<NodeId, u32>,
    /// Input number of each leaf node.
    pub inputs: HashMap<NodeId, u32>,
    /// Which inputs are States: their buffers will change, so they are not handed out.
    pub states: Vec<bool>,
    /// For each node, what must have been computed before it may run, although it does not read it; empty if there is no
    /// such thing in the whole step.
    pub control_deps: Vec<ControlDeps>,
    /// Kept ops that write their image channels last (see `channels`), until views are resolved.
    pub last: HashSet<NodeId>,
    /// Bytes that regions fill rows up to multiples of, where products want that and the backend can.
    pub fills: Option<usize>,
}

pub type ControlDeps = SmallVec<[NodeId; 2]>;

impl Lowered {
    fn empty(states: Vec<bool>) -> Lowered {
        let graph = Graph::new();
        let (views, roots, state_writes) = (Vec::new(), Vec::new(), Vec::new());
        let (slots, inputs, control_deps) = (HashMap::new(), HashMap::new(), Vec::new());
        Lowered {
            graph,
            views,
            roots,
            state_writes,
            slots,
            inputs,
            states,
            control_deps,
            ok: None,
            last: HashSet::new(),
            fills: None,
        }
    }

    /// What must have been computed before `id` may run, besides what it reads.
    pub fn control_deps(&self, id: NodeId) -> &[NodeId] {
        self.control_deps.get(id.index()).map_or(&[], |w| w)
    }

    /// Where the elements that node `x` reads through `input` lie, over dims `shape` (`input` broadcasts to it).
    pub fn read(&self, input: NodeId, shape: Shape) -> (NodeId, Layout) {
        let (base, l) = self.views[input.index()];
        (base, l.expand(shape).collapse())
    }
}

/// How often fused ops may decompose into fused ops: a guard against an op that decomposes into itself.
const MAX_DEPTH: usize = 8;

/// `spans`: what is to be recomputed (see `remat`).
pub fn lower(g: &Graph, tracer: &Tracer, request: &Request, spans: &Spans, backend: &dyn Backend) -> Result<Lowered> {
    let mut out = first(g, &tracer.trace, |id| tracer.position(id), request);
    if !spans.is_empty() {
        out = remat::apply(&out, g, &tracer.trace.order, spans);
    }
    if let (Some(guard), Some(ok)) = (&request.guard, out.ok.take()) {
        select(&mut out, ok, &guard.state_writes, &tracer.trace.state_write_inputs)?;
    }
    for _ in 0..MAX_DEPTH {
        let decomposes = |n: &Node| matches!(n.op.class, Class::Fused(_)) && !backend.has_kernel(n);
        if !out.graph.nodes().iter().any(decomposes) {
            break;
        }
        out = expand(&out, backend)?;
    }
    let out = pad_gemm::apply(out, backend)?;
    let out = merge(&nhwc::apply(out, backend)?, backend)?;
    Ok(Lowered { fills: backend.row_bytes().filter(|_| backend.fills_rows()), ..out })
}

/// Copies the traced nodes to a graph of their own, with leaves and slots numbered as in the trace.
fn first(g: &Graph, trace: &Trace, position: impl Fn(NodeId) -> usize, request: &Request) -> Lowered {
    let states = trace.inputs.iter().map(|s| matches!(s, Source::State(_))).collect();
    let mut out = Lowered::empty(states);
    let by_source: HashMap<Source, u32> = trace.inputs.iter().enumerate().map(|(k, s)| (*s, k as u32)).collect();
    let mut slot = 0;
    // Which traced nodes are leaves is known from the key: their words start with the leaf mark.
    let leaves = leaf_marks(g, trace);
    for (k, &id) in trace.order.iter().enumerate() {
        let node = g.node(id);
        // SourceMap of the lowered graph name positions in the trace: see `ir::Origin`.
        out.graph.modes.loc = perilune_core::source_loc::SourceLoc(k as u32 + 1);
        let new = match leaves[k] {
            Some(source) => {
                let input = by_source[&source];
                let new = out.graph.leaf(&create::LEAF, node.shape, node.dtype, &[], input as u64);
                out.inputs.insert(new, input);
                new
            }
            None => {
                let mut copy = node.clone();
                copy.inputs = node.inputs.iter().map(|x| NodeId(position(*x) as u32)).collect();
                out.graph.add(copy)
            }
        };
        if leaves[k].is_none() && out.graph.generator(new) == Some(Generator::Scalar) {
            out.slots.insert(new, slot);
            slot += 1;
        }
    }
    out.roots = request.roots.iter().map(|r| NodeId(position(*r) as u32)).collect();
    out.state_writes = request.state_writes.iter().map(|c| NodeId(position(c.1) as u32)).collect();
    out.ok = request.guard.as_ref().map(|guard| NodeId(position(guard.ok) as u32));
    out
}

/// Makes every guarded commit `where(ok, new, old)`, with the old value from the State itself (input `inputs[i]`).
fn select(out: &mut Lowered, ok: NodeId, guarded: &[bool], inputs: &[u32]) -> Result<()> {
    let mut leaves: HashMap<u32, NodeId> = HashMap::new();
    for (leaf, input) in &out.inputs {
        // A map's order must not show: the first leaf of an input is as good as any.
        leaves.entry(*input).and_modify(|first| *first = (*first).min(*leaf)).or_insert(*leaf);
    }
    for (i, input) in inputs.iter().enumerate().filter(|(i, _)| guarded[*i]) {
        let new = out.state_writes[i];
        let (shape, dtype) = (out.graph.shape(new), out.graph.dtype(new));
        out.graph.modes.loc = out.graph.loc_of(new);
        let old = match leaves.get(input).filter(|leaf| out.graph.shape(**leaf) == shape) {
            Some(leaf) => *leaf,
            None => {
                let leaf = out.graph.leaf(&create::LEAF, shape, dtype, &[], u64::from(*input));
                out.inputs.insert(leaf, *input);
                leaf
            }
        };
        out.state_writes[i] = out.graph.where_(ok, new, old)?;
    }
    Ok(())
}

/// Walks the key beside the order to find which nodes the trace treated as leaves.
fn leaf_marks(g: &Graph, trace: &Trace) -> Vec<Option<Source>> {
    let mut at = 0;
    let key = &trace.key;
    trace
        .order
        .iter()
        .map(|&id| {
            if key[at] == 0x1eaf {
                let source = trace.inputs[key[at + 1] as usize];
                at += 4 + 2 * key[at + 3] as usize;
                return Some(source);
            }
            let head = key[at + 1];
            let (attrs, inputs) = ((head & 0xff) as usize, (head >> 8 & 0xffff) as usize); // the rest: dtype, tf32
            at += 2;
            if let Class::Generator(_) = g.node(id).op.class {
                at += 1 + key[at] as usize;
            }
            at += 2 * attrs + inputs;
            None
        })
        .collect()
}

/// Carries a lowered step over to a new graph, with ids renamed by `map`.
pub(crate) struct Rewriter {
    pub out: Lowered,
    pub map: Vec<NodeId>,
}

impl Rewriter {
    pub fn new(from: &Lowered) -> Rewriter {
        Rewriter { out: Lowered::empty(from.states.clone()), map: Vec::with_capacity(from.graph.len()) }
    }

    fn inputs(&self, node: &Node) -> SmallVec<[NodeId; 4]> {
        node.inputs.iter().map(|x| self.map[x.index()]).collect()
    }

    pub fn copy(&mut self, from: &Lowered, id: NodeId) -> NodeId {
        let mut node = from.graph.node(id).clone();
        node.inputs = self.inputs(&node);
        let new = self.out.graph.add(node);
        if let Some(slot) = from.slots.get(&id) {
            self.out.slots.insert(new, *slot);
        }
        if let Some(input) = from.inputs.get(&id) {
            self.out.inputs.insert(new, *input);
        }
        new
    }

    pub fn finish(mut self, from: &Lowered) -> Lowered {
        self.out.roots = from.roots.iter().map(|r| self.map[r.index()]).collect();
        self.out.state_writes = from.state_writes.iter().map(|c| self.map[c.index()]).collect();
        self.out.ok = from.ok.map(|ok| self.map[ok.index()]);
        self.out
    }
}

/// Replaces each fused node by its decomposition, one layer deep.
fn expand(from: &Lowered, backend: &dyn Backend) -> Result<Lowered> {
    let mut to = Rewriter::new(from);
    let mut parts: HashMap<NodeId, SmallVec<[NodeId; 2]>> = HashMap::new();
    for id in from.graph.ids() {
        let node = from.graph.node(id);
        to.out.graph.modes.loc = from.graph.loc_of(id);
        let new = match node.op.class {
            Class::Fused(decompose) if !backend.has_kernel(node) => {
                let inputs = to.inputs(node);
                to.out.graph.modes.tf32 = node.tf32;
                let outs = decompose(&mut to.out.graph, &inputs, &node.attrs)?;
                to.out.graph.modes.tf32 = false;
                let first = outs[0];
                parts.insert(id, outs);
                first
            }
            Class::TupleGet if parts.contains_key(&node.inputs[0]) => parts[&node.inputs[0]][node.attrs[0] as usize],
            _ => to.copy(from, id),
        };
        to.map.push(new);
    }
    Ok(to.finish(from))
}

/// Drops trivial and duplicate nodes and resolves views.
fn merge(from: &Lowered, backend: &dyn Backend) -> Result<Lowered> {
    let wanted = reachable(from);
    let readers = Readers::new(from, &wanted, backend);
    let mut to = Rewriter::new(from);
    let mut seen: HashMap<Shape4, NodeId> = HashMap::new();
    for id in from.graph.ids() {
        if !wanted[id.index()] {
            // Never looked at again; any id will do.
            to.map.push(NodeId(0));
            continue;
        }
        to.out.graph.modes.loc = from.graph.loc_of(id);
        let node = from.graph.node(id);
        let inputs = to.inputs(node);
        if let Some(same) = trivial(&to.out, node, &inputs) {
            to.map.push(same);
            continue;
        }
        let key = (
            node.op as *const _ as usize,
            inputs.clone(),
            node.attrs.clone(),
            // Leaves and slots are told apart by their number, not by what they look like.
            from.slots.get(&id).map(|s| *s as u64).or(from.inputs.get(&id).map(|i| *i as u64)),
            node.shape,
            (node.dtype, node.tf32),
        );
        if let Some(&same) = seen.get(&key) {
            to.map.push(same);
            continue;
        }
        let new = match node.op.class {
            Class::View(_) if node.op == &create::OPTIMIZATION_BARRIER => {
                own(&mut to.out);
                let seen = to.out.views[inputs[0].index()];
                let held = to.copy(from, id);
                to.out.views.push(seen);
                held
            }
            Class::View(_) => view(&mut to.out, node, inputs[0]),
            Class::Reduce(f) if reduced(node, &to.out, inputs[0]) == 0 => {
                let c = to.out.graph.constant(perilune_core::ops::reduce::identity(f, node.dtype), node.dtype);
                own(&mut to.out);
                view_as(&mut to.out, c, node.shape)
            }
            Class::Reduce(_) if reduced(node, &to.out, inputs[0]) == 1 => view_as(&mut to.out, inputs[0], node.shape),
            Class::Library | Class::Fused(_) => {
                if node.op == &movement::CAT
                    && let Some(joined) = readers.join(id, &to.map, &mut to.out)
                {
                    seen.insert(key, joined);
                    to.map.push(joined);
                    continue;
                }
                let store = |(k, x): (usize, &NodeId)| match node.op {
                    op if op == &source::KERNEL => dense(&mut to.out, *x, ALIGNED),
                    // A bias: libraries read it one element after the other.
                    op if op == &matmul::LINEAR && k == 2 => dense(&mut to.out, *x, 1),
                    _ => in_memory(&mut to.out, *x),
                };
                let stored: SmallVec<[NodeId; 4]> = inputs.iter().enumerate().map(store).collect();
                let mut copy = node.clone();
                copy.inputs = stored;
                own(&mut to.out);
                let new = to.out.graph.add(copy);
                to.out.views.push((new, readers.layout(id)));
                new
            }
            Class::TupleGet => {
                let new = to.copy(from, id);
                to.out.views.push((new, readers.layout(id)));
                new
            }
            _ => to.copy(from, id),
        };
        own(&mut to.out);
        seen.insert(key, new);
        to.map.push(new);
    }
    let mut out = to.finish(from);
    for list in [true, false] {
        let ids = if list { out.roots.clone() } else { out.state_writes.clone() };
        let fixed: Vec<NodeId> = ids.iter().map(|&id| whole(&mut out, id, !list)).collect();
        if list {
            out.roots = fixed;
        } else {
            out.state_writes = fixed;
        }
    }
    out.control_deps = control_deps(&out);
    Ok(out)
}

/// For each node, the nodes it must not run before: those that the `hold`s it reads through name. A view carries them on.
fn control_deps(out: &Lowered) -> Vec<ControlDeps> {
    if !out.graph.nodes().iter().any(|n| n.op == &create::OPTIMIZATION_BARRIER) {
        return Vec::new();
    }
    let mut all: Vec<ControlDeps> = Vec::with_capacity(out.graph.len());
    for node in out.graph.nodes() {
        let mut list = ControlDeps::new();
        let mut add = |x: NodeId| {
            if !list.contains(&x) {
                list.push(x);
            }
        };
        for (k, x) in node.inputs.iter().enumerate() {
            if node.op == &create::OPTIMIZATION_BARRIER && k == 1 {
                let base = out.views[x.index()].0;
                let computed = out.graph.generator(base).is_none() && !out.inputs.contains_key(&base);
                if computed {
                    add(base);
                }
            } else if matches!(out.graph.node(*x).op.class, Class::View(_)) {
                all[x.index()].iter().for_each(|w| add(*w));
            }
        }
        all.push(list);
    }
    all
}

type Shape4 = (usize, SmallVec<[NodeId; 4]>, SmallVec<[i64; 6]>, Option<u64>, Shape, (perilune_core::DType, bool));

fn reachable(from: &Lowered) -> Vec<bool> {
    let mut wanted = vec![false; from.graph.len()];
    for id in from.roots.iter().chain(&from.state_writes) {
        wanted[id.index()] = true;
    }
    for i in (0..wanted.len()).rev() {
        if wanted[i] {
            for x in &from.graph.nodes()[i].inputs {
                wanted[x.index()] = true;
            }
        }
    }
    wanted
}

/// Gives every node added since the last call a layout of its own elements.
fn own(out: &mut Lowered) {
    for i in out.views.len()..out.graph.len() {
        let id = NodeId(i as u32);
        out.views.push((id, Layout::contiguous(out.graph.shape(id))));
    }
}

/// The node that a do-nothing op stands for.
fn trivial(out: &Lowered, node: &Node, inputs: &[NodeId]) -> Option<NodeId> {
    let same = |x: NodeId| out.graph.shape(x) == node.shape && out.graph.dtype(x) == node.dtype;
    match node.op.class {
        Class::View(_) if node.op == &movement::DETACH || node.op == &create::CUSTOM => Some(inputs[0]),
        Class::View(_) if inputs.len() == 1 && same(inputs[0]) && node.attrs.len() == node.shape.rank() => {
            // reshape and expand to the same shape; permute and flip keep a meaning at equal shapes
            let op = node.op.name;
            (op == "reshape" || op == "expand").then_some(inputs[0])
        }
        Class::Cast if same(inputs[0]) => Some(inputs[0]),
        Class::Map(elementwise::MapFn::Mul) if node.dtype.is_float() => {
            let one = |x: NodeId| {
                let n = out.graph.node(x);
                n.op == &create::CONSTANT && n.attrs[0] as u64 == 1f64.to_bits()
            };
            match (one(inputs[0]), one(inputs[1])) {
                (_, true) if same(inputs[0]) => Some(inputs[0]),
                (true, _) if same(inputs[1]) => Some(inputs[1]),
                _ => None,
            }
        }
        _ => None,
    }
}

/// How many elements a reduction folds into one.
fn reduced(node: &Node, out: &Lowered, x: NodeId) -> usize {
    out.graph.shape(x).dims()[node.attrs[0] as usize..node.attrs[1] as usize].iter().product()
}

/// Adds a view node, over a copy where strides cannot say it.
fn view(out: &mut Lowered, node: &Node, x: NodeId) -> NodeId {
    let Class::View(layout) = node.op.class else { return x };
    own(out);
    let (base, l) = out.views[x.index()];
    let (x, base, l) = match layout(&l, &node.attrs, &node.shape) {
        Some(l) => (x, base, l),
        None => {
            let c = copy(out, x);
            let own_layout = Layout::contiguous(out.graph.shape(c));
            let l = layout(&own_layout, &node.attrs, &node.shape).unwrap_or(Layout::contiguous(node.shape));
            (c, c, l)
        }
    };
    let mut new = node.clone();
    new.inputs = smallvec![x];
    let id = out.graph.add(new);
    out.views.push((base, l));
    id
}

/// `x` read with `shape`: of equal numel, or a scalar repeated.
fn view_as(out: &mut Lowered, x: NodeId, shape: Shape) -> NodeId {
    own(out);
    let (base, l) = out.views[x.index()];
    let seen = if out.graph.shape(x).numel() == shape.numel() { l.reshape(shape) } else { Some(l.expand(shape)) };
    let (base, l, x) = match seen {
        Some(l) => (base, l, x),
        None => {
            let c = copy(out, x);
            (c, Layout::contiguous(shape), c)
        }
    };
    let op = if out.graph.shape(x).numel() == shape.numel() { &movement::RESHAPE } else { &movement::EXPAND };
    let node = Node {
        op,
        dtype: out.graph.dtype(x),
        detached: false,
        tf32: false,
        shape,
        inputs: smallvec![x],
        attrs: shape.dims().iter().map(|&d| d as i64).collect(),
        payload: 0,
    };
    let id = out.graph.add(node);
    out.views.push((base, l));
    id
}

/// A copy of `x` in memory of its own.
fn copy(out: &mut Lowered, x: NodeId) -> NodeId {
    let node = Node {
        op: &elementwise::COPY,
        dtype: out.graph.dtype(x),
        detached: false,
        tf32: false,
        shape: out.graph.shape(x),
        inputs: smallvec![x],
        attrs: smallvec![],
        payload: 0,
    };
    let id = out.graph.add(node);
    own(out);
    id
}

/// `x`, or a copy if its elements are not in memory (generators other than constants).
fn in_memory(out: &mut Lowered, x: NodeId) -> NodeId {
    own(out);
    let base = out.views[x.index()].0;
    match out.graph.generator(base) {
        None | Some(Generator::Constant) => x,
        Some(_) => copy(out, x),
    }
}

/// Bytes that a kernel from source may take the addresses of its operands to be multiples of.
const ALIGNED: usize = 16;

/// `x`, or a copy if its elements are not in memory one after the other, from a multiple of `align` bytes on.
fn dense(out: &mut Lowered, x: NodeId, align: usize) -> NodeId {
    own(out);
    let (base, l) = out.views[x.index()];
    let aligned = (l.offset.unsigned_abs() * out.graph.dtype(x).size()).is_multiple_of(align);
    if l.is_contiguous() && aligned && out.graph.generator(base).is_none() { x } else { copy(out, x) }
}

/// `x`, or a copy if it is not all of a buffer in order. A commit also needs a buffer that is nobody else's.
fn whole(out: &mut Lowered, x: NodeId, commit: bool) -> NodeId {
    let (base, l) = out.views[x.index()];
    let all = l.is_contiguous() && l.numel() == out.graph.shape(base).numel();
    let held = out.inputs.get(&base).is_some_and(|k| commit || out.states[*k as usize]);
    if !all || out.graph.generator(base).is_some() || held { copy(out, x) } else { base }
}
