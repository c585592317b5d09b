//! Differentiates the graph in reverse mode (automatic differentiation).
//!
//! The pass is one loop over ids from the output down. Id order is a topological order, so there is no recursion over
//! the graph. Gradients are ordinary nodes, so with `create_graph` they can be differentiated again. A fused op without
//! a rule is differentiated through its decomposition, which is recorded for this purpose; the planner merges what is
//! computed twice.

use crate::error::{Error, Result};
use crate::graph::{Arrival, Graph, NodeId};
use crate::id_map::{IdMap, IdSet};
use crate::ops::{Class, Expand, Grad, GradCtx, Grads, join, slicing};
use smallvec::SmallVec;
use std::collections::hash_map::Entry;

/// Gradients that have reached a node and have not been added up yet.
type Pending = IdMap<NodeId, SmallVec<[NodeId; 2]>>;

/// Returns the gradients of `output`, seeded with `seed` (same shape; ones for a loss), with respect to `wrt`.
///
/// `None` where `output` does not depend on the node. Unless `create_graph` is set, later differentiation treats the
/// gradients as constants. A graph with host functions (see [`Backward`]) is an error here.
pub fn grad(
    g: &mut Graph,
    output: NodeId,
    seed: NodeId,
    wrt: &[NodeId],
    create_graph: bool,
) -> Result<Vec<Option<NodeId>>> {
    let mut b = Backward::new(g, output, seed, wrt, create_graph);
    match b.advance(g)? {
        None => b.finish(g),
        Some(_) => Err(Error::gradient("custom", "a custom function needs its host to run its backward")),
    }
}

/// A host function's backward that must run before the pass can continue.
#[derive(Clone, Debug)]
pub struct Call {
    /// The `custom` node.
    pub node: NodeId,
    pub grad: NodeId,
}

/// A backward pass that can pause while the host (Lua) runs its own backward, and resume afterwards.
///
/// Call `advance` until it returns `None`, and answer each [`Call`] with `supply`; then call `finish`.
#[derive(Debug)]
pub struct Backward {
    sweep: Sweep,
    wrt: Vec<NodeId>,
    create_graph: bool,
    reached: bool,
}

impl Backward {
    pub fn new(g: &mut Graph, output: NodeId, seed: NodeId, wrt: &[NodeId], create_graph: bool) -> Backward {
        let needs = needed(g, output, wrt, 0);
        let reached = needs.get(output.index()).copied().unwrap_or(false);
        let mut pending = Pending::default();
        pending.entry(output).or_default().push(seed);
        let next = if reached { output.index() + 1 } else { 0 };
        let (parts, stop) = (IdMap::default(), wrt.iter().copied().collect());
        let sweep = Sweep { pass: Some(g.remat.begin_pass()), pending, parts, needs, next, floor: 0, stop };
        Backward { sweep, wrt: wrt.to_vec(), create_graph, reached }
    }

    /// Whether gradients recorded now may be differentiated again.
    pub fn create_graph(&self) -> bool {
        self.create_graph
    }

    /// Continues to the end, or to the next host function.
    pub fn advance(&mut self, g: &mut Graph) -> Result<Option<Call>> {
        let (create_graph, sweep) = (self.create_graph, &mut self.sweep);
        aside(g, create_graph, |g| sweep.run(g))
    }

    /// Supplies the gradients of a host function's inputs after the first.
    pub fn supply(&mut self, g: &mut Graph, call: &Call, grads: &[Option<NodeId>]) -> Result<()> {
        let node = g.node(call.node).clone();
        let wants: SmallVec<[bool; 4]> = node.inputs.iter().map(|x| self.sweep.needs[x.index()]).collect();
        let mut all = Grads::new();
        all.push(None);
        for (i, d) in grads.iter().enumerate() {
            all.push(match (d, node.inputs.get(i + 1)) {
                (Some(d), Some(&x)) => {
                    let (shape, dtype) = (g.shape(x), g.dtype(x));
                    if g.shape(*d) != shape {
                        let message = format!(
                            "its backward gave a gradient of shape {} for input {} of shape {shape}",
                            g.shape(*d),
                            i + 1
                        );
                        let hint =
                            "a gradient has the shape of its input: sum what was broadcast, expand what was summed";
                        return Err(Error::gradient("custom", message).hint(hint));
                    }
                    let cast = |g: &mut Graph| {
                        g.modes.backward_of = Some(call.node);
                        g.cast(*d, dtype)
                    };
                    Some(aside(g, self.create_graph, cast)?)
                }
                _ => None,
            });
        }
        let create_graph = self.create_graph;
        let Sweep { pending, stop, .. } = &mut self.sweep;
        aside(g, create_graph, |g| {
            g.modes.backward_of = Some(call.node);
            file(g, pending, stop, &node.inputs, &wants, all)
        })
    }

