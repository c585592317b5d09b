//! Resolves every view to a layout over the node whose elements it reads.
//!
//! A copy is inserted where strides cannot express a reshape, and where a library op, a root or a State write needs its
//! elements in separate memory. Reductions over one element become views, and reductions over zero elements constants.

use crate::lowered::{Join, Lowered};
use crate::passes::rewriter::Rewriter;
use perilune_core::graph::{Graph, Node, NodeId};
use perilune_core::ops::{Class, Generator, create, elementwise, matmul, movement, reduce, source};
use perilune_core::{Layout, Shape};
use smallvec::{SmallVec, smallvec};

/// Runs the pass. Later passes do not change the graph, which takes the memory of `spare`.
pub fn apply(from: &Lowered, spare: Graph) -> Lowered {
    let mut to = Rewriter::reusing(from, spare);
    to.out.views.reserve(from.graph.len());
    // Whether another node is a view of each node, so far.
    let mut viewed: Vec<bool> = Vec::new();
    for id in from.graph.ids() {
        to.out.graph.modes.loc = from.graph.loc_of(id);
        let first = to.out.graph.len();
        let new = resolve(from, &mut to, id, &viewed);
        own(&mut to.out);
        viewed.resize(to.out.graph.len(), false);
        for k in first..to.out.views.len() {
            let base = to.out.views.owner(NodeId(k as u32)).index();
            viewed[base] |= base != k;
        }
        viewed[new.index()] |= to.out.graph.node(new).op == &create::JOINED;
        to.map.push(new);
    }
    // Nodes added below are attributed to the line that the recording ended with.
    to.out.graph.modes.loc = from.graph.modes.loc;
    let mut out = to.finish(from);
    for k in 0..out.roots.len() {
        let x = out.roots[k];
        out.roots[k] = whole(&mut out, x, false);
    }
    for k in 0..out.state_writes.len() {
        let x = out.state_writes[k];
        out.state_writes[k] = whole(&mut out, x, true);
    }
    out
}

/// Appends node `id` and what it needs. Nodes without an entry in `views` own their elements.
fn resolve(from: &Lowered, to: &mut Rewriter, id: NodeId, viewed: &[bool]) -> NodeId {
    let node = from.graph.node(id);
    let inputs = to.inputs(node);
    match node.op.class {
        Class::View(_) if node.op == &create::OPTIMIZATION_BARRIER => {
            let (owner, layout) = to.out.view(inputs[0]);
            let new = to.copy(from, id);
            to.out.views.push(owner, layout, node.shape);
            new
        }
        Class::View(_) => view(&mut to.out, node, inputs[0]),
        Class::Reduce(f) if reduced(node, &to.out, inputs[0]) == 0 => {
            let c = to.out.graph.constant(reduce::identity(f, node.dtype), node.dtype);
            own(&mut to.out);
            view_as(&mut to.out, c, node.shape)
        }
        Class::Reduce(_) if reduced(node, &to.out, inputs[0]) == 1 => view_as(&mut to.out, inputs[0], node.shape),
        Class::Library | Class::Fused(_) => {
            if let Some(join) = from.stores.joins.get(&id)
                && let Some(joined) = joined(to, node, join, viewed)
            {
                return joined;
            }
            let store = |(k, x): (usize, &NodeId)| match node.op {
                op if op == &source::KERNEL => dense(&mut to.out, *x, ALIGNED),
                // Libraries read a bias as contiguous elements.
                op if op == &matmul::LINEAR && k == 2 => dense(&mut to.out, *x, 1),
                _ => in_memory(&mut to.out, *x),
            };
            let stored: SmallVec<[NodeId; 4]> = inputs.iter().enumerate().map(store).collect();
            let mut copy = node.clone();
            copy.inputs = stored;
            own(&mut to.out);
            let new = to.out.graph.add(copy);
            to.out.views.push(new, stored_layout(from, id), from.graph.shape(id));
            new
        }
        // Its elements keep their places in the whole tensor.
        Class::Generator(Generator::Shard) => {
            let whole = Layout::contiguous(from.graph.shape(node.inputs[0]));
            let new = to.copy(from, id);
            to.out.views.push(new, Layout { shape: node.shape, ..whole }, node.shape);
            new
        }
        Class::TupleGet => {
            let new = to.copy(from, id);
            to.out.views.push(new, stored_layout(from, id), from.graph.shape(id));
            new
        }
        _ => to.copy(from, id),
    }
}

