//! Rematerializes activations: recomputes what the forward pass computed inside a span where the backward pass reads
//! it, instead of keeping it in between (Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016).
//!
//! This is a graph-to-graph pass over the imported step, before decomposition. Every value keeps its bits: a copy is
//! the same op over the same values, including random numbers. The copies read everything from outside the span through
//! an optimization barrier that waits for the gradient from which the span's backward starts, so they run late. Because
//! they read through barriers, they equal no node of the forward pass, so `cse` does not merge them back.
//!
//! A value that is used outside its span (by later forward nodes, metrics, State writes) is kept and read, not copied.
//! Spans nest: an inner span's backward starts from the outer one's copies. Leaves and generators are never copied.

use crate::lowered::Lowered;
use crate::passes::rewriter::Rewriter;
use perilune_core::graph::{Graph, Inputs, Node, NodeId};
use perilune_core::ops::{Class, create};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::smallvec;

/// What to recompute: ranges of recorded nodes, properly nested.
#[derive(Clone, Default, Debug)]
pub struct Spans {
    /// From .. to; outer spans before inner ones.
    list: Vec<(u32, u32)>,
    /// For each span, the span that encloses it.
    parent: Vec<Option<u32>>,
    /// For each node, 1 + the innermost span that contains it, or 0.
    inside: Vec<u32>,
}

impl Spans {
    /// Combines the spans that the recording marks with `more`. A span of `more` may contain other spans but not cut
    /// them.
    pub fn new(g: &Graph, more: &[(NodeId, NodeId)]) -> Spans {
        let all = g.remat.spans.iter().chain(more).map(|s| (s.0.0, s.1.0)).filter(|s| s.0 < s.1);
        let mut list: Vec<(u32, u32)> = all.collect();
        list.sort_by_key(|s| (s.0, std::cmp::Reverse(s.1)));
        list.dedup();
        let mut inside = vec![0; list.iter().map(|s| s.1 as usize).max().unwrap_or(0)];
        let mut parent = Vec::with_capacity(list.len());
        for (k, s) in list.iter().enumerate() {
            parent.push(u32::checked_sub(inside[s.0 as usize], 1));
            inside[s.0 as usize..s.1 as usize].fill(k as u32 + 1);
        }
        Spans { list, parent, inside }
    }

    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The innermost span that contains a node.
    fn of(&self, id: NodeId) -> Option<u32> {
        self.inside.get(id.index()).and_then(|s| s.checked_sub(1))
    }

    /// The innermost span whose backward a node belongs to, but not one that contains the node itself (a gradient
    /// inside a span).
    fn owner(&self, g: &Graph, id: NodeId) -> Option<u32> {
        let mut at = g.remat.back_of(id)?;
        loop {
            if let Some(s) = self.of(at) {
                return Some(s).filter(|s| self.list[*s as usize].1 <= id.0);
            }
            at = g.remat.back_of(at)?;
        }
    }

    /// A span and its enclosing spans, innermost first.
    fn chain(&self, s: Option<u32>) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors(s, |s| self.parent[*s as usize])
    }
}

/// Appends to a plan's key what this pass depends on. `position`: 1 + the position of each node in `order`, or 0.
pub fn words(g: &Graph, spans: &Spans, order: &[NodeId], position: &[u32], key: &mut Vec<u64>) {
    let rank = |id: NodeId| order.partition_point(|o| *o < id) as u64;
    key.push(spans.list.len() as u64);
    for (from, to) in &spans.list {
        key.extend([rank(NodeId(*from)), rank(NodeId(*to))]);
    }
    // A node that is not needed itself still has a position between two that are.
    let place = |id: NodeId| match position[id.index()] {
        0 => 2 * rank(id),
        p => 2 * u64::from(p) - 1,
    };
    let number = |span: Option<u32>| span.map_or(0, |s| u64::from(s) + 1);
    for &id in order {
        match g.remat.back_of(id) {
            None => key.push(0),
            Some(f) => key.extend([1 + place(f), number(spans.owner(g, id)), u64::from(g.remat.pass_of(id))]),
        }
    }
    for a in &g.remat.arrivals {
        if let Some(p) = position.get(a.grad.index()).filter(|p| **p != 0) {
            key.extend([u64::from(a.pass), place(a.node), number(spans.of(a.node)), u64::from(*p)]);
        }
    }
}

/// The copies of one span in one backward pass.
#[derive(Default)]
struct Copies {
    /// Traced position -> the node to read instead.
    map: FxHashMap<usize, NodeId>,
    /// The gradient that the copies wait for.
    start: Option<NodeId>,
}

struct Pass<'a> {
    from: &'a Lowered,
    g: &'a Graph,
    order: &'a [NodeId],
    spans: &'a Spans,
    /// (span, position) of values computed inside the span but used outside it and its backward.
    kept: FxHashSet<(u32, usize)>,
    copies: FxHashMap<(u32, u32), Copies>,
    to: Rewriter,
}

