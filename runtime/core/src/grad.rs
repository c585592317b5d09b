//! Reverse-mode differentiation on the graph.
//!
//! One loop over ids from the output down: id order is a topological order, so there is no recursion over the graph and
//! no stack to overflow. Gradients are ordinary nodes, so with `create_graph` they can be differentiated again. A fused
//! op without a rule of its own is differentiated through its decomposition, which is recorded on the spot; the planner
//! merges what it computes twice.

use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::ops::{Class, Grad, GradCtx, Grads, movement};
use smallvec::SmallVec;
use std::collections::HashMap;

/// What gradients have reached a node and not been added up yet.
type Pending = HashMap<NodeId, SmallVec<[NodeId; 2]>>;

/// Gradients of `output`, seeded with `seed` (same shape; ones for a loss), with respect to `wrt`.
///
/// `None` where `output` does not depend on the node. Unless `create_graph`, the gradients are constants to any later
/// differentiation.
pub fn grad(g: &mut Graph, output: NodeId, seed: NodeId, wrt: &[NodeId], create_graph: bool) -> Result<Vec<Option<NodeId>>> {
    let site = g.site;
    let before = g.no_grad;
    let autocast = g.autocast.take();
    g.no_grad = !create_graph;
    let result = (|| {
        let needs = needed(g, output, wrt, 0);
        if !needs.get(output.index()).copied().unwrap_or(false) {
            return Ok(vec![None; wrt.len()]);
        }
        let mut pending = Pending::new();
        pending.entry(output).or_default().push(seed);
        sweep(g, &mut pending, &needs, output.index() + 1, 0, wrt)?;
        wrt.iter().map(|w| pending.remove(w).map(|p| total(g, p)).transpose()).collect()
    })();
    g.site = site;
    g.no_grad = before;
    g.autocast = autocast;
    let mut found: Vec<Option<NodeId>> = result?;
    // The same node may be asked for twice; the first `remove` took its gradient.
    for i in 1..wrt.len() {
        if found[i].is_none()
            && let Some(k) = wrt[..i].iter().position(|w| *w == wrt[i])
        {
            found[i] = found[k];
        }
    }
    Ok(found)
}

/// Which nodes from `floor` on lie between `wrt` and `output`.
fn needed(g: &Graph, output: NodeId, wrt: &[NodeId], floor: usize) -> Vec<bool> {
    let mut needs = vec![false; output.index() + 1];
    for w in wrt {
        if w.index() < needs.len() {
            needs[w.index()] = true;
        }
    }
    for i in floor..=output.index() {
        let node = &g.nodes()[i];
        if !needs[i] && !node.detached && node.dtype.is_float() && !matches!(node.op.grad, Grad::Zero) | is_part(node.op.class) {
            needs[i] = node.inputs.iter().any(|x| needs[x.index()]);
        }
    }
    needs
}

fn is_part(class: Class) -> bool {
    matches!(class, Class::Part)
}

/// Carries the pending gradients from the nodes below `top` down to `floor`. Nodes of `stop` keep theirs.
fn sweep(g: &mut Graph, pending: &mut Pending, needs: &[bool], top: usize, floor: usize, stop: &[NodeId]) -> Result<()> {
    let mut parts: HashMap<NodeId, SmallVec<[Option<NodeId>; 4]>> = HashMap::new();
    for i in (floor..top).rev() {
        let id = NodeId(i as u32);
        if stop.contains(&id) && !continues(g, id, needs) {
            continue;
        }
        let from_parts = parts.remove(&id);
        let Some(arrived) = pending.get(&id).cloned() else {
            if let Some(mut grads) = from_parts.filter(|_| needs[i]) {
                grads[0] = Some(zeros(g, id)?);
                back(g, pending, needs, id, &grads)?;
            }
            continue;
        };
        if !needs[i] {
            pending.remove(&id);
            continue;
        }
        g.site = g.site_of(id);
        let sum = total(g, arrived)?;
        if stop.contains(&id) {
            pending.insert(id, SmallVec::from_slice(&[sum]));
        } else {
            pending.remove(&id);
        }
        let node = g.node(id);
        if is_part(node.op.class) {
            let (main, k) = (node.inputs[0], node.attrs[0] as usize);
            let slots = parts.entry(main).or_default();
            if slots.len() <= k {
                slots.resize(k + 1, None);
            }
            slots[k] = Some(sum);
            continue;
        }
        let mut grads = from_parts.unwrap_or_default();
        if grads.is_empty() {
            grads.push(None);
        }
        grads[0] = Some(sum);
        back(g, pending, needs, id, &grads)?;
    }
    Ok(())
}

