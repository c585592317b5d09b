//! Regroups values that one device along `pp` computes and another one combines, so that one message takes the place of several.
//!
//! - A sum: each device adds its own terms and sends their total. The gradient of a tied weight is such a sum, over micro-batches and over
//!   the stages that read the weight; in recorded order each term of the other stage would be a message as large as the weight. Terms of one
//!   device keep their recorded order. Another order of floating-point additions has other roundings, so a step with strict shards keeps the
//!   recorded one.
//! - A concatenation of small values: neighbours of one device are joined there. The squares of a gradient norm are hundreds of scalars, each
//!   with the latency of a message.

use super::assign::{Assignment, Part};
use crate::lowered::Lowered;
use crate::passes::rewriter::Rewriter;
use perilune_core::graph::{Node, NodeId};
use perilune_core::ops::{Class, create, elementwise, join};
use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

/// The most bytes of neighbours that are joined before they are sent: of larger values the bytes count, not the messages.
const JOINED_BYTES: usize = 1 << 20;

/// The terms of a sum in recorded order.
type Terms = Vec<NodeId>;

/// Runs the pass. With `strict` the order of additions stays.
pub(super) fn apply(step: &Lowered, mut a: Assignment, strict: bool) -> (Lowered, Assignment) {
    let sums = if strict { Sums::none(step) } else { Sums::find(step, &a) };
    for (id, stage) in &sums.moved {
        a.stage[id.index()] = *stage;
    }
    let mut to = Rewriter::new(step);
    let mut new = Assignment { stage: Vec::new(), part: Vec::new(), ..a };
    let old = Old { stage: &a.stage, part: &a.part };
    for id in step.graph.ids() {
        to.out.graph.modes.loc = step.graph.loc_of(id);
        let node = step.graph.node(id);
        let copied = match sums.roots.get(&id) {
            // Nothing but the sum reads it.
            _ if sums.inner[id.index()] => NodeId(0),
            Some(terms) => total(&mut to, &mut new, old, node, id, terms),
            None if node.op == &join::CAT => concatenation(&mut to, &mut new, old, step, id),
            None => to.copy(step, id),
        };
        to.map.push(copied);
        if new.stage.len() < to.out.graph.len() {
            new.stage.push(a.stage[id.index()]);
            new.part.push(a.part[id.index()]);
        }
    }
    to.out.graph.modes.loc = step.graph.modes.loc;
    (to.finish(step), new)
}

struct Sums {
    /// By the node with the total.
    roots: FxHashMap<NodeId, Terms>,
    /// By node: whether it is a partial sum that becomes another one.
    inner: Vec<bool>,
    /// The stages of views and casts that are made where the term is.
    moved: FxHashMap<NodeId, Option<usize>>,
}

impl Sums {
    /// Finds those of which a device would receive several terms from another one.
    fn find(step: &Lowered, a: &Assignment) -> Sums {
        let g = &step.graph;
        let mut reads = vec![0usize; g.len()];
        for id in g.ids() {
            g.node(id).inputs.iter().for_each(|x| reads[x.index()] += 1);
        }
        for id in step.roots.iter().chain(&step.state_writes).chain(&step.effects).chain(&step.ok) {
            reads[id.index()] += 2;
        }
        let is_sum = |id: NodeId| {
            let node = g.node(id);
            let alike = |x: &NodeId| g.shape(*x) == node.shape && g.dtype(*x) == node.dtype;
            node.op == &elementwise::ADD && node.dtype.is_float() && node.inputs.iter().all(alike)
        };
        let mut found = Sums::none(step);
        let mut visited = vec![false; g.len()];
        for root in g.ids().rev() {
            if visited[root.index()] || !is_sum(root) {
                continue;
            }
            let (mut terms, mut inner, mut stack) = (Vec::new(), Vec::new(), vec![root]);
            while let Some(id) = stack.pop() {
                if id == root || (is_sum(id) && reads[id.index()] == 1) {
                    visited[id.index()] = true;
                    inner.extend((id != root).then_some(id));
                    stack.extend(g.node(id).inputs.iter().rev());
                } else {
                    terms.push(id);
                }
            }
            let own = a.device(root);
            let chains: Vec<Vec<NodeId>> = terms.iter().map(|x| chain(step, a, &reads, *x)).collect();
            // The stage that computes each term, before views and casts of it.
            let makers: Vec<Option<usize>> = chains.iter().map(|c| a.stage[c[c.len() - 1].index()]).collect();
            let is_sent = |maker: &&Option<usize>| maker.is_some_and(|s| own.is_some_and(|own| own != a.devices[s]));
            if makers.iter().filter(is_sent).count() > 1 {
                inner.iter().for_each(|id| found.inner[id.index()] = true);
                for (chain, maker) in chains.iter().zip(makers) {
                    found.moved.extend(chain.iter().map(|id| (*id, maker)));
                }
                found.roots.insert(root, terms);
            }
        }
        found
    }

