//! Decides which values are stored and which are recomputed by each kernel that reads them.
//!
//! A value that crosses clusters is stored, unless each reader can recompute it cheaply and read no more bytes than
//! loading it would take (plus or minus the statistics of a row). Every result is rounded as if it had been stored, so
//! recomputation changes no bits.

use crate::cluster::{Assignment, Fusion, fills, in_register, reads, source_numel};
use crate::lowered::Lowered;
use crate::reading::{Reading, reading};
use perilune_core::DType;
use perilune_core::graph::NodeId;
use perilune_core::id_map::IdMap;
use perilune_core::ops::{Class, Generator};
use smallvec::SmallVec;

/// Maximum work per element for which a value is recomputed instead of stored and loaded (see `MapFn::flops`).
const MAX_RECOMPUTE: usize = 96;
/// Work of one random number.
const UNIFORM_FLOPS: usize = 40;
/// Recomputing a value may read more bytes than loading it, by at most its bytes divided by this, since it also saves
/// the store. A normalised row is thus recomputed from the row, its mean and its scale.
const SLACK: usize = 16;
/// Maximum buffers that a recomputed value may depend on.
const MAX_FRONTIER: usize = 4;

/// The cost of recomputing a value.
#[derive(Clone, Default, Debug)]
struct Expr {
    flops: usize,
    frontier: SmallVec<[NodeId; 4]>,
    /// Cannot be recomputed: a reduction, or a value that depends on reads that are not element for element.
    fixed: bool,
}

/// Sets `stored` for every node. With `enabled` off nothing is recomputed.
pub(crate) fn decide(low: &Lowered, f: &mut Fusion, enabled: bool) {
    let g = &low.graph;
    let mut crossing: IdMap<NodeId, SmallVec<[(usize, bool); 4]>> = IdMap::default();
    let mut loads: IdMap<usize, Vec<NodeId>> = IdMap::default();
    // A control dependency needs a kernel that stores the value.
    for id in low.roots.iter().chain(&low.state_writes).chain(low.control_deps.iter().flatten()) {
        f.stored[id.index()] = true;
    }
    for id in g.ids() {
        match f.assignment[id.index()] {
            Assignment::Library { .. } => {
                f.stored[id.index()] = true;
                for x in &g.node(id).inputs {
                    f.stored[low.views.owner(*x).index()] = true;
                }
            }
            Assignment::Cluster(_) => {
                let Some(k) = f.cluster_of(id) else { continue };
                let n = source_numel(low, id);
                f.stored[id.index()] |= fills(low, id);
                for (base, layout) in reads(low, id) {
                    if in_register(low, f, k, base, &layout, n) {
                        continue;
                    }
                    if matches!(f.assignment[base.index()], Assignment::Cluster(_)) {
                        let m = g.shape(base).numel();
                        crossing.entry(base).or_default().push((k, reading(&layout, n, m) == Reading::Same));
                    }
                    loads.entry(k).or_default().push(base);
                }
            }
            Assignment::None => {}
        }
    }
    let mut exprs: Vec<Expr> = Vec::new();
    exprs.resize(g.len(), Expr::default());
    for id in g.ids() {
        if !matches!(f.assignment[id.index()], Assignment::Cluster(_)) {
            continue;
        }
        let mut expr = expression(low, f, &exprs, id);
        if let Some(users) = crossing.get(&id)
            && !f.stored[id.index()]
        {
            let bytes = |b: NodeId| g.shape(b).numel() * g.dtype(b).size();
            let cheap = users.iter().all(|(k, same)| {
                let own = loads.get(k);
                let extra: usize =
                    expr.frontier.iter().filter(|b| own.is_none_or(|l| !l.contains(b))).map(|b| bytes(*b)).sum();
                *same && extra <= bytes(id) + bytes(id) / SLACK
            });
            if enabled && !expr.fixed && expr.flops <= MAX_RECOMPUTE && expr.frontier.len() <= MAX_FRONTIER && cheap {
                // Its readers read its frontier instead.
                for (k, _) in users {
                    loads.entry(*k).or_default().extend(expr.frontier.iter().copied());
                }
                for b in &expr.frontier {
                    if matches!(f.assignment[b.index()], Assignment::Cluster(_)) {
                        f.stored[b.index()] = true;
                    }
                }
            } else if let Some(base) = widened(low, f, id).filter(|_| enabled && users.iter().all(|u| u.1)) {
                // Its narrower source is stored, and the readers cast it.
                for (k, _) in users {
                    loads.entry(*k).or_default().push(base);
                }
                f.stored[base.index()] = true;
                expr = Expr { flops: 1, frontier: SmallVec::from_slice(&[base]), fixed: false };
            } else {
                f.stored[id.index()] = true;
            }
        }
        exprs[id.index()] = expr;
    }
}

/// The source of a cast to f64, if it is narrower and a kernel computes it. (A loss's sum over rows is in f64, and a
/// kernel of long rows has no registers left to convert its stores.)
fn widened(low: &Lowered, f: &Fusion, id: NodeId) -> Option<NodeId> {
    let node = low.graph.node(id);
    let (base, layout) = reads(low, id).into_iter().next()?;
    let from = low.graph.node(base);
    let same = reading(&layout, node.shape.numel(), from.shape.numel()) == Reading::Same;
    let cast = matches!(node.op.class, Class::Cast) && node.dtype == DType::F64 && from.dtype.size() < 8;
    (cast && same && f.cluster_of(base).is_some() && low.graph.generator(base).is_none()).then_some(base)
}

/// The cost of recomputing node `id`, given what is stored so far.
fn expression(low: &Lowered, f: &Fusion, exprs: &[Expr], id: NodeId) -> Expr {
    let g = &low.graph;
    let node = g.node(id);
    let mut out = Expr::default();
    match node.op.class {
        Class::Map(m) => out.flops = m.flops(),
        Class::Cast => out.flops = 1,
        _ => {
            out.fixed = true;
            return out;
        }
    }
    for (base, layout) in reads(low, id) {
        let b = base.index();
        let stored = |x: NodeId| g.generator(x).is_none();
        if let Some(kind) =
            g.generator(base).filter(|kind| *kind != Generator::Shard || !stored(g.node(base).inputs[0]))
        {
            out.flops += if matches!(kind, Generator::Uniform | Generator::Shard) { UNIFORM_FLOPS } else { 0 };
            continue;
        }
        let same = reading(&layout, node.shape.numel(), g.shape(base).numel()) == Reading::Same;
        let again = matches!(f.assignment[b], Assignment::Cluster(_)) && !f.stored[b] && same && !exprs[b].fixed;
        if again {
            out.flops += exprs[b].flops;
            for &x in &exprs[b].frontier {
                if !out.frontier.contains(&x) {
                    out.frontier.push(x);
                }
            }
        } else if !out.frontier.contains(&base) {
            out.frontier.push(base);
        }
    }
    // A long frontier is not worth tracking.
    if out.frontier.len() > MAX_FRONTIER || out.flops > MAX_RECOMPUTE {
        out.fixed = true;
        out.frontier.clear();
    }
    out
}
