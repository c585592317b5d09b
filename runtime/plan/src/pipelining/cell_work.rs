//! Counts the work of the cells of a schedule, so that gradients of weights come where devices would wait ([`super::late_weights`]).
//!
//! Work is counted in operations of products, of nodes that are not fused yet: only the ratios of the passes matter. It is counted in
//! integers, so that all processes of a job find the same order.

use super::assign::{Assignment, Needs};
use super::table::{Action, Cell};
use crate::lowered::Lowered;
use crate::show::products;
use perilune_core::graph::NodeId;
use perilune_core::ops::{Class, Op, attention, attention_block};
use rustc_hash::{FxHashMap, FxHashSet};

/// Operations of a product for which a device needs as long as for an element of another node: 660 TFLOP/s beside 4 TB/s and a byte an
/// element, as most values of fused nodes are not stored.
const FLOPS_AN_ELEMENT: u64 = 200;

/// How much longer than for those of a product a device needs for the operations of attention: an H200 computes about 300 TFLOP/s of a
/// forward pass, and 220 of a backward pass.
const ATTENTION: [(&Op, u64); 4] = [
    (&attention::ATTENTION, 2),
    (&attention_block::ATTENTION_BLOCK, 2),
    (&attention::ATTENTION_BACKWARD, 3),
    (&attention_block::ATTENTION_BLOCK_BACKWARD, 3),
];

/// The work of each cell `F`, `I` and `W`. `sent`: the nodes of backward passes that other stages wait for.
pub(super) fn of(step: &Lowered, a: &Assignment, needs: &Needs, sent: &FxHashSet<NodeId>) -> FxHashMap<Cell, u64> {
    let mut out: FxHashMap<Cell, u64> = FxHashMap::default();
    for id in step.graph.ids().filter(|id| needs.computed[id.index()] != 0) {
        let Some((stage, (action, micro))) = a.stage[id.index()].zip(a.part[id.index()].action()) else { continue };
        let node = step.graph.node(id);
        let action = match action {
            Action::Backward if sent.contains(&id) => Action::Input,
            Action::Backward => Action::Weight,
            other => other,
        };
        let factor = ATTENTION.iter().find(|(op, _)| node.op == *op).map_or(1, |found| found.1);
        let own = match products(&step.graph, id) {
            Some(flops) => (flops as u64).saturating_mul(factor),
            None if matches!(node.op.class, Class::View(_) | Class::TupleGet) => 0,
            None => (node.shape.numel() as u64).saturating_mul(FLOPS_AN_ELEMENT),
        };
        let all = out.entry(Cell::new(stage, action, micro)).or_default();
        *all = all.saturating_add(own);
    }
    out
}
