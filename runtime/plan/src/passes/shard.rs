//! Divides a step among the devices of a mesh: decides what each device has of every value, and inserts collectives.
//!
//! The axes of the mesh are taken one after the other; each turns the step for one device into the step of every device along that
//! axis. The inputs say what a device has of them ([`Division`]). In recording order every node then gets the cheapest of its
//! factors (`core::sharding`), counting the bytes that its operands have to be sent. A term of a sum stays one through linear ops
//! and is combined where a reader needs the whole, once for all readers. Roots, State writes and the guard are whole.
//!
//! The choice depends on the graph, the mesh and the inputs alone, so every process makes the same. All devices get one program:
//! where a device's part of generated numbers begins is a run-time number. The method is that of GSPMD (Xu et al.,
//! arXiv:2105.04663) with one sweep: batch and States are known, and gradients follow the values they belong to.

use crate::lowered::Lowered;
use crate::passes::decompose;
use crate::passes::rewriter::Rewriter;
use crate::request::Division;
use perilune_core::error::{Error, Result};
use perilune_core::graph::{Attrs, Node, NodeId};
use perilune_core::mesh::{Along, Axis, Combine, Start};
use perilune_core::ops::{Class, Generator, collective, create, index, movement};
use perilune_core::sharding::{self, Factor, Factors, Piece, Signature};
use perilune_core::{DType, Graph, Shape};
use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

/// Operands of a node from which a part of it can be computed again, at most so many nodes up.
const MAX_DERIVED: usize = 16;

/// Turns a step into that of each device of the mesh. `written`: which input each State write overwrites.
pub fn apply(step: Lowered, division: &Division, written: &[u32]) -> Result<Lowered> {
    let mesh = &division.mesh;
    if mesh.devices() == 1 {
        return Ok(step);
    }
    // Of a fused op without factors its parts are divided.
    let undivided = |n: &Node| matches!(n.op.class, Class::Fused(_)) && n.op.shard.is_none();
    let mut step = decompose::all(step, &undivided)?;
    as_stored(&mut step, division, written)?;
    for axis in Axis::ALL.into_iter().filter(|axis| mesh.size(*axis) > 1) {
        step = Divider::new(&step, division, written, axis).run()?;
    }
    Ok(step)
}

/// Gives a value that is written to a split State the dims of the State, which may have been recorded as another view of as many
/// elements.
fn as_stored(step: &mut Lowered, division: &Division, written: &[u32]) -> Result<()> {
    let mut leaves: FxHashMap<u32, NodeId> = FxHashMap::default();
    for (leaf, input) in &step.inputs {
        // Uses the first leaf of each input, so that the map's iteration order has no effect.
        leaves.entry(*input).and_modify(|first| *first = (*first).min(*leaf)).or_insert(*leaf);
    }
    for (i, input) in written.iter().enumerate() {
        let new = step.state_writes[i];
        let split = !division.inputs[*input as usize].is_replicated(&division.mesh);
        let shape = leaves.get(input).filter(|_| split).map(|leaf| step.graph.shape(*leaf));
        if let Some(shape) = shape.filter(|shape| *shape != step.graph.shape(new)) {
            step.graph.modes.loc = step.graph.loc_of(new);
            step.state_writes[i] = movement::reshape(&mut step.graph, new, shape)?;
        }
    }
    Ok(())
}

struct Divider<'a> {
    from: &'a Lowered,
    division: &'a Division,
    written: &'a [u32],
    axis: Axis,
    devices: usize,
    to: Rewriter,
    /// What a device has of each old node as it is computed first.
    first: Vec<Piece>,
    /// The factor that was chosen for a node with several results.
    results: FxHashMap<NodeId, SmallVec<[Piece; 2]>>,
    /// Every piece that exists, by old node.
    made: FxHashMap<(NodeId, Piece), NodeId>,
    /// For each old node, its parts that `tuple_get` takes.
    parts: FxHashMap<NodeId, Vec<(usize, Shape, DType)>>,
}

