//! Describes one evaluation request: the values to return, the States to overwrite and the guard on those writes.

use crate::pipelining::Schedule;
use perilune_core::graph::NodeId;
use perilune_core::mesh::Axis;
use perilune_core::{Mesh, Placement};

/// The results and State writes of one evaluation.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Nodes whose values are returned.
    pub roots: Vec<NodeId>,
    /// (payload of the State, its new value). The writes take effect after every read of the old values. A new value
    /// has its State's numel and dtype.
    pub state_writes: Vec<(u64, NodeId)>,
    /// Makes State writes conditional on a bool that the device computes.
    pub guard: Option<Guard>,
    /// (node, payload of a State that already holds its value): the node is read, not computed. Sorted by node.
    pub copies: Vec<(NodeId, u64)>,
}

impl Request {
    /// Whether it asks for the same nodes as `other`.
    pub(crate) fn repeats(&self, other: &Request) -> bool {
        let Request { roots, state_writes, guard, copies } = other;
        self.state_writes == *state_writes && self.roots == *roots && self.guard == *guard && self.copies == *copies
    }
}

/// Makes State writes conditional on a bool that the device computes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Guard {
    /// A scalar bool. If it is false, the guarded States keep their values.
    pub ok: NodeId,
    /// For each State write, whether the guard applies to it.
    pub state_writes: Vec<bool>,
}

/// Identifies a buffer that a program reads. Payloads of leaves and of States are numbered separately.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum InputBuffer {
    Leaf(u64),
    State(u64),
}

/// How attention with split queries gets the keys of other devices.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum KeyExchange {
    /// By shapes.
    #[default]
    Auto,
    /// Devices exchange positions for heads.
    Heads,
    /// Every device gathers all keys.
    Gather,
    /// Devices pass on blocks of keys.
    Ring,
}

impl KeyExchange {
    pub const ALL: [KeyExchange; 4] = [KeyExchange::Auto, KeyExchange::Heads, KeyExchange::Gather, KeyExchange::Ring];

    pub fn name(self) -> &'static str {
        ["auto", "heads", "gather", "ring"][self as usize]
    }
}

/// A mesh, and what each of its devices has of the inputs of a step.
#[derive(Clone, Debug, Default)]
pub struct Division {
    pub mesh: Mesh,
    /// In the order of `Trace::inputs`. What is written to a State has the State's placement.
    pub inputs: Vec<Placement>,
    /// Divides the batch into so many logical shards, whatever the number of devices, and adds their sums in a fixed tree
    /// (`passes::shard::strict`).
    pub strict: Option<usize>,
    /// How attention whose queries are split gets its keys.
    pub keys: KeyExchange,
    /// Whether the whole of a weight that is stored in blocks is kept to the end of the step, instead of gathered again for the
    /// backward pass.
    pub keeps_weights: bool,
    /// How pipeline stages take turns; without an axis `pp` it has no effect.
    pub schedule: Schedule,
}

impl Division {
    /// The words of a plan key: the mesh, the logical shards, the placement of each input, and how the step is divided.
    pub(crate) fn words(&self) -> impl Iterator<Item = u64> + '_ {
        let sizes = Axis::ALL.iter().map(|axis| self.mesh.size(*axis) as u64);
        let schedule = if self.mesh.size(Axis::Pp) > 1 { self.schedule.words() } else { Vec::new() };
        let choices = [self.strict.unwrap_or(0) as u64, self.keys as u64, u64::from(self.keeps_weights)];
        sizes.chain(choices).chain(self.inputs.iter().flat_map(Placement::words)).chain(schedule)
    }
}
