//! Stores the recorded computation: an append-only arena of nodes (the graph).
//!
//! Every op call checks shapes and dtypes, appends nodes at once and returns ids. Ids ascend in recording order, so id
//! order is a topological order: every pass over a graph is a loop, never a recursion, and every process that runs the
//! same recipe builds the same graph. Nothing is computed here.
//!
//! The same type represents both the engine's recording and the small graphs that the planner lowers a step into.

use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::modes::Modes;
use crate::ops::{Class, Generator, Op, create};
use crate::source_loc::SourceLoc;
use crate::{DType, Shape, amp, host_tensor};
use smallvec::SmallVec;
use std::sync::atomic::{AtomicU64, Ordering};

/// The most nodes of a graph that ops record: a gigabyte of them. A plan of as many would take minutes.
const MAX_NODES: usize = if cfg!(test) { 1 << 18 } else { 1 << 22 };

/// A node of one graph; invalid in any other.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct NodeId(pub u32);

impl NodeId {
    #[inline]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

pub type Inputs = SmallVec<[NodeId; 4]>;
/// Static attributes of a node besides its inputs, as each op defines them: axes, sizes, float bits. Part of the plan
/// key.
pub type Attrs = SmallVec<[i64; 6]>;

/// One application of an op.
///
/// The order of the fields is that in memory, of three cache lines: the shape, the attributes, and what passes over a recording, and the
/// comparison of one with the one before, read of every node. The length of the attributes, their last word, is in the third line.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Node {
    pub shape: Shape,
    pub attrs: Attrs,
    pub op: &'static Op,
    pub inputs: Inputs,
    /// Data that the plan key must not contain: the value of a `scalar`, the identity of a leaf or State.
    pub payload: u64,
    pub dtype: DType,
    /// Recorded under `no_grad`, so autograd treats it as a constant.
    pub detached: bool,
    /// Whether its products may round f32 operands to TF32 on a device where that is faster (see `Graph::tf32`). Part
    /// of the plan key.
    pub tf32: bool,
}

/// A Lua number before it becomes a node.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Number {
    Int(i64),
    Float(f64),
}

impl Number {
    pub fn as_f64(self) -> f64 {
        match self {
            Number::Int(i) => i as f64,
            Number::Float(f) => f,
        }
    }

    pub fn category(self) -> crate::Category {
        match self {
            Number::Int(_) => crate::Category::Int,
            Number::Float(_) => crate::Category::Float,
        }
    }

    /// The bits a slot of dtype `dtype` is stored with: i64 for integers and bools, f64 for floats. Integers wrap and floats
    /// saturate, as in a cast of a tensor.
    pub fn bits(self, dtype: DType) -> u64 {
        match (self, dtype.is_float()) {
            (Number::Int(i), true) => (i as f64).to_bits(),
            (Number::Float(f), true) => f.to_bits(),
            (Number::Int(i), false) => host_tensor::wrap_integer(dtype, i) as u64,
            (Number::Float(f), false) => host_tensor::to_integer(dtype, f) as u64,
        }
    }
}

/// The counters that key random ops. Numbers depend only on (seed, step, index of the random op within the step) and on
/// the logical element, so recomputation, resume and other devices generate the same ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RngState {
    pub seed: u64,
    pub step: u32,
    pub occurrence: u32,
}

/// Identifies the nodes of a graph, but for what the plan key leaves out. A clone has another, since it may grow differently.
#[derive(Debug)]
struct Lineage(u64);

impl Clone for Node {
    fn clone(&self) -> Node {
        self.with_inputs(Inputs::from_slice(&self.inputs))
    }
}

impl Node {
    /// A copy with other inputs. Planning copies each node several times, and `SmallVec::clone` would copy element by element.
    pub fn with_inputs(&self, inputs: Inputs) -> Node {
        let Node { op, payload, dtype, detached, tf32, shape, .. } = *self;
        Node { op, inputs, payload, dtype, detached, tf32, attrs: Attrs::from_slice(&self.attrs), shape }
    }

    /// Whether the node applies `op` to these inputs and attributes.
    fn applies(&self, op: &Op, inputs: &[NodeId], attrs: &[i64]) -> bool {
        std::ptr::eq(self.op, op) && self.inputs[..] == *inputs && self.attrs[..] == *attrs
    }
}