    /// Returns the gradients of `wrt`, in order.
    pub fn finish(mut self, g: &mut Graph) -> Result<Vec<Option<NodeId>>> {
        if !self.reached {
            return Ok(vec![None; self.wrt.len()]);
        }
        let mut found: IdMap<NodeId, Option<NodeId>> = IdMap::default();
        for &w in &self.wrt {
            if let Entry::Vacant(e) = found.entry(w) {
                let arrived = self.sweep.pending.remove(&w);
                let sum = |g: &mut Graph, p| {
                    g.modes.backward_of = Some(w);
                    total(g, p)
                };
                e.insert(arrived.map(|p| aside(g, self.create_graph, |g| sum(g, p))).transpose()?);
            }
        }
        Ok(self.wrt.iter().map(|w| found[w]).collect())
    }
}

/// Records under the modes of a backward pass and restores the previous ones.
fn aside<T>(g: &mut Graph, create_graph: bool, f: impl FnOnce(&mut Graph) -> Result<T>) -> Result<T> {
    let mut g = g.scope();
    g.modes.no_grad = !create_graph;
    g.modes.autocast = None;
    f(&mut g)
}

/// Marks the nodes from `floor` on that are between `wrt` and `output`.
fn needed(g: &Graph, output: NodeId, wrt: &[NodeId], floor: usize) -> Vec<bool> {
    let mut needs = vec![false; output.index() + 1];
    for w in wrt {
        if w.index() < needs.len() && g.dtype(*w).is_float() {
            needs[w.index()] = true;
        }
    }
    for i in floor..=output.index() {
        let node = &g.nodes()[i];
        if !needs[i] && !node.detached && !matches!(node.op.grad, Grad::Zero) | is_part(node.op.class) {
            // Only floats have gradients. An op whose gradient is `Missing` must still be reached, so that the pass
            // reports it.
            let flows = node.dtype.is_float() || matches!(node.op.grad, Grad::Missing(_));
            needs[i] = node.inputs.iter().any(|x| needs[x.index()] && (flows || !g.dtype(*x).is_float()));
        }
    }
    needs
}

fn is_part(class: Class) -> bool {
    matches!(class, Class::TupleGet)
}

/// The loop over ids, from `next` down to `floor`.
#[derive(Debug)]
struct Sweep {
    /// The number of the pass; `None` within a decomposition, which belongs to the fused node.
    pass: Option<u32>,
    pending: Pending,
    /// Gradients of the outputs of multi-output ops, until the op itself is reached.
    parts: IdMap<NodeId, SmallVec<[Option<NodeId>; 4]>>,
    needs: Vec<bool>,
    next: usize,
    floor: usize,
    /// Nodes that keep the gradients that reached them.
    stop: IdSet<NodeId>,
}

