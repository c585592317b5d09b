//! Manages States, the named buffers that change: weights, moments, counters.
//!
//! A State has one buffer for life. `assign` does not write immediately: later reads of the same step
//! return the new value, and the end of the step writes it. A new State is an assignment too, so a whole
//! model's initial values are computed by one plan.

use crate::engine::{Engine, Fault};
use crate::memory::{Entry, Role};
use crate::recorder::Deferred;
use crate::shadow_weights::ShadowWeight;
use perilune_core::error::{Error, Result};
use perilune_core::graph::{Graph, NodeId};
use perilune_core::id_map::IdMap;
use perilune_core::mesh::Axis;
use perilune_core::ops::{create, movement};
use perilune_core::source_loc::SourceLoc;
use perilune_core::{DType, HostTensor, Mesh, Placement, Shape};
use perilune_plan::{Backend, Buffer, BufferDesc, Guard, InputBuffer, Request};
use rustc_hash::{FxHashMap, FxHashSet};
use std::sync::Arc;

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct StateId(pub u64);

/// What each step reads and writes of a State: a table of those of a large model is read in order, from as few cache lines as
/// possible.
#[derive(Debug)]
pub(crate) struct State {
    /// The node of the current value, after the first read: the leaf of the current generation, or the value assigned in it.
    current: Option<NodeId>,
    /// The value to be written at the end of the generation.
    assigned: Option<NodeId>,
    /// For a State made in this generation: its initial value, which is kept if the step fails.
    initial: Option<NodeId>,
    pub grad: Option<Deferred>,
    pub trainable: bool,
    refs: u32,
    pub about: Box<About>,
}

/// What a step that repeats does not read of a State.
#[derive(Debug)]
pub(crate) struct About {
    buffer: Option<Buffer>,
    role: Role,
    pub desc: BufferDesc,
    /// Its path in the run (`model.blocks.3.attn.wq`), once it has one. Checkpoints, shards and errors name it by this.
    path: Option<Arc<str>>,
    /// The recipe line that made it.
    loc: SourceLoc,
}

impl State {
    /// Returns role, line, dtype, shape and bytes on one device of `mesh`.
    fn entry(&self, mesh: &Mesh) -> Entry {
        let about = &self.about;
        let nbytes = about.desc.local(mesh).map_or(about.desc.nbytes(), |part| part.nbytes());
        (about.role, about.loc, about.desc.dtype, about.desc.shape, nbytes)
    }

    /// Returns its path for messages, in brackets behind a space; empty if it has none.
    pub fn name(&self) -> String {
        self.about.path.as_ref().map_or_else(String::new, |path| format!(" ({path})"))
    }
}

/// The public description of a State.
#[derive(Clone, Copy, Debug)]
pub struct StateInfo {
    pub shape: Shape,
    pub dtype: DType,
    /// What each device of the engine's mesh holds of it.
    pub placement: Placement,
    pub trainable: bool,
    /// Whether it was created trainable and is not any more.
    pub frozen: bool,
}

#[derive(Debug, Default)]
pub(crate) struct StateTable {
    all: IdMap<u64, State>,
    next: u64,
    /// Nodes of the current generation through which a State is read, for `backward`.
    reads: Vec<(NodeId, StateId)>,
    /// States with an assignment, in order of their first one, with its value.
    order: Vec<(StateId, NodeId)>,
    /// Whether a State of `order` was assigned again or is gone.
    revised: bool,
    /// The observer of the run that is being called, which may assign none of its States.
    pub(crate) read_only: Option<&'static str>,
    /// States without handles, dropped when the generation ends.
    gone: Vec<StateId>,
    /// The bool on which the assignments of the open step depend.
    pub guard: Option<NodeId>,
    /// 16-bit copies: see `shadow_weights.rs`.
    shadow_weights: FxHashMap<(u64, DType), ShadowWeight>,
    bound: Bound,
}

