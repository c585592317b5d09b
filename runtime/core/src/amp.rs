//! Mixed precision as a policy recorded at the call: which ops run in 16 bits, which are f32 islands.
//!
//! Each op declares its class; under `autocast` the graph casts that op's float inputs when it is recorded, so what
//! runs is visible in the graph and in the plan key, and backward passes follow from it.

use crate::error::Result;
use crate::graph::{Graph, Inputs, NodeId};
use crate::{DType, ops};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Amp {
    /// Runs in whatever dtype comes in.
    Keep,
    /// Safe and fast in 16 bits: matmul, convolutions, attention.
    Low,
    /// Needs f32: losses, sums of many terms, exp-like functions of large range.
    Full,
}

/// The inputs of an op of class `amp` under autocast to `low`.
pub(crate) fn cast_inputs(g: &mut Graph, amp: Amp, low: DType, inputs: &[NodeId]) -> Result<Inputs> {
    let target = if amp == Amp::Low { low } else { DType::F32 };
    g.without_autocast(|g| {
        let mut out = Inputs::new();
        for &id in inputs {
            let dtype = g.dtype(id);
            // f64 is asked for by name and stays; integers and bools are indices and masks.
            let casts = dtype.is_float() && dtype != DType::F64 && dtype != target;
            out.push(if casts { ops::cast(g, id, target)? } else { id });
        }
        Ok(out)
    })
}
