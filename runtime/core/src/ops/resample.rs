//! Defines the resampling of images: nearest and linear interpolation.

use super::spatial::{Attrs, FUSED, MAX_OPTION, Vec8, check_ratio, per_dim};
use super::{Class, Op, bits, index, movement, one, real};
use crate::error::{Error, Result};
use crate::graph::{Graph, Meta, NodeId};
use crate::shape::Dims;
use crate::{DType, Shape};
use smallvec::{SmallVec, smallvec};

pub static OPS: &[&Op] = &[&INTERPOLATE];

/// Nearest: out element i reads element floor(i n / out), or floor(i / scale) if a scale is given.
fn nearest(g: &mut Graph, x: NodeId, at: usize, out: usize, step: f64) -> Result<NodeId> {
    let shape = g.shape(x);
    let n = shape.dims()[at];
    check_ratio("interpolate", out, n)?;
    if step == 0.0 && out.is_multiple_of(n) {
        // Whole multiples are a view.
        let y = g.unsqueeze(x, at + 1)?;
        let y = g.expand(y, shape.insert(at + 1, out / n)?)?;
        return movement::reshape(g, y, shape.with(at, out));
    }
    let i = super::create::iota(g, out)?;
    let i = if step == 0.0 {
        let (size, parts) = (g.constant_like(n as f64, i), g.constant_like(out as f64, i));
        let i = g.mul(i, size)?;
        g.map(&super::elementwise::FLOOR_DIV, &[i, parts])?
    } else {
        let i = g.cast(i, DType::F64)?;
        let i = g.mul_c(i, step)?;
        g.cast(i, DType::I64)?
    };
    let i = g.minimum_c(i, n as f64 - 1.0)?;
    index::index_select(g, x, at, i)
}

/// Linear: out element i is at (i + 1/2) step - 1/2, or at i step with aligned corners; clamped at the ends.
fn linear(g: &mut Graph, x: NodeId, at: usize, out: usize, step: f64, align: bool) -> Result<NodeId> {
    let (n, rank, dtype) = (g.shape(x).dims()[at], g.shape(x).rank(), g.dtype(x));
    let i = super::create::iota(g, out)?;
    let mut p = g.cast(i, dtype)?;
    if align {
        p = g.mul_c(p, step)?;
    } else {
        p = g.add_c(p, 0.5)?;
        p = g.mul_c(p, step)?;
        p = g.add_c(p, -0.5)?;
        p = g.maximum_c(p, 0.0)?;
    }
    let lo = g.cast(p, DType::I64)?;
    let lo = g.minimum_c(lo, n as f64 - 1.0)?;
    let hi = g.add_c(lo, 1.0)?;
    let hi = g.minimum_c(hi, n as f64 - 1.0)?;
    let base = g.cast(lo, dtype)?;
    let part = g.sub(p, base)?;
    let mut dims: Vec8 = smallvec![1; rank];
    dims[at] = out;
    let part = g.reshape(part, &dims)?;
    let rest = g.rsub_c(1.0, part)?;
    let (a, b) = (index::index_select(g, x, at, lo)?, index::index_select(g, x, at, hi)?);
    let (a, b) = (g.mul(a, rest)?, g.mul(b, part)?);
    g.add_(a, b)
}