/// How an op or an output of one stores its elements.
fn stored_layout(from: &Lowered, id: NodeId) -> Layout {
    let layout = from.stores.layouts.get(&id);
    layout.copied().unwrap_or_else(|| Layout::contiguous(from.graph.shape(id)))
}

/// Appends the joined buffer of a concatenation and makes its inputs slices of it. Returns `None` if an input occurs
/// twice or has already been read at its old location.
fn joined(to: &mut Rewriter, node: &Node, join: &Join, viewed: &[bool]) -> Option<NodeId> {
    let out = &mut to.out;
    let slices: SmallVec<[(NodeId, Layout); 3]> =
        join.slices.iter().map(|(x, slice)| (to.map[x.index()], *slice)).collect();
    let twice = (1..slices.len()).any(|k| slices[..k].iter().any(|s| s.0 == slices[k].0));
    if twice || slices.iter().any(|s| viewed[s.0.index()] || out.views.owner(s.0) != s.0) {
        return None;
    }
    let op = to.map[join.op.index()];
    let id = out.graph.add(Node { op: &create::JOINED, inputs: smallvec![op], ..node.clone() });
    out.views.push(id, join.whole, node.shape);
    for (y, slice) in slices {
        let shape = out.graph.shape(y);
        out.views.set(y, id, slice, shape);
    }
    Some(id)
}

/// Gives every node added since the last call a contiguous layout over its own elements.
fn own(out: &mut Lowered) {
    out.views.own_rest(&out.graph);
}

/// The number of elements that a reduction combines into one.
fn reduced(node: &Node, out: &Lowered, x: NodeId) -> usize {
    out.graph.shape(x).dims()[node.attrs[0] as usize..node.attrs[1] as usize].iter().product()
}

/// Appends a view, over a copy where strides cannot express it.
fn view(out: &mut Lowered, node: &Node, x: NodeId) -> NodeId {
    let Class::View(layout) = node.op.class else { return x };
    own(out);
    let (base, l) = out.view(x);
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
    out.views.push(base, l, node.shape);
    id
}

/// Appends a view of `x` with `shape`. Either the numel is equal, or `x` is a scalar that is repeated.
fn view_as(out: &mut Lowered, x: NodeId, shape: Shape) -> NodeId {
    own(out);
    let (base, l) = out.view(x);
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
    out.views.push(base, l, shape);
    id
}

/// Appends a copy of `x`.
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
    let base = out.views.owner(x);
    match out.graph.generator(base) {
        None | Some(Generator::Constant) => x,
        Some(_) => copy(out, x),
    }
}

/// Alignment in bytes of the operands of a source kernel.
const ALIGNED: usize = 16;

/// Returns `x`, or a copy if its elements are not contiguous in memory, aligned to `align` bytes.
fn dense(out: &mut Lowered, x: NodeId, align: usize) -> NodeId {
    own(out);
    let (base, l) = out.view(x);
    let aligned = (l.offset.unsigned_abs() * out.graph.dtype(x).size()).is_multiple_of(align);
    if l.is_contiguous() && aligned && out.graph.generator(base).is_none() { x } else { copy(out, x) }
}

/// The node that owns the elements of `x`, if these are a whole buffer in order; otherwise a copy. A State write also
/// needs a buffer that is not an input's.
fn whole(out: &mut Lowered, x: NodeId, state_write: bool) -> NodeId {
    let (base, l) = out.view(x);
    let all = l.is_contiguous() && l.numel() == out.graph.shape(base).numel();
    let held = out.inputs.get(&base).is_some_and(|k| state_write || out.states[*k as usize]);
    if !all || out.graph.generator(base).is_some() || held { copy(out, x) } else { base }
}