impl Lineage {
    fn fresh() -> Lineage {
        static LAST: AtomicU64 = AtomicU64::new(0);
        Lineage(LAST.fetch_add(1, Ordering::Relaxed))
    }
}

impl Default for Lineage {
    fn default() -> Lineage {
        Lineage::fresh()
    }
}

impl Clone for Lineage {
    fn clone(&self) -> Lineage {
        Lineage::fresh()
    }
}

/// The arena.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    /// The nodes, and behind them those of the recording before. A training step mostly repeats the one before: a node that is
    /// already in its place is confirmed and not written.
    nodes: Vec<Node>,
    len: usize,
    /// Equal for two recordings as long as the second repeats the first. All of `nodes` are of this lineage up to `known`.
    lineage: Lineage,
    known: usize,
    /// Whether a node has a 16-bit dtype.
    has_half: bool,
    source_map: Vec<SourceLoc>,
    /// Modes recorded on the next nodes.
    pub modes: Modes,
    /// The devices of the recording: ops that place tensors along its axes record nothing for an axis of one device.
    pub mesh: Mesh,
    pub rng: RngState,
    pub remat: Remat,
}

/// What recomputation needs to know about a recording besides its nodes. Only `plan::passes::remat` reads it.
#[derive(Clone, Debug, Default)]
pub struct Remat {
    /// Nodes whose values the backward pass recomputes instead of keeping them: from .. to, properly nested.
    pub spans: Vec<(NodeId, NodeId)>,
    /// For each node that a backward pass recorded, 1 + the node whose backward it belongs to; otherwise 0.
    backs: Vec<u32>,
    /// The first node of each backward pass.
    passes: Vec<NodeId>,
    /// The gradients that arrived at nodes, in the order in which the passes processed them.
    pub arrivals: Vec<Arrival>,
}

/// The complete gradient of a node, from which its backward starts.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    pub pass: u32,
    pub node: NodeId,
    pub grad: NodeId,
}

impl Remat {
    /// The node whose backward recorded `id`, if there is one.
    pub fn back_of(&self, id: NodeId) -> Option<NodeId> {
        self.backs[id.index()].checked_sub(1).map(NodeId)
    }

    /// The number of the last pass that began before `id`, or 0.
    pub fn pass_of(&self, id: NodeId) -> u32 {
        self.passes.partition_point(|p| *p <= id) as u32
    }

    /// Records that a pass begins; returns its number.
    pub(crate) fn begin_pass(&mut self) -> u32 {
        self.passes.push(NodeId(self.backs.len() as u32));
        self.passes.len() as u32
    }

    fn clear(&mut self) {
        let Remat { spans, backs, passes, arrivals } = self;
        spans.clear();
        backs.clear();
        passes.clear();
        arrivals.clear();
    }

    fn truncate(&mut self, len: usize) {
        let inside = |id: &NodeId| id.index() < len;
        self.backs.truncate(len);
        self.spans.retain(|s| s.1.index() <= len);
        self.passes.retain(|p| p.index() <= len);
        self.arrivals.retain(|a| inside(&a.node) && inside(&a.grad));
    }
}

impl Default for SourceLoc {
    fn default() -> Self {
        SourceLoc::NONE
    }
}

impl Graph {
    pub fn new() -> Graph {
        Graph::default()
    }

    /// A graph with room for `nodes` of them, which grows beyond it if necessary.
    pub fn with_capacity(nodes: usize) -> Graph {
        Graph {
            nodes: Vec::with_capacity(nodes),
            source_map: Vec::with_capacity(nodes),
            remat: Remat { backs: Vec::with_capacity(nodes), ..Remat::default() },
            ..Graph::default()
        }
    }

    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Removes all nodes; ids start again at 0. Counters and modes are kept.
    pub fn clear(&mut self) {
        (self.len, self.has_half) = (0, false);
        self.source_map.clear();
        self.remat.clear();
    }

    /// A graph without nodes in the memory of this one.
    pub fn emptied(mut self) -> Graph {
        self.clear();
        self.change();
        let Graph { nodes, known, lineage, source_map, remat, .. } = self;
        Graph { nodes, known, lineage, source_map, remat, ..Graph::default() }
    }

    /// As [`Graph::clear`], and returns the recipe lines of the nodes. `spare` is memory for those of the next.
    pub fn clear_for(&mut self, mut spare: Vec<SourceLoc>) -> Vec<SourceLoc> {
        spare.clear();
        std::mem::swap(&mut self.source_map, &mut spare);
        self.clear();
        spare
    }