/// The inputs of the last run, for one with the same: a step that repeats then looks no State up and counts no reference to its
/// buffer. Forgotten when a State changes its buffer or is dropped.
#[derive(Debug, Default)]
struct Bound {
    inputs: Vec<InputBuffer>,
    /// In the place of a leaf, a State's buffer. Empty while a run has them.
    buffers: Vec<Buffer>,
}

impl Bound {
    /// Whether a run with those inputs reads the same States in the same places.
    fn has(&self, inputs: &[InputBuffer]) -> bool {
        let same = |(a, b): (&InputBuffer, &InputBuffer)| {
            a == b || matches!((a, b), (InputBuffer::Leaf(_), InputBuffer::Leaf(_)))
        };
        self.inputs.len() == inputs.len() && self.inputs.iter().zip(inputs).all(same)
    }
}

impl StateTable {
    /// Bytes of all States on one device of `mesh`.
    pub fn nbytes(&self, mesh: &Mesh) -> usize {
        // Of the device along pp that has the most.
        let device = |k| self.all.values().map(|s| s.about.desc.bytes_along_pp(mesh, k)).sum::<usize>();
        (0..mesh.size(Axis::Pp)).map(device).max().unwrap_or(0)
    }

    /// Returns role, line, dtype, shape and bytes on one device of `mesh` of each State that has memory.
    pub fn entries(&self, mesh: Mesh) -> impl Iterator<Item = Entry> {
        self.all.values().filter(|s| s.about.buffer.is_some()).map(move |s| s.entry(&mesh))
    }

    /// Returns the same of each State that has no memory yet.
    pub fn unborn_entries(&self, mesh: Mesh) -> impl Iterator<Item = Entry> {
        self.all.values().filter(|s| s.about.buffer.is_none()).map(move |s| s.entry(&mesh))
    }

    pub fn get(&self, id: StateId) -> Result<&State> {
        self.all.get(&id.0).ok_or_else(|| Error::system("state", "this is a bug: no such State"))
    }

    pub fn get_mut(&mut self, id: StateId) -> Result<&mut State> {
        self.all.get_mut(&id.0).ok_or_else(|| Error::system("state", "this is a bug: no such State"))
    }

    /// Returns the State's buffer, allocated when first needed.
    pub fn buffer(&mut self, id: StateId, backend: &dyn Backend) -> Result<Buffer> {
        let s = self.get_mut(id)?;
        if s.about.buffer.is_none() {
            s.about.buffer = Some(backend.alloc(&s.about.desc)?);
        }
        s.about.buffer.clone().ok_or_else(|| Error::system("state", "this is a bug: no buffer"))
    }

    /// Returns the buffers of the inputs of a run. Those of leaves come from `leaf`.
    pub fn bind(
        &mut self,
        inputs: &[InputBuffer],
        backend: &dyn Backend,
        mut leaf: impl FnMut(u64) -> Result<Buffer>,
    ) -> Result<Vec<Buffer>> {
        let mut buffers = std::mem::take(&mut self.bound.buffers);
        if !self.bound.has(inputs) {
            buffers.clear();
            self.bound.inputs = inputs.to_vec();
        }
        let known = buffers.len();
        for (k, input) in inputs.iter().enumerate() {
            match input {
                InputBuffer::State(_) if k < known => {}
                InputBuffer::State(id) => buffers.push(self.buffer(StateId(*id), backend)?),
                InputBuffer::Leaf(uid) if k < known => buffers[k] = leaf(*uid)?,
                InputBuffer::Leaf(uid) => buffers.push(leaf(*uid)?),
            }
        }
        Ok(buffers)
    }

    /// Keeps what [`StateTable::bind`] returned for the next run, without the buffers of leaves.
    pub fn keep_bound(&mut self, mut buffers: Vec<Buffer>) {
        let is_state = |input: &InputBuffer| matches!(input, InputBuffer::State(_));
        let inputs = &self.bound.inputs;
        let Some(first) = inputs.iter().position(is_state) else { return };
        for k in (0..inputs.len()).filter(|k| !is_state(&inputs[*k])) {
            buffers[k] = buffers[first].clone();
        }
        self.bound.buffers = buffers;
    }

