//! Counts the work of the cells of a schedule, by which gradients of weights come where devices would wait ([`super::late_weights`]), and
//! orders the nodes of the two cells of a pair.
//!
//! Work is counted in operations of products, of nodes that are not fused yet: only the ratios of the passes matter. It is counted in
//! integers, so that all processes of a job find the same order.

use super::assign::{Assignment, Needs};
use super::table::{Action, Cell, Table};
use crate::lowered::Lowered;
use crate::show::products;
use perilune_core::graph::NodeId;
use perilune_core::mesh::Mesh;
use perilune_core::ops::{Class, Op, attention, attention_block, collective};
use rustc_hash::{FxHashMap, FxHashSet};

/// Operations of a product for which a device needs as long as for an element of another node: 660 TFLOP/s beside 4 TB/s and a byte an
/// element, as most values of fused nodes are not stored.
const FLOPS_AN_ELEMENT: u64 = 200;

/// Operations of a product for which a device needs as long as for a byte of an exchange: 660 TFLOP/s beside 330 GB/s.
const FLOPS_A_BYTE: u64 = 2000;

/// How much longer than for those of a product a device needs for the operations of attention: an H200 computes about 300 TFLOP/s of a
/// forward pass, and 220 of a backward pass.
const ATTENTION: [(&Op, u64); 4] = [
    (&attention::ATTENTION, 2),
    (&attention_block::ATTENTION_BLOCK, 2),
    (&attention::ATTENTION_BACKWARD, 3),
    (&attention_block::ATTENTION_BLOCK_BACKWARD, 3),
];

/// The work of each cell `F`, `I` and `W`.
#[derive(Default)]
pub(super) struct CellWork {
    pub computes: FxHashMap<Cell, u64>,
    /// Of exchanges with devices of other axes, without those that only the update waits for.
    pub exchanges: FxHashMap<Cell, u64>,
}

impl CellWork {
    /// `sent`: the nodes of backward passes that other stages wait for.
    pub fn of(step: &Lowered, mesh: &Mesh, a: &Assignment, needs: &Needs, sent: &FxHashSet<NodeId>) -> CellWork {
        let mut out = CellWork::default();
        for (id, cell) in cells(step, a, needs) {
            let cell = part(cell, sent.contains(&id));
            let task = Task::of(step, mesh, id, cell);
            let all = if task.is_exchange { &mut out.exchanges } else { &mut out.computes };
            let all = all.entry(cell).or_default();
            *all = all.saturating_add(task.work);
        }
        out
    }
}

/// The nodes that stages compute in passes, in order, each with the cell of its whole pass.
fn cells(step: &Lowered, a: &Assignment, needs: &Needs) -> impl Iterator<Item = (NodeId, Cell)> {
    let computed = step.graph.ids().filter(|id| needs.computed[id.index()] != 0);
    computed.filter_map(|id| {
        let (stage, (action, micro)) = a.stage[id.index()].zip(a.part[id.index()].action())?;
        Some((id, Cell::new(stage, action, micro)))
    })
}

/// Whether a node is an input of the step, or a view or a cast of one.
fn is_stored(step: &Lowered, id: NodeId) -> bool {
    let node = step.graph.node(id);
    match node.op.class {
        Class::View(_) | Class::Cast => is_stored(step, node.inputs[0]),
        _ => step.inputs.contains_key(&id),
    }
}

/// Whether an exchange is part of a layer, and not the sum of a gradient.
fn is_routed(step: &Lowered, id: NodeId) -> bool {
    step.graph.node(id).op == &collective::ALL_TO_ALL
}

/// The work of an exchange that the next node of a pass waits for: the bytes over the link of a device. Nothing for other nodes, such as
/// gatherings of weights, which come ahead.
fn exchanges(step: &Lowered, mesh: &Mesh, id: NodeId) -> Option<u64> {
    let node = step.graph.node(id);
    let others = |op: &Op| (node.op == op).then(|| mesh.size(collective::axis(&node.attrs)) as u64 - 1);
    let bytes = (node.shape.numel() as u64).saturating_mul(node.dtype.size() as u64);
    let moved = others(&collective::ALL_TO_ALL).or_else(|| {
        let is_ahead = || is_stored(step, node.inputs[0]);
        others(&collective::ALL_GATHER).filter(|_| !is_ahead())
    });
    let sent = if let Some(others) = moved {
        bytes / (others + 1) * others
    } else if let Some(others) = others(&collective::ALL_REDUCE) {
        (bytes / (others + 1)).saturating_mul(2 * others)
    } else {
        bytes.saturating_mul(others(&collective::REDUCE_SCATTER)?)
    };
    Some(sent.saturating_mul(FLOPS_A_BYTE))
}

fn computes(step: &Lowered, id: NodeId) -> u64 {
    let node = step.graph.node(id);
    let factor = ATTENTION.iter().find(|(op, _)| node.op == *op).map_or(1, |found| found.1);
    match products(&step.graph, id) {
        Some(flops) => (flops as u64).saturating_mul(factor),
        None if matches!(node.op.class, Class::View(_) | Class::TupleGet) => 0,
        None => (node.shape.numel() as u64).saturating_mul(FLOPS_AN_ELEMENT),
    }
}

