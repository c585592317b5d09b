//! Records one generation: the graph, the handles that name its nodes, and the values of evaluated nodes.
//!
//! A *generation* is the life of one recording. A [`Handle`] is a generation and a node id, counted here as Lua copies and
//! drops it. When the generation ends, evaluated nodes with handles are carried over, each as a leaf of later
//! generations; all other handles are stale, and using one is an error that names the line it was recorded at.
//!
//! The recorder runs nothing: `evaluate.rs` computes values and stores them here.

use crate::memory::Role;
use crate::stored_value::{Residence, StoredValue, Value};
use perilune_core::error::{Error, Kind, Result};
use perilune_core::graph::{Graph, NodeId, RngState};
use perilune_core::id_map::IdMap;
use perilune_core::ops::{Class, create};
use perilune_core::source_loc::{SourceLoc, SourceMap};
use perilune_core::{DType, HostTensor, Placement, Shape};
use perilune_plan::Buffer;
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::VecDeque;
use std::rc::Rc;

/// A node of some generation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Handle {
    pub generation: u32,
    pub id: NodeId,
}

impl Handle {
    /// The generation of a freed tensor; real generations count from 1.
    pub const FREED: Handle = Handle { generation: 0, id: NodeId(0) };
}

/// A gradient: a node of the current generation, or the value it had when an earlier one ended.
#[derive(Debug)]
pub(crate) enum Deferred {
    Node(NodeId),
    Value(Value),
}

/// A handle that outlived its generation with a value.
struct Carried {
    value: Value,
    refs: u32,
    /// The leaf that represents it in the current generation.
    leaf: Option<Handle>,
}

/// The number of generations for which the line of a stale handle is kept.
const REMEMBERED: usize = 8;

/// The open recording.
pub struct Recorder {
    pub graph: Graph,
    pub source_map: SourceMap,
    generation: u32,
    /// Values of the current generation's nodes, by node; shorter than the graph.
    evaluated: Vec<Option<Value>>,
    /// Live handles of the current generation's nodes, by node.
    refs: Vec<u32>,
    carried: FxHashMap<Handle, Carried>,
    /// Buffers that leaves of the current generation read, by uid.
    live: IdMap<u64, Value>,
    next_uid: u64,
    old_locs: VecDeque<(u32, Vec<SourceLoc>)>,
    /// Bytes of values made since the caller last collected garbage; explicitly freed bytes do not count.
    pub fresh_bytes: usize,
    /// Bytes of values made in this generation, or since unreachable ones were last released.
    pub(crate) made_bytes: usize,
}

/// Nodes that a recording has room for without a copy of all. Until they are recorded they take addresses and no memory.
const NODES: usize = 1 << 17;

impl Default for Recorder {
    fn default() -> Recorder {
        Recorder {
            graph: Graph::with_capacity(NODES),
            source_map: SourceMap::default(),
            generation: 1,
            evaluated: Vec::new(),
            refs: Vec::new(),
            carried: FxHashMap::default(),
            live: IdMap::default(),
            next_uid: 1,
            old_locs: VecDeque::new(),
            fresh_bytes: 0,
            made_bytes: 0,
        }
    }
}

impl Recorder {
    /// Returns the number of the open generation, counted from 1.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Sets the key of random numbers and restarts their counters.
    pub fn seed(&mut self, seed: u64) {
        self.graph.rng = RngState { seed, step: 0, occurrence: 0 };
    }

    /// Makes a counted handle of a node of the current generation.
    pub fn handle(&mut self, id: NodeId) -> Handle {
        if self.refs.len() <= id.index() {
            self.refs.resize(self.graph.len().max(id.index() + 1), 0);
        }
        self.refs[id.index()] += 1;
        Handle { generation: self.generation, id }
    }

    /// Counts a copy of a handle.
    pub fn retain(&mut self, h: Handle) {
        if h.generation == self.generation {
            self.refs[h.id.index()] += 1;
        } else if let Some(c) = self.carried.get_mut(&h) {
            c.refs += 1;
        }
    }