    /// Returns the State's buffer, if it contains the current value.
    pub fn written_buffer(&self, id: StateId) -> Option<Buffer> {
        self.all.get(&id.0).filter(|s| s.assigned.is_none())?.about.buffer.clone()
    }

    /// Moves the values of all States to another device, where each is whole.
    pub fn move_to(&mut self, old: &dyn Backend, new: &dyn Backend) -> Result<()> {
        self.bound = Bound::default();
        for s in self.all.values_mut() {
            if let Some(Deferred::Value(v)) = &s.grad {
                v.to_host(old)?;
            }
            s.about.desc.placement = Placement::REPLICATED;
            if let Some(buffer) = &s.about.buffer {
                s.about.buffer = Some(new.upload(&s.about.desc, &old.download(buffer)?)?);
            }
        }
        Ok(())
    }

    /// Changes the placement of a State. Returns the buffer that it had; its 16-bit copies are dropped.
    pub fn place(&mut self, id: StateId, placement: Placement) -> Result<Option<Buffer>> {
        self.bound = Bound::default();
        let s = self.get_mut(id)?;
        s.about.desc.placement = placement;
        let old = s.about.buffer.take();
        let all = &mut self.all;
        self.shadow_weights.retain(|(base, _), copy| {
            let other = *base != id.0;
            if !other {
                all.remove(&copy.state.0);
            }
            other
        });
        Ok(old)
    }

    /// The recipe line that made it.
    pub fn loc(&self, id: StateId) -> SourceLoc {
        self.all.get(&id.0).map_or(SourceLoc::NONE, |s| s.about.loc)
    }

    /// Returns (payload, value) of every pending assignment, in order.
    pub fn pending(&self) -> Vec<(u64, NodeId)> {
        if !self.revised {
            return self.order.iter().map(|(id, value)| (id.0, *value)).collect();
        }
        self.order.iter().filter_map(|(id, _)| Some((id.0, self.all.get(&id.0)?.assigned?))).collect()
    }

    /// Returns the request that computes `roots` and writes pending assignments. A guard applies to States that the open step
    /// did not make.
    pub fn request(&self, roots: Vec<NodeId>) -> Request {
        let state_writes = self.pending();
        let old = |c: &(u64, NodeId)| self.all.get(&c.0).is_some_and(|s| s.initial.is_none());
        let guard = self.guard.map(|ok| Guard { ok, state_writes: state_writes.iter().map(old).collect() });
        Request { roots, state_writes, guard, ..Request::default() }
    }

    /// Returns the shadow weight of a State in a dtype, created without a value if necessary.
    pub fn copy(&mut self, base: u64, shape: Shape, dtype: DType) -> ShadowWeight {
        if let Some(copy) = self.shadow_weights.get(&(base, dtype)) {
            return *copy;
        }
        self.next += 1;
        let copy = ShadowWeight { state: StateId(self.next), valid: false };
        let (loc, placement) = self
            .all
            .get(&base)
            .map_or((SourceLoc::NONE, Placement::REPLICATED), |s| (s.about.loc, s.about.desc.placement));
        let desc = BufferDesc { shape, dtype, placement };
        let state = State {
            current: None,
            assigned: None,
            initial: None,
            grad: None,
            trainable: false,
            refs: 1,
            about: Box::new(About { buffer: None, role: Role::ShadowWeights, desc, path: None, loc }),
        };
        self.all.insert(copy.state.0, state);
        self.shadow_weights.insert((base, dtype), copy);
        copy
    }

    pub fn has_copies(&self) -> bool {
        !self.shadow_weights.is_empty()
    }

    /// The shadow weight of a State in a dtype, if it has the State's value.
    pub fn valid_copy(&self, base: u64, dtype: DType) -> Option<StateId> {
        self.shadow_weights.get(&(base, dtype)).filter(|copy| copy.valid).map(|copy| copy.state)
    }