/// Whether a node of `stop` has inputs that other nodes of `stop` lie below.
fn continues(g: &Graph, id: NodeId, needs: &[bool]) -> bool {
    let node = g.node(id);
    !node.detached && node.inputs.iter().any(|x| needs[x.index()])
}

/// Adds up what reached a node. Slices of one tensor that tile a dim exactly join in one `cat` instead of sums of
/// zero-filled tensors: the gradient of `split`, `chunk` and `unbind`.
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
        if n.op != &movement::PLACE || n.attrs[2] != 1 || n.attrs[4] != 0 || axis.is_some_and(|a| a != n.attrs[0]) {
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
    movement::cat(g, &xs, axis).map(Some)
}

fn zeros(g: &mut Graph, like: NodeId) -> Result<NodeId> {
    let (shape, dtype) = (g.shape(like), g.dtype(like));
    g.filled(0.0, shape, dtype)
}

/// Runs the backward rule of one node and files what it gives.
fn back(g: &mut Graph, pending: &mut Pending, needs: &[bool], id: NodeId, grads: &[Option<NodeId>]) -> Result<()> {
    let node = g.node(id).clone();
    let wants: SmallVec<[bool; 4]> = node.inputs.iter().map(|x| needs[x.index()]).collect();
    let Some(grad) = grads[0] else { return Ok(()) };
    match node.op.grad {
        Grad::Zero => {}
        Grad::Missing(why) => return Err(Error::gradient(node.op.name, why)),
        Grad::Rule(rule) => {
            let ctx = GradCtx { op: node.op, out: id, inputs: &node.inputs, attrs: &node.attrs, grad, grads, needs: &wants };
            let out = rule(g, &ctx)?;
            file(g, pending, &node.inputs, &wants, out)?;
        }
        Grad::Expand => {
            let Class::Fused(expand) = node.op.class else {
                return Err(Error::gradient(node.op.name, "this is a bug: no decomposition to differentiate"));
            };
            let floor = g.len();
            // The decomposition must be differentiable even where the gradients themselves need not be.
            let outs = g.with_no_grad(false, |g| expand(g, &node.inputs, &node.attrs))?;
            let mut inner = Pending::new();
            let mut top = floor;
            for (k, &o) in outs.iter().enumerate() {
                if let Some(d) = grads.get(k).copied().flatten() {
                    inner.entry(o).or_default().push(d);
                    top = top.max(o.index() + 1);
                }
            }
            let wrt: Vec<NodeId> = node.inputs.iter().zip(&wants).filter(|(_, w)| **w).map(|(x, _)| *x).collect();
            let mut inside = vec![false; top];
            for w in &wrt {
                inside[w.index()] = true;
            }
            for i in floor..top {
                let n = &g.nodes()[i];
                let flows = !n.detached && n.dtype.is_float() && (is_part(n.op.class) || !matches!(n.op.grad, Grad::Zero));
                inside[i] = flows && n.inputs.iter().any(|x| inside[x.index()]);
            }
            sweep(g, &mut inner, &inside, top, floor, &[])?;
            for w in wrt {
                if let Some(p) = inner.remove(&w) {
                    pending.entry(w).or_default().extend(p);
                }
            }
        }
    }
    Ok(())
}

fn file(g: &Graph, pending: &mut Pending, inputs: &[NodeId], wants: &[bool], out: Grads) -> Result<()> {
    for ((&x, d), &want) in inputs.iter().zip(out).zip(wants) {
        let Some(d) = d.filter(|_| want) else { continue };
        if g.shape(d) != g.shape(x) {
            let message = format!("this is a bug: gradient {} of an input {}", g.shape(d), g.shape(x));
            return Err(Error::gradient("backward", message));
        }
        pending.entry(x).or_default().push(d);
    }
    Ok(())
}