/// Rewrites an imported step (node k of `from` is `order[k]` of `g`).
pub fn apply(from: Lowered, g: &Graph, order: &[NodeId], spans: &Spans) -> Lowered {
    if spans.is_empty() {
        return from;
    }
    let from = &from;
    let kept = kept(from, g, order, spans);
    let mut p = Pass { from, g, order, spans, kept, copies: FxHashMap::default(), to: Rewriter::new(from) };
    for at in 0..order.len() {
        let new = match spans.owner(g, order[at]) {
            Some(span) => {
                let pass = g.remat.pass_of(order[at]);
                let inputs = p.inputs(at, span, pass);
                p.to.out.graph.modes.loc = from.graph.loc_of(NodeId(at as u32));
                p.add(at, inputs)
            }
            None => {
                p.to.out.graph.modes.loc = from.graph.loc_of(NodeId(at as u32));
                p.to.copy(from, NodeId(at as u32))
            }
        };
        p.to.map.push(new);
    }
    p.to.finish(from)
}

/// Finds the nodes of spans that are used outside them.
fn kept(from: &Lowered, g: &Graph, order: &[NodeId], spans: &Spans) -> FxHashSet<(u32, usize)> {
    let mut kept = FxHashSet::default();
    for x in from.roots.iter().chain(&from.state_writes).chain(&from.ok) {
        kept.extend(spans.chain(spans.of(order[x.index()])).map(|s| (s, x.index())));
    }
    for (at, &id) in order.iter().enumerate() {
        let covers =
            |s: u32| spans.chain(spans.of(id)).any(|c| c == s) || spans.chain(spans.owner(g, id)).any(|c| c == s);
        for x in &from.graph.node(NodeId(at as u32)).inputs {
            let Some(inner) = spans.of(order[x.index()]) else { continue };
            kept.extend(spans.chain(Some(inner)).filter(|s| !covers(*s)).map(|s| (s, x.index())));
        }
    }
    kept
}

impl Pass<'_> {
    fn node(&self, at: usize) -> &Node {
        self.from.graph.node(NodeId(at as u32))
    }

    /// Appends the node at `at` with other inputs.
    fn add(&mut self, at: usize, inputs: Inputs) -> NodeId {
        self.to.copy_over(self.from, NodeId(at as u32), inputs)
    }

    /// The inputs of the node at `at`, which belongs to the backward of `span` or is copied for it.
    fn inputs(&mut self, at: usize, span: u32, pass: u32) -> Inputs {
        let part = matches!(self.node(at).op.class, Class::TupleGet);
        let list = self.node(at).inputs.clone();
        list.iter().map(|x| self.stand_in(x.index(), span, pass, part)).collect()
    }

    /// The node to read instead of the node at `at` in the backward of `span`. A `TupleGet` reads its op itself,
    /// without a barrier.
    fn stand_in(&mut self, at: usize, span: u32, pass: u32, part: bool) -> NodeId {
        let class = self.node(at).op.class;
        let end = self.spans.list[span as usize].1;
        if matches!(class, Class::Generator(_)) || self.order[at].0 >= end {
            return self.to.map[at];
        }
        self.enter(span, pass);
        if let Some(found) = self.copies[&(span, pass)].map.get(&at)
            && !(part && self.to.out.graph.node(*found).op == &create::OPTIMIZATION_BARRIER)
        {
            return *found;
        }
        let outer = match self.spans.parent[span as usize] {
            Some(p) => self.stand_in(at, p, pass, part),
            None => self.to.map[at],
        };
        let start = self.copies[&(span, pass)].start;
        let Some(start) = start.filter(|_| !part) else { return outer };
        let node = self.to.out.graph.node(outer);
        let (dtype, shape) = (node.dtype, node.shape);
        let inputs = smallvec![outer, start];
        let hold = Node {
            op: &create::OPTIMIZATION_BARRIER,
            dtype,
            detached: true,
            tf32: false,
            shape,
            inputs,
            attrs: smallvec![],
            payload: 0,
        };
        let hold = self.to.out.graph.add(hold);
        self.copies.entry((span, pass)).or_default().map.insert(at, hold);
        hold
    }

    /// Copies the nodes of `span` unless this pass already has. Copies that nothing reads are dropped later.
    fn enter(&mut self, span: u32, pass: u32) {
        if self.copies.contains_key(&(span, pass)) {
            return;
        }
        let here = self.to.map.len();
        let starts = |a: &&perilune_core::graph::Arrival| {
            a.pass == pass && self.spans.chain(self.spans.of(a.node)).any(|s| s == span)
        };
        let start = self.g.remat.arrivals.iter().filter(starts).find_map(|a| {
            let at = self.order.binary_search(&a.grad).ok().filter(|at| *at < here)?;
            Some(self.to.map[at])
        });
        self.copies.insert((span, pass), Copies { map: FxHashMap::default(), start });
        if start.is_none() {
            // There is no gradient to wait for; copies would run at once and save nothing.
            return;
        }
        let (from, to) = self.spans.list[span as usize];
        let place = |id: u32| self.order.partition_point(|o| o.0 < id);
        for at in place(from)..place(to).min(here) {
            let node = self.node(at);
            let copied = match node.op.class {
                Class::Leaf | Class::Generator(_) => false,
                Class::TupleGet => self.copies[&(span, pass)].map.contains_key(&node.inputs[0].index()),
                _ => true,
            };
            if !copied || self.kept.contains(&(span, at)) {
                continue;
            }
            let inputs = self.inputs(at, span, pass);
            self.to.out.graph.modes.loc = self.from.graph.loc_of(NodeId(at as u32));
            let new = self.add(at, inputs);
            self.copies.entry((span, pass)).or_default().map.insert(at, new);
        }
    }
}