    /// Updates the validity of the shadow weights of States that a request writes: those that it does not write become invalid.
    pub fn set_copies(&mut self, request: &Request, on: bool) {
        if self.shadow_weights.is_empty() {
            return;
        }
        let written: FxHashSet<u64> = request.state_writes.iter().map(|c| c.0).collect();
        for ((base, _), copy) in &mut self.shadow_weights {
            if written.contains(base) {
                copy.valid = on && written.contains(&copy.state.0);
            }
        }
    }

    /// Reverts the assignments of a failed step; States made in it get their initial value.
    pub fn roll_back(&mut self) {
        self.guard = None;
        self.revised = true;
        self.order.retain(|(id, _)| match self.all.get_mut(&id.0) {
            Some(s) => {
                s.assigned = s.initial;
                s.assigned.is_some()
            }
            None => false,
        });
        for s in self.all.values_mut() {
            s.grad = None;
        }
    }

    /// Whether an assignment is pending.
    pub fn is_dirty(&self) -> bool {
        self.order.iter().any(|(id, _)| self.all.get(&id.0).is_some_and(|s| s.assigned.is_some()))
    }

    /// Commits the assignments after all writes: the next generation reads the buffers. Without `keep_grads` gradients are
    /// dropped.
    pub fn written(&mut self, keep_grads: bool) {
        self.guard = None;
        for s in self.all.values_mut() {
            if !keep_grads {
                s.grad = None;
            }
            s.current = None;
            s.assigned = None;
            s.initial = None;
        }
        self.reads.clear();
        self.order.clear();
        self.revised = false;
        let gone = std::mem::take(&mut self.gone);
        if gone.is_empty() {
            return;
        }
        self.bound = Bound::default();
        for id in gone {
            if self.all.get(&id.0).is_some_and(|s| s.refs == 0) {
                self.all.remove(&id.0);
            }
        }
        let all = &mut self.all;
        self.shadow_weights.retain(|(base, _), copy| {
            let alive = all.contains_key(base);
            if !alive {
                all.remove(&copy.state.0);
            }
            alive
        });
    }

    /// Drops States that were made in this generation and have lost all handles before they were written.
    pub fn drop_unborn(&mut self) {
        self.bound = Bound::default();
        let all = &mut self.all;
        self.gone.retain(|id| {
            let unborn = all.get(&id.0).is_some_and(|s| s.refs == 0 && s.initial.is_some() && s.about.buffer.is_none());
            if unborn {
                all.remove(&id.0);
            }
            !unborn
        });
        self.shadow_weights.retain(|(base, _), copy| {
            let alive = all.contains_key(base);
            if !alive {
                all.remove(&copy.state.0);
            }
            alive
        });
        self.order.retain(|(id, _)| all.contains_key(&id.0));
        self.reads.retain(|(_, id)| all.contains_key(&id.0));
    }

    /// Returns the nodes of the current generation that read States.
    pub fn reads(&self) -> impl Iterator<Item = (NodeId, StateId)> {
        self.reads.iter().copied()
    }

    /// Returns the trainable States that are read through a node that `f` accepts, each once.
    pub fn read_by(&self, f: impl Fn(NodeId) -> bool) -> Vec<StateId> {
        let mut out: Vec<StateId> = self
            .reads
            .iter()
            .filter(|(node, id)| f(*node) && self.all.get(&id.0).is_some_and(|s| s.trainable))
            .map(|r| r.1)
            .collect();
        out.sort_unstable();
        out.dedup();
        out
    }

    pub fn clear_grads(&mut self) {
        for s in self.all.values_mut() {
            s.grad = None;
        }
    }

    pub fn grads_mut(&mut self) -> impl Iterator<Item = &mut Deferred> {
        self.all.values_mut().filter_map(|s| s.grad.as_mut())
    }
}

