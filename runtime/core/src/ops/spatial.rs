//! Decodes the options that convolution, pooling and resampling share, and reads windows of images as views.
//!
//! x is (N, C, spatial dims...), as in PyTorch; a tensor without the batch dim works too. One function handles every number of
//! spatial dims; `attrs` hold one entry per dim and option.

use super::{Args, Grad, Op, Out, movement, one, slicing};
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use smallvec::{SmallVec, smallvec};

pub(super) type Vec8 = SmallVec<[usize; 8]>;
pub(super) type Attrs = SmallVec<[i64; 12]>;
/// One number for each spatial dim.
pub(super) type Dims2 = SmallVec<[i64; 2]>;

pub(super) const FUSED: Op = Op { grad: Grad::Expand, smooth: true, ..Op::BASE };

/// The largest number of a kernel, stride, padding or dilation: libraries of a device hold them in 32 bits.
pub(super) const MAX_OPTION: i64 = i32::MAX as i64;

/// Argument `i`, one int for all spatial dims or one for each, from `min` to `MAX_OPTION`.
pub(super) fn per_dim(a: &Args, i: usize, what: &str, n: usize, min: i64) -> Result<Dims2> {
    let given = a.ints(i)?;
    let all: Dims2 = match given.len() {
        1 => smallvec![given[0]; n],
        k if k == n => given.into(),
        k => {
            let rule = if n == 1 { "1".to_string() } else { format!("1 or {n}") };
            return Err(Error::argument(a.op.name, format!("{what} has {k} numbers; there must be {rule}")));
        }
    };
    if let Some(bad) = all.iter().find(|v| **v < min) {
        return Err(Error::argument(a.op.name, format!("{what} is {bad}; it must be {min} or more")));
    }
    if let Some(bad) = all.iter().find(|v| **v > MAX_OPTION) {
        return Err(Error::argument(a.op.name, format!("{what} is {bad}; it must be {MAX_OPTION} or less")));
    }
    Ok(all)
}

/// Adds a batch dim to x if it has none; returns whether it did.
pub(super) fn batched(g: &mut Graph, a: &Args, n: usize) -> Result<(NodeId, bool)> {
    let x = a.tensor(0)?;
    let shape = g.shape(x);
    match shape.rank() {
        r if r == n + 2 => Ok((x, false)),
        r if r == n + 1 => Ok((g.unsqueeze(x, 0)?, true)),
        _ => {
            let want = if n == 1 { "(N, C, L)" } else { "(N, C, H, W)" };
            Err(Error::shape(a.op.name, format!("needs x {want}, or one without N, not shape {shape}")))
        }
    }
}

pub(super) fn unbatched(g: &mut Graph, y: NodeId, added: bool) -> Result<Out> {
    if !added {
        return Ok(one(y));
    }
    let shape = g.shape(y).remove(0);
    movement::reshape(g, y, shape).map(one)
}

/// Kernel, stride, padding (before and after) and dilation of each spatial dim.
pub(super) struct Sliding {
    pub(super) kernel: Vec8,
    pub(super) stride: Vec8,
    pub(super) before: Vec8,
    pub(super) after: Vec8,
    pub(super) dilation: Vec8,
}

impl Sliding {
    /// Decodes `attrs` [kernel.., stride.., before.., after.., dilation..] with `n` dims each.
    pub(super) fn of(attrs: &[i64], n: usize) -> Sliding {
        let take = |k: usize| attrs[k * n..(k + 1) * n].iter().map(|&v| v as usize).collect();
        Sliding { kernel: take(0), stride: take(1), before: take(2), after: take(3), dilation: take(4) }
    }

    pub(super) fn n(&self) -> usize {
        self.kernel.len()
    }

    /// Number of positions of dim `d` of size `size`.
    pub(super) fn positions(&self, d: usize, size: usize) -> usize {
        slicing::windows(size + self.before[d] + self.after[d], self.kernel[d], self.stride[d], self.dilation[d])
    }

    /// The spatial dims of the result, or an error if the kernel does not fit.
    pub(super) fn out(&self, op: &str, spatial: &[usize]) -> Result<Vec8> {
        let dims: Vec8 = spatial.iter().enumerate().map(|(d, &size)| self.positions(d, size)).collect();
        if let Some(d) = dims.iter().position(|&k| k == 0) {
            let message = format!(
                "a kernel of {} (dilation {}) does not fit dim {} of size {} (padding {})",
                self.kernel[d],
                self.dilation[d],
                d + 2,
                spatial[d],
                self.before[d]
            );
            return Err(Error::shape(op, message));
        }
        Ok(dims)
    }

    /// (N, C, spatial...) -> (N, C, positions..., kernel...), padded with `fill`.
    pub(super) fn windows(&self, g: &mut Graph, x: NodeId, fill: f64) -> Result<NodeId> {
        let mut x = x;
        for (d, (&lo, &hi)) in self.before.iter().zip(&self.after).enumerate() {
            let size = g.shape(x).dims()[d + 2];
            x = slicing::strided_pad(g, x, d + 2, lo, 1, size + lo + hi, fill)?;
        }
        for d in 0..self.n() {
            x = slicing::window(g, x, d + 2, self.kernel[d], self.stride[d], self.dilation[d])?;
        }
        Ok(x)
    }

    /// The axes of the kernel in the result of `windows`.
    pub(super) fn kernel_axes(&self) -> Vec8 {
        (2 + self.n()..2 + 2 * self.n()).collect()
    }
}

pub(super) fn product(dims: &[usize]) -> usize {
    dims.iter().product()
}

/// An error unless positions of `n` elements resampled to `out` can be computed in i64.
pub(super) fn check_ratio(op: &str, out: usize, n: usize) -> Result<()> {
    if out as i128 * n as i128 <= i128::from(i64::MAX) {
        return Ok(());
    }
    Err(Error::argument(
        op,
        format!("a dim of size {n} cannot become one of {out}: positions would not fit in 64 bits"),
    ))
}