    /// Drops a handle.
    pub fn release(&mut self, h: Handle) {
        if h.generation == self.generation {
            if let Some(n) = self.refs.get_mut(h.id.index()) {
                *n = n.saturating_sub(1);
            }
        } else if let Some(c) = self.carried.get_mut(&h) {
            // Its leaf in this generation, if any, is counted separately.
            c.refs -= 1;
            if c.refs == 0
                && let Some(c) = self.carried.remove(&h)
            {
                // Explicitly freed bytes do not count towards the GC threshold.
                self.fresh_bytes = self.fresh_bytes.saturating_sub(c.value.nbytes());
            }
        }
    }

    /// Returns the node of a handle in the current generation.
    pub fn node(&mut self, h: Handle) -> Result<NodeId> {
        if h.generation == self.generation {
            return Ok(h.id);
        }
        let generation = self.generation;
        let Some(c) = self.carried.get_mut(&h) else { return Err(self.stale(h)) };
        if let Some(leaf) = c.leaf.filter(|l| l.generation == generation) {
            return Ok(leaf.id);
        }
        let value = c.value.clone();
        let id = self.leaf(value);
        if let Some(c) = self.carried.get_mut(&h) {
            c.leaf = Some(Handle { generation, id });
        }
        Ok(id)
    }

    /// Returns shape and dtype without changing the graph.
    pub fn meta(&self, h: Handle) -> Result<(Shape, DType)> {
        if h.generation == self.generation {
            let n = self.graph.node(h.id);
            return Ok((n.shape, n.dtype));
        }
        self.carried.get(&h).map(|c| (c.value.shape, c.value.dtype)).ok_or_else(|| self.stale(h))
    }

    /// Returns whether the value is already in memory.
    pub fn is_evaluated(&self, h: Handle) -> bool {
        if h.generation != self.generation {
            return self.carried.contains_key(&h);
        }
        let node = self.graph.node(h.id);
        self.value(h.id).is_some() || matches!(node.op.class, Class::Leaf)
    }

    /// Returns the line at which a handle was recorded, if it is still known.
    pub fn loc_of(&self, h: Handle) -> Option<SourceLoc> {
        if h.generation == self.generation {
            return Some(self.graph.loc_of(h.id));
        }
        let (_, source_map) = self.old_locs.iter().find(|(g, _)| *g == h.generation)?;
        source_map.get(h.id.index()).copied()
    }

    pub(crate) fn stale(&self, h: Handle) -> Error {
        if h == Handle::FREED {
            return Error::new(Kind::Stale, "", "this tensor was freed with x:free()");
        }
        let at = match self.loc_of(h).filter(|s| *s != SourceLoc::NONE) {
            Some(loc) => format!("recorded at {}", self.source_map.show(loc)),
            None => "recorded in an earlier step".to_string(),
        };
        Error::new(
            Kind::Stale,
            "",
            format!("this tensor was {at}, in a step that has ended, and was never evaluated, so it has no value"),
        )
        .hint("return it from the step, log it, or call pl.keep(x) inside the step")
    }

    pub(crate) fn value(&self, id: NodeId) -> Option<&Value> {
        self.evaluated.get(id.index()).and_then(Option::as_ref)
    }

    pub(crate) fn leaf(&mut self, value: Value) -> NodeId {
        let id = self.graph.leaf(&create::LEAF, value.shape, value.dtype, &[], value.uid);
        self.live.insert(value.uid, value);
        id
    }

    pub(crate) fn new_value(&mut self, shape: Shape, dtype: DType, at: Residence, role: Role, loc: SourceLoc) -> Value {
        self.next_uid += 1;
        let value = StoredValue::new(self.next_uid, (shape, dtype), at, role, loc);
        self.count_bytes(&value);
        Rc::new(value)
    }

    /// Makes an input of host memory of which each device gets its part.
    pub(crate) fn new_input(&mut self, t: HostTensor, placement: Placement) -> Value {
        self.next_uid += 1;
        let (meta, loc) = ((t.shape, t.dtype), self.graph.modes.loc);
        let value = StoredValue::new(self.next_uid, meta, Residence::Host(t), Role::Inputs, loc).placed(placement);
        self.count_bytes(&value);
        Rc::new(value)
    }

