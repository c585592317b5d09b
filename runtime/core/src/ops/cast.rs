//! Defines the cast between dtypes.

use super::{Class, Grad, Op, one};
use crate::error::Result;
use crate::graph::{Graph, Meta, NodeId, Number};
use crate::{DType, Shape};
use smallvec::smallvec;

pub static OPS: &[&Op] = &[&TO, &CAST];

/// `attrs`: [dtype code].
pub static CAST: Op = Op {
    name: "cast",
    class: Class::Cast,
    infer: |i| Ok(Meta { shape: i.shape(0), dtype: DType::from_code(i.attrs[0] as u8).unwrap_or(DType::F32) }),
    grad: Grad::Rule(|g, c| {
        let dtype = g.dtype(c.x(0));
        Ok(smallvec![if dtype.is_float() { Some(cast(g, c.grad, dtype)?) } else { None }])
    }),
    ..Op::BASE
};

pub static TO: Op = Op {
    name: "to",
    sig: "x: tensor, dtype: dtype",
    doc: "x (...) -> (...) with elements of `dtype`.\n\
          Floats round to nearest even. Floats to integers truncate toward zero; beyond the limits of `dtype` they become the\n\
          nearer limit (3e9 as i32 is 2147483647, -1.0 as u8 is 0), and NaN becomes 0. Integers to narrower ones keep the low\n\
          bits (300 as u8 is 44). Anything to bool is \"not zero\", NaN included. All devices give the same bits.",
    call: Some(|g, a| {
        let dtype = a.dtype(1).unwrap_or(DType::F32);
        cast(g, a.tensor(0)?, dtype).map(one)
    }),
    samples: &[
        "f(2,3), 'f64'",
        "f(2,3), 'bf16'",
        "f(0,3), 'f16'",
        "f(4;-3,3), 'i64'",
        "i(5;2,3), 'f32'",
        "i(2;4), 'bool'",
    ],
    ..Op::BASE
};

/// Casts `x` to `dtype`; returns `x` itself if it already has that dtype. Constants are re-created instead of cast.
pub fn cast(g: &mut Graph, x: NodeId, dtype: DType) -> Result<NodeId> {
    let node = g.node(x);
    if node.dtype == dtype {
        return Ok(x);
    }
    if node.op == &super::create::CONSTANT && node.shape == Shape::SCALAR && dtype != DType::Bool {
        let bits = node.attrs[0] as u64;
        if !node.dtype.is_float() {
            let bits = Number::Int(bits as i64).bits(dtype) as i64;
            return Ok(g.leaf(&super::create::CONSTANT, Shape::SCALAR, dtype, &[bits], 0));
        }
        let value = f64::from_bits(bits);
        if !node.dtype.is_half() && (dtype.is_float() || value.fract() == 0.0) {
            return Ok(g.constant(value, dtype));
        }
    }
    g.push(&CAST, &[x], &[dtype as i64])
}
