//! Keeps 16-bit shadow weights. In mixed precision a step casts each weight before it uses it; instead, a State that
//! such a step updates has a 16-bit copy, which the update also writes, and the cast becomes a read of the copy, as it does in what is
//! evaluated between updates. The values are those of the cast, to the bit.
//!
//! A copy is a State that is private to this file: the planner gets a leaf in place of the cast, and one more write, under the same
//! guard. If its State is written without it, a separate plan casts it again.

use crate::engine::{Engine, Fault};
use crate::state::StateId;
use perilune_core::DType;
use perilune_core::error::Result;
use perilune_core::graph::NodeId;
use perilune_core::ops::{cast, create};
use perilune_plan::Request;
use rustc_hash::FxHashMap;

/// A shadow weight: the copy of a State in one dtype.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShadowWeight {
    pub state: StateId,
    /// Whether it is the State's value.
    pub valid: bool,
}

/// The requests that end a step, each of which becomes a program.
pub(crate) struct StepRequests {
    /// What runs first, in order.
    pub before: Vec<Request>,
    /// The step's own: its results, and the writes of its States.
    pub own: Request,
}

impl StepRequests {
    /// All of them, in the order in which they run.
    pub fn iter(&self) -> impl Iterator<Item = &Request> {
        self.before.iter().chain([&self.own])
    }
}

impl Engine {
    /// Returns the requests that run for `request`: it with its copies added, after the writes that make copies valid.
    pub(crate) fn step_requests(&mut self, mut request: Request) -> Result<StepRequests> {
        let before = self.add_copies(&mut request)?;
        let before = if before.state_writes.is_empty() { Vec::new() } else { vec![before] };
        Ok(StepRequests { before, own: request })
    }

    /// Adds the copies to a request: casts that become reads of copies, and the writes of copies. Returns the writes that must
    /// come first, to make copies valid.
    fn add_copies(&mut self, request: &mut Request) -> Result<Request> {
        let mut first = Request::default();
        if request.state_writes.is_empty() && !self.states.has_copies() {
            return Ok(first);
        }
        let casts = self.casts();
        if casts.is_empty() {
            return Ok(first);
        }
        let mut state_writes: FxHashMap<u64, usize> =
            request.state_writes.iter().enumerate().map(|(at, c)| (c.0, at)).collect();
        for (cast, base, dtype) in casts {
            let Some(&at) = state_writes.get(&base) else {
                request.copies.extend(self.states.valid_copy(base, dtype).map(|state| (cast, state.0)));
                continue;
            };
            let ShadowWeight { state, valid } = self.states.copy(base, self.recorder.graph.shape(cast), dtype);
            request.copies.push((cast, state.0));
            if state_writes.insert(state.0, request.state_writes.len()).is_some() {
                continue; // another cast of the same State
            }
            if !valid {
                first.state_writes.push((state.0, cast));
            }
            let new = request.state_writes[at].1;
            let of_new = self.recorder.graph.loc_of(new);
            let mut g = self.recorder.graph.scope();
            (g.modes.loc, g.modes.no_grad) = (of_new, true);
            let low = g.cast(new, dtype)?;
            drop(g);
            request.state_writes.push((state.0, low));
            if let Some(guard) = &mut request.guard {
                guard.state_writes.push(guard.state_writes[at]);
            }
        }
        Ok(first)
    }

    /// The casts of States as they are when the step begins, in order: node, payload of the State, dtype.
    fn casts(&self) -> Vec<(NodeId, u64, DType)> {
        let graph = &self.recorder.graph;
        if !graph.has_half() {
            return Vec::new();
        }
        let cast = |id: NodeId| {
            let node = graph.node(id);
            let is_low = node.op == &cast::CAST && matches!(node.dtype, DType::BF16 | DType::F16);
            let from = is_low.then(|| graph.node(node.inputs[0]))?;
            (from.op == &create::STATE && from.dtype == DType::F32).then_some((id, from.payload, node.dtype))
        };
        graph.ids().filter_map(cast).collect()
    }

    /// Runs the requests that end a step, and returns its own one.
    pub(crate) fn run_step(&mut self, request: Request) -> std::result::Result<Request, Fault> {
        let StepRequests { before, own } = self.step_requests(request)?;
        for request in &before {
            self.run(request)?;
        }
        // A failed run may have written some of them.
        self.states.set_copies(&own, false);
        self.run(&own)?;
        self.states.set_copies(&own, true);
        Ok(own)
    }
}
