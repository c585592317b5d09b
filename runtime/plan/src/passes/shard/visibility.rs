//! Computes which keys the queries of attention see, from the positions of both in the whole sequence.

use super::attention::{Attention, WINDOW};
use super::divider::Divider;
use super::part::Part;
use perilune_core::DType;
use perilune_core::error::Result;
use perilune_core::graph::NodeId;
use perilune_core::ops::{elementwise, index};

/// What hides keys from queries: the same for all blocks of one attention node.
pub(super) struct Visibility {
    window: i64,
    /// Positions of the whole sequence.
    size: usize,
    /// The documents of all positions, with their last dim.
    documents: Option<(NodeId, usize)>,
    heads: bool,
}

/// What of a block of keys may be hidden by position alone.
#[derive(Clone, Copy, Default)]
pub(super) struct Hidden {
    /// Keys behind a query.
    pub later: bool,
    /// Keys that are padding.
    pub padding: bool,
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
        Ok(Visibility { window, size, documents, heads: shape.rank() > 2 })
    }

    /// Which keys at the positions `keys` (S) the queries at `queries` (T) see, as a bool (.., T, S); all of them if `None`.
    pub(super) fn seen(
        &mut self,
        rule: &Visibility,
        queries: NodeId,
        keys: NodeId,
        hidden: Hidden,
    ) -> Result<Option<NodeId>> {
        let g = &mut self.to.out.graph;
        let (i, j) = (g.unsqueeze(queries, 1)?, g.unsqueeze(keys, 0)?);
        let mut all = Vec::new();
        if hidden.later {
            all.push(g.le(j, i)?);
        }
        if rule.window != 0 {
            let edge = g.add_c(i, -rule.window as f64)?;
            all.push(g.gt(j, edge)?);
        }
        if hidden.padding {
            let size = g.int_constant(rule.size as i64);
            all.push(g.lt(j, size)?);
        }
        if let Some((documents, dim)) = rule.documents {
            let last = g.int_constant(rule.size as i64 - 1);
            let mut of = |ids: NodeId| {
                let ids = g.map(&elementwise::MINIMUM, &[ids, last])?;
                g.push(&index::INDEX_SELECT, &[documents, ids], &[dim as i64, index::OF_PLANNER])
            };
            let (own, theirs) = (of(queries)?, of(keys)?);
            let (own, theirs) = (g.unsqueeze(own, dim + 1)?, g.unsqueeze(theirs, dim)?);
            let mut same = g.eq(own, theirs)?;
            if rule.heads {
                same = g.unsqueeze(same, dim)?;
            }
            all.push(same);
        }
        let mut seen = None;
        for one in all {
            seen = Some(match seen {
                Some(before) => g.logical_and(before, one)?,
                None => one,
            });
        }
        debug_assert!(seen.is_none_or(|x| g.dtype(x) == DType::Bool));
        Ok(seen)
    }
}
