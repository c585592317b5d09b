//! Converts images to the channels-last layout (NHWC) for devices whose convolutions need it.
//!
//! A graph-to-graph pass before views are resolved. It starts at ops whose kernels store channels last (convolutions).
//! A map over such an image is rewritten over the permuted shape, so that it reads contiguous memory again. A sum over
//! all dims but the channels becomes a sum of columns. Other inputs of a convolution are permuted where they are
//! computed. Every other reader of a permuted node reads a permuted view of it, so the pass cannot change a result.

use crate::backend::Backend;
use crate::lowered::Lowered;
use crate::passes::rewriter::Rewriter;
use perilune_core::error::Result;
use perilune_core::graph::{Graph, Node, NodeId};
use perilune_core::ops::{Class, conv, pool, reduce, slicing};
use perilune_core::{Layout, Shape};
use smallvec::{SmallVec, smallvec};

const TO_LAST: [usize; 4] = [0, 2, 3, 1];
const FROM_LAST: [usize; 4] = [0, 3, 1, 2];

/// Layout of (N, C, H, W) over a buffer (N, H, W, C).
pub fn last(shape: Shape) -> Layout {
    Layout::contiguous(Layout::contiguous(shape).permute(&TO_LAST).shape).permute(&FROM_LAST)
}

/// Whether an op requires channels-last images: a convolution for which the backend has a kernel.
fn starts(node: &Node, backend: &dyn Backend) -> bool {
    conv::OVER_IMAGES.contains(&node.op) && can_store_nhwc(node, backend)
}

/// Whether the kernel of a fused op can store its image channels last.
fn can_store_nhwc(node: &Node, backend: &dyn Backend) -> bool {
    matches!(node.op.class, Class::Fused(_))
        && is_image(node.shape)
        && backend.can_store_layout(node, 0, &last(node.shape))
}

/// Runs the pass. The backend has a kernel for every fused op of `from`.
pub fn apply(from: Lowered, backend: &dyn Backend) -> Result<Lowered> {
    let g = &from.graph;
    if !g.nodes().iter().any(|n| starts(n, backend)) {
        return Ok(from);
    }
    let wanted = wanted(g, backend);
    let mut to = Turned { from: &from, to: Rewriter::new(&from), turned: vec![None; g.len()] };
    for id in g.ids() {
        to.to.out.graph.modes.loc = g.loc_of(id);
        let (new, turned) = to.visit(id, wanted[id.index()], backend)?;
        to.to.map.push(new);
        to.turned[id.index()] = turned;
    }
    Ok(to.to.finish(&from))
}

fn is_image(shape: Shape) -> bool {
    shape.rank() == 4 && shape.numel() > 0
}

/// Whether a node is a view that keeps its input as it is (an optimization barrier, a detach) or slices the batch.
fn hands_on(node: &Node) -> bool {
    let of_batch = node.op == &slicing::SLICE && node.attrs[0] == 0;
    is_image(node.shape) && (node.attrs.is_empty() || of_batch)
}

fn is_map(node: &Node) -> bool {
    matches!(node.op.class, Class::Map(_) | Class::Cast) && is_image(node.shape)
}

/// Marks maps to be permuted although none of their inputs is: those that a convolution reads, and those whose reader
/// is permuted.
fn wanted(g: &Graph, backend: &dyn Backend) -> Vec<bool> {
    let mut out = vec![false; g.len()];
    for id in g.ids().rev() {
        let node = g.node(id);
        let passes = out[id.index()] && is_map(node);
        if !passes && !starts(node, backend) {
            continue;
        }
        for x in &node.inputs {
            out[x.index()] |= is_image(g.shape(*x)) && (!passes || g.shape(*x) == node.shape);
        }
    }
    // First mark what will be permuted, then the unpermuted inputs of equal shape.
    let mut turned = vec![false; g.len()];
    for id in g.ids() {
        let node = g.node(id);
        let follows = || node.inputs.iter().any(|x| turned[x.index()] && g.shape(*x) == node.shape);
        turned[id.index()] = match node.op.class {
            _ if is_map(node) => out[id.index()] || follows(),
            Class::View(_) => hands_on(node) && turned[node.inputs[0].index()],
            Class::Fused(_) if pool::POOLS.contains(&node.op) => turned[node.inputs[0].index()],
            _ => starts(node, backend) && node.op != &conv::CONV2D_BACKWARD_WEIGHT,
        };
    }
    for id in g.ids().rev().filter(|id| is_map(g.node(*id))) {
        if !turned[id.index()] {
            continue;
        }
        for x in g.node(id).inputs.iter().filter(|x| is_map(g.node(**x)) && g.shape(**x) == g.shape(id)) {
            (out[x.index()], turned[x.index()]) = (true, true);
        }
    }
    out
}