impl Sweep {
    fn run(&mut self, g: &mut Graph) -> Result<Option<Call>> {
        while self.next > self.floor {
            self.next -= 1;
            let i = self.next;
            let id = NodeId(i as u32);
            let stops = self.stop.contains(&id);
            if stops && !continues(g, id, &self.needs) {
                continue;
            }
            let from_parts = self.parts.remove(&id);
            let Some(arrived) = self.pending.get(&id).cloned() else {
                if let Some(mut grads) = from_parts.filter(|_| self.needs[i]) {
                    if self.pass.is_some() {
                        g.modes.backward_of = Some(id);
                    }
                    grads[0] = Some(zeros(g, id)?);
                    back(g, &mut self.pending, &self.needs, &self.stop, id, &grads)?;
                }
                continue;
            };
            if !self.needs[i] {
                self.pending.remove(&id);
                continue;
            }
            g.modes.loc = g.loc_of(id);
            if self.pass.is_some() {
                g.modes.backward_of = Some(id);
            }
            let sum = total(g, arrived)?;
            if let Some(pass) = self.pass {
                g.remat.arrivals.push(Arrival { pass, node: id, grad: sum });
            }
            if stops {
                self.pending.insert(id, SmallVec::from_slice(&[sum]));
            } else {
                self.pending.remove(&id);
            }
            let node = g.node(id);
            if is_part(node.op.class) {
                let (main, k) = (node.inputs[0], node.attrs[0] as usize);
                let slots = self.parts.entry(main).or_default();
                if slots.len() <= k {
                    slots.resize(k + 1, None);
                }
                slots[k] = Some(sum);
                continue;
            }
            if matches!(node.op.grad, Grad::Host) {
                return Ok(Some(Call { node: id, grad: sum }));
            }
            let mut grads = from_parts.unwrap_or_default();
            if grads.is_empty() {
                grads.push(None);
            }
            grads[0] = Some(sum);
            back(g, &mut self.pending, &self.needs, &self.stop, id, &grads)?;
        }
        Ok(None)
    }
}

/// Whether a node of `stop` has inputs that depend on other nodes of `stop`.
fn continues(g: &Graph, id: NodeId, needs: &[bool]) -> bool {
    let node = g.node(id);
    !node.detached && node.inputs.iter().any(|x| needs[x.index()])
}

/// Adds up the gradients that reached a node. Slices of one tensor that tile a dim exactly are joined by one `cat`
/// instead of summing zero-filled tensors: the gradient of `split`, `chunk` and `unbind`.
fn total(g: &mut Graph, mut arrived: SmallVec<[NodeId; 2]>) -> Result<NodeId> {
    if arrived.len() > 1
        && let Some(joined) = tiles(g, &arrived)?
    {
        return Ok(joined);
    }
    let mut sum = arrived[0];
    for &d in arrived.iter().skip(1) {
        sum = g.add_(sum, d)?;
    }
    arrived.clear();
    Ok(sum)
}

fn tiles(g: &mut Graph, arrived: &[NodeId]) -> Result<Option<NodeId>> {
    let mut found: Vec<(usize, NodeId)> = Vec::new();
    let mut axis = None;
    for &id in arrived {
        let n = g.node(id);
        if n.op != &slicing::STRIDED_PAD || n.attrs[2] != 1 || n.attrs[4] != 0 || axis.is_some_and(|a| a != n.attrs[0])
        {
            return Ok(None);
        }
        axis = Some(n.attrs[0]);
        found.push((n.attrs[1] as usize, n.inputs[0]));
    }
    let Some(axis) = axis.map(|a| a as usize) else { return Ok(None) };
    found.sort_unstable();
    let mut end = 0;
    for &(lo, x) in &found {
        if lo != end {
            return Ok(None);
        }
        end += g.shape(x).dims()[axis];
    }
    if end != g.shape(arrived[0]).dims()[axis] {
        return Ok(None);
    }
    let xs: Vec<NodeId> = found.iter().map(|f| f.1).collect();
    join::cat(g, &xs, axis).map(Some)
}

fn zeros(g: &mut Graph, like: NodeId) -> Result<NodeId> {
    let (shape, dtype) = (g.shape(like), g.dtype(like));
    g.filled(0.0, shape, dtype)
}

