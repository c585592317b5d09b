//! Chooses the layouts in which library ops and fused ops store their outputs, so that copies after a kernel that
//! supports strided stores become views.
//!
//! Attention produces (..., heads, rows, width), and its readers nearly always need the heads of a row to be adjacent.
//! An output whose readers all swap heads and rows is stored in that order, and the swap becomes a view. Outputs of one
//! kernel that are only concatenated (the gradients of queries, keys and values from one projection) are stored as
//! slices of the joined buffer. Images keep the layout that `nhwc` chose.
//!
//! The choice cannot change a result, since every reader uses the chosen layout.

use crate::backend::Backend;
use crate::lowered::{Join, Lowered, Stores};
use crate::passes::nhwc;
use perilune_core::graph::{Graph, Node, NodeId};
use perilune_core::ops::{Class, create, join, movement};
use perilune_core::{Layout, Shape};
use smallvec::SmallVec;

/// Sets `stores` and leaves the graph unchanged. Readers are counted before equal nodes are merged.
pub fn apply(mut step: Lowered, backend: &dyn Backend) -> Lowered {
    let readers = Readers::new(&step, backend);
    let mut stores = Stores::default();
    for id in step.graph.ids().filter(|id| readers.reached[id.index()]) {
        let node = step.graph.node(id);
        if !matches!(node.op.class, Class::Library | Class::Fused(_) | Class::TupleGet) {
            continue;
        }
        if let Some(layout) = readers.layout(id) {
            stores.layouts.insert(id, layout);
        }
        if node.op == &join::CAT
            && let Some(join) = readers.join(id)
        {
            stores.joins.insert(id, join);
        }
    }
    step.stores = stores;
    step
}

/// The readers of each node of a step.
struct Readers<'a> {
    from: &'a Lowered,
    backend: &'a dyn Backend,
    reached: Vec<bool>,
    users: Vec<SmallVec<[NodeId; 2]>>,
    /// Roots and values of State writes.
    ends: Vec<bool>,
}

impl<'a> Readers<'a> {
    fn new(from: &'a Lowered, backend: &'a dyn Backend) -> Readers<'a> {
        let reached = from.reachable();
        let mut users = vec![SmallVec::new(); from.graph.len()];
        for id in from.graph.ids().filter(|id| reached[id.index()]) {
            for x in &from.graph.node(id).inputs {
                users[x.index()].push(id);
            }
        }
        let mut ends = vec![false; from.graph.len()];
        for id in from.roots.iter().chain(&from.state_writes) {
            ends[id.index()] = true;
        }
        Readers { from, backend, reached, users, ends }
    }

    /// The layout of node `id`, an op or an output of one, over its own buffer, if it is not contiguous.
    fn layout(&self, id: NodeId) -> Option<Layout> {
        let g = &self.from.graph;
        let (main, output) = output_of(g, id);
        if output == 0 && self.from.channels_last.contains(&main) {
            return Some(nhwc::last(g.shape(id)));
        }
        if !self.is_swapped(id) {
            return None;
        }
        let swapped = heads_inside(g.shape(id));
        self.backend.can_store_layout(g.node(main), output, &swapped).then_some(swapped)
    }

    /// Whether all readers of a node swap its heads and rows. Fused ops are not counted, since they read through any
    /// strides.
    fn is_swapped(&self, id: NodeId) -> bool {
        let g = &self.from.graph;
        let users =
            || self.users[id.index()].iter().map(|u| g.node(*u)).filter(|u| !matches!(u.op.class, Class::TupleGet));
        let takes = |u: &Node| is_swap(u) || matches!(u.op.class, Class::Fused(_));
        !self.ends[id.index()] && users().any(is_swap) && users().all(takes)
    }

    /// How the inputs of concatenation `cat` are stored as slices of one buffer. This requires that they are outputs of
    /// one fused op, that nothing else reads them, and that its kernel can store them there.
    fn join(&self, cat: NodeId) -> Option<Join> {
        let g = &self.from.graph;
        let node = g.node(cat);
        let (op, _) = output_of(g, node.inputs[0]);
        if !matches!(g.node(op).op.class, Class::Fused(_)) {
            return None;
        }
        let whole = if self.is_swapped(cat) { heads_inside(node.shape) } else { Layout::contiguous(node.shape) };
        let axis = node.attrs[0] as usize;
        let mut slices: SmallVec<[(NodeId, Layout); 3]> = SmallVec::new();
        let mut low = 0;
        for &x in &node.inputs {
            let (of, output) = output_of(g, x);
            let shape = g.shape(x);
            let slice = Layout { shape, offset: whole.offset + low * whole.strides[axis], ..whole };
            low += shape.dims()[axis] as isize;
            let only =
                self.users[x.index()].iter().all(|u| *u == cat || matches!(g.node(*u).op.class, Class::TupleGet));
            if of != op || self.ends[x.index()] || !only || !self.backend.can_store_layout(g.node(op), output, &slice) {
                return None;
            }
            slices.push((x, slice));
        }
        Some(Join { op, whole, slices })
    }
}

/// The op of a node, and the index of its output that the node is.
fn output_of(g: &Graph, id: NodeId) -> (NodeId, usize) {
    let node = g.node(id);
    if node.op == &create::TUPLE_GET { (node.inputs[0], node.attrs[0] as usize) } else { (id, 0) }
}

/// Whether a node swaps dims -3 and -2 and leaves the others.
fn is_swap(node: &Node) -> bool {
    let r = node.shape.rank();
    node.op == &movement::PERMUTE
        && r > 2
        && (0..r).all(|i| {
            let axis = if i == r - 3 {
                r - 2
            } else if i == r - 2 {
                r - 3
            } else {
                i
            };
            node.attrs[i] == axis as i64
        })
}

/// Layout of (..., H, T, D) over a buffer (..., T, H, D).
fn heads_inside(shape: Shape) -> Layout {
    let r = shape.rank();
    let mut axes: SmallVec<[usize; 8]> = (0..r).collect();
    axes.swap(r - 3, r - 2);
    Layout::contiguous(Layout::contiguous(shape).permute(&axes).shape).permute(&axes)
}
