//! Gives each device the work of several logical shards of a step: see [`strict`](super::strict).
//!
//! The step has been divided among L shards along one logical axis. Each of the p devices gets L / p copies of every node that differs
//! among shards, and one of every other node. The coordinate of copy j of a device is (rank of the device) L / p + j; where its
//! generated numbers begin is a run-time number, so all devices have one program. A collective over the shards becomes a part over the
//! copies of a device and collectives over the devices:
//!
//! - a sum: the copies' terms are added in a binary tree, the devices' in another ([`collective::TREE`]), innermost axis first; together
//!   they are the tree over shard numbers. Sums of 16-bit terms are taken in f32 and rounded once, at the end;
//! - a gathering: the copies' blocks are joined, then the devices';
//! - a sum that is scattered: as a sum whose last step leaves each device the blocks of its copies.
//!
//! Copies run one after the other, so that a device has the values of one shard at a time, and log2(L / p) + 1 terms of each sum
//! (a binary counter). A collective over the shards ends a stage of the step ([`stages`]). Within a stage each copy is emitted whole,
//! and reads what it takes from outside through barriers that wait for the end of the copy before. Batch norm ends a stage in every
//! layer: then the values of all copies stay.

use crate::lowered::Lowered;
use crate::passes::rewriter::Rewriter;
use perilune_core::error::{Error, Result};
use perilune_core::graph::{Attrs, Graph, Node, NodeId};
use perilune_core::mesh::{Axis, Combine, Start};
use perilune_core::ops::{Class, ReduceFn, collective, create, elementwise, join, movement, slicing};
use perilune_core::{DType, Shape};
use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

/// The new nodes of an old one.
#[derive(Clone, Debug)]
enum Copies {
    /// One, which is equal on all devices.
    Shared(NodeId),
    /// One for each logical shard of the device.
    Each(SmallVec<[NodeId; 8]>),
}

struct Fold<'a> {
    from: &'a Lowered,
    to: Rewriter,
    /// The new nodes of each old one, as far as they exist.
    nodes: Vec<Option<Copies>>,
    samples: &'a [bool],
    stages: Vec<u32>,
    /// For each sum along the logical axis, the terms that have been added, each with the number of copies in it.
    sums: FxHashMap<NodeId, SmallVec<[(NodeId, usize); 4]>>,
    /// What the copy that is being emitted reads through barriers, by old node.
    held: FxHashMap<NodeId, NodeId>,
    /// The last term of the copy before it in this stage.
    before: Option<NodeId>,
    /// The axis of the logical shards.
    logical: Axis,
    /// Logical shards of a device.
    copies: usize,
    /// The axes of the mesh that share the shards, outermost first, with their sizes.
    axes: &'a [(Axis, usize)],
}

/// Maps the logical shards along an axis onto devices. `samples`: for each input, whether a shard has its own samples of it.
pub(super) fn apply(
    step: &Lowered,
    samples: &[bool],
    logical: Axis,
    copies: usize,
    axes: &[(Axis, usize)],
) -> Result<Lowered> {
    let mut to = Rewriter::new(step);
    // Each copy gets starts of its own.
    to.out.starts.clear();
    let mut fold = Fold {
        from: step,
        to,
        nodes: vec![None; step.graph.len()],
        samples,
        stages: stages(step, logical),
        sums: FxHashMap::default(),
        held: FxHashMap::default(),
        before: None,
        logical,
        copies,
        axes,
    };
    let last = fold.stages.iter().copied().max().unwrap_or(0);
    let mut of_stage: Vec<Vec<NodeId>> = vec![Vec::new(); last as usize + 1];
    for id in step.graph.ids() {
        of_stage[fold.stages[id.index()] as usize].push(id);
    }
    // The sums of which each stage has the terms.
    let reached = step.reachable();
    let mut sums: Vec<Vec<NodeId>> = vec![Vec::new(); last as usize + 1];
    for id in step.graph.ids().filter(|id| reached[id.index()] && fold.is_sum(*id)) {
        sums[fold.stages[step.graph.node(id).inputs[0].index()] as usize].push(id);
    }
    for (ids, sums) in of_stage.iter().zip(&sums) {
        fold.before = None;
        for j in 0..copies {
            fold.held.clear();
            for id in ids {
                fold.to.out.graph.modes.loc = step.graph.loc_of(*id);
                fold.visit(*id, j)?;
            }
            fold.before = sums.iter().map(|sum| fold.copy_of(step.graph.node(*sum).inputs[0], j)).max();
            for sum in sums {
                fold.to.out.graph.modes.loc = step.graph.loc_of(*sum);
                fold.add_term(*sum, j)?;
            }
        }
    }
    let shared = |id: &NodeId| match &fold.nodes[id.index()] {
        Some(Copies::Shared(new)) => Ok(*new),
        _ => Err(Error::system("plan", "this is a bug: a result differs among the shards of a step")),
    };
    let roots = step.roots.iter().map(shared).collect::<Result<_>>()?;
    let state_writes = step.state_writes.iter().map(shared).collect::<Result<_>>()?;
    let ok = step.ok.iter().map(shared).next().transpose()?;
    let mut out = fold.to.out;
    (out.roots, out.state_writes, out.ok) = (roots, state_writes, ok);
    Ok(out)
}