impl<'a> Divider<'a> {
    fn new(from: &'a Lowered, division: &'a Division, written: &'a [u32], axis: Axis) -> Divider<'a> {
        let mut parts: FxHashMap<NodeId, Vec<(usize, Shape, DType)>> = FxHashMap::default();
        for node in from.graph.nodes().iter().filter(|n| matches!(n.op.class, Class::TupleGet)) {
            let all = parts.entry(node.inputs[0]).or_default();
            let part = (node.attrs[0] as usize, node.shape, node.dtype);
            if !all.contains(&part) {
                all.push(part);
            }
        }
        parts.values_mut().for_each(|all| all.sort_by_key(|p| p.0));
        let (devices, to) = (division.mesh.size(axis), Rewriter::new(from));
        let (first, results, made) = (Vec::with_capacity(from.graph.len()), FxHashMap::default(), FxHashMap::default());
        Divider { from, division, written, axis, devices, to, first, results, made, parts }
    }

    fn run(mut self) -> Result<Lowered> {
        for id in self.from.graph.ids() {
            self.to.out.graph.modes.loc = self.from.graph.loc_of(id);
            let (new, piece) = self.visit(id)?;
            self.made.insert((id, piece), new);
            self.first.push(piece);
            self.to.map.push(new);
        }
        let from = self.from;
        let whole = |this: &mut Self, id: NodeId| this.piece(id, Piece::Whole);
        let roots = from.roots.iter().map(|id| whole(&mut self, *id)).collect::<Result<Vec<_>>>()?;
        let stored = |this: &mut Self, (id, input): (&NodeId, &u32)| {
            let piece = this.placed(this.graph().shape(*id), *input)?;
            this.piece(*id, piece)
        };
        let writes = from.state_writes.iter().zip(self.written).map(|w| stored(&mut self, w)).collect::<Result<_>>()?;
        let ok = from.ok.map(|id| whole(&mut self, id)).transpose()?;
        let mut out = self.to.finish(from);
        (out.roots, out.state_writes, out.ok) = (roots, writes, ok);
        Ok(out)
    }

    fn graph(&self) -> &'a Graph {
        &self.from.graph
    }

    /// Appends the new form of an old node, and says which piece it is.
    fn visit(&mut self, id: NodeId) -> Result<(NodeId, Piece)> {
        let node = self.graph().node(id);
        if let Some(input) = self.from.inputs.get(&id) {
            return self.input(id, *input);
        }
        if let Class::TupleGet = node.op.class {
            let main = node.inputs[0];
            let piece = self.results.get(&main).map_or(Piece::Whole, |all| all[self.result_of(main, node.attrs[0])]);
            let new = self.to.copy(self.from, id);
            self.resize(new, node.shape, piece);
            return Ok((new, piece));
        }
        if node.inputs.iter().all(|x| self.first[x.index()] == Piece::Whole) {
            return Ok((self.to.copy(self.from, id), Piece::Whole));
        }
        let factors = self.factors(id);
        let whole = self.costs(node, &[]);
        // Where the operands have been combined for another reader, the result is whole, and is not combined again.
        let better = |f: &Factor, cost: u64| cost < whole || cost == whole && !matches!(f.results[0], Piece::Term(_));
        let costs = factors.iter().map(|f| (self.costs(node, &f.operands), f));
        let best = costs.min_by_key(|c| c.0).filter(|(cost, f)| better(f, *cost)).map(|c| c.1);
        match best {
            Some(factor) => {
                let factor = factor.clone();
                let new = self.divided(id, &factor)?;
                self.results.insert(id, factor.results.clone());
                Ok((new, factor.results[0]))
            }
            None => {
                let inputs = self.pieces(node, &SmallVec::<[Piece; 4]>::from_elem(Piece::Whole, node.inputs.len()))?;
                Ok((self.to.copy_over(self.from, id, inputs), Piece::Whole))
            }
        }
    }