/// `attrs`: [1 for linear, 1 for align_corners, out.., step bits..]; a step of 0 in nearest mode means size / out exactly.
pub static INTERPOLATE: Op = Op {
    name: "interpolate",
    sig: "x: tensor, *, size: ints?, scale: float?, mode: 'nearest'|'linear'|'bilinear' = 'nearest', align_corners: bool = false",
    doc: "x (N, C, L) or (N, C, H, W) -> (N, C, out...): resampled to `size`, one int or one for each dim, or by the factor\n\
          `scale` (sizes rounded down). Coordinates as in PyTorch: element centres coincide at the ends of the image, or the\n\
          centres of the corner elements if align_corners. \"linear\" is for one dim, \"bilinear\" for two; f32 for 16-bit\n\
          floats. Nearest computes its indices exactly.",
    class: Class::Fused(|g, x, attrs| {
        let n = g.shape(x[0]).rank() - 2;
        let (out, steps) = (&attrs[2..2 + n], &attrs[2 + n..]);
        if attrs[0] == 0 {
            let mut y = x[0];
            for d in 0..n {
                y = nearest(g, y, d + 2, out[d] as usize, real(steps[d]))?;
            }
            return Ok(one(y));
        }
        g.island(x[0], |g, mut y| {
            for d in 0..n {
                y = linear(g, y, d + 2, out[d] as usize, real(steps[d]), attrs[1] != 0)?;
            }
            Ok(y)
        })
        .map(one)
    }),
    infer: |i| {
        i.float(0)?;
        let mut shape = i.shape(0);
        for d in 2..shape.rank() {
            shape = shape.with(d, i.attr(d));
        }
        Ok(Meta { shape: Shape::new(shape.dims())?, dtype: i.dtype(0) })
    },
    call: Some(|g, a| {
        let op = a.op.name;
        let x = g.to_float(a.tensor(0)?)?;
        let shape = g.shape(x);
        if !(3..=4).contains(&shape.rank()) || shape.dims()[2..].contains(&0) {
            return Err(Error::shape(
                op,
                format!("needs x (N, C, L) or (N, C, H, W) with elements, not shape {shape}"),
            ));
        }
        let n = shape.rank() - 2;
        let (mode, align) = (a.str(3), a.bool(4));
        let fitting = if n == 1 { "linear" } else { "bilinear" };
        if mode != "nearest" && mode != fitting {
            return Err(Error::argument(op, format!("mode \"{mode}\" does not fit x {shape}"))
                .hint(format!("use \"{fitting}\"")));
        }
        if mode == "nearest" && align {
            return Err(Error::argument(op, "align_corners has no meaning with mode \"nearest\""));
        }
        let (sizes, scale): (SmallVec<[i64; 2]>, Option<f64>) = match (a.is_none(1), a.opt_float(2)) {
            (false, None) => (per_dim(a, 1, "size", n, 1)?, None),
            (true, Some(s)) if s > 0.0 && s.is_finite() => {
                (shape.dims()[2..].iter().map(|&d| (d as f64 * s).floor() as i64).collect(), Some(s))
            }
            (true, Some(s)) => return Err(Error::argument(op, format!("scale is {s}; it must be above 0"))),
            (false, Some(s)) => {
                let message = format!(
                    "size {} and scale {s} are both given; one of them says the result's size",
                    Dims(a.ints(1)?)
                );
                return Err(Error::argument(op, message));
            }
            _ => return Err(Error::argument(op, "neither size nor scale is given").hint("x:interpolate { scale = 2 }")),
        };
        let mut attrs: Attrs = smallvec![i64::from(mode != "nearest"), i64::from(align)];
        attrs.extend_from_slice(&sizes);
        for (d, &out) in sizes.iter().enumerate() {
            let size = shape.dims()[d + 2] as f64;
            if out > MAX_OPTION {
                let message = format!(
                    "scale {} makes dim {} of size {size} larger than {MAX_OPTION}",
                    scale.unwrap_or(0.0),
                    d + 2
                );
                return Err(Error::argument(op, message));
            }
            if out < 1 {
                return Err(Error::argument(
                    op,
                    format!("scale {} reduces dim {} of size {size} to 0", scale.unwrap_or(0.0), d + 2),
                ));
            }
            attrs.push(bits(match (mode, align, scale) {
                // A factor that yields an exact size is equivalent to that size.
                ("nearest", _, Some(s)) if size * s != out as f64 => 1.0 / s,
                ("nearest", ..) => 0.0,
                (_, true, _) => {
                    if out > 1 {
                        (size - 1.0) / (out as f64 - 1.0)
                    } else {
                        0.0
                    }
                }
                (_, _, Some(s)) => 1.0 / s,
                _ => size / out as f64,
            }));
        }
        g.push(&INTERPOLATE, &[x], &attrs).map(one)
    }),
    samples: &[
        "f(2,3,4,5), size=[8,10]",
        "f(2,3,4,5), size=[7,3]",
        "f(2,3,4,5), scale=2",
        "f(2,3,5), scale=1.5",
        "f(2,3,4,5), size=[7,9], mode='bilinear'",
        "f(2,3,4,5), size=[7,3], mode='bilinear', align_corners=true",
        "f(2,3,5), size=8, mode='linear'",
        "f(1,1,4,4), scale=0.5, mode='bilinear'",
        "f(1,1,4,4), scale=1.7, mode='bilinear'",
        "f(1,2,3,3), size=1, mode='bilinear', align_corners=true",
    ],
    ..FUSED
};
