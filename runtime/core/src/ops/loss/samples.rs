//! Computes the loss of each sample of a batch from the node of their mean, and the norm of its gradient with respect to the logits.
//!
//! The loss of a sample is the mean over those of its targets that count. Its gradient norm is that of this mean: with the
//! probabilities p, the targets t and n targets, sqrt(sum |p - t|^2) / n. Both share the softmax of the loss and of its backward pass.

use super::classes::{Classes, widened};
use super::{BCE_LOSS, BCE_WITH_LOGITS, CROSS_ENTROPY, CROSS_ENTROPY_BACKWARD, HUBER_LOSS, L1_LOSS, MSE_LOSS};
use super::{NLL_LOSS, NONE, SMOOTH_L1_LOSS};
use crate::error::Result;
use crate::graph::{Graph, NodeId};
use crate::ops::Op;
use smallvec::{SmallVec, smallvec};

/// The results for the samples of a batch.
#[derive(Clone, Copy, Debug)]
pub struct SampleLosses {
    /// (samples) f32 or f64; NaN for a sample without a target that counts.
    pub losses: NodeId,
    /// (samples), of cross-entropy only.
    pub gradient_norms: Option<NodeId>,
}

/// Losses whose attribute 0 is the reduction.
static OF_ELEMENTS: [&Op; 6] = [&MSE_LOSS, &L1_LOSS, &SMOOTH_L1_LOSS, &HUBER_LOSS, &BCE_WITH_LOGITS, &BCE_LOSS];

/// Divides the elements of a loss among the samples of a batch, which are the first dim of what it was computed from, or the first
/// factor of that dim. Records no gradients. Returns `None` if `loss` is no loss of this library or its elements do not
/// divide evenly.
///
/// # Errors
/// Those of recording.
pub fn of_samples(g: &mut Graph, loss: NodeId, samples: usize) -> Result<Option<SampleLosses>> {
    let node = g.node(loss).clone();
    let of_classes = node.op == &CROSS_ENTROPY || node.op == &NLL_LOSS;
    if !of_classes && !OF_ELEMENTS.contains(&node.op) {
        return Ok(None);
    }
    let elements = match of_classes {
        true => g.shape(node.inputs[0]).remove(g.shape(node.inputs[0]).rank() - 1).numel(),
        false => g.shape(node.inputs[0]).numel(),
    };
    if samples == 0 || elements == 0 || elements % samples != 0 {
        return Ok(None);
    }
    let parts = [samples, elements / samples];
    g.without_autocast(|g| {
        g.with_no_grad(true, |g| {
            let mut inputs: SmallVec<[NodeId; 4]> = node.inputs.iter().copied().collect();
            inputs[0] = g.widen(inputs[0])?;
            let mut attrs = node.attrs.clone();
            attrs[usize::from(of_classes)] = NONE;
            let rows = g.push(node.op, &inputs, &attrs)?;
            let sum = by_sample(g, rows, &parts)?;
            if !of_classes {
                let losses = g.mul_c(sum, 1.0 / parts[1] as f64)?;
                return Ok(Some(SampleLosses { losses, gradient_norms: None }));
            }
            let c = Classes::of(g.shape(inputs[0]), &attrs);
            if c.probabilities {
                let losses = g.mul_c(sum, 1.0 / parts[1] as f64)?;
                return Ok(Some(SampleLosses { losses, gradient_norms: None }));
            }
            let weight = widened(g, inputs.get(2))?;
            let counts = c.shares(g, inputs[1], weight, g.dtype(rows))?;
            let total = by_sample(g, counts, &parts)?;
            let losses = g.div(sum, total)?;
            if node.op != &CROSS_ENTROPY {
                return Ok(Some(SampleLosses { losses, gradient_norms: None }));
            }
            let one = g.constant_like(1.0, rows);
            let ones = g.expand(one, g.shape(rows))?;
            let mut all: SmallVec<[NodeId; 4]> = smallvec![inputs[0], inputs[1], ones];
            all.extend(inputs.get(2).copied());
            let gradient = g.push(&CROSS_ENTROPY_BACKWARD, &all, &attrs)?;
            let square = g.square(gradient)?;
            let square = g.sum(square, &[c.last], false)?;
            let square = by_sample(g, square, &parts)?;
            let norm = g.sqrt(square)?;
            let norm = g.div(norm, total)?;
            Ok(Some(SampleLosses { losses, gradient_norms: Some(norm) }))
        })
    })
}

/// The sums over the parts of each sample.
fn by_sample(g: &mut Graph, rows: NodeId, parts: &[usize; 2]) -> Result<NodeId> {
    let rows = g.reshape(rows, parts)?;
    g.sum(rows, &[1], false)
}