impl Engine {
    /// Creates a State with the initial value `init`. `backward` computes gradients of trainable States.
    pub fn new_state(&mut self, init: NodeId, trainable: bool) -> Result<StateId> {
        let (shape, dtype) = (self.recorder.graph.shape(init), self.recorder.graph.dtype(init));
        if trainable && !dtype.is_float() {
            return Err(Error::dtype("state", format!("a trainable State must be a float, not {dtype}"))
                .hint("pass {trainable = false}, or convert the tensor"));
        }
        self.states.next += 1;
        let id = StateId(self.states.next);
        let role = if trainable { Role::Weights } else { Role::Buffers };
        let (desc, loc) = (BufferDesc::new(shape, dtype), self.recorder.graph.modes.loc);
        let state = State {
            current: None,
            assigned: Some(init),
            initial: Some(init),
            grad: None,
            trainable,
            refs: 1,
            about: Box::new(About { buffer: None, role, desc, path: None, loc }),
        };
        self.states.all.insert(id.0, state);
        self.states.order.push((id, init));
        Ok(id)
    }

    /// Makes a node with the value of `x` that stops gradients, for reads of an assigned State.
    fn boundary(&mut self, x: NodeId) -> Result<NodeId> {
        self.recorder.graph.with_no_grad(false, |g| movement::detach(g, x))
    }

    pub fn state_info(&self, id: StateId) -> Result<StateInfo> {
        self.states.get(id).map(|s| {
            let BufferDesc { shape, dtype, placement } = s.about.desc;
            let frozen = s.about.role == Role::Weights && !s.trainable;
            StateInfo { shape, dtype, placement, trainable: s.trainable, frozen }
        })
    }

    pub fn set_trainable(&mut self, id: StateId, on: bool) -> Result<()> {
        let s = self.states.get_mut(id)?;
        if on && !s.about.desc.dtype.is_float() {
            return Err(Error::dtype(
                "state",
                format!("a trainable State must be a float, not {}", s.about.desc.dtype),
            ));
        }
        s.trainable = on;
        Ok(())
    }

    /// Names a State by its path in the run. A State with several paths (tied weights) has the first.
    pub fn set_state_path(&mut self, id: StateId, path: &str) -> Result<()> {
        let s = self.states.get_mut(id)?;
        if s.about.path.as_deref() != Some(path) {
            s.about.path = Some(path.into());
        }
        Ok(())
    }

    /// Returns the path of a State in its run, if it has one.
    pub fn state_path(&self, id: StateId) -> Option<Arc<str>> {
        self.states.get(id).ok()?.about.path.clone()
    }

    /// Sets the role of a State in memory statistics.
    pub fn set_role(&mut self, id: StateId, role: Role) -> Result<()> {
        self.states.get_mut(id)?.about.role = role;
        Ok(())
    }

    /// Reverts a failed step whose new States could not be allocated: the States have their values from before the step, and the
    /// recording stays, so that the new ones get their initial values when memory is available.
    pub(crate) fn keep_initial(&mut self) {
        self.states.reads.clear();
        for s in self.states.all.values_mut() {
            s.current = None;
        }
    }

    pub fn retain_state(&mut self, id: StateId) {
        if let Ok(s) = self.states.get_mut(id) {
            s.refs += 1;
        }
    }

    pub fn release_state(&mut self, id: StateId) {
        if let Ok(s) = self.states.get_mut(id) {
            s.refs -= 1;
            if s.refs == 0 {
                self.states.gone.push(id);
            }
        }
    }

    /// Returns the node of a State's current value.
    pub fn state_node(&mut self, id: StateId) -> Result<NodeId> {
        let s = self.states.get(id)?;
        if let Some(node) = s.current {
            return Ok(node);
        }
        let node = match s.assigned {
            Some(value) => self.boundary(value)?,
            None => match self.recorder.graph.state_again(id.0) {
                Some(node) => node,
                None => {
                    let (shape, dtype) = (s.about.desc.shape, s.about.desc.dtype);
                    let leaf = |g: &mut Graph| Ok(g.leaf(&create::STATE, shape, dtype, &[], id.0));
                    self.recorder.graph.with_no_grad(false, leaf)?
                }
            },
        };
        self.states.get_mut(id)?.current = Some(node);
        self.states.reads.push((node, id));
        Ok(node)
    }