    /// The index among the results of `main` of the one that `tuple_get` names.
    fn result_of(&self, main: NodeId, attr: i64) -> usize {
        let parts = self.parts.get(&main).map_or(&[][..], |p| p);
        1 + parts.iter().position(|p| p.0 == attr as usize).unwrap_or(0)
    }

    fn input(&mut self, id: NodeId, input: u32) -> Result<(NodeId, Piece)> {
        let shape = self.graph().shape(id);
        let piece = self.placed(shape, input)?;
        let new = self.to.copy(self.from, id);
        self.resize(new, shape, piece);
        Ok((new, piece))
    }

    /// What a device has of an input of that shape.
    fn placed(&self, shape: Shape, input: u32) -> Result<Piece> {
        Ok(match self.division.inputs[input as usize].along(self.axis) {
            Along::Replicated => Piece::Whole,
            Along::Partial(combine) => Piece::Term(combine),
            Along::Split(dim) => {
                let d = usize::from(dim);
                if d >= shape.rank() || !shape.dims()[d].is_multiple_of(self.devices) {
                    let (axis, n) = (self.axis.name(), self.devices);
                    let message = format!("{axis}={n} does not divide dim {d} of an input of shape {shape}");
                    return Err(Error::shape("mesh", message).hint("choose a batch that the axis divides"));
                }
                Piece::Block(dim)
            }
        })
    }

    /// Gives a copied node the shape of a piece of `whole`.
    fn resize(&mut self, new: NodeId, whole: Shape, piece: Piece) {
        if let Piece::Block(d) = piece {
            let d = usize::from(d);
            self.to.out.graph.set_shape(new, whole.with(d, whole.dims()[d] / self.devices));
        }
    }

    /// The factors of a node that this number of devices can use.
    fn factors(&self, id: NodeId) -> Factors {
        let (g, node) = (self.graph(), self.graph().node(id));
        let operands: SmallVec<[(Shape, DType); 4]> = node.inputs.iter().map(|x| (g.shape(*x), g.dtype(*x))).collect();
        let mut results: SmallVec<[(Shape, DType); 2]> = smallvec![(node.shape, node.dtype)];
        results.extend(self.parts.get(&id).into_iter().flatten().map(|p| (p.1, p.2)));
        let mut all =
            sharding::factors(node.op, &Signature { operands: &operands, results: &results, attrs: &node.attrs });
        let blocks = |f: &Factor| f.operands.iter().chain(&f.results).any(|p| matches!(p, Piece::Block(_)));
        all.retain(|f| !blocks(f) || f.units > 0 && f.units.is_multiple_of(self.devices));
        all
    }

    /// Bytes that are sent to have those pieces of a node's operands, whole ones if none are named.
    fn costs(&self, node: &Node, pieces: &[Piece]) -> u64 {
        let piece = |k: usize| pieces.get(k).copied().unwrap_or(Piece::Whole);
        let first_use =
            |k: usize| node.inputs[..k].iter().enumerate().all(|(j, x)| (*x, piece(j)) != (node.inputs[k], piece(k)));
        (0..node.inputs.len()).filter(|k| first_use(*k)).map(|k| self.cost(node.inputs[k], piece(k))).sum()
    }

