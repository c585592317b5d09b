//! Defines the losses: fused nodes that compute in f32 or wider, all with a `reduction`.
//!
//! Classes are the *last* dim of logits, here as everywhere in Perilune (PyTorch has them second). No loss uses a
//! gather: the logit of the target is selected by comparing an index ramp with the class id, so that a loss and its
//! backward are each one pass over the rows of logits. Inputs must have equal shapes, because silently broadcasting (N)
//! against (N, 1) is a common mistake. Class ids pass through `class_ids`, which rejects ids outside the classes.

mod binary;
mod classes;
mod cross_entropy;
mod pairs;
mod samples;

pub use binary::{BCE_LOSS, BCE_WITH_LOGITS, KL_DIV};
pub use classes::{CLASS_IDS, IGNORES_NONE, OF_CLASSES, cure_of_class, sum_and_total};
pub use cross_entropy::{CROSS_ENTROPY, CROSS_ENTROPY_BACKWARD, NLL_LOSS};
pub use pairs::{HUBER_LOSS, L1_LOSS, MSE_LOSS, SMOOTH_L1_LOSS};
pub use samples::{SampleLosses, of_samples};

use super::{Args, Grad, Op};
use crate::Shape;
use crate::amp::Amp;
use crate::error::Result;
use crate::graph::{Graph, NodeId};

pub static OPS: &[&Op] = &[
    &CLASS_IDS,
    &CROSS_ENTROPY,
    &CROSS_ENTROPY_BACKWARD,
    &NLL_LOSS,
    &MSE_LOSS,
    &L1_LOSS,
    &SMOOTH_L1_LOSS,
    &HUBER_LOSS,
    &BCE_WITH_LOGITS,
    &BCE_LOSS,
    &KL_DIV,
];

const FUSED: Op = Op { grad: Grad::Expand, amp: Amp::Full, smooth: true, ..Op::BASE };

const NONE: i64 = 0;
const MEAN: i64 = 1;
const SUM: i64 = 2;
const BATCHMEAN: i64 = 3;

fn reduction(a: &Args, i: usize) -> i64 {
    match a.str(i) {
        "none" => NONE,
        "sum" => SUM,
        "batchmean" => BATCHMEAN,
        _ => MEAN,
    }
}

/// The factor of the sum of losses over a tensor of shape `shape`.
fn share(how: i64, shape: Shape) -> f64 {
    match how {
        MEAN => 1.0 / shape.numel() as f64,
        BATCHMEAN => 1.0 / shape.dims().first().map_or(1.0, |&n| n as f64),
        _ => 1.0,
    }
}

fn reduce(g: &mut Graph, x: NodeId, how: i64) -> Result<NodeId> {
    if how == NONE {
        return Ok(x);
    }
    let scale = share(how, g.shape(x));
    let s = g.sum_all(x)?;
    if how == SUM { Ok(s) } else { g.mul_c(s, scale) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::error::Error;
    use crate::ops::{Value, call, create};

    fn leaf(g: &mut Graph, dims: &[usize], dtype: DType) -> Value {
        Value::Tensor(g.leaf(&create::LEAF, Shape::of(dims), dtype, &[], 0))
    }

    fn cross_entropy(x: &[usize], t: &[usize], dtype: DType) -> Error {
        let g = &mut Graph::new();
        let (x, t) = (leaf(g, x, DType::F32), leaf(g, t, dtype));
        let int = |n| Value::Number(crate::Number::Int(n));
        let args = Args::new(&CROSS_ENTROPY, [x, t, int(-100), int(0), Value::Str("mean".into())]);
        call(g, &CROSS_ENTROPY, &args).unwrap_err()
    }

    #[test]
    fn wrong_targets_say_what_would_be_right() {
        let e = cross_entropy(&[4, 5], &[4, 1], DType::I64);
        assert_eq!(
            e.to_string(),
            "cross_entropy: target {4, 1} does not fit logits {4, 5}: it must be {4}, one class id for each row of logits\n  \
             hint: drop the last dim of the target with y:squeeze(-1)"
        );
        let e = cross_entropy(&[2, 5, 7], &[2, 7], DType::I64);
        assert_eq!(e.hint.as_deref(), Some("classes are the last dim here: move them with logits:permute"));
        let e = cross_entropy(&[4, 5], &[4], DType::F32);
        assert_eq!(e.message, "class ids must be integers, not f32");
        let e = cross_entropy(&[], &[], DType::I64);
        assert_eq!(e.message, "needs (..., classes), not shape {}");
    }

    #[test]
    fn pairs_are_not_broadcast() {
        let g = &mut Graph::new();
        let (x, t) = (leaf(g, &[3], DType::F32), leaf(g, &[3, 1], DType::F32));
        let e = call(g, &MSE_LOSS, &Args::new(&MSE_LOSS, [x, t, Value::Str("mean".into())])).unwrap_err();
        assert_eq!(
            e.to_string(),
            "mse_loss: x {3} and target {3, 1} must have the same shape; they are not broadcast\n  \
             hint: give the target the shape of x with y:reshape"
        );
    }
}