    /// Assigns `value` to the State: later reads return it, and the end of the step writes it.
    pub fn assign(&mut self, id: StateId, value: NodeId) -> Result<()> {
        let s = self.states.get(id)?;
        // A State without a path does not belong to the run: an observer may keep some of its own.
        if let Some(rule) = self.states.read_only.filter(|_| s.about.path.is_some()) {
            return Err(Error::argument(
                "assign",
                format!("the State{} is assigned in {rule}, which only observes the run", s.name()),
            )
            .hint("change States in recipe.step or recipe.after_step, which a resumed run repeats exactly"));
        }
        let graph = &self.recorder.graph;
        let (shape, dtype) = match s.current {
            Some(read) => (graph.shape(read), graph.dtype(read)),
            None => (s.about.desc.shape, s.about.desc.dtype),
        };
        let from = graph.shape(value);
        if Shape::broadcast(&from, &shape) != Some(shape) {
            let name = s.name();
            return Err(Error::shape(
                "assign",
                format!("a tensor of shape {from} does not fit a State of shape {shape}{name}"),
            )
            .hint("the shape of a State cannot change"));
        }
        let value = self.recorder.graph.cast(value, dtype)?;
        let value = self.recorder.graph.expand(value, shape)?;
        let s = self.states.get_mut(id)?;
        s.current = None;
        s.grad = None;
        match s.assigned.replace(value) {
            None => self.states.order.push((id, value)),
            Some(_) => self.states.revised = true,
        }
        Ok(())
    }

    /// Refuses assignments to the States of a run until it is called with `None`; `observer` names the function that attempts them in errors.
    /// Returns the setting before.
    pub fn set_states_read_only(&mut self, observer: Option<&'static str>) -> Option<&'static str> {
        std::mem::replace(&mut self.states.read_only, observer)
    }

    /// Returns whether the open step assigns the State a value, other than the initial one of a State that it made.
    pub fn is_assigned(&self, id: StateId) -> bool {
        self.states.get(id).is_ok_and(|s| s.assigned.is_some() && s.assigned != s.initial)
    }

    /// Returns the line that made a State.
    pub fn state_loc(&self, id: StateId) -> SourceLoc {
        self.states.loc(id)
    }

    /// Returns the States that the open step changes but did not make, with the lines that made them.
    pub fn changed_states(&self) -> Vec<(StateId, SourceLoc)> {
        let old = |(id, _): &(StateId, NodeId)| {
            self.states.all.get(&id.0).filter(|s| s.initial.is_none()).map(|s| (*id, s.about.loc))
        };
        self.states.order.iter().filter_map(old).collect()
    }

    /// Returns a State's value in host memory.
    pub fn read_state(&mut self, id: StateId) -> std::result::Result<HostTensor, Fault> {
        let s = self.states.get(id)?;
        if s.assigned.is_none()
            && let Some(buffer) = s.about.buffer.clone()
        {
            let (shape, dtype) = (s.about.desc.shape, s.about.desc.dtype);
            return self.bring(&buffer, shape, dtype);
        }
        let node = self.state_node(id)?;
        self.read_node(node)
    }

    /// Returns the bytes in a State's buffer, without pending assignments.
    pub(crate) fn read_written(&mut self, id: StateId) -> std::result::Result<HostTensor, Fault> {
        let backend = self.executor.backend.clone();
        let buffer = self.states.buffer(id, &*backend)?;
        let s = self.states.get(id)?;
        let bytes = backend.download(&buffer)?;
        Ok(HostTensor::new(s.about.desc.dtype, s.about.desc.shape, bytes))
    }

    /// Overwrites a State from host memory (a checkpoint), between steps. Shape and dtype must be equal.
    pub fn write_state(&mut self, id: StateId, t: &HostTensor) -> Result<()> {
        let s = self.states.get(id)?;
        if s.about.desc.shape != t.shape || s.about.desc.dtype != t.dtype {
            let (desc, name) = (s.about.desc, s.name());
            let message = format!(
                "a {} tensor of shape {} does not fit a {} State of shape {}{name}",
                t.dtype, t.shape, desc.dtype, desc.shape
            );
            return Err(Error::shape("load", message));
        }
        let node = self.upload(t)?;
        self.assign(id, node)
    }
}