    /// Bytes that are sent to have a piece of an old node; those of the whole tensor, not of a device.
    fn cost(&self, id: NodeId, piece: Piece) -> u64 {
        let bytes = (self.graph().shape(id).numel() * self.graph().dtype(id).size()) as u64;
        match (self.first[id.index()], piece) {
            (first, piece) if first == piece || self.made.contains_key(&(id, piece)) => 0,
            (_, Piece::Block(_)) if self.derivable(id, piece, MAX_DERIVED) => 0,
            // A block of a whole tensor sends nothing, but what is computed from it is likely to be gathered.
            (Piece::Whole, Piece::Block(_)) => bytes,
            (Piece::Whole, Piece::Term(_)) => 0,
            (Piece::Term(_), Piece::Whole) => 2 * bytes,
            (Piece::Block(_), Piece::Block(_)) => 2 * bytes,
            // Half of an all-reduce, and then what is computed from the block is likely to be gathered.
            (Piece::Term(_), Piece::Block(_)) => 3 * bytes,
            (Piece::Term(_), Piece::Term(_)) | (Piece::Block(_), Piece::Term(_)) => 3 * bytes,
            _ => bytes,
        }
    }

    /// The factor by which a block of an old node can be computed from whole operands and other such blocks, without a copy.
    fn derivation(&self, id: NodeId, piece: Piece, depth: usize) -> Option<Factor> {
        let node = self.graph().node(id);
        let cheap = matches!(node.op.class, Class::View(_) | Class::Map(_) | Class::Cast);
        if !cheap || depth == 0 || self.first[id.index()] != Piece::Whole {
            return None;
        }
        let ready = |(x, p): (&NodeId, &Piece)| match p {
            Piece::Whole => self.first[x.index()] == Piece::Whole,
            p => self.made.contains_key(&(*x, *p)) || self.derivable(*x, *p, depth - 1),
        };
        self.factors(id).into_iter().find(|f| f.results[0] == piece && node.inputs.iter().zip(&f.operands).all(ready))
    }

    fn derivable(&self, id: NodeId, piece: Piece, depth: usize) -> bool {
        match (self.graph().generator(id), piece) {
            (Some(Generator::Iota | Generator::Uniform | Generator::Shard), Piece::Block(d)) => {
                self.graph().shape(id).dims()[usize::from(d)].is_multiple_of(self.devices)
            }
            _ => self.derivation(id, piece, depth).is_some(),
        }
    }

    /// Appends a node that computes the pieces of one factor.
    fn divided(&mut self, id: NodeId, factor: &Factor) -> Result<NodeId> {
        let node = self.graph().node(id);
        let inputs = self.pieces(node, &factor.operands)?;
        let new = self.to.copy_over(self.from, id, inputs);
        self.resize(new, node.shape, factor.results[0]);
        if let Some(k) = factor.size_attr {
            let mut attrs: Attrs = node.attrs.clone();
            attrs[usize::from(k)] /= self.devices as i64;
            self.to.out.graph.set_attrs(new, attrs);
        }
        Ok(new)
    }

    fn pieces(&mut self, node: &Node, pieces: &[Piece]) -> Result<SmallVec<[NodeId; 4]>> {
        node.inputs.iter().zip(pieces).map(|(x, p)| self.piece(*x, *p)).collect()
    }

    /// Returns a piece of an old node that has been visited; makes it if it does not exist.
    fn piece(&mut self, id: NodeId, piece: Piece) -> Result<NodeId> {
        if let Some(new) = self.made.get(&(id, piece)) {
            return Ok(*new);
        }
        let own = self.graph().loc_of(id);
        let loc = std::mem::replace(&mut self.to.out.graph.modes.loc, own);
        let new = self.make(id, piece)?;
        self.to.out.graph.modes.loc = loc;
        self.made.insert((id, piece), new);
        Ok(new)
    }

