//! Defines the intermediate representation between recording and fusion: a graph in which leaves and run-time numbers
//! have indices.
//!
//! The passes of `pipeline` map one `Lowered` to the next. Some fields are set by one pass and consumed by a later one;
//! their comments name both passes.

use crate::buffer_desc::BufferDesc;
use crate::ir::AttentionExchange;
use crate::view_table::ViewTable;
use perilune_core::graph::{Graph, NodeId};
use perilune_core::id_map::IdMap;
use perilune_core::mesh::Start;
use perilune_core::ops::Class;
use perilune_core::{Layout, Shape};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

/// A lowered step.
#[derive(Debug)]
pub struct Lowered {
    pub graph: Graph,
    /// Where the elements of each node are. Set by `passes::views`.
    pub views: ViewTable,
    pub roots: Vec<NodeId>,
    /// Roots, by their number, of which a device returns a part. Set by `passes::shard`.
    pub placed_roots: FxHashMap<usize, BufferDesc>,
    /// How attention gets its keys on a mesh. Set by `passes::shard`.
    pub exchanges: Vec<AttentionExchange>,
    /// Values of the State writes, in the order of `Trace::state_write_inputs`.
    pub state_writes: Vec<NodeId>,
    /// Nodes that run although nothing reads them: what a pipeline stage sends.
    pub effects: Vec<NodeId>,
    /// The bool that guards State writes, until `passes::guard` turns it into selects.
    pub ok: Option<NodeId>,
    /// Slot number of each `scalar` and `shard` node.
    pub slots: IdMap<NodeId, u32>,
    /// Where the device's parts of generated numbers begin: the run-time numbers from slot `first_start` on.
    pub starts: Vec<Start>,
    pub first_start: u32,
    /// Input number of each leaf node.
    pub inputs: IdMap<NodeId, u32>,
    /// Which inputs are States: their buffers will change, so they cannot be returned as results.
    pub states: Vec<bool>,
    /// For each node, the nodes that must run before it although it does not read them. Empty if the step has no such
    /// node. Set by `passes::control_deps`.
    pub control_deps: Vec<SmallVec<[NodeId; 2]>>,
    /// Ops that store their image channels last. Set by `passes::nhwc`, consumed by `passes::output_layout`.
    pub channels_last: FxHashSet<NodeId>,
    /// How ops store their results. Set by `passes::output_layout`, consumed by `passes::views`.
    pub stores: Stores,
    /// Row alignment in bytes to which regions pad rows, if products need it and the backend supports it.
    pub fills: Option<usize>,
    /// See [`crate::Backend::has_host_memory_route`].
    pub has_host_memory_route: bool,
    /// See [`crate::Backend::defers_index_faults`].
    pub defers_index_faults: bool,
}

/// How ops and parts of their results are stored, if not contiguously in a buffer of their own.
#[derive(Clone, Default, Debug)]
pub struct Stores {
    /// Layout of an output over its own buffer.
    pub layouts: FxHashMap<NodeId, Layout>,
    /// Concatenations whose inputs one op stores as slices of the joined buffer.
    pub joins: FxHashMap<NodeId, Join>,
}

/// A concatenation that needs no copy.
#[derive(Clone, Debug)]
pub struct Join {
    /// The op that stores all inputs of the concatenation.
    pub op: NodeId,
    /// Layout of the result over the joined buffer.
    pub whole: Layout,
    /// Each input of the concatenation and its layout over the joined buffer.
    pub slices: SmallVec<[(NodeId, Layout); 3]>,
}

impl Lowered {
    /// A step without nodes, in a graph without any.
    pub(crate) fn empty(states: Vec<bool>, graph: Graph) -> Lowered {
        Lowered {
            graph,
            views: ViewTable::default(),
            roots: Vec::new(),
            placed_roots: FxHashMap::default(),
            exchanges: Vec::new(),
            state_writes: Vec::new(),
            effects: Vec::new(),
            ok: None,
            slots: IdMap::default(),
            starts: Vec::new(),
            first_start: 0,
            inputs: IdMap::default(),
            states,
            control_deps: Vec::new(),
            channels_last: FxHashSet::default(),
            stores: Stores::default(),
            fills: None,
            has_host_memory_route: false,
            defers_index_faults: false,
        }
    }

    /// The nodes that must run before `id` although it does not read them.
    pub fn control_deps(&self, id: NodeId) -> &[NodeId] {
        self.control_deps.get(id.index()).map_or(&[], |w| w)
    }

    /// The number of the input that a leaf is, or of the slot of a run-time number.
    pub fn number(&self, id: NodeId) -> Option<u32> {
        match self.graph.node(id).op.class {
            Class::Leaf => self.inputs.get(&id).copied(),
            Class::Generator(_) => self.slots.get(&id).copied(),
            _ => None,
        }
    }

    /// Sets the number of a leaf or a run-time number that was copied.
    pub(crate) fn set_number(&mut self, id: NodeId, number: Option<u32>) {
        let Some(number) = number else { return };
        match self.graph.node(id).op.class {
            Class::Leaf => self.inputs.insert(id, number),
            _ => self.slots.insert(id, number),
        };
    }

    /// The owner of the elements of node `x`, and their layout in it.
    pub fn view(&self, x: NodeId) -> (NodeId, Layout) {
        self.views.get(x, self.graph.shape(x))
    }

    /// The owner of the elements that node `x` reads through `input`, and their layout over dims `shape` (`input`
    /// broadcasts to it).
    pub fn read(&self, input: NodeId, shape: Shape) -> (NodeId, Layout) {
        if let Some(owner) = self.views.plain(input)
            && self.graph.shape(input) == shape
        {
            return (owner, Layout::sequence(shape.numel()));
        }
        let (base, l) = self.view(input);
        (base, l.expand(shape).collapse())
    }

    /// Marks the nodes that the roots, State writes and effects depend on.
    pub fn reachable(&self) -> Vec<bool> {
        let mut reached = vec![false; self.graph.len()];
        for id in self.roots.iter().chain(&self.state_writes).chain(&self.effects) {
            reached[id.index()] = true;
        }
        for i in (0..reached.len()).rev() {
            if reached[i] {
                for x in &self.graph.nodes()[i].inputs {
                    reached[x.index()] = true;
                }
            }
        }
        reached
    }
}
