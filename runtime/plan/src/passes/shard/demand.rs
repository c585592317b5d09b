//! Finds the values that are needed in blocks, in a sweep back from the State writes.
//!
//! Elementwise ops and views pass the need on to their operands; it ends at products and sums, whose own blocks are another
//! matter. The forward sweep then makes a block of a partial sum instead of the whole, and prefers blocks that are needed.
//!
//! Where a term is combined decides how a sum is rounded. So what is noted is a property of a value, which a step may compute more than
//! once: a value that the backward pass recomputes behind an optimization barrier is divided as the one that it repeats, whichever of
//! the two a reader reads.

use super::divider::Divider;
use super::part::Part;
use crate::lowered::Lowered;
use perilune_core::Graph;
use perilune_core::Shape;
use perilune_core::graph::{Attrs, Inputs, NodeId};
use perilune_core::ops::elementwise::MapFn;
use perilune_core::ops::{Class, collective, create};
use perilune_core::sharding::Cut;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// Which values are needed in blocks.
#[derive(Default)]
pub(super) struct Demand {
    /// For each node, the first node of the same value. What follows is noted of that one, but for `reader`.
    value: Vec<NodeId>,
    cuts: Vec<Option<Cut>>,
    /// Of the further results of nodes with several.
    results: FxHashMap<(NodeId, usize), Cut>,
    /// The reader of each node that has exactly one.
    reader: Vec<Option<NodeId>>,
    /// Whether all readers of a value can pass on a term.
    passed_on: Vec<bool>,
}

impl Demand {
    /// The first node of the same value: a node may compute it again, or read it behind an optimization barrier.
    pub fn value(&self, id: NodeId) -> NodeId {
        self.value[id.index()]
    }

    /// The cut in which result `k` of a node is needed.
    pub fn of(&self, id: NodeId, k: usize) -> Option<Cut> {
        let id = self.value[id.index()];
        if k == 0 { self.cuts[id.index()] } else { self.results.get(&(id, k)).copied() }
    }

    /// The only reader of a node.
    pub fn reader(&self, id: NodeId) -> Option<NodeId> {
        self.reader[id.index()]
    }

    /// Whether all readers of a value can pass on a term, so that it need not be combined for them.
    pub fn is_passed_on(&self, id: NodeId) -> bool {
        self.passed_on[self.value[id.index()].index()]
    }

    /// `written`: what a device has of the State that each write stores to.
    pub fn find(d: &Divider, written: &[Part]) -> Demand {
        let from = d.from;
        let count = from.graph.len();
        let (cuts, reader, passed_on) = (vec![None; count], vec![None; count], vec![true; count]);
        let mut out = Demand { value: values(from), cuts, reader, passed_on, ..Demand::default() };
        let mut readers = vec![0u32; count];
        for id in from.roots.iter().chain(&from.state_writes).chain(&from.ok) {
            readers[id.index()] += 1;
            out.passed_on[out.value[id.index()].index()] = false;
        }
        let reached = from.reachable();
        for id in from.graph.ids().filter(|id| reached[id.index()]) {
            for x in &from.graph.node(id).inputs {
                readers[x.index()] += 1;
                out.reader[x.index()] = Some(id);
                let passes = passes_on_terms(&from.graph, id) && d.placed_by(id).is_none() && !d.is_meeting(id);
                out.passed_on[out.value[x.index()].index()] &= d.strict.is_none() && passes;
            }
        }
        for (reader, n) in out.reader.iter_mut().zip(readers) {
            *reader = reader.filter(|_| n == 1);
        }
        for (id, part) in from.state_writes.iter().zip(written) {
            if let Some(cut) = part.cut() {
                out.cuts[out.value[id.index()].index()].get_or_insert(cut);
            }
        }
        for id in from.graph.ids().rev().filter(|id| reached[id.index()]) {
            out.pass_on(d, id);
        }
        out
    }

    fn pass_on(&mut self, d: &Divider, id: NodeId) {
        let node = d.from.graph.node(id);
        if let (Class::TupleGet, Some(cut)) = (node.op.class, self.of(id, 0)) {
            self.results.entry((self.value[node.inputs[0].index()], node.attrs[0] as usize)).or_insert(cut);
            return;
        }
        if let Some(part) = d.placed_by(id).or_else(|| d.blocks_moved_by(id)) {
            if let Ok(Part::Block(cut)) = part {
                self.cuts[self.value[node.inputs[0].index()].index()].get_or_insert(cut);
            }
            return;
        }
        let passes = matches!(node.op.class, Class::View(_) | Class::Map(_) | Class::Cast | Class::Fused(_))
            || d.strict.is_some() && node.op == &collective::ALL_REDUCE;
        let several = d.parts.get(&id).map_or(1, |parts| 1 + parts.last().map_or(0, |p| p.0));
        let Some(k) = (0..several).find(|k| self.of(id, *k).is_some()).filter(|_| passes) else { return };
        if node.op == &create::OPTIMIZATION_BARRIER {
            return;
        }
        let wanted = self.of(id, k).map(Part::Block);
        let all = d.candidates(id, &|_| SmallVec::new(), &|r| self.of(id, r));
        let Some(found) = all.into_iter().find(|c| c.results.get(k).copied() == wanted) else { return };
        for (x, part) in node.inputs.iter().zip(&found.operands) {
            if let Part::Block(cut) = part {
                self.cuts[self.value[x.index()].index()].get_or_insert(*cut);
            }
        }
    }
}

/// For each node, the first node that has the same value: equal ops of equal values have, and a barrier has that of its operand.
fn values(from: &Lowered) -> Vec<NodeId> {
    type Value = (&'static str, Inputs, Attrs, Shape, u64, Option<u32>);
    let mut first: FxHashMap<Value, NodeId> = FxHashMap::default();
    let mut out: Vec<NodeId> = Vec::with_capacity(from.graph.len());
    for id in from.graph.ids() {
        let node = from.graph.node(id);
        if node.op == &create::OPTIMIZATION_BARRIER {
            out.push(out[node.inputs[0].index()]);
            continue;
        }
        let inputs = node.inputs.iter().map(|x| out[x.index()]).collect();
        let kind = node.dtype as u64 | u64::from(node.tf32) << 8;
        let number = from.number(id);
        let value = (node.op.name, inputs, node.attrs.clone(), node.shape, kind, number);
        out.push(*first.entry(value).or_insert(id));
    }
    out
}

/// Whether a node of terms is a term at no cost, and is better for it: moved elements, and sums to which all devices add.
pub(super) fn passes_on_terms(g: &Graph, id: NodeId) -> bool {
    let node = g.node(id);
    match node.op.class {
        Class::View(_) => true,
        Class::Cast => node.dtype.is_float() && node.dtype.size() >= g.dtype(node.inputs[0]).size(),
        Class::Map(MapFn::Copy | MapFn::Neg | MapFn::Add | MapFn::Sub) => true,
        // A number is combined as late as possible: many of them are added first.
        Class::Map(_) | Class::Reduce(_) => node.inputs.iter().all(|x| g.shape(*x).numel() == 1),
        Class::Library => node.op == &collective::ALL_REDUCE,
        _ => false,
    }
}