    fn make(&mut self, id: NodeId, piece: Piece) -> Result<NodeId> {
        let first = self.first[id.index()];
        let (axis, n) = (self.axis as i64, self.devices as i64);
        if let Piece::Block(d) = piece
            && self.derivable(id, piece, MAX_DERIVED)
        {
            return match self.derivation(id, piece, MAX_DERIVED) {
                Some(factor) => self.divided(id, &factor),
                None => self.generated(id, usize::from(d)),
            };
        }
        let own = self.to.map[id.index()];
        match (first, piece) {
            (Piece::Term(how), Piece::Whole) => self.push(&collective::ALL_REDUCE, own, &[axis, collective::code(how)]),
            (Piece::Block(d), Piece::Whole) => self.push(&collective::ALL_GATHER, own, &[axis, i64::from(d), n]),
            (Piece::Term(how), Piece::Block(d)) => {
                self.push(&collective::REDUCE_SCATTER, own, &[axis, i64::from(d), n, collective::code(how)])
            }
            (_, Piece::Block(d)) => {
                let whole = self.piece(id, Piece::Whole)?;
                self.cut(whole, usize::from(d))
            }
            (_, Piece::Term(Combine::Sum)) => {
                let whole = self.piece(id, Piece::Whole)?;
                self.on_the_first(whole)
            }
            // A term of a maximum or minimum may be the whole.
            (_, Piece::Term(_)) | (Piece::Whole, Piece::Whole) => self.piece(id, Piece::Whole),
        }
    }

    fn push(&mut self, op: &'static perilune_core::ops::Op, x: NodeId, attrs: &[i64]) -> Result<NodeId> {
        self.to.out.graph.push(op, &[x], attrs)
    }

    /// The block of generated numbers that this device makes.
    fn generated(&mut self, id: NodeId, d: usize) -> Result<NodeId> {
        let node = self.graph().node(id);
        let own = self.to.map[id.index()];
        // Of a part, a part: the steps of both axes are added.
        let (whole, mut attrs) = match self.graph().generator(id) {
            Some(Generator::Shard) => (self.to.out.graph.node(own).inputs[0], node.attrs.clone()),
            _ => (own, Attrs::new()),
        };
        let block = node.shape.dims()[d] / self.devices;
        let stride = self.to.out.graph.shape(whole).strides()[d] as usize;
        attrs.extend([self.axis as i64, (block * stride) as i64]);
        self.shard_node(whole, node.shape.with(d, block), attrs)
    }

    fn shard_node(&mut self, whole: NodeId, shape: Shape, attrs: Attrs) -> Result<NodeId> {
        let out = &mut self.to.out;
        let (dtype, start) = (out.graph.dtype(whole), Start::from_attrs(&attrs));
        let inputs = smallvec![whole];
        let new = out.graph.add(Node {
            op: &create::SHARD,
            dtype,
            detached: true,
            tf32: false,
            shape,
            inputs,
            attrs,
            payload: 0,
        });
        out.slots.insert(new, out.first_start + out.starts.len() as u32);
        out.starts.push(start);
        Ok(new)
    }

    /// `0 ... n - 1`, of which each device has its block.
    fn ramp(&mut self, n: usize) -> Result<NodeId> {
        let whole = create::iota(&mut self.to.out.graph, n)?;
        let block = n / self.devices;
        self.shard_node(whole, Shape::of(&[block]), smallvec![self.axis as i64, block as i64])
    }

    /// The block of a whole tensor that belongs to this device.
    fn cut(&mut self, whole: NodeId, d: usize) -> Result<NodeId> {
        let ids = self.ramp(self.to.out.graph.shape(whole).dims()[d])?;
        self.to.out.graph.push(&index::INDEX_SELECT, &[whole, ids], &[d as i64])
    }

    /// The whole tensor on the first device, zeros on the others.
    fn on_the_first(&mut self, whole: NodeId) -> Result<NodeId> {
        let coordinate = self.ramp(self.devices)?;
        let g = &mut self.to.out.graph;
        let coordinate = movement::reshape(g, coordinate, Shape::SCALAR)?;
        let zero = g.int_constant(0);
        let first = g.eq(coordinate, zero)?;
        let (shape, nothing) = (g.shape(whole), g.constant_like(0.0, whole));
        let (first, nothing) = (g.expand(first, shape)?, g.expand(nothing, shape)?);
        g.where_(first, whole, nothing)
    }
}