/// Whether a node is a collective over the shards.
fn joins(node: &Node, logical: Axis) -> bool {
    collective::is_collective(node.op) && collective::axis(&node.attrs) == logical
}

/// For each node, the stage of the step in which it is computed: a collective over the shards is in a later stage than its operand, and
/// every node is as late as its readers allow. So a forward pass is in the stage of its backward pass, although the loss is first
/// divided by a number of tokens that all shards have to count.
fn stages(step: &Lowered, logical: Axis) -> Vec<u32> {
    let g = &step.graph;
    let mut first = vec![0; g.len()];
    for id in g.ids() {
        let node = g.node(id);
        let after = u32::from(joins(node, logical));
        first[id.index()] = node.inputs.iter().map(|x| first[x.index()] + after).max().unwrap_or(0);
    }
    let mut out = vec![first.iter().copied().max().unwrap_or(0); g.len()];
    for i in (0..g.len()).rev() {
        let node = &g.nodes()[i];
        let latest = out[i] - u32::from(joins(node, logical));
        for x in &node.inputs {
            out[x.index()] = out[x.index()].min(latest);
        }
    }
    // Results are taken where they are computed.
    for (id, node) in g.ids().zip(g.nodes()).filter(|(_, node)| matches!(node.op.class, Class::TupleGet)) {
        out[id.index()] = out[node.inputs[0].index()];
    }
    out
}

