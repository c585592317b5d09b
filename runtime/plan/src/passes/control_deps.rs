//! Collects control dependencies: for each node, the nodes that the optimization barriers it reads through wait for, and for each
//! transfer between pipeline stages the one before it.

use crate::lowered::Lowered;
use perilune_core::graph::NodeId;
use perilune_core::ops::{Class, collective, create};
use smallvec::SmallVec;

/// Sets `control_deps`. A view inherits the dependencies of its input. Runs after views are resolved.
pub fn apply(mut step: Lowered) -> Lowered {
    let g = &step.graph;
    if !g.nodes().iter().any(|n| n.op == &create::OPTIMIZATION_BARRIER || collective::is_transfer(n.op)) {
        return step;
    }
    let mut transfer = None;
    let mut all: Vec<SmallVec<[NodeId; 2]>> = Vec::with_capacity(g.len());
    for (id, node) in g.ids().zip(g.nodes()) {
        let mut list: SmallVec<[NodeId; 2]> = SmallVec::new();
        let mut add = |x: NodeId| {
            if !list.contains(&x) {
                list.push(x);
            }
        };
        for (k, x) in node.inputs.iter().enumerate() {
            if node.op == &create::OPTIMIZATION_BARRIER && k == 1 {
                let base = step.views.owner(*x);
                let computed = g.generator(base).is_none() && !step.inputs.contains_key(&base);
                if computed {
                    add(base);
                }
            } else if matches!(g.node(*x).op.class, Class::View(_)) {
                all[x.index()].iter().for_each(|w| add(*w));
            }
        }
        if collective::is_transfer(node.op) {
            // Transfers keep their order, which is that of a schedule in which no stages wait for each other in a circle.
            list.extend(transfer.replace(id));
        }
        all.push(list);
    }
    step.control_deps = all;
    step
}
