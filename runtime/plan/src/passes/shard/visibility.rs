//! Appends attention to blocks of keys, and says which of them the queries see, from the positions of both in the whole sequence.
//!
//! Causal masks and windows are attributes of a block, with the distance of its queries and keys as an operand where they differ, and
//! documents are operands with an id for each query and each key: kernels need no tensor of T x S elements. Padding without a causal mask
//! is such a tensor.

use super::attention::{Attention, WINDOW};
use super::divider::Divider;
use super::part::Part;
use perilune_core::error::{Error, Result};
use perilune_core::graph::{Attrs, Inputs, NodeId};
use perilune_core::ops::attention_block::{ATTENTION_BLOCK, ATTENTION_BLOCK_BACKWARD, MOST_POSITIONS, block_attrs};
use perilune_core::ops::{elementwise, index};
use smallvec::smallvec;

/// What hides keys from queries: the same for all blocks of one attention node.
pub(super) struct Visibility {
    /// Attributes of the node, and whether its products may round to TF32.
    attrs: Attrs,
    tf32: bool,
    window: i64,
    /// Positions of the whole sequence.
    size: usize,
    /// The documents of all positions, with their last dim.
    documents: Option<(NodeId, usize)>,
}

/// What of a block of keys may be hidden by position alone.
#[derive(Clone, Copy, Default)]
pub(super) struct Hidden {
    /// Keys behind a query.
    pub later: bool,
    /// Keys that are padding. A causal mask hides them from all queries but padding.
    pub padding: bool,
}

/// Adjacent positions: the first as a scalar, and all of them.
#[derive(Clone, Copy)]
pub(super) struct Places {
    pub first: NodeId,
    pub all: NodeId,
}

impl Divider<'_> {
    pub(super) fn visibility(&mut self, a: &Attention) -> Result<Visibility> {
        let node = self.graph().node(a.id);
        let shape = self.graph().shape(node.inputs[0]);
        let documents = match a.documents {
            Some(k) => {
                let last = self.graph().shape(node.inputs[k]).rank() - 1;
                Some((self.part(node.inputs[k], Part::Whole)?, last))
            }
            None => None,
        };
        let (window, size) = (node.attrs[WINDOW], shape.dims()[a.queries.dim]);
        if size > MOST_POSITIONS {
            let message = format!("{size} positions along {}; split sequences have at most 2^29", self.axis.name());
            return Err(Error::shape(node.op.name, message).hint("split the batch into shorter sequences"));
        }
        let (attrs, tf32) = (node.attrs.clone(), node.tf32);
        Ok(Visibility { attrs, tf32, window, size, documents })
    }

    /// The positions of the block of so many elements of the device at a coordinate.
    pub(super) fn places(&mut self, coordinate: NodeId, block: usize) -> Result<Places> {
        let g = &mut self.to.out.graph;
        let size = g.int_constant(block as i64);
        let first = g.mul(coordinate, size)?;
        let ramp = g.iota_along(block, 0, 1)?;
        Ok(Places { first, all: g.add_(ramp, first)? })
    }

    /// Attends to a block of keys, forward or backward. `rows`: the operands that belong to queries, which are the queries, and backward
    /// the gradient of their result, its products with the result, and lse. `at`: positions of queries and keys, equal if the nodes are.
    pub(super) fn attend(
        &mut self,
        rule: &Visibility,
        rows: &[NodeId],
        kv: [NodeId; 2],
        at: [Places; 2],
        hidden: Hidden,
    ) -> Result<NodeId> {
        let mut inputs: Inputs = smallvec![rows[0], kv[0], kv[1]];
        inputs.extend_from_slice(&rows[1..]);
        if hidden.padding && !hidden.later {
            inputs.push(self.before_padding(rule, at[1])?);
        }
        for places in at {
            inputs.extend(self.documents_at(rule, places)?);
        }
        let g = &mut self.to.out.graph;
        let masked = hidden.later || rule.window != 0;
        let shifted = masked && at[0].first != at[1].first;
        if shifted {
            inputs.push(g.sub(at[0].first, at[1].first)?);
        }
        let op = if rows.len() == 1 { &ATTENTION_BLOCK } else { &ATTENTION_BLOCK_BACKWARD };
        let attrs = block_attrs(&rule.attrs, masked, rule.window, shifted);
        let tf32 = std::mem::replace(&mut g.modes.tf32, rule.tf32);
        let found = g.push(op, &inputs, &attrs);
        g.modes.tf32 = tf32;
        found
    }

    /// Which keys are no padding: a bool (1, S).
    fn before_padding(&mut self, rule: &Visibility, keys: Places) -> Result<NodeId> {
        let g = &mut self.to.out.graph;
        let size = g.int_constant(rule.size as i64);
        let j = g.unsqueeze(keys.all, 0)?;
        g.lt(j, size)
    }

    /// The documents of positions, if there are any. Padding has that of the last position.
    fn documents_at(&mut self, rule: &Visibility, places: Places) -> Result<Option<NodeId>> {
        let Some((documents, dim)) = rule.documents else { return Ok(None) };
        let g = &mut self.to.out.graph;
        let last = g.int_constant(rule.size as i64 - 1);
        let ids = g.map(&elementwise::MINIMUM, &[places.all, last])?;
        g.push(&index::INDEX_SELECT, &[documents, ids], &[dim as i64, index::OF_PLANNER]).map(Some)
    }
}