    /// Removes the nodes from `len` on (a failed recording).
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        self.source_map.truncate(len);
        self.remat.truncate(len);
    }

    #[inline]
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes()[id.index()]
    }

    /// Whether a node has a 16-bit dtype. It may have been removed.
    pub fn has_half(&self) -> bool {
        self.has_half
    }

    /// Makes input `k` of a node another node, which stands before it and has the same shape and dtype.
    pub fn set_input(&mut self, id: NodeId, k: usize, input: NodeId) {
        debug_assert!(input < id && id.index() < self.len, "this is a bug: input after its use");
        self.change();
        self.nodes[id.index()].inputs[k] = input;
    }

    /// Sets the shape of a node without a reader; only the planner does, for a node whose operands it has changed.
    pub fn set_shape(&mut self, id: NodeId, shape: Shape) {
        self.change();
        self.nodes[id.index()].shape = shape;
    }

    /// Sets the attributes of a node without a reader.
    pub fn set_attrs(&mut self, id: NodeId, attrs: Attrs) {
        self.change();
        self.nodes[id.index()].attrs = attrs;
    }

    #[inline]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes[..self.len]
    }

    /// Identifies the recording: where two graphs have equal numbers, all nodes are equal but for the values of numbers, the
    /// identities of leaves, and recipe lines.
    pub fn edition(&self) -> (u64, usize) {
        (self.lineage.0, self.len)
    }

    #[inline]
    pub fn ids(&self) -> impl DoubleEndedIterator<Item = NodeId> + use<> {
        (0..self.len as u32).map(NodeId)
    }

    #[inline]
    pub fn loc_of(&self, id: NodeId) -> SourceLoc {
        self.source_map[id.index()]
    }

    #[inline]
    pub fn shape(&self, id: NodeId) -> Shape {
        self.node(id).shape
    }

    #[inline]
    pub fn dtype(&self, id: NodeId) -> DType {
        self.node(id).dtype
    }

    /// Begins a lineage with the nodes that there are.
    fn change(&mut self) {
        (self.lineage, self.known) = (Lineage::fresh(), self.len);
    }

    /// Appends `op(inputs)`: runs the op's shape and dtype rule and, under autocast, its cast policy.
    pub fn push(&mut self, op: &'static Op, inputs: &[NodeId], attrs: &[i64]) -> Result<NodeId> {
        if let Some(low) = self.modes.autocast
            && op.amp != amp::Amp::Keep
        {
            let cast = amp::cast_inputs(self, op.amp, low, inputs)?;
            return self.append(op, &cast, attrs);
        }
        self.append(op, inputs, attrs)
    }

    fn append(&mut self, op: &'static Op, inputs: &[NodeId], attrs: &[i64]) -> Result<NodeId> {
        let detached = self.modes.no_grad;
        // Shape and dtype follow from the op, its attributes and its inputs, which all are those of the recording before.
        if let Some(old) = self.node_before()
            && old.applies(op, inputs, attrs)
            && (old.detached, old.tf32, old.payload) == (detached, self.rounds(op, old.dtype), 0)
        {
            return Ok(self.advance(old.dtype));
        }
        // A weight update has ten inputs.
        let mut metas: SmallVec<[Meta; 10]> = SmallVec::new();
        for &i in inputs {
            let n = self.node(i);
            metas.push(Meta { shape: n.shape, dtype: n.dtype });
        }
        let out = (op.infer)(&Infer { op: op.name, inputs: &metas, attrs })?;
        out.shape.check(op.name)?;
        if self.len >= MAX_NODES {
            let message = format!("{MAX_NODES} ops are recorded in one step, the most that there may be");
            return Err(Error::memory(op.name, message)
                .hint("read a value or end the step within the loop, so that what was recorded runs"));
        }
        let (dtype, shape, tf32) = (out.dtype, out.shape, self.rounds(op, out.dtype));
        let (inputs, attrs) = (inputs.into(), attrs.into());
        Ok(self.write(Node { op, dtype, detached, tf32, shape, inputs, attrs, payload: 0 }))
    }

    /// The node of the recording before in the place of the next, if all before it repeated that recording.
    fn node_before(&self) -> Option<&Node> {
        (self.len < self.known).then(|| &self.nodes[self.len])
    }

    /// Appends a node that differs from the recording before, or has none in its place.
    fn write(&mut self, node: Node) -> NodeId {
        if self.len < self.known {
            self.lineage = Lineage::fresh();
        }
        self.known = self.len + 1;
        let dtype = node.dtype;
        match self.nodes.get_mut(self.len) {
            Some(place) => *place = node,
            None => self.nodes.push(node),
        }
        self.advance(dtype)
    }

    /// Counts a node that is in its place.
    fn advance(&mut self, dtype: DType) -> NodeId {
        let id = NodeId(self.len as u32);
        self.has_half |= dtype.is_half();
        self.len += 1;
        self.source_map.push(self.modes.loc);
        self.remat.backs.push(self.modes.backward_of.map_or(0, |n| n.0 + 1));
        id
    }

    /// Whether products of a node of `op` may round operands to TF32.
    fn rounds(&self, op: &Op, dtype: DType) -> bool {
        self.modes.tf32 && dtype == DType::F32 && self.makes_products(op)
    }

    /// Whether `op` may contain matrix products: because of its autocast class, or because it is recorded in a backward
    /// pass.
    fn makes_products(&self, op: &Op) -> bool {
        matches!(op.class, Class::Library | Class::Fused(_))
            && (op.amp == amp::Amp::Low || self.modes.backward_of.is_some())
    }

    /// Appends a finished node without checks: leaves, and copies by the planner.
    pub fn add(&mut self, node: Node) -> NodeId {
        debug_assert!(node.inputs.iter().all(|i| i.index() < self.len), "this is a bug: input after its use");
        // The value of a number and the identity of a leaf, but not of a State, may differ.
        if let Some(old) = self.node_before()
            && old.applies(node.op, &node.inputs, &node.attrs)
            && (old.dtype, old.detached, old.tf32) == (node.dtype, node.detached, node.tf32)
            && old.shape.dims() == node.shape.dims()
            && (old.payload == node.payload || !std::ptr::eq(node.op, &create::STATE))
        {
            if old.payload != node.payload {
                self.nodes[self.len].payload = node.payload;
            }
            return self.advance(node.dtype);
        }
        self.write(node)
    }

    /// Appends a node without inputs: `op` with that shape and dtype. `payload` is not part of the key.
    pub fn leaf(&mut self, op: &'static Op, shape: Shape, dtype: DType, attrs: &[i64], payload: u64) -> NodeId {
        let inputs = Inputs::new();
        self.add(Node {
            op,
            dtype,
            detached: self.modes.no_grad,
            tf32: false,
            shape,
            inputs,
            attrs: attrs.into(),
            payload,
        })
    }

    /// Appends the State `id` as it is when the step begins, if the recording before has it in this place: a State keeps its shape
    /// and dtype.
    pub fn state_again(&mut self, id: u64) -> Option<NodeId> {
        let old = self.node_before()?;
        if !std::ptr::eq(old.op, &create::STATE) || old.payload != id || old.detached {
            return None;
        }
        Some(self.advance(old.dtype))
    }

    /// Appends a Lua number as a rank-0 node of `dtype` whose value is a run-time slot.
    pub fn scalar(&mut self, value: Number, dtype: DType) -> NodeId {
        self.leaf(&create::SCALAR, Shape::SCALAR, dtype, &[], value.bits(dtype))
    }

    /// Appends a rank-0 node whose value is part of the program.
    pub fn constant(&mut self, value: f64, dtype: DType) -> NodeId {
        let bits = Number::Float(value).bits(dtype) as i64;
        self.leaf(&create::CONSTANT, Shape::SCALAR, dtype, &[bits], 0)
    }

    /// A rank-0 i64 constant; `constant` holds whole numbers up to 2^53 only.
    pub fn int_constant(&mut self, value: i64) -> NodeId {
        self.leaf(&create::CONSTANT, Shape::SCALAR, DType::I64, &[value], 0)
    }

    /// Appends a rank-0 constant with the dtype of `like`.
    pub fn constant_like(&mut self, value: f64, like: NodeId) -> NodeId {
        let dtype = self.dtype(like);
        self.constant(value, dtype)
    }

    /// Returns the generator of a node that a device never stores: a constant, a number, an index ramp, random numbers,
    /// or a part of one of them or of a leaf.
    #[inline]
    pub fn generator(&self, id: NodeId) -> Option<Generator> {
        match self.node(id).op.class {
            Class::Generator(k) => Some(k),
            _ => None,
        }
    }
}