    fn count_bytes(&mut self, value: &StoredValue) {
        self.fresh_bytes += value.nbytes();
        self.made_bytes += value.nbytes();
    }

    /// Returns every value, some of them several times.
    pub(crate) fn all_values(&self) -> impl Iterator<Item = &Value> {
        let carried = self.carried.values().map(|c| &c.value);
        self.live.values().chain(self.evaluated.iter().flatten()).chain(carried)
    }

    /// Returns the values with handles, each once.
    pub(crate) fn values(&self) -> impl Iterator<Item = &Value> {
        let carried = self.carried.values().map(|c| &c.value).filter(|v| !self.live.contains_key(&v.uid));
        let mut seen = FxHashSet::default();
        self.live.values().chain(carried).filter(move |v| seen.insert(v.uid))
    }

    /// Begins a span of nodes that the backward pass recomputes.
    pub fn open_span(&self) -> Handle {
        Handle { generation: self.generation, id: NodeId(self.graph.len() as u32) }
    }

    /// Ends a span. If a flush has cut the span, only its part after the cut counts.
    pub fn close_span(&mut self, from: Handle) {
        let start = if from.generation == self.generation { from.id } else { NodeId(0) };
        let end = NodeId(self.graph.len() as u32);
        if start < end {
            self.graph.remat.spans.push((start, end));
        }
    }

    pub(crate) fn is_plain_leaf(&self, id: NodeId) -> bool {
        self.graph.node(id).op == &create::LEAF
    }

    /// Returns those of `ids` that have not been computed, in order.
    pub(crate) fn roots(&self, ids: &[NodeId]) -> Vec<NodeId> {
        let open = |id: &NodeId| !self.is_plain_leaf(*id) && self.value(*id).is_none();
        let mut roots: Vec<NodeId> = ids.iter().copied().filter(open).collect();
        roots.sort_unstable();
        roots.dedup();
        roots
    }

    /// Returns the nodes of the current generation that have handles.
    pub(crate) fn held(&self) -> Vec<NodeId> {
        (0..self.refs.len().min(self.graph.len()) as u32).map(NodeId).filter(|id| self.refs[id.index()] > 0).collect()
    }

    pub(crate) fn is_held(&self, id: NodeId) -> bool {
        self.refs.get(id.index()).is_some_and(|n| *n > 0)
    }

    /// Returns the nodes that represent handles of earlier generations.
    pub(crate) fn carried_leaves(&self) -> impl Iterator<Item = NodeId> {
        self.carried.values().filter_map(|c| c.leaf.filter(|l| l.generation == self.generation).map(|l| l.id))
    }

    /// Drops a node's value; the node stays and can be evaluated again.
    pub(crate) fn forget_value(&mut self, id: NodeId) {
        if let Some(v) = self.evaluated.get_mut(id.index()) {
            *v = None;
        }
    }

    /// Returns the value of a node or leaf.
    pub(crate) fn uid_of(&self, id: NodeId) -> Option<u64> {
        self.value(id).map(|v| v.uid).or_else(|| self.is_plain_leaf(id).then(|| self.graph.node(id).payload))
    }

    pub(crate) fn retain_live(&mut self, keep: impl Fn(u64) -> bool) {
        self.live.retain(|uid, _| keep(*uid));
    }