/// Runs the backward rule of one node and files the resulting gradients.
fn back(
    g: &mut Graph,
    pending: &mut Pending,
    needs: &[bool],
    stop: &IdSet<NodeId>,
    id: NodeId,
    grads: &[Option<NodeId>],
) -> Result<()> {
    let node = g.node(id).clone();
    let wants: SmallVec<[bool; 4]> = node.inputs.iter().map(|x| needs[x.index()]).collect();
    let Some(grad) = grads[0] else { return Ok(()) };
    g.modes.tf32 = node.tf32;
    match node.op.grad {
        Grad::Zero => {}
        Grad::Host => return Err(Error::gradient(node.op.name, "this is a bug: a host function without its host")),
        Grad::Missing(why) => return Err(Error::gradient(node.op.name, why)),
        Grad::Rule(rule) => {
            let ctx =
                GradCtx { op: node.op, out: id, inputs: &node.inputs, attrs: &node.attrs, grad, grads, needs: &wants };
            let out = rule(g, &ctx)?;
            file(g, pending, stop, &node.inputs, &wants, out)?;
        }
        Grad::Expand => {
            let Class::Fused(expand) = node.op.class else {
                return Err(Error::gradient(node.op.name, "this is a bug: no decomposition to differentiate"));
            };
            for (w, arrived) in through(g, expand, &node.inputs, &node.attrs, grads, &wants)? {
                for d in arrived {
                    arrive(g, pending, stop, w, d)?;
                }
            }
        }
    }
    Ok(())
}

/// Gradients that reach a node.
type Arrived = SmallVec<[NodeId; 2]>;

/// The gradients of `inputs` (where `wants` is set) through a decomposition whose outputs have gradients `grads`. An
/// input may have received several parts, or none.
pub(crate) fn through(
    g: &mut Graph,
    expand: Expand,
    inputs: &[NodeId],
    attrs: &[i64],
    grads: &[Option<NodeId>],
    wants: &[bool],
) -> Result<Vec<(NodeId, Arrived)>> {
    let floor = g.len();
    // The decomposition must be differentiable even if the gradients themselves need not be.
    let outs = g.with_no_grad(false, |g| expand(g, inputs, attrs))?;
    let mut inner = Pending::default();
    let mut top = floor;
    for (k, &o) in outs.iter().enumerate() {
        if let Some(d) = grads.get(k).copied().flatten() {
            inner.entry(o).or_default().push(d);
            top = top.max(o.index() + 1);
        }
    }
    let wrt: Vec<NodeId> = inputs.iter().zip(wants).filter(|(_, w)| **w).map(|(x, _)| *x).collect();
    let mut inside = vec![false; top];
    for w in &wrt {
        inside[w.index()] = true;
    }
    for i in floor..top {
        let n = &g.nodes()[i];
        let flows = !n.detached && n.dtype.is_float() && (is_part(n.op.class) || !matches!(n.op.grad, Grad::Zero));
        inside[i] = flows && n.inputs.iter().any(|x| inside[x.index()]);
    }
    let (parts, none) = (IdMap::default(), IdSet::default());
    let mut within = Sweep { pass: None, pending: inner, parts, needs: inside, next: top, floor, stop: none };
    if within.run(g)?.is_some() {
        return Err(Error::gradient("custom", "this is a bug: a host function inside a decomposition"));
    }
    Ok(wrt.into_iter().map(|w| (w, within.pending.remove(&w).unwrap_or_default())).collect())
}

fn file(
    g: &mut Graph,
    pending: &mut Pending,
    stop: &IdSet<NodeId>,
    inputs: &[NodeId],
    wants: &[bool],
    out: Grads,
) -> Result<()> {
    for ((&x, d), &want) in inputs.iter().zip(out).zip(wants) {
        let Some(d) = d.filter(|_| want) else { continue };
        if g.shape(d) != g.shape(x) {
            let message = format!("this is a bug: gradient {} of an input {}", g.shape(d), g.shape(x));
            return Err(Error::gradient("backward", message));
        }
        arrive(g, pending, stop, x, d)?;
    }
    Ok(())
}

/// Files `d` for `x`. Requested gradients (`stop`: weights) are added up at once, so that a product that computes one
/// part, with everything it reads, need not stay alive until the end of the pass. Slices wait for each other (see
/// [`total`]).
fn arrive(g: &mut Graph, pending: &mut Pending, stop: &IdSet<NodeId>, x: NodeId, d: NodeId) -> Result<()> {
    let list = pending.entry(x).or_default();
    let slice = |g: &Graph, id: NodeId| g.node(id).op == &slicing::STRIDED_PAD;
    match list[..] {
        [before] if stop.contains(&x) && !slice(g, before) && !slice(g, d) => list[0] = g.add_(before, d)?,
        _ => list.push(d),
    }
    Ok(())
}
