//! Defines batch norm (Ioffe and Szegedy, 2015, arXiv:1502.03167), with given statistics and with those of the batch.

use super::group::{all_but_channel, channels, per_channel};
use super::trailing::check_weight;
use super::{Axes, FUSED};
use crate::amp::Amp;
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::ops::{self, Class, Grad, Op, bits, one, out_of, real};
use crate::{DType, Shape};
use smallvec::{SmallVec, smallvec};
/// Inputs: x, mean, var, weight?, bias?; `attrs`: [1 if weight, 1 if bias, eps bits].
pub static BATCH_NORM: Op = Op {
    name: "batch_norm",
    sig: "x: tensor, mean: tensor, var: tensor, weight: tensor?, bias: tensor?, *, eps: float = 1e-5",
    doc: "x (N, C, ...), mean (C), var (C), weight (C), bias (C) -> (N, C, ...): (x - mean) / sqrt(var + eps) * weight + bias\n\
          per channel, with the given statistics: running ones, or those of the batch, through which gradients flow.\n\
          Arithmetic is in f32 for 16-bit floats. Ioffe and Szegedy, arXiv:1502.03167.",
    class: Class::Fused(|g, x, attrs| {
        let rank = g.shape(x[0]).rank();
        g.island(x[0], |g, w| {
            let (mean, var) = (per_channel(g, x[1], rank)?, per_channel(g, x[2], rank)?);
            let r = g.add_c(var, real(attrs[2]))?;
            let r = g.rsqrt(r)?;
            let y = g.sub(w, mean)?;
            let mut y = g.mul(y, r)?;
            if attrs[0] != 0 {
                let weight = per_channel(g, x[3], rank)?;
                y = g.mul(y, weight)?;
            }
            if attrs[1] != 0 {
                let bias = per_channel(g, x[3 + attrs[0] as usize], rank)?;
                y = g.add_(y, bias)?;
            }
            Ok(y)
        })
        .map(one)
    }),
    call: Some(|g, a| {
        let x = g.to_float(a.tensor(0)?)?;
        let c = channels(g, "batch_norm", x)?;
        let mut inputs: SmallVec<[NodeId; 4]> = smallvec![x];
        for (i, what) in [(1, "mean"), (2, "var"), (3, "weight"), (4, "bias")] {
            check_weight(g, "batch_norm", what, a.opt_tensor(i), &[c])?;
            inputs.extend(if i < 3 { Some(a.tensor(i)?) } else { a.opt_tensor(i) });
        }
        let given = |i: usize| i64::from(!a.is_none(i));
        g.push(&BATCH_NORM, &inputs, &[given(3), given(4), bits(a.float(5)?)]).map(one)
    }),
    samples: &[
        "f(2,3,4), f(3), p(3), f(3), f(3)",
        "f(4,3), f(3), p(3)",
        "f(2,3,2,2), f(3), p(3), f(3)",
        "f(2,3,4), f(3), p(3), nil, f(3)",
        "f(0,3,4), f(3), p(3), f(3), f(3)",
    ],
    amp: Amp::Keep,
    ..FUSED
};

/// What `batch_norm_train` and its backward have in common.
struct Batch {
    weight: bool,
    bias: bool,
    eps: f64,
    rank: usize,
    /// Elements per channel.
    count: f64,
    others: Axes,
}

impl Batch {
    /// `attrs`: [1 if weight, 1 if bias, eps bits].
    fn of(x: Shape, attrs: &[i64]) -> Batch {
        let (rank, c) = (x.rank(), x.dims()[1]);
        let count = x.numel() as f64 / c.max(1) as f64;
        Batch {
            weight: attrs[0] != 0,
            bias: attrs[1] != 0,
            eps: real(attrs[2]),
            rank,
            count,
            others: all_but_channel(rank),
        }
    }

    fn sum(&self, g: &mut Graph, x: NodeId) -> Result<NodeId> {
        g.sum(x, &self.others, false)
    }

    fn mean(&self, g: &mut Graph, x: NodeId) -> Result<NodeId> {
        let s = self.sum(g, x)?;
        g.mul_c(s, 1.0 / self.count)
    }

    /// Broadcasts (C) against x.
    fn spread(&self, g: &mut Graph, w: NodeId) -> Result<NodeId> {
        per_channel(g, w, self.rank)
    }

