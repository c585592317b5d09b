//! Sends terms of a sum in the dtype in which they were computed: 16-bit floats that are widened to f32 for the sum alone are widened
//! by the collective ([`collective::WIDENED`]). The sum has the same bits, since widening is exact; the terms take half the bytes in
//! memory and over the links.
//!
//! Two devices exchange large terms, those in f32 too, and each reader adds both: fusion recomputes a sum of two 16-bit values rather than
//! store it in f32, as many bytes. A combination would write the sum, which is read by the norm of gradients and by the optimizer. Two
//! numbers have one sum in either order, so both devices get the same bits. A sum that a product follows is waited for at once, and is
//! combined as it is read.

use crate::lowered::Lowered;
use crate::passes::rewriter::Rewriter;
use perilune_core::DType;
use perilune_core::error::Result;
use perilune_core::graph::{Graph, Node, NodeId};
use perilune_core::mesh::{Combine, Mesh};
use perilune_core::ops::collective::{ALL_REDUCE, COLLECTIVE_PERMUTE};
use perilune_core::ops::slicing::STRIDED_PAD;
use perilune_core::ops::{Class, collective, create};
use smallvec::{SmallVec, smallvec};

/// Bytes of terms from which two devices exchange them, as many as copy engines move. Small ones are combined, many in one bucket.
const EXCHANGED_BYTES: usize = 512 << 10;

/// Rewrites the sums of a divided step.
pub(super) fn apply(from: &Lowered, mesh: &Mesh) -> Result<Lowered> {
    let mut to = Rewriter::new(from);
    let leads = leads_to_products(&from.graph);
    for id in from.graph.ids() {
        to.out.graph.modes.loc = from.graph.loc_of(id);
        let new = match widened(&from.graph, id) {
            Some(moves) => sum(from, &mut to, id, &moves, mesh, leads[id.index()])?,
            None if leads[id.index()] => to.copy(from, id),
            None => plain(from, &mut to, id, mesh)?,
        };
        to.map.push(new);
    }
    Ok(to.finish(from))
}

/// What lies between a 16-bit float and a sum of it in f32: the nodes that move or pad the elements behind the cast, the first one last,
/// and the cast. `None` of any other node.
fn widened(g: &Graph, id: NodeId) -> Option<SmallVec<[NodeId; 4]>> {
    let node = g.node(id);
    let code = collective::is_collective(node.op).then(|| collective::code_of(node.op, &node.attrs))??;
    if code != collective::code(Combine::Sum) || node.dtype != DType::F32 {
        return None;
    }
    let mut chain: SmallVec<[NodeId; 4]> = smallvec![node.inputs[0]];
    loop {
        let at = *chain.last()?;
        let node = g.node(at);
        let moves = matches!(node.op.class, Class::View(_)) && node.op != &create::OPTIMIZATION_BARRIER;
        let pads = node.op == &STRIDED_PAD && node.attrs[4] == 0f64.to_bits() as i64;
        match node.op.class {
            Class::Cast => return g.dtype(node.inputs[0]).is_half().then_some(chain),
            _ if (moves || pads) && node.inputs.len() == 1 => chain.push(node.inputs[0]),
            _ => return None,
        }
    }
}

/// Which nodes a product follows.
fn leads_to_products(g: &Graph) -> Vec<bool> {
    let mut out = vec![false; g.len()];
    for id in g.ids().rev() {
        let node = g.node(id);
        let leads = out[id.index()] || node.op.flops.is_some();
        node.inputs.iter().for_each(|x| out[x.index()] |= leads);
    }
    out
}

/// Emits a sum of 16-bit terms, behind what moved them as f32. `leads`: whether a product follows it.
fn sum(from: &Lowered, to: &mut Rewriter, id: NodeId, moves: &[NodeId], mesh: &Mesh, leads: bool) -> Result<NodeId> {
    let mut x = None;
    for at in moves.iter().rev() {
        let node = from.graph.node(*at);
        x = Some(match x {
            // The cast itself.
            None => to.map[node.inputs[0].index()],
            Some(x) => {
                let g = &mut to.out.graph;
                g.add(Node { dtype: g.dtype(x), inputs: smallvec![x], ..node.clone() })
            }
        });
    }
    let (node, g) = (from.graph.node(id), &mut to.out.graph);
    if let Some(own) = x.filter(|x| !leads && is_exchanged(node, mesh, g, *x)) {
        return exchanged(g, node, own);
    }
    let mut attrs = node.attrs.clone();
    let n = attrs.len();
    attrs[n - 1] = collective::WIDENED;
    g.push(node.op, &x.into_iter().collect::<SmallVec<[NodeId; 1]>>(), &attrs)
}

/// Copies a node, or emits an exchange for a sum of large terms in f32.
fn plain(from: &Lowered, to: &mut Rewriter, id: NodeId, mesh: &Mesh) -> Result<NodeId> {
    let node = from.graph.node(id);
    let sums = collective::is_collective(node.op)
        && node.dtype == DType::F32
        && collective::code_of(node.op, &node.attrs) == Some(collective::code(Combine::Sum));
    match node.inputs.first().map(|x| to.map[x.index()]) {
        Some(own) if sums && is_exchanged(node, mesh, &to.out.graph, own) => exchanged(&mut to.out.graph, node, own),
        _ => Ok(to.copy(from, id)),
    }
}

/// Whether two devices exchange the terms of a sum over devices.
fn is_exchanged(sum: &Node, mesh: &Mesh, g: &Graph, term: NodeId) -> bool {
    let nbytes = g.shape(term).numel() * g.dtype(term).size();
    sum.op == &ALL_REDUCE && mesh.size(collective::axis(&sum.attrs)) == 2 && nbytes >= EXCHANGED_BYTES
}

/// Emits the sum of this device's term and that of the other.
fn exchanged(g: &mut Graph, sum: &Node, own: NodeId) -> Result<NodeId> {
    let axis = collective::axis(&sum.attrs);
    let other = g.push(&COLLECTIVE_PERMUTE, &[own], &collective::permutation(axis, [1, 0].into_iter()))?;
    let (own, other) = (g.cast(own, sum.dtype)?, g.cast(other, sum.dtype)?);
    g.add_(own, other)
}