    /// Releases values that neither a handle nor a node in `wanted` reads: the generation is about to end, or to be tried again
    /// after memory ran out.
    /// With `history` the leaves of all remaining values stay, so that released values can be recomputed, and gradients
    /// can be computed.
    pub(crate) fn drop_unreachable(&mut self, wanted: &[NodeId], history: bool) {
        let mut reached = vec![false; self.graph.len()];
        for id in self.held().iter().chain(wanted) {
            reached[id.index()] = true;
        }
        // Several leaves may represent one value.
        let mut needed = FxHashSet::default();
        for i in (0..reached.len()).rev() {
            let id = NodeId(i as u32);
            if !reached[i] {
                continue;
            }
            match self.value(id) {
                Some(v) => {
                    needed.insert(v.uid);
                }
                None if self.is_plain_leaf(id) => {
                    needed.insert(self.graph.node(id).payload);
                }
                None => self.graph.node(id).inputs.iter().for_each(|x| reached[x.index()] = true),
            }
        }
        for (value, reached) in self.evaluated.iter_mut().zip(&reached) {
            if !reached {
                *value = None;
            }
        }
        if history {
            for id in self.carried_leaves().collect::<Vec<_>>() {
                reached[id.index()] = true;
            }
            for i in (0..reached.len()).rev() {
                let id = NodeId(i as u32);
                if reached[i] && self.is_plain_leaf(id) {
                    needed.insert(self.graph.node(id).payload);
                }
                if reached[i] {
                    self.graph.node(id).inputs.iter().for_each(|x| reached[x.index()] = true);
                }
            }
        }
        self.live.retain(|uid, _| needed.contains(uid));
    }

    /// Ends the generation: evaluated nodes with handles are carried over, all others are dropped.
    pub(crate) fn end_generation(&mut self) {
        let generation = self.generation;
        for i in 0..self.refs.len().min(self.graph.len()) {
            if self.refs[i] == 0 {
                continue;
            }
            let id = NodeId(i as u32);
            let value = match self.value(id) {
                Some(v) => Some(v.clone()),
                None if self.is_plain_leaf(id) => self.live.get(&self.graph.node(id).payload).cloned(),
                None => None,
            };
            if let Some(value) = value {
                self.carried.insert(Handle { generation, id }, Carried { value, refs: self.refs[i], leaf: None });
            }
        }
        for c in self.carried.values_mut() {
            c.leaf = None;
        }
        let oldest = if self.old_locs.len() == REMEMBERED { self.old_locs.pop_front() } else { None };
        let (_, spare) = oldest.unwrap_or_default();
        self.old_locs.push_back((generation, self.graph.clear_for(spare)));
        self.evaluated.clear();
        self.refs.clear();
        self.live.clear();
        self.made_bytes = 0;
        self.generation += 1;
    }

    pub(crate) fn held_grad(&mut self, held: &Deferred) -> NodeId {
        match held {
            Deferred::Node(id) => *id,
            Deferred::Value(v) => {
                let v = v.clone();
                self.leaf(v)
            }
        }
    }

    /// Returns the number of handles that Lua holds.
    pub(crate) fn handle_count(&self) -> usize {
        (self.refs.iter().sum::<u32>() + self.carried.values().map(|c| c.refs).sum::<u32>()) as usize
    }

    /// Returns whether the node's value is in memory; a State's leaf has no separate value.
    pub(crate) fn has_value(&self, id: NodeId) -> bool {
        self.is_evaluated(Handle { generation: self.generation, id }) && self.graph.node(id).op != &create::STATE
    }

    /// Returns the uid of a node's value for the tracer: evaluated nodes are leaves of a plan.
    pub(crate) fn known(&self) -> impl Fn(NodeId) -> Option<u64> + '_ {
        |id| self.value(id).map(|v| v.uid)
    }

    /// Returns the value that a leaf reads.
    pub(crate) fn live(&self, uid: u64) -> Option<&Value> {
        self.live.get(&uid)
    }

    /// Returns the value that was carried over with a handle of an earlier generation.
    pub(crate) fn carried(&self, h: Handle) -> Result<&Value> {
        self.carried.get(&h).map(|c| &c.value).ok_or_else(|| self.stale(h))
    }

    /// Stores the value that a run computed for a node.
    pub(crate) fn set_value(&mut self, id: NodeId, buffer: Buffer) {
        self.evaluated.resize(self.graph.len(), None);
        let node = self.graph.node(id);
        let (shape, dtype, loc) = (node.shape, node.dtype, self.graph.loc_of(id));
        let value = self.new_value(shape, dtype, Residence::Device(buffer), Role::Results, loc);
        self.live.insert(value.uid, value.clone());
        self.evaluated[id.index()] = Some(value);
    }
}
