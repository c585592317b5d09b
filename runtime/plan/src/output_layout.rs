//! Chooses the memory layout of the outputs of kept and library ops, so that copies behind them vanish.
//!
//! Attention makes (..., heads, rows, width), and what follows nearly always wants a row's heads beside each other. So an
//! output whose readers all swap heads and rows is written in that order, and the swap costs nothing. Outputs of one kernel
//! that are only joined (the gradients of queries, keys and values from one projection) are written as slices of the joined
//! buffer. Images lie as `channels` says.
//!
//! None of this can make a result wrong: every reader goes through the layout that is chosen.

use crate::backend::Backend;
use crate::lower::Lowered;
use crate::passes::nhwc;
use perilune_core::graph::{Graph, Node, NodeId};
use perilune_core::ops::{Class, create, movement};
use perilune_core::{Layout, Shape};
use smallvec::{SmallVec, smallvec};

/// Who reads what in a step whose nodes are about to be laid out.
pub struct Readers<'a> {
    from: &'a Lowered,
    backend: &'a dyn Backend,
    users: Vec<SmallVec<[NodeId; 2]>>,
    /// Roots and values of state_writes.
    ends: Vec<bool>,
}

impl<'a> Readers<'a> {
    pub fn new(from: &'a Lowered, wanted: &[bool], backend: &'a dyn Backend) -> Readers<'a> {
        let mut users = vec![SmallVec::new(); from.graph.len()];
        for id in from.graph.ids().filter(|id| wanted[id.index()]) {
            for x in &from.graph.node(id).inputs {
                users[x.index()].push(id);
            }
        }
        let mut ends = vec![false; from.graph.len()];
        for id in from.roots.iter().chain(&from.state_writes) {
            ends[id.index()] = true;
        }
        Readers { from, backend, users, ends }
    }

    /// The layout of node `id`, an op or an output of one, over a buffer of its own.
    pub fn layout(&self, id: NodeId) -> Layout {
        let g = &self.from.graph;
        let plain = Layout::contiguous(g.shape(id));
        let (main, output) = output_of(g, id);
        if output == 0 && self.from.last.contains(&main) {
            return nhwc::last(g.shape(id));
        }
        if !self.is_swapped(id) {
            return plain;
        }
        let turned = heads_inside(g.shape(id));
        if self.backend.can_store_layout(g.node(main), output, &turned) { turned } else { plain }
    }

    /// Whether all that read a node as it lies swap its heads and rows, kept ops apart: they take any strides.
    fn is_swapped(&self, id: NodeId) -> bool {
        let g = &self.from.graph;
        let users =
            || self.users[id.index()].iter().map(|u| g.node(*u)).filter(|u| !matches!(u.op.class, Class::TupleGet));
        let takes = |u: &Node| is_swap(u) || matches!(u.op.class, Class::Fused(_));
        !self.ends[id.index()] && users().any(is_swap) && users().all(takes)
    }

    /// If `cat` joins outputs of one kept op that nothing else reads and its kernel can write there: a node for the joined
    /// buffer, over which these outputs then lie. `map` names the nodes of `out` by those of the step.
    pub fn join(&self, cat: NodeId, map: &[NodeId], out: &mut Lowered) -> Option<NodeId> {
        let g = &self.from.graph;
        let node = g.node(cat);
        let (main, _) = output_of(g, node.inputs[0]);
        if !matches!(g.node(main).op.class, Class::Fused(_)) {
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
            if of != main
                || self.ends[x.index()]
                || !only
                || !self.backend.can_store_layout(g.node(main), output, &slice)
            {
                return None;
            }
            slices.push((map[x.index()], slice));
        }
        // The same op recorded twice is one node by now; what has read it where it lay must find it there.
        let lies = |y: NodeId| out.views.iter().enumerate().all(|(k, v)| (v.0 == y) == (k == y.index()));
        let twice = (1..slices.len()).any(|k| slices[..k].iter().any(|s| s.0 == slices[k].0));
        if twice || !slices.iter().all(|s| lies(s.0)) {
            return None;
        }
        let id = out.graph.add(Node { op: &create::JOINED, inputs: smallvec![map[main.index()]], ..node.clone() });
        out.views.push((id, whole));
        for (y, slice) in slices {
            out.views[y.index()] = (id, slice);
        }
        Some(id)
    }
}

/// The op behind a node, and which of its outputs the node is.
fn output_of(g: &Graph, id: NodeId) -> (NodeId, usize) {
    let node = g.node(id);
    if node.op == &create::TUPLE_GET { (node.inputs[0], node.attrs[0] as usize) } else { (id, 0) }
}

/// Whether a node swaps dims -3 and -2 and leaves the rest.
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

/// (..., H, T, D) over a buffer (..., T, H, D).
fn heads_inside(shape: Shape) -> Layout {
    let r = shape.rank();
    let mut axes: SmallVec<[usize; 8]> = (0..r).collect();
    axes.swap(r - 3, r - 2);
    Layout::contiguous(Layout::contiguous(shape).permute(&axes).shape).permute(&axes)
}
