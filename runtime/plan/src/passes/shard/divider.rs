//! Divides a step along one axis: chooses what a device has of each node, in recording order.

use super::candidates::{self, Candidate};
use super::demand::{Demand, passes_on_terms};
use super::fold;
use super::gather::Gathered;
use super::part::Part;
use crate::buffer_desc::BufferDesc;
use crate::ir::Origin;
use crate::lowered::Lowered;
use crate::passes::rewriter::Rewriter;
use crate::request::Division;
use crate::unplanned::Unplanned;
use perilune_core::error::Result;
use perilune_core::graph::{Graph, Node, NodeId};
use perilune_core::mesh::{Along, Axis};
use perilune_core::ops::{Class, collective, create, distribute};
use perilune_core::sharding::{self, Cut, Meeting, Signature};
use perilune_core::{DType, Shape};
use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};
use std::cell::RefCell;

pub(super) struct Divider<'a> {
    pub from: &'a Lowered,
    pub division: &'a Division,
    /// What a device has of the State that each write stores to.
    written: Vec<Part>,
    pub axis: Axis,
    pub devices: usize,
    pub to: Rewriter,
    pub demand: Demand,
    /// What a device has of each old node at first.
    pub first: Vec<Part>,
    /// What a device has of each result of a node with several.
    results: FxHashMap<NodeId, SmallVec<[Part; 2]>>,
    /// Results of a node, by number, that are not results of the new node.
    pub apart: FxHashMap<(NodeId, usize), NodeId>,
    /// Results of attention by heads, with all positions: by old node and number.
    pub by_heads: FxHashMap<(NodeId, usize), NodeId>,
    /// Results of attention in a zig-zag ring, as the early and the late chunk of a device: by old node and number.
    pub in_chunks: FxHashMap<(NodeId, usize), [NodeId; 2]>,
    /// Every other part that exists, by old node.
    pub made: FxHashMap<(NodeId, Part), NodeId>,
    /// The blocks among them, in the order in which they were made.
    blocks: FxHashMap<NodeId, SmallVec<[Cut; 2]>>,
    /// Whether parts can be computed from others, as far as that has been asked for the node being visited.
    pub derivable: RefCell<FxHashMap<(NodeId, Part), bool>>,
    /// Positions on this device, by the size of a block.
    pub ramps: FxHashMap<usize, NodeId>,
    /// Blocks with a constant for padding, by new node and the bits of the constant.
    pub masked: FxHashMap<(NodeId, u64), NodeId>,
    /// For each old node, its results that `tuple_get` takes: number, shape and dtype.
    pub parts: FxHashMap<NodeId, Vec<(usize, Shape, DType)>>,
    /// Whether an old node follows from States alone.
    pub is_weight: Vec<bool>,
    pub whole_weights: FxHashMap<NodeId, Gathered>,
    /// The inputs of layers that had weights gathered.
    pub layers: Vec<NodeId>,
    /// For each old node, its phase of the step (forward, backward).
    phases: Vec<u32>,
    pub phase: u32,
    /// The old node for which nodes are being made.
    pub visited: NodeId,
    /// Set for a strict step: only what changes no bit is divided.
    pub strict: Option<Strict>,
}

/// What a strict step needs to be divided.
#[derive(Clone, Debug)]
pub(super) struct Strict {
    /// For each input, whether a device has its own samples of it.
    pub samples: Vec<bool>,
    /// Logical shards of a device.
    pub copies: usize,
}

