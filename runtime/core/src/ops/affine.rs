//! Defines the affine resampling of images: one bilinear interpolation at positions that a matrix maps.

use super::spatial::{Attrs, per_dim};
use super::{Args, Class, Grad, Op, Out, Tolerance, bits, one};
use crate::error::{Error, Result};
use crate::graph::{Graph, Infer, Meta};
use crate::{DType, Shape};

pub static OPS: &[&Op] = &[&AFFINE_SAMPLE];

/// The dtypes whose elements the op reads without a cast.
const READ: [DType; 3] = [DType::U8, DType::F32, DType::F64];

fn infer(i: &Infer) -> Result<Meta> {
    let (x, m) = (i.shape(0), i.shape(1));
    if x.rank() != 4 || x.dims()[2..].contains(&0) {
        return Err(Error::shape(i.op, format!("needs x (N, C, H, W) with pixels, not shape {x}")));
    }
    if m.dims() != [x.dims()[0], 2, 3] {
        let message = format!("matrix has shape {m}; for x {x} it must be ({}, 2, 3)", x.dims()[0]);
        return Err(Error::shape(i.op, message).hint("one matrix for each image; matrix:expand(n, 2, 3) repeats one"));
    }
    Ok(Meta { shape: Shape::new(&[x.dims()[0], x.dims()[1], i.attr(0), i.attr(1)])?, dtype: i.dtype(1) })
}

fn call(g: &mut Graph, a: &Args) -> Result<Out> {
    let (x, m, op) = (a.tensor(0)?, a.tensor(1)?, a.op.name);
    let shape = g.shape(x);
    if shape.rank() != 4 {
        return Err(Error::shape(op, format!("needs x (N, C, H, W), not shape {shape}")));
    }
    let mut attrs: Attrs = match a.is_none(2) {
        true => shape.dims()[2..].iter().map(|&d| d as i64).collect(),
        false => per_dim(a, 2, "size", 2, 1)?.iter().copied().collect(),
    };
    let fill = a.float(4)?;
    if !fill.is_finite() {
        return Err(Error::argument(op, format!("fill is {fill}; it must be finite")));
    }
    attrs.extend([i64::from(a.str(3) == "edge"), bits(fill)]);
    let dtype = g.dtype(x);
    let result = dtype.to_float();
    // Bytes are read as they are: a batch of images is moved as bytes.
    let x = if READ.contains(&dtype) { x } else { g.cast(x, DType::F32)? };
    let m = g.cast(m, if dtype == DType::F64 { DType::F64 } else { DType::F32 })?;
    let y = g.push(&AFFINE_SAMPLE, &[x, m], &attrs)?;
    g.cast(y, result).map(one)
}

/// `attrs`: [rows, columns, 1 for the nearest pixel at the border, bits of `fill`].
pub static AFFINE_SAMPLE: Op = Op {
    name: "affine_sample",
    sig: "x: tensor, matrix: tensor, *, size: ints?, border: 'constant'|'edge' = 'constant', fill: float = 0.0",
    doc: "x (N, C, H, W), matrix (N, 2, 3) -> (N, C, OH, OW), floats: bilinear interpolation of each image where its matrix maps the\n\
          pixels of the result. (column, row, 1) of the centre of a result's pixel is multiplied by the matrix and gives the\n\
          position in x, in pixels; the centre of the first pixel is (0.5, 0.5). `size` is the result's, one int or {h, w}, by\n\
          default that of x. Outside of x there is `fill`, or with border \"edge\" the nearest pixel. u8 is read as bytes and gives f32\n\
          from 0 to 255. Without a gradient. The `pl.augment` functions compose matrices.",
    shard: Some(crate::sharding::affine_sample),
    class: Class::Library,
    infer,
    call: Some(call),
    grad: Grad::Missing("it samples images that are data; detach x and matrix"),
    // The reference adds the four products in another order.
    tolerance: Some(Tolerance { half: 2.0, wide: 32.0, half_scaled: 1.0 }),
    samples: &[
        "f(2,3,4,5), f(2,2,3)",
        "f(2,3,4,5), f(2,2,3), size=[3,6]",
        "f(2,1,4,5), f(2,2,3), border='edge'",
        "f(1,2,3,3), f(1,2,3), size=4, fill=2.0",
        "f(0,3,2,2), f(0,2,3)",
    ],
    ..Op::BASE
};

/// The layout of `attrs`, for backends.
#[derive(Clone, Copy, Debug)]
pub struct Border {
    /// Whether the nearest pixel continues outside of the image.
    pub edge: bool,
    /// The value outside of the image otherwise.
    pub fill: f64,
}

impl Border {
    pub fn of(attrs: &[i64]) -> Border {
        let attr = |k: usize| attrs.get(k).copied().unwrap_or(0);
        Border { edge: attr(2) != 0, fill: super::real(attr(3)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Number;
    use crate::ops::{Value, create};
    use smallvec::smallvec;

    #[test]
    fn shapes_and_numbers_are_checked() {
        let mut g = Graph::new();
        let mut leaf = |dims: &[usize], dtype| Value::Tensor(g.leaf(&create::LEAF, Shape::of(dims), dtype, &[], 0));
        let x = leaf(&[2, 3, 4, 4], DType::U8);
        let (m, few, flat) = (leaf(&[2, 2, 3], DType::F32), leaf(&[1, 2, 3], DType::F32), leaf(&[2, 3, 4], DType::U8));
        let mut call = |[x, m]: [Value; 2]| {
            let (border, fill) = (Value::Str("constant".into()), Value::Number(Number::Float(0.0)));
            let values = [x, m, Value::None, border, fill];
            let args = Args::new(&AFFINE_SAMPLE, values);
            super::super::call(&mut g, &AFFINE_SAMPLE, &args).map(|y| (g.shape(y[0]), g.dtype(y[0])))
        };
        assert_eq!(call([x.clone(), m.clone()]).unwrap(), (Shape::of(&[2, 3, 4, 4]), DType::F32));
        let e = call([x, few]).unwrap_err().to_string();
        assert!(e.contains("must be (2, 2, 3)"), "{e}");
        let e = call([flat, m]).unwrap_err().to_string();
        assert!(e.contains("needs x (N, C, H, W)"), "{e}");
    }

    #[test]
    fn a_border_is_read_from_attributes() {
        let attrs: smallvec::SmallVec<[i64; 4]> = smallvec![1, 1, 1, bits(2.5)];
        let b = Border::of(&attrs);
        assert!(b.edge && b.fill == 2.5);
    }
}