/// Shape and dtype of a tensor.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Meta {
    pub shape: Shape,
    pub dtype: DType,
}

/// The arguments of a shape and dtype rule.
#[derive(Debug)]
pub struct Infer<'a> {
    pub op: &'static str,
    pub inputs: &'a [Meta],
    pub attrs: &'a [i64],
}

impl Infer<'_> {
    #[inline]
    pub fn shape(&self, i: usize) -> Shape {
        self.inputs[i].shape
    }

    #[inline]
    pub fn dtype(&self, i: usize) -> DType {
        self.inputs[i].dtype
    }

    #[inline]
    pub fn attr(&self, i: usize) -> usize {
        self.attrs[i] as usize
    }

    /// Fails unless input `i` is a float.
    pub fn float(&self, i: usize) -> Result<()> {
        let dtype = self.dtype(i);
        if dtype.is_float() {
            return Ok(());
        }
        Err(Error::dtype(self.op, format!("needs a float tensor, not {dtype}")).hint("convert it with x:to(\"f32\")"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::elementwise::NEG;

    #[test]
    fn a_recording_without_end_is_an_error() {
        let mut g = Graph::new();
        let mut x = g.constant(1.0, DType::F32);
        while g.len() < MAX_NODES {
            x = g.neg(x).unwrap();
        }
        let e = g.push(&NEG, &[x], &[]).unwrap_err();
        assert_eq!((e.kind, g.len()), (crate::Kind::Memory, MAX_NODES));
        assert!(e.message.contains("ops are recorded in one step"), "{e}");
    }

    #[test]
    fn a_cleared_graph_shows_no_node_of_the_recording_before() {
        let mut g = Graph::new();
        g.modes.loc = SourceLoc(7);
        let x = g.constant(1.0, DType::BF16);
        g.neg(x).unwrap();
        assert!(g.has_half());
        assert_eq!(g.clear_for(Vec::new()), [SourceLoc(7); 2]);
        assert!(g.is_empty() && g.nodes().is_empty() && g.ids().next().is_none() && !g.has_half());
        // A longer recording overwrites the nodes of the shorter one before, and grows.
        g.modes.loc = SourceLoc(8);
        let x = g.constant(2.0, DType::F32);
        let y = g.neg(x).unwrap();
        let z = g.neg(y).unwrap();
        assert_eq!((g.len(), g.nodes().len(), z), (3, 3, NodeId(2)));
        assert_eq!(g.node(y).inputs[..], [x]);
        assert_eq!((g.dtype(x), g.loc_of(z), g.has_half()), (DType::F32, SourceLoc(8), false));
        g.truncate(1);
        assert_eq!((g.len(), g.nodes().len()), (1, 1));
    }

    #[test]
    fn a_repeated_recording_has_the_same_edition() {
        let state = |g: &mut Graph, id| g.leaf(&create::STATE, Shape::of(&[3]), DType::F32, &[], id);
        let record = |g: &mut Graph, id: u64, rate: f64| {
            g.clear();
            let w = state(g, id);
            g.scalar(Number::Float(rate), DType::F32);
            let y = g.neg(w).unwrap();
            g.square(y).unwrap();
            g.edition()
        };
        let g = &mut Graph::new();
        let first = record(g, 1, 0.5);
        assert_eq!(record(g, 1, 0.25), first);
        assert_eq!(f64::from_bits(g.node(NodeId(1)).payload), 0.25, "the value of a number is the new one");
        assert_ne!(record(g, 2, 0.25), first, "another State is another recording");
        let second = record(g, 1, 0.5);
        assert_ne!(second, first, "nothing of the first was left to compare with");
        // A shorter recording, and one that goes on differently, are others; the node after the difference is not taken for equal.
        g.truncate(3);
        assert_ne!(g.edition(), second);
        g.square(NodeId(2)).unwrap();
        assert_eq!(g.edition(), second);
        g.truncate(2);
        g.square(NodeId(0)).unwrap();
        let odd = g.edition();
        g.square(NodeId(2)).unwrap();
        assert!(odd.0 != second.0 && g.edition() != second);
        assert_ne!(record(g, 1, 0.5), second);
        let third = g.edition();
        assert_ne!(g.clone().edition(), third, "a clone may grow differently");
        g.set_input(NodeId(3), 0, NodeId(0));
        assert_ne!(g.edition(), third);
    }
}