    /// Computes the mean and biased variance of each channel of `x`, which is `w` in its compute type, in one pass:
    /// sums of the differences from one element of the channel and of their squares, which do not cancel unless that
    /// element is far from all others.
    fn statistics(&self, g: &mut Graph, x: NodeId, w: NodeId) -> Result<(NodeId, NodeId)> {
        let shape = g.shape(x);
        if shape.numel() == 0 {
            let mean = self.mean(g, w)?;
            return Ok((mean, mean));
        }
        // From the last axis to the samples: devices that have some of these send each other what is left, not all of x.
        let mut near = x;
        for &axis in self.others.iter().rev() {
            let middle = shape.dims()[axis] / 2;
            near = g.slice(near, axis, middle, middle + 1, 1)?;
        }
        // Expand before widening: both then fuse into the readers.
        let k = g.expand(near, shape)?;
        let k = g.widen(k)?;
        let d = g.sub(w, k)?;
        let square = g.square(d)?;
        let (d, square) = (self.mean(g, d)?, self.mean(g, square)?);
        let near = g.reshape(near, &shape.dims()[1..2])?;
        let near = g.widen(near)?;
        let mean = g.add_(near, d)?;
        let d = g.square(d)?;
        let var = g.sub(square, d)?;
        Ok((mean, g.maximum_c(var, 0.0)?))
    }

    fn inverse_root(&self, g: &mut Graph, var: NodeId) -> Result<NodeId> {
        let v = g.add_c(var, self.eps)?;
        g.rsqrt(v)
    }
}

/// Adds the gradient of the batch statistics, which are outputs too: mean and variance.
fn through_statistics(
    g: &mut Graph,
    c: &ops::GradCtx,
    b: &Batch,
    mean: NodeId,
    dmean: Option<NodeId>,
    dvar: Option<NodeId>,
) -> Result<Option<NodeId>> {
    let mut out = None;
    if let Some(d) = dmean {
        let d = g.mul_c(d, 1.0 / b.count)?;
        let d = b.spread(g, d)?;
        out = Some(g.expand(d, g.shape(c.x(0)))?);
    }
    if let Some(d) = dvar {
        let d = g.mul_c(d, 2.0 / b.count)?;
        let (d, m) = (b.spread(g, d)?, b.spread(g, mean)?);
        let x = g.widen(c.x(0))?;
        let x = g.sub(x, m)?;
        let d = g.mul(x, d)?;
        out = Some(match out {
            Some(other) => g.add_(other, d)?,
            None => d,
        });
    }
    Ok(out)
}

