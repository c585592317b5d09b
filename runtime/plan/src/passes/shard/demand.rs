//! Finds the values that are needed in blocks, in a sweep back from the State writes.
//!
//! Elementwise ops and views pass the need on to their operands; it ends at products and sums, whose own blocks are another
//! matter. The forward sweep then makes a block of a partial sum instead of the whole, and prefers blocks that are needed.

use super::divider::Divider;
use super::part::Part;
use perilune_core::Graph;
use perilune_core::graph::NodeId;
use perilune_core::ops::elementwise::MapFn;
use perilune_core::ops::{Class, collective, create};
use perilune_core::sharding::Cut;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// Which values are needed in blocks.
#[derive(Default)]
pub(super) struct Demand {
    cuts: Vec<Option<Cut>>,
    /// Of the further results of nodes with several.
    results: FxHashMap<(NodeId, usize), Cut>,
    /// The reader of each node that has exactly one.
    reader: Vec<Option<NodeId>>,
    /// Whether all readers of a node can pass on a term.
    passed_on: Vec<bool>,
}

impl Demand {
    /// The cut in which result `k` of a node is needed.
    pub fn of(&self, id: NodeId, k: usize) -> Option<Cut> {
        if k == 0 { self.cuts[id.index()] } else { self.results.get(&(id, k)).copied() }
    }

    /// The only reader of a node.
    pub fn reader(&self, id: NodeId) -> Option<NodeId> {
        self.reader[id.index()]
    }

    /// Whether all readers of a node can pass on a term, so that it need not be combined for them.
    pub fn is_passed_on(&self, id: NodeId) -> bool {
        self.passed_on[id.index()]
    }

    /// `written`: what a device has of the State that each write stores to.
    pub fn find(d: &Divider, written: &[Part]) -> Demand {
        let from = d.from;
        let count = from.graph.len();
        let (cuts, reader, passed_on) = (vec![None; count], vec![None; count], vec![true; count]);
        let mut out = Demand { cuts, reader, passed_on, ..Demand::default() };
        let mut readers = vec![0u32; count];
        for id in from.roots.iter().chain(&from.state_writes).chain(&from.ok) {
            readers[id.index()] += 1;
            out.passed_on[id.index()] = false;
        }
        let reached = from.reachable();
        for id in from.graph.ids().filter(|id| reached[id.index()]) {
            for x in &from.graph.node(id).inputs {
                readers[x.index()] += 1;
                out.reader[x.index()] = Some(id);
                out.passed_on[x.index()] &= d.strict.is_none() && passes_on_terms(&from.graph, id);
            }
        }
        for (reader, n) in out.reader.iter_mut().zip(readers) {
            *reader = reader.filter(|_| n == 1);
        }
        for (id, part) in from.state_writes.iter().zip(written) {
            if let Some(cut) = part.cut() {
                out.cuts[id.index()].get_or_insert(cut);
            }
        }
        for id in from.graph.ids().rev().filter(|id| reached[id.index()]) {
            out.pass_on(d, id);
        }
        out
    }

    fn pass_on(&mut self, d: &Divider, id: NodeId) {
        let node = d.from.graph.node(id);
        if let (Class::TupleGet, Some(cut)) = (node.op.class, self.cuts[id.index()]) {
            self.results.entry((node.inputs[0], node.attrs[0] as usize)).or_insert(cut);
            return;
        }
        let passes = matches!(node.op.class, Class::View(_) | Class::Map(_) | Class::Cast | Class::Fused(_))
            || d.strict.is_some() && node.op == &collective::ALL_REDUCE;
        let several = d.parts.get(&id).map_or(1, |parts| 1 + parts.last().map_or(0, |p| p.0));
        let Some(k) = (0..several).find(|k| self.of(id, *k).is_some()).filter(|_| passes) else { return };
        if node.op == &create::OPTIMIZATION_BARRIER {
            let cut = self.cuts[id.index()];
            let x = &mut self.cuts[node.inputs[0].index()];
            *x = x.or(cut);
            return;
        }
        let wanted = self.of(id, k).map(Part::Block);
        let all = d.candidates(id, &|_| SmallVec::new(), &|r| self.of(id, r));
        let Some(found) = all.into_iter().find(|c| c.results.get(k).copied() == wanted) else { return };
        for (x, part) in node.inputs.iter().zip(&found.operands) {
            if let Part::Block(cut) = part {
                self.cuts[x.index()].get_or_insert(*cut);
            }
        }
    }
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
