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

use crate::lowered::Lowered;
use crate::passes::rewriter::Rewriter;
use perilune_core::error::{Error, Result};
use perilune_core::graph::{Attrs, Graph, Node, NodeId};
use perilune_core::mesh::{Axis, Combine, Start};
use perilune_core::ops::{Class, ReduceFn, collective, create, elementwise, join, movement, slicing};
use perilune_core::{DType, Shape};
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
    nodes: Vec<Copies>,
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
    let mut fold = Fold { from: step, to, nodes: Vec::with_capacity(step.graph.len()), logical, copies, axes };
    for id in step.graph.ids() {
        fold.to.out.graph.modes.loc = step.graph.loc_of(id);
        let new = fold.visit(id, samples)?;
        fold.nodes.push(new);
    }
    let shared = |id: &NodeId| match &fold.nodes[id.index()] {
        Copies::Shared(new) => Ok(*new),
        Copies::Each(_) => Err(Error::system("plan", "this is a bug: a result differs among the shards of a step")),
    };
    let roots = step.roots.iter().map(shared).collect::<Result<_>>()?;
    let state_writes = step.state_writes.iter().map(shared).collect::<Result<_>>()?;
    let ok = step.ok.iter().map(shared).next().transpose()?;
    let mut out = fold.to.out;
    (out.roots, out.state_writes, out.ok) = (roots, state_writes, ok);
    Ok(out)
}

impl Fold<'_> {
    fn visit(&mut self, id: NodeId, samples: &[bool]) -> Result<Copies> {
        let node = self.from.graph.node(id);
        // A tensor without elements is not divided.
        if node.shape.numel() > 0 && self.from.inputs.get(&id).is_some_and(|input| samples[*input as usize]) {
            return self.samples(id, node.shape);
        }
        if node.op == &create::SHARD {
            return self.generated(node);
        }
        if collective::is_collective(node.op) && collective::axis(&node.attrs) == self.logical {
            let copies = self.each(node.inputs[0]);
            return if node.op == &collective::ALL_REDUCE {
                self.combined(&copies, node).map(Copies::Shared)
            } else if node.op == &collective::ALL_GATHER {
                self.gathered(&copies, node.attrs[1] as usize).map(Copies::Shared)
            } else {
                self.scattered(&copies, node)
            };
        }
        if values(node).iter().all(|x| matches!(self.nodes[x.index()], Copies::Shared(_))) {
            let inputs: SmallVec<[NodeId; 4]> = node.inputs.iter().map(|x| self.copy_of(*x, 0)).collect();
            return self.shared(id, node, inputs).map(Copies::Shared);
        }
        let mut copies = SmallVec::new();
        for j in 0..self.copies {
            let inputs = node.inputs.iter().map(|x| self.copy_of(*x, j)).collect();
            copies.push(self.to.copy_over(self.from, id, inputs));
        }
        Ok(Copies::Each(copies))
    }

    /// What copy `j` reads of an old node.
    fn copy_of(&self, id: NodeId, j: usize) -> NodeId {
        match &self.nodes[id.index()] {
            Copies::Shared(new) => *new,
            Copies::Each(all) => all[j],
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

    /// The parts of generated numbers. A step along the logical axis is taken once for each shard before the device's own.
    fn generated(&mut self, node: &Node) -> Result<Copies> {
        let step: i64 = node.attrs.chunks_exact(2).map(|pair| pair[1]).sum();
        let mut attrs = Attrs::new();
        let mut shards = self.copies as i64;
        for (axis, size) in self.axes.iter().rev() {
            attrs.extend([*axis as i64, step * shards]);
            shards *= *size as i64;
        }
        let whole = self.copy_of(node.inputs[0], 0);
        let copies = (0..self.copies as i64).map(|j| {
            let mut own = attrs.clone();
            own.extend((j > 0).then_some(j * step));
            let out = &mut self.to.out;
            let start = Start::from_attrs(&own);
            let new = out.graph.add(Node { inputs: smallvec![whole], attrs: own, ..node.clone() });
            out.slots.insert(new, out.first_start + out.starts.len() as u32);
            out.starts.push(start);
            new
        });
        Ok(Copies::Each(copies.collect()))
    }

    /// Combines the copies' terms, then the devices'.
    fn combined(&mut self, copies: &[NodeId], node: &Node) -> Result<NodeId> {
        let (own, how) = self.tree(copies, node.attrs[1])?;
        let g = &mut self.to.out.graph;
        let reduce = |x, (axis, _): &(Axis, usize)| g.push(&collective::ALL_REDUCE, &[x], &[*axis as i64, how]);
        let all = self.axes.iter().rev().try_fold(own, reduce)?;
        g.cast(all, node.dtype)
    }

    /// Combines the copies' terms in pairs; sums of 16-bit floats stay in f32. Returns the attribute of the collectives that go on.
    fn tree(&mut self, copies: &[NodeId], how: i64) -> Result<(NodeId, i64)> {
        let g = &mut self.to.out.graph;
        let (op, how) = match collective::combine(how) {
            Combine::Sum => (&elementwise::ADD, collective::TREE),
            Combine::Max => (&elementwise::MAXIMUM, how),
            Combine::Min => (&elementwise::MINIMUM, how),
        };
        let half = |x: &NodeId| how == collective::TREE && is_half(g.dtype(*x));
        let wide: SmallVec<[bool; 8]> = copies.iter().map(half).collect();
        let mut terms: SmallVec<[NodeId; 8]> = SmallVec::new();
        for (x, wide) in copies.iter().zip(wide) {
            terms.push(if wide { g.cast(*x, DType::F32)? } else { *x });
        }
        while terms.len() > 1 {
            terms = terms.chunks(2).map(|pair| g.map(op, pair)).collect::<Result<_>>()?;
        }
        Ok((terms[0], how))
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
    fn scattered(&mut self, copies: &[NodeId], node: &Node) -> Result<Copies> {
        let (mut x, how) = self.tree(copies, node.attrs[3])?;
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

fn is_half(dtype: DType) -> bool {
    dtype.is_float() && dtype.size() == 2
}
