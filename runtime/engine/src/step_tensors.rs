//! Computes the tensors of a recorded step one after another, for comparing two runs tensor by tensor.
//!
//! The step as it trains stores few of them: fusion keeps most in registers. Here each is stored, read and released again, so memory
//! holds only those that later ones need. Views are left out: they have the elements of their inputs.

use crate::engine::{Engine, Fault};
use crate::state::StateId;
use perilune_core::graph::NodeId;
use perilune_core::ops::{Class, Generator, create};
use perilune_core::source_loc::SourceLoc;
use perilune_core::{DType, HostTensor, Shape};

/// A tensor of a step.
#[derive(Debug)]
pub struct StepTensor<'a> {
    pub op: &'static str,
    pub dtype: DType,
    pub shape: Shape,
    pub loc: SourceLoc,
    /// The State that it reads.
    pub state: Option<StateId>,
    pub content: Content<'a>,
}

/// The value of a tensor.
#[derive(Debug)]
pub enum Content<'a> {
    Elements(&'a HostTensor),
    /// The bits of a number that is part of the program, or given to it: f64, or i64 for integers.
    Number(u64),
}

/// Bytes that are computed at a time.
const CHUNK: usize = 256 << 20;
/// The most tensors computed at a time: one plan has them all.
const TOGETHER: usize = 256;

impl Engine {
    /// Calls `visit` with every tensor that the open step's assignments and `roots` need, in the order in which they were recorded.
    /// No State changes.
    ///
    /// # Errors
    /// A tensor cannot be computed.
    pub fn each_tensor(
        &mut self,
        roots: &[NodeId],
        visit: &mut dyn FnMut(StepTensor<'_>),
    ) -> std::result::Result<(), Fault> {
        let mut wanted: Vec<NodeId> = self.states.pending().iter().map(|write| write.1).collect();
        wanted.extend_from_slice(roots);
        let nodes = self.needed(&wanted);
        let (mut chunk, mut bytes) = (Vec::new(), 0);
        for (k, id) in nodes.iter().enumerate() {
            let node = self.recorder.graph.node(*id);
            chunk.push(*id);
            bytes += node.shape.numel() * node.dtype.size();
            if bytes >= CHUNK || chunk.len() == TOGETHER || k + 1 == nodes.len() {
                self.visit(&chunk, visit)?;
                self.recorder.drop_unreachable(&wanted, true);
                (bytes, _) = (0, chunk.clear());
            }
        }
        Ok(())
    }

    /// Returns the nodes that `wanted` reads, without views.
    fn needed(&self, wanted: &[NodeId]) -> Vec<NodeId> {
        let graph = &self.recorder.graph;
        let mut needed = vec![false; graph.len()];
        wanted.iter().for_each(|id| needed[id.index()] = true);
        // Inputs have smaller ids than their readers.
        for i in (0..needed.len()).rev() {
            if needed[i] {
                graph.node(NodeId(i as u32)).inputs.iter().for_each(|x| needed[x.index()] = true);
            }
        }
        let has_values = |id: &NodeId| {
            let iota = matches!(graph.node(*id).op.class, Class::Generator(Generator::Iota));
            !iota && !matches!(graph.node(*id).op.class, Class::View(_))
        };
        (0..needed.len() as u32).map(NodeId).filter(|id| needed[id.index()] && has_values(id)).collect()
    }

    fn visit(&mut self, ids: &[NodeId], visit: &mut dyn FnMut(StepTensor<'_>)) -> std::result::Result<(), Fault> {
        let numbers: Vec<Option<u64>> = ids.iter().map(|id| self.number(*id)).collect();
        let computed = ids.iter().zip(&numbers).filter(|(_, number)| number.is_none());
        self.evaluate(&computed.map(|(id, _)| *id).collect::<Vec<_>>())?;
        for (id, number) in ids.iter().zip(numbers) {
            let node = self.recorder.graph.node(*id);
            let state = (node.op == &create::STATE).then_some(StateId(node.payload));
            let (op, dtype, shape, loc) = (node.op.name, node.dtype, node.shape, self.recorder.graph.loc_of(*id));
            let value = if number.is_none() { Some(self.read_node(*id)?) } else { None };
            let content = match (&value, number) {
                (Some(value), _) => Content::Elements(value),
                (None, bits) => Content::Number(bits.unwrap_or_default()),
            };
            visit(StepTensor { op, dtype, shape, loc, state, content });
        }
        Ok(())
    }

    /// Returns the bits of a number.
    fn number(&self, id: NodeId) -> Option<u64> {
        let node = self.recorder.graph.node(id);
        match node.op.class {
            Class::Generator(Generator::Scalar) => Some(node.payload),
            Class::Generator(Generator::Constant) => Some(node.attrs.first().copied().unwrap_or_default() as u64),
            _ => None,
        }
    }
}
