//! Makes the part of a value that a reader needs from the part that a device has: by a collective, by computing it again, or by
//! cutting it from the whole.

use super::candidates::Candidate;
use super::divider::Divider;
use super::part::Part;
use crate::ir::BLOCK_ALIGN;
use perilune_core::Shape;
use perilune_core::error::{Error, Result};
use perilune_core::graph::{Attrs, Node, NodeId};
use perilune_core::mesh::{Combine, ONE_SECTION, Start};
use perilune_core::ops::{
    Class, Generator, ReduceFn, collective, create, elementwise, experts, index, join, movement, reduce, slicing,
};
use perilune_core::sharding::{Cut, Positions};
use smallvec::{SmallVec, smallvec};

/// Operands of a node from which a part of it can be computed again, at most so many nodes up.
pub(super) const MAX_DERIVED: usize = 16;

/// A tensor seen as (dims before the cut, segments, a segment, dims behind the cut).
fn segmented(whole: &Shape, cut: Cut, size: usize) -> Shape {
    let dims = whole.dims();
    let product = |dims: &[usize]| dims.iter().product();
    Shape::of(&[product(&dims[..cut.dim]), cut.segments, size, product(&dims[cut.dim + 1..])])
}

impl Divider<'_> {
    /// The way in which a block of an old node can be computed from whole operands and other such blocks, without a copy.
    fn derivation(&self, id: NodeId, part: Part, depth: usize) -> Option<Candidate> {
        let node = self.graph().node(id);
        let cheap = matches!(node.op.class, Class::View(_) | Class::Map(_) | Class::Cast);
        if !cheap || depth == 0 || self.first[id.index()] != Part::Whole {
            return None;
        }
        let ready = |(x, p): (&NodeId, &Part)| match p {
            Part::Whole => self.first[x.index()] == Part::Whole,
            p => self.exists(*x, *p) || self.derivable(*x, *p, depth - 1),
        };
        let wanted = |k| part.cut().filter(|_| k == 0);
        let all = self.candidates(id, &|_| SmallVec::new(), &wanted);
        all.into_iter().find(|c| c.results[0] == part && node.inputs.iter().zip(&c.operands).all(ready))
    }

    pub(super) fn derivable(&self, id: NodeId, part: Part, depth: usize) -> bool {
        match (self.graph().generator(id), part) {
            (Some(Generator::Iota | Generator::Uniform | Generator::Shard), Part::Block(cut)) => {
                cut.segments == 1 && !cut.has_sections() && self.may_begin_at(id, cut)
            }
            _ => {
                // A value that many paths reach is looked at once for each visited node.
                let known = self.derivable.borrow().get(&(id, part)).copied();
                known.unwrap_or_else(|| {
                    let found = self.derivation(id, part, depth).is_some();
                    self.derivable.borrow_mut().insert((id, part), found);
                    found
                })
            }
        }
    }

    /// Makes a part of an old node that does not exist yet.
    pub(super) fn make(&mut self, id: NodeId, part: Part) -> Result<NodeId> {
        if let Part::Block(cut) = part
            && self.derivable(id, part, MAX_DERIVED)
        {
            if self.graph().generator(id).is_some() {
                return self.generated(id, cut);
            }
            if let Some(candidate) = self.derivation(id, part, MAX_DERIVED) {
                return self.divided(id, &candidate);
            }
        }
        let (own, shape) = (self.to.map[id.index()], self.graph().shape(id));
        match (self.first[id.index()], part) {
            (Part::Own, _) | (_, Part::Own) => {
                Err(Error::system("plan", "this is a bug: a device reads samples of others without a collective"))
            }
            (Part::Term(how), Part::Whole) => {
                let attrs = [self.axis as i64, self.combination(how)];
                self.to.out.graph.push(&collective::ALL_REDUCE, &[own], &attrs)
            }
            (Part::Block(cut), Part::Whole) => self.all_gather(own, cut, shape),
            (Part::Term(how), Part::Block(cut)) => self.reduce_scatter(own, cut, shape, how),
            (Part::Block(from), Part::Block(to)) if self.is_exchange(id, from, to) => {
                self.all_to_all(own, from, to, shape)
            }
            (_, Part::Block(cut)) => {
                let whole = self.part(id, Part::Whole)?;
                self.cut(whole, cut)
            }
            (_, Part::Term(Combine::Sum)) => {
                let whole = self.part(id, Part::Whole)?;
                self.on_the_first(whole)
            }
            // A term of a maximum or minimum may be the whole.
            (_, Part::Term(_)) | (Part::Whole, Part::Whole) => self.part(id, Part::Whole),
        }
    }

    /// The attribute of a collective that combines terms.
    fn combination(&self, how: Combine) -> i64 {
        if self.strict.is_some() && how == Combine::Sum { collective::TREE } else { collective::code(how) }
    }

    /// Joins the blocks of all devices, without their padding.
    pub(super) fn all_gather(&mut self, x: NodeId, cut: Cut, whole: Shape) -> Result<NodeId> {
        if cut.has_sections() {
            let part = |this: &mut Self, x, cut, whole| this.all_gather(x, cut, whole);
            return self.by_section(x, cut, cut.block, &whole, &part);
        }
        let (padded, axis, n) = (cut.is_padded(&whole, self.devices), self.axis as i64, self.devices as i64);
        let g = &mut self.to.out.graph;
        if cut.segments == 1 {
            let all = g.push(&collective::ALL_GATHER, &[x], &[axis, cut.dim as i64, n])?;
            return slicing::slice(g, all, cut.dim, 0, whole.dims()[cut.dim], 1);
        }
        let x = movement::reshape(g, x, segmented(&whole, cut, cut.block))?;
        let mut all = g.push(&collective::ALL_GATHER, &[x], &[axis, 2, n])?;
        if padded {
            all = slicing::slice(g, all, 2, 0, cut.segment(&whole), 1)?;
        }
        movement::reshape(g, all, whole)
    }

    /// Converts each section of `x`, which has `unit` elements for each of its blocks, and joins the results.
    fn by_section(
        &mut self,
        x: NodeId,
        cut: Cut,
        unit: usize,
        whole: &Shape,
        convert: &dyn Fn(&mut Self, NodeId, Cut, Shape) -> Result<NodeId>,
    ) -> Result<NodeId> {
        let (mut first, mut done) = (0, SmallVec::<[NodeId; 4]>::new());
        for blocks in cut.sections.map(usize::from).into_iter().filter(|n| *n > 0) {
            let own = slicing::slice(&mut self.to.out.graph, x, cut.dim, first * unit, (first + blocks) * unit, 1)?;
            let one = Cut { sections: ONE_SECTION, block: blocks * cut.block, ..cut };
            done.push(convert(self, own, one, whole.with(cut.dim, blocks * cut.segment(whole)))?);
            first += blocks;
        }
        join::cat(&mut self.to.out.graph, &done, cut.dim)
    }

    /// Whether blocks of one dim become blocks of another without the whole, which does not exist.
    fn is_exchange(&self, id: NodeId, from: Cut, to: Cut) -> bool {
        let plain = |cut: Cut| cut.segments == 1 && !cut.has_sections();
        from.dim != to.dim && plain(from) && plain(to) && !self.exists(id, Part::Whole)
    }

    /// Makes blocks of dim `to` from blocks of dim `from`: every device sends to each other one what is in both blocks.
    fn all_to_all(&mut self, x: NodeId, from: Cut, to: Cut, whole: Shape) -> Result<NodeId> {
        let (axis, n) = (self.axis as i64, self.devices);
        let product = |dims: &[usize]| dims.iter().product::<usize>();
        let dims = whole.dims();
        let (low, high) = (from.dim.min(to.dim), from.dim.max(to.dim));
        let (before, between, behind) =
            (product(&dims[..low]), product(&dims[low + 1..high]), product(&dims[high + 1..]));
        let g = &mut self.to.out.graph;
        let x = slicing::strided_pad(g, x, to.dim, 0, 1, to.block * n, 0.0)?;
        // Seen as six dims, of which one counts the devices: first the one that a slice is for, then the one that it is from.
        let (a, b) = (from.block, to.block);
        let (sent, order, back, joined) = match from.dim < to.dim {
            true => (
                [before, a, between, n, b, behind],
                [3, 0, 1, 2, 4, 5],
                [1, 0, 2, 3, 4, 5],
                [before, n * a, between, b, behind],
            ),
            false => (
                [before, n, b, between, a, behind],
                [1, 0, 2, 3, 4, 5],
                [1, 2, 3, 0, 4, 5],
                [before, b, between, n * a, behind],
            ),
        };
        let x = movement::reshape(g, x, Shape::of(&sent))?;
        let x = movement::permute(g, x, &order)?;
        let x = g.push(&collective::ALL_TO_ALL, &[x], &[axis, 0, n as i64])?;
        let x = movement::permute(g, x, &back)?;
        let x = movement::reshape(g, x, Shape::of(&joined))?;
        let x = movement::reshape(g, x, whole.with(from.dim, n * a).with(to.dim, b))?;
        slicing::slice(g, x, from.dim, 0, dims[from.dim], 1)
    }

    /// Combines the terms of all devices; each gets its block.
    pub(super) fn reduce_scatter(&mut self, x: NodeId, cut: Cut, whole: Shape, how: Combine) -> Result<NodeId> {
        if cut.has_sections() {
            let part = |this: &mut Self, x, cut, whole| this.reduce_scatter(x, cut, whole, how);
            return self.by_section(x, cut, cut.segment(&whole), &whole, &part);
        }
        let attrs = |dim: usize| [self.axis as i64, dim as i64, self.devices as i64, self.combination(how)];
        let (plain, segments) = (attrs(cut.dim), attrs(2));
        let total = cut.block * self.devices;
        let g = &mut self.to.out.graph;
        if cut.segments == 1 {
            let x = slicing::strided_pad(g, x, cut.dim, 0, 1, total, 0.0)?;
            return g.push(&collective::REDUCE_SCATTER, &[x], &plain);
        }
        let x = movement::reshape(g, x, segmented(&whole, cut, cut.segment(&whole)))?;
        let x = slicing::strided_pad(g, x, 2, 0, 1, total, 0.0)?;
        let own = g.push(&collective::REDUCE_SCATTER, &[x], &segments)?;
        movement::reshape(g, own, cut.local(&whole))
    }

    /// The block of a whole tensor that belongs to this device. Padding repeats the last element.
    pub(super) fn cut(&mut self, whole: NodeId, cut: Cut) -> Result<NodeId> {
        let shape = self.to.out.graph.shape(whole);
        if cut.has_sections() {
            let part = |this: &mut Self, x, cut, _| this.cut(x, cut);
            return self.by_section(whole, cut, cut.segment(&shape), &shape, &part);
        }
        if self.is_read_from_whole(whole, cut) {
            let stride = shape.strides()[cut.dim] as usize;
            return self.shard_node(whole, cut.local(&shape), smallvec![self.axis as i64, (cut.block * stride) as i64]);
        }
        let mut ids = self.ramp(cut.block)?;
        let g = &mut self.to.out.graph;
        if cut.is_padded(&shape, self.devices) {
            let last = g.int_constant(cut.segment(&shape) as i64 - 1);
            ids = g.map(&elementwise::MINIMUM, &[ids, last])?;
        }
        if cut.segments == 1 {
            return g.push(&index::INDEX_SELECT, &[whole, ids], &[cut.dim as i64, index::OF_PLANNER]);
        }
        let x = movement::reshape(g, whole, segmented(&shape, cut, cut.segment(&shape)))?;
        let own = g.push(&index::INDEX_SELECT, &[x, ids], &[2, index::OF_PLANNER])?;
        movement::reshape(g, own, cut.local(&shape))
    }

    /// Whether a part of a generator may be cut again: of one of a stored tensor, what [`Divider::is_read_from_whole`] asks for.
    fn may_begin_at(&self, id: NodeId, cut: Cut) -> bool {
        let g = self.graph();
        let Some(whole) = g.node(id).inputs.first().filter(|_| g.generator(id) == Some(Generator::Shard)) else {
            return true;
        };
        let stride = g.shape(*whole).strides()[cut.dim] as usize;
        let aligned = (cut.block * stride * g.dtype(id).size()).is_multiple_of(BLOCK_ALIGN);
        g.generator(*whole).is_some() || aligned && !cut.is_padded(&g.shape(id), self.devices)
    }

    /// Whether kernels may read a block from the whole tensor: an input of the step that no axis divides. A copy of each block, of
    /// every weight whose optimizer is divided, would be a kernel of its own.
    fn is_read_from_whole(&self, whole: NodeId, cut: Cut) -> bool {
        let (g, mesh) = (&self.to.out.graph, &self.division.mesh);
        let (shape, size) = (g.shape(whole), g.dtype(whole).size());
        let input = self.to.out.inputs.get(&whole).map(|k| &self.division.inputs[*k as usize]);
        self.strict.is_none()
            && self.division.strict.is_none()
            && cut.segments == 1
            && !cut.is_padded(&shape, self.devices)
            && (cut.block * shape.strides()[cut.dim] as usize * size).is_multiple_of(BLOCK_ALIGN)
            && input.is_some_and(|placement| placement.is_replicated(mesh))
    }

    /// The whole tensor on the first device, zeros on the others. Zeros are so already.
    fn on_the_first(&mut self, whole: NodeId) -> Result<NodeId> {
        if self.is_zero(whole) {
            return Ok(whole);
        }
        let coordinate = self.ramp(1)?;
        let g = &mut self.to.out.graph;
        let coordinate = movement::reshape(g, coordinate, Shape::SCALAR)?;
        let zero = g.int_constant(0);
        let first = g.eq(coordinate, zero)?;
        self.or_zero(first, whole)
    }

    /// Whether a node of the new graph is a view of the constant 0.
    fn is_zero(&self, id: NodeId) -> bool {
        let node = self.to.out.graph.node(id);
        match node.op.class {
            Class::View(_) => node.inputs.iter().all(|x| self.is_zero(*x)),
            _ => node.op == &create::CONSTANT && node.attrs[..] == [0],
        }
    }

    /// `x` where a condition holds, which has the dims of `x` or size 1 instead, else 0. It is the negative zero, which changes no
    /// number that it is added to, not even a zero.
    pub(super) fn or_zero(&mut self, condition: NodeId, x: NodeId) -> Result<NodeId> {
        let g = &mut self.to.out.graph;
        let (shape, nothing) = (g.shape(x), g.constant_like(-0.0, x));
        let (condition, nothing) = (g.expand(condition, shape)?, g.expand(nothing, shape)?);
        g.where_(condition, x, nothing)
    }

    /// The block of generated numbers that this device makes.
    fn generated(&mut self, id: NodeId, cut: Cut) -> Result<NodeId> {
        let node = self.graph().node(id);
        let own = self.to.map[id.index()];
        // Of a part, a part: the steps of both axes are added.
        let (whole, mut attrs) = match self.graph().generator(id) {
            Some(Generator::Shard) => (self.to.out.graph.node(own).inputs[0], node.attrs.clone()),
            _ => (own, Attrs::new()),
        };
        let stride = self.to.out.graph.shape(whole).strides()[cut.dim] as usize;
        attrs.extend([self.axis as i64, (cut.block * stride) as i64]);
        self.shard_node(whole, cut.local(&node.shape), attrs)
    }

    fn shard_node(&mut self, whole: NodeId, shape: Shape, attrs: Attrs) -> Result<NodeId> {
        let out = &mut self.to.out;
        let (dtype, start, inputs) = (out.graph.dtype(whole), Start::from_attrs(&attrs), smallvec![whole]);
        let op = &create::SHARD;
        let new = out.graph.add(Node { op, dtype, detached: true, tf32: false, shape, inputs, attrs, payload: 0 });
        out.slots.insert(new, out.first_start + out.starts.len() as u32);
        out.starts.push(start);
        Ok(new)
    }

    /// The positions of a block of so many elements on this device.
    pub(super) fn ramp(&mut self, block: usize) -> Result<NodeId> {
        if let Some(found) = self.ramps.get(&block) {
            return Ok(*found);
        }
        let whole = create::iota(&mut self.to.out.graph, block * self.devices)?;
        let ramp = self.shard_node(whole, Shape::of(&[block]), smallvec![self.axis as i64, block as i64])?;
        self.ramps.insert(block, ramp);
        Ok(ramp)
    }

    /// Replaces padding of operands that would reach other elements: terms get the identity of their combination, and a library
    /// op no index that names nothing.
    pub(super) fn mask(&mut self, node: &Node, c: &Candidate, inputs: &mut [NodeId]) -> Result<()> {
        let term = c.results.iter().find_map(|r| if let Part::Term(how) = r { Some(*how) } else { None });
        let library = matches!(node.op.class, Class::Library | Class::Fused(_));
        for (k, x) in node.inputs.iter().enumerate() {
            let Part::Block(cut) = c.operands[k] else { continue };
            let (shape, dtype) = (self.graph().shape(*x), self.graph().dtype(*x));
            let reaches = term.is_some() && c.positions.is_none() || library && dtype.is_int();
            if !reaches || !cut.is_padded(&shape, self.devices) {
                continue;
            }
            let f = match term {
                Some(Combine::Max) => ReduceFn::Max,
                Some(Combine::Min) => ReduceFn::Min,
                _ => ReduceFn::Sum,
            };
            let value = match experts::number_of_experts(node.op, k) {
                // Padding goes through no expert.
                Some(weights) => self.graph().shape(node.inputs[weights]).dims()[0] as f64,
                None => reduce::identity(f, dtype),
            };
            inputs[k] = self.with_padding(inputs[k], cut, shape, value)?;
        }
        Ok(())
    }

    /// A block with that constant for padding.
    pub(super) fn with_padding(&mut self, x: NodeId, cut: Cut, whole: Shape, value: f64) -> Result<NodeId> {
        if let Some(found) = self.masked.get(&(x, value.to_bits())) {
            return Ok(*found);
        }
        let places = self.ramp(cut.block)?;
        let g = &mut self.to.out.graph;
        let size = g.int_constant(cut.segment(&whole) as i64);
        let valid = g.lt(places, size)?;
        let view = segmented(&whole, cut, cut.block);
        let valid = movement::reshape(g, valid, Shape::of(&[cut.block, 1]))?;
        let (seen, padding) = (movement::reshape(g, x, view)?, g.constant_like(value, x));
        let (valid, padding) = (g.expand(valid, view)?, g.expand(padding, view)?);
        let out = g.where_(valid, seen, padding)?;
        let out = movement::reshape(g, out, cut.local(&whole))?;
        self.masked.insert((x, value.to_bits()), out);
        Ok(out)
    }

    /// Makes positions along a divided dim count from the start of the device's block. Returns which of the results are in the
    /// block, if the others have to be 0.
    pub(super) fn own_positions(
        &mut self,
        node: &Node,
        c: &Candidate,
        how: Positions,
        inputs: &mut [NodeId],
    ) -> Result<Option<NodeId>> {
        let whole = self.graph().shape(node.inputs[0]);
        let Part::Block(cut) = c.operands[0] else { return Ok(None) };
        let checked = self.in_range(node, whole.dims()[cut.dim], inputs[1])?;
        let first = self.ramp(cut.block)?;
        let g = &mut self.to.out.graph;
        let first = slicing::slice(g, first, 0, 0, 1, 1)?;
        let first = movement::reshape(g, first, Shape::SCALAR)?;
        // Within its segment, and then from the start of the block.
        let segment = cut.segment(&whole) as i64;
        let (size, block) = (g.int_constant(segment), g.int_constant(cut.block as i64));
        let (number, within) = match cut.segments {
            1 => (None, checked),
            _ => (
                Some(g.map(&elementwise::FLOOR_DIV, &[checked, size])?),
                g.map(&elementwise::REMAINDER, &[checked, size])?,
            ),
        };
        let from = g.sub(within, first)?;
        let zero = g.int_constant(0);
        let (above, below) = (g.ge(from, zero)?, g.lt(from, block)?);
        let own = g.logical_and(above, below)?;
        let from = match number {
            Some(number) => {
                let before = g.mul(number, block)?;
                g.add_(before, from)?
            }
            None => from,
        };
        inputs[1] = self.or_zero(own, from)?;
        let g = &mut self.to.out.graph;
        // A list of positions stands for a dim of the op's other operands.
        let rank = whole.rank();
        let own = match g.shape(own).rank() {
            1 if rank > 1 => {
                let n = g.shape(own).numel();
                let dims: SmallVec<[usize; 8]> = (0..rank).map(|d| if d == cut.dim { n } else { 1 }).collect();
                movement::reshape(g, own, Shape::of(&dims))?
            }
            _ => own,
        };
        if how == Positions::Read {
            return Ok(Some(own));
        }
        inputs[2] = self.or_zero(own, inputs[2])?;
        Ok(None)
    }

    /// Positions that the op's own check has seen: a device cannot tell those of other blocks from those of none.
    fn in_range(&mut self, node: &Node, size: usize, positions: NodeId) -> Result<NodeId> {
        let g = &mut self.to.out.graph;
        let all = create::iota(g, size)?;
        if node.op == &index::INDEX_SELECT {
            let attrs: SmallVec<[i64; 2]> = std::iter::once(0).chain(node.attrs.get(1).copied()).collect();
            return g.push(&index::INDEX_SELECT, &[all, positions], &attrs);
        }
        let shape = g.shape(positions);
        let flat = g.reshape(positions, &[shape.numel()])?;
        let seen = g.push(&index::INDEX_SELECT, &[all, flat], &[0])?;
        movement::reshape(g, seen, shape)
    }
}