impl Fold<'_> {
    /// Emits copy `j` of an old node. A node that is equal on all devices, or that joins copies, is emitted with the first.
    fn visit(&mut self, id: NodeId, j: usize) -> Result<()> {
        let node = self.from.graph.node(id);
        if j > 0 && !matches!(&self.nodes[id.index()], Some(Copies::Each(all)) if all.len() == j) {
            return Ok(());
        }
        let is_samples = self.from.inputs.get(&id).is_some_and(|input| self.samples[*input as usize]);
        let copies = if node.shape.numel() > 0 && is_samples {
            // A tensor without elements is not divided.
            match j {
                0 => self.samples(id, node.shape)?,
                _ => return Ok(()),
            }
        } else if joins(node, self.logical) {
            match node.op {
                op if op == &collective::ALL_REDUCE => self.combined(id, node).map(Copies::Shared)?,
                op if op == &collective::ALL_GATHER => {
                    let copies = self.each(node.inputs[0]);
                    self.gathered(&copies, node.attrs[1] as usize).map(Copies::Shared)?
                }
                _ => self.scattered(id, node)?,
            }
        } else if node.op == &create::SHARD {
            let new = self.generated(node, j);
            self.push(id, new);
            return Ok(());
        } else if values(node).iter().all(|x| matches!(self.nodes[x.index()], Some(Copies::Shared(_)))) {
            let inputs: SmallVec<[NodeId; 4]> = node.inputs.iter().map(|x| self.copy_of(*x, 0)).collect();
            self.shared(id, node, inputs).map(Copies::Shared)?
        } else {
            let inputs = node.inputs.iter().map(|x| self.operand(id, *x, j)).collect();
            let new = self.to.copy_over(self.from, id, inputs);
            self.push(id, new);
            return Ok(());
        };
        self.nodes[id.index()] = Some(copies);
        Ok(())
    }

    /// Notes the next copy of an old node.
    fn push(&mut self, id: NodeId, new: NodeId) {
        match &mut self.nodes[id.index()] {
            Some(Copies::Each(all)) => all.push(new),
            none => *none = Some(Copies::Each(smallvec![new])),
        }
    }

    /// What copy `j` of node `reader` reads of an old node. What it takes from outside of its stage is not read before the copy before it
    /// has ended.
    fn operand(&mut self, reader: NodeId, x: NodeId, j: usize) -> NodeId {
        let own = self.copy_of(x, j);
        let is_outside = self.stages[x.index()] < self.stages[reader.index()] || self.from.inputs.contains_key(&x);
        let Some(before) = self.before.filter(|_| is_outside && matches!(self.nodes[x.index()], Some(Copies::Each(_))))
        else {
            return own;
        };
        if let Some(held) = self.held.get(&x) {
            return *held;
        }
        let g = &mut self.to.out.graph;
        let (dtype, shape, inputs) = (g.dtype(own), g.shape(own), smallvec![own, before]);
        let (op, attrs) = (&create::OPTIMIZATION_BARRIER, Attrs::new());
        let held = g.add(Node { op, dtype, detached: true, tf32: false, shape, inputs, attrs, payload: 0 });
        self.held.insert(x, held);
        held
    }

    /// Whether a node adds terms of the shards.
    fn is_sum(&self, id: NodeId) -> bool {
        let node = self.from.graph.node(id);
        joins(node, self.logical) && collective::code_of(node.op, &node.attrs).is_some()
    }

    /// Copy `j` of an old node.
    fn copy_of(&self, id: NodeId, j: usize) -> NodeId {
        match &self.nodes[id.index()] {
            Some(Copies::Shared(new)) => *new,
            Some(Copies::Each(all)) => all[j],
            // Stages and ids are in an order in which operands come first.
            None => unreachable!("this is a bug: an operand of the step has not been copied"),
        }
    }

    fn each(&self, id: NodeId) -> SmallVec<[NodeId; 8]> {
        (0..self.copies).map(|j| self.copy_of(id, j)).collect()
    }

    /// A node that is equal on all devices; a barrier waits for the first copy. The sum of a whole tensor is taken of the sums of its rows, which devices may divide
    /// without another order of additions.
    fn shared(&mut self, id: NodeId, node: &Node, inputs: SmallVec<[NodeId; 4]>) -> Result<NodeId> {
        let rank = inputs.first().map_or(0, |x| self.to.out.graph.shape(*x).rank());
        let all = matches!(node.op.class, Class::Reduce(ReduceFn::Sum)) && node.attrs[..] == [0, rank as i64];
        if !all || rank < 2 {
            return Ok(self.to.copy_over(self.from, id, inputs));
        }
        let g = &mut self.to.out.graph;
        let rows = g.push(node.op, &inputs, &[1, rank as i64])?;
        g.push(node.op, &[rows], &[0, 1])
    }

    /// The samples of a device, cut into those of its shards. `own`: the shape of a shard's samples.
    fn samples(&mut self, id: NodeId, own: Shape) -> Result<Copies> {
        let all = self.to.copy_over(self.from, id, smallvec![]);
        let n = own.dims()[0];
        self.to.out.graph.set_shape(all, own.with(0, n * self.copies));
        self.blocks(all, 0, n)
    }

    /// Cuts a dim into blocks of `n`, one for each copy.
    fn blocks(&mut self, all: NodeId, dim: usize, n: usize) -> Result<Copies> {
        let g = &mut self.to.out.graph;
        let block = |j| slicing::slice(g, all, dim, j * n, (j + 1) * n, 1);
        Ok(Copies::Each((0..self.copies).map(block).collect::<Result<_>>()?))
    }

    /// The part of generated numbers of copy `j`. A step along the logical axis is taken once for each shard before the device's own.
    fn generated(&mut self, node: &Node, j: usize) -> NodeId {
        let step: i64 = node.attrs.chunks_exact(2).map(|pair| pair[1]).sum();
        let mut attrs = Attrs::new();
        let mut shards = self.copies as i64;
        for (axis, size) in self.axes.iter().rev() {
            attrs.extend([*axis as i64, step * shards]);
            shards *= *size as i64;
        }
        attrs.extend((j > 0).then_some(j as i64 * step));
        let whole = self.copy_of(node.inputs[0], 0);
        let out = &mut self.to.out;
        let start = Start::from_attrs(&attrs);
        let new = out.graph.add(Node { inputs: smallvec![whole], attrs, ..node.clone() });
        out.slots.insert(new, out.first_start + out.starts.len() as u32);
        out.starts.push(start);
        new
    }

    /// Combines the copies' terms, then the devices'.
    fn combined(&mut self, id: NodeId, node: &Node) -> Result<NodeId> {
        let (own, how) = self.sum_of(id, node)?;
        let g = &mut self.to.out.graph;
        let reduce = |x, (axis, _): &(Axis, usize)| g.push(&collective::ALL_REDUCE, &[x], &[*axis as i64, how]);
        let all = self.axes.iter().rev().try_fold(own, reduce)?;
        g.cast(all, node.dtype)
    }

    /// Adds the term of copy `j` to a sum: two sums of as many copies become one, so the terms are added in pairs, the sums of pairs
    /// in pairs again. Sums of 16-bit floats are in f32.
    fn add_term(&mut self, id: NodeId, j: usize) -> Result<()> {
        let node = self.from.graph.node(id);
        let code = collective::code_of(node.op, &node.attrs).unwrap_or_default();
        let op = match collective::combine(code) {
            Combine::Sum => &elementwise::ADD,
            Combine::Max => &elementwise::MAXIMUM,
            Combine::Min => &elementwise::MINIMUM,
        };
        let x = self.copy_of(node.inputs[0], j);
        let g = &mut self.to.out.graph;
        let is_wide = collective::combine(code) == Combine::Sum && g.dtype(x).is_half();
        let mut term = (if is_wide { g.cast(x, DType::F32)? } else { x }, 1);
        let sums = self.sums.entry(id).or_default();
        while let Some((sum, _)) = sums.last().copied().filter(|(_, copies)| *copies == term.1) {
            sums.pop();
            term = (g.map(op, &[sum, term.0])?, 2 * term.1);
        }
        sums.push(term);
        Ok(())
    }

    /// The sum of the copies' terms, and the attribute of the collectives that go on.
    fn sum_of(&mut self, id: NodeId, node: &Node) -> Result<(NodeId, i64)> {
        let code = collective::code_of(node.op, &node.attrs).unwrap_or_default();
        let how = if collective::combine(code) == Combine::Sum { collective::TREE } else { code };
        // A sum that nothing reads has been left out.
        for j in 0..if self.sums.contains_key(&id) { 0 } else { self.copies } {
            self.add_term(id, j)?;
        }
        Ok((self.sums[&id][0].0, how))
    }

    /// Joins the blocks of all shards along a dim.
    fn gathered(&mut self, copies: &[NodeId], dim: usize) -> Result<NodeId> {
        let g: &mut Graph = &mut self.to.out.graph;
        let own = if copies.len() == 1 { copies[0] } else { join::cat(g, copies, dim)? };
        let gather = |x, (axis, size): &(Axis, usize)| {
            g.push(&collective::ALL_GATHER, &[x], &[*axis as i64, dim as i64, *size as i64])
        };
        self.axes.iter().rev().try_fold(own, gather)
    }

    /// Combines the terms of all shards, and leaves each shard its block of a dim.
    fn scattered(&mut self, id: NodeId, node: &Node) -> Result<Copies> {
        let (mut x, how) = self.sum_of(id, node)?;
        let (dim, n) = (node.attrs[1] as usize, node.shape.dims()[node.attrs[1] as usize]);
        let g = &mut self.to.out.graph;
        let dims = g.shape(x);
        let product = |dims: &[usize]| dims.iter().product::<usize>();
        let (before, after) = (product(&dims.dims()[..dim]), product(&dims.dims()[dim + 1..]));
        // (before, outer axis, inner axis, the blocks of a device, behind)
        let mut seen: SmallVec<[usize; 8]> = smallvec![before];
        seen.extend(self.axes.iter().map(|a| a.1));
        seen.extend([n * self.copies, after]);
        x = movement::reshape(g, x, Shape::of(&seen))?;
        for (k, (axis, size)) in self.axes.iter().enumerate().rev() {
            let attrs = [*axis as i64, 1 + k as i64, *size as i64, how];
            x = g.push(&collective::REDUCE_SCATTER, &[x], &attrs)?;
        }
        x = movement::reshape(g, x, dims.with(dim, n * self.copies))?;
        x = g.cast(x, node.dtype)?;
        self.blocks(x, dim, n)
    }
}

/// The operands that a node computes with, without what a barrier waits for.
pub(super) fn values(node: &Node) -> &[NodeId] {
    if node.op == &create::OPTIMIZATION_BARRIER { &node.inputs[..1] } else { &node.inputs }
}
