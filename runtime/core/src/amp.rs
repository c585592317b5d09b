//! Defines mixed precision (autocast) as a policy applied when an op is recorded: which ops run in 16 bits, and which
//! stay in f32.
//!
//! Each op declares its class. Under `autocast`, the graph casts the op's float inputs when it is recorded, so the
//! casts are visible in the graph and in the plan key, and backward passes follow from them.

use crate::error::Result;
use crate::graph::{Graph, Inputs, NodeId};
use crate::{DType, ops};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Amp {
    /// Runs in the dtype of its inputs.
    Keep,
    /// Safe and fast in 16 bits: matmul, convolutions, attention.
    Low,
    /// Needs f32: losses, sums of many terms, exp-like functions of large range.
    Full,
}

/// Casts the inputs of an op of class `amp` under autocast to `low`.
pub(crate) fn cast_inputs(g: &mut Graph, amp: Amp, low: DType, inputs: &[NodeId]) -> Result<Inputs> {
    let target = if amp == Amp::Low { low } else { DType::F32 };
    g.without_autocast(|g| {
        let mut out = Inputs::new();
        for &id in inputs {
            let dtype = g.dtype(id);
            // f64 is only used on request and is kept; integers and bools are indices and masks.
            let casts = dtype.is_float() && dtype != DType::F64 && dtype != target;
            out.push(if casts { ops::cast(g, id, target)? } else { id });
        }
        Ok(out)
    })
}
