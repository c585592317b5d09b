//! Stores, for each node of a lowered step, the node that owns its elements and their layout in it.
//!
//! Most nodes own their elements, contiguous. Only other layouts are stored, so a node takes 8 bytes instead of a layout's 152.

use perilune_core::graph::{Graph, NodeId};
use perilune_core::{Layout, Shape};

/// The view of each node, in the order of the graph.
#[derive(Clone, Default, Debug)]
pub struct ViewTable {
    /// The owner, and the number of the layout or [`PLAIN`].
    views: Vec<(NodeId, u32)>,
    layouts: Vec<Layout>,
}

/// The elements are contiguous, with the shape of the node.
const PLAIN: u32 = u32::MAX;

impl ViewTable {
    pub fn len(&self) -> usize {
        self.views.len()
    }

    pub fn reserve(&mut self, nodes: usize) {
        self.views.reserve(nodes);
    }

    /// The node that owns the elements of `x`.
    pub fn owner(&self, x: NodeId) -> NodeId {
        self.views[x.index()].0
    }

    /// The owner of the elements of `x` if these are contiguous there.
    pub fn plain(&self, x: NodeId) -> Option<NodeId> {
        let (owner, layout) = self.views[x.index()];
        (layout == PLAIN).then_some(owner)
    }

    /// The owner of the elements of node `x`, which has `shape`, and their layout over it.
    pub fn get(&self, x: NodeId, shape: Shape) -> (NodeId, Layout) {
        let (owner, layout) = self.views[x.index()];
        (owner, if layout == PLAIN { Layout::contiguous(shape) } else { self.layouts[layout as usize] })
    }

    /// Appends the view of the next node, which has `shape`.
    pub fn push(&mut self, owner: NodeId, layout: Layout, shape: Shape) {
        let number = self.number(layout, shape);
        self.views.push((owner, number));
    }

    /// Replaces the view of node `x`, which has `shape`.
    pub fn set(&mut self, x: NodeId, owner: NodeId, layout: Layout, shape: Shape) {
        self.views[x.index()] = (owner, self.number(layout, shape));
    }

    /// Gives every node that was added to the graph since the last call a contiguous layout over its own elements.
    pub fn own_rest(&mut self, graph: &Graph) {
        self.views.extend((self.views.len()..graph.len()).map(|k| (NodeId(k as u32), PLAIN)));
    }

    fn number(&mut self, layout: Layout, shape: Shape) -> u32 {
        if layout == Layout::contiguous(shape) {
            return PLAIN;
        }
        self.layouts.push(layout);
        (self.layouts.len() - 1) as u32
    }
}