/// The part of a pass to which a node belongs. `is_sent`: another stage waits for it.
fn part(pass: Cell, is_sent: bool) -> Cell {
    let action = match pass.action {
        Action::Backward if is_sent => Action::Input,
        Action::Backward => Action::Weight,
        other => other,
    };
    Cell { action, ..pass }
}

/// The order of the nodes of each pair of a table, as numbers that grow. Each cell keeps its own order. While one exchanges, the other
/// computes; of two that may go on, the one that is less far.
pub(super) fn pair_order(
    step: &Lowered,
    mesh: &Mesh,
    a: &Assignment,
    needs: &Needs,
    sent: &FxHashSet<NodeId>,
    table: &Table,
) -> FxHashMap<NodeId, u32> {
    let mut nodes: FxHashMap<Cell, Vec<(NodeId, Task)>> = table.pairs().flatten().map(|c| (*c, Vec::new())).collect();
    for (id, pass) in cells(step, a, needs) {
        let part = part(pass, sent.contains(&id));
        // A table has a backward pass whole or in parts.
        let cell = if nodes.contains_key(&part) { part } else { pass };
        if let Some(all) = nodes.get_mut(&cell) {
            all.push((id, Task::of(step, mesh, id, part)));
        }
    }
    let mut out = FxHashMap::default();
    for pair in table.pairs() {
        let all = [&nodes[&pair[0]], &nodes[&pair[1]]];
        let order = alternate(all.map(|nodes| nodes.iter().map(|node| node.1).collect()));
        let mut next = [0; 2];
        for (place, cell) in order.into_iter().enumerate() {
            out.insert(all[cell][next[cell]].0, place as u32);
            next[cell] += 1;
        }
    }
    out
}

/// The work of a node, and whether the links do it.
#[derive(Clone, Copy)]
struct Task {
    work: u64,
    is_exchange: bool,
}

impl Task {
    /// `part`: the cell `F`, `I` or `W` of the node. In `W` the sum of a gradient is no exchange that the next node waits for.
    fn of(step: &Lowered, mesh: &Mesh, id: NodeId, part: Cell) -> Task {
        match exchanges(step, mesh, id) {
            Some(work) if part.action != Action::Weight || is_routed(step, id) => Task { work, is_exchange: true },
            _ => Task { work: computes(step, id), is_exchange: false },
        }
    }
}

/// Merges two lists of tasks: which list each next task is from.
fn alternate(lists: [Vec<Task>; 2]) -> Vec<usize> {
    let whole = lists.each_ref().map(|list| list.iter().map(|task| u128::from(task.work)).sum::<u128>());
    // When the kernels and the link are free, and when each list may go on.
    let (mut kernels, mut link) = (0u128, 0u128);
    let (mut ready, mut done, mut next) = ([0u128; 2], [0u128; 2], [0usize; 2]);
    let mut order = Vec::with_capacity(lists[0].len() + lists[1].len());
    // The list that may go on first; of both that may now, the one that exchanges, then that of which a smaller share is done.
    let key = |k: usize, next: &[usize; 2], ready: &[u128; 2], done: &[u128; 2], kernels: u128| {
        let task = lists[k].get(next[k])?;
        let start = if task.is_exchange { ready[k] } else { kernels.max(ready[k]) };
        let is_ahead = done[k].saturating_mul(whole[1 - k]) > done[1 - k].saturating_mul(whole[k]);
        Some((start, !task.is_exchange, is_ahead, k))
    };
    while let Some((.., k)) = (0..2).filter_map(|k| key(k, &next, &ready, &done, kernels)).min() {
        let task = lists[k][next[k]];
        let work = u128::from(task.work);
        let clock = if task.is_exchange { &mut link } else { &mut kernels };
        *clock = (*clock).max(ready[k]) + work;
        ready[k] = *clock;
        (done[k], next[k]) = (done[k] + work, next[k] + 1);
        order.push(k);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_compute_while_the_other_exchanges() {
        let list = |tasks: &[(u64, bool)]| tasks.iter().map(|t| Task { work: t.0, is_exchange: t.1 }).collect();
        let (kernel, exchange) = ((3, false), (3, true));
        // Both begin with a kernel. The exchange of the first list runs beside the second kernel of the other, and so on.
        let both = [list(&[kernel, exchange, kernel]), list(&[kernel, kernel, exchange])];
        assert_eq!(alternate(both), [0, 0, 1, 1, 1, 0]);
        // Without exchanges they alternate by their shares.
        assert_eq!(alternate([list(&[kernel; 2]), list(&[kernel; 4])]), [0, 1, 1, 0, 1, 1]);
        assert_eq!(alternate([list(&[]), list(&[kernel, exchange])]), [1, 1]);
        assert_eq!(alternate([list(&[(u64::MAX, false); 2]), list(&[(u64::MAX, true); 2])]).len(), 4);
    }
}
