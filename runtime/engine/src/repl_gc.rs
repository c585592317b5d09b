//! Collects garbage for a prompt: releases, between two lines, values that no line can reach any more. Also counts the cost
//! of an evaluation.
//!
//! A line of a prompt does not end a step: a loss recorded in one line may meet its `backward` in a later one. So a
//! generation ends here only if no live handle has a history that could still be needed. Otherwise the nodes
//! stay (they are small, and a long recording is flushed as usual), and only values are released.

use crate::engine::{Engine, Fault};
use crate::recorder::{Deferred, Handle};
use perilune_core::graph::NodeId;
use perilune_core::ops::create;
use perilune_plan::show::{Cost, cost};
use perilune_plan::{Request, pipeline};
use std::collections::HashSet;

impl Engine {
    /// Releases everything that neither a handle nor a pending assignment can reach, with its history. The caller collects garbage
    /// first. Nothing is evaluated; inside a step nothing happens.
    pub fn tidy(&mut self) {
        if self.in_step() {
            return;
        }
        self.states.drop_unborn();
        let held = self.recorder.held();
        let mut wanted: Vec<NodeId> = self.states.pending().iter().map(|c| c.1).collect();
        let grads = self.states.grads_mut().filter_map(|g| match g {
            Deferred::Node(id) => Some(*id),
            Deferred::Value(_) => None,
        });
        wanted.extend(grads);
        let plain = wanted.is_empty();
        let mut reached = vec![false; self.recorder.graph.len()];
        wanted.iter().chain(&held).for_each(|id| reached[id.index()] = true);
        // Whether a live handle has a history that a gradient could pass through: a State, or another
        // handle, among its ancestors; or whether it has no value yet.
        let mut history = false;
        let mut above = vec![false; self.recorder.graph.len()];
        let carried: HashSet<NodeId> = self.recorder.carried_leaves().collect();
        for i in (0..reached.len()).rev() {
            let id = NodeId(i as u32);
            if !reached[i] && !above[i] {
                continue;
            }
            let node = self.recorder.graph.node(id);
            let is_held = self.recorder.is_held(id) || carried.contains(&id);
            history |= above[i] && (is_held || node.op == &create::STATE);
            history |= is_held && !self.recorder.has_value(id) && node.op != &create::LEAF;
            for x in &node.inputs {
                above[x.index()] = true;
            }
        }
        if plain && !history {
            self.states.written(true);
            self.recorder.end_generation();
            return;
        }
        let mut needed = HashSet::new();
        for i in 0..reached.len() {
            if !reached[i] && !above[i] {
                self.recorder.forget_value(NodeId(i as u32));
            } else if let Some(uid) = self.recorder.uid_of(NodeId(i as u32)) {
                needed.insert(uid);
            }
        }
        self.recorder.retain_live(|uid| needed.contains(&uid));
    }

    /// Returns the kernels of evaluating `ids`, and their total cost, as if all nodes before `from` were in memory.
    pub fn cost_since(&mut self, from: NodeId, ids: &[NodeId]) -> Result<(usize, Cost), Fault> {
        let request = Request { roots: ids.to_vec(), ..Request::default() };
        // No value has this number.
        self.trace(&request, |id| (id < from).then_some((1 << 63) | u64::from(id.0)));
        let options = perilune_plan::Options { budget: None, ..self.options() };
        // Decomposed into primitives, so that the work of every op is counted.
        let program = pipeline::plan(&self.recorder.graph, self.tracer(), &request, options, &perilune_plan::Null)?;
        let total = program.kernels.iter().map(|k| cost(&program, k)).fold(Cost::default(), Cost::plus);
        Ok((program.kernels.len(), total))
    }

    /// Returns whether a handle's value is recorded and not computed.
    pub fn is_pending(&self, h: Handle) -> bool {
        h.generation == self.recorder.generation() && self.is_unevaluated(h.id)
    }

    /// Returns the number of values that are recorded, held by the script, and not computed.
    pub fn pending_handles(&self) -> usize {
        self.recorder.held().into_iter().filter(|id| self.is_unevaluated(*id)).count()
    }

    fn is_unevaluated(&self, id: NodeId) -> bool {
        let op = self.recorder.graph.node(id).op;
        op != &create::LEAF && op != &create::STATE && !self.recorder.has_value(id)
    }

    /// Returns the trainable States that `id` depends on, in order of creation.
    pub fn states_below(&self, id: NodeId) -> Vec<crate::StateId> {
        let mut reached = vec![false; id.index() + 1];
        reached[id.index()] = true;
        for i in (0..reached.len()).rev() {
            if reached[i] {
                self.recorder.graph.node(NodeId(i as u32)).inputs.iter().for_each(|x| reached[x.index()] = true);
            }
        }
        self.states.read_by(|node| reached.get(node.index()).is_some_and(|r| *r))
    }
}