struct Turned<'a> {
    from: &'a Lowered,
    to: Rewriter,
    /// For each old node that is stored channels last, the node of shape (N, H, W, C).
    turned: Vec<Option<NodeId>>,
}

impl Turned<'_> {
    /// Returns the node that replaces `id`, and its permuted form.
    fn visit(&mut self, id: NodeId, wanted: bool, backend: &dyn Backend) -> Result<(NodeId, Option<NodeId>)> {
        let g = &self.from.graph;
        let node = g.node(id);
        match node.op.class {
            _ if is_map(node) => {
                let follows = |x: &NodeId| self.turned[x.index()].is_some() && g.shape(*x) == node.shape;
                if wanted || node.inputs.iter().any(follows) {
                    let inputs: Result<SmallVec<[NodeId; 4]>> = node.inputs.iter().map(|x| self.operand(*x)).collect();
                    return self.add(node, inputs?);
                }
            }
            Class::View(_) if hands_on(node) => {
                if let Some(x) = self.turned[node.inputs[0].index()] {
                    let mut inputs: SmallVec<[NodeId; 4]> =
                        node.inputs.iter().map(|x| self.to.map[x.index()]).collect();
                    inputs[0] = x;
                    return self.add(node, inputs);
                }
            }
            Class::Reduce(_) => {
                if let Some((x, axes)) = self.columns(node) {
                    return Ok((self.to.out.graph.push(node.op, &[x], &axes)?, None));
                }
            }
            _ => {}
        }
        let new = self.to.copy(self.from, id);
        let follows = || pool::POOLS.contains(&node.op) && self.turned[node.inputs[0].index()].is_some();
        let writes_last = starts(node, backend) || (follows() && can_store_nhwc(node, backend));
        if !writes_last {
            return Ok((new, None));
        }
        self.to.out.channels_last.insert(new);
        // A weight's gradient is combined with the weight, which is not permuted.
        let turns = node.op != &conv::CONV2D_BACKWARD_WEIGHT;
        let turned = if turns { Some(self.to.out.graph.permute(new, &TO_LAST)?) } else { None };
        Ok((new, turned))
    }

    /// Appends `node` over the permuted shape.
    fn add(&mut self, node: &Node, inputs: SmallVec<[NodeId; 4]>) -> Result<(NodeId, Option<NodeId>)> {
        let shape = Layout::contiguous(node.shape).permute(&TO_LAST).shape;
        let g = &mut self.to.out.graph;
        let turned = g.add(Node { shape, inputs, ..node.clone() });
        Ok((g.permute(turned, &FROM_LAST)?, Some(turned)))
    }

    /// Returns an input of a permuted map.
    fn operand(&mut self, x: NodeId) -> Result<NodeId> {
        if let Some(turned) = self.turned[x.index()] {
            return Ok(turned);
        }
        let mut new = self.to.map[x.index()];
        let g = &mut self.to.out.graph;
        let shape = g.shape(new);
        if shape.is_scalar() {
            return Ok(new);
        }
        if shape.rank() < 4 {
            let mut dims: SmallVec<[usize; 4]> = smallvec![1; 4 - shape.rank()];
            dims.extend_from_slice(shape.dims());
            new = g.reshape(new, &dims)?;
        }
        g.permute(new, &TO_LAST)
    }

    /// Matches a reduction of a permuted image whose result is contiguous; returns the image and its axes.
    fn columns(&self, node: &Node) -> Option<(NodeId, [i64; 2])> {
        let g = &self.from.graph;
        let x = node.inputs[0];
        if let Some(turned) = self.turned[x.index()] {
            let axes = match node.attrs[..] {
                [2, 4] => [1, 3],
                [1, 2] => [3, 4],
                [0, 4] => [0, 4],
                [1, 4] => [1, 4],
                _ => return None,
            };
            return Some((turned, axes));
        }
        // Sums over height and width, then over the batch, become one sum over all rows.
        let inner = g.node(x);
        if inner.op != node.op || node.attrs[..] != [0, 1] || inner.attrs[..] != [2, 4] || node.op == &reduce::PROD {
            return None;
        }
        Some((self.turned[inner.inputs[0].index()]?, [0, 3]))
    }
}