/// Inputs: x, weight?, bias? -> y, mean, var; `attrs` as [`Batch`] and the dtype of the bias.
pub static BATCH_NORM_TRAIN: Op = Op {
    name: "batch_norm_train",
    sig: "x: tensor, weight: tensor?, bias: tensor?, *, eps: float = 1e-5",
    doc: "x (N, C, ...), weight (C), bias (C) -> y (N, C, ...), mean (C), var (C): batch_norm with the mean and the biased variance\n\
          of the batch itself, which are also returned, in f32 for 16-bit floats. Gradients flow through all three.\n\
          Arithmetic is in f32 for 16-bit floats. Ioffe and Szegedy, arXiv:1502.03167.",
    results: crate::ops::Results::Named(&["y", "mean", "var"]),
    class: Class::Fused(|g, x, attrs| {
        let b = Batch::of(g.shape(x[0]), attrs);
        let dtype = g.dtype(x[0]);
        let w = g.widen(x[0])?;
        let (mean, var) = b.statistics(g, x[0], w)?;
        let r = b.inverse_root(g, var)?;
        let (m, r) = (b.spread(g, mean)?, b.spread(g, r)?);
        let y = g.sub(w, m)?;
        let mut y = g.mul(y, r)?;
        if b.weight {
            let weight = b.spread(g, x[1])?;
            y = g.mul(y, weight)?;
        }
        if b.bias {
            let bias = b.spread(g, x[1 + usize::from(b.weight)])?;
            y = g.add_(y, bias)?;
        }
        Ok(smallvec![g.cast(y, dtype)?, mean, var])
    }),
    call: Some(|g, a| {
        let x = g.to_float(a.tensor(0)?)?;
        let c = channels(g, "batch_norm_train", x)?;
        let mut inputs: SmallVec<[NodeId; 4]> = smallvec![x];
        for (i, what) in [(1, "weight"), (2, "bias")] {
            check_weight(g, "batch_norm_train", what, a.opt_tensor(i), &[c])?;
            inputs.extend(a.opt_tensor(i));
        }
        let given = |i: usize| i64::from(!a.is_none(i));
        let y = g.push(&BATCH_NORM_TRAIN, &inputs, &[given(1), given(2), bits(a.float(3)?)])?;
        let wide = g.dtype(x).compute();
        Ok(out_of(g, y, &[(Shape::of(&[c]), wide), (Shape::of(&[c]), wide)]))
    }),
    grad: Grad::Rule(|g, c| {
        let shape = g.shape(c.x(0));
        let b = Batch::of(shape, c.attrs);
        let channel = Shape::of(&shape.dims()[1..2]);
        let wide = g.dtype(c.x(0)).compute();
        // Records the node again: the planner merges the two, or recomputes it if the first has been freed.
        let again = g.push(&BATCH_NORM_TRAIN, c.inputs, c.attrs)?;
        let parts = out_of(g, again, &[(channel, wide), (channel, wide)]);
        let mut inputs: SmallVec<[NodeId; 5]> = smallvec![c.x(0), c.grad, parts[1], parts[2]];
        let mut small: SmallVec<[(Shape, DType); 2]> = SmallVec::new();
        if b.weight {
            inputs.push(c.x(1));
            small.push((channel, g.dtype(c.x(1))));
        }
        let mut attrs: SmallVec<[i64; 4]> = c.attrs.into();
        if b.bias {
            let dtype = g.dtype(c.x(1 + usize::from(b.weight)));
            small.push((channel, dtype));
            attrs.push(dtype as i64);
        }
        let main = g.push(&BATCH_NORM_BACKWARD, &inputs, &attrs)?;
        let mut out: ops::Grads = out_of(g, main, &small).into_iter().map(Some).collect();
        let of = |k: usize| c.grads.get(k).copied().flatten();
        if let Some(more) = through_statistics(g, c, &b, parts[1], of(1), of(2))? {
            let dtype = g.dtype(c.x(0));
            let more = g.cast(more, dtype)?;
            out[0] = Some(g.add_(main, more)?);
        }
        Ok(out)
    }),
    samples: &[
        "f(2,3,4), f(3), f(3)",
        "f(4,3)",
        "f(2,3,2,2), f(3)",
        "f(3,2,4,5), f(2), f(2), eps=0.1",
        "f(2,3,4), nil, f(3)",
        "f(1,3,5), f(3), f(3)",
    ],
    amp: Amp::Keep,
    ..FUSED
};

/// x, gradient, mean, var, weight? -> dx, dweight?, dbias?; `attrs` as `batch_norm_train`, with the dtype of the bias.
///
/// dx = weight r (g - mean(g) - xhat mean(g xhat)), xhat = (x - mean) r; dweight = sum of g xhat; dbias = sum of g.
pub static BATCH_NORM_BACKWARD: Op = Op {
    name: "batch_norm_backward",
    class: Class::Fused(|g, x, attrs| {
        let b = Batch::of(g.shape(x[0]), attrs);
        let dtype = g.dtype(x[0]);
        let (w, d) = (g.widen(x[0])?, g.widen(x[1])?);
        let r = b.inverse_root(g, x[3])?;
        let m = b.spread(g, x[2])?;
        let centred = g.sub(w, m)?;
        let p = g.mul(d, centred)?;
        let (sum, product) = (b.sum(g, d)?, b.sum(g, p)?);
        // The gradient of the weight has one factor of r, from xhat.
        let dweight = g.mul(product, r)?;
        let mean = g.mul_c(sum, 1.0 / b.count)?;
        let slope = g.mul(dweight, r)?;
        let slope = g.mul_c(slope, 1.0 / b.count)?;
        let scale = match b.weight {
            true => {
                let weight = g.widen(x[4])?;
                g.mul(weight, r)?
            }
            false => r,
        };
        let (mean, slope, scale) = (b.spread(g, mean)?, b.spread(g, slope)?, b.spread(g, scale)?);
        let dx = g.sub(d, mean)?;
        let p = g.mul(centred, slope)?;
        let dx = g.sub(dx, p)?;
        let dx = g.mul(dx, scale)?;
        let mut out = one(g.cast(dx, dtype)?);
        if b.weight {
            let dtype = g.dtype(x[4]);
            out.push(g.cast(dweight, dtype)?);
        }
        if b.bias {
            let Some(dtype) = DType::from_code(attrs[3] as u8) else {
                return Err(Error::dtype("batch_norm_backward", "this is a bug: an unknown dtype"));
            };
            out.push(g.cast(sum, dtype)?);
        }
        Ok(out)
    }),
    ..FUSED
};
