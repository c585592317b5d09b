//! Defines clusters, sets of primitives that share a kernel, and answers the queries of later passes about them.

use crate::ir::Level;
use crate::lowered::Lowered;
use crate::passes::pad_gemm;
use crate::reading::{Reading, reading};
use perilune_core::graph::{Node, NodeId};
use perilune_core::ops::{Class, ReduceFn, slicing};
use perilune_core::{Layout, Shape};
use smallvec::SmallVec;

/// A reduction as `outer x reduced x inner`.
#[derive(Clone, Copy, Debug)]
pub struct Fold {
    pub f: ReduceFn,
    pub outer: usize,
    pub reduced: usize,
    pub inner: usize,
}

pub fn fold(node: &Node, input: Shape) -> Option<Fold> {
    let Class::Reduce(f) = node.op.class else { return None };
    let (lo, hi) = (node.attrs[0] as usize, node.attrs[1] as usize);
    let d = input.dims();
    let n = |s: &[usize]| s.iter().product();
    Some(Fold { f, outer: n(&d[..lo]), reduced: n(&d[lo..hi]), inner: n(&d[hi..]) })
}

#[derive(Clone, Debug)]
pub struct Cluster {
    pub depth: u32,
    /// Elements of the iteration space.
    pub numel: usize,
    /// Row length, once a row reduction or broadcast has determined it.
    pub cols: Option<usize>,
    /// Batches of a column reduction, once one has determined them.
    pub batch: Option<usize>,
    pub nodes: Vec<NodeId>,
    /// Number of reads from memory.
    pub(crate) loads: usize,
    /// The cluster that this one was merged into.
    pub(crate) into: Option<usize>,
}

impl Cluster {
    /// `batch, rows, cols` of the region.
    pub fn space(&self) -> (usize, usize, usize) {
        match self.cols {
            None => (1, 1, self.numel),
            Some(c) => {
                let b = self.batch.unwrap_or(1);
                (b, self.numel.checked_div(b * c).unwrap_or(0), c)
            }
        }
    }
}

/// The kernel that computes a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Assignment {
    /// Not computed by a kernel: a leaf, a generator or a view.
    None,
    Library {
        depth: u32,
    },
    Cluster(usize),
}

/// The result of fusion: the clusters, the kernel of each node, and which nodes are stored.
#[derive(Debug)]
pub struct Fusion {
    pub clusters: Vec<Cluster>,
    pub assignment: Vec<Assignment>,
    pub level: Vec<Level>,
    pub stored: Vec<bool>,
}

impl Fusion {
    pub fn cluster_of(&self, id: NodeId) -> Option<usize> {
        match self.assignment[id.index()] {
            Assignment::Cluster(k) => Some(find(&self.clusters, k)),
            _ => None,
        }
    }
}

pub(crate) fn find(clusters: &[Cluster], mut k: usize) -> usize {
    while let Some(next) = clusters[k].into {
        k = next;
    }
    k
}

/// The reads of a node: the owner of the elements, and their layout over the node's elements.
pub type Reads = SmallVec<[(NodeId, Layout); 3]>;

/// Whether node `id` pads the rows of its input with zeros, as inserted by `passes::pad_gemm`.
pub fn fills(low: &Lowered, id: NodeId) -> bool {
    let node = low.graph.node(id);
    let (Some(word), true) = (low.fills, node.op == &slicing::STRIDED_PAD) else { return false };
    let (axis, size) = (node.attrs[0] as usize, node.dtype.size());
    let row = |s: Shape| s.dims().last().map_or(0, |d| d * size);
    let (from, to) = (row(low.graph.shape(node.inputs[0])), row(node.shape));
    axis + 1 == node.shape.rank()
        && node.attrs[1..] == [0, 1, node.attrs[3], 0]
        && to.is_multiple_of(word)
        && (from + 1..from + pad_gemm::LINE).contains(&to)
}

/// Elements of the iteration space of a clustered node: its own, or its input's if it reduces or pads rows.
pub fn source_numel(low: &Lowered, id: NodeId) -> usize {
    let node = low.graph.node(id);
    match node.op.class {
        Class::Reduce(_) | Class::Library => low.graph.shape(node.inputs[0]).numel(),
        _ => node.shape.numel(),
    }
}

/// Returns the reads of a clustered node.
pub fn reads(low: &Lowered, id: NodeId) -> Reads {
    let node = low.graph.node(id);
    match node.op.class {
        Class::Reduce(_) | Class::Library => {
            let x = node.inputs[0];
            std::iter::once(low.read(x, low.graph.shape(x))).collect()
        }
        _ => node.inputs.iter().map(|x| low.read(*x, node.shape)).collect(),
    }
}

/// Whether a node of cluster `k` reads `base` as a register of that cluster.
pub fn in_register(low: &Lowered, f: &Fusion, k: usize, base: NodeId, layout: &Layout, n: usize) -> bool {
    let m = low.graph.shape(base).numel();
    f.cluster_of(base) == Some(k)
        && !fills(low, base)
        && match (f.level[base.index()], reading(layout, n, m)) {
            (Level::Full | Level::Row, Reading::Same) => true,
            (Level::Row, Reading::Broadcast) => n == f.clusters[k].numel,
            _ => false,
        }
}
