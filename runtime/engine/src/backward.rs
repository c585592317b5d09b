//! Computes gradients of States: runs the reverse pass over the recording and accumulates the gradient of each State.

use crate::engine::Engine;
use crate::recorder::Deferred;
use crate::state::StateId;
use perilune_core::DType;
use perilune_core::error::{Error, Result};
use perilune_core::grad::Backward;
use perilune_core::graph::NodeId;

impl Engine {
    /// Returns the gradient that `backward` has accumulated for a State in this step.
    pub fn state_grad(&mut self, id: StateId) -> Result<Option<NodeId>> {
        let Some(held) = self.states.get_mut(id)?.grad.take() else { return Ok(None) };
        let node = self.recorder.held_grad(&held);
        self.states.get_mut(id)?.grad = Some(Deferred::Node(node));
        Ok(Some(node))
    }

    pub fn set_state_grad(&mut self, id: StateId, grad: Option<NodeId>) -> Result<()> {
        let state = self.states.get(id)?;
        if let Some(g) = grad
            && self.recorder.graph.shape(g) != state.about.desc.shape
        {
            let (got, want, name) = (self.recorder.graph.shape(g), state.about.desc.shape, state.name());
            return Err(Error::shape("grad", format!("a gradient of shape {got} for a State of shape {want}{name}")));
        }
        self.states.get_mut(id)?.grad = grad.map(Deferred::Node);
        Ok(())
    }

    /// Begins the pass that adds gradients of `y` (seeded with `seed`, or ones for a scalar) to every trainable State.
    ///
    /// The caller drives the [`Backward`] (functions of the host stop it) and hands both back to `end_backward`.
    pub fn begin_backward(
        &mut self,
        y: NodeId,
        seed: Option<NodeId>,
        create_graph: bool,
    ) -> Result<(Backward, Vec<StateId>)> {
        let seed = self.seed_for("backward", y, seed)?;
        let reads: Vec<(NodeId, StateId)> =
            self.states.reads().filter(|(_, s)| self.states.get(*s).is_ok_and(|s| s.trainable)).collect();
        let wrt: Vec<NodeId> = reads.iter().map(|r| r.0).collect();
        Ok((
            Backward::new(&mut self.recorder.graph, y, seed, &wrt, create_graph),
            reads.into_iter().map(|r| r.1).collect(),
        ))
    }

    /// Stores the gradients of a finished pass and returns the number of States that have one.
    pub fn end_backward(&mut self, pass: Backward, states: Vec<StateId>) -> Result<usize> {
        let grads = pass.finish(&mut self.recorder.graph)?;
        let mut reached = 0;
        for (id, d) in states.into_iter().zip(grads) {
            let Some(d) = d else { continue };
            reached += 1;
            let before = self.state_grad(id)?;
            let sum = match before {
                Some(b) => self.recorder.graph.with_no_grad(true, |g| g.add_(b, d))?,
                None => d,
            };
            self.states.get_mut(id)?.grad = Some(Deferred::Node(sum));
        }
        if reached == 0 {
            return Err(Error::gradient("backward", "the tensor depends on no trainable State")
                .hint("make weights with pl.state(t), and check for detach, no_grad or integer dtypes on the way"));
        }
        Ok(reached)
    }

    /// Runs `begin_backward` to `end_backward` for a graph without host functions.
    pub fn backward(&mut self, y: NodeId, seed: Option<NodeId>, create_graph: bool) -> Result<usize> {
        let (mut pass, states) = self.begin_backward(y, seed, create_graph)?;
        if pass.advance(&mut self.recorder.graph)?.is_some() {
            return Err(Error::gradient("custom", "a custom function needs its host to run its backward"));
        }
        self.end_backward(pass, states)
    }

    /// Begins a pass for gradients of `y` with respect to any nodes.
    pub fn begin_grad(
        &mut self,
        y: NodeId,
        seed: Option<NodeId>,
        wrt: &[NodeId],
        create_graph: bool,
    ) -> Result<Backward> {
        let seed = self.seed_for("grad", y, seed)?;
        Ok(Backward::new(&mut self.recorder.graph, y, seed, wrt, create_graph))
    }

    fn seed_for(&mut self, op: &str, y: NodeId, seed: Option<NodeId>) -> Result<NodeId> {
        let (shape, dtype) = (self.recorder.graph.shape(y), self.recorder.graph.dtype(y));
        if !dtype.is_float() {
            let article = if matches!(dtype, DType::I64 | DType::I32) { "an" } else { "a" };
            return Err(Error::gradient(op, format!("{article} {dtype} tensor has no gradient"))
                .hint("comparisons, argmax and casts to integers have no gradient: compute the loss from floats"));
        }
        match seed {
            Some(s) if self.recorder.graph.shape(s) != shape => Err(Error::shape(
                op,
                format!("the gradient's shape {} must be the tensor's {shape}", self.recorder.graph.shape(s)),
            )),
            Some(s) => self.recorder.graph.cast(s, dtype),
            None if shape.numel() != 1 => Err(Error::shape(op, format!("needs a scalar, not shape {shape}"))
                .hint("sum or average it first, or pass a gradient of its shape")),
            None => self.recorder.graph.filled(1.0, shape, dtype),
        }
    }
}
