//! Guards States against non-finite values, and finds the op that made the first of them.

use crate::engine::{Engine, Fault};
use crate::state::StateId;
use perilune_core::error::Result;
use perilune_core::graph::NodeId;
use perilune_core::ops::create;
use perilune_core::source_loc::SourceLoc;
use perilune_core::{DType, Shape};

/// The origin of a NaN or infinity.
#[derive(Clone, Debug)]
pub struct NotFinite {
    /// The op that made it from finite inputs.
    pub op: &'static str,
    pub shape: Shape,
    pub loc: SourceLoc,
    pub nan: bool,
    /// The State that already contained it.
    pub state: Option<StateId>,
    /// Whether it was in input data.
    pub input: bool,
}

/// The flag that `probe` computes for a NaN.
const NAN: u8 = 2;
/// The maximum number of nodes; planning more would take too long.
const MOST: usize = 20_000;

impl Engine {
    /// Makes every assignment of the open step conditional on `ok`, a bool scalar: if it is false on the device, the States
    /// keep their values from before the step. Initial values of new States are not affected, and reads within the step
    /// return the assigned values. It records nothing: the planner inserts the selects.
    pub fn guard(&mut self, ok: NodeId) {
        self.states.guard = Some(ok);
    }

    /// Finds the op that made the NaN or infinity of the first non-finite root from finite inputs. Evaluates every float that
    /// the roots need, and changes nothing.
    ///
    /// The search follows non-finite inputs from the root. An infinity counts only if an op computed it (exp, a
    /// division); a constant infinity in the recipe, as in masks, is legal.
    pub fn not_finite(&mut self, roots: &[NodeId]) -> std::result::Result<Option<NotFinite>, Fault> {
        let mut needed = vec![false; self.recorder.graph.len()];
        roots.iter().for_each(|r| needed[r.index()] = true);
        // Inputs have smaller ids than their readers.
        for i in (0..needed.len()).rev() {
            if needed[i] {
                self.recorder.graph.node(NodeId(i as u32)).inputs.iter().for_each(|x| needed[x.index()] = true);
            }
        }
        let nodes: Vec<NodeId> = (0..needed.len() as u32).map(NodeId).filter(|id| needed[id.index()]).collect();
        if nodes.len() > MOST {
            return Ok(None);
        }
        let mut probes = Vec::new();
        for id in nodes {
            let (shape, dtype) = (self.recorder.graph.shape(id), self.recorder.graph.dtype(id));
            if dtype.is_float() && shape.numel() > 0 {
                probes.push((id, self.probe(id, shape)?));
            }
        }
        self.evaluate(&probes.iter().map(|p| p.1).collect::<Vec<_>>())?;
        let mut found = vec![0u8; self.recorder.graph.len()];
        for (id, probe) in probes {
            found[id.index()] = self.read_node(probe)?.get_f64(0) as u8;
        }
        let Some(root) = roots.iter().copied().find(|r| found[r.index()] > 0) else { return Ok(None) };
        let id = self.origin(root, &found);
        let node = self.recorder.graph.node(id);
        let is_state = node.op == &create::STATE;
        Ok(Some(NotFinite {
            op: node.op.name,
            shape: node.shape,
            loc: self.recorder.graph.loc_of(id),
            nan: found[id.index()] == NAN,
            state: is_state.then_some(StateId(node.payload)),
            input: node.inputs.is_empty() && !is_state,
        }))
    }

    /// Computes 2 if `x` has a NaN, else 1 if it has an infinity, else 0.
    fn probe(&mut self, x: NodeId, shape: Shape) -> Result<NodeId> {
        self.recorder.graph.with_no_grad(true, |g| {
            let [zero, one, two] = [0.0, 1.0, 2.0].map(|v| g.constant(v, DType::F32));
            let (inf, nan) = (g.isinf(x)?, g.isnan(x)?);
            let code = g.where_(inf, one, zero)?;
            let code = g.where_(nan, two, code)?;
            let dims: Vec<usize> = (0..shape.rank()).collect();
            if dims.is_empty() { Ok(code) } else { g.max(code, &dims, false) }
        })
    }

    fn origin(&self, root: NodeId, found: &[u8]) -> NodeId {
        let mut at = root;
        loop {
            let inputs = &self.recorder.graph.node(at).inputs;
            if let Some(nan) = inputs.iter().find(|x| found[x.index()] == NAN) {
                at = *nan;
                continue;
            }
            let made = inputs.iter().filter(|x| found[x.index()] > 0).find_map(|x| self.made(*x, found));
            return made.unwrap_or(at);
        }
    }

    /// Returns the op that made an infinity, if all its inputs were finite.
    fn made(&self, start: NodeId, found: &[u8]) -> Option<NodeId> {
        let mut at = start;
        loop {
            let node = self.recorder.graph.node(at);
            if node.inputs.is_empty() {
                return (node.op == &create::STATE).then_some(at);
            }
            match node.inputs.iter().find(|x| found[x.index()] > 0) {
                Some(x) => at = *x,
                None => return Some(at),
            }
        }
    }
}
