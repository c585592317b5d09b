//! Defines group norm (Wu and He, 2018, arXiv:1803.08494), and views by channel that batch norm shares.

use super::trailing::{LAYER_NORM, LAYER_NORM_BACKWARD, check_weight};
use super::{Axes, FUSED};
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::ops::{self, Class, Grad, Op, bits, movement, one};
use smallvec::{SmallVec, smallvec};
/// Views a tensor of shape (C) as (C, 1, ...) for (N, C, ...) of rank `rank`, in f32 for 16-bit floats.
pub(super) fn per_channel(g: &mut Graph, w: NodeId, rank: usize) -> Result<NodeId> {
    let w = g.widen(w)?;
    let mut dims: Axes = smallvec![1; rank - 1];
    dims[0] = g.shape(w).numel();
    g.reshape(w, &dims)
}

/// All axes but 1.
pub(super) fn all_but_channel(rank: usize) -> Axes {
    (0..rank).filter(|&a| a != 1).collect()
}

pub(super) fn channels(g: &Graph, op: &str, x: NodeId) -> Result<usize> {
    let shape = g.shape(x);
    if shape.rank() < 2 {
        return Err(Error::shape(op, format!("needs x (N, C, ...), not shape {shape}")));
    }
    Ok(shape.dims()[1])
}

/// (N, C, ...) as (N, groups, rest).
fn grouped(g: &mut Graph, x: NodeId, groups: usize) -> Result<NodeId> {
    let shape = g.shape(x);
    let rest: usize = shape.dims()[1..].iter().product();
    g.reshape(x, &[shape.dims()[0], groups, rest / groups])
}

/// `layer_norm` attributes for rows without weight or bias.
fn plain(eps: i64) -> [i64; 4] {
    [1, 0, eps, -1]
}

/// Inputs: x, weight?, bias?; `attrs`: [groups, 1 if weight, 1 if bias, eps bits].
pub static GROUP_NORM: Op = Op {
    name: "group_norm",
    sig: "x: tensor, groups: int, weight: tensor?, bias: tensor?, *, eps: float = 1e-5",
    doc: "x (N, C, ...), weight (C), bias (C) -> (N, C, ...): each of `groups` groups of adjacent channels normalised to\n\
          mean 0 and variance 1 per sample, then scaled and shifted per channel. Arithmetic is in f32 for 16-bit floats.\n\
          Wu and He, arXiv:1803.08494.",
    class: Class::Fused(|g, x, attrs| {
        let shape = g.shape(x[0]);
        g.island(x[0], |g, w| {
            let rows = grouped(g, w, attrs[0] as usize)?;
            let y = g.push(&LAYER_NORM, &[rows], &plain(attrs[3]))?;
            let mut y = movement::reshape(g, y, shape)?;
            if attrs[1] != 0 {
                let weight = per_channel(g, x[1], shape.rank())?;
                y = g.mul(y, weight)?;
            }
            if attrs[2] != 0 {
                let bias = per_channel(g, x[1 + attrs[1] as usize], shape.rank())?;
                y = g.add_(y, bias)?;
            }
            Ok(y)
        })
        .map(one)
    }),
    call: Some(|g, a| {
        let x = g.to_float(a.tensor(0)?)?;
        let (c, groups) = (channels(g, "group_norm", x)?, a.int(1)?);
        if groups < 1 || !c.is_multiple_of(groups as usize) {
            return Err(Error::argument(
                "group_norm",
                format!("{c} channels cannot be split into {groups} equal groups"),
            ));
        }
        let (weight, bias) = (a.opt_tensor(2), a.opt_tensor(3));
        check_weight(g, "group_norm", "weight", weight, &[c])?;
        check_weight(g, "group_norm", "bias", bias, &[c])?;
        let inputs: SmallVec<[NodeId; 4]> = [Some(x), weight, bias].into_iter().flatten().collect();
        let given = |t: Option<NodeId>| i64::from(t.is_some());
        g.push(&GROUP_NORM, &inputs, &[groups, given(weight), given(bias), bits(a.float(4)?)]).map(one)
    }),
    grad: Grad::Rule(|g, c| {
        let (x, shape) = (c.x(0), g.shape(c.x(0)));
        let others = all_but_channel(shape.rank());
        let d = g.widen(c.grad)?;
        let rows = grouped(g, x, c.attr(0))?;
        let mut dy = d;
        if c.attrs[1] != 0 {
            let weight = per_channel(g, c.x(1), shape.rank())?;
            dy = g.mul(d, weight)?;
        }
        let dy = grouped(g, dy, c.attr(0))?;
        let dx = g.push(&LAYER_NORM_BACKWARD, &[rows, dy], &plain(c.attrs[3]))?;
        let mut out: ops::Grads = smallvec![Some(movement::reshape(g, dx, shape)?)];
        if c.attrs[1] != 0 {
            let wide = g.widen(rows)?;
            let xhat = g.push(&LAYER_NORM, &[wide], &plain(c.attrs[3]))?;
            let xhat = movement::reshape(g, xhat, shape)?;
            let p = g.mul(d, xhat)?;
            let p = g.sum(p, &others, false)?;
            let dtype = g.dtype(c.x(1));
            out.push(Some(g.cast(p, dtype)?));
        }
        if c.attrs[2] != 0 {
            let p = g.sum(d, &others, false)?;
            let dtype = g.dtype(c.inputs[c.inputs.len() - 1]);
            out.push(Some(g.cast(p, dtype)?));
        }
        Ok(out)
    }),
    samples: &[
        "f(2,4,3), 2, f(4), f(4)",
        "f(2,4,3,2), 4, f(4), f(4)",
        "f(2,4,3), 1",
        "f(3,6), 3, f(6)",
        "f(2,4,3), 2, nil, f(4)",
        "f(0,4,3), 2, f(4), f(4)",
    ],
    ..FUSED
};