    fn none(step: &Lowered) -> Sums {
        Sums { roots: FxHashMap::default(), inner: vec![false; step.graph.len()], moved: FxHashMap::default() }
    }
}

/// A term of a sum, and what it is a view or a cast of as long as nothing else reads that.
fn chain(step: &Lowered, a: &Assignment, reads: &[usize], term: NodeId) -> Vec<NodeId> {
    let mut out = vec![term];
    let mut at = term;
    loop {
        let node = step.graph.node(at);
        let follows = matches!(node.op.class, Class::View(_) | Class::Cast) && node.op != &create::OPTIMIZATION_BARRIER;
        match node.inputs[..] {
            [x] if follows && reads[at.index()] == 1 && a.stage[x.index()].is_some() => at = x,
            _ => return out,
        }
        out.push(at);
    }
}

/// Stages and parts by the nodes before the pass.
#[derive(Clone, Copy)]
struct Old<'a> {
    stage: &'a [Option<usize>],
    part: &'a [Part],
}

impl Old<'_> {
    fn stage(&self, id: NodeId) -> Option<usize> {
        self.stage[id.index()]
    }
}

/// Appends the totals of each device, and the sum of these on the device of the root.
fn total(to: &mut Rewriter, new: &mut Assignment, old: Old<'_>, root: &Node, id: NodeId, terms: &[NodeId]) -> NodeId {
    let own = old.stage(id);
    let mut groups: Vec<(Option<usize>, Vec<NodeId>)> = vec![(own.map(|s| new.devices[s]), Vec::new())];
    for x in terms {
        // What is free is added where the total is.
        let device = old.stage(*x).or(own).map(|s| new.devices[s]);
        match groups.iter_mut().find(|g| g.0 == device) {
            Some(group) => group.1.push(*x),
            None => groups.push((device, vec![*x])),
        }
    }
    let Rewriter { out, map } = to;
    let mut add = |a: NodeId, b: NodeId, stage: Option<usize>, part: Part| {
        let sum = out.graph.add(Node { inputs: smallvec![a, b], ..root.clone() });
        new.stage.push(stage);
        new.part.push(part);
        sum
    };
    let mut sums = Vec::with_capacity(groups.len());
    for (_, group) in groups.into_iter().filter(|g| !g.1.is_empty()) {
        let mut sum = map[group[0].index()];
        for x in &group[1..] {
            sum = add(sum, map[x.index()], old.stage(*x).or(own), old.part[x.index()]);
        }
        sums.push(sum);
    }
    let first = sums[0];
    sums[1..].iter().fold(first, |sum, x| add(sum, *x, own, old.part[id.index()]))
}

/// Appends a concatenation whose small neighbours of one other device are joined there.
fn concatenation(to: &mut Rewriter, new: &mut Assignment, old: Old<'_>, from: &Lowered, id: NodeId) -> NodeId {
    let node = from.graph.node(id);
    let device = |x: NodeId| old.stage(x).map(|s| new.devices[s]);
    let own = device(id);
    let mut inputs = SmallVec::new();
    for run in node.inputs.chunk_by(|x, y| device(*x) == device(*y)) {
        let size: usize = run.iter().map(|x| from.graph.shape(*x).dims()[node.attrs[0] as usize]).sum();
        let shape = node.shape.with(node.attrs[0] as usize, size);
        let is_sent = own.is_some() && device(run[0]).is_some_and(|d| Some(d) != own);
        let parts = run.iter().map(|x| to.map[x.index()]);
        if run.len() < 2 || !is_sent || shape.numel() * node.dtype.size() > JOINED_BYTES {
            inputs.extend(parts);
            continue;
        }
        let joined = to.out.graph.add(Node { inputs: parts.collect(), shape, ..node.clone() });
        new.stage.push(old.stage(run[run.len() - 1]));
        new.part.push(old.part[id.index()]);
        inputs.push(joined);
    }
    to.copy_over(from, id, inputs)
}
