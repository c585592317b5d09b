//! Makes guarded State writes conditional: each becomes `where(ok, new, old)`, with the old value read from the State.

use crate::lowered::Lowered;
use perilune_core::error::Result;
use perilune_core::graph::NodeId;
use perilune_core::ops::create;
use rustc_hash::FxHashMap;

/// Rewrites the State writes that `guarded` marks. `inputs`: which input each State write overwrites.
pub fn apply(mut step: Lowered, guarded: &[bool], inputs: &[u32]) -> Result<Lowered> {
    let Some(ok) = step.ok.take() else { return Ok(step) };
    let mut leaves: FxHashMap<u32, NodeId> = FxHashMap::default();
    for (leaf, input) in &step.inputs {
        // Uses the first leaf of each input, so that the map's iteration order has no effect.
        leaves.entry(*input).and_modify(|first| *first = (*first).min(*leaf)).or_insert(*leaf);
    }
    for (i, input) in inputs.iter().enumerate().filter(|(i, _)| guarded[*i]) {
        let new = step.state_writes[i];
        let (shape, dtype) = (step.graph.shape(new), step.graph.dtype(new));
        step.graph.modes.loc = step.graph.loc_of(new);
        let old = match leaves.get(input).filter(|leaf| step.graph.shape(**leaf) == shape) {
            Some(leaf) => *leaf,
            None => {
                let leaf = step.graph.leaf(&create::LEAF, shape, dtype, &[], u64::from(*input));
                step.inputs.insert(leaf, *input);
                leaf
            }
        };
        step.state_writes[i] = step.graph.where_(ok, new, old)?;
    }
    Ok(step)
}