impl<'a> Divider<'a> {
    pub fn new(
        from: &'a Lowered,
        division: &'a Division,
        written: &[u32],
        phases: Vec<u32>,
        axis: Axis,
        strict: Option<Strict>,
    ) -> Result<Divider<'a>> {
        let mut parts: FxHashMap<NodeId, Vec<(usize, Shape, DType)>> = FxHashMap::default();
        for node in from.graph.nodes().iter().filter(|n| matches!(n.op.class, Class::TupleGet)) {
            let all = parts.entry(node.inputs[0]).or_default();
            let part = (node.attrs[0] as usize, node.shape, node.dtype);
            if !all.contains(&part) {
                all.push(part);
            }
        }
        parts.values_mut().for_each(|all| all.sort_by_key(|p| p.0));
        let mut out = Divider {
            from,
            division,
            written: Vec::new(),
            axis,
            devices: division.mesh.size(axis),
            to: Rewriter::new(from),
            demand: Demand::default(),
            first: Vec::with_capacity(from.graph.len()),
            results: FxHashMap::default(),
            apart: FxHashMap::default(),
            by_heads: FxHashMap::default(),
            in_chunks: FxHashMap::default(),
            made: FxHashMap::default(),
            blocks: FxHashMap::default(),
            derivable: RefCell::default(),
            ramps: FxHashMap::default(),
            masked: FxHashMap::default(),
            parts,
            is_weight: Vec::with_capacity(from.graph.len()),
            whole_weights: FxHashMap::default(),
            layers: Vec::new(),
            phases,
            phase: 0,
            visited: NodeId(0),
            strict,
        };
        let placed = |(id, input): (&NodeId, &u32)| out.placed(from.graph.shape(*id), *input);
        out.written = from.state_writes.iter().zip(written).map(placed).collect::<Result<_>>()?;
        out.demand = Demand::find(&out, &out.written);
        Ok(out)
    }

    /// What a device has of an input of that shape.
    fn placed(&self, shape: Shape, input: u32) -> Result<Part> {
        Part::placed(self.division.inputs[input as usize].along(self.axis), &shape, self.axis, self.devices)
    }

    /// Divides the step. An error names the node that was being visited.
    pub fn run(mut self) -> std::result::Result<Lowered, Unplanned> {
        self.visit_all().map_err(|error| {
            let origin = Origin(self.graph().loc_of(self.visited).0);
            Unplanned { origin, ..error.into() }
        })?;
        Ok(self.finish()?)
    }

    fn visit_all(&mut self) -> Result<()> {
        for id in self.from.graph.ids() {
            self.to.out.graph.modes.loc = self.from.graph.loc_of(id);
            (self.phase, self.visited) = (self.phases[id.index()], id);
            self.derivable.borrow_mut().clear();
            self.is_weight.push(self.follows_from_states(id));
            let (new, part) = self.visit(id)?;
            self.first.push(part);
            self.to.map.push(new);
            self.resolve(id)?;
        }
        Ok(())
    }

    /// Makes the parts that the step returns and stores.
    fn finish(mut self) -> Result<Lowered> {
        let from = self.from;
        let whole = |this: &mut Self, id: NodeId| this.part(id, Part::Whole);
        let mut placed_roots = from.placed_roots.clone();
        let mut roots = Vec::with_capacity(from.roots.len());
        for (k, id) in from.roots.iter().enumerate() {
            let part = self.of_root(k, *id, &mut placed_roots);
            roots.push(self.part(*id, part)?);
        }
        let written = std::mem::take(&mut self.written);
        let stored = from.state_writes.iter().zip(written).map(|(id, part)| match part {
            Part::Whole => self.written_whole(*id),
            part => self.part(*id, part),
        });
        let writes = stored.collect::<Result<Vec<_>>>()?;
        let ok = from.ok.map(|id| whole(&mut self, id)).transpose()?;
        let mut out = self.to.finish(from);
        (out.roots, out.state_writes, out.ok, out.placed_roots) = (roots, writes, ok, placed_roots);
        Ok(out)
    }

    /// What a device returns of a root: all of it, unless the recipe places it.
    fn of_root(&self, k: usize, id: NodeId, placed: &mut FxHashMap<usize, BufferDesc>) -> Part {
        let (node, part) = (self.graph().node(id), self.first[id.index()]);
        let along = part.along(&node.shape, self.axis, self.devices).filter(|along| along.split().is_some());
        match along.filter(|_| distribute::placed(node.op, &node.attrs).is_some()) {
            None => Part::Whole,
            Some(along) => {
                let desc = placed.entry(k).or_insert_with(|| BufferDesc::new(node.shape, node.dtype));
                desc.placement = desc.placement.with(self.axis, along);
                part
            }
        }
    }

    /// The part that a node asks for if the recipe places its input along this axis.
    pub fn placed_by(&self, id: NodeId) -> Option<Result<Part>> {
        let node = self.graph().node(id);
        let (_, dim) = distribute::placed(node.op, &node.attrs).filter(|(axis, _)| *axis == self.axis)?;
        let along = dim.map_or(Along::Replicated, |dim| Along::Split(dim as u8));
        Some(Part::placed(along, &node.shape, self.axis, self.devices))
    }

    pub fn graph(&self) -> &'a Graph {
        &self.from.graph
    }

    /// Appends the new form of an old node, and says which part it is.
    fn visit(&mut self, id: NodeId) -> Result<(NodeId, Part)> {
        let node = self.graph().node(id);
        if self.strict.is_some()
            && let Some(found) = self.visit_own(id)?
        {
            return Ok(found);
        }
        if let Some(input) = self.from.inputs.get(&id) {
            let part = self.placed(node.shape, *input)?;
            return Ok((self.copy(id, part), part));
        }
        if let Some(part) = self.placed_by(id) {
            let part = part?;
            return Ok((self.part(node.inputs[0], part)?, part));
        }
        if let Some(part) = self.blocks_moved_by(id) {
            let part = part?;
            return Ok((self.moved_block(id, part)?, part));
        }
        if distribute::meets(node.op, &node.attrs) == Some(self.axis) {
            return self.met(id);
        }
        if let Class::TupleGet = node.op.class {
            let all = self.results.get(&node.inputs[0]);
            let part = all.and_then(|all| all.get(node.attrs[0] as usize).copied()).unwrap_or(Part::Whole);
            if let Some(new) = self.apart.get(&(node.inputs[0], node.attrs[0] as usize)) {
                return Ok((*new, part));
            }
            return Ok((self.copy(id, part), part));
        }
        if node.op == &create::OPTIMIZATION_BARRIER {
            // What it waits for need not be whole.
            let part = self.first[node.inputs[0].index()];
            return Ok((self.copy(id, part), part));
        }
        if node.inputs.iter().all(|x| self.first[x.index()] == Part::Whole) {
            return Ok((self.to.copy(self.from, id), Part::Whole));
        }
        match self.choose(id, node) {
            Some(chosen) => {
                let new = self.divided(id, &chosen)?;
                let part = chosen.results[0];
                self.results.insert(id, chosen.results);
                Ok((new, part))
            }
            None => {
                let parts = SmallVec::<[Part; 4]>::from_elem(Part::Whole, node.inputs.len());
                let inputs = self.operands(node, &parts)?;
                Ok((self.to.copy_over(self.from, id, inputs), Part::Whole))
            }
        }
    }

    /// The cheapest way to divide a node, unless the whole is cheaper.
    fn choose(&self, id: NodeId, node: &Node) -> Option<Candidate> {
        let cuts = |k: usize| self.cuts(node.inputs[k]);
        let all = self.candidates(id, &cuts, &|k| self.demand.of(id, k));
        // Where the operands have been combined for another reader, the result is whole, and is not combined again.
        let order = |part: Part| match part {
            // Other terms may be added before a block of the sum is needed; and a sum that is needed in f32 is not rounded before.
            Part::Term(_) if self.demand.of(id, 0).is_some() && (self.demand.is_passed_on(id) || self.widens(node)) => {
                0
            }
            Part::Block(_) => 1,
            Part::Whole | Part::Own => 2,
            Part::Term(_) => 3,
        };
        let costs = all
            .into_iter()
            .filter(|c| match self.strict {
                Some(_) => self.keeps_bits(id, c),
                None => self.keeps_terms(id, node, c),
            })
            .filter(|c| self.is_even_in_sections(id, c) && self.has_whole_experts(node, c))
            .map(|c| ((self.total(id, node, &c), order(c.results[0])), c));
        let (cost, best) = costs.min_by_key(|c| c.0)?;
        (cost < (self.of_whole(id, node), order(Part::Whole))).then_some(best)
    }

    /// Whether a node makes f32 of 16-bit floats, as a sum over devices can ([`terms`](super::terms)).
    pub(super) fn widens(&self, node: &Node) -> bool {
        let is_half = |x: &NodeId| self.graph().dtype(*x).is_half();
        matches!(node.op.class, Class::Cast) && node.dtype == DType::F32 && node.inputs.first().is_some_and(is_half)
    }

    /// Whether a candidate that passes terms on should: a sum is completed where its last summand is added, before it is scaled or
    /// multiplied, and whole values are not made summands for it. A number may be.
    fn keeps_terms(&self, id: NodeId, node: &Node, c: &Candidate) -> bool {
        let passes_on = |(x, part): (&NodeId, &Part)| match part {
            Part::Term(_) => self.first[x.index()] == *part || self.graph().shape(*x).numel() == 1,
            _ => true,
        };
        let blocks = c.operands.iter().any(|part| matches!(part, Part::Block(_)));
        let alone = |x: &NodeId| matches!(node.op.class, Class::Reduce(_)) && self.demand.reader(*x) == Some(id);
        !matches!(c.results[0], Part::Term(_))
            || blocks
            || (passes_on_terms(self.graph(), id) || node.inputs.iter().all(alone))
                && node.inputs.iter().zip(&c.operands).all(passes_on)
    }

    /// Sections have no padding.
    fn is_even_in_sections(&self, id: NodeId, c: &Candidate) -> bool {
        let shape = self.graph().shape(id);
        c.results[0].cut().is_none_or(|cut| !cut.has_sections() || !cut.is_padded(&shape, self.devices))
    }

    /// The cuts of the blocks that exist of an old node.
    fn cuts(&self, id: NodeId) -> SmallVec<[Cut; 2]> {
        let made = self.blocks.get(&id).into_iter().flatten().copied();
        self.first[id.index()].cut().into_iter().chain(made).collect()
    }

    /// Combines a term that several nodes read, of which one needs the whole or a block. One collective serves them all.
    fn resolve(&mut self, id: NodeId) -> Result<()> {
        if !matches!(self.first[id.index()], Part::Term(_)) || self.demand.is_passed_on(id) {
            return Ok(());
        }
        if let Some(reader) = self.demand.reader(id) {
            // It does that itself, unless it makes more of the value first.
            let expands = self.graph().shape(reader).numel() > self.graph().shape(id).numel();
            if !expands || self.demand.of(id, 0).is_none() {
                return Ok(());
            }
        }
        let part = self.demand.of(id, 0).map_or(Part::Whole, Part::Block);
        // The other results are those of the node, not of the collective.
        let main = self.to.map[id.index()];
        for (k, shape, dtype) in self.further_results(id) {
            if let Some(part) = self.results.get(&id).and_then(|all| all.get(k)).copied() {
                let new = self.result(main, k, part.local(&shape), dtype);
                self.apart.entry((id, k)).or_insert(new);
            }
        }
        let new = self.part(id, part)?;
        (self.first[id.index()], self.to.map[id.index()]) = (part, new);
        Ok(())
    }

    /// Lists the ways to divide a node.
    pub fn candidates(
        &self,
        id: NodeId,
        operand: &dyn Fn(usize) -> SmallVec<[Cut; 2]>,
        wanted: &dyn Fn(usize) -> Option<Cut>,
    ) -> SmallVec<[Candidate; 4]> {
        let (g, node) = (self.graph(), self.graph().node(id));
        let operands: SmallVec<[(Shape, DType); 4]> = node.inputs.iter().map(|x| (g.shape(*x), g.dtype(*x))).collect();
        // Results that nothing takes count as well, so that a result is found by its number.
        let mut results: SmallVec<[(Shape, DType); 2]> = smallvec![(node.shape, node.dtype)];
        for (k, shape, dtype) in self.parts.get(&id).into_iter().flatten() {
            results.resize(results.len().max(k + 1), (node.shape, node.dtype));
            results[*k] = (*shape, *dtype);
        }
        let signature = Signature { operands: &operands, results: &results, attrs: &node.attrs };
        candidates::all(node.op, &signature, operand, wanted)
    }

    /// Visits a node of a strict step that follows from the device's own samples.
    fn visit_own(&mut self, id: NodeId) -> Result<Option<(NodeId, Part)>> {
        let (node, own) = (self.graph().node(id), |x: &NodeId| self.first[x.index()] == Part::Own);
        let samples = |input: &u32| self.strict.as_ref().is_some_and(|s| s.samples[*input as usize]);
        let elements = node.shape.numel() > 0;
        let begins = elements && self.from.inputs.get(&id).is_some_and(samples) || node.op == &create::SHARD;
        if !begins && !fold::values(node).iter().any(own) {
            return Ok(None);
        }
        let along = collective::is_collective(node.op) && collective::axis(&node.attrs) == self.axis;
        if along && node.op == &collective::ALL_REDUCE {
            // A device has the term. It is combined where it is read: as a whole, or as a block.
            return Ok(Some((self.to.map[node.inputs[0].index()], Part::Term(collective::combine(node.attrs[1])))));
        }
        let barrier = node.op == &create::OPTIMIZATION_BARRIER;
        let operand = |this: &mut Self, (k, x): (usize, &NodeId)| match this.first[x.index()] {
            // What a barrier waits for need not be whole.
            _ if barrier && k > 0 => Ok(this.to.map[x.index()]),
            Part::Own => Ok(this.to.map[x.index()]),
            _ => this.part(*x, Part::Whole),
        };
        let inputs = node.inputs.iter().enumerate().map(|x| operand(self, x)).collect::<Result<_>>()?;
        let gathered = along && node.op == &collective::ALL_GATHER;
        let part = if gathered { Part::Whole } else { Part::Own };
        Ok(Some((self.to.copy_over(self.from, id, inputs), part)))
    }

    /// Whether a candidate computes the bits of the undivided node: every element of its blocks by the same operations in the same
    /// order.
    fn keeps_bits(&self, id: NodeId, c: &Candidate) -> bool {
        let node = self.graph().node(id);
        let blocks = c.operands.iter().chain(&c.results).all(|part| !matches!(part, Part::Term(_)));
        blocks
            && c.positions.is_none()
            && match node.op.class {
                Class::Map(_) | Class::Cast | Class::View(_) | Class::Reduce(_) => true,
                Class::Library => node.op == &collective::ALL_REDUCE,
                Class::Fused(_) => self.is_elementwise(id),
                _ => false,
            }
    }

    /// Whether a fused op computes each element from those at the same place.
    fn is_elementwise(&self, id: NodeId) -> bool {
        let (g, node) = (self.graph(), self.graph().node(id));
        let operands: SmallVec<[(Shape, DType); 4]> = node.inputs.iter().map(|x| (g.shape(*x), g.dtype(*x))).collect();
        let results = [(node.shape, node.dtype)];
        let signature = Signature { operands: &operands, results: &results, attrs: &node.attrs };
        sharding::factors(node.op, &signature) == sharding::elementwise(&signature)
    }

    /// Appends a copy of an old node that is a part of it.
    fn copy(&mut self, id: NodeId, part: Part) -> NodeId {
        let new = self.to.copy(self.from, id);
        self.to.out.graph.set_shape(new, part.local(&self.graph().shape(id)));
        new
    }

    /// Appends a node that computes the parts of one candidate.
    pub fn divided(&mut self, id: NodeId, c: &Candidate) -> Result<NodeId> {
        match c.meets {
            Some(Meeting::Keys) => return self.attention(id, c),
            Some(Meeting::Experts) => return self.experts(id, c),
            None => {}
        }
        let node = self.graph().node(id);
        let mut inputs = self.operands(node, &c.operands)?;
        self.mask(node, c, &mut inputs)?;
        let valid = match c.positions {
            Some(how) => self.own_positions(node, c, how, &mut inputs)?,
            None => None,
        };
        let new = self.to.copy_over(self.from, id, inputs);
        self.to.out.graph.set_shape(new, c.results[0].local(&node.shape));
        if let Some(attrs) = &c.attrs {
            self.to.out.graph.set_attrs(new, attrs.clone());
        }
        match valid {
            Some(valid) => self.or_zero(valid, new),
            None => Ok(new),
        }
    }

    fn operands(&mut self, node: &Node, parts: &[Part]) -> Result<SmallVec<[NodeId; 4]>> {
        node.inputs.iter().zip(parts).map(|(x, p)| self.part(*x, *p)).collect()
    }

    /// Whether a part of an old node needs nothing more.
    pub fn exists(&self, id: NodeId, part: Part) -> bool {
        match (self.first[id.index()], part) {
            (first, part) if first == part => true,
            (Part::Block(_), Part::Whole) if self.is_weight[id.index()] => self.gathered(id).is_some(),
            _ => self.made.contains_key(&(id, part)),
        }
    }

    /// Returns a part of an old node that has been visited; makes it if it does not exist.
    pub fn part(&mut self, id: NodeId, part: Part) -> Result<NodeId> {
        let first = self.first[id.index()];
        if first == part {
            return Ok(self.to.map[id.index()]);
        }
        let loc = self.graph().loc_of(id);
        let loc = std::mem::replace(&mut self.to.out.graph.modes.loc, loc);
        let new = if let (Part::Block(_), Part::Whole, true) = (first, part, self.is_weight[id.index()]) {
            self.whole_weight(id)
        } else if let Some(new) = self.made.get(&(id, part)) {
            Ok(*new)
        } else {
            self.make(id, part).inspect(|new| {
                self.made.insert((id, part), *new);
                if let Part::Block(cut) = part {
                    self.blocks.entry(id).or_default().push(cut);
                }
            })
        };
        self.to.out.graph.modes.loc = loc;
        new
    }
}
